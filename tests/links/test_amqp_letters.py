"""links.amqp.letters: one queue of letters per address, which outlives the connection's life."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from actors import connected
from links.amqp import AmqpBroker, EmbeddedBroker, Raw
from links.amqp.engine.events import Condition
from links.amqp.letters import Letters
from links.errors import LinkBroken, PublishNotAccepted

pytestmark = pytest.mark.amqp


def brokers() -> tuple[EmbeddedBroker, AmqpBroker]:
    embedded = EmbeddedBroker(idle_timeout=0.0)
    return embedded, AmqpBroker("amqp://localhost", connect=embedded.connect, heartbeat=1000.0)


def bodies(embedded: EmbeddedBroker) -> list[bytes]:
    return [letter.body for letter in embedded.ready("orders")]


class Asked:
    """Publishes from many tasks, and remembers the order of the calls and what became of them."""

    def __init__(self, broker: AmqpBroker) -> None:
        self.broker = broker
        self.order: list[bytes] = []
        self.published: set[bytes] = set()
        self.errors: dict[bytes, Exception] = {}

    async def publish(self, number: int) -> None:
        body = b"%04d" % number
        self.order.append(body)
        try:
            await self.broker.publisher("orders").publish(body)
        except (LinkBroken, PublishNotAccepted) as error:
            self.errors[body] = error
        else:
            self.published.add(body)


@pytest.mark.parametrize("count", [1, 100, 1000])
async def test_letters_beyond_the_credit_go_in_the_order_of_the_calls(
    autojump_clock: trio.testing.MockClock, count: int
) -> None:
    """All publishers to one address stand in one queue."""
    embedded, broker = brokers()
    asked = Asked(broker)
    async with embedded.running(), broker.connect(), trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(asked.publish, number)
    assert bodies(embedded) == asked.order
    assert len(asked.published) == count


async def test_what_waits_keeps_its_order_over_reconnects(autojump_clock: trio.testing.MockClock) -> None:
    """What was on the wire is LinkBroken and is not sent again; what waited goes in order, once, in later lives."""
    embedded, broker = brokers()
    asked = Asked(broker)
    async with embedded.running(), connected(broker), trio.open_nursery() as nursery:
        await broker.publisher("orders").publish(b"first")
        embedded.peers[0].freeze()
        for number in range(800):
            nursery.start_soon(asked.publish, number)
        for _ in range(3):
            await trio.sleep(0.5)
            embedded.peers[-1].break_off("cut")
            nursery.start_soon(asked.publish, len(asked.order))
    came = bodies(embedded)[1:]
    assert came == [body for body in asked.order if body in asked.published]
    assert set(asked.order) == asked.published | set(asked.errors)
    assert all(isinstance(error, LinkBroken) for error in asked.errors.values())
    assert asked.published


async def test_a_letter_that_is_cancelled_while_it_waits_is_never_sent(autojump_clock: trio.testing.MockClock) -> None:
    """The first one, one in the middle and the last: the others go on behind them."""
    embedded, broker = brokers()
    asked = Asked(broker)
    scopes: dict[bytes, trio.CancelScope] = {}

    async def publish(  # noqa: ASYNC114
        number: int, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        with trio.CancelScope() as scope:
            scopes[b"%04d" % number] = scope
            task_status.started()
            await asked.publish(number)

    async with embedded.running():
        with broker.opened():  # and no connection yet
            async with trio.open_nursery() as nursery:
                for number in range(20):
                    await nursery.start(publish, number)
                await trio.testing.wait_all_tasks_blocked()
                for body in (b"0000", b"0001", b"0010", b"0019"):
                    scopes[body].cancel()
                async with trio.open_nursery() as lives:
                    await lives.start(broker.run)
                    while len(asked.published) < 16:
                        await trio.sleep(0.01)
                    lives.cancel_scope.cancel()
    assert bodies(embedded) == [b"%04d" % number for number in range(20) if number not in (0, 1, 10, 19)]


async def test_a_refused_address_refuses_each_letter_and_then_takes_the_next(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Nobody waits for ever behind a refusal, and it is asked again."""
    embedded, broker = brokers()
    asked = Asked(broker)
    embedded.refuse("orders", Condition("amqp:not-found", "no"))
    async with embedded.running(), broker.connect():
        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(asked.publish, number)
        assert len(asked.errors) == 10
        embedded.refuse("orders", None)
        await broker.publisher("orders").publish(b"x")
        await broker.publisher(Raw("other")).publish(b"y")
    assert bodies(embedded) == [b"x"]


async def test_a_thousand_tasks_wake_the_queue_once_for_each_credit(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each letter: who is first sends for all behind."""
    embedded, broker = brokers()
    asked = Asked(broker)
    carried = 0
    carry = Letters._carry

    async def counting(self: Any, first: Any) -> None:
        nonlocal carried
        carried += 1
        await carry(self, first)

    monkeypatch.setattr(Letters, "_carry", counting)
    async with embedded.running(), broker.connect(), trio.open_nursery() as nursery:
        for number in range(1000):
            nursery.start_soon(asked.publish, number)
    assert len(asked.published) == 1000
    assert carried < 100
