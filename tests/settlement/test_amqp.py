"""AMQP's decision table, cell by cell. Each expected plan is written by hand from the rule that its row names.

Letters compare by identity, so plans are compared by what they print (`repr` shows every field).
"""

from __future__ import annotations

from typing import NamedTuple

import attrs
import pytest

from settlement import amqp
from settlement.amqp import AT_MOST_ONCE, LONGEST, Accepted, Facts, Modified, Rejected, Verb, decide
from settlement.delays import Copies, Hold, Native, Scheduled, Stored
from settlement.delivery import Delivery, Letter
from settlement.ledger import Line
from settlement.outcomes import Ack, Drop, Retry, RetryAfter
from settlement.plans import CapReached, DelayIgnored, Plan, Publish, Unsayable, Wait
from settlement.policy import DeadLetter, Ending, Policy

HEADER = "x-ruststream-retry-count"


@attrs.frozen
class Elsewhere:
    """A publisher of another transport."""

    name: str


def arrived(attempt: int, count: int | None, headers: dict[str, bytes]) -> Delivery[bytes]:
    return Delivery(
        body=b"body",
        message=b"body",
        headers=headers,
        attempt=attempt,
        redelivery_count=count,
        source="orders",
        id="7",
        key="customer",
    )


OURS = arrived(1, None, {"trace": b"7"})
"""Sent by our own publisher: no header section, so the broker does not count it (A-3.2)."""
FOREIGN = arrived(1, 0, {"trace": b"7"})
COPY = arrived(2, None, {"trace": b"7", HEADER: b"1"})
BOTH_COUNTS = arrived(3, 1, {"trace": b"7", HEADER: b"1"})
"""A copy that the broker has redelivered (OQ-2)."""
LAST = arrived(4, None, {"trace": b"7", HEADER: b"3"})
LAST_COUNTED = arrived(4, 3, {"trace": b"7"})
BEYOND = arrived(9, 8, {"trace": b"7"})

FREE = Policy()
CAP = Policy(max_attempts=4)
BOTH = Policy(max_attempts=4, dead_letter="orders.dead")
ONLY_D = Policy(dead_letter="orders.dead")
ELSEWHERE = Policy(max_attempts=4, dead_letter=Elsewhere("audit"))
ONCE = Policy(max_attempts=1)
ONCE_D = Policy(max_attempts=1, dead_letter="orders.dead")

COPIES = Facts("/queues/orders")
HOLD = Facts("/queues/orders", Hold(8, max_delay=600.0))
NATIVE = Facts("/queues/orders", Native())
SCHEDULED = Facts("/queues/orders", Scheduled("x-opt-delivery-delay"))
STORED = Facts("/queues/orders", Stored(Elsewhere("waiting")))


def copy(of: Delivery[bytes], header: bytes, deliver_after: float | None = None) -> Letter:
    return Letter(b"body", {"trace": b"7", HEADER: header}, "customer", deliver_after, of)


def to_own(of: Delivery[bytes], header: bytes, deliver_after: float | None = None) -> Publish:
    return Publish(copy(of, header, deliver_after), "/queues/orders")


def to_table(of: Delivery[bytes], header: bytes, deliver_after: float) -> Publish:
    return Publish(copy(of, header, deliver_after), Elsewhere("waiting"))


def to_dead(of: Delivery[bytes]) -> Publish:
    return Publish(Letter(b"body", of.headers, "customer", None, of), "orders.dead")


class Row(NamedTuple):
    rule: str
    outcome: Ending
    delivery: Delivery[bytes]
    facts: Facts
    policy: Policy
    expected: Plan[Verb]


def dead(of: Delivery[bytes], notice: CapReached | None) -> Plan[Verb]:
    return Plan(Line.DEAD_LETTERED, Accepted(), (to_dead(of),), (), Modified(), notice)


def dropped(attempt: int) -> Plan[Verb]:
    return Plan(Line.DROPPED, Rejected(), notice=CapReached(attempt, None))


AT_LEAST_ONCE_TABLE = [
    Row("A-1.1: ack is accepted", Ack(), OURS, COPIES, FREE, Plan(Line.ACKED, Accepted())),
    Row("A-1.1, C-3.3: ack does not read the cap", Ack(), LAST, COPIES, BOTH, Plan(Line.ACKED, Accepted())),
    Row("A-1.4: drop is rejected", Drop("why"), OURS, COPIES, FREE, Plan(Line.DROPPED, Rejected())),
    Row("A-1.4, C-3.3: drop does not read the cap", Drop(), LAST, COPIES, BOTH, Plan(Line.DROPPED, Rejected())),
    Row("A-4.1: no cap, counted", Retry(), FOREIGN, COPIES, FREE, Plan(Line.RETRIED, Modified())),
    Row("A-4.1: no cap, not counted", Retry(), OURS, COPIES, FREE, Plan(Line.RETRIED, Modified())),
    Row("A-4.1: no cap, for ever", Retry(), BEYOND, COPIES, FREE, Plan(Line.RETRIED, Modified())),
    Row("A-4.2: below the cap, counted", Retry(), FOREIGN, COPIES, BOTH, Plan(Line.RETRIED, Modified())),
    Row("A-4.2: the same without D", Retry(), FOREIGN, COPIES, CAP, Plan(Line.RETRIED, Modified())),
    Row("A-4.2, OQ-2: a copy that is counted", Retry(), BOTH_COUNTS, COPIES, BOTH, Plan(Line.RETRIED, Modified())),
    Row(
        "A-4.3 by DESIGN 6: below the cap, not counted: publish first, then accept",
        Retry(),
        OURS,
        COPIES,
        BOTH,
        Plan(Line.RETRIED, Accepted(), (to_own(OURS, b"1"),), (), Modified()),
    ),
    Row(
        "A-4.3 by DESIGN 6: a copy's header is the attempt that it copies",
        Retry(),
        COPY,
        COPIES,
        CAP,
        Plan(Line.RETRIED, Accepted(), (to_own(COPY, b"2"),), (), Modified()),
    ),
    Row("A-4.5: cap and D, not counted", Retry(), LAST, COPIES, BOTH, dead(LAST, CapReached(4, "orders.dead"))),
    Row(
        "A-4.5: cap and D, counted",
        Retry(),
        LAST_COUNTED,
        COPIES,
        BOTH,
        dead(LAST_COUNTED, CapReached(4, "orders.dead")),
    ),
    Row("A-4.5: beyond the cap", Retry(), BEYOND, COPIES, BOTH, dead(BEYOND, CapReached(9, "orders.dead"))),
    Row("C-3.2: cap 1 with D", Retry(), OURS, COPIES, ONCE_D, dead(OURS, CapReached(1, "orders.dead"))),
    Row("C-4.5: at the cap d is ignored", RetryAfter(5), LAST, COPIES, BOTH, dead(LAST, CapReached(4, "orders.dead"))),
    Row(
        "DESIGN 2: D may be a publisher of another transport",
        Retry(),
        LAST,
        COPIES,
        ELSEWHERE,
        Plan(
            Line.DEAD_LETTERED,
            Accepted(),
            (Publish(Letter(b"body", {"trace": b"7", HEADER: b"3"}, "customer", None, LAST), Elsewhere("audit")),),
            (),
            Modified(),
            CapReached(4, "audit"),
        ),
    ),
    Row("A-4.6: cap without D", Retry(), LAST, COPIES, CAP, dropped(4)),
    Row("A-4.6: the same, counted", Retry(), LAST_COUNTED, COPIES, CAP, dropped(4)),
    Row("A-4.6: d is ignored", RetryAfter(5), LAST, COPIES, CAP, dropped(4)),
    Row("C-3.2: cap 1 without D", RetryAfter(5), OURS, COPIES, ONCE, dropped(1)),
    Row("A-4.7: D without a cap, no warning", Retry(), OURS, COPIES, ONLY_D, dead(OURS, None)),
    Row("A-4.7: the same, counted", Retry(), FOREIGN, COPIES, ONLY_D, dead(FOREIGN, None)),
    Row("A-4.7: no delay", RetryAfter(5), OURS, COPIES, ONLY_D, dead(OURS, None)),
    Row("DESIGN 2: DeadLetter() below the cap, no warning", DeadLetter(), OURS, COPIES, BOTH, dead(OURS, None)),
    Row("DESIGN 2: DeadLetter() at the cap", DeadLetter(), LAST, COPIES, BOTH, dead(LAST, None)),
    Row("DESIGN 2: DeadLetter() without a cap", DeadLetter(), FOREIGN, NATIVE, ONLY_D, dead(FOREIGN, None)),
    Row("C-4.5: no delays at the cap: Hold", RetryAfter(5), LAST, HOLD, BOTH, dead(LAST, CapReached(4, "orders.dead"))),
    Row("A-4.6: no delays at the cap: Native", RetryAfter(5), LAST_COUNTED, NATIVE, CAP, dropped(4)),
    Row("A-4.6: no delays at the cap: Scheduled", RetryAfter(5), LAST, SCHEDULED, CAP, dropped(4)),
    Row("A-4.7: no delays without a cap: Stored", RetryAfter(5), OURS, STORED, ONLY_D, dead(OURS, None)),
    Row(
        "A-1.3, A-4.4: Copies, no cap, not counted",
        RetryAfter(5),
        OURS,
        COPIES,
        FREE,
        Plan(Line.DELAYED, Rejected(), (), (Wait(5.0), to_own(OURS, b"1"))),
    ),
    Row(
        "A-4.4: Copies, no cap, counted: the header takes the broker's count in",
        RetryAfter(5),
        BOTH_COUNTS,
        COPIES,
        FREE,
        Plan(Line.DELAYED, Rejected(), (), (Wait(5.0), to_own(BOTH_COUNTS, b"3"))),
    ),
    Row(
        "A-4.4: Copies, below the cap",
        RetryAfter(5),
        COPY,
        COPIES,
        BOTH,
        Plan(Line.DELAYED, Rejected(), (), (Wait(5.0), to_own(COPY, b"2"))),
    ),
    Row(
        "DESIGN 6: Copies keeps the seed's order for 0 too",
        RetryAfter(0),
        OURS,
        COPIES,
        CAP,
        Plan(Line.DELAYED, Rejected(), (), (Wait(0.0), to_own(OURS, b"1"))),
    ),
    Row(
        "DESIGN 6: Hold, no cap",
        RetryAfter(5),
        OURS,
        HOLD,
        FREE,
        Plan(Line.DELAYED, Modified(), (Wait(5.0),), (), Modified()),
    ),
    Row(
        "DESIGN 6: Hold, below the cap, counted",
        RetryAfter(600),
        FOREIGN,
        HOLD,
        CAP,
        Plan(Line.DELAYED, Modified(), (Wait(600.0),), (), Modified()),
    ),
    Row(
        "DESIGN 6: Hold, below the cap, not counted",
        RetryAfter(5),
        OURS,
        HOLD,
        CAP,
        Plan(Line.DELAYED, Accepted(), (Wait(5.0), to_own(OURS, b"1")), (), Modified()),
    ),
    Row(
        "DESIGN 6: Hold cuts a delay to max_delay",
        RetryAfter(601),
        FOREIGN,
        HOLD,
        CAP,
        Plan(
            Line.DELAYED,
            Modified(),
            (Wait(600.0),),
            (),
            Modified(),
            DelayIgnored(601.0, "longer than Hold(max_delay=600)", 600.0),
        ),
    ),
    Row(
        "DESIGN 6: Hold cuts, not counted",
        RetryAfter(601),
        COPY,
        HOLD,
        BOTH,
        Plan(
            Line.DELAYED,
            Accepted(),
            (Wait(600.0), to_own(COPY, b"2")),
            (),
            Modified(),
            DelayIgnored(601.0, "longer than Hold(max_delay=600)", 600.0),
        ),
    ),
    Row("DESIGN 6: Native, counted", RetryAfter(5), FOREIGN, NATIVE, CAP, Plan(Line.DELAYED, Modified(5.0))),
    Row("DESIGN 6: Native, no cap", RetryAfter(5), OURS, NATIVE, FREE, Plan(Line.DELAYED, Modified(5.0))),
    Row("DESIGN 6: Native, 0", RetryAfter(0), FOREIGN, NATIVE, FREE, Plan(Line.DELAYED, Modified(0.0))),
    Row(
        "DESIGN 6, the law of counting: Native, below the cap, not counted",
        RetryAfter(5),
        OURS,
        NATIVE,
        CAP,
        Plan(Line.DELAYED, Accepted(), (Wait(5.0), to_own(OURS, b"1")), (), Modified()),
    ),
    Row(
        "DESIGN 6: Scheduled, not counted",
        RetryAfter(5),
        OURS,
        SCHEDULED,
        CAP,
        Plan(Line.DELAYED, Accepted(), (to_own(OURS, b"1", 5.0),), (), Modified()),
    ),
    Row(
        "DESIGN 6: Scheduled, counted, no cap",
        RetryAfter(5),
        BOTH_COUNTS,
        SCHEDULED,
        FREE,
        Plan(Line.DELAYED, Accepted(), (to_own(BOTH_COUNTS, b"3", 5.0),), (), Modified()),
    ),
    Row(
        "DESIGN 6: Stored, not counted",
        RetryAfter(5),
        COPY,
        STORED,
        BOTH,
        Plan(Line.DELAYED, Accepted(), (to_table(COPY, b"2", 5.0),), (), Modified()),
    ),
    Row(
        "DESIGN 6: Stored, counted, no cap",
        RetryAfter(0),
        FOREIGN,
        STORED,
        FREE,
        Plan(Line.DELAYED, Accepted(), (to_table(FOREIGN, b"1", 0.0),), (), Modified()),
    ),
    *(
        Row(f"A-4.2: Retry waits under no {each}", Retry(), FOREIGN, facts, CAP, Plan(Line.RETRIED, Modified()))
        for each, facts in (("Hold", HOLD), ("Native", NATIVE), ("Scheduled", SCHEDULED), ("Stored", STORED))
    ),
    *(
        Row(
            f"A-4.3 by DESIGN 6: Retry, not counted, under {each}: to its own address at once",
            Retry(),
            OURS,
            facts,
            CAP,
            Plan(Line.RETRIED, Accepted(), (to_own(OURS, b"1"),), (), Modified()),
        )
        for each, facts in (("Hold", HOLD), ("Native", NATIVE), ("Scheduled", SCHEDULED), ("Stored", STORED))
    ),
]

LET_GO = Facts("/queues/orders", settle=AT_MOST_ONCE)
LET_GO_SCHEDULED = Facts("/queues/orders", Scheduled("x-opt-delivery-delay"), AT_MOST_ONCE)
LET_GO_STORED = Facts("/queues/orders", Stored(Elsewhere("waiting")), AT_MOST_ONCE)


def refused(outcome: str) -> Plan[Verb]:
    return Plan(Line.REFUSED, None, notice=Unsayable(outcome))


def dead_after(of: Delivery[bytes], notice: CapReached | None) -> Plan[Verb]:
    return Plan(Line.DEAD_LETTERED, None, (), (to_dead(of),), None, notice)


GONE = Plan[Verb](Line.REFUSED, None, notice=CapReached(4, None))

AT_MOST_ONCE_TABLE = [
    Row("A-2.2: ack cannot be said", Ack(), OURS, LET_GO, FREE, refused("Ack")),
    Row("A-2.2: drop cannot be said", Drop(), OURS, LET_GO, FREE, refused("Drop")),
    Row("A-2.2, C-3.3: nor at the cap", Drop(), LAST, LET_GO, BOTH, refused("Drop")),
    Row("A-2.3: retry without a cap", Retry(), OURS, LET_GO, FREE, refused("Retry")),
    Row("A-2.3: the same, counted", Retry(), FOREIGN, LET_GO, FREE, refused("Retry")),
    Row(
        "A-2.4: below the cap, not counted",
        Retry(),
        OURS,
        LET_GO,
        CAP,
        Plan(Line.RETRIED, None, (), (to_own(OURS, b"1"),)),
    ),
    Row("A-2.5: below the cap, counted", Retry(), FOREIGN, LET_GO, CAP, refused("Retry")),
    Row(
        "A-2.6: a copy after d, without a cap",
        RetryAfter(5),
        OURS,
        LET_GO,
        FREE,
        Plan(Line.DELAYED, None, (), (Wait(5.0), to_own(OURS, b"1"))),
    ),
    Row(
        "A-2.6: the same, counted",
        RetryAfter(0),
        FOREIGN,
        LET_GO,
        FREE,
        Plan(Line.DELAYED, None, (), (Wait(0.0), to_own(FOREIGN, b"1"))),
    ),
    Row(
        "A-2.6: below the cap",
        RetryAfter(5),
        COPY,
        LET_GO,
        BOTH,
        Plan(Line.DELAYED, None, (), (Wait(5.0), to_own(COPY, b"2"))),
    ),
    Row(
        "A-2.6, DESIGN 6: Scheduled keeps the copy",
        RetryAfter(5),
        COPY,
        LET_GO_SCHEDULED,
        BOTH,
        Plan(Line.DELAYED, None, (), (to_own(COPY, b"2", 5.0),)),
    ),
    Row(
        "A-2.6, DESIGN 6: Stored keeps the copy",
        RetryAfter(5),
        COPY,
        LET_GO_STORED,
        BOTH,
        Plan(Line.DELAYED, None, (), (to_table(COPY, b"2", 5.0),)),
    ),
    Row("A-2.7: cap and D", Retry(), LAST, LET_GO, BOTH, dead_after(LAST, CapReached(4, "orders.dead"))),
    Row("A-2.7: d is ignored", RetryAfter(5), LAST, LET_GO, BOTH, dead_after(LAST, CapReached(4, "orders.dead"))),
    Row("A-2.7: cap without D", Retry(), LAST, LET_GO, CAP, GONE),
    Row("A-2.7: cap without D, d is ignored", RetryAfter(5), LAST_COUNTED, LET_GO_STORED, CAP, GONE),
    Row("A-2.8: D without a cap", Retry(), OURS, LET_GO, ONLY_D, dead_after(OURS, None)),
    Row("A-2.8: D without a cap, d is ignored", RetryAfter(5), FOREIGN, LET_GO, ONLY_D, dead_after(FOREIGN, None)),
    Row("DESIGN 2: DeadLetter()", DeadLetter(), OURS, LET_GO, BOTH, dead_after(OURS, None)),
    Row("DESIGN 2: DeadLetter() at the cap", DeadLetter(), LAST, LET_GO_STORED, ONLY_D, dead_after(LAST, None)),
]


@pytest.mark.parametrize("row", [pytest.param(row, id=row.rule) for row in AT_LEAST_ONCE_TABLE + AT_MOST_ONCE_TABLE])
def test_what_an_outcome_means(row: Row) -> None:
    """A-1 to A-4, C-3, C-4 and DESIGN 6: every cell, the rule in the row."""
    decided = decide(row.outcome, row.delivery, row.facts, row.policy)

    assert repr(row.expected) == repr(decided)


def test_the_modified_that_a_retry_says_is_the_plain_one() -> None:
    """A-1.2: no annotation unless `Native` asks for one."""
    assert Modified().deliver_after is None


@pytest.mark.parametrize(
    ("outcome", "facts", "policy"),
    [
        (Ack(), COPIES, BOTH),
        (Drop(), COPIES, BOTH),
        (Retry(), COPIES, BOTH),
        (Ack(), LET_GO, BOTH),
        (Drop(), LET_GO, BOTH),
        (Retry(), LET_GO, BOTH),
    ],
)
def test_the_hot_path_builds_nothing(outcome: Ending, facts: Facts, policy: Policy) -> None:
    """DESIGN 3.2: the plan of a plain outcome is one constant."""
    assert decide(outcome, FOREIGN, facts, policy) is decide(outcome, FOREIGN, facts, policy)


def test_the_header_of_copies_has_the_name_that_the_broker_was_given() -> None:
    """DESIGN 6, Counting: the header is configurable per broker."""
    plan = decide(Retry(), OURS, Facts("orders", retry_header="x-tries"), CAP)

    (step,) = plan.before
    assert isinstance(step, Publish)
    assert step.letter.headers == {"trace": b"7", "x-tries": b"1"}


def test_a_dead_letter_is_as_it_arrived() -> None:
    """C-4.9: headers unchanged, the retry count present where it was and absent where it was not."""
    for delivery in (LAST, LAST_COUNTED):
        (step,) = decide(Retry(), delivery, COPIES, BOTH).before
        assert isinstance(step, Publish)
        assert delivery.headers is step.letter.headers
        assert delivery is step.letter.original


def test_dead_letter_without_one_is_a_mistake_of_the_caller() -> None:
    """DESIGN 2: no policy can answer so (`Policy` refuses it), so `decide` does not invent a verb."""
    for facts in (COPIES, LET_GO):
        with pytest.raises(ValueError, match="needs a policy with dead_letter"):
            decide(DeadLetter(), OURS, facts, CAP)


@pytest.mark.parametrize("delays", [Hold(1), Native()])
def test_what_was_let_go_cannot_be_held(delays: Hold | Native) -> None:
    """DESIGN 6: `Hold` and `Native` with at most once are a `ValueError` that names what is legal."""
    with pytest.raises(
        ValueError, match=r"^delays must be Copies, Scheduled or Stored at most once.*" + repr(delays)[:4]
    ):
        Facts("orders", delays, AT_MOST_ONCE)


def test_the_defaults_are_the_seeds() -> None:
    """C-15: at least once, and copies."""
    facts = Facts("orders")

    assert (Copies(), amqp.AT_LEAST_ONCE, HEADER) == (facts.delays, facts.settle, facts.retry_header)


@pytest.mark.parametrize("delay", [9.1e15, 1e300, 1.7e308])
@pytest.mark.parametrize("facts", [NATIVE, SCHEDULED, LET_GO_SCHEDULED], ids=["Native", "Scheduled", "at most once"])
def test_a_delay_that_64_bits_cannot_say_is_cut_with_a_word(delay: float, facts: Facts) -> None:
    """DESIGN 6, `delays`: the annotation is milliseconds in 64 bits; a warning, and no error that ends the runtime."""
    plan = decide(RetryAfter(delay), FOREIGN, facts, FREE)
    assert plan.notice == DelayIgnored(delay, "longer than an annotation of 64 bits can say", LONGEST)
    (cut,) = [plan.verb.deliver_after] if isinstance(plan.verb, Modified) else _delays_of(plan)
    assert cut == LONGEST
    assert decide(RetryAfter(LONGEST), FOREIGN, facts, FREE).notice is None


def _delays_of(plan: Plan[Verb]) -> list[float | None]:
    return [step.letter.deliver_after for step in (*plan.before, *plan.after) if isinstance(step, Publish)]
