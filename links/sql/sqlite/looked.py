"""A queue table on SQLite as it was looked at: its columns, the texts for it, and the verbs; the same for every form.

The table is looked at again whenever its schema has changed: no statement runs on columns that are not there, or not of
the type that they were. What no longer fits is a `LinkRefused` from every call, with nothing written, until it does.
Runs in the thread, in a transaction.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

from links.sql.rows import BadText, Token
from links.sql.sqlite import times
from links.sql.sqlite.inspect import SqliteLook, inspect, odd_times
from links.sql.sqlite.schema import SqliteSchema, read_schema, schema_version, undone
from links.sql.sqlite.statements import SqliteStatements, quote, quote_table
from links.sql.sqlite.times import later
from links.sql.table import Table
from settlement.sql import AdvisoryLock, Custom, Delay, Finish, MoveToGroup, MoveToTable, PutBack, Verb

__all__ = ["Ignored", "SqliteLooked"]

_log = logging.getLogger("trio_settlement")

_MINUTE = 60_000_000
"""Microseconds between two looks for times of another form, when there is nothing else to do."""


class Ignored(Exception):
    """A statement touched no row, and the row was there: a trigger had its say. The transaction is undone."""


class SqliteLooked:
    """One queue of one table. Raises `LinkRefused` where the table is no queue."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        table: Table[Any],
        group: str | None,
        *,
        subscription: str,
        dead_letter: str | None = None,
        custom: Mapping[str, str] = MappingProxyType({}),
        key: AdvisoryLock | None = None,
    ) -> None:
        """`key`: of the advisory form; None, the default, for the others."""
        self.table, self.group, self._key, self.own = table, group, key, custom
        self._subscription, self._dead_letter = subscription, dead_letter
        self.here = f"subscription {subscription!r}, table {table.name!r}"
        """For errors."""
        self._version = schema_version(connection)
        look = self._look(connection)
        odd = self._odd_times(connection)
        self._odd = set(odd)
        """The columns that hold times of another form, as far as was told."""
        self._looked = times.now()
        self.warnings = [*look.warnings, *odd.values()]
        """What was told so far: said once."""

    def _look(self, connection: sqlite3.Connection) -> SqliteLook:
        look = inspect(
            connection,
            self.table,
            self._subscription,
            dead_letter=self._dead_letter,
            custom=self.own,
            key=self._key,
        )
        schema, table = look.schema, self.table
        self.schema = schema
        self.texts = schema.statements(table, key=self._key)
        self._odd_texts = schema.statements(table, "CAST(:id AS TEXT)", key=self._key)
        self._due = schema.encoder(table.retry_after)
        self._finished = schema.encoder(table.processed_at)
        self._moment = schema.encoder(table.locked_until or table.retry_after or table.processed_at)
        self._dead: dict[str, SqliteSchema | None] = {}
        return look

    def _again(self, connection: sqlite3.Connection) -> None:
        """SqliteLook at the table again where the schema has changed."""
        version = schema_version(connection)
        if version != self._version:
            self._tell(self._look(connection).warnings)
            self._version = version

    def _tell(self, warnings: Sequence[str]) -> None:
        for line in warnings:
            if line not in self.warnings:
                self.warnings.append(line)
                _log.warning("%s", line)

    def _look_for_odd_times(self, connection: sqlite3.Connection, now: int) -> None:
        """Once a minute, when there is nothing else to do."""
        if not -_MINUTE < now - self._looked < _MINUTE:
            self._looked = now
            odd = self._odd_times(connection)
            self._tell([line for column, line in odd.items() if column not in self._odd])
            self._odd.update(odd)

    def _odd_times(self, connection: sqlite3.Connection) -> dict[str, str]:
        """A time of another form may never be due: then only a look at the rows tells. By column, what to say."""
        found = odd_times(connection, self.table, self.schema)
        return {column: f"{self.here}: {line}" for column, line in found.items()}

    def holds(self, connection: sqlite3.Connection, token: Token, now: int | None = None) -> bool:  # noqa: ARG002
        """Is the row still as this token says? `now`: for a renewal."""
        self._again(connection)
        texts = self._odd_texts if isinstance(token[0], BadText) else self.texts
        values = {"id": token[0], "token": token[1], "attempt": token[2]}
        return connection.execute(texts.holds, values).fetchone() is not None

    def say(self, connection: sqlite3.Connection, now: int, token: Token, verb: Verb) -> bool:
        """Carry out the verb; False: nothing was touched. `holds` tells whether the lease was lost then."""
        self._again(connection)
        texts = self._odd_texts if isinstance(token[0], BadText) else self.texts
        values: dict[str, Any] = {"id": token[0], "token": token[1], "attempt": token[2]}
        statement = ""
        match verb:
            case MoveToTable(table):
                with undone(connection, "move"):
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
            case Custom():
                with undone(connection, "custom"):
                    return self._carry_out(connection, now, token, verb)
        if not statement:
            raise ValueError(f"table {self.table.name!r} has no column for it")
        with self._whole(connection):
            return connection.execute(statement, values).rowcount > 0

    def _carry_out(self, connection: sqlite3.Connection, now: int, token: Token, verb: Custom) -> bool:
        """A statement of the user's own, where the row is still ours. Raises `Ignored` where it touched nothing."""
        if not self.holds(connection, token):
            return False
        key, until, attempt = token
        group = self.group if verb.group is None else verb.group
        values = {"id": key, "token": until, "attempt": attempt, "delay": verb.delay, "group": group}
        cursor = connection.execute(verb.text, values | {"now": self._moment(now)})
        if not (len(cursor.fetchall()) if cursor.description else cursor.rowcount):
            raise Ignored(f"the statement for {verb.event!r} touched no row")
        return True

    def _whole(self, connection: sqlite3.Connection) -> AbstractContextManager[None]:
        """For a statement that fails: a trigger that says RAISE(FAIL) would keep what it has done so far."""
        return undone(connection, "statement") if self.schema.triggers else contextlib.nullcontext()

    def _move(self, connection: sqlite3.Connection, to: str, texts: SqliteStatements, values: dict[str, Any]) -> bool:
        columns = self.schema.stored
        dead = self._dead_schema(connection, to)
        abort = dead is None or not dead.triggers
        new = None
        try:
            touched = connection.execute(texts.copy(to, columns, abort=abort), values).rowcount > 0
        except sqlite3.IntegrityError:
            if not connection.in_transaction or not self._fills_itself(connection, to, values["id"]):
                raise
            others = [column for column in columns if column.lower() != self.table.id.lower()]
            copied = connection.execute(texts.copy(to, others, abort=abort), values)
            touched, new = copied.rowcount > 0, copied.lastrowid
        if touched:
            touched = connection.execute(texts.delete, values).rowcount > 0
            if not touched:
                raise Ignored("the row was copied, and a trigger has ignored its DELETE")
        if touched and new is not None:
            _log.warning(
                "subscription %r, table %r: row %s is row %s of the dead-letter table %r, where its own id was taken; "
                "a key that is AUTOINCREMENT gives no id twice",
                self._subscription,
                self.table.name,
                values["id"],
                self._id_of(connection, to, new),
                to,
            )
        return touched

    def _dead_schema(self, connection: sqlite3.Connection, to: str) -> SqliteSchema | None:
        if to not in self._dead:
            self._dead[to] = read_schema(connection, to)
        return self._dead[to]

    def _fills_itself(self, connection: sqlite3.Connection, to: str, key: Any) -> bool:
        """Is this id taken in the table `to`, and does that table give a row an id by itself?"""
        dead = self._dead_schema(connection, to)
        if dead is None or self.table.id not in dead or not dead[self.table.id].filled:
            return False
        value = "CAST(? AS TEXT)" if isinstance(key, BadText) else "?"
        query = f"SELECT 1 FROM {quote_table(to)} WHERE {quote(self.table.id)} = {value}"  # noqa: S608
        return connection.execute(query, (key,)).fetchone() is not None

    def _id_of(self, connection: sqlite3.Connection, to: str, rowid: int) -> Any:
        query = f"SELECT {quote(self.table.id)} FROM {quote_table(to)} WHERE _rowid_ = ?"  # noqa: S608
        with contextlib.suppress(sqlite3.Error):  # a table WITHOUT ROWID
            if found := connection.execute(query, (rowid,)).fetchone():
                return found[0]
        return "of another id"
