"""Queues of others on SQLite, written as their own documentation writes them: seconds for jobs that do nothing.

huey's `SqliteHuey` (https://huey.readthedocs.io, one at a time, deleted when it is taken) and firm-queue (Solid Queue
in Python, `run_ready(limit=10)`), each in this thread, each with its own defaults.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["peers"]

BODY = "x" * 100


def _huey(huey: Any, folder: Path, count: int) -> float:
    queue = huey.SqliteHuey(filename=str(folder / "huey.db"))

    def job(_body: str) -> None:
        """Nothing."""

    enqueue = queue.task()(job)
    for _ in range(count):
        enqueue(BODY)
    began = time.perf_counter()
    done = 0
    while (task := queue.dequeue()) is not None:
        queue.execute(task)
        done += 1
    spent = time.perf_counter() - began
    assert done == count
    queue.storage.close()
    return spent


def _firm(firm: Any, folder: Path, count: int) -> float:
    runtime = firm.configure(database_url=f"sqlite:///{folder / 'firm.db'}")
    importlib.import_module("firm.queue.schema").create_all(runtime.engine)
    run_ready = importlib.import_module("firm.queue.worker").run_ready

    def job(_body: str) -> None:
        """Nothing."""

    queued = firm.job()(job)
    for _ in range(count):
        queued.enqueue(BODY)
    began = time.perf_counter()
    done = 0
    while some := run_ready(runtime, limit=10):
        done += some
    spent = time.perf_counter() - began
    assert done == count
    runtime.engine.dispose()
    return spent


def peers() -> dict[str, Callable[[Path, int], float]]:
    """Those that are installed, by their names; of the others a line says so."""
    found: dict[str, Callable[[Path, int], float]] = {}
    for name, module, side in (("huey", "huey", _huey), ("firm-queue", "firm.queue", _firm)):
        try:
            library = importlib.import_module(module)
        except ModuleNotFoundError:
            print(f"sqlite-lease-10-{name}: left out: {name} is not installed", flush=True)
            continue
        found[name] = partial(side, library)
    return found
