"""`broker.purge`: rows that nobody needs any more are deleted, in batches, and no other."""

# ruff: noqa: S608 -- the tests' own names

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import trio

from links.errors import CallBroken, LinkRefused, NotConnected
from links.sql import SqlBroker, Table
from settlement.sql import Finish
from tests.links.mysql_kit import connect
from tests.links.mysql_tables import MysqlTables
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import TIMES, Database, Gate, now, open_link, say, stored, until
from tests.servers.mysql import KINDS

DAY = 86400.0
POSTGRES = [pytest.mark.postgres, pytest.mark.servers]
MYSQL = [pytest.mark.mysql, pytest.mark.servers]


class Lite:
    """SQLite, with the calls of PostgresTables; `ago(n)` is so many seconds ago as a column holds it."""

    def __init__(self, path: Path, times: str, *, grouped: bool) -> None:
        self.kit = Database(path, times, grouped=grouped, marks=True).create()
        self.times = times

    def ago(self, seconds: float) -> Any:
        return stored(now() - seconds, self.times)

    def add(self, **values: Any) -> None:
        places = ", ".join(["?"] * len(values))
        self.kit.run(f"INSERT INTO jobs ({', '.join(values)}) VALUES ({places})", *values.values())


class Postgres:
    def __init__(self, url: str, *, grouped: bool) -> None:
        self.kit = PostgresTables(url, grouped=grouped, marks=True).create()

    def ago(self, seconds: float) -> Any:
        ((moment,),) = self.kit.run("SELECT now() - make_interval(secs => %s)", seconds)
        return moment

    def add(self, **values: Any) -> None:
        self.kit.add_to("jobs", **values)


class Mysql:
    def __init__(self, url: str, *, grouped: bool, stamps: bool = False) -> None:
        self.kit = MysqlTables(url, grouped=grouped, marks=True, stamps=stamps).create()

    def ago(self, seconds: float) -> Any:
        ((moment,),) = self.kit.run("SELECT UTC_TIMESTAMP(6) - INTERVAL %s SECOND", seconds)
        return moment

    def add(self, **values: Any) -> None:
        self.kit.add_to("jobs", **values)


World = Lite | Postgres | Mysql
Make = Callable[..., World]


@pytest.fixture(
    params=[
        *(pytest.param(times, marks=pytest.mark.sqlite) for times in TIMES),
        pytest.param("postgres", marks=POSTGRES),
        *(pytest.param(kind, marks=MYSQL) for kind in KINDS),
    ]
)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    def made(*, grouped: bool = False) -> World:
        if request.param == "postgres":
            return Postgres(request.getfixturevalue("database"), grouped=grouped)
        if request.param in KINDS:
            return Mysql(request.getfixturevalue("mysql_databases")(request.param), grouped=grouped)
        return Lite(tmp_path / "q.db", request.param, grouped=grouped)

    return made


@asynccontextmanager
async def opened(world: World) -> AsyncGenerator[SqlBroker, None]:
    broker = world.kit.broker()
    async with broker.connect():
        yield broker


def time_of(world: World) -> str:
    if isinstance(world, Lite):
        return world.times
    return "timestamptz" if isinstance(world, Postgres) else "datetime(6)"


def payloads(world: World) -> list[bytes]:
    return [row["payload"] for row in world.kit.rows()]


async def test_finished_rows_go_when_they_are_old(make: Make) -> None:
    """Those that are not finished, that are finished since, and that are leased, stay: whatever else is old of them."""
    world = make()
    old, young = world.ago(2 * DAY), world.ago(DAY / 2)
    world.add(payload=b"old", processed_at=old)
    world.add(payload=b"older", processed_at=world.ago(900 * DAY), retry_after=young)
    world.add(payload=b"young", processed_at=young)
    world.add(payload=b"unfinished", retry_after=old)
    world.add(payload=b"leased", processed_at=old, locked_until=world.ago(-1000))
    world.add(payload=b"was leased", processed_at=old, locked_until=old)
    async with opened(world) as broker:
        assert await broker.purge(world.kit.table(), older_than=timedelta(days=1)) == 3
        assert payloads(world) == [b"young", b"unfinished", b"leased"]
        assert await broker.purge(world.kit.table(), older_than=DAY) == 0
        assert await broker.purge(world.kit.table(), older_than=0) == 1
    assert payloads(world) == [b"unfinished", b"leased"]


async def test_what_a_queue_has_finished_is_purged(make: Make) -> None:
    """The time is the one that a settlement writes; what is in hand stays and is settled afterwards."""
    world = make()
    for body in (b"a", b"b"):
        world.add(payload=body)
    async with open_link(world.kit.broker().queue(world.kit.table())) as link:
        first, second = await link.receive(2)
        assert await link.settle([say(first, Finish())]) == [None]
        async with opened(world) as broker:
            await trio.sleep(0.01)
            assert await broker.purge(world.kit.table(), older_than=0.0) == 1
        assert payloads(world) == [b"b"]
        assert await link.settle([say(second, Finish())]) == [None]


async def test_a_group_or_all_of_them(make: Make) -> None:
    """`group` narrows it down; without one the whole table is meant."""
    world = make(grouped=True)
    for group in ("a", "b", "c"):
        world.add(payload=group.encode(), grp=group, processed_at=world.ago(DAY))
    async with opened(world) as broker:
        assert await broker.purge(world.kit.table(), older_than=1.0, group="b") == 1
        assert payloads(world) == [b"a", b"c"]
        assert await broker.purge(world.kit.table(), older_than=1.0) == 2


async def test_many_rows_go_in_batches(make: Make) -> None:
    """2,500 between others that stay: all of them, three transactions of 1,000 at most."""
    world = make()
    world.add(payload=b"first")
    old = world.ago(DAY)
    if isinstance(world, Lite):
        world.kit.run(
            "WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 2500) "
            "INSERT INTO jobs (payload, processed_at) SELECT CASE n WHEN 1200 THEN x'01' ELSE x'00' END, ? FROM n",
            old,
        )
        world.kit.run("UPDATE jobs SET processed_at = NULL WHERE payload = x'01'")
        deletions: list[tuple[Any, ...]] = []
    elif isinstance(world, Mysql):
        digits = " UNION ALL ".join(f"SELECT {digit} AS d" for digit in range(10))
        tens = ", ".join(f"({digits}) AS {name}" for name in "abcd")
        number = "a.d * 1000 + b.d * 100 + c.d * 10 + d.d"
        world.kit.run(
            f"INSERT INTO jobs (payload, processed_at) SELECT IF({number} = 1200, '1', '0'), %s FROM {tens} "
            f"WHERE {number} BETWEEN 1 AND 2500 ORDER BY {number}",
            old,
        )
        world.kit.run("UPDATE jobs SET processed_at = NULL WHERE payload = '1'")
        deletions = []
    else:
        world.kit.run(
            "INSERT INTO jobs (payload, processed_at) SELECT CASE n WHEN 1200 THEN '1' ELSE '0' END::bytea, %s "
            "FROM generate_series(1, 2500) n",
            old,
        )
        world.kit.run("UPDATE jobs SET processed_at = NULL WHERE payload = '1'")
        world.kit.run("CREATE TABLE gone (n bigint)")
        world.kit.run(
            "CREATE FUNCTION gone() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN INSERT INTO gone SELECT count(*) FROM o; RETURN NULL; END $$"
        )
        world.kit.run("CREATE TRIGGER gone AFTER DELETE ON jobs REFERENCING OLD TABLE AS o EXECUTE FUNCTION gone()")
        deletions = [(1000,), (1000,), (499,)]
    async with opened(world) as broker:
        assert await broker.purge(world.kit.table(), older_than=1.0) == 2499
    assert len(payloads(world)) == 2
    if deletions:
        assert world.kit.run("SELECT n FROM gone ORDER BY n DESC") == deletions


async def test_dead_letters_go_by_a_time_of_their_own(make: Make) -> None:
    """Since when they are dead, and not since when they were due; what a consumer of them has leased stays."""
    world = make()
    kind = time_of(world)
    world.kit.run(f"ALTER TABLE jobs ADD COLUMN died_at {kind}")
    old = world.ago(2 * DAY)
    world.add(payload=b"old", died_at=old, retry_after=world.ago(0))
    world.add(payload=b"due long ago", died_at=world.ago(1), retry_after=old)
    world.add(payload=b"leased", died_at=old, locked_until=world.ago(-1000))
    world.add(payload=b"nobody knows")
    async with opened(world) as broker:
        table = world.kit.table(processed_at=None)
        assert await broker.purge(table, older_than=DAY, dead_since="died_at") == 1
    assert payloads(world) == [b"due long ago", b"leased", b"nobody knows"]


async def test_dead_letters_of_a_group_are_no_other_ones(make: Make) -> None:
    """Where the table has groups, the group is said."""
    world = make(grouped=True)
    kind = time_of(world)
    world.kit.run(f"ALTER TABLE jobs ADD COLUMN died_at {kind}")
    for group in ("live", "dead"):
        world.add(payload=group.encode(), grp=group, died_at=world.ago(DAY))
    async with opened(world) as broker:
        with pytest.raises(ValueError, match="group must be a name"):
            await broker.purge(world.kit.table(), older_than=1.0, dead_since="died_at")
        assert await broker.purge(world.kit.table(), older_than=1.0, dead_since="died_at", group="dead") == 1
    assert payloads(world) == [b"live"]


async def test_what_cannot_be_purged_is_refused(make: Make) -> None:
    """With the way out, and nothing deleted."""
    world = make()
    world.add(payload=b"x", processed_at=world.ago(DAY))
    table: Table[bytes] = world.kit.table()
    async with opened(world) as broker:
        with pytest.raises(ValueError, match=r"must have a processed_at column: .*dead_since="):
            await broker.purge(world.kit.table(processed_at=None), older_than=1.0)
        with pytest.raises(ValueError, match=r"not 'retry_after', which is retry_after and was written before"):
            await broker.purge(table, older_than=1.0, dead_since="retry_after")
        with pytest.raises(ValueError, match="older_than must be a finite number of seconds, 0 or more"):
            await broker.purge(table, older_than=-1.0)
        with pytest.raises(ValueError, match="has no group column"):
            await broker.purge(table, older_than=1.0, group="g")
        with pytest.raises(LinkRefused, match=r"table 'jobs', after 0 rows: .*there is no column 'died_at'"):
            await broker.purge(table, older_than=1.0, dead_since="died_at")
        world.kit.run("ALTER TABLE jobs ADD COLUMN died_at date")
        with pytest.raises(LinkRefused, match=r"column 'died_at' is .*a time is"):
            await broker.purge(table, older_than=1.0, dead_since="died_at")
        with pytest.raises(LinkRefused, match="there is no such table"):
            await broker.purge(world.kit.table("none"), older_than=1.0)
    with pytest.raises(NotConnected):
        await broker.purge(table, older_than=1.0)
    assert payloads(world) == [b"x"]


async def test_a_row_that_the_database_keeps(make: Make) -> None:
    """A trigger that refuses: the batch stays whole, the error names the table; the batches before it are gone."""
    world = make()
    old = world.ago(DAY)
    if isinstance(world, Lite):
        world.kit.run(
            "CREATE TRIGGER keep BEFORE DELETE ON jobs WHEN OLD.payload = 'keep' BEGIN SELECT RAISE(ABORT, 'kept'); END"
        )
    elif isinstance(world, Mysql):
        world.kit.run(
            "CREATE TRIGGER keep BEFORE DELETE ON jobs FOR EACH ROW BEGIN IF OLD.payload = 'keep' THEN "
            "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'kept'; END IF; END"
        )
    else:
        world.kit.run(
            "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF OLD.payload = 'keep' THEN "
            "RAISE 'kept'; END IF; RETURN OLD; END $$"
        )
        world.kit.run("CREATE TRIGGER keep BEFORE DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION keep()")
    world.add(payload=b"x", processed_at=old)
    keep: Any = "keep" if isinstance(world, Lite) else b"keep"
    world.add(payload=keep, processed_at=old)
    async with opened(world) as broker:
        with pytest.raises(CallBroken, match=r"purge of table 'jobs', after 0 rows: .*kept"):
            await broker.purge(world.kit.table(), older_than=1.0)
        assert len(payloads(world)) == 2
        world.kit.run("DROP TRIGGER keep" + (" ON jobs" if isinstance(world, Postgres) else ""))
        assert await broker.purge(world.kit.table(), older_than=1.0) == 2


@pytest.mark.sqlite
async def test_values_and_ids_that_sqlite_alone_has(tmp_path: Path) -> None:
    """A time in another unit is no old one; ids of every class and texts that are no UTF-8 are walked through."""
    database = Database(tmp_path / "q.db")
    database.run("CREATE TABLE jobs (id PRIMARY KEY, done REAL, lease REAL)")
    table = Table("jobs", id="id", locked_until="lease", processed_at="done")
    for key in ("5", "'a'", "x'ff'", "CAST(x'ff' AS TEXT)", "1.5"):
        database.run(f"INSERT INTO jobs VALUES ({key}, 1700000000.0, NULL)")
    for value in ("2460000.5", "'2020-01-01'", "NULL", "1700000000000.0"):
        database.run(f"INSERT INTO jobs VALUES ('stays ' || {value!r}, {value}, NULL)")
    broker = database.broker()
    async with broker.connect():
        assert await broker.purge(table, older_than=1.0) == 5
    assert database.run("SELECT count(*) FROM jobs") == [(4,)]


@pytest.mark.sqlite
async def test_a_cancelled_purge_stands_between_two_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was deleted is deleted, whole batches; the rest is there."""
    database = Database(tmp_path / "q.db", marks=True).create()
    database.run(
        "WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 3000) "
        "INSERT INTO jobs (payload, processed_at) SELECT x'00', 1700000000.0 FROM n"
    )
    gate = Gate(monkeypatch)
    broker = database.broker()
    async with broker.connect():
        gate.shut()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: broker.purge(database.table(), older_than=1.0))
            await until(lambda: gate.entered)
            nursery.cancel_scope.cancel()
            gate.open()
        await until(lambda: len(database.rows()) == 2000)
        assert await broker.purge(database.table(), older_than=1.0) == 2000


class TestPostgres:
    pytestmark = POSTGRES

    async def test_a_row_that_somebody_has_locked_is_skipped(self, database: str) -> None:
        """Nobody is waited for; the next purge has it."""
        world = Postgres(database, grouped=False)
        for body in (b"a", b"b"):
            world.add(payload=body, processed_at=world.ago(DAY))
        async with opened(world) as broker:
            with psycopg.connect(database) as connection:
                connection.execute("SELECT FROM jobs WHERE payload = 'a' FOR UPDATE")
                with trio.fail_after(10):
                    assert await broker.purge(world.kit.table(), older_than=1.0) == 1
            assert payloads(world) == [b"a"]
            assert await broker.purge(world.kit.table(), older_than=1.0) == 1

    @pytest.mark.parametrize("kind", ["uuid", "text", 'varchar(40) COLLATE "C"', "date"])
    async def test_ids_of_other_types_and_odd_names(self, kind: str, database: str) -> None:
        """Two batches and more, in the order of that type."""
        tables = PostgresTables(database)
        tables.run(f'CREATE TABLE "o%s""d:x" ("i%d" {kind} PRIMARY KEY, "do""ne" timestamptz)')
        value = {"uuid": "gen_random_uuid()", "date": "date '2000-01-01' + n"}.get(kind, "md5(n::text)")
        tables.run(f'INSERT INTO "o%s""d:x" SELECT {value}, now() - interval \'1 day\' FROM generate_series(1, 2100) n')
        broker = tables.broker()
        async with broker.connect():
            table = Table('o%s"d:x', id="i%d", processed_at='do"ne')
            assert await broker.purge(table, older_than=3600.0) == 2100

    async def test_a_time_without_a_zone_is_refused(self, database: str) -> None:
        """It would mean another time in another session."""
        tables = PostgresTables(database)
        tables.run("CREATE TABLE jobs (id serial PRIMARY KEY, done timestamp)")
        broker = tables.broker()
        async with broker.connect():
            with pytest.raises(LinkRefused, match="column 'done' is timestamp; a time is timestamptz"):
                await broker.purge(Table("jobs", id="id", processed_at="done"), older_than=1.0)


class TestMysql:
    pytestmark = MYSQL

    @pytest.mark.parametrize("kind", ["VARCHAR(40)", "BINARY(32)", "DECIMAL(30, 2)", "DATETIME(6)"])
    async def test_ids_of_other_types_and_odd_names(self, kind: str, mysql_database: str) -> None:
        """Two batches and more, in the order of that type."""
        tables = MysqlTables(mysql_database)
        tables.run(f'CREATE TABLE `o%s"d``:x` (`i%d` {kind} PRIMARY KEY, `do"ne` DATETIME(6))')
        value = {"DECIMAL(30, 2)": "n / 4", "DATETIME(6)": "'2000-01-01' + INTERVAL n DAY"}.get(
            kind, "LEFT(SHA2(n, 256), 32)"
        )
        tables.run(
            'INSERT INTO `o%s"d``:x` WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r WHERE n < 700), '
            "m(n) AS (SELECT r.n * 3 + k.k FROM r, (SELECT 0 AS k UNION SELECT 1 UNION SELECT 2) AS k) "
            f"SELECT {value}, UTC_TIMESTAMP() - INTERVAL 1 DAY FROM m"
        )
        broker = tables.broker()
        async with broker.connect():
            table = Table('o%s"d`:x', id="i%d", processed_at='do"ne')
            assert await broker.purge(table, older_than=3600.0) == 2100

    async def test_a_time_of_the_sessions_own_zone_is_refused(self, mysql_database: str) -> None:
        """Its default says that it is no UTC; TIMESTAMP is an instant with any default."""
        tables = MysqlTables(mysql_database, marks=True).create()
        table = tables.table(processed_at=None)
        tables.run("ALTER TABLE jobs ADD died_at DATETIME DEFAULT NOW()")
        tables.add(b"x")
        broker = tables.broker()
        async with broker.connect():
            with pytest.raises(LinkRefused, match=r"column 'died_at' is DATETIME with the default .*UTC_TIMESTAMP"):
                await broker.purge(table, older_than=0.0, dead_since="died_at")
            tables.run("ALTER TABLE jobs MODIFY died_at TIMESTAMP DEFAULT NOW()")
            tables.run("UPDATE jobs SET died_at = NOW() - INTERVAL 2 DAY")
            assert await broker.purge(table, older_than=3 * DAY, dead_since="died_at") == 0
            assert await broker.purge(table, older_than=1e300, dead_since="died_at") == 0
            assert await broker.purge(table, older_than=DAY, dead_since="died_at") == 1

    async def test_a_row_that_somebody_has_locked_is_skipped(self, mysql_database: str) -> None:
        """Nobody is waited for, also where times are TIMESTAMP; the next purge has it."""
        world = Mysql(mysql_database, grouped=False, stamps=True)
        for body in (b"a", b"b"):
            world.kit.run("INSERT INTO jobs (payload, processed_at) VALUES (%s, NOW(6) - INTERVAL 1 DAY)", body)
        async with opened(world) as broker:
            with connect(mysql_database, autocommit=False) as other, other.cursor() as cursor:
                cursor.execute("SELECT * FROM jobs WHERE id = 1 FOR UPDATE")
                with trio.fail_after(10):
                    assert await broker.purge(world.kit.table(), older_than=1.0) == 1
                assert payloads(world) == [b"a"]
            assert await broker.purge(world.kit.table(), older_than=1.0) == 1
