"""One life of a broker's connection: who the peer is, and the sessions that all publishers share; on a RabbitMQ one
more for the questions to its management, and one more in which a link to an address is tried first, since many a
refusal ends the session (no permission; 4.0: each).

Owns the sender links, one per address, attached on first use. Where a peer allows no more links on a session, one that
was not used for a while is detached; where all are in use, one more session is begun. Hears publishers and
sources by plain calls. When the connection is over everything here raises `ConnectionBroken`; the next life has links
of its own.
"""

from __future__ import annotations

import math
import secrets
from contextlib import suppress
from itertools import count
from typing import Final

import attrs
import trio

from links.amqp.addresses import Address
from links.amqp.engine.client_connection import ClientConnection
from links.amqp.engine.events import Terminus
from links.amqp.engine.sender import Sender
from links.amqp.engine.session import Session
from links.amqp.management import Management
from links.amqp.rabbitmq import Peer, QueueInfo
from links.errors import LinkBroken, LinkRefused

__all__ = ["AGAIN", "ATTACH", "ConnectionLife"]

AGAIN: Final = 5.0
"""Seconds for which a management that did not answer is not asked again."""

ATTACH: Final = 30.0
"""Seconds within which a peer answers an attach."""
IDLE: Final = 1.0
"""Seconds for which an address was not published to, before its link makes room for another one."""
SESSIONS: Final = 8
"""So many sessions, at most, for the links of publishers: the others are left to subscriptions."""


@attrs.define(eq=False)
class _Way:
    """The link to one address."""

    attaching: trio.Lock = attrs.field(factory=trio.Lock)
    sender: Sender | None = None
    used: float = 0.0
    """When a message was last asked for, on trio's clock."""

    @property
    def idle(self) -> bool:
        """Is there a link that nobody uses now?"""
        return self.sender is not None and self.sender.idle and not self.attaching.locked()


class ConnectionLife:
    """From the peer's open to the end of the connection."""

    def __init__(self, connection: ClientConnection, peer: Peer, number: int) -> None:
        self.connection = connection
        self.peer = peer
        self.number = number
        """As `Broker.lives`."""
        self._asking = trio.Lock()
        self._manager: Management | None = None
        self._mute: LinkBroken | None = None
        self._asked = -math.inf
        self._token = secrets.token_hex(4)
        self._links = count(1)
        self._sessions: list[Session] = []
        self._placing = trio.Lock()
        self._trying = trio.Lock()
        self._trial: Session | None = None
        self._ways: dict[Address, _Way] = {}

    def link_name(self, what: str) -> str:
        """A name that no other link has, also of another process with the same container id."""
        return f"{self._token}-{next(self._links)}-{what}"

    async def queue(self, name: str) -> QueueInfo:
        """Ask the management of a RabbitMQ what this queue is like.

        Raises `LinkRefused` where there is none, `ConnectionBroken`; `LinkBroken` where it does not say, and then at
        once for every queue, for 5 s: others need not wait for it as well. Cancellation: nothing was done.
        """
        async with self._asking:
            if self._mute is not None and trio.current_time() < self._asked + AGAIN:
                raise LinkBroken(str(self._mute)) from self._mute
            try:
                return await self._ask(name)
            except LinkBroken as error:
                self._mute, self._asked = error, trio.current_time()
                raise

    async def _ask(self, name: str) -> QueueInfo:
        if self._manager is None or self._manager.is_broken:  # one that is mute is kept: its session may be stuck
            session = await self.connection.begin()
            manager = Management(self.connection, session)
            try:
                await manager.attached()
            except BaseException:
                session.end()
                raise
            self._manager = manager
        return await self._manager.queue(name)

    def sender_now(self, address: Address) -> Sender | None:
        """The link to this address, where there is one and nobody else waits for it."""
        way = self._ways.get(address)
        if way is None or way.attaching.locked():
            return None
        way.used = trio.current_time()
        return way.sender

    async def sender(self, address: Address) -> Sender:
        """The link to this address, attached. Raises `LinkRefused`, `LinkBroken`, `ConnectionBroken`.

        Cancellation: it is detached, or stays.
        """
        way = self._ways.setdefault(address, _Way())
        way.used = trio.current_time()
        async with way.attaching:
            if way.sender is None or way.sender.broken is not None:
                way.sender = await self._attached_to(address, way)
            return way.sender

    def most(self, address: Address) -> int | None:
        """The longest message, in bytes, that may be sent to this address, as far as it is known; None: no limit."""
        way = self._ways.get(address)
        if way is not None and way.sender is not None and way.sender.remote is not None:
            return way.sender.max_message
        return self.connection.max_message

    async def _attached_to(self, address: Address, way: _Way) -> Sender:
        try:
            return await self._attach(address)
        except BaseException:
            if not way.attaching.statistics().tasks_waiting:
                self._ways.pop(address, None)  # else a refused address were kept for the whole life
            raise

    async def _attach(self, address: Address) -> Sender:
        to = address.on(self.peer)
        if self.peer.is_rabbitmq:
            await self._try(to)
        async with self._placing:
            sender = self.connection.attach_sender(await self._place(), to, name=self.link_name("sender"))
        return await self._attached(sender)

    async def _place(self) -> Session:
        """A session with room for one more link. There is no checkpoint behind the look at it."""
        while True:
            self._sessions = [session for session in self._sessions if session.broken is None]
            for session in self._sessions:
                await _opened(session)
                if session.broken is None and session.handle.room > 0:
                    return session
            if await self._make_room(IDLE):
                continue
            try:
                if len(self._sessions) < SESSIONS:
                    self._sessions.append(await self.connection.begin())
                    continue
            except LinkRefused:
                if not self._sessions:
                    raise
            if not await self._make_room(0.0):
                links = sum(session.handle.allowed for session in self._sessions)
                raise LinkRefused(f"the peer allows {links} links on {len(self._sessions)} sessions, all are in use")

    async def _make_room(self, unused: float) -> bool:
        """Detach the link that was not used for the longest time, `unused` seconds or more; False: there is none."""
        before = trio.current_time() - unused
        idle = [(way.used, address) for address, way in self._ways.items() if way.used <= before and way.idle]
        if not idle:
            return False
        sender = self._ways.pop(min(idle, key=lambda each: each[0])[1]).sender
        assert sender is not None  # noqa: S101 -- else it were not idle
        sender.detach()
        with trio.move_on_after(ATTACH):
            await sender.detached()
            await self.connection.written()  # the answer to the peer's own detach is what frees a handle, too
            return True
        raise LinkBroken(f"no answer to a detach within {ATTACH:g} s")

    async def _try(self, to: Terminus) -> None:
        """A refusal may end the session, of all publishers: so the link is tried in one in which nobody is."""
        async with self._trying:
            if self._trial is None or self._trial.broken is not None:
                self._trial = await self.connection.begin()
            sender = self.connection.attach_sender(self._trial, to, name=self.link_name("sender"))
            (await self._attached(sender)).detach()

    async def _attached(self, sender: Sender) -> Sender:
        try:
            with trio.move_on_after(ATTACH):
                await sender.attached()
                return sender
        except BaseException:
            sender.detach()
            raise
        sender.detach()
        raise LinkBroken(f"no answer to the attach within {ATTACH:g} s")


async def _opened(session: Session) -> None:
    """Wait until the peer has opened it, and so has said how many links it allows. Raises `LinkBroken`."""
    with trio.move_on_after(ATTACH):
        with suppress(LinkBroken):  # it has ended: the next look passes it over
            await session.opened()
        return
    raise LinkBroken(f"no answer to the attach within {ATTACH:g} s")
