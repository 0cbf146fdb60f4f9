"""What is marked as degraded, and for how long; what spends no patience, and what costs no lease."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from actors import Subscription, open_runtime
from actors.books import Books
from actors.events import Degraded, Event, Recovered, Tell
from actors.restarts import GiveUp, Restart, Restarts
from links.memory import MemoryBroker
from settlement import Delivery, Policy
from tests.actors.scenery import Clock, answers, lines


def test_a_mark_stays_until_the_last_one_has_no_trouble() -> None:
    """Two wait for one closed dead letter: when one of them gives up, the other is still degraded."""
    told: list[Event] = []
    books = Books("q", Tell((told.append,)))
    books.degrade("publishing to dead", "full", one := object())
    books.degrade("publishing to dead", "full still", other := object())

    books.ceased("publishing to dead", one)
    assert books.degraded == {"publishing to dead": "full still"}
    books.ceased("publishing to dead", other)
    assert books.degraded == {}
    assert [type(event) for event in told] == [Degraded, Recovered]


@pytest.mark.parametrize("severs", [1, 3])
async def test_an_idle_link_is_well_as_soon_as_its_connection_is_back(severs: int, autojump_clock: Clock) -> None:
    """A connection that breaks says nothing of the link: it need not do a thing before its mark goes (DESIGN 4)."""
    broker = MemoryBroker()
    async with open_runtime(Subscription(broker.queue("q"), answers())) as runtime:
        for _ in range(severs):
            await trio.sleep(1.0)
            broker.sever_connection()
            await trio.lowlevel.checkpoint()
            await trio.testing.wait_all_tasks_blocked()
            assert not runtime.statistics()["q"].attached
            await trio.sleep(5.0)
            assert runtime.statistics()["q"].attached
            assert runtime.statistics()["q"].degraded == ()


async def test_one_that_blocks_costs_the_others_no_lease(autojump_clock: Clock) -> None:
    """Leases that ran out while the loop was blocked are asked for before they are given up (DESIGN 3.4)."""
    broker = MemoryBroker()
    broker.fill("q", [b"sleeps", b"blocks"])
    calls: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        calls.append(delivery.body)
        if delivery.body == b"sleeps":
            await trio.sleep(12.0)
        else:
            await trio.sleep(1.0)
            autojump_clock.jump(7.0)

    policy = Policy(max_attempts=3, dead_letter="dead")
    source = broker.queue("q", lease=5.0)
    async with open_runtime(Subscription(source, handler, policy=policy, concurrency=2)) as runtime:
        await broker.until_empty("q")
    assert sorted(calls) == [b"blocks", b"sleeps"]
    assert lines(runtime.ledger("q")) == {"received": 2, "acked": 2}


@pytest.mark.parametrize(("without", "decision"), [(0.0, GiveUp), (100.0, Restart)])
def test_time_without_a_connection_spends_no_patience(without: float, decision: type[object]) -> None:
    """`excused` seconds count for nobody: a link that could not be tried was not refused (DESIGN 4)."""
    history = Restarts(0.0)
    history.excused(without)
    assert isinstance(history.broke(650.0, dice=0.5), decision)


@pytest.mark.parametrize(("attached", "decision"), [(True, Restart), (False, GiveUp)])
def test_a_life_that_ended_with_its_connection_was_well_until_then(attached: bool, decision: type[object]) -> None:
    """An excused life counts as well, if it had attached; one that had not is no better than none (DESIGN 4)."""
    history = Restarts(0.0)
    if attached:
        history.attached()
    history.excuse(500.0)
    assert isinstance(history.broke(1000.0, dice=0.5), decision)
