"""Transactional mode on PostgreSQL: what a handler writes commits with its `Ack`, and with nothing else."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest
import trio

from actors import Runtime, Subscription, open_runtime
from links.errors import TransactionHeld
from links.sql import transaction
from settlement import Ack, DeadLetter, Delivery, Drop, Ledger, Outcome, Policy, Retry, RetryAfter
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import until

pytestmark = [pytest.mark.postgres, pytest.mark.servers]

Handler = Callable[[Delivery[Any]], Awaitable[Outcome | None]]
NOTE = "INSERT INTO notes VALUES (%s)"


@pytest.fixture(params=[False, True], ids=["row_lock", "lease"])
def tables(database: str, request: pytest.FixtureRequest) -> PostgresTables:
    tables = PostgresTables(database, leased=request.param).create()
    tables.run("CREATE TABLE notes (body bytea)")
    tables.add(b"a")
    return tables


async def handled(tables: PostgresTables, handler: Handler, policy: Policy = Policy(), **how: Any) -> Ledger:
    """Run until the row has had one outcome; the ledger."""
    runtime: Runtime
    source = tables.broker().queue(tables.table())
    async with open_runtime(Subscription(source, handler, policy=policy, **how), grace=0.3) as runtime:
        with trio.fail_after(15):
            while (ledger := runtime.ledger("jobs")).received - ledger.in_hand < 1:  # noqa: ASYNC110
                await trio.sleep(0.01)
    return runtime.ledger("jobs")


def notes(tables: PostgresTables) -> list[bytes]:
    return [row[0] for row in tables.run("SELECT body FROM notes ORDER BY body")]


@pytest.mark.parametrize("outcome", [Ack(), None])
async def test_what_is_written_commits_with_the_ack(tables: PostgresTables, outcome: Outcome | None) -> None:
    """S-8.1: the row's end and the handler's writes are one transaction: the server says one number for both."""
    tables.run("CREATE TABLE ends (at xid8)")
    tables.run(
        "CREATE FUNCTION ended() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN INSERT INTO ends VALUES (pg_current_xact_id()); RETURN NULL; END $$"
    )
    for table, event in (("notes", "INSERT"), ("jobs", "DELETE")):
        tables.run(f"CREATE TRIGGER ended AFTER {event} ON {table} FOR EACH ROW EXECUTE FUNCTION ended()")

    async def handler(delivery: Delivery[bytes]) -> Outcome | None:
        async with transaction(delivery) as connection:
            await connection.execute(NOTE, [delivery.body])
        assert notes(tables) == [], "nobody sees it before the outcome"
        return outcome

    assert (await handled(tables, handler)).acked == 1
    assert (notes(tables), tables.rows()) == ([b"a"], [])
    assert tables.run("SELECT count(*), count(DISTINCT at) FROM ends") == [(2, 1)]


@pytest.mark.parametrize("trigger", [False, True], ids=["plain", "trigger"])
@pytest.mark.parametrize("concurrency", [1, 3])
async def test_a_verb_that_fails_behind_what_was_written(
    tables: PostgresTables, concurrency: int, trigger: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """S-8.1, S-8.3: nobody sees what was written, and all of it is there when the verb can be said: once.

    Under a row lock the handler may be called once more for it (what it wrote was rolled back), and no more often.
    """
    if trigger:
        tables.run("CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN coalesce(NEW, OLD); END $$")
        tables.run("CREATE TRIGGER t BEFORE UPDATE OR DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION f()")
    tables.add(b"b", b"c", b"d")
    tables.run("CREATE TABLE refers (id bigint REFERENCES jobs)")
    tables.run("INSERT INTO refers SELECT id FROM jobs WHERE payload = 'b'")
    calls: list[bytes] = []
    often = 1 if tables.leased else 2

    async def handler(delivery: Delivery[bytes]) -> None:
        calls.append(delivery.body)
        async with transaction(delivery) as connection:
            await connection.execute(NOTE, [delivery.body])

    source = tables.broker(0.05).queue(tables.table())
    async with open_runtime(Subscription(source, handler, concurrency=concurrency), grace=0.3) as runtime:
        with trio.fail_after(20):
            await until(lambda: "refers" in caplog.text and calls.count(b"b") == often, 15)
            assert b"b" not in notes(tables)
            tables.run("DELETE FROM refers")
            await until(lambda: runtime.ledger("jobs").acked == 4, 15)
    assert (notes(tables), tables.rows()) == ([b"a", b"b", b"c", b"d"], [])
    assert calls.count(b"b") == often


@pytest.mark.parametrize("outcome", [Retry(), RetryAfter(3600.0), Drop(), ValueError("no")], ids=str)
async def test_any_other_outcome_undoes_it_first(tables: PostgresTables, outcome: Any) -> None:
    """K-96, S-8.2, S-8.3: then it is settled as usual; the attempt counts, the writes are gone."""
    calls = 0

    async def handler(delivery: Delivery[bytes]) -> Outcome | None:
        nonlocal calls
        calls += 1
        if calls > 1:
            await trio.sleep_forever()
        async with transaction(delivery) as connection:
            await connection.execute(NOTE, [delivery.body])
        if isinstance(outcome, Exception):
            raise outcome
        result: Outcome = outcome
        return result

    await handled(tables, handler, Policy(on_error=Retry()), within=None)
    assert notes(tables) == []
    counted = 1 + calls if tables.leased else 2  # a lease counts when it is claimed, and a row lock when it is settled
    assert [row["attempt"] for row in tables.rows()] == ([] if isinstance(outcome, Drop) else [counted])


@pytest.mark.parametrize("outcome", [Retry(), ValueError("no")], ids=str)
@pytest.mark.parametrize("leased", [False, True], ids=["row_lock", "lease"])
@pytest.mark.parametrize("grouped", [False, True], ids=["to_a_table", "to_a_group"])
async def test_what_is_moved_to_the_dead_letter_has_written_nothing(
    database: str, outcome: Any, *, grouped: bool, leased: bool
) -> None:
    """K-96, S-4.6: the cap moves the row, and the writes are gone."""
    tables = PostgresTables(database, leased=leased, grouped=grouped).create()
    tables.run("CREATE TABLE notes (body bytea)")
    tables.add(b"a", group="jobs" if grouped else None)

    async def handler(delivery: Delivery[bytes]) -> Any:
        async with transaction(delivery) as connection:
            await connection.execute(NOTE, [delivery.body])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    policy = Policy(max_attempts=1, dead_letter="dead", on_error=DeadLetter())
    source = tables.broker().queue(tables.table(), group="jobs" if grouped else None)
    async with open_runtime(Subscription(source, handler, policy=policy), grace=0.3) as runtime:
        await until(lambda: runtime.ledger("jobs").dead_lettered, 15)
    assert notes(tables) == []
    assert [row["payload"] for row in tables.rows("jobs" if grouped else "dead")] == [b"a"]
    assert not grouped or tables.row()["grp"] == "dead"


async def test_who_takes_too_long_has_written_nothing(tables: PostgresTables) -> None:
    """K-96: `within=` is a failure as any other, and the statement that ran is cancelled."""

    async def handler(delivery: Delivery[bytes]) -> None:
        async with transaction(delivery) as connection:
            await connection.execute(NOTE, [delivery.body])
            await connection.execute("SELECT pg_sleep(60)")

    with trio.fail_after(20):
        ledger = await handled(tables, handler, Policy(on_error=Drop()), within=0.3)
    assert (ledger.dropped, notes(tables), tables.rows()) == (1, [], [])


async def test_a_cancelled_handler_has_written_nothing(tables: PostgresTables) -> None:
    """S-8.2: the row is as it was, but that a lease counts the try."""
    before = {**tables.row(), **({"attempt": 2} if tables.leased else {})}
    begun = trio.Event()

    async def handler(delivery: Delivery[bytes]) -> None:
        async with transaction(delivery) as connection:
            await connection.execute(NOTE, [delivery.body])
            begun.set()
            await connection.execute("SELECT pg_sleep(60)")

    with trio.fail_after(20):
        async with open_runtime(Subscription(tables.broker().queue(tables.table()), handler), grace=0.1) as runtime:
            await begun.wait()
    assert runtime.ledger("jobs").unsettled == 1
    assert (notes(tables), tables.row()) == ([], before)


async def test_a_failed_statement_commits_nothing(tables: PostgresTables) -> None:
    """DESIGN 6, SQL: an `Ack` on top of it cannot be kept: the row is there again, the writes are not."""

    async def handler(delivery: Delivery[bytes]) -> None:
        async with transaction(delivery) as connection:
            await connection.execute(NOTE, [delivery.body])
            with pytest.raises(psycopg.errors.DivisionByZero):
                await connection.execute("SELECT 1 / 0")

    ledger = await handled(tables, handler)
    assert (ledger.acked, ledger.superseded) == (0, 1)
    assert (notes(tables), len(tables.rows())) == ([], 1)


async def test_savepoints_and_cursors_are_psycopgs_own(tables: PostgresTables) -> None:
    """A failure inside goes back to its savepoint, and the rest commits; with a decoder, too."""

    async def handler(delivery: Delivery[Any]) -> None:
        assert delivery.message == [1]
        async with transaction(delivery) as connection:
            with pytest.raises(psycopg.errors.DivisionByZero):
                await _fails(connection)
            async with connection.cursor() as cursor:
                await cursor.executemany(NOTE, [[b"x"], [b"y"]])

    async def _fails(connection: Any) -> None:
        async with connection.transaction():
            await connection.execute(NOTE, [b"lost"])
            await connection.execute("SELECT 1 / 0")

    tables.run("UPDATE jobs SET payload = '[1]'")
    assert (await handled(tables, handler, decode=json.loads)).acked == 1
    assert notes(tables) == [b"x", b"y"]


@pytest.mark.parametrize("ends", ["COMMIT", "ROLLBACK", "COMMIT; BEGIN"])
async def test_who_ends_the_transaction_is_found_out(
    tables: PostgresTables, ends: str, caplog: pytest.LogCaptureFixture
) -> None:
    """DESIGN 6, SQL: *unknown*, `TransactionEnded`: the lock is gone, and nothing of ours is said after it."""

    async def handler(delivery: Delivery[bytes]) -> None:
        async with transaction(delivery) as connection:
            for statement in ends.split(";"):
                await connection.execute(statement)

    assert (await handled(tables, handler)).unknown == 1
    assert "the handler has ended the transaction" in caplog.text
    assert len(tables.rows()) == 1


async def test_it_is_lent_and_no_more(tables: PostgresTables) -> None:
    """S-8.4: no commit, rollback or close; and what is kept past the block is of no use."""
    kept: list[Any] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        async with transaction(delivery) as connection:
            for forbidden in (connection.commit, connection.rollback, connection.close):
                with pytest.raises(TransactionHeld):
                    await forbidden()
            with pytest.raises(TransactionHeld, match="is lent already"):
                async with transaction(delivery):
                    pass
            kept.extend([connection, connection.cursor(), delivery])
        for useless in kept[:2]:
            with pytest.raises(TransactionHeld):
                await useless.execute("SELECT 1")
        async with transaction(delivery) as second:
            await second.execute(NOTE, [b"second"])

    assert (await handled(tables, handler)).acked == 1
    assert notes(tables) == [b"second"]
    connection, cursor, delivery = kept
    for useless in (connection, cursor):
        with pytest.raises((TransactionHeld, psycopg.OperationalError)):  # the link has closed it by now
            await useless.execute("SELECT 1")
    with pytest.raises(TransactionHeld, match="in hand no more"):
        async with transaction(delivery):
            pass


@pytest.mark.parametrize("tables", [False], ids=["row_lock"], indirect=True)
async def test_the_claim_is_watched_before_and_behind_it(tables: PostgresTables) -> None:
    """DESIGN 6, SQL: while it is lent the handler itself meets the end of the connection; behind it the watch does."""
    ours = "FROM pg_stat_activity WHERE application_name = 'trio-settlement' AND state = 'idle in transaction'"
    met: list[str] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        if not met:
            async with transaction(delivery) as connection:
                tables.run(f"SELECT pg_terminate_backend(pid) {ours}")
                met.append("lent")
                with pytest.raises(psycopg.OperationalError):
                    await connection.execute("SELECT 1")
            await trio.sleep_forever()
        if len(met) == 1:
            async with transaction(delivery) as connection:
                await connection.execute("SELECT 1")
            met.append("behind")
            tables.run(f"SELECT pg_terminate_backend(pid) {ours}")
            await trio.sleep_forever()

    async with open_runtime(Subscription(tables.broker().queue(tables.table()), handler)) as runtime:
        await until(lambda: runtime.ledger("jobs").acked, 20)
        assert (met, runtime.ledger("jobs").unsettled) == (["lent", "behind"], 2)


async def test_which_deliveries_have_one() -> None:
    """DESIGN 6, SQL: one of another transport has none."""
    other: Delivery[bytes] = Delivery(
        body=b"a", message=b"a", headers={}, attempt=1, redelivery_count=None, source="q", id="1", key=None
    )
    with pytest.raises(ValueError, match="delivery 1 of 'q' has no transaction"):
        async with transaction(other):
            pass


async def test_an_older_claim_of_the_same_row_is_another_one(tables: PostgresTables) -> None:
    """S-8.4: who kept the delivery of the first try does not write in the second one's transaction."""
    first: list[Delivery[bytes]] = []

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        if not first:
            first.append(delivery)
            return Retry()
        with pytest.raises(TransactionHeld, match="in hand no more"):
            async with transaction(first[0]):
                pass
        async with transaction(delivery) as connection:
            await connection.execute(NOTE, [delivery.body])
        return Ack()

    async with open_runtime(Subscription(tables.broker().queue(tables.table()), handler)) as runtime:
        await until(lambda: runtime.ledger("jobs").acked, 15)
    assert notes(tables) == [b"a"]


async def test_it_is_undone_before_a_letter_is_published(tables: PostgresTables) -> None:
    """S-8.2: the dead letter's INSERT would wait for the handler's own, which waits for the dead letter."""
    tables.run("ALTER TABLE dead ADD UNIQUE (payload)")
    dead = tables.broker().publisher(tables.table("dead"))

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        async with transaction(delivery) as connection:
            await connection.execute("INSERT INTO dead (payload) VALUES (%s)", [delivery.body])
        return Retry()

    policy = Policy(max_attempts=1, dead_letter=dead)
    with trio.fail_after(10):
        assert (await handled(tables, handler, policy)).dead_lettered == 1
    assert ([row["payload"] for row in tables.rows("dead")], tables.rows()) == ([b"a"], [])
