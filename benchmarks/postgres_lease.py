"""`postgres-lease-1`, `-8`, `-32`: a queue table on PostgreSQL, one message at a time to so many handlers, leased.

Ours: `open_runtime` with one subscription of that concurrency, so that a claim asks for all free places. Peer: a trio
loop without runtime and link, on the same kind of connection: one statement claims n rows, one settles them.
`postgres-lease-8-procrastinate`, `-firm-queue`, `-faststream-outbox`: the same work by those (postgres_peers.py), as
their pages recommend. `postgres-lease-8-async-commit`: ours with synchronous_commit off, by the URL alone, against ours
with it on. The server is a PostgreSQL of its own on this machine, synchronous_commit on, as it comes. Messages per
second of wall time, the client's CPU beside them; rounds are interleaved.

Targets: 0.6 of the loop; procrastinate 5, firm-queue 5, faststream-outbox 3.

What it does not show: a network, a disk that is slow to sync, or a handler that does something.
"""

from __future__ import annotations

from functools import partial

import trio

from benchmarks.postgres_peers import workers
from benchmarks.postgres_rounds import TABLE, check, driven, fill, leased
from benchmarks.result import Result
from benchmarks.rounds import compared
from benchmarks.stopwatch import Spent, Stopwatch
from links.sql.postgres.trio_connection import TrioConnection
from tests.servers.postgres import server

PEERS = {"procrastinate": 2_000, "firm-queue": 500, "faststream-outbox": 3_000}
"""Each with its messages for one round of a second or so."""

CLAIM = b"""WITH due AS MATERIALIZED (
    SELECT id FROM jobs WHERE due <= (SELECT clock_timestamp())
      AND (locked_until IS NULL OR locked_until <= (SELECT clock_timestamp()))
    ORDER BY due, id LIMIT %(room)s FOR UPDATE SKIP LOCKED)
UPDATE jobs j SET locked_until = clock_timestamp() + interval '30 s', attempt = j.attempt + 1 FROM due
WHERE j.id = due.id RETURNING j.id, j.locked_until, j.attempt, j.body"""
SETTLE = b"""DELETE FROM jobs j USING unnest(%(ids)s::bigint[], %(tokens)s::timestamptz[]) AS g(id, token)
WHERE j.id = g.id AND j.locked_until = g.token"""


def ours(url: str, count: int, concurrency: int) -> Spent:
    """The runtime."""
    return driven(url, leased(url), count, concurrency)


def bare(url: str, count: int, concurrency: int) -> Spent:
    """The loop of two statements."""
    fill(url, TABLE, count)
    stopwatch = Stopwatch()
    trio.run(_bare, url, concurrency, stopwatch)
    check(url)
    return stopwatch.spent(count)


async def _bare(url: str, concurrency: int, stopwatch: Stopwatch) -> None:
    connection = await TrioConnection.open(url)
    stopwatch()
    while rows := await (await connection.execute(CLAIM, {"room": concurrency})).fetchall():
        for _ in rows:
            await trio.lowlevel.checkpoint()
        values = {"ids": [row[0] for row in rows], "tokens": [row[1] for row in rows]}
        await connection.execute(SETTLE, values)
    stopwatch()
    connection.finish()


def run(*, quick: bool) -> list[Result]:
    """Each size, the peers, interleaved rounds, medians."""
    results: list[Result] = []
    with server() as url:
        for concurrency, count in ((1, 2_000), (8, 10_000), (32, 20_000)):
            results.append(
                compared(
                    f"postgres-lease-{concurrency}",
                    "a trio loop of two statements",
                    partial(ours, url, count, concurrency),
                    partial(bare, url, count, concurrency),
                    3 if quick else 7,
                )
            )
        relaxed = f"{url}?options=-c%20synchronous_commit%3Doff"
        results.append(
            compared(
                "postgres-lease-8-async-commit",
                "the same with synchronous_commit on",
                partial(ours, relaxed, 10_000, 8),
                partial(ours, url, 10_000, 8),
                3 if quick else 5,
            )
        )
        for name, side in workers("postgres-lease-8", [*PEERS]).items():
            mine = partial(ours, url, 10_000, 8)
            case = f"postgres-lease-8-{name}"
            results.append(compared(case, name, mine, partial(side, url, PEERS[name]), 3 if quick else 5))
    return results
