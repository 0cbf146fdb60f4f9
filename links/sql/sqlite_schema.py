"""What SQLite says about a table, and whether a `Table` may be a queue there (S-12.3). Runs in the thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from links.errors import LinkRefused
from links.sql.sqlite_statements import Statements, quote, quote_table
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


def _explain(connection: sqlite3.Connection, text: str, values: Mapping[str, object]) -> Sequence[tuple[Any, ...]]:
    """The program of a statement; what Python has prepared before an ALTER TABLE is not asked again."""
    (version,) = connection.execute("PRAGMA schema_version").fetchone()
    return connection.execute(f"EXPLAIN {text} -- {version}", values).fetchall()


def _collation(connection: sqlite3.Connection, table: Table[Any]) -> str | None:
    """What the id is compared by: no pragma tells, the program of a comparison does; `+` keeps indexes out of it."""
    text = f"SELECT 1 FROM {quote_table(table.name)} WHERE +{quote(table.id)} = :id"  # noqa: S608
    names = [row[5] for row in _explain(connection, text, {"id": 0}) if row[1] in {"Eq", "Ne"} and row[5]]
    return names[0].rsplit("-", 1)[0].strip("()").upper() if names else None  # NOCASE-8, before 3.26 (NOCASE)


def _check_key(connection: sqlite3.Connection, table: Table[Any], schema: Schema, where: str) -> None:
    """Raise `LinkRefused` unless the id is a key of its own, as the id itself is compared."""
    if schema[table.id].rowid:
        return
    within, name = _schema_and_name(table.name)
    collation = _collation(connection, table)
    others: list[str] = []
    for _, index, unique, _, partial in connection.execute(
        f"PRAGMA {quote(within)}.index_list({quote(name)})"
    ).fetchall():
        found = connection.execute(f"PRAGMA {quote(within)}.index_xinfo({quote(index)})").fetchall()
        columns = [(str(row[2]).lower(), str(row[4]).upper()) for row in found if row[5]]
        if unique and not partial and [column for column, _ in columns] == [table.id.lower()]:
            if columns[0][1] == collation:
                return
            others.append(columns[0][1])
    if others:
        raise LinkRefused(
            f"{where}: column {table.id!r} (id) is compared by {collation}, but it is unique by {others[0]} alone, so "
            f"a settlement could touch a second row; make its unique index COLLATE {collation}, or declare the column "
            f"COLLATE {others[0]}"
        )
    raise LinkRefused(
        f"{where}: column {table.id!r} (id) is no key of its own, so a settlement could touch a second row; "
        "declare it PRIMARY KEY or UNIQUE"
    )


def inspect(
    connection: sqlite3.Connection, table: Table[Any], subscription: str, dead_letter: str | None = None
) -> Schema:
    """The schema of a queue table, and a look at the table `dead_letter`, where rows shall move.

    Raises `LinkRefused` naming subscription, table, column and the way out.
    """
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
    if table.attempt is not None and "INT" not in schema[table.attempt].type:
        raise LinkRefused(
            f"{where}: column {table.attempt!r} (attempt) is declared "
            f"{schema[table.attempt].type or 'without a type'}; it counts, so declare it INTEGER"
        )
    _check_key(connection, table, schema, where)
    assert table.locked_until is not None  # noqa: S101 -- the queue was refused without one
    if not schema[table.locked_until].nullable:
        raise LinkRefused(
            f"{where}: column {table.locked_until!r} (locked_until) is NOT NULL, but NULL is what a free row holds"
        )
    _prepare(connection, table, schema, where)
    if dead_letter is not None:
        _check_dead_letter(connection, table, schema, dead_letter, where)
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
                _explain(connection, text, values)
        except sqlite3.Error as error:
            raise LinkRefused(f"{where}: the statement {event!r} cannot be prepared: {error}") from error


def _check_dead_letter(
    connection: sqlite3.Connection, table: Table[Any], schema: Schema, dead_letter: str, where: str
) -> None:
    """Can a row move there? Asked at start-up, not by the first message that is at its cap."""
    where = f"{where}: dead-letter table {dead_letter!r}"
    dead = read_schema(connection, dead_letter)
    if dead is None:
        raise LinkRefused(f"{where}: there is no such table; create it with the columns of {table.name!r}")
    for column in schema.stored:
        if column not in dead or dead[column].computed:
            raise LinkRefused(
                f"{where}: there is no column {column!r} to write to, and a row moves there whole; add it, as in "
                f"{table.name!r}"
            )
    try:
        _explain(connection, schema.statements(table).copy(dead_letter, schema.stored), dict.fromkeys(_BOUND, 0))
    except sqlite3.Error as error:
        raise LinkRefused(f"{where}: the move cannot be prepared: {error}") from error


def name_in_file(name: str) -> str:
    """One spelling for one table: schema `main` is left out, case does not count."""
    schema, table = _schema_and_name(name)
    return table.lower() if schema.lower() == "main" else f"{schema.lower()}.{table.lower()}"
