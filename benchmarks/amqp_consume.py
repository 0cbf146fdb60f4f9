"""`amqp-consume-CREDIT`, `amqp-read-CREDIT`: messages of 1 KiB from a quorum queue of RabbitMQ 4.3, an accept for each.

Ours: `open_runtime` with one subscription of that credit at concurrency 32. Peers: proton's `Container` (explicit
accept, `prefetch` of that size), our own engine without link and runtime (`-bare`: receive, find the body, accept,
give the credit back), RabbitMQ's own client for Python on proton (`-rabbitmq`), and rhea on node (`-rhea`). In
`amqp-consume` the handler of every side does nothing; in `amqp-read` it reads body, message id and one header. A
message is one data section, one application property and a message id. The figure is CPU time of the client per
message, since RabbitMQ runs on the same machine; the rates on the wall stand beside it. Rounds of all are interleaved;
the queue is filled before each.

Targets: Container 5 and 4 (`read`), rhea 1.1, bare 0.8 and 0.9 (`read`).

What it does not show: a network, TLS, or a handler that waits.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from typing import Final, TypeAlias

import trio

from benchmarks.amqp_peers import Rhea, consume, rabbitmq_client
from benchmarks.amqp_rabbit import BODY, HEADERS, Rabbit, bare_connection, rabbitmq
from benchmarks.drive import drive, nothing
from benchmarks.result import Result
from benchmarks.stopwatch import Spent, Stopwatch, median
from links.amqp import AmqpBroker
from links.amqp.engine.events import ACCEPTED, Terminus
from links.amqp.wire.headers import Headers, identity
from links.amqp.wire.sections import quick
from links.amqp.wire.values import LONG_BINARY
from settlement import Ack, Delivery, Outcome

CONCURRENCY: Final = 32
CREDITS: Final = (200, 1000)
WITH_RHEA: Final = 1000
ROUNDS: Final = 4

Side: TypeAlias = Callable[[Rabbit, int, int, bool], Spent]
"""Of a node, takes so many messages with this credit, and reads them or not."""


async def read(delivery: Delivery[bytes]) -> Outcome:
    """Read body, message id and one header."""
    assert len(delivery.body) == len(BODY)
    assert delivery.id
    assert delivery.headers["kind"] == HEADERS["kind"]
    return Ack()


def ours(rabbit: Rabbit, count: int, credit: int, reads: bool) -> Spent:
    """The runtime."""
    queue = AmqpBroker(rabbit.url).queue(rabbit.queue, credit=credit)
    stopwatch = Stopwatch()
    trio.run(drive, queue, count, CONCURRENCY, stopwatch, read if reads else nothing)
    return stopwatch.spent(count)


def bare(rabbit: Rabbit, count: int, credit: int, reads: bool) -> Spent:
    """The engine and its connection alone."""
    stopwatch = Stopwatch()
    trio.run(_bare, rabbit, count, credit, reads, stopwatch)
    return stopwatch.spent(count)


async def _bare(rabbit: Rabbit, count: int, credit: int, reads: bool, stopwatch: Stopwatch) -> None:
    async with bare_connection(rabbit.url) as connection:
        receiver = connection.attach_receiver(await connection.begin(), Terminus(rabbit.address))
        await receiver.attached()
        stopwatch()
        receiver.grant(credit)
        left = count
        while left:
            for arrival in await receiver.receive(left):
                _look(arrival.raw, reads)
                receiver.settle(arrival, ACCEPTED)
                receiver.grant(1)
                left -= 1
    stopwatch()


def _look(raw: bytes, reads: bool) -> None:
    """No more than our own link and handler read of it."""
    found = quick(raw)
    assert found is not None
    _, properties, named, at = found
    body = raw[at + 5 :] if raw[at] == LONG_BINARY else raw[at + 2 :]
    if reads:
        assert len(body) == len(BODY)
        assert identity(raw, properties)[0]
        assert Headers(raw, properties, named)["kind"] == HEADERS["kind"]


def once(side: Side, rabbit: Rabbit, count: int, credit: int, reads: bool) -> Spent:
    """One round: nothing is left of what was there."""
    trio.run(rabbit.fill, count)
    gc.collect()
    spent = side(rabbit, count, credit, reads)
    trio.run(rabbit.check, 0)
    return spent


def run(*, quick: bool) -> list[Result]:
    """`amqp-consume`."""
    return measure("amqp-consume", quick=quick, reads=False)


def measure(case: str, *, quick: bool, reads: bool) -> list[Result]:
    """Each credit, each peer, interleaved rounds, medians."""
    count = 10_000 if quick else 40_000
    results: list[Result] = []
    with rabbitmq() as rabbit:
        if rabbit is None:
            return []
        rhea, client = Rhea.installed(), rabbitmq_client()
        for credit in CREDITS:
            peers: dict[str, tuple[str, Side]] = {
                "": ("proton's Container", consume),
                "-bare": ("our engine without link and runtime", bare),
            }
            if client is not None and credit == CREDITS[0]:
                peers["-rabbitmq"] = "rabbitmq-amqp-python-client", client
            if rhea is not None and credit == WITH_RHEA:
                peers["-rhea"] = "rhea on node", rhea.consume
            mine: list[Spent] = []
            theirs: dict[str, list[Spent]] = {suffix: [] for suffix in peers}
            for _ in range(ROUNDS):
                mine.append(once(ours, rabbit, count, credit, reads))
                for suffix, (_, side) in peers.items():
                    theirs[suffix].append(once(side, rabbit, count, credit, reads))
            for suffix, (name, _) in peers.items():
                results.append(result(f"{case}-{credit}{suffix}", mine, theirs[suffix], name))
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
