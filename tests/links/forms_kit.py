"""Every form of a queue table that there is, on every database, single deliveries and batches: `Place`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from actors import BatchSubscription, Runtime, Subscription, open_runtime
from links.sql import AdvisoryLock, Lease, RowLock, SqlBroker, SqlQueue, Table
from settlement import Delivery, Outcome, Policy
from settlement.ledger import Ledger
from settlement.sql import ClaimForm
from tests.links.mysql_tables import MysqlTables
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import Database
from tests.servers.mysql import KINDS

__all__ = ["FORMS", "ON_POSTGRES", "Place", "serving"]

Handler = Callable[[Delivery[Any]], Awaitable[Outcome | None]]

_POSTGRES = [pytest.mark.postgres, pytest.mark.servers]
ON_POSTGRES = [
    pytest.param(name, marks=_POSTGRES, id=name)
    for name in ("postgres lease", "postgres row lock", "postgres advisory")
]
FORMS = [
    *ON_POSTGRES,
    pytest.param("sqlite lease", marks=pytest.mark.sqlite, id="sqlite lease"),
    pytest.param("sqlite advisory", marks=pytest.mark.sqlite, id="sqlite advisory"),
    *(
        pytest.param(f"{kind} {form}", marks=[pytest.mark.mysql, pytest.mark.servers, *marks], id=f"{kind} {form}")
        for kind, marks in (("mariadb", []), ("mysql", [pytest.mark.long]))
        for form in ("lease", "row lock", "advisory")
    ),
]


@attrs.define
class Place:
    """A database with the tables `jobs` and `dead` of one form.

    `size`: 1 for single deliveries, else how many a batch has.
    """

    name: str
    size: int
    tables: PostgresTables | MysqlTables | Database

    @classmethod
    def of(cls, name: str, size: int, request: pytest.FixtureRequest, **shape: Any) -> Place:
        """An empty one."""
        if name.startswith("postgres"):
            return cls(name, size, PostgresTables(request.getfixturevalue("database"), leased="lease" in name, **shape))
        for kind in KINDS:
            if name.startswith(f"{kind} "):
                url = request.getfixturevalue("mysql_databases")(kind)
                return cls(name, size, MysqlTables(url, leased="lease" in name, **shape))
        path: Path = request.getfixturevalue("tmp_path")
        return cls(name, size, Database(path / "q.db", **shape))

    @property
    def leased(self) -> bool:
        return "lease" in self.name

    @property
    def postgres(self) -> bool:
        return isinstance(self.tables, PostgresTables)

    @property
    def mysql(self) -> bool:
        """Or MariaDB."""
        return isinstance(self.tables, MysqlTables)

    @property
    def broker_url(self) -> str:
        """Of PostgreSQL."""
        assert isinstance(self.tables, PostgresTables)
        return self.tables.url

    @property
    def claim(self) -> ClaimForm:
        match self.name.partition(" ")[2]:
            case "lease":
                return Lease(30.0)
            case "row lock":
                return RowLock()
            case _:
                return AdvisoryLock("job-{id}")

    def create(self) -> Place:
        self.tables.create()
        if isinstance(self.tables, Database) and not self.leased:
            for name in ("jobs", "dead"):
                self.run(f"ALTER TABLE {name} DROP COLUMN locked_until")
        return self

    def table(self, name: str = "jobs", **roles: Any) -> Table[Any]:
        return self.tables.table(name, **{**({} if self.leased else {"locked_until": None}), **roles})

    def broker(self) -> SqlBroker:
        return self.tables.broker(0.05)

    def queue(self, table: Table[Any] | None = None, group: str | None = None) -> SqlQueue[Any]:
        return self.broker().queue(self.table() if table is None else table, claim=self.claim, group=group)

    def run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Of somebody else, in autocommit; a place for a value is ?."""
        if isinstance(self.tables, PostgresTables | MysqlTables):
            return self.tables.run(statement.replace("?", "%s"), *values)
        return self.tables.run(statement, *values)

    async def alter(self, statement: str) -> None:
        """The same in a thread: it may wait for what is in hand here."""
        await trio.to_thread.run_sync(self.run, statement)

    def add(self, *payloads: bytes) -> None:
        self.tables.add(*payloads)

    def rows(self, table: str = "jobs") -> list[dict[str, Any]]:
        return self.tables.rows(table)

    def payloads(self, table: str = "jobs") -> list[bytes]:
        return [row["payload"] for row in self.rows(table)]

    def refuse(self, action: str, when: str, table: str = "jobs") -> None:
        """A trigger refuses "bad" while the table `refusing` has a row: `action` is "raise" or "ignore".

        So DELETE FROM refusing mends it: to drop a trigger would wait for a row lock in hand. On MySQL and MariaDB a
        trigger cannot ignore a statement; it leaves the lease and the attempt as they were.
        """
        self.run("CREATE TABLE refusing AS SELECT 1 AS one")
        if self.mysql:
            kept = "".join(
                f"SET NEW.{column} = OLD.{column}; " for column in ("attempt", "locked_until")[: 1 + self.leased]
            )
            said = "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not today'; " if action == "raise" else kept
            bad = "OLD.payload = 'bad' AND EXISTS (SELECT 1 FROM refusing)"
            self.run(f"CREATE TRIGGER say {when} ON {table} FOR EACH ROW BEGIN IF {bad} THEN {said}END IF; END")
            return
        bad = "OLD.payload = 'bad'" if self.postgres else "OLD.payload = X'626164'"
        when_it_is = bad + " AND EXISTS (SELECT 1 FROM refusing)"  # noqa: S608 -- literals
        if self.postgres:
            said = "RAISE 'not today'" if action == "raise" else "RETURN NULL"
            body = f"BEGIN IF {when_it_is} THEN {said}; END IF; RETURN COALESCE(NEW, OLD); END"
            self.run(f"CREATE FUNCTION say() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$")
            self.run(f"CREATE TRIGGER say {when} ON {table} FOR EACH ROW EXECUTE FUNCTION say()")
        else:
            said = "RAISE(ABORT, 'not today')" if action == "raise" else "RAISE(IGNORE)"
            self.run(f"CREATE TRIGGER say {when} ON {table} FOR EACH ROW WHEN {when_it_is} BEGIN SELECT {said}; END")


@asynccontextmanager
async def serving(
    place: Place, handler: Handler, policy: Policy = Policy(), queue: SqlQueue[Any] | None = None, concurrency: int = 1
) -> AsyncGenerator[tuple[Runtime, Callable[[], Ledger]], None]:
    """A runtime that serves the queue as "billing", with its books as they stand; of a batch each one is handled."""

    async def batch(deliveries: Sequence[Delivery[Any]]) -> Sequence[Outcome | None]:
        return [await handler(delivery) for delivery in deliveries]

    source = place.queue() if queue is None else queue
    subscription: Any
    if place.size == 1:
        subscription = Subscription(source, handler, policy=policy, name="billing", concurrency=concurrency)
    else:
        subscription = BatchSubscription(
            source, batch, size=place.size, policy=policy, name="billing", concurrency=concurrency
        )
    async with open_runtime(subscription, goodbye=30.0) as runtime:  # machines are slow now and then
        yield runtime, lambda: runtime.ledger("billing")
