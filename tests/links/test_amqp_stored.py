"""`Stored(queue)`: copies that wait as rows of a queue table, on SQLite beside the embedded broker.

A database answers in real time, so nothing here runs in virtual time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from actors import Runtime, Subscription, open_runtime
from links.amqp import AT_MOST_ONCE, AmqpBroker, Raw, Topic
from links.amqp.wire.sections import split
from links.errors import LinkRefused
from links.sql import Table
from settlement import Retry, RetryAfter, Stored
from tests.links.amqp_kit import Handler, put, raw_of, take, until
from tests.links.sqlite_kit import Database, now
from tests.links.stored_kit import World, serving, world

__all__ = ["world"]

pytestmark = [pytest.mark.amqp, pytest.mark.sqlite]

RETRY = "x-ruststream-retry-count"
NAMED = b"\x00\x53\x74\xc1\x0b\x02\xa1\x04lane\xa1\x02up"
"""Application properties: lane=up."""
COUNTED = b"\x00\x53\x74\xc1\x28\x04\xa1\x04lane\xa1\x02up\xa1\x18x-ruststream-retry-count\xa1\x011"
"""The same, and that one attempt was made."""
DURABLE = b"\x00\x53\x70\xc0\x09\x03\x41\x50\x07\x70\x00\x0f\x42\x40"
"""A header section: durable, priority 7, a ttl of 1,000 s."""
DELIVERY = b"\x00\x53\x71\xc1\x09\x02\xa3\x03hop\xa1\x01a"
ANNOTATED = b"\x00\x53\x72\xc1\x09\x02\xa3\x03way\xa1\x01b"
PROPERTIES = b"\x00\x53\x73\xc0\x09\x02\xa1\x01m\xa0\x03bob"
"""The message-id m, the user-id bob."""
ANONYMOUS = b"\x00\x53\x73\xc0\x05\x02\xa1\x01m\x40"
BODY = b"\x00\x53\x75\xa0\x01x\x00\x53\x75\xa0\x01y"
FOOTER = b"\x00\x53\x78\xc1\x09\x02\xa3\x03end\xa1\x01c"


# --- what it is for


async def test_a_delayed_message_waits_as_a_row_and_comes_back_when_it_is_due(world: World) -> None:
    """DESIGN 6: stored and confirmed, then the original is accepted; due by the database's clock; attempt 2."""
    handler = Handler({b"lamp": [RetryAfter(0.6)]})
    async with serving(world, handler) as (broker, runtime):
        begun = now()
        await broker.publisher("orders").publish(b"lamp", {"lane": b"up"}, key="k")
        await until(lambda: runtime.ledger("orders").delayed == 1)
        assert (world.server.ready("orders"), world.server.unsettled("orders")) == ([], 0)
        row = world.database.row()
        assert json.loads(row["headers"]) == {"amqp-queue": "orders"}
        assert split(row["payload"]).application_properties == {"lane": "up", RETRY: "1"}
        assert row["lane"] is None  # the row is nobody's order: the key is in the message
        assert 0.55 < row["retry_after"] - begun < 5
        await handler.has(b"lamp", b"lamp")
        assert now() >= row["retry_after"]
        await until(lambda: runtime.ledger("jobs (stored)").acked == 1)
        assert world.database.rows() == []
    first, second = handler.deliveries
    assert (first.attempt, second.attempt) == (1, 2)
    assert (second.key, dict(second.headers)) == ("k", {"partition-key": b"k", "lane": b"up", RETRY: b"1"})
    books = runtime.ledger("orders"), runtime.ledger("jobs (stored)")
    assert all(each.balanced for each in books)
    assert (books[0].acked, books[0].delayed, books[1].received) == (1, 1, 1)


async def test_a_stored_copy_is_spliced_from_what_came(world: World) -> None:
    """DESIGN 6: body, properties, annotations and footer byte for byte; the ttl stays, no stranger's user-id does."""
    handler = Handler({b"xy": [RetryAfter(0.0)]})
    async with serving(world, handler) as (broker, _):
        await put(broker, "orders", DURABLE + DELIVERY + ANNOTATED + PROPERTIES + NAMED + BODY + FOOTER)
        await handler.has(b"xy", b"xy")
    assert raw_of(handler.deliveries[1]) == DURABLE + ANNOTATED + ANONYMOUS + COUNTED + BODY + FOOTER


@pytest.mark.parametrize("answers", [[RetryAfter(0.0)] * 4, [RetryAfter(0.0), Retry(), RetryAfter(0.01), Retry()]])
async def test_a_cap_holds_across_stored_copies(world: World, answers: list[RetryAfter | Retry]) -> None:
    """DESIGN 6, Counting: any mix of both under a cap of 4 calls the handler four times, then the dead letter."""
    handler = Handler({b"lamp": answers})
    async with serving(world, handler, max_attempts=4, dead_letter="dead") as (broker, _):
        await broker.publisher("orders").publish(b"lamp")
        await until(lambda: len(world.server.ready("dead")) == 1)
        (dead,) = await take(broker, "dead", 1)
    assert [delivery.attempt for delivery in handler.deliveries] == [1, 2, 3, 4]
    assert dead.headers[RETRY] == b"3"
    assert world.database.rows() == []


async def test_one_table_serves_several_addresses_and_runtimes(world: World) -> None:
    """The address is in the row; one forwarding subscription for all who name the same table, by its own name."""
    broker, table = world.amqp(), world.database.table()
    sql = world.database.broker()
    handler = Handler({body: [RetryAfter(0.0)] for body in (b"a", b"b", b"c")})
    sources = [
        broker.queue("a b/ü", delays=Stored(sql.queue(table))),
        broker.raw("/b", delays=Stored(sql.queue(table))),
        broker.topic("c", delays=Stored(sql.queue(table))),
    ]
    async with open_runtime(*[Subscription(each, handler) for each in sources]) as runtime:
        assert list(runtime.statistics()) == ["a b/ü", "/b", "c", "jobs (stored)"]
        await broker.publisher("a b/ü").publish(b"a")
        await broker.publisher(Raw("/b")).publish(b"b")
        await broker.publisher(Topic("c")).publish(b"c")
        await handler.has(b"a", b"a", b"b", b"b", b"c", b"c")
        await until(lambda: runtime.ledger("jobs (stored)").acked == 3)
    assert {each.source for each in handler.deliveries} == {"a b/ü", "/b", "c"}


async def test_at_most_once_stores_what_was_accepted_before(world: World) -> None:
    """DESIGN 6: the copy is owed, and its row outlives the process."""
    handler = Handler({b"lamp": [RetryAfter(0.1)]})
    broker = world.amqp()
    source = broker.queue("orders", settle=AT_MOST_ONCE, delays=Stored(world.store()))
    async with open_runtime(Subscription(source, handler)) as runtime:
        await broker.publisher("orders").publish(b"lamp")
        await handler.has(b"lamp", b"lamp")
    ledger = runtime.ledger("orders")
    assert (ledger.owed, ledger.published, ledger.lost) == (1, 1, 0)


async def test_a_copy_that_could_never_be_published_is_not_stored(world: World) -> None:
    """DESIGN 6, AMQP: its original goes back itself."""
    world.server.settings = attrs.evolve(world.server.settings, max_message=2000)
    body = b"x" * 1990
    handler = Handler({body: [RetryAfter(0.0)]})
    async with serving(world, handler) as (broker, runtime):
        await broker.publisher("orders").publish(body)
        await handler.has(body, body)
        await until(lambda: runtime.ledger("orders").acked == 1)
    assert RETRY not in handler.deliveries[1].headers
    assert (runtime.ledger("orders").retried, runtime.ledger("orders").delayed) == (1, 0)
    assert runtime.ledger("jobs (stored)").received == 0


async def test_a_message_in_which_nothing_can_be_counted_is_held_and_not_stored(world: World) -> None:
    """DESIGN 6: a copy of it would go round for ever."""
    handler = Handler()
    async with serving(world, handler, on_undecodable=RetryAfter(0.0)) as (broker, runtime):
        await put(broker, "orders", b"\x00\x53\x75\x40 no message")
        await until(lambda: runtime.ledger("orders").delayed >= 3)
    assert runtime.ledger("jobs (stored)").received == 0
    assert world.database.rows() == []


async def test_what_is_forwarded_carries_no_user_id_of_another(world: World) -> None:
    """DESIGN 6: whoever stored it may have been logged in as bob; its ttl stays."""
    world.put(DURABLE + PROPERTIES + NAMED + BODY, json.dumps({"amqp-queue": "orders"}))
    handler = Handler()
    async with serving(world, handler):
        await handler.has(b"xy")
    assert raw_of(handler.deliveries[0]) == DURABLE + ANONYMOUS + NAMED + BODY


# --- what is refused


@pytest.mark.parametrize(
    ("role", "fragments"),
    [
        ("payload", ["table 'jobs': there is no payload", "bytes that hold the message"]),
        ("headers", ["table 'jobs': there is no headers", "Table(…, headers=…)"]),
        ("retry_after", ["table 'jobs': there is no retry_after", "a time until when it waits"]),
    ],
)
def test_a_table_without_a_role_that_a_copy_needs_is_refused(tmp_path: Path, role: str, fragments: list[str]) -> None:
    database = Database(tmp_path / "delays.db")
    roles: dict[str, Any] = {each: each for each in ("payload", "headers", "retry_after", "locked_until")}
    del roles[role]
    table: Any = Table("jobs", id="id", **roles)
    queue = database.queue(table=table)
    with pytest.raises(ValueError, match=r"^Stored\(queue\), table") as caught:
        AmqpBroker("amqp://localhost").queue("orders", delays=Stored(queue))
    assert [fragment for fragment in fragments if fragment not in str(caught.value)] == []


@pytest.mark.parametrize("role", ["payload", "headers", "retry_after"])
def test_a_role_that_no_insert_writes_is_refused(tmp_path: Path, role: str) -> None:
    database = Database(tmp_path / "delays.db")
    queue = database.queue(table=database.table(generated=[role]))
    with pytest.raises(ValueError, match=rf"column '{role}' \({role}\) must not be in generated"):
        AmqpBroker("amqp://localhost").queue("orders", delays=Stored(queue))


def test_a_fifo_table_is_refused(tmp_path: Path) -> None:
    """One that waits would keep all behind it, and they are due."""
    database = Database(tmp_path / "delays.db", grouped=True)
    queue = database.queue(table=database.table(fifo=True), group="waiting")
    with pytest.raises(ValueError, match="fifo must be False"):
        AmqpBroker("amqp://localhost").queue("orders", delays=Stored(queue))


async def test_two_brokers_in_one_table_are_refused(world: World) -> None:
    """Each could take a row of the other's, and would publish it to the wrong place."""
    sql, one, another = world.database.broker(), world.amqp(), world.amqp()

    def named(name: str, broker: AmqpBroker) -> Subscription[bytes]:
        source = broker.queue("q", delays=Stored(sql.queue(world.database.table())))
        return Subscription(source, Handler(), name=name)

    assert list(Runtime(named("a", one), named("b", one)).statistics()) == ["a", "b", "jobs (stored)"]
    with pytest.raises(ValueError, match="give each a table or a group of its own"):
        Runtime(named("a", one), named("b", another))


async def test_a_name_that_is_taken_gets_a_number(world: World) -> None:
    """Two databases may have a table of one name."""
    first, second = (world.amqp().queue(name, delays=Stored(world.store())) for name in ("a", "jobs (stored)"))
    runtime = Runtime(Subscription(first, Handler()), Subscription(second, Handler()))
    assert list(runtime.statistics()) == ["a", "jobs (stored)", "jobs (stored) 2", "jobs (stored) 3"]


async def test_a_table_that_is_not_there_is_refused_at_start_up(world: World) -> None:
    world.database.run("DROP TABLE jobs")
    with pytest.raises(LinkRefused, match=r"subscription 'jobs \(stored\)', table 'jobs': there is no such table"):
        async with serving(world, Handler()):
            pytest.fail("it was entered")


async def test_a_payload_of_texts_is_refused_at_start_up(world: World) -> None:
    """A message is bytes; PostgreSQL would refuse each, SQLite would keep some as texts."""
    world.database.run("ALTER TABLE jobs DROP COLUMN payload")
    world.database.run("ALTER TABLE jobs ADD COLUMN payload TEXT")
    with pytest.raises(LinkRefused, match=r"column 'payload' \(payload\) holds texts.*BLOB"):
        async with serving(world, Handler()):
            pytest.fail("it was entered")


async def test_a_subscription_of_the_users_own_on_that_table_is_refused(world: World) -> None:
    """It would take the copies, and nobody would forward them."""
    sql = world.database.broker()
    queue = sql.queue(world.database.table())
    orders = world.amqp().queue("orders", delays=Stored(queue))
    with pytest.raises(LinkRefused, match="is already subscribed on this broker"):
        async with open_runtime(Subscription(orders, Handler()), Subscription(queue, Handler())):
            pytest.fail("it was entered")


# --- what is never lost


async def test_a_row_that_is_no_stored_copy_is_put_back_and_told(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody else's row is neither forwarded nor dropped nor finished; those beside it go on."""
    strangers = [
        (b"no address", None),
        (BODY, json.dumps({"lane": "up"})),
        (BODY, json.dumps({"amqp-queue": "orders", "amqp-raw": "/x"})),
        (BODY, json.dumps({"amqp-queue": ""})),
        (b"no message", json.dumps({"amqp-queue": "orders"})),
        (b"", json.dumps({"amqp-queue": "orders"})),
        (None, json.dumps({"amqp-queue": "orders"})),
        (BODY, "no JSON"),
    ]
    for payload, headers in strangers:
        world.database.run("INSERT INTO jobs (payload, headers) VALUES (?, ?)", payload, headers)
    handler = Handler({b"lamp": [RetryAfter(0.1)]})
    async with serving(world, handler) as (broker, runtime):
        await broker.publisher("orders").publish(b"lamp")
        await handler.has(b"lamp", b"lamp")
        await until(lambda: runtime.ledger("jobs (stored)").delayed >= 8)
    assert handler.bodies == [b"lamp", b"lamp"]
    assert [row["payload"] for row in world.database.rows()] == [payload for payload, _ in strangers]
    assert "it is no stored copy: one of the headers amqp-queue, amqp-topic, amqp-raw must say" in caplog.text
    assert "its payload is no AMQP message" in caplog.text
    ledger = runtime.ledger("jobs (stored)")
    assert (ledger.dropped, ledger.dead_lettered) == (0, 0)
