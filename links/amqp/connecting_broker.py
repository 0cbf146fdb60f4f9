"""An AMQP 1.0 broker as far as it connects: one connection at a time, what its sources and publishers stand on.

Owns which host comes next, and the letters that wait for a life. Each life dials one host, logs in by one pinned
mechanism, and looks at who answers: a RabbitMQ older than 4.0 is refused, since any *modified* ends its session.
"""

from __future__ import annotations

import inspect
import ssl
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias
from weakref import WeakValueDictionary

import attrs
import trio

from links.abc import Broker
from links.amqp.addresses import Address, is_text
from links.amqp.connection_life import ConnectionLife
from links.amqp.dial import check_context, dial, explain
from links.amqp.engine.client_connection import ClientConnection
from links.amqp.engine.engine import Engine
from links.amqp.engine.settings import Login, Settings
from links.amqp.letters import Letters
from links.amqp.rabbitmq import Peer
from links.amqp.urls import Target, login, parse
from links.errors import ConnectionBroken, LinkError, LinkRefused
from settlement.attempts import RETRY_HEADER
from settlement.groups import alone, raise_bare
from settlement.outcomes import seconds

__all__ = ["ConnectingBroker", "Password"]

Password: TypeAlias = str | Callable[[], str | Awaitable[str]]

DIAL: Final = 10.0
"""Seconds for a connection to be made, and as many for the peer's answer to our open."""


class ConnectingBroker(Broker):
    """A broker, by its URL, or by several of which one is tried after the other. Its options are `AmqpBroker`'s."""

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        sasl: str | None = None,
        password: Password | None = None,
        plain_text: bool = False,
        ssl_context: ssl.SSLContext | None = None,
        container_id: str = "trio-settlement",
        heartbeat: float = 30.0,
        durable: bool = False,
        retry_header: str = RETRY_HEADER,
        connect: Callable[[], Awaitable[trio.abc.Stream]] | None = None,
    ) -> None:
        urls = list(url) if isinstance(url, Sequence) and not isinstance(url, str) else [url]
        if not urls:
            raise ValueError("url must be an AMQP URL, or one or more of them, not an empty list")
        for argument, name in (("container_id", container_id), ("retry_header", retry_header)):
            if not name:
                raise ValueError(f"{argument} must be 1 character or more, not an empty text")
            if not is_text(name):
                raise ValueError(f"{argument} must be Unicode text without NUL, not {name!r}")
        self._targets = [parse(each) for each in urls]
        self._logins = [login(each, sasl=sasl, password=password, plain_text=plain_text) for each in self._targets]
        for target in self._targets:
            check_context(target, ssl_context)
        super().__init__(", ".join(target.name for target in self._targets))
        self.durable = durable
        self.retry_header = retry_header
        self.user: bytes | None = None
        """Who is logged in, or was last: a copy may keep this user-id."""
        self.life: ConnectionLife
        """The present connection, or the last one; for sources and publishers, behind `until_up`."""
        self._letters: WeakValueDictionary[Address, Letters] = WeakValueDictionary()
        self._password = password if callable(password) else None
        self._ssl_context = ssl_context
        self._connect = connect
        self._settings = Settings(container_id, idle_timeout=seconds("heartbeat", heartbeat, zero=False))
        self._turn = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.presence.value}>"

    def shares_queues_with(self, other: ConnectingBroker) -> bool:
        """Do both lead to one virtual host of one broker, as far as can be told without asking?"""
        if self is other:
            return True
        if self._connect != other._connect:
            return False  # a tunnel leads to where it leads
        return bool({each.place for each in self._targets} & {each.place for each in other._targets})

    def letters(self, address: Address) -> Letters:
        """The queue of all publishers to one address; each keeps it alive."""
        return self._letters.setdefault(address, Letters(self, lambda: self.life, address))

    # --- one life

    async def run(self, goodbye: float = 5.0, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """As `Broker.run`, with the next host.

        Raises `LinkRefused` for a failed login, a failed TLS handshake, a peer that speaks something else or is too
        old; `ConnectionBroken` for one that is not there, or falls silent.

        Cancellation: the connection is closed within `goodbye`, shielded.
        """
        turn, self._turn = self._turn, (self._turn + 1) % len(self._targets)
        target = self._targets[turn]
        who = await self._login(turn)
        self.user = who.user.encode() or None
        stream = await self._dialled(target)
        settings = attrs.evolve(self._settings, hostname=target.hostname, login=who)
        connection = ClientConnection(stream, Engine(settings))
        moving = trio.CancelScope(shield=True)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(_move, connection, moving))
                try:
                    self.life = ConnectionLife(connection, await self._peer(connection), self.lives + 1)
                    with self.up():
                        task_status.started()
                        await trio.sleep_forever()
                finally:
                    moving.deadline = trio.current_time() + goodbye
                    connection.close()
        except BaseExceptionGroup as group:
            error = alone(group)
            if isinstance(error, LinkError):
                opened = connection.remote is not None
                raise explain(error, target, who, opened=opened, logged_in=connection.engine.logged_in) from error
            raise_bare(error)
        raise ConnectionBroken(f"{target.name}: the connection was closed")

    async def _dialled(self, target: Target) -> trio.abc.Stream:
        if self._connect is None:
            return await dial(target, self._ssl_context, within=DIAL)
        try:
            return await self._connect()
        except (OSError, trio.BrokenResourceError) as error:  # a tunnel's weather is weather
            raise ConnectionBroken(f"{target.name}: cannot connect: {error}") from error

    async def _login(self, turn: int) -> Login:
        """Who logs in now. What the function for the password raises goes on, and so does `ValueError` for no text."""
        who = self._logins[turn]
        if self._password is None:
            return who
        given: Any = self._password()
        if inspect.isawaitable(given):
            given = await given
        if not isinstance(given, str):
            raise ValueError(f"password must be a function that gives a str, not {type(given).__name__}")
        return login(self._targets[turn], sasl="plain", password=given, plain_text=True)

    async def _peer(self, connection: ClientConnection) -> Peer:
        """Wait for the peer's open, and look at who it is. What the connection raises it raises itself."""
        with trio.move_on_after(DIAL):
            try:
                opened = await connection.opened()
            except LinkError:
                await trio.sleep_forever()
            peer = Peer.of(opened.properties)
            if peer.too_old:
                raise LinkRefused(f"{peer.name} ends the session on any *modified*: 4.0 is needed, or newer")
            return peer
        connection.break_off(f"no answer to the AMQP open within {DIAL:g} s")
        await trio.sleep_forever()
        raise AssertionError("unreachable: the connection raises")


async def _move(connection: ClientConnection, scope: trio.CancelScope) -> None:
    """Move bytes in a shield of its own: a cancellation is heard by the goodbye, which sets the deadline."""
    with scope:
        await connection.run()
