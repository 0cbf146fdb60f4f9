"""An order and its message in one transaction, whatever carries the message: an outbox on SQLite, a queue on AMQP 1.0.

What it shows: a shop writes each sale and the record of its message in one transaction of its own, and sends the
message by AMQP then. It is killed with -9 after the commit of a sale and before its message was sent, and is started
again: it sends again what no consumer has finished with, and goes on. The warehouse ships what comes. A message that
comes twice finds its record marked, and is acked without the handler. At the end SQL tells whether every sale has one
shipment and every record is marked.

What it does not do: keep anything. The shop's database stands in a folder that is deleted, and the embedded broker
forgets at the end. The shop is this program once more, with `--sell`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sqlite3
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import trio

from actors import Subscription, connected, open_runtime
from links.amqp import AmqpBroker, EmbeddedBroker
from links.sql import Outbox, OutboxTable, SqlBroker
from settlement import Ack, Delivery, Outcome

SALES, KILLED_AT = 40, 17
"""How many sales, and after the commit of which of them the shop is killed."""
PATIENCE = 30.0
"""Seconds; nothing takes as long here."""

SHOP = """
CREATE TABLE sales (number INTEGER PRIMARY KEY, article TEXT NOT NULL);
CREATE TABLE shipments (sale INTEGER NOT NULL REFERENCES sales);
"""

RECORDS = OutboxTable("outbox", id="id", name="name", payload="payload", sent_at="sent_at", processed_at="processed_at")


def an_outbox(path: Path, amqp: AmqpBroker) -> Outbox:
    """The same for the shop and for the warehouse."""
    # min_age 0: this shop is started again at once; in a service it is longer than a handler takes
    outbox = Outbox(RECORDS, SqlBroker(f"sqlite:///{path}"), min_age=0.0)
    outbox.register("orders", amqp.publisher("orders"))
    return outbox


def sell(path: Path, outbox: Outbox, number: int) -> int:
    """The sale and the record of its message, or neither; gives the record's id."""
    with closing(sqlite3.connect(path, timeout=10.0)) as connection, connection:
        connection.execute("INSERT INTO sales VALUES (?, 'hat')", [number])
        return outbox.record(connection, "orders", str(number).encode())


def sold(path: Path) -> int:
    """How many sales there are."""
    with closing(sqlite3.connect(path)) as connection:
        count: int = connection.execute("SELECT count(*) FROM sales").fetchone()[0]
        return count


async def shop(path: Path, url: str, killed_at: int) -> None:
    """Send again what is left of the run before; then sell the rest."""
    amqp = AmqpBroker(url)
    outbox = an_outbox(path, amqp)
    async with connected(amqp), connected(outbox.broker):
        print(
            f"the shop opens after {sold(path)} sales, and sends {await outbox.republish()} messages again", flush=True
        )
        for number in range(sold(path) + 1, SALES + 1):
            record = sell(path, outbox, number)
            if number == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            await outbox.send(record)


async def warehouse(path: Path, url: str) -> int:
    """Ship until every record is marked; how many messages came."""
    amqp = AmqpBroker(url)
    outbox = an_outbox(path, amqp)

    async def ship(delivery: Delivery[bytes]) -> Outcome:
        with closing(sqlite3.connect(path, timeout=10.0)) as connection, connection:
            connection.execute("INSERT INTO shipments VALUES (?)", [int(delivery.body)])
        return Ack()

    def waiting() -> int:
        with closing(sqlite3.connect(path)) as connection:
            count: int = connection.execute("SELECT count(*) FROM outbox WHERE processed_at IS NULL").fetchone()[0]
            return count

    service = Subscription(amqp.queue("orders"), outbox.tracked(ship), name="warehouse")
    async with connected(outbox.broker), open_runtime(service) as runtime:
        with trio.move_on_after(PATIENCE):
            while waiting():  # noqa: ASYNC110 -- a table has no event
                await trio.sleep(0.05)
    print(runtime.ledger("warehouse"))
    return runtime.ledger("warehouse").acked


def balanced(path: Path, came: int) -> bool:
    """Does the shop's own SQL say that every sale has one shipment, and every record is marked?"""
    with closing(sqlite3.connect(path)) as connection:
        counts = connection.execute(
            "SELECT (SELECT count(*) FROM sales), (SELECT count(*) FROM shipments), "
            "(SELECT count(DISTINCT sale) FROM shipments), (SELECT count(*) FROM outbox WHERE processed_at IS NOT NULL)"
        ).fetchone()
    print(f"sales, shipments, sales shipped, records marked: {counts}; {came - SALES} messages came twice")
    return bool(counts == (SALES,) * 4)


async def the_story(folder: Path) -> bool:
    """The shop, killed and started again; then the warehouse."""
    path = folder / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SHOP)
        connection.executescript(Outbox(RECORDS, SqlBroker(f"sqlite:///{path}")).ddl())
    async with EmbeddedBroker().serve() as url:
        command = [sys.executable, str(Path(__file__).resolve()), "--sell", url, "--database", str(path)]
        for killed_at in (KILLED_AT, 0):
            ended = await trio.run_process([*command, "--killed-at", str(killed_at)], check=False)
            if ended.returncode == -signal.SIGKILL:
                print(f"the shop was killed: sale {sold(path)} is committed, and its message was not sent")
            elif ended.returncode:
                return False
        return balanced(path, await warehouse(path, url))


def main(arguments: Sequence[str]) -> int:
    """Read the arguments; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="examples/run outbox", description="An order and its message in one transaction, and a kill between."
    )
    parser.add_argument("--sell", metavar="URL", help="be the shop, on this AMQP broker, and on --database")
    parser.add_argument("--database", metavar="FILE", type=Path, help="the shop's database")
    parser.add_argument("--killed-at", metavar="NUMBER", type=int, default=0, help="die after the commit of this sale")
    given = parser.parse_args(arguments)
    if given.sell is not None:
        if given.database is None:
            parser.error("--sell needs --database")
        trio.run(shop, given.database, given.sell, given.killed_at)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        balance = trio.run(the_story, Path(folder))
    print("books balance" if balance else "books do not balance")
    return 0 if balance else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
