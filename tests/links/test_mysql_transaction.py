"""`links.sql.transaction` on MySQL and MariaDB, in each form: what a handler writes stands with its `Ack` alone."""

from __future__ import annotations

from typing import Any

import pymysql
import pytest
import trio

from actors import Subscription, open_runtime
from links.errors import TransactionHeld
from links.sql import AdvisoryLock, Lease, RowLock, transaction
from settlement import Ack, Delivery, Drop, Outcome, Policy, Retry, RetryAfter
from settlement.sql import ClaimForm
from tests.links.mysql_kit import connect
from tests.links.mysql_tables import MysqlTables
from tests.links.sqlite_kit import until

pytestmark = [pytest.mark.mysql, pytest.mark.servers]

FORMS = [Lease(30.0), RowLock(), AdvisoryLock("job-{id}")]
forms = pytest.mark.parametrize("claim", FORMS, ids=["lease", "row lock", "advisory"])
CAPPED = Policy(max_attempts=2, dead_letter="dead")


def made(url: str, claim: ClaimForm, **shape: Any) -> MysqlTables:
    tables = MysqlTables(url, leased=isinstance(claim, Lease), **shape).create()
    tables.run("CREATE TABLE notes (what VARCHAR(100), n INT)")
    tables.add(b"a")
    return tables


def serving(tables: MysqlTables, claim: ClaimForm, handler: Any, policy: Policy = Policy(), **more: Any) -> Any:
    queue = tables.broker().queue(tables.table(), claim=claim)
    return open_runtime(Subscription(queue, handler, policy=policy, name="billing", **more), goodbye=10.0)


@forms
async def test_it_stands_with_an_ack(claim: ClaimForm, mysql_database: str) -> None:
    """S-8.1: until then nobody sees it; with it the row goes."""
    tables = made(mysql_database, claim)

    async def handler(delivery: Delivery[bytes]) -> None:
        async with transaction(delivery) as connection:
            assert await connection.execute("INSERT INTO notes VALUES (%s, %s)", ["it's", 1]) == []
            assert await connection.execute("SELECT n FROM notes WHERE what = %(what)s", {"what": "it's"}) == [(1,)]
            assert tables.run("SELECT * FROM notes") == []

    async with serving(tables, claim, handler) as runtime:
        await until(lambda: runtime.ledger("billing").acked == 1, 20)
    assert tables.run("SELECT * FROM notes") == [("it's", 1)]
    assert tables.rows() == []


OTHERS = [Retry(), RetryAfter(0.05), Drop("no"), ValueError("no")]


@forms
@pytest.mark.parametrize("outcome", OTHERS, ids=["retry", "retry after", "drop", "error"])
async def test_it_is_undone_by_the_others(claim: ClaimForm, outcome: Any, mariadb_database: str) -> None:
    """S-8.2: first undone, then settled; the dead row has the attempts that it had."""
    tables = made(mariadb_database, claim)

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        async with transaction(delivery) as connection:
            await connection.execute("INSERT INTO notes VALUES ('no', 1)")
        if isinstance(outcome, Exception):
            raise outcome
        answer: Outcome = outcome
        return answer

    async with serving(tables, claim, handler, CAPPED) as runtime:
        await until(lambda: runtime.ledger("billing").dead_lettered + runtime.ledger("billing").dropped == 1, 20)
    assert tables.run("SELECT * FROM notes") == []
    assert tables.rows() == []
    if not isinstance(outcome, Drop):
        assert tables.row("dead")["attempt"] == (2 if isinstance(claim, RowLock) else 3)


@forms
async def test_ddl_ends_it(claim: ClaimForm, mysql_database: str) -> None:
    """The server commits by itself: *unknown*, and the row comes again. What ends it by its name is refused."""
    tables = made(mysql_database, claim)
    calls: list[int] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        calls.append(delivery.attempt)
        async with transaction(delivery) as connection:
            await connection.execute("INSERT INTO notes VALUES ('written', %s)", [len(calls)])
            for ends in ("COMMIT", " rollback", "BEGIN", "/* x */ START TRANSACTION", "SET autocommit = 1"):
                with pytest.raises(TransactionHeld, match="outcome ends its transaction"):
                    await connection.execute(ends)
            await connection.execute("SAVEPOINT own")
            await connection.execute("ROLLBACK TO SAVEPOINT own")
            if len(calls) == 1:
                await connection.execute("CREATE TABLE more (n INT)")
                await connection.execute("INSERT INTO notes VALUES ('behind', 1)")

    short = Lease(1.0) if isinstance(claim, Lease) else claim
    async with serving(tables, short, handler) as runtime:
        await until(lambda: runtime.ledger("billing").acked == 1, 30)
        assert runtime.ledger("billing").unknown == 1
    assert sorted(tables.run("SELECT * FROM notes")) == [("written", 1), ("written", 2)]
    assert tables.rows() == []


@forms
async def test_a_deadlock_takes_everything_back(claim: ClaimForm, mysql_database: str) -> None:
    """1213 is the handler's; nothing that it writes behind it is committed, and the row comes again."""
    tables = made(mysql_database, claim)
    tables.run("INSERT INTO notes VALUES ('x', 0), ('y', 0)")
    tables.run("ALTER TABLE notes ADD PRIMARY KEY (what)")
    calls: list[str] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        async with transaction(delivery) as connection:
            if calls:
                calls.append("again")
                return
            await connection.execute("UPDATE notes SET n = n + 1 WHERE what = 'x'")
            with connect(mysql_database, autocommit=False) as other, other.cursor() as cursor:
                cursor.execute("UPDATE notes SET n = n + 10 WHERE what = 'y'")
                for _ in range(300):  # so that the server undoes the smaller one, ours
                    cursor.execute("INSERT INTO notes VALUES (UUID(), 0)")
                async with trio.open_nursery() as nursery:

                    async def cross() -> None:
                        with pytest.raises(pymysql.OperationalError, match="1213"):
                            await connection.execute("UPDATE notes SET n = n + 1 WHERE what = 'y'")
                        calls.append("deadlock")

                    nursery.start_soon(cross)
                    await trio.to_thread.run_sync(cursor.execute, "UPDATE notes SET n = n + 10 WHERE what = 'x'")
                other.rollback()
            with pytest.raises(pymysql.OperationalError, match="rolled the transaction back"):
                await connection.execute("INSERT INTO notes VALUES ('behind', 1)")

    short = Lease(2.0) if isinstance(claim, Lease) else claim
    async with serving(tables, short, handler) as runtime:
        await until(lambda: runtime.ledger("billing").acked == 1, 30)
        assert runtime.ledger("billing").superseded == 1
    assert calls == ["deadlock", "again"]
    assert sorted(tables.run("SELECT * FROM notes")) == [("x", 0), ("y", 0)]


@forms
async def test_its_session_is_the_users_own(claim: ClaimForm, mysqls: Any, mysql_database: str) -> None:
    """Time zone, SQL mode and lock wait are as in a connection of the user's; behind it they are ours again."""
    del mysqls
    tables = made(mysql_database, claim)
    query = "SELECT @@time_zone, @@sql_mode, @@innodb_lock_wait_timeout"
    (own,) = tables.run(query)
    seen: list[Any] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        async with transaction(delivery) as connection:
            seen.append((await connection.execute(query))[0])
            await connection.execute("SET time_zone = '+05:00', sql_mode = ''")
            await connection.execute("INSERT INTO notes VALUES ('n', 1)")

    async with serving(tables, claim, handler) as runtime:
        await until(lambda: runtime.ledger("billing").acked == 1, 20)
        tables.run("INSERT INTO jobs (payload, retry_after) VALUES ('b', UTC_TIMESTAMP(6) + INTERVAL 1 HOUR)")
        tables.add(b"c")
        await until(lambda: runtime.ledger("billing").acked == 2, 20)
    assert seen == [own, own]
    assert [row["payload"] for row in tables.rows()] == [b"b"]  # 5 hours ahead it would have been due


@forms
async def test_a_connection_that_is_killed_within_it(claim: ClaimForm, mysql_database: str) -> None:
    """Nothing of it stands, and the row comes again."""
    tables = made(mysql_database, claim)
    calls: list[int] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        calls.append(delivery.attempt)
        async with transaction(delivery) as connection:
            await connection.execute("INSERT INTO notes VALUES ('n', %s)", [len(calls)])
            if len(calls) == 1:
                ((number,),) = await connection.execute("SELECT CONNECTION_ID()")
                tables.run(f"KILL {number}")

    short = Lease(1.0) if isinstance(claim, Lease) else claim
    async with serving(tables, short, handler) as runtime:
        await until(lambda: runtime.ledger("billing").acked == 1, 30)
        ledger = runtime.ledger("billing")
        assert ledger.superseded + ledger.unsettled == 1
    assert tables.run("SELECT * FROM notes") == [("n", 2)]


@forms
async def test_a_cancelled_handlers_statement_is_killed(claim: ClaimForm, mysql_database: str) -> None:
    """The server does not go on with it; the row is free at once, but for a lease's connection, which holds none."""
    tables = made(mysql_database, claim)
    asleep = "SELECT count(*) FROM information_schema.PROCESSLIST WHERE INFO = 'SELECT SLEEP(60)'"

    async def handler(delivery: Delivery[bytes]) -> None:
        async with transaction(delivery) as connection:
            await connection.execute("INSERT INTO notes VALUES ('n', 1)")
            await connection.execute("SELECT SLEEP(60)")

    with trio.CancelScope() as scope:
        async with serving(tables, claim, handler):
            await until(lambda: tables.run(asleep) == [(1,)], 20)
            scope.cancel()
    await until(lambda: tables.run(asleep) == [(0,)], 5)
    assert tables.run("SELECT * FROM notes") == []
    row = tables.row()
    assert (row["attempt"], row.get("locked_until")) == (1 if isinstance(claim, RowLock) else 2, None)
    tables.run("UPDATE jobs SET lane = 'free'")


@forms
async def test_it_is_of_no_use_behind_the_block(claim: ClaimForm, mariadb_database: str) -> None:
    """S-8.4: nor a second time at once."""
    tables = made(mariadb_database, claim)
    kept: list[Any] = []

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        async with transaction(delivery) as connection:
            kept.append(connection)
            with pytest.raises(TransactionHeld, match="lent already"):
                async with transaction(delivery):
                    pass
        with pytest.raises(TransactionHeld, match="that is over"):
            await connection.execute("SELECT 1")
        async with transaction(delivery) as connection:
            await connection.execute("INSERT INTO notes VALUES ('n', 1)")
        return Ack()

    async with serving(tables, claim, handler) as runtime:
        await until(lambda: runtime.ledger("billing").acked == 1, 20)
    with pytest.raises(TransactionHeld):
        await kept[0].execute("SELECT 1")
    assert tables.run("SELECT * FROM notes") == [("n", 1)]
