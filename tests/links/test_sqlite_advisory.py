"""The advisory form on SQLite: a row is in work while this process holds its key."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from actors import BatchSubscription, Subscription, open_runtime
from links.abc import Link, Received
from links.errors import LeaseLost, LinkRefused
from links.sql import AdvisoryLock, SqlBroker, SqlQueue, Table
from links.sql.sqlite.keys import Ring
from settlement import Ack, Delivery, Drop, Outcome, Policy, Retry, RetryAfter
from settlement.policy import DeadLetter, Ending
from tests.links.sqlite_kit import KEY, Gate, Unleased, bodies, nothing_lost, order, until

pytestmark = pytest.mark.sqlite

CAPPED = Policy(max_attempts=1, dead_letter="dead")


@pytest.fixture
def database(tmp_path: Path) -> Unleased:
    return Unleased(tmp_path / "q.db").create()


@asynccontextmanager
async def linked(queue: SqlQueue[Any], *, limit: int = 4, size: int = 1) -> AsyncGenerator[Link[Any], None]:
    async with queue.broker.connect(), queue.attach("test", nothing_lost, 5.0, limit=limit, size=size) as link:
        yield link


async def some(link: Link[Any], count: int) -> list[Received[Any]]:
    found: list[Received[Any]] = []
    with trio.fail_after(10):
        while len(found) < count:
            found += await link.receive(count - len(found))
    return found


async def nothing(link: Link[Any], seconds: float = 0.3) -> bool:
    """Does the link hand over nothing for so long?"""
    with trio.move_on_after(seconds):
        return not await link.receive(1)
    return True


@pytest.mark.parametrize(
    ("outcome", "policy", "left", "dead"),
    [
        (Ack(), Policy(), None, False),
        (Drop(), Policy(), None, False),
        (Retry(), Policy(), {"attempt": 2}, False),
        (RetryAfter(3600.0), Policy(), {"attempt": 2}, False),
        (Retry(), CAPPED, None, True),
        (RetryAfter(9.0), CAPPED, None, True),
        (DeadLetter(), CAPPED, None, True),
    ],
)
@pytest.mark.parametrize("marks", [False, True])
async def test_every_cell(  # noqa: PLR0917 -- parameters
    tmp_path: Path, outcome: Ending, policy: Policy, left: dict[str, Any] | None, dead: bool, marks: bool
) -> None:
    """S-3, advisory, K-80, S-4.2: what became of the row, column by column; the attempt was counted at the take."""
    database = Unleased(tmp_path / "q.db", marks=marks).create()
    database.put("seven", b"a")
    before = database.row()
    queue = database.queue()
    async with linked(queue) as link:
        (received,) = await some(link, 1)
        assert (received.delivery.attempt, received.delivery.body) == (1, b"a")
        assert database.row() == before | {"attempt": 2}, "S-2.6: it is in no transaction"
        link.stop()
        assert list(await link.settle([order(queue, received, outcome, policy)])) == [None]
    if dead:
        assert (database.rows(), database.rows("dead")) == ([], [before | {"attempt": 2}])
    elif left is None and marks:
        row = database.row()
        assert row.pop("processed_at") is not None
        assert row == {name: value for name, value in before.items() if name != "processed_at"} | {"attempt": 2}
    elif left is None:
        assert database.rows() == []
    else:
        row = database.row()
        if isinstance(outcome, RetryAfter):
            assert 3590 < row["retry_after"] - time.time() <= 3600
            row["retry_after"] = before["retry_after"]
        assert row == before | left


async def test_the_cap_by_group(tmp_path: Path) -> None:
    """S-4.6: one UPDATE of the group."""
    database = Unleased(tmp_path / "q.db", grouped=True).create()
    database.add(b"a", group="mail")
    queue = database.queue(group="mail")
    async with linked(queue) as link:
        (received,) = await some(link, 1)
        assert list(await link.settle([order(queue, received, Retry(), CAPPED)])) == [None]
    assert (database.row()["grp"], database.row()["attempt"]) == ("dead", 2)


async def test_rows_of_one_key_are_never_in_work_at_once(database: Unleased) -> None:
    """S-2.6: the second one of a key waits for the first, others go on; then it is found without a poll."""
    database.put("a", b"1", b"2")
    database.put("b", b"3")
    database.put(None, b"4", b"5")
    queue = database.queue(poll=60.0)
    async with linked(queue) as link:
        first = await some(link, 3)
        assert sorted(bodies(first)) == [b"1", b"3", b"4"]
        assert await nothing(link)
        (one,) = [received for received in first if received.delivery.body == b"1"]
        assert list(await link.settle([order(queue, one, Ack())])) == [None]
        (second,) = await some(link, 1)
        assert second.delivery.body == b"2"


async def test_keys_of_any_value(database: Unleased) -> None:
    """A BLOB, a text that is no UTF-8 and one with a quote are keys; NULL is an empty text, a number its digits."""
    database.put(b"\xff\x00\x01", b"blob", b"blob again")
    database.run("INSERT INTO jobs (payload, lane) VALUES (?, CAST(? AS TEXT))", b"odd", b"\xfe'")
    database.run("INSERT INTO jobs (payload, lane) VALUES (?, CAST(? AS TEXT))", b"odd again", b"\xfe'")
    database.put(None, b"null")
    database.put("", b"empty, as NULL")
    database.run("ALTER TABLE jobs ADD number")
    queue = database.queue(AdvisoryLock("it's {{{lane}}}%{Number}"))
    async with linked(queue, limit=8) as link:
        assert sorted(bodies(await some(link, 3))) == [b"blob", b"null", b"odd"]
        assert await nothing(link)


async def test_two_brokers_of_one_process(database: Unleased, tmp_path: Path) -> None:
    """S-2.7: they share the keys, by whatever name of the file."""
    database.put("a", b"1", b"2")
    database.put("b", b"3")
    other = tmp_path / "other.db"
    other.symlink_to(database.path)
    queue = database.queue()
    theirs = SqlBroker(f"sqlite:///{other}", poll_interval=0.05).queue(database.table(), claim=KEY)
    async with linked(queue, limit=1) as link:
        (one,) = await some(link, 1)
        async with linked(theirs) as beside:
            (three,) = await some(beside, 1)
            assert (one.delivery.body, three.delivery.body) == (b"1", b"3")
            assert await nothing(beside)
            link.stop()
            assert list(await link.settle([order(queue, one, Ack())])) == [None]
            (two,) = await some(beside, 1)
            assert two.delivery.body == b"2"


CHILD = """
import sys, trio
from links.errors import LinkRefused
from links.sql import AdvisoryLock, SqlBroker, Table

async def main():
    broker = SqlBroker("sqlite:///" + sys.argv[1], poll_interval=0.05)
    table = Table("jobs", id="id", payload="payload", attempt="attempt", retry_after="retry_after")
    queue = broker.queue(table, claim=AdvisoryLock("order-{lane}"))
    async with broker.connect():
        try:
            async with queue.attach("child", print, 5.0) as link:
                found = await link.receive(1)
                print("has", found[0].delivery.body, flush=True)
                await trio.sleep(30)
        except LinkRefused as error:
            print("refused", error, flush=True)

trio.run(main)
"""


def child(database: Unleased) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(database.path)], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


async def test_a_second_process_is_refused(database: Unleased) -> None:
    """DESIGN 6: at its attach, with subscription, table, file and the way out."""
    database.put("a", b"1")
    async with linked(database.queue()) as link:
        await some(link, 1)
        with child(database) as process:
            try:
                line = await trio.to_thread.run_sync(says, process)
            finally:
                process.kill()
        assert line.startswith("refused subscription 'child', table 'jobs': another process has advisory locks")
        assert f"{database.path}.advisory-lock" in line
        assert "use Lease(seconds)" in line


async def test_a_process_that_dies_leaves_no_key(database: Unleased) -> None:
    """S-4.3: killed, its attempt is spent, its rows are free at once."""
    database.put("a", b"1")
    with child(database) as process:
        try:
            assert await trio.to_thread.run_sync(says, process) == "has b'1'\n"
            queue = database.queue()
            async with queue.broker.connect():
                with pytest.raises(LinkRefused, match="another process"):
                    async with queue.attach("test", nothing_lost, 5.0):
                        pass
        finally:
            process.kill()
    async with linked(database.queue()) as link:
        (received,) = await some(link, 1)
        assert received.delivery.attempt == 2


async def test_the_lock_ends_with_the_last_link(database: Unleased) -> None:
    """The lock file stays, and another process may have it; the rows as they were before."""
    database.put("a", b"1")
    before = database.row()
    async with linked(database.queue()) as link:
        await some(link, 1)
    assert database.row() == before
    assert Path(f"{database.path}.advisory-lock").exists()
    with child(database) as process:
        try:
            assert await trio.to_thread.run_sync(says, process) == "has b'1'\n"
        finally:
            process.kill()


async def test_a_lock_file_that_is_deleted_is_made_again(database: Unleased) -> None:
    """By the next claim: a second process is refused again."""
    lock = Path(f"{database.path}.advisory-lock")
    async with linked(database.queue()) as link:
        await until(lock.exists)
        lock.unlink()
        database.put("a", b"1")
        await some(link, 1)
        assert lock.exists()
        with child(database) as process:
            try:
                assert (await trio.to_thread.run_sync(says, process)).startswith("refused")
            finally:
                process.kill()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # from Python 3.12 on, where there are threads
def test_a_forked_child_has_not_its_parents_locks(database: Unleased) -> None:
    """The keys and the file are the parent's."""
    ring = Ring(database.path)
    ring.enter()
    assert ring.take(1, ["a"])
    child = os.fork()
    if child == 0:  # pragma: no cover -- another process
        try:
            theirs = Ring(database.path)
            try:
                theirs.enter()
            except Exception:  # noqa: BLE001
                os._exit(7 if not ring.take(2, ["b"]) else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    ring.leave()


async def test_a_system_without_flock(database: Unleased, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows: refused by name."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    queue = database.queue()
    async with queue.broker.connect():
        with pytest.raises(LinkRefused, match=r"'test', table 'jobs': .*need flock.*use Lease\(seconds\)"):
            async with queue.attach("test", nothing_lost, 5.0):
                pass


async def test_a_free_row_behind_ten_thousand_of_a_held_key(database: Unleased) -> None:
    """Issue 8: its claim takes less than 50 ms."""
    with closing(sqlite3.connect(database.path)) as connection, connection:
        connection.executemany("INSERT INTO jobs (payload, lane) VALUES ('x', ?)", [("held",)] * 10_000)
    database.put("free", b"found")
    queue, other = database.queue(), database.queue()
    spent: list[float] = []
    async with linked(queue, limit=1) as link:
        await some(link, 1)
        async with linked(other, limit=1) as beside:
            for _ in range(15):
                began = time.process_time()  # of every thread; on a busy machine a claim also waits, for its turn
                (received,) = await some(beside, 1)
                spent.append(time.process_time() - began)
                assert received.delivery.body == b"found"
                beside.forget(received)
    assert min(spent) < 0.05


async def test_a_verb_that_fails_releases_the_key(database: Unleased) -> None:
    """S-3.3: the row returns as it was when it was taken, and is passed over for a second; others go on."""
    database.put("a", b"1", b"2")
    database.run(
        "CREATE TRIGGER no BEFORE DELETE ON jobs WHEN OLD.payload = X'31' BEGIN SELECT RAISE(ABORT, 'no'); END"
    )
    before = database.rows()[0]
    queue = database.queue()
    async with linked(queue, limit=1) as link:
        (received,) = await some(link, 1)
        (verdict,) = await link.settle([order(queue, received, Ack())])
        assert isinstance(verdict, LeaseLost)
        assert "not applied, and the lock was released" in str(verdict)
        assert database.rows()[0] == before | {"attempt": 2}
        began = trio.current_time()
        (second,) = await some(link, 1)
        assert second.delivery.body == b"2"
        assert list(await link.settle([order(queue, second, Ack())])) == [None]
        (received,) = await some(link, 1)
        assert (received.delivery.body, trio.current_time() - began > 0.5) == (b"1", True)
        database.run("DROP TRIGGER no")
        assert list(await link.settle([order(queue, received, Ack())])) == [None]
    assert database.rows() == []


@pytest.mark.parametrize("how", ["ABORT", "FAIL", "ROLLBACK", "IGNORE", "CHECK"])
async def test_a_row_that_cannot_be_taken(tmp_path: Path, how: str) -> None:
    """DESIGN 6: a CHECK on the attempt, or a trigger, refuses it: others are claimed, it is named and *degraded*."""
    database = Unleased(tmp_path / "q.db").create()
    if how == "CHECK":
        database.run("ALTER TABLE jobs ADD odd INTEGER CHECK (payload <> X'31' OR attempt < 2)")
    else:
        what = "IGNORE" if how == "IGNORE" else f"{how}, 'no'"
        database.run(
            f"CREATE TRIGGER no BEFORE UPDATE ON jobs WHEN OLD.payload = X'31' BEGIN SELECT RAISE({what}); END"
        )
    database.put("a", b"1", b"2")
    told: list[str | None] = []
    queue = database.queue()
    async with linked(queue, limit=1) as link:
        link.degraded = lambda what, why: told.append(why) if what == "to claim each row" else None
        (received,) = await some(link, 1)
        assert received.delivery.body == b"2", "its key was free again"
        assert list(await link.settle([order(queue, received, Ack())])) == [None]
    assert any(why is not None and "row 1 passed over" in why for why in told)
    assert database.row()["attempt"] == 1


async def test_a_row_that_somebody_changed_is_told(database: Unleased) -> None:
    """By its attempt: its verb touches nothing."""
    database.put("a", b"1")
    queue = database.queue()
    async with linked(queue, limit=1) as link:
        (received,) = await some(link, 1)
        database.run("UPDATE jobs SET attempt = 7")
        link.stop()
        (verdict,) = await link.settle([order(queue, received, Ack())])
        assert isinstance(verdict, LeaseLost)
        assert "changed by somebody else" in str(verdict)
    assert database.row()["attempt"] == 7


async def test_a_row_whose_key_changes_stays_in_hand(database: Unleased) -> None:
    """A handler may write to the columns that the key is made of."""
    database.put("a", b"1")
    async with linked(database.queue()) as link:
        await some(link, 1)
        database.run("UPDATE jobs SET lane = 'b'")
        assert await nothing(link)


async def test_without_an_attempt_column(tmp_path: Path) -> None:
    """S-2.6: nothing is written by a claim, nor by Retry."""
    database = Unleased(tmp_path / "q.db", counts=False).create()
    database.put("a", b"1")
    before = database.rows()
    queue = database.queue()
    async with linked(queue, limit=1) as link:
        for _ in range(2):
            (received,) = await some(link, 1)
            assert received.delivery.attempt == 1
            assert list(await link.settle([order(queue, received, Retry())])) == [None]
        assert database.rows() == before
        (received,) = await some(link, 1)
        assert list(await link.settle([order(queue, received, Ack())])) == [None]
    assert database.rows() == []


async def test_dropped_unsettled_the_row_is_free_at_once(database: Unleased) -> None:
    """S-3, K-88, S-4.3: its attempt is spent where a handler began, else counted back."""
    database.put("a", b"1")
    async with linked(database.queue(), limit=1) as link:
        (received,) = await some(link, 1)
        received.started = True
        link.forget(received)
        (received,) = await some(link, 1)
        assert received.delivery.attempt == 2
    assert database.row()["attempt"] == 2


@pytest.mark.parametrize("taken", [False, True])
async def test_cancelled_from_outside_what_nobody_began_with_is_as_it_was(database: Unleased, *, taken: bool) -> None:
    """K-88: links and handlers end side by side; its attempt is counted back, whether the row was received or not."""
    database.put("a", b"1")
    database.put("b", b"2")
    before = database.rows()
    with trio.CancelScope() as scope:
        async with linked(database.queue(), limit=2) as link:
            await until(lambda: len(link._ready) == 2)  # type: ignore[attr-defined]
            if taken:
                for received in await some(link, 2):
                    received.started = received.delivery.body == b"1"
            scope.cancel()
            await trio.sleep_forever()
    assert database.rows() == [before[0] | {"attempt": 1 + taken}, before[1]]


async def test_a_batch_has_one_row_of_each_key(database: Unleased) -> None:
    """S-6.3, DESIGN 3.8: one claim, one commit; a verb that fails is one verdict."""
    for lane in ("a", "b", "c"):
        database.put(lane, *(b"%s%d" % (lane.encode(), n) for n in range(2)))
    database.run(
        "CREATE TRIGGER no BEFORE DELETE ON jobs WHEN OLD.payload = X'6230' BEGIN SELECT RAISE(ROLLBACK, 'no'); END"
    )
    queue = database.queue()
    async with linked(queue, limit=6, size=6) as link:
        batch = await some(link, 3)
        assert bodies(batch) == [b"a0", b"b0", b"c0"]
        link.stop()
        verdicts = await link.settle([order(queue, each, Ack()) for each in batch])
        assert [type(verdict) for verdict in verdicts] == [type(None), LeaseLost, type(None)]
    assert [row["payload"] for row in database.rows()] == [b"a1", b"b0", b"b1", b"c1"]


def later(gate: Gate) -> None:
    time.sleep(0.2)
    gate.open()


async def test_a_cancelled_claim_leaves_no_key(database: Unleased, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that has begun ends: its attempts are counted back, its keys are free, the file is unlocked."""
    gate = Gate(monkeypatch)
    queue = database.queue()
    async with queue.broker.connect():
        async with trio.open_nursery() as nursery, queue.attach("test", nothing_lost, 5.0, limit=1) as link:
            await until(lambda: gate.entered > 1)
            gate.shut()
            await until(lambda: gate.entered > 0)
            database.put("a", b"1")
            nursery.start_soon(trio.to_thread.run_sync, partial(later, gate))
            link.stop()
        await until(lambda: database.row()["attempt"] == 1)
        ring = Ring(database.path)
        ring.enter()
        assert b"order-a" not in ring.held
        ring.leave()


async def test_a_cancelled_claim_holds_its_key_until_it_is_counted_back(
    database: Unleased, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who takes the row in between has counted it, too, and nothing is counted back."""
    gate = Gate(monkeypatch)
    queue = database.queue()
    scope = trio.CancelScope()

    async def attach() -> None:
        with scope:
            async with queue.attach("test", nothing_lost, 5.0, limit=1):
                await trio.sleep_forever()

    async with queue.broker.connect(), trio.open_nursery() as nursery:
        nursery.start_soon(attach)
        await until(lambda: gate.entered > 1)
        gate.shut()
        await until(lambda: gate.entered == 1)
        database.put("a", b"1")
        scope.cancel()
        gate.let_through()
        await until(lambda: gate.entered == 2)
        ring = Ring(database.path)
        ring.enter()
        assert database.row()["attempt"] == 2
        assert b"order-a" in ring.held
        gate.open()
        await until(lambda: b"order-a" not in ring.held)
        assert database.row()["attempt"] == 1
        ring.leave()


@pytest.mark.parametrize("change", ["ALTER TABLE jobs RENAME COLUMN lane TO street", "DROP TABLE jobs"])
async def test_a_table_altered_meanwhile(database: Unleased, change: str) -> None:
    """It is no queue any more: `receive` says so, by name."""
    async with linked(database.queue()) as link:
        assert await nothing(link, 0.1)
        database.run(change)
        with trio.fail_after(10), pytest.raises(LinkRefused, match="'test', table 'jobs': there is no"):
            await link.receive(1)


async def test_columns_that_are_added_move_to_the_dead_letters(database: Unleased) -> None:
    """The table is looked at again when its schema has changed."""
    database.put("a", b"1")
    queue = database.queue()
    async with linked(queue, limit=1) as link:
        (received,) = await some(link, 1)
        for table in ("jobs", "dead"):
            database.run(f"ALTER TABLE {table} ADD note TEXT DEFAULT 'n'")
        link.stop()
        assert list(await link.settle([order(queue, received, Retry(), CAPPED)])) == [None]
    assert database.row("dead")["note"] == "n"


async def test_a_key_of_columns_that_are_not_there(database: Unleased) -> None:
    """S-12.3: refused at start-up, with what there is."""
    queue = database.queue(AdvisoryLock("order-{customer}"))
    async with queue.broker.connect():
        with pytest.raises(LinkRefused, match=r"'test', table 'jobs': there is no column 'customer' for the key.*lane"):
            async with queue.attach("test", nothing_lost, 5.0):
                pass


async def test_row_mode(database: Unleased) -> None:
    """The message is the row as it was before the claim."""
    database.put("a", b"1")
    before = database.row()
    table = Table("jobs", id="id", attempt="attempt")
    queue = database.queue(table=table)
    async with linked(queue, limit=1) as link:
        (received,) = await some(link, 1)
        assert received.delivery.message == before


async def test_through_the_runtime_no_key_is_twice_in_work(database: Unleased) -> None:
    """K-94: eight workers in two brokers, 200 rows of 10 keys, mixed outcomes: rows in = rows out."""
    with closing(sqlite3.connect(database.path)) as connection, connection:
        connection.executemany(
            "INSERT INTO jobs (payload, lane) VALUES (?, ?)", [(b"%d" % n, str(n % 10)) for n in range(1, 201)]
        )
    busy: set[str] = set()
    seen: Counter[bytes] = Counter()

    async def handle(delivery: Delivery[bytes]) -> Outcome:
        assert delivery.key is not None
        assert delivery.key not in busy
        busy.add(delivery.key)
        await trio.sleep(0.002)
        busy.remove(delivery.key)
        seen[delivery.body] += 1
        return Retry() if int(delivery.body) % 7 == 0 and delivery.attempt == 1 else Ack()

    with trio.fail_after(60):
        async with (
            open_runtime(Subscription(database.queue(), handle, concurrency=4)) as one,
            open_runtime(Subscription(database.queue(), handle, concurrency=4)) as two,
        ):
            while one.ledger("jobs").acked + two.ledger("jobs").acked < 200:  # noqa: ASYNC110 -- bounded above
                await trio.sleep(0.02)
    assert (database.rows(), seen.total(), len(seen)) == ([], 228, 200)


async def test_batches_through_the_runtime(database: Unleased) -> None:
    """S-6.3, C-7.4."""
    for n in range(100):
        database.put(str(n % 10), b"%d" % n)

    async def handle(batch: list[Delivery[bytes]]) -> Outcome:
        keys = [delivery.key for delivery in batch]
        assert len(set(keys)) == len(keys)
        return Ack()

    with trio.fail_after(60):
        async with open_runtime(BatchSubscription(database.queue(), handle, size=20, concurrency=2)) as runtime:
            while runtime.ledger("jobs").acked < 100:  # noqa: ASYNC110 -- bounded above
                await trio.sleep(0.02)
    assert database.rows() == []
