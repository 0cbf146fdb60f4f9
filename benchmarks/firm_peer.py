"""firm-queue as its own documentation writes it: Solid Queue in Python, on any database that SQLAlchemy knows.

A `ThreadSupervisor` of 8 threads with its own defaults (https://h11t-labs.github.io/firm).
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

from benchmarks.rounds import LONGEST, TEXT, WORKERS
from benchmarks.stopwatch import Spent, Stopwatch

__all__ = ["firm_queue"]


def firm_queue(url: str, count: int) -> Spent:
    """Jobs that do nothing, in an empty database; `url` as SQLAlchemy has it."""
    firm: Any = importlib.import_module("firm.queue")
    supervisor: Any = importlib.import_module("firm.queue.supervisor")
    runtime = firm.configure(database_url=url)
    importlib.import_module("firm.queue.schema").create_all(runtime.engine)
    done, numbers = threading.Event(), iter(range(1, count + 1))

    def job(_body: str) -> None:
        """Nothing, but for the last one."""
        if next(numbers) == count:  # one bytecode of a C iterator: no two threads get the same
            done.set()

    queued = firm.job()(job)
    for _ in range(count):
        queued.enqueue(TEXT)
    stopwatch = Stopwatch()
    config = supervisor.SupervisorConfig(workers=[supervisor.WorkerConfig(threads=WORKERS)])
    with supervisor.ThreadSupervisor(runtime, config):
        stopwatch()
        assert done.wait(LONGEST)
        stopwatch()
    runtime.engine.dispose()
    return stopwatch.spent(count)
