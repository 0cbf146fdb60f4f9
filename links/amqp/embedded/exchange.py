"""What stands between the embedded broker's queues and its connections: who takes from which queue, whose turn it is.

It owns the store, the consumers of each queue and the clock of what is delayed. It hears connections by plain calls,
and tells a consumer's connection to deliver. It has one task, `keep_time`; cancelled, what is delayed stays delayed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Protocol

import attrs
import trio

from links.amqp.embedded.store import Message, Store, StoredQueue
from links.amqp.engine.engine import Engine
from links.amqp.engine.events import Condition, Disposition, Terminus
from links.amqp.engine.handles import LinkHandle
from links.errors import LinkError

__all__ = ["Consumer", "Exchange", "Outlet", "SaidByClient"]


class Outlet(Protocol):
    """A connection, as an exchange sees it."""

    engine: Engine
    over: LinkError | None
    """Why nothing more goes out."""

    @property
    def has_room(self) -> bool:
        """May more be sent before the last bytes are written?"""
        ...

    def deliver(self, consumer: Consumer, message: Message) -> None:
        """Send a message."""

    def end_drain(self, consumer: Consumer) -> None:
        """Answer a drain when the queue has nothing more, or the credit is used up."""


@attrs.define(eq=False)
class Consumer:
    """A link that takes messages from a queue.

    Attributes:
        outlet: The connection that it is on.
        link: Our end of it there, a sender.
        queue: What it takes from; for a topic, a queue of its own.
        address: What the client has attached to.
        is_subscription: Is it a topic's? Then its queue ends with it.
        unsettled: What was delivered and not settled, by number, as `Engine.send` returned it; empty at first.
        draining: Does the client wait to be told that there is nothing more (part 2 §2.6.7)? False by default.
    """

    outlet: Outlet
    link: LinkHandle
    queue: StoredQueue
    address: str
    is_subscription: bool
    unsettled: dict[int, Message] = attrs.field(factory=dict[int, Message])
    draining: bool = False

    @property
    def credit(self) -> int:
        """How many it may get."""
        return self.outlet.engine.credit(self.link)

    @property
    def is_ready(self) -> bool:
        """May it get one now?"""
        return self.outlet.over is None and self.outlet.has_room and self.credit > 0


@attrs.frozen
class SaidByClient:
    """A disposition that a client sent.

    Attributes:
        address: What its link is attached to.
        disposition: What was said; None: settled without a word.
        count: The delivery-count that the message was delivered with, 0 or more.
    """

    address: str
    disposition: Disposition | None
    count: int


class Exchange:
    """Queues, topics, and those who take from them."""

    def __init__(self, store: Store, *, topic_prefix: str, keep: int) -> None:
        self.store = store
        self.topic_prefix = topic_prefix
        self.said: deque[SaidByClient] = deque(maxlen=keep)
        """The last dispositions, oldest first."""
        self.refuses_by_session = False
        """Answer a refused attach by ending its session, as RabbitMQ 4.0 does."""
        self._refusals: dict[str, Condition] = {}
        self._waiting: dict[StoredQueue, deque[Consumer]] = {}
        self._due = trio.Event()

    async def keep_time(self) -> None:
        """Deliver what was delayed, when it is due; without end."""
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

    def _queues(self) -> list[StoredQueue]:
        return [*self.store.queues.values(), *(queue for topic in self.store.topics.values() for queue in topic)]

    def publish(self, address: str, raw: bytes) -> None:
        """Put an encoded message into a queue or a topic."""
        self.dispatch(self.store.publish(address, raw))

    def refuse(self, address: str, condition: Condition | None) -> None:
        """Refuse attaches to an address, with this reason; None: no longer."""
        if condition is None:
            self._refusals.pop(address, None)
        else:
            self._refusals[address] = condition

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
        self.said.append(SaidByClient(consumer.address, disposition, message.count))
        now = trio.current_time()
        touched = self.store.settle(consumer.queue, message, disposition, now, time.time())
        if touched:
            if consumer.queue.delayed:
                self._due.set()
            self.dispatch(touched)

    def dispatch(self, queues: Iterable[StoredQueue]) -> None:
        """Deliver what is ready to those who have credit, in turn."""
        for queue in queues:
            waiting = self._waiting.get(queue)
            if not waiting:
                continue
            idle = 0
            while len(queue) and idle < len(waiting):
                consumer = waiting[0]
                waiting.rotate(-1)
                if consumer.is_ready:
                    consumer.outlet.deliver(consumer, queue.take())
                    idle = 0
                else:
                    idle += 1
            for consumer in waiting:
                consumer.outlet.end_drain(consumer)
