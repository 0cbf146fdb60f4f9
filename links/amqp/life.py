"""One life of a connection: the pump, who the peer is, and a session that all publishers share; on a RabbitMQ one more
for the questions to its management, and one more in which a link to an address is tried first, since many a refusal
ends the session (no permission; 4.0: each).

Owns the sender links, one per address, attached on first use. Hears publishers and sources by plain calls. When the
connection is over everything here raises `ConnectionBroken`; the next life has links of its own.
"""

from __future__ import annotations

import math
import secrets
from itertools import count
from typing import Final

import attrs
import trio

from links.amqp.addresses import Address
from links.amqp.ends import Sender, Sent, Session
from links.amqp.events import Terminus
from links.amqp.management import Management
from links.amqp.pump import Pump
from links.amqp.rabbitmq import Peer, QueueInfo
from links.errors import LinkBroken

__all__ = ["AGAIN", "ATTACH", "Life"]

AGAIN: Final = 5.0
"""Seconds for which a management that did not answer is not asked again."""

ATTACH: Final = 30.0
"""Seconds within which a peer answers an attach."""


@attrs.define(eq=False)
class _Way:
    """The link to one address."""

    attaching: trio.Lock = attrs.field(factory=trio.Lock)
    sender: Sender | None = None


class Life:
    """From the peer's open to the end of the connection."""

    def __init__(self, pump: Pump, peer: Peer, number: int) -> None:
        self.pump = pump
        self.peer = peer
        self.number = number
        """As `Broker.lives`."""
        self._asking = trio.Lock()
        self._manager: Management | None = None
        self._mute: LinkBroken | None = None
        self._asked = -math.inf
        self._token = secrets.token_hex(4)
        self._links = count(1)
        self._session: Session | None = None
        self._beginning = trio.Lock()
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
            session = await self.pump.begin()
            manager = Management(self.pump, session)
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
        return None if way is None or way.attaching.locked() else way.sender

    async def sender(self, address: Address) -> Sender:
        """The link to this address, attached. Raises `LinkRefused`, `LinkBroken`, `ConnectionBroken`.

        Cancellation: it is detached, or stays.
        """
        way = self._ways.setdefault(address, _Way())
        async with way.attaching:
            if way.sender is None or way.sender.broken is not None:
                way.sender = await self._attach(address)
            return way.sender

    async def send(self, address: Address, raw: bytes) -> Sent:
        """Send a message to this address, in this life. Whatever it raises, nothing was sent; cancelled, the same."""
        return await (await self.sender(address)).send(raw)

    async def _attach(self, address: Address) -> Sender:
        to = address.on(self.peer)
        if self.peer.is_rabbitmq:
            await self._try(to)
        async with self._beginning:  # a begin may wait for a channel
            if self._session is None or self._session.broken is not None:
                self._session = await self.pump.begin()
            session = self._session
        return await self._attached(session, to)

    async def _try(self, to: Terminus) -> None:
        """A refusal may end the session, of all publishers: so the link is tried in one in which nobody is."""
        async with self._trying:
            if self._trial is None or self._trial.broken is not None:
                self._trial = await self.pump.begin()
            sender = await self._attached(self._trial, to)
            sender.detach()

    async def _attached(self, session: Session, to: Terminus) -> Sender:
        sender = self.pump.attach_sender(session, to, name=self.link_name("sender"))
        try:
            with trio.move_on_after(ATTACH):
                await sender.attached()
                return sender
        except BaseException:
            sender.detach()
            raise
        sender.detach()
        raise LinkBroken(f"no answer to the attach within {ATTACH:g} s")
