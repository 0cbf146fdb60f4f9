"""Through a pooler in transaction mode: each transaction may be in another session, and each session is everybody's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
import trio
from psycopg.pq import TransactionStatus

from actors import Subscription, open_runtime
from links.errors import LinkRefused
from links.sql import AdvisoryLock, SqlBroker
from links.sql.postgres.session import is_pooled
from links.sql.postgres.trio_connection import TrioConnection
from links.sql.transaction import transaction
from links.testing import CHECKS, Check
from settlement import Ack, Delivery
from settlement.sql import Finish, PutBack
from tests.links.postgres_kit import a_database
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import bodies, broker_of, open_link, order, say, until
from tests.servers.pgbouncer import pgbouncer
from tests.test_conformance_postgres import SHAPES

pytestmark = [pytest.mark.postgres, pytest.mark.servers]


@pytest.fixture
def database(postgres: str) -> Generator[str, None, None]:
    """A database of a name of its own: a pooler remembers what the server has once said of one."""
    with a_database(postgres) as url:
        yield url


MOST = 3 * 8
"""psycopg prepares what it has run five times; and there are three sessions."""


@asynccontextmanager
async def opened(url: str) -> AsyncGenerator[TrioConnection, None]:
    connection = await TrioConnection.open(url, application_name="the test's own")
    try:
        yield connection
    finally:
        connection.finish()


async def one(connection: TrioConnection, query: str) -> Any:
    """The first value of the first row."""
    row = await (await connection.execute(query.encode(), prepare=False)).fetchone()
    assert row is not None
    return row[0]


async def each_session(url: str, query: str, *before: str) -> dict[int, Any]:
    """What a query gives in three of the pooler's sessions, by the server's process, behind other statements.

    Three transactions that are open at once are in three sessions: of one alone nobody knows which.
    """
    found: dict[int, Any] = {}
    with trio.fail_after(30):
        async with AsyncExitStack() as stack:
            for _ in range(3):
                connection = await stack.enter_async_context(opened(url))
                await stack.enter_async_context(connection.transaction())
                process = await one(connection, "SELECT pg_backend_pid()")
                for statement in before:
                    await connection.execute(statement.encode(), prepare=False)
                found[process] = await one(connection, query)
    assert len(found) == 3
    return found


async def test_a_pooler_is_told_from_a_server(database: str, pooled: str, postgres: str) -> None:
    """Also one in session mode is a pooler: nothing tells it from the others."""
    async with opened(database) as connection:
        assert not await is_pooled(connection)
        assert connection.info.transaction_status == TransactionStatus.IDLE
    async with opened(pooled) as connection:
        assert await is_pooled(connection)
    assert await each_session(pooled, "SELECT 1")
    with pgbouncer(postgres, pool_mode="session") as url:
        async with opened(url) as connection:
            assert await is_pooled(connection)


@pytest.mark.parametrize("check", [check for check in CHECKS if str(check).startswith("L-")], ids=str)
@pytest.mark.parametrize("shape", ["tables", "row locks"])
async def test_a_link_conforms(shape: str, check: Check, pooled: str) -> None:
    """Both forms: to receive, to extend, to settle, to give back, and every cancellation of it."""
    await check(SHAPES[shape](pooled))


async def test_nothing_is_prepared(pooled: str, caplog: pytest.LogCaptureFixture) -> None:
    """A prepared statement is in one session, under a name that in another is somebody else's: there is none.

    Others prepare other statements under psycopg's names in every session; ours are right all the same.
    """
    tables = PostgresTables(pooled).create()
    taken = [f"PREPARE _pg3_{number} AS SELECT 1" for number in range(10)]
    await each_session(pooled, "SELECT 1", *taken)
    queue = tables.broker().queue(tables.table())
    async with open_link(queue) as link:
        publisher = broker_of(queue).publisher(tables.table())
        for number in range(MOST):
            await publisher.publish(b"%d" % number)
            (received,) = await link.receive(1)
            assert (received.delivery.body, received.delivery.attempt) == (b"%d" % number, 1)
            assert list(await link.extend([received])) == []
            assert list(await link.settle([say(received, PutBack(count=False))])) == [None]
            (received,) = await link.receive(1)
            assert list(await link.settle([say(received, Finish())])) == [None]
        counts = await each_session(pooled, "SELECT count(*) FROM pg_prepared_statements")
    assert {*counts.values()} <= {0, 10}  # 0: of a session that was made since
    assert tables.rows() == []
    assert [record.message for record in caplog.records] == []


@pytest.mark.parametrize("leased", [True, False], ids=["lease", "row lock"])
async def test_a_service(pooled: str, leased: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Eight handlers, who publish in turn; in the row-lock form each writes in its row's own transaction."""
    tables = PostgresTables(pooled, leased=leased).create()
    tables.run("CREATE TABLE done (payload bytea)")
    tables.add(*[b"%d" % number for number in range(40)])
    queue = tables.broker().queue(tables.table())
    publisher = broker_of(queue).publisher(tables.table())

    async def handler(delivery: Delivery[bytes]) -> None:
        number = int(delivery.body)
        if number < 40:
            await publisher.publish(b"%d" % (number + 40))
        write = b"INSERT INTO done VALUES (%s)"
        if leased:
            async with opened(pooled) as connection:
                await connection.execute(write, [delivery.body], prepare=False)
        else:
            async with transaction(delivery) as connection:
                await connection.execute(write, [delivery.body])

    async with open_runtime(Subscription(queue, handler, concurrency=8)) as runtime:
        await until(lambda: runtime.ledger("jobs").acked == 80, within=30)
    assert tables.rows() == []
    done = tables.run("SELECT payload FROM done")
    assert sorted(int(payload) for (payload,) in done) == list(range(80))
    assert [record.message for record in caplog.records if record.levelname != "INFO"] == []


async def test_the_server_ends_the_poolers_sessions(database: str, pooled: str) -> None:
    """The call under way pays at most; leases live on."""
    tables = PostgresTables(database).create()
    queue = PostgresTables(pooled).broker().queue(tables.table())
    tables.add(b"a")
    async with open_link(queue) as link:
        (received,) = await link.receive(1)
        for _ in range(2):
            tables.run(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
                " AND datname = current_database()"
            )
            with trio.fail_after(10):
                assert list(await link.extend([received])) == []
        assert list(await link.settle([order(queue, received, Ack())])) == [None]
        await broker_of(queue).publisher(tables.table()).publish(b"b")
        with trio.fail_after(10):
            assert bodies(await link.receive(1)) == [b"b"]


async def test_the_server_ends_the_session_that_holds_a_row(database: str, pooled: str) -> None:
    """The handler is cancelled while it runs, since the claim has ended; and the row comes again."""
    tables = PostgresTables(database, leased=False).create()
    tables.add(b"a")
    ended: list[bool] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        if ended:
            return
        holders = "FROM pg_stat_activity WHERE state = 'idle in transaction' AND datname = current_database()"
        ended.extend(row[0] for row in tables.run(f"SELECT pg_terminate_backend(pid) {holders}"))
        with trio.fail_after(10):
            await trio.sleep_forever()

    queue = PostgresTables(pooled).broker().queue(tables.table())
    async with open_runtime(Subscription(queue, handler)) as runtime:
        await until(lambda: runtime.ledger("jobs").acked == 1, within=20)
        ledger = runtime.ledger("jobs")
        assert (ledger.received, ledger.unsettled) == (2, 1)
    assert ended == [True]
    assert tables.rows() == []


# --- settings


@pytest.fixture
def setting(database: str) -> Callable[[str, str], None]:
    """Have every session of the database begin with this setting."""
    name = urlsplit(database).path.lstrip("/")

    def set_it(setting: str, value: str) -> None:
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute(f"ALTER DATABASE \"{name}\" SET {setting} = '{value}'".encode())

    return set_it


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("default_transaction_isolation", "serializable"),
        ("default_transaction_isolation", "repeatable read"),
        ("DateStyle", "SQL, DMY"),
        ("extra_float_digits", "-3"),
    ],
)
async def test_a_setting_that_would_not_stay(setting: Any, database: str, pooled: str, name: str, value: str) -> None:
    """It is refused by name, with the way out, behind a pooler; without one it is set for our sessions."""
    setting(name, value)
    with pytest.raises(
        LinkRefused, match=f"pooler .* {name} is '.*' behind it; say ALTER ROLE … SET {name} = "
    ) as told:
        async with PostgresTables(pooled).broker().connect():
            pass
    assert urlsplit(pooled).netloc.rpartition("@")[2] in str(told.value)
    async with PostgresTables(database).broker().connect():
        pass


async def test_a_setting_that_serves(setting: Any, database: str, pooled: str) -> None:
    """ISO with another order, and more digits than the default."""
    setting("DateStyle", "ISO, DMY")
    setting("extra_float_digits", "2")
    tables = PostgresTables(pooled).create()
    tables.add(b"a")
    async with open_link(tables.broker().queue(tables.table())) as link:
        assert bodies(await link.receive(1)) == [b"a"]


async def test_the_sessions_of_others_stay_as_they_are(setting: Any, pooled: str) -> None:
    """They are shared, so nothing is set in one."""
    setting("extra_float_digits", "2")
    tables = PostgresTables(pooled).create()
    await each_session(pooled, "SELECT 1")
    queue = tables.broker().queue(tables.table())
    async with open_link(queue):
        await broker_of(queue).publisher(tables.table()).publish(b"a")
        found = await each_session(pooled, "SELECT current_setting('extra_float_digits')")
    assert {*found.values()} == {"2"}


async def test_advisory_locks_need_a_session(database: str, pooled: str) -> None:
    """S-2.7, issue 8: behind a pooler refused at start-up, with the way out; by `direct_url` they work."""
    tables = PostgresTables(database, leased=False).create()
    tables.add(b"a")
    claim = AdvisoryLock("key {id}")
    queue = SqlBroker(pooled).queue(tables.table(), claim=claim)
    with pytest.raises(LinkRefused, match=r"there is a pooler in front.*direct_url=…\), or claim by Lease"):
        async with open_link(queue):
            pass
    queue = SqlBroker(pooled, direct_url=database).queue(tables.table(), claim=claim)
    async with open_link(queue) as link:
        with trio.fail_after(10):
            (received,) = await link.receive(1)
        assert tables.run("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == [(1,)]
        assert await link.settle([say(received, Finish())]) == [None]
    assert tables.rows() == []
