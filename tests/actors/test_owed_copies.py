"""actors.delay_timer: copies outlive lives, are early rather than lost, and lost only when the goodbye ends (DESIGN
3.7).
"""

# pyright: reportPossiblyUnboundVariable=false

import logging
from collections.abc import Sequence

import pytest
import trio

from actors import Subscription, open_runtime
from links.abc import Settlement, Verdict
from links.errors import LinkBroken, PublishNotAccepted
from links.memory import MemoryBroker
from settlement import Ack, Copies, Delivery, RetryAfter
from tests.actors.scenery import (
    HANGS,
    Clock,
    StageBroker,
    StageLink,
    StageQueue,
    acked,
    answers,
    lines,
    numbered,
    stored,
)


def times(broker: StageBroker) -> list[float]:
    return sorted(time for time, _, _ in broker.published)


async def test_a_copy_goes_out_when_it_is_due(autojump_clock: Clock) -> None:
    """DESIGN 3.7: each copy is published at its own time, whatever the order in which they were owed."""
    broker = StageBroker()
    queue = StageQueue(broker, numbered(4))
    outcomes = [RetryAfter(delay) for delay in (50.0, 1.0, 20.0, 0.0)]
    async with open_runtime(Subscription(queue, answers(*outcomes))) as runtime:
        await trio.sleep(60.0)
    assert times(broker) == [0.0, 1.0, 20.0, 50.0]
    assert lines(runtime.ledger("q")) == {"received": 4, "delayed": 4, "owed": 4, "published": 4}


async def test_copies_outlive_lives_and_connections(autojump_clock: Clock) -> None:
    """DESIGN 0.3: *after* belongs to the subscription: it outlives lives, and the first life's end closes nothing."""
    broker = MemoryBroker()
    broker.fill("q", numbered(3))
    queue = broker.queue("q", delays=Copies())
    async with open_runtime(Subscription(queue, answers(*[RetryAfter(50.0)] * 3))) as runtime:
        await trio.sleep(1.0)
        for _ in range(2):
            broker.sever("q")
            await trio.sleep(10.0)
            broker.sever_connection()
            await trio.sleep(10.0)
        assert runtime.statistics()["q"].waiting == 3
        broker.fill("q", [b"3"])
        await trio.sleep(20.0)
        await broker.until_empty("q")
    assert lines(runtime.ledger("q")) == {"received": 7, "delayed": 3, "acked": 4, "owed": 3, "published": 3}


async def test_room_blocks_the_next_verb(autojump_clock: Clock) -> None:
    """DESIGN 3.7: room is taken before the verb is ordered: with none, the delivery waits unsettled."""
    broker = StageBroker()
    queue = StageQueue(broker, numbered(5), copies=2)
    async with open_runtime(Subscription(queue, answers(then=RetryAfter(10.0)), concurrency=5)) as runtime:
        await trio.sleep(5.0)
        assert len(queue.said) == 2
        assert runtime.statistics()["q"].waiting == 2
        assert runtime.ledger("q").in_hand == 3
        await trio.sleep(10.0)
        assert len(queue.said) == 4
        await trio.sleep(20.0)
    assert times(broker) == [10.0, 10.0, 20.0, 20.0, 30.0]
    assert runtime.ledger("q").published == 5


@pytest.mark.parametrize("concurrency", [1, 5])
async def test_grace_over_while_a_delivery_waits_for_room(concurrency: int, autojump_clock: Clock) -> None:
    """DESIGN 3.7: room is taken inside the delivery's scope: grace over leaves it unsettled."""
    broker = StageBroker()
    queue = StageQueue(broker, numbered(5), copies=2)
    async with open_runtime(
        Subscription(queue, answers(then=RetryAfter(100.0)), concurrency=concurrency), grace=10.0
    ) as runtime:
        await trio.sleep(5.0)
    books = runtime.ledger("q")
    assert (books.received, books.delayed, books.unsettled) == (5, 2, 3)
    assert (books.owed, books.published, books.lost) == (2, 2, 0)


async def test_a_lease_is_kept_while_waiting_for_room(autojump_clock: Clock) -> None:
    """DESIGN 3.7 and 3.4: a delivery that waits for room is renewed; one that is lost meanwhile gives no copy."""
    broker = StageBroker()
    queue = StageQueue(broker, numbered(2), copies=1, lease=9.0)
    async with open_runtime(Subscription(queue, answers(then=RetryAfter(60.0)), concurrency=2)) as runtime:
        await trio.sleep(40.0)
        assert lines(runtime.ledger("q")) == {"received": 2, "delayed": 1, "in_hand": 1, "owed": 1, "waiting": 1}
        queue.extending = HANGS
        await trio.sleep(60.0)
    assert lines(runtime.ledger("q")) == {"received": 2, "delayed": 1, "superseded": 1, "owed": 1, "published": 1}


async def test_a_drain_waits_for_copies_within_grace(autojump_clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """DESIGN 4, row 'drain, while a copy waits': due within grace waits, the rest is early at its end, one log line."""
    broker = StageBroker()
    queue = StageQueue(broker, numbered(4))
    delays = [RetryAfter(delay) for delay in (8.0, 100.0, 200.0, 3.0)]
    async with open_runtime(Subscription(queue, answers(*delays)), grace=10.0) as runtime:
        await trio.sleep(1.0)
    assert times(broker) == [3.0, 8.0, 11.0, 11.0]
    assert trio.current_time() == 11.0
    assert lines(runtime.ledger("q")) == {"received": 4, "delayed": 4, "owed": 4, "published": 4}
    assert len([record for record in caplog.records if "before their time" in record.message]) == 1


async def test_a_drain_ends_early_when_the_last_copy_is_out(autojump_clock: Clock) -> None:
    """DESIGN 4: grace is a bound: a drain is over as soon as nothing is left."""
    broker = StageBroker()
    queue = StageQueue(broker, [b"x"])
    async with open_runtime(Subscription(queue, answers(RetryAfter(4.0))), grace=60.0):
        await trio.sleep(1.0)
    assert trio.current_time() == 4.0


@pytest.mark.parametrize("error", [PublishNotAccepted("closed"), LinkBroken("no confirmation")])
async def test_a_failed_copy_is_published_again(error: LinkBroken, autojump_clock: Clock) -> None:
    """DESIGN 3.7: an owed copy is published again with backoff until it is confirmed, also after a refused publish."""
    broker = StageBroker()
    broker.errors = [error] * 6
    queue = StageQueue(broker, [b"x"])
    async with open_runtime(Subscription(queue, answers(RetryAfter(1.0)))) as runtime:
        await trio.sleep(1.2)
        (why,) = runtime.statistics()["q"].degraded
        assert "copies to q" in why
        await trio.sleep(20.0)
        assert runtime.statistics()["q"].degraded == ()
    assert len(broker.published) == 1
    assert broker.published[0][0] > 4.0
    assert lines(runtime.ledger("q")) == {"received": 1, "delayed": 1, "owed": 1, "published": 1}


async def test_a_copy_without_a_confirmation_is_published_twice(autojump_clock: Clock) -> None:
    """DESIGN 3.7: also after an *unknown* publish: twice beats lost; it counts once in the books."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    broker.lose_confirmations("q", 1)
    async with open_runtime(Subscription(broker.queue("q", delays=Copies()), answers(RetryAfter(1.0)))) as runtime:
        await trio.sleep(30.0)
    assert lines(runtime.ledger("q")) == {"received": 3, "delayed": 1, "acked": 2, "owed": 1, "published": 1}


@pytest.mark.parametrize("end", ["drain", "cancel"])
async def test_a_copy_is_lost_when_the_goodbye_ends_first(
    end: str, autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """DESIGN 3.7, 3.9: *lost* only if the goodbye ends first: counted, an error in the log, and in bounded time."""
    broker = StageBroker(publishing=HANGS)
    queue = StageQueue(broker, numbered(3))
    with trio.CancelScope() as scope:
        async with open_runtime(
            Subscription(queue, answers(then=RetryAfter(100.0))), grace=10.0, goodbye=4.0
        ) as runtime:
            await trio.sleep(1.0)
            if end == "cancel":
                scope.cancel()
    assert lines(runtime.ledger("q")) == {"received": 3, "delayed": 3, "owed": 3, "lost": 3}
    assert trio.current_time() == (15.0 if end == "drain" else 5.0)
    assert [record.levelno for record in caplog.records if "lost" in record.message] == [logging.ERROR]


async def test_an_outside_cancel_publishes_all_at_once(autojump_clock: Clock) -> None:
    """DESIGN 4, row 'user cancels': waiting copies get one bounded attempt, all of them, early."""
    broker = StageBroker(publishing=0.5)
    queue = StageQueue(broker, numbered(40), limit=40)
    with trio.move_on_after(1.0):
        async with open_runtime(Subscription(queue, answers(then=RetryAfter(100.0)), concurrency=8)) as runtime:
            await trio.sleep_forever()
    assert lines(runtime.ledger("q")) == {"received": 40, "delayed": 40, "owed": 40, "published": 40}
    assert trio.current_time() < 6.0


async def test_an_outside_cancel_tries_failed_copies_once_more(autojump_clock: Clock) -> None:
    """DESIGN 4, row 'user cancels': one bounded attempt to publish *them all*, also those that wait for a backoff."""
    broker = StageBroker()
    queue = StageQueue(broker, [b"x"])
    broker.errors = [PublishNotAccepted("closed")] * 1000
    with trio.CancelScope() as scope:
        async with open_runtime(Subscription(queue, answers(RetryAfter(1.0)))) as runtime:
            await trio.sleep(100.0)
            before = len(broker.errors)
            while len(broker.errors) == before:
                await trio.sleep(0.1)
            broker.errors = []  # the next attempt would be more than a goodbye away
            scope.cancel()
    assert lines(runtime.ledger("q")) == {"received": 1, "delayed": 1, "owed": 1, "published": 1}


async def test_a_refused_copy_in_a_goodbye_is_lost(autojump_clock: Clock) -> None:
    """DESIGN 3.7: a copy that is refused until the goodbye has ended is lost, and the end is in time."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    with trio.move_on_after(3.0):
        async with open_runtime(
            Subscription(broker.queue("q", delays=Copies()), answers(RetryAfter(50.0))), goodbye=4.0
        ) as runtime:
            await trio.sleep(1.0)
            broker.close("q")
            await trio.sleep_forever()
    assert lines(runtime.ledger("q")) == {"received": 1, "delayed": 1, "owed": 1, "lost": 1}
    assert trio.current_time() <= 11.0


async def test_drain_with_a_broken_connection_and_owed_copies(autojump_clock: Clock) -> None:
    """DESIGN 4, trap 'drain × broken connection × owed copies': the connection is restarted, the copies go out."""
    broker = MemoryBroker()
    broker.fill("q", numbered(3))
    async with open_runtime(
        Subscription(broker.queue("q", delays=Copies()), answers(then=RetryAfter(20.0))), grace=30.0
    ) as runtime:
        await trio.sleep(1.0)
        runtime.drain()
        await trio.sleep(1.0)
        broker.break_connects(3)
        broker.sever_connection()
        await runtime.finished()
        assert trio.current_time() == pytest.approx(20.0)
    assert lines(runtime.ledger("q")) == {"received": 3, "delayed": 3, "owed": 3, "published": 3}


async def test_a_drain_whose_settlement_hangs_with_a_copy_owed(autojump_clock: Clock) -> None:
    """DESIGN 3.7 × 4: an order that is still on the wire at the very end is unknown; its copy goes out in the exits."""
    for again in range(10):
        broker = StageBroker()
        queue = StageQueue(broker, [b"x"], settling=HANGS)
        start = trio.current_time()
        async with open_runtime(Subscription(queue, answers(RetryAfter(1.0))), grace=3.0, goodbye=2.0) as runtime:
            await trio.sleep(1.0)
        assert trio.current_time() - start <= 8.0, again
        books = runtime.ledger("q")
        assert (books.unknown, books.owed, books.published) == (1, 1, 1)


async def test_many_copies_take_no_more_room_than_there_is(autojump_clock: Clock) -> None:
    """DESIGN 3.7: never more copies wait than `max_waiting`, over many rounds."""
    broker = MemoryBroker()
    broker.fill("q", numbered(200))
    most = 0

    async def handler(delivery: Delivery[bytes]) -> Ack | RetryAfter:
        nonlocal most
        most = max(most, runtime.statistics()["q"].waiting)
        return RetryAfter(1.0) if delivery.attempt < 3 else Ack()

    queue = broker.queue("q", delays=Copies(max_waiting=7), limit=20)
    async with open_runtime(Subscription(queue, handler, concurrency=10)) as runtime:
        while acked(runtime) < 200:
            await trio.sleep(1.0)
    assert most == 7
    assert runtime.ledger("q").published == 400
    assert stored(broker, "q") == []


async def test_room_that_was_taken_returns_when_a_life_breaks(autojump_clock: Clock) -> None:
    """DESIGN 3.7: an order that was not with the link when its life ended owes no copy, and its room returns."""
    broker = MemoryBroker()
    broker.fill("q", numbered(3))
    broker.slow_settlements("q", HANGS)

    async def handler(delivery: Delivery[bytes]) -> RetryAfter:
        await trio.sleep(1.0 if delivery.body == b"0" else 2.0)
        return RetryAfter(1000.0)

    queue = broker.queue("q", delays=Copies(max_waiting=3), limit=3)
    async with open_runtime(Subscription(queue, handler, concurrency=3)) as runtime:
        await trio.sleep(3.0)
        assert runtime.ledger("q").in_hand == 3
        broker.slow_settlements("q", 0.0)
        broker.sever("q")
        await trio.sleep(30.0)
        books = runtime.ledger("q")
        # one copy is owed for what was on the wire, so two of the three find room again
        assert (books.unknown, books.unsettled, books.delayed, books.in_hand) == (1, 2, 2, 1)
        assert books.waiting == 3


async def test_a_copy_that_is_owed_after_the_goodbye_is_lost_in_the_books(autojump_clock: Clock) -> None:
    """DESIGN 3.9, trap 'who closes what': a life that ends after its copies meets no closed channel, and is booked."""

    class Rude(StageLink):
        async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Verdict]:
            with trio.CancelScope(shield=True):
                await trio.sleep(60.0)
            await trio.lowlevel.checkpoint()
            return [None for _ in settlements]

    queue = StageQueue(StageBroker(), [b"x"], link=Rude)
    async with open_runtime(Subscription(queue, answers(RetryAfter(9.0))), grace=1.0, goodbye=2.0) as runtime:
        await trio.sleep(1.0)
    assert lines(runtime.ledger("q")) == {"received": 1, "unknown": 1, "owed": 1, "lost": 1}


@pytest.mark.usefixtures("longest_backoff")
@pytest.mark.parametrize("reopened", [0.5, 4.4])
@pytest.mark.parametrize("closed", [2.0, 30.0, 300.0])
async def test_copies_whose_queue_reopens_in_the_goodbye(closed: float, reopened: float, autojump_clock: Clock) -> None:
    """DESIGN 3.7: *lost* only if the goodbye ends first: a long backoff is no reason, however long it has failed."""
    broker = MemoryBroker()
    broker.fill("q", numbered(3))

    async def handler(delivery: Delivery[bytes]) -> RetryAfter:
        broker.close("q")
        await trio.lowlevel.checkpoint()
        return RetryAfter(1.0)

    queue = broker.queue("q", delays=Copies())
    async with open_runtime(Subscription(queue, handler), grace=5.0, goodbye=5.0) as runtime:
        await trio.sleep(closed)
        runtime.drain()
        await trio.sleep(5.0 + reopened)
        assert runtime.ledger("q").waiting == 3
        broker.reopen("q")
        await runtime.finished()
    assert trio.current_time() <= closed + 10.0
    assert lines(runtime.ledger("q")) == {"received": 3, "delayed": 3, "owed": 3, "published": 3}
    assert sorted(stored(broker, "q")) == numbered(3)


@pytest.mark.usefixtures("longest_backoff")
@pytest.mark.parametrize("back", [1.0, 9.4])
@pytest.mark.parametrize("away", [10.0, 100.0, 300.0])
async def test_copies_whose_broker_is_back_in_the_goodbye(away: float, back: float, autojump_clock: Clock) -> None:
    """DESIGN 4: a connection that is away in a drain is restarted while copies are owed, in the time that is left."""
    broker = MemoryBroker()
    broker.fill("q", numbered(3))
    queue = broker.queue("q", delays=Copies())
    async with open_runtime(Subscription(queue, answers(then=RetryAfter(5.0))), grace=5.0, goodbye=5.0) as runtime:
        await trio.sleep(1.0)
        broker.refuse_connection()
        broker.sever_connection()
        await trio.sleep(away)
        runtime.drain()
        await trio.sleep(back)
        assert runtime.ledger("q").waiting == 3
        broker.admit_connection()
        await runtime.finished()
    assert trio.current_time() <= 1.0 + away + 10.0
    assert lines(runtime.ledger("q")) == {"received": 3, "delayed": 3, "owed": 3, "published": 3}
    assert sorted(stored(broker, "q")) == numbered(3)
