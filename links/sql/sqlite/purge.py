"""Deletes a batch of old rows, in the order of their ids. Runs in the thread, in a transaction."""

# ruff: noqa: S608 -- identifiers are quoted, values are bound

from __future__ import annotations

import math
import sqlite3
from typing import Any

from links.errors import LinkRefused
from links.sql.jobs import Purge
from links.sql.rows import BadText
from links.sql.sqlite.schema import SqliteSchema, read_schema, undone
from links.sql.sqlite.statements import quote, quote_table
from links.sql.sqlite.times import ENCODERS, strange

__all__ = ["purge"]


def purge(connection: sqlite3.Connection, now: int, job: Purge) -> None:
    """Delete a batch. Raises `LinkRefused` where the table cannot be purged so, and `sqlite3.Error`."""
    job.found = job.deleted = 0
    schema = read_schema(connection, job.table.name)
    if schema is None:
        raise LinkRefused("there is no such table")
    for column in (*job.table.roles.values(), job.by):
        if column not in schema:
            raise LinkRefused(f"there is no column {column!r}; it has {', '.join(schema.names)}")
    for column in {job.by, job.table.locked_until or job.by}:
        if schema[column].type not in ENCODERS:
            raise LinkRefused(
                f"column {column!r} is declared {schema[column].type or 'without a type'}; a time is "
                f"{', '.join(ENCODERS)}"
            )
    name, key = quote_table(job.table.name), quote(job.table.id)
    rows, values = _old(job, schema, now)
    beyond = ""
    if job.after is not None:
        beyond = f" AND {key} > {_value(job.after, 'after')}"
        values["after"] = job.after
    found = connection.execute(
        f"SELECT {key} FROM {name} WHERE {rows}{beyond} AND {key} IS NOT NULL ORDER BY {key} LIMIT :room",
        {**values, "room": job.room},
    ).fetchall()
    with undone(connection, "purge"):
        for (each,) in found:
            text = f"DELETE FROM {name} WHERE {key} = {_value(each, 'id')} AND {rows}"
            job.deleted += connection.execute(text, {**values, "id": each}).rowcount
    job.found = len(found)
    if found:
        job.last = found[-1][0]


def _value(key: object, name: str) -> str:
    return f"CAST(:{name} AS TEXT)" if isinstance(key, BadText) else f":{name}"


def _old(job: Purge, schema: SqliteSchema, now: int) -> tuple[str, dict[str, Any]]:
    """The condition, and what it binds."""
    table, by = job.table, quote(job.by)
    then = max(now - math.ceil(min(job.age, 1e12) * 1e6), 0)
    values: dict[str, Any] = {"then": schema.encoder(job.by)(then)}
    old = [f"{by} < :then", f"NOT ({strange(schema[job.by].type, by)})"]  # what is no time is not old
    if not job.unfinished and table.processed_at:
        old.append(f"{quote(table.processed_at)} IS NOT NULL")
    if job.group is not None and table.group:
        old.append(f"{quote(table.group)} = :group")
        values["group"] = job.group
    if table.locked_until:
        lock = quote(table.locked_until)
        old.append(f"({lock} IS NULL OR {lock} <= :now)")
        values["now"] = schema.encoder(table.locked_until)(now)
    return " AND ".join(old), values
