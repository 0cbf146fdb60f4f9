"""psycopg on trio: what a connection does, and what a cancellation leaves of it. On a real server."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
import trio
from psycopg.pq import TransactionStatus

from links.sql.postgres import trio_connection
from links.sql.postgres.trio_connection import TrioConnection

pytestmark = [pytest.mark.postgres, pytest.mark.servers]


@asynccontextmanager
async def opened(url: str, **parameters: Any) -> AsyncGenerator[TrioConnection, None]:
    connection = await TrioConnection.open(url, **parameters)
    try:
        yield connection
    finally:
        connection.finish()


async def one(connection: TrioConnection, query: str, *values: Any) -> Any:
    """The first value of the first row."""
    row = await (await connection.execute(query.encode(), values)).fetchone()
    assert row is not None
    return row[0]


async def backend(connection: TrioConnection) -> int:
    return int(await one(connection, "SELECT pg_backend_pid()"))


async def cut_off(connection: TrioConnection, query: str, after: float) -> None:
    """Run a query, and cancel it."""
    with trio.move_on_after(after) as scope:
        await connection.execute(query.encode())
    assert scope.cancelled_caught


async def test_a_query(database: str) -> None:
    """In autocommit: no transaction stays open."""
    async with opened(database) as connection:
        assert await one(connection, "SELECT %s::int + 1", 41) == 42
        assert connection.pgconn.transaction_status == TransactionStatus.IDLE


async def test_other_tasks_run_meanwhile(database: str) -> None:
    """A query that takes long stops nobody."""
    async with opened(database) as connection, trio.open_nursery() as nursery:
        nursery.start_soon(connection.execute, b"SELECT pg_sleep(0.3)")
        ticks, until = 0, trio.current_time() + 0.2
        while trio.current_time() < until:
            await trio.sleep(0.01)
            ticks += 1
        assert ticks > 5


async def test_a_name_is_looked_up_without_blocking(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By trio's resolver: each address in turn, until one answers."""
    port = urlsplit(database).port
    asked: list[object] = []

    async def answers(host: str, port: object, **_: object) -> list[Any]:
        asked.append(host)
        await trio.lowlevel.checkpoint()
        return [(0, 0, 0, "", ("127.0.0.2", port)), (0, 0, 0, "", ("127.0.0.1", port))]

    monkeypatch.setattr(trio.socket, "getaddrinfo", answers)
    async with opened(database.replace("127.0.0.1", "some-name")) as connection:
        assert connection.info.hostaddr == "127.0.0.1"
        assert connection.info.port == port
    assert asked == ["some-name"]


async def test_hosts_are_tried_in_turn(database: str) -> None:
    """A list of hosts, as libpq has it: the first one that answers."""
    port = urlsplit(database).port
    async with opened(database, host="127.0.0.1,127.0.0.1", port=f"1,{port}") as connection:
        assert await one(connection, "SELECT 1") == 1
    with pytest.raises(psycopg.ProgrammingError, match="port names 3, and there are 2 hosts"):
        await TrioConnection.open(database, host="127.0.0.1,127.0.0.1", port="1,2,3")


async def test_a_connection_that_is_refused(database: str) -> None:
    """An `OperationalError`, without the password that was given."""
    with pytest.raises(psycopg.OperationalError) as refused:
        await TrioConnection.open(database, port=1, password="secret")  # noqa: S106 -- not one
    assert "secret" not in str(refused.value)


async def test_a_server_that_does_not_answer() -> None:
    """`connect_timeout` counts; a cancellation is heard at once."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"postgresql://postgres@127.0.0.1:{mute.getsockname()[1]}/x"
        began = time.monotonic()
        with pytest.raises(psycopg.OperationalError, match="no connection within 2 s"):
            await TrioConnection.open(url, connect_timeout=2)
        assert time.monotonic() - began < 4
        with trio.move_on_after(0.1) as scope:
            await TrioConnection.open(url)
        assert scope.cancelled_caught


async def test_a_cancelled_query_leaves_the_connection_usable(database: str) -> None:
    """The same backend, idle: the server has ended the query."""
    async with opened(database) as connection:
        pid = await backend(connection)
        began = trio.current_time()
        await cut_off(connection, "SELECT pg_sleep(30)", 0.2)
        assert trio.current_time() - began < 2
        assert await backend(connection) == pid


async def test_a_cancellation_before_the_query_sends_nothing(database: str) -> None:
    """Nothing was done."""
    async with opened(database) as connection:
        await connection.execute(b"CREATE TABLE t (n int)")
        with trio.CancelScope() as scope:
            scope.cancel()
            await connection.execute(b"INSERT INTO t VALUES (1)")
        assert scope.cancelled_caught
        assert await one(connection, "SELECT count(*) FROM t") == 0


async def test_many_cancellations_at_random(database: str) -> None:
    """No connection lost, no answer of another query."""
    chance = random.Random(7)  # noqa: S311 -- a test's
    async with opened(database) as connection:
        pid = await backend(connection)
        for number in range(100):
            with trio.move_on_after(chance.uniform(0, 0.004)):
                assert await one(connection, "SELECT %s::int FROM pg_sleep(0.002)", number) == number
            assert await one(connection, "SELECT %s::int", -number) == -number
        assert await backend(connection) == pid


async def test_a_cancellation_amid_a_large_result(database: str) -> None:
    """What is still on its way is thrown away."""
    async with opened(database) as connection:
        with trio.move_on_after(0.1) as scope:
            await connection.execute(b"SELECT repeat('x', 1000) FROM generate_series(1, 3000000)")
        assert scope.cancelled_caught
        assert await one(connection, "SELECT 1") == 1


async def test_a_cancellation_amid_a_transaction_rolls_it_back(database: str) -> None:
    """Also where it comes between two statements, and where everything around is cancelled."""
    async with opened(database) as connection:
        await connection.execute(b"CREATE TABLE t (n int)")
        for query in (b"SELECT pg_sleep(30)", None):
            with trio.move_on_after(0.1) as scope:
                async with connection.transaction():
                    await connection.execute(b"INSERT INTO t VALUES (1)")
                    if query is None:
                        await trio.sleep_forever()
                    await connection.execute(query)
            assert scope.cancelled_caught
            assert connection.pgconn.transaction_status == TransactionStatus.IDLE
        assert await one(connection, "SELECT count(*) FROM t") == 0


async def test_a_transaction_ends_in_spite_of_a_cancellation(database: str) -> None:
    """A COMMIT that has begun is heard to its end: it took effect, or did not."""
    async with opened(database) as connection:
        await connection.execute(b"CREATE TABLE t (n int)")
        with trio.CancelScope() as scope:
            async with connection.transaction():
                await connection.execute(b"INSERT INTO t VALUES (1)")
                scope.cancel()
        assert await one(connection, "SELECT count(*) FROM t") == 1


async def _fails(connection: TrioConnection) -> None:
    async with connection.transaction():
        await connection.execute(b"INSERT INTO t VALUES (2)")
        await connection.execute(b"SELECT 1 / 0")


async def test_transactions_nest(database: str) -> None:
    """A failure inside goes back to its savepoint."""
    async with opened(database) as connection:
        await connection.execute(b"CREATE TABLE t (n int)")
        async with connection.transaction():
            await connection.execute(b"INSERT INTO t VALUES (1)")
            with pytest.raises(psycopg.errors.DivisionByZero):
                await _fails(connection)
        assert await one(connection, "SELECT sum(n) FROM t") == 1


async def test_a_statement_that_does_not_end_closes_the_connection(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The shield has a deadline: what cannot be cancelled is given up."""
    monkeypatch.setattr(trio_connection, "LANDING", 0.3)

    async def unheard(_: TrioConnection, **__: object) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(TrioConnection, "cancel_safe", unheard)
    async with opened(database) as connection:
        began = trio.current_time()
        await cut_off(connection, "SELECT pg_sleep(30)", 0.1)
        assert trio.current_time() - began < 2
        assert connection.closed
        with pytest.raises(psycopg.OperationalError):
            await connection.execute(b"SELECT 1")
    assert "did not end after its cancellation, within 0.3 s" in caplog.text


async def test_fifty_tasks_share_a_connection(database: str) -> None:
    """One after the other, each gets its own answer."""
    async with opened(database) as connection:

        async def ask(number: int) -> None:
            assert await one(connection, "SELECT %s::int", number) == number

        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(ask, number)


async def test_notifications(database: str) -> None:
    """Each is heard once; a wait that was cancelled takes none, and leaves the connection usable."""
    async with opened(database) as listener, opened(database) as other:
        await listener.execute(b"LISTEN jobs")
        with trio.move_on_after(0.1) as scope:
            await listener.until_notified()
        assert scope.cancelled_caught
        await other.execute(b"NOTIFY jobs")
        with trio.fail_after(5):
            assert await listener.until_notified() == ["jobs"]
        assert await one(listener, "SELECT 1") == 1


async def test_a_backend_that_is_killed(database: str) -> None:
    """Amid a query, and while it listens: an `OperationalError`, at once."""
    async with opened(database) as victim, opened(database) as other:
        pid = await backend(victim)
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:

                async def dies() -> None:
                    with pytest.raises(psycopg.OperationalError):
                        await victim.execute(b"SELECT pg_sleep(30)")

                nursery.start_soon(dies)
                await trio.sleep(0.1)
                await other.execute(b"SELECT pg_terminate_backend(%s)", [pid])
    async with opened(database) as victim, opened(database) as other:
        await victim.execute(b"LISTEN jobs")
        pid = await backend(victim)
        with trio.fail_after(10):
            await other.execute(b"SELECT pg_terminate_backend(%s)", [pid])
            with pytest.raises(psycopg.OperationalError):
                await victim.until_notified()


async def test_closed_while_somebody_waits(database: str) -> None:
    """Who waits hears of it."""
    async with opened(database) as connection:
        await connection.execute(b"LISTEN jobs")
        async with trio.open_nursery() as nursery:

            async def waits() -> None:
                with pytest.raises(psycopg.OperationalError, match="closed"):
                    await connection.until_notified()

            nursery.start_soon(waits)
            await trio.testing.wait_all_tasks_blocked(0.05)
            await connection.close()


async def test_pipelines(database: str) -> None:
    """Many statements in one go; an error in one is that one's; a cancelled pipeline closes the connection."""
    async with opened(database) as connection:
        await connection.execute(b"CREATE TABLE t (n int PRIMARY KEY)")
        async with connection.pipeline():
            for number in range(200):
                await connection.execute(b"INSERT INTO t VALUES (%s)", [number])
        assert await one(connection, "SELECT count(*) FROM t") == 200
        with pytest.raises(psycopg.errors.UniqueViolation):
            async with connection.pipeline():
                await connection.execute(b"INSERT INTO t VALUES (1)")
        assert await one(connection, "SELECT count(*) FROM t") == 200
        with trio.move_on_after(0.1) as scope:
            async with connection.pipeline():
                await (await connection.execute(b"SELECT pg_sleep(30)")).fetchone()
        assert scope.cancelled_caught
        assert connection.closed


async def test_a_pipeline_that_fails_at_its_end(database: str) -> None:
    """By a deferred constraint, which no statement of it tells of: the next statement gets its own answer."""
    connection = await TrioConnection.open(database)
    await connection.execute("CREATE TABLE jobs (id int PRIMARY KEY)")
    await connection.execute("CREATE TABLE notes (job int REFERENCES jobs DEFERRABLE INITIALLY DEFERRED)")
    await connection.execute("INSERT INTO jobs VALUES (1)")
    await connection.execute("INSERT INTO notes VALUES (1)")

    async def both() -> None:
        async with connection.pipeline():
            await connection.execute("DELETE FROM jobs")
            await connection.execute("SELECT 1")

    for number in range(8):  # so that statements are prepared, too
        with pytest.raises(psycopg.Error):
            await both()
        if connection.closed:  # its end had not come yet
            connection = await TrioConnection.open(database)
        assert await (await connection.execute("SELECT %s::int", [number])).fetchone() == (number,)
        assert await (await connection.execute("SELECT id FROM jobs")).fetchall() == [(1,)]
    await connection.close()


async def test_copy(database: str) -> None:
    """In and out; a long one lets others run; a cancelled one leaves the connection usable."""
    async with opened(database) as connection:
        await connection.execute(b"CREATE TABLE t (n int, body text)")
        cursor = connection.cursor()
        async with cursor.copy(b"COPY t FROM STDIN") as copy:
            for number in range(1000):
                await copy.write_row((number, "x" * 100))
        assert await one(connection, "SELECT count(*) FROM t") == 1000
        async with cursor.copy(b"COPY t TO STDOUT") as copy:
            assert len([row async for row in copy.rows()]) == 1000
        written = 0
        with trio.move_on_after(0.2) as scope:
            async with cursor.copy(b"COPY t FROM STDIN") as copy:
                while True:
                    await copy.write_row((1, "x" * 10_000))
                    written += 1
        assert scope.cancelled_caught
        assert written
        assert await one(connection, "SELECT count(*) FROM t") == 1000


async def test_prepared_and_many(database: str) -> None:
    """What comes again is prepared by psycopg, which sends many values in a pipeline of its own."""
    async with opened(database) as connection:
        await connection.execute(b"CREATE TABLE t (n int)")
        for number in range(10):
            assert await one(connection, "SELECT %s::int", number) == number
        cursor = connection.cursor()
        await cursor.executemany(b"INSERT INTO t VALUES (%s) RETURNING n", [(n,) for n in range(500)], returning=True)
        assert await one(connection, "SELECT count(*) FROM t") == 500


async def test_server_cursors_and_streams(database: str) -> None:
    """Rows as they come."""
    async with opened(database) as connection:
        async with connection.transaction(), connection.cursor("rows") as cursor:
            await cursor.execute(b"SELECT generate_series(1, 1000)")
            assert len([row async for row in cursor]) == 1000
        stream = connection.cursor().stream(b"SELECT generate_series(1, 1000)")
        assert len([row async for row in stream]) == 1000
        assert await one(connection, "SELECT 1") == 1
