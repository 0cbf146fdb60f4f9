"""A connection that we opened, as sources and publishers see it: sessions, receivers and senders over one `Driver`.

It owns its sessions and their links. It hears orders by plain calls, which are given to the engine and written soon,
and the engine's events; it tells sessions and links, on which answers are awaited. What is awaited raises
`ConnectionBroken` when the connection is over, `LinkBroken` when the link or its session is, `LinkRefused` where the
peer refuses a link. One task, `run`, moves the bytes; cancelled, it leaves as `Driver` does. The rest is called from
any task of the same `trio.run`.

    async with trio.open_nursery() as nursery:
        connection = ClientConnection(stream, Engine(settings))
        nursery.start_soon(connection.run)
        opened = await connection.opened()
        receiver = connection.attach_receiver(await connection.begin(), Terminus("orders"))
        await receiver.attached()
        receiver.grant(100)
        for arrival in await receiver.receive(100):
            receiver.settle(arrival, ACCEPTED)
            receiver.grant(1)
        connection.close()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import trio

from links.amqp.engine.driver import LINGER, Driver
from links.amqp.engine.engine import Engine
from links.amqp.engine.events import (
    Aborted,
    Arrived,
    CreditGranted,
    DispositionOf,
    Drained,
    Event,
    LinkAttached,
    LinkDetached,
    Opened,
    Proved,
    SessionEnded,
    SessionOpened,
    Spoken,
    Terminus,
)
from links.amqp.engine.handles import LinkHandle, SessionHandle
from links.amqp.engine.link_end import LinkEnd
from links.amqp.engine.receiver import Receiver
from links.amqp.engine.sender import Sender
from links.amqp.engine.session import Session

__all__ = ["ClientConnection"]

REST: Final = 0.1
"""Seconds for which the channel of a session that ended is not used again."""
ENDING: Final = 5.0
"""The same, where the peer has not answered the end."""


class ClientConnection(Driver):
    """A connection that we opened."""

    def __init__(self, stream: trio.abc.Stream, engine: Engine, *, linger: float = LINGER) -> None:
        super().__init__(stream, engine, self._on, linger=linger)
        self.remote: Opened | None = None
        """What the peer said when it opened the connection."""
        self.max_message: int | None = None
        """The longest message that it takes on every link of a sender so far; None: it has named no limit."""
        self._sessions: dict[SessionHandle, Session] = {}
        self._ends: dict[LinkHandle, LinkEnd] = {}
        self._session_ended_at = -math.inf
        self._changed = trio.lowlevel.ParkingLot()
        self._answers: dict[type[Any], Callable[[Any], None]] = {
            Opened: self._on_opened,
            SessionOpened: self._on_session_opened,
            SessionEnded: self._on_session_ended,
            LinkDetached: self._on_detached,
        }
        self._tells: dict[type[Any], Callable[[LinkEnd, Any], None]] = {
            LinkAttached: self._on_attached,
            Arrived: lambda end, event: end.on_arrived(event.arrivals),
            Aborted: lambda end, _: end.on_aborted(),
            DispositionOf: lambda end, event: end.on_disposition(event.number, event.disposition),
            Spoken: lambda end, event: end.on_spoken(event.which),
            CreditGranted: lambda end, event: end.on_credit(event.drain),
            Drained: lambda end, _: end.on_drained(),
            Proved: lambda end, event: end.on_proved(event.number),
        }

    async def run(self) -> None:
        """Open the connection and move bytes until it is over; as `Driver.run`."""
        self.engine.open()
        self.hurry()
        await super().run()

    async def opened(self) -> Opened:
        """Wait until the peer has opened the connection; bound it: a mute peer is noticed after 1.5 × idle timeout.

        Cancellation: nothing was done.
        """
        await trio.lowlevel.checkpoint()
        while self.remote is None:
            if self.over is not None:
                raise self.over
            await self._changed.park()
        return self.remote

    # --- orders

    async def begin(self) -> Session:
        """Begin a session. Raises `LinkRefused` where the peer allows no more, `ConnectionBroken`.

        It lets the channel of a session that ended rest a moment: proton gives it away at once, and a RabbitMQ that has
        not cleared away the old session loses a begin on it (seen on 4.0.5, 1 in 100; never after 1 ms).

        Cancellation: nothing was begun. There is no checkpoint behind the beginning.
        """
        self._check()
        while (until := self._channels_rest()) > trio.current_time():
            with trio.move_on_at(until):
                await self._changed.park()
            self._check()
        handle = self.engine.begin()
        session = self._sessions[handle] = Session(self, handle)
        self.hurry()
        return session

    def _channels_rest(self) -> float:
        ending = [session.ended_at for session in self._sessions.values() if session.ended_at is not None]
        return max(self._session_ended_at + REST, *[at + ENDING for at in ending], 0.0)

    def attach_receiver(
        self,
        session: Session,
        source: Terminus,
        *,
        target: str | None = None,
        name: str | None = None,
        properties: Mapping[str, object] | None = None,
        presettled: bool = False,
    ) -> Receiver:
        """Attach a receiver; it gets nothing before `grant`, which waits for `attached`."""
        self._check()
        handle = self.engine.attach_receiver(
            session.handle, source, target=target, name=name, properties=properties, presettled=presettled
        )
        receiver = Receiver(self, session, handle, source.address or "")
        if handle is not None:
            self._ends[handle] = receiver
        self.hurry()
        return receiver

    def attach_sender(
        self,
        session: Session,
        target: Terminus,
        *,
        source: str | None = None,
        name: str | None = None,
        properties: Mapping[str, object] | None = None,
        presettled: bool = False,
    ) -> Sender:
        """Attach a sender."""
        self._check()
        handle = self.engine.attach_sender(
            session.handle, target, source=source, name=name, properties=properties, presettled=presettled
        )
        sender = Sender(self, session, handle, target.address or "")
        if handle is not None:
            self._ends[handle] = sender
        self.hurry()
        return sender

    def _check(self) -> None:
        if self.over is not None:
            raise self.over

    # --- what is heard

    def _on(self, event: Event) -> None:
        if self.over is not None:  # bytes that came in the tick of the break: nobody is there for them
            return
        kind = type(event)
        if (tell := self._tells.get(kind)) is not None:
            end = self._ends.get(cast("Any", event).link)
            if end is not None:  # else it is a link that we did not ask for: it gets no answer and no credit
                tell(end, event)
        elif (answer := self._answers.get(kind)) is not None:
            answer(event)

    def _on_opened(self, event: Opened) -> None:
        self.remote = event
        self._changed.unpark_all()

    def _on_session_opened(self, event: SessionOpened) -> None:
        session = self._sessions.get(event.session)
        if session is None:  # nobody here began it: a peer on proton answers so to a begin with its end behind it
            self.engine.end(event.session)
        else:
            session.on_opened()

    def _on_session_ended(self, event: SessionEnded) -> None:
        session = self._sessions.pop(event.session, None)
        if session is None:
            return
        session.on_ended(event.condition)
        self._session_ended_at = trio.current_time()
        self._changed.unpark_all()
        for handle in [handle for handle, end in self._ends.items() if end.session is session]:
            self._ends.pop(handle).on_detached(event.condition, "the session ended")

    def _on_attached(self, end: LinkEnd, event: LinkAttached) -> None:
        if isinstance(end, Sender) and event.max_message is not None:
            self.max_message = min(event.max_message, self.max_message or event.max_message)
        end.on_attached(event)

    def _on_detached(self, event: LinkDetached) -> None:
        end = self._ends.pop(event.link, None)
        if end is not None:
            end.on_detached(event.condition, "the link was detached")

    def _ended(self) -> None:
        for awaited in [*self._sessions.values(), *self._ends.values()]:
            if self.over is not None:
                awaited.break_(self.over)
        self._sessions.clear()
        self._ends.clear()
        self._changed.unpark_all()
