"""A long run does not grow: what the runtime keeps is bounded by places, not by what has passed."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from actors import Subscription, open_runtime
from links.memory import MemoryBroker
from settlement import Ack, Delivery, Letter, Outcome, Retry
from tests.weather.schedule import sized

pytestmark = [pytest.mark.memory, pytest.mark.slow]

FIRST = 20_000
LAST = sized(fast=110_000, full=110_000, long=200_000)
BOUND = 58 * (LAST - FIRST)
"""Bytes: 58 for each message."""
BLOCK = 1_000


def resident() -> int:
    """Bytes of memory that this process holds."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc, so Linux only")
@pytest.mark.parametrize("lease", [None, 30.0], ids=["no lease", "lease"])
def test_memory_does_not_grow_with_the_messages_that_have_passed(
    lease: float | None, tell: Callable[[str], None]
) -> None:
    """Through a slow handler, memory grows under 58 bytes a message from message 20,000 to the last."""
    broker = MemoryBroker()
    figures: dict[int, int] = {}
    handled = 0
    done = trio.Event()

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        nonlocal handled
        await trio.sleep(0.01)
        handled += 1
        if handled in (FIRST, LAST):
            figures[handled] = resident()
        if handled >= LAST:
            done.set()
        if handled % BLOCK == 0:
            broker.fill("orders", [Letter(b"x" * 100)] * BLOCK)
        return Retry() if handled % 7 == 0 and delivery.attempt == 1 else Ack()

    async def main() -> None:
        broker.fill("orders", [Letter(b"x" * 100)] * (2 * BLOCK))
        subscription = Subscription(broker.queue("orders", lease=lease), handler, concurrency=32)
        async with open_runtime(subscription) as runtime:
            await done.wait()
        ledger = runtime.ledger("orders")
        assert ledger.balanced
        assert ledger.received >= LAST

    trio.run(main, clock=MockClock(autojump_threshold=0))

    grown = figures[LAST] - figures[FIRST]
    tell(f"memory grew by {grown / 2**20:.1f} MiB between message {FIRST:,} and {LAST:,}")
    assert grown < BOUND
