"""The public API as a user may write it: neither type checker says anything about this file. It is never run."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

import attrs
import psycopg
import trio

from actors import BatchSubscription, Runtime, Statistics, Subscription, open_runtime
from actors.events import DrainBegan, Event
from actors.testing import a_delivery, run_once
from links.abc import Publisher
from links.amqp import AT_MOST_ONCE, AmqpBroker, Raw
from links.memory import MemoryBroker
from links.sql import Lease, Outbox, OutboxTable, SqlBroker, Table, forward
from settlement import (
    Ack,
    Copies,
    DeadLetter,
    Delivery,
    Drop,
    FailFast,
    Hold,
    Ledger,
    Letter,
    Native,
    Outcome,
    Policy,
    Retry,
    RetryAfter,
    Scheduled,
    Stored,
)


@attrs.frozen
class Order:
    id: int


def order(body: bytes) -> Order:
    return Order(json.loads(body)["id"])


def order_of_row(row: dict[str, Any]) -> Order:
    return Order(row["id"])


# --- handlers


async def raw(delivery: Delivery[bytes]) -> Outcome:
    return Ack() if delivery.message == delivery.body else Drop("refused")


async def charge(delivery: Delivery[Order]) -> Outcome:
    match delivery.message.id % 4:
        case 0:
            return Ack()
        case 1:
            return RetryAfter(2.0**delivery.attempt)
        case 2:
            return Retry()
        case _:
            return Drop("refused by the bank")


async def maybe(delivery: Delivery[Order]) -> Outcome | None:
    return None if delivery.message.id else Retry()


async def forget(delivery: Delivery[Order]) -> None:
    assert delivery.key is None or delivery.message.id == delivery.redelivery_count


async def only_acks(delivery: Delivery[Order]) -> Ack:
    return Ack()


async def anything(delivery: Delivery[Any]) -> Outcome:
    return Drop(delivery.id)


async def row(delivery: Delivery[dict[str, Any]]) -> Outcome:
    return Ack() if delivery.message["id"] else Drop()


async def all_alike(batch: list[Delivery[Order]]) -> Outcome:
    return Ack() if batch else Retry()


async def each_its_own(batch: list[Delivery[Order]]) -> Sequence[Outcome | None]:
    return [None if each.message.id else Retry() for each in batch]


async def list_of_acks(batch: list[Delivery[bytes]]) -> list[Ack]:
    return [Ack() for _ in batch]


class Counter:
    """A handler may be an object, a bound method, or a nested function."""

    async def __call__(self, delivery: Delivery[Order]) -> Outcome:
        return Ack() if delivery.message.id else Drop()

    async def method(self, delivery: Delivery[bytes]) -> None:
        assert delivery.message


# --- declarations


memory = MemoryBroker()
rabbit = AmqpBroker("amqp://guest:guest@localhost", password=lambda: "guest", heartbeat=10.0, durable=True)
queue = memory.queue("orders")
sql = SqlBroker("sqlite:///orders.db", poll_interval=0.5)
payloads = sql.queue(Table("orders", id="id", payload="body", locked_until="lease"), claim=Lease(30.0))
rows = sql.queue(Table("rows", id="id", locked_until="lease"))
orders: Table[Order] = Table("orders", id="id", locked_until="lease", group="account", row=Order, fifo=True)

RECORDS = OutboxTable("outbox", id="id", name="name", payload="body", sent_at="sent_at")
outbox = Outbox(RECORDS, sql, min_age=60.0)
recorded: Publisher = outbox.register("orders", memory.publisher("orders"))
Subscription(payloads, forward(recorded))
Subscription(memory.queue("orders"), outbox.tracked(charge, name="orders"), decode=order)
Subscription(memory.queue("orders"), outbox.tracked(raw))
Subscription(memory.queue("orders"), outbox.tracked(forget), decode=order)


async def record(connection: sqlite3.Connection, awaited: psycopg.AsyncConnection[Any]) -> None:
    key: int = outbox.record(connection, "orders", b"")
    await outbox.send(key)
    key = await outbox.record(awaited, "orders", "{}", {"x": b"1"}, key="lane")
    sent: int = await outbox.republish(["orders"], min_age=0)
    assert key != sent


elsewhere: Publisher = sql.publisher("orders")

one: Subscription[bytes] = Subscription(queue, raw)
two: Subscription[Order] = Subscription(queue, charge, decode=order, concurrency=16, within=2.5, name="two")

Subscription(queue, maybe, decode=order)
Subscription(queue, forget, decode=order)
Subscription(queue, only_acks, decode=order)
Subscription(queue, anything)
Subscription(queue, anything, decode=order)
Subscription(queue, Counter(), decode=order)
Subscription(queue, Counter().method)
Subscription(memory.queue("slow", delays=Copies(max_waiting=10), lease=30.0, limit=4), raw)
Subscription(payloads, raw)
Subscription(payloads, charge, decode=order)
Subscription(rows, row)
Subscription(rows, charge, decode=order_of_row)
Subscription(sql.queue(orders, group="alice"), charge)
BatchSubscription(sql.queue(orders, group="alice"), all_alike, size=1)
BatchSubscription(queue, all_alike, decode=order, size=10)
BatchSubscription(queue, each_its_own, decode=order, size=10, wait=0.5, concurrency=2)
BatchSubscription(queue, list_of_acks, size=10)

Subscription(rabbit.queue("orders"), raw)
Subscription(rabbit.queue("orders", delays=Hold(100), credit=256), charge, decode=order, concurrency=16)
Subscription(rabbit.queue("orders", delays=Native()), raw, policy=Policy(max_attempts=3, dead_letter="orders.dead"))
Subscription(rabbit.queue("orders", delays=Stored(payloads)), charge, decode=order)
Subscription(rabbit.raw("/queues/orders", settle=AT_MOST_ONCE), raw)
Subscription(rabbit.topic("prices", delays=Scheduled("x-opt-delivery-delay")), raw)
Subscription(rabbit.queue("orders"), raw, policy=Policy(dead_letter=rabbit.publisher(Raw("/exchanges/dead/orders"))))


# --- policies


def answer(delivery: Delivery[Any], error: Exception) -> Retry | DeadLetter:
    return Retry() if delivery.attempt < 3 else DeadLetter()


Policy()
Policy(max_attempts=5)
Policy(max_attempts=5, dead_letter="orders.dead")
Policy(dead_letter=elsewhere, on_error=DeadLetter(), on_undecodable=DeadLetter())
Policy(
    on_error=answer, failures={TimeoutError: RetryAfter(5), KeyError: Drop(), OSError: FailFast(), ValueError: answer}
)
Subscription(queue, raw, policy=Policy(on_error=lambda delivery, error: Drop(f"{error} of {delivery.id}")))


# --- running


def observe(event: Event) -> None:
    assert event != DrainBegan()


async def main() -> None:
    async with open_runtime(one, two, grace=10.0, goodbye=3.0, observers=[observe]) as runtime:
        await memory.publisher("orders").publish(b'{"id": 1}', headers={"tenant": b"7"}, key="7")
        await memory.publisher("orders").send(Letter(b"{}", deliver_after=1.5))
        books: Ledger = runtime.ledger("two")
        state: dict[str, Statistics] = runtime.statistics()
        assert books.balanced or state["two"].in_hand
        runtime.drain()
        await runtime.finished()
    async with trio.open_nursery() as nursery:
        await nursery.start(Runtime(one).run)
    async with sql.connect():
        await elsewhere.publish(b"")
    outcome: Outcome = await run_once(charge, a_delivery(Order(1), attempt=2))
    assert outcome == Ack()
