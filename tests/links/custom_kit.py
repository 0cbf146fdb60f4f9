"""A table of every role, on SQLite and on PostgreSQL, for statements of the user's own that claim, fetch and extend."""

# ruff: noqa: S608 -- the statements are our own

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import attrs
import pytest

from links.abc import Link, Received
from links.sql import Lease, RowLock, SqlBroker, SqlQueue, Table
from settlement import Policy
from settlement.ledger import Line
from settlement.sql import ClaimForm
from tests.links.postgres_tables import PostgresTables

_COLUMNS = (
    "payload {bytes}, attempt integer NOT NULL DEFAULT 1, due {time}, grp text DEFAULT 'here', done {time}, note text"
)
_WAITING = "grp = :group AND (due IS NULL OR due <= :now) AND done IS NULL"
_LEASED = (
    "UPDATE jobs SET locked_until = :until, attempt = attempt + 1 WHERE id IN (SELECT id FROM jobs WHERE "
    + _WAITING
    + " AND (locked_until IS NULL OR locked_until <= :now) ORDER BY id DESC LIMIT :room{}) RETURNING id"
)


@attrs.define
class World:
    """One form on one dialect: `jobs`, whose statement for claim takes the newest row first."""

    name: str
    url: str
    form: ClaimForm
    run: Callable[..., list[Any]]
    told: list[str] = attrs.Factory(list[str])
    """What a link has told as degraded."""
    lost: list[tuple[bytes, Line]] = attrs.Factory(list[tuple[bytes, Line]])

    @property
    def claim(self) -> str:
        match self.name:
            case "sqlite":
                return _LEASED.format("")
            case "lease":
                return _LEASED.format(" FOR UPDATE SKIP LOCKED")
            case _:
                return f"SELECT id FROM jobs WHERE {_WAITING} ORDER BY id DESC LIMIT :room FOR UPDATE SKIP LOCKED"

    @property
    def fetch(self) -> str:
        """Another payload than the table's."""
        text = "'fetched ' || id" if self.name == "sqlite" else "convert_to('fetched ' || id, 'UTF8')"
        return f"SELECT {text} AS payload FROM jobs WHERE id = :id AND grp = :group"

    @property
    def leased(self) -> bool:
        return isinstance(self.form, Lease)

    def given(self, text: str) -> str:
        """A statement for claim that leases nothing; `text` where it needs no lease."""
        return f"{text} WHERE :until IS NOT NULL" if self.leased else text

    def queue(self, custom: Mapping[str, str], lease: float = 30.0, **roles: Any) -> SqlQueue[Any]:
        table: Table[Any] = Table(
            "jobs",
            id="id",
            payload=roles.pop("payload", "payload"),
            attempt="attempt",
            retry_after="due",
            group="grp",
            processed_at="done",
            locked_until="locked_until" if self.leased else None,
        )
        claim = Lease(lease) if self.leased else self.form
        statements = dict(custom)
        if self.name == "sqlite" and "claim" in statements:
            statements.setdefault("fetch", "SELECT payload, * FROM jobs WHERE id = :id")
        return SqlBroker(self.url, poll_interval=0.02).queue(table, group="here", claim=claim, custom=statements)

    def add(self, count: int = 1) -> None:
        for number in range(1, count + 1):
            self.run(f"INSERT INTO jobs (id, payload) VALUES ({number}, {self.bytes(str(number))})")

    def bytes(self, text: str) -> str:
        """A literal."""
        return f"x'{text.encode().hex()}'" if self.name == "sqlite" else f"'\\x{text.encode().hex()}'::bytea"

    def now(self, later: int) -> str:
        """An expression: so many seconds from now."""
        if self.name == "sqlite":
            return f"(julianday('now') * 86400.0 - 210866760000.0 + {later})"
        return f"clock_timestamp() + interval '{later} s'"

    def rows(self, columns: str = "id, attempt, done IS NOT NULL") -> list[Any]:
        return [tuple(row) for row in self.run(f"SELECT {columns} FROM jobs ORDER BY id")]

    @asynccontextmanager
    async def linked(self, queue: SqlQueue[Any], limit: int = 1, size: int = 1) -> AsyncGenerator[Link[Any], None]:
        def lost(received: Received[Any], line: Line) -> None:
            self.lost.append((received.delivery.body, line))

        def told(what: str, why: str | None) -> None:
            self.told += [f"{what}: {why}"] if why is not None else []

        async with (
            queue.broker.connect(),
            queue.attach("test", lost, 5.0, Policy(), limit=limit, size=size) as link,
        ):
            link.degraded = told
            yield link


def on_sqlite(path: Path) -> World:
    def run(text: str) -> list[Any]:
        with closing(sqlite3.connect(path, isolation_level=None, timeout=5.0)) as connection:
            return connection.execute(text).fetchall()

    columns = _COLUMNS.format(bytes="blob", time="real")
    run(f"CREATE TABLE jobs (id INTEGER PRIMARY KEY, locked_until real, {columns})")
    return World("sqlite", f"sqlite:///{path}", Lease(30.0), run)


def on_postgres(url: str, form: ClaimForm) -> World:
    run = PostgresTables(url).run
    lock = "locked_until timestamptz, " if isinstance(form, Lease) else ""
    columns = _COLUMNS.format(bytes="bytea", time="timestamptz")
    run(f"CREATE TABLE jobs (id bigint PRIMARY KEY, {lock}{columns})")
    return World("lease" if lock else "row lock", url, form, run)


_POSTGRES = [pytest.mark.postgres, pytest.mark.servers]
SQLITE = pytest.param(None, marks=pytest.mark.sqlite, id="sqlite")
LEASE = pytest.param(Lease(30.0), marks=_POSTGRES, id="lease")
ROW_LOCK = pytest.param(RowLock(), marks=_POSTGRES, id="row lock")


def world_of(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    """For a fixture that is parametrized with the three of above."""
    if request.param is None:
        return on_sqlite(tmp_path / "q.db")
    return on_postgres(request.getfixturevalue("database"), request.param)
