"""The forms of PostgreSQL that hold a connection, where something goes wrong at the worst moment."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
import trio

from actors import BatchSubscription, Runtime, Subscription, open_runtime
from links.abc import Link, Received
from links.errors import LeaseLost, LinkRefused, NotApplied, SettlementUnknown
from links.sql import AdvisoryLock, RowLock, SqlBroker, SqlQueue, Table
from links.sql.postgres.row_lock import PostgresRowLock, RowLockPin
from settlement import Ack, Delivery, Drop, Outcome, Policy, Retry
from settlement.ledger import Line
from settlement.sql import ClaimForm
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import order, until
from tests.weather.schedule import dice_of

pytestmark = [pytest.mark.postgres, pytest.mark.servers]

IGNORES = (
    "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$; "
    "CREATE TRIGGER no BEFORE DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION no()"
)


def tables_of(database: str, count: int, **shape: bool) -> PostgresTables:
    tables = PostgresTables(database, leased=False, **shape).create()
    tables.add(*(b"%d" % number for number in range(count)))
    return tables


@asynccontextmanager
async def linked(
    queue: SqlQueue[Any], *, limit: int = 1, size: int = 1, told: list[Any] | None = None
) -> AsyncGenerator[Link[Any], None]:
    def lost(received: Received[Any], line: Line) -> None:
        if told is not None:
            told.append((received.delivery.body, line))

    async with queue.broker.connect(), queue.attach("test", lost, 5.0, limit=limit, size=size) as link:
        yield link


async def some(link: Link[Any], count: int) -> list[Received[Any]]:
    found: list[Received[Any]] = []
    with trio.fail_after(10):
        while len(found) < count:
            found += await link.receive(count - len(found))
    return found


def spoil(received: Received[Any], *begin: str) -> None:
    """Let the next settlement find a transaction that has failed."""
    handle: Any = received.delivery._handle  # pyright: ignore[reportPrivateUsage] -- there is no public way
    pin = handle.slot.pin
    settle = pin.settle

    async def settling(*arguments: Any, **options: Any) -> Any:
        pin.settle = settle
        for statement in begin:
            await pin._connection.execute(statement)
        with pytest.raises(psycopg.errors.DivisionByZero):
            await pin._connection.execute("SELECT 1 / 0")
        return await settle(*arguments, **options)

    pin.settle = settling


@pytest.mark.parametrize("trigger", [False, True], ids=["one_message", "one_by_one"])
@pytest.mark.parametrize("size", [1, 3])
async def test_a_transaction_that_has_failed_settles_nothing(database: str, size: int, *, trigger: bool) -> None:
    """DESIGN 4: a cancel that comes late ends the transaction ahead of the verb: the claim is lost, nothing is done."""
    tables = tables_of(database, size)
    if trigger:
        tables.run(IGNORES)
    before = tables.rows()
    queue = tables.broker().queue(tables.table())
    async with linked(queue, limit=size, size=size) as link:
        batch = await some(link, size)
        spoil(batch[0])
        verdicts = await link.settle([order(queue, received, Ack()) for received in batch])
        assert [type(verdict) for verdict in verdicts] == [LeaseLost] * size
    assert tables.rows() == before


async def test_a_message_of_which_nothing_is_carried_out(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DESIGN 4: where it fails in front of the savepoint nothing is done, and nothing is said to be."""
    tables = tables_of(database, 2)
    before = tables.rows()
    queue = tables.broker().queue(tables.table())
    async with linked(queue) as link:
        (received,) = await some(link, 1)
        monkeypatch.setattr(PostgresRowLock, "begin", "no SQL")
        (verdict,) = await link.settle([order(queue, received, Ack())])
        assert isinstance(verdict, LeaseLost)
        monkeypatch.undo()
        assert tables.rows() == before


async def test_what_fails_between_the_commit_and_the_next_begin(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DESIGN 4: it was committed, so it is booked so."""
    tables = tables_of(database, 2)
    queue = tables.broker().queue(tables.table())
    async with linked(queue) as link:
        (received,) = await some(link, 1)
        monkeypatch.setattr(PostgresRowLock, "begin", "SELECT 1 / 0")
        assert list(await link.settle([order(queue, received, Ack())])) == [None]
        monkeypatch.undo()
        (other,) = await some(link, 1)
        assert list(await link.settle([order(queue, other, Ack())])) == [None]
    assert tables.rows() == []


@pytest.mark.parametrize("trigger", [False, True], ids=["one_message", "one_by_one"])
async def test_a_part_whose_rest_cannot_be_locked_again(
    database: str, monkeypatch: pytest.MonkeyPatch, *, trigger: bool
) -> None:
    """S-6.1: the part is committed, the rest is lost, whatever fails behind the COMMIT."""
    tables = tables_of(database, 3)
    if trigger:
        tables.run(
            "CREATE FUNCTION yes() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN OLD; END $$; "
            "CREATE TRIGGER yes BEFORE DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION yes()"
        )
    queue = tables.broker().queue(tables.table())
    told: list[Any] = []
    async with linked(queue, limit=3, size=3, told=told) as link:
        batch = await some(link, 3)
        monkeypatch.setattr(PostgresRowLock, "begin", "SELECT 1 / 0")
        assert list(await link.settle([order(queue, batch[0], Ack())])) == [None]
        monkeypatch.undo()
        assert sorted(told) == [(b"1", Line.UNSETTLED), (b"2", Line.UNSETTLED)]
        assert [row["payload"] for row in tables.rows()] == [b"1", b"2"]


async def test_batches_are_full_again_behind_a_short_one(database: str) -> None:
    """DESIGN 3.8: the claim behind a settlement takes what a batch has, not what the one before had found."""
    tables = tables_of(database, 1)
    queue = tables.broker().queue(tables.table())
    async with linked(queue, limit=5, size=5) as link:
        short = await some(link, 1)
        tables.add(*(b"more %d" % number for number in range(10)))
        await link.settle([order(queue, short[0], Ack())])
        with trio.fail_after(10):
            assert len(await link.receive(5)) == 5


async def test_a_busy_queue_is_looked_at_all_the_same(database: str) -> None:
    """DESIGN 4: a trigger that comes while rows flow without a pause, and ignores the DELETE, is seen within a second.

    Else rows would be booked as acked that stay.
    """
    tables = tables_of(database, 2)
    queue = tables.broker().queue(tables.table())
    async with linked(queue) as link:
        (received,) = await some(link, 1)
        tables.run(IGNORES)
        end = trio.current_time() + 5
        verdict = None
        while verdict is None and trio.current_time() < end:
            tables.add(b"more")
            (verdict,) = await link.settle([order(queue, received, Ack())])
            if verdict is None:
                (received,) = await some(link, 1)
        assert isinstance(verdict, NotApplied)
        assert trio.current_time() < end - 3


async def test_an_advisory_claim_whose_transaction_has_failed(database: str) -> None:
    """DESIGN 4: the key is held by the session: the verb is said in a transaction of its own."""
    tables = tables_of(database, 1)
    queue = tables.broker().queue(tables.table(), claim=AdvisoryLock("one-{id}"))
    async with linked(queue) as link:
        for outcome in (Retry(), Ack()):
            (received,) = await some(link, 1)
            spoil(received, "BEGIN")
            assert list(await link.settle([order(queue, received, outcome)])) == [None]
    assert tables.rows() == []


FORMS: dict[str, ClaimForm] = {"row_lock": RowLock(), "advisory": AdvisoryLock("one-{id}")}
HELD = """SELECT pid FROM pg_locks JOIN pg_database d ON d.oid = database
    WHERE datname = current_database() AND locktype = 'advisory' UNION ALL
    SELECT pid FROM pg_stat_activity WHERE application_name = 'trio-settlement'
    AND datname = current_database() AND state LIKE 'idle in transaction%'"""


async def free(tables: PostgresTables) -> None:
    """Wait until nobody holds anything."""
    with trio.fail_after(10):
        while await trio.to_thread.run_sync(tables.run, HELD):
            await trio.sleep(0.01)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 3])
async def test_cancelled_at_random_moments(database: str, form: str, size: int) -> None:
    """DESIGN 4: nothing is held, nothing is lost, and what was said to be done is done."""
    tables = tables_of(database, 400)
    dice = dice_of(8)
    queue = tables.broker().queue(tables.table(), claim=FORMS[form])
    done: set[bytes] = set()
    unknown: set[bytes] = set()
    async with queue.broker.connect():
        for number in range(24):
            with trio.move_on_after(dice.uniform(0.0, 0.1) if number % 2 else 1.0) as scope:
                async with queue.attach("test", lambda *_: None, 30.0, limit=2 * size, size=size) as link:
                    while True:
                        batch = await link.receive(size)
                        scope.deadline = min(scope.deadline, trio.current_time() + dice.uniform(0.0, 0.03))
                        verdicts = await link.settle([order(queue, received, Ack()) for received in batch])
                        for received, verdict in zip(batch, verdicts, strict=True):
                            if verdict is None:
                                done.add(received.delivery.body)
                            elif isinstance(verdict, SettlementUnknown):
                                unknown.add(received.delivery.body)
            assert trio.current_time() - scope.deadline < 20, "a goodbye is not waited out, since all have answered"
            await free(tables)
        left = {row["payload"] for row in tables.rows()}
        every = {b"%d" % number for number in range(400)}
        assert done.isdisjoint(left)
        assert every - left <= done | unknown
        assert done, "it was cancelled too soon, each time"


@pytest.mark.parametrize("form", FORMS)
async def test_a_row_is_held_until_its_cancelled_handler_has_ended(database: str, form: str) -> None:
    """S-4.3, S-4.4: whoever cancels the runtime cancels handlers that may have to clean up: nobody begins meanwhile."""
    tables = tables_of(database, 1)
    held: list[bool] = []
    started = trio.Event()

    async def handle(_: Delivery[bytes]) -> None:
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.2)  # for whoever would let go
                held.append(bool(tables.run(HELD)))

    source = tables.broker().queue(tables.table(), claim=FORMS[form])
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                async with open_runtime(Subscription(source, handle)):
                    await trio.sleep_forever()

            nursery.start_soon(run)
            await started.wait()
            nursery.cancel_scope.cancel()
    assert held == [True]
    await free(tables)
    assert len(tables.rows()) == 1


@pytest.mark.parametrize("form", FORMS)
async def test_a_batch_whose_handler_takes_too_long(database: str, form: str) -> None:
    """C-7.5, S-6.2: `within` is a failure of each: they are put back by one commit, and come again."""
    tables = tables_of(database, 3)
    calls: list[int] = []

    async def handle(batch: Sequence[Delivery[bytes]]) -> None:
        calls.append(len(batch))
        if len(calls) == 1:
            await trio.sleep_forever()

    source = tables.broker().queue(tables.table(), claim=FORMS[form])
    subscription = BatchSubscription(source, handle, size=3, within=0.2, policy=Policy(on_error=Retry()))
    with trio.fail_after(20):
        async with open_runtime(subscription) as runtime:
            await until(lambda: runtime.ledger("jobs").acked == 3)
    assert runtime.ledger("jobs").retried == 3
    assert calls[0] == 3
    assert tables.rows() == []
    await free(tables)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", ["grace", "fail_fast"])
async def test_a_batch_whose_worker_is_cancelled(database: str, form: str, how: str) -> None:
    """S-13.1, C-5.4: by the end of a drain's grace, or since another handler failed: its rows are as they were."""
    tables = tables_of(database, 3)
    before = tables.rows()
    begun = trio.Event()

    async def handle(_: Sequence[Delivery[bytes]]) -> None:
        begun.set()
        await trio.sleep_forever()

    async def fails(_: Delivery[bytes]) -> None:
        await begun.wait()
        raise ValueError("no")

    broker = tables.broker()
    source = broker.queue(tables.table(), claim=FORMS[form])
    subscriptions: list[Any] = [BatchSubscription(source, handle, size=3)]
    if how == "fail_fast":
        others = RowLock() if form == "row_lock" else AdvisoryLock("other-{id}")
        tables.run("CREATE TABLE others (LIKE jobs INCLUDING ALL)")
        tables.run("INSERT INTO others (payload) VALUES ('x')")
        subscriptions.append(Subscription(broker.queue(tables.table("others"), claim=others), fails))
    runtime: Runtime | None = None
    with trio.fail_after(20), contextlib.suppress(ExceptionGroup):
        async with open_runtime(*subscriptions, grace=0.1) as runtime:
            await begun.wait()
            if how == "fail_fast":
                await trio.sleep_forever()
    assert runtime is not None
    assert runtime.ledger("jobs").unsettled == 3
    counted = int(form == "advisory")  # when it was claimed, and its handler has begun
    assert tables.rows() == [{**row, "attempt": row["attempt"] + counted} for row in before]
    await free(tables)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cancelled", [False, True])
async def test_spoiled_rows_are_settled_with_the_rest_of_their_claim(database: str, form: str, cancelled: bool) -> None:
    """C-7.6, S-6.2: nothing of a claim is free while its handler runs; where that is cancelled they are said alone."""
    tables = tables_of(database, 4)
    before = tables.rows()
    called: list[list[bytes]] = []
    started = trio.Event()

    def decode(body: bytes) -> bytes:
        if body == b"0":
            raise ValueError("no")
        return body

    async def handle(batch: Sequence[Delivery[bytes]]) -> None:
        called.append([delivery.body for delivery in batch])
        assert tables.rows()[0]["payload"] == b"0"
        assert form != "row_lock" or tables.run("SELECT FROM jobs FOR UPDATE SKIP LOCKED") == []
        started.set()
        if cancelled:
            await trio.sleep_forever()

    source = tables.broker().queue(tables.table(), claim=FORMS[form])
    policy = Policy(on_undecodable=Drop())
    subscription = BatchSubscription(source, handle, size=4, decode=decode, policy=policy)
    with trio.fail_after(20):
        async with open_runtime(subscription, grace=0.2) as runtime:
            await started.wait()
            if cancelled:
                runtime.drain()
            else:
                await until(lambda: runtime.ledger("jobs").in_hand == 0)
    ledger = runtime.ledger("jobs")
    assert called == [[b"1", b"2", b"3"]]
    if cancelled:
        assert (ledger.dropped, ledger.unsettled) == (1, 3)
        assert [row["payload"] for row in tables.rows()] == [row["payload"] for row in before[1:]]
    else:
        assert (ledger.dropped, ledger.acked, tables.rows()) == (1, 3, [])
    await free(tables)


async def test_a_dead_letter_of_another_broker_within_a_batch(database: str) -> None:
    """S-4.6, S-6.2: the others are settled by one commit, this row is locked again, and finished behind the letter."""
    tables = tables_of(database, 3)
    tables.run("CREATE TABLE letters (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, payload bytea)")
    other = tables.broker()
    broker = tables.broker()
    letters = other.publisher(Table("letters", id="id", payload="payload", generated=["id"]))
    tables.run("CREATE TABLE ends (payload bytea, tx text)")
    tables.run(
        "CREATE FUNCTION ended() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "INSERT INTO ends VALUES (OLD.payload, pg_current_xact_id()::text); RETURN NULL; END $$"
    )
    tables.run("CREATE TRIGGER ended AFTER DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION ended()")

    async def handle(batch: Sequence[Delivery[bytes]]) -> list[Outcome]:
        return [Retry() if delivery.body == b"1" else Ack() for delivery in batch]

    policy = Policy(max_attempts=1, dead_letter=letters)
    subscription = BatchSubscription(broker.queue(tables.table()), handle, size=3, policy=policy)
    with trio.fail_after(20):
        async with other.connect(), open_runtime(subscription) as runtime:
            await until(lambda: runtime.ledger("jobs").dead_lettered == 1 and runtime.ledger("jobs").acked == 2)
    assert tables.run("SELECT count(*), count(DISTINCT tx) FROM ends") == [(3, 2)]
    assert tables.run("SELECT payload FROM letters") == [(b"1",)]
    assert (tables.rows(), runtime.ledger("jobs").unsettled) == ([], 0)
    await free(tables)


async def test_one_of_a_batch_that_is_not_applied_is_said_again(database: str) -> None:
    """DESIGN 3.8: by the repeater, with the rest settled; its handler is called once."""
    tables = tables_of(database, 3)
    tables.run("CREATE TABLE refers (id bigint REFERENCES jobs)")
    tables.run("INSERT INTO refers SELECT id FROM jobs WHERE payload = '1'")
    called: list[bytes] = []

    async def handle(batch: Sequence[Delivery[bytes]]) -> None:
        called.extend(delivery.body for delivery in batch)

    subscription = BatchSubscription(tables.broker().queue(tables.table()), handle, size=3)
    with trio.fail_after(20):
        async with open_runtime(subscription) as runtime:
            await until(lambda: runtime.ledger("jobs").acked == 2)
            assert [row["payload"] for row in tables.rows()] == [b"1"]
            tables.run("DELETE FROM refers")
            await until(lambda: runtime.ledger("jobs").acked == 3)
    assert (sorted(called), tables.rows()) == ([b"0", b"1", b"2"], [])


@pytest.mark.parametrize(
    "key", ["it's {lane}", "%s %% %(id)s {lane}", "'); DROP TABLE jobs; --{lane}", "{{{lane}}}", "\\' {lane}"]
)
async def test_key_templates_with_sql_in_them(database: str, key: str) -> None:
    """S-4.9: a text is a text: two rows of one key are in work one after the other, two keys at once."""
    tables = tables_of(database, 3)
    tables.run("UPDATE jobs SET lane = CASE WHEN payload = '2' THEN 'b' ELSE 'a''%s' END")
    queue = tables.broker().queue(tables.table(), claim=AdvisoryLock(key))
    async with linked(queue, limit=3) as link:
        batch = await some(link, 2)
        assert sorted(received.delivery.body for received in batch) == [b"0", b"2"]
        assert list(await link.settle([order(queue, received, Ack()) for received in batch])) == [None, None]
        (last,) = await some(link, 1)
        assert list(await link.settle([order(queue, last, Ack())])) == [None]
    assert tables.rows() == []


@pytest.mark.parametrize("how", ["DROP COLUMN lane", "RENAME COLUMN lane TO track"])
async def test_a_key_whose_column_goes_away(database: str, how: str) -> None:
    """DESIGN 4: what is in hand is settled; then refused, by the column's name; with it there again all goes on."""
    tables = tables_of(database, 2)
    queue = tables.broker().queue(tables.table(partition_key=None), claim=AdvisoryLock("order-{lane}"))
    async with linked(queue) as link:
        (received,) = await some(link, 1)
        tables.run(f"ALTER TABLE jobs {how}")
        assert list(await link.settle([order(queue, received, Ack())])) == [None]
        with pytest.raises(LinkRefused, match="lane"):
            await some(link, 1)
    back = "ADD COLUMN lane text" if how.startswith("DROP") else "RENAME COLUMN track TO lane"
    tables.run(f"ALTER TABLE jobs {back}")
    async with linked(queue) as link:
        (received,) = await some(link, 1)
        assert list(await link.settle([order(queue, received, Ack())])) == [None]
    assert tables.rows() == []


async def test_a_key_whose_column_gets_another_type(database: str) -> None:
    """DESIGN 4: the key is of the column as it is now."""
    tables = tables_of(database, 3)
    tables.run("UPDATE jobs SET lane = '7'")
    queue = tables.broker().queue(tables.table(partition_key=None), claim=AdvisoryLock("order-{lane}"))
    async with linked(queue, limit=2) as link:
        (received,) = await some(link, 1)
        tables.run("ALTER TABLE jobs ALTER COLUMN lane TYPE bigint USING lane::bigint")
        assert list(await link.settle([order(queue, received, Ack())])) == [None]
        (received,) = await some(link, 1)
        with trio.move_on_after(0.5) as scope:
            await link.receive(1)
        assert scope.cancelled_caught, "one key, one row in work"
        assert list(await link.settle([order(queue, received, Ack())])) == [None]
        (received,) = await some(link, 1)
        assert list(await link.settle([order(queue, received, Ack())])) == [None]
    assert tables.rows() == []


async def test_many_places_and_few_keys(database: str) -> None:
    """DESIGN 3.8: 32 places and 3 keys: nobody asks the server all the time; a key that is free is taken at once."""
    tables = tables_of(database, 30)
    tables.run("UPDATE jobs SET lane = mod(id, 3)::text")
    broker = SqlBroker(tables.url, poll_interval=20.0)
    queue = broker.queue(tables.table(), claim=AdvisoryLock("order-{lane}"))
    async with linked(queue, limit=32) as link:
        batch = await some(link, 3)
        await trio.sleep(0.5)  # those that looked in vain have ended
        before = time.process_time()
        (asked,) = tables.run("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")
        await trio.sleep(2.0)
        assert time.process_time() - before < 0.3, "seconds of CPU in 2 s of waiting"
        tables.run("SELECT pg_stat_clear_snapshot()")
        (then,) = tables.run("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")
        assert then[0] - asked[0] < 40, "transactions in 2 s of waiting, those of the test among them"
        for _ in range(27):
            received = batch.pop(0)
            began = trio.current_time()
            assert list(await link.settle([order(queue, received, Ack())])) == [None]
            batch += await some(link, 1)
            assert trio.current_time() - began < 5, "the next poll comes in 16 s at the soonest"
        assert list(await link.settle([order(queue, received, Ack()) for received in batch])) == [None] * 3
    assert tables.rows() == []


@pytest.mark.parametrize("claim", [RowLock(), AdvisoryLock("{id}")], ids=["row lock", "advisory"])
async def test_a_connection_that_ended_before_anything_was_said(database: str, claim: Any) -> None:
    """DESIGN 4: it is known that nothing was done: lost, not unknown; and the row is claimed again at once."""
    tables = PostgresTables(database, leased=False).create()
    tables.add(b"a")
    queue = tables.broker().queue(tables.table(), claim=claim)
    async with queue.broker.connect(), queue.attach("test", lambda *_: None, 5.0, limit=1) as link:
        with trio.fail_after(10):
            (received,) = await link.receive(1)
            tables.run(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                "WHERE application_name = 'trio-settlement' AND pid IN (SELECT pid FROM pg_locks "
                "WHERE locktype IN ('advisory', 'transactionid') OR mode = 'RowShareLock')"
            )
            (verdict,) = await link.settle([order(queue, received, Ack())])
            assert isinstance(verdict, LeaseLost), verdict
            (again,) = await link.receive(1)
            assert list(await link.settle([order(queue, again, Ack())])) == [None]
    assert tables.rows() == []


async def test_what_somebody_takes_while_a_failed_transaction_is_begun_again(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-3.2: a verb that fails ends the transaction; what the next one cannot have is lost, the rest is held."""
    tables = PostgresTables(database, leased=False).create()
    tables.add(b"a", b"b", b"c", b"d")
    tables.run("CREATE TABLE refers (id bigint REFERENCES jobs)")
    tables.run("INSERT INTO refers SELECT id FROM jobs WHERE payload IN ('b', 'd')")
    queue = tables.broker().queue(tables.table(), claim=RowLock())
    usual = RowLockPin._committed
    lost: list[Any] = []
    with psycopg.connect(database) as stranger:

        async def taken(pin: RowLockPin, connection: Any, texts: Sequence[str], rest: Sequence[Any]) -> Sequence[Any]:
            if not texts:
                stranger.execute("SELECT FROM jobs WHERE payload IN ('a', 'd') FOR UPDATE")
            return await usual(pin, connection, texts, rest)

        monkeypatch.setattr(RowLockPin, "_committed", taken)
        async with queue.broker.connect(), queue.attach("test", lambda *_: None, 5.0, limit=3, size=3) as link:
            with trio.fail_after(10):
                batch = [*await link.receive(3)]
                link.stop()
                verdicts = await link.settle([order(queue, received, Ack()) for received in batch])
                assert [type(verdict) for verdict in verdicts] == [LeaseLost, NotApplied, type(None)]
                stranger.rollback()
                tables.run("DELETE FROM refers WHERE id = (SELECT id FROM jobs WHERE payload = 'b')")
                assert await link.settle([order(queue, batch[1], Ack())]) == [None]
        async with queue.broker.connect(), queue.attach("test", lambda one, _: lost.append(one), 5.0, limit=1) as link:
            tables.run("DELETE FROM jobs WHERE payload = 'a'")
            with trio.fail_after(10):
                (received,) = await link.receive(1)
                link.stop()
                (verdict,) = await link.settle([order(queue, received, Ack())])
                assert isinstance(verdict, LeaseLost)
    assert (lost, [row["payload"] for row in tables.rows()]) == ([], [b"d"])


async def test_a_connection_that_breaks_behind_a_commit_of_a_part(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DESIGN 3.8: a COMMIT that did not carry out one of the verbs is no word for that one: both are unknown."""
    tables = PostgresTables(database, leased=False).create()
    tables.add(b"a", b"b")
    tables.run("CREATE TABLE refers (id bigint REFERENCES jobs)")
    tables.run("INSERT INTO refers SELECT id FROM jobs WHERE payload = 'b'")
    queue = tables.broker().queue(tables.table(), claim=RowLock())
    usual = RowLockPin._committed

    async def breaks(pin: RowLockPin, connection: Any, texts: Sequence[str], rest: Sequence[Any]) -> Sequence[Any]:
        lost = await usual(pin, connection, texts, rest)
        if not texts:  # the rows are locked again, and nothing is said
            return lost
        connection.finish()
        raise psycopg.OperationalError("behind the COMMIT")

    async with queue.broker.connect(), queue.attach("test", lambda *_: None, 5.0, limit=2, size=2) as link:
        with trio.fail_after(10):
            batch = [*await link.receive(2)]
            link.stop()
            monkeypatch.setattr(RowLockPin, "_committed", breaks)
            verdicts = await link.settle([order(queue, received, Ack()) for received in batch])
    assert [type(verdict) for verdict in verdicts] == [SettlementUnknown] * 2
    assert [row["payload"] for row in tables.rows()] == [b"b"]
