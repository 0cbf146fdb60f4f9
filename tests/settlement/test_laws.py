"""Laws that hold for every transport, tried on small pure models of the four brokers.

A model holds one message, hands it out with the counters that its broker would report, and carries out plans. It knows
nothing of the tables: what a verb does to a message is written here from the specification.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from settlement import amqp, memory, pubsub, sql
from settlement.delays import Copies, Hold, Native, Scheduled, Stored
from settlement.delivery import Delivery, Letter, name_of
from settlement.ledger import Line
from settlement.outcomes import Ack, Drop, Retry, RetryAfter
from settlement.plans import CapReached, Plan, Publish, Wait
from settlement.policy import DeadLetter, Ending, Policy
from tests.weather.schedule import sized

some = settings(database=None, deadline=None, max_examples=20)
many = settings(database=None, deadline=None, max_examples=sized(fast=50, full=150, long=150))

HEADER = "x-ruststream-retry-count"
DEAD = "dead"

Decide = Callable[[Ending, Delivery[Any], Policy], Plan[Any]]


@attrs.frozen
class Elsewhere:
    """A publisher of another transport."""

    name: str


# --- the models


@attrs.define
class Model(ABC):
    """A broker with one message."""

    decide: Decide
    ready: list[tuple[Mapping[str, bytes], int | None]]
    """What can be delivered: headers, and the broker's own counter where it has one."""
    dead: list[Mapping[str, bytes]] = attrs.field(factory=list)
    dead_counter: int | None = None
    """The counter of the message that was moved, not published, to the dead letter."""
    taken: tuple[Mapping[str, bytes], int | None] = ({}, None)

    def receive(self, source: str = "orders") -> Delivery[bytes]:
        """Hand out the next one."""
        headers, counter = self.taken = self.ready.pop(0)
        redeliveries = self.reported(counter)
        return Delivery(
            body=b"body",
            message=b"body",
            headers=headers,
            attempt=int(headers.get(HEADER, b"0")) + (redeliveries or 0) + 1,  # DESIGN 6, Counting
            redelivery_count=redeliveries,
            source=source,
            id="7",
            key=None,
        )

    def reported(self, counter: int | None) -> int | None:
        """How often the broker says that it delivered before."""
        return counter

    def put_back(self, more: int) -> None:
        headers, counter = self.taken
        self.ready.append((headers, None if counter is None else counter + more))

    def move(self) -> None:
        headers, self.dead_counter = self.taken
        self.dead.append(headers)

    def publish(self, step: Publish) -> None:
        if name_of(step.to) == DEAD:
            self.dead.append(step.letter.headers)
        else:
            self.ready.append((step.letter.headers, self.counter_of_copies()))

    def counter_of_copies(self) -> int | None:
        raise AssertionError("this broker moves messages itself: no copies")

    @abstractmethod
    def say(self, verb: Any) -> None:
        """What `verb` does to the message that is taken."""

    @abstractmethod
    def leave_unsettled(self) -> None:
        """What becomes of it when nobody answers."""

    def carry_out(self, plan: Plan[Any], *, cut: bool = False) -> None:
        """Do what the plan says; `cut`: a drain ended before a step of `before` succeeded."""
        if cut and plan.before:
            self.say(plan.instead)
            return
        for step in plan.before:
            if isinstance(step, Publish):
                self.publish(step)
        if plan.verb is not None:
            self.say(plan.verb)
        for step in plan.after:
            if isinstance(step, Publish):
                self.publish(step)


@attrs.define
class Amqp(Model):
    """A queue of an AMQP broker; the counter is the header section's delivery-count, None without a section."""

    copies_have_section: bool = False
    counts: bool = True
    """Does *modified* raise delivery-count, and write a section where there was none (A-1.2, A-3.4)?"""

    def counter_of_copies(self) -> int | None:
        return 0 if self.copies_have_section else None

    def say(self, verb: Any) -> None:
        match verb:
            case amqp.Modified():
                if self.counts:
                    headers, counter = self.taken
                    self.ready.append((headers, (counter or 0) + 1))
                else:
                    self.put_back(0)
            case amqp.Accepted() | amqp.Rejected():
                pass
            case _:
                raise AssertionError(verb)

    def leave_unsettled(self) -> None:
        self.put_back(0)  # the broker requeues


@attrs.define
class Sql(Model):
    """A row; the counter is its attempt column, None without one."""

    counts_at_claim: bool = False

    def receive(self, source: str = "orders") -> Delivery[bytes]:
        delivery = super().receive(source)
        headers, counter = self.taken
        if self.counts_at_claim and counter is not None:  # S-2.5: reported is the value before the claim
            self.taken = (headers, counter + 1)
        return delivery

    def reported(self, counter: int | None) -> int | None:
        return None if counter is None else counter - 1  # S-1.2: a fresh row holds 1

    def say(self, verb: Any) -> None:
        match verb:
            case sql.PutBack(count=count) | sql.Delay(count=count):
                self.put_back(int(count))
            case sql.MoveToGroup(to) | sql.MoveToTable(to):
                assert to == DEAD
                self.move()
            case sql.Finish():
                pass
            case _:
                raise AssertionError(verb)

    def leave_unsettled(self) -> None:
        self.put_back(0)  # S-4.3: what a claim has counted stays counted


@attrs.define
class PubSub(Model):
    """A subscription; the counter is the service's delivery attempt, None without a dead-letter policy."""

    cap: int | None = None

    def reported(self, counter: int | None) -> int | None:
        return None if counter is None else counter - 1

    def say(self, verb: Any) -> None:
        match verb:
            case pubsub.Nack():
                if self.cap is not None and self.taken[1] is not None and self.taken[1] >= self.cap:
                    self.move()
                else:
                    self.put_back(1)
            case pubsub.Acknowledge():
                pass
            case _:
                raise AssertionError(verb)

    def leave_unsettled(self) -> None:
        self.say(pubsub.Nack())  # DESIGN 6: nacked in the goodbye


@attrs.define
class Memory(Model):
    """The in-memory queue, which counts."""

    def counter_of_copies(self) -> int | None:
        return 0

    def say(self, verb: Any) -> None:
        match verb:
            case memory.PutBack():
                self.put_back(1)
            case memory.Accept() | memory.Reject():
                pass
            case _:
                raise AssertionError(verb)

    def leave_unsettled(self) -> None:
        self.put_back(0)


@attrs.frozen
class Case:
    """A transport as it may be met."""

    name: str
    start: Callable[[int | None], Model]
    """A fresh model with one message; Pub/Sub's own service must know the cap."""
    caps: tuple[int, int] = (1, 8)
    half: bool = False
    """May a cap stand without a dead letter?"""


def _decide(table: Any, facts: Any) -> Decide:
    return lambda outcome, delivery, policy: table.decide(outcome, delivery, facts, policy)


DELAYS: dict[str, amqp.Delays] = {
    "Copies": Copies(),
    "Hold": Hold(4, max_delay=60.0),
    "Native": Native(),
    "Scheduled": Scheduled("x-opt-delivery-delay"),
    "Stored": Stored(Elsewhere("waiting")),
}
PEERS: dict[str, tuple[int | None, bool, bool]] = {
    "a foreign message": (0, False, True),
    "a durable one, whose copies have a section": (0, True, True),
    "ours, counted once it is redelivered": (None, False, True),
    "a queue that never counts": (None, False, False),
}


def _amqp(facts: amqp.Facts, first: int | None, section: bool, counts: bool, _cap: int | None) -> Model:
    return Amqp(_decide(amqp, facts), [({}, first)], copies_have_section=section, counts=counts)


def _sql(facts: sql.Facts, _cap: int | None) -> Model:
    at_claim = not isinstance(facts.claim, sql.RowLock)
    return Sql(_decide(sql, facts), [({}, 1 if facts.has_attempt else None)], counts_at_claim=at_claim)


def _pubsub(cap: int | None) -> Model:
    facts = pubsub.Facts("orders", cap)
    return PubSub(_decide(pubsub, facts), [({}, None if cap is None else 1)], cap=cap)


def _memory(facts: memory.Facts, _cap: int | None) -> Model:
    return Memory(_decide(memory, facts), [({}, 0)])


CLAIMS: dict[str, sql.ClaimForm] = {
    "row lock": sql.RowLock(),
    "lease": sql.Lease(),
    "advisory": sql.AdvisoryLock("order-{id}"),
}
CASES = [
    *(
        Case(f"amqp, {name}, {peer}", partial(_amqp, amqp.Facts("orders", delays), *PEERS[peer]), half=True)
        for name, delays in DELAYS.items()
        for peer in PEERS
    ),
    *(
        Case(
            f"amqp at most once, {name}",
            partial(_amqp, amqp.Facts("orders", DELAYS[name], amqp.AT_MOST_ONCE), None, False, True),
            half=True,
        )
        for name in ("Copies", "Scheduled", "Stored")
    ),
    *(
        Case(
            f"sql, {name}, {'with' if delays else 'without'} retry_after, {'a group' if groups else 'a table'}",
            partial(_sql, sql.Facts("orders", claim, has_attempt=True, has_retry_after=delays, has_group=groups)),
        )
        for name, claim in CLAIMS.items()
        for delays in (True, False)
        for groups in (True, False)
    ),
    Case("pubsub", _pubsub, caps=(5, 12)),
    Case("memory, Native", partial(_memory, memory.Facts("orders")), half=True),
    Case("memory, Copies", partial(_memory, memory.Facts("orders", Copies())), half=True),
]
each_case = pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])

delays = st.floats(0, 4000)  # beyond Hold's max_delay and Pub/Sub's max_lease too
retries = st.one_of(st.just(Retry()), st.builds(RetryAfter, delays))


# --- counting


@each_case
@some
@given(data=st.data())
def test_under_cap_n_the_handler_is_called_n_times(case: Case, data: st.DataObject) -> None:
    """DESIGN 6, Counting; A-4.10, S-4.2, P-3.8: any mix of Retry and RetryAfter, and then once into the dead letter."""
    cap = data.draw(st.integers(*case.caps), label="cap")
    mix = data.draw(st.lists(retries, min_size=1, max_size=12), label="outcomes")
    has_dead_letter = data.draw(st.booleans(), label="dead letter") if case.half else True
    policy = Policy(max_attempts=cap, dead_letter=DEAD if has_dead_letter else None)
    model = case.start(cap)

    seen: list[int] = []
    for outcome in cycle(mix):
        if not model.ready or len(seen) > cap:
            break
        delivery = model.receive()
        seen.append(delivery.attempt)
        model.carry_out(model.decide(outcome, delivery, policy))

    assert seen == list(range(1, cap + 1))
    assert len(model.dead) == int(has_dead_letter)
    assert model.ready == []


@pytest.mark.parametrize(("name", "left"), [("row lock", 3), ("lease", 4), ("advisory", 4)])
def test_the_attempt_that_a_dead_row_keeps(name: str, left: int) -> None:
    """S-4.2, S-4.7: a row lock leaves 3 after cap 3, a lease and an advisory lock have counted the last claim too."""
    model = _sql(sql.Facts("orders", CLAIMS[name], has_attempt=True, has_retry_after=True, has_group=True), None)
    while model.ready:
        delivery = model.receive()
        model.carry_out(model.decide(Retry(), delivery, Policy(max_attempts=3, dead_letter=DEAD)))

    assert model.dead_counter == left


@pytest.mark.parametrize(("name", "spent"), [("row lock", 0), ("lease", 1), ("advisory", 1)])
def test_what_a_crash_spends(name: str, spent: int) -> None:
    """S-4.3: nothing under a row lock, one attempt under a lease and an advisory lock."""
    model = _sql(sql.Facts("orders", CLAIMS[name], has_attempt=True, has_retry_after=True, has_group=True), None)
    first = model.receive().attempt
    model.leave_unsettled()

    assert model.receive().attempt - first == spent


@each_case
@some
@given(data=st.data())
def test_attempts_never_fall(case: Case, data: st.DataObject) -> None:
    """DESIGN 6, Counting; OQ-2: not by copies, redeliveries, crashes or drains, with a cap or without one."""
    cap = data.draw(st.none() | st.integers(*case.caps), label="cap")
    model = case.start(cap)
    policy = Policy(max_attempts=cap, dead_letter=None if cap is None else DEAD)
    events = data.draw(
        st.lists(st.tuples(retries, st.sampled_from(["done", "cut", "crash"])), max_size=15), label="events"
    )

    seen = [1]
    for outcome, event in events:
        if not model.ready:
            break
        delivery = model.receive()
        seen.append(delivery.attempt)
        if event == "crash":
            model.leave_unsettled()
        else:
            model.carry_out(model.decide(outcome, delivery, policy), cut=event == "cut")

    assert seen == sorted(seen)


# --- what holds for every plan that there is

VERBS: dict[str, tuple[type, ...]] = {
    "amqp": (amqp.Accepted, amqp.Modified, amqp.Rejected),
    "sql": (sql.Finish, sql.PutBack, sql.Delay, sql.MoveToGroup, sql.MoveToTable),
    "pubsub": (pubsub.Acknowledge, pubsub.Nack),
    "memory": (memory.Accept, memory.PutBack, memory.Reject),
}
KEEPS = (
    amqp.Modified,
    sql.PutBack,
    sql.Delay,
    sql.MoveToGroup,
    sql.MoveToTable,
    pubsub.Nack,
    memory.PutBack,
)
"""Verbs after which the message is still with the broker."""


@attrs.frozen
class Decision:
    """One cell, somewhere in the tables."""

    transport: str
    facts: Any
    outcome: Ending
    delivery: Delivery[bytes]
    policy: Policy
    plan: Plan[Any]

    @property
    def at_most_once(self) -> bool:
        return isinstance(self.facts, amqp.Facts) and self.facts.settle is amqp.AT_MOST_ONCE

    @property
    def at_cap(self) -> bool:
        cap = self.policy.max_attempts
        return isinstance(self.outcome, Retry | RetryAfter) and cap is not None and self.delivery.attempt >= cap


amqp_delays: st.SearchStrategy[amqp.Delays] = st.one_of(
    st.sampled_from([Copies(), Native(), Scheduled("x-opt-delivery-delay"), Stored(Elsewhere("waiting"))]),
    st.builds(Hold, st.integers(1, 9), st.floats(0.1, 5000)),
)
memory_delays: st.SearchStrategy[memory.Delays] = st.sampled_from([Native(), Copies()])
claims = st.sampled_from(list(CLAIMS.values()))
dead_letters: st.SearchStrategy[Any] = st.none() | st.just(DEAD) | st.just(Elsewhere("audit"))
policies = st.builds(Policy, max_attempts=st.none() | st.integers(1, 9), dead_letter=dead_letters)


@st.composite
def decisions(draw: st.DrawFn) -> Decision:
    """Every legal combination of outcome, delivery, facts and policy."""
    transport = draw(st.sampled_from(list(VERBS)))
    policy = draw(policies)
    facts: Any
    table: Any
    match transport:
        case "amqp":
            table = amqp
            delays = draw(amqp_delays)
            may_let_go = not isinstance(delays, Hold | Native)
            settle = draw(st.sampled_from(amqp.Settle)) if may_let_go else amqp.AT_LEAST_ONCE
            facts = amqp.Facts("orders", delays, settle)
        case "sql":
            table = sql
            if policy.max_attempts is None or policy.dead_letter is None:
                policy = Policy()
            counted = True if policy.max_attempts is not None else draw(st.booleans())
            facts = sql.Facts("orders", draw(claims), counted, draw(st.booleans()), draw(st.booleans()))
            sql.check(facts, policy)
        case "pubsub":
            table = pubsub
            declared = draw(st.none() | st.integers(5, 100))
            policy = Policy(max_attempts=declared, dead_letter=None if declared is None else DEAD)
            cap = declared if declared is not None else draw(st.none() | st.integers(5, 100))
            facts = pubsub.Facts("orders", cap, draw(st.floats(0.1, 5000)))
            pubsub.check(facts, policy)
        case _:
            table = memory
            facts = memory.Facts("orders", draw(memory_delays))
    copies, count = draw(st.integers(0, 12)), draw(st.none() | st.integers(0, 12))
    delivery = Delivery(
        body=draw(st.binary(max_size=3)),
        message=b"",
        headers={HEADER: b"%d" % copies} if copies else {"trace": b"7"},
        attempt=copies + (count or 0) + 1,
        redelivery_count=count,
        source="orders",
        id="7",
        key=draw(st.none() | st.just("customer")),
    )
    endings: list[st.SearchStrategy[Ending]] = [st.builds(Ack), st.builds(Drop), retries]
    if policy.dead_letter is not None:
        endings.append(st.builds(DeadLetter))
    outcome = draw(st.one_of(endings))
    return Decision(transport, facts, outcome, delivery, policy, table.decide(outcome, delivery, facts, policy))


@many
@given(decisions())
def test_a_plan_exists_for_every_legal_combination(decision: Decision) -> None:
    """DESIGN 0.2: `decide` is total, its steps are Wait and Publish, and a log can print every plan."""
    plan = decision.plan

    assert isinstance(plan.line, Line)
    assert all(isinstance(step, Wait | Publish) for step in (*plan.before, *plan.after))
    assert str(plan)
    assert plan.notice is None or str(plan.notice)


@many
@given(decisions())
def test_at_most_one_thing_is_said(decision: Decision) -> None:
    """C-1.1, A-2, DESIGN 0.2: one verb of the own transport; none, and nothing before it, at most once."""
    plan = decision.plan

    if decision.at_most_once:
        assert (plan.verb, plan.before, plan.instead) == (None, (), None)
    else:
        assert isinstance(plan.verb, VERBS[decision.transport])


@many
@given(decisions())
def test_a_drain_always_knows_what_to_say(decision: Decision) -> None:
    """DESIGN 3.6: where a step stands before the verb, a retry verb stands ready for a drain that ends first."""
    plan = decision.plan

    assert bool(plan.before) == (plan.instead is not None)
    assert plan.instead is None or isinstance(plan.instead, KEEPS)


@many
@given(decisions())
def test_a_dead_letter_is_published_before_its_original_goes(decision: Decision) -> None:
    """DESIGN 6, C-4.9: published as it arrived and confirmed, then the verb; or the database moves the row itself."""
    plan, policy = decision.plan, decision.policy
    if plan.line is not Line.DEAD_LETTERED:
        return
    if isinstance(plan.verb, sql.MoveToGroup | sql.MoveToTable):
        assert plan.before == plan.after == ()
        return
    (step,) = plan.after if decision.at_most_once else plan.before
    assert isinstance(step, Publish)
    assert step.to is policy.dead_letter
    assert decision.at_most_once or plan.after == ()
    assert repr(step.letter) == repr(Letter.of(decision.delivery))


@many
@given(decisions())
def test_no_plan_loses_an_at_least_once_delivery(decision: Decision) -> None:
    """DESIGN 6: only Ack, Drop, a cap without a dead letter, and the window of `Copies` let an original go alone."""
    plan, outcome = decision.plan, decision.outcome
    still_there = isinstance(plan.verb, KEEPS)
    replaced = any(isinstance(step, Publish) for step in plan.before)
    if decision.at_most_once or still_there or replaced:
        return
    if isinstance(outcome, Ack | Drop):
        return
    if decision.at_cap and decision.policy.dead_letter is None:
        assert plan.notice == CapReached(decision.delivery.attempt, None)
        return
    assert isinstance(outcome, RetryAfter)
    assert isinstance(decision.facts.delays, Copies)
    wait, publish = plan.after
    assert isinstance(wait, Wait)
    assert isinstance(publish, Publish)


@many
@given(decisions())
def test_only_copies_leave_something_to_do_after_the_verb(decision: Decision) -> None:
    """DESIGN 0.3: everything else is done by the time that the verb was said."""
    plan = decision.plan

    if plan.after and not decision.at_most_once:
        assert isinstance(decision.facts.delays, Copies)
        assert plan.line is Line.DELAYED


@many
@given(decisions())
def test_the_cap_warns_once_and_only_when_it_is_reached(decision: Decision) -> None:
    """C-3.3, C-3.5, A-4.7: never for Ack, Drop, DeadLetter() or a D without a cap; Pub/Sub's cap is the service's."""
    warned = isinstance(decision.plan.notice, CapReached)

    assert warned == (decision.at_cap and decision.transport != "pubsub")


@many
@given(decisions())
def test_every_copy_counts_the_delivery_that_it_copies(decision: Decision) -> None:
    """DESIGN 6, Counting: the header of every copy is the attempt; body and key stay."""
    for step in (*decision.plan.before, *decision.plan.after):
        if isinstance(step, Publish) and decision.plan.line is not Line.DEAD_LETTERED:
            assert step.letter.headers[HEADER] == b"%d" % decision.delivery.attempt
            assert (step.letter.body, step.letter.key) == (decision.delivery.body, decision.delivery.key)
            assert step.letter.original is decision.delivery


LINES: dict[type, frozenset[Line]] = {
    Ack: frozenset({Line.ACKED, Line.REFUSED}),
    Drop: frozenset({Line.DROPPED, Line.REFUSED}),
    Retry: frozenset({Line.RETRIED, Line.DROPPED, Line.DEAD_LETTERED, Line.REFUSED}),
    RetryAfter: frozenset({Line.DELAYED, Line.RETRIED, Line.DROPPED, Line.DEAD_LETTERED, Line.REFUSED}),
    DeadLetter: frozenset({Line.DEAD_LETTERED}),
}


@many
@given(decisions())
def test_a_plan_ends_in_a_line_of_its_outcome(decision: Decision) -> None:
    """DESIGN 3.9: *refused* at most once alone; superseded, unsettled and unknown are nobody's decision."""
    line = decision.plan.line

    assert line in LINES[type(decision.outcome)]
    assert line is not Line.REFUSED or decision.at_most_once
    assert line is not Line.ACKED or isinstance(decision.outcome, Ack)
