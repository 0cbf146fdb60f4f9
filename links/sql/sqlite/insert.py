"""From a letter to a row. Runs in the thread, in a transaction.

Left out of the insert, so that the database gives the value: generated columns, and every role with a default. What has
no default and may not be NULL gets one here: an id that is a text (a random one), retry_after (now), attempt (1).
"""

from __future__ import annotations

import contextlib
import sqlite3
import uuid
from typing import Any

import attrs

from links.errors import PublishNotAccepted
from links.sql.headers import dump, load_row
from links.sql.sqlite.lease import Ignored
from links.sql.sqlite.schema import SqliteSchema, read_schema, schema_version, undone
from links.sql.sqlite.statements import insert, quote, quote_table
from links.sql.sqlite.times import later
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
        table = self.table
        strangers = [column for column in table.roles.values() if column not in schema]
        if strangers:
            raise PublishNotAccepted(f"table {table.name!r} has no column {strangers[0]!r}")
        row = self._message(schema, letter)
        if table.group:
            row[table.group] = self.group
        if letter.headers:
            row[self._column("headers", "headers")] = dump(letter.headers)
        if letter.key is not None:
            row[self._column("partition_key", "a key")] = letter.key
        if letter.deliver_after is not None:
            column = self._column("retry_after", "a delay")
            row[column] = schema.encoder(column)(later(now, letter.deliver_after))
        for column in table.generated:
            row.pop(column, None)
        if key is not None:
            row[table.id] = key
        if table.retry_after and self._lacks(schema, table.retry_after, row) and schema[table.retry_after].required:
            row[table.retry_after] = schema.encoder(table.retry_after)(now)
        if table.attempt and self._lacks(schema, table.attempt, row) and schema[table.attempt].required:
            row[table.attempt] = 1
        if table.id in table.generated and table.id not in row and not schema.fills(table.id):
            raise PublishNotAccepted(
                f"table {table.name!r}: column {table.id!r} (id) is in generated=(…), but nothing fills it: declare it "
                "INTEGER PRIMARY KEY AUTOINCREMENT"
            )
        if self._lacks(schema, table.id, row) and not schema.fills(table.id):
            if not schema[table.id].textual:
                raise PublishNotAccepted(
                    f"table {table.name!r}: column {table.id!r} (id) needs a value: publish_once(id, …), or name it "
                    "in generated=(…) where the database fills it"
                )
            row[table.id] = uuid.uuid4().hex
        return row

    def _message(self, schema: SqliteSchema, letter: Letter) -> dict[str, Any]:
        column = self.table.payload
        if column is None:
            try:
                return load_row(letter.body)
            except (ValueError, RecursionError) as error:
                raise PublishNotAccepted(f"table {self.table.name!r} takes rows: {error}") from error
        if schema[column].textual:
            try:
                return {column: letter.body.decode()}
            except UnicodeDecodeError:
                pass
        return {column: letter.body}

    def _column(self, role: str, what: str) -> str:
        column: str | None = getattr(self.table, role)
        if column is None:
            raise PublishNotAccepted(f"table {self.table.name!r} cannot hold {what}: it has no {role} column")
        return column

    def _lacks(self, schema: SqliteSchema, column: str, row: dict[str, Any]) -> bool:
        return column not in row and column not in self.table.generated and not schema[column].computed
