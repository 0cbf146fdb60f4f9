"""For tests of handlers, without a broker and without a clock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from actors.subscription import check_handler
from settlement.delivery import NO_HEADERS, Delivery
from settlement.outcomes import Ack, Outcome, is_outcome, no_outcome

__all__ = ["a_delivery", "run_once"]

T = TypeVar("T")


def a_delivery(
    message: T,
    *,
    body: bytes = b"",
    headers: Mapping[str, bytes] = NO_HEADERS,
    attempt: int = 1,
    source: str = "test",
    id: str = "1",  # noqa: A002 -- the delivery's own name for it
    key: str | None = None,
) -> Delivery[T]:
    """A delivery as a first one would be, with what the test wants to be different.

    Args:
        message: What a decoder would have made of the body.
        body: Bytes; none by default.
        headers: Text names to bytes; none by default.
        attempt: 1 or more; 1 by default. `redelivery_count` is one less.
        source: The queue's name.
        id: The broker's name for it.
        key: The ordering or partition key; None by default.
    """
    return Delivery(
        body=body,
        message=message,
        headers=headers,
        attempt=attempt,
        redelivery_count=attempt - 1,
        source=source,
        id=id,
        key=key,
    )


async def run_once(handler: Callable[[Delivery[T]], Awaitable[Outcome | None]], delivery: Delivery[T]) -> Outcome:
    """Call a handler once and return its outcome as the runtime reads it: None is `Ack()`.

    No policy answers and no time limit holds: it raises what the handler raises, and `TypeError` where that is no async
    function, or returns what is no outcome. A handler of a batch is called by hand.

    Cancellation: the handler's own.

    Args:
        handler: As of a `Subscription`.
        delivery: What it gets; `a_delivery` makes one.

    Returns:
        `Ack()`, `Retry()`, `RetryAfter(delay)` or `Drop(reason)`.
    """
    name = getattr(handler, "__qualname__", repr(handler))
    check_handler(name, handler)
    outcome = await handler(delivery)
    if outcome is None:
        return Ack()
    if not is_outcome(outcome):
        raise no_outcome(outcome, name)
    return outcome
