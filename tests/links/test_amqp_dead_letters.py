"""Dead letters on AMQP: they stay where they are, and never are the queue that they come from."""

from __future__ import annotations

import pytest
import trio
from trio.abc import Clock

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from actors import Subscription, open_runtime
from links.amqp import AmqpBroker, AmqpSource, EmbeddedBroker, Raw, Topic
from links.amqp.addresses import Address, Queue
from links.amqp.engine.events import State
from links.amqp.wire.sections import split
from settlement import Delivery, Policy, Retry
from tests.links.amqp_kit import Handler, Place, places, put, rabbits, raw_of, take

pytestmark = pytest.mark.amqp

URL = "amqp://localhost"
DATA = b"\x00\x53\x75\xa0\x01x"


def expiring(milliseconds: int, priority: int = 7) -> bytes:
    """A durable message with a ttl."""
    fields = b"\x41\x50%c\x70%b" % (priority, milliseconds.to_bytes(4, "big"))
    return b"\x00\x53\x70\xc0%c\x03%b" % (len(fields) + 1, fields) + DATA


# --- the ttl


@rabbits
async def test_a_dead_letter_outlives_the_ttl_of_its_original(place: Place, clock: Clock | None) -> None:
    """DESIGN 6: it carries no ttl, its priority stays; else RabbitMQ throws it away before anybody has seen it."""
    name, dead, broker = await place.queue(), await place.queue(), place.broker()
    policy = Policy(max_attempts=1, dead_letter=dead)
    handler = Handler({b"x": [Retry()]})
    async with open_runtime(Subscription(broker.queue(name), handler, policy=policy)):
        assert await put(broker, name, expiring(1000)) == [State.ACCEPTED]
        await place.until_ready(dead, 1)
        await trio.sleep(1.5)  # the server's clock is no other
        (found,) = await take(broker, dead, 1)
    assert split(raw_of(found)).raw.startswith((b"\x00\x53\x70", b"\x00Sp"))
    assert found.body == b"x"


@places("embedded")
async def test_a_dead_letter_is_spliced_without_its_ttl_alone(place: Place, clock: Clock | None) -> None:
    """DESIGN 6: durable and priority as they came, and every byte behind the header section."""
    name, dead, broker = await place.queue(), await place.queue(), place.broker()
    policy = Policy(max_attempts=1, dead_letter=dead)
    async with open_runtime(Subscription(broker.queue(name), Handler({b"x": [Retry()]}), policy=policy)):
        await put(broker, name, expiring(1000))
        await place.until_ready(dead, 1)
        (found,) = await take(broker, dead, 1)
    assert raw_of(found) == b"\x00\x53\x70\xc0\x04\x02\x41\x50\x07" + DATA


# --- the queue itself


def queue(broker: AmqpBroker, address: Address) -> AmqpSource:
    return broker.raw(address.name) if isinstance(address, Raw) else broker.queue(address.name)


async def handler(delivery: Delivery[bytes]) -> None: ...


@pytest.mark.parametrize(
    ("source", "dead"),
    [
        (Queue("orders"), Queue("orders")),
        (Queue("orders"), Raw("orders")),
        (Queue("orders"), Raw("/queues/orders")),
        (Queue("my orders"), Raw("/queues/my%20orders")),
        (Queue("orders"), Raw("/queues/%6frders")),
        (Queue("orders"), Raw("/exchanges/amq.default/orders")),
        (Raw("/queues/my%20orders"), Queue("my orders")),
        (Raw("/queues/a%2Fb"), Raw("/queues/a%2fb")),
    ],
)
@pytest.mark.parametrize("url", [URL, "amqp://guest:guest@127.0.0.1:5672/%2F", "amqps://localhost.", "amqp://[::1]"])
def test_a_dead_letter_that_is_the_queue_itself_is_refused_however_it_is_spelled(
    source: Address, dead: Address, url: str
) -> None:
    """DESIGN 2: it would go round for ever; also by another broker object, with another user or by TLS."""
    policy = Policy(dead_letter=AmqpBroker(url).publisher(dead))
    with pytest.raises(ValueError, match=f"dead_letter must be another address than {source.name!r} itself"):
        Subscription(queue(AmqpBroker(URL), source), handler, policy=policy)


def test_a_name_that_is_the_raw_address_of_the_source_is_refused() -> None:
    """A str means a queue by its name."""
    with pytest.raises(ValueError, match="dead_letter must be another address"):
        Subscription(AmqpBroker(URL).raw("/queues/orders"), handler, policy=Policy(dead_letter="orders"))


@pytest.mark.parametrize(
    ("url", "dead"),
    [
        (URL, Queue("orders.dead")),
        (URL, Raw("/exchanges/amq.direct/orders")),
        (URL, Topic("orders")),
        ("amqp://localhost:5673", Queue("orders")),
        ("amqp://other", Queue("orders")),
        ("amqp://localhost/other", Queue("orders")),
    ],
)
def test_a_queue_of_the_same_name_elsewhere_is_another_one(url: str, dead: Address) -> None:
    Subscription(AmqpBroker(URL).queue("orders"), handler, policy=Policy(dead_letter=AmqpBroker(url).publisher(dead)))


def test_two_embedded_brokers_are_two_although_their_urls_are_one() -> None:
    """What `connect` leads to is no more known than that it is another function."""
    here, there = EmbeddedBroker(), EmbeddedBroker()
    source = AmqpBroker(URL, connect=here.connect).queue("orders")
    Subscription(source, handler, policy=Policy(dead_letter=AmqpBroker(URL, connect=there.connect).publisher("orders")))
    with pytest.raises(ValueError, match="dead_letter must be another address"):
        Subscription(
            source, handler, policy=Policy(dead_letter=AmqpBroker(URL, connect=here.connect).publisher("orders"))
        )


# --- what an embedded broker shows


async def test_what_is_ready_is_shown_as_letters(autojump_clock: trio.testing.MockClock) -> None:
    """As `MemoryBroker.ready`: body, headers and key; what cannot be read is its own body; nothing is taken."""
    embedded = EmbeddedBroker()
    broker = AmqpBroker(URL, connect=embedded.connect)
    async with embedded.running(), broker.connect():
        await broker.publisher("orders").publish(b"1", {"trace": b"\xff"}, key="k")
        embedded.publish("orders", b"\xffgarbage")
    first, second = embedded.ready("orders")
    assert (first.body, dict(first.headers), first.key) == (b"1", {"trace": b"\xff", "partition-key": b"k"}, "k")
    assert (second.body, dict(second.headers), second.key) == (b"\xffgarbage", {}, None)
    assert len(embedded.ready("orders")) == 2
