"""What the cases on PostgreSQL share: a table of jobs of 100 bytes, and interleaved rounds of the two sides."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from typing import Any, Final

import psycopg
import trio

from benchmarks.drive import drive
from benchmarks.result import Result
from benchmarks.stopwatch import Spent, Stopwatch, median
from links.sql import Lease, SqlBroker, Table
from links.sql.queue import SqlQueue

BODY: Final = b"x" * 100
LEASE: Final = 30.0
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


def compared(
    case: str, peer: str, ours: Callable[[], Spent], theirs: Callable[[], Spent], rounds: int, *, aside: str = ""
) -> Result:
    """Rounds of the two, one after the other; the medians of their rates, and beside them their CPU."""
    pairs: list[tuple[Spent, Spent]] = []
    for _ in range(rounds):
        gc.collect()
        mine = ours()
        gc.collect()
        pairs.append((mine, theirs()))
    middle, other = median([mine for mine, _ in pairs]), median([their for _, their in pairs])
    cpu = f"CPU of the client: ours {middle.cpu:.0f}, peer {other.cpu:.0f} µs per message"
    return Result(
        case=case,
        ours=middle.rate,
        peer=other.rate,
        peer_name=peer,
        ratio=statistics.median(mine.rate / their.rate for mine, their in pairs),
        unit="messages per second",
        aside=f"{cpu}; {aside}" if aside else cpu,
    )
