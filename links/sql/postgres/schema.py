"""What PostgreSQL says of a table: its columns, and whether they are still the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from links.sql.postgres.trio_connection import TrioConnection
from links.sql.table import split

__all__ = [
    "LONGEST",
    "TIME",
    "PostgresColumn",
    "PostgresSchema",
    "fingerprint",
    "kind_of",
    "quote",
    "quote_table",
    "read_schema",
]

LONGEST = 63
"""Bytes of an identifier; PostgreSQL cuts a longer one off without a word."""
TIME = "timestamptz"

_TEXTS = frozenset({"bpchar", "citext", "name", "text", "varchar"})
_JSON = frozenset({"json", "jsonb"})
_KEPT = frozenset({"bpchar", "bytea", "int2", "int4", "int8", "text", "uuid", "varchar"})
"""As keys these are values of Python's and come back as they were; of another type it is the text that does."""


def quote(name: str) -> str:
    """The identifier in double quotes, as psycopg takes it: quotes and percent signs in it are doubled."""
    return '"' + name.replace('"', '""').replace("%", "%%") + '"'


def quote_table(name: str) -> str:
    """The quoted `table`, or `schema.table`."""
    return ".".join(map(quote, split(name)))


@attrs.frozen
class PostgresColumn:
    """One column, as `pg_attribute` tells it (https://www.postgresql.org/docs/current/catalog-pg-attribute.html).

    Attributes:
        name: As it is, case and all.
        type: The type's own name, such as int8 or timestamptz; of a domain, that of its base type.
        array: The type, quoted with its schema, as the element of an array in a cast.
        category: The type's category, such as A for arrays.
        default: The expression that the database evaluates where an insert leaves it out, as text; None: NULL. It
            may be that of a domain.
        nullable: May it be NULL?
        computed: GENERATED ALWAYS AS an expression: it cannot be inserted.
        filled: Has it a default, or is it an identity? Then it may be left out of an insert.
        modifier: What its type is declared with, such as the digits of a timestamptz(3); -1: nothing.
    """

    name: str
    type: str
    array: str
    category: str
    default: str | None
    nullable: bool
    computed: bool
    filled: bool
    modifier: int

    @property
    def required(self) -> bool:
        """NOT NULL, and nothing fills it."""
        return not self.nullable and not self.filled and not self.computed

    @property
    def textual(self) -> bool:
        """Does it hold texts, JSON too?"""
        return self.type in _TEXTS or self.type in _JSON


@attrs.frozen
class PostgresSchema:
    """The columns of one table.

    Attributes:
        oid: The table's number, in `pg_class`.
        columns: Each by its name, in the table's order.
        triggers: Are there triggers or rules on the table? Then something else may fill a column.
        echoes: Are there triggers that may write to a row behind a claim's own statement?
        children: Are there tables that inherit from it? The rows of these are rows of it. A partition is no such one.
        unlogged: Does a crash of the server empty it?
    """

    oid: int
    columns: Mapping[str, PostgresColumn]
    triggers: bool
    echoes: bool
    children: bool
    unlogged: bool

    def __getitem__(self, name: str) -> PostgresColumn:
        return self.columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    @property
    def names(self) -> Sequence[str]:
        """All columns, in the table's order."""
        return list(self.columns)

    @property
    def stored(self) -> Sequence[str]:
        """The columns that can be inserted, in the table's order."""
        return [column.name for column in self.columns.values() if not column.computed]

    def fills(self, name: str) -> bool:
        """Is there something that gives this column a value where an insert leaves it out?"""
        column = self[name]
        return column.filled or column.computed or self.triggers

    def key(self, name: str, alias: str) -> str:
        """The key as a value that is bound again, in a list with others: dates beyond Python's are not of one type."""
        column = f"{alias}.{quote(name)}"
        return column if self[name].type in _KEPT else f"{column}::text"

    def read(self, name: str, alias: str) -> str:
        """The column as bytes or text, whatever it holds: JSON as it is written, not as Python values."""
        column = f"{alias}.{quote(name)}"
        return f"{column}::text" if self[name].type in _JSON else column


_COLUMNS = """
SELECT a.attname, COALESCE(b.typname, t.typname), n.nspname, t.typname, t.typcategory::text,
       CASE WHEN a.attgenerated = '' THEN COALESCE(pg_get_expr(d.adbin, d.adrelid), t.typdefault) END,
       NOT (a.attnotnull OR t.typnotnull), a.attgenerated <> '',
       a.attidentity <> '' OR d.adbin IS NOT NULL OR t.typdefault IS NOT NULL,
       CASE WHEN t.typtype = 'd' THEN t.typtypmod ELSE a.atttypmod END
FROM pg_catalog.pg_attribute a
JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace
LEFT JOIN pg_catalog.pg_type b ON b.oid = NULLIF(t.typbasetype, 0)
LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = %(oid)s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum"""

_TABLE = """
SELECT c.oid, EXISTS (SELECT FROM pg_catalog.pg_trigger t WHERE t.tgrelid = c.oid AND NOT t.tgisinternal)
    OR c.relhasrules, EXISTS (
        SELECT FROM pg_catalog.pg_trigger t WHERE t.tgrelid = c.oid AND NOT t.tgisinternal AND t.tgtype & 18 = 16
    ), c.relkind = 'r' AND EXISTS (SELECT FROM pg_catalog.pg_inherits i WHERE i.inhparent = c.oid),
    c.relpersistence = 'u'
FROM pg_catalog.pg_class c WHERE c.oid = to_regclass(%(name)s) AND c.relkind IN ('r', 'p')"""

# tgtype: 2 is BEFORE, 16 is UPDATE
_KIND = "SELECT relkind::text FROM pg_catalog.pg_class WHERE oid = to_regclass(%(name)s)"
_KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table", "S": "a sequence", "c": "a type"}

_FINGERPRINT = """
SELECT c.oid, c.relkind, c.relhasrules, (
    SELECT string_agg(concat_ws('|', a.attnum, a.attname, a.atttypid, a.atttypmod, a.attnotnull, a.attidentity,
        a.attgenerated, d.adbin), ',' ORDER BY a.attnum)
    FROM pg_catalog.pg_attribute a
    LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
), (SELECT string_agg(i.indexrelid::text, ',' ORDER BY i.indexrelid) FROM pg_catalog.pg_index i
    WHERE i.indrelid = c.oid AND i.indisvalid
), (SELECT count(*) FROM pg_catalog.pg_trigger t WHERE t.tgrelid = c.oid AND NOT t.tgisinternal
), (SELECT count(*) FROM pg_catalog.pg_inherits i WHERE i.inhparent = c.oid)
FROM unnest(%(names)s::text[]) WITH ORDINALITY n(name, place)
LEFT JOIN pg_catalog.pg_class c ON c.oid = to_regclass(n.name) ORDER BY n.place"""


def _named(table: str) -> str:
    return ".".join('"' + part.replace('"', '""') + '"' for part in split(table))


async def fingerprint(connection: TrioConnection, *tables: str) -> list[tuple[Any, ...]]:
    """Another one, when these tables' columns, indexes or triggers are others. Raises `psycopg.Error`."""
    values = {"names": [_named(table) for table in tables]}
    return await (await connection.execute(_FINGERPRINT, values)).fetchall()


async def kind_of(connection: TrioConnection, table: str) -> str | None:
    """What this name is, where it is no table; None: nothing. Raises `psycopg.Error`."""
    found = await (await connection.execute(_KIND, {"name": _named(table)})).fetchone()
    return None if found is None else _KINDS.get(found[0], "something else")


async def read_schema(connection: TrioConnection, table: str) -> PostgresSchema | None:
    """The columns of this table; None where there is no such table (a view is none). Raises `psycopg.Error`."""
    if any(len(part.encode()) > LONGEST for part in split(table)):
        return None
    found = await (await connection.execute(_TABLE, {"name": _named(table)})).fetchone()
    if found is None:
        return None
    oid, triggers, echoes, children, unlogged = found
    columns: dict[str, PostgresColumn] = {}
    for row in await (await connection.execute(_COLUMNS, {"oid": oid})).fetchall():
        name, base, within, kind, category, default, nullable, computed, filled, modifier = row
        columns[name] = PostgresColumn(
            name=name,
            type=base,
            array=f"{quote(within)}.{quote(kind)}",
            category=category,
            default=default,
            nullable=nullable,
            computed=computed,
            filled=filled,
            modifier=modifier,
        )
    return PostgresSchema(oid, columns, triggers, echoes, children, unlogged)
