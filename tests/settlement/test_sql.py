"""The SQL decision table, cell by cell. Each expected plan is written by hand from the rule that its row names.

Letters compare by identity, so plans are compared by what they print (`repr` shows every field).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import attrs
import pytest

from settlement.delivery import Delivery, Letter
from settlement.ledger import Line
from settlement.outcomes import Ack, Drop, Retry, RetryAfter
from settlement.plans import CapReached, DelayIgnored, Plan, Publish
from settlement.policy import DeadLetter, Ending, Policy
from settlement.sql import (
    EVENTS,
    AdvisoryLock,
    Column,
    Custom,
    Delay,
    Facts,
    Finish,
    Lease,
    MoveToGroup,
    MoveToTable,
    PutBack,
    RowLock,
    Verb,
    check,
    decide,
)


@attrs.frozen
class Elsewhere:
    """A publisher of another transport."""

    name: str


def taken(attempt: int) -> Delivery[bytes]:
    return Delivery(
        body=b"body",
        message=b"body",
        headers={"trace": b"7"},
        attempt=attempt,
        redelivery_count=attempt - 1,
        source="orders",
        id="7",
        key=None,
    )


FIRST = taken(1)
SECOND = taken(2)
LAST = taken(3)
BEYOND = taken(9)

FREE = Policy()
BOTH = Policy(max_attempts=3, dead_letter="dead")
ONCE = Policy(max_attempts=1, dead_letter="dead")
ELSEWHERE = Policy(max_attempts=3, dead_letter=Elsewhere("audit"))

ROW_LOCK = Facts("orders", RowLock(), has_attempt=True, has_retry_after=True, has_group=True)
LEASE = Facts("orders", Lease(), has_attempt=True, has_retry_after=True, has_group=True)
ADVISORY = Facts("orders", AdvisoryLock("order-{id}"), has_attempt=True, has_retry_after=True, has_group=True)
BARE_ROW_LOCK = Facts("orders", RowLock(), has_attempt=False, has_retry_after=False, has_group=False)
BARE_LEASE = Facts("orders", Lease(), has_attempt=False, has_retry_after=False, has_group=False)
BARE_ADVISORY = Facts("orders", AdvisoryLock("a"), has_attempt=False, has_retry_after=False, has_group=False)
UNCOUNTED = Facts("orders", RowLock(), has_attempt=False, has_retry_after=True, has_group=True)
TABLES = Facts("orders", RowLock(), has_attempt=True, has_retry_after=True, has_group=False)
UNDELAYED = Facts("orders", RowLock(), has_attempt=True, has_retry_after=False, has_group=True)

ACKED = Plan[Verb](Line.ACKED, Finish())
DROPPED = Plan[Verb](Line.DROPPED, Finish())


def moved(verb: Verb, attempt: int) -> Plan[Verb]:
    return Plan(Line.DEAD_LETTERED, verb, notice=CapReached(attempt, "dead"))


def elsewhere(of: Delivery[bytes], instead: Verb, notice: CapReached | None) -> Plan[Verb]:
    letter = Letter(b"body", {"trace": b"7"}, None, None, of)
    return Plan(Line.DEAD_LETTERED, Finish(), (Publish(letter, Elsewhere("audit")),), (), instead, notice)


def undelayed(count: bool) -> Plan[Verb]:
    return Plan(Line.RETRIED, PutBack(count), notice=DelayIgnored(5.0, "'orders' has no retry_after column"))


class Row(NamedTuple):
    rule: str
    outcome: Ending
    delivery: Delivery[bytes]
    facts: Facts
    policy: Policy
    expected: Plan[Verb]


TABLE = [
    Row("S-3 ack, row lock", Ack(), FIRST, ROW_LOCK, FREE, ACKED),
    Row("S-3 ack, lease", Ack(), FIRST, LEASE, FREE, ACKED),
    Row("S-3 ack, advisory", Ack(), FIRST, ADVISORY, FREE, ACKED),
    Row("S-3 ack, C-3.3: the cap is not read", Ack(), LAST, ROW_LOCK, BOTH, ACKED),
    Row("S-3.4: drop finishes, row lock", Drop("why"), FIRST, ROW_LOCK, FREE, DROPPED),
    Row("S-3.4: drop finishes, lease", Drop(), FIRST, LEASE, FREE, DROPPED),
    Row("S-3.4: drop finishes, advisory", Drop(), FIRST, ADVISORY, FREE, DROPPED),
    Row("S-3.4: drop never dead-letters", Drop(), LAST, LEASE, BOTH, DROPPED),
    Row("S-3 retry, S-4.1: row lock counts", Retry(), FIRST, ROW_LOCK, FREE, Plan(Line.RETRIED, PutBack(True))),
    Row("S-3 retry, OQ-S6: a rollback", Retry(), FIRST, BARE_ROW_LOCK, FREE, Plan(Line.RETRIED, PutBack(False))),
    Row("S-3 retry, S-4.1: lease has counted", Retry(), FIRST, LEASE, FREE, Plan(Line.RETRIED, PutBack(False))),
    Row("S-3 retry, lease, nothing counts", Retry(), FIRST, BARE_LEASE, FREE, Plan(Line.RETRIED, PutBack(False))),
    Row("S-3 retry, S-4.1: advisory has counted", Retry(), FIRST, ADVISORY, FREE, Plan(Line.RETRIED, PutBack(False))),
    Row("S-3 retry, advisory, bare", Retry(), FIRST, BARE_ADVISORY, FREE, Plan(Line.RETRIED, PutBack(False))),
    Row("S-3 retry, no cap: for ever", Retry(), BEYOND, ROW_LOCK, FREE, Plan(Line.RETRIED, PutBack(True))),
    Row("S-4.5: retry below the cap", Retry(), SECOND, ROW_LOCK, BOTH, Plan(Line.RETRIED, PutBack(True))),
    Row("S-4.5: retry below the cap, lease", Retry(), SECOND, LEASE, BOTH, Plan(Line.RETRIED, PutBack(False))),
    Row("S-3 retry_after, row lock", RetryAfter(5), FIRST, ROW_LOCK, FREE, Plan(Line.DELAYED, Delay(5.0, True))),
    Row("S-3 retry_after, D-S2", RetryAfter(5), FIRST, UNCOUNTED, FREE, Plan(Line.DELAYED, Delay(5.0, False))),
    Row("S-3 retry_after, lease", RetryAfter(5), FIRST, LEASE, FREE, Plan(Line.DELAYED, Delay(5.0, False))),
    Row("S-3 retry_after, advisory", RetryAfter(5), FIRST, ADVISORY, FREE, Plan(Line.DELAYED, Delay(5.0, False))),
    Row("S-3 retry_after of 0", RetryAfter(0), FIRST, LEASE, FREE, Plan(Line.DELAYED, Delay(0.0, False))),
    Row("S-4.5: retry_after below", RetryAfter(5), SECOND, ROW_LOCK, BOTH, Plan(Line.DELAYED, Delay(5.0, True))),
    Row("S-3.5: no retry_after column, row lock", RetryAfter(5), FIRST, UNDELAYED, BOTH, undelayed(True)),
    Row("S-3.5: no column at all, row lock", RetryAfter(5), FIRST, BARE_ROW_LOCK, FREE, undelayed(False)),
    Row("S-3.5: no retry_after column, lease", RetryAfter(5), FIRST, BARE_LEASE, FREE, undelayed(False)),
    Row("S-3.5: no retry_after column, advisory", RetryAfter(5), FIRST, BARE_ADVISORY, FREE, undelayed(False)),
    Row("S-3 cap, group, row lock", Retry(), LAST, ROW_LOCK, BOTH, moved(MoveToGroup("dead"), 3)),
    Row("S-3 cap, group, lease", Retry(), LAST, LEASE, BOTH, moved(MoveToGroup("dead"), 3)),
    Row("S-3 cap, group, advisory", RetryAfter(5), LAST, ADVISORY, BOTH, moved(MoveToGroup("dead"), 3)),
    Row("S-3 cap, table, row lock", Retry(), LAST, TABLES, BOTH, moved(MoveToTable("dead"), 3)),
    Row(
        "S-3 cap, table, lease",
        RetryAfter(5),
        LAST,
        attrs.evolve(LEASE, has_group=False),
        BOTH,
        moved(MoveToTable("dead"), 3),
    ),
    Row(
        "S-3 cap, table, advisory",
        Retry(),
        LAST,
        attrs.evolve(ADVISORY, has_group=False),
        BOTH,
        moved(MoveToTable("dead"), 3),
    ),
    Row("S-4.5: at or above the cap", Retry(), BEYOND, LEASE, BOTH, moved(MoveToGroup("dead"), 9)),
    Row("S-4.5: max_attempts(1)", Retry(), FIRST, TABLES, ONCE, moved(MoveToTable("dead"), 1)),
    Row(
        "S-4.5 before S-3.5: the delay is not missed",
        RetryAfter(5),
        LAST,
        UNDELAYED,
        BOTH,
        moved(MoveToGroup("dead"), 3),
    ),
    Row(
        "DESIGN 6: a foreign publisher first, then finish; row lock",
        Retry(),
        LAST,
        ROW_LOCK,
        ELSEWHERE,
        elsewhere(LAST, PutBack(True), CapReached(3, "audit")),
    ),
    Row(
        "DESIGN 6: a foreign publisher first, then finish; lease",
        RetryAfter(5),
        LAST,
        LEASE,
        ELSEWHERE,
        elsewhere(LAST, PutBack(False), CapReached(3, "audit")),
    ),
    Row(
        "DESIGN 2: DeadLetter() to a group, no warning",
        DeadLetter(),
        FIRST,
        ROW_LOCK,
        BOTH,
        Plan(Line.DEAD_LETTERED, MoveToGroup("dead")),
    ),
    Row(
        "DESIGN 2: DeadLetter() to a table, no warning",
        DeadLetter(),
        LAST,
        TABLES,
        BOTH,
        Plan(Line.DEAD_LETTERED, MoveToTable("dead")),
    ),
    Row(
        "DESIGN 2: DeadLetter() to a foreign publisher",
        DeadLetter(),
        FIRST,
        ADVISORY,
        ELSEWHERE,
        elsewhere(FIRST, PutBack(False), None),
    ),
]


@pytest.mark.parametrize("row", [pytest.param(row, id=row.rule) for row in TABLE])
def test_what_an_outcome_means(row: Row) -> None:
    """S-3 and S-4: every cell, the rule in the row."""
    check(row.facts, row.policy)
    decided = decide(row.outcome, row.delivery, row.facts, row.policy)

    assert repr(row.expected) == repr(decided)


@pytest.mark.parametrize("facts", [ROW_LOCK, LEASE, ADVISORY, BARE_ROW_LOCK])
@pytest.mark.parametrize("outcome", [Ack(), Drop(), Retry()])
def test_the_hot_path_builds_nothing(outcome: Ending, facts: Facts) -> None:
    """DESIGN 3.2: the plan of a plain outcome is one constant."""
    assert decide(outcome, FIRST, facts, FREE) is decide(outcome, SECOND, facts, FREE)


def test_dead_letter_without_one_is_a_mistake_of_the_caller() -> None:
    """DESIGN 2: no policy can answer so, and `check` refuses half a cap, so `decide` does not invent a verb."""
    with pytest.raises(ValueError, match="needs a policy with dead_letter"):
        decide(DeadLetter(), FIRST, LEASE, FREE)
    with pytest.raises(ValueError, match="needs a policy with dead_letter"):
        decide(Retry(), LAST, LEASE, Policy(max_attempts=3))


def test_a_cap_without_a_dead_letter_is_refused() -> None:
    """S-4.4: both halves or neither; the message names the argument, what is legal, and the queue."""
    with pytest.raises(
        ValueError, match=r"^dead_letter must be a name or a publisher, not None: 'orders' .* or neither$"
    ):
        check(LEASE, Policy(max_attempts=3))


def test_a_dead_letter_without_a_cap_is_refused() -> None:
    """S-4.4: both halves or neither; the message names the argument, its range, and the queue."""
    with pytest.raises(
        ValueError, match=r"^max_attempts must be a whole number, 1 or more, not None: 'orders' .*neither$"
    ):
        check(LEASE, Policy(dead_letter="dead"))


@pytest.mark.parametrize("facts", [BARE_ROW_LOCK, BARE_LEASE, BARE_ADVISORY])
def test_a_cap_needs_the_attempt_column(facts: Facts) -> None:
    """S-4.4, OQ-S6: nothing would count, so the cap would never be reached."""
    with pytest.raises(ValueError, match=r"^max_attempts must be None, not 3: 'orders' has no attempt column"):
        check(facts, BOTH)


@pytest.mark.parametrize("facts", [BARE_ROW_LOCK, BARE_LEASE, BARE_ADVISORY, ROW_LOCK])
def test_no_cap_needs_nothing(facts: Facts) -> None:
    """S-1.2: every role but the id is optional."""
    check(facts, FREE)


@pytest.mark.parametrize("duration", [0, 0.0, -1.0, math.nan, math.inf, True, "30"])
def test_a_lease_lasts_for_some_time(duration: float) -> None:
    """DESIGN 2: a lease that is no positive duration is refused at construction."""
    with pytest.raises(ValueError, match=r"^Lease\(duration\) must be a finite number of seconds above 0, not "):
        Lease(duration)


def test_a_lease_is_thirty_seconds() -> None:
    """S-5.1: the default."""
    assert Lease(30.0) == Lease()


def test_an_advisory_lock_has_a_key() -> None:
    """S-1.4: an empty template would be one lock for every queue."""
    with pytest.raises(ValueError, match=r"^AdvisoryLock\(key\) must be a template of 1 character or more"):
        AdvisoryLock("")


@pytest.mark.parametrize("key", ["order-{}", "{", "}", "{a!r}", "{a:>3}", "a\0", 3])
def test_a_key_is_a_template(key: Any) -> None:
    """S-1.4, S-12.4: columns by their names alone, refused at construction."""
    with pytest.raises(ValueError, match=r"^AdvisoryLock\(key\) must be a template"):
        AdvisoryLock(key)


def test_the_parts_of_a_key() -> None:
    """S-1.4: texts and columns, in order; a brace is written twice."""
    lock = AdvisoryLock("{{a}}-{customer}{part no.} %")
    assert lock.parts == ("{", "a}", "-", Column("customer"), Column("part no."), " %")
    assert "".join(part for part in lock.parts if isinstance(part, str)) == "{a}- %"
    assert lock.columns == ("customer", "part no.")


@pytest.mark.parametrize("isolation", ["", "READ COMMITTED", "snapshot", None])
def test_an_isolation_level_is_one_of_four(isolation: Any) -> None:
    """S-8.7: refused at construction."""
    with pytest.raises(ValueError, match=r"^RowLock\(isolation\) must be one of read uncommitted, read committed, "):
        RowLock(isolation)


OWN = Facts(
    "orders",
    RowLock(),
    has_attempt=True,
    has_retry_after=False,
    has_group=False,
    custom={event: f"say {event}" for event in EVENTS},
)


@pytest.mark.parametrize(
    ("outcome", "delivery", "line", "verb"),
    [
        (Ack(), FIRST, Line.ACKED, Custom("ack", "say ack")),
        (Drop(), FIRST, Line.DROPPED, Custom("drop", "say drop")),
        (Retry(), FIRST, Line.RETRIED, Custom("retry", "say retry")),
        (RetryAfter(9.0), FIRST, Line.DELAYED, Custom("retry_after", "say retry_after", 9.0)),
        (Retry(), LAST, Line.DEAD_LETTERED, Custom("dead_letter", "say dead_letter", None, "dead")),
        (RetryAfter(9.0), LAST, Line.DEAD_LETTERED, Custom("dead_letter", "say dead_letter", None, "dead")),
        (DeadLetter(), FIRST, Line.DEAD_LETTERED, Custom("dead_letter", "say dead_letter", None, "dead")),
    ],
)
def test_statements_of_the_users_own(outcome: Ending, delivery: Delivery[bytes], line: Line, verb: Verb) -> None:
    """S-10.1: in place of the verb; the rest of the plan stays, and a delay needs no column of ours."""
    plan = decide(outcome, delivery, OWN, BOTH)
    assert (plan.line, plan.verb, plan.before) == (line, verb, ())


def test_only_what_has_a_statement_is_replaced() -> None:
    """S-10.1."""
    facts = attrs.evolve(OWN, custom={"ack": "say ack"})
    assert decide(Ack(), FIRST, facts, BOTH).verb == Custom("ack", "say ack")
    assert decide(Drop(), FIRST, facts, BOTH).verb == Finish()
    assert decide(Retry(), FIRST, facts, BOTH).verb == PutBack(count=True)
