"""A long run over AMQP does not grow: connection, link and runtime keep what is in flight, not what has passed."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from actors import Subscription, open_runtime
from links.amqp import AmqpBroker, EmbeddedBroker
from links.amqp.wire.messages import encode
from settlement import Ack, Delivery, Letter, Outcome, Retry

pytestmark = [pytest.mark.amqp, pytest.mark.slow]

FIRST = 10_000
BOUND = 4 * 2**20
READY = 1_000


def resident() -> int:
    """Bytes of memory that this process holds."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc, so Linux only")
@pytest.mark.parametrize("last", [20_000, pytest.param(200_000, marks=pytest.mark.long)])
def test_memory_does_not_grow_with_the_deliveries_that_have_passed(last: int, tell: Callable[[str], None]) -> None:
    """Through one link, with retries, memory grows under 4 MiB between message 10,000 and the last."""
    server = EmbeddedBroker(keep=100)
    raw = encode(Letter(b"x" * 1024, {"message-id": b"one", "kind": b"growth"}), durable=False)
    figures: dict[int, int] = {}
    handled = 0
    done = trio.Event()

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        nonlocal handled
        await trio.sleep(0.01)  # else virtual time stands still, and nothing is proved
        handled += 1
        if handled in (FIRST, last):
            figures[handled] = resident()
        if handled >= last:
            done.set()
        if handled % 7 == 0 and delivery.attempt == 1:
            return Retry()
        server.publish("orders", raw)
        return Ack()

    async def main() -> None:
        async with server.running():
            for _ in range(READY):
                server.publish("orders", raw)
            broker = AmqpBroker("amqp://localhost", connect=server.connect)
            subscription = Subscription(broker.queue("orders", credit=200), handler, concurrency=32)
            async with open_runtime(subscription) as runtime:
                await done.wait()
        ledger = runtime.ledger("orders")
        assert ledger.balanced
        assert ledger.received >= last
        assert ledger.unknown == 0

    trio.run(main, clock=MockClock(autojump_threshold=0))

    grown = figures[last] - figures[FIRST]
    tell(f"memory grew by {grown / 2**20:.1f} MiB between message {FIRST:,} and {last:,}")
    assert grown < BOUND
