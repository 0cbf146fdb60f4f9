"""Deliveries that wait for a handler: one deque, and the workers that are parked in front of it.

Owns neither: what is in the deque stands in `InFlight.open`, too. Hears the intake, by `put`. Tells workers, by waking
them. It is no memory channel, since a channel wakes one task for each delivery: here one worker is woken, and wakes the
next only while there is work left, so that handlers that never wait are all called by the first one. A link whose verbs
should be said together has as many woken at once as there is work (`Link.spreads`).

Cancelled while it waits, a worker has taken nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import trio

from links.abc import Received

__all__ = ["Backlog"]

AT_ONCE = 2
"""How many workers are on their way at once where each wakes the next."""


class Backlog:
    """First in, first out. Unbounded, and held small by places."""

    def __init__(self, *, spreads: bool) -> None:
        self._ready: deque[Received[Any]] = deque()
        self._lot = trio.lowlevel.ParkingLot()
        self._most = math.inf if spreads else AT_ONCE
        self._woken = 0
        """Workers that were woken and have not come yet. One that is woken always comes: no cancel is in between."""
        self._closed = False

    def __len__(self) -> int:
        return len(self._ready)

    def put(self, batch: Iterable[Received[Any]]) -> None:
        """Hand these over; never waits."""
        self._ready.extend(batch)
        self._wake()

    def take(self) -> Received[Any] | None:
        """The next delivery, where there is one."""
        ready = self._ready
        if not ready:
            return None
        received = ready.popleft()
        if self._woken < self._most and ready and self._lot:
            self._wake()
        return received

    def take_of(self, claim: object) -> Received[Any] | None:
        """The next delivery, where it is of this claim."""
        return self.take() if self._ready and self._ready[0].claim is claim else None

    async def until_ready(self) -> Received[Any] | None:
        """Wait for the next delivery; None: there will be none. Cancellation: nothing was taken."""
        while (received := self.take()) is None:
            if self._closed:
                return None
            await self._lot.park()
            self._woken -= 1
        return received

    def rest(self) -> list[Received[Any]]:
        """Take all that is left."""
        rest = [*self._ready]
        self._ready.clear()
        return rest

    def close(self) -> None:
        """Nothing more comes."""
        self._closed = True
        self._woken += len(self._lot.unpark_all())

    def _wake(self) -> None:
        more = min(len(self._ready), self._most) - self._woken
        if more > 0:
            self._woken += len(self._lot.unpark(count=more))
