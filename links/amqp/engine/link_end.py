"""Our end of a link: what a receiver and a sender have in common. It lives no longer than its session.

It owns its handle. It hears the peer by the connection's plain calls, and tells whoever waits. Every coroutine here
waits for an answer and changes nothing: cancelled, its order stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from links.amqp.engine.awaited import Awaited
from links.amqp.engine.driver import Driver
from links.amqp.engine.events import Condition, Disposition, LinkAttached, Terminus
from links.amqp.engine.handles import Arrival, LinkHandle
from links.amqp.engine.session import Session, because
from links.errors import LinkBroken, LinkRefused

__all__ = ["LinkEnd"]


class LinkEnd(Awaited):
    """Our end of a link."""

    def __init__(self, driver: Driver, session: Session, handle: LinkHandle | None, address: str) -> None:
        super().__init__(driver)
        self.session = session
        self.address = address
        self.remote: Terminus | None = None
        """The source or target at the other end, once attached."""
        self.properties: Mapping[str, Any] = {}
        """The peer's, once attached."""
        self.max_message: int | None = None
        """The longest message that the peer takes on this link, once attached; None: it names no limit."""
        self._handle = handle
        self._detaching = False
        if handle is None:
            self.break_(session.broken or LinkBroken(f"{address}: the session ended"))

    async def attached(self) -> None:
        """Wait for the answer to the attach. `LinkRefused`: the peer detached the link or ended the session instead."""
        await self._until(lambda: self.remote is not None)

    def detach(self) -> None:
        """Detach: what is unsettled goes back to the peer."""
        self._detaching = True
        if self._handle is not None:
            self.driver.engine.detach(self._handle)
            self.driver.hurry()

    async def detached(self) -> None:
        """Wait until the peer has answered the detach, or the session or the connection is over."""
        while self.broken is None:
            await self._changed.park()

    def on_attached(self, event: LinkAttached) -> None:
        """The peer answered the attach."""
        self.remote, self.properties, self.max_message = event.remote, event.properties, event.max_message
        self._changed.unpark_all()

    def on_detached(self, condition: Condition | None, how: str) -> None:
        """The link is over."""
        why = f"{self.address}: {because(how, condition)}"
        self.break_(LinkRefused(why) if self.remote is None and not self._detaching else LinkBroken(why))

    def on_arrived(self, arrivals: Sequence[Arrival]) -> None:
        """A receiver's."""

    def on_aborted(self) -> None:
        """A receiver's."""

    def on_drained(self) -> None:
        """A receiver's."""

    def on_proved(self, number: int) -> None:
        """A receiver's."""

    def on_spoken(self, which: frozenset[object]) -> None:
        """A receiver's."""

    def on_disposition(self, number: int, disposition: Disposition | None) -> None:
        """A sender's."""

    def on_credit(self, drain: bool) -> None:
        """A sender's."""
