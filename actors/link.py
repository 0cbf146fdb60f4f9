"""One life of a link: intake, workers, before-steps, settler, prover and lease keeper, in one nursery: one for all.

Owns the link, the hand, and the channels between them, each unbounded and held small by places (DESIGN 3.2). Hears
the drain. Tells the books. When it ends, also by a cancellation, what is open is booked, and the link's goodbye gives
it back. The intake never awaits between the link's hand-over and the workers' channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import trio

from actors.batch_worker import BatchWorker
from actors.before_steps import BeforeSteps
from actors.events import log
from actors.hand import Hand
from actors.lease_keeper import LeaseKeeper
from actors.messages import Said
from actors.prover import Prover
from actors.restarts import backoff
from actors.settler import Settler
from actors.subscription import BatchSubscription
from actors.worker import SingleWorker, Worker
from links.abc import Link, Order, Received, Settles
from links.errors import CallBroken, LinkBroken
from settlement.ledger import Line
from settlement.plans import Plan

if TYPE_CHECKING:
    from actors.seat import Seat

__all__ = ["Life"]

CALLS = 5
"""So many failed calls of `receive` in a row end the life: then the supervisor reckons with the weather."""


class Life:
    """From attach to detach."""

    def __init__(self, seat: Seat) -> None:
        source, subscription = seat.source, seat.subscription
        self.seat = seat
        self._drain = seat.drain
        self.link_settles = source.settles
        rest = Line.REFUSED if source.at_most_once else Line.UNSETTLED
        guarded = source.lease is not None or source.settles is Settles.ALONE
        self.keeper = LeaseKeeper(subscription.name, source.lease) if guarded else None
        size = subscription.size if isinstance(subscription, BatchSubscription) else 1
        limit = source.limit(subscription.concurrency, size)
        self.hand = Hand(limit, seat.books, seat.copies, self.keeper, rest)
        if self.keeper is not None:
            self.keeper.hand = self.hand
        self.link: Link[Any]
        self.settler: Settler
        self._nursery: trio.Nursery
        self._intake = trio.CancelScope()
        self._workers: list[Worker] = []
        self._walks: set[BeforeSteps] = set()

    @property
    def draining(self) -> bool:
        """The drain has begun: what was not started is given back."""
        return self._drain.requested.is_set()

    @property
    def grace_over(self) -> bool:
        """The grace is over: handlers are cancelled."""
        return self._drain.grace_over.is_set()

    @property
    def publishing(self) -> bool:
        """Does a delivery walk steps before its verb? (A drain has cut its waits short: it publishes.)"""
        return bool(self._walks)

    async def run(self, attached: Callable[[], None], gate: trio.Event) -> None:
        """Attach, report it, wait for the gate, then work until drained. Raises what ends the life."""
        name = self.seat.subscription.name
        async with self.seat.source.attach(
            name, self._lost, self._drain.exit, self.seat.subscription.policy, limit=self.hand.limit
        ) as self.link:
            attached()
            await gate.wait()
            try:
                async with trio.open_nursery() as beside:
                    beside.start_soon(self._hear_the_drain)
                    beside.start_soon(self.link.until_broken)
                    if self.keeper is not None:
                        beside.start_soon(self.keeper.run, self.link)
                    await self._work()
                    beside.cancel_scope.cancel()
            finally:
                self.hand.close()

    async def _work(self) -> None:
        make = BatchWorker if isinstance(self.seat.subscription, BatchSubscription) else SingleWorker
        handing, work = trio.open_memory_channel[Received[Any]](math.inf)
        ordering, orders = trio.open_memory_channel[Order](math.inf)
        saying, said = trio.open_memory_channel[Said](math.inf)
        concurrency = self.seat.subscription.concurrency
        self.settler = Settler(self.seat.books, self.link, self.hand, saying, serial=concurrency == 1)
        # receive ends are closed when every task is gone, so that no hand-over meets a broken channel
        with work, orders, said:
            async with trio.open_nursery() as self._nursery:
                with ordering:
                    for _ in range(concurrency):
                        worker = make(self)
                        self._workers.append(worker)
                        self._nursery.start_soon(worker.run, work.clone(), ordering.clone())
                self._nursery.start_soon(self.settler.run, orders.clone())
                if self.link.proves:
                    self._nursery.start_soon(Prover(self.link, self.hand).run, said.clone())
                await self._take(handing, work)

    async def _take(
        self, handing: trio.MemorySendChannel[Received[Any]], work: trio.MemoryReceiveChannel[Received[Any]]
    ) -> None:
        """The intake: until the drain. Cancellation: the link has given back what it took; nothing is here."""
        link, hand, hand_over = self.link, self.hand, handing.send_nowait
        failures = 0
        with handing:
            with self._intake:
                while True:
                    room = await hand.place()
                    if self.draining:  # the drain itself has freed this place
                        break
                    try:
                        batch = await link.receive(room)
                    except CallBroken as error:
                        failures += 1
                        if failures >= CALLS:
                            raise LinkBroken(f"{failures} calls in a row failed, at last: {error}") from error
                        log.warning("%s: %s; trying again", self.seat.subscription.name, error)
                        await trio.sleep(backoff(failures, 0.5))
                        continue
                    failures = 0
                    hand.take(batch)
                    for received in batch:
                        hand_over(received)
            link.stop()
            await self.give_back(_rest_of(work))

    async def give_back(self, unsettled: list[Received[Any]]) -> None:
        """Nothing is said for these, and they shall go back now: a drain has come before their handler, or their batch
        was cancelled. Cancellation: they go back with the link's goodbye.
        """
        ours = [received for received in unsettled if received in self.hand.open]
        self.hand.ended(self.hand.rest, ours)
        if ours:
            with trio.move_on_after(self._drain.goodbye):
                try:
                    await self.link.give_back(ours)
                except CallBroken as error:
                    name = self.seat.subscription.name
                    log.warning("%s: %d deliveries were not given back: %s", name, len(ours), error)
        for received in unsettled:
            self.hand.free(received)

    def walk(self, received: Received[Any], plan: Plan[Any], orders: trio.MemorySendChannel[Order]) -> None:
        """Start the before-steps of a delivery; its scope is the keeper's before the task begins."""
        steps = BeforeSteps(self, received, plan)
        if self.keeper is not None:
            self.keeper.attend(received, steps.scope)
        self._nursery.start_soon(self._walked, steps, orders.clone())

    async def _walked(self, steps: BeforeSteps, orders: trio.MemorySendChannel[Order]) -> None:
        self._walks.add(steps)
        try:
            await steps.run(orders)
        finally:
            self._walks.remove(steps)

    def _lost(self, received: Received[Any], line: Line) -> None:
        if self.keeper is not None:
            self.keeper.lost(received, line)

    async def _hear_the_drain(self) -> None:
        await self._drain.requested.wait()
        self._intake.cancel()
        await self._drain.grace_over.wait()
        for worker in self._workers:
            if worker.scope is not None:
                worker.scope.cancel()
        for steps in self._walks:
            steps.last_try()


def _rest_of(work: trio.MemoryReceiveChannel[Received[Any]]) -> list[Received[Any]]:
    """All that waits in the channel."""
    rest: list[Received[Any]] = []
    try:
        while True:
            rest.append(work.receive_nowait())
    except (trio.WouldBlock, trio.EndOfChannel):
        return rest
