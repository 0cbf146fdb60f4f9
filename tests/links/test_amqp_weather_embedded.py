"""Bad weather that one scene shows: the embedded broker over a cable that fails, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio
import trio.testing

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from actors import Subscription, connected, open_runtime
from links.amqp.broker import AmqpBroker
from links.amqp.embedded.broker import EmbeddedBroker
from links.amqp.engine.client_connection import ClientConnection
from links.amqp.engine.engine import Engine
from links.amqp.engine.settings import Login, Settings
from links.errors import LinkBroken
from settlement import Delivery
from tests.weather.cable import Cable

pytestmark = pytest.mark.amqp


@attrs.define
class Scene:
    server: EmbeddedBroker
    nursery: trio.Nursery
    cables: list[Cable] = attrs.field(factory=list[Cable])

    async def connect(self) -> Cable:
        await trio.lowlevel.checkpoint()
        self.cables.append(Cable(self.server.connect_in_memory(), latency=0.01))
        self.nursery.start_soon(self.cables[-1].carry)
        return self.cables[-1]

    def broker(self) -> AmqpBroker:
        return AmqpBroker("amqp://localhost", connect=self.connect)

    def there(self, queue: str) -> list[bytes]:
        return [letter.body for letter in self.server.ready(queue)]


@asynccontextmanager
async def scene() -> AsyncGenerator[Scene, None]:
    server = EmbeddedBroker()
    async with server.running(), trio.open_nursery() as nursery:
        yield Scene(server, nursery)
        nursery.cancel_scope.cancel()


async def test_publishes_that_wait_keep_their_order(autojump_clock: trio.testing.MockClock) -> None:
    """A-8.2, K-75: the credit of 256 is on the wire and breaks; what waits was not sent, and goes in order."""
    broken: list[int] = []
    async with scene() as at:
        broker = at.broker()

        async def publish(number: int, *, task_status: trio.TaskStatus[None]) -> None:  # noqa: ASYNC114
            task_status.started()
            try:
                await broker.publisher("orders").publish(b"%d" % number)  # each has a publisher of its own
            except LinkBroken:
                broken.append(number)

        async with connected(broker):
            await broker.publisher("orders").publish(b"first")
            at.cables[0].out.freeze()
            async with trio.open_nursery() as nursery:
                for number in range(300):
                    await nursery.start(publish, number)
                await trio.sleep(1.0)
                assert not broken
                at.cables[0].cut()
        assert sorted(broken) == [*range(256)]
        assert at.there("orders") == [b"first", *[b"%d" % number for number in range(256, 300)]]


@pytest.mark.parametrize("credit", [1, 2])
async def test_a_drain_proves_what_it_has_said(credit: int, autojump_clock: trio.testing.MockClock) -> None:
    """DESIGN 4: also where the credit is used up, so that a peer has nothing to drain and need not answer."""
    async with scene() as at:
        broker = at.broker()
        subscription = Subscription(broker.queue("orders", credit=credit), slowly)
        async with open_runtime(subscription) as runtime:
            await broker.publisher("orders").publish(b"1")
            await trio.sleep(0.5)
            runtime.drain()
            await runtime.finished()
            assert trio.current_time() < 2.0
    assert (runtime.ledger("orders").acked, runtime.ledger("orders").received) == (1, 1)


async def slowly(delivery: Delivery[bytes]) -> None:
    await trio.sleep(1.0)


async def test_a_session_that_is_ended_at_once_ends_nothing_else(autojump_clock: trio.testing.MockClock) -> None:
    """A peer on proton that hears begin and end together answers with a begin that is nobody's."""
    async with scene() as at, trio.open_nursery() as nursery:
        connection = ClientConnection(await at.connect(), Engine(Settings("client", login=Login(), idle_timeout=10.0)))
        nursery.start_soon(connection.run)
        await connection.opened()
        (await connection.begin()).end()
        await trio.sleep(1.0)
        assert connection.over is None
        with trio.fail_after(10.0):
            await (await connection.begin()).opened()
        connection.close()
