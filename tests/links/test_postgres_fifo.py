"""FIFO groups on PostgreSQL: the guard step by step, crashes, eight workers, and what a claim reads."""

# ruff: noqa: S608 -- texts of the tests' own

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
import trio

from actors import Subscription, open_runtime
from links.errors import LinkRefused
from links.sql.jobs import Passing
from links.sql.postgres import lease, row_lock
from links.sql.postgres.dialect import PostgresDialect
from links.sql.postgres.lease import PostgresLease
from links.sql.postgres.row_lock import PostgresRowLock, RowLockPin
from links.sql.postgres.trio_connection import TrioConnection
from settlement import Ack, Delivery, Outcome, Policy, Retry, RetryAfter
from settlement.ledger import Line
from settlement.sql import Lease, RowLock
from tests.links.fifo_kit import FifoTable, Losses, linked, nothing, some
from tests.links.sqlite_kit import order, until

pytestmark = [pytest.mark.postgres, pytest.mark.servers]

OURS = "FROM pg_stat_activity WHERE application_name = 'trio-settlement' AND datname = current_database()"
FORMS = ("lease", "row lock")


@pytest.fixture
def fifo(request: pytest.FixtureRequest, database: str) -> FifoTable:
    return FifoTable.of(getattr(request, "param", "lease"), None, database)


@asynccontextmanager
async def claimer(fifo: FifoTable) -> AsyncGenerator[tuple[PostgresLease, TrioConnection], None]:
    """One consumer in the lease form, statement by statement."""
    connect = PostgresDialect(fifo.url).connect
    connection = await connect()
    try:
        form = PostgresLease(fifo.table(), "g", Lease(fifo.lease), subscription="test", connect=connect)
        await form.look(connection)
        yield form, connection
    finally:
        connection.finish()


def passing() -> Passing:
    return Passing({}, frozenset())


# --- two claimers, step by step


def behind_a_gate(form: PostgresLease, statements: str) -> None:
    """Let this claimer wait for the advisory lock 77 before it tries the guard, with its snapshot taken."""
    texts = form.texts
    gate = "WITH gate AS MATERIALIZED (SELECT pg_advisory_lock_shared(77))"
    guard = texts.guard.removeprefix("SELECT ")
    if statements == "two":
        texts.guard = f"{gate} SELECT {guard} FROM gate"
        return
    key = guard[guard.index("pg_try") : guard.index("::text, true)")]
    texts.guard = "SELECT true"
    texts.claim = texts.claim.replace("WITH ", f"{gate}, held AS MATERIALIZED (SELECT {key} AS so FROM gate), ", 1)
    texts.claim = texts.claim.replace(form.texts.guarded, " AND (SELECT so FROM held)")


@pytest.mark.parametrize(("statements", "in_work"), [("two", 1), ("one", 2)])
async def test_a_claim_looks_behind_its_guard(fifo: FifoTable, statements: str, in_work: int) -> None:
    """S-7.3: a claim whose snapshot is older than another's commit. By one statement the group would have two in work.

    The second claimer has begun when a row enters ahead, and the first one claims that; then it goes on.
    """
    fifo.add(b"a", rank=1)
    found: list[Any] = []
    async with claimer(fifo) as (one, first), claimer(fifo) as (two, second):
        behind_a_gate(two, statements)
        with psycopg.connect(fifo.url, autocommit=True) as gate:
            gate.execute("SELECT pg_advisory_lock(77)")

            async def claim() -> None:
                found.extend(await two.claim(second, 1, passing()))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(claim)
                await until(lambda: fifo.run("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"))
                fifo.add(b"urgent", rank=0)
                (row,) = await one.claim(first, 1, passing())
                assert row[3] == b"urgent"
                gate.execute("SELECT pg_advisory_unlock(77)")
        assert fifo.run("SELECT count(*) FROM jobs WHERE locked_until > clock_timestamp()") == [(in_work,)]
    assert [row[3] for row in found] == ([b"a"] if in_work == 2 else [])


async def test_the_guard_is_its_transactions_own(fifo: FifoTable) -> None:
    """Held by another transaction it is not had; after the claim that had it, a claim without it finds nothing."""
    fifo.add(b"a")
    async with claimer(fifo) as (one, first), claimer(fifo) as (two, second):
        async with first.transaction():
            assert await one.rows(first, one.texts.guard, {"group": "g"}) == [(True,)]
            assert await two.rows(second, two.texts.guard, {"group": "g"}) == [(False,)]
            assert await two.rows(second, two.texts.guard, {"group": "h"}) == [(True,)]
            assert await two.claim(second, 1, passing()) == []
        values = {"group": "g", "lease": 1.0, "over": [], "held": [], "room": 1}
        assert await two.rows(second, two.texts.claim, values) == []
        assert [row[3] for row in await two.claim(second, 1, passing())] == [b"a"]


async def test_a_guard_that_is_busy_amid_a_settlement_costs_no_poll(
    fifo: FifoTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looked meanwhile saw a row in work, so the settling one looks again: else the queue would stand."""
    monkeypatch.setattr(lease, "_PAUSES", (0.05,) * 200)
    fifo.add(b"a", b"b")
    queue = fifo.queue(poll_interval=3600.0)
    async with linked(queue) as link, claimer(fifo) as (other, connection):
        received = await some(link)
        async with trio.open_nursery() as nursery, connection.transaction():
            assert await other.rows(connection, other.texts.guard, {"group": "g"}) == [(True,)]
            nursery.start_soon(link.settle, [order(queue, received, Ack())])
            await until(lambda: fifo.left() == [b"b"])
        assert (await some(link)).delivery.body == b"b"


async def test_a_guard_of_one_who_only_looks_costs_a_row_lock_no_poll(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who found nothing may have looked before the row was there; so one more look follows."""
    monkeypatch.setattr(row_lock, "_BUSY", 1.0)
    fifo = FifoTable.of("row lock", None, database)
    fifo.add(b"a")
    connect = PostgresDialect(fifo.url).connect
    form = PostgresRowLock(fifo.table(), "g", RowLock(), subscription="test", connect=connect)
    other = await connect()
    await form.look(other)
    pin = RowLockPin(form)
    found: list[Any] = []

    async def claim() -> None:
        found.extend(await pin.claim(passing(), 1))

    try:
        async with trio.open_nursery() as nursery, other.transaction():
            assert await form.rows(other, form.texts.guard, {"group": "g"}) == [(True,)]
            nursery.start_soon(claim)
            await until(lambda: fifo.run(f"SELECT 1 {OURS} AND query = 'ROLLBACK' AND state = 'idle'"))
        assert [row[3] for row in found] == [b"a"]
    finally:
        pin.close()
        other.finish()


async def test_a_renewal_that_is_under_way_counts_as_in_work(fifo: FifoTable) -> None:
    """Begun in time and committed late: the lease looks over, and is about to be a new one."""
    fifo.add(b"a", rank=1)
    fifo.lease = 0.5
    async with claimer(fifo) as (one, first), claimer(fifo) as (two, second):
        ((key, token, count, *_),) = await one.claim(first, 1, passing())
        fifo.add(b"urgent", rank=0)
        one.claim_form = Lease(30.0)
        async with first.transaction():
            assert len(await one.extend(first, [(key, token, count)])) == 1
            await fifo.until_over()
            assert await two.claim(second, 1, passing()) == []
        assert await two.claim(second, 1, passing()) == []
        assert await one.let_go(first, [(key, *one_token(fifo))], counted=True) == {0}
        assert [row[3] for row in await two.claim(second, 1, passing())] == [b"urgent"]


def one_token(fifo: FifoTable) -> tuple[Any, ...]:
    ((until_, count),) = fifo.run("SELECT locked_until, attempt FROM jobs WHERE locked_until IS NOT NULL")
    return str(until_), count


# --- others


@pytest.mark.parametrize("fifo", FORMS, indirect=True)
async def test_a_head_that_somebody_has_locked_is_not_overtaken(fifo: FifoTable) -> None:
    """A transaction of the service's own, that edits the head: the group waits for its end."""
    fifo.add(b"a", b"b")
    async with linked(fifo.queue()) as link:
        with psycopg.connect(fifo.url) as other:
            other.execute("SELECT FROM jobs WHERE id = 1 FOR UPDATE")
            await nothing(link)
        assert (await some(link)).delivery.body == b"a"


@pytest.mark.parametrize("fifo", ["row lock"], indirect=True)
async def test_a_connection_that_is_ended_keeps_the_order(fifo: FifoTable) -> None:
    """S-4.3, S-7.1: the same head, its attempt as it was, also to another consumer."""
    fifo.add(b"a", b"b", rank=1)
    losses = Losses()
    async with linked(fifo.queue(), losses) as first:
        received = await some(first)
        async with linked(fifo.queue()) as second:
            fifo.add(b"c", rank=1)
            await nothing(second)
            first.stop()
            fifo.run(f"SELECT pg_terminate_backend(pid) {OURS} AND state = 'idle in transaction'")
            again = await some(second)
            await until(lambda: losses.told == [(b"a", Line.UNSETTLED)])
            assert (again.delivery.body, again.delivery.attempt) == (b"a", received.delivery.attempt)


@pytest.mark.parametrize("fifo", FORMS, indirect=True)
async def test_eight_workers_never_overlap_and_never_overtake(fifo: FifoTable) -> None:
    """Four groups, two brokers: 240 messages with random retries and delays; each is the head while it is in work."""
    groups = tuple("abcd")
    for group in groups:
        fifo.run("INSERT INTO jobs (payload, grp) SELECT n::text::bytea, ? FROM generate_series(1, 60) n", group)
    dice = random.Random(7)  # noqa: S311 -- chance, not secrecy
    outcomes: list[Outcome] = [Ack(), Retry(), RetryAfter(0.02)]
    working = dict.fromkeys(groups, 0)
    violations: list[str] = []
    calls = 0

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        nonlocal calls
        calls += 1
        group = delivery.source
        working[group] += 1
        head = "SELECT id FROM jobs WHERE grp = ? ORDER BY rank, due, id LIMIT 1"
        ((first,),) = await trio.to_thread.run_sync(fifo.run, head, group)
        if working[group] != 1 or str(first) != delivery.id:
            violations.append(f"{group}: {working[group]} in work, {delivery.id} before {first}")
        await trio.sleep(dice.random() * 0.004)
        working[group] -= 1
        return dice.choices(outcomes, [70, 15, 15])[0]

    policy = Policy(on_error=Retry())
    one, two = (
        [Subscription(queue, handler, policy=policy) for queue in queues_of_one_broker(fifo, groups)] for _ in range(2)
    )
    async with open_runtime(*one), open_runtime(*two):
        await until(lambda: not fifo.left(), 60)
    assert violations == []
    assert calls > 240


def queues_of_one_broker(fifo: FifoTable, groups: tuple[str, ...]) -> list[Any]:
    first = fifo.queue(groups[0])
    claim = Lease(30.0) if fifo.leased else RowLock()
    broker: Any = first.broker
    return [first, *[broker.queue(fifo.table(), group=group, claim=claim) for group in groups[1:]]]


async def test_a_group_of_many_spellings_is_refused(fifo: FifoTable) -> None:
    """A guard goes by the group's text: char(n) takes two texts for one, so two consumers would have two guards."""
    fifo.run("ALTER TABLE jobs ALTER grp TYPE char(9)")
    with pytest.raises(LinkRefused, match=r"column 'grp' \(group\) is bpchar, which takes several spellings for one"):
        async with linked(fifo.queue()):
            pass


# --- what a claim reads


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("fifo", FORMS, indirect=True)
async def test_a_claim_reads_little(fifo: FifoTable, analyzed: bool) -> None:
    """10⁵ rows in other groups and 10⁴ in this one, by the recommended table: an index for all, and few pages."""
    rows = "SELECT '', CASE WHEN n % 11 = 0 THEN 'g' ELSE 'g' || n % 50 END FROM generate_series(1, 110000) n"
    fifo.run(f"INSERT INTO jobs (payload, grp) {rows}")
    if analyzed:
        fifo.run("ANALYZE jobs")
    connect = PostgresDialect(fifo.url).connect
    connection = await connect()
    names: dict[str, Any] = {"subscription": "test", "connect": connect}
    form: PostgresLease | PostgresRowLock
    if fifo.leased:
        form = PostgresLease(fifo.table(), "g", Lease(30.0), **names)
    else:
        form = PostgresRowLock(fifo.table(), "g", RowLock(), **names)
    try:
        await form.look(connection)
        assert await read(form, connection) < 40
        if isinstance(form, PostgresLease):
            (row,) = await form.claim(connection, 1, passing())
            fifo.run("INSERT INTO jobs (payload, grp, rank) SELECT '', 'g', -1 FROM generate_series(1, 10000)")
            assert await form.claim(connection, 1, passing()) == []
            assert await read(form, connection) < 40
            assert await form.let_go(connection, [(row[0], row[1], row[2])], counted=False) == {0}
    finally:
        connection.finish()


async def read(form: PostgresLease | PostgresRowLock, connection: TrioConnection) -> int:
    """The pages that one claim touches, by the server's own count; and no page of it by a scan of the table."""
    values = {"group": "g", "lease": 1.0, "over": [], "held": [], "room": 1}
    async with connection.transaction(force_rollback=True):
        assert await form.rows(connection, form.texts.guard, values) == [(True,)]
        explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {form.texts.claim}"
        (((plan,),),) = await form.rows(connection, explain, values)
    assert "Seq Scan" not in str(plan)
    return int(plan["Plan"]["Shared Hit Blocks"]) + int(plan["Plan"]["Shared Read Blocks"])
