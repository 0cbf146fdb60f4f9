"""Issue 8, bad input, in each form on each database, single deliveries and batches: a clear error, rows intact."""

from __future__ import annotations

import datetime as dt
from typing import Any, cast

import psycopg
import pytest
import trio

import links.sql
from links.errors import PublishNotAccepted
from settlement import Ack, Delivery, Letter, Outcome, Policy, Retry, RetryAfter
from tests.links.forms_kit import FORMS, ON_POSTGRES, Place, serving
from tests.links.sqlite_kit import broker_of, until

CAPPED = Policy(max_attempts=2, dead_letter="dead")

sizes = pytest.mark.parametrize("size", [1, 3], ids=["single", "batch"])
forms = pytest.mark.parametrize("form", FORMS)


def place_of(form: str, size: int, request: pytest.FixtureRequest, **shape: Any) -> Place:
    return Place.of(form, size, request, **shape).create()


class Asked:
    """A handler that answers by the message, and remembers what it saw."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[bytes, int]] = []
        self._answers = answers

    async def __call__(self, delivery: Delivery[bytes]) -> Outcome:
        self.calls.append((delivery.body, delivery.attempt))
        answer: Any = self._answers.get(delivery.body.decode(), Ack())
        return cast("Outcome", answer(delivery) if callable(answer) else answer)


@forms
@sizes
@pytest.mark.parametrize("action", ["raise", "ignore"])
async def test_a_row_whose_claim_a_trigger_refuses(
    form: str, size: int, action: str, request: pytest.FixtureRequest
) -> None:
    """S-2.10: the others are handled, it is named and *degraded*, the row is as it was; then it is handled too."""
    place = place_of(form, size, request)
    place.add(b"bad", b"good", b"fine")
    place.refuse(action, "BEFORE UPDATE")
    before = place.rows()[0]
    handler = Asked()
    async with serving(place, handler) as (runtime, books):
        if form.endswith("row lock"):  # its claim writes nothing
            await until(lambda: books().acked == 3, 20)
            return
        await until(lambda: books().acked == 2, 20)
        await until(lambda: "row 1 passed over" in str(runtime.statistics()), 20)
        assert place.rows() == [before]
        await place.alter("DELETE FROM refusing")
        await until(lambda: books().acked == 3, 30)
    assert handler.calls.count((b"bad", 1)) == 1
    assert place.rows() == []


@forms
@sizes
@pytest.mark.parametrize("action", ["raise", "ignore"])
async def test_a_settlement_that_a_trigger_refuses(
    form: str, size: int, action: str, request: pytest.FixtureRequest
) -> None:
    """DESIGN 3.8: it is not booked, the others are; the row is there, and goes when the trigger is gone."""
    place = place_of(form, size, request)
    if place.mysql and action == "ignore":  # there no trigger can
        return
    place.refuse(action, "BEFORE DELETE")
    place.add(b"bad", b"good", b"fine")
    handler = Asked()
    async with serving(place, handler, concurrency=2) as (_, books):
        await until(lambda: books().acked == 2 and place.payloads() == [b"bad"], 20)
        assert books().acked == 2
        await place.alter("DELETE FROM refusing")
        await until(lambda: books().acked == 3, 30)
    assert place.rows() == []
    assert books().balanced
    assert handler.calls.count((b"good", 1)) == handler.calls.count((b"fine", 1)) == 1


@forms
@sizes
async def test_null_in_attempt_and_retry_after(form: str, size: int, request: pytest.FixtureRequest) -> None:
    """DESIGN 6: such a row is due, its first attempt is 1; it is counted from there, and capped."""
    place = place_of(form, size, request)
    if place.postgres:
        for column in ("attempt", "retry_after"):
            place.run(f"ALTER TABLE jobs ALTER {column} DROP NOT NULL")
            place.run(f"ALTER TABLE dead ALTER {column} DROP NOT NULL")
    elif place.mysql:
        for name in ("jobs", "dead"):
            place.run(f"ALTER TABLE {name} MODIFY attempt INT NULL DEFAULT 1, MODIFY retry_after DATETIME(6) NULL")
    else:
        for name in ("jobs", "dead"):
            place.run(f"DROP TABLE {name}")
            place.run(
                f"CREATE TABLE {name} (id INTEGER PRIMARY KEY AUTOINCREMENT, payload BLOB, headers TEXT, lane TEXT, "
                f"retry_after REAL, {'locked_until REAL, ' if place.leased else ''}attempt INTEGER DEFAULT 1)"
            )
    for payload in (b"retried", b"delayed", b"acked"):
        place.run("INSERT INTO jobs (payload, attempt, retry_after) VALUES (?, NULL, NULL)", payload)
    handler = Asked(retried=Retry(), delayed=RetryAfter(0.05))
    async with serving(place, handler, CAPPED) as (_, books):
        await until(lambda: books().acked == 1 and books().dead_lettered == 2, 20)
    assert sorted(handler.calls) == [
        (b"acked", 1), (b"delayed", 1), (b"delayed", 2), (b"retried", 1), (b"retried", 2),
    ]  # fmt: skip
    assert place.rows() == []
    assert {(row["payload"], row["attempt"]) for row in place.rows("dead")} == {
        (b"retried", 2 if "row lock" in form else 3),
        (b"delayed", 2 if "row lock" in form else 3),
    }


@forms
@sizes
async def test_a_table_that_is_dropped_and_made_again(form: str, size: int, request: pytest.FixtureRequest) -> None:
    """The refusal names it; made again, its rows are handled."""
    place = place_of(form, size, request)
    handler = Asked()
    async with serving(place, handler) as (runtime, books):
        place.add(b"before")
        await until(lambda: books().acked == 1, 20)
        await place.alter("DROP TABLE jobs")
        await place.alter("DROP TABLE dead")
        await until(lambda: "'jobs': there is no such table" in str(runtime.statistics()), 20)
        place.create()
        place.add(b"after")
        await until(lambda: books().acked == 2, 40)
    assert [body for body, _ in handler.calls] == [b"before", b"after"]
    assert place.rows() == []


@forms
@sizes
async def test_a_table_that_is_renamed_while_a_row_is_in_hand(
    form: str, size: int, request: pytest.FixtureRequest
) -> None:
    """Nothing is booked that was not done; with its name back all rows are handled. A row lock bars the renaming."""
    place = place_of(form, size, request)
    place.add(b"held")
    gate, seen = trio.Event(), list[bytes]()

    async def handler(delivery: Delivery[bytes]) -> None:
        seen.append(delivery.body)
        await gate.wait()

    async with serving(place, handler) as (runtime, books), trio.open_nursery() as nursery:
        await until(lambda: seen, 10)
        nursery.start_soon(place.alter, "ALTER TABLE jobs RENAME TO other")
        if form == "postgres row lock":
            await until(lambda: place.run("SELECT count(*) FROM pg_locks WHERE NOT granted") == [(1,)])
        elif form.endswith("row lock"):
            waits = "SELECT count(*) FROM information_schema.PROCESSLIST WHERE STATE LIKE 'Waiting for table metadata%'"
            await until(lambda: place.run(waits) == [(1,)])
        else:
            await until(lambda: there(place, "other"), 10)
        gate.set()
        await until(lambda: there(place, "other"), 20)
        await until(lambda: "no such table" in str(runtime.statistics()), 20)
        acked = books().acked
        assert place.run("SELECT count(*) FROM other") == [(1 - acked,)]
        await place.alter("ALTER TABLE other RENAME TO jobs")
        place.add(b"later")
        await until(lambda: books().acked == 2, 40)
    assert place.rows() == []
    assert books().balanced


def there(place: Place, table: str) -> bool:
    if place.postgres:
        return place.run("SELECT to_regclass(?) IS NOT NULL", table) == [(True,)]
    if place.mysql:
        return place.run(f"SHOW TABLES LIKE '{table}'") == [(table,)]  # it waits for no table, and we block the loop
    return place.run("SELECT count(*) FROM sqlite_master WHERE name = ?", table) == [(1,)]


@forms
async def test_a_table_that_is_dropped_under_a_publisher(form: str, request: pytest.FixtureRequest) -> None:
    """It is not accepted, and named; made again it is."""
    place = place_of(form, 1, request)
    broker, table = place.broker(), place.table()
    async with broker.connect():
        publisher = broker.publisher(table)
        await publisher.publish(b"a")
        await publisher.publish_many([b"b", b"c"])
        await place.alter("DROP TABLE jobs")
        await place.alter("DROP TABLE dead")
        for publish in (publisher.publish(b"d"), publisher.publish_many([b"e", b"f"]), publisher.publish_once(9, b"g")):
            with pytest.raises(PublishNotAccepted, match="'jobs'"):
                await publish
        place.create()
        await publisher.publish(b"h")
        await publisher.publish_many([b"i", b"j"])
        await place.alter("ALTER TABLE jobs RENAME TO other")
        with pytest.raises(PublishNotAccepted, match="'jobs'"):
            await publisher.publish(b"k")
        await place.alter("ALTER TABLE other RENAME TO jobs")
        await publisher.publish(b"l")
    assert place.payloads() == [b"h", b"i", b"j", b"l"]


@forms
@sizes
async def test_a_dead_letter_whose_id_is_taken(
    form: str, size: int, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """DESIGN 6: the database gives another one, and the log says both; nothing is lost."""
    place = place_of(form, size, request)
    place.add(b"bad", b"good")
    place.run("INSERT INTO dead (id, payload) VALUES (1, ?)", b"older")
    handler = Asked(bad=Retry())
    async with serving(place, handler, Policy(max_attempts=1, dead_letter="dead")) as (_, books):
        await until(lambda: books().acked == 1 and books().dead_lettered == 1, 20)
    assert sorted(place.payloads("dead")) == [b"bad", b"older"]
    assert place.rows() == []
    assert "row 1 is row 2 of the dead-letter table 'dead'" in caplog.text


@pytest.mark.parametrize("form", [each for each in FORMS if each.id != "sqlite advisory"])
async def test_a_dead_letter_whose_id_is_taken_behind_a_handlers_writes(
    form: str, request: pytest.FixtureRequest
) -> None:
    """S-8.2: what it wrote is undone, and the row moves under another id."""
    place = place_of(form, 1, request)
    place.add(b"bad")
    place.run("INSERT INTO dead (id, payload) VALUES (1, ?)", b"older")
    place.run("CREATE TABLE notes (what int)")

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        async with links.sql.transaction(delivery) as connection:
            await connection.execute("INSERT INTO notes VALUES (1)")
        return Retry()

    async with serving(place, handler, Policy(max_attempts=1, dead_letter="dead")) as (_, books):
        await until(lambda: books().dead_lettered == 1, 20)
    assert place.run("SELECT count(*) FROM notes") == [(0,)]
    assert sorted(place.payloads("dead")) == [b"bad", b"older"]
    assert place.rows() == []


@forms
@sizes
async def test_priorities_that_are_null(form: str, size: int, request: pytest.FixtureRequest, caplog: Any) -> None:
    """DESIGN 6: a nullable column does not order, and that is told; no row is left behind."""
    place = place_of(form, size, request)
    place.run("ALTER TABLE jobs ADD COLUMN level int")
    for payload, level in ((b"a", 2), (b"b", None), (b"c", 1), (b"d", None)):
        place.run("INSERT INTO jobs (payload, level) VALUES (?, ?)", payload, level)
    handler = Asked(b=lambda each: Retry() if each.attempt == 1 else Ack())
    queue = place.queue(place.table(priority="level"))
    async with serving(place, handler, queue=queue) as (_, books):
        await until(lambda: books().acked == 4, 20)
    assert sorted(handler.calls) == [(b"a", 1), (b"b", 1), (b"b", 2), (b"c", 1), (b"d", 1)]
    assert place.rows() == []
    assert "'level'" in caplog.text


@pytest.mark.parametrize("form", [FORMS[2], *FORMS[3:]])  # the first two: tests/links/test_postgres_limits.py
async def test_fifty_megabytes(form: str, request: pytest.FixtureRequest) -> None:
    """Whole, through the runtime: published, handled twice and moved, beside small ones.

    On MySQL and MariaDB as much as their max_allowed_packet holds, which in a statement takes two digits for a byte.
    """
    place = place_of(form, 1, request)
    body = bytes(range(256)) * ((7 if place.mysql else 50) * 4096)
    whole: list[bool] = []

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        if len(delivery.body) < 10:
            return Ack()
        whole.append(delivery.body == body)
        return Retry()

    queue = place.queue()
    async with serving(place, handler, CAPPED, queue) as (_, books):
        publisher = broker_of(queue).publisher(place.table())
        with trio.fail_after(60):
            await publisher.publish_many([b"small", body, b"small too"])
        await until(lambda: books().dead_lettered == 1 and books().acked == 2, 60)
    assert (whole, place.rows()) == ([True, True], [])
    assert place.payloads("dead") == [body]


@pytest.mark.parametrize("form", ON_POSTGRES)
@sizes
async def test_ids_that_are_generated_always(form: str, size: int, request: pytest.FixtureRequest) -> None:
    """Published without one, retried, and moved with it."""
    place = place_of(form, size, request)
    for name in ("jobs", "dead"):
        place.run(f"ALTER TABLE {name} ALTER id SET GENERATED ALWAYS")
    handler = Asked(bad=Retry(), slow=lambda each: RetryAfter(0.05) if each.attempt == 1 else Ack())
    queue = place.queue()
    async with serving(place, handler, CAPPED, queue) as (_, books):
        publisher = broker_of(queue).publisher(place.table())
        await publisher.publish(b"bad")
        await publisher.publish_many([b"slow", b"good"])
        assert await publisher.publish_once(1000, b"own")
        await until(lambda: books().acked == 3 and books().dead_lettered == 1, 20)
    assert [(row["id"], row["payload"]) for row in place.rows("dead")] == [(1, b"bad")]
    assert place.rows() == []


@forms
@sizes
async def test_a_deferred_constraint_that_fails_at_commit(form: str, size: int, request: pytest.FixtureRequest) -> None:
    """S-6.2: it is not booked; the constraint mended, every row is settled."""
    place = place_of(form, size, request)
    place.add(b"bad", b"good")
    if place.mysql:  # no constraint there can wait for COMMIT
        return
    place.run("CREATE TABLE notes (job bigint REFERENCES jobs (id) DEFERRABLE INITIALLY DEFERRED)")
    place.run("INSERT INTO notes VALUES (1)")
    handler = Asked()
    async with serving(place, handler, concurrency=2) as (_, books):
        if not place.postgres:  # it does not enforce foreign keys unless it is told
            await until(lambda: books().acked == 2, 20)
            return
        await until(lambda: place.payloads() == [b"bad"] and books().acked == 1, 20)
        await place.alter("DELETE FROM notes")
        await until(lambda: books().acked == 2, 30)
    assert place.rows() == []
    assert books().balanced


@forms
async def test_a_due_time_without_its_column(form: str, request: pytest.FixtureRequest) -> None:
    """Not accepted, named, with nothing written: one, of many, and once."""
    place = place_of(form, 1, request)
    broker = place.broker()
    due = dt.datetime(2031, 1, 1, tzinfo=dt.UTC)
    async with broker.connect():
        publisher = broker.publisher(place.table(retry_after=None))
        for publish in (
            publisher.publish(b"a", due=due),
            publisher.publish(b"a", delay=1.0),
            publisher.publish_once(1, b"a", due=due),
            publisher.publish_many([b"a", Letter(b"b", deliver_after=1.0)]),
        ):
            with pytest.raises(PublishNotAccepted, match="a delay"):
                await publish
    assert place.rows() == []


def limited(place: Place, setting: str) -> None:
    """For every session that begins from now on."""
    place.run(f'ALTER DATABASE "{place.broker_url.rpartition("/")[2]}" SET {setting}')


@pytest.mark.parametrize("form", ON_POSTGRES)
@sizes
async def test_a_statement_timeout_that_ends_a_claim(
    form: str, size: int, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """S-2.10: told with the server's words and the subscription's name; when there is time again all are handled."""
    place = place_of(form, size, request)
    limited(place, "statement_timeout = '300ms'")
    handler = Asked()
    async with serving(place, handler) as (_, books):
        with psycopg.connect(place.broker_url) as other:
            other.execute(b"LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE")
            other.execute(b"INSERT INTO jobs (payload) VALUES ('a'), ('b')")
            await until(lambda: "due to statement timeout" in caplog.text, 20)
            assert "billing" in caplog.text
            other.commit()
        await until(lambda: books().acked == 2, 40)
    assert sorted(handler.calls) == [(b"a", 1), (b"b", 1)]
    assert place.rows() == []


@pytest.mark.parametrize("form", ON_POSTGRES)
@sizes
async def test_a_statement_timeout_that_ends_a_settlement(
    form: str, size: int, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """DESIGN 3.8: what a lock is in the way of is not booked; its neighbour is, and when the lock is gone it is too."""
    place = place_of(form, size, request)
    place.run("CREATE TABLE notes (job bigint REFERENCES jobs)")
    place.add(b"bad", b"good")
    limited(place, "statement_timeout = '300ms'")
    handler = Asked()
    with psycopg.connect(place.broker_url) as other:
        other.execute(b"INSERT INTO notes VALUES (1)")
        async with serving(place, handler, concurrency=2) as (_, books):
            await until(lambda: place.payloads() == [b"bad"] and books().acked == 1, 20)
            await until(
                lambda: "statement timeout" in caplog.text or "another transaction has locked" in caplog.text, 20
            )
            other.rollback()
            await until(lambda: books().acked == 2, 30)
    assert handler.calls.count((b"good", 1)) == 1
    assert handler.calls.count((b"bad", 1)) == 1
    assert place.rows() == []
    assert books().balanced


@pytest.mark.parametrize("form", ON_POSTGRES)
async def test_a_handlers_transaction_that_is_idle_too_long(form: str, request: pytest.FixtureRequest) -> None:
    """idle_in_transaction_session_timeout: nothing of it stands, its `Ack` is not booked, and the row comes again."""
    place = place_of(form, 1, request)
    place.add(b"a")
    place.run("CREATE TABLE notes (attempt int)")
    limited(place, "idle_in_transaction_session_timeout = '300ms'")
    calls: list[int] = []
    ours = "FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'"

    async def handler(delivery: Delivery[bytes]) -> None:
        calls.append(delivery.attempt)
        async with links.sql.transaction(delivery) as connection:
            await connection.execute("INSERT INTO notes VALUES (%s)", [len(calls)])
            if len(calls) == 1:
                await until(lambda: place.run(f"SELECT count(*) {ours}") == [(0,)], 20)

    async with serving(place, handler) as (_, books):
        await until(lambda: books().acked == 1 and books().in_hand == 0, 40)
        assert books().superseded + books().unsettled == 1
    assert place.run("SELECT attempt FROM notes") == [(2,)]
    assert place.rows() == []
    assert len(calls) == 2
