"""The record tables of an outbox: what is refused by name, and what odd ones are served."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from links.errors import LinkRefused, PublishNotAccepted
from links.memory import MemoryBroker
from links.sql import Outbox, OutboxTable, SqlBroker, Table
from settlement import Ack, Delivery
from tests.links.outbox_kit import BOTH, RECORDS, RecordTables, Sent, a_delivery, answering, made


@pytest.fixture(params=BOTH)
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> RecordTables:
    return made(request.param, tmp_path, request).create()


@given(names=st.lists(st.text(min_size=1, max_size=5), unique=True, max_size=4), known=st.text(min_size=1, max_size=5))
def test_a_name_is_registered_once(names: list[str], known: str) -> None:
    """S-14.7, as a law: who was registered is refused again; who was not is refused everywhere else."""
    outbox = Outbox(RECORDS, SqlBroker("sqlite:///never.db"))
    for name in names:
        outbox.register(name, Sent())
        with pytest.raises(ValueError, match="registered once"):
            outbox.register(name, Sent())
    if known not in names:
        with pytest.raises(ValueError, match="name must be one that is registered"):
            outbox.record_statement(known, b"")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"table": ""}, "a table must be"),
        ({"table": "a.b.c"}, "a table must be"),
        ({"id": ""}, "id must be a column name"),
        ({"name": None}, "name must be a column name"),
        ({"payload": None}, "payload must be a column name"),
        ({"sent_at": None}, "sent_at must be a column name"),
        ({"headers": 3}, "headers must be a column name"),
        ({"processed_at": "sent_at"}, "column 'sent_at' of 'outbox' plays two roles, sent_at and processed_at"),
        ({"partition_key": "a\0"}, "partition_key must be a column name"),
    ],
    ids=str,
)
def test_a_description_that_is_none(given: dict[str, Any], why: str) -> None:
    roles: dict[str, Any] = {"table": "outbox", "id": "id", "name": "name", "payload": "payload", "sent_at": "sent_at"}
    with pytest.raises(ValueError, match=why):
        OutboxTable(**(roles | given))


def test_arguments_that_are_none() -> None:
    broker = SqlBroker("sqlite:///never.db")
    wrong: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, "table must be an OutboxTable", lambda: Outbox(Table("t", id="id"), broker)),  # type: ignore[arg-type]
        (TypeError, "broker must be a SqlBroker", lambda: Outbox(RECORDS, MemoryBroker())),  # type: ignore[arg-type]
        (ValueError, "min_age must be a finite number", lambda: Outbox(RECORDS, broker, min_age=-1)),
        (ValueError, "header must be a name", lambda: Outbox(RECORDS, broker, header="")),
    ]
    outbox = Outbox(RECORDS, broker)
    outbox.register("orders", Sent())

    no: Any = object()

    def plain(_: Delivery[bytes]) -> None: ...

    wrong += [
        (ValueError, "name must be a text of 1", lambda: outbox.register("", Sent())),
        (TypeError, "to must be a publisher", lambda: outbox.register("x", "orders")),  # type: ignore[arg-type]
        (TypeError, "handler must be an async function", lambda: outbox.tracked(plain)),  # type: ignore[arg-type]
        (ValueError, "name must be a text of 1", lambda: outbox.tracked(answering(Ack()), name="")),
        (TypeError, "connection must be one of sqlite3, not builtins.object", lambda: outbox.record(no, "orders", b"")),
        (ValueError, "style must be", lambda: outbox.record_statement("orders", b"", style="qmark")),  # type: ignore[arg-type]
        (ValueError, "body must be bytes or str", lambda: outbox.record_statement("orders", 3)),  # type: ignore[arg-type]
    ]
    for kind, why, call in wrong:
        with pytest.raises(kind, match=why):
            call()


WRONG: list[tuple[str | None, str, str]] = [
    ("DROP TABLE outbox", "DROP TABLE outbox", "there is no such table; create it"),
    (
        "DROP TABLE outbox; CREATE VIEW outbox AS SELECT 1 AS id",
        "DROP TABLE outbox; CREATE VIEW outbox AS SELECT 1 AS id",
        "view",
    ),
    (
        "ALTER TABLE outbox RENAME COLUMN lane TO l",
        "ALTER TABLE outbox RENAME COLUMN lane TO l",
        "no column 'lane' for the role partition_key; it has id, name",
    ),
    (
        "{id} {name} {payload} sent_at REAL)",
        "ALTER TABLE outbox ALTER sent_at DROP DEFAULT",
        r"column 'sent_at' \(sent_at\) has no default, so a record would have no age; declare it (REAL|timestamptz) N",
    ),
    (
        "{id} {name} {payload} sent_at REAL DEFAULT (julianday('now')))",
        "ALTER TABLE outbox ALTER sent_at SET DEFAULT '2001-01-01'",
        "which is not now|but its default julianday",
    ),
    (
        "{id} {name} {payload} sent_at DATETIME DEFAULT CURRENT_TIMESTAMP)",
        "ALTER TABLE outbox ALTER sent_at TYPE timestamp",
        r"\(sent_at\) is (declared DATETIME|timestamp;)",
    ),
    (
        "id TEXT PRIMARY KEY, {name} {payload} {sent_at})",
        "ALTER TABLE outbox ALTER id DROP IDENTITY; ALTER TABLE outbox ALTER id TYPE text",
        r"column 'id' \(id\) must be a whole number that the database gives",
    ),
    (
        "{id} {name} {payload} {processed} NOT NULL, {sent_at})",
        "ALTER TABLE outbox ALTER processed_at SET NOT NULL",
        r"column 'processed_at' \(processed_at\) is NOT NULL, but NULL",
    ),
    (
        "{id} {name} {payload} {processed} DEFAULT 1, {sent_at})",
        "ALTER TABLE outbox ALTER processed_at SET DEFAULT now()",
        "so every row is finished when it is inserted",
    ),
    (
        "{id} {name} {payload} processed_at DATE, {sent_at})",
        "ALTER TABLE outbox ALTER processed_at TYPE date",
        r"column 'processed_at' \(processed_at\) is (declared DATE|date)",
    ),
    (None, "ALTER TABLE outbox ALTER name TYPE integer USING 1", r"column 'name' \(name\) is int4"),
    (None, "ALTER TABLE outbox ALTER headers TYPE bytea USING NULL", r"column 'headers' \(headers\) is bytea"),
    (None, "ALTER TABLE outbox ALTER payload TYPE integer USING 1", r"column 'payload' \(payload\) is int4"),
    (None, "ALTER TABLE outbox DROP CONSTRAINT outbox_pkey", "is no key of its own"),
    (None, "ALTER TABLE outbox SET UNLOGGED", "it is UNLOGGED, so a crash of the server empties it; say ALTER TABLE"),
]


def _wrong() -> list[Any]:
    """Of each dialect: a statement of the table of the test, or its columns; and why it is refused."""
    server = [pytest.mark.postgres, pytest.mark.servers]
    found: list[Any] = [
        pytest.param("sqlite", lite, why, marks=pytest.mark.sqlite) for lite, _, why in WRONG if lite is not None
    ]
    return found + [pytest.param("postgresql", text, why, marks=server) for _, text, why in WRONG]


@pytest.mark.parametrize(("tables", "text", "why"), _wrong(), indirect=["tables"])
async def test_a_table_that_cannot_be_one_is_refused(tables: RecordTables, text: str, why: str) -> None:
    """S-1.5: at start-up, naming table, column and the way out."""
    if "{" in text:
        columns = "headers TEXT, lane TEXT, " + ("" if "processed" in text else "processed_at REAL, ")
        text = "DROP TABLE outbox; CREATE TABLE outbox (" + columns + text
        text = text.format(
            id="id INTEGER PRIMARY KEY,",
            name="name TEXT,",
            payload="payload BLOB,",
            processed="processed_at REAL",
            sent_at="sent_at REAL DEFAULT ((julianday('now') - 2440587.5) * 86400.0)",
        )
    tables.run(*text.split("; "))
    outbox = tables.outbox()
    outbox.register("orders", Sent())
    async with outbox.broker.connect():
        with pytest.raises(LinkRefused, match=why) as raised:
            await outbox.republish()
    assert "outbox table 'outbox'" in str(raised.value)


@pytest.mark.sqlite
@pytest.mark.parametrize("times", ["REAL", "INTEGER", "TEXT"])
async def test_every_form_of_a_time_on_sqlite(tmp_path: Path, times: str) -> None:
    """And a time that is none as its column holds it has passed: nothing waits for ever."""
    from links.sql.sqlite.times import DEFAULTS  # noqa: PLC0415

    path = tmp_path / "o.db"
    sqlite3.connect(path).close()
    tables = RecordTables(f"sqlite:///{path}")
    tables.run(
        f"CREATE TABLE outbox (id INTEGER PRIMARY KEY, name TEXT, payload BLOB, sent_at {times} DEFAULT "
        f"{DEFAULTS[times]}, processed_at {times})"
    )
    outbox = tables.outbox(OutboxTable("outbox", id="id", name="name", payload="payload", sent_at="sent_at"))
    to = Sent()
    orders = outbox.register("orders", to)
    async with outbox.broker.connect():
        await orders.publish(b"a")
        assert await outbox.republish() == 0
        assert await outbox.republish(min_age=0) == 1
        for odd in ("NULL", "'yesterday'", "x'00'"):
            tables.run(f"UPDATE outbox SET sent_at = {odd}")  # noqa: S608 -- our own
            assert await outbox.republish() == 1
            assert await outbox.republish() == 0


@pytest.mark.postgres
@pytest.mark.servers
async def test_a_payload_of_text_or_json_on_postgresql(database: str) -> None:
    """A body is bytes here and text there; one that is no UTF-8 is not accepted."""
    tables = RecordTables(database)
    for number, kind in enumerate(("text", "jsonb")):
        table = attrs.evolve(RECORDS, table=f"outbox{number}")
        tables.create(table).run(f"ALTER TABLE outbox{number} ALTER payload TYPE {kind} USING NULL")
        outbox, to = tables.outbox(table, min_age=0), Sent()
        orders = outbox.register("orders", to)
        with psycopg.connect(database) as connection:
            outbox.record(connection, "orders", '"ä"')
        async with outbox.broker.connect():
            await orders.publish(b'"b"')
            with pytest.raises(PublishNotAccepted, match="the body is no UTF-8"):
                await orders.publish(b"\xff")
            assert await outbox.republish() == 2
        assert to.bodies == [b'"b"', '"ä"'.encode(), b'"b"']


@pytest.mark.postgres
@pytest.mark.servers
async def test_behind_a_pooler_too(pooled: str, database: str) -> None:
    """The lock is a transaction's, so it needs no session of its own."""
    RecordTables(database).create()
    tables = RecordTables(pooled)
    outbox, to = tables.outbox(min_age=0), Sent()
    orders = outbox.register("orders", to)
    async with outbox.broker.connect():
        await orders.publish(b"a")
        assert await outbox.republish() == 1


@pytest.mark.parametrize("dialect", BOTH[:2])
async def test_a_trigger_that_ignores_a_record_is_told(
    dialect: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Nothing is sent that is not recorded. On MySQL and MariaDB a trigger cannot."""
    tables = made(dialect, tmp_path, request).create()
    if tables.lite:
        tables.run("CREATE TRIGGER t BEFORE INSERT ON outbox BEGIN SELECT RAISE(IGNORE); END")
    else:
        tables.run(
            "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
            "CREATE TRIGGER t BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION no()",
        )
    outbox, to = tables.outbox(), Sent()
    orders = outbox.register("orders", to)
    async with outbox.broker.connect():
        with pytest.raises(PublishNotAccepted, match="a trigger has ignored it"):
            await orders.publish(b"a")
    with tables.connection() as connection, pytest.raises(PublishNotAccepted, match="a trigger has ignored it"):
        outbox.record(connection, "orders", b"a")
    assert to.letters == []


async def test_names_of_columns_are_quoted(tables: RecordTables) -> None:
    """A table whose every name is a word of SQL, or holds what drivers read as a parameter."""
    odd = OutboxTable(
        'or"d`er%s :x', id="select", name="from", payload="wh%(v0)s", sent_at="a:v1", processed_at="group"
    )
    tables.create(odd) if not tables.lite else tables.run(
        *[each.replace("\n", " ") for each in _plain(tables.outbox(odd).ddl())]
    )
    outbox, to = tables.outbox(odd, min_age=0), Sent()
    orders = outbox.register("orders", to)
    with tables.connection() as connection:
        assert outbox.record(connection, "orders", b"a") == 1
    async with outbox.broker.connect():
        await orders.publish(b"b")
        assert await outbox.send(1)
        assert await outbox.republish() == 2
        handled = outbox.tracked(answering(Ack()))
        assert await handled(a_delivery(1)) == Ack()
        assert await outbox.republish() == 1
    assert to.bodies == [b"b", b"a", b"a", b"b", b"b"]


def _plain(ddl: str) -> list[str]:
    lines = [line for line in ddl.splitlines() if not line.strip().startswith("--")]
    return list(filter(str.strip, "\n".join(lines).split(";")))
