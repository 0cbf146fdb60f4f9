"""Peers that are mute, stopped or away, hosts in turn, links that end alone, and publishers meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Final

import pytest
import trio

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from actors import Runtime, Subscription, connected, open_runtime
from links.amqp.broker import AmqpBroker
from links.errors import LinkBroken, LinkRefused
from settlement import Ack, Delivery, Outcome
from settlement.groups import leaves
from tests.links.amqp_kit import Handler, take
from tests.links.faulty_network import FaultyNetwork, faulty_network
from tests.links.rabbit_kit import Rabbit, shapes
from tests.links.weather_kit import SLACK, Log, numbered, often, until, until_more

pytestmark = [pytest.mark.amqp, pytest.mark.servers]

HEARTBEAT: Final = 2.0
NOTICED: Final = 2 * HEARTBEAT
"""Seconds of silence after which a connection is taken for dead, at the latest."""


# --- silence


async def test_a_mute_server_is_noticed() -> None:
    """A server that accepts and says nothing: within twice the heartbeat the next life is tried."""
    log, came = Log(), list[float]()

    async def serve(stream: trio.SocketStream) -> None:
        came.append(trio.current_time())
        async for _ in stream:
            pass

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        broker = AmqpBroker(f"amqp://127.0.0.1:{port}", heartbeat=HEARTBEAT)
        runtime = Runtime(Subscription(broker.queue("orders"), Handler()), observers=[log])
        nursery.start_soon(runtime.run)
        await until(lambda: bool(log.breaks(broker.name)))
        ((at, event),) = log.breaks(broker.name)
        assert at - came[0] < NOTICED + SLACK / 4
        assert "does not answer" in str(event.error)
        await until(lambda: len(came) == 2)
        nursery.cancel_scope.cancel()


async def silent(broker: AmqpBroker, name: str, freeze: Callable[[], None], thaw: Callable[[], None]) -> None:
    """A peer falls silent under an attached link, is noticed in time, and the service goes on when it speaks again."""
    log, handler = Log(), Handler()
    subscription = Subscription(broker.queue(name), handler, name="orders")
    async with open_runtime(subscription, observers=[log]) as runtime:
        await broker.publisher(name).publish(b"before")
        await handler.has(b"before")
        await until(lambda: runtime.ledger("orders").acked == 1)
        freeze()
        frozen = trio.current_time()
        await until(lambda: bool(log.breaks(broker.name)))
        assert trio.current_time() - frozen < NOTICED + SLACK / 4
        await until(lambda: bool(runtime.statistics()["orders"].degraded))
        thaw()
        await broker.publisher(name).publish(b"after")
        await handler.has(b"after")
        await until(lambda: not runtime.statistics()["orders"].degraded)
        await until(lambda: runtime.ledger("orders").acked == 2)
    assert handler.bodies == [b"before", b"after"]
    assert runtime.ledger("orders").balanced


@shapes(version="4.3", kind="quorum")
async def test_a_half_open_connection_is_noticed(rabbit: Rabbit) -> None:
    """Neither bytes nor ends pass any more: a cable that is out, a firewall that has forgotten."""
    name = await rabbit.queue()
    async with faulty_network(rabbit.node.host, rabbit.node.port) as network:
        broker = AmqpBroker(network.url(rabbit.url), heartbeat=HEARTBEAT)
        await silent(broker, name, network.freeze, network.thaw)


STOPPED: Final = """
import trio
from links.amqp.embedded.broker import EmbeddedBroker

async def main():
    async with EmbeddedBroker().serve() as url:
        print(url, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@contextmanager
def another_process() -> Generator[tuple[str, Callable[[int], None]], None, None]:
    """An embedded broker in a process of its own: its URL, and how to send it a signal."""
    process = subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), partial(os.kill, process.pid)
        finally:
            process.kill()


async def test_a_stopped_broker_is_noticed() -> None:
    """A process that is stopped answers nothing, though its kernel takes connections and bytes for it."""
    with another_process() as (url, send):
        broker = AmqpBroker(url, heartbeat=HEARTBEAT)
        await silent(broker, "orders", partial(send, signal.SIGSTOP), partial(send, signal.SIGCONT))


# --- away


@pytest.mark.parametrize("seconds", [5.0, pytest.param(120.0, marks=pytest.mark.long)])
@shapes(version="4.3", kind="quorum")
async def test_a_broker_that_is_away_is_waited_for(rabbit: Rabbit, seconds: float) -> None:
    """Connections are cut and refused for so long: the service is degraded, waits, and goes on within the backoff."""
    name, log, handler = await rabbit.queue(), Log(), Handler()
    async with faulty_network(rabbit.node.host, rabbit.node.port) as network:
        broker = AmqpBroker(network.url(rabbit.url))
        subscription = Subscription(broker.queue(name), handler, name="orders")
        async with open_runtime(subscription, observers=[log]) as runtime, trio.open_nursery() as nursery:
            await broker.publisher(name).publish(b"before")
            await handler.has(b"before")
            await until(lambda: runtime.ledger("orders").acked == 1)
            network.refuse()
            network.cut()
            await until(lambda: bool(runtime.statistics()["orders"].degraded))
            nursery.start_soon(broker.publisher(name).publish, b"while")  # it waits, too
            await trio.sleep(seconds)  # that is the outage, and no wait for something
            assert network.refused > 2
            assert runtime.statistics()["orders"].degraded
            assert not runtime.statistics()["orders"].attached
            assert handler.bodies == [b"before"]
            network.admit()
            admitted = trio.current_time()
            await until(lambda: len(handler.bodies) == 2, within=40.0)
            _, last = log.breaks(broker.name)[-1]
            assert last.delay is not None
            assert trio.current_time() - admitted < last.delay + SLACK
            await until(lambda: runtime.ledger("orders").acked == 2)
            assert not runtime.statistics()["orders"].degraded
    assert handler.bodies == [b"before", b"while"]
    assert runtime.ledger("orders").balanced


# --- hosts in turn


@asynccontextmanager
async def three_hosts(rabbit: Rabbit) -> AsyncGenerator[tuple[list[str], FaultyNetwork, FaultyNetwork], None]:
    """URLs of a port where nobody listens, of a host that refuses, and of one that is well; and the last two."""
    async with AsyncExitStack() as stack:
        refusing = await stack.enter_async_context(faulty_network(rabbit.node.host, rabbit.node.port))
        live = await stack.enter_async_context(faulty_network(rabbit.node.host, rabbit.node.port))
        refusing.refuse()
        nobody = stack.enter_context(trio.socket.socket())
        await nobody.bind(("127.0.0.1", 0))  # bound, and not listening
        port = nobody.getsockname()[1]
        dead = live.url(rabbit.url).replace(f":{live.port}", f":{port}")
        yield [dead, refusing.url(rabbit.url), live.url(rabbit.url)], refusing, live


@shapes(version="4.3", kind="quorum")
async def test_hosts_are_tried_in_turn_and_credit_is_given_to_each(
    rabbit: Rabbit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DESIGN 4: each life goes on with the next host; what a handler answers after its life says nothing to the next.

    The first handler shields itself over the cut, and answers `Ack`: its message comes again all the same.
    """
    often(monkeypatch)
    name, log = await rabbit.queue({"x-delivery-limit": -1}), Log()
    attempts: list[int] = []
    late, cut = trio.Event(), trio.Event()

    async def handle(delivery: Delivery[bytes]) -> Outcome:
        with log.handling(delivery):
            if delivery.body == b"late":
                attempts.append(delivery.attempt)
                if len(attempts) == 1:
                    late.set()
                    with trio.CancelScope(shield=True):
                        await cut.wait()
        return Ack()

    async with three_hosts(rabbit) as (urls, refusing, live):
        broker = AmqpBroker(urls, heartbeat=HEARTBEAT)
        subscription = Subscription(broker.queue(name, credit=2), handle, name="orders", concurrency=2)
        async with open_runtime(subscription, observers=[log]) as runtime:
            await broker.publisher(name).publish(b"late")
            await late.wait()
            for life in range(1, 4):
                assert (live.connections, refusing.connections) == (life, 0)
                for number in range(5):  # more than there is credit
                    await broker.publisher(name).publish(b"%d.%d" % (life, number))
                await until_more(lambda: len(log.handled), life * 5)
                live.cut()
                await until_more(lambda: broker.lives, life)
                cut.set()
            await until(lambda: runtime.ledger("orders").acked >= 1 and len(attempts) == 2)
            await rabbit.until_depth(name, 0)
            await until(lambda: not runtime.statistics()["orders"].in_hand)
        said = [str(event.error) for _, event in log.breaks(broker.name)]
    assert attempts == [1, 2]
    assert refusing.refused == 4
    assert len([each for each in said if each.startswith(f"amqp://{urls[0].rpartition('@')[2]}: cannot connect")]) == 4
    log.judge([b"late", *(b"%d.%d" % (life, number) for life in range(1, 4) for number in range(5))], runtime, "orders")
    assert runtime.ledger("orders").unsettled >= 1


# --- links that end alone


@pytest.mark.parametrize(
    ("rabbit", "subscriptions"), [(("4.3", "classic"), 60), (("4.0", "classic"), 6)], indirect=["rabbit"]
)
async def test_many_links_on_one_connection_and_one_that_ends_alone(rabbit: Rabbit, subscriptions: int) -> None:
    """DESIGN 6: a session for each subscription, one for all publishers; RabbitMQ allows 64.

    The link to a queue that is deleted starts again alone, is degraded, and is back when the queue is declared again;
    one session too many is refused by name.
    """
    log, handler = Log(), Handler()
    names: list[str] = []

    async def declare() -> None:
        names.append(await rabbit.queue())

    async with trio.open_nursery() as nursery:
        for _ in range(subscriptions + 4):
            nursery.start_soon(declare)
    broker = AmqpBroker(rabbit.url)
    many = [Subscription(broker.queue(name), handler) for name in names[:subscriptions]]
    async with connected(broker), open_runtime(*many, observers=[log]) as runtime:

        async def round_(number: int, to: list[str]) -> None:
            async with trio.open_nursery() as nursery:
                for name in to:
                    nursery.start_soon(broker.publisher(name).publish, b"%s %d" % (name.encode(), number))
            await handler.has(*[b"%s %d" % (name.encode(), number) for name in to if name in names[:subscriptions]])

        await round_(1, names)
        assert broker.lives == 1
        if subscriptions == 60:
            await one_too_many(broker, names[subscriptions:])
            await round_(2, names)

        await until(lambda: not any(each.in_hand for each in runtime.statistics().values()))
        victim, others = names[3], [*names[:3], *names[4:]]
        await rabbit.delete(victim)
        await until(lambda: bool(runtime.statistics()[victim].degraded))
        await until(lambda: len(log.breaks(victim)) > 1)  # it is tried again, and refused
        await round_(3, others)
        assert [name for name, each in runtime.statistics().items() if each.degraded] == [victim]
        await rabbit.declare(victim)
        await until(lambda: not runtime.statistics()[victim].degraded)
        await round_(4, names)
        await until(lambda: not any(each.in_hand for each in runtime.statistics().values()))
        assert {name for name, each in runtime.statistics().items() if each.restarts} == {victim}
        assert broker.lives == 1
    for name in names[:subscriptions]:
        ledger = runtime.ledger(name)
        assert ledger.balanced
        assert ledger.acked == ledger.received == (3 if subscriptions == 6 else 4) - (name == victim)


async def one_too_many(broker: AmqpBroker, names: list[str]) -> None:
    """More subscriptions on the same connection than there are sessions."""
    with pytest.raises((LinkRefused, ExceptionGroup)) as refused:
        await Runtime(*[Subscription(broker.queue(name), Handler()) for name in names]).run()
    for error in leaves(refused.value):
        assert isinstance(error, LinkRefused)
        assert "allows 64 sessions" in str(error)
        assert any(name in str(error) for name in names)


# --- publishers meanwhile


@shapes(version="4.3", kind="quorum")
async def test_a_publish_on_the_wire_breaks_and_one_after_it_waits(rabbit: Rabbit) -> None:
    """K-75: the one on the wire may be there and is never sent again; the next one waits for the next life."""
    name = await rabbit.queue()
    async with faulty_network(rabbit.node.host, rabbit.node.port) as network:
        broker = AmqpBroker(network.url(rabbit.url))
        publisher = broker.publisher(name)
        async with connected(broker):
            await publisher.publish(b"first")
            network.freeze_to_client()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(breaks, publisher.publish, b"on the wire")
                await rabbit.until_depth(name, 2)
                network.refuse()
                network.cut()
                network.thaw()
            with trio.move_on_after(0.5) as impatient:
                await publisher.publish(b"given up")
            assert impatient.cancelled_caught
            async with trio.open_nursery() as nursery:
                nursery.start_soon(publisher.publish, b"waits")
                await until(lambda: network.refused > 1)
                network.admit()
            await rabbit.until_depth(name, 3)
    async with (again := AmqpBroker(rabbit.url)).connect():
        assert [each.body for each in await take(again, name, 3)] == [b"first", b"on the wire", b"waits"]


async def breaks(publish: Callable[[bytes], Awaitable[None]], body: bytes) -> None:
    with pytest.raises(LinkBroken, match="may be there or not"):
        await publish(body)


@shapes(kind="quorum")
async def test_what_had_no_credit_was_not_sent_and_goes_in_order_in_the_next_life(rabbit: Rabbit) -> None:
    """A-8.2: the peer's credit is what may be on the wire; the rest is nowhere, and keeps its order."""
    name, results = await rabbit.queue(), dict[int, str]()
    async with faulty_network(rabbit.node.host, rabbit.node.port) as network:
        broker = AmqpBroker(network.url(rabbit.url))

        async def publish(number: int, *, task_status: trio.TaskStatus[None]) -> None:  # noqa: ASYNC114
            task_status.started()
            try:
                await broker.publisher(name).publish(b"%d" % number)
                results[number] = "confirmed"
            except LinkBroken:
                results[number] = "broken"

        async with connected(broker):
            await broker.publisher(name).publish(b"first")
            network.freeze_to_server()
            async with trio.open_nursery() as nursery:
                for number in range(300):
                    await nursery.start(publish, number)
                await broker.life.connection.written()
                assert not results
                network.cut()
                network.thaw()
    sent = [number for number in range(300) if results[number] == "broken"]
    assert 100 < len(sent) < 300
    assert sent == [*range(len(sent))]
    await rabbit.until_depth(name, 1 + 300 - len(sent))
    async with (again := AmqpBroker(rabbit.url)).connect():
        there = [each.body for each in await take(again, name, 1 + 300 - len(sent))]
    assert there == [b"first", *numbered(300)[len(sent) :]]
