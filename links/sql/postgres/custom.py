"""Statements of the user's own on PostgreSQL, in place of a claim's and an extension's.

Each runs in a transaction that is open already, and our own look at the rows follows in the same one: so what the
statement gave is worked on only where this transaction holds it.

Cancellation, anywhere: the statement is cancelled on the server, and its transaction is rolled back.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg

from links.errors import CallBroken
from links.sql.custom import fetched, for_psycopg, ids_of, ours_of
from links.sql.jobs import Passing
from links.sql.postgres.codes import is_again, is_reshaped
from links.sql.postgres.looked import Looked
from links.sql.postgres.trio_connection import TrioConnection
from links.sql.postgres.values import array
from links.sql.rows import Row

__all__ = ["asked", "claimed"]


@contextmanager
def _named(connection: TrioConnection, event: str) -> Generator[None]:
    """What fails names the statement, but for what is tried again."""
    try:
        yield
    except psycopg.Error as error:
        if connection.closed or is_again(error) or is_reshaped(error):
            raise
        raise CallBroken(f"the statement for {event!r}: {str(error).partition(chr(10))[0]}") from error


async def asked(
    connection: TrioConnection, event: str, text: str, values: dict[str, Any]
) -> tuple[Sequence[str], list[tuple[Any, ...]]]:
    """Carry out the statement for this event: the names of its columns, and its rows; of one that gives none, neither.

    Raises `CallBroken`, and `psycopg.Error` for what is tried again.
    """
    with _named(connection, event):
        cursor = await connection.execute(for_psycopg(text).encode(), values)
        if cursor.description is None:
            return (), []
        return [column.name for column in cursor.description], await cursor.fetchall()


async def claimed(
    form: Looked[Any], connection: TrioConnection, room: int, passing: Passing, until: str | None = None
) -> list[Row]:
    """The rows that the statement for claim gave and this transaction holds, with what that for fetch gave of each.

    `until`: the lease's end; None: there is none, and they are locked. Raises `CallBroken`, and `psycopg.Error`.
    """
    over = () if until is not None else passing.over  # behind a lock they are free again, and may all stand in front
    most = room + len(over)
    values = {"group": form.group, "room": most, "until": until}
    names, found = await asked(connection, "claim", form.own["claim"], values)
    if not names:
        raise CallBroken("the statement for 'claim' gives no rows, and must give ids, such as by RETURNING")
    ids = ids_of(found, most)
    passing.complete = len(ids) < most
    if not ids:
        return []
    with _named(connection, "claim"):  # it is the ids that cannot be bound
        looked = await form.rows(connection, form.texts.chosen, {**values, "ids": array(ids)})
    missing = "not there, or not leased until :until"
    if until is None:
        missing = "not there, not due, finished, of another group, or locked by somebody else"
    ours = [row for row in ours_of(ids, looked, passing, missing) if row[0] not in over]
    rows = [form.row(row) for row in ours[:room]]
    if "fetch" not in form.own:
        return rows
    return [await _fetched(form, connection, row) for row in rows]


async def _fetched(form: Looked[Any], connection: TrioConnection, row: Row) -> Row:
    values = {"id": row[0], "group": form.group}
    return fetched(form.table, row, *await asked(connection, "fetch", form.own["fetch"], values))
