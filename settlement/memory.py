"""The decision table of `links.memory`: everything that decides the fate of an in-memory delivery lives here.

This file knows no broker and no clock. The in-memory queue counts deliveries itself and delays natively, so a
cap works without copies; `delays=Copies()` behaves as AMQP does by default, so that what AMQP can lose can be seen in
virtual time.

| outcome | below the cap, or none | cap reached, or a dead letter without a cap |
|---|---|---|
| `Ack` | accept | accept |
| `Retry` | put back | dead letter published, then accept; without a dead letter: reject |
| `RetryAfter(d)` | put back after d; with `Copies()`: reject, wait d, publish a copy | as `Retry`; d is ignored |
| `Drop` | reject | reject |
"""
# C-11.1

from __future__ import annotations

from typing import Any, TypeAlias

import attrs

from settlement.attempts import RETRY_HEADER, copied_headers
from settlement.delays import Copies, Native
from settlement.delivery import Delivery, Letter
from settlement.ledger import Line
from settlement.outcomes import Ack, Drop, Retry, RetryAfter
from settlement.plans import CapReached, Plan, Publish, Wait
from settlement.policy import DeadLetter, Ending, Policy, Turn

__all__ = ["Accept", "Delays", "Facts", "PutBack", "Reject", "Verb", "decide"]


@attrs.frozen
class Accept:
    """The message leaves the queue."""

    def __str__(self) -> str:
        return "accept"


@attrs.frozen
class PutBack:
    """The message is ready again after `delay` seconds; its delivery count grows by one.

    Attributes:
        delay: Seconds, 0 or more; 0 by default: now.
    """

    delay: float = 0.0

    def __str__(self) -> str:
        return f"put back in {self.delay:g} s" if self.delay else "put back"


@attrs.frozen
class Reject:
    """The message leaves the queue; the log says that it was rejected."""

    def __str__(self) -> str:
        return "reject"


Verb: TypeAlias = Accept | PutBack | Reject
Delays: TypeAlias = Native | Copies


@attrs.frozen
class Facts:
    """What the source is like; the same for each of its deliveries.

    Attributes:
        queue: Where copies go: the subscription's own queue.
        delays: Who keeps a message while `RetryAfter(delay)` runs; the queue itself by default.
        retry_header: The header that counts copies.
    """

    queue: str
    delays: Delays = Native()
    retry_header: str = RETRY_HEADER


_ACK: Plan[Verb] = Plan(Line.ACKED, Accept())
_DROP: Plan[Verb] = Plan(Line.DROPPED, Reject())
_RETRY: Plan[Verb] = Plan(Line.RETRIED, PutBack())


def decide(outcome: Ending, delivery: Delivery[Any], facts: Facts, policy: Policy) -> Plan[Verb]:
    """What `outcome` means for `delivery`; pure."""
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
                    return Plan(Line.DROPPED, Reject(), notice=CapReached(delivery.attempt, None))
                case Turn.BACK:
                    return _RETRY if isinstance(outcome, Retry) else _later(outcome.delay, delivery, facts)


def _later(delay: float, delivery: Delivery[Any], facts: Facts) -> Plan[Verb]:
    if isinstance(facts.delays, Native):
        return Plan(Line.DELAYED, PutBack(delay))
    headers = copied_headers(delivery.headers, delivery.attempt, facts.retry_header)
    copy = attrs.evolve(Letter.of(delivery), headers=headers)
    return Plan(Line.DELAYED, Reject(), after=(Wait(delay), Publish(copy, facts.queue)))


def _dead_letter(delivery: Delivery[Any], policy: Policy, cap: int | None) -> Plan[Verb]:
    if policy.dead_letter is None:
        raise ValueError("DeadLetter() needs a policy with dead_letter")
    return Plan(
        Line.DEAD_LETTERED,
        Accept(),
        before=(Publish(Letter.of(delivery), policy.dead_letter),),
        instead=PutBack(),
        notice=None if cap is None else CapReached(delivery.attempt, policy.dead_letter_name),
    )
