"""Bad weather between links.amqp and RabbitMQ: connections that break under load, and what was written and not seen.

Through the public API alone; nothing is believed that the runtime says of itself without the broker's own count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs
import pytest
import trio

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from actors import Subscription, open_runtime
from links.amqp.broker import AmqpBroker
from links.amqp.link import AmqpLink
from settlement import Delivery
from settlement.ledger import Line
from tests.links.faulty_network import FaultyNetwork, faulty_network
from tests.links.rabbit_kit import Rabbit, shapes
from tests.links.weather_kit import SLACK, Log, fill, numbered, often, until, until_more
from tests.links.wire_kit import DISPOSITION, Trace, Wire

pytestmark = [pytest.mark.amqp, pytest.mark.servers]


# --- breaks under load


@pytest.mark.parametrize(
    ("rabbit", "count", "breaks"),
    [(("4.3", "quorum"), 10_000, 20), (("4.0", "quorum"), 2_000, 6)],
    indirect=["rabbit"],
    ids=["4.3-quorum-20-breaks", "4.0-quorum-6-breaks"],
)
async def test_a_connection_that_breaks_under_load_loses_nothing(
    rabbit: Rabbit, count: int, breaks: int, monkeypatch: pytest.MonkeyPatch, tell: Callable[[str], None]
) -> None:
    """DESIGN 4: half of the breaks by the network (cut; frozen, then cut; half closed), half by the broker's operator.

    None is lost, consumption resumes within the backoff bound, each repeat is explained by *unsettled* and *unknown*.
    """
    often(monkeypatch)
    name, bodies, log = await rabbit.queue({"x-delivery-limit": -1}), numbered(count), Log()
    await fill(rabbit, name, bodies)

    async def handle(delivery: Delivery[bytes]) -> None:
        with log.handling(delivery):
            await trio.sleep(0.005)

    async with faulty_network(rabbit.node.host, rabbit.node.port) as network:
        broker = AmqpBroker(network.url(rabbit.url), heartbeat=2.0)
        subscription = Subscription(broker.queue(name, credit=200), handle, name="load", concurrency=50)
        async with open_runtime(subscription, observers=[log]) as runtime:
            for number in range(breaks):
                await until_more(lambda: len(log.handled), number * count // (breaks + 1))
                await until(lambda: log.running > 0)
                before = len(log.breaks("load"))
                await break_it(rabbit, network, log, number)
                await until_more(lambda: len(log.breaks("load")), before)
                network.thaw()
                await until_more(lambda: broker.lives, number + 1)
            await rabbit.until_depth(name, 0)
            await until(lambda: not runtime.statistics()["load"].in_hand)
    await rabbit.until_depth(name, 0)
    log.judge(bodies, runtime, "load")
    broken = log.breaks(broker.name)
    assert len(broken) >= breaks
    slowest = 0.0
    for at, event in broken:
        assert event.delay is not None
        back = next(attached for attached in log.attached("load") if attached > at)
        slowest = max(slowest, back - at - event.delay)
    assert slowest < SLACK
    ledger = runtime.ledger("load")
    tell(
        f"{len(broken)} breaks, {ledger.deliveries}; {log.handled.total() - count} calls again; "
        f"back {slowest * 1000:.0f} ms after the backoff at the latest"
    )


async def break_it(rabbit: Rabbit, network: FaultyNetwork, log: Log, number: int) -> None:
    """One after the other: six ways, every second one the operator's."""
    match number % 6:
        case 0:
            network.cut()
        case 2:
            network.freeze()
            await until(lambda: log.running == 0)  # everything is answered, and nobody has seen it
            network.cut()
        case 4:
            network.half_close()
        case _:
            before = len(log.breaks("load"))
            while len(log.breaks("load")) == before:  # a connection is not listed at once
                await rabbit.close_connections()
                await trio.sleep(0.01)


# --- written is not seen


@attrs.frozen
class Told:
    """What the books said before the cut, and what the broker handed out again after it."""

    acked: set[bytes]
    unknown: set[bytes]
    again: set[bytes]


PROVED: Final = 100
WRITTEN: Final = 200


async def cut_with_dispositions_on_the_wire(rabbit: Rabbit, freeze: str) -> Told:
    """200 handlers answer while the network is frozen, then it is cut."""
    name, log, trace = await rabbit.queue({"x-delivery-limit": -1}), Log(), Trace()
    bodies = numbered(PROVED + WRITTEN)
    await fill(rabbit, name, bodies)
    go = trio.Event()

    async def handle(delivery: Delivery[bytes]) -> None:
        with log.handling(delivery):
            if log.handled.total() > PROVED:
                await go.wait()

    async with faulty_network(rabbit.node.host, rabbit.node.port) as network:

        async def connect() -> Wire:
            return Wire(await trio.open_tcp_stream("127.0.0.1", network.port), trace, 0)

        broker = AmqpBroker(rabbit.url, connect=connect)
        subscription = Subscription(broker.queue(name, credit=300), handle, concurrency=300)
        async with open_runtime(subscription, observers=[log]) as runtime:
            await until(lambda: len(log.booked(Line.ACKED)) == PROVED and log.running == WRITTEN)
            getattr(network, freeze)()
            go.set()
            await until(lambda: said(trace) == PROVED + WRITTEN)
            await broker.life.connection.written()
            if freeze == "freeze_to_client":
                await rabbit.until_depth(name, 0)  # it has seen them
            acked = log.booked(Line.ACKED)
            network.cut()
            network.thaw()
            await until(lambda: broker.lives == 2)
            await rabbit.until_depth(name, 0)
            await until(lambda: not runtime.statistics()[name].in_hand)
        again = {body for body, count in log.takes.items() if count > 1}
        assert runtime.ledger(name).balanced
        return Told(acked, log.booked(Line.UNKNOWN), again)


def said(trace: Trace) -> int:
    """How many deliveries our dispositions were about."""
    return sum(
        (each.first if each.last is None else each.last) - each.first + 1 for each in trace(DISPOSITION, ours=True)
    )


def judge(told: Told) -> None:
    """What was booked as acked never comes back; what does was unknown."""
    assert len(told.acked) == PROVED
    assert not told.acked & told.again
    assert told.again <= told.unknown
    assert len(told.unknown) == WRITTEN


@shapes(kind="quorum")
@pytest.mark.parametrize("freeze", ["freeze", "freeze_to_server", "freeze_to_client"])
async def test_what_was_written_and_not_seen_is_unknown(rabbit: Rabbit, freeze: str) -> None:
    """DESIGN 6: a disposition has no answer, so it is booked when it is proved; a cut before that leaves it unknown."""
    told = await cut_with_dispositions_on_the_wire(rabbit, freeze)
    judge(told)
    assert len(told.again) == (0 if freeze == "freeze_to_client" else WRITTEN)


@shapes(version="4.3", kind="quorum")
async def test_a_weak_prover_is_noticed(rabbit: Rabbit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: what is booked when it is written comes back."""
    monkeypatch.setattr(AmqpLink, "proves", False)
    told = await cut_with_dispositions_on_the_wire(rabbit, "freeze")
    assert len(told.acked & told.again) >= WRITTEN
    with pytest.raises(AssertionError):
        judge(told)
