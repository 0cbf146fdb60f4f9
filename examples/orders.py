"""The main job: a small order service on a SQLite queue, cancelled in the middle, started again, and its books.

What it shows: a file of orders (`orders.jsonl`, some lines malformed, some orders poisonous) is published into a queue
table; the order's id is the row's key, so publishing again makes no second order. A service with eight handlers at
once answers with every outcome: `Ack`, `Retry`, `RetryAfter`, `Drop`, and an exception that the policy retries until
the cap moves the order to a dead-letter table, which a second subscription reads. In the middle the service is
cancelled: what it had in hand is unsettled and comes back to the second start. At the end counts of different origin
are compared: lines in the file, rows by SELECT, the ledger. Kill it at any time (`kill -9`), start it again: it
resumes.

What it does not do: talk to a server (see README for the other transports), keep orders apart by customer, or ask a
real bank; the work is a short sleep. What the handlers raise is in `orders.log` beside the queue. `--fresh` throws the
old queue away, `--folder` puts it elsewhere.
"""

from __future__ import annotations

import argparse
import json
import logging
import sqlite3
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import attrs
import rich.console
import rich.progress
import trio

from actors import Runtime, Subscription
from links.sql import Lease, SqlBroker, Table
from settlement import Ack, Delivery, Drop, Ledger, Outcome, Policy, Retry, RetryAfter

ORDERS = Table(
    "orders",
    id="id",
    payload="body",
    attempt="attempt",
    retry_after="retry_after",
    locked_until="locked_until",
    processed_at="processed_at",
)
DEAD = ORDERS.renamed("dead_orders")

COLUMNS = """(
    id TEXT PRIMARY KEY,
    body BLOB NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 1,
    retry_after REAL NOT NULL DEFAULT 0,
    locked_until REAL,
    processed_at REAL
)"""

CONCURRENCY = 8
ATTEMPTS = 3


# --- the service ------------------------------------------------------------------------------------------------------


@attrs.frozen
class Order:
    """What we need of an order."""

    id: str
    quantity: int
    total: float
    payment: str
    stock: str


def decode(body: bytes) -> Order:
    """An order, or the exception that says why it is none."""
    fields = json.loads(body)
    order = Order(fields["id"], fields["quantity"], fields["total"], fields["payment"], fields["stock"])
    if not isinstance(order.quantity, int):
        raise TypeError(f"quantity must be a whole number, not {order.quantity!r}")
    return order


async def fulfil(delivery: Delivery[Order]) -> Outcome:
    """One order. Cancellation: nothing was shipped, the order is unsettled and comes back."""
    order = delivery.message
    await trio.sleep(0.03)  # the warehouse
    if order.payment == "withdrawn":
        return Drop("the customer thought better of it")
    if order.payment == "pending" and delivery.attempt < ATTEMPTS:
        return RetryAfter(0.1 * delivery.attempt)
    if order.stock == "arriving" and delivery.attempt == 1:
        return Retry()
    _price = order.total / order.quantity  # a quantity of 0 is poison: it fails each time
    return Ack()


async def report(delivery: Delivery[bytes]) -> None:
    """A dead order: somebody must look at it."""


def subscriptions(broker: SqlBroker) -> list[Subscription[Order] | Subscription[bytes]]:
    """The service."""
    return [
        Subscription(
            broker.queue(ORDERS, claim=Lease(3.0)),
            fulfil,
            decode=decode,
            policy=Policy(max_attempts=ATTEMPTS, dead_letter="dead_orders"),
            concurrency=CONCURRENCY,
        ),
        Subscription(broker.queue(DEAD, claim=Lease(3.0)), report),
    ]


# --- the counts -------------------------------------------------------------------------------------------------------


@attrs.frozen
class Rows:
    """What a SELECT says, here and now."""

    open: int
    in_hand: int
    finished: int
    dead: int
    dead_open: int

    @property
    def done(self) -> bool:
        """Is there nothing left to do?"""
        return self.open == 0 and self.dead_open == 0


def select(database: Path) -> Rows:
    """Count the rows, on a connection of its own."""
    with closing(sqlite3.connect(database, timeout=10.0)) as connection:
        row = connection.execute(
            "SELECT count(*) FILTER (WHERE processed_at IS NULL),"
            " count(*) FILTER (WHERE processed_at IS NULL AND locked_until IS NOT NULL),"
            " count(*) FILTER (WHERE processed_at IS NOT NULL),"
            " (SELECT count(*) FROM dead_orders),"
            " (SELECT count(*) FROM dead_orders WHERE processed_at IS NULL) FROM orders"
        ).fetchone()
    return Rows(*row)


@attrs.frozen
class Equation:
    """`left` against the sum of `right`; `slack`: so many may stand on either side (an answer was cut)."""

    left: tuple[int, str]
    right: tuple[tuple[int, str], ...]
    slack: int = 0
    why: str = "unknown"

    @property
    def difference(self) -> int:
        """What is missing on the right."""
        missing = self.left[0] - sum(count for count, _ in self.right)
        return 0 if 0 <= missing <= self.slack else missing

    def __str__(self) -> str:
        right = " + ".join(f"{count} {name}" for count, name in self.right)
        slack = f" (+ up to {self.slack} {self.why})" if self.slack else ""
        return f"{self.left[0]} {self.left[1]} = {right}{slack}"


def equations(lines: int, before: Rows, after: Rows, ledgers: Sequence[Mapping[str, Ledger]]) -> list[Equation]:
    """Counts of different origin."""
    orders = [ledger["orders"] for ledger in ledgers]
    dead = [ledger["dead_orders"] for ledger in ledgers]
    return [
        Equation(
            (lines, "lines in the file"),
            ((after.finished, "rows finished"), (after.dead, "rows dead"), (after.open, "rows open")),
        ),
        Equation(
            (after.finished + after.dead - before.finished - before.dead, "rows finished or dead since this start"),
            (
                (sum(ledger.acked for ledger in orders), "acked"),
                (sum(ledger.dropped for ledger in orders), "dropped"),
                (sum(ledger.dead_lettered for ledger in orders), "dead-lettered"),
            ),
            slack=sum(ledger.unknown for ledger in orders),
        ),
        Equation(
            (before.dead_open + after.dead - before.dead, "dead rows read since this start"),
            ((sum(ledger.acked for ledger in dead), "acked"), (after.dead_open, "rows open")),
            slack=sum(ledger.unknown for ledger in dead),
        ),
    ]


# --- the job ----------------------------------------------------------------------------------------------------------


def prepare(database: Path) -> None:
    """Make the tables, where they are not there yet. The library makes none itself."""
    with closing(sqlite3.connect(database)) as connection:
        connection.execute(f"CREATE TABLE IF NOT EXISTS orders {COLUMNS}")
        connection.execute(f"CREATE TABLE IF NOT EXISTS dead_orders {COLUMNS}")
        connection.execute(
            "CREATE INDEX IF NOT EXISTS orders_due ON orders (retry_after, id) WHERE processed_at IS NULL"
        )
        connection.commit()


def key(line: bytes, number: int) -> str:
    """The order's id; a line that has none is known by its number."""
    try:
        return decode(line).id
    except Exception:  # noqa: BLE001 -- any line is published; the service's decoder says what is wrong with it
        return f"line-{number}"


async def publish(broker: SqlBroker, lines: Sequence[bytes], database: Path) -> int:
    """Publish each line once, whatever an earlier run did; how many are new."""
    with closing(sqlite3.connect(database)) as connection:
        moved = {moved for (moved,) in connection.execute("SELECT id FROM dead_orders")}
    publisher = broker.publisher(ORDERS)
    new = 0
    for number, line in enumerate(lines, 1):
        if (order := key(line, number)) not in moved:
            new += await publisher.publish_once(order, line)
    return new


async def serve(
    broker: SqlBroker, database: Path, show: Callable[[Rows], None], until: Callable[[Rows], bool]
) -> dict[str, Ledger]:
    """Run the service until the rows say so, and cancel it then; its ledgers. Nothing left: it is drained instead."""
    runtime = Runtime(*subscriptions(broker), grace=5.0)
    async with trio.open_nursery() as nursery:
        await nursery.start(runtime.run)
        while True:
            rows = await trio.to_thread.run_sync(select, database)
            show(rows)
            if rows.done:
                runtime.drain()
                break
            if until(rows):
                nursery.cancel_scope.cancel()
            await trio.sleep(0.1)
    return {name: runtime.ledger(name) for name in ("orders", "dead_orders")}


async def run(folder: Path, orders: Path, say: Callable[[str], None], show: Callable[[int, Rows], None]) -> int:
    """The whole job; the exit code."""
    database = folder / "orders.db"
    lines = orders.read_bytes().splitlines()
    prepare(database)
    before = select(database)
    if before.open:
        say(f"resuming: {before.open} orders of an earlier run are open, {before.in_hand} of them were in hand")
    broker = SqlBroker(f"sqlite:///{database}")
    async with broker.connect():
        new = await publish(broker, lines, database)
    say(f"published {new} of {len(lines)} lines as new orders")
    half = before.finished + (len(lines) - before.finished - before.dead) // 2
    ledgers: list[dict[str, Ledger]] = []
    if select(database).done:
        say("nothing is left to do")
    else:
        say(f"serving, {CONCURRENCY} handlers at once, to be cancelled in the middle")
    ledgers.append(
        await serve(broker, database, lambda rows: show(len(lines), rows), lambda rows: rows.finished > half)
    )
    rows = select(database)
    if not rows.done:
        say(f"cancelled with {rows.open} orders open; starting again")
        ledgers.append(await serve(broker, database, lambda rows: show(len(lines), rows), lambda _: False))
    after = select(database)
    for number, ledger in enumerate(ledgers, 1):
        for name, book in ledger.items():
            say(f"ledger, start {number}, {name}: {book.deliveries}")
    found = equations(len(lines), before, after, ledgers)
    for equation in found:
        say(f"  {equation}")
    wrong = [equation for equation in found if equation.difference]
    crooked = [book for ledger in ledgers for book in ledger.values() if not book.balanced]
    if not wrong and not crooked:
        say("books balance")
        return 0
    for equation in wrong:
        say(f"books do not balance: {equation.difference:+d} {equation.left[1]}")
    for book in crooked:
        say(f"books do not balance: {book.deliveries}")
    return 1


def main(arguments: Sequence[str]) -> int:
    """Read the arguments, show progress, return the exit code."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(
        prog="examples/run",
        description="A small order service on a SQLite queue.",
        epilog="The other examples: examples/run sigterm, examples/run amqp_orders; each has a --help of its own.",
    )
    parser.add_argument("--folder", type=Path, default=here.parent / ".run", help="where the queue is kept")
    parser.add_argument("--orders", type=Path, default=here / "orders.jsonl", help="the file of orders")
    parser.add_argument("--fresh", action="store_true", help="throw the queue of earlier runs away first")
    options = parser.parse_args(arguments)
    if options.fresh:
        for path in options.folder.glob("orders.db*"):
            path.unlink()
    options.folder.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=options.folder / "orders.log", filemode="w", level=logging.INFO)
    console = rich.console.Console(highlight=False, soft_wrap=True)
    progress = rich.progress.Progress(console=console, transient=True)
    bar = progress.add_task("orders done", total=None)
    said = -1

    def show(lines: int, rows: Rows) -> None:
        nonlocal said
        done = rows.finished + rows.dead
        if console.is_terminal:
            progress.update(bar, total=lines, completed=done)
        elif done * 10 // max(lines, 1) != said:
            said = done * 10 // max(lines, 1)
            console.print(f"{done} of {lines} orders done")

    with progress:
        return trio.run(run, options.folder, options.orders, console.print, show)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
