"""What the tests of links.amqp as a whole stand on: a broker under test, a handler with a script, a trace of the wire.

    async def test_this(place: Place, clock: Clock) -> None:        # once for each of `SHAPES`
        name = await place.queue()
        broker = place.broker()

    @places("embedded", "4.3-quorum")                               # of these
    async def test_that(place: Place, clock: Clock) -> None: ...

`clock` is virtual where nothing but memory is between us and the broker; a test that does not ask for it hangs no
less, but waits in real time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any, Final

import attrs
import pytest
import trio
from trio.abc import Clock
from trio.testing import MockClock

from actors import Runtime, Subscription, open_runtime
from links.abc import Received
from links.amqp.addresses import Queue
from links.amqp.broker import AmqpBroker
from links.amqp.embedded.broker import EmbeddedBroker, QueuePolicy
from links.amqp.engine.events import State
from settlement import Ack, Delivery, Outcome
from settlement.ledger import Line
from tests.links.rabbit_kit import GIVEN, Rabbit, count_ready, node
from tests.links.wire_kit import Trace, Wire

PATIENCE: Final = 20.0
"""Seconds for anything that must happen."""


# --- what is known of each broker


class Reads(Enum):
    """How far a broker looks into what is published; what it finds wrong ends the publisher's link or session."""

    NOTHING = "nothing"
    TO_THE_BODY = "all sections before the body"
    ALL = "everything"


@attrs.frozen(kw_only=True)
class Can:
    """How brokers differ; each is asserted somewhere, and stands in docs/brokers.md."""

    counts: bool = True
    """The delivery-count grows with *modified*, delivery-failed, and when the connection broke."""
    counts_detach: bool = False
    """It grows with a detach, too."""
    header_at_first: bool = True
    """The first delivery has a header section, whatever was published."""
    native: bool = False
    """*modified* with a time delays."""
    topics: bool = False
    reads: Reads = Reads.ALL


EMBEDDED: Final = Can(header_at_first=False, native=True, topics=True, reads=Reads.NOTHING)
SHAPES: Final[Mapping[str, Can]] = {
    "embedded": EMBEDDED,
    "embedded-tcp": EMBEDDED,
    "4.3-quorum": Can(native=True),
    "4.3-classic": Can(counts_detach=True),
    "4.0-quorum": Can(reads=Reads.TO_THE_BODY),
    "4.0-classic": Can(counts=False, reads=Reads.TO_THE_BODY),
}
"""`embedded`: over memory streams, in virtual time. The numbers are RabbitMQ's."""
_RABBITS: Final = tuple(name for name in SHAPES if not name.startswith("embedded"))


# --- a broker under test


@attrs.define
class Place:
    """One broker, and one kind of queue there."""

    shape: str
    trace: Trace = attrs.field(factory=Trace)
    """What passed on the connections that `broker()` made, in order."""
    wires: list[Wire] = attrs.field(factory=list[Wire])
    """Those connections."""

    @property
    def can(self) -> Can:
        return SHAPES[self.shape]

    @property
    def is_rabbitmq(self) -> bool:
        return isinstance(self, OnRabbitMQ)

    def broker(self, **options: Any) -> AmqpBroker:
        """A broker that nobody has opened; its wire is traced."""
        return AmqpBroker(self.url, connect=self._connect, **options)

    async def _connect(self) -> Wire:
        wire = Wire(await self.dial(), self.trace, len(self.wires))
        self.wires.append(wire)
        return wire

    async def cut(self) -> None:
        """Close each connection of ours without a word."""
        for wire in self.wires:
            await trio.aclose_forcefully(wire)

    def address(self, name: str) -> str:
        """A queue's address as it stands in an attach."""
        return name

    # --- what the two kinds of brokers do differently

    @property
    def url(self) -> str:
        raise NotImplementedError

    async def dial(self) -> trio.abc.Stream:
        raise NotImplementedError

    async def queue(self, dead_letter: str | None = None, *, limited: bool = False) -> str:
        """A new queue; `dead_letter`: where the broker puts what it is told to get rid of. Without a delivery limit,
        unless `limited`: then with the one that it has where nothing is said.
        """
        raise NotImplementedError

    async def ready(self, name: str) -> int:
        """How many messages a queue has ready for whoever takes them."""
        raise NotImplementedError

    async def until_ready(self, name: str, count: int) -> None:
        """Wait until a queue has so many."""
        deadline = trio.current_time() + PATIENCE
        while (ready := await self.ready(name)) != count:
            assert trio.current_time() < deadline, f"{name} has {ready} messages ready, not {count}"
            await trio.sleep(0.005)


@attrs.define
class Embedded(Place):
    server: EmbeddedBroker = attrs.field(factory=EmbeddedBroker)
    port: int = 0
    """0: memory streams."""
    _count: int = 0

    @property
    def url(self) -> str:
        return "amqp://localhost"

    async def dial(self) -> trio.abc.Stream:
        if self.port:
            return await trio.open_tcp_stream("127.0.0.1", self.port)
        return await self.server.connect()

    async def queue(self, dead_letter: str | None = None, *, limited: bool = False) -> str:
        assert limited in (False, True)  # there is no limit, anyway
        self._count += 1
        name = f"queue {self._count}"
        self.server.store.policies[name] = QueuePolicy(dead_letter)
        return name

    async def ready(self, name: str) -> int:
        await trio.lowlevel.checkpoint()
        return len(self.server.ready(name))


@attrs.define
class OnRabbitMQ(Place):
    rabbit: Rabbit = attrs.field(kw_only=True)

    @property
    def url(self) -> str:
        return self.rabbit.url

    def address(self, name: str) -> str:
        return f"/queues/{name}"

    async def dial(self) -> trio.abc.Stream:
        stream = await trio.open_tcp_stream(self.rabbit.node.host, self.rabbit.node.port)
        stream.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)
        return stream

    async def queue(self, dead_letter: str | None = None, *, limited: bool = False) -> str:
        arguments: dict[str, object] = {} if limited or self.rabbit.kind == "classic" else {"x-delivery-limit": -1}
        if dead_letter is not None:
            arguments |= {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead_letter}
        return await self.rabbit.queue(arguments)

    async def ready(self, name: str) -> int:
        return await trio.to_thread.run_sync(count_ready, self.rabbit.node, name)


# --- what goes in and what is there


async def put(broker: AmqpBroker, name: str, *raws: bytes) -> list[State]:
    """Publish encoded messages as they stand; what the broker said of each."""
    outcomes: list[State] = []
    for raw in raws:
        outcome = await (await (await broker.life.sender(Queue(name))).send(raw)).answered()
        assert outcome is not None
        outcomes.append(outcome.state)
    return outcomes


def never_lost(received: Received[Any], line: Line) -> None:
    raise AssertionError(f"{received} was lost: {line}")


async def take(broker: AmqpBroker, name: str, count: int) -> list[Delivery[bytes]]:
    """The next messages of a queue; they go back when they were looked at."""
    found: list[Delivery[bytes]] = []
    with trio.fail_after(PATIENCE):
        async with broker.queue(name).attach("take", never_lost, 5.0) as link:
            while len(found) < count:
                found += [each.delivery for each in await link.receive(count - len(found))]
    return found


def raw_of(delivery: Delivery[Any]) -> bytes:
    """The message as it was on the wire."""
    raw: bytes = delivery._handle.raw
    return raw


# --- a handler


class Handler:
    """Remembers what it gets, and answers by the script: outcomes by body, one per call, and `Ack` when they end."""

    def __init__(self, script: Mapping[bytes, Iterable[Outcome | None]] | None = None) -> None:
        self._script = {body: iter(outcomes) for body, outcomes in (script or {}).items()}
        self.deliveries: list[Delivery[Any]] = []
        self.times: list[float] = []
        self._changed = trio.Event()

    async def __call__(self, delivery: Delivery[Any]) -> Outcome | None:
        self.note(delivery)
        await trio.lowlevel.checkpoint()
        return next(self._script.get(delivery.body, iter(())), Ack())

    def note(self, delivery: Delivery[Any]) -> None:
        self.deliveries.append(delivery)
        self.times.append(trio.current_time())
        self._changed.set()
        self._changed = trio.Event()

    @property
    def bodies(self) -> list[bytes]:
        return [delivery.body for delivery in self.deliveries]

    def of(self, body: bytes) -> list[Delivery[Any]]:
        return [delivery for delivery in self.deliveries if delivery.body == body]

    async def has(self, *bodies: bytes) -> None:
        """Wait until each was handled, as often as it stands here."""
        with trio.move_on_after(PATIENCE):
            while Counter(bodies) - Counter(self.bodies):
                await self._changed.wait()
            return
        raise AssertionError(f"handled was no more than {self.bodies}, not {bodies}")


class Hanging(Handler):
    """Never answers."""

    async def __call__(self, delivery: Delivery[Any]) -> None:
        self.note(delivery)
        await trio.sleep_forever()


class LeftError(Exception):
    """How a block is left."""


@asynccontextmanager
async def dropped(*subscriptions: Subscription[Any]) -> AsyncGenerator[Runtime, None]:
    """Run subscriptions beside the block; at its end what is in hand is dropped."""
    with pytest.raises(LeftError):  # noqa: PT012 -- a scenario raises where it ends
        async with open_runtime(*subscriptions) as runtime:
            yield runtime
            raise LeftError


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that nobody tells of."""
    deadline = trio.current_time() + PATIENCE
    while not condition():
        assert trio.current_time() < deadline, "it did not happen"
        await trio.sleep(0.005)


# --- for pytest


def places(*shapes: str) -> pytest.MarkDecorator:
    """The shapes that a test is for."""
    return pytest.mark.parametrize("shape", [_param(shape) for shape in shapes], indirect=True)


def _param(shape: str) -> Any:
    return pytest.param(shape, marks=[pytest.mark.servers] if shape in _RABBITS else [])


rabbits = places(*_RABBITS)
"""RabbitMQ alone."""


@pytest.fixture(params=[_param(shape) for shape in SHAPES])
def shape(request: pytest.FixtureRequest) -> str:
    """A key of `SHAPES`."""
    if GIVEN and request.param in _RABBITS:
        pytest.skip("needs the management of a RabbitMQ of ours, and TEST_AMQP_URL names another broker")
    name: str = request.param
    if name in _RABBITS:
        node(name.partition("-")[0])  # or a skip that says why
    return name


@pytest.fixture
def clock(shape: str) -> Clock | None:
    """Virtual time for memory streams."""
    return MockClock(autojump_threshold=0) if shape == "embedded" else None


@pytest.fixture
async def place(shape: str) -> AsyncGenerator[Place, None]:
    """The broker under test; what it made is deleted at the end."""
    async with _opened(shape) as place:
        yield place


@asynccontextmanager
async def _opened(shape: str) -> AsyncGenerator[Place, None]:
    if shape in _RABBITS:
        version, _, kind = shape.partition("-")
        rabbit = Rabbit(node(version), kind)
        await trio.to_thread.run_sync(rabbit.arrive)
        try:
            yield OnRabbitMQ(shape, rabbit=rabbit)
        finally:
            rabbit.leave()
        return
    place = Embedded(shape)
    if shape == "embedded":
        async with place.server.running():
            yield place
    else:
        async with place.server.serve() as url:
            place.port = int(url.rpartition(":")[2])
            yield place
