"""How long a locked database, and a settlement, is waited for."""

from __future__ import annotations

import math
from collections.abc import Iterable

import trio

__all__ = ["PATIENCE", "Patience"]

PATIENCE = 10.0
"""Seconds for which a database that others keep locked is waited for."""

_SPARE = 0.5
"""Seconds of a lease that a settlement does not use for waiting."""

_LANDING = 0.5
"""Seconds at the end of a round, at most a quarter of it, for the try under way: so it can say what became of it."""


class Patience:
    """One settlement's wait, for one event after another, in rounds of a goodbye, each shielded.

    A cancellation is heard at the end of a round. `expiries`: when the leases end; the wait lasts while the shortest
    does, but a goodbye in any case, and `PATIENCE` at most otherwise.
    """

    def __init__(self, goodbye: float, expiries: Iterable[float | None]) -> None:
        ends = min((each for each in expiries if each is not None), default=math.inf)
        self.length = max(goodbye, min(PATIENCE, ends - trio.current_time() - _SPARE))
        """Seconds in all."""
        self.landing = min(_LANDING, goodbye / 4)
        self._goodbye = goodbye
        self._started = trio.current_time()
        self._end = self._started + self.length
        self._round = self._started + goodbye

    @property
    def waited(self) -> float:
        """Seconds since it was made."""
        return trio.current_time() - self._started

    async def until(self, event: trio.Event) -> bool:
        """Wait for the event, but for the last landing; False: it is time to give up.

        Cancellation: heard between two rounds, where it is time to give up then.
        """
        while not event.is_set():
            with trio.move_on_at(min(self._round, self._end) - self.landing, shield=True):
                await event.wait()
                return True
            now = trio.current_time()
            if trio.current_effective_deadline() == -math.inf or now >= self._end - self.landing:
                break
            self._round = now + self._goodbye
        return event.is_set()
