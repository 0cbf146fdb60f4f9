"""From a letter to the columns of a row, the same for every dialect. Pure.

Left out, so that the database gives the value: generated columns, and every role with a default. What has no default
and may not be NULL gets one here: an id that is a text (a random one), retry_after (now), attempt (1).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, Protocol

from links.errors import PublishNotAccepted
from links.sql.headers import dump, load_row
from links.sql.table import Table
from settlement.delivery import Letter

__all__ = ["Column", "Columns", "row_of"]


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
    due: Callable[[str, float], Any],
    fills: str,
) -> dict[str, Any]:
    """The columns that are written, each with its value.

    `due(column, seconds)`: the value of a time column, so many seconds from now. `fills`: how a key is declared that
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
    if letter.deliver_after is not None:
        column = _column(table, "retry_after", "a delay")
        row[column] = due(column, letter.deliver_after)
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
    return column
