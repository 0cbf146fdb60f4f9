"""What a claim and a settlement read does not grow with the table: PostgreSQL itself counts the pages.

The statements are those that the library runs, explained in a transaction that is rolled back. Seconds prove nothing on
a busy machine; how many pages were looked at does. Autovacuum is off, so that nothing is tidied up but by the test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from links.sql import Lease, RowLock, Table
from links.sql.jobs import Passing
from links.sql.postgres.lease import PostgresLease
from links.sql.postgres.row_lock import PostgresRowLock
from links.sql.postgres.trio_connection import TrioConnection
from tests.links.postgres_tables import PostgresTables

pytestmark = [pytest.mark.postgres, pytest.mark.servers, pytest.mark.slow]

MANY = pytest.mark.parametrize("many", [100_000, pytest.param(1_000_000, marks=pytest.mark.long)])
FORMS = pytest.mark.parametrize("leased", [True, False], ids=["lease", "row lock"])
FEW = 1_000
ROOM = 100
"""So many rows by one claim of the lease form; a row lock has one."""


def table(*, leased: bool, marks: bool = True) -> Table[bytes]:
    return Table(
        "jobs",
        id="id",
        payload="payload",
        retry_after="due",
        attempt="attempt",
        processed_at="done" if marks else None,
        locked_until="lock" if leased else None,
    )


def fill(tables: PostgresTables, rows: int, **columns: str) -> None:
    """So many rows more, ready if nothing else is said."""
    given = {"payload": "'a'", "due": "now() - interval '1 h' + n * interval '1 us'", **columns}
    names, values = ", ".join(given), ", ".join(given.values())
    tables.run(f"INSERT INTO jobs ({names}) SELECT {values} FROM generate_series(1, {rows}) n")  # noqa: S608


def tidy(tables: PostgresTables) -> None:
    tables.run("VACUUM ANALYZE jobs")


def made(database: str, queue: Table[bytes]) -> PostgresTables:
    """The table as the library recommends it."""
    tables = PostgresTables(database)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(queue.ddl("postgresql").encode())
    tables.run("ALTER TABLE jobs SET (autovacuum_enabled = off)")
    return tables


def pages(database: str, statement: str, values: dict[str, Any]) -> int:
    """How many pages this statement looks at; what it does is undone.

    Planned as for a large table, so that a small one is not read whole, and the two can be compared.
    """
    with psycopg.connect(database) as connection:
        for way in ("seqscan", "bitmapscan", "hashjoin", "mergejoin"):
            connection.execute(f"SET LOCAL enable_{way} = off".encode())
        explain = b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + statement.encode()
        row = connection.execute(explain, values).fetchone()
        connection.rollback()
    assert row is not None
    plan = row[0][0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


async def measured(database: str, queue: Table[bytes]) -> dict[str, int]:
    """Pages for a claim of one row and of many, and for the settlement of what a claim of many has."""
    connection = await TrioConnection.open(database)
    passing = Passing((), frozenset())
    if queue.locked_until is None:
        lock = PostgresRowLock(
            queue, None, RowLock(), subscription="test", connect=lambda: TrioConnection.open(database)
        )
        await lock.look(connection)
        found: dict[str, int] = {}
        found["claim of 1"] = pages(database, lock.texts.claim, {"group": None, "over": [], "room": 1})
        ((key, *_),) = await lock.rows(connection, lock.texts.claim, {"group": None, "over": [], "room": 1})
        for name, text in (("finish", lock.texts.finish), ("delay", lock.texts.delay)):
            found[name] = pages(database, text, {"ids": [key], "seconds": 1.0})
    else:
        lease = PostgresLease(
            queue, None, Lease(60.0), subscription="test", connect=lambda: TrioConnection.open(database)
        )
        await lease.look(connection)
        found = {
            f"claim of {room}": pages(database, lease.texts.claim, lease._wanted(room, passing)) for room in (1, ROOM)
        }
        rows = await lease.claim(connection, ROOM, passing)
        tokens = [(row[0], row[1], row[2]) for row in rows]
        for name, text in (("finish", lease.texts.finish), ("extend", lease.texts.extend)):
            found[name] = pages(database, text, {**lease._bound(tokens), "lease": 60.0})
        await lease.let_go(connection, tokens, counted=False)
    connection.finish()
    return found


def assert_bounded(small: dict[str, int], large: dict[str, int]) -> None:
    """Within twice of the smallest, each."""
    assert small.keys() == large.keys()
    assert {name: (small[name], count) for name, count in large.items() if count > 2 * small[name]} == {}


@FORMS
@MANY
async def test_ready_finished_and_delayed_rows(
    many: int, leased: bool, database: str, tell: Callable[[str], None]
) -> None:
    """A thousand ready rows, then many more; and beside those as many that are finished, and that are not due yet."""
    queue = table(leased=leased)
    tables = made(database, queue)
    fill(tables, FEW)
    tidy(tables)
    small = await measured(database, queue)
    for name, columns in (
        ("ready", {}),
        ("finished", {"done": "now()"}),
        ("delayed", {"due": "now() + interval '1 day' + n * interval '1 s'"}),
    ):
        fill(tables, many, **columns)
        tidy(tables)
        large = await measured(database, queue)
        tell(f"{many:,} {name} more: pages {small} -> {large}")
        assert_bounded(small, large)


@FORMS
@MANY
async def test_deletions_without_a_vacuum(many: int, leased: bool, database: str, tell: Callable[[str], None]) -> None:
    """Dead rows stand at the head of the queue: the first claim meets them all and marks them, the next does not.

    The first reads so many pages of the index, and told is how many; after a VACUUM all is as it was.
    """
    queue = table(leased=leased, marks=False)
    tables = made(database, queue)
    fill(tables, many + FEW)
    tidy(tables)
    small = await measured(database, queue)
    tables.run("DELETE FROM jobs WHERE id <= %s", many)
    first = await measured(database, queue)
    second = await measured(database, queue)
    tell(f"after {many:,} deletions: pages {small} -> {first}, then {second}")
    assert first["claim of 1"] > second["claim of 1"]
    assert second["claim of 1"] < many / 100, "an entry of the index that is marked costs no row"
    tidy(tables)
    assert_bounded(small, await measured(database, queue))
