"""`links.sql.insert` on MySQL and MariaDB: one statement, right in every time zone and SQL mode of a session."""

# ruff: noqa: S608 -- identifiers are quoted, values are bound

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import pymysql
from pymysql.cursors import Cursor

from links.errors import PublishNotAccepted
from links.sql.inserting import Binding, Style, Written
from links.sql.mysql.codes import TAKEN, code_of
from links.sql.mysql.ddl import plain
from links.sql.mysql.statements import micros
from links.sql.table import split

__all__ = ["check_strict", "insert", "statement"]


_CUTS: Final = (
    "INSTR(@@sql_mode, 'TIME_TRUNCATE_FRACTIONAL') > 0 "
    "OR (INSTR(VERSION(), 'MariaDB') > 0 AND INSTR(@@sql_mode, 'TIME_ROUND_FRACTIONAL') = 0)"
)
"""Does this session cut the decimals of a time off?"""


def statement(what: Written, style: Style) -> tuple[str, dict[str, Any]]:
    """The INSERT and its parameters. Pure.

    A DATETIME holds UTC, a TIMESTAMP an instant in the session's own zone: so the statement looks which one it is.
    """
    table, bind = what.table, Binding(style)
    name = ".".join(bind.name(plain(part)) for part in split(table.name))
    columns = {bind.name(plain(column)): bind.value(value) for column, value in what.columns.items()}
    if what.due is not None and table.retry_after:
        columns[bind.name(plain(table.retry_after))] = _due(what, bind)
    return f"INSERT INTO {name} ({', '.join(columns)}) VALUES ({', '.join(columns.values())})", bind.values


def _due(what: Written, bind: Binding) -> str:
    if isinstance(what.due, datetime):
        instant = bind.value(what.due.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds"))
        in_utc = f"CAST({instant} AS DATETIME(6))"
        here = f"CONVERT_TZ({in_utc}, '+00:00', @@session.time_zone)"
    else:
        later = f"INTERVAL {bind.value(micros(what.due or 0.0))} MICROSECOND"
        in_utc, here = f"UTC_TIMESTAMP(6) + {later}", f"NOW(6) + {later}"
    *schema, table = split(what.table.name)
    where = f"TABLE_SCHEMA = {bind.value(schema[0]) if schema else 'DATABASE()'} AND TABLE_NAME = {bind.value(table)}"
    kind = f"FROM information_schema.COLUMNS WHERE {where} AND COLUMN_NAME = {bind.value(what.table.retry_after)}"
    # a column with fewer decimals rounds to the nearest, or cuts; and a row is never due early
    up = f"(SELECT CAST(POW(10, 6 - DATETIME_PRECISION) / IF({_CUTS}, 1, 2) AS SIGNED) - 1 {kind})"
    return (
        f"CASE (SELECT LOWER(DATA_TYPE) {kind}) WHEN 'datetime' THEN {in_utc} + INTERVAL {up} MICROSECOND "
        f"WHEN 'timestamp' THEN {here} + INTERVAL {up} MICROSECOND ELSE 'no time' END"
    )


def insert(connection: pymysql.Connection[Any], what: Written) -> bool:
    """Insert by this connection, whatever cursors it makes."""
    with connection.cursor(Cursor) as cursor:
        check_strict(cursor, what.table.name)
        try:
            cursor.execute(*statement(what, "pyformat"))
        except pymysql.MySQLError as error:
            if not what.once or code_of(error) not in TAKEN or not _is_there(cursor, what):
                raise
            return False
    return True


def check_strict(cursor: Any, table: str) -> None:
    """Raise `PublishNotAccepted` where a value that does not fit would be cut without a word."""
    cursor.execute("SELECT @@sql_mode")
    (mode,) = cursor.fetchone() or ("",)
    if "STRICT_" not in mode:
        raise PublishNotAccepted(
            f"table {table!r}: this session's sql_mode is not strict, so a value that does not fit would be cut "
            "without a word; add STRICT_TRANS_TABLES to it"
        )


def _is_there(cursor: Any, what: Written) -> bool:
    bind = Binding("pyformat")
    name = ".".join(bind.name(plain(part)) for part in split(what.table.name))
    key = bind.value(what.columns[what.table.id])
    cursor.execute(f"SELECT 1 FROM {name} WHERE {bind.name(plain(what.table.id))} = {key}", bind.values)
    return cursor.fetchone() is not None
