"""links.memory under random weather: whatever breaks when, the log replays, and each message is finished once."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random

import pytest
import trio
import trio.testing

from links.abc import Link, Settlement, Settles
from links.errors import CallBroken, ConnectionBroken, LinkBroken, LinkRefused, NotApplied, SettlementUnknown
from links.memory import Delivered, Entry, MemoryBroker, MemoryQueue, Returned, replay
from settlement import Plan
from settlement.ledger import Line
from settlement.memory import Accept, PutBack, Reject
from tests.links.memory_kit import kept_open, one_life

pytestmark = pytest.mark.memory


@pytest.mark.parametrize("seed", range(30))
async def test_no_weather_loses_a_message(seed: int, autojump_clock: trio.testing.MockClock) -> None:
    """Under random weather every message is accepted or rejected once, and no link has more in hand than it asked."""
    dice = Random(seed)  # noqa: S311 -- reproducible
    broker = MemoryBroker(dice=Random(seed + 1000))  # noqa: S311 -- reproducible
    log: list[Entry] = []
    broker.log = log
    lease = dice.choice([None, 5.0])
    queue = broker.queue("q", lease=lease, settles=dice.choice([*Settles]))
    broker.fill("q", [b"%d" % number for number in range(100)])
    async with kept_open(broker) as nursery:
        for _ in range(3):
            nursery.start_soon(consume, queue, dice)
        nursery.start_soon(storm, broker, nursery, dice)
        await broker.until_empty("q")
        nursery.cancel_scope.cancel()
    fates = replay(log)
    assert len(fates.accepted) + len(fates.rejected) == 100
    assert len([entry for entry in log if isinstance(entry, Delivered)]) > 100, "no weather"
    assert broker.most_unsettled("q") <= 4
    attempts: dict[str, int] = {}
    for entry in log:
        if isinstance(entry, Delivered):
            assert entry.attempt == attempts.get(entry.id, 0) + 1
            attempts[entry.id] = entry.attempt
        elif isinstance(entry, Returned) and not entry.counted:
            attempts[entry.id] -= 1


async def consume(queue: MemoryQueue, dice: Random) -> None:
    """Lives, one after the other, of somebody who is in no hurry to settle."""
    while True:
        try:
            async with queue.attach("s", lambda *_: None, 5.0) as link:
                while True:
                    with trio.move_on_after(dice.choice([0.1, 20.0])):
                        await handle(queue, link, dice)
        except (LinkBroken, ConnectionBroken, LinkRefused):
            await trio.sleep(1.0)


async def handle(queue: MemoryQueue, link: Link[bytes], dice: Random) -> None:
    try:
        received = await link.receive(4)
    except CallBroken:
        return
    plans = [Plan(Line.ACKED, dice.choice([Accept(), Accept(), Reject(), PutBack(), PutBack(3.0)])) for _ in received]
    with trio.CancelScope(shield=True):
        await trio.sleep(dice.choice([0.0, 0.5, 3.0]))
        if queue.lease is not None and dice.random() < 0.5:
            with suppress(CallBroken):
                await link.extend(received)
        if dice.random() < 0.1:
            await link.give_back(received[-1:])
        asked = [Settlement(each, plan) for each, plan in zip(received, plans, strict=True)]
        for order, verdict in zip(asked, await link.settle(asked), strict=True):
            if isinstance(verdict, NotApplied):
                link.forget(order.received)
            if isinstance(verdict, NotApplied | SettlementUnknown) and queue.lease is None:
                raise LinkBroken("nothing but a goodbye brings it back")


async def storm(broker: MemoryBroker, nursery: trio.Nursery, dice: Random) -> None:
    faults: list[Callable[[], None]] = [
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
            nursery.start_soon(one_life, broker)
            await broker.until_up()
