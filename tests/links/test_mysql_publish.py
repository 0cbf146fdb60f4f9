"""Publishing on MariaDB and MySQL: when a letter is due, once by its id, many of them by few statements."""

from __future__ import annotations

import datetime as dt

import pytest
import trio

from links.errors import LinkBroken, PublishNotAccepted
from links.sql import Table
from settlement import Letter
from tests.links.mysql_kit import connect, run
from tests.links.mysql_tables import MysqlTables
from tests.links.sqlite_kit import bodies, open_link, until

pytestmark = [pytest.mark.mysql, pytest.mark.servers]

times = pytest.mark.parametrize("stamps", [False, True], ids=["DATETIME", "TIMESTAMP"])


# --- when it is due


@times
async def test_a_letter_is_due_when_it_is_said(stamps: bool, mysql_database: str) -> None:
    """A delay is the server's, in seconds or as a `timedelta`; `due` is that instant, whatever its time zone."""
    tables = MysqlTables(mysql_database, stamps=stamps).create()
    broker = tables.broker()
    instant = dt.datetime(2031, 5, 6, 7, 8, 9, 123456, dt.timezone(dt.timedelta(hours=-7, minutes=-30)))
    early = dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=14)))
    async with broker.connect():
        publisher = broker.publisher(tables.table())
        await publisher.publish(b"float", delay=100.0)
        await publisher.publish(b"timedelta", {"a": b"b"}, key="k", delay=dt.timedelta(minutes=2))
        await publisher.publish(b"due", due=instant)
        await publisher.publish(b"past", due=early)
        assert await publisher.publish_once(77, b"once", delay=100.0)
        assert await publisher.publish_once(78, b"at", due=instant)
        assert not await publisher.publish_once(78, b"again", delay=0.0)
    with connect(mysql_database, init_command="SET time_zone = '+00:00'") as connection, connection.cursor() as cursor:
        cursor.execute("SELECT payload, TIMESTAMPDIFF(SECOND, UTC_TIMESTAMP(6), retry_after) FROM jobs")
        wait: dict[bytes, int] = dict(cursor.fetchall())
        cursor.execute("SELECT payload FROM jobs WHERE retry_after = '2031-05-06 14:38:09.123456' ORDER BY id")
        assert cursor.fetchall() == ((b"due",), (b"at",))
    assert 80 < wait[b"float"] <= 100
    assert 100 < wait[b"timedelta"] <= 120
    assert 80 < wait[b"once"] <= 100
    async with open_link(tables.broker().queue(tables.table())) as link:
        assert bodies(await link.receive(9)) == [b"past"]


@times
async def test_an_instant_that_no_column_holds(stamps: bool, mysql_database: str) -> None:
    """Behind the last one of the column: not accepted, with the column's name; of many the letter is named."""
    tables = MysqlTables(mysql_database, stamps=stamps).create()
    far = dt.datetime.max.replace(tzinfo=dt.timezone(dt.timedelta(hours=-14)))
    broker = tables.broker()
    async with broker.connect():
        publisher = broker.publisher(tables.table())
        with pytest.raises(PublishNotAccepted, match=r"'retry_after' is (datetime|timestamp)\(6\), which ends before"):
            await publisher.publish(b"x", due=far)
        if stamps:
            with pytest.raises(PublishNotAccepted, match="which ends before 2039"):
                await publisher.publish(b"x", due=dt.datetime(2039, 1, 1, tzinfo=dt.UTC))
    assert tables.rows() == []


# --- once


async def test_once_is_of_the_id_alone(mysql_database: str) -> None:
    """Another unique column is no id: not accepted; an id of 0 is one; the row that is there stays as it is."""
    tables = MysqlTables(mysql_database).create()
    tables.run("CREATE UNIQUE INDEX one ON jobs (lane)")
    broker = tables.broker()
    async with broker.connect():
        publisher = broker.publisher(tables.table())
        assert [await publisher.publish_once(0, body, key="k") for body in (b"a", b"b")] == [True, False]
        with pytest.raises(PublishNotAccepted, match="Duplicate entry"):
            await publisher.publish_once(2, b"c", key="k")
    assert [(row["id"], row["payload"]) for row in tables.rows()] == [(0, b"a")]


async def test_once_by_many_at_the_same_time(mysql_database: str) -> None:
    """Twenty publishers of five ids: five rows, and five that were told so."""
    tables = MysqlTables(mysql_database).create()
    broker, told = tables.broker(), list[bool]()

    async def publish(number: int) -> None:
        told.append(await broker.publisher(tables.table()).publish_once(number % 5 + 1, b"x"))

    async with broker.connect(), trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(publish, number)
    assert (sorted(told), [row["id"] for row in tables.rows()]) == ([False] * 15 + [True] * 5, [1, 2, 3, 4, 5])


# --- what the table does not take


BAD: dict[str, tuple[str, Letter, str]] = {
    "a key that is too long": ("", Letter(b"x", key="k" * 101), "too long for column 'lane'"),
    "a body that is too long": ("ALTER TABLE jobs MODIFY payload VARBINARY(3)", Letter(b"abcd"), "too long"),
    "no text": ("ALTER TABLE jobs MODIFY payload TEXT", Letter(b"\xff"), "'payload' is text, and the value is no UTF"),
    "no JSON": ("ALTER TABLE jobs MODIFY payload JSON", Letter(b"{"), "payload|JSON"),
    "a check": ("ALTER TABLE jobs ADD CONSTRAINT good CHECK (payload <> 'bad')", Letter(b"bad"), "good"),
    "a column that nothing fills": ("ALTER TABLE jobs ADD shop INT NOT NULL", Letter(b"x"), "shop"),
    "a character of a smaller set": (
        "ALTER TABLE jobs MODIFY lane VARCHAR(9) CHARACTER SET latin1", Letter(b"x", key="語"), "lane"
    ),
    "a lone surrogate": ("", Letter(b"x", key="\ud800"), "surrogates"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
async def test_what_does_not_fit_is_not_accepted(what: str, mysql_database: str) -> None:
    """Refused with the reason, and never cut; of many the letter is named, and none is written."""
    change, letter, why = BAD[what]
    tables = MysqlTables(mysql_database).create()
    if change:
        tables.run(change)
    broker = tables.broker()
    async with broker.connect():
        publisher = broker.publisher(tables.table())
        with pytest.raises(PublishNotAccepted, match=why):
            await publisher.publish(letter.body, key=letter.key)
        number = 1 if "nothing fills" in what else 3
        with pytest.raises(PublishNotAccepted, match=f"letter {number} of 4: .*{why}"):
            await publisher.publish_many([b"1", b"2", letter, b"3"])
    assert tables.rows() == []


async def test_a_trigger_that_refuses(mysql_database: str) -> None:
    """Its own words; what it has written elsewhere is undone."""
    tables = MysqlTables(mysql_database).create()
    tables.run("CREATE TABLE audit (what LONGBLOB)")
    tables.run(
        "CREATE TRIGGER t BEFORE INSERT ON jobs FOR EACH ROW BEGIN INSERT INTO audit VALUES (NEW.payload); "
        "IF NEW.payload = '7' THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no sevens'; END IF; END"
    )
    broker = tables.broker()
    async with broker.connect():
        publisher = broker.publisher(tables.table())
        with pytest.raises(PublishNotAccepted, match=r"letter 8 of 20: .*no sevens"):
            await publisher.publish_many([b"%d" % number for number in range(20)])
        with pytest.raises(PublishNotAccepted, match="no sevens"):
            await publisher.publish(b"7")
    assert (tables.rows(), tables.run("SELECT COUNT(*) FROM audit")) == ([], [(0,)])


async def test_a_message_beyond_the_servers_packet(mysql_database: str) -> None:
    """Not accepted, with the setting's name; the connection lives on; several that are large together are written."""
    tables = MysqlTables(mysql_database).create()
    ((packet,),) = tables.run("SELECT @@max_allowed_packet")
    broker = tables.broker()
    async with broker.connect():
        publisher = broker.publisher(tables.table())
        with trio.fail_after(60):
            with pytest.raises(PublishNotAccepted, match="max_allowed_packet"):
                await publisher.publish(bytes(packet // 2 + 1))
            with pytest.raises(PublishNotAccepted, match=r"letter 2 of 3: .*max_allowed_packet"):
                await publisher.publish_many([b"a", bytes(packet // 2 + 1), b"b"])
            assert tables.rows() == []
            await publisher.publish_many([b"x" * (packet // 8)] * 5)
    assert tables.run("SELECT COUNT(*), MIN(LENGTH(payload)) FROM jobs") == [(5, packet // 8)]


# --- many


async def test_many_letters_in_their_order(mysql_database: str) -> None:
    """5,000, the last ten of them with more columns; in the order of their ids, and each as one alone would be."""
    tables = MysqlTables(mysql_database, grouped=True).create()
    letters: list[Letter | bytes] = [b"%d" % number for number in range(4990)]
    letters += [Letter(b"%d" % number, {"n": b"\xff"}, f"k{number}", 100.0) for number in range(4990, 5000)]
    broker = tables.broker()
    async with broker.connect():
        await broker.publisher(tables.table(), group="g'\"%s\\").publish_many(letters)
    rows = tables.rows()
    assert [row["payload"] for row in rows] == [b"%d" % number for number in range(5000)]
    assert {row["grp"] for row in rows} == {"g'\"%s\\"}
    assert [row["lane"] for row in rows] == [None] * 4990 + [f"k{number}" for number in range(4990, 5000)]
    ((late,),) = tables.run("SELECT COUNT(*) FROM jobs WHERE retry_after > UTC_TIMESTAMP() + INTERVAL 80 SECOND")
    assert late == 10


async def test_letters_of_every_shape_in_turn(mysql_database: str) -> None:
    """Headers or none, a key or none, a delay or none: each is what it was, in its place."""
    tables = MysqlTables(mysql_database).create()
    shapes = [
        Letter(b"%d" % n, {"n": b"%d" % n} if n & 1 else {}, f"k{n}" if n & 2 else None, 50.0 if n & 4 else None)
        for n in [*range(8), *range(8), 7, 7, 0, 0]
    ]
    broker = tables.broker()
    async with broker.connect():
        await broker.publisher(tables.table()).publish_many(shapes)
    found = tables.run(
        "SELECT payload, JSON_UNQUOTE(JSON_EXTRACT(headers, '$.n')), lane, retry_after > UTC_TIMESTAMP() "
        "FROM jobs ORDER BY id"
    )
    assert found == [
        (each.body, each.headers["n"].decode() if each.headers else None, each.key, int(each.deliver_after is not None))
        for each in shapes
    ]


@pytest.mark.parametrize("place", [1, 1500, 2500])
async def test_one_of_many_that_a_check_refuses_is_named(place: int, mysql_database: str) -> None:
    """In the first statement, amid the second, at the end: its number, and nothing of the others."""
    tables = MysqlTables(mysql_database).create()
    tables.run("ALTER TABLE jobs ADD CONSTRAINT good CHECK (payload <> 'bad')")
    broker = tables.broker()
    async with broker.connect():
        publisher = broker.publisher(tables.table())
        with pytest.raises(PublishNotAccepted, match=rf"'jobs', letter {place} of 2500: .*good"):
            await publisher.publish_many([b"bad" if number == place else b"good" for number in range(1, 2501)])
        assert tables.rows() == []
        await publisher.publish_many([b"good", b"better"])
    assert [row["payload"] for row in tables.rows()] == [b"good", b"better"]


@pytest.mark.parametrize("ended", ["cancelled", "killed"])
async def test_many_are_all_there_or_none(ended: str, mysql_database: str) -> None:
    """While they wait for a lock in their midst: an end of the connection leaves none, a cancellation all or none."""
    tables = MysqlTables(mysql_database).create()
    tables.run("CREATE UNIQUE INDEX one ON jobs (lane)")
    broker, errors = tables.broker(), list[LinkBroken]()
    letters = [Letter(b"x", key=f"k{number}") for number in range(3000)]

    async def publish() -> None:
        try:
            await broker.publisher(tables.table()).publish_many(letters)
        except LinkBroken as error:
            errors.append(error)

    waiting = "SELECT ID FROM information_schema.PROCESSLIST WHERE INFO LIKE 'INSERT INTO `jobs`%%' AND DB = DATABASE()"
    async with broker.connect():
        with connect(mysql_database, autocommit=False) as other, other.cursor() as cursor:
            cursor.execute("INSERT INTO jobs (lane) VALUES ('k2500')")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(publish)
                await until(lambda: run(mysql_database, waiting) != [])
                if ended == "cancelled":
                    nursery.cancel_scope.cancel()
                    other.rollback()
                else:
                    for (number,) in run(mysql_database, waiting):
                        run(mysql_database, f"KILL {number}")
            other.rollback()
        await broker.publisher(tables.table()).publish(b"after")
    count = len(tables.rows())
    assert count in ((1, 3001) if ended == "cancelled" else (1,))
    assert len(errors) == (ended == "killed")


# --- a table that changes


async def test_a_table_that_is_altered_between_two_publishings(mysql_database: str) -> None:
    """What is remembered of its columns is another table's by then: looked at again, and written."""
    tables = MysqlTables(mysql_database)
    create = "CREATE TABLE jobs (id BIGINT AUTO_INCREMENT PRIMARY KEY, payload {}, locked_until DATETIME(6))"
    tables.run(create.format("TEXT"))
    table = Table("jobs", id="id", payload="payload", locked_until="locked_until", generated=["id"])
    broker = tables.broker()
    async with broker.connect():
        publisher = broker.publisher(table)
        await publisher.publish_many([b"a", b"\\x41"])
        tables.run("ALTER TABLE jobs MODIFY payload LONGBLOB")
        await publisher.publish_many([b"\\x41", b"\xff"])
        await publisher.publish(b"\xfe")
        assert [row["payload"] for row in tables.rows()] == [b"a", b"\\x41", b"\\x41", b"\xff", b"\xfe"]
        tables.run("DROP TABLE jobs")
        for publish in (publisher.publish(b"1"), publisher.publish_many([b"1", b"2"])):
            with pytest.raises(PublishNotAccepted, match="there is no table 'jobs'"):
                await publish
        tables.run(create.format("JSON"))
        await publisher.publish_many([b"1", b"{}"])
        tables.run("ALTER TABLE jobs RENAME COLUMN locked_until TO gone")
        with pytest.raises(PublishNotAccepted, match="has no column 'locked_until'"):
            await broker.publisher(table.renamed("jobs")).publish_many([b"{", b"2"])


async def test_a_row_of_ones_own_columns(mysql_database: str) -> None:
    """Row mode: what one INSERT writes of a value an INSERT of many writes too; a computed column is left out."""
    tables = MysqlTables(mysql_database)
    tables.run(
        "CREATE TABLE jobs (id BIGINT AUTO_INCREMENT PRIMARY KEY, locked_until DATETIME(6), name VARCHAR(9), "
        "n DECIMAL(6, 2), big BIGINT, at DATETIME, what JSON, raw VARBINARY(3), mood ENUM('sad', 'happy'), "
        '`%s "x" :y` INT DEFAULT 7, twice BIGINT AS (big * 2) STORED)'
    )
    table = Table("jobs", id="id", locked_until="locked_until", generated=["id"])
    row = (
        b'{"name": "a%s\'\\\\", "n": 1.5, "big": 9007199254740993, "at": "2031-01-01 00:00:00", '
        b'"what": "{\\"a\\": [1]}", "raw": {"base64": "/w=="}, "mood": "sad"}'
    )
    broker = tables.broker()
    async with broker.connect():
        publisher = broker.publisher(table)
        await publisher.publish(row)
        await publisher.publish_many([row, row, b"{}", b'{"big": null}', b'{"%s \\"x\\" :y": 5}'])
        for bad in (b'{"raw": "abcd"}', b'{"mood": "?"}', b'{"nope": 1}', b'{"big": "x"}', b'{"n": 123456.0}'):
            with pytest.raises(PublishNotAccepted, match="letter 2 of 2"):
                await publisher.publish_many([b"{}", bad])
    found = [{name: value for name, value in each.items() if name != "id"} for each in tables.rows()]
    assert found[0] == found[1] == found[2]
    assert (found[0]["name"], found[0]["raw"], found[0]["big"]) == ("a%s'\\", b"\xff", 9007199254740993)
    assert [each["twice"] for each in found[2:]] == [18014398509481986, None, None, None]
    assert [each['%s "x" :y'] for each in found] == [7, 7, 7, 7, 7, 5]
