"""The lease form's verbs on SQLite, one call each: claim, say, extend, let go. Runs in the thread, in a transaction.

Each reads the time that it is given, writes what its text says, and tells whether it touched the row. A single
statement that fails undoes itself; the move to another table takes two and stands in a savepoint.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Container, Sized
from typing import Any, Protocol, TypeAlias

import attrs

from links.sql.sqlite_codes import BINDING, is_of_the_row
from links.sql.sqlite_schema import Schema
from links.sql.sqlite_statements import Statements
from links.sql.sqlite_times import later
from links.sql.table import Table
from settlement.sql import Delay, Finish, MoveToGroup, MoveToTable, PutBack, Verb

__all__ = ["BadText", "Held", "Ignored", "LeaseForm", "Passing", "Row", "Token", "text"]

Row: TypeAlias = tuple[Any, ...]
"""What a claim returns: id, locked_until, attempt after the claim, payload, headers, key, and in row mode the row."""

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


class Ignored(Exception):
    """A statement touched no row, and the row was there: a trigger had its say. The transaction is undone."""


class Held(Container[Any], Sized, Protocol):
    """The ids that this process holds. Asked in the thread, changed in trio, where no hop is under way."""


@attrs.define(eq=False)
class Passing:
    """The rows that one claim passes over, and those that it could not lease."""

    held: Held
    """By the row's own lease they are not to be had; by a clock that was set forward they are (DESIGN 6)."""
    over: frozenset[Any]
    """Those that could not be leased a short while ago."""
    most: int = 500
    """How many may fail; then the claim ends with what it has."""
    failed: dict[Any, BaseException] = attrs.Factory(dict[Any, BaseException])
    complete: bool = False
    """Was every row that is due looked at?"""

    def passes(self, key: Any) -> bool:
        """Not this one?"""
        return key in self.held or key in self.over or key in self.failed

    @property
    def size(self) -> int:
        """How many there may be in front of the next row."""
        return len(self.held) + len(self.over) + len(self.failed)

    @property
    def enough(self) -> bool:
        """Have too many failed?"""
        return len(self.failed) >= self.most


class LeaseForm:
    """The verbs for one queue of one table."""

    def __init__(self, table: Table[Any], schema: Schema, group: str | None, lease: float) -> None:
        self.table, self.schema, self.group, self.lease = table, schema, group, lease
        self.texts = schema.statements(table)
        self._odd_texts = schema.statements(table, "CAST(:id AS TEXT)")
        self._lock = schema.encoder(table.locked_until)
        self._due = schema.encoder(table.retry_after)
        self._finished = schema.encoder(table.processed_at)
        self.row_starts = 6
        self._last = 0

    def claim(self, connection: sqlite3.Connection, now: int, room: int, passing: Passing) -> list[Row]:
        """Lease up to `room` due rows in the queue's order, but for those that are passed over.

        Row by row: one that cannot be leased is `passing`'s, and the claim goes on behind it. Raises what says nothing
        of a row, and what has ended the transaction.
        """
        due: dict[str, Any] = {"now": self._lock(now), "due": self._due(now), "group": self.group}
        expiry = self._lock(self._expiry(now))
        taken: list[Row] = []
        passing.complete = False
        look = room
        while True:
            found = connection.execute(self.texts.claim, {**due, "room": look}).fetchall()
            for row in found:
                if passing.passes(row[0]):
                    continue
                if len(taken) == room or passing.enough:
                    return taken
                if (got := self._take(connection, row, due["now"], expiry, passing)) is not None:
                    taken.append(got)
            if len(found) < look:
                passing.complete = True
                return taken
            if len(taken) == room:
                return taken
            # those that were leased are not found again, those that are passed over may all stand in front
            look = min(2 * look, room - len(taken) + passing.size)

    def _take(
        self, connection: sqlite3.Connection, row: tuple[Any, ...], now: Any, expiry: Any, passing: Passing
    ) -> Row | None:
        """Lease this row and read its token back as it is stored; None: it cannot be leased."""
        key, attempt = row[:2]
        texts = self._odd_texts if isinstance(key, BadText) else self.texts
        values = {"id": key, "attempt": attempt, "expiry": expiry, "now": now}
        try:
            touched = connection.execute(texts.take, values).rowcount > 0
            token = connection.execute(texts.taken, values).fetchone() if touched else None
        except BINDING as error:
            if not is_of_the_row(error):
                raise
            passing.failed[key] = error
            if not connection.in_transaction:
                raise
            return None
        if token is None:
            passing.failed[key] = Ignored("a trigger has ignored the lease, or taken it back")
            return None
        return (key, *token, *row[2:])

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
            if touched and connection.execute(texts.delete, values).rowcount == 0:
                raise Ignored("the row was copied, and a trigger has ignored its DELETE")
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

    def holds(self, connection: sqlite3.Connection, token: Token) -> bool:
        """Is the token still there? A statement that touched nothing does not say why."""
        texts = self._odd_texts if isinstance(token[0], BadText) else self.texts
        values = {"id": token[0], "token": token[1], "attempt": token[2]}
        return connection.execute(texts.holds, values).fetchone() is not None

    def let_go(self, connection: sqlite3.Connection, token: Token, *, counted: bool) -> bool:
        """Let the lease go; not `counted`: the attempt is what it was before the claim. False: it was lost."""
        return self._touch(connection, "release" if counted else "give_back", token, None)

    def _touch(self, connection: sqlite3.Connection, event: str, token: Token, expiry: Any) -> bool:
        texts = self._odd_texts if isinstance(token[0], BadText) else self.texts
        values = {"id": token[0], "token": token[1], "attempt": token[2], "expiry": expiry}
        return connection.execute(getattr(texts, event), values).rowcount > 0
