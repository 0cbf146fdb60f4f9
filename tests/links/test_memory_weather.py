"""links.memory in bad weather: each fault that a test can order does what it says, and leaves every message somewhere."""

import math
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from random import Random

import pytest
import trio
import trio.testing

from links.abc import Link, Order, Received, Settles, Verdict
from links.errors import (
    CallBroken,
    ConnectionBroken,
    LeaseLost,
    LinkBroken,
    LinkRefused,
    NotApplied,
    PublishNotAccepted,
    SettlementUnknown,
)
from links.memory import Delivered, Entry, MemoryBroker, MemoryQueue, Returned, Said, Unsaid, replay
from settlement import Letter, Plan
from settlement.ledger import Line
from settlement.memory import Accept, PutBack, Reject, Verb

pytestmark = pytest.mark.memory

LINK_CALLS = ["receive", "settle", "extend"]


def nothing_lost(received: Received[bytes]) -> None:
    raise AssertionError(f"{received} was lost")


@asynccontextmanager
async def attached(queue: MemoryQueue) -> AsyncGenerator[Link[bytes], None]:
    async with queue.attach("test", nothing_lost, 5.0) as link:
        yield link


@asynccontextmanager
async def kept_open(broker: MemoryBroker) -> AsyncGenerator[trio.Nursery, None]:
    """The broker is open and connected; a break of the connection is not followed by another life."""
    with broker.opened():
        async with trio.open_nursery() as nursery:
            await nursery.start(one_life, broker)
            yield nursery
            nursery.cancel_scope.cancel()


async def one_life(broker: MemoryBroker, *, task_status: trio.TaskStatus[None]) -> None:
    with pytest.raises(ConnectionBroken):
        await broker.run(task_status=task_status)


def orders(received: Iterable[Received[bytes]], verb: Verb | None = None) -> list[Order]:
    return [Order(each, Plan(Line.ACKED, Accept() if verb is None else verb)) for each in received]


def bodies(letters: Iterable[Letter]) -> list[bytes]:
    return [letter.body for letter in letters]


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
def breaks(error: type[Exception]) -> Iterator[None]:
    """The block ends with this error, and within no time."""
    before = trio.current_time()
    with pytest.raises(error):
        yield
    assert trio.current_time() == before


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
    async with broker.connect():
        async with attached(broker.queue("a")) as one, attached(broker.queue("a")) as two:
            async with attached(broker.queue("b")) as other:
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
    with pytest.raises(ConnectionBroken):
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
        await nursery.start(one_life, broker)
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
        await nursery.start(one_life, broker)
        await trio.testing.wait_all_tasks_blocked()
        assert bodies(broker.ready("q")) == [b"in time"]


# --- one call


@pytest.mark.parametrize("name", ["receive", "extend"])
@pytest.mark.parametrize("in_flight", [False, True])
async def test_a_call_may_fail_alone(name: str, in_flight: bool, autojump_clock: trio.testing.MockClock) -> None:
    """A receive or extend that breaks has changed nothing; the link lives on, and the next call succeeds."""
    broker = MemoryBroker(log=True)
    broker.fill("q", [b"1"])
    async with broker.connect(), attached(broker.queue("q", lease=30.0)) as link:
        received = [*await link.receive(1)]
        await trio.sleep(1.0)

        async def breaking() -> None:
            with breaks(CallBroken):
                await call(link, name, received)

        if in_flight:
            broker.slow_extensions("q", math.inf)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(breaking)
                await trio.testing.wait_all_tasks_blocked()
                broker.break_calls("q")
            broker.slow_extensions("q", 0)
        else:
            broker.fill("q", [b"2"])
            broker.break_calls("q", 2)
            await breaking()
            await breaking()
        assert (broker.held("q"), received[0].expires) == (["1"], 30.0)
        broker.fill("q", [b"3"])
        assert await call(link, name, received) is not None


@pytest.mark.parametrize("in_flight", [False, True])
async def test_a_settlement_that_breaks_is_unknown(in_flight: bool, autojump_clock: trio.testing.MockClock) -> None:
    """Some of its orders were carried out and some not; all are unknown, and those left come back with the lease."""
    broker = MemoryBroker(dice=Random(1), log=True)
    broker.fill("q", [b""] * 100)
    async with broker.connect(), attached(broker.queue("q", lease=30.0)) as link:
        received = await link.receive(100)
        verdicts: list[Verdict] = []

        async def settle() -> None:
            verdicts.extend(await link.settle([*orders(received[:50]), *orders(received[50:], PutBack())]))

        async with trio.open_nursery() as nursery:
            broker.slow_settlements("q", 5.0 if in_flight else 0.0)
            nursery.start_soon(settle)
            if in_flight:
                await trio.testing.wait_all_tasks_blocked()
            broker.break_calls("q")
        assert kinds(verdicts) == [SettlementUnknown] * 100
        fates = replay(log_of(broker))
        assert 10 < len(fates.accepted) < 40
        assert 10 < len(fates.stored) < 40
        assert len(fates.unsettled) == broker.unsettled("q") == 100 - len(fates.accepted) - len(fates.stored)
        assert {entry.why for entry in log_of(broker) if isinstance(entry, Unsaid)} == {"call broken"}
        before = len(broker.ready("q"))
        await link.receive(before)
        assert broker.most_unsettled("q") == 100  # what a verdict left unsettled takes no place
        await trio.sleep(30.0)
        assert len(broker.ready("q")) == 100 - len(fates.accepted)


async def test_a_refused_settlement_changes_nothing() -> None:
    """The next n orders are `NotApplied`: the delivery is still with the link, which may say it again."""
    broker = MemoryBroker(log=True)
    broker.fill("q", [b"1", b"2", b"3", b"4"])
    async with broker.connect(), attached(broker.queue("q")) as link:
        received = await link.receive(3)
        broker.refuse_settlements("q", 2)
        verdicts = await link.settle(orders(received))
        assert kinds(verdicts) == [NotApplied, NotApplied, type(None)]
        assert (broker.held("q"), Unsaid("q", "1", "refused") in log_of(broker)) == (["1", "2"], True)
        await link.receive(1)
        assert broker.most_unsettled("q") == 3
        assert await link.settle(orders(received[:1])) == [None]
    assert (bodies(broker.ready("q")), replay(log_of(broker)).accepted) == ([b"2", b"4"], ("3", "1"))


async def test_refusals_wait_for_orders_that_are_ours() -> None:
    """An order for a delivery that is somebody else's is `LeaseLost` also while settlements are refused."""
    broker = MemoryBroker()
    broker.fill("q", [b"1", b"2"])
    async with broker.connect(), attached(broker.queue("q", lease=30.0)) as link:
        old = await link.receive(2)
        broker.expire("q")
        assert broker.unsettled("q") == 0
        new = await link.receive(2)
        broker.refuse_settlements("q")
        assert kinds(await link.settle([*orders(old), *orders(new)])) == [LeaseLost, LeaseLost, NotApplied, type(None)]


async def test_leases_may_be_lost_at_once() -> None:
    """`expire` ends all leases on a queue now, and nothing that has none."""
    broker = MemoryBroker(log=True)
    broker.fill("q", [b"1", b"2"])
    async with broker.connect():
        async with attached(broker.queue("q", lease=3600.0)) as leased, attached(broker.queue("q")) as without:
            (one,) = await leased.receive(1)
            (two,) = await without.receive(1)
            broker.expire("q")
            assert bodies(broker.ready("q")) == [b"1"]
            assert list(await leased.extend([one])) == [one]
            assert kinds(await leased.settle(orders([one]))) == [LeaseLost]
            assert await without.settle(orders([two])) == [None]


# --- time on the wire


async def test_a_slow_settlement_is_carried_out_at_its_end(autojump_clock: trio.testing.MockClock) -> None:
    broker = MemoryBroker()
    broker.fill("q", [b"1"])
    broker.slow_settlements("q", 2.0)
    async with broker.connect(), attached(broker.queue("q")) as link:
        received = await link.receive(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.settle, orders(received))
            await trio.sleep(1.5)
            assert broker.unsettled("q") == 1
        assert (trio.current_time(), broker.unsettled("q"), broker.ready("q")) == (2.0, 0, [])


async def test_a_settlement_cancelled_on_the_wire_is_not_carried_out(autojump_clock: trio.testing.MockClock) -> None:
    broker = MemoryBroker(log=True)
    broker.fill("q", [b"1"])
    async with broker.connect(), attached(broker.queue("q")) as link:
        received = await link.receive(1)
        for seconds in (0.0, 2.0):
            broker.slow_settlements("q", seconds)
            with trio.move_on_after(seconds / 2) as scope:
                await link.settle(orders(received))
            assert scope.cancelled_caught
            assert broker.held("q") == ["1"]
    assert replay(log_of(broker)).stored == ("1",)


async def test_a_lease_may_end_on_the_wire(autojump_clock: trio.testing.MockClock) -> None:
    """A settlement that comes to its end after the lease is `LeaseLost`."""
    broker = MemoryBroker()
    broker.fill("q", [b"1"])
    broker.slow_settlements("q", 2.0)
    async with broker.connect(), attached(broker.queue("q", lease=1.0)) as link:
        assert kinds(await link.settle(orders(await link.receive(1)))) == [LeaseLost]
        assert bodies(broker.ready("q")) == [b"1"]


async def test_a_slow_publish(autojump_clock: trio.testing.MockClock) -> None:
    """It is stored at its end; cancelled before that, or broken with the connection, it is not."""
    broker = MemoryBroker()
    broker.slow_publishes("q", 2.0)
    publish = broker.publisher("q").publish

    async def broken() -> None:
        with breaks(LinkBroken):
            await publish(b"broken")

    async with kept_open(broker) as nursery:
        await publish(b"stored")
        assert trio.current_time() == 2.0
        with trio.move_on_after(1.0):
            await publish(b"cancelled")
        nursery.start_soon(broken)
        await trio.testing.wait_all_tasks_blocked()
        broker.sever_connection()
        await trio.testing.wait_all_tasks_blocked()
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


# --- a connection per delivery


async def test_a_delivery_of_its_own_connection_is_lost_alone() -> None:
    """The link tells whom it must, the message goes back and is counted; its late settlement is not applied."""
    broker = MemoryBroker(log=True)
    broker.fill("q", [b"1", b"2"])
    lost: list[Received[bytes]] = []
    async with broker.connect(), broker.queue("q", settles=Settles.ALONE).attach("s", lost.append, 5.0) as link:
        one, two = await link.receive(2)
        assert broker.sever_delivery("q", one.delivery.id)
        assert (lost, bodies(broker.ready("q")), broker.held("q")) == ([one], [b"1"], ["2"])
        assert not broker.sever_delivery("q", one.delivery.id)
        assert kinds(await link.settle(orders([one]))) == [NotApplied]
        assert await link.settle(orders([two])) == [None]
        (again,) = await link.receive(1)
        assert (again.delivery.id, again.delivery.attempt) == ("1", 2)
        assert await link.settle(orders([again])) == [None]
    assert replay(log_of(broker)).accepted == ("2", "1")


async def test_a_delivery_lost_while_it_is_settled_is_unknown(autojump_clock: trio.testing.MockClock) -> None:
    """The settlement on that connection ends at once and is unknown; another's goes on."""
    broker = MemoryBroker(log=True)
    broker.fill("q", [b"1", b"2"])
    broker.slow_settlements("q", 5.0)
    verdicts: dict[str, tuple[float, list[type[object]]]] = {}

    async def settle(link: Link[bytes], received: Received[bytes]) -> None:
        found = kinds(await link.settle(orders([received])))
        verdicts[received.delivery.id] = (trio.current_time(), found)

    queue = broker.queue("q", settles=Settles.ALONE)
    async with broker.connect(), queue.attach("s", lambda _: None, 5.0) as link, trio.open_nursery() as nursery:
        for received in await link.receive(2):
            nursery.start_soon(settle, link, received)
        await trio.sleep(1.0)
        broker.sever_delivery("q", "1")
    assert verdicts == {"1": (1.0, [SettlementUnknown]), "2": (5.0, [type(None)])}
    assert (replay(log_of(broker)).stored, replay(log_of(broker)).accepted) == (("1",), ("2",))


async def test_deliveries_that_share_a_connection_are_not_severed_alone() -> None:
    broker = MemoryBroker()
    broker.fill("q", [b"1"])
    async with broker.connect(), attached(broker.queue("q")) as link:
        await link.receive(1)
        assert not broker.sever_delivery("q", "1")
        assert broker.held("q") == ["1"]


# --- all at once


@pytest.mark.parametrize("seed", range(30))
async def test_no_weather_loses_a_message(seed: int, autojump_clock: trio.testing.MockClock) -> None:
    """Under random weather every message is accepted or rejected once, and no link has more in hand than it asked."""
    dice = Random(seed)
    broker = MemoryBroker(dice=Random(seed), log=True)
    lease = dice.choice([None, 5.0])
    queue = broker.queue("q", lease=lease, settles=dice.choice([*Settles]))
    broker.fill("q", [b"%d" % number for number in range(100)])
    async with kept_open(broker) as nursery:
        for _ in range(3):
            nursery.start_soon(consume, queue, dice)
        nursery.start_soon(storm, broker, nursery, dice)
        await broker.until_empty("q")
        nursery.cancel_scope.cancel()
    fates = replay(log_of(broker))
    assert len(fates.accepted) + len(fates.rejected) == 100
    assert len([entry for entry in log_of(broker) if isinstance(entry, Delivered)]) > 100
    assert broker.most_unsettled("q") <= 4
    attempts: dict[str, int] = {}
    for entry in log_of(broker):
        if isinstance(entry, Delivered):
            assert entry.attempt == attempts.get(entry.id, 0) + 1
            attempts[entry.id] = entry.attempt
        elif isinstance(entry, Returned) and entry.why == "given back":
            attempts[entry.id] -= 1
    assert not [entry for entry in log_of(broker) if isinstance(entry, Said) and entry.id not in attempts]


async def consume(queue: MemoryQueue, dice: Random) -> None:
    """Lives, one after the other, of somebody who is in no hurry to settle."""
    while True:
        try:
            async with queue.attach("s", lambda _: None, 5.0) as link:
                while True:
                    with trio.move_on_after(dice.choice([0.1, 20.0])):
                        await handle(queue, link, dice)
        except (LinkBroken, ConnectionBroken, LinkRefused):
            await trio.sleep(1.0)


async def handle(queue: MemoryQueue, link: Link[bytes], dice: Random) -> None:
    received = await link.receive(4)
    plans = [Plan(Line.ACKED, dice.choice([Accept(), Accept(), Reject(), PutBack(), PutBack(3.0)])) for _ in received]
    with trio.CancelScope(shield=True):
        await trio.sleep(dice.choice([0.0, 0.5, 3.0]))
        if queue.lease is not None and dice.random() < 0.5:
            with suppress(CallBroken):
                await link.extend(received)
        if dice.random() < 0.1:
            await link.give_back(received[-1:])
        asked = [Order(each, plan) for each, plan in zip(received, plans, strict=True)]
        for verdict in await link.settle(asked):
            if isinstance(verdict, NotApplied | SettlementUnknown) and queue.lease is None:
                raise LinkBroken("nothing but a goodbye brings it back")


async def storm(broker: MemoryBroker, nursery: trio.Nursery, dice: Random) -> None:
    faults = [
        partial(broker.sever, "q"),
        partial(broker.expire, "q"),
        partial(broker.break_calls, "q"),
        partial(broker.refuse_settlements, "q", 2),
        partial(broker.break_attaches, "q"),
        broker.sever_connection,
    ]
    while True:
        await trio.sleep(dice.choice([0.2, 1.0, 5.0]))
        broker.slow_settlements("q", dice.choice([0.0, 0.0, 1.0]))
        for each in broker.held("q")[:1]:
            broker.sever_delivery("q", each)
        dice.choice(faults)()
        if broker.severed.is_set():
            await trio.sleep(1.0)
            await nursery.start(one_life, broker)
