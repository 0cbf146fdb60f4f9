"""The server goes away and comes back, or takes no writes for a while: a service waits, and goes on with every row."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import psycopg
import pytest
import trio

from tests.links.postgres_tables import PostgresTables
from tests.links.sql_consumer import Child, a_child, message
from tests.links.sqlite_kit import until
from tests.servers.postgres import Server, a_server

pytestmark = [pytest.mark.postgres, pytest.mark.servers, pytest.mark.slow]

DOWN = [6.0, pytest.param(120.0, marks=pytest.mark.long)]
"""Seconds: so long that no other connection comes within what a writer waits for, which is five."""
FORMS = pytest.mark.parametrize("lease", [2.0, None, "{id}"], ids=["lease", "row lock", "advisory"])
BACK = 45.0
"""Seconds after which it goes on at the latest: tries are 30 s apart at most, and a lease ends."""


@pytest.fixture(scope="module")
def own() -> Generator[Server, None, None]:
    """A server that nobody else uses."""
    with a_server(max_connections="50", fsync="off", full_page_writes="off") as made:
        yield made


@pytest.fixture
def tables(own: Server, lease: float | str | None) -> Generator[PostgresTables, None, None]:
    made = PostgresTables(own.url, leased=isinstance(lease, float)).create()
    yield made
    made.run("DROP TABLE jobs, dead")


def publish(tables: PostgresTables, *names: str) -> None:
    tables.add(*[message(name) for name in names])


async def all_are_done(tables: PostgresTables, child: Child, names: set[str], within: float) -> None:
    """Every row is gone, and its handler was called."""
    await until(lambda: tables.run("SELECT count(*) FROM jobs") == [(0,)], within)
    with trio.move_on_after(5):  # what it has said may not have been read yet
        await until(lambda: {line[1] for line in child.said("ended")} >= names)
    assert {line[1] for line in child.said("ended")} == names, f"{child.told} {child.errors}"


@FORMS
@pytest.mark.parametrize("crash", [False, True], ids=["is stopped", "crashes"])
@pytest.mark.parametrize("down", DOWN)
async def test_a_server_that_goes_away(  # noqa: PLR0917 -- parameters
    down: float,
    crash: bool,
    lease: float | str | None,
    own: Server,
    tables: PostgresTables,
    tmp_path: Path,
    tell: Callable[[str], None],
) -> None:
    """DESIGN 4, Weather: it waits without spending the machine, and goes on with what was there and what is new."""
    before = {f"before {number}" for number in range(20)}
    async with a_child(tmp_path, url=own.url, lease=lease, concurrency=4) as child:
        tables.add(*[message(name, hold=1.0) for name in ("held", "held too")])
        publish(tables, *before)
        await child.until("began", "held")
        own.stop(crash=crash)
        try:
            spent = child.seconds
            await trio.sleep(down)
            spent = child.seconds - spent
        finally:
            own.start()
        publish(tables, "after")
        await all_are_done(tables, child, {*before, "held", "held too", "after"}, BACK)
        (books,) = await child.books()
    assert books["balanced"]
    assert spent < 0.1 * down
    tell(f"{spent / down:.1%} of a CPU in {down:g} s without a server")


@FORMS
@pytest.mark.parametrize("ended", [False, True], ids=["connections stay", "connections are ended"])
async def test_a_server_that_takes_no_writes_for_a_while(
    ended: bool, lease: float | str | None, own: Server, tables: PostgresTables, tmp_path: Path
) -> None:
    """DESIGN 4: after start-up a refusal is weather; what is in hand then is settled, or comes again.

    A row lock whose transaction had begun before is sound, though no other connection may claim.
    """
    async with a_child(tmp_path, url=own.url, lease=lease, concurrency=4) as child:
        tables.add(message("held", hold=1.0))
        publish(tables, "before")
        await child.until("ended", "before")
        await child.until("began", "held")
        tables.run("ALTER SYSTEM SET default_transaction_read_only = on")
        try:
            tables.run("SELECT pg_reload_conf()")
            await until(lambda: tables.run("SHOW default_transaction_read_only") == [("on",)])
            with psycopg.connect(own.url, autocommit=True, options="-c default_transaction_read_only=off") as admin:
                admin.execute(b"INSERT INTO jobs (payload) VALUES (%s)", [message("meanwhile")])
                if ended:
                    ours = b"FROM pg_stat_activity WHERE application_name = 'trio-settlement'"
                    admin.execute(b"SELECT pg_terminate_backend(pid) " + ours)
            await trio.sleep(6.0)
            assert child.said("began", "meanwhile") == []
        finally:
            with psycopg.connect(own.url, autocommit=True, options="-c default_transaction_read_only=off") as admin:
                admin.execute(b"ALTER SYSTEM RESET default_transaction_read_only")
                admin.execute(b"SELECT pg_reload_conf()")
        await until(lambda: tables.run("SHOW default_transaction_read_only") == [("off",)])
        publish(tables, "after")
        await all_are_done(tables, child, {"before", "held", "meanwhile", "after"}, BACK)
        (books,) = await child.books()
    assert books["balanced"]
    assert "Traceback" not in child.errors
    if lease is None and not ended:  # its transaction had begun before
        assert [line[2] for line in child.said("began", "held")] == [1]
