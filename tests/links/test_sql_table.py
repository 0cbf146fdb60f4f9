"""links.sql without a database: the description of a table, the texts of its statements, headers and times."""

# ruff: noqa: S608 -- texts that are compared, not run

import json
from typing import Any

import pytest

from links.sql import AdvisoryLock, Lease, RowLock, SqlBroker, Table
from links.sql.headers import dump, dump_row, load, load_row
from links.sql.sqlite.statements import SqliteStatements, insert, quote, quote_table
from links.sql.sqlite.times import ENCODERS, LAST, later
from settlement import Policy

pytestmark = pytest.mark.sqlite

FULL: dict[str, Any] = {
    "payload": "body",
    "group": "grp",
    "priority": "prio",
    "partition_key": "lane",
    "retry_after": "due",
    "attempt": "tries",
    "processed_at": "done",
    "locked_until": "lease",
    "headers": "heads",
}
COLUMNS = ("id", *FULL.values())


def minimal(name: str = "jobs", group: str | None = None, attempt: str | None = None) -> Table[bytes]:
    return Table(name, id="id", payload="body", locked_until="lease", group=group, attempt=attempt)


# --- the table


def test_a_column_plays_one_role() -> None:
    """S-1.1: each role has one column, and a column in two roles is refused, naming both."""
    with pytest.raises(ValueError, match="'id' of 'jobs' plays two roles, id and payload"):
        Table("jobs", id="id", payload="id")


@pytest.mark.parametrize("name", ["", "a.b.c", ".jobs", "jobs.", "a..b", "jo\0bs"])
def test_a_table_has_one_or_two_parts(name: str) -> None:
    """S-1.5: "schema.table" is understood, anything longer or empty is refused with the legal form."""
    with pytest.raises(ValueError, match=r"'table' or 'schema\.table'"):
        Table(name, id="id")


def test_an_empty_column_name_is_refused() -> None:
    """S-1.2: a role without a column is None, never an empty name."""
    with pytest.raises(ValueError, match="headers must be a column name of 1 character or more"):
        Table("jobs", id="id", headers="")
    with pytest.raises(ValueError, match="id must be a column name"):
        Table("jobs", id=None)  # type: ignore[call-overload]


def test_a_generated_column_plays_a_role() -> None:
    """S-1.3: what is left out of inserts is one of the table's columns."""
    assert Table("jobs", id="id", payload="body", generated=["id"]).generated == {"id"}
    with pytest.raises(ValueError, match=r"generated must name columns that play a role in 'jobs', not \['other'\]"):
        Table("jobs", id="id", generated=["other"])


def test_a_table_is_a_value() -> None:
    """A table that is described twice is one; a copy under another name keeps the roles."""
    assert minimal() == minimal()
    assert minimal().renamed("dead") == minimal("dead")


# --- the texts (K-98)


def test_the_claim_of_a_full_table() -> None:
    """S-2.1, S-2.2: the picked rows by all predicates, in the order of what is not NULL; each leased by its id."""
    texts = SqliteStatements(Table("jobs", id="id", **FULL), COLUMNS, {"lease", "done"})
    assert texts.claim == (
        "SELECT `id`, COALESCE(`tries`, 1) + 1, `body`, `heads`, `lane` FROM `jobs` "
        "WHERE `grp` = :group AND `due` <= :due AND `done` IS NULL "
        "AND (`lease` IS NULL OR `lease` <= :now) ORDER BY `prio`, `due`, `id` LIMIT :room"
    )
    assert texts.take == "UPDATE OR ABORT `jobs` SET `lease` = :expiry, `tries` = :attempt WHERE `id` = :id"


def test_a_nullable_column_does_not_order() -> None:
    """DESIGN 6: NULL retry_after means due, and a nullable column leaves the ORDER BY."""
    text = SqliteStatements(Table("jobs", id="id", **FULL), COLUMNS, {"lease", "done", "due", "prio", "id"}).claim
    assert "(`due` IS NULL OR `due` <= :due)" in text
    assert "AND `id` IS NOT NULL ORDER BY `id` LIMIT" in text


def test_the_claim_of_a_minimal_table() -> None:
    """S-2.1: a part of the predicate stands only where its column exists."""
    texts = SqliteStatements(minimal(), ("id", "body", "lease"), {"lease"})
    assert texts.claim == (
        "SELECT `id`, NULL, `body`, NULL, NULL FROM `jobs` "
        "WHERE (`lease` IS NULL OR `lease` <= :now) ORDER BY `id` LIMIT :room"
    )
    assert texts.take == "UPDATE OR ABORT `jobs` SET `lease` = :expiry WHERE `id` = :id"


def test_row_mode_selects_every_column() -> None:
    """S-1.2: without a payload the whole row is the message."""
    table = Table("jobs", id="id", locked_until="lease", attempt="tries")
    text = SqliteStatements(table, ("id", "a", "lease", "tries"), {"lease"}).claim
    assert text.startswith("SELECT `id`, COALESCE(`tries`, 1) + 1, NULL, NULL, NULL, `id`, `a`, `lease`, `tries` FROM")


UPDATE = "UPDATE OR ABORT `jobs` SET"
MINE = "WHERE `id` = :id AND `lease` = :token AND `tries` = :attempt"


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ("finish", f"{UPDATE} `lease` = NULL, `done` = :finished {MINE}"),
        ("release", f"{UPDATE} `lease` = NULL {MINE}"),
        ("give_back", f"{UPDATE} `lease` = NULL, `tries` = `tries` - 1 {MINE}"),
        ("delay", f"{UPDATE} `lease` = NULL, `due` = :due {MINE}"),
        ("regroup", f"{UPDATE} `lease` = NULL, `grp` = :to {MINE}"),
        ("extend", f"{UPDATE} `lease` = :expiry {MINE}"),
        ("delete", f"DELETE FROM `jobs` {MINE}"),
        ("holds", f"SELECT 1 FROM `jobs` {MINE}"),
    ],
)
def test_every_settlement_carries_the_token(event: str, text: str) -> None:
    """S-3.2, S-19.4 to S-19.7: by id, by the lease's expiry and by the attempt."""
    assert getattr(SqliteStatements(Table("jobs", id="id", **FULL), COLUMNS, {"lease"}), event) == text


def test_without_processed_at_finish_deletes() -> None:
    """S-19.4: no attempt column, no attempt in the token."""
    texts = SqliteStatements(minimal(), ("id", "body", "lease"), {"lease"})
    assert texts.finish == "DELETE FROM `jobs` WHERE `id` = :id AND `lease` = :token"
    assert texts.give_back == f"{UPDATE} `lease` = NULL WHERE `id` = :id AND `lease` = :token"
    assert (texts.delay, texts.regroup) == ("", "")


def test_the_copy_names_its_columns_and_has_an_empty_lease() -> None:
    """S-3.10, S-19.6: insert-select by name, guarded by the token, the lease written NULL."""
    texts = SqliteStatements(minimal("main.jobs"), ("id", "body", "LEASE"), {"lease"})
    assert texts.copy("dead", ("id", "body", "LEASE")) == (
        "INSERT OR ABORT INTO `dead` (`id`, `body`, `LEASE`) SELECT `id`, `body`, NULL FROM `main`.`jobs` "
        "WHERE `id` = :id AND `lease` = :token"
    )


def test_insert() -> None:
    """S-19.9: columns by name, values bound; once: nothing where the id is there."""
    assert insert("jobs", ["a", "b"]) == "INSERT OR ABORT INTO `jobs` (`a`, `b`) VALUES (:v0, :v1)"
    assert insert("jobs", ["a"], once="id").endswith("VALUES (:v0) ON CONFLICT (`id`) DO NOTHING")
    assert insert("jobs", []) == "INSERT OR ABORT INTO `jobs` DEFAULT VALUES"


def test_quotes_are_quoted() -> None:
    """S-19.10: backticks around each identifier, doubled within: SQLite never takes such a name for a text."""
    assert quote("a`b") == "`a``b`"
    assert quote_table("my`schema.select") == "`my``schema`.`select`"


# --- headers and rows


def test_headers_come_back_byte_for_byte() -> None:
    """Twenty-four headers, an empty value, text, and bytes that are no UTF-8."""
    headers = {f"h{number}": bytes([number, 255 - number]) for number in range(21)}
    headers |= {"empty": b"", "text": "ünï".encode(), '"quoted"': b"\x00\n"}
    assert len(headers) == 24
    assert load(dump(headers)) == headers


def test_headers_of_others_are_read_leniently() -> None:
    """NULL is none; a value that is no text is kept as its JSON."""
    assert load(None) == load("") == {}
    assert load('{"n": 1, "o": {"a": []}, "z": null}') == {"n": b"1", "o": b'{"a": []}', "z": b"null"}
    assert load(b'{"a": "b"}') == {"a": b"b"}


@pytest.mark.parametrize("column", ["[]", "no json", '{"a": {"base64": "?"}}', b"\xff", "3"])
def test_headers_that_are_none(column: str | bytes) -> None:
    """S-4.9: whatever is no JSON object of headers is a `ValueError`, which makes the delivery unreadable."""
    with pytest.raises(ValueError, match=r"."):
        load(column)


def test_a_row_is_a_json_object() -> None:
    """Row mode: the body of a delivery can be published again as a row."""
    row = {"id": 1, "x": 0.5, "s": "ä", "raw": b"\xff", "none": None}
    assert json.loads(dump_row(row))["raw"] == {"base64": "/w=="}
    assert load_row(dump_row(row)) == row
    for body in (b"[]", b'{"a": []}', b"\xff"):
        with pytest.raises(ValueError, match=r"."):
            load_row(body)


# --- times


def test_times_by_declared_type() -> None:
    """DESIGN 6: REAL Unix seconds, INTEGER Unix microseconds, TEXT ISO 8601 in UTC with six decimals."""
    moment = 1_796_000_000_000_001
    assert ENCODERS["REAL"](moment) == 1796000000.000001
    assert ENCODERS["INTEGER"](moment) == moment
    assert ENCODERS["TEXT"](moment) == "2026-11-30T00:53:20.000001Z"
    assert ENCODERS["TEXT"](1_796_000_000_000_000) == "2026-11-30T00:53:20.000000Z"


@pytest.mark.parametrize("times", ENCODERS)
def test_two_microseconds_differ(times: str) -> None:
    """Tokens of successive claims differ in each type, and compare in the order of time."""
    moment = 1_796_000_000_123_456
    encode: Any = ENCODERS[times]
    assert encode(moment) < encode(moment + 1) < encode(moment + 2)


def test_a_delay_is_never_early_and_never_overflows() -> None:
    """Microseconds are rounded up; what lies beyond year 9999 is cut to it."""
    assert later(10, 0.0000001) == 11
    assert later(10, 0) == 10
    assert later(10, 1e300) == LAST
    assert ENCODERS["TEXT"](LAST) == "9999-12-31T23:59:59.999999Z"


# --- brokers and queues, before any I/O


@pytest.mark.parametrize(
    "url",
    [
        "",
        "orders.db",
        "sqlite:orders.db",
        "sqlite://",
        "sqlite:///",
        "sqlite://host/orders.db",
        "sqlite:///:memory:",
        "sqlite:///orders/",
        "sqlite:///orders.db?mode=ro",
        "oracle://user:secret@host/db",
    ],
)
def test_a_url_that_names_no_file_is_refused(url: str) -> None:
    """S-12.5: the error names the legal forms and shows no credential."""
    with pytest.raises(ValueError, match=r"sqlite:///relative/path\.db") as caught:
        SqlBroker(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("interval", [0, -1, float("nan"), float("inf")])
def test_a_poll_interval_is_above_zero(interval: float) -> None:
    with pytest.raises(ValueError, match="poll_interval must be"):
        SqlBroker("sqlite:///orders.db", poll_interval=interval)
    with pytest.raises(ValueError, match="poll_interval must be"):
        SqlBroker("sqlite:///orders.db").queue(minimal(), poll_interval=interval)


def test_construction_does_no_io() -> None:
    """C-9.1: a broker, a queue and a publisher of a file that does not exist."""
    broker = SqlBroker("sqlite:////nowhere/at/all.db")
    queue = broker.queue(minimal())
    publisher = broker.publisher("jobs")
    assert repr(broker) == "<SqlBroker sqlite:////nowhere/at/all.db>"
    assert repr(queue) == "<SqlQueue 'jobs' on sqlite:////nowhere/at/all.db>"
    assert repr(publisher) == "<SqlPublisher to 'jobs' on sqlite:////nowhere/at/all.db>"
    assert (queue.name, queue.lease, list(queue.brokers())) == ("jobs", 30.0, [broker])


def test_sqlite_has_no_row_locks() -> None:
    """S-1.4: it locks the whole file."""
    with pytest.raises(ValueError, match=r"Lease\(seconds\) or AdvisoryLock.*SQLite locks the whole file"):
        SqlBroker("sqlite:///jobs.db").queue(minimal(), claim=RowLock())


def test_an_advisory_lock_is_for_a_table_without_leases() -> None:
    """S-1.4: as on PostgreSQL."""
    broker = SqlBroker("sqlite:///jobs.db")
    with pytest.raises(ValueError, match=r"claim must be Lease\(seconds\), not AdvisoryLock.*may be leased by others"):
        broker.queue(minimal(), claim=AdvisoryLock("job-{id}"))
    assert broker.queue(Table("jobs", id="id"), claim=AdvisoryLock("job-{id}")).lease is None


def test_the_lease_form_needs_its_column() -> None:
    """S-1.2: locked_until is required in the lease form."""
    with pytest.raises(ValueError, match=r"must have a locked_until column for Lease\(…\)"):
        SqlBroker("sqlite:///jobs.db").queue(Table("jobs", id="id"), claim=Lease(5.0))


def test_the_columns_say_the_form() -> None:
    """S-1.4: claim=None is the lease form where there is a locked_until, else the row lock, which SQLite has not."""
    broker = SqlBroker("sqlite:///jobs.db")
    assert broker.queue(minimal(), claim=None).lease == 30.0
    with pytest.raises(ValueError, match=r"locked_until column, and 'jobs' has none: so its form is RowLock\(\)"):
        broker.queue(Table("jobs", id="id"))


def test_a_group_is_given_where_the_table_has_groups() -> None:
    """S-1.2: and only there; it names the queue."""
    broker = SqlBroker("sqlite:///jobs.db")
    grouped = minimal(group="grp")
    assert broker.queue(grouped, group="mail").name == "mail"
    with pytest.raises(ValueError, match="'jobs' has no group column"):
        broker.queue(minimal(), group="mail")
    with pytest.raises(ValueError, match="'jobs' has groups"):
        broker.queue(grouped)
    with pytest.raises(ValueError, match="'jobs' has groups"):
        broker.publisher(grouped)


def test_the_limit_is_one_row_for_each_handler() -> None:
    """DESIGN 3.1: concurrency × size, or as given."""
    broker = SqlBroker("sqlite:///jobs.db")
    assert broker.queue(minimal()).limit(8, 5) == 40
    assert broker.queue(minimal(), limit=7).limit(8) == 7
    with pytest.raises(ValueError, match="limit must be"):
        broker.queue(minimal(), limit=0)


def test_half_a_cap_is_refused() -> None:
    """S-4.4: a cap needs a dead letter and an attempt column, and the dead letter is another queue."""
    queue = SqlBroker("sqlite:///jobs.db").queue(minimal(attempt="tries"))
    queue.check(Policy(max_attempts=3, dead_letter="dead"))
    with pytest.raises(ValueError, match="max_attempts"):
        queue.check(Policy(max_attempts=3))
    with pytest.raises(ValueError, match=r"'table' or 'schema\.table'"):
        queue.check(Policy(max_attempts=3, dead_letter="a.b.c"))
    for itself in ("jobs", "Jobs", "main.jobs"):  # one table in the file
        with pytest.raises(ValueError, match="another queue than 'jobs'"):
            queue.check(Policy(max_attempts=3, dead_letter=itself))
    groups = SqlBroker("sqlite:///jobs.db").queue(minimal(group="grp", attempt="tries"), group="mail")
    groups.check(Policy(max_attempts=3, dead_letter="Mail"))  # names of groups are values
    with pytest.raises(ValueError, match="another queue than 'mail'"):
        groups.check(Policy(max_attempts=3, dead_letter="mail"))
    with pytest.raises(ValueError, match="no attempt column"):
        SqlBroker("sqlite:///jobs.db").queue(minimal()).check(Policy(max_attempts=3, dead_letter="dead"))


def test_a_name_without_a_route_is_refused() -> None:
    """S-11.2: the error says what is known here; a table that is made known by `table` is."""
    broker = SqlBroker("sqlite:///jobs.db")
    with pytest.raises(ValueError, match=r"to must be a name with one route here .none yet., not 'jobs' with 0"):
        broker.publisher("jobs")
    broker.table(minimal())
    assert broker.publisher("jobs").name == "jobs"
    grouped = minimal("mails", group="grp")
    broker.queue(grouped, group="mail")
    assert broker.publisher("mail").name == "mail"
    with pytest.raises(ValueError, match=r"'jobs', 'mail'.*not 'other'"):
        broker.publisher("other")
    with pytest.raises(ValueError, match="must have no groups"):
        broker.table(grouped)
    broker.queue(grouped.renamed("letters"), group="mail")
    with pytest.raises(ValueError, match="not 'mail' with 2"):
        broker.publisher("mail")
