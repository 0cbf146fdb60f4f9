"""A dead letter whose id is taken where it moves to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from actors import Subscription, open_runtime
from links.errors import NotApplied
from links.sql import SqlBroker, Table
from settlement import Delivery, Outcome, Policy, Retry
from settlement.sql import MoveToTable
from tests.links.sqlite_kit import Database, open_link, say, until

pytestmark = pytest.mark.sqlite

MOVE = MoveToTable("dead")
OTHERS = "body BLOB, lock REAL, tries INTEGER NOT NULL DEFAULT 1"


def described(name: str = "jobs", **roles: Any) -> Table[bytes]:
    return Table(name, id="id", payload="body", locked_until="lock", attempt="tries", **roles)


def made(path: Path, jobs: str, dead: str) -> Database:
    database = Database(path / "q.db")
    database.run(f"CREATE TABLE jobs (id {jobs}, {OTHERS})")
    database.run(f"CREATE TABLE dead ({OTHERS}, id {dead})")
    return database


async def moved(database: Database) -> list[Any]:
    """The verdicts of moving all that is claimed."""
    async with open_link(database.broker().queue(described())) as link:
        return [*await link.settle([say(each, MOVE) for each in await link.receive(10)])]


@pytest.mark.parametrize("key", ["INTEGER PRIMARY KEY", "INTEGER PRIMARY KEY AUTOINCREMENT"])
async def test_a_taken_id_is_replaced_by_the_database(
    key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The row arrives under a new id, the one before it stays as it is, and one warning says both ids."""
    database = made(tmp_path, "INTEGER PRIMARY KEY", key)
    database.run("INSERT INTO dead (id, body) VALUES (1, 'before'), (7, 'far')")
    database.run("INSERT INTO jobs (body) VALUES ('taken'), ('free')")
    assert await moved(database) == [None, None]
    assert database.rows() == []
    dead = [(row["id"], row["body"], row["tries"], row["lock"]) for row in database.rows("dead")]
    assert sorted(dead) == [
        (1, "before", 1, None),
        (2, "free", 2, None),
        (7, "far", 1, None),
        (8, "taken", 2, None),
    ]
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert record.message == (
        "subscription 'test', table 'jobs': row 1 is row 8 of the dead-letter table 'dead', where its own id was "
        "taken; a key that is AUTOINCREMENT gives no id twice"
    )


async def test_a_key_with_a_default_fills_itself_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A text that the database makes: a new one, and the log says which."""
    key = "TEXT PRIMARY KEY DEFAULT (lower(hex(randomblob(8))))"
    database = made(tmp_path, key, key)
    database.run("INSERT INTO dead (id, body) VALUES ('a', 'before')")
    database.run("INSERT INTO jobs (id, body) VALUES ('a', 'after')")
    assert await moved(database) == [None]
    (new,) = [row["id"] for row in database.rows("dead") if row["body"] == "after"]
    assert len(new) == 16
    assert f"row a is row {new} of the dead-letter table" in caplog.text


@pytest.mark.parametrize("key", ["TEXT PRIMARY KEY", "INT PRIMARY KEY NOT NULL", "TEXT PRIMARY KEY DEFAULT 'a'"])
async def test_a_taken_id_that_nothing_replaces_is_not_applied(key: str, tmp_path: Path) -> None:
    """A key that does not fill itself, or always with the same: the verb says so, and both rows are as they were."""
    database = made(tmp_path, "TEXT PRIMARY KEY", key)
    name = "1" if "INT" in key else "a"
    database.run("INSERT INTO dead (id, body) VALUES (?, 'before')", name)
    database.run("INSERT INTO jobs (id, body) VALUES (?, 'after')", name)
    (verdict,) = await moved(database)
    assert isinstance(verdict, NotApplied)
    assert "UNIQUE constraint failed: dead.id" in str(verdict)
    assert [row["body"] for row in database.rows("dead")] == ["before"]
    assert [row["body"] for row in database.rows()] == ["after"]


@pytest.mark.parametrize("constraint", ["CHECK (body <> 'bad')", "UNIQUE (body)"])
async def test_another_constraint_is_not_taken_for_the_id(constraint: str, tmp_path: Path) -> None:
    """A dead-letter table that refuses the row for another reason, its id taken or free, refuses it."""
    database = Database(tmp_path / "q.db")
    database.run(f"CREATE TABLE jobs (id INTEGER PRIMARY KEY, {OTHERS})")
    database.run(f"CREATE TABLE dead (id INTEGER PRIMARY KEY, {OTHERS}, {constraint})")
    if constraint.startswith("UNIQUE"):
        database.run("INSERT INTO dead (id, body) VALUES (1, 'bad')")
    database.run("INSERT INTO jobs (body) VALUES ('bad'), ('bad')")
    before = (len(database.rows()), database.rows("dead"))
    assert [type(verdict) for verdict in await moved(database)] == [NotApplied, NotApplied]
    assert (len(database.rows()), database.rows("dead")) == before


async def test_a_row_that_a_trigger_keeps_is_not_in_both_tables(tmp_path: Path) -> None:
    """The copy is undone where the row itself would stay."""
    database = made(tmp_path, "INTEGER PRIMARY KEY", "INTEGER PRIMARY KEY")
    database.run("CREATE TRIGGER stay BEFORE DELETE ON jobs BEGIN SELECT RAISE(IGNORE); END")
    database.run("INSERT INTO jobs (body) VALUES ('x')")
    (verdict,) = await moved(database)
    assert isinstance(verdict, NotApplied)
    assert "the row was copied, and a trigger has ignored its DELETE" in str(verdict)
    assert (len(database.rows()), database.rows("dead")) == (1, [])


async def test_a_copy_that_a_trigger_swallows_deletes_nothing(tmp_path: Path) -> None:
    """RAISE(IGNORE) in the dead-letter table: nothing was copied, so the row stays, and it is still ours."""
    database = made(tmp_path, "INTEGER PRIMARY KEY", "INTEGER PRIMARY KEY")
    database.run("CREATE TRIGGER never BEFORE INSERT ON dead BEGIN SELECT RAISE(IGNORE); END")
    database.run("INSERT INTO jobs (body) VALUES ('x')")
    (verdict,) = await moved(database)
    assert verdict is not None
    assert (len(database.rows()), database.rows("dead")) == (1, [])


async def test_two_queues_bury_in_one_table(tmp_path: Path) -> None:
    """Through the runtime, both with ids from 1: every letter arrives, and each handler was called twice per letter."""
    database = Database(tmp_path / "q.db")
    for name in ("mails", "faxes", "dead"):
        database.run(f"CREATE TABLE {name} (id INTEGER PRIMARY KEY AUTOINCREMENT, {OTHERS})")
    broker = SqlBroker(f"sqlite:///{database.path}", poll_interval=0.02)
    calls: list[tuple[bytes, int]] = []

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        calls.append((delivery.body, delivery.attempt))
        return Retry()

    tables = [described(name) for name in ("mails", "faxes")]
    policy = Policy(max_attempts=2, dead_letter="dead")
    letters = [f"{table.name} {number}".encode() for table in tables for number in range(3)]
    async with open_runtime(
        *(Subscription(broker.queue(table), handler, policy=policy) for table in tables)
    ) as runtime:
        for table in tables:
            await broker.publisher(table).publish_many(
                [each for each in letters if each.startswith(table.name.encode())]
            )
        with trio.fail_after(10):
            await until(lambda: sum(runtime.ledger(table.name).dead_lettered for table in tables) == 6, within=10)
    assert sorted(row["body"] for row in database.rows("dead")) == sorted(letters)
    assert sorted(calls) == sorted((letter, attempt) for letter in letters for attempt in (1, 2))
