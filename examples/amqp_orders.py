"""The order service on AMQP 1.0: the handlers of `orders.py`, on an embedded broker, or with `--url` on a RabbitMQ 4.

What it shows: the file of orders is published, confirmed one by one; eight handlers at once answer with every outcome,
and each becomes the disposition that AMQP has for it; a delayed order is held unsettled (`Hold`), so that nothing waits
in this process alone; what fails three times goes to a dead-letter queue, which a second subscription reads. In the
middle the service is cancelled: the broker has what was in hand back, and the second start goes on. At the end counts
of different origin are compared: lines in the file, what the broker has left, the ledgers.

What it does not do: keep anything. The embedded broker forgets at the end, it is for first steps and tests. On a real
broker the two queues, `example.orders` and `example.orders.dead`, are declared as quorum queues if need be, and stay.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from actors import Runtime, Subscription, connected
from examples.orders import ATTEMPTS, CONCURRENCY, Equation, Order, decode, fulfil, report
from links.amqp import AmqpBroker, EmbeddedBroker
from settlement import Hold, Ledger, Policy

QUEUE, DEAD = "example.orders", "example.orders.dead"
MOVES_WITHIN = 5.0
"""Seconds; nothing takes as long here."""


@asynccontextmanager
async def a_broker(url: str | None) -> AsyncGenerator[tuple[AmqpBroker, Callable[[], Awaitable[int]]], None]:
    """A connected broker with the two queues, and how to ask it what is left in them."""
    if url is None:
        embedded = EmbeddedBroker()
        async with embedded.serve() as served:
            broker = AmqpBroker(served, durable=True)

            async def left_here() -> int:
                return sum(len(embedded.ready(name)) + embedded.unsettled(name) for name in (QUEUE, DEAD))

            async with connected(broker):
                yield broker, left_here
        return
    broker = AmqpBroker(url, durable=True)
    async with connected(broker), broker.management() as manage:
        for name in (QUEUE, DEAD):
            await manage.declare(name, kind="quorum")

        async def left_there() -> int:
            return await manage.count(QUEUE) + await manage.count(DEAD)  # what is ready; in hand is what we know

        yield broker, left_there


def subscriptions(broker: AmqpBroker) -> tuple[Subscription[Order], Subscription[bytes]]:
    """The service."""
    orders = Subscription(
        broker.queue(QUEUE, delays=Hold(50)),
        fulfil,
        decode=decode,
        policy=Policy(max_attempts=ATTEMPTS, dead_letter=DEAD),
        concurrency=CONCURRENCY,
    )
    return orders, Subscription(broker.queue(DEAD), report)


async def serve(
    broker: AmqpBroker, left: Callable[[], Awaitable[int]], cancel_at: int, say: Callable[[str], None]
) -> tuple[Ledger, Ledger]:
    """Run the service until so many orders are acked, and cancel it then; or drain it when nothing is left.

    Where nothing moves for a while it is drained as well; the counts tell then what is missing.
    """
    runtime = Runtime(*subscriptions(broker), grace=5.0)
    said = 0
    last, moved = (Ledger(), Ledger()), trio.current_time()
    async with trio.open_nursery() as nursery:
        await nursery.start(runtime.run)
        while True:
            orders, dead = now = runtime.ledger(QUEUE), runtime.ledger(DEAD)
            if now != last:
                last, moved = now, trio.current_time()
            if orders.acked // 100 != said:
                said = orders.acked // 100
                say(f"{orders.acked} orders acked")
            if orders.acked >= cancel_at:
                nursery.cancel_scope.cancel()
            elif orders.in_hand == dead.in_hand == 0 and (
                await left() == 0 or trio.current_time() > moved + MOVES_WITHIN
            ):
                runtime.drain()
                break
            await trio.sleep(0.05)
    return runtime.ledger(QUEUE), runtime.ledger(DEAD)


async def run(url: str | None, path: Path, say: Callable[[str], None]) -> int:
    """The whole job; the exit code."""
    lines = path.read_bytes().splitlines()
    async with a_broker(url) as (broker, left):
        if before := await left():
            say(f"{before} orders of an earlier run are in the queues")
        publisher = broker.publisher(QUEUE)
        async with trio.open_nursery() as nursery:
            for line in lines:
                nursery.start_soon(publisher.publish, line)
        say(f"published {len(lines)} lines to {QUEUE} on {broker.name}")
        starts = [await serve(broker, left, cancel_at=len(lines) // 2, say=say)]
        say("cancelled in the middle; starting again")
        starts.append(await serve(broker, left, cancel_at=sys.maxsize, say=say))
        after = await left()
    for number, books in enumerate(starts, 1):
        for name, ledger in zip((QUEUE, DEAD), books, strict=True):
            say(f"ledger, start {number}, {name}: {ledger.deliveries}")
    orders, dead = ([books[which] for books in starts] for which in (0, 1))
    buried = sum(ledger.dead_lettered for ledger in orders)
    unknown = sum(ledger.unknown for books in starts for ledger in books)
    equations = [
        Equation(
            (len(lines) + before, "lines published, or left by an earlier run"),
            (
                (sum(ledger.acked for ledger in orders), "acked"),
                (sum(ledger.dropped for ledger in orders), "dropped"),
                (buried, "dead-lettered"),
                (after, "left at the broker"),
            ),
            slack=unknown,
        ),
        Equation(  # a dead letter that was published as the cancellation came is published again with its order
            (sum(ledger.acked for ledger in dead), "dead orders acked"),
            ((buried, "dead-lettered"),),
            slack=unknown + starts[0][0].unsettled,
            why="published twice",
        ),
    ]
    for equation in equations:
        say(f"  {equation}")
    if any(equation.difference for equation in equations) or not all(
        ledger.balanced for books in starts for ledger in books
    ):
        say("books do not balance")
        return 1
    say("books balance")
    return 0


def main(arguments: Sequence[str]) -> int:
    """Read the arguments; return the exit code."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(prog="examples/run amqp_orders", description="The order service on AMQP 1.0.")
    parser.add_argument("--url", help="a RabbitMQ 4, as amqp://guest:guest@localhost; default: an embedded broker")
    parser.add_argument("--orders", type=Path, default=here / "orders.jsonl", help="the file of orders")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.CRITICAL)  # what the handlers raise is the policy's to answer here
    return trio.run(run, options.url, options.orders, print)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
