"""The public API as it must not be written: both type checkers find an error on exactly the marked lines.

Never run, and left out of the checks of the whole repository; `tests/test_typing.py` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from actors import BatchSubscription, Runtime, Subscription, open_runtime
from actors.testing import a_delivery, run_once
from links.amqp import AmqpBroker
from links.memory import MemoryBroker
from links.sql import Outbox, OutboxTable, SqlBroker, Table, forward
from settlement import Ack, DeadLetter, Delivery, Drop, Outcome, Policy, Retry, RetryAfter, Stored


@attrs.frozen
class Order:
    id: int


@attrs.frozen
class Invoice:
    id: int


def order(body: bytes) -> Order:
    return Order(len(body))


def order_of_text(text: str) -> Order:
    return Order(len(text))


async def raw(delivery: Delivery[bytes]) -> Outcome:
    return Ack()


async def charge(delivery: Delivery[Order]) -> Outcome:
    return Ack()


async def bill(delivery: Delivery[Invoice]) -> Outcome:
    return Ack()


async def text(delivery: Delivery[Order]) -> str:
    return "ack"


async def truth(delivery: Delivery[Order]) -> bool:
    return True


async def outcome_class(delivery: Delivery[Order]) -> type[Ack]:
    return Ack


async def dead_letters(delivery: Delivery[Order]) -> Outcome | DeadLetter:
    return DeadLetter()


async def nothing_taken() -> Outcome:
    return Ack()


def not_async(delivery: Delivery[Order]) -> Outcome:
    return Ack()


async def batch(deliveries: list[Delivery[Order]]) -> Outcome:
    return Ack()


async def invoices(deliveries: list[Delivery[Invoice]]) -> Sequence[Outcome]:
    return [Ack() for _ in deliveries]


async def texts(deliveries: list[Delivery[Order]]) -> list[str]:
    return ["ack" for _ in deliveries]


async def row(delivery: Delivery[dict[str, Any]]) -> Outcome:
    return Ack()


memory = MemoryBroker()
rabbit = AmqpBroker("amqp://localhost")
queue = memory.queue("orders")
sql = SqlBroker("sqlite:///orders.db")
payloads = sql.queue(Table("orders", id="id", payload="body", locked_until="lease"))
rows = sql.queue(Table("rows", id="id", locked_until="lease"))
orders = sql.queue(Table("orders", id="id", locked_until="lease", row=Order))

# --- the handler's message is not what decode makes, or the source hands out

Subscription(queue, charge)  # wrong
Subscription(queue, bill, decode=order)  # wrong
Subscription(queue, raw, decode=order)  # wrong
Subscription(queue, charge, decode=order_of_text)  # wrong
Subscription(payloads, row)  # wrong
Subscription(rows, raw)  # wrong
Subscription(rows, charge, decode=order)  # wrong
Subscription(orders, row)  # wrong
Subscription(orders, bill)  # wrong
Subscription(orders, charge, decode=order)  # wrong
mistaken: Subscription[Invoice] = Subscription(queue, charge, decode=order)  # wrong

# --- what the handler returns is no outcome, or it is no handler

Subscription(queue, text, decode=order)  # wrong
Subscription(queue, truth, decode=order)  # wrong
Subscription(queue, outcome_class, decode=order)  # wrong
Subscription(queue, dead_letters, decode=order)  # wrong
Subscription(queue, nothing_taken, decode=order)  # wrong
Subscription(queue, not_async, decode=order)  # wrong

# --- batches

BatchSubscription(queue, batch, size=10)  # wrong
BatchSubscription(queue, invoices, decode=order, size=10)  # wrong
BatchSubscription(queue, texts, decode=order, size=10)  # wrong
BatchSubscription(queue, charge, decode=order, size=10)  # wrong
BatchSubscription(queue, batch, decode=order)  # wrong
Subscription(queue, batch, decode=order)  # wrong

# --- arguments of the wrong type, or of a wrong name

Subscription("orders", raw)  # wrong
Subscription(queue, raw, concurrency="4")  # wrong
Subscription(queue, raw, within="2")  # wrong
Subscription(queue, raw, policy={"max_attempts": 5})  # wrong
Subscription(queue, raw, 4)  # wrong
Subscription(queue, raw, workers=4)  # wrong
Policy(max_attempts="5")  # wrong
Policy(max_attempts=1.5)  # wrong
Policy(dead_letter=5)  # wrong
Policy(on_error=Ack)  # wrong
Policy(on_error="retry")  # wrong
Policy(failures={"TimeoutError": Retry()})  # wrong
Policy(failures={TimeoutError: "retry"})  # wrong
Policy(5)  # wrong
RetryAfter("1")  # wrong
RetryAfter()  # wrong
Drop(404)  # wrong
memory.queue("orders", delays="copies")  # wrong
rabbit.queue("orders", delays="copies")  # wrong
rabbit.queue("orders", delays=Stored("a table"))  # wrong
rabbit.queue("orders", settle="at most once")  # wrong
rabbit.queue(b"orders")  # wrong
Subscription(rabbit.queue("orders"), charge)  # wrong
AmqpBroker(5672)  # wrong
AmqpBroker("amqp://localhost", password=5)  # wrong
Table("orders", payload="body")  # wrong
Table("orders", id="id", payload="body", row=Order)  # wrong
Table("orders", id="id", row=Order(1))  # wrong
Table("orders", id="id", group="account", fifo="yes")  # wrong


def one_argument(delivery: Delivery[Any]) -> Retry:
    return Retry()


def answers_text(delivery: Delivery[Any], error: Exception) -> str:
    return "retry"


Policy(on_error=one_argument)  # wrong
Policy(on_error=answers_text)  # wrong


async def main(delivery: Delivery[Order]) -> None:
    delivery.attempt = 2  # wrong
    delivery.ack()  # wrong
    Runtime([Subscription(queue, raw)])  # wrong
    await memory.publisher("orders").publish("text")  # wrong
    await memory.publisher("orders").publish(b"", headers={"a": "1"})  # wrong
    await run_once(charge, a_delivery(b""))  # wrong
    async with open_runtime(Subscription(queue, raw), grace="10") as runtime:  # wrong
        runtime.ledger(0)  # wrong
        await runtime.drain()  # wrong


# --- the outbox

outbox = Outbox(OutboxTable("outbox", id="id", name="name", payload="body", sent_at="sent_at"), sql)
OutboxTable("outbox", id="id", name="name", payload="body")  # wrong
Outbox(Table("orders", id="id"), sql)  # wrong
outbox.register("orders", "orders")  # wrong
forward("orders")  # wrong
outbox.tracked(not_async)  # wrong
outbox.record(object(), "orders", b"")  # wrong
