"""MariaDB or MySQL goes away and comes back, or takes no writes for a while: a service waits, and goes on."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest
import trio

from tests.links.mysql_kit import run
from tests.links.mysql_tables import MysqlTables
from tests.links.sql_consumer import Child, a_child, message
from tests.links.sqlite_kit import until
from tests.servers.mysql import Kind, NotHere, Server, a_server

pytestmark = [pytest.mark.mysql, pytest.mark.servers, pytest.mark.slow]

DOWN = [6.0, pytest.param(120.0, marks=pytest.mark.long)]
"""Seconds: so long that no other connection comes within what a writer waits for, which is five."""
FORMS = pytest.mark.parametrize("lease", [2.0, None, "{id}"], ids=["lease", "row lock", "advisory"])
BACK = 45.0
"""Seconds after which it goes on at the latest: tries are 30 s apart at most, and a lease ends."""


@pytest.fixture(scope="module", params=["mariadb", pytest.param("mysql", marks=pytest.mark.long)])
def own(request: pytest.FixtureRequest) -> Generator[Server, None, None]:
    """A server that nobody else uses. What was committed outlives a crash of the server, if not of the machine."""
    kind: Kind = request.param
    with ExitStack() as stack:
        try:
            made = stack.enter_context(a_server(kind, innodb_flush_log_at_trx_commit="2"))
        except NotHere as why:
            pytest.skip(str(why))
        yield made


@pytest.fixture
def tables(own: Server, lease: float | str | None) -> Generator[MysqlTables, None, None]:
    """In a database of its own, as a user whom `read_only` concerns."""
    run(own.url, "CREATE DATABASE q CHARACTER SET utf8mb4")
    run(own.url, "CREATE USER plain@'%' IDENTIFIED BY 'plain'")
    run(own.url, "GRANT ALL ON q.* TO plain@'%'")
    parts = urlsplit(own.url)
    url = urlunsplit(parts._replace(netloc=f"plain:plain@{parts.netloc.rpartition('@')[2]}", path="/q"))
    yield MysqlTables(url, leased=isinstance(lease, float)).create()
    run(own.url, "DROP DATABASE q")
    run(own.url, "DROP USER plain@'%'")


def publish(tables: MysqlTables, *names: str) -> None:
    tables.add(*[message(name) for name in names])


async def all_are_done(tables: MysqlTables, child: Child, names: set[str], within: float) -> None:
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
    tables: MysqlTables,
    tmp_path: Path,
    tell: Callable[[str], None],
) -> None:
    """DESIGN 4, Weather: it waits without spending the machine, and goes on with what was there and what is new."""
    before = {f"before {number}" for number in range(20)}
    async with a_child(tmp_path, url=tables.url, lease=lease, concurrency=4) as child:
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
    assert "Traceback" not in child.errors
    assert spent < 0.1 * down
    tell(f"{spent / down:.1%} of a CPU in {down:g} s without a server")


@FORMS
@pytest.mark.parametrize("ended", [False, True], ids=["connections stay", "connections are killed"])
async def test_a_server_that_takes_no_writes_for_a_while(
    ended: bool, lease: float | str | None, own: Server, tables: MysqlTables, tmp_path: Path
) -> None:
    """DESIGN 4: after start-up a refusal is weather; what is in hand then is settled, or comes again."""
    async with a_child(tmp_path, url=tables.url, lease=lease, concurrency=4) as child:
        tables.add(message("held", hold=1.0))
        publish(tables, "before")
        await child.until("ended", "before")
        await child.until("began", "held")
        await trio.to_thread.run_sync(run, own.url, "SET GLOBAL read_only = 1")  # it waits for writes under way
        try:
            run(own.url, "INSERT INTO q.jobs (payload) VALUES (%s)", message("meanwhile"))
            if ended:
                for (number,) in run(own.url, "SELECT ID FROM information_schema.PROCESSLIST WHERE USER = 'plain'"):
                    run(own.url, f"KILL {number}")
            await trio.sleep(6.0)
            if lease is not None:  # a lock is no write, so a row lock claims all the same
                assert child.said("began", "meanwhile") == []
        finally:
            run(own.url, "SET GLOBAL read_only = 0")
        publish(tables, "after")
        await all_are_done(tables, child, {"before", "held", "meanwhile", "after"}, BACK)
        (books,) = await child.books()
    assert books["balanced"]
    assert "Traceback" not in child.errors
