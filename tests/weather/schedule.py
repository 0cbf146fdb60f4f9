"""How a schedule of trio is made to come again, how large the tests here are, and a log that is read to the end."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import trio

__all__ = ["chosen", "dice_of", "same_schedule", "sized", "steps"]

SIZE: Literal["fast", "full", "long"] = os.environ.get("SETTLEMENT_TESTS", "full")  # type: ignore[assignment]


def sized(*, fast: int, full: int, long: int) -> int:
    """The number for this run's size."""
    return {"fast": fast, "full": full, "long": long}[SIZE]


def chosen(variable: str, otherwise: Sequence[int]) -> Sequence[int]:
    """The numbers that the environment asks for (`123`, or `100-199`), else `otherwise`."""
    asked = os.environ.get(variable)
    if not asked:
        return otherwise
    first, _, last = asked.partition("-")
    return range(int(first), int(last or first) + 1)


def dice_of(seed: int | None) -> random.Random:
    """Dice of somebody's own."""
    return random.Random(seed)  # noqa: S311 -- not a secret


@contextmanager
def same_schedule(seed: int) -> Generator[list[str], None, None]:
    """Inside, `trio.run` takes the same steps each time: its dice and those of `actors` are seeded.

    Log lines are formatted, so that a wrong one is an error; gives those that warn, and those for us alone.
    """
    inner: Any = trio._core._run  # there is no public way
    before = inner._r.getstate(), inner._ALLOW_DETERMINISTIC_SCHEDULING, random.getstate()
    log = logging.getLogger("trio_settlement")
    reader, level, propagate = _Reader(), log.level, log.propagate
    inner._ALLOW_DETERMINISTIC_SCHEDULING = True
    inner._r.seed(seed)
    random.seed(seed)
    log.addHandler(reader)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    try:
        yield reader.warnings
    finally:
        log.removeHandler(reader)
        log.setLevel(level)
        log.propagate = propagate
        state, inner._ALLOW_DETERMINISTIC_SCHEDULING, dice = before
        inner._r.setstate(state)
        random.setstate(dice)


class _Reader(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []

    def handle(self, record: logging.LogRecord) -> bool:
        line = record.getMessage()
        assert line
        if record.levelno >= logging.WARNING or record.levelno == logging.DEBUG:
            self.warnings.append(line)
        return True


class steps(trio.abc.Instrument):  # noqa: N801 -- a counter, used as `instruments=[steps(...)]`
    """Counts the scheduler's steps from `start`, and calls `then` before step `at` of them."""

    def __init__(self, at: int | None = None, then: Callable[[], object] = lambda: None) -> None:
        self.taken = 0
        self.counting = False
        self.at = at
        self.then = then

    def start(self) -> None:
        self.counting = True

    def stop(self) -> None:
        self.counting = False

    def before_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002 -- trio's signature
        if not self.counting:
            return
        self.taken += 1
        if self.taken == self.at:
            self.then()
