"""`postgres-row-lock-1`, `-8`, `-32`: a queue table on PostgreSQL whose rows are locked while so many handlers run.

Ours: `open_runtime` with one subscription of that concurrency, so with so many connections. Peer: so many trio tasks
without runtime and link, each with a connection of the same kind: one string with BEGIN and SELECT … FOR UPDATE SKIP
LOCKED, one with DELETE and COMMIT. Beside it, for scale, the same with both in one string: a settlement and the next
claim by one message, which leaves no room for a pause between them. `postgres-row-lock-8-procrastinate`: the same work
by that (postgres_peers.py). The server and the figure are those of postgres_lease.py.

Targets: 0.6 of the loop; procrastinate 5.

What it does not show: a network, a disk that is slow to sync, or a handler that writes in its transaction.
"""

from __future__ import annotations

from functools import partial

import trio
from psycopg import AsyncClientCursor

from benchmarks.postgres_peers import workers
from benchmarks.postgres_rounds import check, driven, fill
from benchmarks.result import Result
from benchmarks.rounds import compared
from benchmarks.stopwatch import Spent, Stopwatch, median
from links.sql import RowLock, SqlBroker, Table
from links.sql.postgres.trio_connection import TrioConnection
from tests.servers.postgres import server

LOCKED = Table("jobs", id="id", payload="body", retry_after="due", attempt="attempt", generated=("id",))
CLAIM = b"""BEGIN; SELECT id, attempt, body FROM jobs WHERE due <= (SELECT clock_timestamp())
    ORDER BY due, id LIMIT 1 FOR UPDATE SKIP LOCKED"""
SETTLE = b"DELETE FROM jobs WHERE id = %(id)s; COMMIT"


def ours(url: str, count: int, concurrency: int) -> Spent:
    """The runtime."""
    return driven(url, SqlBroker(url).queue(LOCKED, claim=RowLock()), count, concurrency)


def bare(url: str, count: int, concurrency: int, *, chained: bool = False) -> Spent:
    """The tasks of two strings each; `chained`: of one."""
    fill(url, LOCKED, count)
    stopwatch = Stopwatch()
    trio.run(_bare, url, concurrency, chained, stopwatch)
    check(url)
    return stopwatch.spent(count)


async def _bare(url: str, concurrency: int, chained: bool, stopwatch: Stopwatch) -> None:
    connections = [await TrioConnection.open(url) for _ in range(concurrency)]
    stopwatch()
    async with trio.open_nursery() as nursery:
        for connection in connections:
            nursery.start_soon(_two_strings if not chained else _one_string, connection)
    stopwatch()
    for connection in connections:
        connection.finish()


async def _two_strings(connection: TrioConnection) -> None:
    cursor = AsyncClientCursor(connection)
    while True:
        await cursor.execute(CLAIM)
        cursor.nextset()
        row = await cursor.fetchone()
        if row is None:
            return
        await trio.lowlevel.checkpoint()
        await cursor.execute(SETTLE, {"id": row[0]})


async def _one_string(connection: TrioConnection) -> None:
    cursor = AsyncClientCursor(connection)
    await cursor.execute(CLAIM)
    cursor.nextset()
    while row := await cursor.fetchone():
        await trio.lowlevel.checkpoint()
        await cursor.execute(SETTLE + b";" + CLAIM, {"id": row[0]})
        while cursor.nextset():
            pass


def run(*, quick: bool) -> list[Result]:
    """Each size, the peer, interleaved rounds, medians."""
    results: list[Result] = []
    rounds = 3 if quick else 7
    with server() as url:
        for concurrency, count in ((1, 2_000), (8, 10_000), (32, 10_000)):
            own, loop = partial(ours, url, count, concurrency), partial(bare, url, count, concurrency)
            chained = median([loop(chained=True) for _ in range(rounds)])
            results.append(
                compared(
                    f"postgres-row-lock-{concurrency}",
                    "trio tasks of two strings each",
                    own,
                    loop,
                    rounds,
                    aside=f"of one string each: {chained.rate:.0f} messages per second",
                )
            )
        for name, side in workers("postgres-row-lock-8", ("procrastinate",)).items():
            mine, theirs = partial(ours, url, 10_000, 8), partial(side, url, 2_000)
            results.append(compared(f"postgres-row-lock-8-{name}", name, mine, theirs, rounds))
    return results
