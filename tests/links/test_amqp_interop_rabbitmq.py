"""rhea and proton's blocking client beside ours on RabbitMQ: what one sends the other gets, and they share a queue."""

from __future__ import annotations

import hashlib

import pytest
import trio

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from actors import Subscription, connected, open_runtime
from links.amqp import AmqpBroker
from settlement import Ack, Delivery, Drop, Outcome, Policy, Retry
from tests.interop.rhea_kit import Rhea, digest, install, only, seen, until
from tests.links.rabbit_kit import Rabbit, shapes

pytestmark = [pytest.mark.amqp, pytest.mark.servers]

PROGRAMS = [("produce.js", ["--count", "200"]), ("blocking.py", ["produce", "200"])]


@pytest.fixture(scope="session")
def rhea() -> Rhea:
    return install()


def address(name: str) -> str:
    return f"/queues/{name}"


@pytest.mark.parametrize(("program", "options"), PROGRAMS)
async def test_we_get_what_they_sent(program: str, options: list[str], rhea: Rhea, rabbit: Rabbit) -> None:
    """K-60: bodies, ids, properties and their types as text (A-7.2)."""
    name = await rabbit.queue()
    await rhea.run(program, rabbit.url, address(name), *options)
    got: dict[str, Delivery[bytes]] = {}

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        await trio.lowlevel.checkpoint()
        got[delivery.headers["n"].decode()] = delivery
        return Ack()

    async with open_runtime(Subscription(AmqpBroker(rabbit.url).queue(name), handler, concurrency=8)) as runtime:
        await until(lambda: len(got) == 200)
    assert runtime.ledger(name).acked == 200
    assert {n: hashlib.sha256(each.body).hexdigest() for n, each in got.items()} == {
        str(n): digest(n) for n in range(200)
    }
    one = got["1"]
    assert {key: one.headers[key] for key in ("message-id", "name", "urgent")} == {
        "message-id": b"id-1",
        "name": "Zoë".encode(),
        "urgent": b"true",
    }
    assert (one.id, one.attempt) == ("id-1", 1)


async def test_rhea_gets_what_we_sent_and_what_we_made_of_it(rhea: Rhea, rabbit: Rabbit) -> None:
    """Our own messages, and our dead letters of theirs, byte for byte."""
    name, dead = await rabbit.queue(), await rabbit.queue()
    await rhea.run("produce.js", rabbit.url, address(name), "--count", "3")
    broker = AmqpBroker(rabbit.url)
    policy = Policy(max_attempts=2, dead_letter=dead)

    async def handler(_delivery: Delivery[bytes]) -> Outcome:
        await trio.lowlevel.checkpoint()
        return Retry()

    async with open_runtime(Subscription(broker.queue(name), handler, policy=policy)) as runtime:
        await broker.publisher(name).publish(b"3." * 512, {"n": b"3", "message-id": b"id-3"})
        await until(lambda: runtime.ledger(name).dead_lettered == 4)
    got = await rhea.run("consume.js", rabbit.url, address(dead), "--count", "4")
    assert sorted(only(got, "hash")) == sorted(digest(n) for n in range(4))
    [theirs] = [fact["application_properties"] for fact in got if fact.get("n") == 1]
    copied = {"x-ruststream-retry-count": "1"} if (rabbit.node.version, rabbit.kind) == ("4.0", "classic") else {}
    assert theirs == {"n": 1, "name": "Zoë", "urgent": True, **copied}


@shapes(version="4.3")
async def test_rhea_and_we_share_a_queue(rhea: Rhea, rabbit: Rabbit) -> None:
    """K-66: each of 1,000 messages goes to one of three consumers.

    Not on 4.0, whose count of deliveries proton's clients get wrong: they are sent more than they asked for, and again.
    """
    name = await rabbit.queue()
    ours: list[int] = []

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        await trio.sleep(0.001)
        ours.append(int(delivery.headers["n"]))
        return Ack()

    async with (
        open_runtime(Subscription(AmqpBroker(rabbit.url).queue(name), handler, concurrency=4)),
        rhea.running("consume.js", rabbit.url, address(name), "--credit", "10") as one,
        rhea.running("blocking.py", rabbit.url, address(name), "consume", "0") as other,
    ):
        await one.tells("attached")
        await other.tells("attached")
        await rhea.run("produce.js", rabbit.url, address(name), "--count", "1000")
        await until(lambda: len(ours) + len(seen(one.facts)) + len(seen(other.facts)) >= 1000)
        theirs = [n for program in (one, other) for n, _ in seen(program.facts)]
    assert sorted([*ours, *theirs]) == list(range(1000))
    assert ours
    assert theirs


@shapes(version="4.3", kind="quorum")
async def test_they_get_what_we_dropped_from_the_brokers_dead_letter(rhea: Rhea, rabbit: Rabbit) -> None:
    """K-62: *rejected*; what the broker makes of it is there for anybody."""
    dead = await rabbit.queue()
    name = await rabbit.queue({"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead})
    broker = AmqpBroker(rabbit.url)

    async def handler(_delivery: Delivery[bytes]) -> Outcome:
        await trio.lowlevel.checkpoint()
        return Drop()

    async with connected(broker), open_runtime(Subscription(broker.queue(name), handler)) as runtime:
        await rhea.run("blocking.py", rabbit.url, address(name), "produce", "5")
        await until(lambda: runtime.ledger(name).dropped == 5)
    got = await rhea.run("consume.js", rabbit.url, address(dead), "--count", "5")
    assert sorted(n for n, _ in seen(got)) == [0, 1, 2, 3, 4]
