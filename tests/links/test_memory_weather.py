"""links.memory in bad weather: lives of links and connections that break or are refused, and publishing."""

import math

import pytest
import trio
import trio.testing

from links.abc import Link, Received
from links.errors import (
    ConnectionBroken,
    LinkBroken,
    LinkRefused,
    PublishNotAccepted,
)
from links.memory import MemoryBroker, Returned, replay
from tests.links.memory_kit import attached, bodies, breaks, call, kept_open, log_of, one_life

pytestmark = pytest.mark.memory

LINK_CALLS = ["receive", "settle", "extend"]


# --- a link's life


@pytest.mark.parametrize("name", LINK_CALLS)
async def test_a_severed_link_ends_its_life(name: str) -> None:
    """Every later call is `LinkBroken`, what was unsettled is ready and counted, and the next life gets it."""
    broker = MemoryBroker(log=True)
    broker.fill("q", [b"1", b"2"])
    queue = broker.queue("q", lease=30.0)
    async with broker.connect():
        async with attached(queue) as link:
            received = [*await link.receive(2)]
            broker.sever("q")
            assert (bodies(broker.ready("q")), broker.unsettled("q")) == ([b"1", b"2"], 0)
            for _ in range(2):
                with breaks(LinkBroken):
                    await call(link, name, received)
        async with attached(queue) as link:
            assert [each.delivery.attempt for each in await link.receive(2)] == [2, 2]
    assert log_of(broker).count(Returned("q", "1", "severed")) == 1


@pytest.mark.parametrize("name", LINK_CALLS)
async def test_a_break_reaches_calls_in_flight(name: str, autojump_clock: trio.testing.MockClock) -> None:
    """A call that is on the wire when its link is severed ends at once with `LinkBroken`; its verb was not said."""
    broker = MemoryBroker(log=True)
    broker.fill("q", [b"1"])
    broker.slow_settlements("q", math.inf)
    broker.slow_extensions("q", math.inf)

    async def in_flight(link: Link[bytes], received: list[Received[bytes]]) -> None:
        with breaks(LinkBroken):
            await call(link, name, received)

    async with broker.connect(), attached(broker.queue("q", lease=30.0)) as link:
        received = [*await link.receive(1)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_flight, link, received)
            await trio.testing.wait_all_tasks_blocked()
            broker.sever("q")
    assert replay(log_of(broker)).stored == ("1",)


async def test_severing_ends_every_link_of_that_queue_alone() -> None:
    broker = MemoryBroker()
    broker.fill("b", [b"x"])
    a, b = broker.queue("a"), broker.queue("b")
    async with broker.connect(), attached(a) as one, attached(a) as two, attached(b) as other:
        broker.sever("a")
        for link in (one, two):
            with breaks(LinkBroken):
                await link.receive(1)
        assert len(await other.receive(1)) == 1


async def test_a_refused_link_does_not_attach() -> None:
    """`LinkRefused` names the subscription, the queue and the way out; an attached link stays."""
    broker = MemoryBroker("here")
    broker.fill("q", [b"x"])
    async with broker.connect(), attached(broker.queue("q")) as link:
        broker.refuse("q")
        with pytest.raises(LinkRefused, match=r"test: here refuses 'q' until admit\('q'\)"):
            async with attached(broker.queue("q")):
                pass
        assert len(await link.receive(1)) == 1
        broker.admit("q")
        async with attached(broker.queue("q")):
            pass


async def test_a_link_may_break_while_it_attaches() -> None:
    broker = MemoryBroker()
    broker.break_attaches("q", 2)
    async with broker.connect():
        for _ in range(2):
            with breaks(LinkBroken):
                async with attached(broker.queue("q")):
                    pass
        async with attached(broker.queue("q")):
            pass


# --- the connection's life


async def test_a_connection_that_breaks_ends_run() -> None:
    """`run` raises `ConnectionBroken`, and so leaves a block of `connect`."""
    broker = MemoryBroker()
    with breaks(ConnectionBroken):
        async with broker.connect():
            broker.sever_connection()
            await trio.sleep_forever()
    assert not broker.is_open


@pytest.mark.parametrize("name", LINK_CALLS)
async def test_a_broken_connection_ends_every_link(name: str) -> None:
    """Links of all queues end with `ConnectionBroken`, their deliveries go back, none attaches before the next life."""
    broker = MemoryBroker(log=True)
    broker.fill("a", [b"1"])
    broker.fill("b", [b"2"])
    async with kept_open(broker) as nursery:
        async with attached(broker.queue("a", lease=30.0)) as one, attached(broker.queue("b", lease=30.0)) as two:
            received = {one: [*await one.receive(1)], two: [*await two.receive(1)]}
            broker.sever_connection()
            assert [bodies(broker.ready(name)) for name in "ab"] == [[b"1"], [b"2"]]
            for link in (one, two):
                with breaks(ConnectionBroken):
                    await call(link, name, received[link])
        with breaks(ConnectionBroken):
            async with attached(broker.queue("a")):
                pass
        broker.sever_connection()  # there is none: nothing happens
        nursery.start_soon(one_life, broker)
        await broker.until_up()
        async with attached(broker.queue("a")) as link:
            assert [each.delivery.attempt for each in await link.receive(1)] == [2]


async def test_closing_a_connection_ends_the_links_that_are_left() -> None:
    """A link that outlives the connection it came with is broken, not silent."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    async with trio.open_nursery() as nursery:
        with broker.opened():
            await nursery.start(broker.run)
            async with attached(broker.queue("q")) as link:
                await link.receive(1)
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    await trio.testing.wait_all_tasks_blocked()
                    assert bodies(broker.ready("q")) == [b"x"]
                    with breaks(ConnectionBroken):
                        await link.receive(1)


async def test_a_refused_connection_never_comes_up() -> None:
    broker = MemoryBroker()
    broker.refuse_connection()
    with pytest.raises(LinkRefused, match="refuses connections"):
        async with broker.connect():
            pytest.fail("connected")
    broker.admit_connection()
    broker.break_connects()
    with pytest.raises(ConnectionBroken):
        async with broker.connect():
            pytest.fail("connected")
    async with broker.connect():
        pass


async def test_in_weather_a_publish_waits_for_the_next_life(autojump_clock: trio.testing.MockClock) -> None:
    """Between two lives nothing is stored; a publish that waits goes out in the next one."""
    broker = MemoryBroker()
    async with kept_open(broker) as nursery:
        broker.sever_connection()
        with trio.move_on_after(5.0) as scope:
            await broker.publisher("q").publish(b"too late")
        assert scope.cancelled_caught
        nursery.start_soon(broker.publisher("q").publish, b"in time")
        await trio.sleep(5.0)
        assert broker.ready("q") == []
        nursery.start_soon(one_life, broker)
        await broker.until_up()
        await trio.testing.wait_all_tasks_blocked()
        assert bodies(broker.ready("q")) == [b"in time"]


# --- publishing


async def test_a_slow_publish(autojump_clock: trio.testing.MockClock) -> None:
    """It is stored at its end; cancelled before that, or broken with the connection, it is not."""
    broker = MemoryBroker()
    broker.slow_publishes("q", 2.0)
    publish = broker.publisher("q").publish
    ended = trio.Event()

    async def broken() -> None:
        with breaks(LinkBroken):
            await publish(b"broken")
        ended.set()

    async with kept_open(broker) as nursery:
        await publish(b"stored")
        assert trio.current_time() == 2.0
        with trio.move_on_after(1.0):
            await publish(b"cancelled")
        nursery.start_soon(broken)
        await trio.testing.wait_all_tasks_blocked()
        broker.sever_connection()
        await ended.wait()
        assert bodies(broker.ready("q")) == [b"stored"]


async def test_a_lost_confirmation() -> None:
    """The next n messages are stored, and their publishers learn of a break alone."""
    broker = MemoryBroker()
    async with broker.connect():
        broker.lose_confirmations("q", 1)
        with breaks(LinkBroken):
            await broker.publisher("q").publish(b"1")
        await broker.publisher("q").publish(b"2")
    assert bodies(broker.ready("q")) == [b"1", b"2"]


async def test_a_closed_queue_takes_nothing() -> None:
    """`PublishNotAccepted` until it is reopened; deliveries from it go on."""
    broker = MemoryBroker()
    broker.fill("q", [b"1"])
    async with broker.connect(), attached(broker.queue("q")) as link:
        broker.close("q")
        with breaks(PublishNotAccepted):
            await broker.publisher("q").publish(b"2")
        await broker.publisher("other").publish(b"3")
        assert len(await link.receive(9)) == 1
        broker.reopen("q")
        await broker.publisher("q").publish(b"4")
    assert bodies(broker.ready("q")) == [b"1", b"4"]
