"""The record table of an outbox on SQLite: what it must be, and its statements. Runs in the thread."""

# ruff: noqa: S608 -- identifiers are quoted, values are bound

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from links.errors import LinkRefused, PublishNotAccepted
from links.sql.inserting import Style, Written
from links.sql.jobs import Call
from links.sql.outbox_table import OutboxTable
from links.sql.records import Record
from links.sql.sqlite.codes import is_of_the_row
from links.sql.sqlite.ddl import outbox_ddl
from links.sql.sqlite.defaults import evaluate
from links.sql.sqlite.insert import SqliteInserter
from links.sql.sqlite.inserting import statement
from links.sql.sqlite.inspect import check_replaces, check_times, view
from links.sql.sqlite.looked import Ignored
from links.sql.sqlite.schema import SqliteSchema, read_schema, schema_version
from links.sql.sqlite.statements import quote, quote_table
from links.sql.sqlite.times import DEFAULTS, ENCODERS, FORMS, is_default, now, strange
from links.sql.sqlite.turn import SqliteTurn
from links.sql.table import split
from settlement.delivery import Letter

__all__ = ["SqliteRecords"]


class SqliteRecords:
    """As `Records`. `path`: the file."""

    driver = "sqlite3"

    def __init__(self, table: OutboxTable, path: Path) -> None:
        self.table, self._path = table, path
        self._letters = table.letters
        self._inserters: dict[str, SqliteInserter] = {}
        self._known: tuple[int, SqliteSchema] | None = None
        self._name = quote_table(table.table)
        self._id, self._for = quote(table.id), quote(table.name)
        done = table.processed_at
        self._open = f" AND {quote(done)} IS NULL" if done else ""
        columns = (table.id, table.name, table.payload, table.headers, table.partition_key)
        self._row = ", ".join(quote(column) if column else "NULL" for column in columns)

    def ddl(self) -> str:
        """As `Records.ddl`."""
        return outbox_ddl(split(self.table.table), self.table.roles)

    def turn(self) -> SqliteTurn:
        """As `Records.turn`."""
        return SqliteTurn(self._path, self.table.table)

    def _schema(self, connection: sqlite3.Connection) -> SqliteSchema:
        version = schema_version(connection)
        if self._known is None or self._known[0] != version:
            schema = read_schema(connection, self.table.table)
            if schema is None:
                raise LinkRefused("there is no such table; create it, the library creates none")
            self._known = version, schema
        return self._known[1]

    # --- may it be one? --------------------------------------------------------------------------------------------

    def look(self, age: float) -> Call[Any]:
        """As `Records.look`."""
        return partial(self._look, age=age)

    def _look(self, connection: sqlite3.Connection, moment: int, *, age: float) -> int:
        table, here = self.table, f"outbox table {self.table.table!r}"
        schema = read_schema(connection, table.table)
        if schema is None:
            why = view(connection, table.table)
            raise LinkRefused(f"{here}: there is no such table; create it, the library creates none{why}")
        for role, column in table.roles.items():
            if column not in schema:
                raise LinkRefused(
                    f"{here}: there is no column {column!r} for the role {role}; it has {', '.join(schema.names)}; "
                    "add the column, or leave the role out of OutboxTable(…)"
                )
        check_replaces(schema, here)
        check_times(self._letters, schema, here)
        if not schema[table.id].rowid:
            raise LinkRefused(
                f"{here}: column {table.id!r} (id) must be a whole number that the database gives; declare it INTEGER "
                "PRIMARY KEY AUTOINCREMENT (neither DESC, nor INT, nor WITHOUT ROWID)"
            )
        self._check_sent_at(schema, here)
        return max(moment - math.ceil(min(age, 1e12) * 1e6), 0)

    def _check_sent_at(self, schema: SqliteSchema, here: str) -> None:
        column = schema[self.table.sent_at]
        what = f"{here}: column {column.name!r} (sent_at)"
        if column.type not in ENCODERS:
            raise LinkRefused(
                f"{what} is declared {column.type or 'without a type'}; a time is REAL (Unix seconds), INTEGER (Unix "
                f"microseconds) or TEXT (ISO 8601 in UTC): declare it REAL NOT NULL DEFAULT {DEFAULTS['REAL']}"
            )
        way_out = f"declare it {column.type} NOT NULL DEFAULT {DEFAULTS[column.type]}"
        if column.computed:
            raise LinkRefused(f"{what} is GENERATED ALWAYS, so nothing can be written into it; {way_out}")
        if column.default is None:
            raise LinkRefused(f"{what} has no default, so a record would have no age; {way_out}")
        value = evaluate(column.type, column.default)
        if not is_default(column.type, value, now()):
            raise LinkRefused(
                f"{what} is {column.type}, which holds {FORMS[column.type]}, but its default {column.default} gives "
                f"{value!r}; {way_out}"
            )

    # --- statements --------------------------------------------------------------------------------------------------

    def add(self, name: str, letter: Letter) -> Call[int]:
        """As `Records.add`."""
        return partial(self._add, name=name, letter=letter)

    def _add(self, connection: sqlite3.Connection, moment: int, *, name: str, letter: Letter) -> int:
        inserter = self._inserters.setdefault(name, SqliteInserter(self._letters, name))
        try:
            inserter.insert(connection, moment, letter, None, once=False)
        except Ignored as error:
            raise PublishNotAccepted(str(error)) from None
        except sqlite3.Error as error:
            if connection.in_transaction and is_of_the_row(error):
                raise PublishNotAccepted(str(error)) from error
            raise
        (key,) = connection.execute("SELECT last_insert_rowid()").fetchone()
        return int(key)

    def is_processed(self, name: str, key: int) -> Call[bool | None]:
        """As `Records.is_processed`."""
        done = self.table.processed_at
        state = f"{quote(done)} IS NOT NULL" if done else "0"
        text = f"SELECT {state} FROM {self._name} WHERE {self._id} = ? AND {self._for} = ?"

        def call(connection: sqlite3.Connection, _: int) -> bool | None:
            found = connection.execute(text, (key, name)).fetchone()
            return None if found is None else bool(found[0])

        return call

    def one(self, key: int) -> Call[Record | None]:
        """As `Records.one`."""
        text = f"SELECT {self._row} FROM {self._name} WHERE {self._id} = ?{self._open}"

        def call(connection: sqlite3.Connection, _: int) -> Record | None:
            found: Record | None = connection.execute(text, (key,)).fetchone()
            return found

        return call

    def page(self, names: Sequence[str], until: Any, after: int | None, room: int) -> Call[list[Record]]:
        """As `Records.page`. A time that is none as its column holds it has passed: no record is forgotten for it."""
        return partial(self._page, names=names, until=until, after=after, room=room)

    def _page(
        self, connection: sqlite3.Connection, _: int, *, names: Sequence[str], until: int, after: int | None, room: int
    ) -> list[Record]:
        column, schema = self.table.sent_at, self._schema(connection)
        at = quote(column)
        places = ", ".join(f":n{number}" for number in range(len(names)))
        beyond = "" if after is None else f" AND {self._id} > :after"
        text = (
            f"SELECT {self._row} FROM {self._name} WHERE {self._for} IN ({places}){self._open}{beyond} "
            f"AND ({at} IS NULL OR {at} <= :until OR ({strange(schema[column].type, at)})) "
            f"ORDER BY {self._id} LIMIT :room"
        )
        values: dict[str, Any] = {f"n{number}": name for number, name in enumerate(names)}
        values |= {"until": schema.encoder(column)(until), "after": after, "room": room}
        return connection.execute(text, values).fetchall()

    def sent(self, keys: Sequence[int]) -> Call[None]:
        """As `Records.sent`."""
        text = f"UPDATE {self._name} SET {quote(self.table.sent_at)} = ? WHERE {self._id} = ?"

        def call(connection: sqlite3.Connection, moment: int) -> None:
            at = self._schema(connection).encoder(self.table.sent_at)(moment)
            connection.executemany(text, [(at, key) for key in keys])

        return call

    def mark(self, name: str, key: int) -> Call[None]:
        """As `Records.mark`."""
        done = self.table.processed_at
        where = f"WHERE {self._id} = :id AND {self._for} = :name"
        text = (
            f"UPDATE {self._name} SET {quote(done)} = :at {where}{self._open}"
            if done
            else f"DELETE FROM {self._name} {where}"
        )

        def call(connection: sqlite3.Connection, moment: int) -> None:
            at = self._schema(connection).encoder(done)(moment)
            connection.execute(text, {"id": key, "name": name, "at": at})

        return call

    # --- by a connection of the user's -------------------------------------------------------------------------------

    def record(self, connection: sqlite3.Connection, what: Written) -> int:
        """As `Records.record`."""
        cursor = sqlite3.Cursor(connection)
        try:
            cursor.execute(*statement(what, "named"))
            if cursor.rowcount > 0 and cursor.lastrowid is not None:
                return cursor.lastrowid
        finally:
            cursor.close()
        raise PublishNotAccepted(f"table {what.table.name!r}: no record was written: a trigger has ignored it")

    def record_statement(self, what: Written, style: Style) -> tuple[str, dict[str, Any]]:
        """As `Records.record_statement`; the id is the cursor's `lastrowid`."""
        return statement(what, style)
