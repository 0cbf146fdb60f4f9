"""Batches under a row lock on PostgreSQL: one claim, one transaction, one COMMIT."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

import links.sql
from actors import BatchSubscription, open_runtime
from links.abc import Link, Received
from links.errors import LeaseLost, NotApplied, SettlementUnknown
from links.sql import SqlQueue
from settlement import Ack, Delivery, Drop, Policy, Retry, RetryAfter
from settlement.ledger import Line
from settlement.outcomes import Outcome
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import order, until

pytestmark = [pytest.mark.postgres, pytest.mark.servers]

CAPPED = Policy(max_attempts=1, dead_letter="dead")
IDLE = """SELECT count(*) FROM pg_stat_activity WHERE application_name = 'trio-settlement'
    AND datname = current_database() AND state = 'idle in transaction'"""


def locked(database: str, count: int, **shape: bool) -> PostgresTables:
    tables = PostgresTables(database, leased=False, **shape).create()
    tables.add(*(b"%d" % number for number in range(count)))
    return tables


def queue_of(tables: PostgresTables) -> SqlQueue[bytes]:
    return tables.broker().queue(tables.table())


@asynccontextmanager
async def linked(queue: SqlQueue[Any], size: int, told: list[Any] | None = None) -> AsyncGenerator[Link[Any], None]:
    def lost(received: Received[Any], line: Line) -> None:
        assert told is not None
        told.append((received.delivery.body, line))

    async with queue.broker.connect(), queue.attach("test", lost, 5.0, limit=size, size=size) as link:
        yield link


async def batch_of(link: Link[Any], size: int) -> list[Received[Any]]:
    with trio.fail_after(10):
        return [*await link.receive(size)]


def attempts(tables: PostgresTables) -> dict[bytes, int]:
    return {row["payload"]: row["attempt"] for row in tables.rows()}


async def test_all_are_durable_together(database: str) -> None:
    """S-6.1, K-91: nothing is written before the last one has its outcome; one transaction writes each."""
    tables = locked(database, 4)
    queue = queue_of(tables)
    async with linked(queue, 4) as link:
        batch = await batch_of(link, 4)
        assert [received.delivery.body for received in batch] == [b"0", b"1", b"2", b"3"]
        assert tables.run(IDLE) == [(1,)]
        outcomes: list[Outcome] = [Ack(), Drop(), Retry(), RetryAfter(3600.0)]
        said = [order(queue, received, outcome) for received, outcome in zip(batch, outcomes, strict=True)]
        assert list(await link.settle(said)) == [None] * 4
        assert attempts(tables) == {b"2": 2, b"3": 2}
        assert tables.run("SELECT count(DISTINCT xmin::text) FROM jobs") == [(1,)]
        (ahead,) = tables.run("SELECT extract(epoch FROM max(retry_after) - clock_timestamp())::float8 FROM jobs")
        assert 3590 < ahead[0] <= 3600


async def test_the_next_batch_travels_with_the_settlement(database: str) -> None:
    """DESIGN 3.8: no other message is needed."""
    tables = locked(database, 6)
    queue = queue_of(tables)
    async with linked(queue, 2) as link:
        for expected in ([b"0", b"1"], [b"2", b"3"], [b"4", b"5"]):
            batch = await batch_of(link, 2)
            assert [received.delivery.body for received in batch] == expected
            await link.settle([order(queue, received, Ack()) for received in batch])
    assert tables.rows() == []


async def test_one_that_is_dropped_keeps_the_others(database: str) -> None:
    """S-6.2, K-91: it is as it was; the others' outcomes stand."""
    tables = locked(database, 3)
    before = tables.rows()[1]
    queue = queue_of(tables)
    async with linked(queue, 3) as link:
        one, two, three = await batch_of(link, 3)
        link.forget(two)
        assert list(await link.settle([order(queue, one, Ack()), order(queue, three, Ack())])) == [None, None]
        assert tables.rows() == [before]
        (again,) = await batch_of(link, 3)
        assert (again.delivery.body, again.delivery.attempt) == (b"1", 1)


@pytest.mark.parametrize("trigger", [False, True])
async def test_one_that_cannot_be_settled(database: str, trigger: bool) -> None:
    """DESIGN 3.8, S-6.2: it is not applied, the others are, and it is held and said again on the same connection."""
    tables = locked(database, 4)
    if trigger:
        tables.run("CREATE TABLE refers AS SELECT 1")
        tables.run(
            "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN IF OLD.payload = '1' AND EXISTS (SELECT FROM refers) THEN RETURN NULL; END IF; RETURN OLD; END $$"
        )
        tables.run("CREATE TRIGGER no BEFORE DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION no()")
    else:
        tables.run("CREATE TABLE refers (id bigint REFERENCES jobs)")
        tables.run("INSERT INTO refers SELECT id FROM jobs WHERE payload = '1'")
    queue = queue_of(tables)
    told: list[Any] = []
    async with linked(queue, 4, told) as link:
        batch = await batch_of(link, 4)
        verdicts = await link.settle([order(queue, received, Ack()) for received in batch])
        assert [type(verdict) for verdict in verdicts] == [type(None), NotApplied, type(None), type(None)]
        assert attempts(tables) == {b"1": 1}
        assert tables.run("SELECT 1 FROM jobs FOR UPDATE SKIP LOCKED") == [], "it is locked still"
        tables.run("DELETE FROM refers")
        assert list(await link.settle([order(queue, batch[1], Ack())])) == [None]
    assert (tables.rows(), told) == ([], [])


async def test_a_part_is_settled_and_the_rest_is_locked_again(database: str) -> None:
    """S-6.1 as ruled: the first part is durable, the rest stays ours, unless somebody was there in between."""
    tables = locked(database, 4)
    queue = queue_of(tables)
    told: list[Any] = []
    async with linked(queue, 4, told) as link:
        batch = await batch_of(link, 4)
        assert list(await link.settle([order(queue, batch[0], Ack())])) == [None]
        assert attempts(tables) == {b"1": 1, b"2": 1, b"3": 1}
        assert tables.run("SELECT 1 FROM jobs FOR UPDATE SKIP LOCKED") == []
        said = [order(queue, batch[1], Retry(), CAPPED), order(queue, batch[2], Ack())]
        assert list(await link.settle(said)) == [None, None]
        assert [row["payload"] for row in tables.rows("dead")] == [b"1"]
        assert tables.run("SELECT 1 FROM jobs FOR UPDATE SKIP LOCKED") == []
        assert list(await link.settle([order(queue, batch[3], Ack())])) == [None]
    assert (tables.rows(), told) == ([], [])


async def test_a_row_that_is_gone_in_between_is_lost(database: str) -> None:
    """S-2.11: the COMMIT of a part frees the rest for a moment; a trigger on the COMMIT plays the thief here."""
    tables = locked(database, 3)
    tables.run(
        "CREATE FUNCTION thief() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN DELETE FROM jobs WHERE payload = '2'; RETURN NULL; END $$"
    )
    tables.run(
        "CREATE CONSTRAINT TRIGGER thief AFTER DELETE ON jobs DEFERRABLE INITIALLY DEFERRED FOR EACH ROW "
        "WHEN (OLD.payload = '0') EXECUTE FUNCTION thief()"
    )
    queue = queue_of(tables)
    told: list[Any] = []
    async with linked(queue, 3, told) as link:
        one, two, three = await batch_of(link, 3)
        assert list(await link.settle([order(queue, one, Ack())])) == [None]
        assert told == [(b"2", Line.UNSETTLED)]
        verdicts = await link.settle([order(queue, two, Ack()), order(queue, three, Ack())])
        assert [type(verdict) for verdict in verdicts] == [type(None), LeaseLost]
    assert tables.rows() == []


async def test_a_commit_that_fails_is_one_for_all(database: str) -> None:
    """S-6.2: a deferred constraint ends the claim of each; all rows are as they were."""
    tables = locked(database, 3)
    tables.run("CREATE TABLE refers (id bigint REFERENCES jobs DEFERRABLE INITIALLY DEFERRED)")
    tables.run("INSERT INTO refers SELECT id FROM jobs WHERE payload = '1'")
    before = tables.rows()
    queue = queue_of(tables)
    async with linked(queue, 3) as link:
        batch = await batch_of(link, 3)
        verdicts = await link.settle([order(queue, received, Ack()) for received in batch])
        assert [type(verdict) for verdict in verdicts] == [LeaseLost] * 3
        assert tables.rows() == before


async def test_a_connection_that_ends_amid_a_batch(database: str) -> None:
    """DESIGN 4: all are unsettled, nothing was written; what was being said is unknown."""
    tables = locked(database, 3)
    before = tables.rows()
    queue = queue_of(tables)
    told: list[Any] = []
    async with linked(queue, 3, told) as link:
        await batch_of(link, 3)
        tables.run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'trio-settlement' "
            "AND state = 'idle in transaction'"
        )
        await until(lambda: len(told) == 3)
        assert sorted(told) == [(b"0", Line.UNSETTLED), (b"1", Line.UNSETTLED), (b"2", Line.UNSETTLED)]
        assert len(await batch_of(link, 3)) == 3
    assert tables.rows() == before


async def test_a_settlement_whose_backend_dies_is_unknown(database: str) -> None:
    """OQ-S7: a trigger ends the backend amid the verb."""
    tables = locked(database, 2)
    tables.run(
        "CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN OLD; END $$"
    )
    tables.run("CREATE TRIGGER die BEFORE DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION die()")
    queue = queue_of(tables)
    async with linked(queue, 2) as link:
        batch = await batch_of(link, 2)
        verdicts = await link.settle([order(queue, received, Ack()) for received in batch])
        assert [type(verdict) for verdict in verdicts] == [SettlementUnknown] * 2
    assert len(tables.rows()) == 2


@pytest.mark.parametrize(("size", "concurrency"), [(10, 1), (10, 3), (7, 2)])
async def test_through_the_runtime(database: str, size: int, concurrency: int) -> None:
    """K-91, C-7.4: mixed outcomes, undecodable ones, a dead letter; rows in = rows out, and a batch is of one claim."""
    tables = locked(database, 100)
    seen: list[list[bytes]] = []

    def decode(body: bytes) -> int:
        if int(body) % 10 == 7:
            raise ValueError("no")
        return int(body)

    async def handle(batch: Sequence[Delivery[int]]) -> Sequence[Outcome]:
        seen.append([delivery.body for delivery in batch])
        assert tables.run(IDLE)[0][0] <= concurrency
        return [Retry() if delivery.message % 10 == 3 else Ack() for delivery in batch]

    policy = Policy(max_attempts=2, dead_letter="dead")
    subscription = BatchSubscription(
        queue_of(tables), handle, size=size, decode=decode, policy=policy, concurrency=concurrency
    )
    with trio.fail_after(30):
        async with open_runtime(subscription) as runtime:
            await until(lambda: runtime.ledger("jobs").acked + runtime.ledger("jobs").dead_lettered == 100, 25)
    ledger = runtime.ledger("jobs")
    assert (ledger.acked, ledger.dead_lettered, ledger.retried) == (80, 20, 10)
    assert ledger.unsettled == 0, "all of a claim is settled at once, so none of it is free in between"
    assert tables.rows() == []
    assert max(map(len, seen)) <= size
    bodies = [body for batch in seen for body in batch]
    assert sorted(bodies) == sorted(
        [b"%d" % n for n in range(100) if n % 10 != 7] + [b"%d" % n for n in range(3, 100, 10)]
    )


async def test_a_batch_lends_no_transaction(database: str) -> None:
    """S-6.4: refused with the way out."""
    tables = locked(database, 2)
    said: list[str] = []

    async def handle(batch: Sequence[Delivery[bytes]]) -> Outcome:
        with pytest.raises(ValueError, match=r"'jobs': the rows of a batch share one transaction.* use Subscription"):
            async with links.sql.transaction(batch[0]):
                pass
        said.append("refused")
        return Ack()

    with trio.fail_after(10):
        async with open_runtime(BatchSubscription(queue_of(tables), handle, size=2)) as runtime:
            await until(lambda: runtime.ledger("jobs").acked == 2)
    assert said
