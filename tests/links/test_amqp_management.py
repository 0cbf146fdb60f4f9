"""links.amqp.management: its messages byte by byte, and in virtual time a peer that only claims to be a RabbitMQ."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import attrs
import pytest
import trio
import trio.testing

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from links.amqp.embedded.broker import EmbeddedBroker
from links.amqp.engine.client_connection import ClientConnection
from links.amqp.engine.engine import Engine
from links.amqp.engine.events import Condition
from links.amqp.engine.settings import Login, Settings
from links.amqp.management import Management, Response, management, request, response_to
from links.amqp.rabbitmq import Peer
from links.amqp.wire.values import Other, Undecodable
from links.errors import ConnectionBroken, LinkBroken, LinkRefused

pytestmark = pytest.mark.amqp


# --- messages, by hand


def test_a_request_is_written_with_an_explicit_null_as_its_body() -> None:
    """Without a body section RabbitMQ ends the session."""
    assert request("7", "GET", "/queues/a", None) == (
        b"\x00\x53\x73\xc0\x1a\x05\xa1\x017\x40\xa1\x09/queues/a\xa1\x03GET\xa1\x03$me"  # properties
        b"\x00\x53\x77\x40"  # amqp-value
    )


def test_a_request_carries_a_map_of_bools_longs_strings_and_maps() -> None:
    fields = {"durable": True, "arguments": {"x-delivery-limit": -1, "x": False}, "kind": "ä"}
    body = request("7", "PUT", "/queues/a", fields).partition(b"\x00\x53\x77")[2]
    assert body == (
        b"\xc1\x42\x06"
        b"\xa1\x07durable\x41"
        b"\xa1\x09arguments\xc1\x20\x04\xa1\x10x-delivery-limit\x81\xff\xff\xff\xff\xff\xff\xff\xff\xa1\x01x\x42"
        b"\xa1\x04kind\xa1\x02\xc3\xa4"
    )


@pytest.mark.parametrize("value", [None, 1.5, b"bytes", [1], 2**63])
def test_an_argument_that_is_not_known_how_to_be_written_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^x-it must be a bool, an int of 64 bits or a str"):
        request("7", "PUT", "/queues/a", {"arguments": {"x-it": value}})


PROPERTIES = b"\x00\x53\x73\xc0\x0e\x07\x40\x40\x40\xa1\x03200\x40\xa1\x017\x40"
"""Subject 200, correlation-id 7."""


def test_an_answer_is_read_with_its_map_and_the_map_in_it() -> None:
    raw = PROPERTIES + (
        b"\x00\x53\x77\xc1\x36\x06"
        b"\xa1\x0dmessage_count\x80\x00\x00\x00\x00\x00\x00\x00\x03"
        b"\xa1\x09arguments\xc1\x05\x02\xa1\x01x\x40"
        b"\xa1\x08replicas\x45"
    )
    fields = {"message_count": 3, "arguments": {"x": None}, "replicas": Other("list", b"\x45")}
    assert response_to("7", raw) == Response(200, fields, "")
    assert response_to("8", raw) is None


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (b"\x00\x53\x77\x40", Response(200, {}, "")),
        (b"\x00\x53\x77\xa1\x04gone", Response(200, {}, "gone")),
        (b"\x00\x53\x77\xd1\x00\x00\x00\x08\x00\x00\x00\x02\xa1\x01a\x41", Response(200, {"a": True}, "")),
        (b"", Response(200, {}, "")),
    ],
)
def test_an_answer_without_a_map_has_no_fields(body: bytes, answer: Response) -> None:
    assert response_to("7", PROPERTIES + body) == answer


@pytest.mark.parametrize("status", [b"abc", b"20 ", b"999", b"\xd9\xa2\x30"])
def test_an_answer_without_a_status_cannot_be_read(status: bytes) -> None:
    with pytest.raises(Undecodable, match="has no status"):
        response_to("7", PROPERTIES.replace(b"200", status))


# --- no RabbitMQ, in virtual time


@asynccontextmanager
async def claimed(
    product: str = "RabbitMQ", version: str = "4.3.6"
) -> AsyncGenerator[tuple[EmbeddedBroker, ClientConnection], None]:
    """A connection to an embedded broker that claims to be something else: its `/management` is a queue."""
    broker = EmbeddedBroker()
    broker.settings = attrs.evolve(broker.settings, properties={"product": product, "version": version})
    async with broker.running(), trio.open_nursery() as nursery:
        connection = ClientConnection(
            broker.connect_in_memory(), Engine(Settings("client", login=Login(), idle_timeout=0))
        )

        async def run() -> None:
            with suppress(ConnectionBroken):
                await connection.run()

        nursery.start_soon(run)
        await connection.opened()
        yield broker, connection
        connection.close()


def test_the_embedded_broker_is_known_as_itself() -> None:
    assert Peer.of(EmbeddedBroker().settings.properties).is_embedded


@pytest.mark.parametrize(
    ("product", "version", "name"),
    [
        ("trio-settlement embedded", "", "trio-settlement embedded"),
        ("RabbitMQ", "3.10.8", "RabbitMQ 3.10.8"),
        ("", "", "a peer that does not say what it is"),
    ],
)
async def test_a_peer_without_a_management_is_refused_and_gets_no_queue_of_that_name(
    product: str, version: str, name: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with claimed(product, version) as (broker, connection):
        with pytest.raises(LinkRefused, match=f"^/management: {name} has none; it takes RabbitMQ 4.0 or later$"):
            async with management(connection):
                pass
        assert broker.store.queues == {}


async def test_a_refused_attach_says_why(autojump_clock: trio.testing.MockClock) -> None:
    async with claimed() as (broker, connection):
        broker.refuse("/management", Condition("amqp:not-allowed", "no"))
        with pytest.raises(LinkRefused, match=r"^/management: .*amqp:not-allowed: no"):
            async with management(connection):
                pass


async def test_a_mute_broker_is_given_up_after_10_s_of_attaching(autojump_clock: trio.testing.MockClock) -> None:
    async with claimed() as (broker, connection):
        broker.peers[0].freeze()
        begun = trio.current_time()
        with pytest.raises(LinkBroken, match=r"^/management: no answer to the attach within 10 s"):
            async with management(connection):
                pass
        assert trio.current_time() - begun == pytest.approx(10, abs=0.1)
        broker.peers[0].thaw()


CALLS: list[tuple[str, Callable[[Management], Coroutine[Any, Any, object]]]] = [
    ("queue 'orders'", lambda manage: manage.queue("orders")),
    ("queue 'orders'", lambda manage: manage.count("orders")),
    ("queue 'orders' was not declared", lambda manage: manage.declare("orders")),
    ("queue 'orders' was not deleted", lambda manage: manage.delete("orders")),
    ("queue 'orders' was not purged", lambda manage: manage.purge("orders")),
    ("queue 'orders' was not bound to exchange 'x'", lambda manage: manage.bind("orders", "x", "k")),
]


@pytest.mark.parametrize(("said", "call"), CALLS)
async def test_a_request_without_an_answer_is_given_up_after_10_s(
    said: str, call: Callable[[Management], Coroutine[Any, Any, object]], autojump_clock: trio.testing.MockClock
) -> None:
    async with claimed() as (_, connection), management(connection) as manage:
        begun = trio.current_time()
        with pytest.raises(LinkBroken, match=f"^{said}: no answer from /management within 10 s"):
            await call(manage)  # its own request comes back, which is no answer
        assert trio.current_time() - begun == pytest.approx(10, abs=0.1)


@pytest.mark.parametrize("name", ["", ".", ".."])
async def test_a_name_that_is_a_step_in_a_path_is_refused_before_it_is_sent(
    name: str, autojump_clock: trio.testing.MockClock
) -> None:
    """RabbitMQ takes `/queues/..` for `/`, fails over it, and ends the session."""
    async with claimed() as (broker, connection), management(connection) as manage:
        for call in (manage.queue, manage.count, manage.declare, manage.delete, manage.purge):
            with pytest.raises(LinkRefused, match=f"^queue '{name}': .* rename the queue$"):
                await call(name)
        assert broker.ready("/management") == []


async def test_an_answer_that_cannot_be_read_breaks_the_call(autojump_clock: trio.testing.MockClock) -> None:
    async with claimed() as (broker, connection), management(connection) as manage:
        for raw in (b"\xff", PROPERTIES.replace(b"200", b"xyz").replace(b"\x017", b"\x012")):
            broker.publish("/management", raw)
            with pytest.raises(LinkBroken, match=r"^queue 'orders': .+"):
                await manage.queue("orders")


@pytest.mark.parametrize("how", ["session", "connection"])
async def test_what_breaks_during_a_request_ends_it(how: str, autojump_clock: trio.testing.MockClock) -> None:
    async with claimed() as (broker, connection), management(connection) as manage, trio.open_nursery() as nursery:
        broker.peers[0].freeze()

        async def ask() -> None:
            error = LinkBroken if how == "session" else ConnectionBroken
            with pytest.raises(error, match="queue 'orders': .*amqp:not-allowed" if how == "session" else "the cable"):
                await manage.queue("orders")

        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        if how == "session":
            broker.peers[0].thaw()
            broker.peers[0].detach("/management", Condition("amqp:not-allowed", "no"))
        else:
            connection.break_off("the cable is out")


async def test_a_block_that_is_left_by_an_error_or_cancelled_ends_its_session(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with claimed() as (_, connection):
        with pytest.raises(ZeroDivisionError):
            async with management(connection):
                raise ZeroDivisionError
        with trio.move_on_after(1) as scope:
            async with management(connection):
                await trio.sleep_forever()
        assert scope.cancelled_caught
        with trio.fail_after(1):
            while connection.engine._reader.sessions:  # noqa: ASYNC110 -- nobody tells
                await trio.sleep(0.001)
