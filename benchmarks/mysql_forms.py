"""`mysql-lease-1-mariadb` and so on: queue tables on MariaDB and MySQL, each form against its own bare loop.

Ours: `open_runtime` with one subscription of that concurrency. Peer: so many trio tasks without runtime and link, each
with a connection of PyMySQL's of its own whose calls run in threads, by the statements that one would write by hand:

* lease: START TRANSACTION, SELECT … FOR UPDATE SKIP LOCKED, UPDATE, COMMIT; then DELETE by id and lease.
* row-lock: START TRANSACTION, SELECT … FOR UPDATE SKIP LOCKED; then DELETE, COMMIT.
* advisory: SELECT of candidates whose lock is free, GET_LOCK, UPDATE of the attempt; then DELETE, RELEASE_LOCK.
* batch-100: `BatchSubscription(size=100)` of a lease, against the loop of the lease for 100 rows at once.

A claim and a settlement are a thread call each. `mysql-lease-8-…-firm-queue`: the same work by that, as its pages
recommend, 8 threads. Servers of their own on this machine, innodb_flush_log_at_trx_commit=1, doublewrite on. Messages
per second of wall time, the client's CPU beside them; rounds are interleaved.

Targets: 0.6 of the loop at 1 and at 8, and for batches; firm-queue 5.

What it does not show: a network, a disk that is slow to sync, or a handler that does something.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import pymysql
import trio

from actors import BatchSubscription, open_runtime
from benchmarks.drive import LONGEST, drive
from benchmarks.postgres_hundred import handle
from benchmarks.postgres_peers import firm_queue
from benchmarks.postgres_rounds import BODY, compared
from benchmarks.result import Result
from benchmarks.stopwatch import Spent, Stopwatch
from links.sql import AdvisoryLock, Lease, RowLock, SqlBroker, Table
from settlement.sql import ClaimForm
from tests.servers.mysql import KINDS, NotHere, a_server

DURABLE: Final = {"innodb_flush_log_at_trx_commit": "1", "innodb_doublewrite": "1"}
FORMS: Final[dict[str, ClaimForm]] = {"lease": Lease(30.0), "row-lock": RowLock(), "advisory": AdvisoryLock("job-{id}")}


def table(form: str) -> Table[bytes]:
    """Of this form."""
    leased = "locked_until" if form == "lease" else None
    return Table(
        "jobs",
        id="id",
        payload="body",
        retry_after="due",
        attempt="attempt",
        locked_until=leased,
        generated=("id",),
    )


def connect(url: str) -> pymysql.Connection[Any]:
    """As the loop has it."""
    parts = urlsplit(url)
    return pymysql.connect(
        host=parts.hostname,
        port=parts.port or 3306,
        user=parts.username,
        password=parts.password or "",
        database=parts.path.lstrip("/") or None,
        autocommit=True,
    )


def run_all(url: str, *statements: str) -> list[tuple[Any, ...]]:
    """The rows of the last one."""
    with connect(url) as connection, connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        return list(cursor.fetchall())


def fill(url: str, form: str, count: int) -> None:
    """A new table, as its own DDL says, with `count` rows that are due."""
    lines = [line for line in table(form).ddl("mysql").splitlines() if not line.strip().startswith("--")]
    rows = f"({', '.join(['(%s)'] * 1000)})"[1:-1]
    run_all(url, "DROP TABLE IF EXISTS jobs", "DROP TABLE IF EXISTS dead_jobs")
    run_all(url, *filter(str.strip, "\n".join(lines).split(";")))
    with connect(url) as connection, connection.cursor() as cursor:
        for _ in range(count // 1000):
            cursor.execute(f"INSERT INTO jobs (body) VALUES {rows}", [BODY] * 1000)  # noqa: S608 -- bound
    run_all(url, "ANALYZE TABLE jobs")


def check(url: str) -> None:
    """None is left."""
    assert run_all(url, "SELECT count(*) FROM jobs") == [(0,)]


def ours(url: str, form: str, count: int, concurrency: int) -> Spent:
    """The runtime."""
    fill(url, form, count)
    stopwatch = Stopwatch()
    queue = SqlBroker(url).queue(table(form), claim=FORMS[form])
    trio.run(drive, queue, count, concurrency, stopwatch)
    check(url)
    return stopwatch.spent(count)


def batches(url: str, count: int) -> Spent:
    """The runtime in batches of 100."""
    fill(url, "lease", count)
    stopwatch = Stopwatch()
    trio.run(_batches, url, count, stopwatch)
    check(url)
    return stopwatch.spent(count)


async def _batches(url: str, count: int, stopwatch: Stopwatch) -> None:
    queue = SqlBroker(url).queue(table("lease"), claim=FORMS["lease"])
    async with open_runtime(BatchSubscription(queue, handle, size=100, wait=0.01)) as runtime:
        stopwatch()
        with trio.fail_after(LONGEST):
            while runtime.ledger("jobs").acked < count:  # noqa: ASYNC110 -- as in `drive`
                await trio.sleep(0.005)
        stopwatch()


# --- the loop


def bare(url: str, form: str, count: int, concurrency: int, *, room: int = 1) -> Spent:
    """So many tasks; `room`: rows of a claim."""
    fill(url, form, count)
    stopwatch = Stopwatch()
    trio.run(_bare, url, form, concurrency, room, stopwatch)
    check(url)
    return stopwatch.spent(count)


async def _bare(url: str, form: str, concurrency: int, room: int, stopwatch: Stopwatch) -> None:
    connections = [connect(url) for _ in range(concurrency)]
    limiter = trio.CapacityLimiter(concurrency)
    stopwatch()
    async with trio.open_nursery() as nursery:
        for connection in connections:
            nursery.start_soon(_work, connection, LOOPS[form], room, limiter)
    stopwatch()
    for connection in connections:
        connection.close()


Loop = tuple[Callable[[Any, int], Any], Callable[[Any, Any], None]]


async def _work(connection: pymysql.Connection[Any], loop: Loop, room: int, limiter: trio.CapacityLimiter) -> None:
    claim, settle = loop
    with connection.cursor() as cursor:
        while rows := await trio.to_thread.run_sync(claim, cursor, room, limiter=limiter):
            await trio.lowlevel.checkpoint()
            await trio.to_thread.run_sync(settle, cursor, rows, limiter=limiter)


DUE = "SELECT id, attempt, body FROM jobs WHERE due <= UTC_TIMESTAMP(6)"
ORDER = "ORDER BY due, id LIMIT %s FOR UPDATE SKIP LOCKED"


def _claim_lease(cursor: Any, room: int) -> Any:
    cursor.execute("START TRANSACTION")
    free = "AND (locked_until IS NULL OR locked_until <= UTC_TIMESTAMP(6))"
    cursor.execute(f"{DUE} {free} {ORDER}", [room])
    rows = cursor.fetchall()
    if rows:
        text = (
            "UPDATE jobs SET locked_until = UTC_TIMESTAMP(6) + INTERVAL 30 SECOND, attempt = attempt + 1 WHERE id IN %s"
        )
        cursor.execute(text, [[row[0] for row in rows]])
    cursor.execute("COMMIT")
    return rows


def _settle_lease(cursor: Any, rows: Any) -> None:
    text = "DELETE FROM jobs WHERE id IN %s AND locked_until > UTC_TIMESTAMP(6)"
    cursor.execute(text, [[row[0] for row in rows]])


def _claim_row_lock(cursor: Any, room: int) -> Any:
    cursor.execute("START TRANSACTION")
    cursor.execute(f"{DUE} {ORDER}", [room])
    rows = cursor.fetchall()
    if not rows:
        cursor.execute("COMMIT")
    return rows


def _settle_row_lock(cursor: Any, rows: Any) -> None:
    cursor.execute("DELETE FROM jobs WHERE id IN %s", [[row[0] for row in rows]])
    cursor.execute("COMMIT")


def _claim_advisory(cursor: Any, room: int) -> Any:
    while True:
        cursor.execute(f"{DUE} AND IS_FREE_LOCK(CONCAT('job-', id)) ORDER BY due, id LIMIT %s", [room + 15])
        found = cursor.fetchall()
        if not found:
            return ()
        for row in found:
            cursor.execute("SELECT GET_LOCK(CONCAT('job-', %s), 0)", [row[0]])
            if cursor.fetchone() != (1,):
                continue
            if cursor.execute("UPDATE jobs SET attempt = attempt + 1 WHERE id = %s", [row[0]]):
                return (row,)
            cursor.execute("DO RELEASE_LOCK(CONCAT('job-', %s))", [row[0]])


def _settle_advisory(cursor: Any, rows: Any) -> None:
    cursor.execute("DELETE FROM jobs WHERE id = %s", [rows[0][0]])
    cursor.execute("DO RELEASE_LOCK(CONCAT('job-', %s))", [rows[0][0]])


LOOPS: Final[dict[str, Loop]] = {
    "lease": (_claim_lease, _settle_lease),
    "row-lock": (_claim_row_lock, _settle_row_lock),
    "advisory": (_claim_advisory, _settle_advisory),
}


# --- rounds


@contextmanager
def _servers() -> Iterator[dict[str, str]]:
    """The URLs of databases, by their kind; of what cannot be had a line says so."""
    from contextlib import ExitStack  # noqa: PLC0415

    urls: dict[str, str] = {}
    with ExitStack() as stack:
        for kind in KINDS:
            try:
                server = stack.enter_context(a_server(kind, **DURABLE))
            except NotHere as why:
                print(f"mysql: {kind} is left out: {why}", flush=True)
                continue
            run_all(server.url, "CREATE DATABASE bench")
            urls[kind] = f"{server.url}bench"
        yield urls


def firm(url: str, count: int) -> Spent:
    """On a database of its own."""
    run_all(url, "DROP DATABASE IF EXISTS firm", "CREATE DATABASE firm")
    return firm_queue(f"mysql+pymysql:{url.partition(':')[2].rpartition('/')[0]}/firm", count)


def run(*, quick: bool) -> list[Result]:
    """Each form and size on each server, batches, the peer; interleaved rounds, medians."""
    results: list[Result] = []
    rounds = 3 if quick else 7
    with _servers() as urls:
        for kind, url in urls.items():
            for form in FORMS:
                for concurrency in (1, 8):
                    case, count = f"mysql-{form}-{concurrency}-{kind}", 2_000
                    own = partial(ours, url, form, count, concurrency)
                    loop = partial(bare, url, form, count, concurrency)
                    results.append(compared(case, "trio tasks, PyMySQL in threads", own, loop, rounds))
            own, loop = partial(batches, url, 10_000), partial(bare, url, "lease", 10_000, 1, room=100)
            results.append(compared(f"mysql-batch-100-{kind}", "the loop of a lease, 100 rows", own, loop, rounds))
            if importlib.util.find_spec("firm") is None:
                print(f"mysql-lease-8-{kind}-firm-queue: left out: firm-queue is not installed", flush=True)
                continue
            own, loop = partial(ours, url, "lease", 5_000, 8), partial(firm, url, 500)
            results.append(compared(f"mysql-lease-8-{kind}-firm-queue", "firm-queue", own, loop, rounds))
    return results
