"""What a handler may answer: four plain values, orders to the runtime.

There is deliberately no fifth. *Unsettled* is what is true when nobody answered (the handler was
cancelled, the process died), so no handler can return it.
"""
# CORE C-1.1, DESIGN 0.4

from __future__ import annotations

import math
from typing import TypeAlias, TypeGuard

import attrs

__all__ = ["Ack", "Drop", "Outcome", "Retry", "RetryAfter", "is_outcome", "no_outcome", "seconds"]


def seconds(name: str, value: object, *, zero: bool = True) -> float:
    """Return `value` as a float of seconds, or raise `ValueError` that names the argument and its range."""
    legal = "a finite number of seconds, 0 or more" if zero else "a finite number of seconds above 0"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be {legal}, not {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an int beyond every float, such as 2**attempt of a message that never ends
        number = math.inf
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise ValueError(f"{name} must be {legal}, not {value!r}")
    return number


@attrs.frozen
class Ack:
    """The message was handled: it leaves the queue. A handler that returns `None` says the same."""

    # C-1.2


@attrs.frozen
class Retry:
    """Hand the message out again, now; the attempt grows by one, the cap applies."""

    # C-1.4


def _delay(delay: float) -> float:
    return seconds("RetryAfter(delay)", delay)


@attrs.frozen
class RetryAfter:
    """Hand the message out again, not before `delay` has passed.

    Raises `ValueError` for a delay that is negative, NaN or infinite. Zero is legal.

    Attributes:
        delay: Seconds, finite, 0 or more, counted from the moment when the outcome is carried out.
    """

    # C-1.9

    delay: float = attrs.field(converter=_delay)


@attrs.frozen
class Drop:
    """The message is of no use: it leaves the queue, into the broker's own dead letter if that has one.

    Attributes:
        reason: For logs and observers (`actors.events.GivenUp`); no broker is told. Empty by default.
    """

    # C-1.4

    reason: str = ""


Outcome: TypeAlias = Ack | Retry | RetryAfter | Drop
"""What a handler returns."""

_OUTCOMES = frozenset({Ack, Retry, RetryAfter, Drop})


def is_outcome(value: object) -> TypeGuard[Outcome]:
    """Is this one of the four? (By exact class: a look-alike is a mistake of the handler.)"""
    # C-1.3
    return type(value) in _OUTCOMES


def no_outcome(value: object, name: str) -> TypeError:
    """A handler's mistake, answered like an exception of its own. `name`: the subscription's, or the handler's."""
    return TypeError(f"{name}: a handler must return Ack(), Retry(), RetryAfter(delay), Drop() or None, not {value!r}")
