"""One handler slot that takes deliveries in lists.

Owns, hears and tells what `actors.worker` does, and leaves as much when it is cancelled: a batch that was gathered is
booked by the life.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import trio

from actors.backlog import Backlog
from actors.events import log
from actors.subscription import BatchSubscription
from actors.worker import ACK, Answered, Worker
from links.abc import Received
from settlement.delivery import Delivery
from settlement.outcomes import Retry, is_outcome, no_outcome
from settlement.policy import Ending

__all__ = ["BatchWorker"]


class BatchWorker(Worker):
    """Takes up to `size` deliveries, waiting at most `wait` after the first."""

    _subscription: BatchSubscription[Any]

    async def run(self, backlog: Backlog, wake: trio.MemorySendChannel[None]) -> None:
        """As `Worker.run`."""
        with wake:
            while batch := await self._gather(backlog):
                if self._drain.requested.is_set():
                    await self._give_back(batch)
                else:
                    await self._handle([received for received in batch if self._ours(received)], wake)

    async def _gather(self, backlog: Backlog) -> list[Received[Any]]:
        """A batch; empty when the backlog has ended. Cancellation: the life books what was gathered.

        Those of one claim were handed over together: of another one there is nothing to wait for.
        """
        first = await backlog.until_ready()
        if first is None:
            return []
        batch = [first]
        if (claim := first.claim) is not None:
            while len(batch) < self._subscription.size and (received := backlog.take_of(claim)) is not None:
                batch.append(received)
            return batch
        with trio.move_on_after(self._subscription.wait):
            while len(batch) < self._subscription.size:
                received = backlog.take() or await backlog.until_ready()
                if received is None:
                    break
                batch.append(received)
        return batch

    async def _handle(self, batch: list[Received[Any]], wake: trio.MemorySendChannel[None]) -> None:
        readable: list[tuple[Received[Any], Delivery[Any]]] = []
        spoiled: list[Answered] = []
        for received in batch:
            delivery = self._decoded(received)
            if isinstance(delivery, Answered):
                spoiled.append(delivery)
            else:
                readable.append((received, delivery))
        if spoiled and not (readable and spoiled[0].received.claim is not None):  # of one claim all is said together
            await self._carry_out(spoiled, wake)
            spoiled = []
            if self._drain.requested.is_set():  # it began meanwhile
                await self._give_back([received for received, _ in readable])
                return
            readable = [(received, delivery) for received, delivery in readable if self._ours(received)]
        if not readable:
            return
        held = [received for received, _ in readable]
        called = await self._call(self._subscription.handler, [delivery for _, delivery in readable], held)
        if called is None:
            await self._give_back(held)  # cancelled, by one lost lease it may be: the others go back at once
            await self._carry_out(spoiled, wake)
            return
        result, failure = called
        await self._carry_out([*spoiled, *self._endings(held, result, failure)], wake)

    def _endings(self, held: list[Received[Any]], result: object, failure: Exception | None) -> list[Answered]:
        """One ending for each element; a failure is answered for those that it is about. Raises as a worker."""
        # C-7.5
        results = [None] * len(held) if failure is not None else self._each(result, len(held))
        odd = [n for n, each in enumerate(results) if not (each is None or is_outcome(each))]
        failed = dict.fromkeys(range(len(held)) if failure is not None else odd)
        endings = [
            Answered(received, cast("Ending", each or ACK)) for received, each in zip(held, results, strict=True)
        ]
        if failed:
            name = self._subscription.name
            error = failure if failure is not None else no_outcome(results[odd[0]], name)
            deliveries = [held[n].delivery for n in failed]
            answers = self._answered_by(self._policy.failed, deliveries, error)
            for n, answer in zip(failed, answers, strict=True):
                endings[n] = Answered(held[n], answer, error)
        return endings

    def _each(self, result: object, count: int) -> Sequence[object]:
        if not isinstance(result, Sequence) or isinstance(result, str | bytes):
            return [result] * count
        results = cast("Sequence[object]", result)
        if len(results) == count:
            return results
        name = self._subscription.name
        log.error("%s: a batch of %d got %d outcomes; elements without one are retried", name, count, len(results))
        return [*results[:count], *[Retry()] * (count - len(results))]
