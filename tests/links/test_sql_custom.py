"""Statements of the user's own in place of ours, on every form of every dialect."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

import links.sql
from actors import Subscription, open_runtime
from links.abc import Link
from links.errors import LeaseLost, LinkRefused, NotApplied
from links.sql import AdvisoryLock, Lease, RowLock, SqlBroker, SqlQueue, Table
from links.sql.custom import check_custom, for_psycopg
from settlement import Ack, Delivery, Drop, Policy, Retry, RetryAfter
from settlement.policy import DeadLetter, Ending
from settlement.sql import ClaimForm
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import order, until

CAP = Policy(max_attempts=9, dead_letter="nowhere")


# --- the text


@pytest.mark.sqlite
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("DELETE FROM t WHERE id = :id", "DELETE FROM t WHERE id = %(id)s"),
        ("UPDATE t SET a = now()::date, b = :now", "UPDATE t SET a = now()::date, b = clock_timestamp()"),
        ("SELECT ':id', \":id\", 10 % 3, :id::text -- :id", "SELECT ':id', \":id\", 10 %% 3, %(id)s::text -- :id"),
        ("SELECT $$ :id $$, $a$ :b $$ $a$,  || :group", "SELECT $$ :id $$, $a$ :b $$ $a$,  || %(group)s"),
        ("SELECT /* :id\n */ :attempt, :delay, :token", "SELECT /* :id\n */ %(attempt)s, %(delay)s, %(token)s"),
    ],
)
def test_names_and_what_is_none(text: str, said: str) -> None:
    """DESIGN 6: a colon in a text, a quoted name, a comment or a cast is no name's."""
    assert check_custom({"ack": text}, RowLock(), Table("t", id="id")) == {"ack": text}
    assert for_psycopg(text) == said


@pytest.mark.sqlite
@pytest.mark.parametrize(
    ("custom", "why"),
    [
        (
            {"nack": "SELECT 1"},
            "custom must be statements for ack, drop, retry, .*, lock, unlock, not 'nack'",
        ),
        ({"ack": " ; "}, r"custom\['ack'\] must be a statement"),
        ({"ack": "SELECT :key"}, r"custom\['ack'\] binds :key, which is none of id, token, attempt, now, delay, group"),
    ],
)
def test_what_is_refused_at_once(custom: dict[str, str], why: str) -> None:
    """S-12.4: at construction."""
    broker = SqlBroker("sqlite:///nowhere.db")
    table = Table("jobs", id="id", payload="p", locked_until="u")
    with pytest.raises(ValueError, match=why):
        broker.queue(table, custom=custom)


# --- on real tables

FREE = "UPDATE jobs SET said = '{}', seen = :attempt{}{} WHERE id = :id"


def custom(*, leased: bool) -> dict[str, str]:
    """Each writes what it is for, and lets go of the row."""
    free = ", locked_until = NULL" if leased else ""
    return {
        "ack": FREE.format("ack", free, ", done = :now"),
        "drop": FREE.format("drop", free, ", done = :now"),
        "retry": FREE.format("retry", free, ""),
        "retry_after": FREE.format("retry_after", free, ", delay = :delay"),
        "dead_letter": FREE.format("dead_letter", free, ", grp = :group"),
    }


@attrs.define
class Own:
    """A table without retry_after, with columns that the user's own statements write."""

    queue: SqlQueue[bytes]
    run: Any
    form: ClaimForm

    @property
    def row(self) -> tuple[Any, ...]:
        (found,) = self.run("SELECT said, seen, delay, grp FROM jobs")
        return tuple(found)


def on_sqlite(path: Path, claim: ClaimForm, statements: dict[str, str] | None = None) -> Own:
    def run(text: str) -> list[Any]:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            return connection.execute(text).fetchall()

    run(
        "CREATE TABLE jobs (id INTEGER PRIMARY KEY, payload BLOB, attempt INTEGER NOT NULL DEFAULT 1, "
        "locked_until REAL, done REAL, said TEXT, seen INTEGER, delay REAL, grp TEXT)"
    )
    run("INSERT INTO jobs (payload) VALUES (x'61')")
    return Own(queue_at(f"sqlite:///{path}", claim, statements), run, claim)


def queue_at(url: str, claim: ClaimForm, statements: dict[str, str] | None) -> SqlQueue[bytes]:
    leased = isinstance(claim, Lease)
    lock = "locked_until" if leased else None
    table = Table("jobs", id="id", payload="payload", attempt="attempt", locked_until=lock, processed_at="done")
    own = custom(leased=leased) if statements is None else statements
    return SqlBroker(url, poll_interval=0.05).queue(table, claim=claim, custom=own)


def on_postgres(url: str, claim: ClaimForm, statements: dict[str, str] | None = None) -> Own:
    run = PostgresTables(url).run
    run(
        "CREATE TABLE jobs (id bigint PRIMARY KEY, payload bytea, attempt int NOT NULL DEFAULT 1, "
        "locked_until timestamptz, done timestamptz, said text, seen int, delay float, grp text)"
    )
    run("INSERT INTO jobs (id, payload) VALUES (1, 'a')")
    return Own(queue_at(url, claim, statements), run, claim)


POSTGRES = [pytest.mark.postgres, pytest.mark.servers]
COUNTED: list[Any] = [
    pytest.param(("sqlite", Lease(30.0)), marks=pytest.mark.sqlite, id="sqlite-lease"),
    pytest.param(("sqlite", AdvisoryLock("{id}")), marks=pytest.mark.sqlite, id="sqlite-advisory"),
    pytest.param(("postgresql", Lease(30.0)), marks=POSTGRES, id="postgresql-lease"),
]
"""Those in which the attempt tells whether the row is still ours."""
FORMS: list[Any] = [
    *COUNTED,
    pytest.param(("postgresql", RowLock()), marks=POSTGRES, id="postgresql-row_lock"),
    pytest.param(("postgresql", AdvisoryLock("{id}")), marks=POSTGRES, id="postgresql-advisory"),
]


@pytest.fixture
def own(request: pytest.FixtureRequest, tmp_path: Path) -> Own:
    dialect, *how = request.param
    if dialect == "sqlite":
        return on_sqlite(tmp_path / "q.db", *how)
    return on_postgres(request.getfixturevalue("database"), *how)


def with_own(statements: dict[str, str]) -> list[Any]:
    """Each form, with these statements alone."""
    return [pytest.param((*form.values[0], statements), marks=form.marks, id=form.id) for form in FORMS]


@asynccontextmanager
async def linked(queue: SqlQueue[Any], policy: Policy = CAP) -> AsyncGenerator[Link[Any], None]:
    async with queue.broker.connect(), queue.attach("test", lambda *_: None, 5.0, policy, limit=1) as link:
        yield link


@pytest.mark.parametrize("own", FORMS, indirect=True)
@pytest.mark.parametrize(
    ("outcome", "said", "delay", "group"),
    [
        (Ack(), "ack", None, None),
        (Drop(), "drop", None, None),
        (Retry(), "retry", None, None),
        (RetryAfter(9.5), "retry_after", 9.5, None),
        (DeadLetter(), "dead_letter", None, "nowhere"),
    ],
)
async def test_each_event(own: Own, outcome: Ending, said: str, delay: float | None, group: str | None) -> None:
    """S-10.1: the statement runs in place of ours; a dead letter is then no table of ours to look for."""
    async with linked(own.queue) as link:
        with trio.fail_after(10):
            (received,) = await link.receive(1)
        ((attempt,),) = own.run("SELECT attempt FROM jobs")
        link.stop()
        assert list(await link.settle([order(own.queue, received, outcome, CAP)])) == [None]
        assert own.row == (said, attempt, delay, group)
        assert own.run("SELECT attempt, locked_until FROM jobs") == [(attempt, None)]
        assert own.run("SELECT done IS NULL FROM jobs")[0][0] == (said not in {"ack", "drop"})


@pytest.mark.parametrize("own", COUNTED, indirect=True)
async def test_under_a_lost_lease_it_never_runs(own: Own) -> None:
    """S-10.2, K-89."""
    async with linked(own.queue) as link:
        with trio.fail_after(10):
            (received,) = await link.receive(1)
        own.run("UPDATE jobs SET attempt = attempt + 1")
        assert [type(each) for each in await link.settle([order(own.queue, received, Ack())])] == [LeaseLost]
        assert own.row == (None, None, None, None)


@pytest.mark.parametrize(
    "own", with_own({"ack": "UPDATE jobs SET said = 'ack' WHERE id = :id AND attempt < 0"}), indirect=True
)
async def test_one_that_touches_nothing_is_not_applied(own: Own) -> None:
    """DESIGN 3.8: it is rolled back and said again; under an advisory lock the lock is released."""
    async with linked(own.queue, Policy()) as link:
        with trio.fail_after(10):
            (received,) = await link.receive(1)
        (verdict,) = await link.settle([order(own.queue, received, Ack())])
        released = isinstance(own.form, AdvisoryLock)
        assert type(verdict) is (LeaseLost if released else NotApplied)
        assert "the statement for 'ack' touched no row" in str(verdict)


@pytest.mark.parametrize("own", with_own({"retry": "UPDATE jobs SET nothing = 1 WHERE id = :id"}), indirect=True)
async def test_one_that_cannot_be_prepared(own: Own) -> None:
    """S-12.3: refused at start-up, naming the event."""
    with pytest.raises(LinkRefused, match=r"'test', table 'jobs': custom\['retry'\] cannot be .*nothing"):
        async with linked(own.queue, Policy()):
            pass


@pytest.mark.parametrize("own", FORMS, indirect=True)
async def test_in_the_transaction_of_a_handler(own: Own) -> None:
    """S-10.1, S-8.1: what the handler wrote and the statement of its ack commit together."""
    own.run("CREATE TABLE written (body TEXT)")

    async def handle(delivery: Delivery[bytes]) -> None:
        async with links.sql.transaction(delivery) as connection:
            await connection.execute("INSERT INTO written VALUES ('a')")
        assert own.run("SELECT * FROM written") == []

    with trio.fail_after(10):
        async with open_runtime(Subscription(own.queue, handle)) as runtime:
            await until(lambda: runtime.ledger("jobs").acked == 1)
    assert own.row[0] == "ack"
    assert own.run("SELECT * FROM written") == [("a",)]
