"""`memory-dispatch`: what the whole runtime costs per message, beyond link and handler.

Ours: `open_runtime` with one subscription at concurrency 32. Peer: what trio's own documentation builds from a nursery
and a limit (https://trio.readthedocs.io/en/stable/reference-core.html, "Nurseries and spawning" and `trio.Semaphore`):
one task and one cancel scope per message behind a semaphore of 32, over the same memory link, settled as each handler
ends. The figure is CPU time of this process per message, since both sides use one core; rounds of the two are
interleaved.

What it does not show: a broker's own cost, decoding, or a handler that does something.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from benchmarks.drive import drive, handle, never_lost
from benchmarks.result import Result
from links.abc import Received, Settlement
from links.memory import MemoryBroker, MemoryQueue
from settlement import Letter, Line, Plan
from settlement.memory import Accept

CONCURRENCY = 32
PEER = "a nursery, a semaphore of 32 and a cancel scope per message"


def broker(count: int, lease: float | None) -> tuple[MemoryBroker, MemoryQueue]:
    """A queue with `count` messages of 100 bytes."""
    made = MemoryBroker()
    made.fill("orders", [Letter(b"x" * 100) for _ in range(count)])
    return made, made.queue("orders", lease=lease)


async def ours(count: int, lease: float | None) -> float:
    """CPU seconds for `count` messages through the runtime."""
    _, queue = broker(count, lease)
    return await drive(queue, count, CONCURRENCY, time.process_time)


async def peer(count: int, lease: float | None) -> float:
    """CPU seconds for `count` messages through one task each."""
    made, queue = broker(count, lease)
    limit = trio.Semaphore(CONCURRENCY)
    acknowledge = Plan(Line.ACKED, Accept())

    async with made.connect(), queue.attach("peer", never_lost, 1.0) as link:

        async def one(received: Received[bytes]) -> None:
            try:
                with trio.CancelScope():
                    await handle(received.delivery)
                await link.settle([Settlement(received, acknowledge)])
            finally:
                limit.release()

        began = time.process_time()
        left = count
        async with trio.open_nursery() as nursery:
            while left:
                batch = await link.receive(min(left, 2 * CONCURRENCY))
                left -= len(batch)
                for received in batch:
                    await limit.acquire()
                    nursery.start_soon(one, received)
        spent = time.process_time() - began
    assert not made.ready("orders")
    return spent


async def bare(count: int, lease: float | None) -> float:
    """CPU seconds for the link and the handler alone, in turn: what is left of ours is the runtime (DESIGN 3.2)."""
    made, queue = broker(count, lease)
    acknowledge = Plan(Line.ACKED, Accept())

    async with made.connect(), queue.attach("bare", never_lost, 1.0) as link:
        began = time.process_time()
        left = count
        while left:
            batch = await link.receive(2 * CONCURRENCY)
            left -= len(batch)
            for received in batch:
                await handle(received.delivery)
            await link.settle([Settlement(received, acknowledge) for received in batch])
        return time.process_time() - began


def once(side: Callable[[int, float | None], Awaitable[float]], count: int, lease: float | None) -> float:
    """Microseconds of CPU per message, one round."""
    gc.collect()
    return trio.run(partial(side, count, lease)) / count * 1e6


def run(*, quick: bool) -> list[Result]:
    """Both variants, interleaved rounds, medians."""
    count, rounds = (20_000, 5) if quick else (50_000, 9)
    results: list[Result] = []
    for case, lease in (("memory-dispatch", None), ("memory-dispatch-lease", 30.0)):
        pairs = [(once(ours, count, lease), once(peer, count, lease)) for _ in range(rounds)]
        alone = statistics.median(once(bare, count, lease) for _ in range(rounds))
        results.append(
            Result(
                case=case,
                ours=statistics.median(mine for mine, _ in pairs),
                peer=statistics.median(theirs for _, theirs in pairs),
                peer_name=PEER,
                ratio=statistics.median(theirs / mine for mine, theirs in pairs),
                unit="µs of CPU per message",
                aside=f"link and handler alone: {alone:.1f}; so the runtime costs "
                f"{statistics.median(mine for mine, _ in pairs) - alone:.1f} µs beyond them",
            )
        )
    return results
