"""`links.sql.insert` on PostgreSQL: one statement, which refuses a message of the wrong type before it runs."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import datetime
from typing import Any

import psycopg
from psycopg.pq import PipelineStatus

from links.errors import PublishNotAccepted
from links.sql.inserting import Binding, Style, Written
from links.sql.postgres.ddl import plain
from links.sql.postgres.statements import later
from links.sql.table import split

__all__ = ["insert", "statement"]


def statement(what: Written, style: Style) -> tuple[str, dict[str, Any]]:
    """The INSERT and its parameters. Pure.

    A bytea would go into a text as its digits, and a text into a bytea by its backslashes: so the column's own type is
    named beside the value, by the table's row type, for which nobody needs a right; types that do not match are an
    error of the parser.
    """
    table, bind = what.table, Binding(style)
    name = ".".join(bind.name(plain(part)) for part in split(table.name))
    columns: dict[str, str] = {}
    guard = ""
    for column, value in what.columns.items():
        quoted, place = bind.name(plain(column)), bind.value(value)
        typed = f"(CAST(NULL AS {name})).{quoted}"
        if isinstance(value, bytes | bytearray | memoryview):
            place = f"COALESCE({place}, {typed})"
        elif column == table.payload:  # a text or JSON can be cast so, a bytea cannot
            guard = f"WITH a_text AS (SELECT CAST({typed} AS json)) "
        columns[quoted] = place
    if what.due is not None and table.retry_after:
        due = bind.value(what.due)
        if not isinstance(what.due, datetime):
            due = later(f"CAST({due} AS double precision)")
        columns[bind.name(plain(table.retry_after))] = due
    if not columns:
        return f"INSERT INTO {name} DEFAULT VALUES", {}
    end = f" ON CONFLICT ({bind.name(plain(table.id))}) DO NOTHING" if what.once else ""
    text = f"{guard}INSERT INTO {name} ({', '.join(columns)}) OVERRIDING SYSTEM VALUE "
    return f"{text}VALUES ({', '.join(columns.values())}){end}", bind.values


def _there(what: Written) -> tuple[bytes, dict[str, Any]]:
    """Is there a row of this id?"""
    bind = Binding("pyformat")
    name = ".".join(bind.name(plain(part)) for part in split(what.table.name))
    key = bind.value(what.columns[what.table.id])
    text = f"SELECT FROM {name} WHERE {bind.name(plain(what.table.id))} = {key}"
    return text.encode(), bind.values


def _ignored(what: Written) -> PublishNotAccepted:
    return PublishNotAccepted(f"table {what.table.name!r}: no row was written: a trigger has ignored it")


def insert(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], what: Written) -> bool | Awaitable[bool]:
    """Insert by this connection, whatever cursors it makes; awaited where it is asynchronous."""
    if connection.pgconn.pipeline_status != PipelineStatus.OFF:
        raise ValueError("connection must not be in pipeline mode: there is no answer there; use insert_statement(…)")
    return (
        _awaited(connection, what) if isinstance(connection, psycopg.AsyncConnection) else _blocking(connection, what)
    )


def _blocking(connection: psycopg.Connection[Any], what: Written) -> bool:
    text, values = statement(what, "pyformat")
    with psycopg.Cursor(connection) as cursor:
        if cursor.execute(text.encode(), values).rowcount:
            return True
        if what.once and cursor.execute(*_there(what)).fetchone() is not None:
            return False
    raise _ignored(what)


async def _awaited(connection: psycopg.AsyncConnection[Any], what: Written) -> bool:
    text, values = statement(what, "pyformat")
    async with psycopg.AsyncCursor(connection) as cursor:
        if (await cursor.execute(text.encode(), values)).rowcount:
            return True
        if what.once and await (await cursor.execute(*_there(what))).fetchone() is not None:
            return False
    raise _ignored(what)
