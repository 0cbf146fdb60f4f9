"""What the cases on MariaDB and MySQL share: durable servers, a table of jobs of 100 bytes, and each form.

The peer is a bare loop: so many trio tasks without runtime and link, each with a connection of PyMySQL's of its own at
READ COMMITTED, in autocommit; a claim is one call in a thread, a settlement another one, each of as many statements as
one writes by hand, one message each. It names its index as our claims do: where a claim is for 100 rows out of 2,000
both servers would sort otherwise, and lock all that they sort.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, TypeAlias
from urllib.parse import unquote, urlsplit

import attrs
import pymysql
import trio
from pymysql.cursors import Cursor

from benchmarks.drive import drive
from benchmarks.result import Result
from benchmarks.rounds import BODY, compared
from benchmarks.stopwatch import Spent, Stopwatch
from links.sql import Lease, SqlBroker, Table
from links.sql.queue import SqlQueue
from settlement.sql import ClaimForm
from tests.servers.mysql import KINDS, NotHere, a_server

DURABLE: Final = {"innodb_flush_log_at_trx_commit": "1", "innodb_doublewrite": "1"}
"""As both come: each COMMIT is on the disk when it is answered, and so is each page before it is written over."""
SHOWN: Final = ("innodb_flush_log_at_trx_commit", "innodb_doublewrite", "log_bin")
READ_COMMITTED: Final = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"
LOOP: Final = "trio tasks, PyMySQL in threads"
TARGET: Final = 0.6
"""Of the bare loop, for every form."""

Found: TypeAlias = tuple[tuple[Any, ...], ...]
Claim: TypeAlias = Callable[[Cursor, int], Found]
"""Claims up to so many rows; gives id, attempt as it was, body. None is left where it gives none."""
Settle: TypeAlias = Callable[[Cursor, Found], None]


def connect(url: str) -> pymysql.Connection[Cursor]:
    """A connection that is not ours."""
    parts = urlsplit(url)
    return pymysql.connect(
        host=parts.hostname,
        port=parts.port or 3306,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=parts.path.lstrip("/") or None,
        autocommit=True,
        init_command=READ_COMMITTED,
    )


def said(url: str, *statements: str) -> Found:
    """Say these; the rows of the last one."""
    with connect(url) as connection, connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        return cursor.fetchall()


@contextmanager
def servers() -> Generator[dict[str, str], None, None]:
    """The URL of a database on each kind of server; where one cannot be had a line says why."""
    urls: dict[str, str] = {}
    with ExitStack() as stack:
        for kind in KINDS:
            try:
                server = stack.enter_context(a_server(kind, **DURABLE))
            except NotHere as why:
                print(f"mysql: {kind} is left out: {why}", flush=True)
                continue
            said(server.url, "CREATE DATABASE bench")
            ((version, *values),) = said(server.url, f"SELECT VERSION(), {', '.join(f'@@{name}' for name in SHOWN)}")
            shown = ", ".join(f"{name}={value}" for name, value in zip(SHOWN, values, strict=True))
            print(f"{kind} {version}: {shown}", flush=True)
            urls[kind] = f"{server.url}bench"
        yield urls


# --- a form


@attrs.frozen
class Form:
    """A form and its bare loop."""

    name: str
    form: ClaimForm
    claim: Claim
    settle: Settle
    ahead: bool = False
    """A claim of the loop takes one row, and looks at as many as there are tasks."""

    @property
    def table(self) -> Table[bytes]:
        """The jobs, with a lease where this is one."""
        return Table(
            "jobs",
            id="id",
            payload="body",
            retry_after="due",
            attempt="attempt",
            locked_until="locked_until" if isinstance(self.form, Lease) else None,
            generated=("id",),
        )

    def queue(self, url: str) -> SqlQueue[bytes]:
        """Of the table."""
        return SqlBroker(url).queue(self.table, claim=self.form)

    def fill(self, url: str, count: int) -> None:
        """A new table, as its own DDL says, with `count` rows that are due."""
        said(url, "DROP TABLE IF EXISTS jobs, dead_jobs", *filter(str.strip, self.table.ddl("mysql").split(";\n")))
        with connect(url) as connection, connection.cursor() as cursor:
            cursor.executemany("INSERT INTO jobs (body) VALUES (%s)", [[BODY]] * count)
        said(url, "ANALYZE TABLE jobs")

    def ours(self, url: str, count: int, concurrency: int) -> Spent:
        """The runtime, to the end of a new table."""
        self.fill(url, count)
        stopwatch = Stopwatch()
        trio.run(drive, self.queue(url), count, concurrency, stopwatch)
        check(url)
        return stopwatch.spent(count)

    def bare(self, url: str, count: int, concurrency: int, *, room: int = 1) -> Spent:
        """The loop, to the end of a new table; `room`: rows of a claim, at most."""
        self.fill(url, count)
        stopwatch = Stopwatch()
        trio.run(self._bare, url, concurrency, max(room, concurrency if self.ahead else 1), stopwatch)
        check(url)
        return stopwatch.spent(count)

    async def _bare(self, url: str, concurrency: int, room: int, stopwatch: Stopwatch) -> None:
        connections = [connect(url) for _ in range(concurrency)]
        limiter = trio.CapacityLimiter(concurrency)
        stopwatch()
        async with trio.open_nursery() as nursery:
            for connection in connections:
                nursery.start_soon(self._task, connection.cursor(), room, limiter)
        stopwatch()
        for connection in connections:
            connection.close()

    async def _task(self, cursor: Cursor, room: int, limiter: trio.CapacityLimiter) -> None:
        while rows := await trio.to_thread.run_sync(self.claim, cursor, room, limiter=limiter):
            await trio.lowlevel.checkpoint()
            await trio.to_thread.run_sync(self.settle, cursor, rows, limiter=limiter)

    def sizes(self, kind: str, url: str, *, quick: bool) -> Iterator[Result]:
        """Ours against the loop, for one handler and for eight."""
        for concurrency, count in ((1, 2_000), (8, 4_000)):
            many = count // 4 if quick else count
            yield compared(
                f"mysql-{self.name}-{concurrency}-{kind}",
                LOOP,
                partial(self.ours, url, many, concurrency),
                partial(self.bare, url, many, concurrency),
                3 if quick else 7,
                target=TARGET,
            )


def check(url: str) -> None:
    """None is left."""
    assert said(url, "SELECT count(*) FROM jobs") == ((0,),)
