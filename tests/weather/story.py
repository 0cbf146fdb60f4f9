"""What happened in a run, on any transport: hand-over by hand-over, from the broker's side and from ours.

A world (tests/weather/memory_world.py, tests/weather/amqp_world.py) tells the story what its broker does; observers
and handlers tell it the rest, each in the tick in which it happens. What is wrong is noted when it is seen, and
tests/weather/verdict.py looks at the whole. Nothing here believes a runtime's own counts. The invariants, always:

1. Every hand-over that was taken ends in exactly one line. A line that stands for a verb is booked when the broker has
   heard that verb, not before; what is *unsettled* or *superseded* was never said and came back, or was taken back;
   what is *unknown* was ordered. A plan is made only for what a handler really answered (it returned or raised, and the
   scope around it was not cancelled) or what cannot be decoded, and plan, verb and line are those of rules that were
   typed by hand (tests/weather/fates.py). Of a single delivery each answer makes a plan.
2. A message leaves the queue by one verb. Where its copy or dead letter shall live on, that is there, or is *lost* in
   the books; what there is too much, an unknown verb or an unconfirmed publish accounts for.
3. What a publisher was told is true: confirmed is there once; refused is not there; broken on the wire is there once at
   most: it is never sent again by itself. What one publisher was told to be there came in its order.
4. Both books balance, nothing is in hand or waiting, and they are the fold of the events; a copy is owed for each
   original that is gone for one or may be.
5. A handler ends with its delivery, and at the end of grace; no two have one message at once, unless it was stolen.
   There are never more deliveries in hand than the limit, handlers than concurrency, copies than room; a life that was
   drained has returned every place, none twice. At concurrency 1 handlers run in arrival order, and where a verb is
   answered the next one starts when the delivery before is booked, or its verb was not applied.
6. The attempt grows with each call, a copy counts the attempt that it was made of, and a retry is below the cap.
7. A verb that was not applied is said again, after 1 s, doubled to 60 s; its handler is not called again for it.
8. What the other side took back (its lease, or the peer's word) is *superseded*, and nothing else is.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Generator, Hashable, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import trio

import actors.link_life
from actors.events import Booked, Event
from actors.in_flight import InFlight
from links.abc import Received
from settlement.delivery import Delivery, Letter
from settlement.ledger import Ended, Ledger, Line, Took
from settlement.outcomes import Outcome
from settlement.plans import Plan, Publish, Wait
from settlement.policy import DeadLetter, Policy
from tests.weather.fates import Call, Ending, Fate, Rules, Say, is_cut

__all__ = ["SAID", "Consumer", "HandOver", "Story", "watched_places"]

SAID = {Line.ACKED, Line.RETRIED, Line.DELAYED, Line.DROPPED, Line.DEAD_LETTERED}


@attrs.define(eq=False)
class Consumer:
    """A subscription in one run of a runtime."""

    name: str
    limit: int
    concurrency: int
    size: int
    room: int
    rules: Rules
    folded: Ledger = attrs.field(factory=Ledger)
    """The fold of what observers were told."""
    holds: list[HandOver] = attrs.field(factory=list["HandOver"])
    running: int = 0
    until: float = math.inf
    """When its last handler must have ended: at the end of grace, or of a cancellation."""
    last: list[HandOver] = attrs.field(factory=list["HandOver"])
    """Those of the handler's last call."""


@attrs.define(eq=False)
class HandOver:
    """One delivery, from the broker's side and from ours."""

    number: int
    name: bytes
    """The message's; a copy has the same."""
    message: Hashable = attrs.field(repr=False)
    count: int
    """The broker's."""
    first: bool
    """Of this message."""
    said: Say | None = None
    returned: str = ""
    spent: bool = True
    """It came back, and the next one counts it."""
    taken_back: bool = False
    """The other side says so; nobody may have heard it yet."""
    refused: list[float] = attrs.field(factory=list[float])
    """When its verb was not applied."""
    by: Consumer | None = attrs.field(default=None, repr=lambda by: by.name if by else "nobody")
    attempt: int = 0
    counted: bool = False
    ending: Ending | None = None
    """What a handler answered, in the end."""
    fate: Fate | None = None
    """A plan was made, and this is what it must be."""
    notice: object = None
    line: Line | None = None
    calls: int = 0
    ended_at: float | None = None

    @property
    def in_hand(self) -> bool:
        """Has nobody said, booked or taken back anything yet?"""
        return self.line is None and self.said is None and not self.returned

    @property
    def rules(self) -> Rules:
        """Those of who took it."""
        assert self.by is not None
        return self.by.rules

    def publishes(self, what: str) -> bool:
        """Does its fate publish a `copy`, a `dead` letter?"""
        return self.fate is not None and self.fate.publishes(what)


class Story(ABC):
    """Hears the broker, observers and handlers."""

    exact = True
    """A verb is answered: what was said is booked in the same tick, and what is handed over is taken in the same."""

    def __init__(self, queue: str, dead: str, *, at_most_once: bool = False) -> None:
        self.queue, self.dead, self.at_most_once = queue, dead, at_most_once
        self.handed: list[HandOver] = []
        self.present: dict[Hashable, HandOver] = {}
        """The last hand-over of each message."""
        self.wrong: list[str] = []
        self.consumers: list[Consumer] = []
        self.ledgers: dict[str, Ledger] = {}
        self.stored: dict[str, list[bytes]] = defaultdict(list)
        """The names of what was published to each queue, in order."""
        self.copies: set[Hashable] = set()
        """Messages in the queue that are not the first of their name."""
        self.sent: dict[str, dict[bytes, str]] = defaultdict(dict)
        """What users' publishers were told: confirmed, refused, unknown; by address and name."""
        self.published: list[list[bytes]] = []
        """What each of them asked for, in order."""
        self.unconfirmed: Counter[tuple[str, bytes]] = Counter()
        """Publishes of runtimes that broke on the wire."""
        self.stolen = False
        """Something gave a message to others without asking: then two handlers may have it for a moment."""
        self.slowest = 0.0
        """Seconds that a settlement has taken, at most."""
        self.running: set[Hashable] = set()

    def check(self, holds: object, what: object) -> None:
        """Note what is wrong; an exception here would be the broker's, or an answer of a handler."""
        if not holds:
            self.wrong.append(str(what))

    @abstractmethod
    def find(self, delivery: Delivery[Any]) -> HandOver:
        """Which hand-over this is; the delivery may be decoded."""

    @abstractmethod
    def judge_broker(self) -> None:
        """What the broker itself can show at the end: the queue is empty."""

    # --- the broker

    def on_stored(self, queue: str, name: bytes, message: Hashable) -> None:
        if queue == self.queue and name in self.stored[queue]:
            self.copies.add(message)
        self.stored[queue].append(name)

    def on_handed(self, name: bytes, message: Hashable, count: int, *, first: bool) -> HandOver:
        """The message is on its way."""
        it = self.present[message] = HandOver(len(self.handed), name, message, count, first)
        self.handed.append(it)
        return it

    def on_said(self, message: Hashable, say: Say | None) -> HandOver:
        """None: it was settled without a verb."""
        it = self.present[message]
        self.check(it.said is None and not it.returned, f"said twice, or when it was back: {it}")
        it.said = say
        if self.at_most_once:
            self.check(say is Say.ACCEPTED, f"not accepted: {it}")
        elif not it.taken_back:
            fate = it.fate
            right = fate and (say is it.rules.says(fate.verb) or (say is Say.BACK and fate.before))
            self.check(say and right, f"{say} said without a plan, or against it: {it}")
            self._repeated(it)
        return it

    def on_returned(self, message: Hashable, why: str, *, spent: bool = True) -> None:
        it = self.present[message]
        self.check(it.said is None and not it.returned, f"back twice, or after it was said: {it}")
        self.check(spent or not it.calls or it.taken_back, f"a handler was called for it, and it did not count: {it}")
        it.returned, it.spent = why, spent

    def on_refused(self, message: Hashable) -> None:
        it = self.present[message]
        self._repeated(it)
        it.refused.append(trio.current_time())

    def _repeated(self, it: HandOver) -> None:
        if it.refused:
            late = trio.current_time() - it.refused[-1] - min(2.0 ** (len(it.refused) - 1), 60.0)
            self.check(late <= 2 * self.slowest + 1e-6, f"not applied, and left for {late:g} s too long: {it}")

    def on_unconfirmed(self, address: str, letter: Letter, name: bytes) -> None:
        """A publish broke on the wire; one of a runtime is tried again."""
        if letter.original is not None:
            self.unconfirmed[address, name] += 1

    # --- the runtime

    def consumer(self, name: str, source: Any, *, concurrency: int, size: int, rules: Rules) -> Consumer:
        """Watch a subscription that is about to be made: its plans, and (by `observer`) its events."""
        consumer = Consumer(name, source.limit(concurrency, size or 1), concurrency, size, source.copies, rules)
        self.consumers.append(consumer)
        decide = source.decide

        def deciding(outcome: Outcome | DeadLetter, delivery: Delivery[Any], policy: Policy) -> Plan[Any]:
            plan: Plan[Any] = decide(outcome, delivery, policy)
            self.on_decided(self.find(delivery), plan)
            return plan

        source.decide = deciding
        return consumer

    def named(self, name: str) -> Consumer:
        """A subscription that is watched."""
        return next(each for each in self.consumers if each.name == name)

    def observer(self, event: Event) -> None:
        """Hear a runtime."""
        if not isinstance(event, Booked):
            return
        consumer = self.named(event.subscription)
        consumer.folded.enter(event.entry)
        waiting = consumer.folded.owed - consumer.folded.published - consumer.folded.lost
        self.check(0 <= waiting <= consumer.room, f"{waiting} copies wait in room for {consumer.room}")
        for delivery in event.deliveries:
            it = self.find(delivery)
            if isinstance(event.entry, Took):
                self.check(it.by is None, f"taken twice: {it}")
                it.by, it.attempt = consumer, delivery.attempt
                consumer.holds.append(it)
                self.on_taken(it, delivery)
            elif isinstance(event.entry, Ended):
                self.on_ended(it, event.entry.line)
        if self.exact and isinstance(event.entry, Took):
            consumer.holds = [each for each in consumer.holds if each.in_hand]
            held = len(consumer.holds)
            self.check(held <= consumer.limit, f"{held} in hand, the limit is {consumer.limit}")

    def on_taken(self, it: HandOver, delivery: Delivery[Any]) -> None:  # noqa: B027 -- as hushed in world.py
        """The attempt that the delivery shows is right: the transport's own rule."""

    def on_decided(self, it: HandOver, plan: Plan[Any]) -> None:
        """A plan was made: only for an answer, once, and that of the rules."""
        self.check(it.fate is None, f"decided twice: {it}")
        rules = it.rules
        if rules.undecodable(it.name):
            it.ending = rules.on_undecodable
        if not isinstance(it.ending, Outcome | DeadLetter):
            self.check(False, f"decided without an answer: {it}")
            return
        fate = it.fate = rules.becomes(it.ending, it.attempt, counted=it.counted)
        it.notice = plan.notice
        steps = [type(each) for each in (*plan.before, *plan.after)]
        right = (plan.line, plan.verb) == (fate.line, fate.verb)
        right &= steps == [Wait] * fate.waits + [Publish] * bool(fate.before or fate.after)
        right &= bool(plan.after) == bool(fate.after)
        right &= plan.instead == (rules.back if plan.before else None)
        self.check(right, f"{plan} for {it}")
        retried = rules.cap is not None and plan.line in (Line.RETRIED, Line.DELAYED)
        self.check(not retried or it.attempt < (rules.cap or 0), f"retried at the cap of {rules.cap}: {it}")

    def on_ended(self, it: HandOver, line: Line) -> None:
        self.check(it.line is None, f"ended twice: {it}")
        it.line, it.ended_at = line, trio.current_time()
        if line in SAID and not self.at_most_once:
            self.check(it.said is not None, f"booked as {line.value}, and the broker has heard nothing: {it}")
        if it.said is None:
            self._repeated(it)

    # --- handlers

    @contextmanager
    def call(self, consumer: Consumer, deliveries: Sequence[Delivery[Any]]) -> Generator[Call, None, None]:
        """A handler was called, and runs in the block; what it returns is to be put into `result`."""
        its = [self.find(each) for each in deliveries]
        consumer.running += 1
        self.check(len(its) <= max(1, consumer.size), f"a batch of {len(its)}")
        self.check(consumer.running <= consumer.concurrency, f"{consumer.name}: more handlers than concurrency")
        messages = {each.message for each in its}
        self.check(self.stolen or not messages & self.running, f"two handlers at once have one of {its}")
        self.running |= messages
        if consumer.concurrency == 1:
            numbers = [each.number for each in (*consumer.last[-1:], *its)]
            self.check(numbers == sorted(numbers), f"out of order: {numbers}, {its}")
            late = [each for each in consumer.last if self.exact and each.line is None and not each.refused]
            self.check(not late, f"handler of {its} started before {late} were booked")
            consumer.last = its
        for it in its:
            it.calls += 1
            self.check(it.by is consumer and it.calls == 1 and it.line is None, f"handler called: {it}")
            self.check(not consumer.rules.undecodable(it.name), f"handler called for what is undecodable: {it}")
        call = Call(len(its))
        try:
            yield call
        except BaseException as error:
            call.failure = error
            raise
        finally:
            call.cut = is_cut(consumer.rules)
            consumer.running -= 1
            self.running -= messages
            now = trio.current_time()
            for it, ending in zip(its, consumer.rules.endings(call), strict=True):
                it.ending = ending
                due = min(consumer.until, now if it.ended_at is None else it.ended_at)
                self.check(now <= due + 1e-6, f"the handler ran on for {now - due:g} s after its time: {it}")


class WatchedPlaces(InFlight):
    """Counts its places out loud."""

    def take(self, batch: Sequence[Received[Any]]) -> None:
        super().take(batch)
        assert self.taken <= self.limit, f"{self.taken} places taken of {self.limit}"

    def free(self, batch: Sequence[Received[Any]]) -> None:
        super().free(batch)
        assert self.taken >= 0, "a place was returned twice"

    def close(self) -> None:
        super().close()
        if sys.exc_info()[0] is None:
            assert self.taken == 0, f"{self.taken} places were not returned by a life that was drained"


@contextmanager
def watched_places() -> Generator[None, None, None]:
    """Let every life inside have a `WatchedPlaces`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actors.link_life, "InFlight", WatchedPlaces)
        yield
