"""The decision table of `links.pubsub`: everything that decides the fate of a Pub/Sub delivery lives here.

This file knows no service and no clock. The service moves messages and applies the cap itself: a nack at the cap is
its dead letter, so no retry copy is ever published and `Retry` reads no cap.

| outcome | cap unknown, or attempt below it | attempt at the cap or above |
|---|---|---|
| `Ack` | acknowledged | acknowledged |
| `Drop` | acknowledged | nacked, so that the service moves it to the dead-letter topic |
| `Retry` | nacked | nacked |
| `RetryAfter(d)`, d ≤ max_lease | wait d under the lease, then nacked | the same |
| `RetryAfter(d)`, d > max_lease | nacked at once, an error in the log | the same |
| `DeadLetter` | publish to the dead letter, then acknowledged | the same |

Where a drain ends before a step that stands before the verb succeeded, the delivery is nacked instead. A nack at
attempt ≥ cap + 2 carries a notice that the service's dead-letter policy has no effect.
"""
# P-2.10; DESIGN 6

from __future__ import annotations

from typing import Any, TypeAlias

import attrs

from settlement.delivery import Delivery, Letter
from settlement.ledger import Line
from settlement.outcomes import Ack, Drop, Retry, RetryAfter, seconds
from settlement.plans import DelayBeyondLease, Outlived, Plan, Publish, Wait
from settlement.policy import DeadLetter, Ending, Policy

__all__ = ["CAP_RANGE", "Acknowledge", "Facts", "Nack", "Verb", "check", "decide"]

CAP_RANGE = range(5, 101)
"""The caps that the service accepts in a dead-letter policy: 5 to 100."""
# P-3.5


@attrs.frozen
class Acknowledge:
    """The message leaves the subscription."""

    def __str__(self) -> str:
        return "acknowledged"


@attrs.frozen
class Nack:
    """The message comes again after the retry policy's wait, or goes to the dead-letter topic at the cap."""

    def __str__(self) -> str:
        return "nacked"


Verb: TypeAlias = Acknowledge | Nack


def _max_lease(max_lease: float) -> float:
    return seconds("max_lease", max_lease, zero=False)


@attrs.frozen
class Facts:
    """What the source is like; the same for each of its deliveries.

    Attributes:
        subscription: Its name, for errors.
        cap: As declared, or as read from the service at start-up; None: there is none, or it could not be read.
        max_lease: Seconds, above 0: the longest delay that a delivery is held for.
    """

    subscription: str
    cap: int | None  # P-3.1
    max_lease: float = attrs.field(default=3600.0, converter=_max_lease)


def check(facts: Facts, policy: Policy) -> None:
    """Refuse, by `ValueError`, a policy that the service cannot keep.

    That is half a cap, a cap outside 5 to 100, or a publisher as dead letter: the service moves messages to topics.
    """
    # P-3.5
    cap, to = policy.max_attempts, policy.dead_letter
    name = facts.subscription
    if to is not None and not isinstance(to, str):
        raise ValueError(
            f"dead_letter must be a topic's name, not a publisher ({to.name!r}): the service moves {name!r}"
        )
    if cap is None and to is not None:
        raise ValueError(
            f"max_attempts must be a whole number, 5 to 100, not None: {name!r} has dead_letter={to!r}, "
            "and a dead-letter policy takes both or neither"
        )
    if cap is not None and to is None:
        raise ValueError(
            f"dead_letter must be a topic's name, not None: {name!r} has max_attempts={cap}, "
            "and a dead-letter policy takes both or neither"
        )
    if cap is not None and cap not in CAP_RANGE:
        raise ValueError(f"max_attempts must be a whole number, 5 to 100, not {cap}: {name!r} with dead_letter={to!r}")


_ACK: Plan[Verb] = Plan(Line.ACKED, Acknowledge())
_DROP: Plan[Verb] = Plan(Line.DROPPED, Acknowledge())
_DROP_AT_CAP: Plan[Verb] = Plan(Line.DROPPED, Nack())
_RETRY: Plan[Verb] = Plan(Line.RETRIED, Nack())


def decide(outcome: Ending, delivery: Delivery[Any], facts: Facts, policy: Policy) -> Plan[Verb]:
    """What `outcome` means for `delivery`; pure. The policy has passed `check`."""
    match outcome:
        case Ack():
            return _ACK
        case Drop():
            if facts.cap is None or delivery.attempt < facts.cap:
                return _DROP
            return _watched(_DROP_AT_CAP, delivery, facts)
        case DeadLetter():
            return _dead_letter(delivery, policy)
        case Retry():
            return _watched(_RETRY, delivery, facts)
        case RetryAfter(delay) if delay > facts.max_lease:
            return Plan(Line.RETRIED, Nack(), notice=DelayBeyondLease(delay, facts.max_lease))
        case RetryAfter(delay):
            held: Plan[Verb] = Plan(Line.DELAYED, Nack(), before=(Wait(delay),), instead=Nack())
            return _watched(held, delivery, facts)


def _watched(nack: Plan[Verb], delivery: Delivery[Any], facts: Facts) -> Plan[Verb]:
    if facts.cap is None or delivery.attempt < facts.cap + 2:
        return nack
    return attrs.evolve(nack, notice=Outlived(delivery.attempt, facts.cap))


def _dead_letter(delivery: Delivery[Any], policy: Policy) -> Plan[Verb]:
    if policy.dead_letter is None:
        raise ValueError("DeadLetter() needs a policy with dead_letter")
    letter = Publish(Letter.of(delivery), policy.dead_letter)
    return Plan(Line.DEAD_LETTERED, Acknowledge(), before=(letter,), instead=Nack())
