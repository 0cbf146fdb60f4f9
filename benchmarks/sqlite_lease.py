"""`sqlite-lease-1`, `-10`, `-32`: a queue table in a SQLite file, claimed and settled so many at a time.

Ours: `open_runtime` with one subscription of that concurrency. Peer: a trio loop without this library that calls a
thread once to claim n rows and once to settle them, each in one transaction, with the pragmas that we use ourselves and
that SQLite's documentation recommends for a queue with one writer at a time (https://www.sqlite.org/wal.html, WAL with
synchronous=NORMAL). Beside it, for scale, the same loop inside one thread, without trio. The figure is messages per
second of wall time; rounds of the two are interleaved. `sqlite-lease-10-huey` and `-firm-queue`: ours, 10 at a time,
against those queues (sqlite_peers.py).

Targets: 0.8 (10) and 0.7 (32) of the loop; huey 2, firm-queue 5.

What it does not show: several processes, a slow disk, or a handler that does something.
"""

from __future__ import annotations

import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import trio

from benchmarks.drive import drive
from benchmarks.result import Result
from benchmarks.sqlite_peers import peers
from links.sql import Lease, SqlBroker, Table

TABLE = Table("jobs", id="id", payload="body", attempt="attempt", locked_until="locked_until", generated=("id",))
LEASE = 30.0

CLAIM = """UPDATE jobs SET locked_until = :expiry, attempt = coalesce(attempt, 1) + 1 WHERE id IN (
    SELECT id FROM jobs WHERE locked_until IS NULL OR locked_until <= :now ORDER BY id LIMIT :room)
    RETURNING id, locked_until, attempt, body"""
SETTLE = "DELETE FROM jobs WHERE id = :id AND locked_until = :token AND attempt = :attempt"


def made(folder: Path, count: int) -> Path:
    """A file with `count` rows of 100 bytes."""
    path = Path(tempfile.mkdtemp(dir=folder)) / "jobs.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(
            "CREATE TABLE jobs (id INTEGER PRIMARY KEY, body BLOB NOT NULL, attempt INTEGER NOT NULL DEFAULT 1,"
            " locked_until REAL)"
        )
        connection.executemany("INSERT INTO jobs (body) VALUES (?)", ((b"x" * 100,) for _ in range(count)))
        connection.commit()
    return path


def opened(path: Path) -> sqlite3.Connection:
    """A connection with our pragmas."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def claim(connection: sqlite3.Connection, room: int) -> list[tuple[int, float, int, bytes]]:
    """Lease up to `room` rows."""
    now = time.time()
    connection.execute("BEGIN IMMEDIATE")
    rows = connection.execute(CLAIM, {"now": now, "expiry": now + LEASE, "room": room}).fetchall()
    connection.execute("COMMIT")
    return rows


def settle(connection: sqlite3.Connection, rows: list[tuple[int, float, int, bytes]]) -> None:
    """Delete these by their tokens."""
    connection.execute("BEGIN IMMEDIATE")
    for key, token, attempt, _ in rows:
        connection.execute(SETTLE, {"id": key, "token": token, "attempt": attempt})
    connection.execute("COMMIT")


async def peer(path: Path, room: int) -> float:
    """Seconds for the loop of two thread calls."""

    async def handler(_body: bytes) -> None:
        await trio.lowlevel.checkpoint()

    with closing(opened(path)) as connection:
        began = time.perf_counter()
        while rows := await trio.to_thread.run_sync(claim, connection, room):
            for row in rows:
                await handler(row[3])
            await trio.to_thread.run_sync(settle, connection, rows)
        spent = time.perf_counter() - began
    _check(path)
    return spent


def one_thread(path: Path, room: int) -> float:
    """Seconds for the same loop without trio."""
    with closing(opened(path)) as connection:
        began = time.perf_counter()
        while rows := claim(connection, room):
            settle(connection, rows)
        spent = time.perf_counter() - began
    _check(path)
    return spent


async def ours(path: Path, count: int, room: int) -> float:
    """Seconds for the runtime."""
    queue = SqlBroker(f"sqlite:///{path}").queue(TABLE, claim=Lease(LEASE))
    spent = await drive(queue, count, room, time.perf_counter)
    _check(path)
    return spent


def _check(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM jobs").fetchone() == (0,)


def run(*, quick: bool) -> list[Result]:
    """Each size, the peers, interleaved rounds, medians."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for room, count in ((1, 3_000), (10, 20_000), (32, 20_000)):
            rounds = 5 if quick else 11
            rate: Callable[[float], float] = partial(_rate, count)
            trios: list[tuple[float, float]] = []
            alone: list[float] = []
            for _ in range(rounds):
                mine = rate(trio.run(ours, made(folder, count), count, room))
                theirs = rate(trio.run(peer, made(folder, count), room))
                trios.append((mine, theirs))
                alone.append(rate(one_thread(made(folder, count), room)))
            results.append(
                Result(
                    case=f"sqlite-lease-{room}",
                    ours=statistics.median(mine for mine, _ in trios),
                    peer=statistics.median(theirs for _, theirs in trios),
                    peer_name=f"a trio loop of two thread calls: claim {room}, settle {room}",
                    ratio=statistics.median(mine / theirs for mine, theirs in trios),
                    unit="messages per second",
                    aside=f"the loop inside one thread: {statistics.median(alone):.1f} messages per second",
                )
            )
        results += _against_peers(folder, 5 if quick else 11)
    return results


def _against_peers(folder: Path, rounds: int) -> list[Result]:
    count = 300
    results: list[Result] = []
    for name, side in peers().items():
        pairs: list[tuple[float, float]] = []
        for _ in range(rounds):
            mine = _rate(count, trio.run(ours, made(folder, count), count, 10))
            with tempfile.TemporaryDirectory(dir=folder) as own:
                pairs.append((mine, _rate(count, side(Path(own), count))))
        results.append(
            Result(
                case=f"sqlite-lease-10-{name}",
                ours=statistics.median(mine for mine, _ in pairs),
                peer=statistics.median(theirs for _, theirs in pairs),
                peer_name=name,
                ratio=statistics.median(mine / theirs for mine, theirs in pairs),
                unit="messages per second",
            )
        )
    return results


def _rate(count: int, seconds: float) -> float:
    return count / seconds
