"""`postgres-growth-…`: what a message costs where the table is large, against a table of 10^3 rows that are due.

`-10000`, `-100000`, `-1000000`: so many rows are due. Beside 10^3 that are due: `-finished`, 10^6 that are finished and
stay; `-delayed`, 10^5 that are not due yet; `-deleted`, 10^5 that were deleted from the head of the queue, with no
vacuum since. Quick: 10^5 at most.

Ours on both sides: a link, leases, 500 messages claimed and settled 10 at a time; the figure is their time on the wall,
all of it, so what the first claim pays counts. Each round makes its tables anew, with autovacuum off; one of them is
there at a time, 300 MB at most. Target: at most twice (a ratio of 0.5).

What it does not show: a table without the index, or a snapshot that is kept open so that nothing can be cleaned up.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, Final

import attrs
import psycopg
import trio

from benchmarks.drive import never_lost
from benchmarks.postgres_rounds import TABLE
from benchmarks.result import Result
from benchmarks.rounds import BODY, LEASE
from links.abc import Settlement
from links.sql import Lease, SqlBroker, Table
from settlement import Ack, Policy
from tests.servers.postgres import server

SMALLEST: Final = 1_000
MESSAGES: Final = 500
ROOM: Final = 10
KEPT: Final = Table(
    "jobs",
    id="id",
    payload="body",
    retry_after="due",
    attempt="attempt",
    locked_until="locked_until",
    processed_at="processed_at",
    generated=("id",),
)

_DUE: Final = "INSERT INTO jobs (body) SELECT %(body)s FROM generate_series(1, %(count)s)"
_FINISHED: Final = "INSERT INTO jobs (body, processed_at) SELECT %(body)s, now() FROM generate_series(1, %(count)s)"
_DELAYED: Final = (
    "INSERT INTO jobs (body, due) SELECT %(body)s, now() + interval '1 day' FROM generate_series(1, %(count)s)"
)
_DELETED: Final = "DELETE FROM jobs WHERE id <= %(count)s"


@attrs.frozen
class Situation:
    """A table, and what is written before and behind the rows that are due."""

    table: Table[Any]
    due: int = SMALLEST
    others: int = 0
    before: str = ""
    after: str = ""

    def make(self, url: str) -> None:
        """Make it, as its own DDL says; what was deleted is not cleaned up."""
        values = {"body": BODY, "count": self.others}
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(b"DROP TABLE IF EXISTS jobs, dead_jobs")
            connection.execute(self.table.ddl("postgresql").encode())
            connection.execute(b"ALTER TABLE jobs SET (autovacuum_enabled = off)")
            if self.before:
                connection.execute(self.before.encode(), values)
            connection.execute(_DUE.encode(), {"body": BODY, "count": self.due})
            connection.execute(b"VACUUM ANALYZE jobs")
            if self.after:
                connection.execute(self.after.encode(), values)
            connection.execute(b"CHECKPOINT")

    def measure(self, url: str) -> float:
        """Microseconds per message, on a new table."""
        self.make(url)
        return trio.run(_measure, url, self.table)


async def _measure(url: str, table: Table[Any]) -> float:
    broker = SqlBroker(url)
    queue = broker.queue(table, claim=Lease(LEASE))
    async with broker.connect(), queue.attach("growth", never_lost, 5.0, limit=ROOM) as link:
        began = time.perf_counter()
        done = 0
        while done < MESSAGES:
            some = await link.receive(ROOM)
            verdicts = await link.settle(
                [Settlement(each, queue.decide(Ack(), each.delivery, Policy())) for each in some]
            )
            assert not any(verdicts), verdicts
            done += len(some)
        return (time.perf_counter() - began) / done * 1e6


def run(*, quick: bool) -> list[Result]:
    """Each against the smallest of its table, interleaved rounds, medians."""
    few, many = (100_000, 100_000) if quick else (100_000, 1_000_000)
    situations = {str(size): Situation(TABLE, due=size) for size in (10_000, 100_000, 1_000_000) if size <= many}
    situations["finished"] = Situation(KEPT, others=many, before=_FINISHED)
    situations["delayed"] = Situation(TABLE, others=few, before=_DELAYED)
    situations["deleted"] = Situation(TABLE, others=few, before=_DUE, after=_DELETED)
    results: list[Result] = []
    with server() as url:
        for name, situation in situations.items():
            smallest = Situation(situation.table)
            pairs = [(situation.measure(url), smallest.measure(url)) for _ in range(3 if quick else 5)]
            results.append(
                Result(
                    case=f"postgres-growth-{name}",
                    ours=statistics.median(mine for mine, _ in pairs),
                    peer=statistics.median(theirs for _, theirs in pairs),
                    peer_name=f"the same with {SMALLEST} rows that are due, and no others",
                    ratio=statistics.median(theirs / mine for mine, theirs in pairs),
                    unit="µs per message",
                )
            )
    return results
