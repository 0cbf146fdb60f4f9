"""What psycopg has prepared: a statement that runs often keeps its plan, and no plan outlives what it was made for."""

from __future__ import annotations

from typing import Any, cast

import attrs
import pytest

import links.sql
from actors import Subscription, open_runtime
from links.sql.postgres.trio_connection import TrioConnection
from settlement import Delivery
from settlement.sql import Finish, MoveToTable, PutBack
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import broker_of, open_link, say, until

pytestmark = [pytest.mark.postgres, pytest.mark.servers]

OFTEN = 8
"""psycopg prepares what it has run five times."""


async def test_a_dead_letter_takes_no_prepared_statement_away(database: str) -> None:
    """The second move after others were prepared, and all that comes behind it."""
    tables = PostgresTables(database).create()
    queue = tables.broker().queue(tables.table())
    async with open_link(queue) as link:
        for _ in range(3):
            tables.add(b"dead", *[b"done"] * OFTEN)
            for number in range(OFTEN + 1):
                (received,) = await link.receive(1)
                verb = Finish() if number else MoveToTable("dead")
                assert list(await link.extend([received])) == []
                assert list(await link.settle([say(received, verb)])) == [None]
    assert tables.rows() == []
    assert len(tables.rows("dead")) == 3


@pytest.mark.parametrize("whole", [False, True], ids=["payload", "row mode"])
async def test_a_column_of_another_type_breaks_no_claim(whole: bool, database: str) -> None:
    """DESIGN 6: the same text on other columns is planned anew, and the claim is right."""
    tables = PostgresTables(database).create()
    table: Any = tables.table()
    if whole:
        table = attrs.evolve(table, payload=None)
    queue = tables.broker().queue(table)
    tables.add(b"body")
    async with open_link(queue) as link:
        for kind in ("varchar(9)", "text", "bytea USING lane::bytea", "text USING 'k'"):
            for _ in range(OFTEN):
                (received,) = await link.receive(1)
                assert received.unreadable is None
                assert list(await link.extend([received])) == []
                assert list(await link.settle([say(received, PutBack(count=False))])) == [None]
            tables.run(f"ALTER TABLE jobs ALTER lane TYPE {kind}")
        (received,) = await link.receive(1)
        assert received.delivery.key == "k"


async def test_who_takes_prepared_statements_away_breaks_nothing(database: str) -> None:
    """A pooler between us and the server may: the statement is sent again."""
    tables = PostgresTables(database).create()
    queue = tables.broker().queue(tables.table())
    async with open_link(queue) as link:
        publisher = broker_of(queue).publisher(tables.table())
        life: Any = broker_of(queue).life
        for _ in range(2):
            for number in range(OFTEN):
                await publisher.publish(b"body")
                (received,) = await link.receive(1)
                assert list(await link.extend([received])) == []
                assert list(await link.settle([say(received, Finish())])) == [None]
                assert received.delivery.attempt == 1, number
            for writer in (life.queues, life.publishing):
                writer._connection.pgconn.exec_(b"DEALLOCATE ALL")
    assert tables.rows() == []


async def test_a_claim_is_not_planned_each_time(database: str) -> None:
    """Planning reads the ends of an index, dead rows among them: with many of these it costs more than a claim."""
    tables = PostgresTables(database).create()
    tables.run("INSERT INTO jobs (payload) SELECT '' FROM generate_series(1, 5000)")
    tables.run("ANALYZE jobs")
    tables.run("DELETE FROM jobs WHERE id <= 4000")
    async with open_link(tables.broker().queue(tables.table())) as link:
        for _ in range(2 * OFTEN):
            received = await link.receive(3)
            assert list(await link.settle([say(each, Finish()) for each in received])) == [None] * 3
        asked = "SELECT custom_plans, generic_plans FROM pg_prepared_statements WHERE statement LIKE '%due AS MAT%'"
        connection: TrioConnection = cast("Any", link)._writer._connection
        ((anew, kept),) = await (await connection.execute(asked.encode())).fetchall()
    assert anew == 5, "as PostgreSQL does for each prepared statement"
    assert kept > 0


async def test_a_claim_of_a_row_lock_is_prepared_too(database: str) -> None:
    """By hand, for it travels in a string with others: it is planned once, and found again when a handler lost it."""
    tables = PostgresTables(database, leased=False).create()
    calls: list[bytes] = []
    plans: list[Any] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        calls.append(delivery.body)
        async with links.sql.transaction(delivery) as connection:
            asked = "SELECT sum(custom_plans), sum(generic_plans) FROM pg_prepared_statements"
            plans.append(await (await connection.execute(asked)).fetchone())
            if len(calls) % 20 == 0:
                await connection.execute("DEALLOCATE ALL")

    async with open_runtime(Subscription(tables.broker().queue(tables.table()), handler, name="jobs")) as runtime:
        for number in range(50):
            tables.add(b"%d" % number)
            await until(lambda: runtime.ledger("jobs").acked == len(calls) == number + 1)  # noqa: B023 -- called now
            if number == 35:
                tables.run("ALTER TABLE jobs ALTER lane TYPE varchar(9)")
    assert calls == [b"%d" % number for number in range(50)]
    assert tables.rows() == []
    assert max(anew for anew, _ in plans) == 5
    assert max(kept for _, kept in plans) > 5


@pytest.mark.parametrize("grouped", [False, True])
async def test_a_prepared_claim_is_that_of_its_values(grouped: bool, database: str) -> None:
    """The group and the rows that are passed over are bound: a quote, a percent sign and a dollar among them."""
    tables = PostgresTables(database, leased=False, grouped=grouped).create()
    group = """it's 100 %(room)s of $1 \\ "x" """ if grouped else None
    queue = tables.broker().queue(tables.table(), group=group)
    for number in range(6):
        tables.add(b"%d" % number)
    if grouped:
        tables.run("UPDATE jobs SET grp = %s", group)
    seen: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        seen.append(delivery.body)

    async with open_runtime(Subscription(queue, handler, name="jobs")) as runtime:
        await until(lambda: runtime.ledger("jobs").acked == 6)
    assert seen == [b"%d" % number for number in range(6)]
