"""`postgres-lease-1`, `-8`, `-32`: a queue table on PostgreSQL, one message at a time to so many handlers, leased.

Ours: `open_runtime` with one subscription of that concurrency, so that a claim asks for all free places. Peer: a trio
loop without runtime and link, on the same kind of connection: one statement claims n rows, one settles them.
`postgres-lease-8-procrastinate` and `postgres-batch-100-pgqueuer`: the same work by those (postgres_peers.py), as their
pages recommend; ours in batches of 100 by `BatchSubscription`. The server is a PostgreSQL of its own on this machine,
synchronous_commit on, as it comes. Messages per second of wall time; rounds are interleaved.

Targets: 0.6 of the loop; procrastinate 5, pgqueuer 2 (batches).

What it does not show: a network, a disk that is slow to sync, or a handler that does something.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial

import psycopg
import trio

from actors import BatchSubscription, open_runtime
from benchmarks.drive import LONGEST, drive
from benchmarks.postgres_peers import peers
from benchmarks.result import Result
from links.sql import Lease, SqlBroker, Table
from links.sql.postgres.trio_connection import TrioConnection
from settlement import Ack, Delivery, Outcome
from tests.servers.postgres import server

TABLE = Table(
    "jobs",
    id="id",
    payload="body",
    retry_after="due",
    attempt="attempt",
    locked_until="locked_until",
    generated=("id",),
)
LEASE = 30.0
SIZE = 100

CLAIM = b"""WITH due AS MATERIALIZED (
    SELECT id FROM jobs WHERE due <= (SELECT clock_timestamp())
      AND (locked_until IS NULL OR locked_until <= (SELECT clock_timestamp()))
    ORDER BY due, id LIMIT %(room)s FOR UPDATE SKIP LOCKED)
UPDATE jobs j SET locked_until = clock_timestamp() + interval '30 s', attempt = j.attempt + 1 FROM due
WHERE j.id = due.id RETURNING j.id, j.locked_until, j.attempt, j.body"""
SETTLE = b"""DELETE FROM jobs j USING unnest(%(ids)s::bigint[], %(tokens)s::timestamptz[]) AS g(id, token)
WHERE j.id = g.id AND j.locked_until = g.token"""


def fill(url: str, count: int) -> None:
    """A new table with `count` rows of 100 bytes."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(b"DROP TABLE IF EXISTS jobs, dead_jobs")
        connection.execute(TABLE.ddl("postgresql").encode())
        connection.execute(b"INSERT INTO jobs (body) SELECT %s FROM generate_series(1, %s)", [b"x" * 100, count])
        connection.execute(b"ANALYZE jobs")


def check(url: str) -> None:
    """All is done."""
    with psycopg.connect(url) as connection:
        assert connection.execute(b"SELECT count(*) FROM jobs").fetchone() == (0,)


async def ours(url: str, count: int, concurrency: int) -> float:
    """Seconds for the runtime."""
    return await drive(SqlBroker(url).queue(TABLE, claim=Lease(LEASE)), count, concurrency, time.perf_counter)


async def handle(_batch: Sequence[Delivery[bytes]]) -> Outcome:
    """Do nothing."""
    await trio.lowlevel.checkpoint()
    return Ack()


async def batches(url: str, count: int, size: int) -> float:
    """Seconds for the runtime in batches."""
    queue = SqlBroker(url).queue(TABLE, claim=Lease(LEASE))
    async with open_runtime(BatchSubscription(queue, handle, size=size, wait=0.01)) as runtime:
        began = time.perf_counter()
        with trio.fail_after(LONGEST):
            while runtime.ledger("jobs").acked < count:  # noqa: ASYNC110 -- as in `drive`
                await trio.sleep(0.005)
        return time.perf_counter() - began


async def bare(url: str, concurrency: int) -> float:
    """Seconds for the loop of two statements."""
    connection = await TrioConnection.open(url)
    began = time.perf_counter()
    while rows := await (await connection.execute(CLAIM, {"room": concurrency})).fetchall():
        for _ in rows:
            await trio.lowlevel.checkpoint()
        values = {"ids": [row[0] for row in rows], "tokens": [row[1] for row in rows]}
        await connection.execute(SETTLE, values)
    spent = time.perf_counter() - began
    connection.finish()
    return spent


def run(*, quick: bool) -> list[Result]:
    """Each size, the peers, interleaved rounds, medians."""
    results: list[Result] = []
    with server() as url:
        for concurrency, count in ((1, 2_000), (8, 10_000), (32, 20_000)):
            pairs: list[tuple[float, float]] = []
            for _ in range(3 if quick else 7):
                fill(url, count)
                mine = count / trio.run(ours, url, count, concurrency)
                check(url)
                fill(url, count)
                pairs.append((mine, count / trio.run(bare, url, concurrency)))
                check(url)
            results.append(_result(f"postgres-lease-{concurrency}", pairs, "a trio loop of two statements"))
        for name, side in peers().items():
            own = partial(batches, size=SIZE) if name == "pgqueuer" else partial(ours, concurrency=8)
            count = 2_000 if name == "procrastinate" else 10_000
            pairs = []
            for _ in range(3 if quick else 5):
                fill(url, count)
                mine = count / trio.run(own, url, count)
                check(url)
                pairs.append((mine, count / side(url, count)))  # it drops what was there
            case = "postgres-batch-100" if name == "pgqueuer" else "postgres-lease-8"
            results.append(_result(f"{case}-{name}", pairs, name))
    return results


def _result(case: str, pairs: list[tuple[float, float]], peer: str) -> Result:
    return Result(
        case=case,
        ours=statistics.median(mine for mine, _ in pairs),
        peer=statistics.median(theirs for _, theirs in pairs),
        peer_name=peer,
        ratio=statistics.median(mine / theirs for mine, theirs in pairs),
        unit="messages per second",
    )
