"""What the tests of links.sql on SQLite stand on: a file with a queue table, looked at by a connection of its own."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import attrs
import pytest
import trio

from links.abc import Link, Received, Settlement
from links.sql import SqlBroker, SqlQueue, Table
from links.sql.jobs import Job
from links.sql.sqlite import ddl
from links.sql.sqlite.connection import SqliteConnection
from settlement import Policy
from settlement.ledger import Line
from settlement.plans import Plan
from settlement.policy import Ending
from settlement.sql import AdvisoryLock, ClaimForm, Finish, Verb

KEY = AdvisoryLock("order-{lane}")

TIMES = ("REAL", "INTEGER", "TEXT")
"""The declared types that hold a time."""


def seconds(stored: Any) -> float:
    """Unix seconds of a time as a column of any of the three types holds it."""
    match stored:
        case str():
            return datetime.strptime(stored, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC).timestamp()
        case int():
            return stored / 1e6
        case _:
            return float(stored)


def stored(moment: float, times: str) -> Any:
    """As such a column holds it."""
    match times:
        case "TEXT":
            return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        case "INTEGER":
            return round(moment * 1e6)
        case _:
            return moment


@attrs.define
class Database:
    """A file with a table `jobs` of every role, and `dead` with the same columns."""

    path: Path
    times: str = "REAL"
    grouped: bool = False
    marks: bool = False
    """Has it a processed_at column?"""
    counts: bool = True
    retries: str = "NOT NULL DEFAULT {zero}"
    """What else is declared of retry_after; zero is the beginning of time."""

    def create(self) -> Database:
        zero = "'1970-01-01T00:00:00.000000Z'" if self.times == "TEXT" else "0"
        columns = ", ".join(
            [
                "id INTEGER PRIMARY KEY AUTOINCREMENT",
                "payload BLOB",
                "headers TEXT",
                "lane TEXT",
                f"retry_after {self.times} {self.retries.format(zero=zero)}",
                f"locked_until {self.times}",
                *(["attempt INTEGER NOT NULL DEFAULT 1"] if self.counts else []),
                *(["grp TEXT"] if self.grouped else []),
                *([f"processed_at {self.times}"] if self.marks else []),
            ]
        )
        with closing(sqlite3.connect(self.path)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute(f"CREATE TABLE jobs ({columns})")
            connection.execute(ddl.index(["jobs"], self.table().roles, ["retry_after", "id"]))
            connection.execute(f"CREATE TABLE dead ({columns})")
        return self

    def table(self, name: str = "jobs", **roles: Any) -> Table[bytes]:
        given: dict[str, Any] = {
            "headers": "headers",
            "partition_key": "lane",
            "retry_after": "retry_after",
            "locked_until": "locked_until",
            "attempt": "attempt" if self.counts else None,
            "group": "grp" if self.grouped else None,
            "processed_at": "processed_at" if self.marks else None,
            **roles,
        }
        return Table(name, id="id", payload="payload", **given)

    def broker(self, poll_interval: float = 0.05) -> SqlBroker:
        return SqlBroker(f"sqlite:///{self.path}", poll_interval=poll_interval)

    def queue(
        self,
        claim: ClaimForm | None = None,
        group: str | None = None,
        *,
        table: Table[Any] | None = None,
        limit: int | None = None,
        poll: float = 0.05,
    ) -> SqlQueue[Any]:
        """On a broker of its own."""
        return self.broker(poll).queue(table or self.table(), claim=claim, group=group, limit=limit)

    def run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.path, timeout=5.0, isolation_level=None)) as connection:
            return connection.execute(statement, values).fetchall()

    def add(self, *payloads: bytes, group: str | None = None) -> None:
        with closing(sqlite3.connect(self.path, timeout=5.0)) as connection, connection:
            if group is None:
                connection.executemany("INSERT INTO jobs (payload) VALUES (?)", [(each,) for each in payloads])
            else:
                connection.executemany(
                    "INSERT INTO jobs (payload, grp) VALUES (?, ?)", [(each, group) for each in payloads]
                )

    def rows(self, table: str = "jobs") -> list[dict[str, Any]]:
        with closing(sqlite3.connect(self.path, timeout=5.0)) as connection:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute(f"SELECT * FROM {table} ORDER BY id")]  # noqa: S608

    def row(self, table: str = "jobs") -> dict[str, Any]:
        (row,) = self.rows(table)
        return row


@attrs.define
class Unleased(Database):
    """Its tables have no locked_until, so they are for advisory locks: by `KEY`, the default."""

    def create(self) -> Unleased:
        super().create()
        for name in ("jobs", "dead"):
            self.run(f"ALTER TABLE {name} DROP COLUMN locked_until")
        return self

    def table(self, name: str = "jobs", **roles: Any) -> Table[bytes]:
        return super().table(name, locked_until=None, **roles)

    def put(self, lane: object, *payloads: bytes) -> None:
        for payload in payloads:
            self.run("INSERT INTO jobs (payload, lane) VALUES (?, ?)", payload, lane)

    def queue(self, claim: ClaimForm | None = KEY, group: str | None = None, **how: Any) -> SqlQueue[Any]:
        return super().queue(claim, group, **how)


class Foreigner:
    """Another process, as far as SQLite can tell: a connection that may hold the write lock."""

    def __init__(self, database: Database) -> None:
        self.connection = sqlite3.connect(database.path, isolation_level=None, timeout=5.0)

    def __enter__(self) -> Self:
        self.connection.execute("BEGIN IMMEDIATE")
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.execute("ROLLBACK")
        self.connection.close()


def nothing_lost(received: Received[Any], line: Line) -> None:
    raise AssertionError(f"{received} was lost: {line}")


@asynccontextmanager
async def attached(
    queue: SqlQueue[Any], goodbye: float = 5.0, policy: Policy = Policy()
) -> AsyncGenerator[Link[Any], None]:
    async with queue.attach("test", nothing_lost, goodbye, policy) as link:
        yield link


@asynccontextmanager
async def open_link(queue: SqlQueue[Any]) -> AsyncGenerator[Link[Any], None]:
    async with queue.broker.connect(), attached(queue) as link:
        yield link


def order(queue: SqlQueue[Any], received: Received[Any], outcome: Ending, policy: Policy | None = None) -> Settlement:
    """As the runtime orders: a handler was called."""
    received.started = True
    return Settlement(received, queue.decide(outcome, received.delivery, policy or Policy()))


def say(received: Received[Any], verb: Verb) -> Settlement:
    """As the runtime orders: a handler was called."""
    received.started = True
    return Settlement(received, Plan(Line.ACKED, verb))


def bodies(received: Iterable[Received[Any]]) -> list[bytes]:
    return [each.delivery.body for each in received]


async def until(condition: Callable[[], object], within: float = 5.0) -> None:
    """Wait for a condition, not for seconds."""
    with trio.fail_after(within):
        while not condition():
            await trio.sleep(0.005)


def near(moment: float, expected: float, slack: float = 3.0) -> bool:
    """Is that time about as expected? Machines are slow now and then, so from below it is exact to 50 ms."""
    return expected - 0.05 <= moment <= expected + slack


def now() -> float:
    return time.time()


def finish(received: Sequence[Received[Any]]) -> list[Any]:
    return [say(each, Finish()) for each in received]


class Gate:
    """Holds the database's thread before BEGIN, so that a test can act while a hop is under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self._open.set()
        self.entered = 0
        original = SqliteConnection.transact

        def transact(connection: SqliteConnection, jobs: Sequence[Job]) -> None:
            self.entered += 1
            assert self._open.wait(10)
            original(connection, jobs)

        monkeypatch.setattr(SqliteConnection, "transact", transact)

    def shut(self) -> None:
        self.entered = 0
        self._open.clear()

    def let_through(self) -> None:
        """Those that wait, and no other one."""
        self._open.set()
        self._open.clear()

    def open(self) -> None:
        self._open.set()


def broker_of(queue: SqlQueue[Any]) -> SqlBroker:
    """A queue's broker, as what it is."""
    assert isinstance(queue.broker, SqlBroker)
    return queue.broker
