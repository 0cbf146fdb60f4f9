"""`links.sql.insert` on a connection of PyMySQL: zones with summer time, transactions that look back, any names."""

# ruff: noqa: S608 -- the tests' own names

from __future__ import annotations

import datetime as dt
from collections.abc import Generator
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit

import pymysql
import pytest
import sqlalchemy
import sqlalchemy.orm
from pymysql.converters import conversions

from links.errors import PublishNotAccepted
from links.sql import Table, insert, insert_statement
from tests.links.mysql_kit import Mysqls, a_database, connect, run
from tests.links.mysql_tables import MysqlTables
from tests.servers.mysql import KINDS, a_server

pytestmark = [pytest.mark.mysql, pytest.mark.servers]

times = pytest.mark.parametrize("stamps", [False, True], ids=["DATETIME", "TIMESTAMP"])
INSTANT = dt.datetime(2031, 5, 6, 7, 8, 9, 125001, dt.UTC)


# --- zones


SPRING = dt.datetime(2027, 3, 28, 1, tzinfo=dt.UTC)
AUTUMN = dt.datetime(2027, 10, 31, 1, tzinfo=dt.UTC)
"""The clock goes from 2:00 to 3:00, and from 3:00 to 2:00."""


@pytest.fixture(scope="module", params=KINDS)
def summery(request: pytest.FixtureRequest, mysqls: Mysqls) -> Generator[str, None, None]:
    """A server whose own zone has summer time, and which knows such a zone by name, too: "Test/Summer"."""
    mysqls.url(request.param)  # a skip where there is none
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        with a_server(request.param) as server:
            run(server.url, "INSERT INTO mysql.time_zone (Time_zone_id, Use_leap_seconds) VALUES (900, 'N')")
            run(server.url, "INSERT INTO mysql.time_zone_name (Name, Time_zone_id) VALUES ('Test/Summer', 900)")
            kinds = "(900, 0, 3600, 0, 'W'), (900, 1, 7200, 1, 'S')"
            run(server.url, f"INSERT INTO mysql.time_zone_transition_type VALUES {kinds}")
            for moment, summer in ((0, 0), (SPRING.timestamp(), 1), (AUTUMN.timestamp(), 0)):
                run(server.url, "INSERT INTO mysql.time_zone_transition VALUES (900, %s, %s)", int(moment), summer)
            yield server.url


NIGHTS = {
    "spring": (SPRING - dt.timedelta(hours=12), 86400),
    "autumn": (AUTUMN - dt.timedelta(hours=12), 86400),
    "the hour, first": (AUTUMN - dt.timedelta(minutes=30), 60),
    "the hour, again": (AUTUMN + dt.timedelta(minutes=30), 60),
}


@times
@pytest.mark.parametrize("zone", ["SYSTEM", "Test/Summer", "+05:30"])
@pytest.mark.parametrize("night", NIGHTS)
def test_a_night_in_which_the_clock_is_changed(night: str, zone: str, stamps: bool, summery: str) -> None:
    """A delay is so many seconds, also over a day of 23 hours; within the hour that comes twice never too early."""
    now, delay = NIGHTS[night]
    due = now + dt.timedelta(seconds=delay)
    with a_database(summery) as url:
        tables = MysqlTables(url, stamps=stamps).create()
        with connect(url) as connection, connection.cursor() as cursor:
            cursor.execute("SET time_zone = %s, timestamp = %s", (zone, int(now.timestamp())))
            insert(connection, tables.table(), b"a", delay=float(delay))
            insert(connection, tables.table(), b"b", due=due)
            cursor.execute("SET time_zone = '+00:00'")
            cursor.execute("SELECT retry_after FROM jobs")
            late = {(found.replace(tzinfo=dt.UTC) - due).total_seconds() for (found,) in cursor.fetchall()}
    if stamps and zone != "+05:30" and night.startswith("the hour"):
        assert late in ({0.0}, {3600.0})
    else:
        assert late == {0.0}


@times
@pytest.mark.parametrize(("precision", "stored"), [(0, (10, 0)), (3, (9, 126000)), (6, (9, 125001))])
def test_a_due_time_is_what_was_given_or_the_next_that_fits(
    precision: int, stored: tuple[int, int], stamps: bool, mysql_database: str
) -> None:
    """To the microsecond where the column holds them: never one less."""
    tables = MysqlTables(mysql_database, stamps=stamps).create()
    kind = "TIMESTAMP" if stamps else "DATETIME"
    tables.run(f"ALTER TABLE jobs MODIFY retry_after {kind}({precision}) NULL")
    for zone in ("+00:00", "-03:30"):
        with connect(mysql_database, init_command=f"SET time_zone = '{zone}'") as connection:
            insert(connection, tables.table(), b"a", due=INSTANT)
    with connect(mysql_database, init_command="SET time_zone = '+00:00'") as connection, connection.cursor() as cursor:
        cursor.execute("SELECT retry_after FROM jobs")
        assert cursor.fetchall() == ((dt.datetime(2031, 5, 6, 7, 8, *stored),),) * 2  # noqa: DTZ001 -- as stored


@times
def test_times_at_the_ends(stamps: bool, mysql_database: str) -> None:
    """What is past is due now; what a column cannot hold is an error, and no NULL, which would be due at once."""
    tables = MysqlTables(mysql_database, stamps=stamps).create()
    tables.run(f"ALTER TABLE jobs MODIFY retry_after {'TIMESTAMP' if stamps else 'DATETIME'} NULL")
    early = dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=14)))
    far = dt.datetime.max.replace(tzinfo=dt.timezone(dt.timedelta(hours=-14)))
    with connect(mysql_database) as connection:
        insert(connection, tables.table(), b"a", due=dt.datetime(1960, 1, 1, tzinfo=dt.UTC))
        insert(connection, tables.table(), b"b", due=early)
        with pytest.raises(PublishNotAccepted, match="which in UTC is behind the year 9999"):
            insert(connection, tables.table(), b"c", due=far)
        with pytest.raises(pymysql.MySQLError):
            insert(connection, tables.table(), b"d", due=dt.datetime.max.replace(tzinfo=dt.UTC))
    found = tables.run("SELECT payload, retry_after <= UTC_TIMESTAMP() FROM jobs ORDER BY id")
    assert found == [(b"a", 1), (b"b", 1)]


@pytest.mark.parametrize("kind", ["BIGINT", "VARCHAR(3)", "DATE"])
def test_a_due_column_that_is_no_time(kind: str, mysql_database: str) -> None:
    """An error of the server, and no row that is due at some time or other."""
    tables = MysqlTables(mysql_database).create()
    tables.run(f"ALTER TABLE jobs DROP retry_after, ADD due {kind} NULL")
    with connect(mysql_database) as connection, pytest.raises(pymysql.MySQLError):
        insert(connection, tables.table(retry_after="due"), b"a", delay=5.0)
    assert tables.rows() == []


# --- once


@pytest.mark.parametrize("level", ["REPEATABLE READ", "READ COMMITTED"])
def test_once_where_the_transaction_looks_back(level: str, mysql_database: str) -> None:
    """A row that came since the transaction began to read is there all the same: False, and the user's work stands."""
    tables = MysqlTables(mysql_database).create()
    tables.run("CREATE TABLE orders (n INT)")
    table = tables.table(generated=[])
    with connect(mysql_database, autocommit=False) as connection, connection.cursor() as cursor:
        cursor.execute(f"SET SESSION TRANSACTION ISOLATION LEVEL {level}")
        cursor.execute("INSERT INTO orders VALUES (1)")
        cursor.execute("SELECT COUNT(*) FROM orders")
        with connect(mysql_database) as other:
            assert insert(other, table, b"theirs", id=7, once=True)
        assert insert(connection, table, b"ours", id=7, once=True) is False
        connection.commit()
    assert tables.run("SELECT n FROM orders") == [(1,)]
    assert [row["payload"] for row in tables.rows()] == [b"theirs"]


def test_once_is_of_the_id_alone(mysql_database: str) -> None:
    """Another unique column is no id: the driver's error, and nothing written."""
    tables = MysqlTables(mysql_database).create()
    tables.run("CREATE UNIQUE INDEX one ON jobs (lane)")
    table = tables.table(generated=[])
    with connect(mysql_database) as connection:
        assert insert(connection, table, b"a", key="k", id=1, once=True)
        with pytest.raises(pymysql.IntegrityError, match="one"):
            insert(connection, table, b"b", key="k", id=2, once=True)
    assert [row["id"] for row in tables.rows()] == [1]


@pytest.mark.parametrize("zero", [0, Decimal(0)], ids=repr)
def test_an_id_of_zero(zero: Any, mysql_database: str) -> None:
    """To most sessions it means the next number, another one each time: refused there; else it is an id."""
    tables = MysqlTables(mysql_database).create()
    table = tables.table(generated=[])
    why = pytest.raises(PublishNotAccepted, match="an id of 0 means the next number; add NO_AUTO_VALUE_ON_ZERO")
    with connect(mysql_database) as connection, why:
        insert(connection, table, b"a", id=zero, once=True)
    assert tables.rows() == []
    mode = "STRICT_TRANS_TABLES,NO_AUTO_VALUE_ON_ZERO"
    with connect(mysql_database, sql_mode=mode) as connection:
        assert insert(connection, table, b"a", id=zero, once=True)
        assert not insert(connection, table, b"b", id=zero, once=True)
    assert [row["id"] for row in tables.rows()] == [0]


# --- connections, names, rights


WRITES_ALONE = {kind: each for kind, each in conversions.items() if not isinstance(kind, int)}
READS: dict[str, dict[str, Any]] = {"texts as bytes": {"use_unicode": False}, "all as texts": {"conv": WRITES_ALONE}}


@pytest.mark.parametrize("kind", READS)
def test_however_the_connection_reads(kind: str, mysql_database: str) -> None:
    """What is looked at is not what the driver makes of it."""
    given = READS[kind]
    tables = MysqlTables(mysql_database).create()
    with connect(mysql_database, **given) as connection:
        assert insert(connection, tables.table(), "x", delay=5.0)
    with connect(mysql_database, sql_mode="", **given) as connection, pytest.raises(PublishNotAccepted, match="strict"):
        insert(connection, tables.table(), "y")
    assert [row["payload"] for row in tables.rows()] == [b"x"]


ODD = 'or`d"er%s :x'
BODY = 'b`o"dy %(v0)s :v1'
ODD_TABLE = Table(ODD, id="select", payload=BODY, group="group", retry_after="when%", headers="h:v2")


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


@pytest.mark.parametrize("driver", ["pymysql", "sqlalchemy"])
def test_names_of_any_kind(driver: str, mysql_database: str) -> None:
    """Backticks, quotes, percent signs, colons, reserved words; rolled back and committed with the user's rows."""
    columns = f"`select` BIGINT AUTO_INCREMENT PRIMARY KEY, {quoted(BODY)} BLOB, `group` VARCHAR(20)"
    run(mysql_database, f"CREATE TABLE {quoted(ODD)} ({columns}, `when%` DATETIME(6), `h:v2` JSON)")
    calls: list[dict[str, Any]] = [{"headers": {"a:b": b"%s"}, "delay": 0.0}, {"due": INSTANT, "id": 70}, {}]
    if driver == "pymysql":
        with connect(mysql_database, autocommit=False) as connection:
            for end in (connection.rollback, connection.commit):
                for call in calls:
                    assert insert(connection, ODD_TABLE, b"x%s", group="g%s:v0", **call)
                end()
    else:
        engine = sqlalchemy.create_engine(urlsplit(mysql_database)._replace(scheme="mysql+pymysql").geturl())
        try:
            with sqlalchemy.orm.Session(engine) as session:
                for end in (session.rollback, session.commit):
                    for call in calls:
                        text, values = insert_statement("mysql", ODD_TABLE, b"x%s", group="g%s:v0", **call)
                        done: Any = session.execute(sqlalchemy.text(text), values)
                        assert done.rowcount == 1
                    end()
        finally:
            engine.dispose()
    text = f"SELECT `group`, {quoted(BODY)}, `when%` = '2031-05-06 07:08:09.125001', `h:v2` IS NULL FROM {quoted(ODD)}"
    rows = run(mysql_database, f"{text} ORDER BY `when%`")
    assert rows == [("g%s:v0", b"x%s", None, 1), ("g%s:v0", b"x%s", 0, 0), ("g%s:v0", b"x%s", 1, 1)]


def test_a_producer_that_may_only_insert(mysql_database: str) -> None:
    """No right but INSERT is needed, also where the type of a column is asked for; `once` reads the id, too."""
    tables = MysqlTables(mysql_database).create()
    parts = urlsplit(mysql_database)
    user, name = f"producer_{parts.path[-8:]}", parts.path.lstrip("/")
    url = parts._replace(netloc=f"{user}:hush@{parts.hostname}:{parts.port}").geturl()
    table = tables.table(generated=[])
    run(mysql_database, f"CREATE USER {user}@'%' IDENTIFIED BY 'hush'")
    try:
        run(mysql_database, f"GRANT INSERT ON {name}.jobs TO {user}@'%'")
        with connect(url) as connection:
            assert insert(connection, table, b"x", {"a": b"b"}, key="k", delay=1.0, id=5, once=True)
        run(mysql_database, f"GRANT SELECT ON {name}.jobs TO {user}@'%'")
        with connect(url) as connection:
            assert insert(connection, table, b"x", id=5, once=True) is False
    finally:
        run(mysql_database, f"DROP USER {user}@'%'")
    assert len(tables.rows()) == 1
