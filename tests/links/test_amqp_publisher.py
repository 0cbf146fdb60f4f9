"""Publishing, as a user has it, to each broker: confirmed, in order, many at once, and what is not taken (A-7, A-8)."""

from __future__ import annotations

import pytest
import trio
from trio.abc import Clock

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from actors import Subscription, open_runtime
from actors.events import Degraded, Event, Recovered
from links.amqp.addresses import Raw
from links.amqp.broker import AmqpBroker
from links.amqp.engine.events import State
from links.amqp.publisher import AmqpPublisher
from links.amqp.wire.sections import split
from links.errors import LinkBroken, PublishNotAccepted
from settlement import Policy, Retry
from tests.links.amqp_kit import Handler, OnRabbitMQ, Place, places, put, rabbits, raw_of, take, until
from tests.links.wire_kit import ATTACH, TRANSFER, Seen

pytestmark = pytest.mark.amqp


def message_of(user: bytes) -> bytes:
    """A message with a user-id and a `to`."""
    fields = b"\x40\xa0%c%b\xa1\x01t" % (len(user), user)
    return b"\x00\x53\x73\xc0%c\x03%b\x00\x53\x75\xa0\x01x" % (len(fields) + 1, fields)


# --- confirmed


async def test_a_publish_that_returns_is_in_the_queue(place: Place, clock: Clock | None) -> None:
    """A-8.2: it waits for the broker's word."""
    name, broker = await place.queue(), place.broker()
    async with broker.connect():
        for count in range(1, 4):
            await broker.publisher(name).publish(b"x")
            assert await place.ready(name) == count


async def test_many_publishes_are_on_their_way_at_once_and_in_order(place: Place, clock: Clock | None) -> None:
    """A-8.1: 100 tasks, one link: none waits for another's confirmation, and they go in the order of the calls."""
    name, broker, order = await place.queue(), place.broker(), list[bytes]()

    async def publish(publisher: AmqpPublisher, number: int) -> None:
        order.append(b"%d" % number)
        await publisher.publish(b"%d" % number)

    def sent() -> list[Seen]:
        return [each for each in place.trace(TRANSFER, ours=True) if not each.settled]

    async with broker.connect():
        await broker.publisher(name).publish(b"first")
        (wire,) = place.wires
        wire.deafen()
        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(publish, broker.publisher(name), number)
            await until(lambda: len(sent()) == 101)
            wire.hear()
        assert await place.ready(name) == 101
        found = [delivery.body for delivery in await take(broker, name, 101)]
    assert found == [b"first", *order]
    (channel,) = {each.channel for each in sent()}
    attached = [each for each in place.trace(ATTACH, ours=True) if not each.is_receiver and each.channel == channel]
    assert [each.address for each in attached] == [place.address(name)]


async def test_our_messages_carry_no_header_section_unless_they_are_durable(place: Place, clock: Clock | None) -> None:
    """A-3.3, A-8.5."""
    name, plain, durable = await place.queue(), place.broker(), place.broker(durable=True)
    async with plain.connect(), durable.connect():
        await plain.publisher(name).publish(b"x")
        await durable.publisher(name).publish(b"x")
    sent = [each.payload for each in place.trace(TRANSFER, ours=True) if not each.settled]
    assert sent == [b"\x00\x53\x75\xa0\x01x", b"\x00\x53\x70\xc0\x02\x01\x41\x00\x53\x75\xa0\x01x"]


# --- headers, both ways


async def test_headers_go_out_as_properties_and_come_in_as_headers(place: Place, clock: Clock | None) -> None:
    """A-7.1: known names as properties, others as application properties: a string, or a binary where it is no text."""
    name, broker = await place.queue(), place.broker()
    headers = {"content-type": b"text/plain", "reply-to": b"r", "correlation-id": b"c", "message-id": b"m"}
    async with broker.connect():
        await broker.publisher(name).publish(
            b"", {**headers, "partition-key": b"k", "text": "Zoë".encode(), "raw": b"\xff"}
        )
        (found,) = await take(broker, name, 1)
    sections = split(raw_of(found))
    properties = sections.properties
    assert (properties.message_id, properties.reply_to, properties.correlation_id) == ("m", "r", "c")
    assert (properties.content_type, type(properties.content_type).__name__) == ("text/plain", "Symbol")
    assert (properties.group_id, properties.to, properties.user_id) == ("k", None, None)
    assert sections.application_properties == {"text": "Zoë", "raw": b"\xff"}


async def test_the_properties_of_others_come_as_headers(place: Place, clock: Clock | None) -> None:
    """A-7.2: a ulong as a decimal, a uuid as text, a truth, a number, a time, a symbol, a null not at all."""
    name, broker = await place.queue(), place.broker()
    properties = b"\x00\x53\x73\xc0\x2a\x06\x80\x00\x00\x00\x00\x00\x00\x30\x39\x40\x40\xa1\x01s\xa1\x04back\x98"
    properties += bytes(range(16))
    named = b"\xa1\x01t\x41\xa1\x01i\x54\xff\xa1\x01d\x82\x3f\xf8\x00\x00\x00\x00\x00\x00"
    named += b"\xa1\x01w\x83\x00\x00\x00\x00\x00\x00\x03\xe8\xa1\x01s\xa3\x01y\xa1\x01n\x40"
    named = b"\x00\x53\x74\xc1%c\x0c%b" % (len(named) + 1, named)
    properties = properties[:4] + b"%c" % (len(properties) - 5) + properties[5:]
    async with broker.connect():
        assert await put(broker, name, properties + named + b"\x00\x53\x75\xa0\x01x") == [State.ACCEPTED]
        (found,) = await take(broker, name, 1)
    assert dict(found.headers) == {
        "message-id": b"12345",
        "reply-to": b"back",
        "correlation-id": b"00010203-0405-0607-0809-0a0b0c0d0e0f",
        "t": b"true",
        "i": b"-1",
        "d": b"1.5",
        "w": b"1000",
        "s": b"y",
    }
    assert found.id == "12345"


async def test_what_amqp_cannot_carry_is_not_taken(place: Place, clock: Clock | None) -> None:
    """A-7.5: a well-known header that is no UTF-8; nothing is sent."""
    name, broker = await place.queue(), place.broker()
    async with broker.connect():
        with pytest.raises(PublishNotAccepted, match="'correlation-id' as a string: it must be UTF-8"):
            await broker.publisher(name).publish(b"x", {"correlation-id": b"\xff"})
    await place.until_ready(name, 0)


# --- what is not taken


@rabbits
async def test_what_goes_nowhere_is_not_accepted(place: Place, clock: Clock | None) -> None:
    """A-8.2: *released* where no queue is bound; no such queue; no such exchange. The connection is none the worse."""
    name, broker = await place.queue(), place.broker()
    async with broker.connect():
        for to, why in (
            (Raw("/exchanges/amq.direct/nowhere"), "released; is a queue bound there"),
            (Raw("/exchanges/missing/nowhere"), "amqp:not-found: no exchange 'missing'.*; nothing was sent"),
            (f"{name}.missing", f"{name}.missing' in vhost '/'.*; nothing was sent"),
        ):
            with pytest.raises(PublishNotAccepted, match=why):
                await broker.publisher(to).publish(b"x")
            await broker.publisher(name).publish(b"x")
    await place.until_ready(name, 3)


@places("embedded", "embedded-tcp")
async def test_on_the_embedded_broker_a_queue_is_there_as_soon_as_it_is_named(
    place: Place, clock: Clock | None
) -> None:
    broker = place.broker()
    async with broker.connect():
        await broker.publisher("nobody ever heard of it").publish(b"x")
    await place.until_ready("nobody ever heard of it", 1)


@rabbits
async def test_a_queue_that_is_full_says_so(place: Place, clock: Clock | None) -> None:
    """*rejected*, and the next one may be taken."""
    assert isinstance(place, OnRabbitMQ)
    name = await place.rabbit.queue({"x-max-length": 1, "x-overflow": "reject-publish"})
    broker = place.broker()
    async with broker.connect():
        with pytest.raises(PublishNotAccepted, match="rejected"):  # noqa: PT012
            for _ in range(5):  # a quorum queue takes one or two more
                await broker.publisher(name).publish(b"x")
        await place.rabbit.delete(name)
        await place.rabbit.declare(name)
        await broker.publisher(name).publish(b"x")


@rabbits
async def test_a_queue_that_is_deleted_while_we_publish(place: Place, clock: Clock | None) -> None:
    """What was on its way may be there or not, what comes after that was not sent; a new queue of the name is found."""
    assert isinstance(place, OnRabbitMQ)
    name, broker, other = await place.queue(), place.broker(), await place.queue()
    errors, published, some = list[Exception](), 0, trio.Event()

    async def publish() -> None:
        nonlocal published
        publisher = broker.publisher(name)
        while not errors:
            try:
                await publisher.publish(b"x")
            except (LinkBroken, PublishNotAccepted) as error:
                errors.append(error)
            else:
                published += 1
                some.set()

    async with broker.connect():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(publish)
            await some.wait()
            await place.rabbit.delete(name)
        assert published
        with pytest.raises(PublishNotAccepted, match=r"nothing was sent|released"):
            await broker.publisher(name).publish(b"x")
        await broker.publisher(other).publish(b"x")
        await place.rabbit.declare(name)
        await broker.publisher(name).publish(b"x")
    await place.until_ready(name, 1)
    await place.until_ready(other, 1)


@rabbits
async def test_a_link_that_is_refused_leaves_the_others_unharmed(place: Place, clock: Clock | None) -> None:
    """No permission, no exchange, no queue: RabbitMQ ends the session of such a link, but nobody else is in it."""
    assert isinstance(place, OnRabbitMQ)
    name, rabbit, done = await place.queue(), place.rabbit, False
    await rabbit.put_user(f"{rabbit.user}.b", "pw", rf"^(amq\.default|{name})$")
    url = f"amqp://{rabbit.user}.b:pw@{rabbit.node.host}:{rabbit.node.port}"
    broker, published = AmqpBroker(url, connect=place._connect), 0

    async def publish() -> None:
        nonlocal published
        while not done:
            await broker.publisher(name).publish(b"x")
            published += 1

    async with broker.connect(), trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(publish)
        await until(lambda: published > 4)
        for to in (Raw("/exchanges/amq.direct/x"), Raw("/exchanges/missing/x"), f"{name}.missing"):
            with pytest.raises(PublishNotAccepted, match="nothing was sent"):
                await broker.publisher(to).publish(b"x")
        done = True
    await place.until_ready(name, published)


# --- copies, and whose they are


@rabbits
async def test_a_copy_drops_the_user_id_of_somebody_else(place: Place, clock: Clock | None) -> None:
    """DESIGN 6: RabbitMQ refuses a user-id that is not who logged in, 4.0 by ending the session of all publishers."""
    assert isinstance(place, OnRabbitMQ)
    dead = await place.queue()
    name, rabbit, broker = await place.queue(), place.rabbit, place.broker()
    other = f"{rabbit.user}.c"
    await rabbit.put_user(other, "pw")
    theirs = AmqpBroker(f"amqp://{other}:pw@{rabbit.node.host}:{rabbit.node.port}")
    handler = Handler({b"x": [Retry()] * 2})
    policy = Policy(dead_letter=dead)
    async with theirs.connect():
        assert await put(theirs, name, message_of(other.encode())) == [State.ACCEPTED]
    async with open_runtime(Subscription(broker.queue(name), handler, policy=policy)):
        await place.until_ready(dead, 1)  # else it may be on the wire in the session that ends now, and comes twice
        with pytest.raises(LinkBroken, match=f"amqp:unauthorized-access: user_id property set to '{other}'"):
            await put(broker, name, message_of(other.encode()))
        assert await put(broker, name, message_of(rabbit.user.encode())) == [State.ACCEPTED]
        await place.until_ready(dead, 2)
    async with broker.connect():
        found = [split(raw_of(delivery)).properties for delivery in await take(broker, dead, 2)]
    assert [(each.user_id, each.to) for each in found] == [(None, "t"), (rabbit.user.encode(), "t")]


@rabbits
async def test_a_copy_that_is_refused_waits_and_others_go_on(place: Place, clock: Clock | None) -> None:
    """DESIGN 3.6: a dead letter that takes no more stops its own line alone, is tried again, and nothing is lost."""
    assert isinstance(place, OnRabbitMQ)
    full = await place.rabbit.queue({"x-max-length": 1, "x-overflow": "reject-publish"})
    poisoned, healthy, broker = await place.queue(), await place.queue(), place.broker()
    handler, other, said = Handler({b"x": [Retry()] * 9}), Handler(), list[type[Event]]()
    policy = Policy(dead_letter=full)

    async with broker.connect():
        with pytest.raises(PublishNotAccepted):  # noqa: PT012
            for _ in range(5):
                await broker.publisher(full).publish(b"filler")
    async with open_runtime(
        Subscription(broker.queue(poisoned), handler, policy=policy, name="poisoned"),
        Subscription(broker.queue(healthy), other, name="healthy"),
        observers=[lambda event: said.append(type(event))],
    ) as runtime:
        await broker.publisher(poisoned).publish(b"x")
        await until(lambda: Degraded in said)
        await broker.publisher(healthy).publish(b"y")
        await other.has(b"y")
        assert runtime.ledger("poisoned").in_hand == 1
        await place.rabbit.delete(full)
        await place.rabbit.declare(full)
        await until(lambda: Recovered in said)
    assert handler.bodies == [b"x"]
    assert runtime.ledger("poisoned").dead_lettered == 1
    await place.until_ready(full, 1)
