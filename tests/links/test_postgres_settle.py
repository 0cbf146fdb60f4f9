"""What a settlement does to the row, on a real PostgreSQL: the row is compared column by column, in every shape."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import attrs
import psycopg
import pytest
import trio

from actors import Subscription, open_runtime
from links.errors import LeaseLost, NotApplied
from links.memory import MemoryBroker
from links.sql import Lease
from links.sql.postgres.lease import PostgresLease
from settlement import Ack, DeadLetter, Delivery, Drop, Outcome, Policy, Retry, RetryAfter
from settlement.policy import Ending
from settlement.sql import Delay, Finish, MoveToGroup, MoveToTable, PutBack
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import attached, bodies, finish, near, now, open_link, order, say, until

pytestmark = [pytest.mark.postgres, pytest.mark.servers]

BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)
FRESH = {"id": 1, "payload": b"body", "headers": None, "lane": None, "retry_after": BEGINNING, "locked_until": None}
"""The row as it was inserted, without the columns that only some tables have."""


@attrs.frozen
class Shape:
    """A table, and whether the whole row is the message."""

    counts: bool = True
    grouped: bool = False
    marks: bool = False
    whole: bool = False

    def tables(self, url: str) -> PostgresTables:
        return PostgresTables(url, counts=self.counts, grouped=self.grouped, marks=self.marks).create()

    @property
    def group(self) -> str | None:
        return "mail" if self.grouped else None

    def fresh(self, **changes: Any) -> dict[str, Any]:
        row: dict[str, Any] = dict(FRESH)
        if self.counts:
            row["attempt"] = 1
        if self.grouped:
            row["grp"] = "mail"
        if self.marks:
            row["processed_at"] = None
        return row | changes

    def claimed(self, **changes: Any) -> dict[str, Any]:
        """After one delivery."""
        return self.fresh(**({"attempt": 2} if self.counts else {}), **changes)


SHAPES = {
    "plain": Shape(),
    "marks": Shape(marks=True),
    "groups": Shape(grouped=True),
    "no attempt": Shape(counts=False),
    "row mode": Shape(whole=True),
    "groups, marks": Shape(grouped=True, marks=True),
    "no attempt, marks": Shape(counts=False, marks=True),
    "row mode, groups": Shape(whole=True, grouped=True),
}


def shapes(**wanted: bool) -> pytest.MarkDecorator:
    """Those that are so."""
    found = {name: each for name, each in SHAPES.items() if wanted.items() <= attrs.asdict(each).items()}
    return pytest.mark.parametrize("shape", [pytest.param(each, id=name) for name, each in found.items()])


def queue_of(tables: PostgresTables, shape: Shape, lease: float = 30.0, **roles: Any) -> Any:
    table: Any = tables.table(**roles)
    if shape.whole:
        table = attrs.evolve(table, payload=None)
    return tables.broker().queue(table, group=shape.group, claim=Lease(lease))


async def settle(tables: PostgresTables, shape: Shape, *outcomes: Ending, policy: Policy | None = None) -> float:
    """Claim the only row and settle it so, one outcome after the other; returns the time before the last claim."""
    tables.add(b"body", group=shape.group)
    queue = queue_of(tables, shape)
    before = now()
    async with open_link(queue) as link:
        for number, outcome in enumerate(outcomes):
            before = now()
            (received,) = await link.receive(1)
            assert received.delivery.attempt == (number + 1 if shape.counts else 1)
            assert list(await link.settle([order(queue, received, outcome, policy)])) == [None]
    return before


# --- the matrix: section 3 of the rules, its lease column


@shapes(marks=True)
@pytest.mark.parametrize("outcome", [Ack(), Drop("a poison message leaves")], ids=["ack", "drop"])
async def test_finish_marks_the_row(outcome: Ending, shape: Shape, database: str) -> None:
    """S-3.4: `Ack` and `Drop` set processed_at to now, clear the lease, and change nothing else."""
    tables = shape.tables(database)
    before = await settle(tables, shape, outcome)
    row = tables.row()
    assert near(row["processed_at"].timestamp(), before)
    assert row == shape.claimed(processed_at=row["processed_at"])
    assert tables.rows("dead") == []


@shapes(marks=False)
@pytest.mark.parametrize("outcome", [Ack(), Drop()], ids=["ack", "drop"])
async def test_finish_deletes_the_row(outcome: Ending, shape: Shape, database: str) -> None:
    """S-3.4: without processed_at `Ack` and `Drop` delete, and neither dead-letters."""
    tables = shape.tables(database)
    await settle(tables, shape, outcome)
    assert (tables.rows(), tables.rows("dead")) == ([], [])


@shapes()
async def test_retry_frees_the_row(shape: Shape, database: str) -> None:
    """S-4.1: locked_until = NULL; the attempt was counted by the claim, retry_after stays as it was."""
    tables = shape.tables(database)
    await settle(tables, shape, Retry())
    assert tables.row() == shape.claimed()


@shapes()
async def test_retry_after_sets_the_due_time(shape: Shape, database: str) -> None:
    """S-3, retry_after(d): retry_after = now + d, locked_until = NULL, nothing else."""
    tables = shape.tables(database)
    before = await settle(tables, shape, RetryAfter(90.5))
    row = tables.row()
    assert near(row["retry_after"].timestamp(), before + 90.5)
    assert row == shape.claimed(retry_after=row["retry_after"])


async def test_each_delay_is_its_own(database: str) -> None:
    """S-3, retry_after(d): several in one statement, each with its own d."""
    tables = Shape().tables(database)
    tables.add(b"a", b"b", b"c")
    queue = queue_of(tables, Shape())
    async with open_link(queue) as link:
        received = await link.receive(3)
        before = now()
        orders = [order(queue, each, RetryAfter(d)) for each, d in zip(received, (300, 100, 200), strict=True)]
        assert list(await link.settle(orders)) == [None, None, None]
    for row, delay in zip(tables.rows(), (300, 100, 200), strict=True):
        assert near(row["retry_after"].timestamp(), before + delay)


async def test_retry_after_without_its_column_is_a_retry(database: str) -> None:
    """S-3.5: there is nowhere to keep the delay, so the row is free at once; the plan says so."""
    shape = Shape()
    tables = shape.tables(database)
    tables.add(b"body")
    queue = queue_of(tables, shape, retry_after=None)
    async with open_link(queue) as link:
        (received,) = await link.receive(1)
        spoken = order(queue, received, RetryAfter(90))
        assert spoken.plan.notice is not None
        assert list(await link.settle([spoken])) == [None]
    assert tables.row() == shape.claimed()


@shapes(grouped=True)
async def test_the_cap_moves_to_a_group(shape: Shape, database: str) -> None:
    """S-4.6: one UPDATE of the group, the lease cleared; after a cap of 3 the attempt is 4 (S-4.2)."""
    tables = shape.tables(database)
    policy = Policy(max_attempts=3, dead_letter="dead mail")
    await settle(tables, shape, Retry(), RetryAfter(0), Retry(), policy=policy)
    row = tables.row()
    assert BEGINNING < row["retry_after"] < datetime.now(UTC), "of the second one"
    assert row == shape.fresh(attempt=4, grp="dead mail", retry_after=row["retry_after"])


@shapes(grouped=False, counts=True)
async def test_the_cap_moves_to_a_table(shape: Shape, database: str) -> None:
    """S-3.10, S-4.7: the row leaves for the other table as it is, with an empty lease, unfinished; attempt 4."""
    tables = shape.tables(database)
    due = datetime(2001, 9, 9, 1, 46, 40, 250_000, tzinfo=UTC)
    tables.run(
        "INSERT INTO jobs (payload, headers, lane, retry_after, attempt) VALUES (%s, %s, %s, %s, 3)",
        *(b"body", '{"a": "b"}', "k", due),
    )
    queue = queue_of(tables, shape)
    policy = Policy(max_attempts=3, dead_letter="dead")
    async with open_link(queue) as link:
        (received,) = await link.receive(1)
        assert received.delivery.attempt == 3
        assert list(await link.settle([order(queue, received, RetryAfter(5), policy)])) == [None]
    assert tables.rows() == []
    assert tables.row("dead") == shape.fresh(headers={"a": "b"}, lane="k", retry_after=due, attempt=4)


async def test_a_dead_letter_by_policy_moves_at_any_attempt(database: str) -> None:
    """`DeadLetter()` moves now; a table "schema.table" is understood."""
    tables = Shape().tables(database)
    await settle(tables, Shape(), DeadLetter(), policy=Policy(max_attempts=9, dead_letter="public.dead"))
    assert (tables.rows(), tables.row("dead")) == ([], Shape().claimed())


async def test_a_dead_letter_may_be_a_publisher_of_another_broker(database: str) -> None:
    """Cap, foreign publisher: it has the message, and then the row is finished."""
    tables = Shape().tables(database)
    tables.run("INSERT INTO jobs (payload, headers, lane) VALUES ('body', '{\"a\": \"b\"}', 'k')")
    memory = MemoryBroker()
    policy = Policy(max_attempts=2, dead_letter=memory.publisher("dead"))
    attempts: list[int] = []

    async def fails(delivery: Delivery[bytes]) -> Outcome:
        attempts.append(delivery.attempt)
        return Retry()

    async with memory.connect():
        async with open_runtime(Subscription(queue_of(tables, Shape()), fails, name="jobs", policy=policy)):
            await until(lambda: memory.ready("dead"))
            await until(lambda: not tables.rows())
        (letter,) = memory.ready("dead")
    assert attempts == [1, 2]
    assert (letter.body, letter.headers["a"], letter.key) == (b"body", b"b", "k")


@shapes()
@pytest.mark.parametrize("started", [True, False], ids=["begun", "not begun"])
async def test_unsettled_the_lease_is_released(started: bool, shape: Shape, database: str) -> None:
    """S-3, last row: let go at once; the attempt stays counted where a handler was called, else it is as it was."""
    tables = shape.tables(database)
    tables.add(b"body", group=shape.group)
    async with open_link(queue_of(tables, shape)) as link:
        (received,) = await link.receive(1)
        received.started = started
        assert tables.row()["locked_until"] > datetime.now(UTC)
    assert tables.row() == (shape.claimed() if started else shape.fresh())


async def test_a_generated_column_is_not_copied(database: str) -> None:
    """S-3.9: the move writes what can be written; what the database computes it computes again."""
    tables = Shape().tables(database)
    for table in ("jobs", "dead"):
        tables.run(f"ALTER TABLE {table} ADD COLUMN size integer GENERATED ALWAYS AS (length(payload)) STORED")
    await settle(tables, Shape(), DeadLetter(), policy=Policy(max_attempts=9, dead_letter="dead"))
    assert tables.row("dead") == Shape().claimed(size=4)


async def test_an_identity_is_kept_by_the_move(database: str) -> None:
    """S-3.9, S-4.7: GENERATED ALWAYS AS IDENTITY: the moved row has its own id all the same."""
    tables = Shape().tables(database)
    for table in ("jobs", "dead"):
        tables.run(f"ALTER TABLE {table} ALTER id SET GENERATED ALWAYS")
    tables.run("ALTER TABLE jobs ALTER id RESTART WITH 77")
    await settle(tables, Shape(), DeadLetter(), policy=Policy(max_attempts=9, dead_letter="dead"))
    assert tables.row("dead") == Shape().claimed(id=77)


# --- the token


VERBS = [Finish(), PutBack(count=False), Delay(5.0, count=False), MoveToTable("dead")]
LOST = [
    *((shape, verb) for shape in ("plain", "no attempt", "marks", "row mode") for verb in VERBS),
    *(("groups", verb) for verb in (Finish(), MoveToGroup("dead"))),
    ("groups, marks", MoveToGroup("dead")),
]


@pytest.mark.parametrize(("name", "verb"), LOST, ids=[f"{name}, {type(verb).__name__}" for name, verb in LOST])
async def test_a_late_holder_changes_nothing(name: str, verb: Any, database: str) -> None:
    """S-3.2, S-5.7: the lease passed, another has the row: each verb of the first is LeaseLost, the row untouched."""
    shape = SHAPES[name]
    tables = shape.tables(database)
    tables.add(b"body", group=shape.group)
    first, second = queue_of(tables, shape, 0.05), queue_of(tables, shape)
    async with open_link(first) as link, open_link(second) as other:
        (lost,) = await link.receive(1)
        with trio.fail_after(5):
            (kept,) = await other.receive(1)
        before = tables.row()
        (verdict,) = await link.settle([say(lost, verb)])
        assert isinstance(verdict, LeaseLost)
        assert (tables.row(), tables.rows("dead")) == (before, [])
        assert kept.delivery.attempt == (2 if shape.counts else 1)
        assert list(await other.settle([say(kept, Finish())])) == [None]
    assert [row["processed_at"] is None for row in tables.rows()] == [False] * shape.marks


@shapes()
@pytest.mark.parametrize("started", [True, False], ids=["begun", "not begun"])
async def test_a_late_goodbye_changes_nothing(started: bool, shape: Shape, database: str) -> None:
    """S-3.2: what is let go at the end is let go by its token, too; an extension says that it was lost."""
    tables = shape.tables(database)
    tables.add(b"body", group=shape.group)
    second = queue_of(tables, shape)
    async with open_link(second) as other:
        async with open_link(queue_of(tables, shape, 0.05)) as link:
            (lost,) = await link.receive(1)
            lost.started = started
            with trio.fail_after(5):
                (kept,) = await other.receive(1)
            before = tables.row()
        assert tables.row() == before
        assert list(await other.extend([kept])) == []
        assert tables.row()["locked_until"] > before["locked_until"]


async def test_an_extension_says_which_are_lost(database: str) -> None:
    """S-5.4: 0 rows: lost, and its settlement is LeaseLost; the others are extended, their tokens have moved."""
    tables = Shape().tables(database)
    tables.add(b"a", b"b")
    async with open_link(queue_of(tables, Shape())) as link:
        lost, kept = await link.receive(2)
        tables.run("UPDATE jobs SET attempt = 9 WHERE id = 1")
        before = tables.rows()
        assert list(await link.extend([lost, kept])) == [lost]
        after = tables.rows()
        assert (after[0], after[1]["locked_until"] > before[1]["locked_until"]) == (before[0], True)
        verdicts = await link.settle(finish([lost, kept]))
        assert [type(verdict) for verdict in verdicts] == [LeaseLost, type(None)]


async def test_a_lease_that_passed_and_was_not_taken_still_settles(database: str) -> None:
    """The token is still the row's, so the settlement is allowed."""
    tables = Shape().tables(database)
    tables.add(b"body")
    async with open_link(queue_of(tables, Shape(), 0.02)) as link:
        (received,) = await link.receive(1)
        await until(lambda: tables.run("SELECT 1 FROM jobs WHERE locked_until < clock_timestamp()"))
        assert list(await link.settle([say(received, Finish())])) == [None]
    assert tables.rows() == []


async def test_the_verdict_says_whose_row_it_was(database: str) -> None:
    """S-3.8: verb, row, queue and table."""
    tables = Shape().tables(database)
    tables.add(b"body")
    async with open_link(queue_of(tables, Shape())) as link:
        (received,) = await link.receive(1)
        tables.run("DELETE FROM jobs")
        (verdict,) = await link.settle([say(received, Finish())])
    assert "Finish of row 1 of 'jobs', table 'jobs'" in str(verdict)


# --- a settlement that fails


async def test_one_order_that_fails_harms_no_other(database: str) -> None:
    """S-3.6, DESIGN 3.8: a constraint refuses one move: NotApplied with its cause; it is kept, the others moved."""
    tables = Shape().tables(database)
    tables.run("CREATE UNIQUE INDEX once ON dead (lane)")
    tables.run("INSERT INTO dead (id, lane) VALUES (99, 'taken')")
    for lane in ("a", "taken", "b"):
        tables.run("INSERT INTO jobs (payload, lane) VALUES ('x', %s)", lane)
    async with open_link(queue_of(tables, Shape())) as link:
        received = await link.receive(3)
        verdicts = await link.settle([say(each, MoveToTable("dead")) for each in received])
        assert [type(verdict) for verdict in verdicts] == [type(None), NotApplied, type(None)]
        assert isinstance(verdicts[1], NotApplied)
        assert isinstance(verdicts[1].__cause__, psycopg.errors.UniqueViolation)
        assert (tables.row()["lane"], tables.row()["attempt"]) == ("taken", 2)
        assert tables.row()["locked_until"] > datetime.now(UTC)
    assert [row["lane"] for row in tables.rows("dead")] == ["a", "b", "taken"]


async def test_a_row_whose_settlement_failed_is_kept_and_settled_again(database: str) -> None:
    """DESIGN 3.8: it is leased on, not handed out again, and the rows behind it are; then its verb is said."""
    tables = Shape().tables(database)
    tables.add(b"bad", b"good")
    async with open_link(queue_of(tables, Shape(), 0.6)) as link:
        (bad,) = await link.receive(1)
        (verdict,) = await link.settle([say(bad, MoveToTable("nowhere"))])
        assert isinstance(verdict, NotApplied)
        assert bodies(await link.receive(5)) == [b"good"]
        with trio.move_on_after(1.0):  # longer than a lease
            async with trio.open_nursery() as nursery:
                nursery.start_soon(link.receive, 5)
                while True:
                    assert list(await link.extend([bad])) == []
                    await trio.sleep(0.2)
        assert tables.rows()[0]["attempt"] == 2
        tables.run("CREATE TABLE nowhere AS SELECT * FROM dead")
        assert list(await link.settle([say(bad, MoveToTable("nowhere"))])) == [None]
    assert tables.run("SELECT payload FROM nowhere") == [(b"bad",)]


@pytest.mark.parametrize("verb", VERBS, ids=lambda each: type(each).__name__)
async def test_a_row_that_another_transaction_has_locked_is_not_waited_for(verb: Any, database: str) -> None:
    """DESIGN 6: skipped: not applied, neither lost nor touched; the other one is settled; later it is said again."""
    tables = Shape().tables(database)
    tables.add(b"locked", b"free")
    async with open_link(queue_of(tables, Shape())) as link:
        received = await link.receive(2)
        with psycopg.connect(database) as stranger:
            stranger.execute("SELECT FROM jobs WHERE id = 1 FOR UPDATE")
            before = tables.rows()[0]
            with trio.fail_after(2):
                verdicts = await link.settle([say(each, verb) for each in received])
            assert [type(verdict) for verdict in verdicts] == [NotApplied, type(None)]
            assert tables.rows()[0] == before
        assert list(await link.settle([say(received[0], verb)])) == [None]
    assert [row["locked_until"] for row in tables.rows()] in ([], [None, None])


@pytest.mark.parametrize("verb", [*VERBS, "extend", "settle and claim", "give back"], ids=str)
async def test_a_lock_that_is_left_at_once_costs_nothing(
    verb: Any, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DESIGN 6: a claim locks for its own length what was due when it began, also what is ours by now: tried again."""
    tables = Shape().tables(database)
    tables.add(b"a", b"b", b"c", b"d")
    looked, holds = 0, PostgresLease.holds
    async with open_link(queue_of(tables, Shape())) as link:
        received = await link.receive(2 if verb == "settle and claim" else 3)
        until = max(row["locked_until"] for row in tables.rows() if row["locked_until"])
        with psycopg.connect(database, autocommit=False) as stranger:
            stranger.execute("SELECT FROM jobs WHERE id = 1 FOR UPDATE")

            async def held(form: PostgresLease, connection: Any, tokens: Sequence[Any]) -> set[int]:
                nonlocal looked
                looked += 1
                ours = await holds(form, connection, tokens)
                stranger.rollback()
                return ours

            monkeypatch.setattr(PostgresLease, "holds", held)
            if verb == "extend":
                assert list(await link.extend(received)) == []
                assert min(row["locked_until"] for row in tables.rows()[:3]) > until
            elif verb == "give back":
                await link.give_back(received)
                assert [row["locked_until"] for row in tables.rows()] == [None] * 4
            else:
                verb = Finish() if verb == "settle and claim" else verb
                assert list(await link.settle([say(each, verb) for each in received])) == [None] * len(received)
    assert looked == 1, "somebody had locked it"


async def test_a_move_is_whole_or_not_at_all(database: str) -> None:
    """S-3.9: where the row cannot be deleted there is no copy."""
    tables = Shape().tables(database)
    tables.run("CREATE FUNCTION kept() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'kept'; END $$")
    tables.run("CREATE TRIGGER keep AFTER DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION kept()")
    tables.add(b"a")
    async with open_link(queue_of(tables, Shape())) as link:
        (verdict,) = await link.settle([say(each, MoveToTable("dead")) for each in await link.receive(1)])
        assert isinstance(verdict, NotApplied)
    assert (tables.row()["payload"], tables.rows("dead")) == (b"a", [])


# --- who gets which row


async def test_two_claimers_never_get_the_same_row(database: str) -> None:
    """S-2.11: 200 rows, two brokers: disjoint, complete, and each of them has got some."""
    tables = Shape().tables(database)
    tables.run("INSERT INTO jobs (payload) SELECT n::text::bytea FROM generate_series(1, 200) n")
    seen: list[list[bytes]] = [[], []]
    both = trio.Event()

    async def consume(number: int) -> None:
        queue = queue_of(tables, Shape())
        async with queue.broker.connect(), attached(queue) as link:
            while len(seen[0]) + len(seen[1]) < 200:
                with trio.move_on_after(0.2):
                    received = await link.receive(7)
                    seen[number] += bodies(received)
                    if seen[1 - number]:
                        both.set()
                    await both.wait()
                    assert not any(await link.settle(finish(received)))

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(consume, 0)
            nursery.start_soon(consume, 1)
    assert sorted(seen[0] + seen[1]) == sorted(b"%d" % number for number in range(1, 201))
    assert all(seen)


async def test_the_queue_is_ordered_by_priority_then_due_then_id(database: str) -> None:
    """S-2.2: the present ones, in this order; in claims of several and of one."""
    tables = Shape().tables(database)
    tables.run("ALTER TABLE jobs ADD COLUMN rank integer NOT NULL DEFAULT 5")
    for body, rank, due in [("e", 5, 20), ("f", 5, 20), ("a", 1, 90), ("d", 5, 10), ("b", 2, 40), ("c", 2, 50)]:
        tables.run(
            "INSERT INTO jobs (payload, rank, retry_after) VALUES (%s, %s, to_timestamp(%s))", body.encode(), rank, due
        )
    tables.run("INSERT INTO jobs (payload, rank, retry_after) VALUES ('later', 0, now() + interval '1 hour')")
    queue = queue_of(tables, Shape(), priority="rank")
    async with open_link(queue) as link:
        first = bodies(await link.receive(4))
        second = bodies(await link.receive(1))
        assert [*first, *second, *bodies(await link.receive(9))] == [b"a", b"b", b"c", b"d", b"e", b"f"]
        assert (len(first), len(second)) == (4, 1)


async def test_a_handler_of_several_leases_keeps_its_row(database: str) -> None:
    """S-5.5: the lease is renewed while it runs, a rival that looks all the time gets nothing, and it is acked."""
    tables = Shape().tables(database)
    tables.add(b"body")
    lease, calls = 1.5, 0
    tokens: set[Any] = set()

    async def slow(_: Delivery[bytes]) -> None:
        nonlocal calls
        calls += 1
        end = trio.current_time() + 3 * lease
        while trio.current_time() < end:
            await trio.sleep(0.05)
            tokens.add((await trio.to_thread.run_sync(tables.row))["locked_until"])  # else the keeper could not run

    rival = tables.broker(0.02).queue(tables.table())
    async with open_link(rival) as link, trio.open_nursery() as nursery:
        async with open_runtime(Subscription(queue_of(tables, Shape(), lease), slow, name="jobs")):
            await until(lambda: calls)
            nursery.start_soon(link.receive, 1)
            with trio.fail_after(30):
                while await trio.to_thread.run_sync(tables.rows):
                    await trio.sleep(0.1)  # noqa: ASYNC110 -- the database tells
        nursery.cancel_scope.cancel()
    assert calls == 1
    assert len(tokens) >= 4, "renewed, several times"
    assert None not in tokens
