"""Row mode on PostgreSQL: what a handler gets of each type, and a body that is JSON whatever the row holds."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from decimal import Decimal
from typing import Any

import pytest

from links.sql import SqlBroker, Table
from settlement import Policy, Retry
from settlement.sql import Finish, MoveToTable
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import finish, open_link, order, say

pytestmark = [pytest.mark.postgres, pytest.mark.servers]

ROWS: Table[dict[str, Any]] = Table("jobs", id="id", attempt="tries", locked_until="lock")
COLUMNS = "id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tries integer NOT NULL DEFAULT 1, lock timestamptz"

UUID = uuid.UUID("12345678-1234-5678-1234-567812345678")
NOON = dt.datetime(2024, 2, 29, 12, 30, 15, 250_000, tzinfo=dt.UTC)
TYPES: list[tuple[str, str, Any, Any]] = [
    ("uuid", f"'{UUID}'", UUID, str(UUID)),
    ("numeric", "12345678901234567890.50", Decimal("12345678901234567890.50"), "12345678901234567890.50"),
    ("numeric", "'NaN'", Decimal("NaN"), "NaN"),
    ("jsonb", """'{"a": [1, null, {"b": "ä"}]}'""", {"a": [1, None, {"b": "ä"}]}, {"a": [1, None, {"b": "ä"}]}),
    ("json", "'[1, 2.5]'", [1, 2.5], [1, 2.5]),
    ("json", "'{\"n\": 1e400}'", {"n": float("inf")}, {"n": "Infinity"}),
    ("timestamptz", "'2024-02-29 12:30:15.25+00'", NOON, "2024-02-29T12:30:15.250000+00:00"),
    ("timestamp", "'2024-02-29 12:30:15.25'", NOON.replace(tzinfo=None), "2024-02-29T12:30:15.250000"),
    ("date", "'2024-02-29'", dt.date(2024, 2, 29), "2024-02-29"),
    ("time", "'12:30'", dt.time(12, 30), "12:30:00"),
    ("time", "'24:00'", "24:00:00", "24:00:00"),
    ("timetz", "'24:00+02'", "24:00:00+02", "24:00:00+02"),
    ("interval", "'100000000 years'", "100000000 years", "100000000 years"),
    ("daterange", "'[2024-02-29,infinity)'", None, "[2024-02-29, infinity)"),
    ("int4multirange", "'{[1,5),[8,9)}'", None, "{[1, 5), [8, 9)}"),
    ("integer[]", "'[0:1]={1,2}'", [1, 2], [1, 2]),
    ("box[]", "'{(1,1),(0,0);(3,3),(2,2)}'", ["(1,1),(0,0)", "(3,3),(2,2)"], ["(1,1),(0,0)", "(3,3),(2,2)"]),
    ("interval", "'90 minutes'", dt.timedelta(minutes=90), "1:30:00"),
    ("date", "'infinity'", "infinity", "infinity"),
    ("timestamptz", "'-infinity'", "-infinity", "-infinity"),
    ("timestamp", "'0044-03-15 BC'", "0044-03-15 00:00:00 BC", "0044-03-15 00:00:00 BC"),
    ("integer[]", "'{1,2,NULL}'", [1, 2, None], [1, 2, None]),
    ("text[]", "'{{a,b},{c,d}}'", [["a", "b"], ["c", "d"]], [["a", "b"], ["c", "d"]]),
    ("date[]", "'{2024-02-29,infinity}'", [dt.date(2024, 2, 29), "infinity"], ["2024-02-29", "infinity"]),
    ("uuid[]", f"'{{{UUID}}}'", [UUID], [str(UUID)]),
    ("float8[]", "'{1.5,NaN,-Infinity}'", [1.5, float("nan"), -float("inf")], [1.5, "NaN", "-Infinity"]),
    ("bytea", r"'\x00ff'", b"\x00\xff", {"base64": "AP8="}),
    ("bytea", "'text'", b"text", "text"),
    ("mood", "'ok'", "ok", "ok"),
    ("boolean", "true", True, True),
    ("float8", "0.5", 0.5, 0.5),
    ("float8", "'Infinity'", float("inf"), "Infinity"),
    ("bigint", str(2**63 - 1), 2**63 - 1, 2**63 - 1),
    ("text", "'ä'", "ä", "ä"),
    ("text", "NULL", None, None),
    ("inet", "'10.0.0.1'", None, "10.0.0.1"),
    ("int4range", "'[1,5)'", None, "[1, 5)"),
    ("point", "'(1,2)'", "(1,2)", "(1,2)"),
]
"""Type, a literal, what the handler gets (None: some object of psycopg's), and what is in the body."""


def made(url: str, *columns: str) -> PostgresTables:
    tables = PostgresTables(url)
    tables.run("CREATE TYPE mood AS ENUM ('sad', 'ok')")
    for name in ("jobs", "dead"):
        tables.run(f"CREATE TABLE {name} ({', '.join([COLUMNS, *columns])})")
    return tables


def strictly(body: bytes) -> Any:
    """JSON as its standard has it: Python's own reader takes NaN and Infinity."""

    def no(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(body, parse_constant=no)


async def test_a_handler_gets_python_values_and_a_body_that_is_json(database: str) -> None:
    """S-1.2: each type of PostgreSQL beside each other one; the row is settled, moved and finished as it was."""
    tables = made(database, *(f"c{number} {each[0]}" for number, each in enumerate(TYPES)))
    names = ", ".join(f"c{number}" for number in range(len(TYPES)))
    name = database.rpartition("/")[2]
    tables.run(f"ALTER DATABASE {name} SET timezone = 'UTC'")  # a timestamptz is read in the session's zone
    tables.run(f"INSERT INTO jobs ({names}) VALUES ({', '.join(each[1] for each in TYPES)})")  # noqa: S608
    before = tables.run(f"SELECT ROW({names})::text FROM jobs")  # noqa: S608
    policy = Policy(max_attempts=1, dead_letter="dead")
    queue = SqlBroker(database).queue(ROWS)
    async with open_link(queue) as link:
        (received,) = await link.receive(1)
        assert received.unreadable is None
        message: Any = received.delivery.message
        body = strictly(received.delivery.body)
        for number, (kind, literal, value, plain) in enumerate(TYPES):
            found = message[f"c{number}"]
            if value is not None or literal == "NULL":
                assert found == value or repr(found) == repr(value), f"{kind} {literal}"  # no NaN equals another
                assert type(found) is type(value), f"{kind} {literal}"
            assert body[f"c{number}"] == plain, f"{kind} {literal}"
        assert (message["id"], message["tries"], message["lock"]) == (1, 1, None)
        assert (body["id"], body["tries"], body["lock"]) == (1, 1, None)
        assert list(await link.settle([order(queue, received, Retry(), policy)])) == [None]
    assert tables.rows() == []
    assert tables.run(f"SELECT ROW({names})::text FROM dead") == before  # noqa: S608


ODD = {
    "a whole number of 5000 digits": f"'{'9' * 5000}'",
    "arrays in arrays in arrays": f"'{'[' * 3000}{']' * 3000}'",
}


@pytest.mark.parametrize("odd", ODD)
async def test_json_that_python_cannot_read_harms_no_neighbour(odd: str, database: str) -> None:
    """S-4.9: PostgreSQL takes it; the rows beside it are read, and it can be moved and finished as they can."""
    tables = made(database, "data jsonb")
    for data in ("'1'", ODD[odd], "'2'"):
        tables.run(f"INSERT INTO jobs (data) VALUES ({data})")  # noqa: S608
    async with open_link(SqlBroker(database).queue(ROWS)) as link:
        received = await link.receive(3)
        first, strange, last = [each.delivery for each in received]
        assert [strictly(each.body)["data"] for each in (first, last)] == [1, 2]
        assert strange.id == "2"
        verdicts = await link.settle([say(received[1], MoveToTable("dead")), *finish([received[0], received[2]])])
        assert list(verdicts) == [None, None, None]
    assert tables.rows() == []
    assert tables.run(f"SELECT data = {ODD[odd]}::jsonb FROM dead") == [(True,)]  # noqa: S608


@pytest.mark.parametrize("whole", [True, False], ids=["row mode", "payload"])
async def test_a_text_that_is_no_utf_8_harms_no_neighbour(
    whole: bool, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A database of encoding SQL_ASCII holds any bytes: this row is passed over and named, the others are read."""
    base, _, name = database.rpartition("/")
    ascii_name = f"{name}_ascii"
    PostgresTables(database).run(f"CREATE DATABASE {ascii_name} ENCODING 'SQL_ASCII' TEMPLATE template0 LC_COLLATE 'C'")
    url = f"{base}/{ascii_name}"
    try:
        tables = made(url, "body text")
        for body in (r"'a'", r"E'\xff'", r"'b'"):
            tables.run(f"INSERT INTO jobs (body) VALUES ({body})")  # noqa: S608
        payload: Any = {} if whole else {"payload": "body"}
        table: Table[Any] = Table("jobs", id="id", attempt="tries", locked_until="lock", **payload)
        async with open_link(SqlBroker(url).queue(table)) as link:
            received = await link.receive(3)
            assert [each.delivery.id for each in received] == ["1", "3"]
            assert list(await link.settle([say(each, Finish()) for each in received])) == [None, None]
        assert tables.run("SELECT id, tries, lock FROM jobs") == [(2, 1, None)]
    finally:
        PostgresTables(database).run(f"DROP DATABASE {ascii_name} WITH (FORCE)")
    assert "row 2 of table 'jobs' cannot be claimed" in caplog.text
