"""What the embedded broker keeps: queues, topics, and what becomes of a message. Pure: no trio, no proton, no clock.

Delivery counts are kept beside a message, and spliced into its header section when it is delivered again. A first
delivery goes out as it came, so that a message of ours, which has no header section, has none.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import count

import attrs

from links.amqp.engine.events import DELIVERY_TIME, Disposition, State
from links.amqp.wire.sections import HEADER, split, walk
from links.amqp.wire.values import LIST, Timestamp, Undecodable, compound, elements, skip
from settlement.delivery import Letter

__all__ = ["Message", "QueuePolicy", "Store", "StoredQueue", "letter_of", "recounted"]

_NULL, _FALSE = b"\x40", b"\x42"
_KEPT = 3
"""The fields durable, priority, ttl of a header section."""


@attrs.frozen
class QueuePolicy:
    """What a queue does with what it does not keep.

    Attributes:
        dead_letter: The queue that gets what is rejected, undeliverable, or over the limit; None, the default: it is
            gone.
        delivery_limit: How often a message may fail, 0 or more; one more, and it is dead-lettered. None, the default:
            without end.
    """

    dead_letter: str | None = None
    delivery_limit: int | None = None


@attrs.define(eq=False, order=False)
class Message:
    """A message in a queue.

    Attributes:
        raw: The encoded message, as it came.
        position: Its place in the queue, from 0: smaller first.
        count: How often it has failed: the delivery-count (part 3 §3.2.1); 0 by default.
        returned: It was delivered before: the next one is not its first acquirer. False by default.
    """

    raw: bytes
    position: int
    count: int = 0
    returned: bool = False

    def encoded(self) -> bytes:
        """As it is delivered now."""
        return recounted(self.raw, self.count) if self.returned or self.count else self.raw


def letter_of(raw: bytes) -> Letter:
    """A message as a letter; one that cannot be read is a body as it came."""
    try:
        sections = split(raw)
        return Letter(sections.body, sections.headers, sections.key)
    except Undecodable:
        return Letter(raw)


def recounted(raw: bytes, delivery_count: int) -> bytes:
    """The message with this delivery-count, and first-acquirer false; what cannot be read goes as it is."""
    try:
        parts = walk(raw)
    except (Undecodable, IndexError):
        return raw
    begin, rest = 0, 0
    fields: list[bytes] = []
    if parts and parts[0][0] == HEADER:
        _, begin, value, rest = parts[0]
        fields = [raw[at : skip(raw, at, rest)] for at in elements(raw, value)][:_KEPT]
    fields += [_NULL] * (_KEPT - len(fields))
    fields += [_FALSE, b"\x70" + delivery_count.to_bytes(4, "big")]
    return raw[:begin] + b"\x00\x53\x70" + compound(LIST, len(fields), b"".join(fields)) + raw[rest:]


class StoredQueue:
    """Messages in order of their position; what comes back goes to its old place."""

    def __init__(self, name: str, policy: QueuePolicy) -> None:
        self.name = name
        self.policy = policy
        self.unsettled = 0
        self.delayed: list[tuple[float, int, Message]] = []
        """A heap: when it is due, and the message."""
        self._fresh: deque[Message] = deque()
        self._returned: list[tuple[int, Message]] = []
        self._positions = count()

    def __len__(self) -> int:
        return len(self._fresh) + len(self._returned)

    def __iter__(self) -> Iterator[Message]:
        yield from sorted([*self._fresh, *(message for _, message in self._returned)], key=lambda each: each.position)

    def put(self, raw: bytes, delivery_count: int = 0) -> None:
        """A new message."""
        self._fresh.append(Message(raw, next(self._positions), delivery_count))

    def take(self) -> Message:
        """The first message, now unsettled."""
        self.unsettled += 1
        if self._returned and (not self._fresh or self._returned[0][0] < self._fresh[0].position):
            return heapq.heappop(self._returned)[1]
        return self._fresh.popleft()

    def put_back(self, message: Message, due: float | None = None) -> None:
        """It is unsettled no longer; `due`: not ready before."""
        self.unsettled -= 1
        message.returned = True
        if due is None:
            heapq.heappush(self._returned, (message.position, message))
        else:
            heapq.heappush(self.delayed, (due, message.position, message))

    def wake(self, now: float) -> None:
        """What is due is ready."""
        while self.delayed and self.delayed[0][0] <= now:
            _, position, message = heapq.heappop(self.delayed)
            heapq.heappush(self._returned, (position, message))


class Store:
    """All queues and topics."""

    def __init__(self, policies: dict[str, QueuePolicy], default: QueuePolicy) -> None:
        self.policies = policies
        self.default = default
        self.queues: dict[str, StoredQueue] = {}
        self.topics: dict[str, set[StoredQueue]] = {}
        """Each subscription has a queue of its own, as long as its link lives."""

    def queue(self, name: str) -> StoredQueue:
        """The queue of this name, made if need be."""
        queue = self.queues.get(name)
        if queue is None:
            queue = self.queues[name] = StoredQueue(name, self.policies.get(name, self.default))
        return queue

    def subscribe(self, topic: str) -> StoredQueue:
        """A new subscription of a topic."""
        queue = StoredQueue(topic, self.policies.get(topic, self.default))
        self.topics.setdefault(topic, set()).add(queue)
        return queue

    def unsubscribe(self, queue: StoredQueue) -> None:
        """A subscription's link is gone, and what it has not taken with it."""
        self.topics.get(queue.name, set()).discard(queue)

    def publish(self, address: str, raw: bytes, delivery_count: int = 0) -> list[StoredQueue]:
        """A message for an address; returns the queues that have it."""
        topic = self.topics.get(address)
        queues = [self.queue(address)] if topic is None else list(topic)
        for queue in queues:
            queue.put(raw, delivery_count)
        return queues

    def settle(
        self, queue: StoredQueue, message: Message, disposition: Disposition | None, now: float, wall: float
    ) -> list[StoredQueue]:
        """What a disposition does; returns the queues in which something is ready. `wall`: seconds since 1970."""
        state = State.RELEASED if disposition is None else disposition.state
        if state is State.ACCEPTED:
            queue.unsettled -= 1
            return []
        if state is State.RELEASED or disposition is None:
            queue.put_back(message)
            return [queue]
        if state is State.REJECTED or disposition.failed:
            message.count += 1
        limit = queue.policy.delivery_limit
        if state is State.REJECTED or disposition.undeliverable or (limit is not None and message.count > limit):
            return self._bury(queue, message)
        at = (disposition.annotations or {}).get(DELIVERY_TIME)
        delay = at / 1000 - wall if isinstance(at, Timestamp | int) else 0.0
        queue.put_back(message, now + delay if delay > 0 else None)
        return [queue]

    def give_back(self, queue: StoredQueue, message: Message, *, failed: bool) -> list[StoredQueue]:
        """Nothing was said; `failed`: the connection broke, which counts (RabbitMQ's quorum queues count the same)."""
        if failed:
            return self.settle(queue, message, Disposition(State.MODIFIED, failed=True), 0.0, 0.0)
        queue.put_back(message)
        return [queue]

    def _bury(self, queue: StoredQueue, message: Message) -> list[StoredQueue]:
        queue.unsettled -= 1
        target = queue.policy.dead_letter
        return [] if target is None else self.publish(target, message.raw, message.count)
