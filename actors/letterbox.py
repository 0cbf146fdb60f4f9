"""Publishes the letters that plans ask for: dead letters and copies before a verb, owed copies after one.

Owns the publishers it has looked up. Hears plain calls: who calls decides how often, and what a failure means. Tells
brokers. Cancelled, a letter was published or not.
"""

from __future__ import annotations

from links.abc import Broker, Publisher
from links.errors import ConnectionBroken, LinkBroken, LinkRefused, NotConnected, PublishNotAccepted
from settlement.delivery import name_of
from settlement.plans import Publish

__all__ = ["PUBLISH_FAILED", "Letterbox"]

PUBLISH_FAILED = (PublishNotAccepted, LinkBroken, ConnectionBroken, LinkRefused, NotConnected)
"""What `Letterbox.post` raises for a letter that may be tried again; anything else is a bug."""


class Letterbox:
    """Posts letters, by name on the subscription's own broker, or through a publisher of another one."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._publishers: dict[str, Publisher] = {}

    async def post(self, step: Publish) -> None:
        """Publish, return when confirmed. Raises one of `PUBLISH_FAILED`. Cancellation: published or not."""
        to = step.to
        if isinstance(to, Publisher):
            publisher = to
        else:
            name = name_of(to)
            if name not in self._publishers:
                self._publishers[name] = self._broker.publisher(name)
            publisher = self._publishers[name]
        await publisher.send(step.letter)
