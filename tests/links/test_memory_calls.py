"""links.memory: calls that break, are refused or take long, and deliveries on connections of their own."""

import math
from random import Random

import pytest
import trio
import trio.testing

from links.abc import Link, Received, Settles, Verdict
from links.errors import (
    CallBroken,
    LeaseLost,
    NotApplied,
    SettlementUnknown,
)
from links.memory import MemoryBroker, Unsaid, replay
from settlement.ledger import Line
from settlement.memory import PutBack
from tests.links.memory_kit import attached, bodies, breaks, call, kinds, log_of, orders

pytestmark = pytest.mark.memory


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
    broker = MemoryBroker(dice=Random(1), log=True)  # noqa: S311 -- reproducible
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
        before = await link.receive(len(broker.ready("q")))
        assert broker.most_unsettled("q") == 100  # what a verdict left unsettled takes no place
        await trio.sleep(30.0)
        assert len(broker.ready("q")) == 100 - len(fates.accepted) - len(before)


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
        broker.fill("q", [b"5", b"6", b"7"])
        await link.receive(3)
        assert broker.most_unsettled("q") == 5  # 2 keeps its place: it will be said again
    assert replay(log_of(broker)).accepted == ("3", "1")
    assert bodies(broker.ready("q")) == [b"2", b"4", b"5", b"6", b"7"]


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
    leasing, plain = broker.queue("q", lease=3600.0), broker.queue("q")
    async with broker.connect(), attached(leasing) as leased, attached(plain) as without:
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
    """A settlement that comes to its end after the lease is carried out, unless somebody has taken the message."""
    broker = MemoryBroker()
    broker.fill("q", [b"1"])
    broker.slow_settlements("q", 2.0)
    async with broker.connect(), attached(broker.queue("q", lease=1.0)) as link:
        assert await link.settle(orders(await link.receive(1))) == [None]
        broker.fill("q", [b"2"])
        received = await link.receive(1)
        async with attached(broker.queue("q", lease=1.0)) as other, trio.open_nursery() as nursery:
            nursery.start_soon(other.receive, 1)
            assert kinds(await link.settle(orders(received))) == [LeaseLost]


# --- a connection per delivery


async def test_a_delivery_of_its_own_connection_is_lost_alone() -> None:
    """The link tells whom it must, the message goes back and is counted; its late settlement is not applied."""
    broker = MemoryBroker(log=True)
    broker.fill("q", [b"1", b"2"])
    lost: list[tuple[Received[bytes], Line]] = []
    async with (
        broker.connect(),
        broker.queue("q", settles=Settles.ALONE).attach("s", lambda *told: lost.append(told), 5.0) as link,
    ):
        one, two = await link.receive(2)
        assert broker.sever_delivery("q", one.delivery.id)
        assert (lost, bodies(broker.ready("q")), broker.held("q")) == ([(one, Line.UNSETTLED)], [b"1"], ["2"])
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
    async with broker.connect(), queue.attach("s", lambda *_: None, 5.0) as link, trio.open_nursery() as nursery:
        for received in await link.receive(2):
            nursery.start_soon(settle, link, received)
        await trio.sleep(1.0)
        broker.sever_delivery("q", "1")
    assert verdicts == {"1": (1.0, [SettlementUnknown]), "2": (5.0, [type(None)])}
    assert (replay(log_of(broker)).stored, replay(log_of(broker)).accepted) == (("1",), ("2",))


async def test_a_settlement_that_was_cancelled_is_on_the_wire_no_more(autojump_clock: trio.testing.MockClock) -> None:
    """A connection that breaks after that is broken before the next settlement: not applied, rather than unknown."""
    broker = MemoryBroker()
    broker.fill("q", [b"1"])
    queue = broker.queue("q", settles=Settles.ALONE)
    async with broker.connect(), queue.attach("s", lambda *_: None, 5.0) as link:
        received = await link.receive(1)
        broker.slow_settlements("q", 5.0)
        with trio.move_on_after(1.0):
            await link.settle(orders(received))
        assert broker.sever_delivery("q", "1")
        assert kinds(await link.settle(orders(received))) == [NotApplied]


async def test_deliveries_that_share_a_connection_are_not_severed_alone() -> None:
    broker = MemoryBroker()
    broker.fill("q", [b"1"])
    async with broker.connect(), attached(broker.queue("q")) as link:
        await link.receive(1)
        assert not broker.sever_delivery("q", "1")
        assert broker.held("q") == ["1"]
