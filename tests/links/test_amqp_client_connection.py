"""links.amqp.engine.client_connection: its tasks, over memory streams in virtual time, against the embedded broker."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import attrs
import pytest
import trio
import trio.testing

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from links.amqp.embedded.broker import EmbeddedBroker
from links.amqp.embedded.server_connection import ServerConnection
from links.amqp.engine.client_connection import ClientConnection
from links.amqp.engine.engine import Engine
from links.amqp.engine.events import ACCEPTED, Condition, Terminus
from links.amqp.engine.receiver import Receiver
from links.amqp.engine.sender import Sender
from links.amqp.engine.session import Session
from links.amqp.engine.settings import Login, Settings
from links.errors import ConnectionBroken, LinkBroken, LinkError, LinkRefused

pytestmark = pytest.mark.amqp

IDLE = 10.0


@attrs.define
class Scene:
    broker: EmbeddedBroker
    connection: ClientConnection
    session: Session
    ended: list[LinkError]

    @property
    def peer(self) -> ServerConnection:
        return self.broker.peers[0]

    async def receiver(self, address: str = "orders") -> Receiver:
        receiver = self.connection.attach_receiver(self.session, Terminus(address))
        await receiver.attached()
        return receiver

    async def sender(self, address: str = "orders") -> Sender:
        sender = self.connection.attach_sender(self.session, Terminus(address))
        await sender.attached()
        return sender


@asynccontextmanager
async def scene(
    broker: EmbeddedBroker | None = None,
    login: Login | None = None,
    wrap: Callable[[trio.abc.Stream], trio.abc.Stream] = lambda stream: stream,
) -> AsyncGenerator[Scene, None]:
    """A broker and an open connection to it; at the end of the block the connection is closed."""
    broker = broker or EmbeddedBroker(idle_timeout=IDLE)
    ended: list[LinkError] = []
    async with broker.running(), trio.open_nursery() as nursery:
        settings = Settings("client", login=login or Login(), idle_timeout=IDLE)
        connection = ClientConnection(wrap(broker.connect_in_memory()), Engine(settings))

        async def run() -> None:
            try:
                await connection.run()
            except LinkError as error:
                ended.append(error)

        nursery.start_soon(run)
        await connection.opened()
        session = await connection.begin()
        await session.opened()
        yield Scene(broker, connection, session, ended)
        connection.close()


async def test_deliveries_come_and_are_settled(autojump_clock: trio.testing.MockClock) -> None:
    async with scene() as at:
        receiver, sender = await at.receiver(), await at.sender()
        for number in range(5):
            assert await (await sender.send(b"%d" % number)).answered() == ACCEPTED
        receiver.grant(3)
        with trio.fail_after(1):
            taken = await receiver.receive(2)
            taken += await receiver.receive(2)
        assert [each.raw for each in taken] == [b"0", b"1", b"2"]
        assert at.peer.unsettled == 3
        for each in taken:
            assert receiver.settle(each)
        await at.connection.written()
        assert await receiver.proved()
        assert (at.peer.unsettled, [each.raw for each in at.broker.store.queue("orders")]) == (0, [b"3", b"4"])
    assert at.ended == []


async def test_a_cancelled_receive_has_taken_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with scene() as at:
        receiver = await at.receiver()
        receiver.grant(1)
        with trio.move_on_after(5):
            await receiver.receive(1)
        at.broker.publish("orders", b"x")
        with trio.move_on_after(1) as scope:
            scope.cancel()
            await receiver.receive(1)
        with trio.fail_after(1):
            assert len(await receiver.receive(1)) == 1


async def test_a_refused_attach_says_why(autojump_clock: trio.testing.MockClock) -> None:
    async with scene() as at:
        at.broker.refuse("gone", Condition("amqp:not-found", "no queue 'gone'"))
        for by_session in (False, True):
            at.broker.refuses_by_session = by_session
            session = await at.connection.begin()
            receiver = at.connection.attach_receiver(session, Terminus("gone"))
            with pytest.raises(LinkRefused, match=r"gone.*amqp:not-found"):
                await receiver.attached()
        await at.receiver("here")


async def test_a_link_that_is_detached_breaks_alone(autojump_clock: trio.testing.MockClock) -> None:
    async with scene() as at:
        receiver, other, sender = await at.receiver(), await at.receiver("other"), await at.sender()
        at.peer.detach("orders", Condition("amqp:resource-deleted", "queue deleted"))
        for call in (receiver.until_broken, lambda: receiver.receive(1), receiver.proved, lambda: sender.send(b"x")):
            with pytest.raises(LinkBroken, match="amqp:resource-deleted"):
                await call()
        other.grant(1)
        at.broker.publish("other", b"x")
        assert len(await other.receive(1)) == 1


async def test_a_severed_connection_wakes_everybody(autojump_clock: trio.testing.MockClock) -> None:
    async with scene() as at:
        receiver, sender = await at.receiver(), await at.sender()
        at.peer.freeze()
        sent = await sender.send(b"x")
        woken: list[type[LinkError]] = []

        async def wait(call: Callable[[], object]) -> None:
            with pytest.raises(ConnectionBroken) as caught:
                await call()  # type: ignore[misc]
            woken.append(type(caught.value))

        async with trio.open_nursery() as nursery:
            calls: list[Callable[[], object]] = [
                receiver.until_broken,
                lambda: receiver.receive(1),
                lambda: receiver.proved(60.0),
                sent.answered,
                at.session.opened if not at.session.handle.opened else receiver.until_broken,
                lambda: at.connection.next_frames(10**9),
            ]
            for call in calls:
                nursery.start_soon(wait, call)
            await trio.sleep(0.5)
            at.peer.sever()
        assert len(woken) == len(calls)
        with pytest.raises(ConnectionBroken):
            await at.connection.begin()
    assert [type(error) for error in at.ended] == [ConnectionBroken]


async def test_the_brokers_reason_for_closing_is_told(autojump_clock: trio.testing.MockClock) -> None:
    async with scene() as at:
        receiver = await at.receiver()
        at.peer.close(Condition("amqp:connection:forced", "by the operator"))
        with pytest.raises(ConnectionBroken, match="amqp:connection:forced: by the operator"):
            await receiver.until_broken()
    assert str(at.ended[0]) == "amqp:connection:forced: by the operator"


async def test_a_frozen_peer_is_noticed_within_twice_the_idle_timeout(autojump_clock: trio.testing.MockClock) -> None:
    async with scene() as at:
        receiver = await at.receiver()
        await trio.sleep(1000)  # heartbeats keep it
        at.peer.freeze()
        began = trio.current_time()
        with pytest.raises(ConnectionBroken, match=r"amqp:resource-limit-exceeded"):
            await receiver.until_broken()
        assert trio.current_time() - began <= 2 * IDLE


class Stuck(trio.abc.Stream):
    """A stream whose other end takes nothing more after a while, as a full socket."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.is_stuck = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_stuck:
            await trio.sleep_forever()
        await self.stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self.stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        if self.is_stuck:
            await trio.sleep_forever()
        return await self.stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        await self.stream.aclose()


async def test_a_writer_that_is_stuck_hides_no_silence(autojump_clock: trio.testing.MockClock) -> None:
    streams: list[Stuck] = []

    def wrap(stream: trio.abc.Stream) -> trio.abc.Stream:
        streams.append(Stuck(stream))
        return streams[0]

    async with scene(wrap=wrap) as at:
        receiver = await at.receiver()
        streams[0].is_stuck = True
        began = trio.current_time()
        receiver.grant(1)
        with pytest.raises(ConnectionBroken):
            await receiver.until_broken()
        assert trio.current_time() - began <= 2 * IDLE
        with pytest.raises(ConnectionBroken):
            await at.connection.written()
    assert trio.current_time() - began <= 2 * IDLE + 2


async def test_a_mute_peer_at_the_start(autojump_clock: trio.testing.MockClock) -> None:
    ours, _theirs = trio.testing.memory_stream_pair()
    connection = ClientConnection(ours, Engine(Settings("client", login=Login(), idle_timeout=IDLE)))
    with trio.fail_after(2 * IDLE), pytest.raises(ConnectionBroken, match="resource-limit"):
        await connection.run()
    with pytest.raises(ConnectionBroken):
        await connection.opened()


@pytest.mark.parametrize("said", [b"HTTP/1.0 400 Bad\r\n\r\n", b""])
async def test_a_stranger_is_a_refusal_and_an_early_end_is_weather(
    said: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    connection = ClientConnection(ours, Engine(Settings("client", login=Login(), idle_timeout=IDLE)))
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def stranger() -> None:
            await theirs.receive_some()
            if said:
                await theirs.send_all(said)
            await theirs.aclose()

        with pytest.raises(LinkRefused if said else ConnectionBroken):
            await connection.run()


@pytest.mark.parametrize(
    ("login", "welcome"),
    [
        (Login("PLAIN", "guest", "secret"), True),
        (Login("PLAIN", "guest", "wrong"), False),
        (Login("PLAIN", "nobody", "secret"), False),
        (Login("ANONYMOUS"), False),
        (Login("EXTERNAL"), False),
    ],
)
async def test_logins(login: Login, welcome: bool, autojump_clock: trio.testing.MockClock) -> None:
    """The mechanism is pinned: no wrong setup logs in as somebody else. No error and no repr holds the password."""
    broker = EmbeddedBroker(users={"guest": "secret"}, anonymous=False)
    assert "secret" not in repr(login)
    async with broker.running(), trio.open_nursery() as nursery:
        connection = ClientConnection(broker.connect_in_memory(), Engine(Settings("client", login=login)))
        if welcome:
            nursery.start_soon(connection.run)
            await connection.opened()
            assert broker.peers[0].sasl.user == "guest"
            connection.close()
        else:
            with pytest.raises(LinkRefused) as refused:
                await connection.run()
            assert "secret" not in str(refused.value)
            assert "wrong" not in str(refused.value)


async def test_a_goodbye_is_bounded_by_its_owner(autojump_clock: trio.testing.MockClock) -> None:
    broker = EmbeddedBroker()
    async with broker.running(), trio.open_nursery() as nursery:
        connection = ClientConnection(broker.connect_in_memory(), Engine(Settings("client")))
        scope = trio.CancelScope()

        async def run() -> None:
            with scope:
                await connection.run()

        nursery.start_soon(run)
        await connection.opened()
        broker.peers[0].freeze()
        connection.close()
        began = scope.deadline = trio.current_time() + 5.0
        receiver = await connection.begin()
        with pytest.raises(ConnectionBroken):
            await receiver.opened()
        assert trio.current_time() == began


async def test_a_cancelled_connection_tells_its_waiters(autojump_clock: trio.testing.MockClock) -> None:
    async with scene() as at:
        receiver = await at.receiver()
        at.connection._scope.cancel()
        with pytest.raises(ConnectionBroken, match="this side"):
            await receiver.receive(1)
