"""What befalls the files of a database while it is in use: nothing is confirmed that is not there."""

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio

from links.errors import CallBroken, ConnectionBroken, LinkBroken, NotApplied, PublishNotAccepted
from links.sql import SqlBroker
from links.sql.sqlite import watch as files
from links.sql.sqlite.connection import SqliteConnection
from links.sql.sqlite.schema import SqliteSession
from links.sql.sqlite.watch import SqliteWatch
from settlement.sql import MoveToTable
from tests.links.sqlite_kit import Database, attached, bodies, finish, open_link, say

pytestmark = pytest.mark.sqlite


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def closed_by_another_process(path: Path) -> None:
    """Closing any descriptor of the file drops this process's locks; then one SELECT of another takes the log away."""
    shutil.copyfile(path, beside(path, ".copy"))
    script = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT * FROM jobs').fetchall(); c.close()"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)


def replaced(path: Path) -> None:
    shutil.copyfile(path, beside(path, ".new"))
    beside(path, ".new").rename(path)


def another_log(path: Path) -> None:
    beside(path, "-wal").rename(beside(path, "-old"))
    beside(path, "-wal").touch()


def another_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))
    path.parent.mkdir()


TAKEN: dict[str, Callable[[Path], object]] = {
    "another process": closed_by_another_process,
    "rm wal": lambda path: beside(path, "-wal").unlink(),
    "rm shm": lambda path: beside(path, "-shm").unlink(),
    "mv wal": lambda path: beside(path, "-wal").rename(beside(path, "-old")),
    "another wal": another_log,
    "replaced": replaced,
    "mv folder": another_folder,
}


def leaves(error: BaseException) -> list[BaseException]:
    """The errors of a group: the caller's and the broker's end may come together."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaves(each)]
    return [error]


def broken(error: BaseException, what: str) -> bool:
    """Does it say that, and nothing but that a connection broke?"""
    return all(isinstance(leaf, (LinkBroken, ConnectionBroken)) and what in str(leaf) for leaf in leaves(error))


async def publish(broker: SqlBroker, database: Database, how: str, confirmed: list[bytes]) -> None:
    publisher = broker.publisher(database.table())
    async with broker.connect():
        await publisher.publish(b"first")
        confirmed.append(b"first")
        TAKEN[how](database.path)
        for number in range(5):
            await publisher.publish(b"%d" % number)
            confirmed.append(b"%d" % number)


def folder(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    return tmp_path / "here" / "q.db"


@pytest.mark.parametrize("how", TAKEN)
async def test_a_publish_into_nothing_is_not_confirmed(how: str, tmp_path: Path) -> None:
    """The life breaks loudly with the first that may be lost."""
    database = Database(folder(tmp_path)).create()
    confirmed: list[bytes] = []
    with pytest.raises((LinkBroken, ConnectionBroken, ExceptionGroup)) as caught:
        await publish(database.broker(), database, how, confirmed)
    assert broken(caught.value, "the file")
    assert confirmed == [b"first"]


async def settle(database: Database, how: str) -> None:
    async with open_link(database.broker().queue(database.table())) as link:
        received = await link.receive(1)
        TAKEN[how](database.path)
        with pytest.raises(ConnectionBroken, match="the file"):
            await link.settle(finish(received))
        await trio.sleep_forever()


@pytest.mark.parametrize("how", TAKEN)
async def test_a_settlement_into_nothing_is_unknown(how: str, tmp_path: Path) -> None:
    """No verdict, but the end of the life; and that is heard by the broker's owner."""
    database = Database(folder(tmp_path)).create()
    database.add(b"a", b"b")
    with pytest.raises((LinkBroken, ConnectionBroken, ExceptionGroup)) as caught:
        await settle(database, how)
    assert broken(caught.value, "the file")


async def test_a_lasting_quiet_is_believed_and_its_end_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing changes in the folder one look is one stat; a change is seen by the next."""
    database = Database(tmp_path / "q.db").create()
    looked: list[Any] = []
    identity = files._identity
    monkeypatch.setattr(files, "_QUIET", 0)
    with closing(sqlite3.connect(database.path)) as connection:
        connection.execute("INSERT INTO jobs (payload) VALUES ('x')")
        connection.commit()
        watch = SqliteWatch(database.path, identity(str(database.path)))

        def counted(name: str) -> tuple[int, int]:
            looked.append(name)
            return identity(name)

        monkeypatch.setattr(files, "_identity", counted)
        for _ in range(20):
            assert watch.look() is None
        assert len(looked) <= 6
        beside(database.path, "-wal").rename(beside(database.path, "-old"))
        assert watch.look() == "the file is gone: q.db-wal: No such file or directory"


async def test_a_folder_that_keeps_no_time_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is believed for a second at most, and not at all where the path is a symbolic link."""
    database = Database(tmp_path / "q.db").create()
    monkeypatch.setattr(files, "_QUIET", 0)
    monkeypatch.setattr(files, "_OFTEN", 0.0)
    with closing(sqlite3.connect(database.path)) as connection:
        connection.execute("INSERT INTO jobs (payload) VALUES ('x')")
        connection.commit()
        watch = SqliteWatch(database.path, files._identity(str(database.path)))
        assert watch.look() is None
        before = tmp_path.stat()
        beside(database.path, "-wal").rename(beside(database.path, "-old"))
        os.utime(tmp_path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert watch.look() is not None


async def test_a_link_that_is_turned_elsewhere_is_seen(tmp_path: Path) -> None:
    """The broker's path is a symbolic link, and now it names another file."""
    one = Database(tmp_path / "one.db").create()
    other = Database(tmp_path / "other.db").create()
    link = tmp_path / "link.db"
    link.symlink_to(one.path)
    broker = SqlBroker(f"sqlite:///{link}")

    async def turned() -> None:
        async with broker.connect():
            await broker.publisher(one.table()).publish(b"1")
            link.unlink()
            link.symlink_to(other.path)
            await broker.publisher(one.table()).publish(b"2")

    with pytest.raises((LinkBroken, ConnectionBroken, ExceptionGroup)) as caught:
        await turned()
    assert broken(caught.value, "replaced by another: link.db")


MAINTENANCE = (
    "PRAGMA wal_checkpoint(TRUNCATE)",
    "PRAGMA wal_checkpoint(RESTART)",
    "VACUUM",
    "PRAGMA journal_mode = DELETE",
    "REINDEX",
    "ANALYZE",
)


@pytest.mark.parametrize("statement", MAINTENANCE)
async def test_maintenance_by_another_process_ends_nothing(statement: str, tmp_path: Path) -> None:
    """The files stay the same ones; what cannot be done beside us is refused to the other, not to us."""
    database = Database(tmp_path / "q.db").create()
    database.add(*[b"%d" % number for number in range(20)])
    async with open_link(database.broker().queue(database.table())) as link:
        for _ in range(4):
            received = await link.receive(5)
            with closing(sqlite3.connect(database.path, isolation_level=None, timeout=0.2)) as other:
                try:
                    other.execute(statement).fetchall()
                except sqlite3.OperationalError as error:
                    assert "locked" in str(error)  # noqa: PT017 -- only some are refused
            assert await link.settle(finish(received)) == [None] * 5
    assert database.rows() == []


async def test_a_reader_that_keeps_its_snapshot_holds_nobody_up(tmp_path: Path) -> None:
    """It sees what was there; the queue goes on."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a", b"b")
    with closing(sqlite3.connect(database.path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert len(reader.execute("SELECT * FROM jobs").fetchall()) == 2
        async with open_link(database.broker().queue(database.table())) as link:
            assert await link.settle(finish(await link.receive(2))) == [None, None]
        assert len(reader.execute("SELECT * FROM jobs").fetchall()) == 2
    assert database.rows() == []


# --- a full disk


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that cannot let their file grow."""
    connect = SqliteConnection._connect

    def connecting(self: SqliteConnection) -> None:
        connect(self)
        (pages,) = self._open.execute("PRAGMA page_count").fetchone()
        self._open.execute(f"PRAGMA max_page_count = {pages + 20}")

    monkeypatch.setattr(SqliteConnection, "_connect", connecting)


async def test_a_full_disk_confirms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publish is not accepted, a move not applied; what needs no room is said, and the life goes on."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a" * 20_000, b"b")
    published = 0
    small(monkeypatch)
    broker = database.broker()
    async with broker.connect(), attached(broker.queue(database.table())) as link:
        one, other = await link.receive(2)
        with pytest.raises(PublishNotAccepted, match="full"):  # noqa: PT012 -- how many were confirmed is asked
            for published in range(100):  # noqa: B007 -- as above
                await broker.publisher(database.table()).publish(b"x" * 3_000)
        verdicts = await link.settle([say(one, MoveToTable("dead")), *finish([other])])
        assert isinstance(verdicts[0], NotApplied)
        assert "full" in str(verdicts[0])
        assert verdicts[1] is None
        assert await link.settle(finish([one])) == [None]
    assert (len(database.rows()), database.rows("dead")) == (published, [])


class Commit(SqliteSession):
    """A connection whose COMMIT may fail."""

    fails = 0

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if sql == "COMMIT" and Commit.fails:
            Commit.fails -= 1
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return super().execute(sql, parameters)


async def test_a_commit_that_fails_confirms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim, an extension and a giving back are broken calls, a verb is not applied, a publish not accepted."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a", b"b")
    connect: Any = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **kw: connect(*args, **{**kw, "factory": Commit}))
    broker = database.broker()
    async with broker.connect(), attached(broker.queue(database.table())) as link:
        monkeypatch.setattr(Commit, "fails", 9)
        with pytest.raises(CallBroken, match="full"):
            await link.receive(1)
        Commit.fails = 0
        received = await link.receive(1)
        token = received[0].token
        Commit.fails = 99
        for call in (link.extend(received), link.receive(1)):
            with pytest.raises(CallBroken, match="full"):
                await call
        (verdict,) = await link.settle(finish(received))
        assert isinstance(verdict, NotApplied)
        with pytest.raises(PublishNotAccepted, match="full"):
            await broker.publisher(database.table()).publish(b"x")
        Commit.fails = 0
        assert received[0].token == token
        assert await link.settle(finish(received)) == [None]
        assert bodies(await link.receive(1)) == [b"b"]
    assert [row["locked_until"] for row in database.rows()] == [None]


class Stuck(Commit):
    """And then its ROLLBACK fails too, so that the transaction stays open."""

    rolls_back = True

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if sql == "ROLLBACK" and not Stuck.rolls_back:
            raise sqlite3.OperationalError("no rollback")
        return super().execute(sql, parameters)


async def test_a_rollback_that_fails_ends_the_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would stand in the next transaction by mistake is closed with its connection; nothing of it is written."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a")
    connect: Any = sqlite3.connect
    broker = database.broker()

    async def claim() -> None:
        async with broker.connect(), attached(broker.queue(database.table())) as link:
            monkeypatch.setattr(Commit, "fails", 1)
            monkeypatch.setattr(Stuck, "rolls_back", False)
            with pytest.raises(ConnectionBroken, match="full"):
                await link.receive(1)
            await trio.sleep_forever()

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", lambda *args, **kw: connect(*args, **{**kw, "factory": Stuck}))
        with pytest.raises(ConnectionBroken, match="full"):
            await claim()
    assert (database.row()["locked_until"], database.row()["attempt"]) == (None, 1)
    monkeypatch.setattr(Stuck, "rolls_back", True)
    async with open_link(database.broker().queue(database.table())) as link:
        assert bodies(await link.receive(1)) == [b"a"]


async def test_a_disk_that_is_full_at_the_opening_is_weather(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has said no: the next life may open it."""

    class Full(SqliteSession):
        def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
            if sql.startswith("PRAGMA user_version ="):
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorcode = sqlite3.SQLITE_FULL
                raise error
            return super().execute(sql, parameters)

    database = Database(tmp_path / "q.db").create()
    connect: Any = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **kw: connect(*args, **{**kw, "factory": Full}))
    with pytest.raises(ConnectionBroken, match="full"):
        async with database.broker().connect():
            raise AssertionError("connected")
