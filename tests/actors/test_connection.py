"""actors.connection: one connection for all links of a broker, restarted after breaks, closed last (DESIGN 1, 4)."""

# pyright: reportPossiblyUnboundVariable=false
# ruff: noqa: PT012 -- a scenario raises where it ends

import pytest
import trio

from actors import LinkGaveUp, Subscription, connected, open_runtime
from actors.events import Attached, Broke, Event
from links.errors import ConnectionBroken
from links.memory import MemoryBroker
from settlement import Delivery
from tests.actors.scenery import Clock, StageBroker, StageQueue, acked, answers, lines, numbered, stored


async def test_a_broken_connection_brings_all_links_back(autojump_clock: Clock) -> None:
    """DESIGN 4, row 'connection breaks': the lives end, what was in hand is unsettled, and all goes on in the next."""
    broker = MemoryBroker()
    for name in "abc":
        broker.fill(name, numbered(5))
    async with open_runtime(
        *(Subscription(broker.queue(name), answers(taking=1.0), concurrency=2) for name in "abc")
    ) as runtime:
        await trio.sleep(1.5)
        broker.sever_connection()
        for name in "abc":
            await broker.until_empty(name)
            assert runtime.statistics()[name].restarts == 1
            assert runtime.statistics()[name].degraded == ()
    for name in "abc":
        books = runtime.ledger(name)
        assert books.acked == 5
        assert books.received == 5 + books.unsettled + books.unknown


async def test_many_breaks_that_are_far_apart(autojump_clock: Clock) -> None:
    """DESIGN 4: a connection that breaks every minute for a day is weather, not an end; links do not count it."""
    broker = MemoryBroker()
    async with open_runtime(Subscription(broker.queue("q"), answers())) as runtime:
        for number in range(300):
            await trio.sleep(15.0)
            broker.sever_connection()
            broker.fill("q", [b"%d" % number])
            await broker.until_empty("q")
    assert acked(runtime) == 300


async def test_a_flapping_connection_gives_up_once(autojump_clock: Clock) -> None:
    """DESIGN 4: the connection's supervisor gives up, by its broker's name, from the last break; links stay silent."""
    broker = MemoryBroker("far")

    with pytest.raises(ExceptionGroup) as caught:
        async with open_runtime(*(Subscription(broker.queue(name), answers()) for name in "ab")):
            while True:
                await trio.sleep(2.0)
                broker.sever_connection()
    (error,) = caught.value.exceptions
    assert isinstance(error, LinkGaveUp)
    assert (error.name, type(error.__cause__)) == ("far", ConnectionBroken)


async def test_observers_hear_of_connections_and_links(autojump_clock: Clock) -> None:
    """DESIGN 1 (events): both are told by name when they attach and when they break."""
    broker = MemoryBroker("far")
    heard: list[Event] = []
    async with open_runtime(Subscription(broker.queue("q"), answers()), observers=[heard.append]):
        broker.sever_connection()
        await trio.sleep(5.0)
    told = [(type(event), event.name) for event in heard if isinstance(event, Attached | Broke)]
    assert sorted(told, key=str) == sorted(
        [(Attached, "far"), (Attached, "q"), (Broke, "far"), (Broke, "q"), (Attached, "far"), (Attached, "q")], key=str
    )
    assert told[:2] == [(Attached, "far"), (Attached, "q")]


async def test_the_connection_closes_after_the_links(autojump_clock: Clock) -> None:
    """DESIGN 4: the exits run from the inside out: links, copies, connections."""
    order: list[str] = []

    class Told(StageBroker):
        async def run(  # noqa: ASYNC128 -- super calls started
            self, goodbye: float = 5.0, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
        ) -> None:
            try:
                await super().run(goodbye, task_status=task_status)
            finally:
                order.append(f"connection {trio.current_time():g}")

    queue = StageQueue(Told(closing=1.0), [b"x"], detaching=1.0)
    async with open_runtime(Subscription(queue, answers(taking=3.0))):
        await trio.sleep(1.0)
    assert order == ["connection 5"]
    with trio.move_on_after(1.0):
        async with open_runtime(
            Subscription(StageQueue(Told(closing=1.0), [b"x"], detaching=1.0), answers(taking=9.0))
        ):
            await trio.sleep_forever()
    assert order == ["connection 5", "connection 8"]


async def test_two_brokers_break_one_by_one(autojump_clock: Clock) -> None:
    """DESIGN 1: each broker has its own supervised connection: the links of the other go on."""
    one, two = MemoryBroker("one"), MemoryBroker("two")
    two.fill("q", [b"x"])
    async with open_runtime(
        Subscription(one.queue("q"), answers(), name="one.q"),
        Subscription(two.queue("q"), answers(taking=30.0), name="two.q"),
    ) as runtime:
        one.break_connects(5)
        one.sever_connection()
        await two.until_empty("q")
    assert lines(runtime.ledger("two.q")) == {"received": 1, "acked": 1}


async def test_a_shared_connection_that_breaks_for_good(autojump_clock: Clock) -> None:
    """DESIGN 2: `broker.connect()` is one life: its break cancels the block, and with it the runtime inside."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    with pytest.raises(ConnectionBroken):
        async with broker.connect(), open_runtime(Subscription(broker.queue("q"), answers(taking=60.0))) as runtime:
            await trio.sleep(1.0)
            broker.sever_connection()
            await trio.sleep_forever()
    assert lines(runtime.ledger("q")) == {"received": 1, "unsettled": 1}


async def test_a_shared_connection_that_lives_on(autojump_clock: Clock) -> None:
    """DESIGN 2: `connected(broker)` keeps a broker connected through weather, and a runtime inside lives through it."""
    broker = MemoryBroker()
    broker.fill("q", numbered(3))

    async def handler(delivery: Delivery[bytes]) -> None:
        await trio.sleep(1.0)
        await broker.publisher("out").publish(delivery.body)

    async with connected(broker), open_runtime(Subscription(broker.queue("q"), handler)) as runtime:
        await trio.sleep(1.5)
        broker.sever_connection()
        await broker.until_empty("q")
    assert acked(runtime) == 3
    assert set(stored(broker, "out")) == set(numbered(3))
