"""links.amqp as a user has it, on each broker: the life of connections and links (CONFORMANCE H)."""

from __future__ import annotations

import gc

import pytest
import trio
from trio.abc import Clock

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from actors import Subscription, connected, open_runtime
from links.abc import Settlement
from links.amqp.broker import AmqpBroker
from links.amqp.wire.frames import ATTACH
from links.errors import ConnectionBroken, LinkBroken, LinkRefused, NotConnected
from settlement import Ack, Delivery, Drop, Outcome, Policy, Retry
from settlement.amqp import AT_MOST_ONCE
from tests.links.amqp_kit import PATIENCE, Handler, Hanging, OnRabbitMQ, Place, dropped, never_lost, take, until

pytestmark = pytest.mark.amqp


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


# --- what goes in comes out


async def test_a_message_comes_as_it_was_published(place: Place, clock: Clock | None) -> None:
    """K-60, A-7.1, A-7.2."""
    name, broker, handler = await place.queue(), place.broker(), Handler()
    headers = {
        "content-type": b"application/json",
        "message-id": b"id-1",
        "correlation-id": b"of-1",
        "reply-to": b"answers",
        "partition-key": b"lane 7",
        "tenant": "Zoë".encode(),
        "binary": b"\xff\x00",
        "empty": b"",
    }
    async with open_runtime(Subscription(broker.queue(name), handler)) as runtime:
        await broker.publisher(name).publish(b'{"id": 1}\x00', headers)
        await handler.has(b'{"id": 1}\x00')
    (delivery,) = handler.deliveries
    assert dict(delivery.headers) == headers
    assert (delivery.id, delivery.key, delivery.attempt, delivery.source) == ("id-1", "lane 7", 1, name)
    assert delivery.redelivery_count == (0 if place.can.header_at_first and place.can.counts else None)
    assert (runtime.ledger(name).acked, runtime.ledger(name).balanced) == (1, True)
    await place.until_ready(name, 0)


# --- at most once


async def test_at_most_once_the_queue_is_empty_while_the_handler_runs(place: Place, clock: Clock | None) -> None:
    """K-63, A-2.1 to A-2.3: it was accepted on arrival, and nothing more can be said, whatever the outcome."""
    name, broker = await place.queue(), place.broker()
    outcomes: dict[bytes, Outcome | None] = {b"ack": Ack(), b"none": None, b"drop": Drop("x"), b"retry": Retry()}
    handled: list[bytes] = []

    async def handle(delivery: Delivery[bytes]) -> Outcome | None:
        with trio.fail_after(PATIENCE):
            await place.until_ready(name, 3 - len(handled))
        handled.append(delivery.body)
        return outcomes[delivery.body]

    async with broker.connect():
        for body in outcomes:
            await broker.publisher(name).publish(body)
    source = broker.queue(name, settle=AT_MOST_ONCE, credit=1)
    async with open_runtime(Subscription(source, handle)) as runtime:
        await until(lambda: runtime.ledger(name).refused == 4)
    assert handled == list(outcomes)
    assert (runtime.ledger(name).received, runtime.ledger(name).balanced) == (4, True)
    await place.until_ready(name, 0)


# --- what is unsettled comes back


@pytest.mark.parametrize("how", ["detach", "cut"])
async def test_what_is_unsettled_comes_back(how: str, place: Place, clock: Clock | None) -> None:
    """K-64, A-1.5: after our goodbye, and when the connection broke; which of them a broker counts differs."""
    name, broker, hanging = await place.queue(), place.broker(), Hanging()
    async with connected(broker):
        await broker.publisher(name).publish(b"mine")
    async with dropped(Subscription(broker.queue(name), hanging)) as runtime:
        await hanging.has(b"mine")
        if how == "cut":
            await place.cut()
            await hanging.has(b"mine", b"mine")
    assert runtime.ledger(name).unsettled == runtime.ledger(name).received == len(hanging.deliveries)
    async with broker.connect():
        (found,) = await take(broker, name, 1)
    assert found.body == b"mine"
    counted = [*[delivery.attempt for delivery in hanging.deliveries], found.attempt]
    if how == "detach":
        assert counted == ([1, 2] if place.can.counts_detach else [1, 1])
    elif not place.can.counts:
        assert counted == [1, 1, 1]
    else:
        assert counted == ([1, 2, 3] if place.can.counts_detach else [1, 2, 2])


async def test_sixteen_cycles_with_sixty_four_in_flight(place: Place, clock: Clock | None) -> None:
    """K-72, A-12.4: each ends cleanly, each delivery in one line of the books, and no message is lost or doubled."""
    name, broker = await place.queue(), place.broker()
    async with broker.connect(), trio.open_nursery() as nursery:
        for body in numbered(64):
            nursery.start_soon(broker.publisher(name).publish, body)
    for _ in range(16):
        hanging = Hanging()
        async with dropped(Subscription(broker.queue(name), hanging, concurrency=64)) as runtime:
            await hanging.has(*numbered(64))
        ledger = runtime.ledger(name)
        assert (ledger.received, ledger.unsettled, ledger.balanced) == (64, 64, True)
    handler = Handler()
    async with open_runtime(Subscription(broker.queue(name), handler, concurrency=8)):
        await handler.has(*numbered(64))
    assert sorted(handler.bodies) == sorted(numbered(64))
    await place.until_ready(name, 0)


async def test_nothing_is_settled_after_the_shutdown(place: Place, clock: Clock | None) -> None:
    """K-73: the verb of a delivery that is held over the end of its link is no silent success."""
    name, broker = await place.queue(), place.broker()
    async with broker.connect():
        source = broker.queue(name)
        await broker.publisher(name).publish(b"held")
        async with source.attach("test", never_lost, 5.0) as link:
            (held,) = await link.receive(1)
            order = Settlement(held, source.decide(Ack(), held.delivery, Policy()))
        with pytest.raises(LinkBroken, match="detached"):
            await link.settle([order])
    with pytest.raises(LinkBroken, match="detached"):
        await link.settle([order])
    await place.until_ready(name, 1)


# --- credit


async def test_the_third_message_waits_for_a_credit_of_two(place: Place, clock: Clock | None) -> None:
    """K-67, A-5.4: two are with us and nobody else has them, the third is with the broker until one is settled."""
    name, broker = await place.queue(), place.broker()
    release, handled = trio.Event(), list[bytes]()

    async def handle(delivery: Delivery[bytes]) -> None:
        handled.append(delivery.body)
        await release.wait()

    async with broker.connect():
        for body in numbered(3):
            await broker.publisher(name).publish(body)
    async with open_runtime(Subscription(broker.queue(name, credit=2), handle, concurrency=3)):
        await until(lambda: len(handled) == 2)
        await place.until_ready(name, 1)
        assert sorted(handled) == numbered(2)
        release.set()
        await until(lambda: len(handled) == 3)
    assert sorted(handled) == numbered(3)
    await place.until_ready(name, 0)


# --- queues, topics, addresses as they stand


async def test_receivers_of_a_queue_compete(place: Place, clock: Clock | None) -> None:
    """K-66: each message comes to exactly one of two subscriptions, and both get some."""
    name, broker, one, two = await place.queue(), place.broker(), Handler(), Handler()
    async with open_runtime(
        Subscription(broker.queue(name), one, name="one"), Subscription(broker.queue(name), two, name="two")
    ):
        for body in numbered(40):
            await broker.publisher(name).publish(body)
        await until(lambda: len(one.bodies) + len(two.bodies) >= 40)
    assert sorted(one.bodies + two.bodies) == sorted(numbered(40))
    assert one.bodies
    assert two.bodies
    await place.until_ready(name, 0)


async def test_each_subscription_of_a_topic_gets_each_message(place: Place, clock: Clock | None) -> None:
    """K-66. RabbitMQ has no topic to take from: a refusal that says what to do instead."""
    broker, one, two = place.broker(), Handler(), Handler()
    both = (Subscription(broker.topic("news"), each, name=name) for each, name in ((one, "one"), (two, "two")))
    if not place.can.topics:
        with pytest.raises(ExceptionGroup) as refused:
            async with open_runtime(*both):
                pytest.fail("it was attached")
        said = [str(error) for error in refused.value.exceptions if isinstance(error, LinkRefused)]
        assert len(said) == 2
        assert all("'news'" in each and "bind a queue to the exchange" in each for each in said)
        return
    async with open_runtime(*both):
        for body in numbered(5):
            await broker.publisher(broker.topic("news")._address).publish(body)
        await one.has(*numbered(5))
        await two.has(*numbered(5))
    assert (one.bodies, two.bodies) == (numbered(5), numbered(5))


async def test_a_queue_is_known_by_its_name_and_an_address_goes_out_as_it_stands(
    place: Place, clock: Clock | None
) -> None:
    """K-66, A-5.1: a name that needs it is percent-encoded for RabbitMQ; `raw` is verbatim, without a capability."""
    name = await place.queue() + " ä/%"
    broker, handler = place.broker(), Handler()
    if isinstance(place, OnRabbitMQ):
        await place.rabbit.declare(name)
        encoded = f"/queues/{name.removesuffix(' ä/%')}%20%C3%A4%2F%25"
    else:
        encoded = name
    async with open_runtime(
        Subscription(broker.queue(name), handler, name="queue"),
        Subscription(broker.raw(encoded), handler, name="raw"),
    ):
        await broker.publisher(name).publish(b"known")
        await handler.has(b"known")
    found = [
        (seen.address, seen.source[1][10] if len(seen.source[1]) > 10 else None)
        for seen in place.trace(ATTACH, ours=True)
        if seen.is_receiver and seen.address != "/management"
    ]
    assert [address for address, _ in found] == [encoded, encoded]
    assert sorted((found[0][1] is None, found[1][1] is None)) == [False, True]


# --- publishers come and go


async def test_a_publisher_that_is_dropped_leaves_the_connection_usable(place: Place, clock: Clock | None) -> None:
    """K-65: one that nobody holds any more, one whose publish was cancelled, and one that was refused."""
    name, broker = await place.queue(), place.broker()
    async with broker.connect():
        await broker.publisher(name).publish(b"one")
        gc.collect()
        with trio.CancelScope() as scope:
            scope.cancel()
            await broker.publisher(name).publish(b"never sent")
        assert scope.cancelled_caught
        await broker.publisher(name).publish(b"two")
        assert [each.body for each in await take(broker, name, 2)] == [b"one", b"two"]


async def test_a_publisher_works_while_its_broker_is_open(place: Place, clock: Clock | None) -> None:
    """K-75, A-8.3, A-12.5: before and after it raises `NotConnected`, used or not."""
    name, broker = await place.queue(), place.broker()
    used, unused = broker.publisher(name), broker.publisher(name)
    with pytest.raises(NotConnected):
        await used.publish(b"before")
    async with broker.connect():
        await used.publish(b"while")
    for publisher in (used, unused):
        with pytest.raises(NotConnected):
            await publisher.publish(b"after")
    async with broker.connect():
        await used.publish(b"again")
    await place.until_ready(name, 2)


# --- refused before any I/O


@pytest.mark.parametrize("url", ["", "localhost", "http://localhost", "amqp://", "amqp://localhost:0", "amqp://:x"])
def test_a_bad_url_is_refused_when_the_broker_is_made(url: str) -> None:
    """K-76, A-6.1."""
    with pytest.raises(ValueError, match="url"):
        AmqpBroker(url)


def test_what_cannot_be_is_refused_when_it_is_made() -> None:
    """K-76, A-5.3, A-8.4."""
    broker = AmqpBroker("amqp://localhost")
    for make in (broker.queue, broker.topic, broker.raw, broker.publisher):
        with pytest.raises(ValueError, match="name must be"):
            make("")
    with pytest.raises(ValueError, match="credit must be"):
        broker.queue("orders", credit=0)


async def test_a_connection_that_breaks_is_told_to_the_block_that_keeps_it_open(
    place: Place, clock: Clock | None
) -> None:
    broker = place.broker()
    with pytest.raises(ConnectionBroken):  # noqa: PT012 -- where it is told
        async with broker.connect():
            await place.cut()
            await trio.sleep_forever()
