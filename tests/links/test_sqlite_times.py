"""Times in another form than their column's type says: a default, a value, a declaration; and the first attempt."""

# ruff: noqa: S608 -- texts of the tests' own

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio

from links.errors import LinkRefused
from links.sql import Table
from links.sql.sqlite import looked, times
from links.sql.sqlite.defaults import evaluate
from links.sql.sqlite.inspect import odd_times
from links.sql.sqlite.schema import read_schema
from links.sql.sqlite.times import DEFAULTS, ENCODERS, is_default
from tests.links.sqlite_kit import TIMES, Database, attached, bodies, open_link, stored, until

pytestmark = pytest.mark.sqlite

JOBS: Table[bytes] = Table(
    "jobs", id="id", payload="body", attempt="tries", retry_after="due", locked_until="lock", processed_at="done"
)
INDEX = "CREATE INDEX jobs_due ON jobs (due, id) WHERE done IS NULL"


def made(path: Path, due: str = "REAL NOT NULL DEFAULT 0", tries: str = "INTEGER", **others: str) -> Database:
    database = Database(path / "q.db")
    lock, done = others.get("lock", "REAL"), others.get("done", "REAL")
    database.run(
        f"CREATE TABLE jobs (id INTEGER PRIMARY KEY AUTOINCREMENT, body, due {due}, tries {tries}, "
        f"lock {lock}, done {done})"
    )
    database.run(INDEX)
    return database


async def refusal(database: Database) -> str:
    queue = database.broker().queue(JOBS)
    async with queue.broker.connect():
        with pytest.raises(LinkRefused) as refused:
            async with attached(queue):
                pass
    return str(refused.value)


WRONG = [
    ("REAL", "CURRENT_TIMESTAMP"),
    ("REAL", "(datetime('now'))"),
    ("REAL", "(julianday('now'))"),
    ("REAL", "(strftime('%s', 'now') * 1000)"),
    ("REAL", "(strftime('%s', 'now') * 1000000)"),
    ("REAL", "'soon'"),
    ("REAL", "1000"),
    ("INTEGER", "CURRENT_TIMESTAMP"),
    ("INTEGER", "(strftime('%s', 'now'))"),
    ("INTEGER", "(CAST(strftime('%s', 'now') AS INTEGER) * 1000)"),
    ("INTEGER", "(julianday('now') * 86400.0 - 210866760000.0)"),
    ("INTEGER", "(julianday('now'))"),
    ("INTEGER", "0.5"),
    ("INTEGER", "(CAST(strftime('%s', 'now') AS INTEGER) * 1000000000)"),
    ("TEXT", "CURRENT_TIMESTAMP"),
    ("TEXT", "(datetime('now'))"),
    ("TEXT", "(strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))"),
    ("TEXT", "(strftime('%Y-%m-%dT%H:%M:%f000+00:00', 'now'))"),
    ("TEXT", "'2026-11-30T12:00:00.000000+01:00'"),
    ("TEXT", "(strftime('%s', 'now'))"),
    ("TEXT", "0"),
    ("TEXT", "''"),
    ("TEXT", "now"),
    ("TEXT", "x'00'"),
]


@pytest.mark.parametrize(("kind", "default"), WRONG)
async def test_a_default_in_another_form_is_refused(kind: str, default: str, tmp_path: Path) -> None:
    """Whatever it is spelled like: what it gives is looked at; the refusal names column, default and way out."""
    said = await refusal(made(tmp_path, f"{kind} NOT NULL DEFAULT {default}"))
    assert said.startswith(f"subscription 'test', table 'jobs': column 'due' (retry_after) is {kind}, which holds ")
    assert f"its default {default.removeprefix('(').removesuffix(')')}" in said or f"its default {default}" in said
    assert said.endswith(f"declare it {kind} NOT NULL DEFAULT {DEFAULTS[kind]}")


RIGHT = [
    *DEFAULTS.items(),
    ("REAL", "0"),
    ("REAL", "-1.5"),
    ("REAL", "(0)"),
    ("REAL", "(strftime('%s', 'now'))"),
    ("REAL", "(strftime('%s', 'now', '+1 hour'))"),
    ("REAL", "'1700000000'"),
    ("INTEGER", "0"),
    ("INTEGER", "(CAST(strftime('%s', 'now') AS INTEGER) * 1000000)"),
    ("TEXT", "'1970-01-01T00:00:00.000000Z'"),
    ("TEXT", "(strftime('%Y-%m-%dT%H:%M:%S.000000Z', 'now'))"),
]


@pytest.mark.parametrize(("kind", "default"), RIGHT)
async def test_a_default_in_the_right_form_is_delivered(
    kind: str, default: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Attached without a word, and what is inserted by anybody is due as it says."""
    database = made(tmp_path, f"{kind} NOT NULL DEFAULT {default}", "INTEGER NOT NULL DEFAULT 1")
    database.run("INSERT INTO jobs (body) VALUES ('x')")
    async with open_link(database.broker().queue(JOBS)) as link:
        if "hour" not in default:
            with trio.fail_after(5):
                assert bodies(await link.receive(1)) == [b"x"]
    assert caplog.records == []


@pytest.mark.parametrize("kind", TIMES)
def test_the_present_time_as_a_default(kind: str) -> None:
    """The default that is recommended gives what the encoder writes, to a few milliseconds."""
    before = times.now()
    value = evaluate(kind, DEFAULTS[kind])
    earliest, latest = ENCODERS[kind](before - 2_000), ENCODERS[kind](times.now() + 2_000)
    assert earliest <= value <= latest
    assert type(value) is type(earliest)
    assert is_default(kind, value, before)


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        (
            {"lock": "DATETIME"},
            "column 'lock' (locked_until) is declared DATETIME; a time is REAL (Unix seconds), INTEGER",
        ),
        ({"lock": "TIMESTAMP"}, "is declared TIMESTAMP"),
        ({"done": "DATETIME DEFAULT NULL"}, "column 'done' (processed_at) is declared DATETIME"),
        ({"done": "REAL DEFAULT 0"}, "so every row is finished when it is inserted"),
        ({"done": "REAL NOT NULL DEFAULT 0"}, "NOT NULL, but NULL is what an unfinished row holds"),
        ({"lock": "REAL DEFAULT CURRENT_TIMESTAMP"}, "column 'lock' (locked_until) is REAL"),
        ({"due": "DATETIME DEFAULT CURRENT_TIMESTAMP"}, f"declare it REAL NOT NULL DEFAULT {DEFAULTS['REAL']}"),
        ({"due": "TIMESTAMP NOT NULL"}, "column 'due' (retry_after) is declared TIMESTAMP"),
    ],
)
async def test_a_time_that_is_declared_otherwise(others: dict[str, str], reason: str, tmp_path: Path) -> None:
    """S-12.3: refused when a link attaches, with the way out."""
    assert reason in await refusal(made(tmp_path, **others))


@pytest.mark.parametrize("default", ["0", "2", "(0)", "'none'", "1.5", "-1"])
async def test_the_first_attempt_is_one(default: str, tmp_path: Path) -> None:
    """A column that starts elsewhere would make a cap of three four calls, or two."""
    said = await refusal(made(tmp_path, tries=f"INTEGER NOT NULL DEFAULT {default}"))
    assert "column 'tries' (attempt) has the default" in said
    assert said.endswith("declare it INTEGER NOT NULL DEFAULT 1")


@pytest.mark.parametrize(
    "tries", ["INTEGER DEFAULT 1", "INT DEFAULT (1)", "INTEGER DEFAULT NULL", "INTEGER DEFAULT '1'"]
)
async def test_attempts_that_start_at_one(tries: str, tmp_path: Path) -> None:
    """NULL counts as 1."""
    database = made(tmp_path, tries=tries)
    database.run("INSERT INTO jobs (body) VALUES ('x')")
    async with open_link(database.broker().queue(JOBS)) as link:
        (received,) = await link.receive(1)
        assert (received.delivery.attempt, received.token[2]) == (1, 2)


# --- a value of another form

VALUES = [
    ("REAL", "datetime('now')"),
    ("REAL", "1000 * strftime('%s', 'now')"),
    ("REAL", "x'00'"),
    ("INTEGER", "strftime('%s', 'now')"),
    ("INTEGER", "julianday('now')"),
    ("TEXT", "datetime('now', '+1 hour')"),
    ("TEXT", "strftime('%Y-%m-%dT%H:%M:%f000+02:00', 'now')"),
]


@pytest.mark.parametrize(("kind", "value"), VALUES)
async def test_a_value_in_another_form_is_told(
    kind: str, value: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning when the link attaches, naming column, form and value; the other rows go on."""
    database = made(tmp_path, f"{kind} NOT NULL DEFAULT {DEFAULTS[kind]}")
    database.run(f"INSERT INTO jobs (body, due) VALUES ('odd', {value}), ('odd', {value})")
    async with open_link(database.broker().queue(JOBS)):
        pass
    (record,) = caplog.records
    assert record.message.startswith(f"subscription 'test', table 'jobs': column 'due' (retry_after) is {kind}, which")
    assert repr(database.run("SELECT due FROM jobs")[0][0]) in record.message


async def test_a_value_that_comes_later_is_told_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes another form after the link has attached: told once, at an idle claim, at most once a minute."""
    monkeypatch.setattr(looked, "_MINUTE", 1)
    database = made(tmp_path)
    async with open_link(database.broker(0.01).queue(JOBS)) as link, trio.open_nursery() as nursery:
        nursery.start_soon(link.receive, 1)
        database.run("INSERT INTO jobs (body, due) VALUES ('never', datetime('now')), ('never', datetime('now'))")
        await until(lambda: caplog.records)
        seen = times.now()
        await until(lambda: times.now() > seen + 100_000)
        nursery.cancel_scope.cancel()
    (record,) = caplog.records
    assert re.search(
        r"column 'due' \(retry_after\) is REAL, which holds Unix seconds, but a row has '2", record.message
    )


@pytest.mark.parametrize("kind", TIMES)
async def test_our_own_times_are_in_form(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Leases, the longest delay, the beginning of time, and finished rows of any form: not a word."""
    database = made(tmp_path, f"{kind} NOT NULL DEFAULT {DEFAULTS[kind]}", lock=kind, done=kind)
    for due in (ENCODERS[kind](times.LAST), stored(0, kind), stored(1e9, kind)):
        database.run("INSERT INTO jobs (body, due, lock) VALUES ('x', ?, ?)", due, due)
    database.run("INSERT INTO jobs (body, due, done) VALUES ('x', 'long ago', ?)", stored(1e9, kind))
    async with open_link(database.broker().queue(JOBS)):
        pass
    assert caplog.records == []


def test_the_condition_reads_no_more_than_the_newest_rows(tmp_path: Path) -> None:
    """A look at a large table is bounded; a table WITHOUT ROWID is looked at from its beginning."""
    database = Database(tmp_path / "q.db")
    columns = "(id INTEGER PRIMARY KEY, body, due REAL, tries INTEGER, lock REAL, done REAL)"
    database.run(f"CREATE TABLE jobs {columns} WITHOUT ROWID")
    database.run("INSERT INTO jobs (id, due) VALUES (1, 'odd')")
    assert odd(database) == {"due"}
    database.run("DROP TABLE jobs")
    database.run(f"CREATE TABLE jobs {columns}")
    database.run(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000) "
        "INSERT INTO jobs (id, due) SELECT i, CASE i WHEN 1 THEN 'odd' ELSE 0 END FROM n"
    )
    assert odd(database) == set()


def odd(database: Database) -> set[str]:
    with closing(sqlite3.connect(database.path)) as connection:
        schema: Any = read_schema(connection, "jobs")
        return set(odd_times(connection, JOBS, schema))
