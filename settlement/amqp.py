"""The decision table of `links.amqp`: everything that decides the fate of an AMQP 1.0 delivery lives here.

This file knows no broker and no clock. *Counted* means that the delivery carries a header section, so that the broker
counts its redeliveries; D is the dead letter; a *copy* is the letter as it arrived, its retry-count header set to the
attempt of the delivery that is copied, so that a copy and a redelivery count alike.

At least once:

| outcome | below the cap, or none | cap reached with D, or D without a cap | cap reached without D |
|---|---|---|---|
| `Ack` | accepted | accepted | accepted |
| `Drop` | rejected | rejected | rejected |
| `Retry` | modified; capped but not counted: publish a copy, then accepted | publish to D, then accepted | rejected |
| `RetryAfter(d)` | see `delays` | as `Retry`; d is ignored | as `Retry`; d is ignored |
| `DeadLetter` | publish to D, then accepted | publish to D, then accepted | no such policy |

| `delays` | `RetryAfter(d)` below the cap, or none |
|---|---|
| `Copies()` | rejected, wait d, publish a copy: a stop before that loses the message |
| `Hold(n, max_delay)` | wait d or max_delay, then modified; capped but not counted: publish a copy, then accepted |
| `Native()` | modified, to be delivered after d; capped but not counted: wait d, publish a copy, then accepted |
| `Scheduled(annotation)` | publish a copy that the broker keeps for d, then accepted |
| `Stored(queue)` | publish a copy to the table, which keeps it for d, then accepted |

`Native` and `Scheduled` cut d to `LONGEST`, with a warning: their annotations are milliseconds in 64 bits.

Where a drain ends before a step that stands before the verb succeeded, *modified* is said instead.

At most once every delivery was accepted on arrival, and nothing more can be said of it. What needs saying is refused
(and the message is gone), what can be published is published after:

| outcome | below the cap, or none | cap reached with D, or D without a cap | cap reached without D |
|---|---|---|---|
| `Ack`, `Drop` | refused | refused | refused |
| `Retry` | refused; capped but not counted: publish a copy | publish to D | refused |
| `RetryAfter(d)` | wait d (or let `Scheduled`, `Stored` keep it), publish a copy | publish to D | refused |
| `DeadLetter` | publish to D | publish to D | no such policy |
"""
# DESIGN 6

from __future__ import annotations

from enum import Enum
from typing import Any, Final, TypeAlias

import attrs

from settlement.attempts import RETRY_HEADER, copied_headers
from settlement.delays import Copies, Hold, Native, Scheduled, Stored
from settlement.delivery import Delivery, Destination, Letter
from settlement.ledger import Line
from settlement.outcomes import Ack, Drop, Retry, RetryAfter
from settlement.plans import CapReached, DelayIgnored, Plan, Publish, Step, Unsayable, Wait
from settlement.policy import DeadLetter, Ending, Policy, Turn

__all__ = [
    "AT_LEAST_ONCE",
    "AT_MOST_ONCE",
    "LONGEST",
    "Accepted",
    "Delays",
    "Facts",
    "Modified",
    "Rejected",
    "Settle",
    "Verb",
    "decide",
]


@attrs.frozen
class Accepted:
    """The message leaves the queue."""

    #

    def __str__(self) -> str:
        return "accepted"


@attrs.frozen
class Modified:
    """The message is ready again; its delivery-count grows by one.

    Said with delivery-failed true and undeliverable-here false, never as *released*.

    Attributes:
        deliver_after: Seconds from now, for the annotation `x-opt-delivery-time` (`Native`); None: no annotation.
    """

    #

    deliver_after: float | None = None

    def __str__(self) -> str:
        return "modified" if self.deliver_after is None else f"modified, due in {self.deliver_after:g} s"


@attrs.frozen
class Rejected:
    """The message leaves the queue, into the broker's own dead letter if that has one; no error condition."""

    #

    def __str__(self) -> str:
        return "rejected"


Verb: TypeAlias = Accepted | Modified | Rejected
Delays: TypeAlias = Copies | Hold | Native | Scheduled | Stored


class Settle(Enum):
    """When a delivery is settled.

    Attributes:
        AT_LEAST_ONCE: After the handler, by its outcome.
        AT_MOST_ONCE: Accepted on arrival, before the handler.
    """

    AT_LEAST_ONCE = "at least once"
    AT_MOST_ONCE = "at most once"


AT_LEAST_ONCE = Settle.AT_LEAST_ONCE
AT_MOST_ONCE = Settle.AT_MOST_ONCE

_COPIES = Copies()

LONGEST: Final = 9e15
"""Seconds that an annotation of a delay, or of the time when it is over, can say; 285 million years."""


@attrs.frozen
class Facts:
    """What the source is like; the same for each of its deliveries.

    Raises `ValueError` for `Hold` or `Native` at most once: what was accepted on arrival cannot be held.

    Attributes:
        address: Where copies go: the subscription's own address.
        delays: Who keeps a message while `RetryAfter(delay)` runs; `Copies()` by default.
        settle: When a delivery is settled; at least once by default.
        retry_header: The header that counts copies; a name of 1 character or more.
    """

    address: str | Destination
    delays: Delays = _COPIES
    settle: Settle = AT_LEAST_ONCE
    retry_header: str = RETRY_HEADER

    def __attrs_post_init__(self) -> None:
        if self.settle is AT_MOST_ONCE and isinstance(self.delays, Hold | Native):
            raise ValueError(
                "delays must be Copies, Scheduled or Stored at most once, where a delivery is accepted on arrival, "
                f"not {self.delays!r}"
            )


_ACK: Plan[Verb] = Plan(Line.ACKED, Accepted())
_DROP: Plan[Verb] = Plan(Line.DROPPED, Rejected())
_RETRY: Plan[Verb] = Plan(Line.RETRIED, Modified())
_UNSAYABLE_ACK: Plan[Verb] = Plan(Line.REFUSED, None, notice=Unsayable("Ack"))
_UNSAYABLE_DROP: Plan[Verb] = Plan(Line.REFUSED, None, notice=Unsayable("Drop"))
_UNSAYABLE_RETRY: Plan[Verb] = Plan(Line.REFUSED, None, notice=Unsayable("Retry"))


def decide(outcome: Ending, delivery: Delivery[Any], facts: Facts, policy: Policy) -> Plan[Verb]:
    """What `outcome` means for `delivery`; pure."""
    if facts.settle is AT_MOST_ONCE:
        return _at_most_once(outcome, delivery, facts, policy)
    match outcome:
        case Ack():
            return _ACK
        case Drop():
            return _DROP
        case DeadLetter():
            return _dead_letter(delivery, policy, None)
        case Retry() | RetryAfter():
            match policy.turn(delivery.attempt):
                case Turn.DEAD_LETTER:
                    return _dead_letter(delivery, policy, policy.max_attempts)
                case Turn.DISCARD:
                    return Plan(Line.DROPPED, Rejected(), notice=CapReached(delivery.attempt, None))
                case Turn.BACK if isinstance(outcome, RetryAfter):
                    return _later(outcome.delay, delivery, facts, policy)
                case Turn.BACK if _needs_copy(delivery, policy):
                    return _copy_first(Line.RETRIED, Publish(_copy(delivery, facts), facts.address))
                case Turn.BACK:
                    return _RETRY


def _later(delay: float, delivery: Delivery[Any], facts: Facts, policy: Policy) -> Plan[Verb]:
    match facts.delays:
        case Copies():
            copy = _copy(delivery, facts)
            return Plan(Line.DELAYED, Rejected(), after=(Wait(delay), Publish(copy, facts.address)))
        case Hold(max_delay=most):
            held = Wait(min(delay, most))
            cut = DelayIgnored(delay, f"longer than Hold(max_delay={most:g})", most) if delay > most else None
            if _needs_copy(delivery, policy):
                return _copy_first(Line.DELAYED, held, Publish(_copy(delivery, facts), facts.address), notice=cut)
            return Plan(Line.DELAYED, Modified(), before=(held,), instead=Modified(), notice=cut)
        case Native():
            if _needs_copy(delivery, policy):
                return _copy_first(Line.DELAYED, Wait(delay), Publish(_copy(delivery, facts), facts.address))
            kept, cut = _sayable(delay)
            return Plan(Line.DELAYED, Modified(kept), notice=cut)
        case Scheduled():
            kept, cut = _sayable(delay)
            return _copy_first(Line.DELAYED, Publish(_copy(delivery, facts, kept), facts.address), notice=cut)
        case Stored(queue):
            return _copy_first(Line.DELAYED, Publish(_copy(delivery, facts, delay), queue))


def _at_most_once(outcome: Ending, delivery: Delivery[Any], facts: Facts, policy: Policy) -> Plan[Verb]:
    match outcome:
        case Ack():
            return _UNSAYABLE_ACK
        case Drop():
            return _UNSAYABLE_DROP
        case DeadLetter():
            return _dead_letter_after(delivery, policy, None)
        case Retry() | RetryAfter():
            match policy.turn(delivery.attempt):
                case Turn.DEAD_LETTER:
                    return _dead_letter_after(delivery, policy, policy.max_attempts)
                case Turn.DISCARD:
                    return Plan(Line.REFUSED, None, notice=CapReached(delivery.attempt, None))
                case Turn.BACK if isinstance(outcome, RetryAfter):
                    return _copied_later(outcome.delay, delivery, facts)
                case Turn.BACK if _needs_copy(delivery, policy):
                    return Plan(Line.RETRIED, None, after=(Publish(_copy(delivery, facts), facts.address),))
                case Turn.BACK:
                    return _UNSAYABLE_RETRY


def _copied_later(delay: float, delivery: Delivery[Any], facts: Facts) -> Plan[Verb]:
    cut: DelayIgnored | None = None
    after: tuple[Step, ...]
    match facts.delays:
        case Scheduled():
            kept, cut = _sayable(delay)
            after = (Publish(_copy(delivery, facts, kept), facts.address),)
        case Stored(queue):
            after = (Publish(_copy(delivery, facts, delay), queue),)
        case _:
            after = Wait(delay), Publish(_copy(delivery, facts), facts.address)
    return Plan(Line.DELAYED, None, after=after, notice=cut)


def _sayable(delay: float) -> tuple[float, DelayIgnored | None]:
    """The delay as an annotation can say it, and the word that it was cut."""
    if delay <= LONGEST:
        return delay, None
    return LONGEST, DelayIgnored(delay, "longer than an annotation of 64 bits can say", LONGEST)


def _needs_copy(delivery: Delivery[Any], policy: Policy) -> bool:
    """Would *modified* leave the attempt as it is, so that a cap were never reached?"""
    return policy.max_attempts is not None and delivery.redelivery_count is None


def _copy(delivery: Delivery[Any], facts: Facts, deliver_after: float | None = None) -> Letter:
    headers = copied_headers(delivery.headers, delivery.attempt, facts.retry_header)
    return attrs.evolve(Letter.of(delivery, deliver_after=deliver_after), headers=headers)


def _copy_first(line: Line, *before: Step, notice: DelayIgnored | None = None) -> Plan[Verb]:
    """Publish, then *accept*: a rejected original would be stored a second time by the broker's own policy."""
    return Plan(line, Accepted(), before=before, instead=Modified(), notice=notice)


def _dead_letter(delivery: Delivery[Any], policy: Policy, cap: int | None) -> Plan[Verb]:
    letter, notice = _last_letter(delivery, policy, cap)
    return Plan(Line.DEAD_LETTERED, Accepted(), before=(letter,), instead=Modified(), notice=notice)


def _dead_letter_after(delivery: Delivery[Any], policy: Policy, cap: int | None) -> Plan[Verb]:
    letter, notice = _last_letter(delivery, policy, cap)
    return Plan(Line.DEAD_LETTERED, None, after=(letter,), notice=notice)


def _last_letter(delivery: Delivery[Any], policy: Policy, cap: int | None) -> tuple[Publish, CapReached | None]:
    if policy.dead_letter is None:
        raise ValueError("DeadLetter() needs a policy with dead_letter")
    notice = None if cap is None else CapReached(delivery.attempt, policy.dead_letter_name)
    return Publish(Letter.of(delivery), policy.dead_letter), notice
