"""A graceful stop under an orchestrator: SIGTERM drains, a second one drops.

What it shows: the library installs no signal handler, so the program says what a signal means. The first SIGTERM (or
Ctrl-C) drains: nothing more is claimed, what is in hand is finished within `grace`; 15 s of it and twice 5 s of
goodbye fit into the 30 s that Kubernetes and systemd give by default. The second one cancels: what is in hand is
unsettled, its lease is released at once, and another instance goes on with it.

What it does not do: make its own work; it fills a queue table of its own with a few hundred rows, so that there is
something in hand when the signal comes. `examples/run sigterm` starts it; then send it a signal: `kill -TERM <the pid
that it prints>`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import trio

from actors import Runtime, Subscription
from links.sql import SqlBroker, Table
from settlement import Ack, Delivery, Outcome

JOBS = Table("jobs", id="id", payload="body", locked_until="locked_until", generated=("id",))


async def work(_delivery: Delivery[bytes]) -> Outcome:
    """Half a second of it. Cancellation: the job is unsettled."""
    await trio.sleep(0.5)
    return Ack()


async def listen(runtime: Runtime, everything: trio.CancelScope) -> None:
    """What a signal means here. Cancellation: the handlers are Python's own again."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        print(f"serving, pid {os.getpid()}", flush=True)  # from here on a signal means this
        async for number in signals:
            if runtime.draining:
                print(f"{signal.Signals(number).name} again: dropping what is in hand", flush=True)
                everything.cancel()
            else:
                print(f"{signal.Signals(number).name}: draining", flush=True)
                runtime.drain()


async def run(folder: Path) -> int:
    """Serve until a signal comes."""
    folder.mkdir(parents=True, exist_ok=True)
    database = folder / "jobs.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS jobs (id INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB, locked_until REAL)"
        )
        (left,) = connection.execute("SELECT count(*) FROM jobs").fetchone()
        connection.executemany("INSERT INTO jobs (body) VALUES (?)", [(b"job",)] * (300 - left))
        connection.commit()
    broker = SqlBroker(f"sqlite:///{database}")
    runtime = Runtime(Subscription(broker.queue(JOBS), work, concurrency=4), grace=15.0, goodbye=5.0)
    async with trio.open_nursery() as nursery:
        await nursery.start(runtime.run)
        nursery.start_soon(listen, runtime, nursery.cancel_scope)
        await runtime.finished()
        nursery.cancel_scope.cancel()
    ledger = runtime.ledger("jobs")
    print(ledger.deliveries)
    return 0 if ledger.balanced else 1


def main(arguments: Sequence[str]) -> int:
    """Read the arguments; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="examples/run sigterm", description="A graceful stop: SIGTERM or Ctrl-C drains, a second one drops."
    )
    default = Path(__file__).parent.parent / ".run"
    parser.add_argument("folder", nargs="?", type=Path, default=default, help="where its queue table is kept")
    return trio.run(run, parser.parse_args(arguments).folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
