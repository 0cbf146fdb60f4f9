"""Who keeps a message while `RetryAfter(delay)` runs: each an explicit choice of the subscription.

`Copies()` is the default on AMQP and the only one that can lose a message: the original is gone before its copy is
published, and the copy waits in this process. The others are crash-safe.
"""
# DESIGN 6

from __future__ import annotations

import attrs

from settlement.delivery import Destination
from settlement.outcomes import seconds
from settlement.policy import positive

__all__ = ["Copies", "Hold", "Native", "Scheduled", "Stored"]


def _max_waiting(count: int) -> int:
    return positive("Copies(max_waiting)", count)


def _max_held(count: int) -> int:
    return positive("Hold(max_held)", count)


def _max_delay(delay: float) -> float:
    return seconds("Hold(max_delay)", delay, zero=False)


@attrs.frozen
class Copies:
    """Reject the original, wait in this process, publish a copy.

    Attributes:
        max_waiting: How many copies may wait at once, 1 or more, 10,000 by default; the next delivery waits for room
            before its verb is said. Else `ValueError`.
    """

    max_waiting: int = attrs.field(default=10_000, converter=_max_waiting)


@attrs.frozen
class Hold:
    """Keep the delivery unsettled for the delay, then hand it back.

    Attributes:
        max_held: How many deliveries may be held at once, 1 or more; the next one waits for a place, and its handler's
            slot with it. The link's credit grows by as many.
        max_delay: Seconds, above 0, 600 by default. A longer delay is cut to this, with a warning.
    """

    max_held: int = attrs.field(converter=_max_held)
    max_delay: float = attrs.field(default=600.0, converter=_max_delay)


@attrs.frozen
class Native:
    """The broker itself hands the message out later."""


@attrs.frozen
class Scheduled:
    """Publish a copy now, with the broker's own annotation for delayed delivery, then accept the original.

    Attributes:
        annotation: The broker's name for it, such as `x-opt-delivery-delay`, in milliseconds from now; 1 character or
            more.
    """

    annotation: str

    def __attrs_post_init__(self) -> None:
        if not self.annotation:
            raise ValueError("Scheduled(annotation) must be a name of 1 character or more, not an empty one")


@attrs.frozen
class Stored:
    """Store a copy as a row of a SQL queue table, then accept the original; the runtime forwards what is due.

    Attributes:
        queue: Where it is stored: a queue of its own that nobody else takes from, `sql_broker.queue(table)`. It may be
            shared by the queues of one broker, and by several processes. Its table has the roles payload (bytes),
            headers and retry_after.
    """

    queue: Destination
