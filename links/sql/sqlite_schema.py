"""What SQLite says about a table, and whether a `Table` may be a queue there (S-12.3). Runs in the thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import attrs

from links.errors import LinkRefused
from links.sql.sqlite_statements import Statements, quote
from links.sql.sqlite_times import ENCODERS, Encoder
from links.sql.table import Table, split

__all__ = ["Column", "Schema", "inspect", "name_in_file", "read_schema"]


@attrs.frozen
class Column:
    """One column, as `pragma table_xinfo` tells it."""

    name: str
    type: str
    """As declared, upper case."""
    required: bool
    """NOT NULL, and no default."""
    nullable: bool
    computed: bool
    """GENERATED ALWAYS: it cannot be inserted."""
    filled: bool
    """Has it a default, or is it INTEGER PRIMARY KEY? Then it may be left out of an insert and is not NULL."""
    rowid: bool
    """INTEGER PRIMARY KEY: SQLite gives it a value."""

    @property
    def textual(self) -> bool:
        """Does SQLite hold texts in it?"""
        return any(word in self.type for word in ("CHAR", "CLOB", "TEXT"))


@attrs.frozen
class Schema:
    """The columns of one table, by lower-case name: SQLite does not distinguish case."""

    columns: dict[str, Column]

    def __getitem__(self, name: str) -> Column:
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

    def encoder(self, column: str | None) -> Encoder:
        """How this column holds a time; for no column, anything."""
        return ENCODERS["INTEGER" if column is None else self[column].type]

    def statements(self, table: Table[Any], id_value: str = ":id") -> Statements:
        """The texts for this table."""
        nullable = {column for column in table.roles.values() if self[column].nullable}
        return Statements(table, self.names, nullable, id_value)


def _schema_and_name(name: str) -> tuple[str, str]:
    *schema, table = split(name)
    return schema[0] if schema else "main", table


def read_schema(connection: sqlite3.Connection, name: str) -> Schema | None:
    """The columns of this table; None where there is no such table (a view is none)."""
    schema, table = _schema_and_name(name)
    if schema.lower() not in {
        str(each).lower() for _, each, _ in connection.execute("PRAGMA database_list").fetchall()
    }:
        return None
    found = connection.execute(
        f"SELECT 1 FROM {quote(schema)}.sqlite_master WHERE type = 'table' AND lower(name) = lower(?)",  # noqa: S608
        (table,),
    ).fetchone()
    if found is None:
        return None
    rows = connection.execute(f"PRAGMA {quote(schema)}.table_xinfo({quote(table)})").fetchall()
    keys = sum(1 for row in rows if row[5])
    columns: dict[str, Column] = {}
    for _, column, declared, notnull, default, key, hidden in rows:
        kind = declared.strip().upper()
        rowid = keys == 1 and bool(key) and kind == "INTEGER"
        columns[column.lower()] = Column(
            name=column,
            type=kind,
            required=bool(notnull) and default is None and not rowid,
            nullable=not notnull and not rowid,
            computed=hidden in (2, 3),
            filled=default is not None or rowid,
            rowid=rowid,
        )
    return Schema(columns)


def _unique(connection: sqlite3.Connection, table: Table[Any], schema: Schema) -> bool:
    """Is the id a key of its own?"""
    if schema[table.id].rowid:
        return True
    name, within = _schema_and_name(table.name)[1], _schema_and_name(table.name)[0]
    for _, index, unique, _, partial in connection.execute(
        f"PRAGMA {quote(within)}.index_list({quote(name)})"
    ).fetchall():
        columns = connection.execute(f"PRAGMA {quote(within)}.index_info({quote(index)})").fetchall()
        if unique and not partial and [str(row[2]).lower() for row in columns] == [table.id.lower()]:
            return True
    return False


def inspect(connection: sqlite3.Connection, table: Table[Any], subscription: str) -> Schema:
    """The schema of a queue table. Raises `LinkRefused` naming subscription, table, column and the way out."""
    where = f"subscription {subscription!r}, table {table.name!r}"
    schema = read_schema(connection, table.name)
    if schema is None:
        raise LinkRefused(f"{where}: there is no such table; create it, the library creates none")
    for role, column in table.roles.items():
        if column not in schema:
            raise LinkRefused(
                f"{where}: there is no column {column!r} for the role {role}; it has {', '.join(schema.names)}; "
                "add the column, or leave the role out of Table(…)"
            )
    for role in ("locked_until", "retry_after", "processed_at"):
        moment: str | None = getattr(table, role)
        if moment is not None and schema[moment].type not in ENCODERS:
            raise LinkRefused(
                f"{where}: column {moment!r} ({role}) is declared {schema[moment].type or 'without a type'}; "
                "a time is REAL (Unix seconds), INTEGER (Unix microseconds) or TEXT (ISO 8601 in UTC)"
            )
    if not _unique(connection, table, schema):
        raise LinkRefused(
            f"{where}: column {table.id!r} (id) is no key of its own, so a settlement could touch a second row; "
            "declare it PRIMARY KEY or UNIQUE"
        )
    assert table.locked_until is not None  # noqa: S101 -- the queue was refused without one
    if not schema[table.locked_until].nullable:
        raise LinkRefused(
            f"{where}: column {table.locked_until!r} (locked_until) is NOT NULL, but NULL is what a free row holds"
        )
    _prepare(connection, table, schema, where)
    return schema


_BOUND = ("id", "token", "attempt", "now", "due", "finished", "expiry", "group", "room", "to")
_EVENTS = ("claim", "finish", "release", "give_back", "delay", "regroup", "extend", "delete")


def _prepare(connection: sqlite3.Connection, table: Table[Any], schema: Schema, where: str) -> None:
    """Prepare every statement once (S-12.3)."""
    texts = schema.statements(table)
    values: dict[str, int] = dict.fromkeys(_BOUND, 0)
    for event in _EVENTS:
        text = getattr(texts, event)
        try:
            if text:
                connection.execute(f"EXPLAIN {text}", values).fetchall()
        except sqlite3.Error as error:
            raise LinkRefused(f"{where}: the statement {event!r} cannot be prepared: {error}") from error


def name_in_file(name: str) -> str:
    """One spelling for one table: schema `main` is left out, case does not count."""
    schema, table = _schema_and_name(name)
    return table.lower() if schema.lower() == "main" else f"{schema.lower()}.{table.lower()}"
