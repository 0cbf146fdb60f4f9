"""docs/queue-tables.md: its programs run, its SQL is what `Table.ddl` gives, and a link attaches without a word."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy
import sqlalchemy.orm
import trio

from links.errors import LinkRefused
from links.sql import AdvisoryLock, SqlBroker
from settlement import Policy
from settlement.sql import Finish, MoveToTable
from tests.links.mysql_kit import run
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import attached, bodies, open_link, say

PAGE = (Path(__file__).parent.parent / "docs" / "queue-tables.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def normal(sql: str) -> str:
    return " ".join(re.sub(r"--.*", "", sql).split())


@pytest.mark.sqlite
async def test_the_page_is_true(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    """The Python block prints the first SQL block; its tables attach, with a dead letter, without a warning."""
    names: dict[str, Any] = {}
    (program, *_), (sql, *_) = blocks("python"), blocks("sql")
    exec(program, names)  # noqa: S102 -- our own page
    assert normal(capsys.readouterr().out) == normal(sql)
    path = tmp_path / "q.db"
    with closing(sqlite3.connect(path)) as database:
        database.executescript(sql)
    queue = SqlBroker(f"sqlite:///{path}").queue(names["ORDERS"])
    async with queue.broker.connect(), attached(queue, policy=Policy(max_attempts=3, dead_letter="dead_orders")):
        pass
    assert caplog.records == []


@pytest.mark.postgres
@pytest.mark.servers
async def test_the_page_is_true_of_postgresql(database: str, capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    """The second SQL block is what `ddl("postgresql")` gives, also a second time; a link attaches without a warning."""
    names: dict[str, Any] = {}
    (program, *_), (_, sql, *_) = blocks("python"), blocks("sql")
    exec(program, names)  # noqa: S102 -- our own page
    capsys.readouterr()
    assert normal(names["ORDERS"].ddl("postgresql")) == normal(sql)
    tables = PostgresTables(database)
    for _ in range(2):
        tables.run(names["ORDERS"].ddl("postgresql"))
    queue = tables.broker().queue(names["ORDERS"])
    async with queue.broker.connect(), attached(queue, policy=Policy(max_attempts=3, dead_letter="dead_orders")):
        pass
    assert caplog.records == []


@pytest.mark.mysql
@pytest.mark.servers
async def test_the_page_is_true_of_mysql(
    mysql_database: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The third SQL block is what `ddl("mysql")` gives, also a second time; a link attaches without a warning."""
    names: dict[str, Any] = {}
    (program, *_), (*_, sql) = blocks("python"), blocks("sql")
    exec(program, names)  # noqa: S102 -- our own page
    capsys.readouterr()
    assert normal(names["ORDERS"].ddl("mysql")) == normal(names["ORDERS"].ddl("mariadb")) == normal(sql)
    for _ in range(2):
        for statement in filter(str.strip, normal(names["ORDERS"].ddl("mysql")).split(";")):
            run(mysql_database, statement)
    queue = SqlBroker(mysql_database).queue(names["ORDERS"])
    async with queue.broker.connect(), attached(queue, policy=Policy(max_attempts=3, dead_letter="dead_orders")):
        pass
    assert caplog.records == []


@pytest.mark.sqlite
async def test_the_statements_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    """The newest row comes first; on SQLite as the page says."""
    names: dict[str, Any] = {}
    for program in blocks("python"):
        exec(program, names)  # noqa: S102 -- our own page
    capsys.readouterr()
    path = tmp_path / "q.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(names["ORDERS"].ddl("sqlite"))
        database.execute("INSERT INTO orders (body) VALUES (x'61'), (x'62')")
    names["NEWEST_FIRST"]["claim"] = names["NEWEST_FIRST"]["claim"].replace("FOR UPDATE SKIP LOCKED", "")
    async with open_link(names["newest_first"](SqlBroker(f"sqlite:///{path}"))) as link:
        assert bodies(await link.receive(1)) == [b"b"]
    assert caplog.records == []


@pytest.mark.postgres
@pytest.mark.servers
async def test_the_statements_of_the_page_on_postgresql(
    database: str, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    """The newest row comes first."""
    names: dict[str, Any] = {}
    for program in blocks("python"):
        exec(program, names)  # noqa: S102 -- our own page
    capsys.readouterr()
    tables = PostgresTables(database)
    tables.run(names["ORDERS"].ddl("postgresql"))
    tables.run("INSERT INTO orders (body) VALUES ('a'), ('b')")
    async with open_link(names["newest_first"](tables.broker())) as link:
        assert bodies(await link.receive(1)) == [b"b"]
    assert caplog.records == []


@pytest.mark.sqlite
async def test_the_fifo_table_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    """Its own ddl attaches without a warning; what the page says is refused is refused."""
    names: dict[str, Any] = {}
    for program in blocks("python"):
        exec(program, names)  # noqa: S102 -- our own page
    capsys.readouterr()
    path = tmp_path / "q.db"
    with closing(sqlite3.connect(path)) as database:
        database.executescript(names["LEDGERS"].ddl("sqlite"))
    broker = SqlBroker(f"sqlite:///{path}")
    async with broker.connect(), attached(broker.queue(names["LEDGERS"], group="alice")):
        pass
    assert caplog.records == []
    with pytest.raises(ValueError, match="limit must be 1"):
        broker.queue(names["LEDGERS"], group="alice", limit=2)
    with pytest.raises(ValueError, match="put the group into the key"):
        broker.queue(names["LEDGERS"], group="alice", claim=AdvisoryLock("alice"))


async def publishing(broker: SqlBroker, connection: Any, rows: Callable[[str], list[dict[str, Any]]]) -> None:
    """Run what the page says of publishing, on tables that are there; `customers` is the user's own."""
    names: dict[str, Any] = {}
    for program in blocks("python"):
        exec(program, names)  # noqa: S102 -- our own page
    async with broker.connect():
        await names["publish"](broker)
        names["register"](connection, "Ada")
        assert "welcome, Ada" not in str(rows("orders"))
        connection.commit()
        found = rows("orders")
        assert sorted(bytes(row["body"]) for row in found) == [
            b"all",
            b"at an instant",
            b"in a minute",
            b"now",
            b"or none",
            b"under an id of yours",
            b"welcome, Ada",
        ]
        assert len(rows("customers")) == 1
        queue = broker.queue(names["ORDERS"])
        async with attached(queue, policy=Policy(max_attempts=3, dead_letter="dead_orders")) as link:
            received = await link.receive(2)
            assert await link.settle([say(received[0], Finish()), say(received[1], MoveToTable("dead_orders"))]) == [
                None,
                None,
            ]
        assert len(rows("dead_orders")) == 1
        names.update(timedelta=lambda **_: timedelta(0))  # a week and a season have gone by
        await trio.sleep(0.01)
        assert await names["clean_up"](broker) == 2
    assert (len(rows("orders")), rows("dead_orders")) == (5, [])


@pytest.mark.sqlite
async def test_publishing_is_true(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On SQLite, with the dead-letter table's own column in the form of its times."""
    now = "REAL NOT NULL DEFAULT (julianday('now') * 86400.0 - 210866760000.0)"
    path = tmp_path / "q.db"
    sql, dead = blocks("sql")[0].split("CREATE TABLE IF NOT EXISTS dead_orders (")
    with closing(sqlite3.connect(path)) as database:
        database.executescript(f"{sql} CREATE TABLE dead_orders (died_at {now}, {dead} CREATE TABLE customers (name)")

        def rows(table: str) -> list[dict[str, Any]]:
            with closing(sqlite3.connect(path)) as other:
                other.row_factory = sqlite3.Row
                return [dict(row) for row in other.execute(f"SELECT * FROM {table}")]  # noqa: S608

        await publishing(SqlBroker(f"sqlite:///{path}"), database, rows)
    capsys.readouterr()


@pytest.mark.postgres
@pytest.mark.servers
async def test_publishing_is_true_of_postgresql(database: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And a SQLAlchemy session inserts as the page says."""
    tables = PostgresTables(database)
    tables.run(blocks("sql")[1])
    tables.run("ALTER TABLE dead_orders ADD COLUMN died_at timestamptz NOT NULL DEFAULT now()")
    tables.run("CREATE TABLE customers (id serial PRIMARY KEY, name text)")
    with psycopg.connect(database) as connection:
        await publishing(tables.broker(), connection, tables.rows)
    names: dict[str, Any] = {}
    for program in blocks("python"):
        exec(program, names)  # noqa: S102 -- our own page
    engine = sqlalchemy.create_engine(database.replace("postgresql://", "postgresql+psycopg://"))
    try:
        with sqlalchemy.orm.Session(engine) as session, session.begin():
            names["register_by_session"](session)
    finally:
        engine.dispose()
    assert b"by a session" in [row["body"] for row in tables.rows("orders")]
    capsys.readouterr()


@pytest.mark.postgres
@pytest.mark.servers
@pytest.mark.parametrize("way", ["the statement", "the trigger"])
async def test_what_the_page_says_of_own_inserts(database: str, way: str) -> None:
    """Each plpgsql block wakes a queue that would not poll for ten minutes."""
    names: dict[str, Any] = {}
    (program, *_), (statement, trigger) = blocks("python"), blocks("plpgsql")
    exec(program, names)  # noqa: S102 -- our own page
    tables = PostgresTables(database)
    tables.run(names["ORDERS"].ddl("postgresql"))
    if way == "the trigger":
        tables.run(trigger)
    queue = SqlBroker(database, poll_interval=600.0, listen_notify=True).queue(names["ORDERS"])
    async with open_link(queue) as link:
        for _ in range(2):  # the first look finds what is there anyhow
            with trio.fail_after(10):
                if way == "the trigger":
                    tables.run(statement.splitlines()[0])
                else:
                    tables.run(statement)
                assert bodies(await link.receive(1)) == [b"by hand"]
            with trio.move_on_after(0.3):
                await link.receive(1)


@pytest.mark.sqlite
async def test_the_class_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row comes as its instance; what the page says is refused is refused."""
    names: dict[str, Any] = {}
    for program in blocks("python"):
        exec(program, names)  # noqa: S102 -- our own page
    capsys.readouterr()
    path = tmp_path / "q.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("CREATE TABLE invoices (id INTEGER PRIMARY KEY, customer TEXT, paid INT, locked_until REAL)")
        database.execute("INSERT INTO invoices (customer) VALUES ('alice')")
        queue = SqlBroker(f"sqlite:///{path}").queue(names["INVOICES"])
        async with queue.broker.connect(), attached(queue) as link:
            (received,) = await link.receive(1)
            assert received.delivery.message == names["Invoice"](1, "alice")
        database.execute("ALTER TABLE invoices RENAME customer TO buyer")
        with pytest.raises(LinkRefused, match="no column 'customer' for that field of Invoice"):
            async with queue.broker.connect(), attached(queue):
                pass
