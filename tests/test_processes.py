"""Several processes share one SQLite file, and some of them die."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

pytestmark = [pytest.mark.servers, pytest.mark.sqlite]

ROWS = 5_000
PROCESSES = 6
KILLED = 2

CONSUMER = """
import logging, os, sqlite3, sys
from contextlib import ExitStack, closing
import trio
from actors import Subscription, open_runtime
from links.sql import Lease, SqlBroker, Table
from settlement import Ack

database, name = sys.argv[1:]
logging.basicConfig(level=logging.WARNING)
table = Table(
    "jobs", id="id", payload="body", attempt="attempt", locked_until="locked_until", processed_at="processed_at"
)
log = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

async def handle(delivery):
    os.write(log, delivery.id.encode() + b"\\n")
    os.fsync(log)
    await trio.sleep(0.001)
    return Ack()

def left():
    with closing(sqlite3.connect(database, timeout=30)) as connection:
        return connection.execute("SELECT count(*) FROM jobs WHERE processed_at IS NULL").fetchone()[0]

async def main():
    queue = SqlBroker(f"sqlite:///{database}").queue(table, claim=Lease(3.0), poll_interval=0.2)
    async with open_runtime(Subscription(queue, handle, concurrency=8)) as runtime:
        while await trio.to_thread.run_sync(left):
            await trio.sleep(0.2)
    ledger = runtime.ledger("jobs")
    print(ledger.deliveries)
    sys.exit(not ledger.balanced)

trio.run(main)
"""


def test_six_processes_share_a_file_and_two_are_killed(tmp_path: Path, tell: Callable[[str], None]) -> None:
    """Every row is finished, none is lost, a repeat is explained by a kill, and nobody hears of a locked database."""
    database = tmp_path / "jobs.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute(
            "CREATE TABLE jobs (id INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB NOT NULL,"
            " attempt INTEGER NOT NULL DEFAULT 1,"
            " locked_until REAL, processed_at REAL)"
        )
        connection.executemany("INSERT INTO jobs (body) VALUES (?)", [(b"x" * 100,)] * ROWS)
        connection.commit()
    logs = [tmp_path / f"acked-{number}" for number in range(PROCESSES)]
    processes: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:
        for log in logs:
            errors = stack.enter_context(log.with_suffix(".err").open("w"))
            command = [sys.executable, "-c", CONSUMER, str(database), str(log)]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True))
            stack.callback(_end, processes[-1])
        for number in range(KILLED):
            _wait_until_in_hand(database, logs[number], finished=(number + 1) * ROWS // 10)
            processes[number].send_signal(signal.SIGKILL)
        out = [process.communicate(timeout=120)[0] for process in processes]

    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT id, processed_at, locked_until FROM jobs ORDER BY id").fetchall()
    assert [row[0] for row in rows] == list(range(1, ROWS + 1))
    assert all(finished is not None and locked is None for _, finished, locked in rows)

    assert [process.returncode for process in processes] == [-signal.SIGKILL] * KILLED + [0] * (PROCESSES - KILLED), out
    complaints = "".join(log.with_suffix(".err").read_text() for log in logs)
    assert "database is locked" not in complaints
    assert "Traceback" not in complaints

    seen: dict[int, list[int]] = defaultdict(list)
    for number, log in enumerate(logs):
        for line in log.read_text().split():
            seen[int(line)].append(number)
    assert set(seen) == set(range(1, ROWS + 1))
    repeated = {row: numbers for row, numbers in seen.items() if len(numbers) > 1}
    unexplained = {row: numbers for row, numbers in repeated.items() if not any(n < KILLED for n in numbers)}
    assert unexplained == {}
    # a killed process had at most its limit of 8 in hand, and 8 more on the wire of the hop that was cut
    repeats = sum(len(numbers) - 1 for numbers in repeated.values())
    tell(f"{ROWS} rows, {PROCESSES} processes, {KILLED} of them killed: {repeats} repeats")
    assert repeats <= KILLED * 16


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
        process.communicate()


def _wait_until_in_hand(database: Path, log: Path, *, finished: int) -> None:
    """Until some rows are finished, one is in hand, and this process has handled something."""
    deadline = time.monotonic() + 60
    query = (
        "SELECT count(*) FILTER (WHERE processed_at IS NOT NULL),"
        " count(*) FILTER (WHERE processed_at IS NULL AND locked_until IS NOT NULL) FROM jobs"
    )
    while time.monotonic() < deadline:
        with closing(sqlite3.connect(database, timeout=30)) as connection:
            done, in_hand = connection.execute(query).fetchone()
        if done >= finished and in_hand and log.exists() and log.stat().st_size:
            return
        time.sleep(0.002)
    pytest.fail("nothing was in hand within 60 s")
