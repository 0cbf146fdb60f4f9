"""Transactional mode beside a lease: what a handler writes commits with its row by the token that holds it then."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
import trio

from actors import BatchSubscription, Subscription, open_runtime
from links.errors import CallBroken, LeaseLost, NotApplied, SettlementUnknown, TransactionHeld
from links.sql import Lease, SqlBroker, transaction
from links.sql.postgres.lease import PostgresLease
from settlement import Ack, Delivery, Drop, Outcome, Policy, Retry
from tests.links.faulty_network import faulty_network
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import finish, open_link, until

pytestmark = [pytest.mark.postgres, pytest.mark.servers]

Handler = Callable[[Delivery[Any]], Awaitable[Outcome | None]]
NOTE = "INSERT INTO notes VALUES (%s)"
OURS = "application_name = 'trio-settlement' AND datname = current_database()"


@pytest.fixture
def tables(database: str) -> PostgresTables:
    tables = PostgresTables(database).create()
    tables.run("CREATE TABLE notes (body bytea)")
    tables.add(b"a")
    return tables


def notes(tables: PostgresTables) -> list[bytes]:
    return [row[0] for row in tables.run("SELECT body FROM notes ORDER BY body")]


def backends(tables: PostgresTables, which: str = "true") -> int:
    ((count,),) = tables.run(f"SELECT count(*) FROM pg_stat_activity WHERE {OURS} AND {which}")  # noqa: S608
    return int(count)


def terminate(tables: PostgresTables, which: str) -> list[Any]:
    return tables.run(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {OURS} AND {which}")  # noqa: S608


async def write(delivery: Delivery[Any]) -> None:
    async with transaction(delivery) as connection:
        await connection.execute(NOTE, [delivery.body])


# --- the lease beside it


async def test_the_lease_is_renewed_beside_it_and_the_ack_takes_the_token_as_it_is_then(tables: PostgresTables) -> None:
    """S-8.3, S-5.5: a handler of several lease lengths; no renewal waits for the transaction, none is in its way."""
    expiries: list[Any] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        async with transaction(delivery) as connection:
            await connection.execute(NOTE, [delivery.body])
            with trio.fail_after(10):
                while len(expiries) < 6:
                    if (found := tables.row()["locked_until"]) not in expiries:
                        expiries.append(found)
                    await trio.sleep(0.02)
            await connection.execute(NOTE, [b"b"])

    queue = tables.broker().queue(tables.table(), claim=Lease(0.6))
    async with open_runtime(Subscription(queue, handler), grace=0.3) as runtime:
        await until(lambda: runtime.ledger("jobs").acked, 15)
    assert expiries == sorted(expiries)
    assert (notes(tables), tables.rows()) == ([b"a", b"b"], [])


async def test_a_lost_lease_cancels_the_handler_and_nothing_is_written(tables: PostgresTables) -> None:
    """K-96, S-8.3: somebody else has the row; what the handler wrote is rolled back, the row is theirs."""
    cancelled: list[bool] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        async with transaction(delivery) as connection:
            await connection.execute(NOTE, [delivery.body])
            tables.run("UPDATE jobs SET attempt = 9, locked_until = now() + interval '1 hour'")
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                cancelled.append(connection.closed)
                raise

    queue = tables.broker().queue(tables.table(), claim=Lease(0.6))
    async with open_runtime(Subscription(queue, handler), grace=0.3) as runtime:
        await until(lambda: runtime.ledger("jobs").superseded, 15)
        await until(lambda: not backends(tables, "state = 'idle in transaction'"))
    assert cancelled == [False], "it was cancelled before its connection was closed"
    assert (notes(tables), tables.row()["attempt"]) == ([], 9)


async def test_a_lease_that_was_lost_unseen_is_found_out_by_the_ack(tables: PostgresTables) -> None:
    """S-8.3: 0 rows were touched: everything is rolled back, the row is as somebody else has left it."""
    async with open_link(tables.broker().queue(tables.table())) as link:
        (received,) = await link.receive(1)
        await write(received.delivery)
        tables.run("UPDATE jobs SET attempt = 9")
        (verdict,) = await link.settle(finish([received]))
        assert isinstance(verdict, LeaseLost)
        assert (notes(tables), tables.row()["attempt"]) == ([], 9)


async def test_what_an_ack_ends_and_what_not_are_settled_by_one_call(tables: PostgresTables) -> None:
    """S-8.1, S-8.2: one with a transaction is acked, another put back, a third has none; each has its own verdict."""
    tables.add(b"b", b"c")
    queue = tables.broker().queue(tables.table())
    async with open_link(queue) as link:
        received = await link.receive(3)
        for each in received[:2]:
            await write(each.delivery)
        orders = finish(received)
        outcomes: list[Outcome] = [Ack(), Retry(), Drop()]
        for each, outcome in zip(orders, outcomes, strict=True):
            each.plan = queue.decide(outcome, each.received.delivery, Policy())
        assert list(await link.settle(orders)) == [None, None, None]
        assert notes(tables) == [b"a"]
        assert [(row["payload"], row["locked_until"]) for row in tables.rows()] == [(b"b", None)]


# --- what the Ack cannot do


@pytest.mark.parametrize("returns", ["RETURN NULL", "RAISE 'closed'"])
async def test_a_verb_that_is_not_applied_waits_with_the_writes(tables: PostgresTables, returns: str) -> None:
    """DESIGN 3.8: it is said again in the same transaction, the lease kept, the handler not called again."""
    calls = 0
    tables.run(f"CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {returns}; END $$")
    tables.run("CREATE TRIGGER no BEFORE DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION no()")

    async def handler(delivery: Delivery[bytes]) -> None:
        nonlocal calls
        calls += 1
        await write(delivery)

    queue = tables.broker().queue(tables.table(), claim=Lease(0.6))
    async with open_runtime(Subscription(queue, handler), grace=0.3) as runtime:
        await until(lambda: runtime.statistics()["jobs"].degraded, 15)
        before = tables.row()["locked_until"]
        await until(lambda: tables.row()["locked_until"] > before)
        assert notes(tables) == []
        tables.run("DROP TRIGGER no ON jobs")
        await until(lambda: runtime.ledger("jobs").acked, 15)
    assert (calls, notes(tables), tables.rows()) == (1, [b"a"], [])


async def test_a_row_that_another_transaction_has_locked_is_waited_for_by_saying_it_again(
    tables: PostgresTables,
) -> None:
    """S-8.3: nothing waits for a lock; then the same transaction finishes it."""
    async with open_link(tables.broker().queue(tables.table())) as link:
        (received,) = await link.receive(1)
        await write(received.delivery)
        with psycopg.connect(tables.url) as other:
            other.execute("SELECT FROM jobs FOR UPDATE")
            for _ in range(2):
                (verdict,) = await link.settle(finish([received]))
                assert isinstance(verdict, NotApplied)
        assert list(await link.settle(finish([received]))) == [None]
        assert (notes(tables), tables.rows()) == ([b"a"], [])


async def test_a_lock_that_is_left_at_once_costs_nothing(
    tables: PostgresTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-8.3: another's claim has the row for its own length; the ack is said again within the call."""
    holds = PostgresLease.holds
    async with open_link(tables.broker().queue(tables.table())) as link:
        (received,) = await link.receive(1)
        await write(received.delivery)
        with psycopg.connect(tables.url) as other:
            other.execute("SELECT FROM jobs FOR UPDATE")

            async def held(form: PostgresLease, connection: Any, tokens: Sequence[Any]) -> set[int]:
                ours = await holds(form, connection, tokens)
                other.rollback()
                return ours

            monkeypatch.setattr(PostgresLease, "holds", held)
            assert list(await link.settle(finish([received]))) == [None]
    assert (notes(tables), tables.rows()) == ([b"a"], [])


async def test_a_constraint_that_fails_at_commit_rolls_both_back(tables: PostgresTables) -> None:
    """S-8.3: the row comes back when its lease ends, and the handler writes what fits."""
    tables.run("ALTER TABLE notes ADD UNIQUE (body) DEFERRABLE INITIALLY DEFERRED")
    tables.run(NOTE, b"a")
    calls = 0

    async def handler(delivery: Delivery[bytes]) -> None:
        nonlocal calls
        calls += 1
        async with transaction(delivery) as connection:
            await connection.execute(NOTE, [b"a" if calls == 1 else b"b"])

    queue = tables.broker().queue(tables.table(), claim=Lease(0.6))
    async with open_runtime(Subscription(queue, handler), grace=0.3) as runtime:
        await until(lambda: runtime.ledger("jobs").acked, 15)
        assert runtime.ledger("jobs").superseded == 1
    assert (notes(tables), tables.rows()) == ([b"a", b"b"], [])


async def test_what_a_handler_has_set_is_not_what_its_row_is_settled_by(tables: PostgresTables) -> None:
    """S-8.1: a role without rights, and a path to another table of that name, are the handler's own."""
    tables.run("DO $$ BEGIN CREATE ROLE nobody_at_all; EXCEPTION WHEN duplicate_object THEN NULL; END $$")
    tables.run("CREATE SCHEMA other")
    tables.run("CREATE TABLE other.jobs (LIKE jobs)")
    tables.run("GRANT ALL ON notes TO nobody_at_all")
    async with open_link(tables.broker().queue(tables.table())) as link:
        (received,) = await link.receive(1)
        async with transaction(received.delivery) as connection:
            await connection.execute("SET search_path TO other, public")
            await connection.execute("SET ROLE nobody_at_all")
            await connection.execute(NOTE, [b"a"])
        assert list(await link.settle(finish([received]))) == [None]
        assert (notes(tables), tables.rows()) == ([b"a"], [])


# --- a connection that breaks


async def test_a_backend_that_was_terminated_behind_the_block_has_written_nothing(tables: PostgresTables) -> None:
    """S-8.3: the Ack finds nothing to commit; the row is not finished, and is handled again."""
    calls = 0

    async def handler(delivery: Delivery[bytes]) -> None:
        nonlocal calls
        calls += 1
        await write(delivery)
        if calls == 1:
            terminate(tables, "state = 'idle in transaction'")

    queue = tables.broker().queue(tables.table(), claim=Lease(0.6))
    async with open_runtime(Subscription(queue, handler), grace=0.3) as runtime:
        await until(lambda: runtime.ledger("jobs").acked, 15)
        assert (calls, runtime.ledger("jobs").superseded) == (2, 1)
    assert (notes(tables), tables.rows()) == ([b"a"], [])


async def test_a_backend_that_is_terminated_within_the_block_is_the_handlers_to_see(tables: PostgresTables) -> None:
    """Its error is a failure as any other, and the row is settled by the policy at once."""

    async def handler(delivery: Delivery[bytes]) -> None:
        async with transaction(delivery) as connection:
            await connection.execute(NOTE, [delivery.body])
            terminate(tables, "state = 'idle in transaction'")
            with pytest.raises(psycopg.OperationalError):
                await connection.execute("SELECT 1")
            raise ValueError("as it is")

    queue = tables.broker().queue(tables.table())
    async with open_runtime(Subscription(queue, handler, policy=Policy(on_error=Drop())), grace=0.3) as runtime:
        await until(lambda: runtime.ledger("jobs").dropped, 15)
    assert (notes(tables), tables.rows()) == ([], [])


SLOWLY = (
    "CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(1); RETURN NULL; END $$",
    (
        "CREATE CONSTRAINT TRIGGER slowly AFTER INSERT ON notes DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION slowly()"
    ),
)
"""COMMIT takes a second, so that a test can act amid it."""


@pytest.mark.parametrize("cut", [True, False], ids=["answer_lost", "terminated"])
async def test_a_commit_whose_answer_is_lost_is_unknown(tables: PostgresTables, *, cut: bool) -> None:
    """S-8.3, OQ-S7: both stand or neither; which of it, the verdict does not say."""
    for statement in SLOWLY:
        tables.run(statement)
    parts = urlsplit(tables.url)
    async with faulty_network(parts.hostname or "", parts.port or 5432) as network:
        queue = SqlBroker(network.url(tables.url)).queue(tables.table(), claim=Lease(30.0))
        async with open_link(queue) as link, trio.open_nursery() as nursery:
            (received,) = await link.receive(1)
            await write(received.delivery)

            async def disturb() -> None:
                await until(lambda: backends(tables, "state = 'active' AND query = 'COMMIT'"))
                if cut:
                    network.cut()
                else:
                    terminate(tables, "query = 'COMMIT'")

            nursery.start_soon(disturb)
            (verdict,) = await link.settle(finish([received]))
            assert isinstance(verdict, SettlementUnknown)
            await until(lambda: not backends(tables, "query = 'COMMIT'"))
            stands = [b"a"] if cut else []
            assert (notes(tables), len(tables.rows())) == (stands, 1 - len(stands))


async def test_a_commit_that_takes_longer_than_the_goodbye_is_unknown(tables: PostgresTables) -> None:
    """DESIGN 4: the shield has an end; the connection is closed."""
    for statement in SLOWLY:
        tables.run(statement.replace("pg_sleep(1)", "pg_sleep(60)"))
    queue = tables.broker().queue(tables.table())
    async with queue.broker.connect(), queue.attach("test", lambda *_: None, 0.3) as link:
        (received,) = await link.receive(1)
        await write(received.delivery)
        with trio.fail_after(10):
            (verdict,) = await link.settle(finish([received]))
        assert isinstance(verdict, SettlementUnknown)
        await until(lambda: not backends(tables, "query = 'COMMIT'"))
        assert (notes(tables), len(tables.rows())) == ([], 1)


async def test_a_cancellation_amid_the_commit_says_what_became_of_it(tables: PostgresTables) -> None:
    """DESIGN 4: shielded for a goodbye, so the verdict is true."""
    for statement in SLOWLY:
        tables.run(statement.replace("pg_sleep(1)", "pg_sleep(0.3)"))
    verdicts: list[Any] = []
    async with open_link(tables.broker().queue(tables.table())) as link:
        (received,) = await link.receive(1)
        await write(received.delivery)
        with trio.CancelScope() as scope:
            scope.cancel()
            verdicts += await link.settle(finish([received]))
        assert (verdicts, notes(tables), tables.rows()) == ([None], [b"a"], [])


# --- connections


async def test_two_deliveries_in_work_have_two_connections(tables: PostgresTables) -> None:
    """S-8.5: neither sees what the other one has written, and each commits by itself."""
    tables.add(b"b")
    pids: list[int] = []
    met = trio.Event()

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        async with transaction(delivery) as connection:
            await connection.execute(NOTE, [delivery.body])
            ((pid, seen),) = await (
                await connection.execute("SELECT pg_backend_pid(), (SELECT count(*) FROM notes)")
            ).fetchall()
            pids.append(pid)
            assert seen == 1
            if len(pids) == 2:
                met.set()
            await met.wait()
        return Ack() if delivery.body == b"a" else Drop()

    async with open_runtime(Subscription(tables.broker().queue(tables.table()), handler, concurrency=2)) as runtime:
        await until(lambda: runtime.ledger("jobs").acked and runtime.ledger("jobs").dropped, 15)
    assert len(set(pids)) == 2
    assert notes(tables) == [b"a"]


async def test_each_delivery_of_a_batch_has_its_own(tables: PostgresTables) -> None:
    """S-6.3: each settles alone, so each has its own transaction and its own outcome."""
    tables.add(b"b", b"c")

    async def handler(batch: Sequence[Delivery[bytes]]) -> list[Outcome]:
        for delivery in batch:
            await write(delivery)
        return [Drop() if delivery.body == b"b" else Ack() for delivery in batch]

    queue = tables.broker().queue(tables.table())
    async with open_runtime(BatchSubscription(queue, handler, size=3, wait=0.5)) as runtime:
        await until(lambda: not tables.rows(), 15)
        assert runtime.ledger("jobs").received == 3
    assert notes(tables) == [b"a", b"c"]


async def test_the_next_delivery_gets_the_connection_as_if_it_were_new(tables: PostgresTables) -> None:
    """S-8.5: one after the other needs one; what a handler has set, locked, made or prepared is not the next one's."""
    tables.add(b"b", b"c")
    pids: list[int] = []
    fresh: list[Any] = []

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        async with transaction(delivery) as connection:
            pids.append(connection.info.backend_pid)
            fresh.extend(
                await (
                    await connection.execute(
                        "SELECT current_setting('DateStyle'), current_setting('statement_timeout'), "
                        "current_setting('transaction_isolation'), to_regclass('pg_temp.mine'), "
                        "(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()), "
                        "(SELECT count(*) FROM pg_prepared_statements)"
                    )
                ).fetchall()
            )
            await connection.execute("SET DateStyle = 'German'")
            await connection.execute("SET statement_timeout = '7s'")
            await connection.execute("CREATE TEMP TABLE mine (a integer)")
            await connection.execute("SELECT pg_advisory_lock(7)")
            await connection.execute("PREPARE mine AS SELECT 1")
        return Retry() if delivery.body == b"b" and delivery.attempt == 1 else Ack()

    async with open_runtime(Subscription(tables.broker().queue(tables.table()), handler)) as runtime:
        await until(lambda: runtime.ledger("jobs").acked == 3, 15)
    assert len(set(pids)) == 1
    assert set(fresh) == {("ISO, DMY", "0", "read committed", None, 0, 0)} or set(fresh) == {
        ("ISO, MDY", "0", "read committed", None, 0, 0)
    }


async def test_an_isolation_that_cannot_see_a_renewal_is_not_taken(tables: PostgresTables) -> None:
    """S-8.6: READ COMMITTED whatever the database says; so the Ack sees the lease as it was renewed."""
    name = urlsplit(tables.url).path.lstrip("/")
    tables.run(f'ALTER DATABASE "{name}" SET default_transaction_isolation = serializable')
    async with open_link(tables.broker().queue(tables.table())) as link:
        (received,) = await link.receive(1)
        await write(received.delivery)
        assert list(await link.extend([received])) == []
        assert list(await link.settle(finish([received]))) == [None]
    assert (notes(tables), tables.rows()) == ([b"a"], [])


async def test_where_the_server_has_no_connection_left_the_handler_is_told(
    tables: PostgresTables, caplog: pytest.LogCaptureFixture
) -> None:
    """S-8.5: a clear error, answered by the policy; with a free connection the next try goes well."""
    tables.run("DO $$ BEGIN CREATE ROLE few LOGIN PASSWORD 'few'; EXCEPTION WHEN duplicate_object THEN NULL; END $$")
    tables.run("GRANT ALL ON ALL TABLES IN SCHEMA public TO few")
    tables.run("ALTER ROLE few CONNECTION LIMIT 2")
    parts = urlsplit(tables.url)
    url = urlunsplit(parts._replace(netloc=f"few:few@{parts.hostname}:{parts.port}"))
    errors: list[Exception] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        try:
            await write(delivery)
        except CallBroken as error:
            errors.append(error)
            tables.run("ALTER ROLE few CONNECTION LIMIT 3")
            raise

    queue = SqlBroker(url, poll_interval=0.05).queue(tables.table())
    policy = Policy(on_error=Retry())
    with caplog.at_level(logging.ERROR):
        async with open_runtime(Subscription(queue, handler, policy=policy), grace=0.3) as runtime:
            await until(lambda: runtime.ledger("jobs").acked, 15)
            assert runtime.ledger("jobs").retried == 1
    assert "no connection for a handler's transaction" in str(errors[0])
    assert "too many connections for role" in str(errors[0])
    assert "few:few" not in caplog.text
    assert notes(tables) == [b"a"]


async def test_no_connection_outlives_the_link(tables: PostgresTables) -> None:
    """S-8.5: neither one that is free, nor one that is still lent."""
    tables.add(b"b", b"c")
    queue = tables.broker().queue(tables.table())
    async with queue.broker.connect():
        async with queue.attach("test", lambda *_: None, 5.0) as link:
            first, second, third = await link.receive(3)
            async with transaction(first.delivery) as free:  # it is held here, so that it is not closed by itself
                await free.execute(NOTE, [b"a"])
            assert list(await link.settle(finish([first]))) == [None]
            lent = transaction(second.delivery)
            connection = await lent.__aenter__()
            await connection.execute(NOTE, [b"b"])
            assert connection.info.backend_pid == free.info.backend_pid, "one was free"
            async with transaction(third.delivery) as third_one:
                assert third_one.info.backend_pid != free.info.backend_pid
            assert list(await link.settle(finish([third]))) == [None]
            assert backends(tables) == 4
        await until(lambda: backends(tables) == 2)
        with pytest.raises((TransactionHeld, psycopg.OperationalError)):
            await connection.execute("SELECT 1")
        await lent.__aexit__(None, None, None)
    assert (notes(tables), tables.row()["locked_until"]) == ([b"a"], None)


async def test_what_is_forgotten_while_it_is_begun_is_not_lent(tables: PostgresTables) -> None:
    """S-8.4: the delivery was settled before its connection was there."""
    async with open_link(tables.broker().queue(tables.table())) as link, trio.open_nursery() as nursery:
        (received,) = await link.receive(1)

        async def late() -> None:
            with pytest.raises(TransactionHeld, match="in hand no more"):
                await write(received.delivery)

        nursery.start_soon(late)
        await until(lambda: backends(tables) == 3)
        assert list(await link.settle(finish([received]))) == [None]
    assert (notes(tables), tables.rows()) == ([], [])
    await until(lambda: backends(tables) == 0)


# --- weather


async def test_every_row_is_handled_and_written_once_whatever_breaks(tables: PostgresTables) -> None:
    """S-8.1: row and note change together, so in any weather each row has one note: not none, not two."""
    dice = random.Random(7)  # noqa: S311 -- weather, not secrecy
    tables.run("DELETE FROM jobs")
    bodies = [b"%03d" % number for number in range(80)]
    tables.add(*bodies)

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        async with transaction(delivery) as connection:
            await connection.execute(NOTE, [delivery.body])
            await trio.sleep(dice.uniform(0, 0.03))
        if dice.random() < 0.2:
            raise ValueError("bad luck")
        return Retry() if dice.random() < 0.2 else Ack()

    broken = 0
    for _ in range(12):
        queue = tables.broker().queue(tables.table(), claim=Lease(0.8))
        told = Subscription(queue, handler, policy=Policy(on_error=Retry()), concurrency=4)
        with trio.move_on_after(dice.uniform(0.3, 1.5)):  # cancelled amid anything
            async with open_runtime(told, goodbye=2.0):
                while True:
                    await trio.sleep(dice.uniform(0.02, 0.2))
                    which = dice.choice(["state = 'idle in transaction'", "state = 'active'", "state = 'idle'"])
                    broken += len(terminate(tables, which))
        both = tables.run("SELECT body FROM notes UNION ALL SELECT payload FROM jobs ORDER BY 1")
        assert [body for (body,) in both] == bodies
    queue = tables.broker().queue(tables.table(), claim=Lease(0.8))
    async with open_runtime(Subscription(queue, handler, policy=Policy(on_error=Retry()), concurrency=4)):
        await until(lambda: not tables.rows(), 30)
    assert notes(tables) == bodies
    assert broken > 5, "else nothing was tried"
