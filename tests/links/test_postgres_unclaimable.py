"""Rows that a user's constraint, index, trigger or lock does not let be claimed or settled: the others go on."""

from __future__ import annotations

import logging
from typing import Any

import psycopg
import pytest
import trio

from actors import Subscription, open_runtime
from links.errors import LeaseLost, NotApplied, PublishNotAccepted
from links.sql import Lease, Table
from links.sql.postgres.trio_connection import TrioConnection
from settlement import Ack, Delivery, Outcome, Policy, Retry
from settlement.delivery import Letter
from settlement.sql import Delay, Finish, MoveToTable, PutBack, Verb
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import bodies, broker_of, finish, open_link, say, until

pytestmark = [pytest.mark.postgres, pytest.mark.servers]

REFUSALS = {
    "check": "CHECK",
    "index": "INDEX",
    "raise": "BEFORE UPDATE: RAISE EXCEPTION 'not this one'",
    "raise after": "AFTER UPDATE: RAISE EXCEPTION 'not this one'",
    "bug": "BEFORE UPDATE: NEW.nothing = 1",
    "no right": "BEFORE UPDATE: RAISE insufficient_privilege",
    "null": "BEFORE UPDATE: RETURN NULL",
    "old": "BEFORE UPDATE: RETURN OLD",
    "taken back": "AFTER UPDATE: UPDATE jobs SET locked_until = NULL WHERE id = OLD.id AND locked_until IS NOT NULL",
    "over": "BEFORE UPDATE: NEW.locked_until = '1970-01-01'",
}
"""Each refuses the row `bad`."""


def trigger(tables: PostgresTables, event: str, body: str, table: str = "jobs", when: str = "") -> None:
    """One that does this for the rows `bad`; `event`: such as BEFORE UPDATE."""
    row = "OLD" if "INSERT" not in event else "NEW"
    end = "RETURN OLD;" if "DELETE" in event else "RETURN NEW;"
    tables.run(
        f"CREATE OR REPLACE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF {row}.payload = 'bad' THEN {body}; END IF; {end} END $$"
    )
    tables.run(f"CREATE TRIGGER no {event} ON {table} FOR EACH ROW {when} EXECUTE FUNCTION no()")


def refuse(tables: PostgresTables, kind: str) -> None:
    if kind == "check":
        tables.run("ALTER TABLE jobs ADD CONSTRAINT no CHECK (payload <> 'bad' OR locked_until IS NULL)")
    elif kind == "index":
        tables.run("UPDATE jobs SET lane = CASE WHEN payload = 'bad' THEN '1' ELSE id::text END")
        tables.run("CREATE UNIQUE INDEX no ON jobs (lane) WHERE locked_until IS NOT NULL")
    else:
        event, _, body = REFUSALS[kind].partition(": ")
        trigger(tables, event, body)


def allow(tables: PostgresTables, kind: str) -> None:
    match kind:
        case "check":
            tables.run("ALTER TABLE jobs DROP CONSTRAINT no")
        case "index":
            tables.run("DROP INDEX no")
        case _:
            tables.run("DROP TRIGGER no ON jobs")


class Told:
    """What a link says is degraded."""

    def __init__(self) -> None:
        self.lines: list[str | None] = []

    def __call__(self, _: str, why: str | None) -> None:
        self.lines.append(why)


@pytest.mark.parametrize("kind", REFUSALS)
async def test_the_others_are_claimed(kind: str, database: str, caplog: pytest.LogCaptureFixture) -> None:
    """DESIGN 6: the claim goes on behind a row that it cannot have; that row is named, and comes when it can."""
    tables = PostgresTables(database).create()
    tables.add(b"good", b"bad", b"also good")
    refuse(tables, kind)
    told = Told()
    async with open_link(tables.broker().queue(tables.table())) as link:
        link.degraded = told
        with trio.fail_after(5):
            received = [*await link.receive(2)]
        assert bodies(received) == [b"good", b"also good"]
        assert "row 2" in (told.lines[-1] or "")
        assert [line for line in caplog.messages if "row 2 of table 'jobs' cannot" in line]
        assert await link.settle(finish(received)) == [None, None]
        allow(tables, kind)
        with trio.fail_after(5):
            (bad,) = await link.receive(2)
        assert bad.delivery.body == b"bad"
        assert await link.settle(finish([bad])) == [None]
        assert told.lines[-1] is None


async def test_a_held_row_keeps_the_others_of_its_index_back_alone(database: str) -> None:
    """Unique over held rows, one at a time for each lane: the second of a lane comes when the first has gone."""
    tables = PostgresTables(database).create()
    tables.run("INSERT INTO jobs (payload, lane) VALUES ('a1', 'a'), ('a2', 'a'), ('b1', 'b'), ('a3', 'a')")
    tables.run("CREATE UNIQUE INDEX one ON jobs (lane) WHERE locked_until IS NOT NULL")
    async with open_link(tables.broker().queue(tables.table())) as link:
        first = [*await link.receive(4)]
        assert bodies(first) == [b"a1", b"b1"]
        assert await link.settle(finish(first)) == [None, None]
        with trio.fail_after(5):
            assert bodies(await link.receive(4)) == [b"a2"]


async def test_many_are_passed_without_a_hot_loop(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """600 in front of a good one: it is reached, none of them is forgotten or tried more than once a second."""
    tables = PostgresTables(database).create()
    tables.run("INSERT INTO jobs (payload) SELECT 'bad' FROM generate_series(1, 600)")
    tables.add(b"good")
    refuse(tables, "raise")
    statements = 0
    execute = TrioConnection.execute

    async def counted(connection: TrioConnection, *arguments: Any, **options: Any) -> Any:
        nonlocal statements
        statements += 1
        return await execute(connection, *arguments, **options)

    monkeypatch.setattr(TrioConnection, "execute", counted)
    async with open_link(tables.broker(poll_interval=3600.0).queue(tables.table())) as link:
        with trio.fail_after(30):
            (good,) = await link.receive(4)
        assert good.delivery.body == b"good"
        assert statements < 1500
        begun, before = trio.current_time(), statements
        with trio.move_on_after(0.5):
            await link.receive(4)
        assert statements - before < 700 * (1 + trio.current_time() - begun)
        allow(tables, "raise")
        found = 0
        with trio.fail_after(60):
            while found < 600:
                received = await link.receive(500)
                found += len(received)
                await link.settle(finish(received))
    assert [row["payload"] for row in tables.rows()] == [b"good"]


async def test_a_runtime_goes_on(database: str, caplog: pytest.LogCaptureFixture) -> None:
    """One row beyond its CHECK neither ends the runtime nor keeps the others waiting."""
    tables = PostgresTables(database).create()
    tables.add(b"bad", *[b"good"] * 5)
    refuse(tables, "check")
    done: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> Ack:
        done.append(delivery.body)
        return Ack()

    with caplog.at_level(logging.INFO):
        queue = tables.broker().queue(tables.table(), claim=Lease(30.0))
        async with open_runtime(Subscription(queue, handler, concurrency=2)):
            await until(lambda: len(done) == 5)
            allow(tables, "check")
            await until(lambda: len(done) == 6)
    assert any("is degraded: to claim each row: table 'jobs': row 1 passed over" in line for line in caplog.messages)
    assert any("to claim each row works again" in line for line in caplog.messages)


# --- settled


UNSETTLED: dict[str, tuple[Verb, str]] = {
    "finish raises": (Finish(), "BEFORE DELETE: RAISE EXCEPTION 'not this one'"),
    "finish null": (Finish(), "BEFORE DELETE: RETURN NULL"),
    "mark raises": (Finish(), "BEFORE UPDATE: RAISE EXCEPTION 'not this one'"),
    "mark null": (Finish(), "BEFORE UPDATE: RETURN NULL"),
    "mark old": (Finish(), "BEFORE UPDATE: RETURN OLD"),
    "release raises": (PutBack(count=True), "BEFORE UPDATE: RAISE EXCEPTION 'not this one'"),
    "release null": (PutBack(count=True), "BEFORE UPDATE: RETURN NULL"),
    "release old": (PutBack(count=True), "BEFORE UPDATE: RETURN OLD"),
    "delay old": (Delay(9.0, count=True), "BEFORE UPDATE: RETURN OLD"),
    "move raises": (MoveToTable("dead"), "BEFORE DELETE: RAISE EXCEPTION 'not this one'"),
    "move null": (MoveToTable("dead"), "BEFORE DELETE: RETURN NULL"),
}


@pytest.mark.parametrize("kind", UNSETTLED)
async def test_what_a_trigger_does_not_let_be_settled_is_not_applied(kind: str, database: str) -> None:
    """Neither booked nor called lost; the others of the same call are settled, and later it is said again."""
    verb, what = UNSETTLED[kind]
    marks = kind.startswith("mark")
    tables = PostgresTables(database, marks=marks).create()
    tables.add(b"good", b"bad", b"also good")
    event, _, body = what.partition(": ")
    async with open_link(tables.broker().queue(tables.table())) as link:
        received = await link.receive(3)
        trigger(tables, event, body)
        before = [row for row in tables.rows() if row["payload"] == b"bad"]
        verdicts = await link.settle([say(each, verb) for each in received])
        assert [type(each) for each in verdicts] == [type(None), NotApplied, type(None)]
        assert [row for row in tables.rows() if row["payload"] == b"bad"] == before
        assert len([row for row in tables.rows("dead") if row["payload"] == b"bad"]) == 0
        tables.run("DROP TRIGGER no ON jobs")
        assert await link.settle([say(received[1], verb)]) == [None]


async def test_a_mark_that_a_trigger_undoes_is_not_booked(database: str) -> None:
    """The row is free and not finished, so it is not ours any more, and comes back."""
    tables = PostgresTables(database, marks=True).create()
    tables.add(b"good", b"bad")
    async with open_link(tables.broker().queue(tables.table())) as link:
        received = await link.receive(2)
        trigger(tables, "BEFORE UPDATE", "NEW.processed_at = NULL")
        first, second = await link.settle(finish(received))
        assert (first, type(second)) == (None, LeaseLost)
        with trio.fail_after(5):
            (again,) = await link.receive(2)
        assert (again.delivery.body, again.delivery.attempt) == (b"bad", 2)


@pytest.mark.parametrize("seconds", [1e11, 1e13, 1e300])
async def test_a_delay_beyond_all_time_is_said(seconds: float, database: str) -> None:
    """The row is free, and not due in anybody's life; else it would be held and said again for ever."""
    tables = PostgresTables(database).create()
    tables.add(b"a")
    async with open_link(tables.broker().queue(tables.table())) as link:
        received = await link.receive(1)
        assert await link.settle([say(received[0], Delay(seconds, count=True))]) == [None]
    assert tables.run("SELECT locked_until IS NULL, retry_after > now() + interval '1000 years' FROM jobs") == [
        (True, True)
    ]


async def test_a_check_that_a_mark_fails_is_not_applied(database: str) -> None:
    """The row's own fault, and no other one's."""
    tables = PostgresTables(database, marks=True).create()
    tables.add(b"good", b"bad")
    tables.run("ALTER TABLE jobs ADD CHECK (payload <> 'bad' OR processed_at IS NULL)")
    async with open_link(tables.broker().queue(tables.table())) as link:
        received = await link.receive(2)
        first, second = await link.settle(finish(received))
        assert (first, type(second)) == (None, NotApplied)
        assert "violates check constraint" in str(second)


@pytest.mark.parametrize("what", ["RAISE EXCEPTION 'not this one'", "RETURN NULL", "RETURN OLD"])
async def test_a_lease_that_is_not_extended_harms_no_other(what: str, database: str) -> None:
    """The others are extended; where the lease stands as it stood, the row is not called lost."""
    tables = PostgresTables(database).create()
    tables.add(b"good", b"bad", b"also good")
    async with open_link(tables.broker().queue(tables.table())) as link:
        received = await link.receive(3)
        before = {row["payload"]: row["locked_until"] for row in tables.rows()}
        trigger(tables, "BEFORE UPDATE", what)
        assert await link.extend(received) == []
        after = {row["payload"]: row["locked_until"] for row in tables.rows()}
        assert [after[body] > before[body] for body in (b"good", b"bad", b"also good")] == [True, False, True]
        tables.run("DROP TRIGGER no ON jobs")
        assert await link.settle(finish(received)) == [None] * 3


async def test_a_lease_that_a_trigger_takes_away_is_lost(database: str) -> None:
    """With the extension: the row is free, so its handler is told."""
    tables = PostgresTables(database).create()
    tables.add(b"good", b"bad")
    async with open_link(tables.broker().queue(tables.table())) as link:
        received = await link.receive(2)
        trigger(tables, "BEFORE UPDATE", "NEW.locked_until = NULL")
        assert bodies(await link.extend(received)) == [b"bad"]


# --- locked by somebody else


async def test_a_locked_row_is_skipped_by_a_claim_and_never_called_lost(database: str) -> None:
    """Behind it the claim goes on; a verb for a row that is locked is said again, its extension too."""
    tables = PostgresTables(database).create()
    tables.add(b"a", b"b", b"c")
    async with open_link(tables.broker().queue(tables.table())) as link:
        (first,) = await link.receive(1)
        with psycopg.connect(database) as connection:
            connection.execute("SELECT FROM jobs WHERE payload IN ('a', 'b') FOR UPDATE")
            (third,) = await link.receive(2)
            assert third.delivery.body == b"c"
            assert await link.extend([first, third]) == []
            verdicts = await link.settle(finish([first, third]))
            assert [type(each) for each in verdicts] == [NotApplied, type(None)]
            assert "another transaction has locked the row" in str(verdicts[0])
        assert await link.settle(finish([first])) == [None]
        with trio.fail_after(5):
            assert bodies(await link.receive(2)) == [b"b"]


async def test_a_row_that_is_changed_elsewhere_while_locked_is_settled(database: str) -> None:
    """Through the runtime: somebody edits a row amid its handler; the verb is said when that one has ended."""
    tables = PostgresTables(database).create()
    tables.add(b"a")
    connection = psycopg.connect(database)
    calls: list[int] = []

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        calls.append(delivery.attempt)
        connection.execute("UPDATE jobs SET lane = 'edited'")
        return Ack()

    with connection:
        queue = tables.broker().queue(tables.table())
        async with open_runtime(Subscription(queue, handler, name="billing")) as runtime:
            await until(lambda: calls)
            await trio.testing.wait_all_tasks_blocked(0.2)
            assert runtime.ledger("billing").acked == 0
            connection.commit()
            await until(lambda: runtime.ledger("billing").acked == 1, within=10)
    assert (calls, tables.rows()) == ([1], [])


async def test_a_row_that_somebody_deletes_while_it_is_locked_is_lost(database: str) -> None:
    """Not applied while nobody knows, lost when it is gone."""
    tables = PostgresTables(database).create()
    tables.add(b"a")
    async with open_link(tables.broker().queue(tables.table())) as link:
        received = await link.receive(1)
        with psycopg.connect(database) as connection:
            connection.execute("DELETE FROM jobs")
            (verdict,) = await link.settle(finish(received))
            assert isinstance(verdict, NotApplied)
        (verdict,) = await link.settle(finish(received))
        assert isinstance(verdict, LeaseLost)


# --- published


LETTERS: dict[str, Any] = {
    "no UTF-8 in a text": b"\xff",
    "a NUL in a text": b"a\x00b",
    "a NUL in a header": Letter(b"x", {"a": b"\x00"}),
    "a NUL in a header's name": Letter(b"x", {"a\x00": b"b"}),
    "a NUL in a key": Letter(b"x", key="a\x00"),
    "a lone surrogate in a key": Letter(b"x", key="\ud800"),
    "a CHECK": b"bad",
}


@pytest.mark.parametrize("kind", LETTERS)
async def test_a_letter_that_the_table_cannot_hold_is_not_accepted(kind: str, database: str) -> None:
    """Alone it says why; among others it is named, and nothing is written; the next ones are."""
    tables = PostgresTables(database)
    tables.run(
        "CREATE TABLE jobs (id serial PRIMARY KEY, payload text CHECK (payload <> 'bad'), headers jsonb, lane text, "
        "retry_after timestamptz NOT NULL DEFAULT now(), locked_until timestamptz, attempt int NOT NULL DEFAULT 1)"
    )
    broker = tables.broker()
    async with broker.connect():
        publisher = broker.publisher(tables.table())
        for _ in range(2):
            with pytest.raises(PublishNotAccepted):
                await publisher.publish_many([LETTERS[kind]])
            with pytest.raises(PublishNotAccepted, match="letter 3 of 4"):
                await publisher.publish_many([b"a", b"b", LETTERS[kind], b"c"])
        assert tables.rows() == []
        await publisher.publish_many([b"d", b"e"])
    assert [row["payload"] for row in tables.rows()] == ["d", "e"]


async def test_a_delay_beyond_all_time_is_cut(database: str) -> None:
    """As a `RetryAfter` is: a timestamptz ends in the year 294276, and 1e15 s are 30 million years."""
    tables = PostgresTables(database).create()
    broker = tables.broker()
    async with broker.connect():
        await broker.publisher(tables.table()).send(Letter(b"x", deliver_after=1e15))
    ((years,),) = tables.run("SELECT extract(year FROM retry_after)::int - extract(year FROM now())::int FROM jobs")
    assert 3000 < years < 3500


async def test_bytes_are_not_written_into_a_text(database: str) -> None:
    """As PostgreSQL would cast them, to their digits: another message, also in row mode and as an id."""
    tables = PostgresTables(database)
    tables.run("CREATE TABLE jobs (id text PRIMARY KEY, body text, lock timestamptz)")
    broker = tables.broker()
    async with broker.connect():
        whole = broker.publisher(Table("jobs", id="id", locked_until="lock"))
        with pytest.raises(PublishNotAccepted, match="column 'body' is text, and the value is no UTF-8"):
            await whole.publish(b'{"id": "1", "body": {"base64": "/w=="}}')
        plain = broker.publisher(Table("jobs", id="id", payload="body", locked_until="lock"))
        with pytest.raises(PublishNotAccepted, match="column 'id' is text"):
            await plain.publish_once(b"1", b"x")
    assert tables.rows() == []


async def test_what_a_trigger_writes_elsewhere_is_not_half_accepted(database: str) -> None:
    """A trigger that sends the row to another table and returns NULL: not accepted, so it is nowhere."""
    tables = PostgresTables(database).create()
    tables.run("CREATE TABLE elsewhere (LIKE jobs)")
    trigger(tables, "BEFORE INSERT", "INSERT INTO elsewhere SELECT NEW.*; RETURN NULL")
    broker = tables.broker()
    async with broker.connect():
        publisher = broker.publisher(tables.table())
        with pytest.raises(PublishNotAccepted, match="a trigger has ignored it"):
            await publisher.publish(b"bad")
        with pytest.raises(PublishNotAccepted, match="letter 2 of 2"):
            await publisher.publish_many([b"good", b"bad"])
    assert (tables.rows(), tables.rows("elsewhere")) == ([], [])


async def test_a_large_payload_comes_whole(database: str) -> None:
    """50 MB: published, claimed, extended and moved, while other tasks have their turns."""
    tables = PostgresTables(database).create()
    body = bytes(range(256)) * (50 * 4096)
    queue = tables.broker().queue(tables.table())
    async with open_link(queue) as link:
        await broker_of(queue).publisher(tables.table()).publish(body)
        with trio.fail_after(60):
            (received,) = await link.receive(1)
        assert received.delivery.body == body
        assert await link.extend([received]) == []
        assert await link.settle([say(received, MoveToTable("dead"))]) == [None]
    assert tables.run("SELECT length(payload) FROM dead") == [(len(body),)]


async def test_ten_thousand_rows_without_an_index(database: str, caplog: pytest.LogCaptureFixture) -> None:
    """One warning names the index to create; that one is walked along, so there is none the next time."""
    tables = PostgresTables(database).create()
    tables.run("DROP INDEX jobs_due")
    tables.run("INSERT INTO jobs (payload) SELECT n::text::bytea FROM generate_series(1, 10000) n")
    async with open_link(tables.broker().queue(tables.table())) as link:
        received = await link.receive(100)
        assert bodies(received) == [str(n).encode() for n in range(1, 101)]
        assert await link.settle(finish(received)) == [None] * 100
    (line,) = [each for each in caplog.messages if "create the index" in each]
    assert line.startswith("subscription 'test', table 'jobs': a claim reads and sorts every row that is due")
    tables.run(line.partition("create the index: ")[2])
    caplog.clear()
    async with open_link(tables.broker().queue(tables.table())):
        assert not [each for each in caplog.messages if "index" in each]


async def test_a_table_without_columns_to_count_is_settled(database: str) -> None:
    """The least: id, payload and lease."""
    tables = PostgresTables(database)
    tables.run("CREATE TABLE jobs (id serial PRIMARY KEY, body bytea, lock timestamptz)")
    tables.run("INSERT INTO jobs (body) VALUES ('a')")
    queue = tables.broker().queue(Table("jobs", id="id", payload="body", locked_until="lock"))
    calls: list[int] = []

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        calls.append(delivery.attempt)
        return Ack() if len(calls) > 1 else Retry()

    async with open_runtime(Subscription(queue, handler, policy=Policy(), name="billing")) as runtime:
        await until(lambda: runtime.ledger("billing").acked == 1, within=10)
    assert tables.rows() == []
