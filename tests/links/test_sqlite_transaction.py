"""Transactional mode on SQLite: a handler's transaction locks the file, and commits with its `Ack` alone."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from actors import BatchSubscription, Subscription, open_runtime
from links.errors import CallBroken, LeaseLost, PublishNotAccepted, TransactionHeld
from links.sql import Lease, transaction
from links.sql.sqlite.connection import SqliteConnection
from settlement import Ack, DeadLetter, Delivery, Drop, Ledger, Outcome, Policy, Retry, RetryAfter
from settlement.sql import ClaimForm
from tests.links.sqlite_kit import KEY, Database, Foreigner, Gate, Unleased, broker_of, finish, open_link, until

Handler = Callable[[Delivery[Any]], Awaitable[Outcome | None]]
NOTE = "INSERT INTO notes VALUES (?)"


@pytest.fixture(params=[Database, Unleased], ids=["lease", "advisory"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Database]:
    """Makes the database of a form: with one row, and with notes for the handlers."""

    def made(**shape: Any) -> Database:
        database: Database = request.param(tmp_path / "jobs.db", **shape).create()
        database.run("CREATE TABLE notes (body BLOB)")
        database.add(b"a", group="jobs" if database.grouped else None)
        return database

    return made


@pytest.fixture
def database(make: Callable[..., Database]) -> Database:
    return make()


LEASED = pytest.mark.parametrize("make", [Database], indirect=True, ids=["lease"])
"""Of leases alone."""


def notes(database: Database) -> list[bytes]:
    return [row[0] for row in database.run("SELECT body FROM notes ORDER BY body")]


def short(database: Database) -> ClaimForm:
    """A claim that does not keep the test waiting when nobody works on it any more."""
    return KEY if isinstance(database, Unleased) else Lease(0.8)


async def write(delivery: Delivery[Any]) -> None:
    async with transaction(delivery) as connection:
        await connection.execute(NOTE, [delivery.body])


async def handled(database: Database, handler: Handler, policy: Policy = Policy(), **how: Any) -> Ledger:
    """Run until the row has had one outcome; the ledger."""
    async with open_runtime(Subscription(database.queue(), handler, policy=policy, **how), grace=0.3) as runtime:
        with trio.fail_after(15):
            while (ledger := runtime.ledger("jobs")).received - ledger.in_hand < 1:  # noqa: ASYNC110
                await trio.sleep(0.01)
    return runtime.ledger("jobs")


@pytest.mark.parametrize("marks", [False, True])
async def test_what_is_written_commits_with_the_ack(make: Callable[..., Database], *, marks: bool) -> None:
    """K-96, S-8.1: nobody sees it before the outcome; rows come back as `sqlite3` gives them."""
    database = make(marks=marks)

    async def handler(delivery: Delivery[bytes]) -> None:
        async with transaction(delivery) as connection:
            assert await connection.execute(NOTE, [delivery.body]) == []
            found = await connection.execute("SELECT body, :two FROM notes", {"two": "zwei"})
            assert found == [(b"a", "zwei")]
        async with transaction(delivery) as again:
            assert await again.execute("SELECT count(*) FROM notes") == [(1,)]
        assert notes(database) == []

    assert (await handled(database, handler)).acked == 1
    left = [row["processed_at"] is not None for row in database.rows()] if marks else database.rows()
    assert (notes(database), left) == ([b"a"], [True] if marks else [])


@pytest.mark.parametrize("outcome", [Retry(), RetryAfter(3600.0), Drop(), ValueError("no")], ids=str)
async def test_any_other_outcome_undoes_it_first(database: Database, outcome: Any) -> None:
    """K-96, S-8.2, S-8.3: then it is settled as usual; the claims are counted, the writes are gone."""
    calls = 0

    async def handler(delivery: Delivery[bytes]) -> Outcome | None:
        nonlocal calls
        calls += 1
        if calls > 1:
            await trio.sleep_forever()
        await write(delivery)
        if isinstance(outcome, Exception):
            raise outcome
        result: Outcome = outcome
        return result

    await handled(database, handler, Policy(on_error=Retry()))
    assert notes(database) == []
    assert [row["attempt"] for row in database.rows()] == ([] if isinstance(outcome, Drop) else [1 + calls])


@pytest.mark.parametrize("grouped", [False, True], ids=["to_a_table", "to_a_group"])
async def test_what_is_moved_to_the_dead_letter_has_written_nothing(
    make: Callable[..., Database], *, grouped: bool
) -> None:
    """K-96, S-4.6: the cap moves the row, and the writes are gone."""
    database = make(grouped=grouped)

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        await write(delivery)
        return Retry()

    source = database.queue(group="jobs" if grouped else None)
    policy = Policy(max_attempts=1, dead_letter="dead")
    async with open_runtime(Subscription(source, handler, policy=policy), grace=0.3) as runtime:
        await until(lambda: runtime.ledger("jobs").dead_lettered, 15)
    assert notes(database) == []
    assert [row["payload"] for row in database.rows("jobs" if grouped else "dead")] == [b"a"]


async def test_a_letter_before_the_verb_does_not_wait_for_the_handlers_transaction(database: Database) -> None:
    """S-8.2: a publisher as dead letter, in the same file: the writes are undone before it publishes."""
    source = database.queue()

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        await write(delivery)
        raise ValueError("no")

    dead = broker_of(source).publisher(database.table("dead"))
    policy = Policy(max_attempts=9, dead_letter=dead, on_error=DeadLetter())
    async with open_runtime(Subscription(source, handler, policy=policy), grace=0.3) as runtime:
        await until(lambda: runtime.ledger("jobs").dead_lettered, 8)
    assert (notes(database), database.rows()) == ([], [])
    assert [row["payload"] for row in database.rows("dead")] == [b"a"]


@pytest.mark.parametrize("within", [None, 0.3], ids=["cancelled", "too_slow"])
async def test_a_statement_that_runs_for_long_is_interrupted(database: Database, within: float | None) -> None:
    """K-96: cancellation and `within=` reach a statement in its thread; nothing is written."""
    begun = trio.Event()
    endless = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"

    async def handler(delivery: Delivery[bytes]) -> None:
        async with transaction(delivery) as connection:
            await connection.execute(NOTE, [delivery.body])
            begun.set()
            await connection.execute(endless)

    told = Subscription(database.queue(), handler, policy=Policy(on_error=Drop()), within=within)
    with trio.fail_after(15):
        async with open_runtime(told, grace=0.1) as runtime:
            await begun.wait()
            if within is not None:
                await until(lambda: runtime.ledger("jobs").dropped, 10)
    assert notes(database) == []
    assert [(row["attempt"], row.get("locked_until")) for row in database.rows()] == ([] if within else [(2, None)])


async def test_a_handler_cannot_end_it(database: Database) -> None:
    """S-8.4: neither by SQL, nor by an object that was kept; a statement that failed has changed nothing."""
    kept: list[Any] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        async with transaction(delivery) as connection:
            for statement in ("COMMIT", "ROLLBACK", "/* so */ END", "BEGIN"):
                with pytest.raises(TransactionHeld):
                    await connection.execute(statement)
            with pytest.raises(sqlite3.OperationalError):
                await connection.execute("no SQL")
            with pytest.raises(TransactionHeld, match="is lent already"):
                async with transaction(delivery):
                    pass
            await connection.execute("SAVEPOINT mine")
            await connection.execute(NOTE, [b"lost"])
            await connection.execute("ROLLBACK TO mine")
            await connection.execute(NOTE, [delivery.body])
            kept.extend([connection, delivery])
        with pytest.raises(TransactionHeld):
            await connection.execute("SELECT 1")

    assert (await handled(database, handler)).acked == 1
    connection, delivery = kept
    with pytest.raises(TransactionHeld):
        await connection.execute("SELECT 1")
    with pytest.raises(TransactionHeld, match="in hand no more"):
        await write(delivery)
    assert notes(database) == [b"a"]


async def test_what_an_error_has_rolled_back_is_not_acked(database: Database) -> None:
    """S-8.3: ON CONFLICT ROLLBACK ends the whole transaction: nothing is written after it, nothing is acked."""
    database.run("CREATE UNIQUE INDEX once ON notes (body)")

    async def handler(delivery: Delivery[bytes]) -> None:
        async with transaction(delivery) as connection:
            await connection.execute(NOTE, [b"a"])
            with pytest.raises(sqlite3.IntegrityError):
                await connection.execute("INSERT OR ROLLBACK INTO notes VALUES (?)", [b"a"])
            with pytest.raises(sqlite3.OperationalError, match="there is none any more"):
                await connection.execute(NOTE, [b"b"])

    ledger = await handled(database, handler)
    assert (ledger.acked, ledger.superseded) == (0, 1)
    assert (notes(database), len(database.rows())) == ([], 1)


# --- the claim


@LEASED
async def test_the_lease_rests_while_the_transaction_is_open(database: Database) -> None:
    """DESIGN 6: a handler of several lease lengths is not cancelled, and nothing is written to its row meanwhile."""

    async def handler(delivery: Delivery[bytes]) -> None:
        before = database.row()
        async with transaction(delivery) as connection:
            await connection.execute(NOTE, [delivery.body])
            end = time.monotonic() + 2.0
            while time.monotonic() < end:  # noqa: ASYNC110 -- it is time that is waited for
                await trio.sleep(0.05)
        assert database.row() == before

    async with open_runtime(Subscription(database.queue(Lease(0.6)), handler), grace=0.3) as runtime:
        await until(lambda: runtime.ledger("jobs").acked, 15)
        assert runtime.ledger("jobs").received == 1
    assert (notes(database), database.rows()) == ([b"a"], [])


@LEASED
async def test_it_begins_behind_an_extension_that_is_under_way(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-5.4: else the extension would wait for the lock of the transaction, and the Ack for the extension."""
    gate, written = Gate(monkeypatch), trio.Event()

    async def handler(delivery: Delivery[bytes]) -> None:
        await write(delivery)
        written.set()

    async with open_link(database.queue()) as link, trio.open_nursery() as nursery:
        (received,) = await link.receive(1)
        gate.shut()
        nursery.start_soon(link.extend, [received])
        await until(lambda: gate.entered)
        nursery.start_soon(handler, received.delivery)
        with trio.move_on_after(0.5):
            await written.wait()
        assert not written.is_set()
        gate.open()
        with trio.fail_after(5):
            await written.wait()
            assert list(await link.settle(finish([received]))) == [None]
    assert (notes(database), database.rows()) == ([b"a"], [])


async def test_a_claim_that_was_lost_before_it_began_is_found_out_by_the_ack(database: Database) -> None:
    """S-8.3: 0 rows were touched: everything is rolled back, the row is as somebody else has left it."""
    async with open_link(database.queue()) as link:
        (received,) = await link.receive(1)
        database.run("UPDATE jobs SET attempt = 9")
        await write(received.delivery)
        (verdict,) = await link.settle(finish([received]))
        assert isinstance(verdict, LeaseLost)
        assert (notes(database), database.row()["attempt"]) == ([], 9)


@pytest.mark.parametrize(
    "trigger", ["SELECT RAISE(IGNORE)", "SELECT RAISE(ABORT, 'closed')", "SELECT RAISE(ROLLBACK, 'closed')"]
)
async def test_an_ack_that_the_table_refuses_gives_the_file_free(database: Database, trigger: str) -> None:
    """DESIGN 6, S-3.3: it keeps nobody waiting; the row comes back when its lease ends, or after a second."""
    database.run(f"CREATE TRIGGER no BEFORE DELETE ON jobs BEGIN {trigger}; END")
    async with open_runtime(Subscription(database.queue(short(database)), write), grace=0.3) as runtime:
        await until(lambda: runtime.ledger("jobs").superseded, 15)
        assert notes(database) == []
        database.run("DROP TRIGGER no")
        await until(lambda: runtime.ledger("jobs").acked, 15)
    assert (notes(database), database.rows()) == ([b"a"], [])


# --- one at a time


@pytest.mark.parametrize(("concurrency", "limit"), [(2, None), (1, 2)])
async def test_where_more_are_in_hand_there_is_none(database: Database, concurrency: int, limit: int | None) -> None:
    """DESIGN 6: at concurrency 1 alone; the error says what to do."""
    errors: list[Exception] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        try:
            await write(delivery)
        except ValueError as error:
            errors.append(error)

    queue = database.queue(limit=limit)
    async with open_runtime(Subscription(queue, handler, concurrency=concurrency)) as runtime:
        await until(lambda: runtime.ledger("jobs").acked, 15)
    assert "here 2 may be; give its subscription concurrency=1" in str(errors[0])


async def test_a_batch_of_more_than_one_has_none(database: Database) -> None:
    """S-6.4."""
    errors: list[Exception] = []

    async def handler(batch: list[Delivery[bytes]]) -> None:
        try:
            await write(batch[0])
        except ValueError as error:
            errors.append(error)

    async with open_runtime(BatchSubscription(database.queue(), handler, size=3, wait=0.1)) as runtime:
        await until(lambda: runtime.ledger("jobs").acked, 15)
    why = "the rows of a batch share one transaction" if isinstance(database, Unleased) else "here 3 may be"
    assert why in str(errors[0])


async def test_one_after_the_other_has_one(database: Database) -> None:
    """S-8.5: each on a connection as if it were new."""
    database.add(b"b", b"c")
    found: list[Any] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        async with transaction(delivery) as connection:
            found.extend(await connection.execute("SELECT count(*) FROM temp.sqlite_master"))
            await connection.execute("CREATE TEMP TABLE mine (a)")
            await connection.execute(NOTE, [delivery.body])

    async with open_runtime(Subscription(database.queue(), handler)) as runtime:
        await until(lambda: runtime.ledger("jobs").acked == 3, 15)
    assert (notes(database), found) == ([b"a", b"b", b"c"], [(0,)] * 3)


async def test_a_publish_of_the_handlers_own_would_wait_for_itself(database: Database) -> None:
    """DESIGN 6: it is refused at once, in the block and behind it; another task's waits until it is over."""
    source = database.queue()
    publisher = broker_of(source).publisher(database.table("dead"))
    refused: list[Exception] = []
    locked = trio.Event()

    async def handler(delivery: Delivery[bytes]) -> None:
        await publisher.publish(b"before")
        async with transaction(delivery) as connection:
            await connection.execute(NOTE, [delivery.body])
            refused.append(await failed())
        refused.append(await failed())
        locked.set()
        await trio.sleep(0.3)

    async def failed() -> PublishNotAccepted:
        with trio.fail_after(1), pytest.raises(PublishNotAccepted, match="the transaction of this very handler") as why:
            await publisher.publish(b"within")
        return why.value

    async with open_runtime(Subscription(source, handler)) as runtime:
        await locked.wait()
        await publisher.publish(b"beside")
        await until(lambda: runtime.ledger("jobs").acked, 15)
        await publisher.publish(b"behind")
    assert len(refused) == 2
    assert [row["payload"] for row in database.rows("dead")] == [b"before", b"beside", b"behind"]


async def test_a_file_that_others_keep_locked_is_told(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-8.5: after the patience a clear error, which the policy answers; the lease is as it was."""
    monkeypatch.setattr("links.sql.sqlite.lender.PATIENCE", 0.5)
    async with open_link(database.queue()) as link:
        (received,) = await link.receive(1)
        with (
            Foreigner(database),
            trio.fail_after(5),
            pytest.raises(CallBroken, match="others have kept the file locked"),
        ):
            await write(received.delivery)
        await write(received.delivery)
        assert list(await link.settle(finish([received]))) == [None]
    assert notes(database) == [b"a"]


async def test_one_that_is_left_unsettled_locks_nothing_any_more(database: Database) -> None:
    """S-8.2, S-8.5: its writes are undone, and the next claim finds the file free, and the row."""
    async with open_link(database.queue()) as link:
        (received,) = await link.receive(1)
        received.started = True
        await write(received.delivery)
        await link.give_back([received])
        with trio.fail_after(3):
            (again,) = await link.receive(1)
        assert (again.delivery.body, again.delivery.attempt) == (b"a", 2)
    assert notes(database) == []


async def test_one_that_is_let_go_while_it_begins_keeps_nothing_locked(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-8.4: who waits for it gets none, and the file is free for others."""
    tries = 0
    really = SqliteConnection.open

    def opening(connection: SqliteConnection) -> None:
        nonlocal tries
        tries += 1
        really(connection)

    async def refused(delivery: Delivery[Any]) -> None:
        with pytest.raises((TransactionHeld, CallBroken)):
            await write(delivery)
        await trio.to_thread.run_sync(database.run, "UPDATE jobs SET lane = 'free'")

    async with open_link(database.queue()) as link:
        (received,) = await link.receive(1)
        monkeypatch.setattr(SqliteConnection, "open", opening)
        link.stop()
        with trio.fail_after(15):
            async with trio.open_nursery() as nursery:
                with Foreigner(database):
                    nursery.start_soon(refused, received.delivery)
                    await until(lambda: tries)
                    link.forget(received)
            await until(lambda: database.row()["attempt"] == 1)
    assert notes(database) == []


async def test_no_connection_outlives_its_delivery(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-8.5: whatever became of it, its file is closed."""
    opened: list[SqliteConnection] = []
    made = SqliteConnection._beside

    def beside(connection: SqliteConnection) -> SqliteConnection:
        opened.append(made(connection))
        return opened[-1]

    monkeypatch.setattr(SqliteConnection, "_beside", beside)
    calls = 0

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        nonlocal calls
        calls += 1
        await write(delivery)
        if calls == 3:
            await trio.sleep_forever()
        return Retry() if calls == 1 else Ack()

    database.add(b"b")
    async with open_runtime(Subscription(database.queue(), handler), grace=0.1):
        await until(lambda: calls == 3, 15)
    assert len(opened) == 3
    await until(lambda: all(each._connection is None for each in opened))
    assert len(database.rows()) == 1


# --- weather


async def test_every_row_is_handled_and_written_once_whatever_is_cancelled(database: Database) -> None:
    """S-8.1: row and note change together: in any weather each row has one note."""
    dice = random.Random(7)  # noqa: S311 -- weather, not secrecy
    database.run("DELETE FROM jobs")
    bodies = [b"%03d" % number for number in range(60)]
    database.add(*bodies)

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        async with transaction(delivery) as connection:
            await connection.execute(NOTE, [delivery.body])
            await trio.sleep(dice.uniform(0, 0.02))
        if dice.random() < 0.2:
            raise ValueError("bad luck")
        return Retry() if dice.random() < 0.2 else Ack()

    def both() -> list[bytes]:
        return [
            body for (body,) in database.run("SELECT body FROM notes UNION ALL SELECT payload FROM jobs ORDER BY 1")
        ]

    cancelled = 0
    for _ in range(20):
        queue = database.queue(short(database))
        with trio.move_on_after(dice.uniform(0.05, 0.4)) as scope:  # cancelled amid anything
            async with open_runtime(Subscription(queue, handler, policy=Policy(on_error=Retry())), goodbye=2.0):
                await trio.sleep_forever()
        cancelled += scope.cancelled_caught
        assert both() == bodies
    queue = database.queue(short(database))
    async with open_runtime(Subscription(queue, handler, policy=Policy(on_error=Retry()))):
        await until(lambda: not database.rows(), 30)
    assert notes(database) == bodies
    assert cancelled == 20
