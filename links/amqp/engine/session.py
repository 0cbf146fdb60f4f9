"""A session, as a `ClientConnection` offers it. It lives no longer than its connection.

It owns its handle. It hears the peer by the connection's plain calls, and tells whoever waits. Every coroutine here
waits for an answer and changes nothing: cancelled, its order stands.
"""

from __future__ import annotations

import trio

from links.amqp.engine.awaited import Awaited
from links.amqp.engine.driver import Driver
from links.amqp.engine.events import Condition
from links.amqp.engine.handles import SessionHandle
from links.errors import LinkBroken

__all__ = ["Session", "because"]


class Session(Awaited):
    """A session of ours."""

    def __init__(self, driver: Driver, handle: SessionHandle) -> None:
        super().__init__(driver)
        self.handle = handle
        self.ended_at: float | None = None
        """When we ended it, on trio's clock."""

    async def opened(self) -> None:
        """Wait until the peer has opened it."""
        await self._until(lambda: self.handle.opened)

    def end(self) -> None:
        """End it, and its links with it."""
        self.ended_at = self.ended_at or trio.current_time()
        self.driver.engine.end(self.handle)
        self.driver.hurry()

    async def ended(self) -> None:
        """Wait until it has ended, or the connection has."""
        while self.broken is None:
            await self._changed.park()

    def on_opened(self) -> None:
        """The peer opened it."""
        self._changed.unpark_all()

    def on_ended(self, condition: Condition | None) -> None:
        """The peer ended it."""
        self.break_(LinkBroken(because("the session ended", condition)))


def because(how: str, condition: Condition | None) -> str:
    """How it ended, and the reason that was given."""
    return how if condition is None else f"{how}: {condition}"
