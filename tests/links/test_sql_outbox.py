"""The outbox: recorded first, and sent then; its consumer marks what it has finished with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import sqlalchemy
import trio

from actors import Subscription, open_runtime
from links.errors import NotConnected, PublishNotAccepted
from links.memory import MemoryBroker
from links.sql import OUTBOX_ID, Outbox, OutboxTable, transaction
from settlement import Ack, DeadLetter, Delivery, Drop, Outcome, Policy, Retry, RetryAfter
from settlement.delivery import Letter
from settlement.ledger import Ended, Line
from tests.links.outbox_kit import BOTH, RECORDS, RecordTables, Sent, a_delivery, answering, made
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import until


@pytest.fixture(params=BOTH)
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> RecordTables:
    return made(request.param, tmp_path, request).create()


# --- publishing -----------------------------------------------------------------------------------------------------


async def test_the_record_comes_first_and_the_message_carries_its_id(tables: RecordTables) -> None:
    """S-14.2: body, headers and key as they came, and the header."""
    outbox, to = tables.outbox(), Sent()
    orders = outbox.register("orders", to)
    async with outbox.broker.connect():
        await orders.publish(b"a", {"x": b"\xff"}, key="lane 1")
        await orders.publish(b"b")

    assert tables.rows() == [(1, "orders", b"a", False), (2, "orders", b"b", False)]
    (a, b) = to.letters
    assert (a.body, dict(a.headers), a.key) == (b"a", {"x": b"\xff", "x-ruststream-outbox-id": b"1"}, "lane 1")
    assert (b.body, dict(b.headers), b.key) == (b"b", {"x-ruststream-outbox-id": b"2"}, None)


async def test_a_record_that_is_not_written_is_not_sent(tables: RecordTables) -> None:
    """S-14.2: a delay has no column; a CHECK refuses; a table is not there."""
    outbox, to = tables.outbox(), Sent()
    orders = outbox.register("orders", to)
    async with outbox.broker.connect():
        with pytest.raises(PublishNotAccepted, match=r"cannot hold .*retry_after|cannot hold a delay"):
            await orders.send(Letter(b"a", deliver_after=1.0))
        with pytest.raises(PublishNotAccepted, match="a body is bytes"):
            await orders.publish("text")  # type: ignore[arg-type]
        tables.run("ALTER TABLE outbox RENAME COLUMN payload TO other")
        with pytest.raises(PublishNotAccepted, match="payload"):
            await orders.publish(b"a")
        tables.run("DROP TABLE outbox")
        with pytest.raises(PublishNotAccepted, match="no table"):
            await orders.publish(b"a")
    assert to.letters == []


async def test_a_message_that_is_refused_keeps_its_record(tables: RecordTables) -> None:
    """The error is the publisher's own, with a note; republishing sends it."""
    outbox, to = tables.outbox(min_age=0), Sent()
    to.fail = lambda _: PublishNotAccepted("the queue is full")
    orders = outbox.register("orders", to)
    async with outbox.broker.connect():
        with pytest.raises(PublishNotAccepted, match="the queue is full") as raised:
            await orders.publish(b"a")
        assert raised.value.__notes__ == ["record 1 of the outbox stays, and is sent when it is republished"]
        to.fail = lambda _: None
        assert await outbox.republish() == 1
    assert to.ids == [1]


async def test_nobody_has_opened_the_broker(tables: RecordTables) -> None:
    outbox, to = tables.outbox(), Sent()
    orders = outbox.register("orders", to)
    for call in (lambda: orders.publish(b"a"), outbox.republish, lambda: outbox.send(1)):
        with pytest.raises(NotConnected):
            await call()
    assert to.letters == []


# --- in the user's own transaction ----------------------------------------------------------------------------------


async def test_recorded_in_the_users_own_transaction(tables: RecordTables) -> None:
    """What is rolled back is not sent; what is committed is, by its id."""
    tables.run("CREATE TABLE shipments (number integer)")
    outbox, to = tables.outbox(), Sent()
    outbox.register("orders", to)
    with tables.connection() as connection:
        connection.cursor().execute("INSERT INTO shipments VALUES (1)")
        rolled_back = outbox.record(connection, "orders", b"never")
        connection.rollback()
    with tables.connection() as connection:
        connection.cursor().execute("INSERT INTO shipments VALUES (2)")
        key = outbox.record(connection, "orders", b"a", {"x": b"\xff"}, key="lane")
    assert tables.run("SELECT * FROM shipments") == [(2,)]

    async with outbox.broker.connect():
        assert await outbox.send(key + 100) is False
        if rolled_back != key:  # SQLite gives the number again
            assert await outbox.send(rolled_back) is False
        assert await outbox.send(key) is True
        tables.run("UPDATE outbox SET processed_at = sent_at")
        assert await outbox.send(key) is False
        for none in (True, "1", None, 1.0):
            with pytest.raises(ValueError, match="key must be the id of a record"):
                await outbox.send(none)  # type: ignore[arg-type]

    (letter,) = to.letters
    assert (letter.body, letter.key) == (b"a", "lane")
    assert dict(letter.headers) == {"x": b"\xff", OUTBOX_ID: str(key).encode()}


@pytest.mark.postgres
@pytest.mark.servers
async def test_recorded_by_an_asynchronous_connection(database: str) -> None:
    tables = RecordTables(database).create()
    outbox = tables.outbox()
    outbox.register("orders", Sent())
    from links.sql.postgres.trio_connection import TrioConnection  # noqa: PLC0415 -- psycopg's own needs asyncio

    connection = await TrioConnection.open(database)
    try:
        assert await outbox.record(connection, "orders", b"a") == 1
    finally:
        connection.finish()
    assert tables.rows() == [(1, "orders", b"a", False)]


@pytest.mark.postgres
@pytest.mark.servers
async def test_recorded_in_the_transaction_of_a_delivery(database: str) -> None:
    """A handler's own: the record is there with its `Ack`, and not after a `Retry`; then it is sent in a while."""
    queue_tables = PostgresTables(database).create()
    queue_tables.add(b"a")
    tables = RecordTables(database).create()
    broker = queue_tables.broker()
    outbox, to = Outbox(RECORDS, broker, min_age=0), Sent()
    outbox.register("orders", to)

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        async with transaction(delivery) as connection:
            await outbox.record(connection, "orders", str(delivery.attempt).encode())
        return Retry() if delivery.attempt == 1 else Ack()

    async with open_runtime(Subscription(broker.queue(queue_tables.table()), handler)) as runtime:
        await until(lambda: runtime.ledger("jobs").acked == 1)
        assert [payload for _, _, payload, _ in tables.rows()] == [b"2"]
        assert await outbox.republish() == 1
    assert to.bodies == [b"2"]


async def test_the_statement_for_another_driver(tables: RecordTables) -> None:
    """By SQLAlchemy, whose parameters begin with a colon; and the id that it gives."""
    outbox = tables.outbox()
    outbox.register("orders", Sent())
    statement, parameters = outbox.record_statement("orders", b"a", key="lane")
    driver = {"postgresql": "psycopg", "sqlite": "pysqlite"}.get(tables.url.partition(":")[0], "pymysql")
    engine = sqlalchemy.create_engine(tables.url.replace("://", f"+{driver}://", 1))
    try:
        with engine.begin() as connection:
            result = connection.execute(sqlalchemy.text(statement), parameters)
            key = result.lastrowid if tables.lite or tables.mysql else result.scalar_one()
    finally:
        engine.dispose()
    assert (key, tables.rows()) == (1, [(1, "orders", b"a", False)])


# --- consuming ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "marked"),
    [(Ack(), True), (None, True), (Drop("no"), True), (Retry(), False), (RetryAfter(1.0), False)],
    ids=str,
)
async def test_the_outcome_marks_the_record_or_leaves_it(
    tables: RecordTables, outcome: Outcome | None, marked: bool
) -> None:
    """S-14.3; and K-97: what is marked comes to no handler again."""
    outbox = tables.outbox()
    orders = outbox.register("orders", Sent())
    handler = answering(outcome)
    tracked = outbox.tracked(handler)
    async with outbox.broker.connect():
        await orders.publish(b"a")
        assert await tracked(a_delivery(1)) == outcome
        assert tables.rows() == [(1, "orders", b"a", marked)]
        assert await tracked(a_delivery(1)) == (Ack() if marked else outcome)
    assert len(handler.calls) == (1 if marked else 2)


async def test_without_processed_at_the_record_is_deleted(tables: RecordTables) -> None:
    """S-14.3. Who has no record is handled: it may be somebody else's, and nothing may be lost."""
    plain = OutboxTable("plain", id="id", name="name", payload="payload", sent_at="sent_at")
    tables.create(plain)
    outbox = tables.outbox(plain)
    orders = outbox.register("orders", Sent())
    handler = answering(Ack())
    async with outbox.broker.connect():
        await orders.publish(b"a")
        for _ in range(2):
            assert await outbox.tracked(handler)(a_delivery(1)) == Ack()
    assert tables.run("SELECT count(*) FROM plain") == [(0,)]
    assert len(handler.calls) == 2


@pytest.mark.parametrize(
    "key", [None, b"", b"one", b"1.0", b" 1", b"1\n", "١".encode(), b"9" * 19, b"9" * 40, b"\xff", 7], ids=repr
)
async def test_what_has_no_record_passes_untracked(tables: RecordTables, key: int | bytes | None) -> None:
    """S-14.6: without the header, with one that is no number, or that nobody wrote."""
    outbox = tables.outbox()
    orders = outbox.register("orders", Sent())
    handler = answering(Ack())
    async with outbox.broker.connect():
        await orders.publish(b"a")
        assert await outbox.tracked(handler)(a_delivery(key)) == Ack()
    assert (handler.calls, tables.rows()) == ([b"a"], [(1, "orders", b"a", False)])


async def test_another_name_is_another_record(tables: RecordTables) -> None:
    """S-14.6: the id of one name says nothing under another; one may be given beside the source's."""
    outbox = tables.outbox()
    orders = outbox.register("orders", Sent())
    handler = answering(Ack())
    async with outbox.broker.connect():
        await orders.publish(b"a")
        await outbox.tracked(handler)(a_delivery(1, "other"))  # not registered
        await outbox.tracked(handler, name="bills")(a_delivery(1, "other"))
        assert tables.rows() == [(1, "orders", b"a", False)]
        await outbox.tracked(handler, name="orders")(a_delivery(1, "another"))
    assert len(handler.calls) == 3
    assert tables.rows() == [(1, "orders", b"a", True)]


async def test_a_record_that_cannot_be_looked_up_is_retried(tables: RecordTables, caplog: Any) -> None:
    """S-14.4: without the handler."""
    outbox = tables.outbox()
    outbox.register("orders", Sent())
    handler = answering(Ack())
    tables.run("DROP TABLE outbox")
    async with outbox.broker.connect():
        assert await outbox.tracked(handler)(a_delivery(1)) == Retry()
    assert handler.calls == []
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("record 1 of 'orders', table 'outbox': not looked up, so it is retried: ")


async def test_a_record_that_cannot_be_marked_is_warned_of(tables: RecordTables, caplog: Any) -> None:
    """S-14.5: the outcome stays."""
    outbox = tables.outbox()
    orders = outbox.register("orders", Sent())

    async def handler(_: Delivery[bytes]) -> Outcome:
        await trio.to_thread.run_sync(tables.run, "ALTER TABLE outbox RENAME COLUMN processed_at TO p")
        return Drop()

    async with outbox.broker.connect():
        await orders.publish(b"a")
        assert await outbox.tracked(handler)(a_delivery(1)) == Drop()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("record 1 of 'orders', table 'outbox': not marked, so it may be sent again: ")


async def test_a_handler_that_swallows_its_cancellation_marks_nothing(tables: RecordTables) -> None:
    """It has answered nothing, so the message comes again, and must find a handler."""
    outbox = tables.outbox()
    orders = outbox.register("orders", Sent())

    async def handler(_: Delivery[bytes]) -> Outcome:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:  # noqa: ASYNC103 -- the mistake
            return Ack()  # noqa: ASYNC104

    async with outbox.broker.connect():
        await orders.publish(b"a")
        with trio.move_on_after(0.05) as scope:
            await outbox.tracked(handler)(a_delivery(1))
        assert scope.cancelled_caught
    assert tables.rows() == [(1, "orders", b"a", False)]


POLICIES: dict[str, tuple[Any, Policy, Line]] = {
    "at the cap": (Retry(), Policy(max_attempts=2, dead_letter="dead"), Line.DEAD_LETTERED),
    "at once": (ValueError(), Policy(dead_letter="dead", on_error=DeadLetter()), Line.DEAD_LETTERED),
    "by a function": (ValueError(), Policy(failures={ValueError: lambda _, __: Drop()}), Line.DROPPED),
    "acked": (ValueError(), Policy(on_error=Ack()), Line.ACKED),
}


@pytest.mark.parametrize("how", POLICIES)
async def test_what_a_policy_ends_is_marked_by_the_observer(tables: RecordTables, how: str) -> None:
    """A dead-lettered delivery marks its record, whoever decided it, and so does every other end without a retry."""
    answer, policy, line = POLICIES[how]
    outbox, memory = tables.outbox(), MemoryBroker()
    orders = outbox.register("orders", memory.publisher("orders"))
    handler = answering(answer)
    subscription = Subscription(memory.queue("orders"), outbox.tracked(handler), policy=policy)
    async with outbox.broker.connect(), open_runtime(subscription, observers=[outbox.observe]) as runtime:
        async with trio.open_nursery() as nursery:
            await nursery.start(outbox.run)
            await orders.publish(b"a")
            await until(lambda: tables.rows()[0][3] and not outbox._tracking._told)
            nursery.cancel_scope.cancel()
        assert getattr(runtime.ledger("orders"), line.name.lower()) == 1


async def test_what_is_observed_is_bounded_and_marked_once(tables: RecordTables, monkeypatch: Any, caplog: Any) -> None:
    """An ack that the wrapper has marked is not marked again; 10,000 wait at most; a retry is no end."""
    outbox = tables.outbox()
    orders = outbox.register("orders", Sent())
    monkeypatch.setattr("links.sql.tracking._REMEMBERED", 2)

    @attrs.frozen
    class Told:
        entry: Any
        deliveries: tuple[Delivery[Any], ...] = ()

    async with outbox.broker.connect():
        outbox.observe(Told(None))
        for body in (b"a", b"b", b"c", b"d"):
            await orders.publish(body)
        first = a_delivery(1)
        await outbox.tracked(answering(Ack()))(first)
        assert outbox._tracking._marked == {("orders", 1)}
        outbox.observe(Told(Ended(Line.ACKED), (first,)))
        assert (outbox._tracking._marked, outbox._tracking._told) == (set(), {})
        outbox.observe(Told(Ended(Line.RETRIED), (a_delivery(2),)))
        outbox.observe(Told(Ended(Line.DEAD_LETTERED, 3), tuple(map(a_delivery, (2, 3, 4)))))
        assert [record.getMessage() for record in caplog.records] == [
            "record 4 of 'orders', table 'outbox': not marked, so it is sent again: too many wait for that"
        ]
        await outbox.mark_observed()
    assert [done for *_, done in tables.rows()] == [True, True, True, False]
