"""One life of a link: intake, workers, before-steps, settler, prover and lease keeper, in one nursery: one for all.

Owns the link, `InFlight`, the backlog, and the channels between them, each unbounded and held small by places. Hears
the drain. Tells the books. When it ends, also by a cancellation, what is open is booked, and the link's goodbye gives
it back. The intake never awaits between the link's hand-over and the backlog.
"""
# DESIGN 3.2

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import trio

from actors.backlog import Backlog
from actors.batch_worker import BatchWorker
from actors.before_steps import BeforeSteps
from actors.books import Books
from actors.drain import Drain
from actors.events import log
from actors.in_flight import InFlight
from actors.lease_keeper import LeaseKeeper
from actors.letterbox import Letterbox
from actors.messages import Said
from actors.owed_copies import OwedCopies
from actors.prover import Prover
from actors.restarts import backoff
from actors.settler import Settler
from actors.subscription import AnySubscription, BatchSubscription
from actors.worker import SingleWorker, Tools, Worker
from links.abc import Link, Received, Settles
from links.errors import CallBroken, LinkBroken
from settlement.ledger import Line
from settlement.plans import Plan

__all__ = ["LinkLife"]

CALLS = 5
"""So many failed calls of `receive` in a row end the life: then the supervisor reckons with the weather."""

SETTLED_IN = 60.0
"""Seconds after which a link works that had nothing to do."""


@attrs.define(eq=False)
class LinkLife:
    """From attach to detach.

    Attributes:
        subscription: What the user declared.
        books: Where every delivery ends.
        letterbox: Where letters go.
        copies: What is owed when this life is over.
        drain: When to take nothing more.
        in_flight: What is in hand; once attached.
    """

    subscription: AnySubscription
    books: Books
    letterbox: Letterbox
    copies: OwedCopies
    drain: Drain
    in_flight: InFlight = attrs.field(init=False)
    _size: int = attrs.field(default=1, init=False)
    _keeper: LeaseKeeper | None = attrs.field(default=None, init=False)
    _link: Link[Any] = attrs.field(init=False)
    _settler: Settler = attrs.field(init=False)
    _nursery: trio.Nursery = attrs.field(init=False)
    _intake: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _workers: list[Worker] = attrs.field(factory=list[Worker], init=False)
    _walks: set[BeforeSteps] = attrs.field(factory=set[BeforeSteps], init=False)

    def __attrs_post_init__(self) -> None:
        source, subscription = self.subscription.source, self.subscription
        self._size = subscription.size if isinstance(subscription, BatchSubscription) else 1
        rest = Line.REFUSED if source.at_most_once else Line.UNSETTLED
        self.in_flight = InFlight(
            source.limit(subscription.concurrency, self._size), self.books, self.copies, rest, source.held
        )
        if source.lease is not None:
            self._keeper = LeaseKeeper(subscription.name, source.lease, source.renewal, self.in_flight)

    @property
    def publishing(self) -> bool:
        """Does a delivery walk steps before its verb? (A drain has cut its waits short: it publishes.)"""
        return bool(self._walks)

    async def run(self, attached: Callable[[], None], worked: Callable[[], None], gate: trio.Event) -> None:
        """Attach, report it, wait for the gate, then work until drained. Raises what ends the life.

        `worked` is called when the link has done one thing, or has stood for a minute with nothing to do.
        """
        name, source = self.subscription.name, self.subscription.source
        async with source.attach(
            name, self._lost, self.drain.exit, self.subscription.policy, limit=self.in_flight.limit, size=self._size
        ) as self._link:
            self.in_flight.proves, self.in_flight.forget = self._link.proves, self._link.forget
            self._link.degraded = partial(self.books.heard, self._link)
            attached()
            await gate.wait()
            try:
                async with trio.open_nursery() as beside:
                    beside.start_soon(self._hear_the_drain)
                    beside.start_soon(self._link.until_broken)
                    beside.start_soon(_settle_in, worked)
                    if self._keeper is not None:
                        beside.start_soon(self._keeper.run, self._link)
                    await self._work(worked)
                    beside.cancel_scope.cancel()
            finally:
                self.in_flight.close()
                self.books.left(self._link)

    async def _work(self, worked: Callable[[], None]) -> None:
        subscription, concurrency = self.subscription, self.subscription.concurrency
        make = BatchWorker if isinstance(subscription, BatchSubscription) else SingleWorker
        backlog = Backlog(spreads=self._link.spreads)
        waking, wakes = trio.open_memory_channel[None](math.inf)
        saying, said = trio.open_memory_channel[Said](math.inf)
        self._settler = Settler(
            self._link,
            self.in_flight,
            self.books,
            self.drain,
            saying,
            alone=concurrency == 1 or subscription.source.settles is Settles.ALONE,
            serial=concurrency == 1,
        )
        tools = Tools(
            subscription,
            self.books,
            self.in_flight,
            self._keeper,
            self._settler,
            self.drain,
            self._walk,
            self._give_back,
        )
        # receive ends are closed when every task is gone, so that no hand-over meets a broken channel
        with wakes, said:
            async with trio.open_nursery() as self._nursery:
                with waking:
                    for _ in range(concurrency):
                        worker = make(tools)
                        self._workers.append(worker)
                        self._nursery.start_soon(worker.run, backlog, waking.clone())
                self._nursery.start_soon(self._settler.run, wakes.clone())
                if self._link.proves:
                    self._nursery.start_soon(Prover(self._link, self.in_flight).run, said.clone())
                await self._take(backlog, worked)

    async def _take(self, backlog: Backlog, worked: Callable[[], None]) -> None:
        """The intake: until the drain. Cancellation: the link has given back what it took; nothing is here."""
        link, in_flight = self._link, self.in_flight
        failures = 0
        try:
            with self._intake:
                while True:
                    room = await in_flight.place()
                    if self.drain.requested.is_set():  # the drain itself has freed this place
                        break
                    try:
                        batch = await link.receive(room)
                    except CallBroken as error:
                        failures += 1
                        if failures >= CALLS:
                            raise LinkBroken(f"{failures} calls in a row failed, at last: {error}") from error
                        log.warning("%s: %s; trying again", self.subscription.name, error)
                        await trio.sleep(backoff(failures, 0.5))
                        continue
                    failures = 0
                    in_flight.take(batch)
                    backlog.put(batch)
                    worked()
            link.stop()
            await self._give_back(backlog.rest())
        finally:
            backlog.close()

    async def _give_back(self, unsettled: Sequence[Received[Any]]) -> None:
        """Nothing is said for these, and they shall go back now: a drain has come before their handler, or their batch
        was cancelled. Cancellation: they go back with the link's goodbye.
        """
        ours = [received for received in unsettled if received in self.in_flight.open]
        self.in_flight.ended(self.in_flight.rest, ours)
        if ours:
            with trio.move_on_after(self.drain.goodbye):
                try:
                    await self._link.give_back(ours)
                except CallBroken as error:
                    name = self.subscription.name
                    log.warning("%s: %d deliveries were not given back: %s", name, len(ours), error)
        self.in_flight.free(unsettled)

    def _walk(self, received: Received[Any], plan: Plan[Any], wake: trio.MemorySendChannel[None]) -> None:
        """Start the before-steps of a delivery, which hold it from now on."""
        self._link.undo(received)
        steps = BeforeSteps(
            received, plan, self.in_flight, self._keeper, self._settler, self.letterbox, self.books, self.drain
        )
        if received in self.in_flight.open:
            self.in_flight.open[received] = steps
        else:  # lost in this moment: the walk finds itself cancelled
            steps.scope.cancel()
        self._nursery.start_soon(self._walked, steps, wake.clone())

    async def _walked(self, steps: BeforeSteps, wake: trio.MemorySendChannel[None]) -> None:
        self._walks.add(steps)
        try:
            await steps.run(wake)
        finally:
            self._walks.remove(steps)

    def _lost(self, received: Received[Any], line: Line) -> None:
        """As `links.abc.Lost`."""
        self.in_flight.lose(line, received)

    async def _hear_the_drain(self) -> None:
        await self.drain.requested.wait()
        self._intake.cancel()
        await self.drain.grace_over.wait()
        for worker in self._workers:
            worker.stop()
        for steps in self._walks:
            steps.last_try()


async def _settle_in(worked: Callable[[], None]) -> None:
    await trio.sleep(SETTLED_IN)
    worked()
