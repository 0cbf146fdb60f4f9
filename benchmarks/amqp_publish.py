"""`amqp-publish`: messages of 1 KiB to a quorum queue of RabbitMQ 4.3, each confirmed.

Ours: one publisher, shared by 64 tasks of which each waits for the confirmation of one message before it publishes the
next one. Peer: the sender of proton's `BlockingConnection`, which does the same with one message at a time. The figure
is CPU time of the client per message, since RabbitMQ runs on the same machine; the rates on the wall stand beside it:
there the peer waits for the disk. `amqp-publish-1000`: 1,000 tasks, many more than RabbitMQ gives credit (170), beside
the 64: a task that waits for credit costs next to nothing. Rounds of the two are interleaved.

What it does not show: a network, TLS, or one message alone, which takes both of them as long as the broker does.
"""

from __future__ import annotations

import gc
from itertools import count as numbers
from typing import Final

import trio

from benchmarks.amqp_consume import ROUNDS, result
from benchmarks.amqp_peers import publish
from benchmarks.amqp_rabbit import BODY, HEADERS, Rabbit, rabbitmq
from benchmarks.result import Result
from benchmarks.stopwatch import Spent, Stopwatch
from links.amqp import AmqpBroker

TASKS: Final = 64
MANY_TASKS: Final = 1000


def ours(rabbit: Rabbit, count: int, tasks: int = TASKS) -> Spent:
    """The publisher."""
    stopwatch = Stopwatch()
    trio.run(_ours, rabbit, count, tasks, stopwatch)
    return stopwatch.spent(count)


async def _ours(rabbit: Rabbit, count: int, tasks: int, stopwatch: Stopwatch) -> None:
    broker = AmqpBroker(rabbit.url)
    publisher = broker.publisher(rabbit.queue)
    number = numbers()

    async def publish_some() -> None:
        while (mine := next(number)) < count:
            await publisher.publish(BODY, {**HEADERS, "message-id": b"%032d" % mine})

    async with broker.connect():
        stopwatch()
        async with trio.open_nursery() as nursery:
            for _ in range(tasks):
                nursery.start_soon(publish_some)
        stopwatch()


def run(*, quick: bool) -> list[Result]:
    """Interleaved rounds, medians."""
    many, few = (10_000, 1_000) if quick else (40_000, 4_000)
    mine: list[Spent] = []
    wide: list[Spent] = []
    theirs: list[Spent] = []
    with rabbitmq() as rabbit:
        if rabbit is None:
            return []
        for _ in range(ROUNDS):
            gc.collect()
            mine.append(ours(rabbit, many))
            trio.run(rabbit.check, many)
            trio.run(rabbit.purge)
            gc.collect()
            wide.append(ours(rabbit, many, MANY_TASKS))
            trio.run(rabbit.check, many)
            trio.run(rabbit.purge)
            gc.collect()
            theirs.append(publish(rabbit, few))
            trio.run(rabbit.check, few)
            trio.run(rabbit.purge)
    return [
        result("amqp-publish", mine, theirs, "proton's BlockingConnection, one message at a time"),
        result("amqp-publish-1000", wide, mine, "the same publisher, shared by 64 tasks"),
    ]
