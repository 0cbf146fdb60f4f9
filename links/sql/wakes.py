"""When a queue is worth a look: at once after a wake or a full claim, at a known due time, or at the next poll."""

from __future__ import annotations

import heapq
import random
from typing import Any

import attrs
import trio

__all__ = ["Paused", "Wakes"]

_MOST_TIMES = 10_000
"""How many due times are remembered; the poll finds what was due at others."""

_MOST_PAUSED = 500
"""How many rows are passed over at once; the oldest are forgotten first."""


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

    def look(self) -> None:
        """Somebody looks now: what is woken from here on is another reason."""
        if self._due.is_set():
            self._due = trio.Event()
        now = trio.current_time()
        while self._times and self._times[0] <= now:
            heapq.heappop(self._times)

    async def until_due(self) -> None:
        """Wait for a reason, or for the next poll (S-2.9). Does not yield where there is a reason already.

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


@attrs.define
class _Pause:
    until: float
    length: float


class Paused:
    """Rows that are passed over for a while: 1 s after a settlement failed, doubled to 60 s (DESIGN 6)."""

    def __init__(self, first: float = 1.0, longest: float = 60.0) -> None:
        self._first, self._longest = first, longest
        self._rows: dict[Any, _Pause] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def pause(self, row: Any) -> float:
        """Pass over this row; returns until when, on trio's clock."""
        before = self._rows.pop(row, None)
        length = self._first if before is None else min(before.length * 2, self._longest)
        until = trio.current_time() + length
        self._rows[row] = _Pause(until, length)
        if len(self._rows) > _MOST_PAUSED:
            del self._rows[next(iter(self._rows))]
        return until

    def forget(self, row: Any) -> None:
        """Its settlement succeeded."""
        self._rows.pop(row, None)

    def now(self) -> list[Any]:
        """The rows to pass over now; those that came back long ago are forgotten."""
        now = trio.current_time()
        for row in [row for row, pause in self._rows.items() if now > pause.until + 2 * self._longest]:
            del self._rows[row]
        return [row for row, pause in self._rows.items() if now < pause.until]
