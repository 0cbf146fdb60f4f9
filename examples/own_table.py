"""A queue in a table that is there already: the orders of a shop, with a CHECK, a foreign key and columns of their own.

What it shows: the table is the shop's, and was not made for a queue; two columns were added to it, `tries` and
`done_at`. A sale writes the customer and the order in one transaction of the shop's own (`links.sql.insert`), so
neither is there without the other. The service claims orders in row mode: the message is the row. Each handler writes
the shipment in the transaction that holds its order (`links.sql.transaction`), and `Ack` commits both; an order that
does not go into the van the first time undoes what was written, and is tried again. At the end SQL tells whether
every order has one shipment, and the ledger whether it says the same.

What it does not do: keep anything. Its tables stand in a schema of their own, `example_shop`, made and dropped here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import psycopg
import trio

from actors import Subscription, open_runtime
from links.sql import RowLock, SqlBroker, Table, insert, transaction
from settlement import Ack, Delivery, Outcome, Policy, Retry

SALES, TOO_MANY = 40, 3
"""How many sales, and how many pieces do not go into the van at the first time."""

SHOP = """
DROP SCHEMA IF EXISTS example_shop CASCADE;
CREATE SCHEMA example_shop;
CREATE TABLE example_shop.customers (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL UNIQUE);
CREATE TABLE example_shop.orders (
    number text PRIMARY KEY,
    customer bigint NOT NULL REFERENCES example_shop.customers,
    article text NOT NULL,
    pieces integer NOT NULL CHECK (pieces > 0),
    sold_at timestamptz NOT NULL
);
CREATE TABLE example_shop.shipments ("order" text NOT NULL REFERENCES example_shop.orders, pieces integer NOT NULL);

-- what makes it a queue
ALTER TABLE example_shop.orders ADD tries integer NOT NULL DEFAULT 1, ADD done_at timestamptz;
CREATE INDEX orders_due ON example_shop.orders (number) WHERE done_at IS NULL;
"""

ORDERS = Table("example_shop.orders", id="number", attempt="tries", processed_at="done_at")


def sell(connection: psycopg.Connection[Any], number: int) -> None:
    """A customer and the order, or neither."""
    with connection.transaction():
        name = f"customer {number}"
        customer = connection.execute(
            "INSERT INTO example_shop.customers (name) VALUES (%s) RETURNING id", [name]
        ).fetchone()
        assert customer is not None  # noqa: S101 -- RETURNING gives one
        order = {"customer": customer[0], "article": "hat", "pieces": number % 5, "sold_at": datetime.now(UTC)}
        insert(connection, ORDERS, order, id=f"R-{number:03}")


def sell_all(url: str) -> int:
    """How many the shop has taken: it refuses an order of no pieces, and its customer with it."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(SHOP)
        sold = 0
        for number in range(1, SALES + 1):
            try:
                sell(connection, number)
                sold += 1
            except psycopg.errors.CheckViolation:
                print(f"sale {number} is refused: no pieces")
        return sold


async def ship(delivery: Delivery[dict[str, Any]]) -> Outcome:
    """Write the shipment where the order is held; the transaction is the order's."""
    order = delivery.message
    async with transaction(delivery) as connection:
        await connection.execute(
            'INSERT INTO example_shop.shipments ("order", pieces) VALUES (%s, %s)', [order["number"], order["pieces"]]
        )
    if order["pieces"] == TOO_MANY and delivery.attempt == 1:
        return Retry()  # the van is full: the shipment is undone
    return Ack()


async def serve(url: str, sold: int) -> int:
    """The service, until every order is shipped; how many it has acked."""
    queue = SqlBroker(url).queue(ORDERS, claim=RowLock())
    service = Subscription(queue, ship, name="shipping", concurrency=4, policy=Policy(on_error=Retry()))
    async with open_runtime(service) as runtime:
        with trio.move_on_after(30):
            while runtime.ledger("shipping").acked < sold:  # noqa: ASYNC110 -- a ledger has no event
                await trio.sleep(0.05)
    print(runtime.ledger("shipping"))
    return runtime.ledger("shipping").acked


def balanced(url: str, sold: int, acked: int) -> bool:
    """Does the shop's own SQL say the same as the ledger?"""
    with psycopg.connect(url, autocommit=True) as connection:
        counts = connection.execute(
            "SELECT (SELECT count(*) FROM example_shop.customers), (SELECT count(*) FROM example_shop.orders), "
            "(SELECT count(*) FROM example_shop.orders WHERE done_at IS NOT NULL), "
            "(SELECT count(*) FROM example_shop.shipments), "
            '(SELECT count(DISTINCT "order") FROM example_shop.shipments)'
        ).fetchone()
        connection.execute("DROP SCHEMA example_shop CASCADE")
    print(f"{sold} sold; customers, orders, done, shipments, orders shipped: {counts}; {acked} acked")
    return counts == (sold,) * 5 and acked == sold


def main(arguments: Sequence[str]) -> int:
    """Read the arguments; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="examples/run own_table", description="A queue in a table that was there before."
    )
    parser.add_argument("--url", help="postgresql://user:password@host:5432/database, where a schema may be made")
    url: str | None = parser.parse_args(arguments).url
    if url is None:
        print("--url names no database; any PostgreSQL 12 or newer does, such as one in a container:", file=sys.stderr)
        print("  docker run --rm -d -p 5432:5432 -e POSTGRES_PASSWORD=try postgres", file=sys.stderr)
        print("  examples/run own_table --url postgresql://postgres:try@127.0.0.1:5432/postgres", file=sys.stderr)
        return 2
    sold = sell_all(url)
    acked = trio.run(serve, url, sold)
    balance = balanced(url, sold, acked)
    print("books balance" if balance else "books do not balance")
    return 0 if balance else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
