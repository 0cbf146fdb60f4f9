"""links.memory and trio's clock: delays, leases, and what is too late."""

import math
from random import Random

import pytest
import trio
import trio.testing

from links.errors import LeaseLost, SettlementUnknown
from links.memory import Delivered, MemoryBroker, Published, Returned, Said, replay
from settlement import Letter
from settlement.memory import Accept, PutBack, Reject, Verb
from tests.links.memory_kit import attached, bodies, kinds, order, orders

pytestmark = pytest.mark.memory


async def test_a_delayed_message_comes_at_its_time(autojump_clock: trio.testing.MockClock) -> None:
    """Put back with a delay, a message is not ready before that, and a receive that waits wakes at that moment."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    async with broker.connect(), attached(broker.queue("q")) as link:
        for attempt in (1, 2):
            (received,) = await link.receive(1)
            assert received.delivery.attempt == attempt
            await link.settle([order(received, PutBack(7200.0))])
            assert (broker.ready("q"), bodies(broker.delayed("q")), broker.unsettled("q")) == ([], [b"x"], 0)
        assert trio.current_time() == 7200.0
        await trio.sleep(7200.0)
        assert (bodies(broker.ready("q")), broker.delayed("q")) == ([b"x"], [])


async def test_a_delay_that_comes_while_another_link_waits(autojump_clock: trio.testing.MockClock) -> None:
    """A receive that waits without end learns of a message that another link puts back with a delay."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    async with broker.connect(), attached(broker.queue("q")) as one, attached(broker.queue("q")) as two:
        (received,) = await one.receive(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.receive, 1)
            await trio.testing.wait_all_tasks_blocked()
            await one.settle([order(received, PutBack(60.0))])
        assert trio.current_time() == 60.0


async def test_a_delayed_letter_is_stored_and_waits(autojump_clock: trio.testing.MockClock) -> None:
    """A letter to be delivered later does not hold up those behind it, and then stands at its place before them."""
    broker = MemoryBroker()
    broker.fill("q", [Letter(b"later", deliver_after=10.0), b"1", b"2"])
    async with broker.connect(), attached(broker.queue("q")) as link:
        assert bodies(await link.receive(1)) == [b"1"]
        broker.fill("q", [Letter(b"much later", deliver_after=20.0), b"3"])
        assert bodies(broker.delayed("q")) == [b"later", b"much later"]
        await trio.sleep(10.0)
        assert bodies(await link.receive(2)) == [b"later", b"2"]
        assert bodies(await link.receive(2)) == [b"3"]
        assert bodies(await link.receive(2)) == [b"much later"]
    assert trio.current_time() == 20.0


async def test_a_delayed_letter_has_its_place(autojump_clock: trio.testing.MockClock) -> None:
    """A letter that has become due stands between those that were published before and after it."""
    broker = MemoryBroker()
    async with broker.connect(), attached(broker.queue("q")) as link:
        broker.fill("q", [b"1", Letter(b"2", deliver_after=10.0), b"3"])
        await trio.sleep(10.0)
        assert bodies(broker.ready("q")) == [b"1", b"2", b"3"]
        assert bodies(await link.receive(2)) == [b"1", b"2"]


async def test_a_lease_runs_out(autojump_clock: trio.testing.MockClock) -> None:
    """What is not settled within its lease is ready for anyone, counted, and its late settlement changes nothing."""
    broker = MemoryBroker(log=True)
    broker.fill("q", [b"0", b"1"])
    async with broker.connect(), attached(broker.queue("q", lease=30.0)) as one:
        first = await one.receive(2)
        assert [each.expires for each in first] == [30.0, 30.0]
        await trio.sleep(29.0)
        assert await one.settle([order(first[0])]) == [None]
        async with attached(broker.queue("q", lease=30.0)) as two:
            (second,) = await two.receive(1)
            assert (trio.current_time(), second.expires) == (30.0, 60.0)
            assert (second.delivery.body, second.delivery.attempt) == (b"1", 2)
            (verdict,) = await one.settle([order(first[1])])
            assert isinstance(verdict, LeaseLost)
            assert await two.settle([order(second)]) == [None]
    assert Returned("q", "2", "lease expired") in (broker.log or [])
    assert replay(broker.log or []).accepted == ("1", "2")


@pytest.mark.parametrize("verb", [Accept(), PutBack()])
async def test_a_late_settlement_counts_where_nobody_took_over(
    verb: Verb, autojump_clock: trio.testing.MockClock
) -> None:
    """DESIGN 3.4: a lease that has run out and was taken by nobody is still its link's, which takes it but once."""
    broker = MemoryBroker(log=True)
    broker.fill("q", [b"x"])
    async with broker.connect(), attached(broker.queue("q", lease=30.0)) as link:
        (received,) = await link.receive(1)
        with trio.move_on_after(100.0):
            await link.receive(1)
            pytest.fail("taken twice")
        assert await link.settle([order(received, verb)]) == [None]
        assert bodies(broker.ready("q")) == ([b"x"] if verb == PutBack() else [])
    assert [type(entry) for entry in broker.log or []] == [Published, Delivered, Said]


async def test_a_lapsed_delivery_that_was_given_up_comes_again(autojump_clock: trio.testing.MockClock) -> None:
    """What its link has forgotten is ready at the end of its lease, for that link too, and counted."""
    broker = MemoryBroker()
    broker.fill("q", [b"early", b"late"])
    async with broker.connect(), attached(broker.queue("q", lease=30.0)) as link:
        early, late = await link.receive(2)
        link.forget(early)
        again = await link.receive(1)
        assert (trio.current_time(), bodies(again), again[0].delivery.attempt) == (30.0, [b"early"], 2)
        link.forget(late)
        again = await link.receive(1)
        assert (trio.current_time(), bodies(again), again[0].delivery.attempt) == (30.0, [b"late"], 2)


async def test_a_settlement_that_breaks_after_the_lease_brings_it_back(autojump_clock: trio.testing.MockClock) -> None:
    """What was not carried out, on a lease that had run out, is ready at once, for its own link too."""
    broker = MemoryBroker(dice=Random(2), log=True)  # noqa: S311 -- reproducible
    broker.fill("q", [b""] * 20)
    async with broker.connect(), attached(broker.queue("q", lease=5.0)) as link:
        received = await link.receive(20)
        await trio.sleep(6.0)
        broker.break_calls("q")
        assert kinds(await link.settle(orders(received))) == [SettlementUnknown] * 20
        accepted = len(replay(broker.log or []).accepted)
        assert 0 < accepted < 20
        assert len(await link.receive(20)) == 20 - accepted


async def test_another_link_takes_no_more_than_it_has_room_for(autojump_clock: trio.testing.MockClock) -> None:
    """Of three lapsed leases one is taken over; the others are still their link's."""
    broker = MemoryBroker()
    broker.fill("q", [b"0", b"1", b"2"])
    queue = broker.queue("q", lease=30.0)
    async with broker.connect(), attached(queue) as one, attached(queue) as two:
        held = await one.receive(3)
        (taken,) = await two.receive(1)
        assert (trio.current_time(), taken.delivery.body, taken.delivery.attempt) == (30.0, b"0", 2)
        assert kinds(await one.settle(orders(held))) == [LeaseLost, type(None), type(None)]


async def test_extending_moves_the_expiry(autojump_clock: trio.testing.MockClock) -> None:
    """An extended lease runs a whole lease from now, also one that had lapsed; what somebody took is lost."""
    broker = MemoryBroker()
    broker.fill("q", [b"0", b"1"])
    async with broker.connect(), attached(broker.queue("q", lease=30.0)) as link:
        kept, lost = await link.receive(2)
        await trio.sleep(20.0)
        assert list(await link.extend([kept])) == []
        assert (kept.expires, lost.expires) == (50.0, 30.0)
        await trio.sleep(15.0)
        async with attached(broker.queue("q", lease=30.0)) as other:
            assert bodies(await other.receive(2)) == [b"1"]
            assert list(await link.extend([kept, lost])) == [lost]
        for _ in range(1000):
            await trio.sleep(20.0)
            assert list(await link.extend([kept])) == []
        await trio.sleep(29.5)
        assert await link.settle([order(kept)]) == [None]


async def test_an_old_hand_over_does_not_touch_the_new_one(autojump_clock: trio.testing.MockClock) -> None:
    """Also on the same link, which had given it up, an older hand-over can neither settle nor extend the newer one."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    async with broker.connect(), attached(broker.queue("q", lease=10.0)) as link:
        (old,) = await link.receive(1)
        link.forget(old)
        (new,) = await link.receive(1)
        assert (old.delivery.id, trio.current_time()) == (new.delivery.id, 10.0)
        await trio.sleep(1.0)
        assert list(await link.extend([old])) == [old]
        (verdict,) = await link.settle([order(old, Reject())])
        assert isinstance(verdict, LeaseLost)
        assert (new.expires, broker.unsettled("q")) == (20.0, 1)
        assert await link.settle([order(new)]) == [None]


async def test_leases_of_the_settled_do_not_pile_up() -> None:
    broker = MemoryBroker()
    async with broker.connect(), attached(broker.queue("q", lease=3600.0)) as link:
        for _ in range(100):
            broker.fill("q", [b""] * 50)
            await link.settle(orders(await link.receive(50)))
        assert len(broker.store("q").leases) < 500
        assert broker.store("q").next_time() == math.inf


async def test_a_link_without_a_lease_extends_nothing() -> None:
    broker = MemoryBroker()
    async with broker.connect(), attached(broker.queue("q")) as link:
        with pytest.raises(NotImplementedError):
            await link.extend([])
