"""What SQLite's columns may look like: their order, their types, their keys, and what else a table does by itself."""

# ruff: noqa: S608 -- texts of the tests' own

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import trio

from links.errors import LinkRefused, NotApplied, PublishNotAccepted
from links.sql import Table
from settlement import Policy, Retry
from settlement.sql import Finish, MoveToTable, PutBack
from tests.links.sqlite_kit import Database, attached, bodies, broker_of, finish, now, open_link, order, say, until

pytestmark = pytest.mark.sqlite

COLUMNS = {
    "id": "INTEGER PRIMARY KEY AUTOINCREMENT",
    "body": "BLOB",
    "due": "REAL NOT NULL DEFAULT 0",
    "lock": "REAL",
    "tries": "INTEGER NOT NULL DEFAULT 1",
    "rank": "REAL NOT NULL DEFAULT 3",
}
JOBS: Table[bytes] = Table(
    "jobs", id="id", payload="body", retry_after="due", locked_until="lock", attempt="tries", priority="rank"
)


def made(path: Path, columns: str, *, dead: bool = False, end: str = "") -> Database:
    database = Database(path / "q.db")
    for name in ("jobs", "dead") if dead else ("jobs",):
        database.run(f"CREATE TABLE {name} ({columns}) {end}")
    return database


@pytest.mark.parametrize("first", COLUMNS)
@pytest.mark.parametrize("end", ["", "STRICT"])
async def test_any_column_may_stand_first(first: str, end: str, tmp_path: Path) -> None:
    """Up to SQLite 3.40 RETURNING gave integers as floats behind a REAL first column: counts and tokens stay whole."""
    names = [first, *(name for name in COLUMNS if name != first)]
    database = made(tmp_path, ", ".join(f"{name} {COLUMNS[name]}" for name in names), dead=True, end=end)
    policy = Policy(max_attempts=2, dead_letter="dead")
    queue = database.broker().queue(JOBS)
    async with queue.broker.connect(), attached(queue, policy=policy) as link:
        await broker_of(queue).publisher(JOBS).publish(b"precious")
        for attempt in (1, 2):
            (received,) = await link.receive(1)
            assert received.unreadable is None
            assert (received.delivery.attempt, type(received.token[2])) == (attempt, int)
            assert await link.extend([received]) == []
            assert await link.settle([order(queue, received, Retry(), policy)]) == [None]
    assert database.rows() == []
    assert [(row["body"], row["tries"]) for row in database.rows("dead")] == [(b"precious", 3)]


@pytest.mark.parametrize("key", [2**53 + 1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("kind", ["INTEGER PRIMARY KEY", "INT NOT NULL UNIQUE"])
async def test_an_id_keeps_every_bit(key: int, kind: str, tmp_path: Path) -> None:
    """An id beyond the whole numbers that a float holds is claimed, extended and settled, and no neighbour is."""
    database = made(tmp_path, f"due REAL NOT NULL DEFAULT 0, id {kind}, body BLOB, lock REAL")
    database.run("INSERT INTO jobs (id, body) VALUES (?, 'mine'), (?, 'other')", key, key ^ 1)
    database.run("UPDATE jobs SET due = ? WHERE id = ?", now() + 100, key ^ 1)
    table = Table("jobs", id="id", payload="body", retry_after="due", locked_until="lock")
    async with open_link(database.broker().queue(table)) as link:
        (received,) = await link.receive(2)
        assert (received.token[0], received.delivery.id) == (key, str(key))
        assert await link.extend([received]) == []
        assert await link.settle(finish([received])) == [None]
    assert database.run("SELECT id, body FROM jobs") == [(key ^ 1, "other")]


async def test_a_row_has_the_values_that_are_stored(tmp_path: Path) -> None:
    """Row mode behind a REAL first column: whole numbers, whole floats, texts, blobs and NULL are what they are."""
    columns = "r REAL, id INTEGER PRIMARY KEY, i INTEGER, f REAL, t TEXT, b BLOB, n, lock REAL, made AS (i + 1) STORED"
    database = made(tmp_path, columns)
    database.run("INSERT INTO jobs (r, id, i, f, t, b) VALUES (1.5, 7, ?, 2.0, '3', x'00ff')", 2**60 + 1)
    table = Table("jobs", id="id", locked_until="lock")
    async with open_link(database.broker().queue(table)) as link:
        (received,) = await link.receive(1)
        row: dict[str, Any] = received.delivery.message
        assert row == {
            "r": 1.5,
            "id": 7,
            "i": 2**60 + 1,
            "f": 2.0,
            "t": "3",
            "b": b"\x00\xff",
            "n": None,
            "lock": None,
            "made": 2**60 + 2,
        }
        assert [type(row[name]) for name in ("id", "i", "f", "made")] == [int, int, float, int]
        assert await link.settle(finish([received])) == [None]


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("TEXT PRIMARY KEY", ["a", "A", "ä", "", "1"]),
        ("TEXT COLLATE NOCASE PRIMARY KEY", ["a", "B", "c"]),
        ("BLOB PRIMARY KEY NOT NULL", [b"", b"\x00", b"\xff\x00"]),
        ("REAL PRIMARY KEY NOT NULL", [0.1, 1e300, -2.5]),
        ("PRIMARY KEY NOT NULL", [1, 1.5, "x", b"x"]),
    ],
)
async def test_a_key_of_any_type(kind: str, keys: list[Any], tmp_path: Path) -> None:
    """Each row is claimed once, extended, put back, claimed again and moved; the others are left alone."""
    database = made(tmp_path, f"id {kind}, body BLOB, lock REAL", dead=True)
    for key in keys:
        database.run("INSERT INTO jobs VALUES (?, ?, NULL)", key, repr(key).encode())
    table = Table("jobs", id="id", payload="body", locked_until="lock")
    async with open_link(database.broker().queue(table)) as link:
        for verb in (PutBack(count=False), MoveToTable("dead")):
            received = await link.receive(10)
            assert sorted(bodies(received)) == sorted(repr(key).encode() for key in keys)
            assert await link.extend(received) == []
            assert await link.settle([say(each, verb) for each in received]) == [None] * len(keys)
    assert database.rows() == []
    assert len(database.rows("dead")) == len(keys)


async def test_reserved_words_and_quotes_as_names(tmp_path: Path) -> None:
    """Words of SQL, and every kind of quote that SQLite knows, name columns through every verb."""
    names = ("order", "it's", 'say "x"', "back`tick", "[box]", "rowid", "true")
    quoted = ['"' + name.replace('"', '""') + '"' for name in names]
    kinds = (
        "INTEGER PRIMARY KEY",
        "BLOB",
        "REAL",
        "INTEGER NOT NULL DEFAULT 1",
        "REAL",
        "TEXT",
        "INTEGER NOT NULL DEFAULT 0",
    )
    database = made(tmp_path, ", ".join(map(" ".join, zip(quoted, kinds, strict=True))), dead=True)
    key, body, lock, tries, done, lane, rank = names
    table = Table(
        "jobs",
        id=key,
        payload=body,
        locked_until=lock,
        attempt=tries,
        processed_at=done,
        partition_key=lane,
        priority=rank,
    )
    queue = database.broker().queue(table)
    async with open_link(queue) as link:
        for letter in (b"a", b"b"):
            await broker_of(queue).publisher(table).publish(letter, key="k")
        received = await link.receive(2)
        assert ([each.delivery.key for each in received], await link.extend(received)) == (["k", "k"], [])
        assert await link.settle([say(received[0], Finish()), say(received[1], MoveToTable("dead"))]) == [None, None]
    assert [(row[key], row[done] is None) for row in database_rows(database, "jobs")] == [(1, False)]
    assert [(row[key], row[body]) for row in database_rows(database, "dead")] == [(2, b"b")]


def database_rows(database: Database, name: str) -> list[dict[str, Any]]:
    columns = [row[1] for row in database.run(f"PRAGMA table_info({name})")]
    return [dict(zip(columns, row, strict=True)) for row in database.run(f"SELECT * FROM {name}")]


# --- what a table does by itself


async def test_a_trigger_may_rewrite_the_lease(tmp_path: Path) -> None:
    """The token is what is stored, not what was written: rounded up to whole seconds here, at claim and extension."""
    database = made(tmp_path, "id INTEGER PRIMARY KEY, body BLOB, lock REAL, tries INTEGER NOT NULL DEFAULT 1")
    database.run(
        "CREATE TRIGGER whole AFTER UPDATE OF lock ON jobs WHEN NEW.lock <> round(NEW.lock) + 1 "
        "BEGIN UPDATE jobs SET lock = round(NEW.lock) + 1 WHERE id = NEW.id; END"
    )
    database.run("INSERT INTO jobs (body) VALUES ('a'), ('b')")
    table = Table("jobs", id="id", payload="body", locked_until="lock", attempt="tries")
    async with open_link(database.broker().queue(table)) as link:
        received = await link.receive(2)
        assert [each.token for each in received] == database.run("SELECT id, lock, tries FROM jobs")
        assert await link.extend(received) == []
        assert [each.token for each in received] == database.run("SELECT id, lock, tries FROM jobs")
        assert await link.settle(finish(received)) == [None, None]
    assert database.rows() == []


async def test_a_trigger_may_pass_a_row_over(tmp_path: Path) -> None:
    """RAISE(IGNORE) in a trigger: that row was not leased, so it is not handed out; the others are."""
    database = made(tmp_path, "id INTEGER PRIMARY KEY, body BLOB, lock REAL")
    database.run("CREATE TRIGGER not_two BEFORE UPDATE ON jobs WHEN OLD.id = 2 BEGIN SELECT RAISE(IGNORE); END")
    database.run("INSERT INTO jobs (body) VALUES ('a'), ('b'), ('c')")
    table = Table("jobs", id="id", payload="body", locked_until="lock")
    async with open_link(database.broker().queue(table)) as link:
        received = await link.receive(3)
        assert bodies(received) == [b"a", b"c"]
        assert await link.settle(finish(received)) == [None, None]


@pytest.mark.parametrize("what", ["CHECK (tries < 3 OR body <> 'bad')", "index", "trigger"])
async def test_a_row_that_cannot_be_claimed_keeps_no_other_back(what: str, tmp_path: Path) -> None:
    """A CHECK, a unique index over held rows, a trigger that raises: each row is leased by itself then."""
    check = f", {what}" if what.startswith("CHECK") else ""
    database = made(tmp_path, f"id INTEGER PRIMARY KEY, body TEXT, lock REAL, tries INTEGER NOT NULL DEFAULT 1{check}")
    database.run("INSERT INTO jobs (body, tries) VALUES ('a', 1), ('bad', 2), ('c', 1), ('d', 1)")
    if what == "index":
        database.run("CREATE UNIQUE INDEX one ON jobs (body) WHERE lock IS NOT NULL AND body = 'bad'")
        database.run("INSERT INTO jobs (body, lock) VALUES ('bad', ?)", now() + 100)
    elif what == "trigger":
        database.run("CREATE TRIGGER no BEFORE UPDATE ON jobs WHEN OLD.id = 2 BEGIN SELECT RAISE(ABORT, 'no'); END")
    table = Table("jobs", id="id", payload="body", locked_until="lock", attempt="tries")
    async with open_link(database.broker().queue(table)) as link:
        received = await link.receive(4)
        assert bodies(received) == [b"a", b"c", b"d"]
        assert await link.settle(finish(received)) == [None] * 3
    assert [row["tries"] for row in database.rows() if row["id"] == 2] == [2]


async def test_a_claim_of_nothing_but_such_a_row_finds_nothing(tmp_path: Path) -> None:
    """The only row cannot be claimed: the queue is degraded, says why, and nothing was written."""
    database = made(tmp_path, "id INTEGER PRIMARY KEY, body TEXT, lock REAL CHECK (lock IS NULL)")
    database.run("INSERT INTO jobs (body) VALUES ('a')")
    table = Table("jobs", id="id", payload="body", locked_until="lock")
    said: list[str | None] = []
    async with open_link(database.broker().queue(table)) as link:
        link.degraded = lambda _, why: said.append(why)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.receive, 1)
            await until(lambda: said)
            nursery.cancel_scope.cancel()
    assert "CHECK constraint failed" in (said[0] or "")
    assert [row["lock"] for row in database.rows()] == [None]


@pytest.mark.parametrize("answer", ["REPLACE", "IGNORE", "FAIL", "ROLLBACK"])
async def test_a_constraint_may_not_settle_by_itself(answer: str, tmp_path: Path) -> None:
    """ON CONFLICT … in the table would lose a row without a word: what we write is written OR ABORT."""
    database = made(
        tmp_path,
        f"id TEXT PRIMARY KEY ON CONFLICT {answer}, body TEXT UNIQUE ON CONFLICT {answer}, lock REAL",
        dead=True,
    )
    database.run("INSERT INTO dead (id, body) VALUES ('1', 'first')")
    table = Table("jobs", id="id", payload="body", locked_until="lock")
    queue = database.broker().queue(table)
    async with open_link(queue) as link:
        publisher = broker_of(queue).publisher(table)
        assert await publisher.publish_once("1", b"second")
        assert not await publisher.publish_once("1", b"third")
        with pytest.raises(PublishNotAccepted, match=r"UNIQUE constraint failed: jobs\.body"):
            await publisher.publish(b"second")
        (received,) = await link.receive(2)
        (verdict,) = await link.settle([say(received, MoveToTable("dead"))])
        assert isinstance(verdict, NotApplied)
        assert r"UNIQUE constraint failed: dead.id" in str(verdict)
    assert [row["body"] for row in database.rows("dead")] == ["first"]
    assert [row["body"] for row in database.rows()] == ["second"]


async def test_a_held_row_is_not_replaced_by_a_claim(tmp_path: Path) -> None:
    """A unique constraint with ON CONFLICT REPLACE over what a claim writes would delete another row."""
    database = made(tmp_path, "id INTEGER PRIMARY KEY, body TEXT, lock REAL, tries INTEGER UNIQUE ON CONFLICT REPLACE")
    database.run("INSERT INTO jobs (body, tries) VALUES ('a', 1), ('b', 2)")
    table = Table("jobs", id="id", payload="body", locked_until="lock", attempt="tries")
    async with open_link(database.broker().queue(table)) as link:
        assert bodies(await link.receive(2)) == [b"b"]
    assert [row["body"] for row in database.rows()] == ["a", "b"]


TALLY = "CREATE TRIGGER tally AFTER INSERT ON {} BEGIN SELECT 1; END"


@pytest.mark.parametrize("where", ["jobs", "dead"])
async def test_a_table_that_replaces_and_has_triggers_is_refused(where: str, tmp_path: Path) -> None:
    """Beside a trigger nothing can be written OR ABORT: the other row would be gone without a word."""
    database = made(tmp_path, "id INTEGER PRIMARY KEY, body TEXT UNIQUE on  conflict\nReplace, lock REAL", dead=True)
    table = Table("jobs", id="id", payload="body", locked_until="lock", generated=("id",))
    queue = database.broker().queue(table)
    async with queue.broker.connect(), attached(queue, policy=Policy(max_attempts=2, dead_letter="dead")):
        await broker_of(queue).publisher(table.renamed(where)).publish(b"one")
    database.run(TALLY.format(where))
    async with queue.broker.connect():
        with pytest.raises(LinkRefused, match=rf"{where}.*ON CONFLICT REPLACE"):
            async with attached(queue, policy=Policy(max_attempts=2, dead_letter="dead")):
                raise AssertionError
        with pytest.raises(PublishNotAccepted, match=rf"{where}.*ON CONFLICT REPLACE"):
            await broker_of(queue).publisher(table.renamed(where)).publish(b"one")
    assert [row["body"] for row in database.rows(where)] == ["one"]


async def test_a_table_that_only_speaks_of_it_is_taken(tmp_path: Path) -> None:
    """In a comment or a text, or in the triggers' own statements."""
    columns = "id INTEGER PRIMARY KEY, /* not ON CONFLICT REPLACE */ body TEXT DEFAULT 'ON CONFLICT REPLACE', lock REAL"
    database = made(tmp_path, columns + " -- ON CONFLICT REPLACE\n")
    database.run("CREATE TABLE tally (id UNIQUE ON CONFLICT REPLACE)")
    database.run("CREATE TRIGGER tally AFTER INSERT ON jobs BEGIN INSERT OR REPLACE INTO tally VALUES (1); END")
    table = Table("jobs", id="id", payload="body", locked_until="lock", generated=("id",))
    queue = database.broker().queue(table)
    async with open_link(queue) as link:
        await broker_of(queue).publisher(table).publish(b"one")
        assert bodies(await link.receive(1)) == [b"one"]


async def test_a_view_is_no_queue(tmp_path: Path) -> None:
    """S-12.3: a view, also one with triggers in the place of updates, is refused and named as one."""
    database = made(tmp_path, "id INTEGER PRIMARY KEY, body TEXT, lock REAL")
    database.run("CREATE VIEW open AS SELECT * FROM jobs")
    queue = database.broker().queue(Table("open", id="id", payload="body", locked_until="lock"))
    async with queue.broker.connect():
        with pytest.raises(LinkRefused, match=r"table 'open': there is no such table.*the name is a view's"):
            async with attached(queue):
                pass
        dead = database.broker().queue(Table("jobs", id="id", payload="body", locked_until="lock"))
    async with dead.broker.connect():
        with pytest.raises(
            LinkRefused, match=r"dead-letter table 'open': there is no such table.*the name is a view's"
        ):
            async with attached(dead, policy=Policy(dead_letter="open")):
                pass


# --- keys that nothing fills


@pytest.mark.parametrize(
    ("columns", "generated", "lost"),
    [
        ("id INTEGER PRIMARY KEY DESC", (), "has the id NULL"),
        ("id INTEGER PRIMARY KEY DESC", ("id",), "has the id NULL"),
        ("id INT PRIMARY KEY", ("id",), "has the id NULL"),
        ("id BIGINT UNIQUE", (), "has the id NULL"),
        ("id TEXT PRIMARY KEY", ("id",), "has the id NULL"),
        ("id INTEGER PRIMARY KEY) WITHOUT ROWID", ("id",), "is refused"),
        ("id INT PRIMARY KEY NOT NULL DEFAULT NULL", ("id",), "is refused"),
    ],
)
async def test_a_key_that_nothing_fills_is_refused(
    columns: str, generated: tuple[str, ...], lost: str, tmp_path: Path
) -> None:
    """INTEGER PRIMARY KEY DESC and WITHOUT ROWID are no keys that SQLite fills; the way out says what is."""
    end = "" if columns.endswith("WITHOUT ROWID") else ")"
    database = Database(tmp_path / "q.db")
    database.run(f"CREATE TABLE jobs (body, lock REAL, {columns}{end}")
    table = Table("jobs", id="id", payload="body", locked_until="lock", generated=generated)
    queue = database.broker().queue(table)
    async with queue.broker.connect():
        with pytest.raises(LinkRefused, match=rf"column 'id' \(id\) is filled by nothing.*{lost}.*AUTOINCREMENT"):
            async with attached(queue):
                pass
        with pytest.raises(PublishNotAccepted, match=r"'id' \(id\)"):
            await broker_of(queue).publisher(table).publish(b"x")
    assert database.run("SELECT * FROM jobs") == []


@pytest.mark.parametrize(
    "columns",
    [
        "id INTEGER, body, lock REAL, PRIMARY KEY (id DESC)",  # an alias of the rowid all the same
        "id INTEGER PRIMARY KEY ASC, body, lock REAL",
        "id TEXT PRIMARY KEY DEFAULT (lower(hex(randomblob(8)))), body, lock REAL",
        "id TEXT PRIMARY KEY, body, lock REAL",
    ],
)
async def test_a_key_that_something_fills(columns: str, tmp_path: Path) -> None:
    """The database, or for a text the publisher."""
    database = made(tmp_path, columns)
    table = Table("jobs", id="id", payload="body", locked_until="lock")
    queue = database.broker().queue(table)
    async with open_link(queue) as link:
        for _ in range(2):
            await broker_of(queue).publisher(table).publish(b"x")
        received = list(itertools.chain(await link.receive(2)))
        assert len({each.delivery.id for each in received}) == 2
        assert await link.settle(finish(received)) == [None, None]


async def test_rows_without_an_id_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A text key may be NULL in SQLite: such rows are never delivered, stand in nobody's way, and are told of."""
    database = made(tmp_path, "id TEXT PRIMARY KEY, body, lock REAL")
    database.run("INSERT INTO jobs VALUES (NULL, 'lost', NULL), ('7', 'behind', NULL)")
    table = Table("jobs", id="id", payload="body", locked_until="lock")
    async with open_link(database.broker().queue(table)) as link:
        received = await link.receive(2)
        assert bodies(received) == [b"behind"]
        assert await link.settle(finish(received)) == [None]
    (record,) = caplog.records
    assert record.message == (
        "subscription 'test', table 'jobs': there are rows whose 'id' (id) is NULL; they are never delivered, give "
        "them an id"
    )
