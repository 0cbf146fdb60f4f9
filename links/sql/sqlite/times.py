"""How SQLite's columns hold a time, by the type they were declared with. Pure, but for `now`.

| declared | holds |
|---|---|
| REAL | Unix seconds |
| INTEGER | Unix microseconds |
| TEXT | ISO 8601 in UTC with six decimals, `2026-11-29T12:00:00.000000Z`, compared as text |

SQLite has no clock of its own, so time is this machine's; outside of columns it is Unix microseconds.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

__all__ = [
    "DEFAULTS",
    "ENCODERS",
    "FORMS",
    "LAST",
    "Encoder",
    "Stamp",
    "is_default",
    "later",
    "micros",
    "now",
    "strange",
]

Stamp: TypeAlias = float | int | str
Encoder: TypeAlias = Callable[[int], Stamp]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LAST = (datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
"""The last time that all three types can hold, Unix microseconds; a longer delay is cut to this."""

_FIRST = (datetime(1980, 1, 1, tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
"""Before this a number is no time of ours but in another unit: Julian days, seconds in place of microseconds."""

_FAR = timedelta(days=3653) // timedelta(microseconds=1)
"""What a default says is due later than this is in another unit too."""


def now() -> int:
    """This machine's clock, Unix microseconds."""
    return time.time_ns() // 1000


def later(now: int, seconds: float) -> int:
    """`seconds` after `now`, never early, at most the end of year 9999."""
    return min(now + math.ceil(min(seconds, 1e12) * 1e6), LAST)


def micros(when: float | datetime, now: int) -> int:
    """So many seconds after `now`, or that instant, which has a time zone; one before 1980 is written as 1980."""
    if isinstance(when, datetime):
        return min(max((when - _EPOCH) // timedelta(microseconds=1), _FIRST), LAST)
    return later(now, when) if when else now


def _real(micros: int) -> float:
    return micros / 1e6


def _integer(micros: int) -> int:
    return micros


def _text(micros: int) -> str:
    return (_EPOCH + timedelta(microseconds=micros)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


ENCODERS: Mapping[str, Encoder] = {"REAL": _real, "INTEGER": _integer, "TEXT": _text}

FORMS: Mapping[str, str] = {
    "REAL": "Unix seconds",
    "INTEGER": "Unix microseconds",
    "TEXT": "ISO 8601 in UTC with six decimals, as 2026-11-29T12:00:00.000000Z",
}
"""What such a column holds, in words."""

DEFAULTS: Mapping[str, str] = {
    "REAL": "(julianday('now') * 86400.0 - 210866760000.0)",
    "INTEGER": "(CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000)",
    "TEXT": "(strftime('%Y-%m-%dT%H:%M:%f000Z', 'now'))",
}
"""The present time as a DEFAULT, for SQLite of any version."""

_GLOB = "dddd-dd-ddTdd:dd:dd.ddddddZ".replace("d", "[0-9]")
_TEXT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", re.ASCII)


def is_default(kind: str, value: object, now: int) -> bool:
    """Would the encoder of this type write such a value? `now` is when the default was evaluated.

    A number is told by its size: 0 and less is the beginning of time, else it lies between 1980 and ten years from now.
    """
    match kind, value:
        case "TEXT", str():
            return _TEXT.fullmatch(value) is not None
        case "REAL", float():
            micros = value * 1e6
        case "INTEGER", int():
            micros = float(value)
        case _:
            return False
    return micros <= 0 or _FIRST <= micros <= now + _FAR


def strange(kind: str, column: str) -> str:
    """The condition in SQL that a value of this (quoted) column is no time as its type holds it."""
    if kind == "TEXT":
        return f"{column} IS NOT NULL AND (typeof({column}) <> 'text' OR {column} NOT GLOB '{_GLOB}')"
    first, last = ENCODERS[kind](_FIRST), ENCODERS[kind](LAST)
    return (
        f"{column} IS NOT NULL AND (typeof({column}) <> '{kind.lower()}' "
        f"OR ({column} > 0 AND NOT {column} BETWEEN {first!r} AND {last!r}))"
    )
