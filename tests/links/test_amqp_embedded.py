"""links.amqp.embedded: the same matrix of dispositions as on RabbitMQ, over the real wire, in virtual time."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import attrs
import pytest
import trio
import trio.testing

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from links.amqp.embedded.broker import EmbeddedBroker, QueuePolicy
from links.amqp.embedded.store import recounted
from links.amqp.engine.client_connection import ClientConnection
from links.amqp.engine.engine import Engine
from links.amqp.engine.events import (
    ACCEPTED,
    FAILED,
    REJECTED,
    RELEASED,
    Disposition,
    State,
    Terminus,
)
from links.amqp.engine.handles import Arrival
from links.amqp.engine.receiver import Receiver
from links.amqp.engine.sender import Sender
from links.amqp.engine.session import Session
from links.amqp.engine.settings import Login, Settings
from links.amqp.wire.sections import split
from links.amqp.wire.values import Timestamp
from links.errors import LinkError

pytestmark = pytest.mark.amqp

UNDELIVERABLE = Disposition(State.MODIFIED, failed=True, undeliverable=True)
UNFLAGGED = Disposition(State.MODIFIED)


def message(body: bytes, header: bytes = b"") -> bytes:
    return header + b"\x00\x53\x75\xa0%c%b" % (len(body), body)


@attrs.define
class Client:
    connection: ClientConnection
    session: Session

    async def receiver(self, address: str, credit: int = 0, *, topic: bool = False) -> Receiver:
        receiver = self.connection.attach_receiver(self.session, Terminus(address, ("topic",) if topic else ()))
        await receiver.attached()
        if credit:
            receiver.grant(credit)
        return receiver

    async def sender(self, address: str) -> Sender:
        sender = self.connection.attach_sender(self.session, Terminus(address))
        await sender.attached()
        return sender


@asynccontextmanager
async def client(broker: EmbeddedBroker) -> AsyncGenerator[Client, None]:
    async with trio.open_nursery() as nursery:
        connection = ClientConnection(broker.connect_in_memory(), Engine(Settings("client", login=Login())))

        async def run() -> None:
            with suppress(LinkError):
                await connection.run()

        nursery.start_soon(run)
        await connection.opened()
        yield Client(connection, await connection.begin())
        connection.close()


async def seen(receiver: Receiver, count: int) -> list[tuple[bytes, int | None]]:
    """The next deliveries, each accepted: body and delivery-count."""
    found: list[tuple[bytes, int | None]] = []
    with trio.fail_after(5):
        while len(found) < count:
            for arrival in await receiver.receive(count - len(found)):
                receiver.settle(arrival)
                found.append(told(arrival))
    return found


def told(arrival: Arrival) -> tuple[bytes, int | None]:
    sections = split(arrival.raw)
    return sections.body, sections.delivery_count


MATRIX = {
    "accepted": (ACCEPTED, None, False),
    "modified(failed)": (FAILED, 1, False),
    "modified(failed, undeliverable)": (UNDELIVERABLE, None, True),
    "modified()": (UNFLAGGED, 0, False),
    "released": (RELEASED, 0, False),
    "rejected": (REJECTED, None, True),
    "detach": ("detach", 0, False),
    "end": ("end", 0, False),
    "close": ("close", 0, False),
    "connection drop": ("drop", 1, False),
}
"""What is said of the first of three messages; with which delivery-count it is back at the head; or dead-lettered."""


@pytest.mark.parametrize("how", MATRIX)
async def test_the_matrix(how: str, autojump_clock: trio.testing.MockClock) -> None:
    said, count, buried = MATRIX[how]
    broker = EmbeddedBroker(policies={"q": QueuePolicy(dead_letter="dead")})
    async with broker.running():
        for body in (b"m1", b"m2", b"m3"):
            broker.publish("q", message(body))
        async with client(broker) as first:
            receiver = await first.receiver("q", 1)
            [arrival] = await receiver.receive(1)
            assert told(arrival) == (b"m1", None)
            if isinstance(said, Disposition):
                receiver.settle(arrival, said)
                await receiver.proved()
            elif said == "detach":
                receiver.detach()
                await receiver.detached()
            elif said == "end":
                first.session.end()
                await first.session.ended()
            elif said == "drop":
                broker.peers[0].sever()
        async with client(broker) as second:
            receiver = await second.receiver("q", 10)
            assert await seen(receiver, 2 if count is None else 3) == [
                *([] if count is None else [(b"m1", count)]),
                (b"m2", None),
                (b"m3", None),
            ]
            await receiver.proved()
            assert (broker.ready("q"), broker.unsettled("q")) == ([], 0)
            if buried:
                assert await seen(await second.receiver("dead", 1), 1) == [(b"m1", 1)]
            else:
                assert broker.ready("dead") == []


async def test_a_hundred_retries_are_counted(autojump_clock: trio.testing.MockClock) -> None:
    broker = EmbeddedBroker()
    async with broker.running(), client(broker) as at:
        broker.publish("q", message(b"x"))
        receiver = await at.receiver("q", 1)
        counts = []
        for _ in range(100):
            [arrival] = await receiver.receive(1)
            counts.append(told(arrival)[1])
            receiver.settle(arrival, FAILED)
            receiver.grant(1)
        assert counts == [None, *range(1, 100)]


async def test_the_delivery_limit_sends_to_the_dead_letter(autojump_clock: trio.testing.MockClock) -> None:
    """Limit 2: three deliveries, then the dead letter, as on RabbitMQ; without a dead letter it is gone."""
    for target in ("dead", None):
        broker = EmbeddedBroker(default=QueuePolicy(dead_letter=target, delivery_limit=2))
        async with broker.running(), client(broker) as at:
            broker.publish("q", message(b"x"))
            receiver = await at.receiver("q", 10)
            for _ in range(3):
                [arrival] = await receiver.receive(1)
                receiver.settle(arrival, FAILED)
            await receiver.proved()
            assert (broker.ready("q"), broker.unsettled("q")) == ([], 0)
            assert len(broker.ready("dead")) == (1 if target else 0)


async def test_a_delivery_time_holds_a_message_back(autojump_clock: trio.testing.MockClock) -> None:
    """An hour in milliseconds of real time, with the true frames; others overtake it, and it is counted."""
    broker = EmbeddedBroker()
    began = time.monotonic()
    async with broker.running(), client(broker) as at:
        for body in (b"late", b"soon"):
            broker.publish("q", message(body))
        receiver = await at.receiver("q", 10)
        late, soon = await receiver.receive(2)
        start = trio.current_time()
        for arrival, delay in ((late, 3600), (soon, 60)):
            due = {"x-opt-delivery-time": Timestamp(int((time.time() + delay) * 1000))}
            receiver.settle(arrival, Disposition(State.MODIFIED, failed=True, annotations=due))
        await receiver.proved()
        assert (broker.delayed("q"), broker.unsettled("q")) == (2, 0)
        times = []
        for expected in ((b"soon", 1), (b"late", 1)):
            [arrival] = await receiver.receive(1)
            assert told(arrival) == expected
            receiver.settle(arrival)
            times.append(trio.current_time() - start)
        assert times == pytest.approx([60, 3600], abs=2)
        await receiver.proved()
    assert time.monotonic() - began < 10


async def test_consumers_compete_in_turn_by_credit(autojump_clock: trio.testing.MockClock) -> None:
    broker = EmbeddedBroker()
    async with broker.running(), client(broker) as one, client(broker) as other:
        receivers = [await one.receiver("q", 100), await other.receiver("q", 100), await other.receiver("q", 2)]
        await trio.sleep(1)
        for number in range(20):
            broker.publish("q", message(b"%d" % number))
        await trio.sleep(1)
        assert [len(receiver.arrived) for receiver in receivers] == [9, 9, 2]
        assert broker.unsettled("q") == 20


async def test_unsettled_never_exceeds_credit(autojump_clock: trio.testing.MockClock) -> None:
    """A-5.4."""
    broker = EmbeddedBroker()
    async with broker.running(), client(broker) as at:
        receiver = await at.receiver("q", 2)
        for number in range(3):
            broker.publish("q", message(b"%d" % number))
        await trio.sleep(1)
        assert (len(receiver.arrived), broker.unsettled("q")) == (2, 2)
        receiver.settle(receiver.arrived[0], RELEASED)
        receiver.grant(1)
        await trio.sleep(1)
        assert [told(each)[0] for each in receiver.arrived] == [b"0", b"1", b"0"]


@pytest.mark.parametrize(("address", "topic"), [("news", True), ("topic://news", False)])
async def test_a_topic_goes_to_everybody(address: str, topic: bool, autojump_clock: trio.testing.MockClock) -> None:
    broker = EmbeddedBroker()
    async with broker.running(), client(broker) as one, client(broker) as other:
        receivers = [await each.receiver(address, 10, topic=topic) for each in (one, other)]
        sender = await one.sender(address)
        for body in (b"a", b"b"):
            assert await (await sender.send(message(body))).answered() == ACCEPTED
        for receiver in receivers:
            assert await seen(receiver, 2) == [(b"a", None), (b"b", None)]
        receivers[0].detach()
        await receivers[0].detached()
        await (await sender.send(message(b"c"))).answered()
        assert await seen(receivers[1], 1) == [(b"c", None)]
        assert not broker.store.queues


async def test_a_subscription_has_retries_of_its_own(autojump_clock: trio.testing.MockClock) -> None:
    broker = EmbeddedBroker()
    async with broker.running(), client(broker) as at:
        one, other = [await at.receiver("news", 10, topic=True) for _ in range(2)]
        broker.publish("news", message(b"x"))
        [arrival] = await one.receive(1)
        one.settle(arrival, FAILED)
        assert await seen(one, 1) == [(b"x", 1)]
        assert await seen(other, 1) == [(b"x", None)]


async def test_our_own_message_has_no_header_until_it_comes_again(autojump_clock: trio.testing.MockClock) -> None:
    """K-77: a first delivery goes out as it came."""
    broker = EmbeddedBroker()
    async with broker.running(), client(broker) as at:
        raw = message(b"x")
        receiver, sender = await at.receiver("q", 10), await at.sender("q")
        await (await sender.send(raw)).answered()
        [arrival] = await receiver.receive(1)
        assert arrival.raw == raw
        receiver.settle(arrival, FAILED)
        [arrival] = await receiver.receive(1)
        assert arrival.raw == b"\x00\x53\x70\xc0\x0a\x05\x40\x40\x40\x42\x70\x00\x00\x00\x01" + raw


@pytest.mark.parametrize(
    ("header", "kept"),
    [
        (b"", b"\x40\x40\x40"),
        (b"\x00\x53\x70\x45", b"\x40\x40\x40"),
        (b"\x00\x53\x70\xc0\x02\x01\x41", b"\x41\x40\x40"),
        (
            b"\x00\x80" + b"\x00" * 7 + b"\x70\xc0\x0c\x05\x41\x50\x07\x70\x00\x00\x00\x09\x41\x52\x05",
            b"\x41\x50\x07\x70\x00\x00\x00\x09",
        ),
    ],
)
def test_a_count_is_spliced_in(header: bytes, kept: bytes) -> None:
    for count in (0, 3, 300):
        again = recounted(message(b"x", header), count)
        assert kept in again[:20]
        assert (split(again).body, split(again).delivery_count) == (b"x", count)
        assert again.endswith(message(b"x"))


def test_a_count_of_what_cannot_be_read_is_left_out() -> None:
    assert recounted(b"\xff\x00garbage", 3) == b"\xff\x00garbage"
