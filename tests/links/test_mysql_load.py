"""Eight claimers in two processes and four producers on one table of MariaDB or MySQL; connections are killed, too."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import NoneType

import pymysql
import pytest
import trio

from tests.links.mysql_kit import Mysqls, a_database
from tests.links.mysql_tables import MysqlTables
from tests.links.sql_consumer import message
from tests.links.sqlite_kit import until
from tests.links.test_postgres_load import CLAIMERS, Sent, asked, claimers, handled, overlaps, produce
from tests.servers.mysql import Kind

pytestmark = [pytest.mark.mysql, pytest.mark.servers, pytest.mark.slow]

SECONDS = [5.0, pytest.param(60.0, marks=pytest.mark.long)]
FORMS = pytest.mark.parametrize("lease", [2.0, None, "{id}"], ids=["lease", "row lock", "advisory"])
HELD = {
    float: "SELECT count(*) FROM jobs WHERE locked_until > UTC_TIMESTAMP(6)",
    NoneType: "SELECT count(*) FROM information_schema.INNODB_TRX WHERE trx_rows_locked > 0 AND trx_rows_modified = 0",
    str: "SELECT count(*) FROM jobs WHERE IS_USED_LOCK(CONCAT(LOWER(DATABASE()), '.', id)) IS NOT NULL",
}
"""As the server sees it: how many rows are held."""


@FORMS
@pytest.mark.parametrize("kind", ["mariadb", "mysql"])
@pytest.mark.parametrize("seconds", SECONDS)
async def test_eight_claimers_and_four_producers(  # noqa: PLR0917 -- parameters
    seconds: float,
    kind: Kind,
    lease: float | str | None,
    mysqls: Mysqls,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    tell: Callable[[str], None],
) -> None:
    """S-2.11: no row is in work twice, rows in = rows out, and nobody hears of a deadlock or the like."""
    with a_database(mysqls.url(kind)) as url:
        tables = MysqlTables(url, leased=isinstance(lease, float)).create()
        sent, most = Sent(), 0
        holding = [f"holding {number}" for number in range(CLAIMERS)]
        async with claimers(tmp_path, url, lease) as children:
            tables.add(*[message(name, hold=3.5) for name in holding])  # when everybody is there
            async with trio.open_nursery() as nursery:
                for who in range(4):
                    nursery.start_soon(produce, tables, who, seconds, sent)
                end = trio.current_time() + seconds
                while trio.current_time() < end:
                    ((held,),) = tables.run(HELD[type(lease)])
                    most = max(most, held)
                    await trio.sleep(0.05)
            assert most >= CLAIMERS, "held at one moment, as the server shows it"
            await until(lambda: tables.run("SELECT count(*) FROM jobs") == [(0,)], 60)
            books = [each for child in children for each in await child.books()]
            complaints = caplog.text + "".join(child.errors for child in children)
            counts = handled(children)
            assert overlaps(children) == []

        passing = ("another transaction has locked the row", "settling works again")
        assert [line for line in complaints.splitlines() if not any(each in line for each in passing)] == []
        assert all(each["balanced"] for each in books)
        total = {name: sum(each[name] for each in books) for name in ("received", "acked", "superseded", "unknown")}
        names = {*sent.confirmed, *holding}
        assert names <= {*counts} <= {*names, *sent.unknown}
        assert counts == {name: 1 + len(asked(name)) for name in counts}
        assert (total["acked"], total["superseded"], total["unknown"]) == (len(counts), 0, 0)
        tell(f"{len(counts)} rows by {CLAIMERS} claimers in {seconds:g} s on {kind}, {total['received']} deliveries")


@FORMS
@pytest.mark.parametrize("kind", ["mariadb", pytest.param("mysql", marks=pytest.mark.long)])
@pytest.mark.parametrize("seconds", SECONDS)
async def test_connections_are_killed_in_turn_under_load(  # noqa: PLR0917 -- parameters
    seconds: float,
    kind: Kind,
    lease: float | str | None,
    mysqls: Mysqls,
    tmp_path: Path,
    tell: Callable[[str], None],
) -> None:
    """DESIGN 4: a claimer's, the writer's, a publisher's: each is had again, nothing is lost, and the books balance."""
    with a_database(mysqls.url(kind)) as url:
        tables = MysqlTables(url, leased=isinstance(lease, float)).create()
        sent = Sent()
        ended: dict[str, int] = defaultdict(int)
        own = "DB = DATABASE() AND ID <> CONNECTION_ID()"
        victims = {"sleeping": f"{own} AND COMMAND = 'Sleep'", "busy": f"{own} AND COMMAND = 'Query'", "any": own}
        async with claimers(tmp_path, url, lease) as children:
            async with trio.open_nursery() as nursery:
                for who in range(4):
                    nursery.start_soon(produce, tables, who, seconds, sent)
                end = trio.current_time() + seconds
                for victim in itertools.cycle(victims):
                    if trio.current_time() > end:
                        break
                    query = f"SELECT ID FROM information_schema.PROCESSLIST WHERE {victims[victim]} "  # noqa: S608
                    for (number,) in tables.run(query + "ORDER BY RAND() LIMIT 2"):
                        try:
                            tables.run(f"KILL {number}")
                        except pymysql.OperationalError:  # it has ended meanwhile
                            continue
                        ended[victim] += 1
                    await trio.sleep(0.25)
            await until(lambda: tables.run("SELECT count(*) FROM jobs") == [(0,)], 60)
            books = [each for child in children for each in await child.books()]
            counts = handled(children)
            complaints = "".join(child.errors for child in children)

        assert all(each["balanced"] for each in books)
        assert sent.confirmed <= {*counts} <= {*sent.confirmed, *sent.unknown}, "what was confirmed was handled"
        assert "Traceback" not in complaints
        assert "eadlock" not in complaints
        assert ended["sleeping"]
        assert ended["any"]
        tell(f"{len(counts)} rows, {sum(ended.values())} connections killed, {len(sent.unknown)} publishings unknown")
