"""A sender, as a `ClientConnection` offers it, and the messages that are on their way.

It owns the messages that wait for credit and those that are unsettled. It hears the peer by the connection's plain
calls, and tells whoever sent. Cancelled while it waits for credit, a message was not sent; later, it is on its way.
"""

from __future__ import annotations

import trio

from links.amqp.engine.driver import Driver
from links.amqp.engine.events import ACCEPTED, Disposition
from links.amqp.engine.handles import LinkHandle
from links.amqp.engine.link_end import LinkEnd
from links.amqp.engine.session import Session
from links.errors import LinkBroken, LinkError, LinkRefused

__all__ = ["Sender", "Sent"]


class Sent:
    """A message that was sent, and what became of it."""

    __slots__ = ("_known", "_lot", "_sender", "disposition")

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._lot: trio.lowlevel.ParkingLot | None = None
        self._known = False
        self.disposition: Disposition | None = None

    async def answered(self) -> Disposition | None:
        """Wait for what the peer says; None: it settled it and said nothing. Raises what ended the link before that.

        Cancellation: the message is on its way.
        """
        while not self._known:
            if self._sender.broken is not None:
                raise self._sender.broken
            if self._lot is None:
                self._lot = trio.lowlevel.ParkingLot()
            await self._lot.park()
        return self.disposition

    def wakes(self, lot: trio.lowlevel.ParkingLot) -> None:
        """Who is parked there already hears what became of it, without a wake before."""
        self._lot = lot

    def settled(self, disposition: Disposition | None) -> None:
        """The peer has spoken."""
        self._known, self.disposition = True, disposition
        self.wake()

    def wake(self) -> None:
        """Look again."""
        if self._lot is not None:
            self._lot.unpark_all()


class _Turn:
    """A message that waits for credit."""

    __slots__ = ("lot", "raw", "sent")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.lot = trio.lowlevel.ParkingLot()
        self.sent: Sent | None = None


class Sender(LinkEnd):
    """Sends messages to an address."""

    def __init__(self, driver: Driver, session: Session, handle: LinkHandle | None, address: str) -> None:
        super().__init__(driver, session, handle, address)
        self.credit = 0
        """How many messages the peer takes now."""
        self.waiting: dict[_Turn, None] = {}
        """Messages that wait for credit, in order."""
        self.unsettled: dict[int, Sent] = {}

    async def send(self, raw: bytes) -> Sent:
        """Wait for credit, in turn, and send an encoded message; `await sent.answered()` says what became of it.

        Raises `LinkRefused` for one that is longer than the peer takes, which would end its link or its session.

        Cancellation: nothing was sent.
        """
        await trio.lowlevel.checkpoint()
        if (sent := self.send_nowait(raw)) is not None:
            return sent
        self._check(raw)
        turn = _Turn(raw)
        self.waiting[turn] = None
        try:
            while self.broken is None and turn.sent is None:
                await turn.lot.park()
        finally:
            self.waiting.pop(turn, None)
        if turn.sent is None:
            raise self.broken or LinkBroken(self.address)
        return turn.sent

    async def until_credit(self) -> None:
        """Wait until `send_nowait` sends, for the only one who waits here. Cancellation: nothing was done."""
        await self._until(lambda: self.broken is None and self.credit > 0 and not self.waiting)

    @property
    def idle(self) -> bool:
        """Is nothing on its way, and nobody waits?"""
        return not self.waiting and not self.unsettled and not self._changed

    def send_nowait(self, raw: bytes) -> Sent | None:
        """Send now, or not at all: None where others wait, there is no credit, or the link is over.

        Raises as `send`.
        """
        if self._handle is None or self.broken is not None or self.waiting or self.credit <= 0:
            return None
        self._check(raw)
        return self._send(self._handle, raw)

    def _check(self, raw: bytes) -> None:
        if self.max_message is not None and len(raw) > self.max_message:
            raise LinkRefused(f"a message of {len(raw)} bytes, and the peer takes {self.max_message} at most")

    def _send(self, handle: LinkHandle, raw: bytes) -> Sent:
        self.credit -= 1
        sent = Sent(self)
        number = self.driver.engine.send(handle, raw)
        if handle.presettled:
            sent.settled(ACCEPTED)
        else:
            self.unsettled[number] = sent
        self.driver.hurry()
        return sent

    def on_disposition(self, number: int, disposition: Disposition | None) -> None:
        """The peer has spoken of a message."""
        sent = self.unsettled.pop(number, None)
        if sent is not None:
            sent.settled(disposition)

    def on_credit(self, drain: bool) -> None:
        """The peer wants messages, or its credit back. What waits is sent here, so that it goes in order."""
        if self._handle is None:
            return
        self.credit = self.driver.engine.credit(self._handle)  # an event's is that of its time
        while self.waiting and self.credit > 0:
            turn = next(iter(self.waiting))
            del self.waiting[turn]
            if turn.lot:  # else it was cancelled in this tick: nothing is sent
                turn.sent = self._send(self._handle, turn.raw)
                turn.lot.unpark()
        self._changed.unpark_all()
        if drain:
            self.credit = 0
            self.driver.engine.drained(self._handle)
            self.driver.hurry()

    def break_(self, error: LinkError) -> None:
        """Its life is over."""
        super().break_(error)
        for turn in self.waiting:
            turn.lot.unpark()
        for sent in self.unsettled.values():
            sent.wake()
