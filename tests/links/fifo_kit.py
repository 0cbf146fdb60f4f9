"""FIFO queue tables for the tests, in each form that has them: `jobs` by the recommended ddl, with groups and ranks."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import attrs
import psycopg
import trio

from links.abc import Link, Received
from links.sql import Lease, SqlBroker, SqlQueue, Table
from settlement.ledger import Line
from tests.links.sqlite_kit import bodies, until

__all__ = ["FORMS", "FifoTable", "Losses", "linked", "nothing", "some", "whoever"]

FORMS = ("lease", "row lock", "sqlite")


@attrs.define
class Losses:
    """What a link has told as lost."""

    told: list[tuple[bytes, Line]] = attrs.Factory(list[tuple[bytes, Line]])

    def __call__(self, received: Received[Any], line: Line) -> None:
        self.told.append((received.delivery.body, line))


@attrs.define
class FifoTable:
    """`url`: of the database. `leased`: in the lease form."""

    url: str
    leased: bool = True
    lease: float = 30.0

    @classmethod
    def of(cls, form: str, path: Path | None, database: str | None) -> FifoTable:
        """Created, in an empty database."""
        url = database or f"sqlite:///{path}/q.db"
        made = cls(url, leased=form != "row lock")
        if made.sqlite:
            with closing(sqlite3.connect(made.file)) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.executescript(made.table().ddl("sqlite"))
        else:
            made.run(made.table().ddl("postgresql"))
        return made

    @property
    def sqlite(self) -> bool:
        return self.url.startswith("sqlite")

    @property
    def file(self) -> str:
        return self.url.removeprefix("sqlite:///")

    def table(self, *, fifo: bool = True) -> Table[bytes]:
        return Table(
            "jobs",
            id="id",
            payload="payload",
            group="grp",
            priority="rank",
            retry_after="due",
            attempt="attempt",
            locked_until="locked_until" if self.leased else None,
            generated=["id"],
            fifo=fifo,
        )

    def queue(self, group: str = "g", poll_interval: float = 0.02) -> SqlQueue[bytes]:
        """One consumer: a broker of its own, as another process has one."""
        claim = Lease(self.lease) if self.leased else None
        return SqlBroker(self.url, poll_interval=poll_interval).queue(self.table(), group=group, claim=claim)

    def run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """One statement of somebody else, committed; `?` for each value."""
        if self.sqlite:
            with closing(sqlite3.connect(self.file, timeout=10.0, isolation_level=None)) as connection:
                return connection.execute(statement, values).fetchall()
        with psycopg.connect(self.url, autocommit=True) as server:
            cursor = server.execute(statement.replace("?", "%s").encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def add(self, *payloads: bytes, group: str = "g", rank: int = 0) -> None:
        for payload in payloads:
            self.run("INSERT INTO jobs (payload, grp, rank) VALUES (?, ?, ?)", payload, group, rank)

    def left(self) -> list[bytes]:
        """The payloads that are there, by id."""
        return [bytes(row[0]) for row in self.run("SELECT payload FROM jobs ORDER BY id")]

    async def until_over(self) -> None:
        """Until every lease is over by the clock that judges; nobody renews them here."""
        now = "julianday('now') * 86400.0 - 210866760000.0" if self.sqlite else "clock_timestamp()"
        await until(lambda: not self.run(f"SELECT 1 FROM jobs WHERE locked_until > {now}"), 10)  # noqa: S608


@asynccontextmanager
async def linked(queue: SqlQueue[Any], losses: Losses | None = None) -> AsyncGenerator[Link[Any], None]:
    """Its link, on a connection of its own."""
    async with queue.broker.connect(), queue.attach("test", losses or Losses(), 5.0, limit=queue.limit(1)) as link:
        yield link


async def some(link: Link[Any]) -> Received[Any]:
    """The one delivery that there is, within 10 s."""
    with trio.fail_after(10):
        (received,) = await link.receive(1)
    return received


async def whoever(*links: Link[Any]) -> tuple[Link[Any], Received[Any]]:
    """Who gets the one delivery that there is, within 10 s."""
    found: list[tuple[Link[Any], Received[Any]]] = []

    async def ask(link: Link[Any]) -> None:
        (received,) = await link.receive(1)
        found.append((link, received))
        nursery.cancel_scope.cancel()

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            for link in links:
                nursery.start_soon(ask, link)
    (one,) = found
    return one


async def nothing(link: Link[Any], within: float = 0.2) -> None:
    """Ten polls of the queue find nothing."""
    found: list[bytes] = []
    with trio.move_on_after(within) as scope:
        found = bodies(await link.receive(1))
    assert scope.cancelled_caught, found
