"""What happened in a run on a `MemoryBroker`, in order, and what must be true of it whatever the weather was.

One list holds the broker's own log, what observers were told, and the calls of handlers, so that what a runtime booked
can be held against what was said at the queue, hand-over by hand-over. Nothing here believes a runtime's own counts.

The invariants (`judge`), always:

1. Every message was finished once at most and is at one place at the end; none is in anybody's hands.
2. Every hand-over was taken into the books of one subscription in the tick of its delivery, and ended in exactly one
   line. A line that stands for a verb was said, with that verb; a verb that was said is booked so, or *unknown*; what
   is *unsettled* or *superseded* was not said, and came back. A plan is made only for what a handler really answered
   (it returned or raised, and the scope around it was not cancelled) or what cannot be decoded, and verb and line are
   those of a table that was typed by hand (tests/weather/fates.py). Of a single delivery each answer makes a plan.
3. A message (its body is its name) does not vanish: each original that was rejected for a copy has its copy or is
   *lost* in the books, each accepted for a dead letter has been published there before. What there is too much, a fault
   that doubles (an unknown verb, a lost confirmation, a publish before a verb that was never said) accounts for.
4. Both books balance, nothing is in hand or waiting, and they are the fold of the events that observers were told.
   Copies owed: one for each rejected original and each unknown one, no more.
5. A handler is cancelled with its delivery (a lost lease, a broken life) and at the end of grace, and no two have one
   message at once, unless it was stolen. Never more than `limit` deliveries in hand, `concurrency` handlers or
   `max_waiting` copies; a life that was drained has returned every place, none twice; at concurrency 1 the next
   handler starts when the delivery before it is booked.
6. In each chain of copies and redeliveries the attempt grows with each call, and a retry is answered below the cap.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import trio

import actors.link_life
from actors.events import Booked, Event
from actors.in_flight import InFlight
from links.abc import Received
from links.memory import Delivered, MemoryBroker, MemoryQueue, Published, Returned, Said, Unsaid, replay
from settlement.delivery import Delivery
from settlement.ledger import CopiesOwed, CopiesPublished, Ended, Ledger, Line, Took
from settlement.memory import Accept, PutBack, Reject, Verb
from settlement.outcomes import Outcome
from settlement.plans import Plan, Publish, Wait
from settlement.policy import DeadLetter, Policy
from tests.weather.fates import Call, Ending, Fate, Rules, is_cut

__all__ = ["Consumer", "HandOver", "Story", "Verdict", "judge", "watched_places"]

SAID = {Line.ACKED, Line.RETRIED, Line.DELAYED, Line.DROPPED, Line.DEAD_LETTERED}


@attrs.define(eq=False)
class Consumer:
    """A subscription in one run of a runtime."""

    name: str
    queue: str
    limit: int
    concurrency: int
    size: int
    room: int
    rules: Rules
    folded: Ledger = attrs.field(factory=Ledger)
    """The fold of what observers were told."""
    running: int = 0
    until: float = math.inf
    """When its last handler must have ended: at the end of grace, or of a cancellation."""


@attrs.frozen
class Told:
    by: Consumer
    entry: Booked


@attrs.frozen
class Started:
    by: Consumer
    call: Call


@attrs.frozen
class Stopped:
    by: Consumer
    call: Call


@attrs.frozen
class Decided:
    by: Consumer
    delivery: Delivery[Any]
    plan: Plan[Verb]


@attrs.define(eq=False)
class HandOver:
    """One delivery, from the broker's side and from ours."""

    id: str
    attempt: int
    delivery: Delivery[Any] | None = None
    by: Consumer | None = None
    ending: Ending | None = None
    """What a handler answered, in the end."""
    fate: Fate | None = None
    """A plan was made, and this is what it must be."""
    notice: object = None
    line: Line | None = None
    said: Verb | None = None
    returned: str | None = None
    counted: bool = True
    refused: bool = False
    """A settlement was not applied: it is said again, and the slot was given back (DESIGN 3.8)."""
    calls: int = 0

    @property
    def in_hand(self) -> bool:
        """Has nobody said, booked or taken back anything yet?"""
        return self.line is None and self.said is None and self.returned is None

    @property
    def body(self) -> bytes:
        assert self.delivery is not None
        return self.delivery.body


class Story:
    """Keeps what happened."""

    def __init__(self, *brokers: MemoryBroker) -> None:
        self.timeline: list[Any] = []
        for broker in brokers:
            broker.log = self.timeline
        self.brokers = brokers
        self.consumers: list[Consumer] = []
        self.handed: list[HandOver] = []
        self.bodies: dict[tuple[str, str], bytes] = {}
        self.ledgers: dict[str, Ledger] = {}
        self.running: set[str] = set()
        """The messages that a handler has now."""
        self.wrong: list[str] = []
        """What a handler saw; an error there would be the policy's to answer."""
        self.stolen = False
        """Something gave a message to others without asking: then two handlers may have it for a moment."""
        self.ended: dict[tuple[str, int], float] = {}
        """When a delivery was booked."""

    def consumer(self, name: str, queue: MemoryQueue, *, concurrency: int, size: int = 0, rules: Rules) -> Consumer:
        """Watch a subscription that is about to be made: its plans, and (by `observer`) its events."""
        limit = queue.limit(concurrency, size or 1)
        consumer = Consumer(name, queue.name, limit, concurrency, size, queue.copies, rules)
        self.consumers.append(consumer)
        decide = queue.decide

        def deciding(outcome: Outcome | DeadLetter, delivery: Delivery[Any], policy: Policy) -> Plan[Verb]:
            plan = decide(outcome, delivery, policy)
            self.timeline.append(Decided(consumer, delivery, plan))
            return plan

        queue.decide = deciding  # type: ignore[method-assign]
        return consumer

    def observer(self, event: Event) -> None:
        """Hear a runtime."""
        if isinstance(event, Booked):
            consumer = self.named(event.subscription)
            consumer.folded.enter(event.entry)
            waiting = consumer.folded.owed - consumer.folded.published - consumer.folded.lost
            assert 0 <= waiting <= consumer.room, f"{waiting} copies wait in room for {consumer.room}"
            self.timeline.append(Told(consumer, event))
            for each in event.deliveries:
                if isinstance(event.entry, Ended):
                    self.ended[each.id, each.attempt] = trio.current_time()
                else:  # given back, it comes again with the same attempt
                    self.ended.pop((each.id, each.attempt), None)

    def named(self, name: str) -> Consumer:
        """A subscription that is watched."""
        return next(each for each in self.consumers if each.name == name)

    @contextmanager
    def call(self, consumer: Consumer, deliveries: Sequence[Delivery[Any]]) -> Generator[Call, None, None]:
        """A handler was called, and runs in the block; what it returns is to be put into `result`."""
        consumer.running += 1
        if consumer.running > consumer.concurrency:
            self.wrong.append(f"{consumer.name}: more handlers than concurrency")
        ids = {each.id for each in deliveries}
        if ids & self.running and not self.stolen:
            self.wrong.append(f"two handlers at once have {ids & self.running}")
        self.running |= ids
        call = Call(tuple((each.id, each.attempt) for each in deliveries))
        self.timeline.append(Started(consumer, call))
        try:
            yield call
        except BaseException as error:
            call.failure = error
            raise
        finally:
            call.cut = is_cut(consumer.rules)
            self._stopped(consumer, deliveries, call)

    def _stopped(self, consumer: Consumer, deliveries: Sequence[Delivery[Any]], call: Call) -> None:
        consumer.running -= 1
        self.running -= {each.id for each in deliveries}
        now = trio.current_time()
        ended = min(self.ended.get((each.id, each.attempt), now) for each in deliveries)
        late = now - min(consumer.until, ended)
        if late > 1e-6:
            self.wrong.append(f"the handler of {deliveries} ran on for {late:g} s after its time, or its delivery's")
        self.timeline.append(Stopped(consumer, call))

    def read(self, queue: str) -> None:
        """Make `handed` of the timeline, and hold each entry against what came before it."""
        now: dict[str, HandOver] = {}
        named: dict[tuple[str, int], HandOver] = {}
        of: dict[Delivery[Any], HandOver] = {}
        mine: dict[Consumer, list[HandOver]] = defaultdict(list)
        last: dict[Consumer, list[HandOver]] = defaultdict(list)
        called: dict[Call, list[HandOver]] = {}
        for item in self.timeline:
            match item:
                case Delivered(name, id, attempt):
                    assert name == queue
                    now[id] = named[id, attempt] = hand_over = HandOver(id, attempt)
                    self.handed.append(hand_over)
                case Told(by, Booked(entry=Took(), deliveries=deliveries)):
                    for delivery in deliveries:
                        hand_over = of[delivery] = now[delivery.id]
                        assert hand_over.delivery is None, f"taken twice: {delivery}"
                        hand_over.delivery, hand_over.by = delivery, by
                        self.bodies[queue, delivery.id] = delivery.body
                        mine[by].append(hand_over)
                    mine[by] = [each for each in mine[by] if each.in_hand]
                    assert len(mine[by]) <= by.limit, f"{len(mine[by])} in hand, the limit is {by.limit}"
                case Told(_, Booked(entry=Ended(line), deliveries=deliveries)):
                    for delivery in deliveries:
                        assert of[delivery].line is None, f"ended twice: {delivery}"
                        assert line not in SAID or of[delivery].fate is not None, f"{line} without a plan: {delivery}"
                        of[delivery].line = line
                case Decided(by, delivery, plan):
                    self._decided(of[delivery], by, plan)
                case Said(name, id, verb) if name == queue:
                    assert now[id].fate is not None, f"{verb} said without a plan: {now[id]}"
                    assert now[id].said is None and now[id].returned is None  # noqa: PT018
                    now[id].said = verb
                case Returned(name, id, why, counted) if name == queue:
                    assert now[id].said is None and now[id].returned is None  # noqa: PT018
                    now[id].returned, now[id].counted = why, counted
                case Unsaid(name, id, why="refused") if name == queue:
                    now[id].refused = True
                case Started(by, call):
                    if by.concurrency == 1:
                        late = [each.id for each in last[by] if each.line is None and not each.refused]
                        assert not late, f"handler of {call.which} started before {late} were booked"
                    last[by] = called[call] = [named[each] for each in call.which]
                    for each in last[by]:
                        each.calls += 1
                        assert each.calls == 1, f"handler called twice for one delivery: {each}"
                        assert each.line is None, f"handler called for a delivery that has ended: {each}"
                        assert not by.rules.undecodable(each.body), f"handler called for what is undecodable: {each}"
                case Stopped(by, call):
                    for each, ending in zip(called[call], by.rules.endings(call), strict=True):
                        each.ending = ending
                case _:
                    pass

    def _decided(self, it: HandOver, by: Consumer, plan: Plan[Verb]) -> None:
        """A plan was made: only for an answer, once, and that of the table."""
        assert it.fate is None, f"decided twice: {it}"
        if by.rules.undecodable(it.body):
            it.ending = by.rules.on_undecodable
        assert it.ending is not None, f"decided without an answer: {it}"
        assert isinstance(it.ending, Outcome | DeadLetter), f"decided, and {it.ending}: {it}"
        fate = it.fate = by.rules.fate(it.ending, it.attempt)
        it.notice = plan.notice
        assert (plan.line, plan.verb) == (fate.line, fate.verb), f"{plan} for {it}"
        assert [type(each) for each in plan.before] == [Publish] * fate.letter, f"{plan} for {it}"
        assert plan.instead == (PutBack() if fate.letter else None), f"{plan} for {it}"
        assert [type(each) for each in plan.after] == [Wait, Publish] * fate.copy, f"{plan} for {it}"


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


def entries(timeline: Iterable[Any]) -> list[Any]:
    return [each for each in timeline if isinstance(each, Published | Delivered | Said | Unsaid | Returned)]


def owed_for(story: Story, body: bytes) -> list[HandOver]:
    """The deliveries of a message that copies may stand for."""
    return [each for each in story.handed if each.body == body and each.fate is not None and each.fate.copy]


@attrs.frozen
class Verdict:
    """What a test may go on asking."""

    calls: Counter[bytes]
    """Handler calls for each message."""
    doubled: int
    """Messages that there are too many, all together."""
    vanished: int
    """Messages that are gone (each is counted as lost)."""


def judge(
    story: Story,
    queue: str,
    dead: tuple[MemoryBroker, str],
    originals: Sequence[bytes],
    *,
    cap: int | None = None,
    unconfirmed: int = 0,
) -> Verdict:
    """Raise `AssertionError` for the first invariant that does not hold.

    `dead`: where dead letters go; `originals`: the messages, each with a body of its own; `unconfirmed`: how many
    confirmations of copies and dead letters were lost.
    """
    assert not story.wrong, "; ".join(story.wrong)
    main, (dead_broker, dead_queue) = story.brokers[0], dead
    assert main.unsettled(queue) == 0, f"in somebody's hands at the end: {main.held(queue)}"
    log = [each for each in entries(story.timeline) if each.queue == queue]
    fates = replay(log)
    assert fates.unsettled == ()
    stored = [*main.store(queue).ready(), *(entry[2] for entry in main.store(queue).delayed)]
    assert sorted(fates.stored) == sorted(message.id for message in stored)
    story.read(queue)
    for message in stored:
        story.bodies[queue, message.id] = message.body

    # 2: the two sides of each hand-over
    for each in story.handed:
        what = f"{each}"
        assert each.delivery is not None, f"delivered, and not taken: {what}"
        assert each.line is not None, f"not booked: {what}"
        assert each.by is not None
        fate = each.fate
        right: dict[Line, Verb] = {}
        if fate is not None:
            right = {fate.line: fate.verb} | ({Line.RETRIED: PutBack()} if fate.letter else {})
        if not each.by.size and isinstance(each.ending, Outcome | DeadLetter):
            assert fate is not None, f"answered, and no plan was made: {what}"
        if each.said is not None:
            assert each.said in right.values(), f"said something else: {what}"
        else:
            assert each.returned is not None, f"neither said nor back: {what}"
        if each.line in SAID:
            assert each.said is not None, f"booked, not said: {what}"
            assert right.get(each.line) == each.said, f"booked something else: {what}"
        elif each.line is Line.UNKNOWN:
            assert fate is not None, f"unknown without an order: {what}"
        else:
            assert each.line in (Line.UNSETTLED, Line.SUPERSEDED), what
            assert each.said is None, f"said, and not booked so: {what}"

    # 3: no message vanishes, and none is doubled without a reason
    copies: Counter[bytes] = Counter()
    for entry in log:
        if isinstance(entry, Published):
            copies[story.bodies[queue, entry.id]] += 1
    assert set(copies) <= set(originals), "messages that nobody published"
    letters: Counter[bytes] = Counter(message.body for message in dead_broker.store(dead_queue).ready())
    moved: Counter[bytes] = Counter()
    buried: Counter[bytes] = Counter()
    may_copy: Counter[bytes] = Counter()
    may_bury: Counter[bytes] = Counter()
    for each in story.handed:
        fate = each.fate
        if fate is None:
            continue
        if fate.copy:
            if isinstance(each.said, Reject):
                moved[each.body] += 1
            elif each.line is Line.UNKNOWN:
                may_copy[each.body] += 1
        if fate.letter:
            if isinstance(each.said, Accept):
                buried[each.body] += 1
            else:
                may_bury[each.body] += 1
    doubled = vanished = 0
    for body in originals:
        assert copies[body] >= 1, f"{body!r} was never there"
        excess = copies[body] - 1 - moved[body]
        vanished += max(0, -excess)
        doubled += max(0, excess)
        assert excess <= may_copy[body] + unconfirmed, f"{body!r}: {excess} copies too many"
        excess = letters[body] - buried[body]
        doubled += max(0, excess)
        assert excess >= 0, f"{body!r} was accepted for a dead letter that is not there"
        assert excess <= may_bury[body] + unconfirmed, f"{body!r}: {excess} dead letters too many"
    lost = sum(consumer.folded.lost for consumer in story.consumers)
    assert vanished <= lost, f"{vanished} messages are gone, {lost} are counted as lost"

    # 4: the books
    for consumer in story.consumers:
        ledger, folded = story.ledgers[consumer.name], consumer.folded
        assert ledger.balanced, f"{ledger.deliveries}; {ledger.copies}"
        assert (ledger.in_hand, ledger.waiting) == (0, 0), f"{ledger.deliveries}; {ledger.copies}"
        assert ledger == folded, "the books are not the fold of the events"
        own = [each for each in story.handed if each.by is consumer]
        assert ledger.received == len(own)
        owed = [each for each in own if each.fate is not None and each.fate.copy]
        assert ledger.owed == len([each for each in owed if each.line in (Line.DELAYED, Line.UNKNOWN)])
        assert consumer.running == 0, "a handler runs on"
    told = [each.entry.entry for each in story.timeline if isinstance(each, Told)]
    published = sum(entry.count for entry in told if isinstance(entry, CopiesPublished))
    assert published <= sum(copies.values()) - len(originals), "copies booked that are not there"
    assert sum(entry.count for entry in told if isinstance(entry, CopiesOwed)) >= sum(moved.values())

    # 6: attempts
    attempts: dict[str, int] = {}
    for each in story.handed:
        before = attempts.get(each.id)
        if before is None:
            answered = {other.attempt for other in owed_for(story, each.body)} if each.attempt > 1 else {0}
            assert each.attempt - 1 in answered, f"a copy that counts wrongly: {each}"
        else:
            assert each.attempt == before + 1, f"the attempt is not {before + 1}: {each}"
        assert each.counted or not each.calls, f"a handler was called for it, and it did not count: {each}"
        attempts[each.id] = each.attempt - (not each.counted)
        if each.fate is not None and each.fate.line in (Line.RETRIED, Line.DELAYED) and cap is not None:
            assert each.attempt < cap, f"retried at the cap of {cap}: {each}"
    calls = Counter(each.body for each in story.handed if each.calls)
    return Verdict(calls, doubled, vanished)
