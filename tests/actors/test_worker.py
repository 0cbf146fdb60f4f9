"""actors.worker: limits, order, slots, and what becomes of a handler that is cancelled (DESIGN 3.1, 3.2, 3.5)."""

# pyright: reportPossiblyUnboundVariable=false

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import trio

from actors import Subscription, open_runtime
from actors.events import Booked
from links.abc import Settles
from links.memory import MemoryBroker
from settlement import Ack, Copies, Delivery, Outcome, Policy, Retry, RetryAfter
from settlement.ledger import Ended
from tests.actors.scenery import HANGS, Clock, StageBroker, StageQueue, acked, answers, lines, numbered, stored


@pytest.mark.parametrize("concurrency", [1, 3, 16])
async def test_no_more_handlers_than_concurrency(concurrency: int, autojump_clock: Clock) -> None:
    """DESIGN 3.1: `concurrency` handlers run at once, no more; and as many, where there is work."""
    broker = MemoryBroker()
    broker.fill("q", numbered(50))
    running, most = 0, 0

    async def handler(delivery: Delivery[bytes]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(1.0)
        running -= 1

    async with open_runtime(Subscription(broker.queue("q"), handler, concurrency=concurrency)) as runtime:
        await broker.until_empty("q")
    assert most == concurrency
    assert trio.current_time() == math.ceil(50 / concurrency)
    assert acked(runtime) == 50


@pytest.mark.parametrize("outcome", [Ack(), Retry(), RetryAfter(1.0)])
@pytest.mark.parametrize(("concurrency", "limit"), [(1, 1), (1, 5), (4, 4), (8, 20)])
async def test_the_sources_limit_is_never_passed(
    concurrency: int, limit: int, outcome: Outcome, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DESIGN 3.1 and 3.2: unsettled at once ≤ the source's limit; the unbounded seams never hold more than that."""
    broker = MemoryBroker()
    broker.fill("q", numbered(100))
    channels: list[trio.MemorySendChannel[Any]] = []
    most = 0
    make: Any = trio.open_memory_channel

    class Counted:
        def __getitem__(self, _: object) -> Callable[[float], object]:
            def opened(size: float) -> object:
                assert size == math.inf
                ends = make(size)
                channels.append(ends[0])
                return ends

            return opened

    monkeypatch.setattr(trio, "open_memory_channel", Counted())

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        nonlocal most
        most = max([most, *(channel.statistics().current_buffer_used for channel in channels)])
        await trio.sleep(0.01)
        return outcome if delivery.attempt < 3 else Ack()

    queue = broker.queue("q", limit=limit)
    async with open_runtime(Subscription(queue, handler, concurrency=concurrency)) as runtime:
        monkeypatch.undo()
        await broker.until_empty("q")
    assert len(channels) >= 2
    assert most <= limit
    assert broker.most_unsettled("q") == limit
    assert acked(runtime) == 100


@pytest.mark.parametrize("again", range(30))
async def test_arrival_order_at_concurrency_1(again: int, autojump_clock: Clock) -> None:
    """C-7.1, DESIGN 3.1: one at a time, in arrival order, the next not before the verb of the one before is said."""
    broker = MemoryBroker()
    broker.slow_settlements("q", 0.5)
    handled: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        assert acked_before == handled
        await trio.sleep(0.1)
        handled.append(delivery.body)

    acked_before: list[bytes] = []

    def observer(event: object) -> None:
        if isinstance(event, Booked) and isinstance(event.entry, Ended):
            acked_before.extend(delivery.body for delivery in event.deliveries)

    async with open_runtime(Subscription(broker.queue("q", limit=1 + again % 8), handler), observers=[observer]):
        for body in numbered(12):
            broker.fill("q", [body])
            if again % 2:
                await trio.sleep(0.3)
        await broker.until_empty("q")
    assert handled == numbered(12)


@pytest.mark.parametrize("again", range(10))
async def test_deliveries_are_taken_in_arrival_order(again: int, autojump_clock: Clock) -> None:
    """DESIGN 3.1: deliveries are taken in arrival order at any concurrency."""
    broker = MemoryBroker()
    broker.fill("q", numbered(40))
    begun: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        begun.append(delivery.body)
        await trio.sleep(int(delivery.body) % 7)

    async with open_runtime(Subscription(broker.queue("q", limit=30), handler, concurrency=4)):
        await broker.until_empty("q")
    # workers that become free in one tick may swap what they take
    assert all(abs(begun.index(body) - place) < 4 for place, body in enumerate(numbered(40)))


@pytest.mark.parametrize(("concurrency", "expected"), [(1, [0.0, 11.0, 22.0, 33.0]), (2, [0.0, 0.0, 1.0, 1.0])])
async def test_at_concurrency_1_a_slot_returns_when_the_verb_was_said(
    concurrency: int, expected: list[float], autojump_clock: Clock
) -> None:
    """DESIGN 3.1: at concurrency 1 the slot returns with the verb, above 1 when the handler ended."""
    queue = StageQueue(StageBroker(), numbered(4), settling=10.0)
    begun: list[float] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        begun.append(trio.current_time())
        await trio.sleep(1.0)

    async with open_runtime(Subscription(queue, handler, concurrency=concurrency), grace=100.0):
        await trio.sleep(45.0)
    assert begun == expected


async def test_the_place_returns_with_the_verb(autojump_clock: Clock) -> None:
    """DESIGN 3.1: a place under the limit returns when the verb was said, not when the handler ended."""
    queue = StageQueue(StageBroker(), numbered(30), settling=10.0, limit=3)
    async with open_runtime(Subscription(queue, answers(taking=1.0), concurrency=3), grace=100.0) as runtime:
        await trio.sleep(15.0)
        assert runtime.ledger("q").received == 6
        await trio.sleep(10.0)
        assert runtime.ledger("q").received == 9
    assert queue.most == 3


async def test_the_settler_takes_all_that_is_ready(autojump_clock: Clock) -> None:
    """DESIGN 3.2: the settler takes one, and then all that is ready, so that verbs are said together."""
    queue = StageQueue(StageBroker(), numbered(60), settling=1.0, limit=20)
    async with open_runtime(Subscription(queue, answers(), concurrency=20)) as runtime:
        await trio.sleep(10.0)
    assert acked(runtime) == 60


# --- cancelled handlers


async def test_a_handler_that_swallows_cancelled_settles_nothing(autojump_clock: Clock) -> None:
    """DESIGN 3.5: whatever it returns, a handler whose scope was cancelled from outside settles nothing."""
    broker = MemoryBroker()
    broker.fill("q", [b"x", b"y"])
    begun: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        begun.append(delivery.body)
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            return Ack()

    with trio.move_on_after(1.0):
        async with open_runtime(Subscription(broker.queue("q"), handler)) as runtime:
            await trio.sleep_forever()
    assert lines(runtime.ledger("q")) == {"received": 2, "unsettled": 2}
    assert stored(broker, "q") == [b"x", b"y"]
    assert begun == [b"x"]


@pytest.mark.parametrize("concurrency", [1, 2])
async def test_grace_over_for_a_handler_that_swallows_cancelled(concurrency: int, autojump_clock: Clock) -> None:
    """DESIGN 3.5 and 4, row 'drain, grace over': its delivery is unsettled all the same."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            return Ack()

    async with open_runtime(Subscription(broker.queue("q"), handler, concurrency=concurrency), grace=3.0) as runtime:
        await trio.sleep(1.0)
    assert trio.current_time() == 4.0
    assert lines(runtime.ledger("q")) == {"received": 1, "unsettled": 1}


async def test_a_handler_that_fails_while_it_is_cancelled(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """DESIGN 4, trap: a `BaseExceptionGroup` of `Cancelled` and an error is split; the error is logged."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])

    async def child() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise KeyError("while cancelled")

    async def handler(delivery: Delivery[bytes]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)
            await trio.sleep_forever()

    async with open_runtime(Subscription(broker.queue("q"), handler), grace=3.0) as runtime:
        await trio.sleep(1.0)
    assert lines(runtime.ledger("q")) == {"received": 1, "unsettled": 1}
    with trio.move_on_after(2.0) as scope:
        async with open_runtime(Subscription(broker.queue("q"), handler)) as runtime:
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert lines(runtime.ledger("q")) == {"received": 1, "unsettled": 1}
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 2


async def test_a_plain_failure_while_cancelled_is_logged(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """DESIGN 4: an error raised instead of `Cancelled` at the end of grace fails nothing; the delivery is unsettled."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])

    async def handler(delivery: Delivery[bytes]) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise KeyError("while cancelled")

    async with open_runtime(Subscription(broker.queue("q"), handler), grace=3.0) as runtime:
        await trio.sleep(1.0)
    assert lines(runtime.ledger("q")) == {"received": 1, "unsettled": 1}
    assert "failed while it was cancelled" in caplog.text


async def test_a_handlers_own_scope_is_its_own(autojump_clock: Clock) -> None:
    """DESIGN 3.5: a handler that cancels scopes of its own is not cancelled; its outcome counts."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        with trio.move_on_after(1.0):
            await trio.sleep_forever()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.cancel_scope.cancel()
        return Ack()

    async with open_runtime(Subscription(broker.queue("q"), handler)) as runtime:
        await broker.until_empty("q")
    assert acked(runtime) == 1


async def test_handlers_without_a_checkpoint(autojump_clock: Clock) -> None:
    """DESIGN 3.2: a worker parks only on an empty channel, and yet a handler that never waits starves nobody."""
    broker = MemoryBroker()
    broker.fill("q", numbered(500))

    async def handler(delivery: Delivery[bytes]) -> None:
        pass

    async with open_runtime(Subscription(broker.queue("q"), handler, concurrency=8)) as runtime:
        await broker.until_empty("q")
    assert acked(runtime) == 500


async def test_nothing_is_started_after_a_cancel(autojump_clock: Clock) -> None:
    """DESIGN 4, row 'user cancels': what waits in the channel is unsettled; no handler starts in a cancelled life."""
    broker = MemoryBroker()
    broker.fill("q", numbered(20))
    begun: list[bytes] = []
    scope = trio.CancelScope()

    async def handler(delivery: Delivery[bytes]) -> None:
        begun.append(delivery.body)
        scope.cancel()

    with scope:
        async with open_runtime(Subscription(broker.queue("q", limit=20), handler)) as runtime:
            await trio.sleep_forever()
    assert lines(runtime.ledger("q")) == {"received": 20, "unsettled": 20}
    assert begun == [b"0"]


# --- alone


async def test_alone_each_worker_says_its_own_verb(autojump_clock: Clock) -> None:
    """DESIGN 3.8: in ALONE mode a worker says its own verb, so that one slow settlement holds nobody up."""
    queue = StageQueue(StageBroker(), numbered(8), settles=Settles.ALONE, settling=1.0, limit=4)
    async with open_runtime(Subscription(queue, answers(), concurrency=4)) as runtime:
        await trio.sleep(2.5)
    assert acked(runtime) == 8
    assert trio.current_time() == 2.5
    assert queue.most == 4


async def test_alone_on_memory(autojump_clock: Clock) -> None:
    """DESIGN 3.8: every outcome works in ALONE mode, with before-steps and with copies."""
    broker = MemoryBroker()
    broker.fill("q", numbered(40))
    policy = Policy(max_attempts=3, dead_letter="dead")

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        return (Ack(), Retry(), RetryAfter(2.0), Retry())[int(delivery.body) % 4]

    queue = broker.queue("q", settles=Settles.ALONE, delays=Copies())
    async with open_runtime(Subscription(queue, handler, concurrency=4, policy=policy)) as runtime:
        await trio.sleep(60.0)
    books = runtime.ledger("q")
    assert (books.acked, books.dead_lettered, books.owed, books.published) == (10, 30, 20, 20)
    assert len(stored(broker, "dead")) == 30


@pytest.mark.parametrize("when", ["waiting", "running", "settling"])
async def test_alone_a_delivery_whose_own_connection_breaks(when: str, autojump_clock: Clock) -> None:
    """DESIGN 4, row 'the own connection of a delivery breaks': that one delivery is unsettled, the life goes on."""
    broker = MemoryBroker()
    broker.fill("q", numbered(3))
    broker.slow_settlements("q", 1.0)
    cancelled: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        try:
            await trio.sleep(5.0)
        except trio.Cancelled:
            cancelled.append(delivery.body)
            raise

    queue = broker.queue("q", settles=Settles.ALONE, limit=2)
    async with open_runtime(Subscription(queue, handler), grace=60.0) as runtime:
        await trio.sleep(1.0 if when != "settling" else 5.5)
        assert broker.sever_delivery("q", "2" if when == "waiting" else "1")
        await broker.until_empty("q")
        assert runtime.statistics()["q"].restarts == 0
    books = runtime.ledger("q")
    assert cancelled == ([b"0"] if when == "running" else [])
    assert (books.received, books.acked) == (4, 3)
    assert books.unknown == (when == "settling")
    assert books.unsettled == (when != "settling")


# --- at most once


async def test_at_most_once_says_nothing(autojump_clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """DESIGN 6 (Runtime) and 3.9: each outcome that cannot be said is *refused*; one warning per outcome."""
    queue = StageQueue(StageBroker(), numbered(6), at_most_once=True)
    handler = answers(Ack(), Retry(), Ack(), Retry(), Ack(), Ack())
    async with open_runtime(Subscription(queue, handler)) as runtime:
        await trio.sleep(5.0)
    assert lines(runtime.ledger("q")) == {"received": 6, "refused": 6}
    assert queue.said == []
    assert sorted(record.args[2].split()[0] for record in caplog.records if record.levelno == logging.WARNING) == [  # type: ignore[index,union-attr]
        "Ack",
        "Retry",
    ]


async def test_at_most_once_a_cancelled_handler_is_refused(autojump_clock: Clock) -> None:
    """DESIGN 3.9: at most once, *no* outcome is booked *refused* too, also for what was never started."""
    queue = StageQueue(StageBroker(), numbered(3), at_most_once=True, limit=3)
    async with open_runtime(Subscription(queue, answers(taking=HANGS)), grace=2.0) as runtime:
        await trio.sleep(1.0)
    assert lines(runtime.ledger("q")) == {"received": 3, "refused": 3}


async def test_at_most_once_copies(autojump_clock: Clock) -> None:
    """DESIGN 3.9: at most once a copy can be published after nothing was said; it is owed and published."""
    broker = StageBroker()
    queue = StageQueue(broker, numbered(2), at_most_once=True)
    async with open_runtime(Subscription(queue, answers(then=RetryAfter(4.0)))) as runtime:
        await trio.sleep(10.0)
    assert lines(runtime.ledger("q")) == {"received": 2, "delayed": 2, "owed": 2, "published": 2}
    assert sorted((time, letter.body) for time, _, letter in broker.published) == [(4.0, b"0"), (4.0, b"1")]


async def test_at_most_once_the_place_returns_with_the_handler(autojump_clock: Clock) -> None:
    """DESIGN 3.1: at most once a place returns when the handler ended."""
    queue = StageQueue(StageBroker(), numbered(10), at_most_once=True, limit=2)
    async with open_runtime(Subscription(queue, answers(taking=1.0), concurrency=2)) as runtime:
        await trio.sleep(3.5)
        assert runtime.ledger("q").received == 8
