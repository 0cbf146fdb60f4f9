"""What cannot be a queue on MySQL or MariaDB is refused at start-up, by name and with the way out; rows stay intact."""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pymysql
import pytest
import trio

from links.errors import ConnectionBroken, LinkRefused
from links.sql import AdvisoryLock, Lease, RowLock, SqlBroker, Table
from settlement import Policy
from settlement.sql import ClaimForm
from tests.links.mysql_kit import Mysqls, a_database, connect, run
from tests.links.mysql_tables import MysqlTables
from tests.links.sqlite_kit import attached, nothing_lost
from tests.servers.mysql import a_server

pytestmark = [pytest.mark.mysql, pytest.mark.servers]

GOOD = {
    "id": "BIGINT AUTO_INCREMENT PRIMARY KEY",
    "payload": "LONGBLOB",
    "headers": "JSON",
    "due": "DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6))",
    "attempt": "INT NOT NULL DEFAULT 1",
    "lease": "DATETIME(6) NULL",
    "done": "DATETIME(6) NULL",
    "grp": "VARCHAR(50) COLLATE utf8mb4_bin NOT NULL",
}
INDEX = "INDEX i (grp, done, due, id)"


def table(**more: Any) -> Table[bytes]:
    return Table(
        "jobs",
        id="id",
        payload="payload",
        headers="headers",
        retry_after="due",
        attempt="attempt",
        locked_until="lease",
        processed_at="done",
        group="grp",
        **more,
    )


def create(
    url: str, name: str = "jobs", *more: str, index: str = INDEX, engine: str = "InnoDB", **columns: str
) -> None:
    given = [f"{column} {declared}" for column, declared in {**GOOD, **columns}.items() if declared]
    run(url, f"CREATE TABLE {name} ({', '.join(filter(None, [*given, index, *more]))}) ENGINE={engine}")


async def refusal(url: str, which: Table[bytes], claim: ClaimForm | None = None, dead: str | None = None) -> str:
    policy = Policy() if dead is None else Policy(max_attempts=2, dead_letter=dead)
    group = "a" if which.group else None
    queue = SqlBroker(url).queue(which, group=group, claim=claim)
    with pytest.raises(LinkRefused) as caught:
        async with queue.broker.connect(), attached(queue, policy=policy):
            pass
    assert "subscription 'test', table 'jobs'" in str(caught.value)
    return str(caught.value)


WRONG = [
    ({"lease": "DATETIME NULL"}, "'lease' (locked_until) is datetime, without microseconds", "declare it DATETIME(6)"),
    ({"lease": "DATETIME(6) NOT NULL"}, "'lease' (locked_until) is NOT NULL", "NULL is what a free row holds"),
    ({"lease": "BIGINT NULL"}, "'lease' (locked_until) is bigint", "declare it DATETIME(6) NULL"),
    ({"lease": "DATETIME(6) NULL DEFAULT '2030-01-01'"}, "every row is leased when it is inserted", ""),
    ({"done": "DATETIME(6) NULL DEFAULT '2030-01-01'"}, "every row is finished when it is inserted", ""),
    ({"due": "DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)"}, "the session's own zone", "UTC_TIMESTAMP(6)"),
    (
        {"due": "TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6) ON UPDATE CURRENT_TIMESTAMP(6)"},
        "ON UPDATE CURRENT_TIMESTAMP",
        "declare it DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6))",
    ),
    ({"due": "BIGINT NOT NULL DEFAULT 0"}, "'due' (retry_after) is bigint", "DATETIME(6)"),
    ({"due": "DATETIME(6) AS (done) STORED"}, "'due' (retry_after) is GENERATED ALWAYS", "no claim can write it"),
    ({"attempt": "INT NOT NULL DEFAULT 0"}, "'attempt' (attempt) has the default 0", "INT NOT NULL DEFAULT 1"),
    ({"attempt": "VARCHAR(5) NOT NULL DEFAULT '1'"}, "'attempt' (attempt) is varchar(5)", "it counts"),
    ({"payload": "INT"}, "'payload' (payload) is int", "LONGBLOB"),
    ({"headers": "LONGBLOB"}, "'headers' (headers) is longblob", "JSON or LONGTEXT"),
    ({"grp": "INT NOT NULL"}, "'grp' (group) is int", "VARCHAR(190)"),
    ({"id": "DOUBLE PRIMARY KEY"}, "'id' (id) is double", "one plain value"),
    ({"id": "BIGINT NOT NULL"}, "'id' (id) is no key of its own", "PRIMARY KEY or UNIQUE"),
    ({"id": "BIGINT NULL UNIQUE"}, "'id' (id) may be NULL", "NOT NULL"),
    ({"attempt": ""}, "no column 'attempt' for the role attempt; it has id, payload", "add the column"),
]


@pytest.mark.parametrize(("columns", "what", "way_out"), WRONG, ids=[what for _, what, _ in WRONG])
async def test_a_column_is_refused(columns: dict[str, str], what: str, way_out: str, mariadb_database: str) -> None:
    """S-12.3, DESIGN 6: by its name, with how to declare it."""
    create(mariadb_database, **columns)
    said = await refusal(mariadb_database, table())
    assert what in said
    assert way_out in said


async def test_other_tables_are_refused(mysql_database: str) -> None:
    """None, a view, one of an engine without transactions, a key of a part of a text, an id beside another column."""
    assert "there is no such table; create it" in await refusal(mysql_database, table())
    create(mysql_database, "base")
    run(mysql_database, "CREATE VIEW jobs AS SELECT * FROM base")
    assert "there is no such table" in await refusal(mysql_database, table())
    run(mysql_database, "DROP VIEW jobs")
    create(mysql_database, engine="MyISAM")
    assert "its engine is MyISAM, which has no transactions; say ALTER" in await refusal(mysql_database, table())
    run(mysql_database, "DROP TABLE jobs")
    create(mysql_database, "jobs", "UNIQUE (id(5))", id="VARCHAR(100) NOT NULL")
    assert "is no key of its own" in await refusal(mysql_database, table())
    run(mysql_database, "DROP TABLE jobs")
    create(mysql_database, "jobs", "PRIMARY KEY (id, due)", id="BIGINT NOT NULL")
    assert "is no key of its own" in await refusal(mysql_database, table())
    long = Table("j" * 65, id="id", payload="p")
    queue = SqlBroker(mysql_database).queue(long)
    with pytest.raises(LinkRefused, match="longer than 64 characters"):
        async with queue.broker.connect(), attached(queue):
            pass


@pytest.mark.parametrize("claim", [Lease(30.0), RowLock(), AdvisoryLock("k-{id}")], ids=str)
async def test_a_claim_without_its_index_is_refused(claim: ClaimForm, mysql_database: str) -> None:
    """DESIGN 6: it would sort; with the index that the error names it attaches, and one that is hidden is none."""
    create(mysql_database, index="")
    which = table() if isinstance(claim, Lease) else Table("jobs", id="id", payload="payload", retry_after="due")
    said = await refusal(mysql_database, which, claim)
    assert "no index has the queue's order (due, id)" in said
    (_, made) = said.split("create it: ")
    run(mysql_database, made)
    queue = SqlBroker(mysql_database).queue(which, group="a" if which.group else None, claim=claim)
    async with queue.broker.connect(), attached(queue):
        pass
    kind = "IGNORED" if mysql_database.startswith("mariadb") else "INVISIBLE"
    run(mysql_database, f"ALTER TABLE jobs ALTER INDEX jobs_due {kind}")
    assert "no index has the queue's order" in await refusal(mysql_database, which, claim)


DEAD: list[tuple[dict[str, str], str, str]] = [
    ({}, "DROP TABLE dead", "there is no such table"),
    ({}, "ALTER TABLE dead DROP COLUMN headers", "no column 'headers' to write to"),
    ({}, "ALTER TABLE dead ADD COLUMN why INT NOT NULL", "'why' is NOT NULL without a default"),
    ({}, "ALTER TABLE dead ENGINE=MyISAM", "its engine is MyISAM"),
    ({}, "ALTER TABLE dead MODIFY lease DATETIME(6) NOT NULL", "a row moves there with an empty lease"),
]


@pytest.mark.parametrize(("columns", "change", "what"), DEAD, ids=[what for *_, what in DEAD])
async def test_a_dead_letter_table_is_refused(
    columns: dict[str, str], change: str, what: str, mariadb_database: str
) -> None:
    """Asked at start-up, not by the first message at its cap."""
    which = Table("jobs", id="id", payload="payload", retry_after="due", attempt="attempt", locked_until="lease")
    for name in ("jobs", "dead"):
        create(mariadb_database, name, index="INDEX i (due)", grp="", done="", **columns)
    run(mariadb_database, change)
    said = await refusal(mariadb_database, which, dead="dead")
    assert "dead-letter table 'dead'" in said
    assert what in said


async def test_rights_that_are_missing(mysql_database: str) -> None:
    """The statement, and what to grant; no password in the error."""
    MysqlTables(mysql_database).create()
    name = urlsplit(mysql_database).path.lstrip("/")
    user = f"reader_{name[-6:]}"
    run(mysql_database, f"CREATE USER {user}@'%' IDENTIFIED BY 'hush'")
    try:
        run(mysql_database, f"GRANT CREATE ON {name}.* TO {user}@'%'")
        parts = urlsplit(mysql_database)
        url = urlunsplit(parts._replace(netloc=f"{user}:hush@{parts.hostname}:{parts.port}"))
        assert "grant this user SELECT" in await refusal(url, MysqlTables(mysql_database).table())
        run(mysql_database, f"GRANT SELECT ON {name}.* TO {user}@'%'")
        said = await refusal(url, MysqlTables(mysql_database).table())
        assert "cannot be carried out" in said
        assert "grant this user SELECT, INSERT, UPDATE and DELETE" in said
        assert "hush" not in said
    finally:
        run(mysql_database, f"DROP USER {user}@'%'")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"netloc": "tests:wrong@{host}"}, "Access denied"),
        ({"netloc": "nobody:secret@{host}"}, "Access denied"),
        ({"path": "/there_is_none"}, "there_is_none"),
    ],
    ids=["password", "user", "database"],
)
async def test_a_server_that_says_no(change: dict[str, str], why: str, mysql_database: str) -> None:
    """`LinkRefused`, and no password in it."""
    parts = urlsplit(mysql_database)
    given = {key: value.format(host=f"{parts.hostname}:{parts.port}") for key, value in change.items()}
    broker = SqlBroker(urlunsplit(parts._replace(**given)))
    with pytest.raises(LinkRefused, match=why) as caught:
        async with broker.connect():
            pass
    assert "wrong" not in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_more_places_than_the_server_has_connections(mysql_database: str) -> None:
    """S-12.6: refused with the numbers."""
    tables = MysqlTables(mysql_database, leased=False).create()
    queue = tables.broker().queue(tables.table())
    with pytest.raises(LinkRefused, match=r"each of 500 places holds a connection of its own.* the server allows 300"):
        async with queue.broker.connect(), queue.attach("test", nothing_lost, 5.0, limit=500):
            pass


async def test_binlog_format_statement(mysqls: Mysqls) -> None:
    """OQ-S9: such a server takes no writes at READ COMMITTED."""
    del mysqls
    with (
        a_server("mariadb", log_bin="binlog", binlog_format="STATEMENT", server_id="1") as server,
        a_database(server.url) as url,
        pytest.raises(LinkRefused, match="binlog_format is STATEMENT"),
    ):
        async with SqlBroker(url).connect():
            pass


async def test_a_server_that_takes_no_writes(mysqls: Mysqls) -> None:
    """At start-up, named."""
    del mysqls
    with a_server("mariadb") as server, a_database(server.url) as url:
        tables = MysqlTables(url).create()
        run(url, "CREATE USER app@'%' IDENTIFIED BY 'app'")
        run(url, f"GRANT SELECT, INSERT, UPDATE, DELETE ON {urlsplit(url).path[1:]}.* TO app@'%'")
        run(url, "SET GLOBAL read_only = 1")
        try:
            own = url.replace("tests:secret", "app:app")
            assert "takes no writes: name the one that does" in await refusal(own, tables.table())
        finally:
            run(url, "SET GLOBAL read_only = 0")


# --- peers that are no such server


@contextmanager
def peer(*said: bytes) -> Generator[str, None, None]:
    """The URL of something that says this to whoever connects, and then nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        taken: list[socket.socket] = []

        def serve() -> None:
            try:
                while True:
                    connection, _ = listening.accept()
                    taken.append(connection)
                    for each in said:
                        connection.sendall(each)
            except OSError:
                return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"mysql://u:secret@127.0.0.1:{listening.getsockname()[1]}/db"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(5)
            for each in taken:
                each.close()


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 40, b"\x00" * 400, b"SSH-2.0-OpenSSH_9.2\r\n" * 20]
)
async def test_a_peer_that_is_no_such_server(said: bytes) -> None:
    """Whatever it says, the error is ours."""
    with trio.fail_after(20), peer(said) as url:
        broker = SqlBroker(url)
        with pytest.raises((LinkRefused, ConnectionBroken), match=r"mysql://127\.0\.0\.1") as caught:
            async with broker.connect():
                pass
    assert "secret" not in str(caught.value)


async def test_nobody_listens() -> None:
    """That is weather."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ConnectionBroken, match="refused"):
            async with SqlBroker(f"mysql://u:secret@127.0.0.1:{port}/db").connect():
                pass


@pytest.mark.parametrize(
    ("version", "oldest"), [("5.7.44-log", "8.0.1"), ("8.0.0", "8.0.1"), ("5.5.5-10.5.29-MariaDB", "10.6.0")]
)
async def test_a_server_that_is_too_old(
    version: str, oldest: str, mariadb_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-12.2: the version that it says, and the one that has SKIP LOCKED."""
    from links.sql.mysql.session import MysqlSession  # noqa: PLC0415 -- for this alone

    say = MysqlSession.say

    def older(self: MysqlSession, *texts: str) -> Any:
        return say(self, *(text.replace("VERSION()", f"'{version}'") for text in texts))

    monkeypatch.setattr(MysqlSession, "say", older)
    with pytest.raises(LinkRefused, match=f"{version}, and SKIP LOCKED came with {oldest}"):
        async with SqlBroker(mariadb_database).connect():
            pass


def test_the_kit_sees_what_somebody_else_wrote(mysql_database: str) -> None:
    """Else every test above could pass for nothing."""
    tables = MysqlTables(mysql_database).create()
    with connect(mysql_database) as connection, connection.cursor() as cursor:
        cursor.execute("INSERT INTO jobs (payload) VALUES (X'61')")
    assert tables.row()["payload"] == b"a"
    with pytest.raises(pymysql.MySQLError):
        tables.run("SELECT * FROM nowhere")
