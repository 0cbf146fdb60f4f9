"""What the cases on PostgreSQL share: a table of jobs of 100 bytes, and our side of a round."""

from __future__ import annotations

from typing import Any, Final

import psycopg
import trio

from benchmarks.drive import drive
from benchmarks.rounds import BODY, LEASE
from benchmarks.stopwatch import Spent, Stopwatch
from links.sql import Lease, SqlBroker, Table
from links.sql.queue import SqlQueue

TABLE: Final = Table(
    "jobs",
    id="id",
    payload="body",
    retry_after="due",
    attempt="attempt",
    locked_until="locked_until",
    generated=("id",),
)


def fill(url: str, table: Table[Any], count: int) -> None:
    """A new table, as its own DDL says, with `count` rows that are due."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(b"DROP TABLE IF EXISTS jobs, dead_jobs")
        connection.execute(table.ddl("postgresql").encode())
        connection.execute(b"INSERT INTO jobs (body) SELECT %s FROM generate_series(1, %s)", [BODY, count])
        connection.execute(b"ANALYZE jobs")


def check(url: str, count: int = 0) -> None:
    """So many are left."""
    with psycopg.connect(url) as connection:
        assert connection.execute(b"SELECT count(*) FROM jobs").fetchone() == (count,)


def leased(url: str, *, limit: int | None = None) -> SqlQueue[bytes]:
    """The table as a queue of the lease form."""
    return SqlBroker(url).queue(TABLE, claim=Lease(LEASE), limit=limit)


def driven(url: str, queue: SqlQueue[bytes], count: int, concurrency: int) -> Spent:
    """Our runtime on a new table with `count` rows, to its end."""
    fill(url, queue.table, count)
    stopwatch = Stopwatch()
    trio.run(drive, queue, count, concurrency, stopwatch)
    check(url)
    return stopwatch.spent(count)
