"""A table that somebody alters under the worker: nothing is read or settled by columns that are not what they were."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from actors import Runtime, Subscription, open_runtime
from links.abc import Link
from links.errors import LinkRefused, NotApplied, PublishNotAccepted
from links.sql import SqlQueue, Table
from settlement import Ack, Delivery, Outcome, Policy, Retry
from settlement.delivery import Letter
from settlement.sql import Delay, Finish, MoveToTable, PutBack, Verb
from tests.links.sqlite_kit import Database, attached, broker_of, finish, near, now, open_link, order, say, until

pytestmark = pytest.mark.sqlite

ROLES = {
    "payload": "body",
    "headers": "heads",
    "partition_key": "lane",
    "group": "grp",
    "priority": "prio",
    "retry_after": "due",
    "attempt": "tries",
    "processed_at": "done",
    "locked_until": "lease",
}
CREATE = (
    "(id INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB, heads TEXT, lane TEXT, grp TEXT, "
    "prio INTEGER NOT NULL DEFAULT 0, due REAL NOT NULL DEFAULT 0, "
    "tries INTEGER NOT NULL DEFAULT 1, done REAL, lease REAL)"
)
POLICY = Policy(max_attempts=1, dead_letter="dead")


def described(name: str = "jobs", *without: str, **roles: Any) -> Table[bytes]:
    given: dict[str, Any] = {**ROLES, **roles}
    return Table(name, id="id", **{role: column for role, column in given.items() if role not in without})


@asynccontextmanager
async def at_work(
    path: Path, table: Table[Any] | None = None, policy: Policy = POLICY, group: str | None = None
) -> AsyncGenerator[tuple[Database, SqlQueue[Any], Link[Any]], None]:
    """A link that has claimed nothing yet, on jobs without groups and their dead-letter table."""
    database = Database(path / "q.db")
    for name in ("jobs", "dead"):
        database.run(f"CREATE TABLE {name} {CREATE}")
    queue = database.broker().queue(table or described("jobs", "group"), group=group)
    async with queue.broker.connect(), attached(queue, policy=policy) as link:
        yield database, queue, link


@pytest.mark.parametrize("how", ["RENAME COLUMN {0} TO other", "DROP COLUMN {0}"])
@pytest.mark.parametrize("column", ROLES.values())
async def test_a_column_that_goes_away_is_missed(how: str, column: str, tmp_path: Path) -> None:
    """The claim is refused, naming it; of the rows, of another group and not yet due ones too, none is touched."""
    async with at_work(tmp_path, described(), Policy(), "mail") as (database, _, link):
        database.run("INSERT INTO jobs (body, grp) VALUES ('x', 'mail'), ('y', ?), ('z', 'paper')", column)
        database.run("INSERT INTO jobs (body, grp, due) VALUES ('later', 'mail', ?)", now() + 1000)
        database.run(f"ALTER TABLE jobs {how.format(column)}")
        before = database.rows()
        role = next(role for role, name in ROLES.items() if name == column)
        with pytest.raises(
            LinkRefused, match=f"subscription 'test', table 'jobs': there is no column '{column}' for the role {role}"
        ):
            await link.receive(10)
        assert database.rows() == before


async def test_a_renamed_key_is_missed(tmp_path: Path) -> None:
    """As a text it was equal to itself in every row: all were claimed and all were settled."""
    async with at_work(tmp_path) as (database, _, link):
        database.run("INSERT INTO jobs (body) VALUES ('a'), ('b'), ('c')")
        (received,) = await link.receive(1)
        database.run("ALTER TABLE jobs RENAME COLUMN id TO number")
        before = database.run("SELECT * FROM jobs")
        with pytest.raises(LinkRefused, match="there is no column 'id' for the role id"):
            await link.receive(3)
        (verdict,) = await link.settle([say(received, Finish())])
        assert isinstance(verdict, NotApplied)
        assert "there is no column 'id' for the role id" in str(verdict)
        assert database.run("SELECT * FROM jobs") == before


@pytest.mark.parametrize("verb", [Finish(), PutBack(count=False), Delay(5.0, count=False), MoveToTable("dead")])
@pytest.mark.parametrize("column", ["body", "due", "done", "tries", "lease"])
async def test_a_verb_on_an_altered_table_is_not_applied(verb: Verb, column: str, tmp_path: Path) -> None:
    """What was claimed before is settled by columns that are there, or not at all; mended, the verb is said."""
    async with at_work(tmp_path) as (database, _, link):
        database.run("INSERT INTO jobs (body) VALUES ('a'), ('b')")
        (received,) = await link.receive(1)
        database.run(f"ALTER TABLE jobs RENAME COLUMN {column} TO other")
        before = (database.rows(), database.rows("dead"))
        (verdict,) = await link.settle([say(received, verb)])
        assert isinstance(verdict, NotApplied)
        assert f"there is no column '{column}'" in str(verdict)
        with pytest.raises(LinkRefused, match="there is no column"):
            await link.extend([received])
        assert (database.rows(), database.rows("dead")) == before


async def test_an_added_column_moves_too(tmp_path: Path) -> None:
    """Added to both tables while the worker runs, in any order of columns: its value arrives."""
    async with at_work(tmp_path) as (database, queue, link):
        database.run("INSERT INTO jobs (body) VALUES ('before')")
        (before,) = await link.receive(1)
        for text in ("dead ADD COLUMN note TEXT", "dead ADD COLUMN customer TEXT", "jobs ADD COLUMN customer TEXT"):
            database.run(f"ALTER TABLE {text}")
        database.run("UPDATE jobs SET customer = 'ACME'")
        database.run("INSERT INTO jobs (body, customer) VALUES ('after', 'Bell')")
        (after,) = await link.receive(1)
        assert await link.settle([order(queue, each, Retry(), POLICY) for each in (before, after)]) == [None, None]
        assert database.run("SELECT body, customer FROM dead ORDER BY id") == [("before", "ACME"), ("after", "Bell")]


async def test_an_added_column_without_a_place_stays(tmp_path: Path) -> None:
    """Added to the queue alone: the row would lose it, so nothing moves, and the refusal says what to add."""
    async with at_work(tmp_path) as (database, queue, link):
        database.run("INSERT INTO jobs (body) VALUES ('x')")
        (received,) = await link.receive(1)
        database.run("ALTER TABLE jobs ADD COLUMN customer TEXT DEFAULT 'ACME'")
        (verdict,) = await link.settle([order(queue, received, Retry(), POLICY)])
        assert isinstance(verdict, NotApplied)
        with pytest.raises(LinkRefused, match="dead-letter table 'dead': there is no column 'customer' to write to"):
            await link.receive(1)
        assert (len(database.rows()), database.rows("dead")) == (1, [])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("DROP TABLE dead", "dead-letter table 'dead': there is no such table"),
        ("ALTER TABLE dead RENAME TO graves", "dead-letter table 'dead': there is no such table"),
        ("ALTER TABLE dead RENAME COLUMN body TO what", "dead-letter table 'dead': there is no column 'body'"),
        ("ALTER TABLE dead ADD COLUMN why TEXT NOT NULL DEFAULT ''", None),
        ("CREATE TABLE another (x)", None),
        ("CREATE INDEX whatever ON jobs (body)", None),
    ],
)
async def test_the_dead_letter_table_is_looked_at_again(text: str, reason: str | None, tmp_path: Path) -> None:
    """What still fits goes on in the same life; what does not is refused before a message needs it."""
    async with at_work(tmp_path) as (database, queue, link):
        database.run(text)
        database.run("INSERT INTO jobs (body) VALUES ('x')")
        if reason is not None:
            with pytest.raises(LinkRefused, match=reason):
                await link.receive(1)
            return
        (received,) = await link.receive(1)
        assert await link.settle([order(queue, received, Retry(), POLICY)]) == [None]
        assert [row["body"] for row in database.rows("dead")] == ["x"]


async def test_a_table_that_is_made_again(tmp_path: Path) -> None:
    """Dropped: refused. Made again with times in another type and columns in another order: served as it is now."""
    async with at_work(tmp_path, described("jobs", "group", "priority"), Policy()) as (database, _, link):
        database.run("INSERT INTO jobs (body) VALUES ('old')")
        (old,) = await link.receive(1)
        database.run("DROP TABLE jobs")
        with pytest.raises(LinkRefused, match="table 'jobs': there is no such table"):
            await link.receive(1)
        database.run(
            "CREATE TABLE jobs (lease INTEGER, done TEXT, due INTEGER NOT NULL DEFAULT 0, tries INT DEFAULT 1, lane, "
            "heads, body, id INTEGER PRIMARY KEY AUTOINCREMENT)"
        )
        database.run("INSERT INTO jobs (body) VALUES ('new'), ('newer')")
        (newer,) = await link.receive(2)  # the other one has an id that is held here, until that has ended
        assert near(newer.token[1] / 1e6, now() + 30)
        verdicts = await link.settle([say(old, Finish()), say(newer, Finish())])
        assert (type(verdicts[0]).__name__, verdicts[1:]) == ("LeaseLost", [None])
        (new,) = await link.receive(2)
        before = now()
        assert await link.settle([say(new, Delay(7.0, count=False))]) == [None]
        (due,), (done,) = database.run("SELECT due FROM jobs WHERE id = 1") + database.run(
            "SELECT done FROM jobs WHERE id = 2"
        )
        assert (near(due / 1e6, before + 7), done.endswith("Z")) == (True, True)


async def test_a_row_is_read_as_the_table_is_now(tmp_path: Path) -> None:
    """Row mode: a column more is in the message from then on."""
    database = Database(tmp_path / "q.db")
    database.run("CREATE TABLE jobs (id INTEGER PRIMARY KEY, a, lease REAL)")
    database.run("INSERT INTO jobs (a) VALUES (1), (2)")
    async with open_link(database.broker().queue(Table("jobs", id="id", locked_until="lease"))) as link:
        (first,) = await link.receive(1)
        database.run("ALTER TABLE jobs ADD COLUMN b DEFAULT 'more'")
        (second,) = await link.receive(1)
        assert [each.delivery.message for each in (first, second)] == [
            {"id": 1, "a": 1, "lease": None},
            {"id": 2, "a": 2, "lease": None, "b": "more"},
        ]
        assert await link.settle(finish([first, second])) == [None, None]


async def test_a_publisher_hears_of_another_type(tmp_path: Path) -> None:
    """A delay is written as the column is now; a column that is gone is `PublishNotAccepted`, and comes back."""
    table = described("jobs", "group", "priority")
    async with at_work(tmp_path, table, Policy()) as (database, queue, _):
        publisher = broker_of(queue).publisher(table)
        await publisher.publish(b"before", headers={"a": b"b"})
        database.run("DROP TABLE jobs")
        with pytest.raises(PublishNotAccepted, match="there is no table 'jobs'"):
            await publisher.publish(b"nowhere")
        database.run(f"CREATE TABLE jobs {CREATE.replace('due REAL', 'due INTEGER')}")
        before = now()
        await publisher.send(Letter(b"later", deliver_after=50.0))
        (row,) = database.rows()
        assert isinstance(row["due"], int)
        assert near(row["due"] / 1e6, before + 50)
        database.run("ALTER TABLE jobs RENAME COLUMN body TO what")
        with pytest.raises(PublishNotAccepted, match="table 'jobs' has no column 'body'"):
            await publisher.publish(b"nowhere")
        database.run("ALTER TABLE jobs RENAME COLUMN what TO body")
        await publisher.publish(b"again")
        assert [row["body"] for row in database.rows()] == [b"later", b"again"]


async def test_a_worker_that_lost_a_column_is_degraded_and_goes_on_when_it_is_back(tmp_path: Path) -> None:
    """Through the runtime: no call, nothing settled, the refusal in `degraded`; mended, the same rows are handled."""
    database = Database(tmp_path / "q.db")
    database.run(f"CREATE TABLE jobs {CREATE}")
    database.run("CREATE INDEX jobs_due ON jobs (prio, due, id) WHERE done IS NULL")
    calls: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        calls.append(delivery.body)
        return Ack()

    queue = database.broker(0.02).queue(described("jobs", "group"))
    async with open_runtime(Subscription(queue, handler, name="billing")) as runtime:
        database.run("ALTER TABLE jobs RENAME COLUMN body TO payload")
        database.run("INSERT INTO jobs (payload) VALUES ('precious')")
        await until(lambda: "no column 'body'" in str(degraded(runtime)))
        assert (calls, database.rows()[0]["done"]) == ([], None)
        database.run("ALTER TABLE jobs RENAME COLUMN payload TO body")
        with trio.fail_after(10):
            await until(lambda: runtime.ledger("billing").acked == 1, within=10)
    assert calls == [b"precious"]


def degraded(runtime: Runtime) -> object:
    return runtime.statistics()["billing"]
