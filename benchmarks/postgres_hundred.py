"""`postgres-batch-100-pgqueuer`, `postgres-single-100-pgqueuer`: leases of 100 messages at once, against pgqueuer's.

Ours: `BatchSubscription(size=100)`, whose handler gets 100 messages, and single deliveries to 8 handlers out of claims
of 100 (`queue(…, limit=100)`). Peer: pgqueuer at its batch of 100 (postgres_peers.py). The server, the table and the
figure are those of postgres_lease.py.

Targets: 2 (batches), 1.2 (single deliveries).

What it does not show: pgqueuer writes a log of what became of each job, and we do not.
"""

from __future__ import annotations

from functools import partial

import trio

from benchmarks.drive import drive_batches
from benchmarks.postgres_peers import workers
from benchmarks.postgres_rounds import TABLE, check, driven, fill, leased
from benchmarks.result import Result
from benchmarks.rounds import compared
from benchmarks.stopwatch import Spent, Stopwatch
from tests.servers.postgres import server

SIZE = 100


def batches(url: str, count: int) -> Spent:
    """The runtime in batches."""
    fill(url, TABLE, count)
    stopwatch = Stopwatch()
    trio.run(drive_batches, leased(url), count, SIZE, stopwatch)
    check(url)
    return stopwatch.spent(count)


def singles(url: str, count: int) -> Spent:
    """The runtime, 8 handlers, one message each."""
    return driven(url, leased(url, limit=SIZE), count, 8)


def run(*, quick: bool) -> list[Result]:
    """Interleaved rounds, medians."""
    results: list[Result] = []
    count, rounds = 10_000, 3 if quick else 7
    with server() as url:
        for name, side in workers("postgres-batch-100", ("pgqueuer",)).items():
            for case, own in (("batch", batches), ("single", singles)):
                mine, theirs = partial(own, url, count), partial(side, url, count)
                results.append(compared(f"postgres-{case}-100-{name}", name, mine, theirs, rounds))
    return results
