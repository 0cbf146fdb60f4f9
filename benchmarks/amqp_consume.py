"""`amqp-consume-CREDIT`: messages of 1 KiB from a quorum queue of RabbitMQ 4.3, one accept per message.

Ours: `open_runtime` with one subscription of that credit at concurrency 32, and an empty handler. Peers: proton's
`Container` (explicit accept, `prefetch` of that size), rhea on node (`-rhea`), and our own engine without link and
runtime (`-bare`: receive, decode body, properties and application properties, accept, give the credit back). A message
is one data section, one application property and a message id. The figure is CPU time of the client per message, since
RabbitMQ runs on the same machine; the rates on the wall stand beside it. Rounds of all are interleaved; the queue is
filled before each.

What it does not show: a network, TLS, or a handler that does something.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from typing import Final, TypeAlias

import trio

from benchmarks.amqp_peers import Rhea, consume
from benchmarks.amqp_rabbit import BODY, HEADERS, Rabbit, Spent, Stopwatch, bare_connection, median, rabbitmq
from benchmarks.drive import drive, nothing
from benchmarks.result import Result
from links.amqp import AmqpBroker
from links.amqp.events import ACCEPTED, Terminus
from links.amqp.sections import split

CONCURRENCY: Final = 32
CREDITS: Final = (200, 1000)
WITH_RHEA: Final = 1000
ROUNDS: Final = 4

Side: TypeAlias = Callable[[Rabbit, int, int], Spent]
"""Of a node, takes so many messages with this credit."""


def ours(rabbit: Rabbit, count: int, credit: int) -> Spent:
    """The runtime."""
    queue = AmqpBroker(rabbit.url).queue(rabbit.queue, credit=credit)
    stopwatch = Stopwatch()
    trio.run(drive, queue, count, CONCURRENCY, stopwatch, nothing)
    return stopwatch.spent(count)


def bare(rabbit: Rabbit, count: int, credit: int) -> Spent:
    """The engine and its pump alone."""
    stopwatch = Stopwatch()
    trio.run(_bare, rabbit, count, credit, stopwatch)
    return stopwatch.spent(count)


async def _bare(rabbit: Rabbit, count: int, credit: int, stopwatch: Stopwatch) -> None:
    async with bare_connection(rabbit.url) as pump:
        receiver = pump.attach_receiver(await pump.begin(), Terminus(rabbit.address))
        await receiver.attached()
        stopwatch()
        receiver.grant(credit)
        left = count
        while left:
            for arrival in await receiver.receive(left):
                sections = split(arrival.raw)
                assert len(sections.body) == len(BODY)
                assert sections.properties.message_id is not None
                assert len(sections.application_properties) == len(HEADERS)
                receiver.settle(arrival, ACCEPTED)
                receiver.grant(1)
                left -= 1
    stopwatch()


def once(side: Side, rabbit: Rabbit, count: int, credit: int) -> Spent:
    """One round: nothing is left of what was there."""
    trio.run(rabbit.fill, count)
    gc.collect()
    spent = side(rabbit, count, credit)
    trio.run(rabbit.check, 0)
    return spent


def run(*, quick: bool) -> list[Result]:
    """Each credit, each peer, interleaved rounds, medians."""
    count = 10_000 if quick else 40_000
    results: list[Result] = []
    with rabbitmq() as rabbit:
        if rabbit is None:
            return []
        rhea = Rhea.installed()
        for credit in CREDITS:
            peers: dict[str, tuple[str, Side]] = {
                "": ("proton's Container", consume),
                "-bare": ("our engine without link and runtime", bare),
            }
            if rhea is not None and credit == WITH_RHEA:
                peers["-rhea"] = "rhea on node", rhea.consume
            mine: list[Spent] = []
            theirs: dict[str, list[Spent]] = {suffix: [] for suffix in peers}
            for _ in range(ROUNDS):
                mine.append(once(ours, rabbit, count, credit))
                for suffix, (_, side) in peers.items():
                    theirs[suffix].append(once(side, rabbit, count, credit))
            for suffix, (name, _) in peers.items():
                results.append(result(f"amqp-consume-{credit}{suffix}", mine, theirs[suffix], name))
    return results


def result(case: str, mine: list[Spent], theirs: list[Spent], peer: str) -> Result:
    """What the rounds came to."""
    middle, other = median(mine), median(theirs)
    return Result(
        case=case,
        ours=middle.cpu,
        peer=other.cpu,
        peer_name=peer,
        ratio=statistics.median(their.cpu / my.cpu for my, their in zip(mine, theirs, strict=True)),
        unit="µs of CPU per message",
        aside=f"on the wall: ours {middle.rate:.0f}, peer {other.rate:.0f} messages per second",
    )
