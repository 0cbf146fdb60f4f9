"""Publishing on a real PostgreSQL: when a letter is due, and many of them by few statements."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
import trio

from links.errors import LinkBroken, PublishNotAccepted
from links.sql import Table
from settlement import Letter
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import bodies, open_link, until

pytestmark = [pytest.mark.postgres, pytest.mark.servers]


def count_statements(tables: PostgresTables, table: str = "jobs") -> None:
    """From here on each INSERT into this table is one row of `calls`."""
    tables.run("CREATE TABLE calls (what text)")
    tables.run(
        "CREATE FUNCTION called() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO calls VALUES (TG_OP); "
        "RETURN NULL; END $$"
    )
    tables.run(f"CREATE TRIGGER calls AFTER INSERT ON {table} FOR EACH STATEMENT EXECUTE FUNCTION called()")


# --- when it is due


async def test_a_letter_is_due_when_it_is_said(database: str) -> None:
    """A delay is the server's, in seconds or as a `timedelta`; `due` is that instant, whatever its time zone."""
    tables = PostgresTables(database).create()
    broker = tables.broker()
    instant = datetime(2031, 5, 6, 7, 8, 9, 123456, timezone(timedelta(hours=-7, minutes=-30)))
    async with broker.connect():
        publisher = broker.publisher(tables.table())
        await publisher.publish(b"float", delay=100.0)
        await publisher.publish(b"timedelta", {"a": b"b"}, key="k", delay=timedelta(minutes=2))
        await publisher.publish(b"due", due=instant)
        await publisher.publish(b"past", due=datetime(1, 1, 1, tzinfo=UTC))
        await publisher.publish(b"far", due=datetime.max.replace(tzinfo=timezone(timedelta(hours=-14))))
        assert await publisher.publish_once(77, b"once", delay=100.0)
        assert await publisher.publish_once(78, b"once", due=instant)
        assert not await publisher.publish_once(78, b"again", delay=0.0)
    due = dict(tables.run("SELECT payload, extract(epoch FROM retry_after - now())::float8 FROM jobs WHERE id <> 78"))
    assert 80 < due[b"float"] <= 100
    assert 100 < due[b"timedelta"] <= 120
    assert 80 < due[b"once"] <= 100
    ((same,),) = tables.run("SELECT count(*) FROM jobs WHERE retry_after = %s", instant)
    assert same == 2
    async with open_link(tables.broker().queue(tables.table())) as link:
        assert bodies(await link.receive(9)) == [b"past"]


WRONG: dict[str, dict[str, Any]] = {
    "both": {"delay": 1.0, "due": datetime(2031, 1, 1, tzinfo=UTC)},
    "a naive time": {"due": datetime(2031, 1, 1)},  # noqa: DTZ001 -- that is the point
    "no time": {"due": 5.0},
    "less than nothing": {"delay": -1.0},
    "a timedelta below 0": {"delay": timedelta(seconds=-1)},
    "no number": {"delay": float("nan")},
    "a text": {"delay": "5"},
}


@pytest.mark.parametrize("kind", WRONG)
async def test_a_time_that_is_none_is_a_mistake(kind: str, database: str) -> None:
    """`ValueError` that names the argument, with nothing written."""
    tables = PostgresTables(database).create()
    broker = tables.broker()
    async with broker.connect():
        publisher = broker.publisher(tables.table())
        with pytest.raises(ValueError, match=r"delay|due"):
            await publisher.publish(b"x", **WRONG[kind])
        with pytest.raises(ValueError, match=r"delay|due"):
            await publisher.publish_once(1, b"x", **WRONG[kind])
    assert tables.rows() == []


@pytest.mark.parametrize("roles", [{"retry_after": None}, {"generated": ["id", "retry_after"]}])
async def test_a_delay_that_the_table_cannot_hold_is_not_accepted(roles: dict[str, Any], database: str) -> None:
    """No column for it, or one that is left out of inserts: not accepted, and not early."""
    tables = PostgresTables(database).create()
    broker = tables.broker()
    async with broker.connect():
        publisher = broker.publisher(tables.table(**roles))
        times: list[dict[str, Any]] = [{"delay": 1.0}, {"due": datetime(2031, 1, 1, tzinfo=UTC)}]
        for when in times:
            with pytest.raises(PublishNotAccepted, match="cannot hold a delay"):
                await publisher.publish(b"x", **when)
        with pytest.raises(PublishNotAccepted, match=r"letter 2 of 2: .*cannot hold a delay"):
            await publisher.publish_many([b"x", Letter(b"y", deliver_after=1.0)])
    assert tables.rows() == []


# --- many


async def test_many_letters_are_few_statements(database: str) -> None:
    """20,000 in their order, each as one alone would be written; letters of other columns begin another statement."""
    tables = PostgresTables(database, grouped=True).create()
    count_statements(tables)
    letters: list[Letter | bytes] = [b"%d" % number for number in range(19_990)]
    letters += [
        Letter(b"%d" % number, {"n": b"\xff%d" % number}, f"k{number}", 100.0) for number in range(19_990, 20_000)
    ]
    broker = tables.broker()
    async with broker.connect():
        await broker.publisher(tables.table(), group="g'\"%s").publish_many(letters)
    rows = tables.rows()
    assert [row["payload"] for row in rows] == [b"%d" % number for number in range(20_000)]
    assert [row["id"] for row in rows] == sorted(row["id"] for row in rows)
    assert {row["grp"] for row in rows} == {"g'\"%s"}
    assert {(row["headers"], row["lane"], row["attempt"]) for row in rows[:-10]} == {(None, None, 1)}
    assert [row["lane"] for row in rows[-10:]] == [f"k{number}" for number in range(19_990, 20_000)]
    assert tables.run("SELECT count(*) FROM calls") == [(21,)]
    async with open_link(tables.broker().queue(tables.table(), group="g'\"%s")) as link:
        assert len(await link.receive(100)) == 100
    ((late,),) = tables.run("SELECT count(*) FROM jobs WHERE retry_after BETWEEN now() + '80 s' AND now() + '100 s'")
    assert late == 10


async def test_letters_of_every_shape_in_turn(database: str) -> None:
    """Headers or none, a key or none, a delay or none: each is what it was, in its place."""
    tables = PostgresTables(database).create()
    shapes = [
        Letter(b"%d" % n, {"n": b"%d" % n} if n & 1 else {}, f"k{n}" if n & 2 else None, 50.0 if n & 4 else None)
        for n in [*range(8), *range(8), 7, 7, 0, 0]
    ]
    broker = tables.broker()
    async with broker.connect():
        await broker.publisher(tables.table()).publish_many(shapes)
    found = tables.run("SELECT payload, headers->>'n', lane, retry_after > now() FROM jobs ORDER BY id")
    assert found == [
        (
            letter.body,
            letter.headers["n"].decode() if letter.headers else None,
            letter.key,
            letter.deliver_after is not None,
        )
        for letter in shapes
    ]


COLUMNS = {
    "name": "text",
    "short": "varchar(3)",
    "code": "char(4)",
    "n": "numeric(6, 2)",
    "big": "bigint",
    "yes": "boolean",
    "at": "timestamptz",
    "day": "date",
    "ids": "int[]",
    "what": "jsonb",
    "raw": "bytea",
    "mood": "mood",
    "positive": "positive",
    "place": "point",
    "uid": "uuid",
    "bits": "bit(3)",
    "pair": "pair",
}

ROWS = b"""{"name": "a%sb'", "short": "abc", "code": "x", "n": 1.239, "big": 9007199254740993, "yes": true,
"at": "2031-01-01 00:00:00+02", "day": "0044-03-15 BC", "ids": "{1,NULL,3}", "what": "{\\"a\\": [1]}",
"raw": {"base64": "/w=="}, "mood": "sad", "positive": 5, "place": "(1,2)",
"uid": "0193c2a4-0000-7000-8000-000000000000", "bits": "101", "pair": "(1,x)"}"""


async def test_a_row_of_many_is_a_row_of_one(database: str) -> None:
    """Row mode, columns of seventeen types: what one INSERT writes of a value, an INSERT of many writes too."""
    tables = PostgresTables(database)
    tables.run("CREATE TYPE mood AS ENUM ('sad', 'happy')")
    tables.run("CREATE DOMAIN positive AS int CHECK (VALUE > 0)")
    tables.run("CREATE TYPE pair AS (a int, b text)")
    columns = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
    tables.run(f"CREATE TABLE jobs (id serial PRIMARY KEY, locked_until timestamptz, {columns})")
    whole = Table("jobs", id="id", locked_until="locked_until", generated=["id"])
    broker = tables.broker()
    async with broker.connect():
        publisher = broker.publisher(whole)
        await publisher.publish(ROWS)
        await publisher.publish_many([ROWS, ROWS, b"{}", b'{"big": null}', b'{"big": 70000}', b'{"big": 1}', b"{}"])
    texts = ", ".join(f"{name}::text" for name in COLUMNS)
    one, *many = tables.run(f"SELECT {texts} FROM jobs ORDER BY id")  # noqa: S608
    assert many[:2] == [one, one]
    assert one[3:5] == ("1.24", "9007199254740993")
    big = list(COLUMNS).index("big")
    assert [row[big] for row in many[2:]] == [None, None, "70000", "1", None]
    assert {value for row in many[2:] for number, value in enumerate(row) if number != big} == {None}


@pytest.mark.parametrize(
    "bad", [b'{"short": "abcd"}', b'{"positive": 0}', b'{"nope": 1}', b'{"yes": 1}', b'{"mood": "?"}']
)
async def test_a_value_that_one_row_cannot_have_many_cannot(bad: bytes, database: str) -> None:
    """A cast to the column's type is not laxer than an assignment is: named, and nothing written."""
    tables = PostgresTables(database)
    tables.run("CREATE TYPE mood AS ENUM ('sad', 'happy')")
    tables.run("CREATE DOMAIN positive AS int CHECK (VALUE > 0)")
    tables.run(
        "CREATE TABLE jobs (id serial PRIMARY KEY, locked_until timestamptz, short varchar(3), positive positive, "
        "yes boolean, mood mood)"
    )
    broker = tables.broker()
    async with broker.connect():
        publisher = broker.publisher(Table("jobs", id="id", locked_until="locked_until", generated=["id"]))
        with pytest.raises(PublishNotAccepted):
            await publisher.publish(bad)
        with pytest.raises(PublishNotAccepted, match="letter 1 of 2"):
            await publisher.publish_many([bad, bad])
    assert tables.rows() == []


@pytest.mark.parametrize("place", [1, 1500, 2500])
async def test_one_of_many_that_a_check_refuses_is_named(place: int, database: str) -> None:
    """In the first statement, amid the second, at the end: its number, and nothing of the others."""
    tables = PostgresTables(database).create()
    tables.run("ALTER TABLE jobs ADD CHECK (payload <> 'bad')")
    letters = [b"bad" if number == place else b"good" for number in range(1, 2501)]
    broker = tables.broker()
    async with broker.connect():
        publisher = broker.publisher(tables.table())
        with pytest.raises(PublishNotAccepted, match=rf"'jobs', letter {place} of 2500: .*violates check"):
            await publisher.publish_many(letters)
        assert tables.rows() == []
        await publisher.publish_many([b"good", b"better"])
    assert len(tables.rows()) == 2


async def test_two_of_many_that_are_the_same(database: str) -> None:
    """A unique index over the key: the second of them is named."""
    tables = PostgresTables(database).create()
    tables.run("CREATE UNIQUE INDEX one ON jobs (lane)")
    letters = [Letter(b"x", key=f"k{number % 30}") for number in range(40)]
    broker = tables.broker()
    async with broker.connect():
        with pytest.raises(PublishNotAccepted, match=r"letter 31 of 40: .*duplicate key"):
            await broker.publisher(tables.table()).publish_many(letters)
    assert tables.rows() == []


async def test_what_the_commit_refuses_is_no_one_letters(database: str) -> None:
    """A deferred constraint: not accepted, none written, no letter named."""
    tables = PostgresTables(database).create()
    tables.run("ALTER TABLE jobs ADD CONSTRAINT one UNIQUE (lane) DEFERRABLE INITIALLY DEFERRED")
    broker = tables.broker()
    async with broker.connect():
        publisher = broker.publisher(tables.table())
        with pytest.raises(PublishNotAccepted, match="duplicate key") as caught:
            await publisher.publish_many([Letter(b"x", key="k")] * 3)
        assert "letter" not in str(caught.value)
        await publisher.publish(b"y")
    assert [row["payload"] for row in tables.rows()] == [b"y"]


async def test_a_column_that_nothing_fills_is_not_accepted(database: str) -> None:
    """One of the user's own, NOT NULL without a default: the error names it; a GENERATED ALWAYS id is no trouble."""
    tables = PostgresTables(database)
    tables.run(
        "CREATE TABLE jobs (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, payload bytea, "
        "locked_until timestamptz, shop text NOT NULL, twice text GENERATED ALWAYS AS (shop || shop) STORED, "
        '"%s ""x"" :y" int DEFAULT 7)'
    )
    table = Table("jobs", id="id", payload="payload", locked_until="locked_until", generated=["id"])
    broker = tables.broker()
    async with broker.connect():
        publisher = broker.publisher(table)
        with pytest.raises(PublishNotAccepted, match=r'letter 1 of 2: .*column "shop"'):
            await publisher.publish_many([b"x", b"y"])
        tables.run("ALTER TABLE jobs ALTER COLUMN shop SET DEFAULT 's'")
        await publisher.publish_many([b"x", b"y"])
        assert await publisher.publish_once(99, b"z")
        whole = Table("jobs", id="id", locked_until="locked_until", partition_key='%s "x" :y')
        await broker.publisher(whole).publish_many(
            [b'{"id": 50, "%s \\"x\\" :y": 5}', b'{"id": 51, "%s \\"x\\" :y": 6}']
        )
    last = [row[:1] + row[-1:] for row in tables.run("SELECT * FROM jobs WHERE id >= 50 ORDER BY id")]
    assert last == [(50, 5), (51, 6), (99, 7)]
    assert tables.run("SELECT payload, shop, twice FROM jobs WHERE id < 50") == [(b"x", "s", "ss"), (b"y", "s", "ss")]


async def test_many_into_a_table_with_odd_names(database: str) -> None:
    """Quotes, percent signs, colons, reserved words, a schema: the names are themselves."""
    tables = PostgresTables(database)
    tables.run('CREATE SCHEMA "select"')
    tables.run(
        'CREATE TABLE "select"."or%s""der:x" ("user" serial PRIMARY KEY, "%(v0)s" bytea, "group" text, '
        '"a:b" timestamptz, "he""ad" jsonb)'
    )
    table = Table(
        'select.or%s"der:x', id="user", payload="%(v0)s", group="group", locked_until="a:b", headers='he"ad',
        generated="user",
    )  # fmt: skip
    broker = tables.broker()
    async with broker.connect():
        await broker.publisher(table, group="g").publish_many([Letter(b"%d" % n, {"%s": b":v0"}) for n in range(3)])
    with psycopg.connect(database) as connection:
        rows = connection.execute(b'SELECT * FROM "select"."or%s""der:x" ORDER BY 1').fetchall()
    assert rows == [(n + 1, b"%d" % n, "g", None, {"%s": ":v0"}) for n in range(3)]


async def test_a_trigger_that_ignores_one_of_many(database: str) -> None:
    """Fewer rows than letters: the letter is named; what the trigger has written elsewhere is undone."""
    tables = PostgresTables(database).create()
    tables.run("CREATE TABLE audit (what bytea)")
    tables.run(
        "CREATE FUNCTION deaf() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO audit VALUES (NEW.payload); "
        "IF NEW.payload = '7' THEN RETURN NULL; END IF; RETURN NEW; END $$"
    )
    broker = tables.broker()
    async with broker.connect():
        publisher = broker.publisher(tables.table())
        await publisher.publish_many([b"known", b"already"])
        tables.run("CREATE TRIGGER deaf BEFORE INSERT ON jobs FOR EACH ROW EXECUTE FUNCTION deaf()")
        with pytest.raises(PublishNotAccepted, match=r"letter 8 of 20: .*a trigger has ignored it"):
            await publisher.publish_many([b"%d" % n for n in range(20)])
    assert tables.run("SELECT count(*) FROM audit") == [(0,)]
    assert [row["payload"] for row in tables.rows()] == [b"known", b"already"]


async def test_many_large_letters(database: str) -> None:
    """Three of 50 MB between small ones: each is a statement of its own, and all come."""
    tables = PostgresTables(database).create()
    large = bytes(range(256)) * (50 * 4096)
    broker = tables.broker()
    async with broker.connect():
        with trio.fail_after(120):
            await broker.publisher(tables.table()).publish_many([b"a", large, large, b"b", b"c", large])
    assert tables.run("SELECT length(payload), md5(payload) FROM jobs WHERE length(payload) > 1") == tables.run(
        "SELECT %s::int, md5(%s) FROM generate_series(1, 3)", len(large), large
    )
    assert tables.run("SELECT count(*) FROM jobs") == [(6,)]


async def test_a_table_that_is_altered_between_two_publishings(database: str) -> None:
    """What is remembered of its columns is another table's by then: looked at again, and written."""
    tables = PostgresTables(database)
    tables.run("CREATE TABLE jobs (id serial PRIMARY KEY, payload text, locked_until timestamptz)")
    table = Table("jobs", id="id", payload="payload", locked_until="locked_until", generated=["id"])
    broker = tables.broker()
    async with broker.connect():
        publisher = broker.publisher(table)
        for _ in range(7):
            await publisher.publish_many([b"a", b"b", b"\\x41"])
        tables.run("ALTER TABLE jobs ALTER COLUMN payload TYPE bytea USING convert_to(payload, 'UTF8')")
        await publisher.publish_many([b"\\x41", b"\xff", b"d"])
        found = tables.run("SELECT payload FROM jobs ORDER BY id")
        assert found == [(b"a",), (b"b",), (b"\\x41",)] * 7 + [(b"\\x41",), (b"\xff",), (b"d",)]
        tables.run("DROP TABLE jobs")
        with pytest.raises(PublishNotAccepted, match=r"^there is no table 'jobs'"):
            await publisher.publish_many([b"1", b"2", b"3"])
        tables.run("CREATE TABLE jobs (id serial PRIMARY KEY, payload jsonb, locked_until timestamptz)")
        await publisher.publish_many([b"1", b"{}", b"[2]"])
        tables.run("ALTER TABLE jobs RENAME COLUMN locked_until TO gone")
        with pytest.raises(PublishNotAccepted, match="has no column 'locked_until'"):
            await broker.publisher(table.renamed("public.jobs")).publish_many([b"1", b"2"])
    assert [row["payload"] for row in tables.rows()] == [1, {}, [2]]


async def test_one_letter_for_a_column_that_has_become_bytea(database: str) -> None:
    """What was remembered as a text would be read by its backslashes: four bytes stay four bytes, and are no A."""
    tables = PostgresTables(database)
    tables.run("CREATE TABLE jobs (id serial PRIMARY KEY, payload text, locked_until timestamptz)")
    table = Table("jobs", id="id", payload="payload", locked_until="locked_until", generated=["id"])
    broker = tables.broker()
    async with broker.connect():
        publisher = broker.publisher(table)
        await publisher.publish(b"\\x41")
        tables.run("ALTER TABLE jobs ALTER COLUMN payload TYPE bytea USING convert_to(payload, 'UTF8')")
        await publisher.publish(b"\\x41")
    assert [row["payload"] for row in tables.rows()] == [b"\\x41", b"\\x41"]


@pytest.mark.parametrize("ended", ["cancelled", "killed"])
async def test_many_are_all_there_or_none(ended: str, database: str) -> None:
    """While they wait for a lock in their midst: a cancellation leaves all of them, an end of the connection none."""
    tables = PostgresTables(database).create()
    tables.run("CREATE UNIQUE INDEX one ON jobs (lane)")
    letters = [Letter(b"x", key=f"k{number}") for number in range(3000)]
    broker = tables.broker()
    errors: list[LinkBroken] = []

    async def publish() -> None:
        try:
            await broker.publisher(tables.table()).publish_many(letters)
        except LinkBroken as error:
            errors.append(error)

    async with broker.connect():
        with psycopg.connect(database) as other:
            other.execute("INSERT INTO jobs (lane) VALUES ('k2500')")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(publish)
                await until(lambda: tables.run("SELECT count(*) FROM pg_locks WHERE NOT granted") == [(1,)])
                if ended == "cancelled":
                    nursery.cancel_scope.cancel()
                else:
                    tables.run("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE NOT granted")
            other.rollback()
        await broker.publisher(tables.table()).publish(b"after")
    found = dict(tables.run("SELECT payload, count(*) FROM jobs GROUP BY payload"))
    assert found == ({b"x": 3000, b"after": 1} if ended == "cancelled" else {b"after": 1})
    assert len(errors) == (ended == "killed")
