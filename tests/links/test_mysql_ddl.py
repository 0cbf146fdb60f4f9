"""`Table.ddl` on MariaDB and MySQL: for any roles a table that serves as it stands."""

from __future__ import annotations

import itertools
from typing import Any

import pymysql
import pytest
import trio
from pymysql.constants import CLIENT

from links.sql import Lease, RowLock, SqlBroker, Table
from settlement import Policy
from settlement.sql import Finish, MoveToTable
from tests.links.mysql_kit import connect, run
from tests.links.sqlite_kit import attached, bodies, broker_of, finish, open_link, say

ON_SERVERS = [pytest.mark.mysql, pytest.mark.servers]
OPTIONAL = {"group": "group", "priority": "rank", "retry_after": "due", "processed_at": "done"}
SUBSETS = [
    [role for role, there in zip(OPTIONAL, chosen, strict=True) if there]
    for chosen in itertools.product((False, True), repeat=4)
]


def described(roles: list[str], name: str = "jobs", **more: Any) -> Table[Any]:
    given: dict[str, Any] = {role: OPTIONAL[role] for role in roles}
    return Table(
        name, id="id", payload="body", attempt="attempt", headers="headers", partition_key="lane", **given, **more
    )


def create(url: str, table: Table[Any]) -> None:
    """Run the text, as a client does that sends a whole file."""
    kind = "mariadb" if url.startswith("mariadb") else "mysql"
    with connect(url, client_flag=CLIENT.MULTI_STATEMENTS) as connection, connection.cursor() as cursor:
        cursor.execute(table.ddl(kind))
        while cursor.nextset():
            pass


@pytest.mark.mysql
def test_it_says_what_it_does() -> None:
    """The whole text of a table: a reason over each column and index, the dead letters; one for both servers."""
    table = Table("orders", id="id", payload="body", retry_after="due", locked_until="lock", processed_at="order")
    text = table.ddl("mysql")
    assert text == table.ddl("mariadb")
    queue, dead = text.split("\n\n")
    assert queue == (
        "-- the queue\n"
        "CREATE TABLE IF NOT EXISTS `orders` (\n"
        "    -- the database gives it\n"
        "    `id` BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,\n"
        "    -- due from then on, in UTC, whatever a session's time zone is\n"
        "    `due` DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),\n"
        "    -- NULL or past: free; else leased until then, in UTC\n"
        "    `lock` DATETIME(6) NULL,\n"
        "    -- NULL: not finished; finished rows stay, with the time in UTC\n"
        "    `order` DATETIME(6) NULL,\n"
        "    -- the message's bytes\n"
        "    `body` LONGBLOB NOT NULL,\n"
        "    -- a claim walks along it; it holds neither lease nor attempt, for every claim writes both;\n"
        "    -- finished rows stand apart in it, so they cost a claim nothing\n"
        "    INDEX `orders_due` (`order`, `due`, `id`)\n"
        ") ENGINE=InnoDB;"
    )
    assert dead.startswith("-- where dead letters move to")
    assert "CREATE TABLE IF NOT EXISTS `dead_orders` (" in dead
    assert "INDEX" not in dead


@pytest.mark.mysql
def test_in_row_mode_the_columns_are_yours() -> None:
    """It says where to put them."""
    assert "the message is the whole row: put its columns in here" in Table("jobs", id="id").ddl("mysql")


class TestServers:
    """Run as it is."""

    pytestmark = ON_SERVERS

    @pytest.mark.parametrize("leased", [True, False], ids=["lease", "row lock"])
    @pytest.mark.parametrize("roles", SUBSETS, ids="+".join)
    async def test_what_it_gives_attaches_without_a_word(
        self, roles: list[str], leased: bool, mysql_database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """For any roles: publish, claim, finish, and move to the dead-letter table that it made; no warning."""
        table = described(roles, **({"locked_until": "lock"} if leased else {}))
        create(mysql_database, table)
        group = "mail" if table.group else None
        policy = Policy() if group else Policy(max_attempts=3, dead_letter="dead_jobs")
        queue = SqlBroker(mysql_database).queue(table, group=group, claim=Lease(30.0) if leased else RowLock())
        async with queue.broker.connect(), attached(queue, policy=policy) as link:
            publisher = broker_of(queue).publisher(table, group=group)
            for body in (b"a\xff", b"b\x00"):
                await publisher.publish(body, {"x": b"y"}, key="k")
            verb = Finish() if group else MoveToTable("dead_jobs")
            with trio.fail_after(20):
                for body, what in ((b"a\xff", Finish()), (b"b\x00", verb)):
                    (received,) = await link.receive(1)
                    assert (received.delivery.body, received.delivery.attempt) == (body, 1)
                    assert await link.settle([say(received, what)]) == [None]
        if not group:
            assert run(mysql_database, "SELECT body FROM dead_jobs") == [(b"b\x00",)]
        assert [record.message for record in caplog.records] == []

    async def test_fifo(self, mysql_database: str, caplog: pytest.LogCaptureFixture) -> None:
        """With its second index: no warning, one of a group at a time."""
        table = described(["group", "retry_after"], locked_until="lock", fifo=True)
        create(mysql_database, table)
        queue = SqlBroker(mysql_database).queue(table, group="g")
        async with open_link(queue) as link:
            publisher = broker_of(queue).publisher(table, group="g")
            await publisher.publish_many([b"a", b"b"])
            first = await link.receive(2)
            assert bodies(first) == [b"a"]
            assert await link.settle(finish(first)) == [None]
            assert bodies(await link.receive(2)) == [b"b"]
        assert [record.message for record in caplog.records] == []

    async def test_it_may_run_at_every_start(self, mysql_database: str) -> None:
        """Rows stay, and a table that a start before did not come to is made."""
        table = described(["retry_after"], locked_until="lock")
        create(mysql_database, table)
        run(mysql_database, "INSERT INTO jobs (body) VALUES ('a')")
        run(mysql_database, "DROP TABLE dead_jobs")
        create(mysql_database, table)
        assert run(mysql_database, "SELECT body, attempt, due <= UTC_TIMESTAMP(6) FROM jobs") == [(b"a", 1, 1)]
        assert run(mysql_database, "SELECT COUNT(*) FROM dead_jobs") == [(0,)]

    @pytest.mark.parametrize("name", ["my table", 'd`e"ad', "order", "%s :x", "123", "ä" * 59])
    async def test_names_are_quoted(self, name: str, mysql_database: str) -> None:
        """Keywords, blanks, quotes, digits; of a long one the index has a shorter name."""
        table = described(["retry_after", "priority"], name, locked_until="lock")
        create(mysql_database, table)
        queue = SqlBroker(mysql_database).queue(table)
        async with open_link(queue) as link:
            await broker_of(queue).publisher(table).publish(b"x")
            assert bodies(await link.receive(1)) == [b"x"]

    async def test_a_group_is_itself(self, mysql_database: str) -> None:
        """'a' is not 'A', nor 'ä', in a database whose collation takes them for one."""
        run(mysql_database, "ALTER DATABASE CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci")
        table = described(["group"], locked_until="lock")
        create(mysql_database, table)
        for group in ("a", "A", "ä"):
            run(mysql_database, "INSERT INTO jobs (`group`, body) VALUES (%s, %s)", group, group)
        async with open_link(SqlBroker(mysql_database).queue(table, group="A")) as link:
            assert bodies(await link.receive(9)) == [b"A"]

    def test_headers_are_an_object(self, mysql_database: str) -> None:
        """What is no JSON is refused by either server."""
        create(mysql_database, described([]))
        with pytest.raises(pymysql.MySQLError):
            run(mysql_database, "INSERT INTO jobs (body, headers) VALUES ('a', 'no json')")
