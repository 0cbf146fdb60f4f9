"""The lease form's verbs on SQLite, one call each: claim, say, extend, let go. Runs in the thread, in a transaction.

Each reads the time that it is given, writes what its text says, and tells whether it touched the row. A single
statement that fails undoes itself; the move to another table takes two and stands in a savepoint.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

from links.sql.sqlite_schema import Schema
from links.sql.sqlite_statements import Statements
from links.sql.sqlite_times import later
from links.sql.table import Table
from settlement.sql import Delay, Finish, MoveToGroup, MoveToTable, PutBack, Verb

__all__ = ["BadText", "LeaseForm", "Row", "Token", "text"]

Row: TypeAlias = tuple[Any, ...]
"""What a claim returns: id, locked_until, attempt after the claim, payload, headers, key, and what the order needs."""

Token: TypeAlias = tuple[Any, Any, Any]
"""(id, locked_until, attempt), as they are stored; attempt is None where the table has none (DESIGN 6)."""


class BadText(bytes):
    """A text of the database that is not UTF-8: one row's trouble, not the claim's."""

    __slots__ = ()


def text(value: bytes) -> str | BadText:
    """The `text_factory` of our connections."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return BadText(value)


class LeaseForm:
    """The verbs for one queue of one table."""

    def __init__(self, table: Table[Any], schema: Schema, group: str | None, lease: float) -> None:
        self.table, self.schema, self.group, self.lease = table, schema, group, lease
        self.texts = schema.statements(table)
        self._odd_texts = schema.statements(table, "CAST(:id AS TEXT)")
        self._lock = schema.encoder(table.locked_until)
        self._due = schema.encoder(table.retry_after)
        self._finished = schema.encoder(table.processed_at)
        ordering = len(self.texts.order) - 1
        self._key: Callable[[Row], Any] = itemgetter(*range(6, 6 + ordering), 0)
        self.row_starts = 6 + ordering
        self._last = 0

    def claim(self, connection: sqlite3.Connection, now: int, room: int, paused: Sequence[Any]) -> list[Row]:
        """Lease up to `room` due rows, but for those ids that are `paused`; in the queue's order."""
        values: dict[str, Any] = {
            "now": self._lock(now),
            "due": self._due(now),
            "expiry": self._lock(self._expiry(now)),
            "group": self.group,
            "room": room,
        }
        statement = self.texts.claim
        if paused:
            statement = self.texts.claim_without(len(paused))
            values.update((f"paused{number}", key) for number, key in enumerate(paused))
        rows = connection.execute(statement, values).fetchall()
        if len(rows) > 1:
            try:
                rows.sort(key=self._key)
            except TypeError:  # ids of several types in one column
                rows.sort(key=lambda row: [_rank(value) for value in (*row[6 : self.row_starts], row[0])])
        return rows

    def _expiry(self, now: int) -> int:
        """The expiry of a claim at `now`; no claim of the last second had it, so that two claims of a row differ.

        Also by a clock that stands still or is set back a little; one that is set back by more makes new times.
        """
        expiry = later(now, self.lease)
        if self._last - 1_000_000 < expiry <= self._last:
            expiry = self._last + 1
        self._last = expiry
        return expiry

    def say(self, connection: sqlite3.Connection, now: int, token: Token, verb: Verb) -> bool:
        """Carry out the verb; False: the lease was lost, and nothing was touched (S-3.2)."""
        texts = self._odd_texts if isinstance(token[0], BadText) else self.texts
        values: dict[str, Any] = {"id": token[0], "token": token[1], "attempt": token[2]}
        statement = ""
        match verb:
            case MoveToTable(table):
                return self._move(connection, table, texts, values)
            case Finish():
                values["finished"] = self._finished(now)
                statement = texts.finish
            case PutBack():
                statement = texts.release
            case Delay(seconds):
                values["due"] = self._due(later(now, seconds))
                statement = texts.delay
            case MoveToGroup(group):
                values["to"] = group
                statement = texts.regroup
        if not statement:
            raise ValueError(f"table {self.table.name!r} has no column for it")
        return connection.execute(statement, values).rowcount > 0

    def _move(self, connection: sqlite3.Connection, to: str, texts: Statements, values: dict[str, Any]) -> bool:
        connection.execute("SAVEPOINT move")
        try:
            touched = connection.execute(texts.copy(to, self.schema.stored), values).rowcount > 0
            if touched:
                connection.execute(texts.delete, values)
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK TO move")
                connection.execute("RELEASE move")
            raise
        connection.execute("RELEASE move")
        return touched

    def extend(self, connection: sqlite3.Connection, now: int, token: Token) -> Token | None:
        """The token that now holds the row; None: the lease was lost."""
        expiry = self._lock(later(now, self.lease))
        return (token[0], expiry, token[2]) if self._touch(connection, "extend", token, expiry) else None

    def let_go(self, connection: sqlite3.Connection, token: Token, *, counted: bool) -> bool:
        """Let the lease go; not `counted`: the attempt is what it was before the claim. False: it was lost."""
        return self._touch(connection, "release" if counted else "give_back", token, None)

    def _touch(self, connection: sqlite3.Connection, event: str, token: Token, expiry: Any) -> bool:
        texts = self._odd_texts if isinstance(token[0], BadText) else self.texts
        values = {"id": token[0], "token": token[1], "attempt": token[2], "expiry": expiry}
        return connection.execute(getattr(texts, event), values).rowcount > 0


def _rank(value: object) -> tuple[int, Any]:
    """SQLite's order between types: numbers, texts, blobs."""
    match value:
        case int() | float():
            return 0, value
        case str():
            return 1, value.encode("utf-8", "surrogatepass")
        case BadText():
            return 1, bytes(value)
        case _:
            return 2, value
