"""A real RabbitMQ that is down for two minutes: a node of the test's own, whose application is stopped and started."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import attrs
import pytest
import trio

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from actors import Subscription, open_runtime
from links.amqp.broker import AmqpBroker
from settlement import Delivery
from tests.links.rabbit_kit import _SCRIPT, Node, Rabbit, node
from tests.links.weather_kit import SLACK, Log, until

pytestmark = [pytest.mark.amqp, pytest.mark.servers, pytest.mark.long]

DOWN: Final = 120.0


@attrs.frozen
class OwnNode:
    """A node that nobody else uses."""

    node: Node
    root: Path
    environment: Sequence[str]

    def control(self, order: str) -> None:
        """`rabbitmqctl`, in the node's own root and environment; blocking."""
        inside = ["chroot", "--userspec=rabbitmq:rabbitmq", str(self.root), "/usr/bin/env", "-i", *self.environment]
        subprocess.run([*inside, "/usr/lib/rabbitmq/bin/rabbitmqctl", order], check=True, capture_output=True)


@contextmanager
def own_node() -> Generator[OwnNode, None, None]:
    """The root of the shared node in hard links, which take no room, and a node of its own started there."""
    node("4.3")  # its root is there now, or the test is skipped
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trio-settlement"
    with TemporaryDirectory(dir=cache) as folder:
        root = Path(folder) / "trio-settlement" / "rabbitmq-4.3"
        root.mkdir(parents=True)
        parts = [each for each in (cache / "rabbitmq-4.3").iterdir() if each.name != "tmp"]
        subprocess.run(["cp", "-al", *parts, root], check=True)
        (root / "tmp").mkdir(mode=0o1777)
        (root / "tmp").chmod(0o1777)

        def script(order: str) -> str:
            there = {**os.environ, "XDG_CACHE_HOME": folder}
            return subprocess.run(
                [_SCRIPT, order, "4.3"], check=True, capture_output=True, text=True, env=there, timeout=300
            ).stdout

        try:
            url, management = script("start").split()
            pid = root.with_suffix(".3.state").read_text().split()[0]
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode().strip("\0").split("\0")
            yield OwnNode(Node("4.3", url, management), root, environment)
        finally:
            script("stop")


async def test_a_broker_that_is_down_for_two_minutes_is_waited_for() -> None:
    """DESIGN 4, Weather: the service waits, is *degraded*, and goes on with what was in the queue and in hand."""
    with own_node() as own:
        rabbit, log = Rabbit(own.node, "quorum"), Log()
        rabbit.arrive()
        name = await rabbit.queue({"x-delivery-limit": -1})
        gate = trio.Event()

        async def handle(delivery: Delivery[bytes]) -> None:
            with log.handling(delivery):
                await gate.wait()

        broker = AmqpBroker(rabbit.url, durable=True)
        subscription = Subscription(broker.queue(name, credit=2), handle, name="orders", concurrency=2)
        async with open_runtime(subscription, observers=[log]) as runtime, trio.open_nursery() as nursery:
            for body in (b"in hand", b"too", b"in the queue"):
                await broker.publisher(name).publish(body)
            await until(lambda: log.running == 2)
            await trio.to_thread.run_sync(own.control, "stop_app")
            await until(lambda: bool(runtime.statistics()["orders"].degraded))
            gate.set()
            nursery.start_soon(broker.publisher(name).publish, b"published meanwhile")
            await trio.sleep(DOWN)  # that is the outage, and no wait for something
            assert runtime.statistics()["orders"].degraded
            assert log.running == 0
            await trio.to_thread.run_sync(own.control, "start_app")
            up = trio.current_time()
            await until(lambda: runtime.ledger("orders").acked == 4, within=60.0)
            _, last = log.breaks(broker.name)[-1]
            assert last.delay is not None
            assert trio.current_time() - up < last.delay + SLACK
            assert not runtime.statistics()["orders"].degraded
        await rabbit.until_depth(name, 0)
        log.judge([b"in hand", b"too", b"in the queue", b"published meanwhile"], runtime, "orders")
