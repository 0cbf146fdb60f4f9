"""What the tests of `links.memory` share."""

from collections.abc import AsyncGenerator, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager

import pytest
import trio

from links.abc import Link, Received, Settlement, Verdict
from links.errors import ConnectionBroken
from links.memory import Entry, MemoryBroker, MemoryQueue
from settlement import Letter, Plan
from settlement.ledger import Line
from settlement.memory import Accept, Verb


def nothing_lost(received: Received[bytes], line: Line) -> None:
    raise AssertionError(f"{received} was lost: {line}")


@asynccontextmanager
async def attached(queue: MemoryQueue) -> AsyncGenerator[Link[bytes], None]:
    async with queue.attach("test", nothing_lost, 5.0) as link:
        yield link


@asynccontextmanager
async def kept_open(broker: MemoryBroker) -> AsyncGenerator[trio.Nursery, None]:
    """The broker is open and connected; a break of the connection is not followed by another life."""
    with broker.opened():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one_life, broker)
            await broker.until_up()
            yield nursery
            nursery.cancel_scope.cancel()


async def one_life(broker: MemoryBroker) -> None:
    with pytest.raises(ConnectionBroken):
        await broker.run()


def order(received: Received[bytes], verb: Verb | None = None) -> Settlement:
    return Settlement(received, Plan(Line.ACKED, Accept() if verb is None else verb))


def orders(received: Iterable[Received[bytes]], verb: Verb | None = None) -> list[Settlement]:
    return [order(each, verb) for each in received]


def bodies(found: Iterable[Received[bytes]] | Iterable[Letter]) -> list[bytes]:
    return [each.delivery.body if isinstance(each, Received) else each.body for each in found]


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def kinds(verdicts: Iterable[Verdict]) -> list[type[object]]:
    return [type(verdict) for verdict in verdicts]


def log_of(broker: MemoryBroker) -> list[Entry]:
    assert broker.log is not None
    return broker.log


async def call(link: Link[bytes], name: str, received: list[Received[bytes]]) -> object:
    match name:
        case "receive":
            return await link.receive(1)
        case "settle":
            return await link.settle(orders(received))
        case _:
            return await link.extend(received)


@contextmanager
def breaks(error: type[Exception]) -> Generator[None, None, None]:
    """The block ends with this error, and at once."""
    before = trio.current_time()
    with pytest.raises(error):
        yield
    assert trio.current_time() - before < 1.0
