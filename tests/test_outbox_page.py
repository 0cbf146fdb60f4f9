"""docs/outbox.md: its programs run on every database, and its SQL is what `Outbox.ddl` gives."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pymysql
import pytest
import trio

from actors import connected, open_runtime
from links.abc import Source
from links.memory import MemoryBroker
from links.sql import insert
from settlement import Ack, Delivery, Outcome, Retry
from tests.links.outbox_kit import BOTH, RecordTables, made
from tests.links.sqlite_kit import until

PAGE = (Path(__file__).parent.parent / "docs" / "outbox.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def normal(sql: str) -> str:
    return " ".join(re.sub(r"--.*", "", sql).split())


@pytest.fixture(params=BOTH)
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> RecordTables:
    return made(request.param, tmp_path, request)


def programs() -> dict[str, Any]:
    """What the page's programs have made; the last ones say what they have from the program around them."""
    names: dict[str, Any] = {
        "Any": Any,
        "Handler": Callable[[Delivery[bytes]], Awaitable[Outcome]],
        "Source": Source,
        "connected": connected,
        "open_runtime": open_runtime,
        "trio": trio,
    }
    for program in blocks("python"):
        exec(program, names)  # noqa: S102 -- our own page
    return names


def number(tables: RecordTables) -> int:
    """Of the page's SQL for this database."""
    return 0 if tables.lite else 2 if tables.mysql else 1


def statements(sql: str) -> list[str]:
    return list(filter(str.strip, normal(sql).split(";")))


class Committed(pymysql.Connection):
    """A connection of PyMySQL's whose block commits, as those of the others do."""

    def __init__(self, connection: Any) -> None:
        self.__dict__ = connection.__dict__

    def __exit__(self, *_: object) -> None:
        self.commit()

    def __del__(self) -> None:
        """It closes nothing."""


async def test_the_sql_is_what_ddl_gives(tables: RecordTables) -> None:
    """Also a second time; and the table is taken."""
    names = programs()
    sql = blocks("sql")[number(tables)]
    outbox = names["an_outbox"](tables.broker(), MemoryBroker().publisher("orders"))
    assert normal(outbox.ddl()) == normal(sql)
    for _ in range(2):
        tables.run(*statements(sql))
    async with outbox.broker.connect():
        assert await outbox.republish() == 0


async def test_the_programs_of_the_page(tables: RecordTables) -> None:
    """A sale and a piece of news are sent, one is tried once more, one is dead-lettered; all are marked."""
    names, memory = programs(), MemoryBroker()
    tables.run("CREATE TABLE orders (name text)", *statements(blocks("sql")[number(tables)]))
    outbox = names["an_outbox"](tables.broker(), memory.publisher("orders"))
    seen: list[tuple[bytes, int]] = []

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        await trio.lowlevel.checkpoint()
        seen.append((delivery.body, delivery.attempt))
        return Retry() if delivery.body == b"never" or delivery.attempt == 1 else Ack()

    async with trio.open_nursery() as nursery, memory.connect():
        nursery.start_soon(names["serve"], outbox, memory.queue("orders"), handler)
        await until(lambda: outbox.broker.is_open and outbox.broker.presence.name == "UP")
        with tables.connection() as connection:
            await names["sell"](outbox, Committed(connection) if tables.mysql else connection)
        with tables.connection() as connection:
            never = outbox.record(connection, "orders", b"never")
        await outbox.send(never)
        await until(lambda: [done for *_, done in tables.rows()] == [True, True])
        await names["tell"](outbox, memory.publisher("news"))
        (news,) = memory.store("news").ready()
        assert dict(news.headers) == {"x-ruststream-outbox-id": b"3"}
        nursery.cancel_scope.cancel()
    assert sorted(seen) == [(b"a hat was sold", 1), (b"a hat was sold", 2), *[(b"never", n) for n in range(1, 6)]]
    assert len(memory.store("dead").ready()) == 1
    assert tables.run("SELECT name FROM orders") == [("hat",)]


async def test_the_relay_of_the_page(tables: RecordTables) -> None:
    """What is inserted in a transaction goes out; what is rolled back does not."""
    names, memory = programs(), MemoryBroker()
    table = names["OUTGOING"]
    tables.run(*statements(table.ddl(("sqlite", "postgresql", "mysql")[number(tables)])))
    with tables.connection() as connection:
        insert(connection, table, b"never")
        connection.rollback()
        insert(connection, table, b"a", {"x": b"1"})
    relay = names["relay"](tables.broker(), memory.publisher("orders"))
    async with memory.connect(), open_runtime(relay) as runtime:
        await until(lambda: runtime.ledger("outgoing").acked == 1)
    (letter,) = memory.store("orders").ready()
    assert (letter.body, dict(letter.headers)) == (b"a", {"x": b"1"})
    assert tables.run("SELECT count(*) FROM outgoing") == [(0,)]
