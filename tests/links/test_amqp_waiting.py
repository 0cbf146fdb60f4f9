"""What waits on AMQP: what is held is bounded, and what merely waits for the broker is seen."""

# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import pytest
import trio
import trio.testing

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from actors import BatchSubscription, Subscription, open_runtime
from links.amqp import AmqpBroker, EmbeddedBroker
from settlement import Copies, Delivery, Hold, Policy, RetryAfter
from tests.links.amqp_kit import Handler, until
from tests.links.rabbit_kit import Rabbit, shapes

pytestmark = pytest.mark.amqp

HEADER = b"\x00\x53\x70\x45"


def message(number: int) -> bytes:
    return HEADER + b"\x00\x53\x75\xa0\x02%02d" % number


async def handler(_: Delivery[bytes]) -> None:
    await trio.lowlevel.checkpoint()


# --- held


@pytest.mark.parametrize("max_held", [1, 3])
@pytest.mark.parametrize("concurrency", [1, 4])
async def test_no_more_are_held_than_max_held(
    autojump_clock: trio.testing.MockClock, max_held: int, concurrency: int
) -> None:
    """The next RetryAfter waits for a place; each is handled again, 10 s after it was held."""
    embedded = EmbeddedBroker()
    broker = AmqpBroker("amqp://localhost", connect=embedded.connect)
    work = Handler({b"%02d" % number: [RetryAfter(10.0)] for number in range(12)})
    began = 0.0
    source = broker.queue("orders", delays=Hold(max_held), credit=20)
    async with embedded.running(), open_runtime(Subscription(source, work, concurrency=concurrency)) as runtime:
        began = trio.current_time()
        for number in range(12):
            embedded.publish("orders", message(number))
        await trio.sleep(1.0)
        assert len(work.bodies) == max_held + concurrency
        await trio.sleep(130.0)
        assert runtime.ledger("orders").acked == 12
    last = max(work.times) - began
    assert last == pytest.approx(10.0 * 12 / max_held, abs=1.0)
    assert (runtime.ledger("orders").delayed, len(work.bodies)) == (12, 24)


async def test_a_drain_ends_what_is_held_and_what_waits_for_a_place(autojump_clock: trio.testing.MockClock) -> None:
    """Its verb is said at once, without waiting; nobody hangs for the room."""
    embedded = EmbeddedBroker()
    broker = AmqpBroker("amqp://localhost", connect=embedded.connect)
    work = Handler({b"%02d" % number: [RetryAfter(500.0)] * 2 for number in range(6)})
    source = broker.queue("orders", delays=Hold(2), credit=10)
    async with embedded.running():
        async with open_runtime(Subscription(source, work, concurrency=2)) as runtime:
            for number in range(6):
                embedded.publish("orders", message(number))
            await work.has(b"00", b"01", b"02", b"03")
            await trio.sleep(1.0)
            drained = trio.current_time()
        assert trio.current_time() - drained < 1.0
    assert runtime.ledger("orders").delayed == 4
    assert len(embedded.ready("orders")) == 6


async def test_a_dropped_runtime_leaves_what_is_held_unsettled(autojump_clock: trio.testing.MockClock) -> None:
    """Also what waits for a place, and a batch."""
    embedded = EmbeddedBroker()
    broker = AmqpBroker("amqp://localhost", connect=embedded.connect)

    async def delay(deliveries: list[Delivery[bytes]]) -> RetryAfter:
        await trio.lowlevel.checkpoint()
        return RetryAfter(500.0)

    source = broker.queue("orders", delays=Hold(2), credit=10)
    async with embedded.running():
        with trio.move_on_after(5.0):
            async with open_runtime(BatchSubscription(source, delay, size=4)) as runtime:
                for number in range(6):
                    embedded.publish("orders", message(number))
                await trio.sleep_forever()
    ledger = runtime.ledger("orders")
    assert (ledger.delayed, ledger.unsettled, ledger.balanced) == (0, ledger.received, True)
    assert len(embedded.ready("orders")) == 6


# --- waiting for the broker


@pytest.mark.parametrize("step", ["publishing to dead", "copies to orders"])
async def test_a_letter_that_merely_waits_is_degraded(autojump_clock: trio.testing.MockClock, step: str) -> None:
    """A broker that stops reading fails nothing: the mark comes within seconds, and goes when it reads again."""
    letters, main = EmbeddedBroker(idle_timeout=0.0), EmbeddedBroker()
    far = AmqpBroker("amqp://far", connect=letters.connect, heartbeat=1000.0)
    near = AmqpBroker("amqp://near", connect=main.connect)
    if step == "publishing to dead":
        source, policy = near.queue("orders"), Policy(max_attempts=1, dead_letter=far.publisher("dead"))
        there = main
    else:
        source, policy = far.queue("orders", delays=Copies()), Policy()
        there = letters
    work = Handler({b"01": [RetryAfter(1.0)]})
    async with (
        letters.running(),
        main.running(),
        open_runtime(Subscription(source, work, policy=policy)) as runtime,
    ):
        there.publish("orders", message(1))
        await work.has(b"01")
        letters.peers[0].freeze()
        await trio.sleep(8.0)
        (mark,) = runtime.statistics()["orders"].degraded
        assert mark.startswith(f"{step}: amqp://far:5672 has not confirmed it for 5 s")
        letters.peers[0].thaw()
        await until(lambda: runtime.statistics()["orders"].degraded == ())


# --- a login that is refused after a break


async def test_a_password_that_was_changed_is_what_the_link_waits_for(autojump_clock: trio.testing.MockClock) -> None:
    """Degraded by the refused login, not by the break before it; attached again when the password is back."""
    embedded = EmbeddedBroker(users={"anna": "old"}, anonymous=False)
    broker = AmqpBroker("amqp://anna:old@localhost", connect=embedded.connect)
    async with embedded.running(), open_runtime(Subscription(broker.queue("orders"), handler)) as runtime:
        embedded.users["anna"] = "new"
        embedded.peers[0].break_off("cut")
        await trio.sleep(5.0)
        (mark,) = runtime.statistics()["orders"].degraded
        assert "the peer has refused the login by PLAIN" in mark
        assert "old" not in mark
        embedded.users["anna"] = "old"
        await until(lambda: runtime.statistics()["orders"].degraded == ())


@pytest.mark.servers
@shapes(kind="quorum")
async def test_a_password_that_was_changed_on_rabbitmq_is_named(rabbit: Rabbit) -> None:
    """As above, in RabbitMQ's words."""
    name = await rabbit.queue()
    broker = AmqpBroker(rabbit.url)
    async with open_runtime(Subscription(broker.queue(name), handler)) as runtime:
        await rabbit.put_user(rabbit.user, "another password")
        await rabbit.close_connections()
        await until(lambda: any("refused the login by PLAIN" in each for each in runtime.statistics()[name].degraded))
        await rabbit.put_user(rabbit.user, rabbit.user)
        await until(lambda: runtime.statistics()[name].degraded == ())
