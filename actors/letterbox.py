"""Publishes the letters that plans ask for: dead letters and copies before a verb, owed copies after one.

Owns the publishers it has looked up. Hears plain calls: who calls decides how often, and what a failure means. Tells
brokers. Cancelled, a letter was published or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from links.abc import Broker, Presence, Publisher
from links.errors import ConnectionBroken, LinkBroken, LinkRefused, NotConnected, PublishNotAccepted
from settlement.delivery import name_of
from settlement.plans import Publish

__all__ = ["PUBLISH_FAILED", "SLOW", "Letterbox"]

SLOW: Final = 5.0
"""Seconds after which a publish that merely waits is *degraded*."""

PUBLISH_FAILED = (PublishNotAccepted, LinkBroken, ConnectionBroken, LinkRefused, NotConnected)
"""What `Letterbox.post` raises for a letter that may be tried again; anything else is a bug."""


class Letterbox:
    """Posts letters, by name on the subscription's own broker, or through a publisher of another one."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._publishers: dict[str, Publisher] = {}

    async def post(self, step: Publish, slow: Callable[[str], None]) -> None:
        """Publish, return when confirmed; `slow` hears why each `SLOW` seconds in which it is not.

        Raises one of `PUBLISH_FAILED`. Cancellation: published or not.
        """
        publisher = self._publisher(step)
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_tell, publisher, slow)
            try:
                await publisher.send(step.letter)
            except Exception as error:  # noqa: BLE001 -- leaves bare, below
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    def _publisher(self, step: Publish) -> Publisher:
        to = step.to
        if isinstance(to, Publisher):
            return to
        name = name_of(to)
        if name not in self._publishers:
            self._publishers[name] = self._broker.publisher(name)
        return self._publishers[name]


async def _tell(publisher: Publisher, slow: Callable[[str], None]) -> None:
    """Until cancelled: it was called when somebody has waited for long."""
    waited = 0.0
    while True:
        await trio.sleep(SLOW)
        waited += SLOW
        broker = publisher.broker
        if broker.presence is Presence.UP:
            slow(
                f"{broker.name} has not confirmed it for {waited:g} s: it may block publishers (an alarm of its memory)"
            )
        else:
            slow(f"{broker.name} is {broker.presence.value}")
