"""actors.forwarding: what waits in a store is published when it is due, by a subscription of the runtime's own."""

# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import trio

from actors import Runtime, Subscription, open_runtime
from actors.events import Booked, Event
from links.memory import MemoryBroker
from links.memory.source import MemoryQueue
from settlement import Delivery, Letter
from settlement.plans import Publish
from tests.actors.scenery import HANGS, Clock, answers, bodies, lines, stored


def storing(broker: MemoryBroker, name: str, store: MemoryQueue) -> MemoryQueue:
    """A queue whose delayed copies are thought to wait in `store`: each goes to the queue, but for what is strange."""

    def forwarded(delivery: Delivery[Any]) -> Publish:
        if delivery.body == b"strange":
            raise ValueError("it is no stored copy")
        return Publish(Letter(delivery.body), broker.publisher(name))

    queue = broker.queue(name)
    queue.store = store
    queue.forwarded = forwarded  # type: ignore[method-assign]
    return queue


async def test_what_is_in_the_store_goes_to_its_queue(autojump_clock: Clock) -> None:
    """The runtime opens the store's broker too, runs a subscription of its own there, and keeps its books."""
    broker, beside = MemoryBroker(), MemoryBroker()
    beside.fill("late", [b"1", b"2"])
    queue = storing(broker, "q", beside.queue("late"))
    async with open_runtime(Subscription(queue, answers())) as runtime:
        await trio.sleep(1.0)
    assert lines(runtime.ledger("late (stored)")) == {"received": 2, "acked": 2}
    assert lines(runtime.ledger("q")) == {"received": 2, "acked": 2}


def test_one_for_each_store_by_a_name_of_its_own() -> None:
    """Those who share a store share the subscription; a name that is taken gets a number."""
    broker, beside = MemoryBroker(), MemoryBroker()
    late, other = beside.queue("late"), beside.queue("late")
    sources = [storing(broker, "a", late), storing(broker, "b", late), storing(broker, "late (stored)", other)]
    runtime = Runtime(*[Subscription(each, answers()) for each in sources])
    assert list(runtime.statistics()) == ["a", "b", "late (stored)", "late (stored) 2", "late (stored) 3"]


def test_one_store_for_two_brokers_is_refused() -> None:
    """Either could take what is the other's."""
    late = MemoryBroker().queue("late")
    one, two = storing(MemoryBroker(), "a", late), storing(MemoryBroker(), "b", late)
    with pytest.raises(ValueError, match="give each a table or a group of its own"):
        Runtime(Subscription(one, answers()), Subscription(two, answers()))


async def test_a_queue_that_refuses_is_tried_again_without_end(autojump_clock: Clock) -> None:
    """DESIGN 3.6: after 1 s, doubled to 60 s, each spread over its upper half; degraded; a day later it is there."""
    broker, beside = MemoryBroker(), MemoryBroker()
    beside.fill("late", [b"1"])
    broker.close("q")
    times: list[float] = []

    def observer(event: Event) -> None:
        if isinstance(event, Booked) and event.subscription == "late (stored)" and "DELAYED" in str(event.entry):
            times.append(trio.current_time())

    queue = storing(broker, "q", beside.queue("late"))
    async with open_runtime(Subscription(queue, answers()), observers=[observer]) as runtime:
        await trio.sleep(86_400.0)
        (degraded,) = runtime.statistics()["late (stored)"].degraded
        assert degraded.startswith("forwarding to q: ")
        assert stored(beside, "late") == [b"1"]
        broker.reopen("q")
        await trio.sleep(61.0)
        assert runtime.statistics()["late (stored)"].degraded == ()
    waits = [later - earlier for earlier, later in pairwise(times)]
    most = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, *[60.0] * (len(waits) - 6)]
    assert len(waits) > 1_000
    assert [wait for wait, limit in zip(waits, most, strict=True) if not limit / 2 <= wait <= limit + 0.001] == []
    assert lines(runtime.ledger("q")) == {"received": 1, "acked": 1}


async def test_a_row_goes_back_when_its_broker_is_away(autojump_clock: Clock) -> None:
    """Another process may reach it; degraded, and forwarded when it is there again."""
    broker, beside = MemoryBroker(), MemoryBroker()
    queue = storing(broker, "q", beside.queue("late"))
    async with open_runtime(Subscription(queue, answers())) as runtime:
        broker.break_connects(20)
        broker.sever_connection()
        beside.fill("late", [b"1"])
        await trio.sleep(4.0)
        assert beside.unsettled("late") == 1  # it may come back at once
        await trio.sleep(1.5)
        assert (beside.unsettled("late"), bodies(beside.delayed("late"))) == (0, [b"1"])
        (degraded,) = runtime.statistics()["late (stored)"].degraded
        assert degraded.endswith("is between two connections")
        await trio.sleep(900.0)
        assert runtime.statistics()["late (stored)"].degraded == ()
    assert lines(runtime.ledger("q")) == {"received": 1, "acked": 1}


async def test_what_is_no_stored_copy_is_put_back_and_logged(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """It is somebody's: neither dropped nor a dead letter; those behind it go on."""
    broker, beside = MemoryBroker(), MemoryBroker()
    beside.fill("late", [b"strange", b"1"])
    async with open_runtime(Subscription(storing(broker, "q", beside.queue("late")), answers())) as runtime:
        await trio.sleep(3_600.0)
    assert stored(beside, "late") == [b"strange"]
    assert "it is no stored copy" in caplog.text
    books = lines(runtime.ledger("late (stored)"))
    assert books.keys() == {"received", "acked", "delayed"}
    assert books["acked"] == 1
    assert 60 < books["delayed"] < 130


async def test_a_drain_forwards_no_more_and_gives_back_what_is_in_hand(autojump_clock: Clock) -> None:
    """What hangs is cancelled when the grace is over, and stays in the store."""
    broker, beside = MemoryBroker(), MemoryBroker()
    broker.slow_publishes("q", HANGS)
    beside.fill("late", [b"1"])
    async with open_runtime(Subscription(storing(broker, "q", beside.queue("late")), answers()), grace=3.0) as runtime:
        await trio.sleep(1.0)
        runtime.drain()
        await trio.sleep(0.1)
        beside.fill("late", [b"2"])
    assert stored(beside, "late") == [b"1", b"2"]
    assert lines(runtime.ledger("late (stored)")) == {"received": 1, "unsettled": 1}
