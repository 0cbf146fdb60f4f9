"""The Pub/Sub decision table, cell by cell. Each expected plan is written by hand from the rule that its row names.

Letters compare by identity, so plans are compared by what they print (`repr` shows every field).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import attrs
import pytest

from settlement.delivery import Delivery, Letter
from settlement.ledger import Line
from settlement.outcomes import Ack, Drop, Retry, RetryAfter
from settlement.plans import DelayBeyondLease, Outlived, Plan, Publish, Wait
from settlement.policy import DeadLetter, Ending, Policy
from settlement.pubsub import Acknowledge, Facts, Nack, Verb, check, decide


@attrs.frozen
class Elsewhere:
    """A publisher of another transport."""

    name: str


def pulled(attempt: int, count: int | None) -> Delivery[bytes]:
    return Delivery(
        body=b"body",
        message=b"body",
        headers={"trace": b"7"},
        attempt=attempt,
        redelivery_count=count,
        source="orders",
        id="7",
        key="customer",
    )


UNCOUNTED = pulled(1, None)
"""No dead-letter policy: the service reports no attempt (P-3.4)."""
FIRST = pulled(1, 0)
BELOW = pulled(4, 3)
LAST = pulled(5, 4)
OVERSHOT = pulled(6, 5)
OUTLIVED = pulled(7, 6)
LONG_OUTLIVED = pulled(31, 30)

FREE = Policy()
BOTH = Policy(max_attempts=5, dead_letter="orders-dead")

NO_CAP = Facts("orders", None, max_lease=3600.0)
CAP = Facts("orders", 5, max_lease=3600.0)

ACKED = Plan[Verb](Line.ACKED, Acknowledge())
NACKED = Plan[Verb](Line.RETRIED, Nack())
DROPPED = Plan[Verb](Line.DROPPED, Acknowledge())
DROPPED_INTO_THE_DEAD_LETTER = Plan[Verb](Line.DROPPED, Nack())
BEYOND_LEASE = Plan[Verb](Line.RETRIED, Nack(), notice=DelayBeyondLease(3601.0, 3600.0))


def held(seconds: float, notice: Outlived | None = None) -> Plan[Verb]:
    return Plan(Line.DELAYED, Nack(), (Wait(seconds),), (), Nack(), notice)


def dead(of: Delivery[bytes]) -> Plan[Verb]:
    letter = Letter(b"body", {"trace": b"7"}, "customer", None, of)
    return Plan(Line.DEAD_LETTERED, Acknowledge(), (Publish(letter, "orders-dead"),), (), Nack())


class Row(NamedTuple):
    rule: str
    outcome: Ending
    delivery: Delivery[bytes]
    facts: Facts
    policy: Policy
    expected: Plan[Verb]


TABLE = [
    Row("P-2.1: ack", Ack(), UNCOUNTED, NO_CAP, FREE, ACKED),
    Row("P-2.1, C-3.3: ack does not read the cap", Ack(), LAST, CAP, BOTH, ACKED),
    Row("P-2.1: ack of one that outlived the cap", Ack(), OUTLIVED, CAP, BOTH, ACKED),
    Row("P-2.2: retry", Retry(), UNCOUNTED, NO_CAP, FREE, NACKED),
    Row("P-2.2: retry below the cap", Retry(), BELOW, CAP, BOTH, NACKED),
    Row("P-2.10: retry at the cap is a nack like any other", Retry(), LAST, CAP, BOTH, NACKED),
    Row("P-2.10: the count is approximate", Retry(), OVERSHOT, CAP, BOTH, NACKED),
    Row(
        "DESIGN 6: retry at cap + 2 names the roles",
        Retry(),
        OUTLIVED,
        CAP,
        BOTH,
        Plan(Line.RETRIED, Nack(), notice=Outlived(7, 5)),
    ),
    Row(
        "DESIGN 6: and far above it",
        Retry(),
        LONG_OUTLIVED,
        CAP,
        BOTH,
        Plan(Line.RETRIED, Nack(), notice=Outlived(31, 5)),
    ),
    Row("P-3.1: a cap that an operator set", Drop(), LAST, CAP, FREE, DROPPED_INTO_THE_DEAD_LETTER),
    Row("P-2.3: drop", Drop("why"), UNCOUNTED, NO_CAP, FREE, DROPPED),
    Row("P-2.3: drop on the first attempt", Drop(), FIRST, CAP, BOTH, DROPPED),
    Row("P-2.3: drop below the cap", Drop(), BELOW, CAP, BOTH, DROPPED),
    Row("P-2.4: drop on the last attempt", Drop(), LAST, CAP, BOTH, DROPPED_INTO_THE_DEAD_LETTER),
    Row("OQ-P12: drop above the cap", Drop(), OVERSHOT, CAP, BOTH, DROPPED_INTO_THE_DEAD_LETTER),
    Row("P-3.2: cap not readable: drop acknowledges", Drop(), LONG_OUTLIVED, NO_CAP, FREE, DROPPED),
    Row(
        "DESIGN 6: drop at cap + 2 names the roles",
        Drop(),
        OUTLIVED,
        CAP,
        BOTH,
        Plan(Line.DROPPED, Nack(), notice=Outlived(7, 5)),
    ),
    Row("P-2.5: retry_after", RetryAfter(5), UNCOUNTED, NO_CAP, FREE, held(5.0)),
    Row("P-2.5: retry_after of 0", RetryAfter(0), FIRST, CAP, BOTH, held(0.0)),
    Row("OQ-P10: held at the cap as well", RetryAfter(5), LAST, CAP, BOTH, held(5.0)),
    Row("P-2.6: d equal to max_lease is allowed", RetryAfter(3600), FIRST, CAP, BOTH, held(3600.0)),
    Row("P-2.6: d above it", RetryAfter(3601), FIRST, CAP, BOTH, BEYOND_LEASE),
    Row("P-2.6: the same without a cap", RetryAfter(3601), UNCOUNTED, NO_CAP, FREE, BEYOND_LEASE),
    Row("P-2.6: one notice, the error", RetryAfter(3601), OUTLIVED, CAP, BOTH, BEYOND_LEASE),
    Row("DESIGN 6: held at cap + 2 names the roles", RetryAfter(5), OUTLIVED, CAP, BOTH, held(5.0, Outlived(7, 5))),
    Row("DESIGN 2: DeadLetter()", DeadLetter(), FIRST, CAP, BOTH, dead(FIRST)),
    Row("DESIGN 2: DeadLetter() at the cap", DeadLetter(), LAST, CAP, BOTH, dead(LAST)),
    Row("DESIGN 2: DeadLetter() is no nack, so no notice", DeadLetter(), OUTLIVED, CAP, BOTH, dead(OUTLIVED)),
]


@pytest.mark.parametrize("row", [pytest.param(row, id=row.rule) for row in TABLE])
def test_what_an_outcome_means(row: Row) -> None:
    """P-2 and P-3: every cell, the rule in the row."""
    check(row.facts, row.policy)
    decided = decide(row.outcome, row.delivery, row.facts, row.policy)

    assert repr(row.expected) == repr(decided)


@pytest.mark.parametrize(("outcome", "delivery"), [(Ack(), LAST), (Drop(), FIRST), (Drop(), LAST), (Retry(), LAST)])
def test_the_hot_path_builds_nothing(outcome: Ending, delivery: Delivery[bytes]) -> None:
    """DESIGN 3.2: the plan of a plain outcome is one constant."""
    assert decide(outcome, delivery, CAP, BOTH) is decide(outcome, delivery, CAP, BOTH)


def test_dead_letter_without_one_is_a_mistake_of_the_caller() -> None:
    """DESIGN 2: no policy can answer so, so `decide` does not invent a verb."""
    with pytest.raises(ValueError, match="needs a policy with dead_letter"):
        decide(DeadLetter(), FIRST, CAP, FREE)


@pytest.mark.parametrize("cap", [5, 6, 99, 100])
def test_caps_that_the_service_accepts(cap: int) -> None:
    """P-3.5: 5 to 100."""
    check(CAP, Policy(max_attempts=cap, dead_letter="orders-dead"))


@pytest.mark.parametrize("cap", [1, 4, 101, 1000])
def test_caps_that_the_service_refuses(cap: int) -> None:
    """P-3.5: out of range; the message names the argument, its range, and both halves."""
    with pytest.raises(
        ValueError,
        match=rf"^max_attempts must be a whole number, 5 to 100, not {cap}: 'orders' with dead_letter='orders-dead'$",
    ):
        check(CAP, Policy(max_attempts=cap, dead_letter="orders-dead"))


def test_a_cap_without_a_dead_letter_is_refused() -> None:
    """P-3.5: one half alone."""
    with pytest.raises(ValueError, match=r"^dead_letter must be a topic's name, not None: 'orders' has max_attempts=5"):
        check(CAP, Policy(max_attempts=5))


def test_a_dead_letter_without_a_cap_is_refused() -> None:
    """P-3.5: one half alone."""
    with pytest.raises(
        ValueError, match=r"^max_attempts must be a whole number, 5 to 100, not None: 'orders' has dead_"
    ):
        check(CAP, Policy(dead_letter="orders-dead"))


def test_a_publisher_as_dead_letter_is_refused() -> None:
    """DESIGN 6: the service moves messages itself, and only to topics."""
    with pytest.raises(ValueError, match=r"^dead_letter must be a topic's name, not a publisher \('audit'\).*'orders'"):
        check(CAP, Policy(max_attempts=5, dead_letter=Elsewhere("audit")))


def test_neither_half_is_fine() -> None:
    """P-3.7: nothing declared, the resource is not touched."""
    check(NO_CAP, FREE)


@pytest.mark.parametrize("max_lease", [0, -1.0, math.nan, math.inf, True])
def test_a_lease_lasts_for_some_time(max_lease: float) -> None:
    """P-1.2: a ceiling that is no positive duration is refused at construction."""
    with pytest.raises(ValueError, match=r"^max_lease must be a finite number of seconds above 0, not "):
        Facts("orders", None, max_lease)


def test_the_ceiling_is_an_hour() -> None:
    """P-1.2: the default."""
    assert Facts("orders", None).max_lease == 3600.0
