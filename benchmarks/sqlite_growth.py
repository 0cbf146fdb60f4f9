"""`sqlite-growth`: what one claim of 10 costs on 10^6 rows that wait, against 10^3, with the index that it needs.

Ours on both sides: a link that claims from a table with `due` and the index `(due, id)`. The figure is the median time
on the wall of a claim, the hop into the thread included. Target: flat, at most twice (a ratio of 0.5). The files, 100
MB at most, lie in a temporary folder that is deleted.

What it does not show: a table without the index, or rows that were finished and stay.
"""

from __future__ import annotations

import sqlite3
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Final

import trio

from benchmarks.drive import never_lost
from benchmarks.result import Result
from links.abc import Received
from links.sql import Lease, SqlBroker, Table

TABLE = Table(
    "jobs",
    id="id",
    payload="body",
    attempt="attempt",
    locked_until="locked_until",
    retry_after="due",
    generated=("id",),
)
SIZES: Final = (1_000, 10_000, 100_000, 1_000_000)
CLAIMS: Final = 50


def made(folder: Path, count: int) -> Path:
    """A file with `count` rows of 20 bytes that are due."""
    path = folder / f"{count}.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(
            "CREATE TABLE jobs (id INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB NOT NULL,"
            " attempt INTEGER NOT NULL DEFAULT 1, due REAL NOT NULL DEFAULT 0, locked_until REAL)"
        )
        connection.execute("CREATE INDEX jobs_due ON jobs (due, id)")
        connection.executemany("INSERT INTO jobs (body) VALUES (?)", ((b"x" * 20,) for _ in range(count)))
        connection.commit()
    return path


async def claims(path: Path) -> float:
    """Microseconds for a claim of 10, the median of many; behind them all goes back."""
    broker = SqlBroker(f"sqlite:///{path}")
    spent: list[float] = []
    held: list[Received[bytes]] = []
    async with (
        broker.connect(),
        broker.queue(TABLE, claim=Lease(300.0)).attach("growth", never_lost, 5.0, limit=10 * CLAIMS) as link,
    ):
        for _ in range(CLAIMS):
            began = time.perf_counter()
            held += await link.receive(10)
            spent.append(time.perf_counter() - began)
        await link.give_back(held)
    return statistics.median(spent) * 1e6


def run(*, quick: bool) -> list[Result]:
    """Each size against the smallest, interleaved rounds, medians."""
    rounds = 1 if quick else 3
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        paths = [made(Path(name), size) for size in SIZES]
        for size, path in zip(SIZES[1:], paths[1:], strict=True):
            pairs = [(trio.run(claims, path), trio.run(claims, paths[0])) for _ in range(rounds)]
            results.append(
                Result(
                    case=f"sqlite-growth-{size}",
                    ours=statistics.median(mine for mine, _ in pairs),
                    peer=statistics.median(theirs for _, theirs in pairs),
                    peer_name=f"the same with {SIZES[0]} rows",
                    ratio=statistics.median(theirs / mine for mine, theirs in pairs),
                    unit="µs per claim of 10",
                )
            )
    return results
