"""What the tests of bad weather on real brokers share: a log of what happened, and ways to fill queues and to wait."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import pytest
import trio

import actors.supervisor
from actors import Runtime
from actors.events import Attached, Booked, Broke, Event
from actors.restarts import Restarts
from links.amqp.broker import AmqpBroker
from settlement import Delivery
from settlement.ledger import Ended, Line, Took
from tests.links.rabbit_kit import Rabbit

__all__ = ["PATIENCE", "SLACK", "Log", "fill", "numbered", "often", "until", "until_more"]

PATIENCE: Final = 30.0
"""Seconds for anything that must happen."""
SLACK: Final = 2.0
"""Seconds that a loaded machine may take for what takes milliseconds."""


class Log:
    """An observer that remembers when what happened, and a handler that counts."""

    def __init__(self) -> None:
        self.handled: Counter[bytes] = Counter()
        self.running = 0
        self.events: list[tuple[float, Event]] = []
        self.takes: Counter[bytes] = Counter()
        self.ends: dict[bytes, list[Line]] = defaultdict(list)
        self.wrong: list[str] = []

    def __call__(self, event: Event) -> None:
        self.events.append((trio.current_time(), event))
        if not isinstance(event, Booked):
            return
        for delivery in event.deliveries:
            if isinstance(event.entry, Ended):
                self.ends[delivery.body].append(event.entry.line)
            elif isinstance(event.entry, Took):
                self.takes[delivery.body] += 1
                if Line.ACKED in self.ends[delivery.body]:
                    self.wrong.append(f"{delivery.body!r} was booked as acked, and is here again")

    @contextmanager
    def handling(self, delivery: Delivery[Any]) -> Generator[None, None, None]:
        self.running += 1
        self.handled[delivery.body] += 1
        try:
            yield
        finally:
            self.running -= 1

    def booked(self, line: Line) -> set[bytes]:
        """Which have ended so."""
        return {body for body, lines in self.ends.items() if line in lines}

    def breaks(self, name: str) -> list[tuple[float, Broke]]:
        """When a life of this one broke."""
        return [(at, event) for at, event in self.events if isinstance(event, Broke) and event.name == name]

    def attached(self, name: str) -> list[float]:
        """When a life of this one had attached."""
        return [at for at, event in self.events if isinstance(event, Attached) and event.name == name]

    def judge(self, bodies: Sequence[bytes], runtime: Runtime, name: str) -> None:
        """Each was handled, acked once or unknown; each repeat has its reason; the books balance."""
        assert not self.wrong, self.wrong[:5]
        ledger = runtime.ledger(name)
        assert ledger.balanced, ledger.deliveries
        assert ledger.received == ledger.acked + ledger.unsettled + ledger.unknown == self.takes.total()
        assert ledger.in_hand == 0
        assert set(self.handled) == set(self.takes) == set(bodies)
        for body, lines in self.ends.items():
            assert lines.count(Line.ACKED) <= 1, f"{body!r}: {lines}"
            assert lines.count(Line.ACKED) or Line.UNKNOWN in lines, f"{body!r} never got to its end: {lines}"
            again = lines.count(Line.UNSETTLED) + lines.count(Line.UNKNOWN)
            assert self.takes[body] - 1 <= again, f"{body!r} was taken {self.takes[body]} times: {lines}"


async def until(condition: Callable[[], bool], within: float = PATIENCE) -> None:
    """Wait for something that nobody tells of."""
    deadline = trio.current_time() + within
    while not condition():
        assert trio.current_time() < deadline, "it did not happen"
        await trio.sleep(0.002)


async def until_more(count: Callable[[], int], than: int) -> None:
    """Wait until it counts more than so many."""
    await until(lambda: count() > than)


async def fill(rabbit: Rabbit, name: str, bodies: Sequence[bytes]) -> None:
    """Publish them, over a connection of its own."""
    broker = AmqpBroker(rabbit.url)
    async with broker.connect():
        publisher = broker.publisher(name)
        for at in range(0, len(bodies), 1000):
            async with trio.open_nursery() as nursery:
                for body in bodies[at : at + 1000]:
                    nursery.start_soon(publisher.publish, body)


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def often(patch: pytest.MonkeyPatch) -> None:
    """Let lives break often: so many are flapping, which a supervisor gives up."""
    patch.setattr(actors.supervisor, "Restarts", partial(Restarts, intensity=1000, period=1.0))
