"""An AMQP 1.0 broker in this process: a test double, and what an example starts with before there is a real one.

It speaks the real wire (proton's engine at this end, too), over loopback TCP or over memory streams, the latter in
virtual time if need be. It keeps everything in memory, forgets it at the end, and is checked against the same matrix
of dispositions as RabbitMQ, whose quorum queues it resembles. It is no broker to put a service on: nothing is durable,
nothing expires, a queue has no bound, and it listens on loopback only.

    broker = EmbeddedBroker(policies={"orders": QueuePolicy(dead_letter="orders.dead", delivery_limit=20)})
    async with broker.serve() as url: ...           # amqp://127.0.0.1:<port>
    async with broker.running(): client = AmqpBroker("amqp://localhost", connect=broker.connect)

| said | what becomes of the message |
|---|---|
| accepted | it is gone |
| modified with delivery-failed | its delivery-count grows, and it is ready at its old place |
| … and `x-opt-delivery-time` | … when that time has come; other annotations are not kept |
| modified without | ready at its old place |
| modified with undeliverable-here | dead letter, or gone |
| released; the link or its session ended, the connection was closed | ready at its old place |
| rejected | its delivery-count grows; dead letter, or gone |
| the connection broke | as modified with delivery-failed |

A queue exists as soon as it is named. An address becomes a topic by the capability `topic` on a source, or by the
prefix: each link that subscribes gets every message that is published while it is attached. A link that publishes and
has no address sends each message to where its property `to` says.

Bounds per connection: 1 MiB ahead of what is written (and one message), `max_message` for each link that publishes, and
as many messages unsettled as the client gave credit for. Publishers get a credit of 256.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import trio
import trio.testing

from links.abc import beside
from links.amqp.embedded.exchange import Exchange
from links.amqp.embedded.server_connection import ServerConnection
from links.amqp.embedded.store import QueuePolicy, Store, letter_of
from links.amqp.engine.settings import Settings
from links.errors import LinkError
from settlement.delivery import Letter

__all__ = ["EmbeddedBroker", "QueuePolicy"]

_NO_POLICY = QueuePolicy()
_LOOPBACK: Final = "127.0.0.1"


class EmbeddedBroker(Exchange):
    """A broker; nothing runs before `running` or `serve`."""

    def __init__(
        self,
        *,
        policies: Mapping[str, QueuePolicy] | None = None,
        default: QueuePolicy = _NO_POLICY,
        users: Mapping[str, str] | None = None,
        anonymous: bool = True,
        topic_prefix: str = "topic://",
        idle_timeout: float = 60.0,
        max_message: int = 64 * 2**20,
        keep: int = 10_000,
    ) -> None:
        super().__init__(Store(dict(policies or {}), default), topic_prefix=topic_prefix, keep=keep)
        self.users = dict(users or {})
        """Names and passwords, for PLAIN."""
        self.anonymous = anonymous
        self.settings = Settings(
            container="embedded",
            idle_timeout=idle_timeout,
            max_message=max_message,
            properties={"product": "trio-settlement embedded"},
            capabilities=("ANONYMOUS-RELAY",),
        )
        self.peers: list[ServerConnection] = []
        """The connections, oldest first."""
        self._nursery: trio.Nursery | None = None

    # --- life

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Run for the block; at its end the connections are cut. An exception of the block leaves bare.

        Cancellation: as the end of the block.
        """
        async with beside(self.run):
            yield

    @asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncGenerator[str, None]:
        """Run and listen on loopback for the block; gives the URL.

        Cancellation: as the end of the block.
        """
        async with self.running():
            listeners = await trio.open_tcp_listeners(port, host=_LOOPBACK)
            number = listeners[0].socket.getsockname()[1]
            await self._tasks().start(trio.serve_listeners, self._serve, listeners)
            yield f"amqp://{_LOOPBACK}:{number}"

    async def connect(self) -> trio.abc.Stream:
        """As `connect_in_memory`; for `AmqpBroker(connect=…)`. Cancellation: there is no connection."""
        await trio.lowlevel.checkpoint()
        return self.connect_in_memory()

    def connect_in_memory(self) -> trio.abc.Stream:
        """A new connection: the client's end of a pair of memory streams. Raises `RuntimeError` if not running."""
        ours, theirs = trio.testing.memory_stream_pair()
        self._tasks().start_soon(self._serve, ours)
        return theirs

    def _tasks(self) -> trio.Nursery:
        if self._nursery is None:
            raise RuntimeError("the broker does not run: enter broker.running() or broker.serve() first")
        return self._nursery

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled; for `nursery.start`."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                task_status.started()
                await self.keep_time()
            finally:
                self._nursery = None

    async def _serve(self, stream: trio.abc.Stream) -> None:
        if isinstance(stream, trio.SocketStream):
            stream.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)
        peer = ServerConnection(self, stream, self.settings, users=self.users, anonymous=self.anonymous)
        self.peers.append(peer)
        try:
            await peer.run()
        except LinkError:
            pass  # a client that went away
        finally:
            self.peers.remove(peer)

    # --- for tests

    def ready(self, address: str) -> list[Letter]:
        """What waits in a queue, in order. Nothing is taken."""
        return [letter_of(message.raw) for message in self.store.queue(address)]

    def delayed(self, address: str) -> int:
        """How many messages of a queue wait for their time."""
        return len(self.store.queue(address).delayed)

    def unsettled(self, address: str) -> int:
        """How many messages of a queue are with clients."""
        return self.store.queue(address).unsettled
