"""The forms of PostgreSQL that hold a connection, where something goes wrong at the worst moment."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
import trio

from links.abc import Link, Received
from links.errors import LeaseLost, NotApplied
from links.sql import AdvisoryLock, SqlQueue
from links.sql.postgres.row_lock import PostgresRowLock
from settlement import Ack, Retry
from settlement.ledger import Line
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import order

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
