"""A service that kills itself with -9 at a numbered point, and one that goes on after it: `python -m` this, with a URL.

The record table is in the database of the URL, the messages travel through a queue table in a file of their own. The
service writes an order and its record in a transaction and sends it; publishes a second one; records a third one and
forgets to send it; sends again what is not processed; and consumes. A point is passed before and after every statement
on the record table, every message, and every step of the consumer. For each number a process is forked that dies there,
and then one that does not; a line of JSON tells what is left. The last number is one that nobody has come to.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
import traceback
from collections.abc import Awaitable, Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import trio

from actors import Subscription, open_runtime
from links.abc import Publisher
from links.sql import Outbox, SqlBroker, Table
from settlement import Ack, Delivery, Outcome
from settlement.delivery import Letter
from tests.links.outbox_kit import RecordTables

QUEUE = Table("orders", id="id", payload="payload", headers="headers", locked_until="locked_until", generated=["id"])
NEVER = 10_000


class Story:
    """One process. `fatal`: the number of the point where it dies."""

    def __init__(self, url: str, folder: Path, fatal: int) -> None:
        self.tables, self.folder, self.fatal = RecordTables(url), folder, fatal
        self.passed = 0

    def point(self) -> None:
        self.passed += 1
        if self.passed == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def outbox(self) -> Outbox:
        """One that passes points."""
        outbox = self.tables.outbox(min_age=0)
        ask: Any = outbox._ask

        async def numbered(*given: Any, **how: Any) -> Any:
            self.point()
            result = await ask(*given, **how)
            self.point()
            return result

        outbox._ask = outbox._tracking._ask = numbered
        return outbox

    async def tell(self) -> None:
        """The service, from its beginning or where the one before it died."""
        carrier = SqlBroker(f"sqlite:///{self.folder / 'carrier.db'}", poll_interval=0.01)
        outbox = self.outbox()
        orders = outbox.register("orders", Numbered(carrier.publisher(QUEUE), self.point))
        async with outbox.broker.connect(), carrier.connect():
            await outbox.republish()
            if self.fatal != NEVER:
                await self.produce(outbox, orders)
                await outbox.republish()
            await self.consume(outbox, carrier)

    async def produce(self, outbox: Outbox, orders: Publisher) -> None:
        self.point()
        key = self.sell(outbox, "first")
        self.point()
        await outbox.send(key)
        self.point()
        await orders.publish(b"second")
        self.point()
        self.sell(outbox, "third")
        self.point()

    def sell(self, outbox: Outbox, order: str) -> int:
        with self.tables.connection() as connection:
            connection.cursor().execute(f"INSERT INTO sales VALUES ('{order}')")  # noqa: S608 -- our own
            self.point()
            key: int = outbox.record(connection, "orders", order.encode())
            self.point()
        return key

    async def consume(self, outbox: Outbox, carrier: SqlBroker) -> None:
        tracked = outbox.tracked(self.handle)

        async def handled(delivery: Delivery[bytes]) -> Outcome | None:
            self.point()
            outcome = await tracked(delivery)
            self.point()
            return outcome

        async with open_runtime(Subscription(carrier.queue(QUEUE), handled)) as runtime:
            while self.waiting():
                await trio.sleep(0.01)
        self.note("delivered", str(runtime.ledger("orders").acked))
        self.point()

    def waiting(self) -> int:
        with closing(sqlite3.connect(self.folder / "carrier.db", timeout=5.0)) as connection:
            number: int = connection.execute("SELECT count(*) FROM orders").fetchone()[0]
            return number

    async def handle(self, delivery: Delivery[bytes]) -> Outcome:
        self.point()
        self.note("handled", delivery.body.decode())
        self.point()
        await trio.lowlevel.checkpoint()
        return Ack()

    def note(self, name: str, line: str) -> None:
        with (self.folder / name).open("a") as file:
            file.write(f"{line}\n")


class Numbered(Publisher):
    """Passes a point before and after each message."""

    def __init__(self, to: Publisher, point: Callable[[], None]) -> None:
        self.broker, self.name, self._to, self._point = to.broker, to.name, to, point

    async def send(self, letter: Letter) -> None:
        self._point()
        await self._to.send(letter)
        self._point()


def forked(tell: Callable[[], Awaitable[None]]) -> int:
    """Run it in a process of its own; how that ended."""
    process = os.fork()
    if process == 0:
        try:
            trio.run(tell)
        except BaseException:  # noqa: BLE001 -- it ends here
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def a_line(url: str, folder: Path, fatal: int) -> dict[str, Any]:
    """One number: what the two processes have left."""
    folder.mkdir()
    with closing(sqlite3.connect(folder / "carrier.db")) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(QUEUE.ddl("sqlite"))
    url = url or f"sqlite:///{folder / 'records.db'}"
    tables = RecordTables(url)
    tables.run("DROP TABLE IF EXISTS outbox", "DROP TABLE IF EXISTS sales", "CREATE TABLE sales (number text)")
    tables.create()
    died = forked(Story(url, folder, fatal).tell)
    # what the killed one had leased is free when its lease is over; nobody waits for that here
    with closing(sqlite3.connect(folder / "carrier.db")) as connection, connection:
        connection.execute("UPDATE orders SET locked_until = NULL")
    went_on = forked(Story(url, folder, NEVER).tell)
    return {
        "point": fatal,
        "died": died,
        "went on": went_on,
        "sales": sorted(name for (name,) in tables.run("SELECT number FROM sales")),
        "records": [[payload.decode(), done] for _, _, payload, done in tables.rows()],
        "handled": lines(folder / "handled"),
        "delivered": [int(number) for number in lines(folder / "delivered")],
    }


def main(url: str, folder: Path) -> None:
    for fatal in count(1):
        told = a_line(url, folder / str(fatal), fatal)
        os.write(1, json.dumps(told).encode() + b"\n")
        if told["died"] != -signal.SIGKILL:
            return


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 2 else "", Path(sys.argv[-1]))
