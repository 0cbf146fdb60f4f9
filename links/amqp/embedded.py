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

import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Final

import attrs
import trio
import trio.testing

from links.abc import beside
from links.amqp.embedded_peer import Consumer, Peer
from links.amqp.embedded_store import Message, Queue, QueuePolicy, Store, letter_of
from links.amqp.events import Condition, Disposition, Terminus
from links.amqp.settings import Settings
from links.errors import LinkError
from settlement.delivery import Letter

__all__ = ["EmbeddedBroker", "QueuePolicy", "Said"]

_NO_POLICY = QueuePolicy()
_LOOPBACK: Final = "127.0.0.1"


@attrs.frozen
class Said:
    """A disposition that a client sent."""

    address: str
    disposition: Disposition | None
    """None: settled without one."""
    count: int
    """The delivery-count that the message was delivered with."""


class EmbeddedBroker:
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
        self.store = Store(dict(policies or {}), default)
        self.users = dict(users or {})
        """Names and passwords, for PLAIN."""
        self.anonymous = anonymous
        self.topic_prefix = topic_prefix
        self.settings = Settings(
            container="embedded",
            idle_timeout=idle_timeout,
            max_message=max_message,
            properties={"product": "trio-settlement embedded"},
            capabilities=("ANONYMOUS-RELAY",),
        )
        self.peers: list[Peer] = []
        """The connections, oldest first."""
        self.said: deque[Said] = deque(maxlen=keep)
        """The last dispositions, oldest first."""
        self.refuses_by_session = False
        """Answer a refused attach by ending its session, as RabbitMQ 4.0 does."""
        self._refusals: dict[str, Condition] = {}
        self._waiting: dict[Queue, deque[Consumer]] = {}
        self._nursery: trio.Nursery | None = None
        self._due = trio.Event()

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
                await self._keep_time()
            finally:
                self._nursery = None

    async def _serve(self, stream: trio.abc.Stream) -> None:
        if isinstance(stream, trio.SocketStream):
            stream.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)
        peer = Peer(self, stream)
        self.peers.append(peer)
        try:
            await peer.run()
        except LinkError:
            pass  # a client that went away
        finally:
            self.peers.remove(peer)

    async def _keep_time(self) -> None:
        while True:
            self._due = trio.Event()
            times = [queue.delayed[0][0] for queue in self._queues() if queue.delayed]
            with trio.move_on_at(min(times, default=float("inf"))):
                await self._due.wait()
                continue
            ready = [queue for queue in self._queues() if queue.delayed]
            for queue in ready:
                queue.wake(trio.current_time())
            self.dispatch(ready)

    def _queues(self) -> list[Queue]:
        return [*self.store.queues.values(), *(queue for topic in self.store.topics.values() for queue in topic)]

    # --- for tests

    def publish(self, address: str, raw: bytes) -> None:
        """Put an encoded message into a queue or a topic."""
        self.dispatch(self.store.publish(address, raw))

    def ready(self, address: str) -> list[Letter]:
        """What waits in a queue, in order. Nothing is taken."""
        return [letter_of(message.raw) for message in self.store.queue(address)]

    def delayed(self, address: str) -> int:
        """How many messages of a queue wait for their time."""
        return len(self.store.queue(address).delayed)

    def unsettled(self, address: str) -> int:
        """How many messages of a queue are with clients."""
        return self.store.queue(address).unsettled

    def refuse(self, address: str, condition: Condition | None) -> None:
        """Refuse attaches to an address, with this reason; None: no longer."""
        if condition is None:
            self._refusals.pop(address, None)
        else:
            self._refusals[address] = condition

    # --- for peers

    def refusal(self, address: str | None) -> Condition | None:
        """Why an address may not be attached to."""
        return None if address is None else self._refusals.get(address)

    def is_topic(self, source: Terminus) -> bool:
        """Is this a topic's subscription?"""
        address = source.address or ""
        return "topic" in source.capabilities or address.startswith(self.topic_prefix) or address in self.store.topics

    def join(self, consumer: Consumer) -> None:
        """A link takes from a queue."""
        self._waiting.setdefault(consumer.queue, deque()).append(consumer)

    def leave(self, consumer: Consumer, *, failed: bool) -> None:
        """It takes no more; `failed`: its connection broke."""
        queue = consumer.queue
        self._waiting[queue].remove(consumer)
        touched = [queue]
        for message in consumer.unsettled.values():
            touched += self.store.give_back(queue, message, failed=failed)
        consumer.unsettled.clear()
        if consumer.is_subscription:
            self.store.unsubscribe(queue)
            del self._waiting[queue]
        self.dispatch(touched)

    def settle(self, consumer: Consumer, message: Message, disposition: Disposition | None) -> None:
        """Do what a client said."""
        self.said.append(Said(consumer.address, disposition, message.count))
        now = trio.current_time()
        touched = self.store.settle(consumer.queue, message, disposition, now, time.time())
        if touched:
            if consumer.queue.delayed:
                self._due.set()
            self.dispatch(touched)

    def dispatch(self, queues: Iterable[Queue]) -> None:
        """Deliver what is ready to those who have credit, in turn."""
        for queue in queues:
            waiting = self._waiting.get(queue)
            if not waiting:
                continue
            idle = 0
            while len(queue) and idle < len(waiting):
                consumer = waiting[0]
                waiting.rotate(-1)
                if consumer.peer.over is None and consumer.peer.has_room and consumer.credit > 0:
                    consumer.peer.deliver(consumer, queue.take())
                    idle = 0
                else:
                    idle += 1
            for consumer in waiting:
                consumer.peer.end_drain(consumer)
