"""What happened in a run on an `EmbeddedBroker`, and what must be true of it whatever the weather was.

The broker stamps each message that it hands out with a number, as a delivery annotation, which no copy may carry on. By
it both sides of one hand-over are known as the same: what the broker heard of it, and what a handler answered and a
runtime booked. What is wrong is noted when it is seen, and `judge` looks at the whole. The invariants:

1. A line that stands for a verb is booked when the broker has heard that verb, not before (*proved*); what is
   *unsettled* was never said and came back; what is *unknown* was ordered. Each in one line, each line of one answer,
   verb and line those of a table that was typed by hand (`AmqpRules`).
2. A message leaves the queue by one disposition. Where its copy or dead letter shall live on, that is there, or is
   *lost* in the books; what there is too much, an unknown verb or an unconfirmed publish accounts for.
3. What a publisher was told is true: confirmed is there once; refused or cut while it waited is not there; broken on
   the wire is there once at most: it is never sent again by itself.
4. Both books balance and are the fold of the events; a copy is owed for each original that is gone or may be.
5. A handler ends with its delivery; there are never more deliveries with a link than its credit, nor more handlers than
   concurrency; at concurrency 1 they run in arrival order.
6. The attempt is the count of copies, the broker's count and one; a copy counts the attempt that it was made of.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import attrs
import trio

from actors.events import Booked, Event
from links.amqp.broker import AmqpBroker
from links.amqp.embedded import EmbeddedBroker
from links.amqp.embedded_peer import Consumer as BrokersLink
from links.amqp.embedded_store import Message
from links.amqp.events import Disposition, State
from links.amqp.sections import DELIVERY_ANNOTATIONS, walk
from links.amqp.source import AmqpSource
from links.amqp.values import items, scalar
from settlement.amqp import Modified, Verb
from settlement.delivery import Delivery, Letter
from settlement.ledger import Ended, Ledger, Line, Took
from settlement.outcomes import Outcome
from settlement.plans import Plan, Publish, Wait
from settlement.policy import DeadLetter, Policy
from tests.weather.amqp_fates import AmqpRules, Fate, is_sequence, state_of
from tests.weather.fates import Call, Ending, is_cut
from tests.weather.story import SAID, Consumer

__all__ = ["STAMP", "AmqpStory", "HandOver", "publishes"]

NAME: Final = re.compile(rb"(?:m|bad|x)[0-9]{4}")
"""Each message has one, as its message-id; a copy has the same."""
STAMP: Final = "x-opt-hand-over"
"""The delivery annotation that holds the number."""
_HEADER: Final = b"\x00\x53\x70"


# --- one hand-over, and all of them


@attrs.define(eq=False)
class HandOver:
    """One delivery, from the broker's side and from ours."""

    number: int
    name: bytes
    message: Message = attrs.field(repr=False)
    count: int
    """The broker's."""
    first: bool
    """Of this message."""
    link: BrokersLink = attrs.field(repr=False)
    said: State | None = None
    returned: str = ""
    by: Consumer | None = attrs.field(default=None, repr=lambda by: by.name if by else "nobody")
    attempt: int = 0
    counted: bool = False
    ending: Ending | None = None
    fate: Fate | None = None
    line: Line | None = None
    calls: int = 0
    ended_at: float | None = None


class AmqpStory:
    """Hears the broker, observers and handlers, in the tick in which something happens."""

    def __init__(self, queue: str, dead: str, *, at_most_once: bool = False) -> None:
        self.queue, self.dead, self.at_most_once = queue, dead, at_most_once
        self.broker: EmbeddedBroker
        self.handed: list[HandOver] = []
        self.wrong: list[str] = []
        self.consumers: list[Consumer] = []
        self.ledgers: dict[str, Ledger] = {}
        self.stored: dict[str, list[bytes]] = defaultdict(list)
        """The names of what was published to each queue, in order."""
        self.sent: dict[str, dict[bytes, str]] = defaultdict(dict)
        """What users' publishers were told: confirmed, refused, unknown; by address and name."""
        self.published: dict[AmqpBroker, list[bytes]] = defaultdict(list)
        """What each of them asked for, in order."""
        self.unconfirmed: Counter[tuple[str, bytes]] = Counter()
        """Publishes of runtimes that broke on the wire."""
        self.copies: set[Message] = set()
        """Messages in the queue that are not the first of their name."""
        self.present: dict[Message, HandOver] = {}
        """The last hand-over of each message."""
        self.bases: dict[Message, int] = {}
        self.stolen = False
        """A connection broke: then the queue may have given a message to others before its handler hears of it."""
        self.running: set[Message] = set()
        self.last: dict[tuple[Consumer, BrokersLink], int] = {}

    def check(self, holds: bool, what: object) -> None:
        """Note what is wrong; an exception here would be the broker's, or an answer of a handler."""
        if not holds:
            self.wrong.append(str(what))

    # --- the broker

    def on_stored(self, queue: str, message: Message) -> None:
        name = name_of(message.raw)
        if queue == self.queue and name in self.stored[queue]:
            self.copies.add(message)
        self.stored[queue].append(name)

    def on_handed(self, link: BrokersLink, message: Message) -> int:
        """The message is on its way; the number of the hand-over."""
        first = not message.returned
        it = HandOver(len(self.handed), name_of(message.raw), message, message.count, first, link)
        self.handed.append(it)
        self.present[message] = it
        return it.number

    def on_said(self, message: Message, disposition: Disposition | None) -> None:
        it = self.present[message]
        self.check(it.said is None and not it.returned, f"said twice, or when it was back: {it}")
        if disposition is None:
            self.check(False, f"settled without an outcome: {it}")
            return
        it.said = disposition.state
        if self.at_most_once:
            self.check(it.said is State.ACCEPTED, f"not accepted: {it}")
            return
        if it.fate is None:
            self.check(False, f"said without a plan: {it}")
            return
        verb = it.fate.verb
        self.check(it.said is state_of(verb) or (it.said is State.MODIFIED and bool(it.fate.before)), f"said: {it}")
        if it.said is State.MODIFIED:
            delayed = isinstance(verb, Modified) and verb.deliver_after is not None
            right = disposition.failed and not disposition.undeliverable and bool(disposition.annotations) == delayed
            self.check(right, f"{disposition}: {it}")

    def on_returned(self, message: Message, *, failed: bool) -> None:
        it = self.present[message]
        self.check(it.said is None and not it.returned, f"back twice, or after it was said: {it}")
        it.returned = "broken" if failed else "detached"

    def on_unconfirmed(self, address: str, letter: Letter) -> None:
        """A publish broke on the wire; one of a runtime is tried again."""
        if letter.original is not None:
            self.unconfirmed[address, letter.headers["message-id"]] += 1

    # --- the runtime

    def consumer(self, name: str, source: AmqpSource, *, concurrency: int, size: int, rules: AmqpRules) -> Consumer:
        """Watch a subscription that is about to be made: its plans, and (by `observer`) its events."""
        limit = source.limit(concurrency, size or 1)
        consumer = Consumer(name, source.name, limit, concurrency, size, source.copies, rules)
        self.consumers.append(consumer)
        decide = source.decide

        def deciding(outcome: Outcome | DeadLetter, delivery: Delivery[Any], policy: Policy) -> Plan[Verb]:
            plan = decide(outcome, delivery, policy)
            self.on_decided(self.handed[number_of(delivery)], plan)
            return plan

        source.decide = deciding  # type: ignore[method-assign]
        return consumer

    def observer(self, event: Event) -> None:
        """Hear a runtime."""
        if not isinstance(event, Booked):
            return
        consumer = next(each for each in self.consumers if each.name == event.subscription)
        consumer.folded.enter(event.entry)
        waiting = consumer.folded.owed - consumer.folded.published - consumer.folded.lost
        self.check(0 <= waiting <= consumer.room, f"{waiting} copies wait in room for {consumer.room}")
        for delivery in event.deliveries:
            it = self.handed[number_of(delivery)]
            if isinstance(event.entry, Took):
                self.on_taken(it, consumer, delivery)
            elif isinstance(event.entry, Ended):
                self.on_ended(it, event.entry.line)

    def on_taken(self, it: HandOver, consumer: Consumer, delivery: Delivery[Any]) -> None:
        self.check(it.by is None, f"taken twice: {it}")
        it.by, it.attempt, it.counted = consumer, delivery.attempt, delivery.redelivery_count is not None
        says = not it.first or it.message.raw.startswith(_HEADER)
        count = it.count if says and (rules_of(it).counts or is_sequence(it.name)) else None
        self.check(delivery.redelivery_count == count, f"{delivery.redelivery_count}, and {count} is the count: {it}")
        base = it.attempt - 1 - (count or 0)
        known = self.bases.setdefault(it.message, base)
        self.check(base == known, f"copies count {base}, and counted {known} before: {it}")
        if it.message not in self.copies:
            self.check(base == 0, f"{base} copies, and it is none: {it}")
        elif it.first:
            of = [each.attempt for each in self.handed if each.name == it.name and publishes(each, "copy")]
            self.check(base in of, f"a copy counts {base}, those that were copied {of}: {it}")

    def on_decided(self, it: HandOver, plan: Plan[Verb]) -> None:
        """A plan was made: only for an answer, once, and that of the table."""
        self.check(it.fate is None, f"decided twice: {it}")
        rules = rules_of(it)
        if rules.undecodable(it.name):
            it.ending = rules.on_undecodable
        if not isinstance(it.ending, Outcome | DeadLetter):
            self.check(False, f"decided without an answer: {it}")
            return
        fate = it.fate = rules.becomes(it.ending, it.attempt, counted=it.counted)
        self.check((plan.line, plan.verb) == (fate.line, fate.verb), f"{plan} for {it}")
        steps = [type(each) for each in (*plan.before, *plan.after)]
        self.check(steps == [Wait] * fate.waits + [Publish] * bool(fate.before or fate.after), f"{plan} for {it}")
        self.check(bool(plan.after) == bool(fate.after), f"{plan} for {it}")
        self.check(plan.instead == (Modified() if plan.before else None), f"{plan} for {it}")

    def on_ended(self, it: HandOver, line: Line) -> None:
        self.check(it.line is None, f"ended twice: {it}")
        it.line, it.ended_at = line, trio.current_time()
        if line in SAID and not self.at_most_once:
            self.check(it.said is not None, f"booked as {line.value}, and the broker has heard nothing: {it}")

    # --- handlers

    @contextmanager
    def call(self, consumer: Consumer, deliveries: Sequence[Delivery[Any]]) -> Generator[Call, None, None]:
        """A handler was called, and runs in the block; what it returns is to be put into `result`."""
        its = [self.handed[number_of(each)] for each in deliveries]
        consumer.running += 1
        self.check(consumer.running <= consumer.concurrency, f"{consumer.name}: more handlers than concurrency")
        messages = {each.message for each in its}
        self.check(self.stolen or not messages & self.running, f"two handlers at once have one of {its}")
        self.running |= messages
        for it in its:
            it.calls += 1
            self.check(it.by is consumer and it.calls == 1 and it.line is None, f"handler called: {it}")
            self.check(not consumer.rules.undecodable(it.name), f"handler called for what is undecodable: {it}")
            if consumer.concurrency == 1:
                self.check(it.number > self.last.get((consumer, it.link), -1), f"out of order: {it}")
                self.last[consumer, it.link] = it.number
        call = Call(tuple((each.name.decode(), each.number) for each in its))
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


def name_of(raw: bytes) -> bytes:
    """The message's name; empty: it has none."""
    found = NAME.search(raw)
    return b"" if found is None else found[0]


def rules_of(it: HandOver) -> AmqpRules:
    """Those of who took it."""
    assert it.by is not None
    assert isinstance(it.by.rules, AmqpRules)
    return it.by.rules


def publishes(it: HandOver, what: str) -> bool:
    """Does the fate of this one publish a `copy`, a `dead` letter?"""
    return it.fate is not None and what in (it.fate.before, it.fate.after)


def number_of(delivery: Delivery[Any]) -> int:
    """Which hand-over it is."""
    raw: bytes = delivery._handle.raw
    found = [scalar(raw, items(raw, at)[STAMP]) for code, _, at, _ in walk(raw) if code == DELIVERY_ANNOTATIONS]
    assert len(found) == 1
    assert isinstance(found[0], int)
    return found[0]
