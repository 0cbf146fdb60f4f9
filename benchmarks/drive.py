"""Our side of every benchmark: a whole runtime, an empty handler, one accept per message."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import trio

from actors import BatchSubscription, Subscription, open_runtime
from benchmarks.rounds import LONGEST
from links.abc import Received, Source
from settlement import Ack, Delivery, Line, Outcome


def never_lost(received: Received[Any], line: Line) -> None:
    """No delivery of a benchmark is taken back."""
    raise AssertionError(f"{received} was lost: {line}")


async def handle(_delivery: Delivery[bytes]) -> Outcome:
    """Do nothing, as a handler does it."""
    await trio.lowlevel.checkpoint()
    return Ack()


async def nothing(_delivery: Delivery[bytes]) -> Outcome:
    """Do nothing, as the callback of a peer does it."""
    return Ack()


async def drive(
    queue: Source[bytes],
    count: int,
    concurrency: int,
    clock: Callable[[], float],
    handle: Callable[[Delivery[bytes]], Awaitable[Outcome]] = handle,
) -> float:
    """Seconds of this clock from the first message to the end of the drain; the ledger must say `count` acked.

    The ledger tells when all was handled, every 5 ms, so that the handler is nothing but what a peer's is.
    """
    async with open_runtime(Subscription(queue, handle, concurrency=concurrency)) as runtime:
        began = clock()
        with trio.fail_after(LONGEST):
            while runtime.ledger(queue.name).acked < count:  # noqa: ASYNC110 -- an observer would cost the handler
                await trio.sleep(0.005)
        runtime.drain()
        await runtime.finished()
        spent = clock() - began
    assert runtime.ledger(queue.name).acked == count
    return spent


async def handle_batch(_batch: Sequence[Delivery[bytes]]) -> Outcome:
    """Do nothing."""
    await trio.lowlevel.checkpoint()
    return Ack()


async def drive_batches(queue: Source[bytes], count: int, size: int, clock: Callable[[], float]) -> float:
    """As `drive`, so many messages at once; without the drain."""
    async with open_runtime(BatchSubscription(queue, handle_batch, size=size, wait=0.01)) as runtime:
        began = clock()
        with trio.fail_after(LONGEST):
            while runtime.ledger(queue.name).acked < count:  # noqa: ASYNC110 -- as in `drive`
                await trio.sleep(0.005)
        return clock() - began
