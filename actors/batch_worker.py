"""One handler slot that takes deliveries in lists.

Owns, hears and tells what `actors.worker` does, and leaves as much when it is cancelled: a batch that was gathered is
booked by the life.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import trio

from actors.events import log
from actors.worker import ACK, Worker
from links.abc import Order, Received
from settlement.delivery import Delivery
from settlement.outcomes import Retry, is_outcome, no_outcome
from settlement.policy import Ending

if TYPE_CHECKING:
    from actors.subscription import BatchSubscription

__all__ = ["BatchWorker"]


class BatchWorker(Worker):
    """Takes up to `size` deliveries, waiting at most `wait` after the first."""

    _subscription: BatchSubscription[Any]

    async def run(self, work: trio.MemoryReceiveChannel[Received[Any]], orders: trio.MemorySendChannel[Order]) -> None:
        """As `Worker.run`."""
        with work, orders:
            while batch := await self._gather(work):
                if self._life.draining:
                    await self._life.give_back(batch)
                else:
                    await self._handle([received for received in batch if self._ours(received)], orders)

    async def _gather(self, work: trio.MemoryReceiveChannel[Received[Any]]) -> list[Received[Any]]:
        """A batch; empty when the channel has ended. Cancellation: the life books what was gathered."""
        batch: list[Received[Any]] = []
        try:
            batch.append(await work.receive())
            with trio.move_on_after(self._subscription.wait):
                while len(batch) < self._subscription.size:
                    try:
                        batch.append(work.receive_nowait())
                    except trio.WouldBlock:
                        batch.append(await work.receive())
        except trio.EndOfChannel:
            pass
        return batch

    async def _handle(self, batch: list[Received[Any]], orders: trio.MemorySendChannel[Order]) -> None:
        elements: list[tuple[Received[Any], Delivery[Any]]] = []
        for received in batch:
            delivery = self._decoded(received)
            if isinstance(delivery, Delivery):
                elements.append((received, delivery))
            elif (freeing := await self._order(received, delivery, orders)) is not None:
                await freeing.wait()
        if self._life.draining:  # it began while an undecodable element was settled
            await self._life.give_back([received for received, _ in elements])
            return
        elements = [(received, delivery) for received, delivery in elements if self._ours(received)]
        if not elements:
            return
        deliveries = [delivery for _, delivery in elements]
        called = await self._called(self._subscription.handler, deliveries, [received for received, _ in elements])
        if called is None:  # by one lost lease, it may be: the others go back at once
            await self._life.give_back([received for received, _ in elements])
            return
        result, failure = called
        results: Sequence[object] = self._each(result, len(elements)) if failure is None else ()
        waits: list[trio.Event] = []
        for index, (received, delivery) in enumerate(elements):
            each = failure
            if each is None and not (results[index] is None or is_outcome(results[index])):
                each = no_outcome(results[index])
            ending = cast("Ending", results[index] or ACK) if each is None else self._answer(delivery, each)
            if (freeing := await self._order(received, ending, orders)) is not None:
                waits.append(freeing)
        for freeing in waits:
            await freeing.wait()

    def _each(self, result: object, count: int) -> Sequence[object]:
        """One result for each element (C-7.5)."""
        if not isinstance(result, Sequence) or isinstance(result, str | bytes):
            return [result] * count
        results = cast("Sequence[object]", result)
        if len(results) == count:
            return results
        name = self._subscription.name
        log.error("%s: a batch of %d got %d outcomes; elements without one are retried", name, count, len(results))
        return [*results[:count], *[Retry()] * (count - len(results))]
