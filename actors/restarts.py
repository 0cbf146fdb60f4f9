"""When a supervisor starts the next life, and when it gives up loudly. Pure: time and dice are arguments.

*Flapping*: more than `intensity` lives that had attached and done one thing broke within `period`. *Outage*: attempts
that never attach, or attach and get no call through (a full disk, a server that answers nothing), go on with capped and
jittered backoff, until `patience` has passed since the last life that did better.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

import attrs

__all__ = ["MOST", "Decision", "GiveUp", "Restart", "Restarts", "backoff"]

MOST = 30.0
"""Seconds between two tries, at most."""


@attrs.frozen
class Restart:
    """Start the next life after `delay` seconds.

    Attributes:
        delay: 0 or more.
    """

    delay: float


@attrs.frozen
class GiveUp:
    """Too much of it.

    Attributes:
        why: In words.
    """

    why: str


Decision: TypeAlias = Restart | GiveUp


def backoff(failures: int, dice: float, *, first: float = 0.1, most: float = MOST) -> float:
    """Seconds to wait after so many failures in a row (1 or more): doubled each time, at most `most`.

    `dice` in [0, 1) spreads it over the upper half, so that many clients do not come back at once.
    """
    return min(most, first * 2.0 ** min(failures - 1, 30)) * (0.5 + dice / 2)


@attrs.define
class Restarts:
    """The history of one supervised thing. Times are seconds on one clock that never goes back.

    Attributes:
        started: When it was first tried.
        intensity: So many breaks within `period` are borne.
        period: Seconds.
        patience: Seconds without a life that did better.
    """

    started: float
    intensity: int = 5
    period: float = 60.0
    patience: float = 600.0
    _breaks: deque[float] = attrs.field(factory=deque[float], init=False)
    _failures: int = attrs.field(default=0, init=False)
    _well: float = attrs.field(init=False)
    """When all was well, the last time."""
    _attached: bool = attrs.field(default=False, init=False)
    _worked: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._well = self.started

    def attached(self) -> None:
        """The present life has attached."""
        self._attached = True

    def worked(self) -> None:
        """The present life has done one thing, or has stood long enough with nothing to do."""
        self._worked = True

    def excuse(self, now: float) -> None:
        """The present life ended with its connection, which does not count."""
        if self._attached:
            self._well = now
        self._attached = self._worked = False

    def excused(self, seconds: float) -> None:
        """For so long nothing could be attempted: there was no connection."""
        self._well += seconds

    def broke(self, now: float, *, dice: float) -> Decision:
        """The present life ended in bad weather."""
        attached, worked = self._attached, self._worked
        self._attached = self._worked = False
        if worked:
            self._well = now
            self._failures = 0
            self._breaks.append(now)
            while self._breaks[0] < now - self.period:
                self._breaks.popleft()
            if len(self._breaks) > self.intensity:
                return GiveUp(f"{len(self._breaks)} breaks within {self.period:g} s (flapping)")
            return Restart(backoff(len(self._breaks), dice))
        if now - self._well > self.patience:
            what = "nothing got through" if attached else "not attached"
            return GiveUp(f"{what} for {now - self._well:.0f} s (outage)")
        self._failures += 1
        return Restart(backoff(self._failures, dice))
