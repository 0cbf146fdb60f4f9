"""How the values of a row are read: what Python's type cannot hold is a text, and no reason to fail for all rows.

PostgreSQL has dates beyond the year 9999, before Christ and at infinity, and a time 24:00; Python's have none of these.
Its JSON may be nested deeper than Python reads, or hold a longer number. An error here would come when the rows are
leased already, and nobody would know which.

How a list is bound as an array: as its text where it holds whole numbers alone; and what a statement holds as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from psycopg import DataError, NotSupportedError
from psycopg.abc import Loader
from psycopg.adapt import AdaptersMap
from psycopg.types.datetime import (
    DateLoader,
    IntervalLoader,
    TimeLoader,
    TimestampLoader,
    TimestamptzLoader,
    TimetzLoader,
)
from psycopg.types.json import JsonbLoader, JsonLoader

from links.sql.postgres.trio_connection import TrioConnection

__all__ = ["array", "tolerate"]


_ESCAPED = frozenset("'\\")


def _tolerant(usual: Any) -> type[Loader]:
    class Tolerant(usual):  # type: ignore[misc]  # a class of psycopg's
        """As usual, else the text."""

        def load(self, data: Any) -> Any:
            try:
                return usual.load(self, data)
            except (DataError, NotSupportedError, ValueError, OverflowError, RecursionError):
                return bytes(data).decode()

    return Tolerant


_LOADERS = {
    "date": _tolerant(DateLoader),
    "json": _tolerant(JsonLoader),
    "jsonb": _tolerant(JsonbLoader),
    "time": _tolerant(TimeLoader),
    "timestamp": _tolerant(TimestampLoader),
    "timestamptz": _tolerant(TimestamptzLoader),
    "timetz": _tolerant(TimetzLoader),
    "interval": _tolerant(IntervalLoader),
}


def tolerate(connection: TrioConnection) -> None:
    """Read rows of this connection so."""
    adapters: AdaptersMap = connection.adapters
    for name, loader in _LOADERS.items():
        adapters.register_loader(name, loader)


def array(values: Sequence[Any]) -> Sequence[Any] | str:
    """What to bind as an array of these, where the statement names its type.

    psycopg asks each value of a list for its type and escapes it: a sixth of what a batch of 100 costs this process.
    """
    if all(type(each) is int for each in values):
        return "{" + ",".join(map(str, values)) + "}"
    return [*values]


def literal(value: Any) -> str | None:
    """How this stands in a statement, where that is plain: NULL, a number, whole numbers as an array, a simple text.

    None: it is not, and the driver must escape it.
    """
    if value is None:
        return "NULL"
    if type(value) is int or (type(value) is float and math.isfinite(value)):
        return f"{value!r}" if value >= 0 else f"({value!r})"
    if type(value) is str:
        return f"'{value}'" if value.isascii() and value.isprintable() and not _ESCAPED.intersection(value) else None
    if type(value) is list:
        text = array(cast("list[Any]", value))  # type: ignore[redundant-cast]  # pyright sees a list of nothing known
        return f"'{text}'" if isinstance(text, str) else None
    return None
