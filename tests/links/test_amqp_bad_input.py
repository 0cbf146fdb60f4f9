"""links.amqp: what a user gets wrong is refused where it was written, or at start-up, by a text that names what and the
way out, and holds no credential.
"""

from __future__ import annotations

import math
import re
import ssl
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import trio
import trio.testing

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from actors import Subscription, open_runtime
from links.amqp import AT_MOST_ONCE, AmqpBroker, EmbeddedBroker, Queue, Raw, Topic
from links.amqp.engine.events import Condition
from links.errors import LinkRefused
from settlement import Ack, Delivery, Hold, Native, Outcome, Policy, Scheduled, Stored
from tests.links.rabbit_kit import Rabbit, any_broker, shapes

pytestmark = pytest.mark.amqp

NUMBER: Any = 7
SECRET = "hunter2"  # noqa: S105 -- shall be in no message


async def handler(delivery: Delivery[Any]) -> Outcome:
    return Ack()


def broker(url: Any = "amqp://localhost", **options: Any) -> AmqpBroker:
    return AmqpBroker(url, **options)


def queue(**options: Any) -> Any:
    return broker().queue("orders", **options)


# --- at construction


@pytest.mark.parametrize(
    ("make", "fragments"),
    [
        # the URL (K-76)
        (lambda: broker(f"amqp://scott:{SECRET}@"), ["url must be", "no host"]),
        (lambda: broker(f"http://scott:{SECRET}@host"), ["url must be", "amqp://", "scheme 'http'"]),
        (lambda: broker(f"scott:{SECRET}@host"), ["url must be", "without a scheme"]),
        (lambda: broker(f"amqp://scott:{SECRET}@host:0"), ["url must be", "port from 1 to 65535"]),
        (lambda: broker(f"amqp://scott:{SECRET}@localhost:port"), ["url must be", "port from 1 to 65535"]),
        (lambda: broker(None), ["url must be"]),
        (lambda: broker([]), ["url must be", "empty list"]),
        (lambda: broker(["amqp://localhost", f"amqp://a:{SECRET}@b:99999"]), ["url must be"]),
        # who logs in
        (lambda: broker(f"amqp://scott:{SECRET}@bank.example"), ["amqps://", "clear text", "plain_text=True"]),
        (lambda: broker("amqp://scott@localhost"), ["password is missing"]),
        (lambda: broker("amqp://localhost", password=SECRET), ["password is for PLAIN"]),
        (lambda: broker(f"amqp://scott:{SECRET}@localhost", sasl="magic"), ["sasl must be", "'external'", "'magic'"]),
        (lambda: broker("amqp://localhost", sasl="plain"), ["needs a user"]),
        (lambda: broker("amqp://localhost", sasl="external"), ["amqps://"]),
        (lambda: broker("amqp://localhost", ssl_context=ssl.create_default_context()), ["ssl_context is for TLS"]),
        # names
        (lambda: broker(container_id=""), ["container_id must be 1 character or more"]),
        (lambda: broker(retry_header=""), ["retry_header must be 1 character or more"]),
        (lambda: broker().queue(""), ["name must be", "1 character or more"]),
        (lambda: broker().topic(""), ["name must be", "1 character or more"]),
        (lambda: broker().raw(""), ["name must be", "1 character or more"]),
        (lambda: broker().queue(NUMBER), ["name must be a str", "not 7"]),
        (lambda: broker().publisher(""), ["name must be", "1 character or more"]),
        (lambda: broker().publisher(Raw("")), ["name must be", "1 character or more"]),
        # options
        (lambda: broker(heartbeat=0), ["heartbeat must be a finite number of seconds above 0"]),
        (lambda: broker(heartbeat=math.inf), ["heartbeat must be a finite number of seconds above 0"]),
        (lambda: queue(credit=0), ["credit must be a whole number, 1 or more, not 0"]),
        (lambda: queue(credit=2.5), ["credit must be a whole number, 1 or more, not 2.5"]),
        (lambda: queue(settle="at least once"), ["settle must be AT_LEAST_ONCE or AT_MOST_ONCE"]),
        (lambda: queue(count="handlers"), ["count must be 'broker' or 'copies', not 'handlers'"]),
        (lambda: queue(delays="copies"), ["delays must be Copies(), Hold", "not 'copies'"]),
        (lambda: queue(delays=Stored(broker().publisher("t"))), ["Stored(queue) must be a queue, sql_broker.queue"]),
        (lambda: queue(delays=Stored(broker().queue("t"))), ["'t' on amqp://", "keeps no letters", "a queue table"]),
        (lambda: queue(delays=Hold(5), settle=AT_MOST_ONCE), ["delays must be", "at most once", "Hold"]),
        (lambda: queue(delays=Native(), settle=AT_MOST_ONCE), ["delays must be", "at most once", "Native"]),
        (lambda: Scheduled(""), ["Scheduled(annotation) must be a name"]),
        # a dead letter that goes round for ever
        (
            lambda: Subscription(queue(), handler, policy=Policy(dead_letter="orders")),
            ["dead_letter must be another address than 'orders'"],
        ),
    ],
)
def test_a_mistake_is_a_value_error_that_says_what_is_legal(make: Callable[[], object], fragments: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(fragments[0])) as caught:
        make()
    text = str(caught.value)
    assert [fragment for fragment in fragments if fragment not in text] == [], text
    assert SECRET not in repr(caught.value)


def test_a_dead_letter_that_is_the_address_itself_is_refused_in_each_form() -> None:
    one = broker()
    for source, to in (
        (one.queue("orders"), one.publisher("orders")),
        (one.raw("/x"), one.publisher(Raw("/x"))),
        (one.topic("t"), one.publisher(Topic("t"))),
        (one.raw("orders"), "orders"),  # elsewhere than on RabbitMQ that is the queue's address
        (one.queue("orders"), broker().publisher(Queue("orders"))),  # on the same host
    ):
        with pytest.raises(ValueError, match="dead_letter must be another address"):
            Subscription(source, handler, policy=Policy(dead_letter=to))
    Subscription(one.raw("orders"), handler, policy=Policy(dead_letter=Raw("/queues/others").name))


def test_no_repr_shows_a_credential() -> None:
    """A-6.5, K-47."""
    one = broker([f"amqp://scott:{SECRET}@localhost", f"amqps://scott:{SECRET}@bank.example/ledger"])
    things = [one, one.queue("q"), one.publisher("q"), *vars(one).values()]
    assert [thing for thing in things if SECRET in repr(thing)] == []
    assert one.name == "amqp://localhost:5672, amqps://bank.example:5671/ledger"


async def test_a_password_that_is_none_is_refused_when_it_is_asked_for(autojump_clock: trio.testing.MockClock) -> None:
    def forgotten() -> Any:
        return None

    one = broker("amqp://scott@localhost", password=forgotten)
    with pytest.raises(ValueError, match="password must be a function that gives a str"):
        async with one.connect():
            pass


# --- at start-up


async def refused(source: Any, **options: Any) -> str:
    """The refusal of a subscription on this source."""
    with pytest.raises(LinkRefused) as caught:
        async with open_runtime(Subscription(source, handler, name="billing", **options)):
            pass
    assert SECRET not in repr(caught.value)
    assert SECRET not in str(caught.value)
    return str(caught.value)


def embedded_client(embedded: EmbeddedBroker, url: str = "amqp://localhost") -> AmqpBroker:
    return AmqpBroker(url, connect=embedded.connect)


async def test_a_wrong_password(autojump_clock: trio.testing.MockClock) -> None:
    embedded = EmbeddedBroker(users={"scott": "tiger"}, anonymous=False)
    async with embedded.running():
        said = await refused(embedded_client(embedded, f"amqp://scott:{SECRET}@localhost").queue("orders"))
    assert "amqp://localhost:5672" in said
    assert "login by PLAIN" in said
    assert "billing" in said


async def test_nobody_is_logged_in_as_somebody_else(autojump_clock: trio.testing.MockClock) -> None:
    """A-6.2: the mechanism is pinned; a broker that offers PLAIN alone gets no anonymous login, and the reverse."""
    embedded = EmbeddedBroker(users={"scott": "tiger"}, anonymous=False)
    async with embedded.running():
        said = await refused(embedded_client(embedded).queue("orders"))
        assert "offers no login by ANONYMOUS" in said
    embedded = EmbeddedBroker()
    async with embedded.running():
        said = await refused(embedded_client(embedded, f"amqp://scott:{SECRET}@localhost").queue("orders"))
        assert "offers no login by PLAIN" in said


@pytest.mark.parametrize("by_session", [False, True])
async def test_a_refused_address(by_session: bool, autojump_clock: trio.testing.MockClock) -> None:
    """A-5.7, in both forms: the link is detached, or the session ended."""
    embedded = EmbeddedBroker()
    embedded.refuses_by_session = by_session
    embedded.refuse("orders", Condition("amqp:not-found", "no queue 'orders'"))
    async with embedded.running():
        said = await refused(embedded_client(embedded).queue("orders"))
    assert "'billing'" in said
    assert "'orders' on amqp://localhost:5672" in said
    assert "amqp:not-found: no queue 'orders'" in said


def posing(product: str, version: str) -> EmbeddedBroker:
    """An embedded broker that says that it is another one."""
    embedded = EmbeddedBroker()
    embedded.settings = attrs.evolve(embedded.settings, properties={"product": product, "version": version})
    return embedded


async def test_a_rabbitmq_that_is_too_old(autojump_clock: trio.testing.MockClock) -> None:
    """DESIGN 6: any *modified* would end its session."""
    embedded = posing("RabbitMQ", "3.13.7")
    async with embedded.running():
        said = await refused(embedded_client(embedded).queue("orders"))
    assert "RabbitMQ 3.13.7" in said
    assert "4.0 is needed" in said


async def test_native_on_a_broker_without_it(autojump_clock: trio.testing.MockClock) -> None:
    embedded = posing("Artemis", "2.40")
    async with embedded.running():
        said = await refused(embedded_client(embedded).queue("orders", delays=Native()))
    assert "needs a quorum queue of RabbitMQ 4.3" in said
    assert "this is Artemis 2.40" in said
    assert "Hold(" in said


@pytest.mark.servers
async def test_native_on_a_queue_without_it(rabbit: Rabbit) -> None:
    """Of the four shapes one has it."""
    name = await rabbit.queue()
    if (rabbit.node.version, rabbit.kind) == ("4.3", "quorum"):
        async with open_runtime(Subscription(AmqpBroker(rabbit.url).queue(name, delays=Native()), handler)):
            return
    said = await refused(AmqpBroker(rabbit.url).queue(name, delays=Native()))
    assert name in said
    assert "needs a quorum queue of RabbitMQ 4.3" in said
    assert f"this is a {rabbit.kind} queue of RabbitMQ {rabbit.node.version}" in said


@pytest.mark.servers
async def test_a_queue_or_topic_that_rabbitmq_does_not_have(rabbit: Rabbit) -> None:
    one = AmqpBroker(rabbit.url)
    said = await refused(one.queue("no such queue"))
    assert "no queue 'no such queue'" in said or "queue 'no such queue'" in said
    assert "declare it" in said
    assert "bind a queue" in await refused(one.topic("orders"))


@pytest.mark.servers
@shapes(version="4.3", kind="quorum")
async def test_a_password_that_rabbitmq_does_not_take(rabbit: Rabbit) -> None:
    url = f"amqp://{rabbit.user}:{SECRET}@{rabbit.node.host}:{rabbit.node.port}"
    said = await refused(AmqpBroker(url).queue("orders"))
    assert "refused the login by PLAIN" in said


@pytest.mark.servers
@any_broker
async def test_a_virtual_host_that_rabbitmq_does_not_have(rabbit: Rabbit) -> None:
    """RabbitMQ says so by cutting the connection behind the login."""
    said = await refused(AmqpBroker(f"{rabbit.url}/nowhere").queue("orders"))
    assert "virtual host 'nowhere'" in said
