"""From a letter to the columns of a row, the same for every dialect. Pure.

Left out, so that the database gives the value: generated columns, and every role with a default. What has no default
and may not be NULL gets one here: an id that is a text (a random one), retry_after (now), attempt (1).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, Protocol, TypeAlias

import attrs

from links.errors import PublishNotAccepted
from links.sql.headers import dump, load_row
from links.sql.table import Table
from settlement.delivery import Letter
from settlement.outcomes import seconds

__all__ = ["Column", "Columns", "DueLetter", "When", "dated", "moment", "row_of", "span"]

When: TypeAlias = float | datetime
"""So many seconds from now by the database's clock, or an instant."""


def span(name: str, value: object) -> float:
    """Seconds of a number or a `timedelta`. Raises `ValueError` that names the argument and its range."""
    return seconds(name, value.total_seconds() if isinstance(value, timedelta) else value)


def moment(delay: float | timedelta | None, due: datetime | None) -> When | None:
    """When a letter is due; None: at once. Raises `ValueError` for both, and for a `due` without a time zone."""
    if due is None:
        return None if delay is None else span("delay", delay)
    if delay is not None:
        raise ValueError("delay or due must be None: a letter is due once")
    if not isinstance(due, datetime) or due.utcoffset() is None:
        raise ValueError(f"due must be a datetime with a time zone, such as datetime.now(UTC), not {due!r}")
    return due


@attrs.frozen(eq=False)
class DueLetter(Letter):
    """A letter that is due at an instant.

    Attributes:
        body: As of every letter, and so what follows.
        headers: None by default.
        key: None by default.
        deliver_after: None.
        original: None.
        due: With a time zone; in the past it is due now. None by default: at once.
    """

    due: datetime | None = None


def dated(
    body: bytes, headers: Mapping[str, bytes], key: str | None, delay: float | timedelta | None, due: datetime | None
) -> Letter:
    """A letter, due then. Raises `ValueError` as `moment`."""
    when = moment(delay, due)
    if isinstance(when, datetime):
        return DueLetter(body, headers, key, due=when)
    return Letter(body, headers, key, when)


class Column(Protocol):
    """What counts of a column."""

    @property
    def required(self) -> bool:
        """NOT NULL, and nothing fills it."""
        ...

    @property
    def textual(self) -> bool:
        """Does it hold texts?"""
        ...

    @property
    def computed(self) -> bool:
        """Can it not be inserted?"""
        ...


class Columns(Protocol):
    """The columns of a table, by name."""

    def __getitem__(self, name: str) -> Column: ...

    def __contains__(self, name: str) -> bool: ...

    def fills(self, name: str) -> bool:
        """Is there something that gives this column a value where an insert leaves it out?"""
        ...


def row_of(
    table: Table[Any],
    columns: Columns,
    letter: Letter,
    key: Any,
    *,
    group: str | None,
    due: Callable[[str, When], Any],
    fills: str,
) -> dict[str, Any]:
    """The columns that are written, each with its value.

    `due(column, when)`: the value of a time column. `fills`: how a key is declared that
    the database fills, for the error. Raises `PublishNotAccepted` where the table cannot hold the letter.
    """
    strangers = [column for column in table.roles.values() if column not in columns]
    if strangers:
        raise PublishNotAccepted(f"table {table.name!r} has no column {strangers[0]!r}")
    row = _message(table, columns, letter)
    if table.group:
        row[table.group] = group
    if letter.headers:
        row[_column(table, "headers", "headers")] = dump(letter.headers)
    if letter.key is not None:
        row[_column(table, "partition_key", "a key")] = letter.key
    when = letter.due if isinstance(letter, DueLetter) else letter.deliver_after
    if when is not None:
        column = _column(table, "retry_after", "a delay")
        row[column] = due(column, when)
    for column in table.generated:
        row.pop(column, None)
    if key is not None:
        row[table.id] = key

    def lacks(column: str) -> bool:
        return column not in row and column not in table.generated and not columns[column].computed

    if table.retry_after and lacks(table.retry_after) and columns[table.retry_after].required:
        row[table.retry_after] = due(table.retry_after, 0.0)
    if table.attempt and lacks(table.attempt) and columns[table.attempt].required:
        row[table.attempt] = 1
    if table.id in table.generated and table.id not in row and not columns.fills(table.id):
        raise PublishNotAccepted(
            f"table {table.name!r}: column {table.id!r} (id) is in generated=(…), but nothing fills it: declare it "
            f"{fills}"
        )
    if lacks(table.id) and not columns.fills(table.id):
        if not columns[table.id].textual:
            raise PublishNotAccepted(
                f"table {table.name!r}: column {table.id!r} (id) needs a value: publish_once(id, …), or name it "
                "in generated=(…) where the database fills it"
            )
        row[table.id] = uuid.uuid4().hex
    return row


def _message(table: Table[Any], columns: Columns, letter: Letter) -> dict[str, Any]:
    column = table.payload
    if column is None:
        try:
            return load_row(letter.body)
        except (ValueError, RecursionError) as error:
            raise PublishNotAccepted(f"table {table.name!r} takes rows: {error}") from error
    if columns[column].textual:
        try:
            return {column: letter.body.decode()}
        except UnicodeDecodeError:
            pass
    return {column: letter.body}


def _column(table: Table[Any], role: str, what: str) -> str:
    column: str | None = getattr(table, role)
    if column is None:
        raise PublishNotAccepted(f"table {table.name!r} cannot hold {what}: it has no {role} column")
    if column in table.generated:
        raise PublishNotAccepted(
            f"table {table.name!r} cannot hold {what}: column {column!r} ({role}) is in generated=(…), so it is left "
            "out of inserts"
        )
    return column
