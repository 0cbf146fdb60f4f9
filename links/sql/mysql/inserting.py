"""`links.sql.insert` on MySQL and MariaDB: one statement, right in every time zone and SQL mode of a session."""

# ruff: noqa: S608 -- identifiers are quoted, values are bound

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import pymysql
from pymysql.cursors import Cursor

from links.errors import PublishNotAccepted
from links.sql.inserting import Binding, Style, Written
from links.sql.mysql.codes import TAKEN, code_of
from links.sql.mysql.ddl import plain
from links.sql.mysql.statements import in_utc, micros
from links.sql.table import split

__all__ = ["check_strict", "insert", "statement"]


_CUTS: Final = (
    "INSTR(@@sql_mode, 'TIME_TRUNCATE_FRACTIONAL') > 0 "
    "OR (INSTR(VERSION(), 'MariaDB') > 0 AND INSTR(@@sql_mode, 'TIME_ROUND_FRACTIONAL') = 0)"
)
"""Does this session cut the decimals of a time off?"""
_ZONE: Final = "@@session.time_zone"
_FIRST: Final = "TIMESTAMP'1970-01-01 00:00:01'"
"""Of a TIMESTAMP, in UTC."""


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
        try:
            instant = in_utc(what.due)
        except OverflowError:
            raise PublishNotAccepted(
                f"table {what.table.name!r}: no time column holds {what.due}, which in UTC is behind the year 9999"
            ) from None
        moment = f"CAST({bind.value(instant.isoformat(' ', 'microseconds'))} AS DATETIME(6))"
    else:
        moment = f"UTC_TIMESTAMP(6) + INTERVAL {bind.value(micros(what.due or 0.0))} MICROSECOND"
    *schema, table = split(what.table.name)
    where = f"TABLE_SCHEMA = {bind.value(schema[0]) if schema else 'DATABASE()'} AND TABLE_NAME = {bind.value(table)}"
    kind = f"FROM information_schema.COLUMNS WHERE {where} AND COLUMN_NAME = {bind.value(what.table.retry_after)}"
    # a column with fewer decimals rounds to the nearest, or cuts; and a row is never due early
    up = f"(SELECT GREATEST(CAST(POW(10, 6 - DATETIME_PRECISION) / IF({_CUTS}, 1, 2) AS SIGNED) - 1, 0) {kind})"
    due = f"{moment} + INTERVAL {up} MICROSECOND"
    # no time at all is an error; a NULL would be due at once
    return (
        f"COALESCE(CASE (SELECT LOWER(DATA_TYPE) {kind}) WHEN 'datetime' THEN {due} "
        f"WHEN 'timestamp' THEN {_here(due)} END, 'no time')"
    )


def _here(moment: str) -> str:
    """A time in UTC as a TIMESTAMP takes it: in the session's own zone; before its first second it is that.

    It is reckoned in UTC, for a day of the zone may have 23 hours. The hour that a clock passes twice means the first
    to a server, or the last: what would be read as earlier is told later by as much.
    """
    due = f"GREATEST({moment}, {_FIRST})"
    read_as = f"CONVERT_TZ(CONVERT_TZ({due}, '+00:00', {_ZONE}), {_ZONE}, '+00:00')"
    early = f"GREATEST(TIMESTAMPDIFF(MICROSECOND, {read_as}, {due}), 0)"
    return f"CONVERT_TZ({due} + INTERVAL {early} MICROSECOND, '+00:00', {_ZONE})"


def insert(connection: pymysql.Connection[Any], what: Written) -> bool:
    """Insert by this connection, whatever cursors it makes."""
    with connection.cursor(Cursor) as cursor:
        check_strict(cursor, what.table.name)
        if what.columns.get(what.table.id) == 0:
            _check_zero(cursor, what.table.name)
        try:
            cursor.execute(*statement(what, "pyformat"))
        except pymysql.MySQLError as error:
            if not what.once or code_of(error) not in TAKEN or not _is_there(cursor, what):
                raise
            return False
    return True


def check_strict(cursor: Any, table: str) -> None:
    """Raise `PublishNotAccepted` where a value that does not fit would be cut without a word."""
    if not _has_mode(cursor, "STRICT_"):
        raise PublishNotAccepted(
            f"table {table!r}: this session's sql_mode is not strict, so a value that does not fit would be cut "
            "without a word; add STRICT_TRANS_TABLES to it"
        )


def _check_zero(cursor: Any, table: str) -> None:
    """Raise `PublishNotAccepted` where an id of 0 would become the next number, another one each time."""
    if not _has_mode(cursor, "NO_AUTO_VALUE_ON_ZERO"):
        raise PublishNotAccepted(
            f"table {table!r}: in this session an id of 0 means the next number; add NO_AUTO_VALUE_ON_ZERO to its "
            "sql_mode, or give another id"
        )


def _has_mode(cursor: Any, mode: str) -> bool:
    """Is the session's sql_mode so? The server compares: what a text is read as is the user's choice."""
    cursor.execute("SELECT 1 FROM DUAL WHERE INSTR(@@sql_mode, %s) > 0", (mode,))
    return cursor.fetchone() is not None


def _is_there(cursor: Any, what: Written) -> bool:
    """Has a row this id by now? It is read with a lock, which the failed INSERT has taken already.

    A plain read looks at the time when a REPEATABLE READ transaction began to read, and passes over a later row.
    """
    bind = Binding("pyformat")
    name = ".".join(bind.name(plain(part)) for part in split(what.table.name))
    key = bind.value(what.columns[what.table.id])
    it = f"{bind.name(plain(what.table.id))} = {key}"
    cursor.execute(f"SELECT 1 FROM {name} WHERE {it} LOCK IN SHARE MODE", bind.values)
    return cursor.fetchone() is not None
