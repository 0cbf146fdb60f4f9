"""`Table.ddl`, and the index that a claim walks along: what SQLite itself plans, and how many rows a claim reads."""

# ruff: noqa: S608 -- texts of the tests' own

from __future__ import annotations

import itertools
import sqlite3
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from links.sql import SqlBroker, Table
from links.sql.jobs import Passing
from links.sql.sqlite.ddl import plain
from links.sql.sqlite.lease import SqliteLease
from links.sql.sqlite.plans import unserved
from links.sql.sqlite.schema import read_schema
from settlement import Policy
from settlement.sql import AdvisoryLock, Finish, MoveToTable
from tests.links.sqlite_kit import Database, attached, bodies, broker_of, finish, open_link, say

pytestmark = pytest.mark.sqlite

OPTIONAL = {
    "payload": "body",
    "group": "group",
    "priority": "rank",
    "partition_key": "lane",
    "retry_after": "due",
    "attempt": "attempt",
    "processed_at": "done",
    "headers": "headers",
}
ORDERING = ("group", "priority", "retry_after", "processed_at")
SUBSETS = [
    [role for role, there in zip(ORDERING, chosen, strict=True) if there]
    for chosen in itertools.product((False, True), repeat=4)
]


def described(roles: list[str], name: str = "jobs") -> Table[Any]:
    given: dict[str, Any] = {role: OPTIONAL[role] for role in roles}
    return Table(name, id="id", locked_until="lock", **given)


def created(path: Path, text: str) -> Database:
    database = Database(path / "q.db")
    with closing(sqlite3.connect(database.path)) as connection:
        connection.executescript(text)
    return database


# --- the text


@pytest.mark.parametrize("roles", SUBSETS, ids="+".join)
async def test_what_it_gives_attaches_without_a_word(
    roles: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For any roles: publish, claim, finish, and move to the dead-letter table that it made; no warning."""
    table = described([*roles, "payload", "attempt", "headers", "partition_key"])
    database = created(tmp_path, table.ddl("sqlite"))
    group = "mail" if table.group else None
    policy = Policy() if group else Policy(max_attempts=3, dead_letter="dead_jobs")
    queue = database.broker().queue(table, group=group)
    async with queue.broker.connect(), attached(queue, policy=policy) as link:
        publisher = broker_of(queue).publisher(table, group=group)
        for body in (b"a", b"b"):
            await publisher.publish(body, {"x": b"y"}, key="k")
        received = await link.receive(2)
        assert (bodies(received), [each.delivery.attempt for each in received]) == ([b"a", b"b"], [1, 1])
        verb = Finish() if group else MoveToTable("dead_jobs")
        assert await link.settle([say(received[0], Finish()), say(received[1], verb)]) == [None, None]
    assert caplog.records == []


async def test_in_row_mode_the_columns_are_yours(tmp_path: Path) -> None:
    """It says where to put them; what it makes serves as it stands."""
    table = Table("jobs", id="id", locked_until="lock")
    text = table.ddl("sqlite")
    assert "the message is the whole row: put its columns in here" in text
    database = created(tmp_path, text)
    database.run("INSERT INTO jobs DEFAULT VALUES")
    async with open_link(database.broker().queue(table)) as link:
        received = await link.receive(1)
        assert received[0].delivery.message == {"id": 1, "lock": None}
        assert await link.settle(finish(received)) == [None]


def test_it_says_what_it_does(tmp_path: Path) -> None:
    """The whole text of a table: a reason over each column, the index, the dead letters."""
    table = Table("orders", id="id", payload="body", retry_after="due", locked_until="lock", processed_at="order")
    text = table.ddl("sqlite")
    queue, index, dead = text.split("\n\n")
    assert queue == (
        "-- the queue\n"
        "CREATE TABLE IF NOT EXISTS orders (\n"
        "    -- no id is given twice, so a row that moves finds its own free\n"
        "    id INTEGER PRIMARY KEY AUTOINCREMENT,\n"
        "    -- due from then on, Unix seconds; the default is now; a column that may be NULL does not order\n"
        "    due REAL NOT NULL DEFAULT (julianday('now') * 86400.0 - 210866760000.0),\n"
        "    -- NULL or past: free; else leased until then, Unix seconds\n"
        "    lock REAL,\n"
        "    -- NULL: not finished; finished rows stay, with the time in Unix seconds\n"
        '    "order" REAL,\n'
        "    -- the message's bytes; last, so that the rest is read without it\n"
        "    body BLOB NOT NULL\n"
        ");"
    )
    assert index.endswith('CREATE INDEX IF NOT EXISTS orders_due ON orders (due, id) WHERE "order" IS NULL;')
    assert dead.startswith("-- where dead letters move to")
    assert "CREATE TABLE IF NOT EXISTS dead_orders (" in dead
    created(tmp_path, text)


def test_it_may_run_at_every_start(tmp_path: Path) -> None:
    """Rows stay, and what a start before did not come to is made up for."""
    text = described(["payload", "retry_after"]).ddl("sqlite")
    database = created(tmp_path, text)
    database.run("INSERT INTO jobs (body) VALUES (x'61')")
    database.run("DROP TABLE dead_jobs")
    database.run("DROP INDEX jobs_due")
    with closing(sqlite3.connect(database.path)) as connection:
        connection.executescript(text)
        made = connection.execute("SELECT name FROM sqlite_master WHERE name IN ('dead_jobs', 'jobs_due')").fetchall()
        assert len(made) == 2
        assert connection.execute("SELECT body FROM jobs").fetchall() == [(b"a",)]


@pytest.mark.parametrize("name", ["my table", 'de"ad', "order", "main.jobs", "main.my jobs", "123"])
async def test_names_are_quoted_where_they_must_be(name: str, tmp_path: Path) -> None:
    """Keywords, blanks, quotes and schemas in the table's name."""
    table = described(["payload", "retry_after"], name)
    database = created(tmp_path, table.ddl("sqlite"))
    async with open_link(SqlBroker(f"sqlite:///{database.path}").queue(table)) as link:
        link.stop()
    assert [plain("jobs"), plain("Group"), plain("a b"), plain("rank_of")] == ["jobs", '"Group"', '"a b"', "rank_of"]


@pytest.mark.parametrize("dialect", ["postgres", "SQLite", "", "oracle"])
def test_another_dialect_is_refused(dialect: str) -> None:
    """The error names those that there are, and what was given."""
    with pytest.raises(ValueError, match=f"one of mariadb, mysql, postgresql, sqlite, not '{dialect}'"):
        described([]).ddl(dialect)


def test_a_table_without_a_lease_is_for_the_advisory_form() -> None:
    """S-2.6: it has no such column, and its queue takes an `AdvisoryLock` alone."""
    table = Table("jobs", id="id", payload="body", retry_after="due", attempt="attempt")
    text = table.ddl("sqlite")
    assert "attempt INTEGER" in text
    assert "leased" not in text
    queue = SqlBroker("sqlite:///jobs.db").queue(table, claim=AdvisoryLock("job-{id}"))
    assert queue.lease is None


# --- the index


@contextmanager
def opened(database: Database) -> Generator[sqlite3.Connection, None, None]:
    with closing(sqlite3.connect(database.path, isolation_level=None)) as connection:
        yield connection


def plan_of(database: Database, table: Table[Any]) -> tuple[str | None, list[str]]:
    """What is said of the claim, and SQLite's own plan of the very statement that a claim runs."""
    with opened(database) as connection:
        schema: Any = read_schema(connection, table.name)
        values: dict[str, int] = dict.fromkeys(("now", "due", "group", "room"), 0)
        plan = connection.execute(f"EXPLAIN QUERY PLAN {schema.statements(table).claim}", values).fetchall()
        return unserved(connection, table, schema.statements(table)), [row[3] for row in plan]


INDEXES = [
    (["retry_after"], "(due, id)", None),
    (["retry_after"], "(due)", None),
    (["retry_after"], "(due, body)", "reads and sorts"),
    (["retry_after"], "(lock)", "reads and sorts"),
    (["retry_after"], "(due, id) WHERE lock IS NULL", "reads and sorts"),
    (["retry_after", "processed_at"], "(due, id)", "passes over the rows that are finished"),
    (["retry_after", "processed_at"], "(due, id) WHERE done IS NOT NULL", "reads and sorts"),
    (["retry_after", "processed_at"], "(due, id) WHERE done IS NULL", None),
    (["retry_after", "processed_at"], "(done, due)", None),
    (["processed_at"], "(id) WHERE done IS NULL", None),
    (["processed_at"], "(due)", "passes over the rows that are finished"),
    (["priority", "retry_after", "processed_at"], "(rank, due)", "passes over the rows that are finished"),
    (["priority", "retry_after", "processed_at"], "(rank, due) WHERE done IS NULL", None),
    (["priority", "retry_after"], "(due, id)", "reads and sorts"),
    (["group", "retry_after"], '("group", due, id)', None),
    (["group", "retry_after"], "(due, id)", "passes over the rows of other groups"),
    (["group", "retry_after"], '("group")', "reads and sorts"),
    (["group"], "(id)", "passes over the rows of other groups"),
    (["group", "priority"], '("group", rank)', None),
    ([], "(due)", None),
]


@pytest.mark.parametrize(
    ("roles", "index", "why"), INDEXES, ids=lambda value: "+".join(value) if isinstance(value, list) else None
)
async def test_a_claim_without_an_index_is_told(
    roles: list[str], index: str, why: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning when the link attaches; the index that it names makes the next attach silent."""
    table = described([*roles, "payload"])
    columns = [
        "id INTEGER PRIMARY KEY",
        '"group" TEXT',
        "rank INTEGER NOT NULL DEFAULT 0",
        "due REAL NOT NULL DEFAULT 0",
    ]
    database = Database(tmp_path / "q.db")
    database.run(f"CREATE TABLE jobs ({', '.join(columns)}, body, lock REAL, done REAL)")
    database.run(f'CREATE INDEX "an index (of jobs)" ON jobs {index}')
    queue = database.broker().queue(table, group="mail" if table.group else None)
    async with queue.broker.connect():
        async with attached(queue):
            said = [record.message for record in caplog.records]
        if why is None:
            assert said == []
            return
        (line,) = said
        assert line.startswith(f"subscription 'test', table 'jobs': a claim {why}")
        caplog.clear()
        database.run(line[line.index("CREATE INDEX") :])
        async with attached(queue):
            assert caplog.records == []


@pytest.mark.parametrize(("column", "role"), [("rank", "priority"), ("due", "retry_after")])
async def test_a_nullable_column_of_the_order_is_told(
    column: str, role: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not order, and a nullable due makes every index on it useless: one warning says so."""
    database = Database(tmp_path / "q.db")
    database.run(
        "CREATE TABLE jobs (id INTEGER PRIMARY KEY, body, lock REAL, rank INTEGER DEFAULT 0, due REAL DEFAULT 0)"
    )
    async with open_link(database.broker().queue(described([role, "payload"]))):
        pass
    (record,) = caplog.records
    assert f"column '{column}' ({role}) may be NULL, so it does not order the queue" in record.message
    assert ("no index on it helps a claim" in record.message) == (role == "retry_after")


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("roles", SUBSETS, ids="+".join)
def test_a_claim_reads_what_it_takes(roles: list[str], analyzed: bool, tmp_path: Path) -> None:
    """Over the recommended index at 100 and at 20,000 rows, finished and foreign ones among them: the same steps."""
    table = described([*roles, "payload", "attempt"])
    steps: list[int] = []
    for count in (100, 20_000):
        path = tmp_path / str(count)
        path.mkdir()
        database = created(path, table.ddl("sqlite"))
        fill(database, table, count, analyzed=analyzed)
        said, plan = plan_of(database, table)
        assert said is None, plan
        assert not any("TEMP B-TREE" in step for step in plan)
        steps.append(steps_of_a_claim(database, table))
    assert steps[1] <= 1.5 * steps[0] + 50, steps


def test_a_claim_of_a_hundred_thousand_rows_reads_what_it_takes(tmp_path: Path) -> None:
    """The same steps as of a hundred."""
    roles = max(SUBSETS, key=len)
    table = described([*roles, "payload", "attempt"])
    steps: list[int] = []
    for count in (100, 100_000):
        path = tmp_path / str(count)
        path.mkdir()
        database = created(path, table.ddl("sqlite"))
        fill(database, table, count, analyzed=False)
        steps.append(steps_of_a_claim(database, table))
    assert steps[1] <= 1.5 * steps[0] + 50, steps


def fill(database: Database, table: Table[Any], count: int, *, analyzed: bool) -> None:
    values = {"body": "x'00'"}
    if table.group:
        values['"group"'] = "CASE i % 3 WHEN 0 THEN 'mail' ELSE 'other' END"
    if table.priority:
        values["rank"] = "i % 5"
    if table.processed_at:  # all but the last fifty are finished
        values["done"] = f"CASE WHEN i <= {count} - 50 THEN 1.0e9 END"
    database.run(
        f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count}) "
        f"INSERT INTO jobs ({', '.join(values)}) SELECT {', '.join(values.values())} FROM n"
    )
    if analyzed:
        database.run("ANALYZE")


def steps_of_a_claim(database: Database, table: Table[Any]) -> int:
    """How many instructions SQLite's machine runs for a claim of ten, ten times: no clock, so no busy machine."""
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    with opened(database) as connection:
        names: dict[str, Any] = {"subscription": "test", "beside": NotImplemented}
        form = SqliteLease(connection, table, "mail" if table.group else None, lease=30.0, **names)
        connection.execute("BEGIN IMMEDIATE")
        connection.set_progress_handler(count, 10)
        for _ in range(3):
            assert len(form.claim(connection, time.time_ns() // 1000 + 1_000_000, 5, Passing({}, frozenset()))) == 5
        connection.set_progress_handler(None, 10)
        connection.execute("ROLLBACK")
    return steps
