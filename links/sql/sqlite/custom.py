"""Statements of the user's own on SQLite, in place of a claim's. Runs in the thread, in a transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from links.errors import CallBroken
from links.sql.sqlite.codes import BINDING, is_busy, is_fatal

__all__ = ["asked"]


def asked(
    connection: sqlite3.Connection, event: str, text: str, values: Mapping[str, Any]
) -> tuple[Sequence[str], list[tuple[Any, ...]]]:
    """Carry out the statement for this event: the names of its columns, and its rows; of one that gives none, neither.

    Raises `CallBroken` with the statement's name, and what has ended the transaction.
    """
    try:
        cursor = connection.execute(text, values)
        rows = cursor.fetchall()
    except BINDING as error:
        if not connection.in_transaction or is_busy(error) or is_fatal(error):
            raise
        raise CallBroken(f"the statement for {event!r}: {error}") from error
    return [column[0] for column in cursor.description or ()], rows
