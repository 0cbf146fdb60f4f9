"""Deletes a batch of old rows, in the order of their ids; those that others have locked it skips. Runs in a thread."""

# ruff: noqa: S608 -- identifiers are quoted, values are bound

from __future__ import annotations

from links.errors import LinkRefused
from links.sql.jobs import Purge
from links.sql.mysql.looked import BEGIN
from links.sql.mysql.schema import TIMES, MysqlSchema, bound, quote, quote_table, read_schema
from links.sql.mysql.session import MysqlSession
from links.sql.mysql.statements import LOCKED, NOW, micros

__all__ = ["purge"]


def purge(session: MysqlSession, job: Purge) -> None:
    """Delete a batch, in a transaction of its own.

    Raises `LinkRefused` where the table cannot be purged so, and `pymysql.MySQLError`.
    """
    job.found = job.deleted = 0
    schema = read_schema(session, job.table.name)
    if schema is None:
        raise LinkRefused("there is no such table")
    for column in (*job.table.roles.values(), job.by):
        if column not in schema:
            raise LinkRefused(f"there is no column {column!r}; it has {', '.join(schema.names)}")
    for column in {job.by, job.table.locked_until or job.by}:
        if schema[column].type not in TIMES:
            raise LinkRefused(f"column {column!r} is {schema[column].declared}; a time is DATETIME or TIMESTAMP")
        if schema[column].local:
            raise LinkRefused(
                f"column {column!r} is DATETIME with the default {schema[column].default}, which is the time of the "
                "session's own zone; it holds UTC here: declare it with DEFAULT (UTC_TIMESTAMP(6)), or TIMESTAMP(6)"
            )
    find, delete = _texts(job, schema)
    values = {"age": micros(job.age), "group": job.group, "room": job.room, "after": job.after}
    *_, found = session.say(BEGIN, bound(find, values))
    ids = [row[0] for row in found.rows]
    gone, _ = session.say(bound(delete, {"ids": ids}), "COMMIT")
    job.found, job.deleted = len(ids), gone.touched
    if ids:
        job.last = ids[-1]


def _texts(job: Purge, schema: MysqlSchema) -> tuple[str, str]:
    table = job.table
    name, key = quote_table(table.name), quote(table.id)
    old = [f"{quote(job.by)} < {NOW} - INTERVAL LEAST(%(age)s, {_span(schema, job.by)}) MICROSECOND"]
    if not job.unfinished and table.processed_at:
        old.append(f"{quote(table.processed_at)} IS NOT NULL")
    if job.group is not None and table.group:
        old.append(f"{quote(table.group)} = %(group)s")
    if table.locked_until:
        lock = quote(table.locked_until)
        old.append(f"({lock} IS NULL OR {lock} <= {NOW})")
    if job.after is not None:
        old.append(f"{key} > %(after)s")
    return (
        f"SELECT {key} FROM {name} WHERE {' AND '.join(old)} ORDER BY {key} LIMIT %(room)s {LOCKED}",
        f"DELETE FROM {name} WHERE {key} IN %(ids)s",
    )


def _span(schema: MysqlSchema, column: str) -> int:
    """Microseconds that may be subtracted from now, so that it stays a time: 1,000 years, or 50 of a TIMESTAMP."""
    years = 1000 if schema[column].type == "datetime" else 50
    return years * 365 * 86_400_000_000
