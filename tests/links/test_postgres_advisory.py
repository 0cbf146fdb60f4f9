"""The advisory form on PostgreSQL: a row is in work under a session's lock on its key."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import psycopg
import pytest
import trio

import links.sql
from actors import BatchSubscription, Subscription, open_runtime
from links.abc import Link, Received
from links.errors import LeaseLost, LinkRefused, SettlementUnknown, TransactionEnded
from links.sql import AdvisoryLock, SqlQueue
from settlement import Ack, Delivery, Drop, Outcome, Policy, Retry, RetryAfter
from settlement.ledger import Line
from settlement.policy import DeadLetter, Ending
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import bodies, order, until

pytestmark = [pytest.mark.postgres, pytest.mark.servers]

KEY = AdvisoryLock("order-{lane}")
CAPPED = Policy(max_attempts=1, dead_letter="dead")
HELD = """SELECT (classid::bigint << 32) | objid::bigint FROM pg_locks JOIN pg_database d ON d.oid = database
    WHERE locktype = 'advisory' AND datname = current_database() ORDER BY 1"""
OURS = "FROM pg_stat_activity WHERE application_name = 'trio-settlement' AND datname = current_database()"


@attrs.define
class Losses:
    """What a link has told as lost."""

    told: list[tuple[bytes, Line]] = attrs.Factory(list[tuple[bytes, Line]])

    def __call__(self, received: Received[Any], line: Line) -> None:
        self.told.append((received.delivery.body, line))


def tables_of(database: str, **shape: bool) -> PostgresTables:
    return PostgresTables(database, leased=False, **shape).create()


def queue_of(tables: PostgresTables, group: str | None = None, key: AdvisoryLock = KEY) -> SqlQueue[bytes]:
    return tables.broker().queue(tables.table(), group=group, claim=key)


@asynccontextmanager
async def linked(
    queue: SqlQueue[Any], losses: Losses | None = None, *, limit: int = 4, size: int = 1
) -> AsyncGenerator[Link[Any], None]:
    async with queue.broker.connect(), queue.attach("test", losses or Losses(), 5.0, limit=limit, size=size) as link:
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


def add(tables: PostgresTables, lane: str | None, *payloads: bytes) -> None:
    for payload in payloads:
        tables.run("INSERT INTO jobs (payload, lane) VALUES (%s, %s)", payload, lane)


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
    database: str, outcome: Ending, policy: Policy, left: dict[str, Any] | None, dead: bool, marks: bool
) -> None:
    """S-3, advisory, K-80: what became of the row, column by column; the attempt was counted when it was taken."""
    tables = tables_of(database, marks=marks)
    add(tables, "seven", b"a")
    before = tables.row()
    queue = queue_of(tables)
    async with linked(queue) as link:
        (received,) = await some(link, 1)
        assert (received.delivery.attempt, received.delivery.body) == (1, b"a")
        assert tables.row() == before | {"attempt": 2}, "S-2.6: it is in no transaction"
        (held,) = tables.run(HELD)
        assert [held] == tables.run("SELECT hashtextextended('order-seven', 0)"), "S-2.7: verbatim, seed 0"
        link.stop()
        assert list(await link.settle([order(queue, received, outcome, policy)])) == [None]
        await until(lambda: tables.run(HELD) == [])  # a claim that was under way may have won it, and finds no row
    if dead:
        assert (tables.rows(), tables.rows("dead")) == ([], [before | {"attempt": 2}])  # S-4.2
    elif left is None and marks:
        row = tables.row()
        assert row.pop("processed_at") is not None
        assert row == {name: value for name, value in before.items() if name != "processed_at"} | {"attempt": 2}
    elif left is None:
        assert tables.rows() == []
    else:
        row = tables.row()
        if isinstance(outcome, RetryAfter):
            (ahead,) = tables.run("SELECT extract(epoch FROM retry_after - clock_timestamp())::float8 FROM jobs")
            assert 3590 < ahead[0] <= 3600
            row["retry_after"] = before["retry_after"]
        assert row == before | left


async def test_the_cap_by_group(database: str) -> None:
    """S-4.6: one UPDATE of the group."""
    tables = tables_of(database, grouped=True)
    tables.add(b"a", group="mail")
    queue = queue_of(tables, "mail")
    async with linked(queue) as link:
        (received,) = await some(link, 1)
        assert list(await link.settle([order(queue, received, Retry(), CAPPED)])) == [None]
    assert (tables.row()["grp"], tables.row()["attempt"]) == ("dead", 2)


async def test_rows_of_one_key_are_never_in_work_at_once(database: str) -> None:
    """S-2.6: the second one of a key waits for the first, others go on; then it is found without a poll."""
    tables = tables_of(database)
    add(tables, "a", b"1", b"2")
    add(tables, "b", b"3")
    add(tables, None, b"4", b"5")
    broker = tables.broker(poll_interval=60.0)
    queue = broker.queue(tables.table(), claim=KEY)
    async with linked(queue) as link:
        first = await some(link, 3)
        assert sorted(bodies(first)) == [b"1", b"3", b"4"]
        assert await nothing(link)
        (one,) = [received for received in first if received.delivery.body == b"1"]
        assert list(await link.settle([order(queue, one, Ack())])) == [None]
        (second,) = await some(link, 1)
        assert second.delivery.body == b"2"


async def test_two_queues_exclude_each_other_by_the_key(database: str) -> None:
    """S-2.7: keys are the database's: another session that holds one is respected."""
    tables = tables_of(database)
    add(tables, "a", b"1")
    add(tables, "b", b"2")
    with psycopg.connect(database, autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(hashtextextended('order-a', 0))")
        async with linked(queue_of(tables)) as link:
            (received,) = await some(link, 1)
            assert received.delivery.body == b"2"
            other.execute("SELECT pg_advisory_unlock_all()")
            (received,) = await some(link, 1)
            assert received.delivery.body == b"1"


async def test_a_free_row_behind_ten_thousand_of_a_held_key(database: str) -> None:
    """Issue 8: its claim takes less than 50 ms; no lock function runs over the table."""
    tables = tables_of(database)
    tables.run("INSERT INTO jobs (payload, lane) SELECT 'x', 'held' FROM generate_series(1, 10000)")
    add(tables, "free", b"found")
    tables.run("ANALYZE jobs")
    with psycopg.connect(database, autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(hashtextextended('order-held', 0))")
        queue = queue_of(tables)
        spent: list[float] = []
        async with linked(queue, limit=1) as link:
            for _ in range(5):
                (received,) = await some(link, 1)
                assert received.delivery.body == b"found"
                assert len(tables.run(HELD)) == 2
                link.forget(received)
                began = time.perf_counter()
                (received,) = await some(link, 1)
                spent.append(time.perf_counter() - began)
                link.forget(received)
    assert min(spent) < 0.05


async def test_a_row_that_was_settled_since_is_not_taken(database: str) -> None:
    """S-2.6: a claim whose snapshot is older than the owner's COMMIT releases the key and passes the row over.

    A trigger of the holder's own DELETE holds the moment open: the claimer wins the key in between.
    """
    tables = tables_of(database)
    add(tables, "a", b"1")
    with psycopg.connect(database) as owner:
        owner.execute("DELETE FROM jobs")  # not committed, and its key was let go before
        async with linked(queue_of(tables), limit=1) as link:
            assert await nothing(link)
            assert tables.run(HELD) == []
            owner.rollback()
            (received,) = await some(link, 1)
            assert received.delivery.attempt == 1, "what was not taken was not counted"


async def test_dropped_unsettled_the_row_is_free_at_once(database: str) -> None:
    """S-3, K-88, S-4.3: its attempt is spent, its key released."""
    tables = tables_of(database)
    add(tables, "a", b"1")
    queue = queue_of(tables)
    async with linked(queue, limit=1) as link:
        (received,) = await some(link, 1)
        received.started = True
        link.forget(received)
        (received,) = await some(link, 1)
        assert received.delivery.attempt == 2
        await link.give_back([received])
        assert tables.row()["attempt"] in (2, 3), "no handler began with it: it was counted back, and claimed again"
    assert (tables.run(HELD), tables.row()["attempt"]) == ([], 2)
    assert tables.run(f"SELECT 1 {OURS}") == []


@pytest.mark.parametrize("taken", [False, True])
async def test_cancelled_from_outside_what_nobody_began_with_is_as_it_was(database: str, *, taken: bool) -> None:
    """K-88: links and handlers end side by side; its attempt is counted back, whether the row was received or not."""
    tables = tables_of(database)
    add(tables, "a", b"1")
    add(tables, "b", b"2")
    before = tables.rows()
    with trio.CancelScope() as scope:
        async with linked(queue_of(tables), limit=2) as link:
            await until(lambda: len(link._ready) == 2)  # type: ignore[attr-defined]
            if taken:
                for received in await some(link, 2):
                    received.started = received.delivery.body == b"1"
            scope.cancel()
            await trio.sleep_forever()
    await until(lambda: tables.run(HELD) == [])
    assert tables.rows() == [before[0] | {"attempt": 1 + taken}, before[1]]


async def test_a_connection_that_ends_frees_its_row(database: str) -> None:
    """S-4.3, DESIGN 4: the delivery is unsettled, its settlement lost, the row another one's."""
    tables = tables_of(database)
    add(tables, "a", b"1")
    losses = Losses()
    queue = queue_of(tables)
    async with linked(queue, losses, limit=1) as link:
        (received,) = await some(link, 1)
        tables.run("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'")
        await until(lambda: losses.told == [(b"1", Line.UNSETTLED)])
        assert [type(each) for each in await link.settle([order(queue, received, Ack())])] == [LeaseLost]
        (again,) = await some(link, 1)
        assert again.delivery.attempt == 2


async def test_a_verb_that_fails_releases_the_lock(database: str) -> None:
    """S-3.3: the row returns as it was when it was taken, and is passed over for a second."""
    tables = tables_of(database)
    add(tables, "a", b"1")
    tables.run("CREATE TABLE refers (id bigint REFERENCES jobs)")
    tables.run("INSERT INTO refers SELECT id FROM jobs")
    before = tables.row()
    queue = queue_of(tables)
    async with linked(queue, limit=1) as link:
        (received,) = await some(link, 1)
        (verdict,) = await link.settle([order(queue, received, Ack())])
        assert isinstance(verdict, LeaseLost)
        assert "not applied, and the lock was released" in str(verdict)
        assert (tables.run(HELD), tables.row()) == ([], before | {"attempt": 2})
        began = trio.current_time()
        (received,) = await some(link, 1)
        assert trio.current_time() - began > 0.5, "it was passed over"
        tables.run("DELETE FROM refers")
        assert list(await link.settle([order(queue, received, Ack())])) == [None]
    assert tables.rows() == []


async def test_a_settlement_whose_backend_dies_is_unknown(database: str) -> None:
    """OQ-S7."""
    tables = tables_of(database)
    add(tables, "a", b"1")
    tables.run(
        "CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN OLD; END $$"
    )
    tables.run("CREATE TRIGGER die BEFORE DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION die()")
    queue = queue_of(tables)
    async with linked(queue, limit=1) as link:
        (received,) = await some(link, 1)
        verdicts = await link.settle([order(queue, received, Ack())])
        assert [type(verdict) for verdict in verdicts] == [SettlementUnknown]
    assert len(tables.rows()) == 1


@pytest.mark.parametrize("how", ["fails", "ignored"])
async def test_a_row_that_cannot_be_taken(database: str, how: str) -> None:
    """DESIGN 6: a CHECK on the attempt, or a trigger, refuses it: others are claimed, it is named and *degraded*."""
    tables = tables_of(database)
    add(tables, "a", b"1")
    add(tables, "b", b"2")
    if how == "fails":
        tables.run("ALTER TABLE jobs ADD CHECK (payload <> '1' OR attempt < 2)")
    else:
        tables.run("CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$")
        tables.run(
            "CREATE TRIGGER no BEFORE UPDATE ON jobs FOR EACH ROW WHEN (OLD.payload = '1') EXECUTE FUNCTION no()"
        )
    told: list[str | None] = []
    async with linked(queue_of(tables), limit=1) as link:
        link.degraded = lambda what, why: told.append(why) if what == "to claim each row" else None
        (received,) = await some(link, 1)
        assert received.delivery.body == b"2"
        assert len(tables.run(HELD)) == 1
    assert any(why is not None and "row 1 passed over" in why for why in told)


async def test_without_an_attempt_column(database: str) -> None:
    """S-2.6: nothing is written by a claim."""
    tables = tables_of(database, counts=False)
    add(tables, "a", b"1")
    before = tables.run("SELECT xmin::text, ctid::text FROM jobs")
    queue = queue_of(tables)
    async with linked(queue, limit=1) as link:
        for _ in range(2):
            (received,) = await some(link, 1)
            assert received.delivery.attempt == 1
            assert list(await link.settle([order(queue, received, Retry())])) == [None]
        assert tables.run("SELECT xmin::text, ctid::text FROM jobs") == before


async def test_a_batch_has_one_row_of_each_key(database: str) -> None:
    """S-6.3, DESIGN 3.8: one connection, one claim, one commit."""
    tables = tables_of(database)
    for lane in ("a", "b", "c"):
        add(tables, lane, *(b"%s%d" % (lane.encode(), n) for n in range(2)))
    queue = queue_of(tables)
    async with linked(queue, limit=6, size=6) as link:
        batch = await some(link, 3)
        assert bodies(batch) == [b"a0", b"b0", b"c0"]
        assert len(tables.run(HELD)) == 3
        assert list(await link.settle([order(queue, batch[0], Ack())])) == [None]
        assert len(tables.run(HELD)) == 2, "the rest is held"
        link.stop()
        assert list(await link.settle([order(queue, each, Ack()) for each in batch[1:]])) == [None, None]
        assert tables.run(HELD) == []
    assert [row["payload"] for row in tables.rows()] == [b"a1", b"b1", b"c1"]


async def test_through_the_runtime_no_key_is_twice_in_work(database: str) -> None:
    """K-94: eight workers in two brokers, 200 rows of 10 keys, mixed outcomes: rows in = rows out."""
    tables = tables_of(database)
    tables.run("INSERT INTO jobs (payload, lane) SELECT n::text::bytea, n % 10 FROM generate_series(1, 200) n")
    busy: set[str] = set()
    seen: list[bytes] = []

    async def handle(delivery: Delivery[bytes]) -> Outcome:
        assert delivery.key is not None
        assert delivery.key not in busy
        busy.add(delivery.key)
        await trio.sleep(0.002)
        busy.remove(delivery.key)
        seen.append(delivery.body)
        return Retry() if int(delivery.body) % 7 == 0 and delivery.attempt == 1 else Ack()

    with trio.fail_after(60):
        async with (
            open_runtime(Subscription(queue_of(tables), handle, concurrency=4)) as one,
            open_runtime(Subscription(queue_of(tables), handle, concurrency=4)) as two,
        ):
            while one.ledger("jobs").acked + two.ledger("jobs").acked < 200:  # noqa: ASYNC110 -- bounded above
                await trio.sleep(0.02)
    assert (tables.rows(), len(seen), len(set(seen))) == ([], 228, 200)
    assert tables.run(HELD) == []


async def test_batches_through_the_runtime(database: str) -> None:
    """S-6.3, C-7.4."""
    tables = tables_of(database)
    tables.run("INSERT INTO jobs (payload, lane) SELECT n::text::bytea, n % 10 FROM generate_series(1, 100) n")

    async def handle(batch: list[Delivery[bytes]]) -> Outcome:
        keys = [delivery.key for delivery in batch]
        assert len(set(keys)) == len(keys)
        return Ack()

    with trio.fail_after(60):
        async with open_runtime(BatchSubscription(queue_of(tables), handle, size=20, concurrency=2)) as runtime:
            while runtime.ledger("jobs").acked < 100:  # noqa: ASYNC110 -- bounded above
                await trio.sleep(0.02)
    assert tables.rows() == []


@pytest.mark.parametrize("outcome", [Ack(), Retry(), Drop(), RetryAfter(60.0), None])
async def test_a_transaction_on_the_locks_connection(database: str, outcome: Outcome | None) -> None:
    """S-8.1, S-8.2, K-96: what the handler writes commits with Ack and with nothing else. None: it fails."""
    tables = tables_of(database)
    add(tables, "a", b"1")
    tables.run("CREATE TABLE written (body bytea)")

    async def handle(delivery: Delivery[bytes]) -> Outcome:
        async with links.sql.transaction(delivery) as connection:
            await connection.execute("INSERT INTO written VALUES (%s)", [delivery.body])
        if outcome is None:
            raise ValueError("no")
        return outcome if delivery.attempt == 1 else Drop()

    subscription = Subscription(queue_of(tables), handle, policy=Policy(on_error=Drop()))
    with trio.fail_after(20):
        async with open_runtime(subscription) as runtime:
            await until(lambda: runtime.ledger("jobs").received > runtime.ledger("jobs").in_hand)
    assert tables.run("SELECT * FROM written") == ([(b"1",)] if outcome == Ack() else [])


async def test_a_handler_that_ends_the_transaction(database: str) -> None:
    """DESIGN 6: unknown, TransactionEnded; the lock is released."""
    tables = tables_of(database)
    add(tables, "a", b"1")
    queue = queue_of(tables)
    async with linked(queue, limit=1) as link:
        (received,) = await some(link, 1)
        async with links.sql.transaction(received.delivery) as connection:
            await connection.execute("COMMIT")
        (verdict,) = await link.settle([order(queue, received, Ack())])
        assert isinstance(verdict, TransactionEnded)
        assert (tables.run(HELD), tables.row()["attempt"]) == ([], 2)


async def test_a_handler_that_unlocks_is_found_out(database: str) -> None:
    """S-3.3: an unlock that is not confirmed closes the connection; the row was ours to finish all the same."""
    tables = tables_of(database)
    add(tables, "a", b"1")
    queue = queue_of(tables)
    async with linked(queue, limit=1) as link:
        (received,) = await some(link, 1)
        async with links.sql.transaction(received.delivery) as connection:
            await connection.execute("SELECT pg_advisory_unlock_all()")
        (pid,) = tables.run(f"SELECT pid {OURS} AND state LIKE 'idle in transaction%%' OR query LIKE '%%unlock_all%%'")[
            0
        ]
        link.stop()
        assert list(await link.settle([order(queue, received, Ack())])) == [None]
        await until(lambda: not tables.run(f"SELECT 1 {OURS} AND pid = {pid}"))
    assert tables.rows() == []


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("order-{customer}", "there is no column 'customer' for the key 'order-{customer}'"),
        ("order-{Lane}", "there is no column 'Lane'"),
    ],
)
async def test_a_key_of_columns_that_are_not_there(database: str, key: str, why: str) -> None:
    """S-12.3: refused at start-up, with what there is."""
    tables = tables_of(database)
    queue = queue_of(tables, key=AdvisoryLock(key))
    async with queue.broker.connect():
        with pytest.raises(LinkRefused, match=f"'test', table 'jobs': {why}.*lane"):
            async with queue.attach("test", Losses(), 5.0):
                pass


@pytest.mark.parametrize("kind", ["timestamptz", "bytea", "uuid", "double precision", "date"])
async def test_a_key_is_the_same_in_every_session(database: str, kind: str) -> None:
    """DESIGN 6: whatever the time zone, bytea_output, DateStyle or digits of a session."""
    values = {
        "timestamptz": "2026-11-30 12:00+00",
        "bytea": "\\x00ff",
        "uuid": "00000000-0000-0000-0000-000000000001",
        "double precision": "0.1",
        "date": "2026-11-30",
    }
    tables = tables_of(database)
    tables.run(f"ALTER TABLE jobs ADD odd {kind}")
    add(tables, "a", b"1")
    tables.run(f"UPDATE jobs SET odd = %s::{kind}", values[kind])  # noqa: S608
    name = database.rsplit("/", maxsplit=1)[-1]
    keys: set[Any] = set()
    for zone, output in (("UTC", "hex"), ("Asia/Tokyo", "escape")):
        tables.run(f"ALTER ROLE CURRENT_USER IN DATABASE {name} SET timezone = '{zone}'")
        tables.run(f"ALTER ROLE CURRENT_USER IN DATABASE {name} SET bytea_output = '{output}'")
        async with linked(queue_of(tables, key=AdvisoryLock("it's 100%{odd}")), limit=1) as link:
            await some(link, 1)
            keys.update(tables.run(HELD))
    assert len(keys) == 1
