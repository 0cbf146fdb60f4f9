"""What the tests of actors stand on: small handlers, short words for books, and a transport that hangs where told.

The scenarios run on `links.memory`. `StageBroker` and `StageQueue` do what that one cannot: settle at most once, take
plans from a test, and hang in each call that a link or a publisher has.
"""

# ruff: noqa: ARG002 -- a stage does not need every argument

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import attrs
import trio
import trio.testing

from actors import Runtime
from links.abc import Broker, Link, Lost, Publisher, Received, Settlement, Settles, Source, Verdict
from links.errors import LinkError
from links.memory import MemoryBroker
from settlement import Ack, Delivery, Letter, Outcome, Plan, Policy, Publish, Retry, RetryAfter, Wait
from settlement.ledger import Ledger, Line
from settlement.plans import Unsayable
from settlement.policy import Ending

__all__ = [
    "HANGS",
    "Clock",
    "Handler",
    "StageBroker",
    "StageLink",
    "StageQueue",
    "acked",
    "answers",
    "bodies",
    "lines",
    "numbered",
    "rejected",
    "stored",
]

Clock: TypeAlias = trio.testing.MockClock
Handler: TypeAlias = Callable[[Delivery[bytes]], Awaitable[Outcome | None]]


# --- words


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def bodies(letters: Iterable[Letter | Delivery[Any]]) -> list[bytes]:
    return [letter.body for letter in letters]


def lines(books: Ledger) -> dict[str, int]:
    """What a ledger counts, without its zeros."""
    return {field: count for field, count in attrs.asdict(books).items() if count}


def answers(
    *outcomes: Outcome | Exception | None, then: Outcome | Exception | None = None, taking: float = 0.0
) -> Handler:
    """A handler that gives one after the other, and `then` ever after; each call takes so long."""
    left = list(outcomes)

    async def handler(delivery: Delivery[bytes]) -> Outcome | None:
        await trio.sleep(taking)
        answer = left.pop(0) if left else then
        if isinstance(answer, Exception):
            raise answer
        return answer

    return handler


def stored(broker: MemoryBroker, name: str) -> list[bytes]:
    """What is in the queue, ready or later."""
    return bodies([*broker.ready(name), *broker.delayed(name)])


def acked(runtime: Runtime, name: str = "q") -> int:
    return runtime.ledger(name).acked


def rejected(outcome: Ending, delivery: Delivery[Any], _: Policy) -> Plan[str]:
    """A table in which a copy waits after its original was rejected, as AMQP's default."""
    match outcome:
        case RetryAfter(delay):
            return Plan(Line.DELAYED, "reject", after=(Wait(delay), Publish(Letter.of(delivery), delivery.source)))
        case Retry():
            return Plan(Line.RETRIED, "put back")
        case Ack():
            return Plan(Line.ACKED, "accept")
        case _:
            return Plan(Line.DROPPED, "reject")


def settled_on_arrival(outcome: Ending, delivery: Delivery[Any], _: Policy) -> Plan[str]:
    """The table of a source that settles on arrival."""
    match outcome:
        case RetryAfter(delay):
            return Plan(Line.DELAYED, None, after=(Wait(delay), Publish(Letter.of(delivery), delivery.source)))
        case _:
            return Plan(Line.REFUSED, None, notice=Unsayable(type(outcome).__name__))


# --- a transport that does as it is told


class StageBroker(Broker):
    """A connection that can hang while it closes, and whose publishers can hang or fail."""

    def __init__(self, name: str = "stage", *, closing: float = 0.0, publishing: float = 0.0) -> None:
        super().__init__(name)
        self.closing = closing
        self.publishing = publishing
        self.errors: list[LinkError] = []
        """What the next publishes raise."""
        self.published: list[tuple[float, str, Letter]] = []

    async def run(self, goodbye: float = 5.0, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            with self.up():
                task_status.started()
                await trio.sleep_forever()
        finally:
            with trio.move_on_after(goodbye, shield=True):
                await trio.sleep(self.closing)

    def publisher(self, to: str) -> StagePublisher:
        return StagePublisher(self, to)


class StagePublisher(Publisher):
    def __init__(self, broker: StageBroker, name: str) -> None:
        self.broker = self._broker = broker
        self.name = name

    async def send(self, letter: Letter) -> None:
        await self._broker.until_up()
        await trio.sleep(self._broker.publishing)
        if self._broker.errors:
            raise self._broker.errors.pop(0)
        self._broker.published.append((trio.current_time(), self.name, letter))


class StageQueue(Source[bytes]):
    """A source with a script: what it hands out, what it decides, and how long each call takes (`math.inf`: hangs)."""

    def __init__(
        self,
        broker: StageBroker,
        messages: Iterable[bytes] = (),
        *,
        name: str = "q",
        table: Callable[[Ending, Delivery[Any], Policy], Plan[Any]] | None = None,
        at_most_once: bool = False,
        lease: float | None = None,
        settles: Settles = Settles.TOGETHER,
        limit: int = 8,
        copies: int = 100,
        settling: float = 0.0,
        extending: float = 0.0,
        giving_back: float = 0.0,
        detaching: float = 0.0,
        verdicts: Iterable[Verdict] = (),
        link: Callable[[StageQueue], Link[bytes]] | None = None,
    ) -> None:
        self.broker = broker
        self.name = name
        self.settles = settles
        self.at_most_once = at_most_once
        self.lease = lease
        self.copies = copies
        self.table = table or (settled_on_arrival if at_most_once else rejected)
        self.messages = list(messages)
        self.settling, self.extending, self.giving_back, self.detaching = settling, extending, giving_back, detaching
        self.verdicts = list(verdicts)
        self.said: list[tuple[bytes, str]] = []
        self.given_back: list[bytes] = []
        self.lives = 0
        self.most = 0
        self.overlaps = 0
        """How often an extension began while a settlement of the same delivery was on the wire."""
        self._limit = limit
        self._link = link or StageLink

    def limit(self, concurrency: int, size: int = 1) -> int:
        return self._limit

    def decide(self, outcome: Ending, delivery: Delivery[Any], policy: Policy) -> Plan[Any]:
        return self.table(outcome, delivery, policy)

    @asynccontextmanager
    async def attach(
        self, subscription: str, lost: Lost, goodbye: float, policy: Policy = Policy(), *, limit: int = 1, size: int = 1
    ) -> AsyncGenerator[Link[bytes], None]:
        await trio.lowlevel.checkpoint()
        self.lives += 1
        try:
            yield self._link(self)
        finally:
            with trio.move_on_after(goodbye, shield=True):
                await trio.sleep(self.detaching)


class StageLink(Link[bytes]):
    def __init__(self, queue: StageQueue) -> None:
        self._queue = queue
        self._settling: set[Received[Any]] = set()
        self._held = 0

    async def receive(self, room: int) -> Sequence[Received[bytes]]:
        queue = self._queue
        await trio.lowlevel.checkpoint()
        while not queue.messages:
            await trio.sleep(0.01 if queue.messages else 1.0)
        taken, queue.messages = queue.messages[:room], queue.messages[room:]
        self._held += len(taken)
        queue.most = max(queue.most, self._held)
        expires = None if queue.lease is None else trio.current_time() + queue.lease
        return [Received(self._delivery(body), None, expires) for body in taken]

    def _delivery(self, body: bytes) -> Delivery[bytes]:
        return Delivery(
            body=body,
            message=body,
            headers={},
            attempt=1,
            redelivery_count=0,
            source=self._queue.name,
            id=body.decode(),
            key=None,
        )

    def stop(self) -> None:
        pass

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Verdict]:
        queue = self._queue
        asked = {order.received for order in settlements}
        self._settling |= asked
        try:
            await trio.sleep(queue.settling)
        finally:
            self._settling -= asked
        self._held -= len(settlements)
        verdicts = [queue.verdicts.pop(0) if queue.verdicts else None for _ in settlements]
        for order, verdict in zip(settlements, verdicts, strict=True):
            assert order.plan.verb is not None
            if verdict is None:
                queue.said.append((order.received.delivery.body, order.plan.verb))
        return verdicts

    async def extend(self, held: Sequence[Received[bytes]]) -> Sequence[Received[bytes]]:
        queue = self._queue
        assert queue.lease is not None
        queue.overlaps += len(self._settling.intersection(held))
        await trio.sleep(queue.extending)
        for received in held:
            received.expires = trio.current_time() + queue.lease
        return ()

    async def give_back(self, unsettled: Sequence[Received[bytes]]) -> None:
        await trio.sleep(self._queue.giving_back)
        self._queue.given_back += [received.delivery.body for received in unsettled]


HANGS = math.inf
