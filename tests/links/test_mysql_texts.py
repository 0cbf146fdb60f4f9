"""What is pure of MySQL and MariaDB: URLs, which index a claim walks along, times, values, statements of one's own."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import attrs
import pymysql
import pytest
from hypothesis import given
from hypothesis import strategies as st

from links.errors import PublishNotAccepted
from links.sql import AdvisoryLock, Lease, RowLock, SqlBroker, Table
from links.sql.mysql.codes import is_again, is_lost, is_of_the_row, is_refusal, is_undone
from links.sql.mysql.custom import values_of
from links.sql.mysql.dialect import MysqlDialect
from links.sql.mysql.insert import as_stored
from links.sql.mysql.plans import walk
from links.sql.mysql.schema import Index, MysqlColumn, MysqlSchema, bound, quote
from links.sql.mysql.session import Raw, text_of
from links.sql.mysql.statements import micros, none_of

pytestmark = pytest.mark.mysql

COLUMN = MysqlColumn("due", "datetime", "datetime(6)", False, None, False, False, False, 6, False)


def schema(*indexes: Index) -> MysqlSchema:
    return MysqlSchema({}, indexes, False, "InnoDB")


PRIMARY = Index("PRIMARY", True, ("id",), True)


@pytest.mark.parametrize(
    "url",
    [
        "mysql://user:secret@host",
        "mysql://user:secret@host/",
        "mariadb://user:secret@host:port/db",
        "mariadb://user:secret@host/db?charset=utf8",
        "mysql://user:secret@host/db?ssl_disabled=yes",
    ],
)
def test_a_url_is_refused(url: str) -> None:
    """S-12.5: the error names the legal form, and shows no credential."""
    with pytest.raises(ValueError, match=r"mysql://user:password@host:3306/database|must be 1 or 0") as caught:
        SqlBroker(url)
    assert "secret" not in str(caught.value)


def test_a_url_says_host_and_database_and_no_credential() -> None:
    """Nor does the repr of what is made of it."""
    broker = SqlBroker("mariadb://us%40er:s%3Acret@db.example:3307/shop%20one?ssl_ca=%2Fca.pem&ssl_verify_cert=1")
    assert broker.name == "mariadb://db.example:3307/shop%20one"
    assert "cret" not in repr(broker)


@pytest.mark.parametrize("more", [{"direct_url": "mysql://host/db"}, {"listen_notify": True}])
def test_what_the_server_has_not_is_refused(more: dict[str, Any]) -> None:
    """S-9.5: no server here tells other processes."""
    with pytest.raises(ValueError, match="poll_interval"):
        MysqlDialect("mysql://host/db", **more)


LEASED = Table("jobs", id="id", payload="body", locked_until="lease")
PLAIN = Table("jobs", id="id", payload="body")
FIFO = Table("jobs", id="id", payload="body", group="grp", fifo=True)


@pytest.mark.parametrize(
    ("claim", "table", "why"),
    [
        (RowLock(), LEASED, "must be Lease"),
        (AdvisoryLock("k"), LEASED, "must be Lease"),
        (Lease(5.0), PLAIN, "must have a locked_until column"),
        (RowLock("serializable"), FIFO, "must be 'read committed'"),
        (AdvisoryLock("k"), FIFO, "FIFO"),
    ],
)
def test_a_form_is_refused(claim: Any, table: Table[Any], why: str) -> None:
    """S-1.4, S-7.4: with the way out, before any I/O."""
    with pytest.raises(ValueError, match=why):
        SqlBroker("mysql://host/db").queue(table, group="a" if table.group else None, claim=claim)


def test_a_form_follows_from_the_columns() -> None:
    """S-1.4; S-8.7: each isolation that the server has may be asked for."""
    dialect = MysqlDialect("mysql://host/db")
    assert dialect.form(None, LEASED) == Lease(30.0)
    assert dialect.form(None, PLAIN) == RowLock()
    for level in ("read uncommitted", "read committed", "repeatable read", "serializable"):
        assert dialect.form(RowLock(level), PLAIN) == RowLock(level)


# --- plans


@pytest.mark.parametrize(
    ("columns", "same", "order", "found"),
    [
        ((), (), ("id",), ("PRIMARY", 0)),
        (("due",), (), ("due", "id"), ("i", 0)),
        (("due", "id"), (), ("due", "id"), ("i", 0)),
        (("prio", "due"), (), ("prio", "due", "id"), ("i", 0)),
        (("grp", "due"), ("grp",), ("due", "id"), ("i", 1)),
        (("grp", "done", "due", "id"), ("grp", "done"), ("due", "id"), ("i", 2)),
        (("done", "grp", "due"), ("grp", "done"), ("due", "id"), ("i", 2)),
        (("due", "id"), ("grp",), ("due", "id"), ("i", 0)),
        (("due", "prio"), (), ("prio", "due", "id"), None),
        (("other", "due"), (), ("due", "id"), None),
        (("due", "other"), (), ("due", "id"), None),
        ((), (), ("due", "id"), None),
        (("DUE".lower(),), (), ("Due", "ID"), ("i", 0)),
    ],
)
def test_the_index_in_the_queues_order(
    columns: tuple[str, ...], same: tuple[str, ...], order: tuple[str, ...], found: tuple[str, int] | None
) -> None:
    """DESIGN 6: a claim goes in index order, or is refused; an index ends with the primary key."""
    got = walk(schema(PRIMARY, *([Index("i", False, columns, True)] if columns else [])), same, order)
    assert (None if got is None else (got.index, got.among)) == found


def test_a_part_of_an_index_does_not_order() -> None:
    """A prefix of a text, and what follows it, and a descending column, say nothing of the order."""
    assert walk(schema(PRIMARY, Index("i", False, ("due",), False)), (), ("due", "id")) is None


def test_the_index_that_keeps_the_queue_apart_is_preferred() -> None:
    """Of two in the same order the one whose first columns are the group's."""
    wide, narrow = Index("wide", False, ("due", "id"), True), Index("narrow", False, ("grp", "due", "id"), True)
    got = walk(schema(PRIMARY, wide, narrow), ("grp",), ("due", "id"))
    assert got is not None
    assert got.index == "narrow"


# --- values


@given(st.floats(0, 1e15), st.integers(0, 6))
def test_a_delay_is_never_short(seconds: float, precision: int) -> None:
    """DESIGN 6: not before its time, whatever the column rounds away; cut to what a time can hold."""
    whole = micros(seconds, attrs.evolve(COLUMN, precision=precision))
    unit = 10 ** (6 - precision)
    for now in (0, 1, unit // 2, unit - 1):  # the clock's own part
        stored = (now + whole + unit // 2) // unit * unit  # as the server rounds
        assert stored >= now + min(seconds * 1_000_000, 10**17) - 1e-6 * seconds


@given(st.datetimes(datetime(2000, 1, 1), datetime(2037, 1, 1), timezones=st.just(UTC)), st.integers(0, 6))  # noqa: DTZ001 -- a time zone is added
def test_an_instant_is_never_early(due: datetime, precision: int) -> None:
    """In UTC, up to the column's own decimals."""
    stored = as_stored(due, attrs.evolve(COLUMN, precision=precision))
    assert timedelta(0) <= stored - due.replace(tzinfo=None) < timedelta(microseconds=10 ** (6 - precision))


def test_an_instant_beyond_a_timestamp_is_refused() -> None:
    """It ends in 2038; what is long past is due all the same."""
    stamp = attrs.evolve(COLUMN, type="timestamp", declared="timestamp(6)")
    with pytest.raises(PublishNotAccepted, match=r"timestamp\(6\), which ends before"):
        as_stored(datetime(2040, 1, 1, tzinfo=UTC), stamp)
    assert as_stored(datetime(1950, 1, 1, tzinfo=UTC), stamp) == datetime(1970, 1, 1, 0, 0, 1)  # noqa: DTZ001 -- as a column holds it
    with pytest.raises(PublishNotAccepted, match="ends before"):
        as_stored(datetime.max.replace(tzinfo=UTC), attrs.evolve(COLUMN, precision=0))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "NULL"),
        (True, "1"),
        (-5, "-5"),
        ("it's \\ \0", r"'it\'s \\ \0'"),
        (b"\x00'", "X'0027'"),
        ([], "(NULL)"),
        ([1, "a"], "(1, 'a')"),
        (Decimal("1.50"), "1.50"),
        (Raw("NOW()"), "NOW()"),
    ],
)
def test_how_a_value_stands_in_a_statement(value: object, text: str) -> None:
    """In single quotes, which every SQL mode takes for a text."""
    assert text_of(value) == text


@pytest.mark.parametrize("value", ["\ud800", {"a": 1}, object(), {1}])
def test_a_value_without_a_form_is_refused(value: object) -> None:
    """And never written as something else."""
    with pytest.raises(ValueError, match=r"surrogates|no column can hold"):
        text_of(value)


def test_names_and_values_with_percent_signs() -> None:
    """S-1.5: a backtick is doubled, a % is no placeholder."""
    assert quote("a`b%c") == "`a``b%%c`"
    assert bound(f"{quote('50%')} = %(v)s", {"v": "100%(x)s"}) == "`50%` = '100%(x)s'"


def test_none_of_nothing_is_everything() -> None:
    """`NOT IN (NULL)` would be nobody."""
    assert none_of([]) == "IS NOT NULL"
    assert none_of([1, 2]) == "NOT IN (1, 2)"


def test_names_in_a_statement_of_ones_own() -> None:
    """S-10.1: bound where they are names, and not in texts, quoted names and comments."""
    text = "UPDATE t SET a = :id, b = ':id', c = \"it\\\":id\", `:id` = :now -- :id\n, d = 'it''s :id' # :id\n/* :id */"
    assert values_of(text, {"id": 7}) == (
        "UPDATE t SET a = 7, b = ':id', c = \"it\\\":id\", `:id` = UTC_TIMESTAMP(6) -- :id\n, d = 'it''s :id' # :id\n"
        "/* :id */"
    )
    assert values_of("SET @x := :id, @y = 'a\\':id'", {"id": "q"}) == "SET @x := 'q', @y = 'a\\':id'"


# --- errors


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (1213, {is_again, is_undone}),
        (1205, {is_again}),
        (1020, {is_again}),
        (2013, {is_lost}),
        (4031, {is_lost}),
        (1045, {is_refusal}),
        (1062, {is_of_the_row}),
        (4025, {is_of_the_row}),
        (1644, {is_of_the_row}),
        (1153, {is_of_the_row}),
        (1114, set[Any]()),
        (1290, set[Any]()),
        (1142, set[Any]()),
    ],
)
def test_what_an_error_means(number: int, said: set[Any]) -> None:
    """A deadlock is no fault of a row, a full disk neither; a trigger's SIGNAL, a CHECK and a key are."""
    error = pymysql.OperationalError(number, "…")
    judges = (is_again, is_undone, is_lost, is_refusal, is_of_the_row)
    assert {judge for judge in judges if judge(error)} == said
