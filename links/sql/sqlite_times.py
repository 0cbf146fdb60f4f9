"""How SQLite's columns hold a time, by the type they were declared with. Pure, but for `now`.

| declared | holds |
|---|---|
| REAL | Unix seconds |
| INTEGER | Unix microseconds |
| TEXT | ISO 8601 in UTC with six decimals, `2026-11-29T12:00:00.000000Z`, compared as text |

SQLite has no clock of its own, so time is this machine's (DESIGN 6); outside of columns it is Unix microseconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

__all__ = ["ENCODERS", "LAST", "Encoder", "Stamp", "later", "now"]

Stamp: TypeAlias = float | int | str
Encoder: TypeAlias = Callable[[int], Stamp]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LAST = (datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
"""The last time that all three types can hold, Unix microseconds; a longer delay is cut to this."""


def now() -> int:
    """This machine's clock, Unix microseconds."""
    return time.time_ns() // 1000


def later(now: int, seconds: float) -> int:
    """`seconds` after `now`, never early, at most the end of year 9999."""
    return min(now + math.ceil(min(seconds, 1e12) * 1e6), LAST)


def _real(micros: int) -> float:
    return micros / 1e6


def _integer(micros: int) -> int:
    return micros


def _text(micros: int) -> str:
    return (_EPOCH + timedelta(microseconds=micros)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


ENCODERS: Mapping[str, Encoder] = {"REAL": _real, "INTEGER": _integer, "TEXT": _text}
