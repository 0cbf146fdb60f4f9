"""A broker on a real SQLite file: what is refused at start-up, and how its life ends."""

import os
import re
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio

from links.errors import ConnectionBroken, LinkRefused, NotConnected
from links.sql import SqlBroker, Table
from settlement import Policy
from settlement.sql import Finish, MoveToTable
from tests.links.sqlite_kit import (
    Database,
    Foreigner,
    attached,
    bodies,
    open_link,
    say,
)

pytestmark = pytest.mark.sqlite


def minimal(name: str = "jobs", **roles: Any) -> Table[bytes]:
    given: dict[str, Any] = {"id": "id", "payload": "payload", "locked_until": "locked_until", **roles}
    return Table(name, **given)


# --- the file


async def refused(broker: SqlBroker) -> str:
    with pytest.raises(LinkRefused) as caught, trio.fail_after(5):
        async with broker.connect():
            raise AssertionError("connected")
    return str(caught.value)


async def test_a_missing_file_is_not_created(tmp_path: Path) -> None:
    """The error names the file and the way out; nothing is made."""
    path = tmp_path / "none.db"
    message = await refused(SqlBroker(f"sqlite:///{path}"))
    assert str(path) in message
    assert "create the database and its tables first" in message
    assert list(tmp_path.iterdir()) == []


async def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert "this is a folder" in await refused(SqlBroker(f"sqlite:///{tmp_path}"))


@pytest.mark.parametrize("content", [b"this is a text, and a long one" * 100, b"short", bytes(5000)])
async def test_a_file_that_is_no_database_is_left_as_it_is(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "q.db"
    path.write_bytes(content)
    assert "no SQLite database" in await refused(SqlBroker(f"sqlite:///{path}"))
    assert path.read_bytes() == content


@pytest.mark.parametrize("wal", [False, True])
async def test_a_file_that_cannot_be_written_is_refused(wal: bool) -> None:
    """Refused when it is opened, not found out with the first claim; also by root, who becomes somebody else here."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        database = Database(folder / "q.db").create()
        if wal:
            database.run("PRAGMA journal_mode = WAL")
        user = os.geteuid()
        try:
            database.path.chmod(0o444)
            folder.chmod(0o555)
            if user == 0:
                os.seteuid(65534)  # nobody
            assert "the right to" in await refused(database.broker())
        finally:
            os.seteuid(user)
            folder.chmod(0o755)


async def test_a_relative_path_is_found_from_where_the_broker_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three slashes: relative; four: absolute. A name with characters of URLs is taken as it is."""
    database = Database(tmp_path / "ä %20#.db").create()
    database.add(b"a")
    monkeypatch.chdir(tmp_path)
    queue = SqlBroker("sqlite:///ä %20#.db").queue(database.table())
    async with open_link(queue) as link:
        assert bodies(await link.receive(1)) == [b"a"]


async def test_a_locked_file_is_waited_for_at_start_up(tmp_path: Path) -> None:
    """Bounded, then `ConnectionBroken`: weather, which a supervisor tries again."""
    database = Database(tmp_path / "q.db").create()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            with Foreigner(database):
                nursery.start_soon(opened, database)
                await trio.sleep(0.2)


async def opened(database: Database) -> None:
    async with database.broker().connect():
        pass


async def test_a_file_that_stays_locked_at_start_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("links.sql.thread_writer.PATIENCE", 0.2)
    database = Database(tmp_path / "q.db").create()
    with Foreigner(database), pytest.raises(ConnectionBroken, match="another process has held the lock of the file"):
        await opened(database)


async def test_the_file_is_in_wal_mode_and_closed_behind_us(tmp_path: Path) -> None:
    """Opened twice one after the other; after the last close no log file is left."""
    path = tmp_path / "q.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE jobs (id INTEGER PRIMARY KEY, payload BLOB, locked_until REAL)")
    broker = SqlBroker(f"sqlite:///{path}")
    for _ in range(2):
        async with broker.connect():
            await broker.publisher(minimal()).publish(b"x")
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert [each.name for each in tmp_path.iterdir()] == ["q.db"]


async def taken_away(database: Database) -> None:
    """The file is deleted, or replaced by another one, under a claimed row."""
    async with open_link(database.broker().queue(database.table())) as link:
        received = await link.receive(1)
        for path in database.path.parent.iterdir():
            path.unlink()
        with pytest.raises(ConnectionBroken, match="the file is gone"):
            await link.settle([say(received[0], Finish())])
        with pytest.raises(ConnectionBroken):
            await link.extend(received)
        await trio.sleep_forever()


async def test_a_file_that_is_taken_away_ends_the_connection(tmp_path: Path) -> None:
    """`ConnectionBroken` out of the link, and out of the broker's own life; SQLite itself would go on into nothing."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a", b"b")
    with pytest.raises(ConnectionBroken, match=re.escape(str(database.path))):
        await taken_away(database)


async def test_a_mock_clock_is_refused_with_a_word(autojump_clock: trio.abc.Clock, tmp_path: Path) -> None:
    """Not by a time-out: it runs ahead of the threads."""
    database = Database(tmp_path / "q.db").create()
    with pytest.raises(LinkRefused, match="has a mock clock"):
        async with database.broker().connect():
            raise AssertionError("connected")


@pytest.mark.parametrize("scheme", ["sqlite+x", "sqlite+aiosqlite", "postgresql+asyncpg", "h2.jdbc", "x-y"])
def test_another_scheme_is_called_by_its_name(scheme: str) -> None:
    """Never more than the scheme: the rest may hold a password."""
    with pytest.raises(ValueError, match=f"not one of scheme '{re.escape(scheme)}'") as caught:
        SqlBroker(f"{scheme}://user:secret@host/x.db")
    assert "secret" not in str(caught.value)


# --- the table


@pytest.mark.parametrize(
    ("columns", "table", "reason"),
    [
        ("id INTEGER PRIMARY KEY", minimal("none"), "there is no such table"),
        ("id INTEGER PRIMARY KEY", minimal("other.jobs"), "there is no such table"),
        ("id INTEGER PRIMARY KEY, locked_until REAL", minimal(), "no column 'payload' for the role payload"),
        ("id INTEGER PRIMARY KEY, payload, locked_until", minimal(), "'locked_until' .* is declared without a type"),
        ("id INTEGER PRIMARY KEY, payload, locked_until DATETIME", minimal(), "declared DATETIME; a time is REAL"),
        (
            "id INTEGER PRIMARY KEY, payload, locked_until REAL, due NUMERIC",
            minimal(retry_after="due"),
            "column 'due' .retry_after. is declared NUMERIC",
        ),
        (
            "id INTEGER PRIMARY KEY, payload, locked_until REAL, done BLOB",
            minimal(processed_at="done"),
            "column 'done' .processed_at. is declared BLOB",
        ),
        ("id INTEGER, payload, locked_until REAL", minimal(), "column 'id' .id. is no key of its own"),
        ("id INTEGER, payload, locked_until REAL, PRIMARY KEY (id, payload)", minimal(), "no key of its own"),
        ("id INTEGER PRIMARY KEY, payload, locked_until REAL NOT NULL", minimal(), "NULL is what a free row holds"),
        (
            "id INTEGER PRIMARY KEY, payload, locked_until REAL, tries TEXT",
            minimal(attempt="tries"),
            "column 'tries' .attempt. is declared TEXT; it counts, so declare it INTEGER",
        ),
    ],
)
async def test_a_table_that_is_no_queue_is_refused(
    columns: str, table: Table[bytes], reason: str, tmp_path: Path
) -> None:
    """S-12.3: at start-up, naming subscription, table, column and the way out."""
    database = Database(tmp_path / "q.db")
    database.run(f"CREATE TABLE jobs ({columns})")
    broker = database.broker()
    async with broker.connect():
        with pytest.raises(LinkRefused, match=reason) as caught:
            async with attached(broker.queue(table)):
                pass
    assert f"subscription 'test', table '{table.name}'" in str(caught.value)


@pytest.mark.parametrize(
    "columns",
    [
        "id TEXT PRIMARY KEY, payload, locked_until REAL",
        "id TEXT UNIQUE, payload, locked_until real",
        "id TEXT COLLATE NOCASE PRIMARY KEY, payload, locked_until REAL",
        "id TEXT COLLATE RTRIM, payload, locked_until REAL, PRIMARY KEY (id)) WITHOUT ROWID --",
        "ID INT PRIMARY KEY NOT NULL, Payload BLOB, LOCKED_UNTIL Integer",
    ],
)
async def test_a_key_may_be_declared_in_any_way(columns: str, tmp_path: Path) -> None:
    """Primary or unique; SQLite does not distinguish case in names and types."""
    database = Database(tmp_path / "q.db")
    database.run(f"CREATE TABLE jobs ({columns})")
    database.run("INSERT INTO jobs VALUES ('7', 'x', NULL)")
    async with open_link(database.broker().queue(minimal())) as link:
        (received,) = await link.receive(1)
        assert await link.settle([say(received, Finish())]) == [None]
    assert received.delivery.id == "7"


async def test_a_key_is_unique_as_it_is_compared(tmp_path: Path) -> None:
    """S-12.3: a key that is unique by another collation than its column's is none: 'a' would settle 'A' too."""
    database = Database(tmp_path / "q.db")
    database.run("CREATE TABLE jobs (id TEXT COLLATE NOCASE, payload, locked_until REAL)")
    database.run("CREATE UNIQUE INDEX plain ON jobs (id COLLATE BINARY)")
    broker = database.broker()
    async with broker.connect():
        with pytest.raises(
            LinkRefused, match=r"'id' .id. is compared by NOCASE, but it is unique by BINARY alone"
        ) as no:
            async with attached(broker.queue(minimal())):
                pass
        assert "subscription 'test', table 'jobs'" in str(no.value)
        assert "make its unique index COLLATE NOCASE" in str(no.value)
        database.run("CREATE UNIQUE INDEX as_told ON jobs (id COLLATE NOCASE)")
        async with attached(broker.queue(minimal())):
            pass


async def test_the_dead_letter_table_is_looked_at_by_attach(tmp_path: Path) -> None:
    """S-12.3: a table that is not there, or lacks a column, is refused at start-up, not by the first capped message."""
    database = Database(tmp_path / "q.db").create()
    database.run("CREATE TABLE few (id INTEGER PRIMARY KEY, payload BLOB)")
    broker = database.broker()
    queue = broker.queue(database.table())
    async with broker.connect():
        for name, reason in (("dread", "there is no such table; create it"), ("few", "there is no column 'headers'")):
            policy = Policy(max_attempts=3, dead_letter=name)
            with pytest.raises(
                LinkRefused, match=f"subscription 'test', table 'jobs': dead-letter table '{name}': {reason}"
            ):
                async with attached(queue, policy=policy):
                    pass
        async with attached(queue, policy=Policy(max_attempts=3, dead_letter="MAIN.Dead")):
            pass


async def test_a_dead_letter_group_needs_no_table(tmp_path: Path) -> None:
    """S-4.6: in a table with groups the dead letter is one of them."""
    database = Database(tmp_path / "q.db", grouped=True).create()
    broker = database.broker()
    queue = broker.queue(database.table(), group="mail")
    async with broker.connect(), attached(queue, policy=Policy(max_attempts=3, dead_letter="no table")):
        pass


async def test_names_are_quoted(tmp_path: Path) -> None:
    """S-1.5, S-19.10: quotes, keywords and blanks in names, through every verb."""
    database = Database(tmp_path / "q.db")
    columns = (
        '"select" INTEGER PRIMARY KEY, "a""b" BLOB, "lo ck" REAL, "group" TEXT, "order" INTEGER NOT NULL DEFAULT 1'
    )
    for name in ("my table", 'de"ad'):
        database.run(f'CREATE TABLE "{name.replace(chr(34), chr(34) * 2)}" ({columns})')
    table: Table[bytes] = Table(
        "my table", id="select", payload='a"b', locked_until="lo ck", partition_key="group", attempt="order"
    )
    broker = database.broker()
    queue = broker.queue(table)
    async with open_link(queue) as link:
        await broker.publisher(table).publish(b"x", key="k")
        (received,) = await link.receive(1)
        assert (received.delivery.key, await link.extend([received])) == ("k", [])
        assert await link.settle([say(received, MoveToTable('de"ad'))]) == [None]
    assert database.run('SELECT "group" FROM "de""ad"') == [("k",)]


async def test_one_queue_has_one_subscription(tmp_path: Path) -> None:
    """S-12.1: the same queue twice on one broker is refused, by whatever name; groups are queues of their own."""
    database = Database(tmp_path / "q.db", grouped=True).create()
    broker = database.broker()
    table, plain = database.table(), database.table("MAIN.Dead", group=None)
    async with broker.connect(), attached(broker.queue(table, group="a")):
        async with attached(broker.queue(table, group="b")), attached(broker.queue(plain)):
            for again in (broker.queue(table, group="b"), broker.queue(database.table("dead", group=None))):
                with pytest.raises(LinkRefused, match="already subscribed on this broker, by 'test'"):
                    async with attached(again):
                        pass
        async with attached(broker.queue(table, group="b")):
            pass


async def test_a_link_needs_an_open_broker(tmp_path: Path) -> None:
    database = Database(tmp_path / "q.db").create()
    with pytest.raises(NotConnected):
        async with attached(database.broker().queue(database.table())):
            pass


async def test_a_file_with_two_names_is_refused(tmp_path: Path) -> None:
    """SQLite keeps its log beside the name that it was opened by: by another name nobody would find it."""
    database = Database(tmp_path / "q.db").create()
    (tmp_path / "other.db").hardlink_to(database.path)
    with pytest.raises(LinkRefused, match=r"q\.db: the file has 2 names .* remove the other names"):
        async with database.broker().connect():
            raise AssertionError("connected")
    (tmp_path / "other.db").unlink()
    async with database.broker().connect():
        pass
