"""What SQLite says of a table: its columns, and whether they are still the same. Runs in the thread."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import attrs

from links.sql.sqlite.statements import SqliteStatements, quote
from links.sql.sqlite.times import ENCODERS, Encoder
from links.sql.table import Table, split
from settlement.sql import AdvisoryLock

__all__ = [
    "SqliteColumn",
    "SqliteSchema",
    "SqliteSession",
    "explain",
    "name_in_file",
    "read_schema",
    "schema_version",
    "undone",
    "where",
]


_PROSE = re.compile(r"--[^\n]*|/\*.*?(?:\*/|$)|'(?:[^']|'')*'", re.DOTALL)
"""Comments and texts in a CREATE TABLE."""
_REPLACES = re.compile(r"\bON\s+CONFLICT\s+REPLACE\b", re.IGNORECASE)


class SqliteSession(sqlite3.Connection):
    """A connection that knows, within a transaction, the version of the schema: read once, not for every statement."""

    version: int | None = None

    def begin(self) -> None:
        """BEGIN IMMEDIATE: from here on nobody else writes, and nobody alters a table."""
        self.version = None
        self.execute("BEGIN IMMEDIATE")
        self.version = schema_version(self)


def schema_version(connection: sqlite3.Connection) -> int:
    """A number that changes with every CREATE, ALTER and DROP, also by another process."""
    if isinstance(connection, SqliteSession) and connection.version is not None and connection.in_transaction:
        return connection.version
    version: int = connection.execute("PRAGMA schema_version").fetchone()[0]
    return version


@contextlib.contextmanager
def undone(connection: sqlite3.Connection, name: str) -> Generator[None, None, None]:
    """A savepoint for the block: where it fails, nothing of it is written."""
    connection.execute(f"SAVEPOINT {name}")
    try:
        yield
    except BaseException:
        if connection.in_transaction:
            connection.execute(f"ROLLBACK TO {name}")
            connection.execute(f"RELEASE {name}")
        raise
    connection.execute(f"RELEASE {name}")


@attrs.frozen
class SqliteColumn:
    """One column, as `pragma table_xinfo` tells it.

    Attributes:
        name: As declared.
        type: As declared, upper case; empty where none is.
        default: The expression that the database evaluates where an insert leaves it out, as text; None: NULL.
        required: NOT NULL, and no default.
        nullable: May it be NULL?
        computed: GENERATED ALWAYS: it cannot be inserted.
        filled: Has it a default, or is it INTEGER PRIMARY KEY? Then it may be left out of an insert and is not NULL.
        rowid: INTEGER PRIMARY KEY: SQLite gives it a value. Not so with DESC, and not WITHOUT ROWID.
    """

    name: str
    type: str
    default: str | None
    required: bool
    nullable: bool
    computed: bool
    filled: bool
    rowid: bool

    @property
    def textual(self) -> bool:
        """Does SQLite hold texts in it?"""
        return "INT" not in self.type and any(word in self.type for word in ("CHAR", "CLOB", "TEXT"))


@attrs.frozen
class SqliteSchema:
    """The columns of one table, by lower-case name: SQLite does not distinguish case.

    Attributes:
        columns: Each by its name in lower case, in the table's order.
        triggers: Are there triggers on the table? Then what was written may not be what is stored. False by default.
        replaces: Does a constraint of the table say ON CONFLICT REPLACE, and are there triggers? Then nothing that is
            written can say OR ABORT, and another row would be lost without a word. False by default.
    """

    columns: dict[str, SqliteColumn]
    triggers: bool = False
    replaces: bool = False

    def __getitem__(self, name: str) -> SqliteColumn:
        return self.columns[name.lower()]

    def __contains__(self, name: str) -> bool:
        return name.lower() in self.columns

    @property
    def names(self) -> Sequence[str]:
        """All columns, in the table's order."""
        return [column.name for column in self.columns.values()]

    @property
    def stored(self) -> Sequence[str]:
        """The columns that can be inserted, in the table's order."""
        return [column.name for column in self.columns.values() if not column.computed]

    def fills(self, name: str) -> bool:
        """Is there something that gives this column a value where an insert leaves it out?"""
        column = self[name]
        return column.filled or column.computed or self.triggers

    def encoder(self, column: str | None) -> Encoder:
        """How this column holds a time; for no column, anything."""
        return ENCODERS["INTEGER" if column is None else self[column].type]

    def statements(
        self, table: Table[Any], id_value: str = ":id", *, key: AdvisoryLock | None = None
    ) -> SqliteStatements:
        """The texts for this table; `key`: for the advisory form."""
        nullable = {column for column in table.roles.values() if self[column].nullable}
        return SqliteStatements(table, self.names, nullable, id_value, abort=not self.triggers, key=key)


def where(name: str) -> tuple[str, str]:
    """SqliteSchema and table of a name; `main` where none is said."""
    *schema, table = split(name)
    return schema[0] if schema else "main", table


def read_schema(connection: sqlite3.Connection, name: str) -> SqliteSchema | None:
    """The columns of this table; None where there is no such table (a view is none)."""
    schema, table = where(name)
    if schema.lower() not in {
        str(each).lower() for _, each, _ in connection.execute("PRAGMA database_list").fetchall()
    }:
        return None
    found = connection.execute(
        f"SELECT sql FROM {quote(schema)}.sqlite_master WHERE type = 'table' AND lower(name) = lower(?)",  # noqa: S608
        (table,),
    ).fetchone()
    if found is None:
        return None
    rows = connection.execute(f"PRAGMA {quote(schema)}.table_xinfo({quote(table)})").fetchall()
    indexes = connection.execute(f"PRAGMA {quote(schema)}.index_list({quote(table)})").fetchall()
    # the primary key of a table WITHOUT ROWID has an index of its own, and so has INTEGER PRIMARY KEY DESC
    alias = sum(1 for row in rows if row[5]) == 1 and all(index[3] != "pk" for index in indexes)
    columns: dict[str, SqliteColumn] = {}
    for _, column, declared, notnull, default, key, hidden in rows:
        kind = declared.strip().upper()
        rowid = alias and bool(key) and kind == "INTEGER"
        given = default is not None and default.strip().upper() != "NULL"
        columns[column.lower()] = SqliteColumn(
            name=column,
            type=kind,
            default=default if given else None,
            required=bool(notnull) and not given and not rowid,
            nullable=not notnull and not rowid,
            computed=hidden in (2, 3),
            filled=given or rowid,
            rowid=rowid,
        )
    triggers = any(
        connection.execute(
            f"SELECT 1 FROM {master} WHERE type = 'trigger' AND lower(tbl_name) = lower(?)",  # noqa: S608
            (table,),
        ).fetchone()
        for master in (f"{quote(schema)}.sqlite_master", "sqlite_temp_master")
    )
    return SqliteSchema(columns, triggers, triggers and _REPLACES.search(_PROSE.sub(" ", found[0])) is not None)


def explain(
    connection: sqlite3.Connection, text: str, values: Mapping[str, object], how: str = "EXPLAIN"
) -> Sequence[tuple[Any, ...]]:
    """The program of a statement; what Python has prepared before an ALTER TABLE is not asked again."""
    return connection.execute(f"{how} {text} -- {schema_version(connection)}", values).fetchall()


def name_in_file(name: str) -> str:
    """One spelling for one table: schema `main` is left out, case does not count."""
    schema, table = where(name)
    return table.lower() if schema.lower() == "main" else f"{schema.lower()}.{table.lower()}"
