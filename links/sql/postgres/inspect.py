"""May a `Table` be a queue in this database? What must not be is refused, what is only slow or odd is told.

Asked when a link attaches, and again when the table's columns have changed under it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import psycopg

from links.errors import LinkRefused
from links.sql.custom import for_psycopg
from links.sql.postgres.codes import is_weather
from links.sql.postgres.held_statements import AdvisoryStatements, RowLockStatements
from links.sql.postgres.plans import unmarked, unserved
from links.sql.postgres.schema import LONGEST, TIME, PostgresSchema, kind_of, read_schema
from links.sql.postgres.statements import LeaseStatements, Rows
from links.sql.postgres.trio_connection import TrioConnection
from links.sql.row_class import lacking
from links.sql.table import Table
from settlement.sql import AdvisoryLock, ClaimForm, Lease, RowLock

__all__ = ["PostgresLook", "check_key", "check_message", "check_times", "inspect", "instead"]

_COUNTING = ("int2", "int4", "int8")
_ONE_SPELLING = ("name", "text", "varchar")
"""Types that hold two texts as the same only where they are the same."""
_DUE = f"{TIME} NOT NULL DEFAULT now()"
_UNLOGGED = "it is UNLOGGED, so a crash of the server empties it; say ALTER TABLE … SET LOGGED"


@attrs.frozen
class PostgresLook:
    """What was found.

    Attributes:
        schema: The table's columns.
        texts: The statements for it.
        warnings: What is no reason to refuse: one line each.
    """

    schema: PostgresSchema
    texts: Rows
    warnings: Sequence[str]


async def inspect(
    connection: TrioConnection,
    table: Table[Any],
    group: str | None,
    claim: ClaimForm,
    *,
    subscription: str,
    dead_letter: str | None = None,
    custom: Mapping[str, str] = MappingProxyType({}),
) -> PostgresLook:
    """A look at a queue table, and at the table `dead_letter`, where rows shall move.

    Raises `LinkRefused` naming subscription, table, column and the way out, and `psycopg.Error`.
    """
    here = f"subscription {subscription!r}, table {table.name!r}"
    for name in (*table.name.split("."), *table.roles.values(), *(dead_letter or "").split(".")):
        if len(name.encode()) > LONGEST:
            raise LinkRefused(f"{here}: PostgreSQL cuts {name!r} off at {LONGEST} bytes; give it a shorter name")
    schema = await read_schema(connection, table.name)
    if schema is None:
        raise LinkRefused(
            f"{here}: there is no such table{await instead(connection, table.name)}; create it, the library creates "
            "none"
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
    check_times(table, schema, here)
    check_message(table, schema, here)
    _check_attempt(table, schema, here)
    await _check_defaults(connection, table, schema, here)
    await check_key(connection, table, schema, here)
    if isinstance(claim, AdvisoryLock):
        for column in claim.columns:
            if column not in schema:
                raise LinkRefused(
                    f"{here}: there is no column {column!r} for the key {claim.key!r}; it has {', '.join(schema.names)}"
                )
    texts = _statements(table, schema, claim)
    await _prepare(connection, texts, here)
    for event, text in custom.items():
        if not text.lower().startswith("call"):  # a procedure's, of which there is no plan
            await _explain(connection, texts, for_psycopg(text), here=here, what=f"custom[{event!r}]")
    warnings = _warnings(table, schema)
    if dead_letter is not None:
        warnings += await _check_dead_letter(connection, table, (schema, texts), dead_letter, here)
    for line in (
        None if "claim" in custom else await unserved(connection, table, schema, texts, {"group": group}),
        await unmarked(connection, table, schema),
    ):
        if line is not None:
            warnings.append(line)
    return PostgresLook(schema, texts, [f"{here}: {line}" for line in warnings])


async def instead(connection: TrioConnection, name: str) -> str:
    """What has this name, where it is no table."""
    kind = await kind_of(connection, name)
    return f" (the name is that of {kind})" if kind else ""


def _statements(table: Table[Any], schema: PostgresSchema, claim: ClaimForm) -> Rows:
    match claim:
        case Lease():
            return LeaseStatements(table, schema)
        case AdvisoryLock():
            return AdvisoryStatements(table, schema, claim)
        case RowLock():
            return RowLockStatements(table, schema)


def check_times(table: Table[Any], schema: PostgresSchema, here: str) -> None:
    """Raise `LinkRefused` for a column that holds no time as its role needs it."""
    for role in ("locked_until", "retry_after", "processed_at"):
        name: str | None = getattr(table, role)
        if name is None:
            continue
        column = schema[name]
        what = f"{here}: column {name!r} ({role})"
        if column.type != TIME:
            declare = _DUE if role == "retry_after" else TIME
            raise LinkRefused(
                f"{what} is {column.type}; a time is {TIME}, so that it means the same in every session: "
                f"declare it {declare}"
            )
        if role == "locked_until" and column.modifier not in (-1, 6):
            raise LinkRefused(
                f"{what} is {TIME}({column.modifier}), without microseconds, so two leases could not be told from each "
                f"other; declare it {TIME}"
            )
        if role != "retry_after" and not column.nullable:
            free = "a free row" if role == "locked_until" else "an unfinished row"
            raise LinkRefused(f"{what} is NOT NULL, but NULL is what {free} holds")
        if role == "processed_at" and column.default is not None:
            raise LinkRefused(f"{what} has the default {column.default}, so every row is finished when it is inserted")
        if role == "locked_until" and column.default is not None:
            raise LinkRefused(f"{what} has the default {column.default}, but NULL is what a free row holds")
        if column.computed:
            raise LinkRefused(f"{what} is GENERATED ALWAYS AS an expression, so no claim can write it")


def check_message(table: Table[Any], schema: PostgresSchema, here: str) -> None:
    """Raise `LinkRefused` for a payload, headers or a group in a column of another type."""
    for role, kinds in (("payload", "bytea, text or jsonb"), ("headers", "jsonb or text")):
        name: str | None = getattr(table, role)
        if name is None:
            continue
        column = schema[name]
        if not column.textual and not (role == "payload" and column.type == "bytea"):
            raise LinkRefused(f"{here}: column {name!r} ({role}) is {column.type}; declare it {kinds}")
    if table.group is not None and not schema[table.group].textual:
        raise LinkRefused(
            f"{here}: column {table.group!r} (group) is {schema[table.group].type}; a group's name is a text: declare "
            "it text NOT NULL"
        )
    if table.fifo and schema[table.group or ""].type not in _ONE_SPELLING:
        raise LinkRefused(
            f"{here}: column {table.group!r} (group) is {schema[table.group or ''].type}, which takes several "
            "spellings for one, and a FIFO group has one name for everybody; declare it text NOT NULL"
        )


def _check_attempt(table: Table[Any], schema: PostgresSchema, here: str) -> None:
    if table.attempt is not None and schema[table.attempt].type not in _COUNTING:
        raise LinkRefused(
            f"{here}: column {table.attempt!r} (attempt) is {schema[table.attempt].type}; it counts, so declare it "
            "integer NOT NULL DEFAULT 1"
        )


async def _check_defaults(connection: TrioConnection, table: Table[Any], schema: PostgresSchema, here: str) -> None:
    """The default of attempt is asked of the database itself, where it is an expression without sub-queries."""
    if table.attempt is None or (default := schema[table.attempt].default) is None:
        return
    try:
        found = await (await connection.execute(f"SELECT {default.replace('%', '%%')}".encode())).fetchone()
    except psycopg.Error:
        return  # such as a sequence without the right to it: an insert will tell
    if found is not None and found[0] != 1:
        raise LinkRefused(
            f"{here}: column {table.attempt!r} (attempt) has the default {default}, but the first delivery is attempt "
            "1, so a cap would come late; declare it integer NOT NULL DEFAULT 1"
        )


_KEYS = """
SELECT 1 FROM pg_catalog.pg_index i JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
WHERE i.indrelid = %(oid)s AND i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indnkeyatts = 1
  AND a.attname = %(name)s LIMIT 1"""


async def check_key(connection: TrioConnection, table: Table[Any], schema: PostgresSchema, here: str) -> None:
    """Raise `LinkRefused` unless the id is a key of its own, and one that can be told from another."""
    column = schema[table.id]
    what = f"{here}: column {table.id!r} (id)"
    if column.category in {"A", "C"} or column.type in {"json", "jsonb"}:
        raise LinkRefused(f"{what} is {column.type}; an id is one plain value, such as bigint, uuid or text")
    if schema.children:
        raise LinkRefused(
            f"{what} is no key over the tables that INHERIT from this one, so a settlement could touch a second row; "
            "use partitions, or a table without children"
        )
    if column.textual and connection.info.parameter_status("server_encoding") == "SQL_ASCII":
        raise LinkRefused(
            f"{what} is {column.type} in a database whose encoding is SQL_ASCII: one that is no UTF-8 could not be "
            "read, and no row behind it; declare it bigint or uuid"
        )
    values = {"oid": schema.oid, "name": table.id}
    if await (await connection.execute(_KEYS, values)).fetchone() is None:
        raise LinkRefused(
            f"{what} is no key of its own, so a settlement could touch a second row; declare it PRIMARY KEY or UNIQUE"
        )
    if column.nullable:
        raise LinkRefused(f"{what} may be NULL, and such a row could never be settled; declare it NOT NULL")
    if table.id in table.generated and not schema.fills(table.id):
        raise LinkRefused(
            f"{what} is filled by nothing, so a row that is inserted without it is refused; declare it bigint "
            "GENERATED BY DEFAULT AS IDENTITY, or leave it out of generated=(…)"
        )


_BOUND: dict[str, Any] = {
    "ids": [], "tokens": [], "attempts": [], "over": [], "group": None, "to": None, "lease": 1.0,
    "room": 1, "wanted": 1, "id": None, "held": [], "until": None, "key": None,
}  # fmt: skip


async def _prepare(connection: TrioConnection, texts: Rows, here: str) -> None:
    """Have every statement planned once: what is missing, and what this user may not do, is told now."""
    for event in texts.events:
        if text := getattr(texts, event):
            await _explain(connection, texts, text, here=here, what=f"the statement {event!r}")


async def _explain(connection: TrioConnection, texts: Rows, text: str, *, here: str, what: str) -> None:
    bound = _BOUND | {"seconds": texts.delays, "token": None, "attempt": None, "delay": None}
    try:
        await connection.execute(f"EXPLAIN {text}".encode(), bound, prepare=False)
    except psycopg.Error as error:
        if connection.closed or is_weather(error):
            raise
        way_out = ""
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            way_out = "; grant this user SELECT, INSERT, UPDATE and DELETE on its tables"
        raise LinkRefused(f"{here}: {what} cannot be carried out: {_first_line(error)}{way_out}") from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


async def _check_dead_letter(
    connection: TrioConnection,
    table: Table[Any],
    known: tuple[PostgresSchema, Rows],
    dead_letter: str,
    here: str,
) -> list[str]:
    """Can a row move there? Asked at start-up, not by the first message at its cap. One line for each change."""
    schema, texts = known
    here = f"{here}: dead-letter table {dead_letter!r}"
    dead = await read_schema(connection, dead_letter)
    if dead is None:
        raise LinkRefused(
            f"{here}: there is no such table{await instead(connection, dead_letter)}; create it with the columns of "
            f"{table.name!r}"
        )
    for column in schema.stored:
        if column not in dead or dead[column].computed:
            raise LinkRefused(
                f"{here}: there is no column {column!r} to write to, and a row moves there whole; add it, as in "
                f"{table.name!r}"
            )
    for column in dead.stored:
        if column not in schema.stored and dead[column].required:
            raise LinkRefused(
                f"{here}: column {column!r} is NOT NULL without a default, and {table.name!r} has no such column, so "
                "no row could move there; give it a default"
            )
    lock = table.locked_until
    if lock is not None and not dead[lock].nullable:
        raise LinkRefused(
            f"{here}: column {lock!r} (locked_until) is NOT NULL, but a row moves there with an empty lease"
        )
    await _explain(connection, texts, texts.move(dead_letter, schema.stored), here=here, what="the move")
    unlogged = [f"dead-letter table {dead_letter!r}: {_UNLOGGED}"] if dead.unlogged else []
    return unlogged + [
        f"dead-letter table {dead_letter!r}: column {name!r} is another type than in {table.name!r} "
        f"({dead[name].type}, {schema[name].type}), so a row that moves there may change or be refused; declare both "
        "alike"
        for name in schema.stored
        if name != table.locked_until
        and (dead[name].array, dead[name].modifier) != (schema[name].array, schema[name].modifier)
    ]


def _warnings(table: Table[Any], schema: PostgresSchema) -> list[str]:
    found: list[str] = [_UNLOGGED] if schema.unlogged else []
    if table.priority is not None and schema[table.priority].nullable:
        found.append(
            f"column {table.priority!r} (priority) may be NULL, so it does not order the queue; declare it integer NOT "
            "NULL DEFAULT 0"
        )
    if table.retry_after is not None and schema[table.retry_after].nullable:
        found.append(
            f"column {table.retry_after!r} (retry_after) may be NULL, so it does not order the queue, and no index on "
            f"it helps a claim; declare it {_DUE}"
        )
    return found
