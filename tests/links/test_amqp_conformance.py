"""The conformance suite on AMQP: the embedded broker over memory streams, in virtual time, and RabbitMQ.

Differences between brokers are named capabilities, asserted by the suite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import trio.testing

from links.abc import Broker, Source
from links.amqp.broker import AmqpBroker
from links.amqp.embedded.broker import EmbeddedBroker
from links.testing import CHECKS, Capabilities, Check, Harness, Routing
from settlement import Copies, Hold, Native
from settlement.amqp import Delays
from tests.links.rabbit_kit import Rabbit

pytestmark = pytest.mark.amqp

COPIES = Capabilities(native_delay=False, virtual_time=True)
DELAYED = attrs.evolve(COPIES, native_delay=True)


@attrs.define
class EmbeddedHarness(Harness):
    """Queues or topics of one embedded broker."""

    embedded: EmbeddedBroker
    capabilities: Capabilities
    delays: Delays = Copies()
    durable: bool = True
    """Our messages carry a header section, so that the first delivery is counted, too."""
    topic: bool = False

    def broker(self) -> AmqpBroker:
        return AmqpBroker("amqp://localhost", connect=self.embedded.connect, durable=self.durable)

    def source(self, broker: Broker, name: str, *, lease: float | None = None) -> Source[Any]:
        assert isinstance(broker, AmqpBroker)
        assert lease is None
        make = broker.topic if self.topic else broker.queue
        return make(name, delays=self.delays)

    async def prepare(self, name: str) -> None:
        if self.topic:
            self.embedded.store.topics[name] = set()


SHAPES: Mapping[str, tuple[Capabilities, dict[str, Any]]] = {
    "copies": (COPIES, {}),
    "no header": (attrs.evolve(COPIES, counts_at_first=False), {"durable": False}),
    "hold": (DELAYED, {"delays": Hold(10)}),
    "native": (DELAYED, {"delays": Native()}),
    "topic": (attrs.evolve(COPIES, routing=Routing.BOTH, backlog=False), {"topic": True}),
}


@pytest.mark.parametrize("check", CHECKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
async def test_the_embedded_broker_conforms(shape: str, check: Check, autojump_clock: trio.testing.MockClock) -> None:
    can, options = SHAPES[shape]
    embedded = EmbeddedBroker()
    async with embedded.running():
        await check(EmbeddedHarness(embedded, can, **options))


# --- RabbitMQ


@attrs.define
class RabbitHarness(Harness):
    """Queues of one kind on one node. RabbitMQ puts a header section on every delivery, so that all are counted."""

    rabbit: Rabbit
    capabilities: Capabilities
    delays: Delays = Copies()

    def broker(self) -> AmqpBroker:
        return AmqpBroker(self.rabbit.url)

    def source(self, broker: Broker, name: str, *, lease: float | None = None) -> Source[Any]:
        assert isinstance(broker, AmqpBroker)
        assert lease is None
        return broker.queue(name, delays=self.delays)

    async def prepare(self, name: str) -> None:
        await self.rabbit.declare(name)


REAL = attrs.evolve(COPIES, virtual_time=False)
REAL_DELAYED = attrs.evolve(REAL, native_delay=True)
RABBITS = [
    pytest.param(("4.3", "quorum"), REAL, Copies(), id="4.3-quorum-copies"),
    pytest.param(("4.3", "quorum"), REAL_DELAYED, Hold(10), id="4.3-quorum-hold"),
    pytest.param(("4.3", "quorum"), REAL_DELAYED, Native(), id="4.3-quorum-native"),
    pytest.param(("4.3", "classic"), attrs.evolve(REAL, counts_detach=True), Copies(), id="4.3-classic"),
    pytest.param(("4.0", "quorum"), REAL, Copies(), id="4.0-quorum"),
    pytest.param(("4.0", "classic"), attrs.evolve(REAL, counts_redeliveries=False), Copies(), id="4.0-classic"),
]


@pytest.mark.servers
@pytest.mark.parametrize("check", CHECKS, ids=str)
@pytest.mark.parametrize(("rabbit", "can", "delays"), RABBITS, indirect=["rabbit"])
async def test_rabbitmq_conforms(rabbit: Rabbit, can: Capabilities, delays: Delays, check: Check) -> None:
    await check(RabbitHarness(rabbit, can, delays))
