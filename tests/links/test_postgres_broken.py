"""Connections to PostgreSQL that are ended, mute or refused: the call under way pays for it, and no delivery."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import psycopg
import pytest
import trio
from psycopg.conninfo import conninfo_to_dict

from actors import Subscription, open_runtime
from links.errors import CallBroken, ConnectionBroken, LinkBroken, LinkRefused, SettlementUnknown
from links.sql import SqlBroker
from links.sql.postgres import writer
from links.sql.postgres.trio_connection import TrioConnection
from settlement import Ack, Delivery, Retry
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import bodies, broker_of, open_link, order

pytestmark = [pytest.mark.postgres, pytest.mark.servers]

OURS = "FROM pg_stat_activity WHERE application_name = 'trio-settlement' AND datname = current_database()"


def end_all(tables: PostgresTables) -> int:
    """End every connection of ours, as an administrator or a failover does; how many there were."""
    return len(tables.run(f"SELECT pg_terminate_backend(pid) {OURS}"))


@contextlib.asynccontextmanager
async def breaking(monkeypatch: pytest.MonkeyPatch, statement: str, *, before: bool) -> AsyncGenerator[None, None]:
    """The next statement that begins so loses its connection: before it is sent, or its answer is lost."""
    usual: Any = TrioConnection.execute
    broken = False

    async def execute(connection: TrioConnection, query: Any, *arguments: Any, **more: Any) -> Any:
        nonlocal broken
        if broken or not (query if isinstance(query, str) else query.decode()).startswith(statement):
            return await usual(connection, query, *arguments, **more)
        broken = True
        if not before:
            await usual(connection, query, *arguments, **more)
        other = await TrioConnection.open(connection.info.dsn)
        await usual(other, b"SELECT pg_terminate_backend(%s)", [connection.info.backend_pid])
        other.finish()
        while True:
            await usual(connection, b"SELECT 1")

    monkeypatch.setattr(TrioConnection, "execute", execute)
    yield
    assert broken, f"no {statement} came"


async def test_the_connections_are_ended_again_and_again(database: str) -> None:
    """DESIGN 4: a pooled connection of the lease form breaks: handlers, leases and queued settlements go on."""
    tables = PostgresTables(database).create()
    tables.add(*[b"%d" % number for number in range(30)])
    seen: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        seen.append(delivery.body)
        await trio.sleep(0.05)

    queue = tables.broker().queue(tables.table())
    async with open_runtime(Subscription(queue, handler, concurrency=4)) as runtime:
        ended = 0
        with trio.fail_after(30):
            while tables.rows():
                ended += end_all(tables)
                await trio.sleep(0.5)
        assert ended
        ledger = runtime.ledger("jobs")
        assert ledger.acked + ledger.unknown + ledger.superseded == ledger.received
        assert ledger.acked >= len(seen) - ledger.unknown
    assert {*seen} == {b"%d" % number for number in range(30)}


async def test_an_idle_connection_was_ended(database: str) -> None:
    """The next call goes by another one, and is none the worse for it."""
    tables = PostgresTables(database).create()
    queue = tables.broker().queue(tables.table())
    tables.add(b"a")
    async with open_link(queue) as link:
        (received,) = await link.receive(1)
        assert end_all(tables)
        with trio.fail_after(10):
            assert list(await link.settle([order(queue, received, Ack())])) == [None]
            await broker_of(queue).publisher(tables.table()).publish(b"b")
            assert bodies(await link.receive(1)) == [b"b"]


@pytest.mark.parametrize("before", [True, False])
async def test_amid_a_settlement(database: str, monkeypatch: pytest.MonkeyPatch, *, before: bool) -> None:
    """DESIGN 3.8: it is said again; what touched nothing then may have been said before, so it is unknown, not lost."""
    tables = PostgresTables(database).create()
    queue = tables.broker().queue(tables.table())
    tables.add(b"a", b"b")
    async with open_link(queue) as link:
        received = await link.receive(2)
        link.stop()  # so no claim goes with it: what is lost of both, tests/links/test_postgres_lost_answers.py has
        async with breaking(monkeypatch, "WITH held", before=before):
            with trio.fail_after(10):
                verdicts = await link.settle([order(queue, each, Ack()) for each in received])
        assert [type(verdict) for verdict in verdicts] == [type(None) if before else SettlementUnknown] * 2
        assert tables.rows() == []


@pytest.mark.parametrize("counts", [True, False])
async def test_amid_a_renewal(database: str, monkeypatch: pytest.MonkeyPatch, *, counts: bool) -> None:
    """DESIGN 6, SQL: after an unknown renewal the tokens are read back by id and attempt; no lease is given up."""
    tables = PostgresTables(database, counts=counts).create()
    queue = tables.broker().queue(tables.table())
    tables.add(b"a")
    async with open_link(queue) as link:
        (received,) = await link.receive(1)
        old = received.token
        async with breaking(monkeypatch, "WITH held", before=False):
            with trio.fail_after(10):
                lost = await link.extend([received])
        if counts:
            assert list(lost) == []
            assert received.token != old
            assert list(await link.settle([order(queue, received, Ack())])) == [None]
        else:
            assert list(lost) == [received]  # nothing tells whose lease it is


async def test_amid_a_claim(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-2.10: that call has failed; rows that it may have leased come back when their lease ends."""
    tables = PostgresTables(database).create()
    queue = tables.broker().queue(tables.table(), claim=None)
    tables.add(b"a")
    async with open_link(queue) as link:
        async with breaking(monkeypatch, "WITH due", before=False):
            with pytest.raises(CallBroken, match="'test'"):
                await link.receive(1)
        assert tables.row()["locked_until"] is not None
        tables.run("UPDATE jobs SET locked_until = clock_timestamp()")
        with trio.fail_after(10):
            (received,) = await link.receive(1)
        assert received.delivery.attempt == 2


@pytest.mark.parametrize("before", [True, False])
async def test_amid_a_publish(database: str, monkeypatch: pytest.MonkeyPatch, *, before: bool) -> None:
    """DESIGN 2: it may be there or not, the error says so, and it is never sent again by itself."""
    tables = PostgresTables(database).create()
    broker = tables.broker()
    async with broker.connect():
        publisher = broker.publisher(tables.table())
        async with breaking(monkeypatch, "INSERT", before=before):
            with pytest.raises(LinkBroken, match="may be there or not"):
                await publisher.publish(b"a")
        await publisher.publish(b"b")
        assert [row["payload"] for row in tables.rows()] == ([b"b"] if before else [b"a", b"b"])


async def test_no_other_connection_comes(postgres: str, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The life is over then: its links break, and what is held comes back when its lease ends."""
    monkeypatch.setattr(writer, "RECONNECT", 0.5)
    tables = PostgresTables(database).create()
    queue = tables.broker().queue(tables.table())
    tables.add(b"a")
    name = conninfo_to_dict(database)["dbname"]
    server = PostgresTables(postgres)

    async def out_of_reach() -> None:
        async with open_link(queue) as link:
            (received,) = await link.receive(1)
            server.run(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS off')
            server.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", name)
            await link.settle([order(queue, received, Retry())])

    with pytest.raises(BaseExceptionGroup) as caught:
        await out_of_reach()
    assert caught.group_contains(ConnectionBroken, match="the connection broke, and there is no other")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"user": "nobody_here"}, 'role "nobody_here" does not exist'),
        ({"path": "no_such_database"}, 'database "no_such_database" does not exist'),
    ],
)
async def test_a_server_that_says_no(database: str, change: dict[str, str], why: str) -> None:
    """DESIGN 4: at start-up that is a refusal, with the server's own words and no password."""
    parts = conninfo_to_dict(database)
    user, path = change.get("user", parts["user"]), change.get("path", parts["dbname"])
    url = f"postgresql://{user}:secret@{parts['host']}:{parts['port']}/{path}"
    broker = SqlBroker(url)
    with pytest.raises(LinkRefused, match=why) as caught:
        async with broker.connect():
            pass
    assert "secret" not in f"{caught.value}{broker!r}"


async def test_a_server_that_takes_no_writes(database: str) -> None:
    """DESIGN 4: a standby is refused at start-up, with the way out."""
    tables = PostgresTables(database).create()
    name = conninfo_to_dict(database)["dbname"]
    tables.run(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    with pytest.raises(LinkRefused, match="takes no writes"):
        async with tables.broker().connect():
            pass


async def test_nobody_listens_there() -> None:
    """DESIGN 4: an outage is weather, also at start-up; the error names where it was."""
    broker = SqlBroker("postgresql://me:secret@127.0.0.1:1/db")
    with pytest.raises(ConnectionBroken, match=r"127\.0\.0\.1:1/db") as caught:
        async with broker.connect():
            pass
    assert "secret" not in str(caught.value)


async def test_a_statement_that_hangs_ends_by_itself(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that waits for a lock of the whole table is cancelled on the server, and the next one finds the row."""
    monkeypatch.setattr(writer, "STATEMENT", 0.5)
    tables = PostgresTables(database).create()
    queue = tables.broker().queue(tables.table())
    tables.add(b"a")
    async with open_link(queue) as link:
        with psycopg.connect(database) as other:
            other.execute(b"LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(CallBroken, match="has not answered within"):
                await link.receive(1)
        with trio.fail_after(10):
            assert bodies(await link.receive(1)) == [b"a"]
        assert tables.run(f"SELECT count(*) {OURS}") == [(2,)]


async def test_a_publish_that_gets_no_answer_may_be_there_or_not(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DESIGN 2: a statement that was cancelled took effect or not, so nobody says that it was not accepted."""
    monkeypatch.setattr(writer, "STATEMENT", 0.5)
    tables = PostgresTables(database).create()
    broker = tables.broker()
    async with broker.connect():
        publisher = broker.publisher(tables.table())
        await publisher.publish(b"a")
        with psycopg.connect(database) as other:
            other.execute(b"LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(LinkBroken, match="may be there or not"):
                await publisher.publish(b"b")
        await publisher.publish(b"c")
    assert [row["payload"] for row in tables.rows()] == [b"a", b"c"]
