"""actors.link: one life, from attach to detach; what a break leaves, and what calls that break do (DESIGN 3 and 4)."""

# pyright: reportPossiblyUnboundVariable=false
# ruff: noqa: PT012, ARG002 -- a scenario raises where it ends; a stage does not need every argument

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from actors import LinkGaveUp, Subscription, open_runtime
from actors.events import Broke, Event, Recovered
from links.abc import Link, Received
from links.errors import CallBroken, ConnectionBroken, LinkBroken
from links.memory import MemoryBroker, MemoryLink, MemoryQueue
from settlement import Delivery
from tests.actors.scenery import Clock, StageBroker, StageLink, StageQueue, acked, answers, lines, numbered


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("what", ["sever", "sever_connection"])
async def test_a_break_while_much_is_in_hand(what: str, concurrency: int, autojump_clock: Clock) -> None:
    """DESIGN 4, trap 'a break while several tasks wait to hand over': no closed channel is met, the next life goes
    on.
    """
    for again in range(10):
        broker = MemoryBroker()
        broker.fill("q", numbered(50))
        broker.slow_settlements("q", 0.3)
        queue = broker.queue("q", limit=12)
        async with open_runtime(Subscription(queue, answers(taking=0.2), concurrency=concurrency)) as runtime:
            await trio.sleep(0.1 * again)
            if what == "sever":
                broker.sever("q")
            else:
                broker.sever_connection()
            await broker.until_empty("q")
            assert runtime.statistics()["q"].restarts == 1
        books = runtime.ledger("q")
        assert books.acked == 50
        assert books.received == 50 + books.unsettled + books.unknown


@pytest.mark.parametrize("draining", [False, True])
@pytest.mark.parametrize("what", ["sever", "sever_connection"])
async def test_a_break_is_heard_while_nothing_is_asked_of_the_link(
    what: str, draining: bool, autojump_clock: Clock
) -> None:
    """DESIGN 4, row 'link breaks': that life dies then, also where its hand is full or it drains: no call is in
    flight.
    """
    broker = MemoryBroker()
    broker.fill("q", numbered(2))
    cancelled: list[float] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        try:
            await trio.sleep(100.0)
        except trio.Cancelled:
            cancelled.append(trio.current_time())
            raise

    async with open_runtime(Subscription(broker.queue("q", limit=2), handler, concurrency=2), grace=200.0) as runtime:
        await trio.sleep(1.0)
        if draining:
            runtime.drain()
            await trio.sleep(1.0)
        if what == "sever":
            broker.sever("q")
        else:
            broker.sever_connection()
        await trio.sleep(1.0)
        assert len(cancelled) == 2


async def test_flapping_ends_in_giving_up(autojump_clock: Clock) -> None:
    """DESIGN 4: a link that works and breaks six times within a minute gives up, by its subscription's name."""
    broker = MemoryBroker()
    with pytest.raises(ExceptionGroup) as caught:
        async with open_runtime(Subscription(broker.queue("q"), answers(), name="orders")) as runtime:
            while True:
                broker.fill("q", [b"x"])
                await trio.sleep(3.0)
                broker.sever("q")
    (error,) = caught.value.exceptions
    assert isinstance(error, LinkGaveUp)
    assert error.name == "orders"
    assert isinstance(error.__cause__, LinkBroken)
    assert runtime.statistics()["orders"].restarts == 5


async def test_lives_that_get_nothing_through_are_an_outage(autojump_clock: Clock) -> None:
    """DESIGN 4: a life that attached and got no call through is no flapping: degraded all the while, for `patience`."""
    broker = MemoryBroker()
    began: list[float] = []
    recovered: list[Event] = []

    def observe(event: Event) -> None:
        if isinstance(event, Recovered):
            recovered.append(event)

    with pytest.raises(ExceptionGroup) as caught:
        async with open_runtime(Subscription(broker.queue("q"), answers()), observers=[observe]) as runtime:
            while True:
                broker.break_calls("q", 5)
                await trio.sleep(0.5)
                began.append(trio.current_time())
                assert runtime.statistics()["q"].degraded or trio.current_time() < 3.0
    (error,) = caught.value.exceptions
    assert isinstance(error, LinkGaveUp)
    assert "nothing got through" in str(error)
    assert 600.0 < began[-1] < 640.0
    assert recovered == []


async def test_a_link_that_had_nothing_to_do_for_a_day_has_worked(autojump_clock: Clock) -> None:
    """DESIGN 4: a link on an empty queue that breaks after a day spends nothing of its patience, and recovers."""
    broker = MemoryBroker()
    async with open_runtime(Subscription(broker.queue("q"), answers())) as runtime:
        for _ in range(3):
            await trio.sleep(86_400.0)
            broker.sever("q")
            await trio.sleep(90.0)
            assert runtime.statistics()["q"].degraded == ()
    assert runtime.statistics()["q"].restarts == 3


async def test_calls_that_break_alone_spend_no_restart(autojump_clock: Clock) -> None:
    """DESIGN 4, row 'a pooled connection breaks': the call in flight alone; a routine break spends no restart."""
    broker = MemoryBroker()
    async with open_runtime(Subscription(broker.queue("q"), answers())) as runtime:
        for _ in range(50):
            broker.break_calls("q")
            await trio.sleep(2.0)
            broker.fill("q", [b"x"])
            await broker.until_empty("q")
        assert runtime.statistics()["q"].restarts == 0
    assert acked(runtime) == 50


async def test_calls_that_never_succeed_end_the_life(autojump_clock: Clock) -> None:
    """DESIGN 4: calls that fail over and over are weather of the link, so that it is counted, and gives up."""
    broker = MemoryBroker()
    heard: list[Event] = []
    with pytest.raises(ExceptionGroup) as caught:
        async with open_runtime(Subscription(broker.queue("q"), answers()), observers=[heard.append]):
            broker.break_calls("q", 10**6)
            await trio.sleep_forever()
    assert [type(error) for error in caught.value.exceptions] == [LinkGaveUp]
    broke = [event.error for event in heard if isinstance(event, Broke)]
    assert isinstance(broke[0], LinkBroken)
    assert isinstance(broke[0].__cause__, CallBroken)


async def test_a_place_is_asked_before_each_receive(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """DESIGN 3.1: each claim asks for the free places, never for none."""
    rooms: list[int] = []
    receive = MemoryLink.receive

    async def spied(self: MemoryLink, room: int) -> object:
        rooms.append(room)
        return await receive(self, room)

    monkeypatch.setattr(MemoryLink, "receive", spied)
    broker = MemoryBroker()
    broker.fill("q", numbered(40))
    async with open_runtime(Subscription(broker.queue("q", limit=6), answers(taking=1.0), concurrency=3)):
        await broker.until_empty("q")
    assert rooms[0] == 6
    assert min(rooms) >= 1
    assert max(rooms) == 6


async def test_a_bug_of_a_link_ends_the_runtime(autojump_clock: Clock) -> None:
    """DESIGN 4: what a link raises that is no weather is a bug: it propagates, and nothing is restarted."""

    class Broken(StageLink):
        async def settle(self, settlements: object) -> object:  # type: ignore[override]
            raise ZeroDivisionError

    queue = StageQueue(StageBroker(), numbered(3), link=Broken)
    with pytest.raises(ExceptionGroup) as caught:
        async with open_runtime(Subscription(queue, answers())) as runtime:
            await trio.sleep_forever()
    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError]
    books = runtime.ledger("q")
    assert (books.received, books.unknown, books.unsettled) == (3, 1, 2)
    assert queue.lives == 1


async def test_what_is_unreadable_is_a_delivery(autojump_clock: Clock) -> None:
    """DESIGN 6 (Runtime): what the transport cannot read is a delivery with a decode failure, never a broken link."""

    class Garbled(StageLink):
        async def receive(self, room: int) -> list[Received[bytes]]:
            received = await super().receive(1)
            received[0].unreadable = ValueError("no such section")
            return list(received)

    seen: list[Delivery[bytes]] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        seen.append(delivery)

    queue = StageQueue(StageBroker(), numbered(2), link=Garbled)
    async with open_runtime(Subscription(queue, handler)) as runtime:
        await trio.sleep(1.0)
        assert runtime.statistics()["q"].restarts == 0
    assert seen == []
    assert lines(runtime.ledger("q")) == {"received": 2, "dropped": 2}


async def test_a_cancel_between_link_and_channel_loses_nothing(autojump_clock: Clock) -> None:
    """DESIGN 3.3: between the link's hand-over and the channel there is no checkpoint: received is booked or back."""
    for again in range(40):
        broker = MemoryBroker()
        with trio.CancelScope() as scope:
            async with open_runtime(Subscription(broker.queue("q"), answers(), concurrency=2)) as runtime:
                await trio.testing.wait_all_tasks_blocked()
                broker.fill("q", numbered(3))
                for _ in range(again % 5):
                    await trio.lowlevel.checkpoint()
                scope.cancel()
                await trio.sleep_forever()
        assert runtime.ledger("q").balanced
        assert len(broker.ready("q")) == 3 - runtime.ledger("q").acked


@pytest.mark.parametrize("ends", ["life", "drain"])
async def test_a_link_that_knows_of_a_break_before_its_broker_waits_for_the_next_life(
    ends: str, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DESIGN 4: after `ConnectionBroken` a link waits for the connection's *next* life, although this one seems up."""
    attaches: list[float] = []
    attach = MemoryQueue.attach
    half_open = False

    @asynccontextmanager
    async def knowing(self: MemoryQueue, *arguments: Any, **options: Any) -> AsyncGenerator[Link[bytes], None]:
        attaches.append(trio.current_time())
        assert len(attaches) < 10, "it does not wait"
        await trio.lowlevel.checkpoint()
        if half_open:
            raise ConnectionBroken("gone, and the broker has not heard of it")
        async with attach(self, *arguments, **options) as link:
            yield link

    monkeypatch.setattr(MemoryQueue, "attach", knowing)
    broker = MemoryBroker()
    async with open_runtime(Subscription(broker.queue("q"), answers())) as runtime:
        half_open = True
        broker.sever("q")
        await trio.sleep(3600.0)
        assert len(attaches) == 2
        assert "has not heard" in runtime.statistics()["q"].degraded[0]
        half_open = False
        broker.fill("q", [b"x"])
        if ends == "life":
            broker.sever_connection()
            await broker.until_empty("q")
            assert runtime.statistics()["q"].degraded == ()
    assert trio.current_time() == (3600.0 if ends == "drain" else pytest.approx(attaches[2]))
    assert len(attaches) == (3 if ends == "life" else 2)
    assert acked(runtime) == (ends == "life")


async def test_what_a_link_has_trouble_with_ends_with_its_life(autojump_clock: Clock) -> None:
    """A link says *degraded* and *works again* by plain calls; what it never took back does not outlive it."""
    broker = MemoryBroker()
    async with open_runtime(Subscription(broker.queue("q"), answers())) as runtime:
        link = broker.store("q").links[0]
        assert isinstance(link, MemoryLink)
        link.degraded("claiming row 7", "a constraint")
        link.degraded("claiming row 8", "a trigger")
        assert runtime.statistics()["q"].degraded == ("claiming row 7: a constraint", "claiming row 8: a trigger")
        link.degraded("claiming row 7", None)
        assert runtime.statistics()["q"].degraded == ("claiming row 8: a trigger",)
        broker.fill("q", [b"x"])
        await trio.sleep(1.0)
        broker.sever("q")
        await trio.sleep(5.0)
        assert runtime.statistics()["q"].degraded == ()
