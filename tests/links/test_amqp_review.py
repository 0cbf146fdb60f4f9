"""links.amqp under review: peers that say odd things, unlucky ticks, and names that C reads differently."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from actors import Subscription, open_runtime
from links.amqp.addresses import Queue, Raw, Topic
from links.amqp.broker import AmqpBroker
from links.amqp.connection_life import ConnectionLife
from links.amqp.deliveries import disposition
from links.amqp.embedded.broker import EmbeddedBroker, QueuePolicy
from links.amqp.engine.binding import lib
from links.amqp.engine.client_connection import ClientConnection
from links.amqp.engine.engine import Engine
from links.amqp.engine.events import Terminus
from links.amqp.engine.session import Session
from links.amqp.engine.settings import Login, Settings
from links.amqp.rabbitmq import Peer
from links.amqp.wire.frames import ATTACH, BEGIN, FLOW, TRANSFER, flow_frame, packed, uint
from links.amqp.wire.values import LIST, MAP, compound, string, symbol, variable
from links.errors import ConnectionBroken
from settlement import Ack, Delivery, Outcome, Policy, Retry, RetryAfter
from settlement.amqp import AT_MOST_ONCE, Modified
from settlement.delays import Native, Scheduled

pytestmark = pytest.mark.amqp

BODY = b"\x00\x53\x75\xa0\x01x"
"""A message: one data section, `x`."""
NULL, TRUE, FALSE = b"\x40", b"\x41", b"\x42"
DETACH, END = 0x16, 0x17

Clock = trio.testing.MockClock


# --- a peer that also says what it is told to


def transfer(handle: bytes, *, settled: bool) -> bytes:
    frame = packed(TRANSFER, [handle, uint(0), variable(0xA0, b"t"), uint(0), TRUE if settled else FALSE])
    return (len(frame) + len(BODY)).to_bytes(4) + frame[4:] + BODY


def attach(*, is_receiver: bool, properties: bytes = NULL) -> bytes:
    source = b"\x00\x53\x28" + compound(LIST, 1, string(b"from"))
    target = b"\x00\x53\x29" + compound(LIST, 1, string(b"to"))
    fields = [string(b"theirs"), uint(9), TRUE if is_receiver else FALSE, NULL, NULL, source, target]
    return packed(ATTACH, [*fields, NULL, NULL, uint(0), NULL, NULL, NULL, properties])


def nested(levels: int) -> bytes:
    value = NULL
    for _ in range(levels):
        value = compound(LIST, 1, value)
    return value


THEIRS = attach(is_receiver=False)
LIST_AS_KEY = compound(MAP, 2, compound(LIST, 1, string(b"a")) + string(b"b"))
DEEP = compound(MAP, 2, symbol("a") + nested(3000))
NO_CHARACTER = compound(MAP, 2, symbol("a") + b"\x73\x00\x11\xff\xff")


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([packed(ATTACH, [string(b"theirs"), uint(9)])], id="an attach without a role"),
        pytest.param([THEIRS, packed(DETACH, [uint(9), TRUE])], id="a link that nobody asked for"),
        pytest.param([THEIRS, transfer(uint(9), settled=False)], id="a delivery on it"),
        pytest.param(
            [
                attach(is_receiver=True),
                packed(FLOW, [*[uint(0), uint(9)] * 2, uint(9), uint(0), uint(9)]),
                packed(DETACH, [uint(9), TRUE]),
            ],
            id="credit on it",
        ),
        pytest.param([attach(is_receiver=False, properties=LIST_AS_KEY)], id="properties with a list as a key"),
        pytest.param([attach(is_receiver=False, properties=DEEP)], id="properties of 3000 levels"),
        pytest.param([attach(is_receiver=False, properties=NO_CHARACTER)], id="properties with a char that is none"),
        pytest.param([packed(BEGIN, [b"\x60\x00\x00", uint(0), uint(9), uint(9)], 7)], id="a session begun twice"),
        pytest.param([packed(END, [], 9)], id="the end of nothing"),
        pytest.param([transfer(uint(77), settled=False)], id="a delivery on no link"),
        pytest.param([packed(0x15, [TRUE, uint(9), uint(4_000_000_000), TRUE])], id="a disposition out of range"),
    ],
)
async def test_what_a_peer_says_by_mistake_is_weather_and_never_a_bug(
    frames: list[bytes], autojump_clock: Clock
) -> None:
    """DESIGN 4: only what is no weather propagates; the service goes on, in this life or the next."""
    handled = trio.Event()

    async def handler(_: Delivery[bytes]) -> None:
        handled.set()

    server = EmbeddedBroker()
    async with server.running():
        client = AmqpBroker("amqp://localhost", connect=server.connect)
        async with open_runtime(Subscription(client.queue("orders"), handler)):
            peer = server.peers[0]
            # in one piece: the peer's own engine does not know of it, and ends the connection when it is answered
            await peer.gate._stream.send_all(b"".join(frames))
            await trio.sleep(1)
            server.publish("orders", BODY)
            with trio.fail_after(60):
                await handled.wait()


# --- unlucky ticks


@asynccontextmanager
async def scene(
    server: EmbeddedBroker, wrap: Callable[[trio.abc.Stream], trio.abc.Stream] = lambda stream: stream
) -> AsyncGenerator[tuple[ClientConnection, Session, list[BaseException]], None]:
    """An open connection and a session on it."""
    ended: list[BaseException] = []
    async with server.running(), trio.open_nursery() as nursery:
        connection = ClientConnection(wrap(server.connect_in_memory()), Engine(Settings("client", login=Login())))

        async def run() -> None:
            try:
                await connection.run()
            except Exception as error:  # noqa: BLE001 -- whatever it is, the test looks at it
                ended.append(error)

        nursery.start_soon(run)
        await connection.opened()
        session = await connection.begin()
        await session.opened()
        yield connection, session, ended
        nursery.cancel_scope.cancel()


class Relaying(trio.abc.Stream):
    """Passes on what comes and goes; subclasses do something beside that."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self.stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self.stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data = await self.stream.receive_some(max_bytes)
        self.received(bytes(data))
        return data

    def received(self, data: bytes) -> None:
        """Called in the tick in which it is handed on."""

    async def aclose(self) -> None:
        await self.stream.aclose()


async def test_bytes_that_come_in_the_tick_of_a_break_are_nobodys(autojump_clock: Clock) -> None:
    """A write fails while the reader has something in hand: a break, and no KeyError."""
    connections: list[ClientConnection] = []

    class Breaking(Relaying):
        def received(self, data: bytes) -> None:
            if BODY in data:
                connections[0].break_off("the connection was cut")

    server = EmbeddedBroker()
    async with scene(server, Breaking) as (connection, session, ended):
        connections.append(connection)
        receiver = connection.attach_receiver(session, Terminus("orders"))
        await receiver.attached()
        receiver.grant(1)
        server.publish("orders", BODY)
        with pytest.raises(ConnectionBroken, match="cut"):
            await receiver.receive(1)
        await trio.testing.wait_all_tasks_blocked()
        assert [type(error) for error in ended] == [ConnectionBroken]


async def test_waiting_for_a_write_ends_where_the_connection_has(autojump_clock: Clock) -> None:
    """`Driver.written` raises what ended the connection, also where something was ordered since."""
    server = EmbeddedBroker()
    async with scene(server) as (connection, _, ended):
        server.peers[0].close()
        await trio.sleep(10)
        assert ended
        connection.kick()
        with trio.fail_after(1), pytest.raises(ConnectionBroken):
            await connection.written()


async def test_a_send_that_is_cancelled_in_the_tick_of_the_credit_was_not_sent(autojump_clock: Clock) -> None:
    """`Sender.send`: cancelled, nothing was sent; and who waits behind it is sent."""
    server = EmbeddedBroker()
    async with scene(server) as (connection, session, _):
        sender = connection.attach_sender(session, Terminus("orders"))
        await sender.attached()
        await trio.sleep(1)
        sender.credit = 0
        scope = trio.CancelScope()

        async def cancelled() -> None:
            with scope:
                await sender.send(b"first")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancelled)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(sender.send, b"second")
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
            sender.on_credit(False)
        assert scope.cancelled_caught
        await trio.sleep(1)
        assert [each.raw for each in server.store.queue("orders")] == [b"second"]


async def test_publishers_share_a_session_also_where_beginning_it_takes_time(autojump_clock: Clock) -> None:
    """A-5.6. A channel rests after the end of a session; three publishers begin meanwhile."""
    server = EmbeddedBroker()
    async with scene(server) as (connection, session, _):
        life = ConnectionLife(connection, Peer(), 1)

        async def publish(name: str) -> None:
            await (await life.sender(Queue(name))).send(BODY)

        session.end()
        await session.ended()
        async with trio.open_nursery() as nursery:
            for name in ("a", "b", "c"):
                nursery.start_soon(publish, name)
        assert len({link.session for link in server.peers[0].producers}) == 1


async def test_at_most_once_nothing_is_handled_before_it_is_accepted_however_long_the_peer_stalls(
    autojump_clock: Clock,
) -> None:
    """A-2.1. Else a break after the stall brings it again, and it is handled twice."""
    handled: list[bytes] = []

    class Stalling(Relaying):
        flows = True

        def received(self, data: bytes) -> None:
            if BODY in data:
                self.flows = False

        async def send_all(self, data: bytes | bytearray | memoryview) -> None:
            if not self.flows:
                await trio.sleep_forever()
            await self.stream.send_all(data)

    async def handler(delivery: Delivery[bytes]) -> None:
        handled.append(delivery.body)

    server = EmbeddedBroker()

    streams: list[type[Relaying]] = [Relaying, Stalling]

    async def connect() -> trio.abc.Stream:
        return streams.pop()(await server.connect())

    async with server.running():
        client = AmqpBroker("amqp://localhost", connect=connect, heartbeat=1000.0)
        async with open_runtime(Subscription(client.queue("orders", settle=AT_MOST_ONCE), handler)) as runtime:
            server.publish("orders", BODY)
            await trio.sleep(10)
            assert handled == []
            server.peers[0].sever()
            await trio.sleep(60)
            assert handled == [b"x"]
            ledger = runtime.ledger("orders")
            assert (ledger.received, ledger.refused) == (1, 1)


# --- the books


async def answered(outcome: Outcome, **options: Any) -> tuple[EmbeddedBroker, Any]:
    """The ledger after one delivery that was answered so, and `Ack` to all later ones; options of the queue."""
    server = EmbeddedBroker()
    outcomes = [outcome]

    async def handler(_: Delivery[bytes]) -> Outcome:
        return outcomes.pop() if outcomes else Ack()

    async with server.running():
        client = AmqpBroker("amqp://localhost", connect=server.connect)
        server.publish("orders", BODY)
        async with open_runtime(Subscription(client.queue("orders", **options), handler)) as runtime:
            await trio.sleep(5)
            return server, runtime.ledger("orders")


@pytest.mark.parametrize(("outcome", "acked", "refused"), [(Retry(), 0, 1), (Ack(), 1, 0)])
async def test_of_a_delivery_that_came_settled_nothing_but_an_ack_is_booked(
    outcome: Outcome, acked: int, refused: int, autojump_clock: Clock
) -> None:
    """OQ-A10: its sender has let it go; a retry that is booked as one would be a message that is gone in silence."""
    server = EmbeddedBroker()

    async def handler(_: Delivery[bytes]) -> Outcome:
        return outcome

    async with server.running():
        client = AmqpBroker("amqp://localhost", connect=server.connect)
        async with open_runtime(Subscription(client.queue("orders"), handler)) as runtime:
            await server.peers[0].gate._stream.send_all(transfer(b"\x43", settled=True))
            await trio.sleep(5)
            ledger = runtime.ledger("orders")
            assert (ledger.received, ledger.acked, ledger.retried, ledger.refused) == (1, acked, 0, refused)
            engine = client.life.connection.engine
            assert [lib.pn_link_unsettled(link.pointer) for link in engine._reader.links.values()] == [0]


async def test_a_delay_beyond_64_bits_is_the_longest_that_there_is(autojump_clock: Clock) -> None:
    """A handler may compute it of a header that anybody wrote: one message must not stop the service."""
    said = disposition(Modified(1e17), 0.0)
    assert said.annotations == {"x-opt-delivery-time": 9_223_372_036_854_775_807}
    server, ledger = await answered(RetryAfter(1e17), delays=Native())
    assert (ledger.delayed, server.delayed("orders")) == (1, 1)
    for annotation in ("x-opt-delivery-time", "x-opt-delivery-delay"):
        _, ledger = await answered(RetryAfter(1e17), delays=Scheduled(annotation))  # this broker looks at none
        assert (ledger.delayed, ledger.acked) == (1, 1)


async def test_an_unreadable_message_that_is_answered_by_retry_after_is_held(autojump_clock: Clock) -> None:
    """A copy of it could not count, and would go round without an end: it is held, and the broker's limit ends it."""
    server = EmbeddedBroker(policies={"orders": QueuePolicy(dead_letter="dead", delivery_limit=2)})
    asked: list[tuple[int, int]] = []

    def again(delivery: Delivery[Any], _: Exception) -> RetryAfter:
        asked.append((round(trio.current_time()), delivery.attempt))
        return RetryAfter(10.0)

    async def handler(_: Delivery[bytes]) -> None:
        pass

    async with server.running():
        client = AmqpBroker("amqp://localhost", connect=server.connect)
        policy = Policy(max_attempts=9, on_undecodable=again)
        server.publish("orders", b"\x00\x53\x75")
        async with open_runtime(Subscription(client.queue("orders"), handler, policy=policy)) as runtime:
            began = round(trio.current_time())
            await trio.sleep(60)
    assert asked == [(began, 1), (began + 10, 1), (began + 20, 1)]
    assert [each.raw for each in server.store.queue("dead")] == [b"\x00\x53\x75"]
    assert (runtime.ledger("orders").delayed, runtime.ledger("orders").owed) == (3, 0)


NO_CREDIT_BEHIND = (
    "after a drain no credit goes out, so the echo has the limit of the flow before it, and a flow that the peer said "
    "before it saw the echo is taken for its answer; harmless unless a peer says a flow of its own accord"
)


@pytest.mark.xfail(strict=True, reason=NO_CREDIT_BEHIND)
async def test_after_a_drain_a_flow_that_was_said_before_proves_nothing(autojump_clock: Clock) -> None:
    """DESIGN 6: *proved* means that the peer has seen the disposition."""
    server = EmbeddedBroker()
    async with scene(server) as (connection, session, _):
        server.publish("orders", BODY)
        receiver = connection.attach_receiver(session, Terminus("orders"))
        await receiver.attached()
        receiver.grant(1)
        (arrival,) = await receiver.receive(1)
        receiver.take_back()
        assert await receiver.proved(math.inf)
        peer = server.peers[0]
        peer.freeze()
        receiver.settle(arrival)
        proved: list[bool] = []

        async def prove() -> None:
            proved.append(await receiver.proved(math.inf))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(prove)
            await trio.sleep(1)
            said = flow_frame(0, b"\x43", incoming=0, outgoing=1, window=9, delivery_count=1, credit=0)
            await peer.gate._stream.send_all(said)
            await trio.sleep(1)
            nursery.cancel_scope.cancel()
        assert peer.unsettled == 1
        assert proved == []


# --- what a user gives


@pytest.mark.parametrize("name", ["orders\0dead", "\ud800"])
@pytest.mark.parametrize("kind", [Queue, Topic, Raw])
def test_a_name_that_the_wire_would_cut_is_refused(kind: type[Queue | Topic | Raw], name: str) -> None:
    """A-5.3. C ends a text at its NUL: a message for "orders", NUL, "dead" went to "orders"."""
    with pytest.raises(ValueError, match="name must be Unicode text without NUL"):
        kind(name)


@pytest.mark.parametrize("argument", ["container_id", "retry_header"])
def test_a_text_that_the_wire_would_cut_is_refused(argument: str) -> None:
    """DESIGN: bad input is a ValueError that names the argument, before there is any IO."""
    options: dict[str, Any] = {argument: "\ud800"}
    with pytest.raises(ValueError, match=f"{argument} must be Unicode text without NUL"):
        AmqpBroker("amqp://localhost", **options)


async def test_a_heartbeat_of_months_is_as_good_as_none(autojump_clock: Clock) -> None:
    """The wire says milliseconds in 32 bits: 49 days; a longer one is no OverflowError in the middle of a dial."""
    server = EmbeddedBroker()
    async with server.running():
        client = AmqpBroker("amqp://localhost", connect=server.connect, heartbeat=1e7)
        async with client.connect():
            await client.publisher("orders").publish(b"x")
    assert [each.raw for each in server.store.queue("orders")] == [BODY]


@pytest.mark.parametrize("error", [ConnectionRefusedError("nobody listens"), trio.BrokenResourceError("cut")])
async def test_a_tunnel_that_is_not_there_is_weather(error: Exception, autojump_clock: Clock) -> None:
    """DESIGN 4: `connect=` raises what sockets raise; the next life tries again, and the service is not dead."""
    server = EmbeddedBroker()
    failures = [error, error]
    handled = trio.Event()

    async def connect() -> trio.abc.Stream:
        if failures:
            raise failures.pop()
        return await server.connect()

    async def handler(_: Delivery[bytes]) -> None:
        handled.set()

    async with server.running():
        server.publish("orders", BODY)
        client = AmqpBroker("amqp://localhost", connect=connect)
        async with open_runtime(Subscription(client.queue("orders"), handler)):
            with trio.fail_after(60):
                await handled.wait()
