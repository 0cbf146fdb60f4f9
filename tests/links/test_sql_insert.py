"""`links.sql.insert`: a message written by the user's own connection, in the user's own transaction."""

# ruff: noqa: S608 -- the tests' own names

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Generator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy
import sqlalchemy.orm
import trio
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from actors import Subscription, open_runtime
from links.errors import PublishNotAccepted
from links.sql import RowLock, Table, insert, insert_statement, transaction
from settlement import Ack, Delivery, Outcome
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import TIMES, Database, bodies, open_link, seconds, until

POSTGRES = [pytest.mark.postgres, pytest.mark.servers]
INSTANT = datetime(2031, 5, 6, 7, 8, 9, 125000, UTC)

ODD = 'or"d`er%s :x'
ODD_COLUMN = 'b"o`dy %(v0)s :v1'


def in_double_quotes(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def odd_table(**roles: Any) -> Table[bytes]:
    given: dict[str, Any] = {
        "id": "select",
        "payload": ODD_COLUMN,
        "group": "group",
        "retry_after": "when%",
        "headers": "h:v2",
    }
    return Table(ODD, **{**given, **roles})


def create_odd(*, key: str, body: str, time: str, headers: str, column: str = ODD_COLUMN) -> str:
    columns = f'"select" {key}, {in_double_quotes(column)} {body}, "group" text, "when%" {time}, "h:v2" {headers}'
    return f"CREATE TABLE {in_double_quotes(ODD)} ({columns})"


# --- pure


ORDERS = Table("orders", id="id", payload="body", retry_after="due", headers="heads", partition_key="lane")
ROWS: Table[dict[str, Any]] = Table("orders", id="id", retry_after="due", generated=["id"])


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
@pytest.mark.parametrize(
    ("table", "body", "given", "error"),
    [
        (ORDERS, b"", {"delay": 1.0, "due": INSTANT}, "delay or due must be None"),
        (ORDERS, b"", {"due": datetime(2031, 1, 1)}, "due must be a datetime with a time zone"),  # noqa: DTZ001
        (ORDERS, b"", {"delay": -1}, "delay must be a finite number of seconds, 0 or more"),
        (ORDERS, b"", {"group": "g"}, "has no group column"),
        (Table("t", id="id", payload="p", group="g"), b"", {}, "'t' has groups"),
        (ORDERS, b"", {"once": True}, "once=True needs an id"),
        (ORDERS, {}, {}, "body must be bytes or str, not dict"),
        (ROWS, b"{}", {}, "body must be a mapping of columns, not bytes"),
        (ROWS, {"id": 1}, {}, "column 'id' of 'orders' is in generated"),
        (ROWS, {"due": 1}, {"delay": 1.0}, "column 'due' of 'orders' is given twice"),
        (ROWS, {"": 1}, {}, "a column is a name of 1 character or more"),
        (ORDERS, b"", {"headers": {"a": "b"}}, "a header is a str and bytes"),
        (ORDERS, b"", {"key": 5}, "a key is a str or None"),
    ],
)
def test_what_contradicts_itself_is_a_mistake(
    table: Table[Any], body: Any, given: dict[str, Any], error: str, dialect: str
) -> None:
    """`ValueError` that says what is meant, before any connection is asked."""
    with pytest.raises(ValueError, match=error):
        insert_statement(dialect, table, body, **given)


@pytest.mark.parametrize("given", [{"headers": {"secret": b"token"}}, {"key": "secret"}, {"delay": 1.0}])
def test_what_the_table_has_no_column_for_is_not_accepted(given: dict[str, Any]) -> None:
    """As of a publisher; what was given is not in the error."""
    with pytest.raises(PublishNotAccepted, match="table 't' cannot hold what is given as") as caught:
        insert_statement("postgresql", Table("t", id="id", payload="p"), b"", **given)
    assert "secret" not in str(caught.value)
    with pytest.raises(PublishNotAccepted, match=r"column 'due' is in generated="):
        insert_statement("sqlite", Table("t", id="id", payload="p", retry_after="due", generated="due"), b"", delay=1)


def test_other_dialects_styles_and_connections_are_refused() -> None:
    """By name, with what there is."""
    with pytest.raises(ValueError, match="dialect must be one of mariadb, mysql, postgresql, sqlite, not 'oracle'"):
        insert_statement("oracle", ORDERS, b"")
    with pytest.raises(ValueError, match="style must be 'text', 'named' or 'pyformat', not 'qmark'"):
        insert_statement("sqlite", ORDERS, b"", style="qmark")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"must be psycopg's, pymysql's or sqlite3's, not trio\.Event: .*insert_statement"
    ):
        insert(trio.Event(), ORDERS, b"")  # type: ignore[call-overload]


def test_nothing_that_the_database_fills_is_written() -> None:
    """Payload alone, where no more is given; no column at all, where a row has none."""
    guard = 'WITH a_text AS (SELECT CAST((CAST(NULL AS "orders"))."body" AS json)) '
    assert insert_statement("postgresql", ORDERS, "x") == (
        f'{guard}INSERT INTO "orders" ("body") OVERRIDING SYSTEM VALUE VALUES (:v0)',
        {"v0": "x"},
    )
    assert insert_statement("sqlite", ORDERS, b"x", id=7, once=True, style="named") == (
        "INSERT OR ABORT INTO `orders` (`body`, `id`) VALUES (:v0, :v1) ON CONFLICT (`id`) DO NOTHING",
        {"v0": b"x", "v1": 7},
    )
    assert insert_statement("postgresql", ROWS, {}) == ('INSERT INTO "orders" DEFAULT VALUES', {})
    assert insert_statement("sqlite", ROWS, {}) == ("INSERT OR ABORT INTO `orders` DEFAULT VALUES", {})


# --- SQLite


@pytest.fixture(params=[None, "tuples and bytes"])
def lite(tmp_path: Path, request: pytest.FixtureRequest) -> Generator[sqlite3.Connection, None, None]:
    with closing(sqlite3.connect(tmp_path / "q.db")) as connection:
        if request.param:  # whatever the user has made of it
            connection.row_factory = lambda _cursor, _row: {}
            connection.text_factory = bytes
        yield connection


@pytest.mark.sqlite
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("schema", ["", "main."])
async def test_a_message_commits_with_the_users_rows_on_sqlite(
    times: str, schema: str, lite: sqlite3.Connection, tmp_path: Path
) -> None:
    """Rolled back with them, and committed with them; then a queue finds it, as a published one, when it is due."""
    database = Database(tmp_path / "q.db", times).create()
    database.run("CREATE TABLE shipments (n)")
    table = database.table(f"{schema}jobs")
    for end in (lite.rollback, lite.commit):
        lite.execute("INSERT INTO shipments VALUES (1)")
        assert insert(lite, table, b"now", {"a": b"\xff"}, key="k") is True
        assert insert(lite, table, "later", delay=timedelta(seconds=90))
        assert insert(lite, table, b"at", due=INSTANT)
        assert lite.in_transaction
        assert database.rows() == []
        end()
    rows = database.rows()
    assert [row["payload"] for row in rows] == [b"now", "later", b"at"]
    assert 80 < seconds(rows[1]["retry_after"]) - datetime.now(UTC).timestamp() <= 90
    assert seconds(rows[2]["retry_after"]) == INSTANT.timestamp()
    async with open_link(database.broker().queue(database.table())) as link:
        (received,) = await link.receive(9)
        assert (received.delivery.headers, received.delivery.key) == ({"a": b"\xff"}, "k")
        assert received.delivery.attempt == 1


@pytest.mark.sqlite
def test_names_of_any_kind_on_sqlite(lite: sqlite3.Connection) -> None:
    """Quotes, backticks, percent signs, colons, reserved words; a key of the user's own, given twice."""
    lite.execute(create_odd(key="integer PRIMARY KEY", body="blob", time="real", headers="text"))
    arguments: dict[str, Any] = {"group": "g%s:v0", "delay": 0.0, "id": 7, "once": True}
    assert insert(lite, odd_table(), b"x", {"a:b": b"%s"}, **arguments) is True
    assert insert(lite, odd_table(), b"y", {"a:b": b"%s"}, **arguments) is False
    statement, values = insert_statement("sqlite", odd_table(), b"z", group="g", style="named")
    assert lite.execute(statement, values).rowcount == 1
    lite.row_factory, lite.text_factory = None, str
    assert lite.execute(f"SELECT * FROM {in_double_quotes(ODD)}").fetchall() == [
        (7, b"x", "g%s:v0", pytest.approx(datetime.now(UTC).timestamp(), abs=5), '{"a:b": "%s"}'),
        (8, b"z", "g", None, None),
    ]


@pytest.mark.sqlite
def test_what_sqlite_refuses(lite: sqlite3.Connection) -> None:
    """The driver's own errors pass; a trigger that ignores the row is noticed; a time of another type is no guess."""
    lite.execute("CREATE TABLE orders (id integer PRIMARY KEY, body text CHECK (body <> 'bad'), due datetime)")
    with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
        insert(lite, ORDERS, "bad")
    with pytest.raises(sqlite3.OperationalError, match="no column named heads"):
        insert(lite, ORDERS, "x", {"a": b"b"})
    with pytest.raises(PublishNotAccepted, match=r"'due' .retry_after. must be there and declared REAL"):
        insert(lite, ORDERS, "x", delay=1.0)
    with pytest.raises(sqlite3.OperationalError, match="integer overflow"):
        lite.execute(*insert_statement("sqlite", ORDERS, "x", delay=1.0, style="named"))
    with pytest.raises(PublishNotAccepted, match=r"'due' .retry_after. must be there"):
        insert(lite, ORDERS.renamed("none"), "x", delay=1.0)
    assert insert(lite, ORDERS, "x", id=1)
    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
        insert(lite, ORDERS, "y", id=1)
    lite.execute("CREATE TRIGGER deaf BEFORE INSERT ON orders BEGIN SELECT RAISE(IGNORE); END")
    for once in (False, True):
        with pytest.raises(PublishNotAccepted, match="a trigger has ignored it"):
            insert(lite, ORDERS, "y", id=2, once=once)
    assert lite.execute("SELECT 1 FROM orders").fetchall() != []


# --- PostgreSQL


BODIES: dict[str, Any] = {
    "bytea": b"\x00\xff\\x41",
    "text": '\\x41 {"ä": 1}',
    "varchar(20)": "\\x41",
    "jsonb": '{"a": "\\\\"}',
    "json": "[1]",
}


@pytest.mark.parametrize("kind", BODIES)
class TestPostgres:
    """Each driver by one call, into a payload column of each type, under names of any kind."""

    pytestmark = POSTGRES

    @pytest.fixture
    def tables(self, kind: str, database: str) -> PostgresTables:
        tables = PostgresTables(database)
        key = "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY"
        tables.run(create_odd(key=key, body=kind, time="timestamptz", headers="jsonb"))
        return tables

    def check(self, tables: PostgresTables, kind: str) -> None:
        """There are three rows, of ids 1, 70 and 2."""
        name, body = (in_double_quotes(each).replace("%", "%%") for each in (ODD, ODD_COLUMN))
        same = f"{body}::text = %s" if kind == "json" else f"{body} = %s::{kind}"
        rows = tables.run(f'SELECT "select", {same}, "group", "h:v2"->>\'a:b\' FROM {name} ORDER BY 1', BODIES[kind])
        assert rows == [(1, True, "g", "%s"), (2, True, "g", None), (70, True, "g", None)]
        ((delayed, dated),) = tables.run(
            f"SELECT count(*) FILTER (WHERE \"when%%\" BETWEEN now() + '80 s' AND now() + '90 s'), "
            f'count(*) FILTER (WHERE "when%%" = %s) FROM {name}',
            INSTANT,
        )
        assert (delayed, dated) == (1, 1)

    def test_psycopg(self, tables: PostgresTables, kind: str) -> None:
        """Rolled back and committed with the user's transaction, whatever rows and cursors the connection makes."""
        body = BODIES[kind]
        with psycopg.connect(tables.url, cursor_factory=psycopg.RawCursor) as connection:
            rows: Any = dict_row
            connection.row_factory = rows
            for _ in range(2):
                connection.rollback()
                connection.execute(f"TRUNCATE {in_double_quotes(ODD)} RESTART IDENTITY".encode())
                assert insert(connection, odd_table(), body, {"a:b": b"%s"}, group="g", delay=90) is True
                assert insert(connection, odd_table(), body, group="g", due=INSTANT, id=70, once=True) is True
                assert insert(connection, odd_table(), body, group="g", due=INSTANT, id=70, once=True) is False
                assert insert(connection, odd_table(), body, group="g") is True
        self.check(tables, kind)

    async def test_psycopg_asynchronous(self, tables: PostgresTables, kind: str) -> None:
        """The same call, awaited."""
        body = BODIES[kind]

        async def write() -> None:
            async with await psycopg.AsyncConnection.connect(tables.url) as connection:
                assert await insert(connection, odd_table(), body, {"a:b": b"%s"}, group="g", delay=90) is True
                assert await insert(connection, odd_table(), body, group="g", due=INSTANT, id=70, once=True) is True
                assert await insert(connection, odd_table(), body, group="g", due=INSTANT, id=70, once=True) is False
                assert await insert(connection, odd_table(), body, group="g") is True

        await trio.to_thread.run_sync(asyncio.run, write())
        self.check(tables, kind)

    def test_sqlalchemy(self, tables: PostgresTables, kind: str) -> None:
        """A session, by `text`: colons and percent signs in names are no parameters."""
        body = BODIES[kind]
        calls: list[tuple[dict[str, Any], int]] = [
            ({"headers": {"a:b": b"%s"}, "delay": 90}, 1),
            ({"due": INSTANT, "id": 70, "once": True}, 1),
            ({"due": INSTANT, "id": 70, "once": True}, 0),
            ({}, 1),
        ]
        engine = sqlalchemy.create_engine(tables.url.replace("postgresql://", "postgresql+psycopg://"))
        try:
            with sqlalchemy.orm.Session(engine) as session, session.begin():
                for arguments, touched in calls:
                    statement, values = insert_statement("postgresql", odd_table(), body, group="g", **arguments)
                    result: Any = session.execute(sqlalchemy.text(statement), values)
                    assert result.rowcount == touched
        finally:
            engine.dispose()
        self.check(tables, kind)

    def test_the_wrong_kind_of_body_is_refused(self, tables: PostgresTables, kind: str) -> None:
        """Bytes for a text would be stored as digits, a text for bytea by its backslashes: an error of the parser."""
        wrong = "\\x41" if kind == "bytea" else b"[1]"
        with psycopg.connect(tables.url) as connection:
            with pytest.raises((psycopg.errors.CannotCoerce, psycopg.errors.DatatypeMismatch)):
                insert(connection, odd_table(), wrong, group="g")
            connection.rollback()
            assert connection.execute(f"SELECT 1 FROM {in_double_quotes(ODD)}".encode()).fetchall() == []


@pytest.mark.sqlite
def test_sqlalchemy_on_sqlite(tmp_path: Path) -> None:
    """As on PostgreSQL, with a time, whose column is asked for its type by parameters.

    But for a name such as `%(v0)s`: where the driver's parameters have no names SQLAlchemy takes it for one.
    """
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'q.db'}")
    try:
        with engine.begin() as connection:
            column = 'b"o`dy %s :v1'
            create = create_odd(key="integer PRIMARY KEY", body="blob", time="integer", headers="text", column=column)
            connection.exec_driver_sql(create)
            table = odd_table(payload=column)
            statement, values = insert_statement("sqlite", table, b"x", {"a": b":x"}, group="g", due=INSTANT)
            connection.execute(sqlalchemy.text(statement), values)
            found = connection.exec_driver_sql(f"SELECT * FROM {in_double_quotes(ODD)}").fetchall()
    finally:
        engine.dispose()
    assert [tuple(row) for row in found] == [(1, b"x", "g", round(INSTANT.timestamp() * 1e6), '{"a": ":x"}')]


class TestUsersOwn:
    """PostgreSQL, in transactions that users have."""

    pytestmark = POSTGRES

    def test_what_the_server_refuses(self, database: str) -> None:
        """The driver's own errors pass; a trigger that ignores a row is noticed; nothing is committed for the user."""
        tables = PostgresTables(database).create()
        tables.run("ALTER TABLE jobs ADD shop text NOT NULL")
        tables.run(
            "CREATE FUNCTION deaf() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$; "
            "CREATE TRIGGER deaf BEFORE INSERT ON jobs FOR EACH ROW WHEN (NEW.payload = 'deaf') EXECUTE FUNCTION deaf()"
        )
        with psycopg.connect(database) as connection:
            with pytest.raises(psycopg.errors.NotNullViolation, match="shop"), connection.transaction():
                insert(connection, tables.table(), b"x")
            with pytest.raises(psycopg.errors.UndefinedTable), connection.transaction():
                insert(connection, tables.table("nowhere"), b"x")
            for once in (True, False):
                with pytest.raises(PublishNotAccepted, match="a trigger has ignored it"), connection.transaction():
                    insert(connection, tables.table(), b"deaf", id=5, once=once)
            tables.run("ALTER TABLE jobs ALTER shop SET DEFAULT 's'")
            assert insert(connection, tables.table(), b"x")
            with connection.pipeline(), pytest.raises(ValueError, match="pipeline"):
                insert(connection, tables.table(), b"x")
            assert connection.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
            assert tables.rows() == []
        assert [row["payload"] for row in tables.rows()] == [b"x"]

    def test_a_row_of_the_users_own_values(self, database: str) -> None:
        """Row mode: what psycopg takes, a datetime, a number, a list, JSON; bytes for a text are refused, too."""
        tables = PostgresTables(database)
        tables.run(
            "CREATE TABLE orders (id serial PRIMARY KEY, due timestamptz, at timestamptz, "
            '"n%" numeric, ids int[], '
            "what jsonb, "
            "note text, raw bytea)"
        )
        row = {
            "at": INSTANT,
            "n%": 5,
            "ids": [1, 2],
            "what": Jsonb({"a": 1}),
            "note": "n",
            "raw": b"\xff",
        }
        with psycopg.connect(database) as connection:
            assert insert(connection, ROWS, row, delay=5)
            assert insert(connection, ROWS, {}, id=9)
            with pytest.raises(psycopg.errors.DatatypeMismatch), connection.transaction():
                insert(connection, ROWS, {"note": b"abc"})
        one, two = tables.rows("orders")
        assert {name: one[name] for name in row} == {**row, "what": {"a": 1}}
        assert (two["id"], two["raw"]) == (9, None)

    def test_a_table_that_is_named_like_a_type(self, database: str) -> None:
        """By its schema; else the error says that it was taken for the type, and nothing is written."""
        tables = PostgresTables(database)
        tables.run("CREATE TABLE path (id serial PRIMARY KEY, body bytea)")
        with psycopg.connect(database, autocommit=True) as connection:
            with pytest.raises(psycopg.errors.WrongObjectType, match="type path"):
                insert(connection, Table("path", id="id", payload="body"), b"x")
            assert insert(connection, Table("public.path", id="id", payload="body"), b"y")
        assert [row["body"] for row in tables.rows("path")] == [b"y"]

    async def test_a_producer_that_may_only_insert(self, database: str) -> None:
        """No right but INSERT is needed, also where the types are compared."""
        tables = PostgresTables(database).create()
        tables.run("CREATE ROLE producer_of_tests LOGIN")
        try:
            tables.run("GRANT INSERT ON jobs TO producer_of_tests")
            with psycopg.connect(database, user="producer_of_tests") as connection:
                assert insert(connection, tables.table(), b"x", {"a": b"b"}, key="k", delay=1.0)
        finally:
            tables.run("DROP OWNED BY producer_of_tests; DROP ROLE producer_of_tests")
        assert len(tables.rows()) == 1

    async def test_a_handler_inserts_with_its_ack(self, database: str) -> None:
        """On the lent connection: the next queue's message commits with this one's end."""
        tables = PostgresTables(database, leased=False).create()
        tables.add(b"order")
        broker = tables.broker()
        dead = tables.table("dead")

        async def handler(delivery: Delivery[bytes]) -> Outcome:
            async with transaction(delivery) as connection:
                assert await insert(connection, dead, delivery.body + b" shipped") is True
            assert tables.rows("dead") == []
            return Ack()

        queue = broker.queue(tables.table(), claim=RowLock())
        with trio.fail_after(20):
            async with open_runtime(Subscription(queue, handler)) as runtime:
                await until(lambda: runtime.ledger("jobs").acked == 1, within=15)
        assert [row["payload"] for row in tables.rows("dead")] == [b"order shipped"]

    async def test_what_is_inserted_is_found_by_the_next_poll(self, database: str) -> None:
        """Nobody is woken, and nothing is lost: it is claimed within a poll."""
        tables = PostgresTables(database).create()
        async with open_link(tables.broker(poll_interval=0.05).queue(tables.table())) as link:
            with psycopg.connect(database) as connection:
                insert(connection, tables.table(), b"x", {"a": b"b"})
            with trio.fail_after(5):
                assert bodies(await link.receive(1)) == [b"x"]
