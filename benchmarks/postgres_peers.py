"""Queues of others on PostgreSQL, written as their own documentation writes them: what jobs that do nothing take.

procrastinate (https://procrastinate.readthedocs.io, a worker of concurrency 8, jobs deleted when they are done),
pgqueuer (https://pgqueuer.readthedocs.io on asyncpg, batches of 100, a worker that drains the queue), firm-queue (Solid
Queue in Python, https://h11t-labs.github.io/firm, a `ThreadSupervisor` of 8 threads) and faststream-outbox
(https://faststream-outbox.modern-python.org on asyncpg, 8 workers; its fetch intervals are those of its own benchmarks,
1 ms, so that it never sleeps). Each in this process, in a new schema, with its own defaults but for these.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import psycopg

from benchmarks.firm_peer import firm_queue
from benchmarks.rounds import BODY, LONGEST, TEXT, WORKERS
from benchmarks.stopwatch import Spent, Stopwatch

__all__ = ["publishers", "workers"]


def _fresh(url: str) -> None:
    """A new schema."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(b"DROP SCHEMA public CASCADE")
        connection.execute(b"CREATE SCHEMA public")


def _at_once(main: Callable[[Stopwatch], Awaitable[None]], count: int) -> Spent:
    async def run() -> Spent:
        stopwatch = Stopwatch()
        await main(stopwatch)
        return stopwatch.spent(count)

    return asyncio.run(run())


# --- procrastinate


def _procrastinate(url: str, count: int, size: int = 0) -> Spent:
    """A worker; with a size: publishing, so many at once."""
    library: Any = importlib.import_module("procrastinate")
    app = library.App(connector=library.PsycopgConnector(conninfo=url))

    async def job(body: str) -> None:
        """Nothing."""

    task = app.task(name="job")(job)
    _fresh(url)

    async def main(stopwatch: Stopwatch) -> None:
        async with app.open_async():
            await app.schema_manager.apply_schema_async()
            if size == 0:
                await task.batch_defer_async(*({"body": TEXT} for _ in range(count)))
            stopwatch()
            if size == 0:
                await app.run_worker_async(
                    concurrency=WORKERS,
                    wait=False,
                    delete_jobs="always",
                    install_signal_handlers=False,
                    listen_notify=False,
                )
            elif size == 1:
                for _ in range(count):
                    await task.defer_async(body=TEXT)
            else:
                for _ in range(count // size):
                    await task.batch_defer_async(*({"body": TEXT} for _ in range(size)))
            stopwatch()

    return _at_once(main, count)


# --- pgqueuer


def _pgqueuer(url: str, count: int, size: int = 0) -> Spent:
    """A worker; with a size: publishing, so many at once."""
    library: Any = importlib.import_module("pgqueuer")
    asyncpg = importlib.import_module("asyncpg")
    types = importlib.import_module("pgqueuer.types")
    _fresh(url)

    async def main(stopwatch: Stopwatch) -> None:
        connection = await asyncpg.connect(url)
        driver = importlib.import_module("pgqueuer.db").AsyncpgDriver(connection)
        queries = importlib.import_module("pgqueuer.queries").Queries(driver)
        await queries.install()
        if size == 0:
            await queries.enqueue(["job"] * count, [BODY] * count, [0] * count)
        worker = library.PgQueuer(driver)

        async def job(_job: Any) -> None:
            """Nothing."""

        worker.entrypoint("job")(job)
        stopwatch()
        if size == 0:
            await worker.run(batch_size=100, mode=types.QueueExecutionMode.drain)
        elif size == 1:
            for _ in range(count):
                await queries.enqueue("job", BODY, 0)
        else:
            for _ in range(count // size):
                await queries.enqueue(["job"] * size, [BODY] * size, [0] * size)
        stopwatch()
        await connection.close()

    return _at_once(main, count)


# --- firm-queue


def _firm(url: str, count: int) -> Spent:
    _fresh(url)
    return firm_queue(url.replace("postgresql:", "postgresql+psycopg:"), count)


# --- faststream-outbox


def _outbox(url: str, count: int) -> Spent:
    library: Any = importlib.import_module("faststream_outbox")
    sqlalchemy: Any = importlib.import_module("sqlalchemy")
    aio: Any = importlib.import_module("sqlalchemy.ext.asyncio")
    _fresh(url)

    async def main(stopwatch: Stopwatch) -> None:
        metadata = sqlalchemy.MetaData()
        table = library.make_outbox_table(metadata, table_name="outbox")
        engine = aio.create_async_engine(url.replace("postgresql:", "postgresql+asyncpg:"), pool_size=WORKERS + 2)
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
        broker = library.OutboxBroker(engine, outbox_table=table, logger=None)
        done, numbers = asyncio.Event(), iter(range(1, count + 1))

        async def job(_body: str) -> None:
            """Nothing, but for the last one."""
            if next(numbers) == count:
                done.set()

        broker.subscriber("jobs", max_workers=WORKERS, min_fetch_interval=0.001, max_fetch_interval=0.001)(job)
        async with aio.async_sessionmaker(engine)() as session, session.begin():
            await broker.publish_batch(*([TEXT] * count), queue="jobs", session=session)
        stopwatch()
        await broker.start()
        await asyncio.wait_for(done.wait(), LONGEST)
        await broker.stop()
        stopwatch()
        await engine.dispose()

    return _at_once(main, count)


_MODULES: dict[str, str] = {
    "procrastinate": "procrastinate",
    "pgqueuer": "pgqueuer",
    "firm-queue": "firm.queue",
    "faststream-outbox": "faststream_outbox",
}


class _Publishing(Protocol):
    def __call__(self, url: str, count: int, size: int) -> Spent: ...


def workers(case: str, names: Sequence[str]) -> dict[str, Callable[[str, int], Spent]]:
    """Those that are installed, by their names; of the others a line says so."""
    sides: dict[str, Callable[[str, int], Spent]] = {
        "procrastinate": _procrastinate,
        "pgqueuer": _pgqueuer,
        "firm-queue": _firm,
        "faststream-outbox": _outbox,
    }
    return {name: sides[name] for name in names if _is_there(case, name)}


def publishers(case: str, names: Sequence[str]) -> dict[str, _Publishing]:
    """As `workers`, of those that publish: `size` messages at once."""
    sides: dict[str, _Publishing] = {"procrastinate": _procrastinate, "pgqueuer": _pgqueuer}
    return {name: sides[name] for name in names if _is_there(case, name)}


def _is_there(case: str, name: str) -> bool:
    try:
        importlib.import_module(_MODULES[name])
    except ModuleNotFoundError:
        print(f"{case}-{name}: left out: {name} is not installed", flush=True)
        return False
    return True
