"""Queues of others on PostgreSQL, written as their own documentation writes them: seconds for jobs that do nothing.

procrastinate (https://procrastinate.readthedocs.io, a worker of concurrency 8, jobs deleted when they are done) and
pgqueuer (https://pgqueuer.readthedocs.io on asyncpg, batches of 100, a worker that drains the queue).
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["peers"]

BODY = "x" * 100


def _procrastinate(library: Any, url: str, count: int) -> float:
    async def main() -> float:
        app = library.App(connector=library.PsycopgConnector(conninfo=url))

        async def job(body: str) -> None:
            """Nothing."""

        task = app.task(name="job")(job)
        async with app.open_async():
            await app.connector.execute_query_async("DROP SCHEMA public CASCADE")
            await app.connector.execute_query_async("CREATE SCHEMA public")
            await app.schema_manager.apply_schema_async()
            await task.batch_defer_async(*({"body": BODY} for _ in range(count)))
            began = time.perf_counter()
            await app.run_worker_async(
                concurrency=8, wait=False, delete_jobs="always", install_signal_handlers=False, listen_notify=False
            )
            return time.perf_counter() - began

    return asyncio.run(main())


def _pgqueuer(library: Any, url: str, count: int) -> float:
    asyncpg = importlib.import_module("asyncpg")
    types = importlib.import_module("pgqueuer.types")

    async def main() -> float:
        connection = await asyncpg.connect(url)
        await connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        driver = importlib.import_module("pgqueuer.db").AsyncpgDriver(connection)
        queries = importlib.import_module("pgqueuer.queries").Queries(driver)
        await queries.install()
        await queries.enqueue(["job"] * count, [BODY.encode()] * count, [0] * count)
        worker = library.PgQueuer(driver)

        async def job(_job: Any) -> None:
            """Nothing."""

        worker.entrypoint("job")(job)
        began = time.perf_counter()
        await worker.run(batch_size=100, mode=types.QueueExecutionMode.drain)
        spent = time.perf_counter() - began
        await connection.close()
        return spent

    return asyncio.run(main())


def peers() -> dict[str, Callable[[str, int], float]]:
    """Those that are installed, by their names; of the others a line says so."""
    found: dict[str, Callable[[str, int], float]] = {}
    for name, side in (("procrastinate", _procrastinate), ("pgqueuer", _pgqueuer)):
        try:
            library = importlib.import_module(name)
        except ModuleNotFoundError:
            print(f"postgres-lease-8-{name}: left out: {name} is not installed", flush=True)
            continue
        found[name] = partial(side, library)
    return found
