"""Writes a letter as a row. Runs in the thread, in a transaction."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import Any

import attrs

from links.errors import PublishNotAccepted
from links.sql.letters import When, row_of
from links.sql.sqlite.looked import Ignored
from links.sql.sqlite.schema import SqliteSchema, read_schema, schema_version, undone
from links.sql.sqlite.statements import insert, quote, quote_table
from links.sql.sqlite.times import micros
from links.sql.table import Table
from settlement.delivery import Letter

__all__ = ["SqliteInserter"]


@attrs.define(eq=False)
class SqliteInserter:
    """Inserts into one table, for one group.

    Attributes:
        table: Which one.
        group: Which of its groups; None: it has none.
    """

    table: Table[Any]
    group: str | None
    _schema: SqliteSchema | None = None
    _version: int | None = None

    def insert(self, connection: sqlite3.Connection, now: int, letter: Letter, key: Any, *, once: bool) -> bool:
        """Insert one row; `once`: False where the id is there already.

        Raises `PublishNotAccepted`, and `Ignored` where the database has written no row.
        """
        version = schema_version(connection)
        schema = self._schema if version == self._version else None
        schema = schema or read_schema(connection, self.table.name)
        if schema is None:
            raise PublishNotAccepted(f"there is no table {self.table.name!r}")
        if schema.replaces:
            raise PublishNotAccepted(
                f"table {self.table.name!r} has triggers, and a constraint that says ON CONFLICT REPLACE, so that a "
                "row may take the place of another without a word; declare the constraint without that"
            )
        row = self._row(schema, now, letter, key)
        text = insert(self.table.name, [*row], once=self.table.id if once else None, abort=not schema.triggers)
        values = {f"v{number}": value for number, value in enumerate(row.values())}
        try:
            with undone(connection, "statement") if schema.triggers else contextlib.nullcontext():  # for RAISE(FAIL)
                touched = connection.execute(text, values).rowcount > 0
        except sqlite3.IntegrityError as error:
            if not connection.in_transaction:
                raise
            raise PublishNotAccepted(f"table {self.table.name!r}: {error}") from error
        if not touched and not (once and self._is_there(connection, key)):
            raise Ignored(f"table {self.table.name!r}: no row was written: a trigger has ignored it")
        self._schema, self._version = schema, version
        return touched

    def _is_there(self, connection: sqlite3.Connection, key: Any) -> bool:
        text = f"SELECT 1 FROM {quote_table(self.table.name)} WHERE {quote(self.table.id)} = ?"  # noqa: S608
        return connection.execute(text, (key,)).fetchone() is not None

    def _row(self, schema: SqliteSchema, now: int, letter: Letter, key: Any) -> dict[str, Any]:
        def due(column: str, when: When) -> Any:
            return schema.encoder(column)(micros(when, now))

        declared = "INTEGER PRIMARY KEY AUTOINCREMENT"
        return row_of(self.table, schema, letter, key, group=self.group, due=due, fills=declared)
