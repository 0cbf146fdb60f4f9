"""Tables and neighbours that nobody planned for: right, or refused with the way out, never silently otherwise."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
import trio

import links.sql
from actors import Runtime, Subscription, open_runtime
from links.errors import LinkRefused
from links.sql import AdvisoryLock, Lease, RowLock, SqlBroker, SqlQueue, Table
from settlement import Ack, Delivery, Outcome, Policy, Retry
from settlement.sql import ClaimForm
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import until

pytestmark = [pytest.mark.postgres, pytest.mark.servers]

FORMS = pytest.mark.parametrize("leased", [True, False], ids=["lease", "row lock"])
SHAPES = {
    "a list of partitions": (
        "CREATE TABLE jobs (id int, kind int GENERATED ALWAYS AS (id % 2) STORED, body bytea, lock timestamptz, "
        "tries int NOT NULL DEFAULT 1, PRIMARY KEY (id)) PARTITION BY RANGE (id); "
        "CREATE TABLE jobs_low PARTITION OF jobs FOR VALUES FROM (MINVALUE) TO (2); "
        "CREATE TABLE jobs_high PARTITION OF jobs DEFAULT"
    ),
    "a computed column": (
        "CREATE TABLE jobs (size int GENERATED ALWAYS AS (length(body)) STORED, id int PRIMARY KEY, body bytea, "
        "lock timestamptz, twice int GENERATED ALWAYS AS (tries * 2) STORED, tries int NOT NULL DEFAULT 1)"
    ),
    "a child that inherits": (
        "CREATE TABLE base (id int, body bytea); "
        "CREATE TABLE jobs (lock timestamptz, tries int NOT NULL DEFAULT 1, PRIMARY KEY (id)) INHERITS (base)"
    ),
    "a key without case": (
        "CREATE EXTENSION citext; CREATE TABLE jobs (id citext PRIMARY KEY, body bytea, lock timestamptz, "
        "tries int NOT NULL DEFAULT 1)"
    ),
    "a uuid": (
        "CREATE TABLE jobs (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), body bytea, lock timestamptz, "
        "tries int NOT NULL DEFAULT 1)"
    ),
    "a composite index beside the key": (
        "CREATE TABLE jobs (id int PRIMARY KEY, body bytea, lock timestamptz, tries int NOT NULL DEFAULT 1, "
        "UNIQUE (id, tries), UNIQUE (body, tries))"
    ),
}
"""Each with columns id, body, lock and tries."""


def table(*, leased: bool) -> Table[bytes]:
    return Table("jobs", id="id", payload="body", attempt="tries", locked_until="lock" if leased else None)


@asynccontextmanager
async def serving(
    queue: SqlQueue[Any], handler: Any, policy: Policy = Policy(), concurrency: int = 1
) -> AsyncGenerator[Runtime, None]:
    subscription = Subscription(queue, handler, policy=policy, concurrency=concurrency, name="billing")
    async with open_runtime(subscription) as runtime:
        yield runtime


class Once:
    """A handler that asks for a second try of each."""

    def __init__(self) -> None:
        self.calls: list[tuple[bytes, int]] = []

    async def __call__(self, delivery: Delivery[bytes]) -> Outcome:
        self.calls.append((delivery.body, delivery.attempt))
        return Retry() if delivery.attempt == 1 else Ack()


@FORMS
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_table_of_another_shape(shape: str, leased: bool, database: str) -> None:
    """Through the runtime: each row is handled twice, and is gone; its neighbour in no queue of ours is untouched."""
    tables = PostgresTables(database)
    for statement in SHAPES[shape].split("; "):
        tables.run(statement)
    key = "gen_random_uuid()" if shape == "a uuid" else "n"
    tables.run(f"INSERT INTO jobs (id, body) SELECT {key}, ('b' || n)::bytea FROM generate_series(1, 4) n")  # noqa: S608
    handler = Once()
    queue = tables.broker(0.05).queue(table(leased=leased))
    async with serving(queue, handler) as runtime:
        await until(lambda: runtime.ledger("billing").acked == 4, 30)
    assert sorted(handler.calls) == [(b"b%d" % number, attempt) for number in range(1, 5) for attempt in (1, 2)]
    assert tables.run("SELECT count(*) FROM jobs") == [(0,)]


@FORMS
async def test_a_deferred_trigger_that_fails_at_commit(leased: bool, database: str) -> None:
    """DESIGN 3.8: the settlement is not done, and not booked; mended, the row is settled."""
    tables = PostgresTables(database, leased=leased).create()
    tables.run("CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not today'; END $$")
    tables.run(
        "CREATE CONSTRAINT TRIGGER no AFTER DELETE ON jobs DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW WHEN (OLD.payload = 'bad') EXECUTE FUNCTION no()"
    )
    tables.add(b"bad", b"good")
    seen: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        seen.append(delivery.body)

    queue = tables.broker(0.05).queue(tables.table())
    async with serving(queue, handler, concurrency=2) as runtime:
        await until(lambda: runtime.ledger("billing").acked == 1 and b"bad" in seen, 20)
        assert [row["payload"] for row in tables.rows()] == [b"bad"]
        await trio.to_thread.run_sync(tables.run, "DROP TRIGGER no ON jobs")
        await until(lambda: runtime.ledger("billing").acked == 2, 30)
    assert tables.rows() == []
    assert runtime.ledger("billing").balanced
    assert seen.count(b"bad") == 1 or not leased


@FORMS
async def test_a_column_that_is_added_while_rows_are_in_hand(leased: bool, database: str) -> None:
    """NOT NULL with a default: what is in hand is settled, what comes later too, and the dead letter has it."""
    tables = PostgresTables(database, leased=leased).create()
    tables.add(b"before")
    gate, seen = trio.Event(), []

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        seen.append(delivery.body)
        await gate.wait()
        return Retry()

    policy = Policy(max_attempts=1, dead_letter="dead")
    queue = tables.broker(0.05).queue(tables.table())
    async with serving(queue, handler, policy) as runtime:
        await until(lambda: seen)
        adding = [f"ALTER TABLE {name} ADD COLUMN region text NOT NULL DEFAULT 'north'" for name in ("jobs", "dead")]
        async with trio.open_nursery() as nursery:  # a row lock lets nobody alter its table
            for statement in adding:
                nursery.start_soon(trio.to_thread.run_sync, tables.run, statement)
            if leased:
                await until(lambda: "region" in tables.row())
            else:
                await until(lambda: tables.run("SELECT count(*) FROM pg_locks WHERE NOT granted") == [(1,)])
            gate.set()
        tables.add_to("jobs", payload=b"after", region="south")
        await until(lambda: runtime.ledger("billing").dead_lettered == 2, 30)
    assert {(row["payload"], row["region"]) for row in tables.rows("dead")} == {
        (b"before", "north"),
        (b"after", "south"),
    }


@pytest.fixture
def role(postgres: str, database: str) -> Generator[str, None, None]:
    """The name of a user without any right."""
    name, server = f"u_{database.rpartition('_')[2]}", PostgresTables(postgres)
    server.run(f"CREATE ROLE {name} LOGIN")
    yield name
    PostgresTables(database).run(f"DROP OWNED BY {name}")
    server.run(f"DROP ROLE {name}")


@FORMS
@pytest.mark.parametrize("right", ["SELECT", "UPDATE", "DELETE"])
async def test_a_right_that_is_revoked_while_it_runs(
    right: str, leased: bool, database: str, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost or booked that was not done; the server's words are told; granted again, all is handled."""
    tables = PostgresTables(database, leased=leased).create()
    tables.run(f"GRANT SELECT, INSERT, UPDATE, DELETE ON jobs TO {role}")
    mine = PostgresTables(database.replace("postgres@", f"{role}@"), leased=leased)
    seen: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        seen.append(delivery.body)

    async with serving(mine.broker(0.05).queue(mine.table()), handler) as runtime:
        tables.add(b"a")
        await until(lambda: runtime.ledger("billing").acked == 1, 20)
        await trio.to_thread.run_sync(tables.run, f"REVOKE {right} ON jobs FROM {role}")
        tables.add(b"b")
        await until(lambda: "permission denied" in caplog.text, 20)
        assert [row["payload"] for row in tables.rows()] == [b"b"]
        assert runtime.ledger("billing").acked == 1
        await trio.to_thread.run_sync(tables.run, f"GRANT {right} ON jobs TO {role}")
        await until(lambda: runtime.ledger("billing").acked == 2, 40)
    assert {*seen} == {b"a", b"b"}
    assert tables.rows() == []
    assert runtime.ledger("billing").balanced


@FORMS
async def test_a_table_that_is_renamed_and_back(leased: bool, database: str) -> None:
    """Told by its name meanwhile; a row that was in hand is settled when the name is back, or comes again."""
    tables = PostgresTables(database, leased=leased).create()
    tables.add(b"a")
    seen: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        seen.append(delivery.body)

    async with serving(tables.broker(0.05).queue(tables.table()), handler) as runtime:
        await until(lambda: runtime.ledger("billing").acked == 1, 20)
        await trio.to_thread.run_sync(tables.run, "ALTER TABLE jobs RENAME TO other")
        tables.run("INSERT INTO other (payload) VALUES ('b')")
        await until(lambda: "there is no such table" in str(runtime.statistics()["billing"]), 20)
        await trio.to_thread.run_sync(tables.run, "ALTER TABLE other RENAME TO jobs")
        await until(lambda: runtime.ledger("billing").acked == 2, 40)
    assert seen == [b"a", b"b"]
    assert tables.rows() == []


@pytest.mark.parametrize("how", ["SET ROLE {role}", "SET LOCAL ROLE {role}", "SET search_path = ''"])
async def test_a_handler_that_sets_something_on_a_lent_connection(how: str, database: str, role: str) -> None:
    """It is undone, or ends with the transaction: the row's own end is said, and so is the next one's."""
    tables = PostgresTables(database, leased=False).create()
    tables.add(b"a", b"b")
    seen: list[int] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        seen.append(delivery.attempt)
        async with links.sql.transaction(delivery) as connection:
            await connection.execute(how.format(role=role).encode())

    async with serving(tables.broker(0.05).queue(tables.table()), handler) as runtime:
        await until(lambda: runtime.ledger("billing").acked == 2, 20)
    assert tables.rows() == []


@FORMS
async def test_somebody_locks_the_table_for_a_while(leased: bool, database: str) -> None:
    """LOCK TABLE for three seconds, longer than a lease: nothing is lost, nothing handled twice."""
    tables = PostgresTables(database, leased=leased).create()
    tables.add(*[b"%d" % number for number in range(20)])
    seen: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        seen.append(delivery.body)
        await trio.sleep(0.05)

    claim = Lease(20.0) if leased else None
    async with serving(tables.broker(0.05).queue(tables.table(), claim=claim), handler) as runtime:
        await until(lambda: len(seen) >= 3, 20)

        def lock() -> None:
            with psycopg.connect(database) as other:
                other.execute(b"LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE")
                other.execute(b"SELECT pg_sleep(3)")

        await trio.to_thread.run_sync(lock)
        await until(lambda: runtime.ledger("billing").acked == 20, 30)
    assert sorted(seen, key=int) == [b"%d" % number for number in range(20)]


async def test_two_brokers_with_other_roles_for_the_same_columns(database: str) -> None:
    """One counts and the other does not, one leases and the other locks: each keeps off what the other has in hand."""
    tables = PostgresTables(database).create()
    tables.add(*[b"%d" % number for number in range(30)])
    seen: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        seen.append(delivery.body)
        await trio.sleep(0.01)

    counting = SqlBroker(database, poll_interval=0.05).queue(tables.table())
    plain = SqlBroker(database, poll_interval=0.05).queue(
        Table("jobs", id="id", payload="payload", locked_until="locked_until")
    )
    async with serving(counting, handler) as one, serving(plain, handler) as other:
        await until(lambda: one.ledger("billing").acked + other.ledger("billing").acked == 30, 30)
    assert sorted(seen, key=int) == [b"%d" % number for number in range(30)]
    assert tables.rows() == []


async def test_a_parent_with_rows_in_its_children_is_refused(database: str) -> None:
    """INHERITS, as a row lock too: a key of the parent says nothing of its children's rows."""
    tables = PostgresTables(database)
    tables.run("CREATE TABLE jobs (id int PRIMARY KEY, body bytea, tries int NOT NULL DEFAULT 1)")
    tables.run("CREATE TABLE more () INHERITS (jobs)")
    with pytest.raises(LinkRefused, match="'billing'"):
        async with serving(tables.broker().queue(table(leased=False)), Once()):
            raise AssertionError


@pytest.mark.parametrize("claim", [RowLock(), AdvisoryLock("{id}"), Lease(9.0)], ids=["row lock", "advisory", "lease"])
async def test_more_places_than_connections_are_refused(claim: ClaimForm, database: str, role: str) -> None:
    """S-12.6: named with the numbers, at start-up; one less is enough, and a lease needs one for all."""
    leased = isinstance(claim, Lease)
    tables = PostgresTables(database, leased=leased).create()
    tables.run(f"GRANT SELECT, INSERT, UPDATE, DELETE ON jobs TO {role}")
    tables.run(f"ALTER ROLE {role} CONNECTION LIMIT 4")
    tables.add(b"a")
    mine = PostgresTables(database.replace("postgres@", f"{role}@"), leased=leased)

    async def attached(places: int) -> None:
        queue = mine.broker().queue(mine.table(), claim=claim)
        async with queue.broker.connect(), queue.attach("billing", lambda *_: None, 5.0, limit=places) as link:
            with trio.fail_after(10):
                assert len(await link.receive(places)) == 1

    await attached(3)
    if leased:
        await attached(40)
    else:
        with pytest.raises(LinkRefused, match=r"'billing', table 'jobs': each of 4 places .*this user 4 .*lower"):
            await attached(4)
    assert len(tables.rows()) == 1


@pytest.mark.parametrize("which", ["jobs", "dead"])
async def test_a_table_that_a_crash_empties_is_told_of(
    which: str, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """S-12: nothing is lost but by the user's own word: one warning, with the way out."""
    tables = PostgresTables(database).create()
    policy = Policy(max_attempts=2, dead_letter="dead")

    async def attached() -> None:
        queue = tables.broker().queue(tables.table())
        async with queue.broker.connect(), queue.attach("billing", lambda *_: None, 5.0, policy):
            pass

    await attached()
    assert "UNLOGGED" not in caplog.text
    tables.run(f"ALTER TABLE {which} SET UNLOGGED")
    await attached()
    (line,) = [line for line in caplog.messages if "UNLOGGED" in line]
    assert "'billing'" in line
    assert "SET LOGGED" in line
    assert ("'dead'" in line) == (which == "dead")
