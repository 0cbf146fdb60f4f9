"""`postgres-publish-1`, `postgres-publish-many`: 100 bytes into a queue table on PostgreSQL, one by one or 1,000 each.

Ours: one publisher, one task; each `publish` and each `publish_many` is a transaction that is on the disk when it
returns. Peers (postgres_peers.py), by their own calls for one and for many: procrastinate and pgqueuer. The server is
that of postgres_lease.py. Messages per second of wall time, the client's CPU beside them; rounds are interleaved.

What it does not show: several publishers at once, or a network.
"""

from __future__ import annotations

from functools import partial

import trio

from benchmarks.postgres_peers import publishers
from benchmarks.postgres_rounds import TABLE, check, fill
from benchmarks.result import Result
from benchmarks.rounds import BODY, compared
from benchmarks.stopwatch import Spent, Stopwatch
from links.sql import SqlBroker
from tests.servers.postgres import server

PEERS = ("procrastinate", "pgqueuer")


def ours(url: str, count: int, size: int) -> Spent:
    """`count` messages, `size` at once."""
    fill(url, TABLE, 0)
    stopwatch = Stopwatch()
    trio.run(_ours, url, count, size, stopwatch)
    check(url, count)
    return stopwatch.spent(count)


async def _ours(url: str, count: int, size: int, stopwatch: Stopwatch) -> None:
    broker = SqlBroker(url)
    publisher = broker.publisher(TABLE)
    async with broker.connect():
        stopwatch()
        if size == 1:
            for _ in range(count):
                await publisher.publish(BODY)
        else:
            for _ in range(count // size):
                await publisher.publish_many([BODY] * size)
        stopwatch()


def run(*, quick: bool) -> list[Result]:
    """One by one and in bulk, interleaved rounds, medians."""
    results: list[Result] = []
    with server() as url:
        for case, count, size in (("1", 2_000, 1), ("many", 10_000, 1_000)):
            for name, side in publishers(f"postgres-publish-{case}", PEERS).items():
                mine, theirs = partial(ours, url, count, size), partial(side, url, count, size)
                results.append(compared(f"postgres-publish-{case}-{name}", name, mine, theirs, 3 if quick else 7))
    return results
