"""What could not be learned of a queue is weather: said as such, asked again, and never read as a no (DESIGN 6)."""

from __future__ import annotations

import logging
from typing import Any

import attrs
import pytest
import trio
import trio.testing

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from actors import Subscription, connected, open_runtime
from links.amqp import AmqpBroker, EmbeddedBroker
from links.amqp.connection_life import ConnectionLife
from links.amqp.rabbitmq import QueueInfo
from links.errors import LinkBroken, LinkRefused
from settlement import Copies, Delivery, Native, Policy, Retry
from settlement.delays import Hold
from tests.links.amqp_kit import Handler, until
from tests.links.rabbit_kit import Rabbit, shapes

pytestmark = pytest.mark.amqp

STREAM = b"\x00\x53\x72\xc1\x14\x02\xa3\x0fx-stream-offset\x55\x07\x00\x53\x75\xa0\x01x"


@attrs.define
class Management:
    """What the management of a pretended RabbitMQ says; None: nothing, for ten seconds."""

    says: QueueInfo | LinkRefused | None = None
    asked: int = 0

    async def queue(self, name: str) -> QueueInfo:
        self.asked += 1
        if self.says is None:
            await trio.sleep(10.0)
            raise LinkBroken(f"queue {name!r}: no answer")
        await trio.lowlevel.checkpoint()
        if isinstance(self.says, LinkRefused):
            raise self.says
        return self.says


def kind(name: str) -> QueueInfo:
    return QueueInfo("orders", name, {}, None, None)


@pytest.fixture
def manage(monkeypatch: pytest.MonkeyPatch) -> Management:
    management = Management()

    async def ask(_: ConnectionLife, name: str) -> QueueInfo:
        return await management.queue(name)

    monkeypatch.setattr(ConnectionLife, "_ask", ask)
    return management


def rabbitmq(version: str = "4.3.6") -> tuple[EmbeddedBroker, AmqpBroker]:
    embedded = EmbeddedBroker()
    embedded.settings = attrs.evolve(embedded.settings, properties={"product": "RabbitMQ", "version": version})
    return embedded, AmqpBroker("amqp://localhost", connect=embedded.connect)


async def handler(_: Delivery[bytes]) -> None:
    await trio.lowlevel.checkpoint()


async def test_native_waits_for_a_mute_management_and_attaches_soon_after_it_speaks(
    autojump_clock: trio.testing.MockClock, manage: Management
) -> None:
    """Weather at start-up: no refusal; attached within ten seconds of the answer, after an alarm of minutes."""
    embedded, broker = rabbitmq()
    spoke = 0.0

    async def speak() -> None:
        nonlocal spoke
        await trio.sleep(200.0)
        manage.says, spoke = kind("quorum"), trio.current_time()

    async with embedded.running(), trio.open_nursery() as nursery:
        nursery.start_soon(speak)
        async with open_runtime(Subscription(broker.queue("orders", delays=Native()), handler)):
            assert 0.0 < spoke <= trio.current_time() <= spoke + 16.0


async def test_native_says_what_it_waits_for(
    autojump_clock: trio.testing.MockClock, manage: Management, caplog: pytest.LogCaptureFixture
) -> None:
    """A link that comes back in an alarm is degraded by what it cannot learn, and not by a no."""
    embedded, broker = rabbitmq()
    manage.says = kind("quorum")
    async with (
        embedded.running(),
        open_runtime(Subscription(broker.queue("orders", delays=Native()), handler)) as runtime,
    ):
        manage.says = None
        embedded.peers[0].break_off("cut")
        await trio.sleep(15.0)
        (why,) = runtime.statistics()["orders"].degraded
        assert "the type of queue 'orders' cannot be read" in why
        assert not runtime.statistics()["orders"].attached
        manage.says = kind("quorum")
        await trio.sleep(16.0)
        assert runtime.statistics()["orders"].degraded == ()
        assert runtime.statistics()["orders"].attached


@pytest.mark.parametrize(("version", "says"), [("4.0.5", None), ("4.3.6", kind("classic"))])
async def test_native_is_refused_where_it_is_known_to_be_missing(
    autojump_clock: trio.testing.MockClock, manage: Management, version: str, says: QueueInfo | None
) -> None:
    """A version that never has it needs no answer."""
    embedded, broker = rabbitmq(version)
    manage.says = says
    async with embedded.running():
        with pytest.raises(LinkRefused, match=r"delays=Native\(\) needs a quorum queue of RabbitMQ 4.3"):
            async with open_runtime(Subscription(broker.queue("orders", delays=Native()), handler)):
                pass


async def test_who_attached_without_knowing_learns_and_counts_by_the_broker(
    autojump_clock: trio.testing.MockClock, manage: Management
) -> None:
    """Not by copies for the link's whole life: a retry before the answer is a copy, one after it *modified*."""
    embedded, broker = rabbitmq()
    counted, copied = b"\x00\x53\x70\x45\x00\x53\x75\xa0\x01b", b"\x00\x53\x70\x45\x00\x53\x75\xa0\x01a"
    work = Handler({b"a": [Retry()], b"b": [Retry()]})
    async with (
        embedded.running(),
        open_runtime(Subscription(broker.queue("orders"), work, policy=Policy(max_attempts=3))) as runtime,
    ):
        embedded.publish("/queues/orders", copied)
        await work.has(b"a", b"a")
        assert [each.redelivery_count for each in work.of(b"a")] == [None, None]
        manage.says = kind("quorum")
        asked = manage.asked
        await trio.sleep(30.0)
        embedded.publish("/queues/orders", counted)
        await work.has(b"b", b"b")
        assert [(each.attempt, each.redelivery_count) for each in work.of(b"b")] == [(1, 0), (2, 1)]
        learned = manage.asked
        assert learned > asked
        await trio.sleep(100.0)
        assert manage.asked == learned
        assert runtime.statistics()["orders"].restarts == 0


@pytest.mark.parametrize("delays", [Copies(), Hold(3), Native()])
async def test_a_stream_is_refused_as_a_source(
    autojump_clock: trio.testing.MockClock, manage: Management, delays: Any
) -> None:
    """Nothing in it comes back: at attach, with the way out."""
    embedded, broker = rabbitmq()
    manage.says = kind("stream")
    async with embedded.running():
        with pytest.raises(LinkRefused, match=r"'orders'.*a stream gives nothing back.*quorum or classic queue"):
            async with open_runtime(Subscription(broker.queue("orders", delays=delays), handler)):
                pass


async def test_a_stream_that_is_learned_of_later_ends_the_life(
    autojump_clock: trio.testing.MockClock, manage: Management
) -> None:
    """After start-up a refusal is weather: loud and degraded."""
    embedded, broker = rabbitmq()
    async with embedded.running(), open_runtime(Subscription(broker.queue("orders"), handler)) as runtime:
        manage.says = kind("stream")
        await trio.sleep(30.0)
        (why,) = runtime.statistics()["orders"].degraded
        assert "a stream gives nothing back" in why


async def test_a_stream_is_known_by_its_messages_where_nobody_says_it(
    autojump_clock: trio.testing.MockClock, manage: Management
) -> None:
    """Each has its offset: no handler is called for one."""
    embedded, broker = rabbitmq()
    work = Handler()
    async with embedded.running(), open_runtime(Subscription(broker.queue("orders"), work)) as runtime:
        embedded.publish("/queues/orders", STREAM)
        await until(lambda: bool(runtime.statistics()["orders"].degraded))
        assert "a stream gives nothing back" in runtime.statistics()["orders"].degraded[0]
    assert work.bodies == []


async def test_one_warning_says_that_it_is_asked_again(
    autojump_clock: trio.testing.MockClock, manage: Management, caplog: pytest.LogCaptureFixture
) -> None:
    """However long the management is mute."""
    embedded, broker = rabbitmq()
    async with embedded.running(), open_runtime(Subscription(broker.queue("orders"), handler)):
        await trio.sleep(300.0)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1
    assert "cannot be read" in said[0]
    assert "until it can, copies count" in said[0]


# --- on RabbitMQ


@pytest.mark.servers
@shapes(kind="quorum")
async def test_a_stream_of_rabbitmq_is_refused(rabbit: Rabbit) -> None:
    """DESIGN 6, read over `/management`."""
    name = await rabbit.queue(kind="stream")
    broker = AmqpBroker(rabbit.url)
    with pytest.raises(LinkRefused, match="a stream gives nothing back"):
        async with open_runtime(Subscription(broker.queue(name), handler)):
            pass


@pytest.mark.servers
@shapes(kind="quorum")
async def test_a_stream_of_rabbitmq_is_known_by_its_messages(rabbit: Rabbit, manage: Management) -> None:
    """Where its management says nothing."""
    name = await rabbit.queue(kind="stream")
    broker, work = AmqpBroker(rabbit.url), Handler()
    manage.says = None
    async with connected(broker), open_runtime(Subscription(broker.queue(name), work)) as runtime:
        await broker.publisher(name).publish(b"x")
        await until(lambda: bool(runtime.statistics()[name].degraded))
        assert "a stream gives nothing back" in runtime.statistics()[name].degraded[0]
    assert work.bodies == []
