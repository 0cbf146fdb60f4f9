"""Says again what was not applied: a constraint, a trigger, a dead-letter table that refuses.

Owns the orders that wait for their next try, by due time: 1 s after the first refusal, doubled to 60 s. Their leases
and places are kept, their handlers are not called again. Hears the settler, by plain calls. Tells it by `say`. A drain
makes the next tries come soon; at the end of its grace they are left unsettled. Cancelled, the life books them.
"""
# DESIGN 3.8

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs
import trio

from actors.books import Books
from actors.drain import HURRY, Drain
from actors.in_flight import InFlight
from links.abc import Received, Settlement

__all__ = ["Repeater"]

FIRST, MOST = 1.0, 60.0
"""Seconds between two tries."""

WHAT = "settling"
"""The name of the trouble, in `Statistics.degraded`."""


@attrs.define
class _Try:
    settlement: Settlement
    due: float
    wait: float


class Repeater:
    """One per life."""

    def __init__(
        self, say: Callable[[Sequence[Settlement]], Awaitable[None]], in_flight: InFlight, books: Books, drain: Drain
    ) -> None:
        self._say = say
        self._in_flight = in_flight
        self._books = books
        self._drain = drain
        self._tries: dict[Received[Any], _Try] = {}
        self._changed = trio.Event()
        self._closed = False

    def add(self, settlement: Settlement, why: object) -> float:
        """This one was not applied: say it again, in so many seconds."""
        received, before = settlement.received, self._tries.get(settlement.received)
        wait = FIRST if before is None else min(2 * before.wait, MOST)
        if self._drain.requested.is_set():
            wait = min(wait, HURRY)
        self._tries[received] = _Try(settlement, trio.current_time() + wait, wait)
        self._in_flight.open[received] = self
        self._in_flight.free_slot(received)
        self._books.degrade(WHAT, why, self)
        self._change()
        return wait

    def cancel(self, received: Received[Any]) -> bool:  # noqa: ARG002 -- as `Holder.cancel`
        """Its verb is ordered. Where it is no longer ours its place returns."""
        self._change()
        return False

    def close(self) -> None:
        """No more orders come than those that are here."""
        self._closed = True
        self._change()

    async def run(self) -> None:
        """Until closed and empty: what is left when the grace is over is left unsettled. Raises what `say` raises."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._hear_the_drain)
                await self._repeat()
                nursery.cancel_scope.cancel()
        finally:
            self._books.ceased(WHAT, self)

    async def _repeat(self) -> None:
        while self._tries or not self._closed:
            self._drop()
            due = [each.settlement for each in self._tries.values() if each.due <= trio.current_time()]
            if due:
                await self._again(due)
            elif self._tries or not self._closed:
                with trio.CancelScope(deadline=min((each.due for each in self._tries.values()), default=math.inf)):
                    await self._changed.wait()

    async def _again(self, due: list[Settlement]) -> None:
        tried = [(settlement.received, self._tries[settlement.received]) for settlement in due]
        await self._say(due)
        for received, before in tried:
            if self._tries.get(received) is before:  # it was not added again
                del self._tries[received]
        self._recover()

    def _drop(self) -> None:
        """Give back the places of what was lost while it waited, and of all when the grace is over."""
        over = self._drain.grace_over.is_set()
        for received in [received for received in self._tries if over or received not in self._in_flight.open]:
            del self._tries[received]
            self._in_flight.leave(received)
        self._recover()

    def _recover(self) -> None:
        if not self._tries:
            self._books.ceased(WHAT, self)

    async def _hear_the_drain(self) -> None:
        await self._drain.requested.wait()
        soon = trio.current_time() + HURRY
        for each in self._tries.values():
            each.due = min(each.due, soon)
        self._change()
        await self._drain.grace_over.wait()
        self._change()

    def _change(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()
