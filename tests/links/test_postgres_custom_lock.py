"""The advisory form with statements of the user's own for lock and unlock."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import psycopg
import pytest
import trio

from actors import BatchSubscription, Subscription, open_runtime
from links.abc import Link, Received
from links.errors import LinkRefused
from links.sql import AdvisoryLock, SqlQueue, Table
from settlement import Ack, Delivery, Retry
from settlement.ledger import Line
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import bodies, order, until

pytestmark = [pytest.mark.postgres, pytest.mark.servers]

LOCK = "SELECT pg_try_advisory_lock(hashtext(:key))"
UNLOCK = "SELECT pg_advisory_unlock(hashtext(:key))"
KEYS = "SELECT array_agg(objid ORDER BY objid) FROM pg_locks WHERE locktype = 'advisory'"


@attrs.define
class Shop:
    """A queue of orders of customers; `told` is what a link says is degraded."""

    tables: PostgresTables
    told: list[str] = attrs.Factory(list[str])

    def add(self, *lanes: str) -> None:
        for lane in lanes:
            self.tables.run("INSERT INTO jobs (payload, lane) VALUES ('a', %s)", lane)

    def queue(self, custom: Mapping[str, str] | None = None) -> SqlQueue[bytes]:
        statements = {"lock": LOCK, "unlock": UNLOCK, **(custom or {})}
        return self.tables.broker(0.02).queue(self.tables.table(), claim=AdvisoryLock("of-{lane}"), custom=statements)

    @asynccontextmanager
    async def linked(self, queue: SqlQueue[Any], limit: int = 1, size: int = 1) -> AsyncGenerator[Link[Any], None]:
        def told(what: str, why: str | None) -> None:
            self.told += [f"{what}: {why}"] if why is not None else []

        def lost(received: Received[Any], line: Line) -> None:
            raise AssertionError(f"{received} was lost: {line}")

        async with queue.broker.connect(), queue.attach("test", lost, 5.0, limit=limit, size=size) as link:
            link.degraded = told
            yield link

    @property
    def locked(self) -> bool:
        return self.tables.run(KEYS) != [(None,)]


@pytest.fixture
def shop(database: str) -> Shop:
    return Shop(PostgresTables(database, leased=False).create())


async def one(link: Link[Any]) -> Received[Any]:
    with trio.fail_after(10):
        (received,) = await link.receive(1)
    return received


async def until_told(shop: Shop, link: Link[Any], what: str) -> None:
    """Claim, and get nothing, until the link has told this."""
    with trio.fail_after(10), trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def receive() -> None:
                raise AssertionError(f"received {bodies(await link.receive(1))}")

            nursery.start_soon(receive)
            await until(lambda: any(what in line for line in shop.told))
            scope.cancel()


async def test_a_row_is_in_work_under_that_lock(shop: Shop) -> None:
    """S-10.1: the key is the template's text; it is free when the claim has ended, and the attempt is counted."""
    shop.add("Ada")
    queue = shop.queue()
    async with shop.linked(queue) as link:
        received = await one(link)
        assert received.delivery.attempt == 1
        with psycopg.connect(shop.tables.url) as other:
            assert other.execute("SELECT pg_try_advisory_lock(hashtext('of-Ada'))").fetchone() == (False,)
            assert list(await link.settle([order(queue, received, Retry())])) == [None]
            received = await one(link)
            assert received.delivery.attempt == 2
            link.stop()
            assert list(await link.settle([order(queue, received, Ack())])) == [None]
            assert other.execute("SELECT pg_try_advisory_lock(hashtext('of-Ada'))").fetchone() == (True,)
    assert shop.tables.rows() == []


async def test_a_key_that_somebody_else_has(shop: Shop) -> None:
    """Its rows are passed over, however many there are in front; and it is waited for."""
    shop.add(*["Ada"] * 40, *[f"customer {number}" for number in range(30)], "Grace")
    with psycopg.connect(shop.tables.url, autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(hashtext('of-' || lane)) FROM jobs WHERE lane <> 'Grace' GROUP BY lane")
        queue = shop.queue()
        async with shop.linked(queue) as link:
            received = await one(link)
            assert received.delivery.key == "Grace"
            assert list(await link.settle([order(queue, received, Ack())])) == [None]
            other.execute("SELECT pg_advisory_unlock(hashtext('of-Ada'))")
            assert (await one(link)).delivery.key == "Ada"
            link.stop()
    assert shop.told == []


async def test_one_of_a_key_at_once(shop: Shop) -> None:
    """In a runtime of several places, and a batch."""
    shop.add(*["Ada", "Grace"] * 10)
    working: list[str | None] = []
    most = 0

    async def handle(delivery: Delivery[bytes]) -> None:
        nonlocal most
        assert delivery.key not in working
        working.append(delivery.key)
        most = max(most, len(working))
        await trio.lowlevel.checkpoint()
        working.remove(delivery.key)

    with trio.fail_after(20):
        async with open_runtime(Subscription(shop.queue(), handle, name="s", concurrency=3)) as runtime:
            await until(lambda: runtime.ledger("s").acked == 20, within=15)

    shop.add("Ada", "Ada", "Grace", "Grace")
    batches: list[list[str]] = []

    async def handle_all(deliveries: list[Delivery[bytes]]) -> None:
        batches.append(sorted(str(each.key) for each in deliveries))

    with trio.fail_after(20):
        async with open_runtime(BatchSubscription(shop.queue(), handle_all, name="b", size=4, wait=0.1)) as runtime:
            await until(lambda: runtime.ledger("b").acked == 4, within=15)
    assert batches == [["Ada", "Grace"], ["Ada", "Grace"]]
    assert not shop.locked


async def test_what_was_not_begun_is_given_back(shop: Shop) -> None:
    """S-13.1: the lock is free, the attempt as it was."""
    shop.add("Ada")
    async with shop.linked(shop.queue()) as link:
        received = await one(link)
        assert shop.locked
        link.stop()
        await link.give_back([received])
        assert not shop.locked
    assert [row["attempt"] for row in shop.tables.rows()] == [1]


async def test_the_goodbye_frees_it(shop: Shop) -> None:
    shop.add("Ada")
    async with shop.linked(shop.queue()) as link:
        await one(link)
        assert shop.locked
    assert not shop.locked


async def test_in_a_table_of_locks(shop: Shop) -> None:
    """A lock may be anything that answers true or false, such as a row."""
    shop.tables.run("CREATE TABLE locks (key text PRIMARY KEY)")
    lock = (
        "WITH mine AS (INSERT INTO locks VALUES (:key) ON CONFLICT DO NOTHING RETURNING 1) "
        "SELECT EXISTS (SELECT FROM mine)"
    )
    unlock = "WITH gone AS (DELETE FROM locks WHERE key = :key RETURNING 1) SELECT count(*) FROM gone"
    shop.add("Ada", "Grace")
    shop.tables.run("INSERT INTO locks VALUES ('of-Ada')")
    queue = shop.queue({"lock": lock, "unlock": unlock})
    async with shop.linked(queue) as link:
        received = await one(link)
        assert received.delivery.key == "Grace"
        assert shop.tables.run("SELECT key FROM locks ORDER BY key") == [("of-Ada",), ("of-Grace",)]
        link.stop()
        assert list(await link.settle([order(queue, received, Ack())])) == [None]
        assert shop.tables.run("SELECT key FROM locks") == [("of-Ada",)]


@pytest.mark.parametrize(
    ("lock", "why"),
    [
        (
            "SELECT NULL::boolean WHERE :key <> ''",
            "the statement for 'lock' must give one row with true or false, not None",
        ),
        ("SELECT nullif(pg_try_advisory_lock(hashtext(:key)), true)", "one row with true or false, not None"),
        ("SELECT true WHERE :key = ''", "the statement for 'lock' must give one row with true or false, not 0 rows"),
        (
            "UPDATE jobs SET lane = lane WHERE lane = :key",
            "the statement for 'lock' must give one row with true or false",
        ),
        ("SELECT 1 / (length(:key) - 6) = 1", "the statement for 'lock': division by zero"),
    ],
)
async def test_a_lock_that_does_not_answer(shop: Shop, lock: str, why: str) -> None:
    """The claim fails and says so; nothing is claimed, and nothing stays locked."""
    shop.add("Ada")
    async with shop.linked(shop.queue({"lock": lock})) as link:
        await until_told(shop, link, why)
        await until(lambda: not shop.locked)
    assert [row["attempt"] for row in shop.tables.rows()] == [1]


async def test_what_was_locked_before_one_that_fails_is_free(shop: Shop) -> None:
    """In a batch: the claim is one."""
    shop.add("Ada", "Eve", "Grace")
    lock = "SELECT pg_try_advisory_lock(hashtext(:key)) AND 1 / (length(:key) - 8) < 9"
    async with shop.linked(shop.queue({"lock": lock}), limit=3, size=3) as link:
        await until_told(shop, link, "the statement for 'lock': division by zero")
        await until(lambda: not shop.locked)


@pytest.mark.parametrize(
    ("unlock", "why"),
    [
        ("SELECT false AND :key <> ''", "it has answered false"),
        ("SELECT NULL::boolean WHERE :key <> ''", "the statement for 'unlock' must give one row with true or false"),
        ("SELECT 1 / (length(:key) - 6) = 1", "the statement for 'unlock': division by zero"),
    ],
)
async def test_an_unlock_that_fails(shop: Shop, caplog: pytest.LogCaptureFixture, unlock: str, why: str) -> None:
    """S-3.3: what was settled is settled; the connection is closed, so the lock ends; and another one goes on."""
    shop.add("Ada", "Ada")
    queue = shop.queue({"unlock": unlock})
    async with shop.linked(queue) as link:
        for _ in range(2):
            received = await one(link)
            with caplog.at_level(logging.WARNING):
                assert list(await link.settle([order(queue, received, Ack())])) == [None]
        link.stop()
        await until(lambda: not shop.locked)
    assert shop.tables.rows() == []
    assert any(
        f"key 'of-Ada' was not unlocked, so its connection was closed: {why}" in line for line in caplog.messages
    )


async def test_a_row_that_is_gone_when_its_key_is_locked(shop: Shop) -> None:
    """It is passed over, and its key free again."""
    shop.add("Ada", "Grace")
    shop.tables.run(
        "CREATE FUNCTION locked(key text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN "
        "DELETE FROM jobs WHERE 'of-' || lane = key AND lane = 'Ada'; "
        "RETURN pg_try_advisory_lock(hashtext(key)); END $$"
    )
    async with shop.linked(shop.queue({"lock": "SELECT locked(:key)"})) as link:
        assert (await one(link)).delivery.key == "Grace"
        assert shop.tables.run(KEYS) == shop.tables.run("SELECT ARRAY[hashtext('of-Grace')::oid]")
    assert shop.told == []


async def test_nothing_is_worked_on_whose_lock_has_ended(shop: Shop) -> None:
    """A key that is not unlocked amid a claim closes the connection: what was won by then is won anew."""
    shop.add("Ada", "Grace")
    shop.tables.run(
        "CREATE FUNCTION locked(key text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN "
        "DELETE FROM jobs WHERE 'of-' || lane = key AND lane = 'Grace'; "
        "RETURN pg_try_advisory_lock(hashtext(key)); END $$"
    )
    unlock = "SELECT :key <> 'of-Grace' AND pg_advisory_unlock(hashtext(:key))"
    async with shop.linked(shop.queue({"lock": "SELECT locked(:key)", "unlock": unlock}), limit=2, size=2) as link:
        received = await one(link)
        assert (received.delivery.key, received.delivery.attempt) == ("Ada", 2)
        assert shop.tables.run(KEYS) == shop.tables.run("SELECT ARRAY[hashtext('of-Ada')::oid]")
    assert any("a key was not unlocked, so the connection was closed" in line for line in shop.told)


async def test_a_row_that_cannot_be_counted(shop: Shop) -> None:
    """It is passed over and named, its key is free, and the others go on."""
    shop.add("Ada", "Grace")
    shop.tables.run("ALTER TABLE jobs ADD CHECK (lane <> 'Ada' OR attempt < 2)")
    async with shop.linked(shop.queue()) as link:
        assert (await one(link)).delivery.key == "Grace"
        assert any("row 1 passed over: " in line for line in shop.told)
        with psycopg.connect(shop.tables.url) as other:
            assert other.execute("SELECT pg_try_advisory_lock(hashtext('of-Ada'))").fetchone() == (True,)


@pytest.mark.parametrize("alter", ["lane TYPE int USING lane::int", "id TYPE int"])
async def test_a_table_that_is_altered_meanwhile(shop: Shop, alter: str) -> None:
    """What was prepared for other columns is prepared anew."""
    table: Table[Any] = Table("jobs", id="id", attempt="attempt")
    queue = shop.tables.broker(0.02).queue(
        table, claim=AdvisoryLock("of-{lane}"), custom={"lock": LOCK, "unlock": UNLOCK}
    )
    shop.add(*["1"] * 9)
    async with shop.linked(queue) as link:
        for _ in range(9):
            received = await one(link)
            assert received.delivery.message["lane"] == "1"
            assert list(await link.settle([order(queue, received, Ack())])) == [None]
        await trio.to_thread.run_sync(shop.tables.run, f"ALTER TABLE jobs ALTER COLUMN {alter}")
        shop.tables.run("INSERT INTO jobs (payload, lane) VALUES ('a', '2')")
        assert (await one(link)).delivery.message["lane"] in {2, "2"}
    assert shop.told == []


async def test_one_that_cannot_be_prepared(shop: Shop) -> None:
    """S-12.3."""
    with pytest.raises(LinkRefused, match=r"custom\['unlock'\] cannot be carried out: .*nothing"):
        async with shop.linked(shop.queue({"unlock": "SELECT nothing(:key)"})):
            pass
