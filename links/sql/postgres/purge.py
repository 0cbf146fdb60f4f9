"""Deletes a batch of old rows by one statement, in the order of their ids; those that others have locked it skips.

Cancellation: the statement is cancelled on the server, and the rows are gone or not.
"""

# ruff: noqa: S608 -- identifiers are quoted, values are bound

from __future__ import annotations

from links.errors import LinkRefused
from links.sql.jobs import Purge
from links.sql.postgres.schema import TIME, PostgresSchema, quote, quote_table, read_schema
from links.sql.postgres.trio_connection import TrioConnection

__all__ = ["purge"]


async def purge(connection: TrioConnection, job: Purge) -> None:
    """Delete a batch. Raises `LinkRefused` where the table cannot be purged so, and `psycopg.Error`."""
    job.found = job.deleted = 0
    schema = await read_schema(connection, job.table.name)
    if schema is None:
        raise LinkRefused("there is no such table")
    for column in (*job.table.roles.values(), job.by):
        if column not in schema:
            raise LinkRefused(f"there is no column {column!r}; it has {', '.join(schema.names)}")
    for column in {job.by, job.table.locked_until or job.by}:
        if schema[column].type != TIME:
            raise LinkRefused(f"column {column!r} is {schema[column].type}; a time is {TIME}")
    values = {"age": job.age, "group": job.group, "room": job.room, "after": job.after}
    found = await (await connection.execute(_text(job, schema).encode(), values)).fetchone()
    if found is not None:
        job.found, job.deleted, job.last = found


def _text(job: Purge, schema: PostgresSchema) -> str:
    table = job.table
    name, key = quote_table(table.name), f"j.{quote(table.id)}"
    old = [f"j.{quote(job.by)} < (SELECT clock_timestamp() - make_interval(secs => LEAST(%(age)s::float8, 1e11)))"]
    if not job.unfinished and table.processed_at:
        old.append(f"j.{quote(table.processed_at)} IS NOT NULL")
    if job.group is not None and table.group:
        old.append(f"j.{quote(table.group)} = %(group)s")
    if table.locked_until:
        lock = f"j.{quote(table.locked_until)}"
        old.append(f"({lock} IS NULL OR {lock} <= clock_timestamp())")
    rows = " AND ".join(old)
    beyond = "" if job.after is None else f" AND {key} > %(after)s::{schema[table.id].array}"
    return (
        f"WITH old AS MATERIALIZED (SELECT {key} AS id, {schema.key(table.id, 'j')} AS key FROM {name} j "
        f"WHERE {rows}{beyond} ORDER BY {key} LIMIT %(room)s FOR UPDATE SKIP LOCKED), "
        f"gone AS (DELETE FROM {name} j USING old WHERE {key} = old.id AND {rows} RETURNING 1) "
        "SELECT (SELECT count(*) FROM old), (SELECT count(*) FROM gone), "
        "(SELECT key FROM old ORDER BY id DESC LIMIT 1)"
    )
