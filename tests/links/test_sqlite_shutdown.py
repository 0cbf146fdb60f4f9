"""How long things on a real SQLite file may take: a locked file, small goodbyes, a thread that hangs, half a life."""

import re
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from links.abc import Link, Received, Verdict
from links.errors import ConnectionBroken, NotApplied
from links.sql import Lease, SqlBroker
from links.sql.sqlite.connection import SqliteConnection
from tests.links.sqlite_kit import Database, Foreigner, Gate, attached, finish, open_link, until

pytestmark = pytest.mark.sqlite


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@contextmanager
def taking(least: float, most: float) -> Generator[None, None, None]:
    """The block takes so long."""
    started = trio.current_time()
    yield
    took = trio.current_time() - started
    assert least <= took <= most, took


async def settle(link: Link[Any], received: list[Received[Any]], verdicts: list[Verdict]) -> None:
    verdicts.extend(await link.settle(finish(received)))


# --- a locked file


async def test_a_locked_file_is_waited_out_while_the_lease_lasts(tmp_path: Path) -> None:
    """DESIGN 4: a finished outcome is not thrown away because a backup takes longer than a goodbye."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a")
    broker = database.broker()
    verdicts: list[Verdict] = []
    async with broker.connect(), attached(broker.queue(database.table()), goodbye=0.2) as link:
        received = [*await link.receive(1)]
        async with trio.open_nursery() as nursery:
            with Foreigner(database):
                nursery.start_soon(settle, link, received, verdicts)
                await trio.sleep(1.8)
                assert verdicts == []
    assert verdicts == [None]
    assert database.rows() == []


async def test_a_locked_file_is_not_waited_for_beyond_the_lease(tmp_path: Path) -> None:
    """Half a second of the lease is left then, the row is kept, and the text says how long it really was."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a")
    broker = database.broker()
    queue = broker.queue(database.table(), claim=Lease(1.5))
    # a quarter of the goodbye is for the try under way, which takes 0.05 s at least: too little is *unknown*
    async with broker.connect(), attached(queue, goodbye=0.8) as link:
        received = await link.receive(1)
        with Foreigner(database):
            started = trio.current_time()
            (verdict,) = await link.settle(finish(received))
            took = trio.current_time() - started
        assert isinstance(verdict, NotApplied)
        assert 0.7 <= took <= 1.4
        said = re.search(r"held the lock of the file for ([0-9.]+) s; nothing was changed", str(verdict))
        assert said is not None
        assert abs(float(said[1]) - took) < 0.2
        assert await link.settle(finish(received)) == [None]
    assert database.rows() == []


async def test_a_cancelled_settlement_waits_one_goodbye(tmp_path: Path) -> None:
    """DESIGN 4: the shield is as long as the goodbye; then the file is still locked, and nothing was changed."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a")
    broker = database.broker()
    verdicts: list[Verdict] = []
    async with broker.connect(), attached(broker.queue(database.table()), goodbye=1.2) as link:
        received = [*await link.receive(1)]
        with Foreigner(database), trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(settle, link, received, verdicts)
                await trio.sleep(0.1)
                with taking(0.0, 1.4):
                    scope.cancel()
                    with trio.CancelScope(shield=True):
                        await until(lambda: verdicts)
    (verdict,) = verdicts
    assert isinstance(verdict, NotApplied)
    assert "held the lock" in str(verdict)


async def test_a_row_whose_extension_was_still_under_way_is_kept(gate: Gate, tmp_path: Path) -> None:
    """As every row whose verb was not said: it is settled by its new token, and let go once nothing will be said."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a", b"b", b"c")
    broker = database.broker()
    queue = broker.queue(database.table(), claim=Lease(1.5))
    async with broker.connect(), attached(queue, goodbye=0.2) as link:
        one, other, third = await link.receive(3)
        gate.shut()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.extend, [one, third])
            await until(lambda: gate.entered)
            verdicts = await link.settle(finish([one, other]))
            assert [type(each) for each in verdicts] == [NotApplied, NotApplied]
            assert re.search(r"an extension was still under way after [01]\.[0-9] s", str(verdicts[0]))
            link.forget(third)
            link.stop()
            gate.open()
        assert await link.settle(finish([one, other])) == [None, None]
        await until(lambda: [(row["id"], row["locked_until"]) for row in database.rows()] == [(3, None)])


async def test_small_goodbyes_are_kept(tmp_path: Path) -> None:
    """DESIGN 4: settlement, link and connection get the goodbye that was given, not a second each."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a", b"b")
    broker = database.broker()
    started = 0.0
    with Foreigner(database) as foreigner, trio.CancelScope() as scope:
        foreigner.connection.execute("ROLLBACK")
        async with broker.connect(goodbye=0.1), attached(broker.queue(database.table()), goodbye=0.1) as link:
            received = [*await link.receive(2)]
            foreigner.connection.execute("BEGIN IMMEDIATE")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(settle, link, received, [])
                await trio.sleep(0.05)
                started = trio.current_time()
                scope.cancel()
    assert trio.current_time() - started < 0.7


# --- a thread that hangs


class Hang:
    """A disk that does not answer: a step of the database's thread hangs while it is shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
        self._step = step
        self._answers = threading.Event()
        self._answers.set()
        self.hanging = 0
        self.connections: list[SqliteConnection] = []
        original: Callable[[SqliteConnection], None] = getattr(SqliteConnection, step)

        def hang(connection: SqliteConnection) -> None:
            self.connections.append(connection)
            self.hanging += 1
            assert self._answers.wait(20)
            self.hanging -= 1
            original(connection)

        monkeypatch.setattr(SqliteConnection, step, hang)

    def shut(self) -> None:
        self._answers.clear()

    def open(self) -> None:
        self._answers.set()

    @property
    def closed(self) -> bool:
        return not self.hanging and all(each._connection is None for each in self.connections)


async def abandon(database: Database, hang: Hang) -> None:
    broker = database.broker(0.02)
    started = 0.0
    with trio.CancelScope() as scope:
        async with broker.connect(goodbye=0.4), attached(broker.queue(database.table()), goodbye=0.4) as link:
            hang.shut()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(link.receive, 1)
                nursery.start_soon(broker.publisher("jobs").publish, b"x")
                await until(lambda: hang.hanging)
                started = trio.current_time()
                scope.cancel()
    assert scope.cancelled_caught
    assert trio.current_time() - started < 2.0


async def test_a_thread_that_hangs_is_left_alone_with_its_connection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """DESIGN 4: no unbounded shield: `run` ends within its goodbye, and the thread closes the file when it ends."""
    database = Database(tmp_path / "q.db").create()
    hang = Hang(monkeypatch, "_look")
    await abandon(database, hang)
    assert hang.hanging
    hang.open()
    await until(lambda: hang.closed)
    async with open_link(database.broker().queue(database.table())):
        pass


def test_a_thread_that_ends_after_trio_ends_quietly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It has nobody to tell any more; that is no error in the thread, and the file is closed."""
    uncaught: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    database = Database(tmp_path / "q.db").create()
    hang = Hang(monkeypatch, "_look")
    trio.run(abandon, database, hang)
    hang.open()
    trio.run(until, lambda: hang.closed)
    assert uncaught == []


async def test_a_file_that_hangs_at_open_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Start-up can be cancelled within the goodbye, whatever the disk does; what was opened late is closed."""
    database = Database(tmp_path / "q.db").create()
    hang = Hang(monkeypatch, "_connect")
    hang.shut()
    with taking(0.1, 1.5), trio.move_on_after(0.1) as scope:
        async with database.broker().connect(goodbye=0.2):
            raise AssertionError("connected")
    assert scope.cancelled_caught
    hang.open()
    await until(lambda: hang.closed)


# --- a life that ends


async def half_broken(broker: SqlBroker, database: Database) -> None:
    async with broker.connect(), attached(broker.queue(database.table())) as link:
        (received,) = await link.receive(1)
        with trio.fail_after(2):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(link.until_broken)
                await trio.testing.wait_all_tasks_blocked()
                publishing: Any = broker.life.publishing
                publishing._end(ConnectionBroken("a disk hiccup"))
                publishing._change()
                assert received.token == (1, database.row()["locked_until"], 2)


async def test_an_idle_link_hears_that_its_life_is_over(tmp_path: Path) -> None:
    """`until_broken` raises at once, and the goodbye is said on the connection that is well."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a")
    with taking(0.0, 4.0), pytest.raises(BaseExceptionGroup) as caught:
        await half_broken(database.broker(poll_interval=3600.0), database)
    assert caught.group_contains(ConnectionBroken, match="'test': a disk hiccup")
    assert (database.row()["attempt"], database.row()["locked_until"]) == (1, None)


async def test_superseded_rows_are_forgotten(tmp_path: Path) -> None:
    """What a link was told to forget is claimed again when its lease has ended; what it holds does not grow."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a")
    link: Any
    async with open_link(database.broker().queue(database.table(), claim=Lease(0.1))) as link:
        seen: list[Received[Any]] = []
        for _ in range(4):
            with trio.fail_after(5):
                seen += await link.receive(1)
            await trio.sleep(0.06)
            link.forget(seen[-1])
        assert [each.delivery.attempt for each in seen] == [1, 2, 3, 4]
        assert len(link._rows) < 4
