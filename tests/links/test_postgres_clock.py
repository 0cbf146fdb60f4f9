"""Clocks that disagree: time is the server's, so neither a client's clock nor a session's time zone moves a row."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import pytest
import trio

from links.abc import Link
from links.sql import Lease, SqlQueue
from settlement import RetryAfter
from tests.links.postgres_tables import PostgresTables
from tests.links.sql_consumer import FAKETIME, Child, a_child, message
from tests.links.sqlite_kit import bodies, finish, nothing_lost, open_link, order

pytestmark = [pytest.mark.postgres, pytest.mark.servers]

AHEAD = 600.0


async def one_that_is_ahead(child: Child, tell: Callable[[str], None]) -> None:
    """Is its clock what the test says?"""
    _, by_time, by_datetime, _ = await child.until("ready")
    assert by_time - time.time() > AHEAD - 60
    if FAKETIME.exists():
        assert by_datetime - time.time() > AHEAD - 60
    else:
        tell("libfaketime is not installed: the clock of Python's time module alone was ahead")


@pytest.mark.parametrize("lease", [2.0, None], ids=["lease", "row lock"])
async def test_a_clock_ten_minutes_ahead_claims_nothing_early(
    lease: float | None, database: str, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """DESIGN 6, SQL: due times and leases are compared by the server's clock."""
    tables = PostgresTables(database, leased=lease is not None).create()
    later = "INSERT INTO jobs (payload, retry_after) VALUES (%s, clock_timestamp() + interval '2 s')"
    async with a_child(tmp_path, ahead=AHEAD, lease=lease, url=database, concurrency=4) as child:
        await one_that_is_ahead(child, tell)
        began = time.monotonic()
        tables.run(later, message("later"))
        tables.add(message("now"), message("delayed", outcomes=("after",)))
        await child.until("ended", "later")
        *_, at = child.said("began", "later")[0]
        assert at - began >= 2.0
        assert len(child.said("ended", "now")) == 1
        (books,) = await child.books()
        assert (books["acked"], books["delayed"]) == (3, 1)


async def test_a_clock_ten_minutes_ahead_steals_no_lease(
    database: str, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """A lease that ends within these ten minutes by the server's clock has not ended."""
    tables = PostgresTables(database).create()
    tables.add(message("ours"))
    queue = tables.broker(0.02).queue(tables.table(), claim=Lease(60.0))
    async with open_link(queue) as link:
        (received,) = await link.receive(1)
        async with a_child(tmp_path, ahead=AHEAD, lease=2.0, url=database, concurrency=4) as child:
            await one_that_is_ahead(child, tell)
            tables.add(message("theirs"))
            await child.until("ended", "theirs")
            assert await link.extend([received]) == []
            tables.add(message("theirs too"))
            await child.until("ended", "theirs too")
            assert child.said("began", "ours") == []
            assert list(await link.settle(finish([received]))) == [None]
            (books,) = await child.books()
            assert (books["acked"], books["superseded"]) == (2, 0)


async def test_one_that_is_ahead_keeps_its_lease(database: str, tmp_path: Path, tell: Callable[[str], None]) -> None:
    """The other way round: it renews by its own clock, which counts seconds as any other, and writes the server's."""
    tables = PostgresTables(database).create()
    tables.add(message("theirs", hold=4.5))
    async with a_child(tmp_path, ahead=AHEAD, lease=2.5, url=database) as child:
        await one_that_is_ahead(child, tell)
        await child.until("began", "theirs")
        queue = tables.broker(0.02).queue(tables.table(), claim=Lease(2.0))
        async with open_link(queue) as link:
            with trio.move_on_after(3.5):
                raise AssertionError(bodies(await link.receive(1)))
            ((ahead,),) = tables.run("SELECT extract(epoch FROM locked_until - clock_timestamp())::float8 FROM jobs")
            assert 0 < ahead <= 2.5
            await child.until("ended", "theirs")
            (books,) = await child.books()
        assert (books["acked"], books["superseded"]) == (1, 0)
    assert tables.rows() == []


ZONES = ["Pacific/Kiritimati", "America/St_Johns", "UTC+12", "<-0330>+03:30"]
"""14 h ahead of UTC, 3.5 h behind it with a summer time, and what POSIX writes with the other sign."""


@asynccontextmanager
async def linked(queue: SqlQueue[bytes]) -> AsyncGenerator[Link[bytes], None]:
    async with queue.broker.connect(), queue.attach("test", nothing_lost, 5.0, limit=1) as link:
        yield link


@pytest.fixture
def role(postgres: str, database: str) -> Generator[str, None, None]:
    """A user who may do all with every table."""
    name, server = f"u_{database.rpartition('_')[2]}", PostgresTables(postgres)
    server.run(f"CREATE ROLE {name} LOGIN SUPERUSER")
    yield name
    server.run(f"DROP ROLE {name}")


@pytest.mark.parametrize("by", ["the URL", "the role"])
@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("leased", [True, False], ids=["lease", "row lock"])
async def test_a_session_in_another_time_zone(leased: bool, zone: str, by: str, database: str, role: str) -> None:
    """K-86: a due time is a moment and a token is the server's: nothing comes early, nothing is stolen or lost."""
    tables = PostgresTables(database, leased=leased).create()
    url = database
    if by == "the URL":
        url += f"?options={quote(f'-c timezone={zone}')}"
    else:
        tables.run(f"ALTER ROLE {role} SET timezone = '{zone}'")
        url = database.replace("postgres@", f"{role}@")
    away = PostgresTables(url, leased=leased)
    assert away.run("SHOW timezone") == [(zone,)]
    claim = Lease(2.0) if leased else None
    there, here = (each.broker(0.02).queue(each.table(), claim=claim) for each in (away, tables))
    tables.add(b"a")
    async with linked(there) as link:
        with trio.fail_after(10):
            (received,) = await link.receive(1)
        link.stop()
        tables.run("INSERT INTO jobs (payload, retry_after) VALUES ('b', clock_timestamp() + interval '1 hour')")
        async with linked(here) as other:
            with trio.move_on_after(0.5):
                raise AssertionError(bodies(await other.receive(1)))
            if leased:
                assert await link.extend([received]) == []
            settled = time.monotonic()
            assert list(await link.settle([order(there, received, RetryAfter(0.5))])) == [None]
            with trio.fail_after(10):
                (again,) = await other.receive(1)
            assert time.monotonic() - settled >= 0.5
            assert (again.delivery.body, again.delivery.attempt) == (b"a", 2)
            assert list(await other.settle(finish([again]))) == [None]
    assert [row["payload"] for row in tables.rows()] == [b"b"]
