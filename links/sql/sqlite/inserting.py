"""`links.sql.insert` on SQLite: one statement, which finds out itself how its time column holds a time."""

# ruff: noqa: S608 -- identifiers are quoted, values are bound

from __future__ import annotations

import sqlite3
from typing import Any

from links.errors import PublishNotAccepted
from links.sql.inserting import Binding, Style, Written
from links.sql.sqlite.statements import quote
from links.sql.sqlite.times import ENCODERS, micros, now
from links.sql.table import split

__all__ = ["insert", "statement"]

_KINDS = ", ".join(f"'{kind}'" for kind in ENCODERS)


def _kind(what: Written, bind: Binding) -> str:
    """The declared type of retry_after, as an expression."""
    given = ", ".join(bind.value(part) for part in reversed(split(what.table.name)))  # table, then schema
    return (
        f"(SELECT upper(trim(type)) FROM pragma_table_info({given}) "
        f"WHERE lower(name) = lower({bind.value(what.table.retry_after)}))"
    )


def statement(what: Written, style: Style) -> tuple[str, dict[str, Any]]:
    """The INSERT and its parameters; a delay counts from now."""
    table, bind = what.table, Binding(style)
    name = ".".join(bind.name(quote(part)) for part in split(table.name))
    columns = {bind.name(quote(column)): bind.value(value) for column, value in what.columns.items()}
    if what.due is not None and table.retry_after:
        due = micros(what.due, now())
        forms = " ".join(f"WHEN '{kind}' THEN {bind.value(encode(due))}" for kind, encode in ENCODERS.items())
        # of another type it is an error, "integer overflow", and no NULL, which would mean due now
        columns[bind.name(quote(table.retry_after))] = (
            f"CASE {_kind(what, bind)} {forms} ELSE abs(-9223372036854775807 - 1) END"
        )
    if not columns:
        return f"INSERT OR ABORT INTO {name} DEFAULT VALUES", {}
    end = f" ON CONFLICT ({bind.name(quote(table.id))}) DO NOTHING" if what.once else ""
    return (
        f"INSERT OR ABORT INTO {name} ({', '.join(columns)}) VALUES ({', '.join(columns.values())}){end}",
        bind.values,
    )


def insert(connection: sqlite3.Connection, what: Written) -> bool:
    """Insert by this connection, whatever rows and texts it makes."""
    cursor = sqlite3.Cursor(connection)
    try:
        if what.due is not None:
            _check_time(cursor, what)
        if cursor.execute(*statement(what, "named")).rowcount > 0:
            return True
        if what.once and _is_there(cursor, what):
            return False
    finally:
        cursor.close()
    raise PublishNotAccepted(f"table {what.table.name!r}: no row was written: a trigger has ignored it")


def _check_time(cursor: sqlite3.Cursor, what: Written) -> None:
    bind = Binding("named")
    found = cursor.execute(f"SELECT {_kind(what, bind)} IN ({_KINDS})", bind.values).fetchone()
    if not found[0]:
        raise PublishNotAccepted(
            f"table {what.table.name!r} cannot hold a delay: column {what.table.retry_after!r} (retry_after) must be "
            "there and declared REAL, INTEGER or TEXT"
        )


def _is_there(cursor: sqlite3.Cursor, what: Written) -> bool:
    bind = Binding("named")
    name, key = ".".join(map(quote, split(what.table.name))), bind.value(what.columns[what.table.id])
    text = f"SELECT 1 FROM {name} WHERE {quote(what.table.id)} = {key}"
    return cursor.execute(text, bind.values).fetchone() is not None
