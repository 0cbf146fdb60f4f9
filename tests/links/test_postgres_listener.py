"""Wake-ups by LISTEN and NOTIFY: what another process publishes is there at once, and nothing hangs on it."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
import trio

from links.errors import ConnectionBroken, LinkBroken, LinkRefused
from links.sql import SqlBroker, SqlQueue
from links.sql.postgres import listener, writer
from links.sql.postgres.notify import payload
from settlement import RetryAfter
from tests.links.faulty_network import faulty_network
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import attached, bodies, broker_of, finish, open_link, order, until
from tests.servers.pgbouncer import pgbouncer

pytestmark = [pytest.mark.postgres, pytest.mark.servers]

LEGAL = "postgresql://me:secret@host/db"
NEVER = 600.0
"""Seconds between two polls: what comes within a test was not found by one."""
LISTENERS = "FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"


def broker(tables: PostgresTables, **given: Any) -> SqlBroker:
    return SqlBroker(tables.url, poll_interval=NEVER, listen_notify=True, **given)


async def arrives(link: Any, *expected: bytes) -> None:
    """These come, in this order, and are settled."""
    with trio.fail_after(10):
        for body in expected:
            received = await link.receive(1)
            assert bodies(received) == [body]
            assert list(await link.settle(finish(received))) == [None]


async def listening(tables: PostgresTables, count: int = 1) -> None:
    """Wait until so many sessions of ours listen."""
    await until(lambda: tables.run(f"SELECT count(*) {LISTENERS}") == [(count,)], within=10)


async def idle(link: Any) -> None:
    """It has looked, and waits."""
    with trio.move_on_after(0.3) as scope:
        await link.receive(1)
    assert scope.cancelled_caught


@asynccontextmanager
async def notified(url: str, channel: str) -> AsyncGenerator[list[str], None]:
    """What somebody else hears on a channel during the block, and a moment behind it."""
    heard: list[str] = []
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f'LISTEN "{channel}"'.encode())
        yield heard
        await trio.to_thread.run_sync(lambda: heard.extend(each.payload for each in connection.notifies(timeout=0.5)))


# --- from process to process


@pytest.mark.parametrize("leased", [True, False], ids=["lease", "row lock"])
async def test_what_another_process_publishes_is_there_at_once(database: str, leased: bool) -> None:
    """S-9.2, S-9.3: one by one, and many at once; nobody polls."""
    tables = PostgresTables(database, leased=leased).create()
    elsewhere = broker(tables)
    async with open_link(broker(tables).queue(tables.table())) as link, elsewhere.connect():
        await listening(tables)
        await idle(link)
        publisher = elsewhere.publisher(tables.table())
        for body in (b"a", b"b"):
            await publisher.publish(body)
            await arrives(link, body)
        await publisher.publish_many([b"c", b"d"])
        await arrives(link, b"c", b"d")


async def test_a_group_is_told_apart_and_nothing_means_all(database: str) -> None:
    """S-9.2: the payload is the group; an empty one wakes every group of the table."""
    tables = PostgresTables(database, grouped=True).create()
    service, elsewhere = broker(tables), broker(tables)
    queues = [service.queue(tables.table(), group=name) for name in ("one", "two")]
    async with service.connect(), elsewhere.connect(), attached(queues[0]) as one, attached(queues[1]) as two:
        await listening(tables)
        await idle(one)
        await idle(two)
        tables.add(b"unheard", group="two")
        await elsewhere.publisher(tables.table(), group="one").publish(b"a")
        await arrives(one, b"a")
        await idle(two)
        tables.add(b"b", group="one")
        tables.run("SELECT pg_notify('jobs', '')")
        await arrives(one, b"b")
        await arrives(two, b"unheard")


async def test_a_schema_is_part_of_the_channel(database: str) -> None:
    """S-9.2: the qualified name, in which `public` is left out; quotes, dots and percent signs are no matter."""
    tables = PostgresTables(database).create()
    name = 'odd "%s" schema.Jobs%'
    tables.run('CREATE SCHEMA "odd ""%s"" schema"')
    tables.run('CREATE TABLE "odd ""%s"" schema"."Jobs%" (LIKE jobs INCLUDING ALL)')
    service, elsewhere = broker(tables), broker(tables)
    async with service.connect(), elsewhere.connect():
        for here, there in ((name, name), ("jobs", "public.jobs")):
            async with attached(service.queue(tables.table(here))) as link:
                await idle(link)
                await elsewhere.publisher(tables.table(there)).publish(b"a")
                await arrives(link, b"a")


async def test_a_queue_that_attaches_later_is_heard_of_too(database: str) -> None:
    """Each table's channel is listened to from its attaching on; what came before it is found by the first look."""
    tables = PostgresTables(database).create()
    service, elsewhere = broker(tables), broker(tables)
    async with service.connect(), elsewhere.connect(), attached(service.queue(tables.table())) as first:
        await listening(tables)
        for _ in range(2):  # a second attaching, too
            async with attached(service.queue(tables.table("dead"))) as second:
                await idle(second)
                await elsewhere.publisher(tables.table("dead")).publish(b"a")
                await arrives(second, b"a")
        await elsewhere.publisher(tables.table()).publish(b"b")
        await arrives(first, b"b")
        assert tables.run(f"SELECT count(*) {LISTENERS}") == [(1,)]  # one connection for all


async def test_one_notification_for_many_rows(database: str) -> None:
    """Once for `publish_many`; and what is published side by side is told together, the last row not before it."""
    tables = PostgresTables(database).create()
    elsewhere = broker(tables)
    async with elsewhere.connect(), open_link(broker(tables).queue(tables.table())) as link:
        await listening(tables)
        await idle(link)
        publisher = elsewhere.publisher(tables.table())
        async with notified(database, "jobs") as heard:
            await publisher.publish_many([b"%d" % number for number in range(100)])
        assert heard == [""]
        async with notified(database, "jobs") as heard, trio.open_nursery() as nursery:
            for number in range(100, 200):
                nursery.start_soon(publisher.publish, b"%d" % number)
        assert 1 <= len(heard) <= 3
        found: list[bytes] = []
        with trio.fail_after(10):
            while len(found) < 200:
                received = await link.receive(7)
                found += bodies(received)
                await link.settle(finish(received))
    assert sorted(map(int, found)) == list(range(200))


async def test_what_a_row_becomes_later_is_not_told(database: str) -> None:
    """A retry, a delay or a move wakes this process alone: others find it by polling."""
    tables = PostgresTables(database).create()
    queue = broker(tables).queue(tables.table())
    tables.add(b"a")
    async with open_link(queue) as link, notified(database, "jobs") as heard:
        (received,) = await link.receive(1)
        await link.settle([order(queue, received, RetryAfter(0.1))])
        await arrives(link, b"a")
    assert heard == []


async def test_without_it_nobody_is_told(database: str) -> None:
    """S-9.5: that is the default; there are two connections then, and no NOTIFY."""
    tables = PostgresTables(database).create()
    queue = SqlBroker(database, poll_interval=NEVER).queue(tables.table())
    async with open_link(queue), notified(database, "jobs") as heard:
        await broker_of(queue).publisher(tables.table()).publish(b"a")
        ours = "FROM pg_stat_activity WHERE application_name = 'trio-settlement' AND datname = current_database()"
        assert tables.run(f"SELECT count(*) {ours}") == [(2,)]
    assert heard == []


# --- what fails


@pytest.fixture
def restricted(database: str) -> Generator[str, None, None]:
    """The URL of a user who may do anything with the tables, and may not notify."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    run = PostgresTables(database).create().run
    run(f"CREATE ROLE {name} LOGIN")
    run(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {name}")
    run("REVOKE EXECUTE ON FUNCTION pg_notify FROM PUBLIC")
    parts = urlsplit(database)
    yield urlunsplit(parts._replace(netloc=f"{name}@{parts.netloc.rpartition('@')[2]}"))
    run(f"DROP OWNED BY {name}")
    run(f"DROP ROLE {name}")


async def test_a_notification_that_fails_is_no_publish_that_fails(
    database: str, restricted: str, caplog: pytest.LogCaptureFixture
) -> None:
    """S-9.3: one warning, the row is there; and one line when it works again."""
    tables = PostgresTables(database)
    elsewhere = broker(PostgresTables(restricted))
    async with elsewhere.connect():
        publisher = elsewhere.publisher(tables.table())
        for body in (b"a", b"b"):
            await publisher.publish(body)
        await until(lambda: caplog.messages)
        tables.run("GRANT EXECUTE ON FUNCTION pg_notify TO PUBLIC")
        await publisher.publish(b"c")
        await until(lambda: len(caplog.messages) == 2)
    assert [row["payload"] for row in tables.rows()] == [b"a", b"b", b"c"]
    failed, again = caplog.messages
    assert "cannot tell other processes of what is published here; they find it by polling: permission denied" in failed
    assert again.endswith("can tell other processes of what is published here again")


async def test_the_listener_is_ended(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S-9.4: it connects again, and then every queue looks once: what came meanwhile, unheard, is found."""
    monkeypatch.setattr(listener, "PAUSE", (0.2, 0.4))
    tables = PostgresTables(database).create()
    async with open_link(broker(tables).queue(tables.table())) as link:
        for _ in range(2):
            await listening(tables)
            await idle(link)
            assert len(tables.run(f"SELECT pg_terminate_backend(pid) {LISTENERS}")) == 1
            tables.add(b"a")  # tells nobody
            await arrives(link, b"a")
    ended, again, *more = caplog.messages
    assert "cannot hear of what other processes publish" in ended
    assert again.endswith("can hear of what other processes publish again")
    assert len(more) == 2


async def test_the_listener_is_ended_again_and_again(database: str) -> None:
    """It pauses, longer each time; the processor has nothing to do, and the links go on."""
    tables = PostgresTables(database).create()
    queue = SqlBroker(database, poll_interval=0.1, listen_notify=True).queue(tables.table())
    async with open_link(queue) as link:
        await listening(tables)
        ended: set[int] = set()
        used = time.process_time()
        with psycopg.connect(database, autocommit=True) as connection:

            def end_it() -> int:
                rows = connection.execute(f"SELECT pid, pg_terminate_backend(pid) {LISTENERS}".encode()).fetchall()
                ended.update(row[0] for row in rows)
                return len(ended)

            with trio.move_on_after(5):
                await until(lambda: end_it() > 4, within=60)
            assert len(ended) <= 4  # at 0 s, 1 s and 3 s, each ±20 %
            assert time.process_time() - used < 1.5
            await until(lambda: end_it() > 1, within=20)
        tables.add(b"a")
        await arrives(link, b"a")


async def test_the_listener_is_cut_off_in_silence(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that swallows all tells nothing: the server is asked from time to time, and another way is found."""
    monkeypatch.setattr(listener, "PAUSE", (0.1, 0.2))
    monkeypatch.setattr(listener, "HEARTBEAT", 0.2)
    monkeypatch.setattr(listener, "ANSWER", 0.5)
    tables = PostgresTables(database).create()
    parts = urlsplit(database)
    async with faulty_network(parts.hostname or "", parts.port or 5432) as network:
        queue = broker(tables, direct_url=network.url(database)).queue(tables.table())
        async with open_link(queue) as link:
            await listening(tables)
            await idle(link)
            network.freeze()
            tables.add(b"a")
            tables.run("SELECT pg_notify('jobs', '')")
            before = network.connections
            await until(lambda: network.connections > before, within=10)
            network.thaw()
            await arrives(link, b"a")


async def test_the_life_ends_with_its_writers(postgres: str, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener holds nobody up: where the other connections are not to be had, the life is over."""
    monkeypatch.setattr(writer, "RECONNECT", 0.5)
    name, server = urlsplit(database).path.lstrip("/"), PostgresTables(postgres)
    elsewhere = broker(PostgresTables(database).create())

    async def out_of_reach() -> None:
        async with elsewhere.connect():
            server.run(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS off')
            server.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", name)
            while True:
                with contextlib.suppress(LinkBroken):
                    await elsewhere.publisher(PostgresTables(database).table()).publish(b"a")

    with trio.fail_after(20), pytest.raises(ConnectionBroken, match="there is no other"):
        await out_of_reach()


async def test_a_later_life_does_not_wait_for_it(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start-up needs it; after weather the queues go on without, by polling, until it hears again."""
    monkeypatch.setattr(listener, "PAUSE", (0.1, 0.2))
    tables = PostgresTables(database).create()
    parts = urlsplit(database)
    async with faulty_network(parts.hostname or "", parts.port or 5432) as network:
        queue = broker(tables, direct_url=network.url(database)).queue(tables.table())
        network.refuse()
        with pytest.raises(ConnectionBroken):
            async with open_link(queue):
                pass
        network.admit()
        async with open_link(queue):
            await listening(tables)
        network.refuse()
        async with open_link(queue) as link:
            await idle(link)
            await broker_of(queue).publisher(tables.table()).publish(b"a")
            await arrives(link, b"a")
            network.admit()
            await listening(tables)
            await idle(link)
            tables.run("INSERT INTO jobs (payload) VALUES ('b')")
            tables.run("SELECT pg_notify('jobs', '')")
            await arrives(link, b"b")


async def test_a_payload_that_cannot_be_read(postgres: str) -> None:
    """In a database without an encoding anybody may notify bytes that are none: who listens is ended, and goes on."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    server = PostgresTables(postgres)
    server.run(f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' TEMPLATE template0")
    try:
        tables = PostgresTables(urlunsplit(urlsplit(postgres)._replace(path=f"/{name}"))).create()
        async with open_link(broker(tables).queue(tables.table())) as link:
            await listening(tables)
            await idle(link)
            tables.add(b"a")
            tables.run("SELECT pg_notify('jobs', convert_from('\\xff', 'SQL_ASCII'))")
            await arrives(link, b"a")
    finally:
        server.run(f"DROP DATABASE {name} WITH (FORCE)")


async def test_nothing_is_left_behind(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every connection is closed: at the end of a life, of a start that was cancelled, and of one that was refused."""
    tables = PostgresTables(database).create()
    ours = "FROM pg_stat_activity WHERE application_name = 'trio-settlement' AND datname = current_database()"
    queue = broker(tables).queue(tables.table())
    async with open_link(queue):
        await listening(tables)
        assert tables.run(f"SELECT count(*) {ours}") == [(3,)]
    await until(lambda: tables.run(f"SELECT count(*) {ours}") == [(0,)])

    monkeypatch.setattr(listener, "HEARING", 60.0)
    other = urlunsplit(urlsplit(database)._replace(path="/postgres"))
    with trio.move_on_after(0.5) as scope:
        async with broker(tables, direct_url=other).connect():
            pass
    assert scope.cancelled_caught
    await until(lambda: tables.run(f"SELECT count(*) {ours}") == [(0,)])


# --- start-up


async def test_another_database_hears_nothing(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`direct_url` that names another one, with the right tables perhaps: refused, and not silently deaf."""
    monkeypatch.setattr(listener, "HEARING", 0.5)
    tables = PostgresTables(database).create()
    other = urlunsplit(urlsplit(database)._replace(path="/postgres"))
    with pytest.raises(LinkRefused, match=r"nothing is heard at direct_url .* must name the same database"):
        async with broker(tables, direct_url=other).connect():
            pass


async def test_nobody_is_at_direct_url(database: str) -> None:
    """That is weather, and names where; never a password."""
    tables = PostgresTables(database).create()
    with pytest.raises(ConnectionBroken, match=r"127\.0\.0\.1:1/db") as caught:
        async with broker(tables, direct_url="postgresql://me:secret@127.0.0.1:1/db").connect():
            pass
    assert "secret" not in str(caught.value)


async def test_behind_a_pooler(database: str, pooled: str, postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused with the way out; heard by the server's own URL, and by that of a pooler in session mode."""
    monkeypatch.setattr(listener, "HEARING", 2.0)
    tables = PostgresTables(pooled).create()
    with pytest.raises(LinkRefused, match=r"there is a pooler in front of the server; give SqlBroker .* direct_url=…"):
        async with broker(tables).connect():
            pass
    with pytest.raises(LinkRefused, match="the server itself or a pooler in session mode"):
        async with broker(tables, direct_url=pooled).connect():
            pass
    with pgbouncer(postgres, pool_mode="session") as url:
        for direct in (database, urlunsplit(urlsplit(database)._replace(netloc=urlsplit(url).netloc))):
            elsewhere = broker(tables, direct_url=direct)
            queue = broker(tables, direct_url=direct).queue(tables.table())
            async with open_link(queue) as link, elsewhere.connect():
                await idle(link)
                await elsewhere.publisher(tables.table()).publish(b"a")
                await arrives(link, b"a")


async def test_a_name_that_is_too_long_for_a_channel(database: str) -> None:
    """S-9.2: 63 bytes with the schema; refused when the queue attaches, by name."""
    tables = PostgresTables(database).create()
    fits, long = f"{'s' * 31}.{'t' * 31}", f"{'s' * 31}.{'t' * 32}"
    tables.run(f"CREATE SCHEMA {'s' * 31}")
    for name in (fits, long):
        tables.run(f"CREATE TABLE {name} (LIKE jobs INCLUDING ALL)")
    service = broker(tables)
    async with service.connect():
        async with attached(service.queue(tables.table(fits))) as link:
            await idle(link)
            await service.publisher(tables.table(fits)).publish(b"a")
            await arrives(link, b"a")
        with pytest.raises(LinkRefused, match=f"subscription 'test', table '{long}': .* 63 bytes"):
            async with attached(service.queue(tables.table(long))):
                pass
        other: SqlQueue[bytes] = SqlBroker(database).queue(tables.table(long))
        async with open_link(other):
            pass


@pytest.mark.parametrize(
    ("url", "given", "why"),
    [
        ("sqlite:///q.db", {"listen_notify": True}, "listen_notify must be False for SQLite.*poll_interval"),
        ("sqlite:///q.db", {"direct_url": "sqlite:///q.db"}, "direct_url must be None for SQLite"),
        (
            LEGAL,
            {"direct_url": "mysql://me:secret@host/db"},
            "direct_url must be 'postgresql",
        ),
        (
            LEGAL,
            {"direct_url": "postgresql://me:secret@host"},
            "direct_url must .* no database",
        ),
        (LEGAL, {"direct_url": "postgresql://secret:%zz@host/db"}, "direct_url must be"),
    ],
)
def test_what_has_no_meaning(url: str, given: dict[str, Any], why: str) -> None:
    """Refused when the broker is made, with what is legal, and never a password."""
    with pytest.raises(ValueError, match=why) as caught:
        SqlBroker(url, **given)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("group", "expected"),
    [(None, ""), ("", ""), ("mail", "mail"), ("ö" * 3999, "ö" * 3999), ("ö" * 4000, ""), ("x" * 7999, "x" * 7999)],
)
def test_a_group_as_a_payload(group: str | None, expected: str) -> None:
    """PostgreSQL takes less than 8000 bytes; a longer name wakes all."""
    assert payload(group) == expected
