"""What one side took: its CPU and its time on the wall, per message."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import attrs


class Stopwatch:
    """A clock that tells this process's CPU seconds; it remembers its first and its last reading, the wall's, too."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None
        self._last = 0.0, 0.0

    def __call__(self) -> float:
        """Read it."""
        self._last = time.process_time(), time.perf_counter()
        self._first = self._first or self._last
        return self._last[0]

    def spent(self, count: int) -> Spent:
        """What passed between the first reading and the last, for so many messages."""
        first = self._first or self._last
        return Spent.of(count, self._last[0] - first[0], self._last[1] - first[1])


@attrs.frozen
class Spent:
    """What one side took in one round."""

    cpu: float
    """Microseconds of the client's CPU per message."""
    rate: float
    """Messages per second of wall time."""

    @classmethod
    def of(cls, count: int, cpu: float, wall: float) -> Spent:
        """From seconds."""
        return cls(cpu / count * 1e6, count / wall)


def median(rounds: Sequence[Spent]) -> Spent:
    """Of each figure."""
    return Spent(statistics.median(each.cpu for each in rounds), statistics.median(each.rate for each in rounds))
