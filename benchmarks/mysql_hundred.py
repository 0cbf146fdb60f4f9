"""`mysql-batch-100-mariadb`, `mysql-batch-100-mysql`: leases of 100 messages at once.

Ours: `BatchSubscription(size=100)`, whose handler gets 100 messages. Peer: the bare loop of mysql_lease.py, one task
that claims 100 rows and settles them by one DELETE. The servers and the figure are those of mysql_lease.py.

Target: 0.6 of the loop.

What it does not show: a network, a disk that is slow to sync, or a handler that does something.
"""

from __future__ import annotations

from functools import partial

import trio

from benchmarks.drive import drive_batches
from benchmarks.mysql_lease import FORM
from benchmarks.mysql_rounds import LOOP, TARGET, check, servers
from benchmarks.result import Result
from benchmarks.rounds import compared
from benchmarks.stopwatch import Spent, Stopwatch

SIZE = 100


def batches(url: str, count: int) -> Spent:
    """The runtime in batches."""
    FORM.fill(url, count)
    stopwatch = Stopwatch()
    trio.run(drive_batches, FORM.queue(url), count, SIZE, stopwatch)
    check(url)
    return stopwatch.spent(count)


def run(*, quick: bool) -> list[Result]:
    """On each server, interleaved rounds, medians."""
    results: list[Result] = []
    count = 5_000 if quick else 20_000
    with servers() as urls:
        for kind, url in urls.items():
            mine, theirs = partial(batches, url, count), partial(FORM.bare, url, count, 1, room=SIZE)
            case = f"mysql-batch-{SIZE}-{kind}"
            results.append(compared(case, LOOP, mine, theirs, 3 if quick else 7, target=TARGET))
    return results
