"""The decision table of `links.sql`: everything that decides the fate of a claimed row lives here.

This file knows no database and no clock. The row itself is moved, put back or finished; no copy is ever published.
*Counts* says whether the settling statement adds one to the attempt: it does under a row lock on a table that has the
column; a lease and an advisory lock have counted when they took the row. D is the dead letter.

| outcome | below the cap, or none | cap reached |
|---|---|---|
| `Ack` | finish | finish |
| `Drop` | finish | finish |
| `Retry` | put back (counts) | D is a name: move the row there; D is a publisher: publish to it, then finish |
| `RetryAfter(d)` | due after d (counts); no retry_after column: put back (counts) | as `Retry`; d is ignored |
| `DeadLetter` | as the cap reached | as the cap reached |

A statement of the user's own for ack, drop, retry, retry_after or dead_letter is carried out in place of the verb.
A name means a group where the table has groups, else another table with the same columns. Where a drain ends
before the letter was published, the row is put back instead.
"""
# S-4.8; S-4.1; S-4.6

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Any, TypeAlias

import attrs

from settlement.delivery import Delivery, Letter
from settlement.ledger import Line
from settlement.outcomes import Ack, Drop, Retry, RetryAfter, seconds
from settlement.plans import CapReached, DelayIgnored, Plan, Publish
from settlement.policy import DeadLetter, Ending, Policy, Turn

__all__ = [
    "EVENTS",
    "AdvisoryLock",
    "ClaimForm",
    "Column",
    "Custom",
    "Delay",
    "Facts",
    "Finish",
    "Lease",
    "MoveToGroup",
    "MoveToTable",
    "PutBack",
    "RowLock",
    "Verb",
    "check",
    "decide",
    "lease_of",
]


ISOLATIONS = ("read uncommitted", "read committed", "repeatable read", "serializable")


@attrs.frozen
class RowLock:
    """A transaction that holds the row stays open until the delivery is settled; a crash spends no attempt.

    Attributes:
        isolation: The transaction's isolation level, in lower case, of those that the server has:
            "read committed", the default, "repeatable read", "serializable", and on MySQL and MariaDB "read
            uncommitted". Above the default a COMMIT may fail by
            what others do meanwhile, and at "serializable" claims alone make it fail where there are several places:
            the row comes back then, and its handler is called again.
    """

    # S-4.3; S-8.7

    isolation: str = "read committed"

    def __attrs_post_init__(self) -> None:
        if self.isolation not in ISOLATIONS:
            raise ValueError(f"RowLock(isolation) must be one of {', '.join(ISOLATIONS)}, not {self.isolation!r}")


def _duration(duration: float) -> float:
    return seconds("Lease(duration)", duration, zero=False)


@attrs.frozen
class Lease:
    """The claim writes an expiry into the row, and a keeper renews it; a crash spends one attempt.

    Attributes:
        duration: Seconds, above 0. The keeper renews at a third of it.
    """

    duration: float = attrs.field(default=30.0, converter=_duration)


@attrs.frozen
class Column:
    """A column in the template of a key.

    Attributes:
        name: As it is in the table.
    """

    name: str


@attrs.frozen
class AdvisoryLock:
    """The claim takes a named lock of the server; a crash spends one attempt.

    Rows with the same key are never in work at once. Raises `ValueError` for a template that is none.

    Attributes:
        key: A template of 1 character or more with columns in braces, such as `"order-{customer}"`; a brace itself is
            written twice. NULL counts as an empty text.
    """

    key: str

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.key, str) or not self.key or "\0" in self.key:
            raise ValueError(f"AdvisoryLock(key) must be a template of 1 character or more, not {self.key!r}")
        _ = self.parts

    @property
    def parts(self) -> tuple[str | Column, ...]:
        """The template's texts and columns, in order."""
        found: list[str | Column] = []
        try:
            for text, name, spec, conversion in Formatter().parse(self.key):
                if text:
                    found.append(text)
                if name == "" or spec or conversion:
                    raise ValueError("a column stands in braces by its name alone")
                if name is not None:
                    found.append(Column(name))
        except ValueError as error:
            raise ValueError(
                f"AdvisoryLock(key) must be a template such as 'order-{{customer}}', not {self.key!r}: {error}"
            ) from None
        return tuple(found)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns in it."""
        return tuple(part.name for part in self.parts if isinstance(part, Column))


ClaimForm: TypeAlias = RowLock | Lease | AdvisoryLock


def lease_of(claim: ClaimForm) -> float:
    """Seconds of a lease. Raises `TypeError` for another form."""
    if not isinstance(claim, Lease):
        raise TypeError(f"{claim!r} is no lease")
    return claim.duration


@attrs.frozen
class Finish:
    """The row is marked as processed, or deleted where the table has no such column."""

    def __str__(self) -> str:
        return "finish"


@attrs.frozen
class PutBack:
    """The row is free again, now.

    Attributes:
        count: Does this statement add one to the attempt?
    """

    count: bool

    def __str__(self) -> str:
        return "put back, attempt + 1" if self.count else "put back"


@attrs.frozen
class Delay:
    """The row is free again, and not due before `seconds` have passed by the database's clock.

    Attributes:
        seconds: 0 or more, by the database's clock.
        count: Does this statement add one to the attempt?
    """

    seconds: float
    count: bool

    def __str__(self) -> str:
        return f"due in {self.seconds:g} s" + (", attempt + 1" if self.count else "")


@attrs.frozen
class MoveToGroup:
    """The row becomes one of `group`, in the same table; its attempt stays.

    Attributes:
        group: Its new group.
    """

    # S-4.7

    group: str

    def __str__(self) -> str:
        return f"move to group {self.group}"


@attrs.frozen
class MoveToTable:
    """The row leaves this table for `table`, which has the same columns; its attempt stays.

    Attributes:
        table: Its new table.
    """

    # S-4.7

    table: str

    def __str__(self) -> str:
        return f"move to table {self.table}"


EVENTS = ("ack", "drop", "retry", "retry_after", "dead_letter")
"""What a statement of the user's own may stand for."""


@attrs.frozen
class Custom:
    """A statement of the user's own is carried out in place of ours.

    Attributes:
        event: What for, one of `EVENTS`.
        text: The statement.
        delay: Seconds, of retry_after; else None.
        group: The dead letter's name, of dead_letter; else None, which is the row's own group.
    """

    event: str
    text: str
    delay: float | None = None
    group: str | None = None

    def __str__(self) -> str:
        return f"the statement for {self.event}"


Verb: TypeAlias = Finish | PutBack | Delay | MoveToGroup | MoveToTable | Custom


@attrs.frozen
class Facts:
    """What the source is like; the same for each of its deliveries.

    Attributes:
        queue: The table's name, or its group's, for errors.
        claim: How a row is held while it is in hand.
        has_attempt: Has the table an attempt column?
        has_retry_after: Has the table a retry_after column? Without one no delay can be kept.
        has_group: Has the table groups? Then a dead letter is one, else another table.
        custom: Statements of the user's own, by their event; none by default.
    """

    queue: str
    claim: ClaimForm
    has_attempt: bool
    has_retry_after: bool  # S-3.5
    has_group: bool  # S-4.6
    custom: Mapping[str, str] = attrs.field(factory=dict[str, str])  # S-10.1

    @property
    def counts(self) -> bool:
        """Does the settling statement count?"""
        # S-4.1
        return self.has_attempt and isinstance(self.claim, RowLock)


def check(facts: Facts, policy: Policy) -> None:
    """Refuse, by `ValueError`, a policy that the table cannot keep: half a cap, or one that nothing counts."""
    # S-4.4
    given = policy.dead_letter_name
    if policy.max_attempts is None and given is not None:
        raise ValueError(
            f"max_attempts must be a whole number, 1 or more, not None: {facts.queue!r} has dead_letter={given!r}, "
            "and a queue table takes both or neither"
        )
    if policy.max_attempts is None:
        return
    if given is None:
        raise ValueError(
            f"dead_letter must be a name or a publisher, not None: {facts.queue!r} has "
            f"max_attempts={policy.max_attempts}, and a queue table takes both or neither"
        )
    if not facts.has_attempt:
        raise ValueError(
            f"max_attempts must be None, not {policy.max_attempts}: {facts.queue!r} has no attempt column to count in"
        )


_ACK: Plan[Verb] = Plan(Line.ACKED, Finish())
_DROP: Plan[Verb] = Plan(Line.DROPPED, Finish())
_RETRY: Plan[Verb] = Plan(Line.RETRIED, PutBack(count=False))
_RETRY_COUNTED: Plan[Verb] = Plan(Line.RETRIED, PutBack(count=True))


def decide(outcome: Ending, delivery: Delivery[Any], facts: Facts, policy: Policy) -> Plan[Verb]:
    """What `outcome` means for `delivery`; pure. The policy has passed `check`."""
    plan = _usual(outcome, delivery, facts, policy)
    return _own(plan, outcome, facts, policy) if facts.custom else plan


def _own(plan: Plan[Verb], outcome: Ending, facts: Facts, policy: Policy) -> Plan[Verb]:
    """The statement of the user's own as the verb, where there is one for this event."""
    delay = group = None
    if plan.line is Line.DEAD_LETTERED:
        event, group = "dead_letter", policy.dead_letter_name
    elif isinstance(outcome, RetryAfter):
        event, delay = "retry_after", outcome.delay
    else:
        event = {Line.ACKED: "ack", Line.DROPPED: "drop"}.get(plan.line, "retry")
    text = facts.custom.get(event)
    if text is None:
        return plan
    if delay is not None:  # whatever keeps it, it is no column of ours
        return Plan(Line.DELAYED, Custom(event, text, delay))
    return attrs.evolve(plan, verb=Custom(event, text, None, group))


def _usual(outcome: Ending, delivery: Delivery[Any], facts: Facts, policy: Policy) -> Plan[Verb]:
    match outcome:
        case Ack():
            return _ACK
        case Drop():
            return _DROP
        case DeadLetter():
            return _dead_letter(delivery, facts, policy, None)
        case Retry() | RetryAfter():
            if policy.turn(delivery.attempt) is not Turn.BACK:
                return _dead_letter(delivery, facts, policy, policy.max_attempts)
            if isinstance(outcome, RetryAfter):
                return _later(outcome.delay, facts)
            return _RETRY_COUNTED if facts.counts else _RETRY


def _later(delay: float, facts: Facts) -> Plan[Verb]:
    if facts.has_retry_after:
        return Plan(Line.DELAYED, Delay(delay, facts.counts))
    notice = DelayIgnored(delay, f"{facts.queue!r} has no retry_after column")
    return Plan(Line.RETRIED, PutBack(facts.counts), notice=notice)


def _dead_letter(delivery: Delivery[Any], facts: Facts, policy: Policy, cap: int | None) -> Plan[Verb]:
    to = policy.dead_letter
    if to is None:
        raise ValueError("DeadLetter() needs a policy with dead_letter")
    notice = None if cap is None else CapReached(delivery.attempt, policy.dead_letter_name)
    if isinstance(to, str):
        return Plan(Line.DEAD_LETTERED, MoveToGroup(to) if facts.has_group else MoveToTable(to), notice=notice)
    return Plan(
        Line.DEAD_LETTERED,
        Finish(),
        before=(Publish(Letter.of(delivery), to),),
        instead=PutBack(facts.counts),
        notice=notice,
    )
