"""The in-memory decision table, cell by cell. Each expected plan is written by hand from the rule in its row.

Letters compare by identity, so plans are compared by what they print (`repr` shows every field).
"""

from __future__ import annotations

from typing import NamedTuple

import attrs
import pytest

from settlement.delays import Copies, Native
from settlement.delivery import Delivery, Letter
from settlement.ledger import Line
from settlement.memory import Accept, Facts, PutBack, Reject, Verb, decide
from settlement.outcomes import Ack, Drop, Retry, RetryAfter
from settlement.plans import CapReached, Plan, Publish, Wait
from settlement.policy import DeadLetter, Ending, Policy

HEADER = "x-ruststream-retry-count"


@attrs.frozen
class Elsewhere:
    """A publisher of another transport."""

    name: str


def arrived(attempt: int, count: int, headers: dict[str, bytes]) -> Delivery[bytes]:
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


FIRST = arrived(1, 0, {"trace": b"7"})
BOTH_COUNTS = arrived(2, 0, {"trace": b"7", HEADER: b"1"})
LAST = arrived(3, 1, {"trace": b"7", HEADER: b"1"})

FREE = Policy()
CAP = Policy(max_attempts=3)
BOTH = Policy(max_attempts=3, dead_letter="dead")
ONLY_D = Policy(dead_letter="dead")
ELSEWHERE = Policy(max_attempts=3, dead_letter=Elsewhere("audit"))

NATIVE = Facts("orders")
COPIES = Facts("orders", Copies())

ACKED = Plan[Verb](Line.ACKED, Accept())
DROPPED = Plan[Verb](Line.DROPPED, Reject())
BACK = Plan[Verb](Line.RETRIED, PutBack(0.0))
DISCARDED = Plan[Verb](Line.DROPPED, Reject(), notice=CapReached(3, None))


def dead(of: Delivery[bytes], notice: CapReached | None) -> Plan[Verb]:
    letter = Letter(b"body", of.headers, "customer", None, of)
    return Plan(Line.DEAD_LETTERED, Accept(), (Publish(letter, "dead"),), (), PutBack(0.0), notice)


def copied(of: Delivery[bytes], delay: float, header: bytes) -> Plan[Verb]:
    letter = Letter(b"body", {"trace": b"7", HEADER: header}, "customer", None, of)
    return Plan(Line.DELAYED, Reject(), (), (Wait(delay), Publish(letter, "orders")))


class Row(NamedTuple):
    rule: str
    outcome: Ending
    delivery: Delivery[bytes]
    facts: Facts
    policy: Policy
    expected: Plan[Verb]


TABLE = [
    Row("C-1.4: ack", Ack(), FIRST, NATIVE, FREE, ACKED),
    Row("C-1.4, C-3.3: ack does not read the cap", Ack(), LAST, COPIES, BOTH, ACKED),
    Row("C-1.4: drop", Drop("why"), FIRST, NATIVE, FREE, DROPPED),
    Row("C-1.4, C-3.3: drop does not read the cap", Drop(), LAST, NATIVE, BOTH, DROPPED),
    Row("C-4.1: retry, nothing declared", Retry(), LAST, NATIVE, FREE, BACK),
    Row("C-4.2: retry below the cap", Retry(), BOTH_COUNTS, NATIVE, BOTH, BACK),
    Row("C-11.1: the queue counts, so a retry needs no copy", Retry(), FIRST, COPIES, CAP, BACK),
    Row("C-3.4: retry at the cap, D", Retry(), LAST, NATIVE, BOTH, dead(LAST, CapReached(3, "dead"))),
    Row("C-3.4: retry at the cap, no D", Retry(), LAST, NATIVE, CAP, DISCARDED),
    Row("C-3.4: D without a cap", Retry(), FIRST, NATIVE, ONLY_D, dead(FIRST, None)),
    Row("C-11.1: native delay", RetryAfter(5), FIRST, NATIVE, FREE, Plan(Line.DELAYED, PutBack(5.0))),
    Row("C-11.1: native delay below the cap", RetryAfter(0), FIRST, NATIVE, BOTH, Plan(Line.DELAYED, PutBack(0.0))),
    Row("DESIGN 6: Copies", RetryAfter(5), FIRST, COPIES, FREE, copied(FIRST, 5.0, b"1")),
    Row("DESIGN 6: Copies, 0", RetryAfter(0), BOTH_COUNTS, COPIES, BOTH, copied(BOTH_COUNTS, 0.0, b"2")),
    Row("C-4.5: d is ignored at the cap", RetryAfter(5), LAST, NATIVE, BOTH, dead(LAST, CapReached(3, "dead"))),
    Row("C-4.5: with Copies too", RetryAfter(5), LAST, COPIES, CAP, DISCARDED),
    Row("C-3.4: D without a cap, d is ignored", RetryAfter(5), FIRST, COPIES, ONLY_D, dead(FIRST, None)),
    Row("DESIGN 2: DeadLetter()", DeadLetter(), FIRST, NATIVE, BOTH, dead(FIRST, None)),
    Row("DESIGN 2: DeadLetter() at the cap", DeadLetter(), LAST, COPIES, BOTH, dead(LAST, None)),
    Row(
        "DESIGN 2: D may be a publisher of another transport",
        Retry(),
        LAST,
        NATIVE,
        ELSEWHERE,
        Plan(
            Line.DEAD_LETTERED,
            Accept(),
            (Publish(Letter(b"body", {"trace": b"7", HEADER: b"1"}, "customer", None, LAST), Elsewhere("audit")),),
            (),
            PutBack(0.0),
            CapReached(3, "audit"),
        ),
    ),
]


@pytest.mark.parametrize("row", [pytest.param(row, id=row.rule) for row in TABLE])
def test_what_an_outcome_means(row: Row) -> None:
    """C-1, C-3, C-4 and C-11: every cell, the rule in the row."""
    decided = decide(row.outcome, row.delivery, row.facts, row.policy)

    assert repr(row.expected) == repr(decided)


@pytest.mark.parametrize("outcome", [Ack(), Drop(), Retry()])
def test_the_hot_path_builds_nothing(outcome: Ending) -> None:
    """DESIGN 3.2: the plan of a plain outcome is one constant."""
    assert decide(outcome, FIRST, NATIVE, BOTH) is decide(outcome, BOTH_COUNTS, NATIVE, BOTH)


def test_dead_letter_without_one_is_a_mistake_of_the_caller() -> None:
    """DESIGN 2: no policy can answer so, so `decide` does not invent a verb."""
    with pytest.raises(ValueError, match="needs a policy with dead_letter"):
        decide(DeadLetter(), FIRST, NATIVE, CAP)


def test_the_queue_delays_natively_by_default() -> None:
    """C-11.1: every capability."""
    assert (Native(), HEADER) == (Facts("orders").delays, Facts("orders").retry_header)
