"""What waits in a store (`Stored`) is published when it is due: by a subscription of the runtime's own on that store.

Owns no task: it is the handler of that subscription, so leases, a drain and weather are as of any other. Hears its
workers. Tells the books, and the broker that letters go to. Cancelled, a letter was published or not, and its row is
left unsettled: it comes again.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Hashable
from functools import partial
from typing import Any, Final

import trio

from actors.books import Books
from actors.letterbox import PUBLISH_FAILED, SLOW, Letterbox
from actors.restarts import backoff
from actors.subscription import AnySubscription, Subscription
from links.abc import Source
from settlement.delivery import Delivery, name_of
from settlement.outcomes import Ack, RetryAfter
from settlement.policy import Policy

__all__ = ["Forwarding", "forwardings"]

AT_ONCE: Final = 8
"""How many rows are published at the same time."""
LEAST: Final = 1.0
MOST: Final = 60.0
"""Seconds until a row is tried again, doubled from the one to the other."""


def _later(delivery: Delivery[Any], error: Exception | None = None) -> RetryAfter:  # noqa: ARG001 -- of a policy
    """Never dropped, never a dead letter: a row that cannot be published waits for whoever mends that."""
    return RetryAfter(backoff(delivery.attempt, random.random(), first=LEAST, most=MOST))  # noqa: S311


_POLICY: Final = Policy(on_error=_later, on_undecodable=_later)


class Forwarding:
    """The handler. `source`: any of those that have this store.

    Attributes:
        source: It says what a row is published as.
        books: Of its own subscription, set when there are any; they hear what is degraded.
    """

    books: Books

    def __init__(self, source: Source[Any]) -> None:
        self.source = source
        self._letterbox = Letterbox(source.broker)

    async def __call__(self, delivery: Delivery[Any]) -> Ack | RetryAfter:
        """Publish one row; finished when that is confirmed, else put back for a while.

        Where there is no connection it is put back too, so that another process may publish it. Raises `ValueError`
        for a row that is no stored copy, which the policy puts back, and logs.

        Cancellation: it was published or not.
        """
        step = self.source.forwarded(delivery)
        what = f"forwarding to {name_of(step.to)}"
        degraded = partial(self.books.degrade, what, who=self)
        broker = self.source.broker
        try:
            with trio.move_on_after(SLOW) as waiting:
                await broker.until_up()
            if waiting.cancelled_caught:
                degraded(f"{broker.name} is {broker.presence.value}")
                return _later(delivery)
            await self._letterbox.post(step, degraded)
        except PUBLISH_FAILED as error:
            degraded(error)
            return _later(delivery)
        self.books.recover(what)
        return Ack()


def forwardings(subscriptions: Collection[AnySubscription]) -> list[Subscription[Any]]:
    """One subscription for each place where copies of these are stored, with a `Forwarding` as its handler.

    Raises `ValueError` where two brokers would share one: either could take what is the other's.
    """
    taken = {subscription.name for subscription in subscriptions}
    found: dict[Hashable, Subscription[Any]] = {}
    for source in [subscription.source for subscription in subscriptions]:
        store = source.store
        if store is None:
            continue
        if (other := found.get(store.place)) is None:
            name = _free(f"{store.name} (stored)", taken)
            taken.add(name)
            handler = Forwarding(source)
            found[store.place] = Subscription(store, handler, name=name, policy=_POLICY, concurrency=AT_ONCE)
        elif isinstance(other.handler, Forwarding) and other.handler.source.broker is not source.broker:
            raise ValueError(
                f"{other.handler.source!r} and {source!r} store their copies in one place, {store.name!r} on "
                f"{store.broker.name}, and forward them by two brokers: give each a table or a group of its own"
            )
    return list(found.values())


def _free(name: str, taken: set[str]) -> str:
    """The name, or one with a number where another has it."""
    number = 1
    free = name
    while free in taken:
        number += 1
        free = f"{name} {number}"
    return free
