"""The row-lock form on PostgreSQL: a claim is an open transaction, its COMMIT the settlement."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import psycopg
import pytest
import trio

from actors import Subscription, open_runtime
from links.abc import Link, Received
from links.errors import LeaseLost, LinkRefused, NotApplied, SettlementUnknown
from links.sql import AdvisoryLock, Lease, RowLock, SqlQueue, Table, slot, transaction
from settlement import Ack, Delivery, Drop, Policy, Retry, RetryAfter
from settlement.ledger import Line
from settlement.policy import DeadLetter, Ending
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import bodies, broker_of, order, until

pytestmark = [pytest.mark.postgres, pytest.mark.servers]

OURS = "FROM pg_stat_activity WHERE application_name = 'trio-settlement' AND datname = current_database()"


@attrs.define
class Losses:
    """What a link has told as lost."""

    told: list[tuple[bytes, Line]] = attrs.Factory(list[tuple[bytes, Line]])

    def __call__(self, received: Received[Any], line: Line) -> None:
        self.told.append((received.delivery.body, line))


def locked(database: str, **shape: bool) -> PostgresTables:
    return PostgresTables(database, leased=False, **shape).create()


def queue_of(tables: PostgresTables, group: str | None = None) -> SqlQueue[bytes]:
    return tables.broker().queue(tables.table(), group=group)


@asynccontextmanager
async def linked(
    queue: SqlQueue[Any], losses: Losses | None = None, *, limit: int = 4, goodbye: float = 5.0
) -> AsyncGenerator[Link[Any], None]:
    async with queue.broker.connect(), queue.attach("test", losses or Losses(), goodbye, limit=limit) as link:
        yield link


async def some(link: Link[Any], count: int) -> list[Received[Any]]:
    """So many deliveries, in the order in which they were handed over."""
    found: list[Received[Any]] = []
    with trio.fail_after(10):
        while len(found) < count:
            found += await link.receive(count - len(found))
    return found


CAPPED = Policy(max_attempts=1, dead_letter="dead")


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
    """S-3, row lock: what became of the row, column by column; the attempt counts in the statement that returns it."""
    tables = locked(database, marks=marks)
    tables.add(b"a")
    before = tables.row()
    queue = queue_of(tables)
    async with linked(queue) as link:
        (received,) = await some(link, 1)
        assert (received.delivery.attempt, received.delivery.body) == (1, b"a")
        assert list(await link.settle([order(queue, received, outcome, policy)])) == [None]
    if dead:
        assert (tables.rows(), tables.rows("dead")) == ([], [before])  # S-4.2: its attempt stays
    elif left is None and marks:
        row = tables.row()
        assert row.pop("processed_at") is not None
        assert row == {name: value for name, value in before.items() if name != "processed_at"}
    elif left is None:
        assert tables.rows() == []
    else:
        row = tables.row()
        if isinstance(outcome, RetryAfter):
            (ahead,) = tables.run("SELECT extract(epoch FROM retry_after - clock_timestamp())::float8 FROM jobs")
            assert 3590 < ahead[0] <= 3600
            row["retry_after"] = before["retry_after"]
        assert row == before | left


async def test_without_an_attempt_column_a_retry_is_a_rollback(database: str) -> None:
    """S-3: nothing is written; and the row is there again at once."""
    tables = locked(database, counts=False)
    tables.add(b"a")
    before = tables.run("SELECT xmin::text, ctid::text FROM jobs")
    queue = queue_of(tables)
    async with linked(queue) as link:
        for _ in range(2):
            (received,) = await some(link, 1)
            assert received.delivery.attempt == 1
            assert list(await link.settle([order(queue, received, Retry())])) == [None]
            assert tables.run("SELECT xmin::text, ctid::text FROM jobs") == before


async def test_the_cap_by_group(database: str) -> None:
    """S-4.6: one UPDATE of the group; the other group's consumer is woken."""
    tables = locked(database, grouped=True)
    tables.add(b"a", group="mail")
    queue = queue_of(tables, "mail")
    async with linked(queue) as link:
        (received,) = await some(link, 1)
        assert list(await link.settle([order(queue, received, Retry(), CAPPED)])) == [None]
    assert (tables.row()["grp"], tables.row()["attempt"]) == ("dead", 1)


async def test_a_crash_spends_no_attempt(database: str) -> None:
    """S-4.3, S-2.3: the transaction stays open with its connection; where that ends, the row is as it was."""
    tables = locked(database)
    tables.add(b"a")
    before = tables.row()
    losses = Losses()
    queue = queue_of(tables)
    async with linked(queue, losses, limit=1) as link:
        (received,) = await some(link, 1)
        assert tables.run("SELECT id FROM jobs FOR UPDATE SKIP LOCKED") == []
        tables.run(f"SELECT pg_terminate_backend(pid) {OURS} AND state = 'idle in transaction'")
        await until(lambda: losses.told)
        assert losses.told == [(b"a", Line.UNSETTLED)]
        (verdict,) = await link.settle([order(queue, received, Ack())])
        assert isinstance(verdict, LeaseLost)
        (again,) = await some(link, 1)
        assert again.delivery.attempt == 1
    assert tables.row() == before


async def test_the_handler_of_a_lost_claim_is_cancelled(database: str) -> None:
    """DESIGN 6, SQL: the socket is watched while the handler runs."""
    tables = locked(database)
    tables.add(b"a")
    ended: list[str] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        if not ended:
            tables.run(f"SELECT pg_terminate_backend(pid) {OURS} AND state = 'idle in transaction'")
            try:
                await trio.sleep(30)
            finally:
                ended.append("cancelled")
        ended.append("handled")

    async with open_runtime(Subscription(queue_of(tables), handler)) as runtime:
        await until(lambda: not tables.rows(), 15)
        await until(lambda: runtime.ledger("jobs").acked, 5)
        assert (runtime.ledger("jobs").unsettled, ended) == (1, ["cancelled", "handled"])


async def test_the_server_shows_as_many_as_are_in_hand(database: str) -> None:
    """S-2.12: a claim and a connection for each; with the queue empty one of them looks."""
    tables = locked(database)
    tables.add(*[b"%d" % number for number in range(20)])
    queue = queue_of(tables)
    async with linked(queue, limit=8) as link:
        received = await some(link, 8)
        assert {*bodies(received)} == {b"%d" % number for number in range(8)}
        assert tables.run(f"SELECT count(*) {OURS} AND state = 'idle in transaction'") == [(8,)]
        with trio.move_on_after(0.3) as scope:
            await link.receive(1)
        assert scope.cancelled_caught, "there are eight places"
        await link.settle([order(queue, each, Ack()) for each in received])
        assert len(await some(link, 8)) == 8
    assert len(tables.rows()) == 12


async def test_two_claimers_never_have_the_same_row(database: str) -> None:
    """S-2.11: 200 rows, two runtimes; nothing is left, nothing comes twice."""
    tables = locked(database)
    tables.add(*[b"%d" % number for number in range(200)])
    seen: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        seen.append(delivery.body)
        await trio.sleep(0.001)

    first, second = (Subscription(queue_of(tables), handler, concurrency=4) for _ in range(2))
    async with open_runtime(first) as one, open_runtime(second) as other:
        await until(lambda: len(seen) >= 200, 30)
        await until(lambda: one.ledger("jobs").acked + other.ledger("jobs").acked == 200)
    assert sorted(seen, key=int) == [b"%d" % number for number in range(200)]
    assert tables.rows() == []


async def test_a_verb_that_fails_leaves_the_claim_alive(database: str) -> None:
    """DESIGN 3.8: the row is locked again at once, so the handler is not called again for it."""
    tables = locked(database)
    tables.add(b"a")
    tables.run("ALTER TABLE jobs ADD CHECK (attempt < 2) NOT VALID")
    queue = queue_of(tables)
    async with linked(queue) as link:
        (received,) = await some(link, 1)
        (verdict,) = await link.settle([order(queue, received, Retry())])
        assert isinstance(verdict, NotApplied)
        assert tables.run("SELECT id FROM jobs FOR UPDATE SKIP LOCKED") == []
        assert list(await link.settle([order(queue, received, Ack())])) == [None]
    assert tables.rows() == []


@pytest.mark.parametrize("action", ["RAISE 'no'", "RETURN NULL"])
async def test_a_table_can_be_mended_while_a_row_is_tried_again(database: str, action: str) -> None:
    """DESIGN 3.8: who alters the table has his turn at the next try; then the verb is said, with no second call."""
    tables = locked(database)
    tables.run(f"CREATE FUNCTION say() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {action}; END $$")
    tables.run("CREATE TRIGGER say BEFORE DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION say()")
    tables.add(b"a")
    calls = 0

    async def handler(_: Delivery[bytes]) -> None:
        nonlocal calls
        calls += 1

    async with open_runtime(Subscription(queue_of(tables), handler, name="jobs")) as runtime:
        await until(lambda: runtime.ledger("jobs").in_hand == 1 and calls == 1)
        with trio.fail_after(20):
            await trio.to_thread.run_sync(tables.run, "DROP TRIGGER say ON jobs")
        await until(lambda: runtime.ledger("jobs").acked == 1)
    assert (calls, tables.rows()) == (1, [])


async def test_a_commit_that_fails_passes_the_row_over(database: str) -> None:
    """A deferred constraint: the transaction is gone; the row is as it was, and comes again after a pause."""
    tables = locked(database)
    tables.run("CREATE TABLE notes (job bigint REFERENCES jobs DEFERRABLE INITIALLY DEFERRED)")
    tables.add(b"a", b"b")
    tables.run("INSERT INTO notes SELECT min(id) FROM jobs")
    queue = queue_of(tables)
    async with linked(queue, limit=1) as link:
        (received,) = await some(link, 1)
        (verdict,) = await link.settle([order(queue, received, Ack())])
        assert isinstance(verdict, LeaseLost)
        assert "rolled back" in str(verdict)
        assert bodies(await some(link, 1)) == [b"b"]
    assert [row["payload"] for row in tables.rows()] == [b"a", b"b"]


@pytest.mark.parametrize("action", ["RETURN NULL", "RAISE 'no'"])
async def test_a_trigger_has_its_say(database: str, action: str) -> None:
    """DESIGN 3.8: a verb that touched nothing was not applied; the claim lives on."""
    tables = locked(database)
    tables.add(b"a")
    tables.run(f"CREATE FUNCTION say() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {action}; END $$")
    tables.run("CREATE TRIGGER say BEFORE DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION say()")
    queue = queue_of(tables)
    async with linked(queue) as link:
        (received,) = await some(link, 1)
        (verdict,) = await link.settle([order(queue, received, Ack())])
        assert isinstance(verdict, NotApplied)
        assert list(await link.settle([order(queue, received, Retry())])) == [None]
    assert tables.row()["attempt"] == 2


async def test_the_dead_letters_id_is_taken(database: str) -> None:
    """DESIGN 6, SQL: the database gives another one, and nothing is lost."""
    tables = locked(database)
    tables.add(b"a")
    tables.run("INSERT INTO dead (id, payload) SELECT id, 'other' FROM jobs")
    queue = queue_of(tables)
    async with linked(queue) as link:
        (received,) = await some(link, 1)
        (verdict,) = await link.settle([order(queue, received, Retry(), CAPPED)])
        while isinstance(verdict, NotApplied):  # the identity begins at the same number
            (verdict,) = await link.settle([order(queue, received, Retry(), CAPPED)])
        assert verdict is None
    assert tables.rows() == []
    assert sorted(row["payload"] for row in tables.rows("dead")) == [b"a", b"other"]


async def test_the_goodbye_lets_everything_go(database: str) -> None:
    """S-13.1: handed over or not, each row is as it was; no connection of ours is left."""
    tables = locked(database)
    tables.add(b"a", b"b", b"c")
    before = tables.rows()
    async with linked(queue_of(tables), limit=3) as link:
        await some(link, 1)
    assert tables.rows() == before
    assert len(tables.run("SELECT id FROM jobs FOR UPDATE SKIP LOCKED")) == 3
    assert tables.run(f"SELECT count(*) {OURS}") == [(0,)]


async def test_a_settlement_that_does_not_end_is_unknown(database: str) -> None:
    """S-3, DESIGN 4: shielded for a goodbye; a row that another transaction refers to cannot be deleted meanwhile."""
    tables = locked(database)
    tables.run("CREATE TABLE notes (job bigint REFERENCES jobs)")
    tables.add(b"a")
    queue = queue_of(tables)
    async with linked(queue, goodbye=0.5) as link:
        (received,) = await some(link, 1)
        with psycopg.connect(database) as other:
            other.execute(b"INSERT INTO notes SELECT id FROM jobs")
            with trio.fail_after(10):
                (verdict,) = await link.settle([order(queue, received, Ack())])
        assert isinstance(verdict, SettlementUnknown)
    assert len(tables.rows()) == 1


async def test_publishing_wakes(database: str) -> None:
    """S-9.1: the slot that looks is woken at once, however long the poll."""
    tables = locked(database)
    queue = tables.broker(poll_interval=60.0).queue(tables.table())
    async with linked(queue) as link:
        with trio.move_on_after(0.3):
            await link.receive(1)
        await broker_of(queue).publisher(tables.table()).publish(b"a")
        with trio.fail_after(5):
            assert bodies(await link.receive(1)) == [b"a"]


async def test_due_times_wake(database: str) -> None:
    """S-9: the next due time sets the timer, below the poll."""
    tables = locked(database)
    tables.add(b"a")
    queue = tables.broker(poll_interval=60.0).queue(tables.table())
    async with linked(queue) as link:
        (received,) = await some(link, 1)
        await link.settle([order(queue, received, RetryAfter(0.3))])
        with trio.fail_after(5):
            (again,) = await link.receive(1)
        assert again.delivery.attempt == 2


async def test_row_mode(database: str) -> None:
    """S-1.2: the message is the whole row, as it is."""
    tables = locked(database)
    tables.add(b"a")
    table = Table("jobs", id="id", attempt="attempt", retry_after="retry_after", generated=["id"])
    async with linked(tables.broker().queue(table)) as link:
        (received,) = await some(link, 1)
        assert received.delivery.message["payload"] == b"a"
        assert {*received.delivery.message} == {*tables.row()}


def test_which_form_fits_which_table(database: str) -> None:
    """S-1.4: locked_until means the lease, none the row lock; the other one is refused with the way out."""
    broker = PostgresTables(database).broker()
    plain, leased = Table("jobs", id="id", payload="p"), Table("jobs", id="id", payload="p", locked_until="u")
    assert broker.queue(plain).lease is None
    assert broker.queue(plain, claim=RowLock()).lease is None
    assert broker.queue(leased).lease == 30.0
    for table, claim, why in (
        (plain, Lease(), "must have a locked_until column"),
        (leased, RowLock(), r"claim must be Lease\(seconds\), not RowLock\("),
        (leased, AdvisoryLock("k"), r"claim must be Lease\(seconds\), not AdvisoryLock"),
    ):
        with pytest.raises(ValueError, match=why):
            broker.queue(table, claim=claim)


async def test_a_table_that_is_none_is_refused(database: str) -> None:
    """S-12.3: naming subscription and table."""
    tables = PostgresTables(database)
    with pytest.raises(LinkRefused, match="subscription 'test', table 'nowhere': there is no such table"):
        async with linked(tables.broker().queue(Table("nowhere", id="id", payload="p"))):
            pass


async def test_altered_under_the_worker(database: str) -> None:
    """DESIGN 6, SQL: a column that is gone ends the link's life with a refusal that names it; nothing is settled."""
    tables = locked(database)
    queue = queue_of(tables)
    async with linked(queue) as link:
        tables.run("ALTER TABLE jobs RENAME payload TO body")
        tables.add_to("jobs", body=b"a")
        with trio.fail_after(10), pytest.raises(LinkRefused, match="no column 'payload'"):
            await link.receive(1)
    assert tables.row()["attempt"] == 1


async def test_a_table_that_somebody_holds(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that waits for a lock of the whole table is given up, and leaves nothing behind on the server."""
    monkeypatch.setattr(slot, "CLAIM", 0.5)
    tables = locked(database)
    tables.add(b"a")
    told: list[str | None] = []
    async with linked(queue_of(tables)) as link:
        link.degraded = lambda _, why: told.append(why)
        with psycopg.connect(database) as other:
            other.execute(b"LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE")
            await until(lambda: told)
        (received,) = await some(link, 1)
        assert received.delivery.body == b"a"
    assert tables.run(f"SELECT count(*) {OURS}") == [(0,)]


def test_no_isolation_level_below_read_committed(database: str) -> None:
    """S-8.7: PostgreSQL has none."""
    broker = PostgresTables(database).broker()
    with pytest.raises(ValueError, match="must be 'read committed' or more on PostgreSQL"):
        broker.queue(Table("jobs", id="id", payload="p"), claim=RowLock("read uncommitted"))


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
async def test_a_handler_at_another_isolation_level(database: str, isolation: str) -> None:
    """S-8.7: it works at that level; a COMMIT that fails by others ends the claim, and the row comes back."""
    tables = locked(database)
    tables.run("CREATE TABLE sums (who text, value int)")
    tables.add(b"one", b"two")
    queue = tables.broker().queue(tables.table(), claim=RowLock(isolation))
    levels: set[str] = set()
    together = [trio.Event(), trio.Event()]

    async def handle(delivery: Delivery[bytes]) -> None:
        async with transaction(delivery) as connection:
            (level,) = await (await connection.execute("SHOW transaction_isolation")).fetchone()
            levels.add(level)
            (total,) = await (await connection.execute("SELECT count(*) FROM sums")).fetchone()
            place = 0 if delivery.body == b"one" else 1
            together[place].set()
            await together[1 - place].wait()  # both have read before one writes: at *serializable* one must fail
            await connection.execute("INSERT INTO sums VALUES (%s, %s)", [delivery.body.decode(), total])

    with trio.fail_after(20):
        async with open_runtime(Subscription(queue, handle, concurrency=2)) as runtime:
            await until(lambda: runtime.ledger("jobs").acked == 2, 15.0)
            ledger = runtime.ledger("jobs")
    assert levels == {isolation}
    assert tables.rows() == []
    sums = sorted(value for (value,) in tables.run("SELECT value FROM sums"))
    assert (sums, ledger.superseded) == (([0, 1], 1) if isolation == "serializable" else ([0, 0], 0))


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
async def test_claims_at_another_isolation_level(
    database: str, isolation: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Issue 8: no serialization error of a claim reaches the user; rows in = rows out."""
    tables = locked(database)
    tables.run("INSERT INTO jobs (payload) SELECT n::text::bytea FROM generate_series(1, 100) n")

    async def handle(delivery: Delivery[bytes]) -> None:
        await trio.sleep(0.001)

    with trio.fail_after(40):
        queues = [tables.broker().queue(tables.table(), claim=RowLock(isolation)) for _ in range(2)]
        async with (
            open_runtime(Subscription(queues[0], handle, concurrency=2)) as one,
            open_runtime(Subscription(queues[1], handle, concurrency=2)) as two,
        ):
            await until(lambda: one.ledger("jobs").acked + two.ledger("jobs").acked >= 100, 35.0)
    assert tables.rows() == []
    assert "degraded" not in caplog.text
