"""When a queue is worth a look: at once after a wake or a full claim, at a known due time, or at the next poll."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import TypeAlias

import trio

from settlement.sql import Custom, Delay, MoveToGroup, MoveToTable, PutBack, Verb

__all__ = ["Tell", "Wakes", "wake_for"]

Tell: TypeAlias = Callable[[str, str | None], None]
"""Wake the queue of this table, and of this group where it is not None."""

_MOST_TIMES = 10_000
"""How many due times are remembered; the poll finds what was due at others."""


class Wakes:
    """One queue's reasons to look, on trio's clock. `poll`: seconds between two looks without a reason."""

    def __init__(self, poll: float) -> None:
        self._poll = poll
        self._due = trio.Event()
        self._due.set()
        self._times: list[float] = []
        self._waiting: trio.CancelScope | None = None

    def wake(self) -> None:
        """There may be something now."""
        self._due.set()

    def wake_at(self, moment: float) -> None:
        """There will be something at that time."""
        if len(self._times) < _MOST_TIMES:
            heapq.heappush(self._times, moment)
            if self._waiting is not None:
                self._waiting.deadline = min(self._waiting.deadline, moment)

    def rouse(self) -> None:
        """Whoever waits shall look around: no reason to look into the queue."""
        if self._waiting is not None:
            self._waiting.cancel()

    def look(self) -> None:
        """Somebody looks now: what is woken from here on is another reason."""
        if self._due.is_set():
            self._due = trio.Event()
        now = trio.current_time()
        while self._times and self._times[0] <= now:
            heapq.heappop(self._times)

    async def until_due(self) -> None:
        """Wait for a reason, the next poll, or to be roused. Does not yield where there is a reason already.

        Cancellation: nothing was done.
        """
        if self._due.is_set():
            return
        deadline = trio.current_time() + self._poll * random.uniform(0.8, 1.2)  # noqa: S311 -- spread, not secrecy
        if self._times:
            deadline = min(deadline, self._times[0])
        with trio.CancelScope(deadline=deadline) as scope:
            self._waiting = scope
            try:
                await self._due.wait()
            finally:
                self._waiting = None


def wake_for(verb: Verb, table: str, wakes: Wakes, tell: Tell) -> None:
    """What this verb, said of a row of `table`, is a reason for: a look at this queue, or at another one."""
    match verb:
        case Delay(seconds):
            wakes.wake_at(trio.current_time() + seconds)
        case PutBack() | Custom(event="retry"):
            wakes.wake()
        case Custom(delay=float(seconds)):
            wakes.wake_at(trio.current_time() + seconds)
        case MoveToGroup(group):
            tell(table, group)
        case MoveToTable(other):
            tell(other, None)
        case _:
            pass
