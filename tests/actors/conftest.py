"""After every scenario the books are held against the broker: whatever a test looked at, nothing else went wrong."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from actors import Runtime
from links.memory import MemoryBroker, replay


@pytest.fixture(autouse=True)
def balanced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """DESIGN 0.6 and 3.9: at every stop the books balance, nothing is in hand, and nothing is unsettled at a broker."""
    runtimes: list[Runtime] = []
    brokers: list[MemoryBroker] = []
    make_runtime, make_broker = Runtime.__init__, MemoryBroker.__init__

    def a_runtime(self: Runtime, *args: Any, **options: Any) -> None:
        make_runtime(self, *args, **options)
        runtimes.append(self)

    def a_broker(self: MemoryBroker, *args: Any, **options: Any) -> None:
        make_broker(self, *args, **{"log": True, **options})
        brokers.append(self)

    monkeypatch.setattr(Runtime, "__init__", a_runtime)
    monkeypatch.setattr(MemoryBroker, "__init__", a_broker)
    yield
    for runtime in runtimes:
        for name, statistics in runtime.statistics().items():
            books = runtime.ledger(name)
            assert books.balanced, f"{name}: {books.deliveries}; {books.copies}"
            assert (statistics.in_hand, statistics.waiting, statistics.attached) == (0, 0, False), name
    for broker in brokers:
        assert not broker.is_open
        for store in broker._stores.values():
            assert (store.unsettled, store.links) == (0, []), store.name
        assert broker.log is not None
        assert replay(broker.log).unsettled == ()


@pytest.fixture
def longest_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dice are as bad as can be: each backoff takes the whole of its time."""
    monkeypatch.setattr(random, "random", lambda: 1.0)
