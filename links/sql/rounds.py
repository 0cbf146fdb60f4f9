"""How long a settlement waits: in rounds of a goodbye, each shielded, with a look around between two of them."""

from __future__ import annotations

import math

import trio

__all__ = ["Rounds"]

_LANDING = 0.5
"""Seconds at the end of a round, at most a quarter of it, for the try under way: so it can say what became of it."""


class Rounds:
    """One wait, for one event after another. A cancellation is heard at the end of a round: within one goodbye."""

    def __init__(self, goodbye: float, patience: float) -> None:
        self.landing = min(_LANDING, goodbye / 4)
        self._goodbye = goodbye
        self._started = trio.current_time()
        self._end = self._started + patience
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
