"""A ready handler: it relays what it gets to a publisher, of whatever transport."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from links.abc import Publisher
from settlement.delivery import Delivery, Letter
from settlement.outcomes import Ack, Outcome

__all__ = ["forward"]


def forward(publisher: Publisher) -> Callable[[Delivery[Any]], Awaitable[Outcome]]:
    """A handler that publishes each delivery by this publisher, body, headers and key as they came.

        Subscription(broker.queue(ORDERS), forward(amqp.publisher("orders")), policy=Policy(on_error=RetryAfter(5.0)))

    It answers `Ack` when the publisher's broker has confirmed the message; the row leaves its table then. What is
    raised (`PublishNotAccepted`, `LinkBroken`) is a failure like any other: the subscription's policy answers it. In
    weather it waits for the publisher's next connection, with the row held.

    At least once: a kill, a cancellation or a broken connection between the confirmation and the row's end sends the
    message again. Rows arrive in the order in which the subscription hands them out at concurrency 1, but for those
    that are tried again. In row mode the body is the row as a JSON object.

    Raises `TypeError` for what is no publisher.

    Cancellation of the handler: the message was published or not, and the row stays.
    """
    if not isinstance(publisher, Publisher):
        raise TypeError(f"publisher must be a publisher of a broker, not {publisher!r}")

    async def forwarded(delivery: Delivery[Any]) -> Outcome:
        await publisher.send(Letter(delivery.body, delivery.headers, delivery.key))
        return Ack()

    return forwarded
