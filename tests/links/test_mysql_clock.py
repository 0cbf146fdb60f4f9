"""Times on MySQL and MariaDB: whatever the time zone of the server and of a session, nothing is claimed early."""

from __future__ import annotations

import datetime as dt
from collections.abc import Generator
from typing import Any

import pymysql
import pytest
import trio
from pymysql.cursors import DictCursor, SSCursor

import links.sql
from actors import Subscription, open_runtime
from links.errors import PublishNotAccepted
from links.sql import Lease, RowLock, insert, insert_statement
from settlement import Ack, Delivery, Outcome, RetryAfter
from tests.links.mysql_kit import Mysqls, a_database, connect
from tests.links.mysql_tables import MysqlTables
from tests.links.sqlite_kit import until
from tests.servers.mysql import a_server

pytestmark = [pytest.mark.mysql, pytest.mark.servers]

times = pytest.mark.parametrize("stamps", [False, True], ids=["DATETIME", "TIMESTAMP"])
DELAY = 0.6


@pytest.fixture(scope="module")
def away(mysqls: Mysqls) -> Generator[str, None, None]:
    """A MariaDB whose own time zone is 5:30 h ahead."""
    del mysqls
    with a_server("mariadb", default_time_zone="+05:30") as server:
        yield server.url


@times
@pytest.mark.parametrize("leased", [True, False], ids=["lease", "row lock"])
async def test_two_services_in_two_time_zones(leased: bool, stamps: bool, away: str) -> None:
    """DESIGN 6: a delay of a handler's, of a publisher's, and of inserts in sessions of other zones; none is early."""
    with a_database(away) as url:
        tables = MysqlTables(url, leased=leased, stamps=stamps).create()
        due: dict[bytes, float] = {}
        early: list[bytes] = []

        async def handler(delivery: Delivery[bytes]) -> Outcome:
            now = trio.current_time()
            if now < due.get(delivery.body, 0.0):
                early.append(delivery.body)
            if delivery.attempt == 1 and delivery.body.startswith(b"again"):
                due[delivery.body] = now + DELAY
                return RetryAfter(DELAY)
            return Ack()

        claim = Lease(5.0) if leased else RowLock()
        services = [
            open_runtime(Subscription(tables.broker().queue(tables.table(), claim=claim), handler, name="jobs"))
            for _ in range(2)
        ]
        async with services[0] as one, services[1] as other:
            async with tables.broker().connect():
                pass
            for zone in ("-08:00", "+00:00", "+13:00", "SYSTEM"):
                with connect(url, init_command=f"SET time_zone = '{zone}'") as connection:
                    for number in range(2):
                        body = f"again {zone} {number}".encode()
                        due[body] = trio.current_time() + DELAY
                        insert(connection, tables.table(), body, delay=DELAY)
                        soon = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=DELAY)
                        due[b"at " + body] = trio.current_time() + DELAY - 0.01
                        insert(connection, tables.table(), b"at " + body, due=soon)
            await until(lambda: one.ledger("jobs").acked + other.ledger("jobs").acked == 16, 20)
        assert early == []
        assert tables.rows() == []


@times
async def test_a_due_time_without_decimals_is_rounded_up(stamps: bool, mysql_database: str) -> None:
    """The server would round it to the nearest second, half a second early."""
    tables = MysqlTables(mysql_database, stamps=stamps).create()
    kind = "TIMESTAMP" if stamps else "DATETIME"
    tables.run(f"ALTER TABLE jobs MODIFY retry_after {kind} NOT NULL DEFAULT '2000-01-01'")
    wanted = dt.datetime(2030, 1, 1, 12, 0, 0, 1, tzinfo=dt.UTC)
    async with tables.broker().connect() as _, trio.open_nursery():
        pass
    broker = tables.broker()
    async with broker.connect():
        await broker.publisher(tables.table()).publish(b"a", due=wanted)
    with connect(mysql_database, init_command="SET time_zone = '+00:00'") as connection:
        insert(connection, tables.table(), b"b", due=wanted)
        with connection.cursor() as cursor:
            cursor.execute("SELECT retry_after FROM jobs ORDER BY id")
            assert cursor.fetchall() == ((dt.datetime(2030, 1, 1, 12, 0, 1),),) * 2  # noqa: DTZ001 -- as stored


@times
async def test_a_delay_beyond_all_times(stamps: bool, mysql_database: str) -> None:
    """It is cut to what the column holds, and is never due at once."""
    tables = MysqlTables(mysql_database, stamps=stamps).create()
    tables.add(b"a")

    async def handler(_: Delivery[bytes]) -> Outcome:
        return RetryAfter(1e300)

    queue = tables.broker().queue(tables.table(), claim=Lease(5.0))
    async with open_runtime(Subscription(queue, handler, name="jobs")) as runtime:
        await until(lambda: runtime.ledger("jobs").delayed == 1, 10)
    assert tables.row()["retry_after"].year >= 2038


CURSORS: list[Any] = [pymysql.cursors.Cursor, DictCursor, SSCursor]


@pytest.mark.parametrize("kind", CURSORS)
@pytest.mark.parametrize("mode", ["STRICT_TRANS_TABLES", "STRICT_ALL_TABLES,ANSI_QUOTES,NO_BACKSLASH_ESCAPES"])
def test_insert_in_any_session(kind: Any, mode: str, mysql_database: str) -> None:
    """In the user's transaction, whatever cursors and SQL mode it has; once by its id."""
    tables = MysqlTables(mysql_database).create()
    table = tables.table(generated=[])
    with connect(mysql_database, cursorclass=kind, sql_mode=mode, autocommit=False) as connection:
        body = b'it\'s \\ "quoted" \x00\xff'
        assert insert(connection, table, body, {"k": b"\xff"}, key="l'ane\\", id=7, once=True)
        assert not insert(connection, table, b"other", id=7, once=True)
        with pytest.raises(pymysql.IntegrityError):
            insert(connection, table, b"other", id=7)
        assert tables.rows() == []
        connection.commit()
    row = tables.row()
    assert (row["id"], row["payload"], row["lane"]) == (7, body, "l'ane\\")


def test_insert_where_values_would_be_cut(mysql_database: str) -> None:
    """A session that is not strict is refused, with the way out."""
    tables = MysqlTables(mysql_database).create()
    why = pytest.raises(PublishNotAccepted, match=r"sql_mode is not strict.*add STRICT_TRANS_TABLES")
    with connect(mysql_database, sql_mode="") as connection, why:
        insert(connection, tables.table(), b"a", key="x" * 200)
    assert tables.rows() == []


def test_the_statement_for_another_driver(mysql_database: str) -> None:
    """Named in each style; a delay counts by the server's clock."""
    tables = MysqlTables(mysql_database).create()
    text, values = insert_statement("mysql", tables.table(), b"a", delay=3600.0, style="pyformat")
    assert insert_statement("mariadb", tables.table(), b"a", delay=3600.0, style="pyformat") == (text, values)
    with connect(mysql_database) as connection, connection.cursor() as cursor:
        cursor.execute(text, values)
        cursor.execute("SELECT TIMESTAMPDIFF(SECOND, UTC_TIMESTAMP(6), retry_after) FROM jobs")
        ((seconds,),) = cursor.fetchall()
    assert 3590 <= seconds <= 3600


async def test_purge(mysql_database: str) -> None:
    """Old finished rows are deleted; others, and one that somebody has locked, stay."""
    tables = MysqlTables(mysql_database, marks=True).create()
    for number, age in enumerate((10, 100, 1000, None), 1):
        done = "NULL" if age is None else f"UTC_TIMESTAMP(6) - INTERVAL {age} SECOND"
        tables.run(f"INSERT INTO jobs (payload, processed_at) VALUES ('{number}', {done})")  # noqa: S608 -- ours
    broker = tables.broker()
    async with broker.connect():
        with connect(mysql_database, autocommit=False) as other, other.cursor() as cursor:
            cursor.execute("SELECT * FROM jobs WHERE id = 3 FOR UPDATE")
            assert await broker.purge(tables.table(), older_than=50.0) == 1
        assert await broker.purge(tables.table(), older_than=1e300) == 0
        assert await broker.purge(tables.table(), older_than=50.0) == 1
    assert [row["id"] for row in tables.rows()] == [1, 4]


def test_the_package_says_what_there_is() -> None:
    """`Table.ddl` for both names is one text."""
    table = links.sql.Table("t", id="id", payload="p", retry_after="due")
    assert table.ddl("mysql") == table.ddl("mariadb")
