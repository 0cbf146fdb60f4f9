"""What a settlement does to the row, on real files: the row is compared column by column, in all three time types."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest
import trio

from links.abc import Settlement
from links.errors import LeaseLost, NotApplied
from links.sql import Lease, SqlBroker, Table
from links.sql.sqlite import times
from settlement import Ack, DeadLetter, Drop, Policy, Retry, RetryAfter
from settlement.attempts import RETRY_HEADER
from settlement.policy import Ending
from settlement.sql import Delay, Finish, MoveToGroup, MoveToTable, PutBack
from tests.links.sqlite_kit import (
    TIMES,
    Database,
    attached,
    bodies,
    near,
    now,
    open_link,
    order,
    say,
    seconds,
    stored,
    until,
)

pytestmark = pytest.mark.sqlite

FRESH = {"id": 1, "payload": b"body", "headers": None, "lane": None, "retry_after": 0, "locked_until": None}
"""The row as it was inserted, without the columns that only some tables have."""


def fresh(database: Database, **changes: Any) -> dict[str, Any]:
    row = {**FRESH, "retry_after": "1970-01-01T00:00:00.000000Z" if database.times == "TEXT" else 0}
    if database.counts:
        row["attempt"] = 1
    if database.grouped:
        row["grp"] = "mail"
    if database.marks:
        row["processed_at"] = None
    return row | changes


async def settle(database: Database, outcome: Ending, policy: Policy | None = None) -> float:
    """Claim the only row and settle it so; returns the time before."""
    group = "mail" if database.grouped else None
    database.add(b"body", group=group)
    queue = database.broker().queue(database.table(), group=group, claim=Lease(30.0))
    before = now()
    async with open_link(queue) as link:
        (received,) = await link.receive(1)
        assert await link.settle([order(queue, received, outcome, policy)]) == [None]
    return before


def bodies_of(database: Database, table: str) -> list[bytes]:
    return [body for (body,) in database.run(f"SELECT payload FROM {table}")]  # noqa: S608


# --- the matrix (K-80, K-81, K-82)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("outcome", [Ack(), Drop("a poison message leaves")])
async def test_finish_marks_the_row(outcome: Ending, times: str, tmp_path: Path) -> None:
    """K-80, S-3.4: `Ack` and `Drop` set processed_at to now, clear the lease, and change nothing else."""
    database = Database(tmp_path / "q.db", times, marks=True).create()
    before = await settle(database, outcome)
    row = database.row()
    assert near(seconds(row["processed_at"]), before)
    assert row == fresh(database, attempt=2, processed_at=row["processed_at"])
    assert type(row["processed_at"]) is {"REAL": float, "INTEGER": int, "TEXT": str}[times]


@pytest.mark.parametrize("outcome", [Ack(), Drop()])
async def test_finish_deletes_the_row(outcome: Ending, tmp_path: Path) -> None:
    """K-80: without processed_at finishing deletes."""
    database = Database(tmp_path / "q.db").create()
    await settle(database, outcome)
    assert database.rows() == []


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("counts", [True, False], ids=["attempt", "no attempt"])
async def test_retry_frees_the_row(counts: bool, times: str, tmp_path: Path) -> None:
    """K-81, S-4.1: locked_until = NULL; the attempt was counted by the claim, retry_after stays as it was."""
    database = Database(tmp_path / "q.db", times, counts=counts, grouped=True, marks=True).create()
    await settle(database, Retry())
    assert database.row() == fresh(database, **({"attempt": 2} if counts else {}))


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("counts", [True, False], ids=["attempt", "no attempt"])
async def test_retry_after_sets_the_due_time(counts: bool, times: str, tmp_path: Path) -> None:
    """K-81: retry_after = now + d, locked_until = NULL, nothing else."""
    database = Database(tmp_path / "q.db", times, counts=counts).create()
    before = await settle(database, RetryAfter(90.5))
    row = database.row()
    assert near(seconds(row["retry_after"]), before + 90.5)
    assert row == fresh(database, retry_after=row["retry_after"], **({"attempt": 2} if counts else {}))


async def test_retry_after_without_its_column_is_a_retry(tmp_path: Path) -> None:
    """S-3.5: there is nowhere to keep the delay, so the row is free at once; the plan says so."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"body")
    queue = database.broker().queue(database.table(retry_after=None))
    async with open_link(queue) as link:
        (received,) = await link.receive(1)
        spoken = order(queue, received, RetryAfter(90))
        assert spoken.plan.notice is not None
        assert await link.settle([spoken]) == [None]
    assert database.row() == fresh(database, attempt=2)


@pytest.mark.parametrize("times", TIMES)
async def test_the_cap_moves_to_a_group(times: str, tmp_path: Path) -> None:
    """K-82, S-4.6: one UPDATE of the group, the lease cleared; after a cap of 3 the attempt is 4 (S-4.2)."""
    database = Database(tmp_path / "q.db", times, grouped=True, marks=True).create()
    database.add(b"body", group="mail")
    queue = database.broker().queue(database.table(), group="mail")
    policy = Policy(max_attempts=3, dead_letter="dead mail")
    attempts = []
    async with open_link(queue) as link:
        for _ in range(3):
            (received,) = await link.receive(1)
            attempts.append(received.delivery.attempt)
            assert await link.settle([order(queue, received, Retry(), policy)]) == [None]
    assert attempts == [1, 2, 3]
    assert database.row() == fresh(database, attempt=4, grp="dead mail")


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("marks", [True, False], ids=["marks", "deletes"])
async def test_the_cap_moves_to_a_table(marks: bool, times: str, tmp_path: Path) -> None:
    """K-82, S-3.10: the row leaves for the other table as it is, with an empty lease, unfinished; attempt 4."""
    database = Database(tmp_path / "q.db", times, marks=marks).create()
    database.run(
        "INSERT INTO jobs (payload, headers, lane, retry_after, attempt) VALUES (?, ?, ?, ?, 3)",
        *(b"body", '{"a": "b"}', "k", stored(1_000_000_000.25, times)),
    )
    queue = database.broker().queue(database.table())
    async with open_link(queue) as link:
        (received,) = await link.receive(1)
        policy = Policy(max_attempts=3, dead_letter="dead")
        assert received.delivery.attempt == 3
        assert await link.settle([order(queue, received, RetryAfter(5), policy)]) == [None]
    assert database.rows() == []
    assert database.row("dead") == fresh(
        database, headers='{"a": "b"}', lane="k", retry_after=stored(1_000_000_000.25, times), attempt=4
    )


async def test_a_dead_letter_by_policy_moves_at_any_attempt(tmp_path: Path) -> None:
    """`DeadLetter()` moves now; a table "schema.table" is understood."""
    database = Database(tmp_path / "q.db").create()
    await settle(database, DeadLetter(), Policy(max_attempts=9, dead_letter="main.dead"))
    assert (database.rows(), database.row("dead")["attempt"]) == ([], 2)


@pytest.mark.parametrize("times", TIMES)
async def test_unsettled_the_lease_is_released(times: str, tmp_path: Path) -> None:
    """S-3, last row: dropped unsettled the lease is let go at once; the attempt stays where a handler was called."""
    database = Database(tmp_path / "q.db", times, marks=True).create()
    database.add(b"body")
    async with open_link(database.broker().queue(database.table())) as link:
        (received,) = await link.receive(1)
        received.started = True
        assert database.row()["locked_until"] is not None
    assert database.row() == fresh(database, attempt=2)


async def test_a_generated_column_is_not_copied(tmp_path: Path) -> None:
    """S-3.9: the move writes what can be written; what the database computes it computes again."""
    database = Database(tmp_path / "q.db").create()
    for table in ("jobs", "dead"):
        database.run(f"ALTER TABLE {table} ADD COLUMN size INTEGER GENERATED ALWAYS AS (length(payload)) VIRTUAL")
    await settle(database, DeadLetter(), Policy(max_attempts=9, dead_letter="dead"))
    assert database.row("dead")["size"] == 4


# --- the token


VERBS = [Finish(), PutBack(count=False), Delay(5.0, count=False), MoveToTable("dead")]


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("verb", VERBS, ids=str)
@pytest.mark.parametrize("counts", [True, False], ids=["attempt", "no attempt"])
async def test_a_late_holder_changes_nothing(verb: Any, times: str, counts: bool, tmp_path: Path) -> None:
    """S-3.2, S-5.7: the lease passed, another has the row: each verb of the first is LeaseLost, the row untouched."""
    database = Database(tmp_path / "q.db", times, counts=counts).create()
    database.add(b"body")
    early, late = database.broker(), database.broker()
    first = early.queue(database.table(), claim=Lease(0.05))
    second = late.queue(database.table(), claim=Lease(30.0))
    async with open_link(first) as link, open_link(second) as other:
        (lost,) = await link.receive(1)
        with trio.fail_after(5):
            (kept,) = await other.receive(1)
        before = database.row()
        (verdict,) = await link.settle([say(lost, verb)])
        assert isinstance(verdict, LeaseLost)
        assert (database.row(), database.rows("dead")) == (before, [])
        assert kept.delivery.attempt == (2 if counts else 1)
        assert await other.settle([say(kept, Finish())]) == [None]
    assert database.rows() == []


async def test_a_late_holder_in_a_group_changes_nothing(tmp_path: Path) -> None:
    """S-3.2: the move to a group carries the token too."""
    database = Database(tmp_path / "q.db", grouped=True).create()
    database.add(b"body", group="mail")
    async with open_link(database.broker().queue(database.table(), group="mail")) as link:
        (received,) = await link.receive(1)
        database.run("UPDATE jobs SET attempt = attempt + 1")
        before = database.row()
        (verdict,) = await link.settle([say(received, MoveToGroup("dead"))])
        assert isinstance(verdict, LeaseLost)
        assert database.row() == before


async def test_a_lease_that_passed_and_was_not_taken_still_settles(tmp_path: Path) -> None:
    """OQ-S14: the token is still the row's, so the settlement is allowed."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"body")
    async with open_link(database.broker().queue(database.table(), claim=Lease(0.02))) as link:
        (received,) = await link.receive(1)
        await until(lambda: now() > received.token[1])
        assert await link.settle([say(received, Finish())]) == [None]
    assert database.rows() == []


async def test_successive_claims_have_different_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DESIGN 6: also where a row is put back and claimed again at once, by a clock that stands still."""
    database = Database(tmp_path / "q.db", counts=False).create()
    database.add(b"body")
    queue = database.broker().queue(database.table())
    tokens = set()
    noon = times.now()
    monkeypatch.setattr(times, "now", lambda: noon)
    async with open_link(queue) as link:
        for _ in range(20):
            (received,) = await link.receive(1)
            tokens.add(received.token)
            assert await link.settle([say(received, PutBack(count=False))]) == [None]
    assert len(tokens) == 20


async def test_the_verdict_says_whose_row_it_was(tmp_path: Path) -> None:
    """S-3.8: verb, row, queue and table."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"body")
    async with open_link(database.broker().queue(database.table())) as link:
        (received,) = await link.receive(1)
        database.run("DELETE FROM jobs")
        (verdict,) = await link.settle([say(received, Finish())])
    assert "Finish of row 1 of 'jobs', table 'jobs'" in str(verdict)


# --- a settlement that fails


async def test_one_order_that_fails_harms_no_other(tmp_path: Path) -> None:
    """S-3.6, DESIGN 3.8: a constraint refuses one move: NotApplied with its cause; it is kept, the others moved."""
    database = Database(tmp_path / "q.db").create()
    database.run("CREATE UNIQUE INDEX once ON dead (lane)")
    database.run("INSERT INTO dead (id, lane) VALUES (99, 'taken')")
    for lane in ("a", "taken", "b"):
        database.run("INSERT INTO jobs (payload, lane) VALUES ('x', ?)", lane)
    async with open_link(database.broker().queue(database.table())) as link:
        received = await link.receive(3)
        verdicts = await link.settle([say(each, MoveToTable("dead")) for each in received])
        assert [type(verdict) for verdict in verdicts] == [type(None), NotApplied, type(None)]
        assert isinstance(verdicts[1], NotApplied)
        assert isinstance(verdicts[1].__cause__, sqlite3.IntegrityError)
        assert database.row()["locked_until"] == received[1].token[1]
    assert [row["lane"] for row in database.rows("dead")] == ["a", "b", "taken"]
    assert (database.row()["lane"], database.row()["attempt"]) == ("taken", 2)


async def test_a_row_whose_settlement_failed_is_kept_and_settled_again(tmp_path: Path) -> None:
    """DESIGN 3.8: it is leased on, not handed out again, and the rows behind it are; then its verb is said."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"bad", b"good")
    async with open_link(database.broker().queue(database.table(), claim=Lease(0.6))) as link:
        (bad,) = await link.receive(1)
        (verdict,) = await link.settle([say(bad, MoveToTable("nowhere"))])
        assert isinstance(verdict, NotApplied)
        assert bodies(await link.receive(5)) == [b"good"]
        for _ in range(4):
            await trio.sleep(0.2)
            assert await link.extend([bad]) == []
        with trio.move_on_after(0.3):
            raise AssertionError(await link.receive(5))
        database.run("CREATE TABLE nowhere AS SELECT * FROM dead")
        assert await link.settle([say(bad, MoveToTable("nowhere"))]) == [None]
    assert bodies_of(database, "nowhere") == [b"bad"]


async def test_of_many_that_are_finished_one_was_lost(tmp_path: Path) -> None:
    """S-3.6: its verdict says so; the others are finished, each once."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a", b"lost", b"b")
    async with open_link(database.broker().queue(database.table())) as link:
        received = await link.receive(3)
        database.run("UPDATE jobs SET locked_until = locked_until + 1 WHERE payload = ?", b"lost")
        verdicts = await link.settle([say(each, Finish()) for each in received])
        assert [type(verdict) for verdict in verdicts] == [type(None), LeaseLost, type(None)]
    assert [row["payload"] for row in database.rows()] == [b"lost"]


async def test_of_many_that_are_finished_the_table_refuses_some(tmp_path: Path) -> None:
    """S-3.6: nothing but what was said stands there, and who was refused keeps the lease."""
    database = Database(tmp_path / "q.db", marks=True).create()
    database.run("CREATE UNIQUE INDEX one_a_time ON jobs (processed_at)")
    database.add(b"a", b"b", b"c")
    async with open_link(database.broker().queue(database.table())) as link:
        received = await link.receive(3)
        verdicts = await link.settle([say(each, Finish()) for each in received])
        assert [type(verdict) for verdict in verdicts] == [type(None), NotApplied, NotApplied]
        held = [(row["processed_at"] is None, row["locked_until"]) for row in database.rows()]
        assert held == [(False, None), (True, received[1].token[1]), (True, received[2].token[1])]


async def test_a_trigger_that_ends_the_transaction_harms_no_other(tmp_path: Path) -> None:
    """A statement that rolls back everything is carried out again alone; the others are settled all the same."""
    database = Database(tmp_path / "q.db").create()
    database.run(
        "CREATE TRIGGER veto BEFORE DELETE ON jobs WHEN old.payload = 'no' BEGIN SELECT RAISE(ROLLBACK, 'veto'); END"
    )
    for payload in ("yes", "no", "also"):
        database.run("INSERT INTO jobs (payload) VALUES (?)", payload)
    async with open_link(database.broker().queue(database.table())) as link:
        received = await link.receive(3)
        verdicts = await link.settle([say(each, Finish()) for each in received])
        assert [verdict is None for verdict in verdicts] == [True, False, True]
        assert "veto" in str(verdicts[1])
    assert database.row()["payload"] == "no"


async def test_a_move_is_whole_or_not_at_all(tmp_path: Path) -> None:
    """S-3.9: the copy was made and the row cannot be deleted: then there is no copy."""
    database = Database(tmp_path / "q.db").create()
    database.run("CREATE TRIGGER keep BEFORE DELETE ON jobs BEGIN SELECT RAISE(ABORT, 'kept'); END")
    database.add(b"a")
    async with open_link(database.broker().queue(database.table())) as link:
        (verdict,) = await link.settle([say(each, MoveToTable("dead")) for each in await link.receive(1)])
        assert isinstance(verdict, NotApplied)
    assert (database.row()["payload"], database.rows("dead")) == (b"a", [])


async def test_nothing_to_settle(tmp_path: Path) -> None:
    database = Database(tmp_path / "q.db").create()
    async with open_link(database.broker().queue(database.table())) as link:
        nothing: list[Settlement] = []
        assert await link.settle(nothing) == []


# --- rows that are odd


async def test_a_row_without_payload_is_unreadable_not_a_broken_link(tmp_path: Path) -> None:
    """S-4.9: `unreadable` is set, the attempt is read all the same, and the row can be finished."""
    database = Database(tmp_path / "q.db").create()
    database.run("INSERT INTO jobs (payload, attempt) VALUES (NULL, 2)")
    database.run("INSERT INTO jobs (payload, headers) VALUES ('x', '[broken')")
    async with open_link(database.broker().queue(database.table())) as link:
        null, headers = await link.receive(2)
        assert isinstance(null.unreadable, ValueError)
        assert isinstance(headers.unreadable, ValueError)
        assert (null.delivery.attempt, null.delivery.body, headers.delivery.body) == (2, b"", b"x")
        assert await link.settle([say(null, Finish()), say(headers, Finish())]) == [None, None]
    assert database.rows() == []


@pytest.mark.parametrize("odd", ["5", "0", "0.5", "'7'", "'[1]'", "x'ff'", "'" + "[" * 100_000 + "'"])
async def test_an_unreadable_row_harms_no_neighbour(odd: str, tmp_path: Path) -> None:
    """S-4.9: whatever a header column holds, the row is a delivery with `unreadable`, the rows beside it are read."""
    database = Database(tmp_path / "q.db")
    database.run("CREATE TABLE jobs (id INTEGER PRIMARY KEY, payload BLOB, headers JSON, locked_until REAL)")
    for headers in ("NULL", odd, "NULL"):
        database.run(f"INSERT INTO jobs (payload, headers) VALUES ('p', {headers})")  # noqa: S608
    table = Table("jobs", id="id", payload="payload", headers="headers", locked_until="locked_until")
    async with open_link(database.broker().queue(table)) as link:
        received = await link.receive(3)
        assert [each.unreadable is None for each in received] == [True, False, True]
        assert await link.settle([say(each, Finish()) for each in received]) == [None] * 3
    assert database.rows() == []


@pytest.mark.parametrize("row_mode", [False, True])
async def test_an_attempt_that_is_no_whole_number_is_unreadable(row_mode: bool, tmp_path: Path) -> None:
    """S-4.9: the header counts then, and the row can be settled."""
    database = Database(tmp_path / "q.db").create()
    for attempt in (1, 1.5, 1e400):
        database.run(
            "INSERT INTO jobs (payload, headers, attempt) VALUES ('x', ?, ?)", f'{{"{RETRY_HEADER}": "4"}}', attempt
        )
    table: Table[Any] = database.table()
    if row_mode:
        table = Table("jobs", id="id", headers="headers", attempt="attempt", locked_until="locked_until")
    async with open_link(database.broker().queue(table)) as link:
        received = await link.receive(3)
        assert [each.unreadable is None for each in received] == [True, False, False]
        assert [each.delivery.attempt for each in received] == [1, 5, 5]
        assert await link.settle([say(each, Finish()) for each in received]) == [None] * 3
    assert database.rows() == []


async def test_an_odd_id_is_settled_as_it_is(tmp_path: Path) -> None:
    """S-4.9: numbers, texts, blobs and a text that is no UTF-8 in one id column; each comes once and is finished."""
    database = Database(tmp_path / "q.db")
    database.run("CREATE TABLE jobs (id DEFAULT (random()) UNIQUE, payload BLOB, locked_until REAL)")
    for key in ("2.5", "'ä'", "x'00ff'", "cast(x'ff61' AS TEXT)", "NULL"):
        database.run(f"INSERT INTO jobs VALUES ({key}, 'p', NULL)")  # noqa: S608
    table = Table("jobs", id="id", payload="payload", locked_until="locked_until")
    async with open_link(database.broker().queue(table)) as link:
        received = await link.receive(10)
        assert [each.delivery.id for each in received] == ["2.5", "ä", "\\xffa", "00ff"]
        assert await link.settle([say(each, PutBack(count=False)) for each in received]) == [None] * 4
        received = await link.receive(10)
        assert not await link.extend(received)
        assert await link.settle([say(each, Finish()) for each in received]) == [None] * 4
    assert database.run("SELECT id FROM jobs") == [(None,)]


async def test_row_mode_hands_out_the_row_before_the_claim(tmp_path: Path) -> None:
    """S-1.2: without a payload the message is the whole row; attempt as before the claim, the lease empty."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"\xff")
    queue = SqlBroker(f"sqlite:///{database.path}").queue(
        Table("jobs", id="id", attempt="attempt", locked_until="locked_until")
    )
    async with open_link(queue) as link:
        (received,) = await link.receive(1)
        row: dict[str, Any] = received.delivery.message
        assert row == fresh(database, payload=b"\xff")
        assert b'"payload": {"base64": "/w=="}' in received.delivery.body


async def test_two_queues_of_one_broker_settle_side_by_side(tmp_path: Path) -> None:
    """Jobs of several links share transactions; each gets its own verdicts."""
    database = Database(tmp_path / "q.db", grouped=True).create()
    for group in ("a", "b"):
        database.add(*[b"%d" % number for number in range(50)], group=group)
    broker = database.broker()
    seen: dict[str, list[bytes]] = {"a": [], "b": []}

    async def consume(group: str) -> None:
        async with attached(broker.queue(database.table(), group=group)) as link:
            while len(seen[group]) < 50:
                received = await link.receive(3)
                seen[group] += [each.delivery.body for each in received]
                assert not any(await link.settle([say(each, Finish()) for each in received]))

    async with broker.connect():
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(consume, "a")
                nursery.start_soon(consume, "b")
    assert seen["a"] == seen["b"] == [b"%d" % number for number in range(50)]
    assert database.rows() == []
