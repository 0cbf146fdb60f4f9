"""Both forms where something is in their way: a time limit of the server, a lock, a table that is gone, 50 MB."""

from __future__ import annotations

import psycopg
import pytest
import trio

from actors import Subscription, open_runtime
from links.sql import Lease, SqlQueue
from settlement import Ack, Delivery, Outcome, Policy, Retry
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import attached, bodies, broker_of, until

pytestmark = [pytest.mark.postgres, pytest.mark.servers]

FORMS = pytest.mark.parametrize("leased", [True, False], ids=["lease", "row lock"])


def limited(database: str, setting: str) -> None:
    """For every session that begins from now on."""
    PostgresTables(database).run(f'ALTER DATABASE "{database.rpartition("/")[2]}" SET {setting}')


def queue_of(tables: PostgresTables, lease: float = 30.0) -> SqlQueue[bytes]:
    return tables.broker(0.05).queue(tables.table(), claim=Lease(lease) if tables.leased else None)


@FORMS
async def test_a_statement_timeout_kills_a_claim(leased: bool, database: str, caplog: pytest.LogCaptureFixture) -> None:
    """S-2.10: it is told with the server's words, the row is as it was, and when there is time again it is claimed."""
    tables = PostgresTables(database, leased=leased).create()
    limited(database, "statement_timeout = '300ms'")
    calls: list[int] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        calls.append(delivery.attempt)

    async with open_runtime(Subscription(queue_of(tables), handler, name="billing")) as runtime:
        with psycopg.connect(database) as other:
            other.execute(b"LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE")
            other.execute(b"INSERT INTO jobs (payload) VALUES ('a')")
            await until(lambda: "due to statement timeout" in caplog.text, 15)
            assert "billing" in caplog.text
            other.commit()
        await until(lambda: runtime.ledger("billing").acked == 1, 40)
    assert calls == [1]
    assert tables.rows() == []


async def test_a_transaction_that_is_idle_too_long_is_told(database: str, caplog: pytest.LogCaptureFixture) -> None:
    """idle_in_transaction_session_timeout: the handler is cancelled at once, the log says why, the row is as it was."""
    tables = PostgresTables(database, leased=False).create()
    tables.add(b"a")
    before = tables.row()
    limited(database, "idle_in_transaction_session_timeout = '500ms'")
    ends: list[str] = []

    async def handler(_: Delivery[bytes]) -> None:
        try:
            await trio.sleep(30 if not ends else 0)
        finally:
            ends.append("ended" if ends else "cancelled")
            assert tables.row() == before

    async with open_runtime(Subscription(queue_of(tables), handler)) as runtime:
        await until(lambda: runtime.ledger("jobs").acked == 1, 30)
        assert runtime.ledger("jobs").unsettled == 1
    assert ends == ["cancelled", "ended"]
    assert "the claim of delivery 1 has ended: " in caplog.text
    assert "idle-in-transaction timeout" in caplog.text


@FORMS
async def test_a_table_that_is_dropped_and_made_again(leased: bool, database: str) -> None:
    """DESIGN 6, SQL: the refusal names it; made again, its rows are handled, and what was in hand is nobody's now."""
    tables = PostgresTables(database, leased=leased).create()
    seen: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        seen.append(delivery.body)

    async with open_runtime(Subscription(queue_of(tables), handler)) as runtime:
        tables.add(b"before")
        await until(lambda: runtime.ledger("jobs").acked == 1, 20)
        await trio.to_thread.run_sync(tables.run, "DROP TABLE jobs, dead")  # it waits for a claim that is under way
        await until(lambda: "there is no such table" in str(runtime.statistics()["jobs"]), 20)
        tables.create()
        tables.add(b"after")
        await until(lambda: runtime.ledger("jobs").acked == 2, 40)
    assert seen == [b"before", b"after"]
    assert tables.rows() == []


@FORMS
async def test_fifty_megabytes_from_publishing_to_the_dead_letter(leased: bool, database: str) -> None:
    """Whole, through the runtime: published, handled twice and moved, beside small ones."""
    tables = PostgresTables(database, leased=leased).create()
    body = bytes(range(256)) * (50 * 4096)
    whole: list[bool] = []

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        if len(delivery.body) < 10:
            return Ack()
        whole.append(delivery.body == body)
        return Retry()

    queue = queue_of(tables)
    policy = Policy(max_attempts=2, dead_letter="dead")
    async with open_runtime(Subscription(queue, handler, policy=policy, concurrency=2)) as runtime:
        publisher = broker_of(queue).publisher(tables.table())
        with trio.fail_after(60):
            await publisher.publish_many([b"small", body, b"small too"])
        await until(lambda: runtime.ledger("jobs").dead_lettered == 1, 60)
        await until(lambda: runtime.ledger("jobs").acked == 2, 10)
    assert (whole, tables.rows()) == ([True, True], [])
    ((moved,),) = tables.run("SELECT payload FROM dead")
    assert moved == body


LOCKS = {
    "an insert that refers to it": "INSERT INTO notes SELECT id FROM jobs WHERE payload = 'locked'",
    "SELECT FOR UPDATE": "SELECT FROM jobs WHERE payload = 'locked' FOR UPDATE",
}


@pytest.mark.parametrize("lock", LOCKS)
async def test_one_locked_row_keeps_no_other_lease_from_being_renewed(lock: str, database: str) -> None:
    """DESIGN 6, SQL: a handler locks its own row on a connection of its own, for several lease lengths.

    What an insert needs does not conflict with a renewal; what a FOR UPDATE has is skipped, and costs its own lease.
    """
    tables = PostgresTables(database).create()
    tables.run("CREATE TABLE notes (job bigint REFERENCES jobs ON DELETE CASCADE)")
    tables.add(b"locked", b"other")
    began: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        began.append(delivery.body)
        if delivery.body == b"other":
            await trio.sleep(6.0)
        elif delivery.attempt == 1:
            with psycopg.connect(database) as own:
                own.execute(LOCKS[lock].encode())
                await trio.sleep(5.0)
        return Ack()

    async with open_runtime(Subscription(queue_of(tables, 2.0), handler, concurrency=2)) as runtime:
        await until(lambda: len(began) == 2)
        rival = queue_of(tables, 2.0)
        async with rival.broker.connect(), attached(rival) as link:
            with trio.move_on_after(4.0):
                assert bodies(await link.receive(1)) == [b"locked"]
                assert lock == "SELECT FOR UPDATE"
        await until(lambda: b"other" not in [row["payload"] for row in tables.rows()], 15)
        assert runtime.ledger("jobs").superseded == (lock == "SELECT FOR UPDATE")
    assert began.count(b"other") == 1
    assert began.count(b"locked") == 1 or lock == "SELECT FOR UPDATE"
