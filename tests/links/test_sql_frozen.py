"""A process that is stopped while it holds a row: another one has it meanwhile, and the thawed one changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from links.sql import Lease
from tests.links.postgres_tables import PostgresTables
from tests.links.sql_consumer import a_child, message
from tests.links.sqlite_kit import Database, attached, bodies, finish, open_link

LEASE = 1.5
STORES = [
    pytest.param("sqlite", marks=[pytest.mark.sqlite, pytest.mark.servers]),
    pytest.param("postgres", marks=[pytest.mark.postgres, pytest.mark.servers]),
]


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    """The tables, and the options of a child on them."""
    if request.param == "sqlite":
        return Database(tmp_path / "q.db").create(), {"path": str(tmp_path / "q.db")}
    url = request.getfixturevalue("database")
    return PostgresTables(url).create(), {"url": url}


@pytest.mark.parametrize("store", STORES, indirect=True)
@pytest.mark.parametrize("shielded", [False, True], ids=["is cancelled", "returns an Ack all the same"])
async def test_a_thawed_holder_changes_nothing(
    shielded: bool, store: tuple[Any, dict[str, Any]], tmp_path: Path
) -> None:
    """S-5.7, DESIGN 3.4: its lease ran out while it stood still; its handler is cancelled, the line is *superseded*.

    One that cannot be cancelled returns an `Ack`, and that is refused: the row stays the other one's, column by column.
    """
    tables, options = store
    hold = LEASE + 4.0 if shielded else 60.0
    tables.add(message("a", hold=hold, shielded=shielded))
    async with a_child(tmp_path, lease=LEASE, **options) as holder:
        await holder.until("began")
        holder.freeze()
        before = tables.row()
        async with open_link(tables.broker(0.02).queue(tables.table(), claim=Lease(60.0))) as other:
            with trio.move_on_after(LEASE / 3):
                raise AssertionError(bodies(await other.receive(1)))
            with trio.fail_after(LEASE + 10):
                (received,) = await other.receive(1)
            assert received.delivery.attempt == 2
            held = tables.row()
            assert {name for name in held if held[name] != before[name]} == {"locked_until", "attempt"}

            holder.thaw()
            await holder.until("ended" if shielded else "cancelled")
            (books,) = await holder.books()
            assert (books["received"], books["superseded"], books["balanced"]) == (1, 1, True)
            assert tables.row() == held
            assert list(await other.settle(finish([received]))) == [None]
    assert tables.rows() == []


@pytest.mark.postgres
@pytest.mark.servers
async def test_a_row_lock_outlives_a_freeze(database: str, tmp_path: Path) -> None:
    """S-2.3: the transaction is the server's: nobody else has the row, and the thawed handler's `Ack` ends it."""
    tables = PostgresTables(database, leased=False).create()
    tables.add(message("a", hold=1.0))
    async with a_child(tmp_path, lease=None, url=database) as holder:
        await holder.until("began")
        holder.freeze()
        queue = tables.broker(0.02).queue(tables.table())
        async with queue.broker.connect(), attached(queue) as other:
            with trio.move_on_after(2.0):
                raise AssertionError(bodies(await other.receive(1)))
        holder.thaw()
        await holder.until("ended")
        (books,) = await holder.books()
        assert (books["received"], books["acked"], books["balanced"]) == (1, 1, True)
    assert tables.rows() == []


@pytest.mark.postgres
@pytest.mark.servers
@pytest.mark.parametrize("shielded", [False, True], ids=["is cancelled", "returns an Ack all the same"])
async def test_a_row_lock_that_the_server_ended_amid_a_freeze(shielded: bool, database: str, tmp_path: Path) -> None:
    """DESIGN 3.8: idle_in_transaction_session_timeout; another has the row, and the thawed one changes nothing."""
    tables = PostgresTables(database, leased=False).create()
    name = database.rpartition("/")[2]
    tables.run(f"ALTER DATABASE \"{name}\" SET idle_in_transaction_session_timeout = '700ms'")
    tables.add(message("a", hold=3.0 if shielded else 60.0, shielded=shielded))
    async with a_child(tmp_path, lease=None, url=database) as holder:
        await holder.until("began")
        holder.freeze()
        tables.run(f'ALTER DATABASE "{name}" RESET idle_in_transaction_session_timeout')
        before = tables.row()
        queue = tables.broker(0.02).queue(tables.table())
        async with queue.broker.connect(), queue.attach("test", lambda *_: None, 5.0, limit=1) as other:
            with trio.fail_after(10):
                (received,) = await other.receive(1)
            holder.thaw()
            await holder.until("ended" if shielded else "cancelled")
            assert tables.row() == before
            (books,) = await holder.books()
            assert (books["received"], books["acked"], books["unsettled"], books["balanced"]) == (1, 0, 1, True)
            assert tables.row() == before
            assert list(await other.settle(finish([received]))) == [None]
    assert tables.rows() == []
