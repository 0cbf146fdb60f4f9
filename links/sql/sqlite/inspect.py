"""May a `Table` be a queue in this file? What must not be is refused, what is only slow or odd is told. In the thread.

Asked when a link attaches, and again when the schema has changed under it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from links.errors import LinkRefused
from links.sql.custom import NAMES
from links.sql.row_class import lacking
from links.sql.sqlite.defaults import evaluate
from links.sql.sqlite.plans import unmarked, unserved
from links.sql.sqlite.schema import SqliteSchema, explain, read_schema, where
from links.sql.sqlite.statements import SqliteStatements, quote, quote_table
from links.sql.sqlite.times import DEFAULTS, ENCODERS, FORMS, is_default, now, strange
from links.sql.table import Table
from settlement.sql import AdvisoryLock

__all__ = ["SqliteLook", "check_key", "check_replaces", "check_times", "inspect", "odd_times", "view"]

_NEWEST = 1000
"""In how many of the newest rows a time of another form is looked for."""


@attrs.frozen
class SqliteLook:
    """What was found.

    Attributes:
        schema: The table's columns.
        warnings: What is no reason to refuse: one line each.
    """

    schema: SqliteSchema
    warnings: Sequence[str]


def inspect(
    connection: sqlite3.Connection,
    table: Table[Any],
    subscription: str,
    *,
    dead_letter: str | None = None,
    custom: Mapping[str, str] = MappingProxyType({}),
    key: AdvisoryLock | None = None,
) -> SqliteLook:
    """A look at a queue table, and at the table `dead_letter`, where rows shall move. `key`: of the advisory form.

    Raises `LinkRefused` naming subscription, table, column and the way out.
    """
    here = f"subscription {subscription!r}, table {table.name!r}"
    schema = read_schema(connection, table.name)
    if schema is None:
        raise LinkRefused(
            f"{here}: there is no such table; create it, the library creates none{view(connection, table.name)}"
        )
    for role, column in table.roles.items():
        if column not in schema:
            raise LinkRefused(
                f"{here}: there is no column {column!r} for the role {role}; it has {', '.join(schema.names)}; "
                "add the column, or leave the role out of Table(…)"
            )
    if table.row is not None and (fields := lacking(table.row, schema.names)):
        raise LinkRefused(
            f"{here}: there is no column {fields[0]!r} for that field of {table.row.__name__}, which has no default; "
            f"it has {', '.join(schema.names)}; add the column, or give the field a default"
        )
    check_replaces(schema, here)
    check_times(table, schema, here)
    _check_attempt(table, schema, here)
    check_key(connection, table, schema, here)
    if key is not None and (unknown := [column for column in key.columns if column not in schema]):
        raise LinkRefused(
            f"{here}: there is no column {unknown[0]!r} for the key {key.key!r}; it has {', '.join(schema.names)}"
        )
    texts = schema.statements(table, key=key)
    _prepare(connection, texts, here)
    for event, text in custom.items():
        _plan(connection, text, dict.fromkeys(NAMES, 0), f"{here}: custom[{event!r}]")
    if dead_letter is not None:
        _check_dead_letter(connection, texts, schema, dead_letter, here)
    warnings = _warnings(connection, texts, schema)
    looks = (unmarked,) if "claim" in custom else (unserved, unmarked)
    warnings += [line for look in looks if (line := look(connection, table, texts))]
    return SqliteLook(schema, [f"{here}: {line}" for line in warnings])


def view(connection: sqlite3.Connection, table: str) -> str:
    """What has this name, where it is a view's."""
    schema, name = where(table)
    text = "SELECT 1 FROM sqlite_master WHERE type = 'view' AND lower(name) = lower(?)"
    found = schema.lower() == "main" and connection.execute(text, (name,)).fetchone()
    return "; the name is a view's, and a queue must be a table" if found else ""


def check_replaces(schema: SqliteSchema, here: str) -> None:
    """Raise `LinkRefused` where a write may delete another row without a word."""
    if schema.replaces:
        raise LinkRefused(
            f"{here}: it has triggers, and a constraint that says ON CONFLICT REPLACE, so that a write may delete "
            "another row without a word; declare the constraint without that"
        )


def check_times(table: Table[Any], schema: SqliteSchema, here: str) -> None:
    """Raise `LinkRefused` for a column that holds no time as its role needs it."""
    for role in ("locked_until", "retry_after", "processed_at"):
        name: str | None = getattr(table, role)
        if name is None:
            continue
        column = schema[name]
        what = f"{here}: column {name!r} ({role})"
        if column.type not in ENCODERS:
            raise LinkRefused(
                f"{what} is declared {column.type or 'without a type'}; a time is REAL (Unix seconds), INTEGER (Unix "
                f"microseconds) or TEXT (ISO 8601 in UTC): declare it {_suggestion(role, 'REAL')}"
            )
        if role != "retry_after" and not column.nullable:
            free = "a free row" if role == "locked_until" else "an unfinished row"
            raise LinkRefused(f"{what} is NOT NULL, but NULL is what {free} holds")
        if column.default is None or column.computed:
            continue
        moment = now()
        value = evaluate(column.type, column.default)
        if value is None:
            continue
        if role == "processed_at":
            raise LinkRefused(f"{what} has the default {column.default}, so every row is finished when it is inserted")
        if not is_default(column.type, value, moment):
            raise LinkRefused(
                f"{what} is {column.type}, which holds {FORMS[column.type]}, but its default {column.default} gives "
                f"{value!r}; declare it {_suggestion(role, column.type)}"
            )


def _suggestion(role: str, kind: str) -> str:
    return f"{kind} NOT NULL DEFAULT {DEFAULTS[kind]}" if role == "retry_after" else kind


def _check_attempt(table: Table[Any], schema: SqliteSchema, here: str) -> None:
    if table.attempt is None:
        return
    column = schema[table.attempt]
    what = f"{here}: column {table.attempt!r} (attempt)"
    if "INT" not in column.type:
        raise LinkRefused(f"{what} is declared {column.type or 'without a type'}; it counts, so declare it INTEGER")
    if column.default is not None and (value := evaluate(column.type, column.default)) is not None and value != 1:
        raise LinkRefused(
            f"{what} has the default {column.default}, but the first delivery is attempt 1, so a cap would come late; "
            "declare it INTEGER NOT NULL DEFAULT 1"
        )


def _collation(connection: sqlite3.Connection, table: Table[Any]) -> str | None:
    """What the id is compared by: no pragma tells, the program of a comparison does; `+` keeps indexes out of it."""
    text = f"SELECT 1 FROM {quote_table(table.name)} WHERE +{quote(table.id)} = :id"  # noqa: S608
    names = [row[5] for row in explain(connection, text, {"id": 0}) if row[1] in {"Eq", "Ne"} and row[5]]
    return names[0].rsplit("-", 1)[0].strip("()").upper() if names else None  # NOCASE-8, before 3.26 (NOCASE)


def check_key(connection: sqlite3.Connection, table: Table[Any], schema: SqliteSchema, here: str) -> None:
    """Raise `LinkRefused` unless the id is a key of its own, as the id itself is compared, and never NULL for long."""
    column = schema[table.id]
    if column.rowid:
        return
    _check_unique(connection, table, here)
    what = f"{here}: column {table.id!r} (id)"
    if schema.fills(table.id):
        return
    if table.id in table.generated or (column.nullable and not column.textual):
        lost = "has the id NULL and is never delivered" if column.nullable else "is refused"
        raise LinkRefused(
            f"{what} is filled by nothing, so a row that is inserted without it {lost}; declare it INTEGER PRIMARY KEY "
            "AUTOINCREMENT (neither DESC, nor INT, nor WITHOUT ROWID), or NOT NULL where whoever inserts gives it, and "
            "leave it out of generated=(…) then"
        )


def _check_unique(connection: sqlite3.Connection, table: Table[Any], here: str) -> None:
    within, name = where(table.name)
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
            f"{here}: column {table.id!r} (id) is compared by {collation}, but it is unique by {others[0]} alone, so "
            f"a settlement could touch a second row; make its unique index COLLATE {collation}, or declare the column "
            f"COLLATE {others[0]}"
        )
    raise LinkRefused(
        f"{here}: column {table.id!r} (id) is no key of its own, so a settlement could touch a second row; "
        "declare it PRIMARY KEY or UNIQUE"
    )


_BOUND = ("id", "token", "attempt", "now", "due", "finished", "expiry", "group", "room", "to")
_EVENTS = ("claim", "read", "leased", "take", "finish", "release", "give_back", "delay", "regroup", "extend", "delete")


def _prepare(connection: sqlite3.Connection, texts: SqliteStatements, here: str) -> None:
    """Prepare every statement once."""
    values: dict[str, int] = dict.fromkeys(_BOUND, 0)
    for event in _EVENTS:
        if text := getattr(texts, event):
            _plan(connection, text, values, f"{here}: the statement {event!r}")


def _plan(connection: sqlite3.Connection, text: str, values: Mapping[str, int], what: str) -> None:
    try:
        explain(connection, text, values)
    except sqlite3.Error as error:
        raise LinkRefused(f"{what} cannot be prepared: {error}") from error


def _check_dead_letter(
    connection: sqlite3.Connection, texts: SqliteStatements, schema: SqliteSchema, dead_letter: str, here: str
) -> None:
    """Can a row move there? Asked at start-up, not by the first message that is at its cap."""
    table = texts.table
    here = f"{here}: dead-letter table {dead_letter!r}"
    dead = read_schema(connection, dead_letter)
    if dead is None:
        raise LinkRefused(
            f"{here}: there is no such table; create it with the columns of {table.name!r}"
            f"{view(connection, dead_letter)}"
        )
    check_replaces(dead, here)
    for column in schema.stored:
        if column not in dead or dead[column].computed:
            raise LinkRefused(
                f"{here}: there is no column {column!r} to write to, and a row moves there whole; add it, as in "
                f"{table.name!r}"
            )
    moved = {column.lower() for column in schema.stored}
    for column in dead.stored:
        if column.lower() not in moved and dead[column].required:
            raise LinkRefused(
                f"{here}: column {column!r} is NOT NULL without a default, and {table.name!r} has no such column, so "
                "no row could move there; give it a default"
            )
    lock = table.locked_until
    if lock is not None and not dead[lock].nullable:
        raise LinkRefused(
            f"{here}: column {lock!r} (locked_until) is NOT NULL, but a row moves there with an empty lease"
        )
    try:
        explain(connection, texts.copy(dead_letter, schema.stored), dict.fromkeys(_BOUND, 0))
    except sqlite3.Error as error:
        raise LinkRefused(f"{here}: the move cannot be prepared: {error}") from error


def _warnings(connection: sqlite3.Connection, texts: SqliteStatements, schema: SqliteSchema) -> list[str]:
    found: list[str] = []
    table = texts.table
    if table.priority is not None and schema[table.priority].nullable:
        found.append(
            f"column {table.priority!r} (priority) may be NULL, so it does not order the queue; declare it INTEGER NOT "
            "NULL DEFAULT 0"
        )
    if table.retry_after is not None and schema[table.retry_after].nullable:
        due = schema[table.retry_after]
        found.append(
            f"column {table.retry_after!r} (retry_after) may be NULL, so it does not order the queue, and no index on "
            f"it helps a claim; declare it {_suggestion('retry_after', due.type)}"
        )
    if schema[table.id].nullable:
        text = f"SELECT 1 FROM {quote_table(table.name)} WHERE {quote(table.id)} IS NULL LIMIT 1"  # noqa: S608
        if connection.execute(text).fetchone():
            found.append(f"there are rows whose {table.id!r} (id) is NULL; they are never delivered, give them an id")
    return found


def odd_times(connection: sqlite3.Connection, table: Table[Any], schema: SqliteSchema) -> dict[str, str]:
    """One line for each column of a time, by its name, in which one of the newest rows holds something else."""
    found: dict[str, str] = {}
    open_ = quote(table.processed_at) if table.processed_at else "NULL"
    newest = "" if "_rowid_" in schema else "ORDER BY _rowid_ DESC"
    for role in ("retry_after", "locked_until"):
        column: str | None = getattr(table, role)
        if column is None:
            continue
        kind = schema[column].type
        rows = f"SELECT {quote(column)} AS v, {open_} AS p FROM {quote_table(table.name)}"  # noqa: S608
        for order in (newest, ""):
            text = f"SELECT v FROM ({rows} {order} LIMIT {_NEWEST}) WHERE p IS NULL AND {strange(kind, 'v')} LIMIT 1"  # noqa: S608
            try:
                value = connection.execute(text).fetchone()
            except sqlite3.OperationalError:  # a table WITHOUT ROWID
                continue
            if value:
                found[column] = (
                    f"column {column!r} ({role}) is {kind}, which holds {FORMS[kind]}, but a row has {value[0]!r}: it "
                    "comes at another time than was meant, or never; whoever writes it must write the other form"
                )
            break
    return found
