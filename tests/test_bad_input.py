"""What a user gets wrong: each is refused where it was written, by a text that names the argument and what is legal."""

from __future__ import annotations

import math
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from actors import BatchSubscription, HandlerFailed, Runtime, Subscription, open_runtime
from actors.testing import a_delivery, run_once
from links.errors import ConnectionBroken, LinkBroken, LinkRefused, PublishNotAccepted
from links.memory import MemoryBroker
from links.sql import (
    AdvisoryLock,
    Lease,
    RowLock,
    SqlBroker,
    Table,
    lease_link,
    patience,
    publisher,
    queue,
    thread_writer,
)
from settlement import Ack, Copies, DeadLetter, Delivery, Drop, Hold, Outcome, Policy, Retry, RetryAfter, Scheduled

SECRET = "hunter2"  # noqa: S105 -- shall be in no message


async def handler(delivery: Delivery[Any]) -> Outcome:
    return Ack()


async def batch_handler(deliveries: list[Delivery[Any]]) -> Outcome:
    return Ack()


def memory_queue(**options: Any) -> Any:
    return MemoryBroker().queue("orders", **options)


def subscription(**options: Any) -> Any:
    return Subscription(memory_queue(), handler, **options)


def batch(size: Any = 1, **options: Any) -> Any:
    return BatchSubscription(memory_queue(), batch_handler, size=size, **options)


def runtime(**options: Any) -> Any:
    return Runtime(subscription(), **options)


def policy(**options: Any) -> Any:
    return Policy(**options)


def table(**options: Any) -> Table[Any]:
    columns: dict[str, Any] = {"id": "id", "payload": "body", "locked_until": "lease", "attempt": "attempt"}
    return Table("orders", **{**columns, **options})


def sql_broker(url: Any = "sqlite:///orders.db", **options: Any) -> SqlBroker:
    return SqlBroker(url, **options)


def sql_queue(described: Table[Any] | None = None, **options: Any) -> Any:
    return sql_broker().queue(described or table(), **options)


def sql_subscription(**options: Any) -> Any:
    return Subscription(sql_queue(), handler, policy=Policy(**options))


# --- at construction

COUNTS: list[tuple[Callable[[Any], object], str]] = [
    (lambda value: policy(max_attempts=value), "max_attempts"),
    (lambda value: subscription(concurrency=value), "concurrency"),
    (lambda value: batch(concurrency=value), "concurrency"),
    (lambda value: batch(size=value), "size"),
    (lambda value: memory_queue(limit=value), "limit"),
    (lambda value: sql_queue(limit=value), "limit"),
    (lambda value: Copies(max_waiting=value), "max_waiting"),
    (lambda value: Hold(max_held=value), "max_held"),
]


@pytest.mark.parametrize(("make", "name"), COUNTS, ids=[f"{number}-{name}" for number, (_, name) in enumerate(COUNTS)])
@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True, math.inf], ids=repr)
def test_a_count_is_a_whole_number_of_one_or_more(make: Callable[[Any], object], name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}.* must be a whole number, 1 or more, not ") as caught:
        make(value)
    assert str(caught.value).endswith(f"not {value!r}")


NO_SECONDS: list[object] = [math.nan, math.inf, -math.inf, "3", True, 10**400]


def short(value: object) -> str:
    return repr(value)[:9]


ABOVE_ZERO: list[tuple[Callable[[Any], object], str]] = [
    (lambda value: memory_queue(lease=value), "lease"),
    (Lease, r"Lease\(duration\)"),
    (lambda value: subscription(within=value), "within"),
    (lambda value: batch(within=value), "within"),
    (lambda value: runtime(goodbye=value), "goodbye"),
    (lambda value: Hold(1, max_delay=value), "max_delay"),
    (lambda value: sql_broker(poll_interval=value), "poll_interval"),
    (lambda value: sql_queue(poll_interval=value), "poll_interval"),
]
ZERO_OR_MORE: list[tuple[Callable[[Any], object], str]] = [
    (RetryAfter, r"RetryAfter\(delay\)"),
    (lambda value: batch(wait=value), "wait"),
    (lambda value: runtime(grace=value), "grace"),
]


@pytest.mark.parametrize(
    ("make", "name"), ABOVE_ZERO, ids=[f"{number}-{name}" for number, (_, name) in enumerate(ABOVE_ZERO)]
)
@pytest.mark.parametrize("value", [0, -1.0, *NO_SECONDS], ids=short)
def test_a_duration_is_finite_and_above_zero(make: Callable[[Any], object], name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}.* must be a finite number of seconds above 0, not "):
        make(value)


@pytest.mark.parametrize(
    ("make", "name"), ZERO_OR_MORE, ids=[f"{number}-{name}" for number, (_, name) in enumerate(ZERO_OR_MORE)]
)
@pytest.mark.parametrize("value", [-0.001, *NO_SECONDS], ids=short)
def test_a_delay_is_finite_and_not_negative(make: Callable[[Any], object], name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}.* must be a finite number of seconds, 0 or more, not "):
        make(value)
    make(0)


@pytest.mark.parametrize(
    ("make", "fragments"),
    [
        # an empty name
        (lambda: MemoryBroker().queue(""), ["name must be 1 character or more"]),
        (lambda: MemoryBroker().publisher(""), ["name must be 1 character or more"]),
        (lambda: subscription(name=""), ["name must be a text of 1 character or more"]),
        (lambda: batch(name=""), ["name must be a text of 1 character or more"]),
        (lambda: policy(dead_letter=""), ["dead_letter must be a name of 1 character or more"]),
        (lambda: Table("", id="id"), ["a table must be 'table' or 'schema.table'", "1 character or more"]),
        (lambda: table(id=""), ["id must be a column name of 1 character or more"]),
        (lambda: table(locked_until=""), ["locked_until must be a column name of 1 character or more"]),
        (lambda: sql_queue(table(group="shop"), group=""), ["group must be", "1 character or more"]),
        (lambda: AdvisoryLock(""), ["AdvisoryLock(key) must be a template of 1 character or more"]),
        (lambda: Scheduled(""), ["Scheduled(annotation) must be a name of 1 character or more"]),
        (
            lambda: sql_broker().publisher(""),
            ["to must be a name with one route here", "not ''", "broker.table(table)"],
        ),
        # a URL
        (lambda: sql_broker(f"oracle://scott:{SECRET}@host/db"), ["url must be", "sqlite:///", "scheme 'oracle'"]),
        (lambda: sql_broker(f"scott:{SECRET}@host/db"), ["url must be", "sqlite:///", "without a scheme"]),
        (lambda: sql_broker(f"sqlite://scott:{SECRET}@host/db"), ["url must be", "no host"]),
        (lambda: sql_broker("sqlite:///"), ["url must be", "names no file"]),
        (lambda: sql_broker("sqlite:///:memory:"), ["url must be", "memory"]),
        (lambda: sql_broker(f"sqlite:///a.db?key={SECRET}"), ["url must be", "without options"]),
        (lambda: sql_broker(None), ["url must be", "sqlite:///"]),
        # half a cap where both halves are needed
        (lambda: sql_subscription(max_attempts=3), ["dead_letter must be a name", "max_attempts=3", "both or neither"]),
        (lambda: sql_subscription(dead_letter="dead"), ["max_attempts must be a whole number, 1 or more", "'dead'"]),
        (
            lambda: Subscription(
                sql_queue(table(attempt=None)), handler, policy=Policy(max_attempts=3, dead_letter="dead")
            ),
            ["max_attempts must be None, not 3", "no attempt column"],
        ),
        (
            lambda: sql_subscription(max_attempts=3, dead_letter="orders"),
            ["dead_letter must be another queue than 'orders'"],
        ),
        # a form that the database has not
        (lambda: sql_queue(claim=RowLock()), ["claim must be Lease(seconds) or AdvisoryLock(key), not RowLock("]),
        (lambda: sql_queue(claim=AdvisoryLock("order-{id}")), ["claim must be Lease(seconds)"]),
        (lambda: sql_queue(table(locked_until=None)), ["locked_until", "'orders' has none"]),
        (lambda: sql_queue(group="shop"), ["group must be None", "'shop'"]),
        (lambda: sql_queue(table(group="shop")), ["group must be"]),
        (lambda: table(attempt="body"), ["'body'", "plays two roles", "payload", "attempt"]),
        (lambda: memory_queue(delays=Hold(1)), ["delays must be Native() or Copies(...)", "Hold"]),
        # a policy
        (lambda: policy(on_error="retry"), ["on_error must be Ack, Retry, RetryAfter, Drop", "'retry'"]),
        (lambda: policy(on_error=Retry), ["on_error must be", "Retry"]),
        (lambda: policy(on_undecodable=Drop), ["on_undecodable must be", "Drop"]),
        (lambda: policy(on_error=DeadLetter()), ["on_error is DeadLetter()", "dead_letter must name one"]),
        (lambda: policy(failures={ValueError: 1}), ["failures[ValueError] must be", "not 1"]),
        (lambda: policy(failures={"ValueError": Drop()}), ["a key of failures must be a class of exceptions"]),
        (lambda: policy(failures={KeyboardInterrupt: Drop()}), ["a key of failures must be a class of exceptions"]),
        (lambda: policy(dead_letter=5), ["dead_letter must be a name or a publisher, not 5"]),
        # a runtime
        (Runtime, ["1 subscription or more"]),
        (lambda: Runtime(subscription(), subscription()), ["two subscriptions are named 'orders'", "name="]),
    ],
)
def test_a_mistake_is_a_value_error_that_says_what_is_legal(make: Callable[[], object], fragments: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(fragments[0])) as caught:
        make()
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert SECRET not in f"{caught.value!r} {caught.value.__cause__!r} {caught.value.__context__!r}"


# --- a handler that returns something that is no outcome

NO_OUTCOMES = ["ack", 1, True, Ack, [Ack()], DeadLetter(), Exception("returned, not raised")]


@pytest.mark.memory
@pytest.mark.parametrize("result", NO_OUTCOMES, ids=repr)
async def test_what_is_no_outcome_is_a_type_error_answered_by_the_policy(
    result: Any, autojump_clock: trio.testing.MockClock
) -> None:
    """`failures` answer it as they answer any exception; the text names what came and what may come."""
    broker, errors = MemoryBroker(), list[Exception]()

    def answer(delivery: Delivery[Any], error: Exception) -> Drop:
        errors.append(error)
        return Drop()

    async def wrong(delivery: Delivery[bytes]) -> Any:
        return result

    broker.fill("orders", [b"1"])
    mistaken = Subscription(broker.queue("orders"), wrong, policy=Policy(failures={TypeError: answer}))
    async with open_runtime(mistaken) as run:
        await broker.until_empty("orders")
    assert run.ledger("orders").dropped == 1
    (error,) = errors
    assert (
        str(error) == f"orders: a handler must return Ack(), Retry(), RetryAfter(delay), Drop() or None, not {result!r}"
    )


@pytest.mark.memory
async def test_what_is_no_outcome_fails_fast_by_default(autojump_clock: trio.testing.MockClock) -> None:
    """Without a cap or an answer the runtime ends, with the delivery unsettled: it is there for the next one."""
    broker = MemoryBroker()

    async def wrong(delivery: Delivery[bytes]) -> Any:
        return "ack"

    broker.fill("orders", [b"1"])
    with pytest.raises(ExceptionGroup) as caught:
        async with open_runtime(Subscription(broker.queue("orders"), wrong)):
            await trio.sleep_forever()
    (failed,) = caught.value.exceptions
    assert isinstance(failed, HandlerFailed)
    assert isinstance(failed.__cause__, TypeError)
    assert "not 'ack'" in str(failed.__cause__)
    assert [letter.body for letter in broker.ready("orders")] == [b"1"]


@pytest.mark.memory
async def test_a_batch_answers_for_the_element_that_got_no_outcome(autojump_clock: trio.testing.MockClock) -> None:
    broker = MemoryBroker()

    async def wrong(deliveries: list[Delivery[bytes]]) -> Any:
        return [Ack() if delivery.body == b"1" else "ack" for delivery in deliveries]

    broker.fill("orders", [b"1", b"2"])
    mistaken = BatchSubscription(broker.queue("orders"), wrong, size=2, policy=Policy(on_error=Drop()))
    async with open_runtime(mistaken) as run:
        await broker.until_empty("orders")
    assert (run.ledger("orders").acked, run.ledger("orders").dropped) == (1, 1)


async def test_run_once_says_the_same() -> None:
    async def wrong(delivery: Delivery[bytes]) -> Any:
        return "ack"

    with pytest.raises(
        TypeError,
        match=r"wrong: a handler must return Ack.*, not 'ack'",
    ):
        await run_once(wrong, a_delivery(b""))


# --- a database that is not as described

COLUMNS = {
    "id": "INTEGER PRIMARY KEY",
    "body": "BLOB",
    "lease": "REAL",
    "due": "REAL NOT NULL DEFAULT 0",
    "done": "REAL",
    "attempt": "INTEGER NOT NULL DEFAULT 1",
    "headers": "TEXT",
    "lane": "TEXT",
    "rank": "INTEGER NOT NULL DEFAULT 0",
    "shop": "TEXT",
}
FULL = table(
    retry_after="due", processed_at="done", headers="headers", partition_key="lane", priority="rank", group="shop"
)


def database(path: Path, without: str | None = None, **types: str) -> Path:
    columns = {**COLUMNS, **types}
    definition = ", ".join(f"{name} {kind}" for name, kind in columns.items() if name != without)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"CREATE TABLE orders ({definition})")
        connection.execute("PRAGMA journal_mode=WAL")
    return path


async def refused(path: Path, described: Table[Any], group: str | None = None) -> str:
    """What `open_runtime` says."""
    source = SqlBroker(f"sqlite:///{path}").queue(described, group=group)
    with pytest.raises(LinkRefused) as caught:
        async with open_runtime(Subscription(source, handler, name="billing")):
            raise AssertionError("it started")
    return str(caught.value)


@pytest.mark.sqlite
@pytest.mark.parametrize("column", [column for column in COLUMNS if column != "id"])
async def test_a_missing_column_is_refused_at_start_up(column: str, tmp_path: Path) -> None:
    """Bare out of `open_runtime`, naming subscription, table, column, role, and what to do."""
    said = await refused(database(tmp_path / "shop.db", without=column), FULL, "books")
    role = next(role for role, mapped in FULL.roles.items() if mapped == column)
    for fragment in ("'billing'", "'orders'", repr(column), f"role {role}", "add the column"):
        assert fragment in said


@pytest.mark.sqlite
async def test_a_missing_table_is_refused_at_start_up(tmp_path: Path) -> None:
    path = database(tmp_path / "shop.db")
    said = await refused(path, Table("invoices", id="id", payload="body", locked_until="lease"))
    for fragment in ("'billing'", "'invoices'", "no such table"):
        assert fragment in said


@pytest.mark.sqlite
@pytest.mark.parametrize(
    ("types", "fragments"),
    [
        ({"lease": "DATETIME"}, ["'lease'", "locked_until", "DATETIME", "REAL", "INTEGER", "TEXT"]),
        ({"due": "BLOB"}, ["'due'", "retry_after", "BLOB"]),
        ({"lease": "REAL NOT NULL DEFAULT 0"}, ["'lease'", "NOT NULL", "NULL is what a free row holds"]),
        ({"id": "INTEGER"}, ["'id'", "PRIMARY KEY or UNIQUE"]),
    ],
)
async def test_a_column_of_no_use_is_refused_at_start_up(
    types: dict[str, str], fragments: list[str], tmp_path: Path
) -> None:
    said = await refused(database(tmp_path / "shop.db", **types), FULL, "books")
    for fragment in ("'billing'", "'orders'", *fragments):
        assert fragment in said


@pytest.mark.sqlite
async def test_two_refusals_leave_together(tmp_path: Path) -> None:
    """Each names its own subscription; no delivery is taken by the one that could have started."""
    broker = SqlBroker(f"sqlite:///{database(tmp_path / 'shop.db', without='body')}")
    other = SqlBroker(f"sqlite:///{tmp_path / 'missing.db'}")
    memory = MemoryBroker()
    memory.fill("orders", [b"1"])
    with pytest.raises(ExceptionGroup) as caught:
        async with open_runtime(
            Subscription(broker.queue(table()), handler, name="billing"),
            Subscription(other.queue(table()), handler, name="shipping"),
            Subscription(memory.queue("orders"), handler, name="fine"),
        ):
            raise AssertionError("it started")
    billing, shipping = sorted(map(str, caught.value.exceptions), key=lambda text: "missing.db" in text)
    assert all(type(error) is LinkRefused for error in caught.value.exceptions)
    assert "'billing'" in billing
    assert "missing.db" in shipping
    assert len(memory.ready("orders")) == 1


@pytest.mark.sqlite
@pytest.mark.parametrize(
    ("content", "fragments"),
    [
        (b"this is no database, but a text of more than a hundred bytes" * 3, ["no SQLite database", "backup"]),
        (None, ["No such file", "create the database"]),
    ],
    ids=["corrupt", "missing"],
)
async def test_a_file_that_is_no_database_is_refused(
    content: bytes | None, fragments: list[str], tmp_path: Path
) -> None:
    """The error names the file, and the file is left as it was."""
    path = tmp_path / "shop.db"
    if content is not None:
        path.write_bytes(content)
    said = await refused(path, table())
    for fragment in ("shop.db", *fragments):
        assert fragment in said
    assert (path.read_bytes() if content is not None else None) == content
    assert path.exists() == (content is not None)


@pytest.mark.sqlite
async def test_a_database_that_is_damaged_in_use_is_a_clear_error(tmp_path: Path) -> None:
    """Its pages overwritten, `publish` confirms nothing, and the connection ends with an error that names the file."""
    path = database(tmp_path / "shop.db")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany("INSERT INTO orders (body) VALUES (?)", [(b"x" * 500,)] * 100)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    broker = SqlBroker(f"sqlite:///{path}")

    async def publish() -> None:
        async with broker.connect():
            with pytest.raises(LinkBroken, match=r"'orders': .*shop\.db: .*malformed.*; the row may be there or not"):
                await broker.publisher(table()).publish(b"lost?")
            await trio.sleep_forever()

    with pytest.raises(ConnectionBroken, match=r"shop\.db: .*malformed"):
        await publish()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A locked file is waited for 0.3 s, not 10."""
    for module in (thread_writer, queue, lease_link, patience, publisher):
        monkeypatch.setattr(module, "PATIENCE", 0.3)


@pytest.mark.sqlite
async def test_a_locked_database_is_waited_for_and_nothing_is_lost(impatient: None, tmp_path: Path) -> None:
    """While another process holds the lock `publish` is refused by a text that says so, and stores nothing; the runtime
    lives on and handles what is there when the lock is gone.
    """
    path = database(tmp_path / "shop.db")
    broker = SqlBroker(f"sqlite:///{path}", poll_interval=0.05)
    handled, came = list[bytes](), trio.Event()

    async def handle(delivery: Delivery[bytes]) -> None:
        handled.append(delivery.body)
        came.set()

    source = broker.queue(table())
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        async with open_runtime(Subscription(source, handle)) as run:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(PublishNotAccepted, match="held the lock of the file for") as caught:
                await broker.publisher(table()).publish(b"refused")
            assert "shop.db" in str(caught.value)
            other.execute("INSERT INTO orders (body) VALUES (?)", (b"theirs",))
            other.execute("COMMIT")
            with trio.fail_after(20):
                await came.wait()
        assert run.ledger("orders").balanced
    assert handled == [b"theirs"]


@pytest.mark.sqlite
async def test_a_database_that_is_locked_at_start_up_is_weather(impatient: None, tmp_path: Path) -> None:
    """Start-up waits as long as it takes, also where the lock outlasts several attempts to attach."""
    path = database(tmp_path / "shop.db")
    broker = SqlBroker(f"sqlite:///{path}", poll_interval=0.05)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")

        async def release() -> None:
            await trio.sleep(0.8)
            other.execute("COMMIT")

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(release)
                async with open_runtime(Subscription(broker.queue(table()), handler)):
                    pass


@pytest.mark.sqlite
async def test_a_lock_between_two_attaches_is_weather(impatient: None, tmp_path: Path) -> None:
    """A file that is locked while a link attaches breaks that attempt, not the runtime: the next one attaches."""
    path = database(tmp_path / "shop.db")
    broker = SqlBroker(f"sqlite:///{path}", poll_interval=0.05)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        async with broker.connect():
            other.execute("BEGIN IMMEDIATE")

            async def release() -> None:
                await trio.sleep(0.8)
                other.execute("COMMIT")

            with trio.fail_after(20):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(release)
                    async with open_runtime(Subscription(broker.queue(table()), handler)) as run:
                        assert run.statistics()["orders"].restarts >= 1
