"""actors.repeater: what was not applied is said again; the handler is not called again for it (DESIGN 3.8)."""

# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any

import pytest
import trio

from actors import BatchSubscription, Subscription, open_runtime
from links.abc import Settles
from links.errors import LeaseLost, NotApplied
from links.memory import MemoryBroker, MemoryLink
from settlement import Delivery, Drop, Outcome, Policy, Retry, RetryAfter
from tests.actors.scenery import HANGS, Clock, StageBroker, StageQueue, answers, bodies, lines, numbered, stored


class Calls:
    """A handler that remembers when it was called for what."""

    def __init__(self, outcome: Outcome | None = None) -> None:
        self.seen: list[tuple[float, bytes]] = []
        self.outcome = outcome

    async def __call__(self, delivery: Delivery[bytes]) -> Outcome | None:
        self.seen.append((trio.current_time(), delivery.body))
        return self.outcome


@pytest.mark.parametrize("settles", Settles)
@pytest.mark.parametrize("concurrency", [1, 3])
async def test_said_again_after_1_2_4_and_at_most_60_seconds(
    settles: Settles, concurrency: int, autojump_clock: Clock
) -> None:
    """The waits double from 1 s to 60 s; the handler is called once; then it is said."""
    queue = StageQueue(StageBroker(), [b"x"], settles=settles, verdicts=[NotApplied("no")] * 9)
    handler = Calls()
    async with open_runtime(Subscription(queue, handler, concurrency=concurrency)) as runtime:
        waits = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
        await trio.sleep(sum(waits) - 0.5)
        assert lines(runtime.ledger("q")) == {"received": 1, "in_hand": 1}
        await trio.sleep(1.0)
        assert lines(runtime.ledger("q")) == {"received": 1, "acked": 1}
    assert handler.seen == [(0.0, b"x")]
    assert queue.said == [(b"x", "accept")]


@pytest.mark.parametrize("concurrency", [1, 2])
async def test_others_go_on_until_every_place_is_held(concurrency: int, autojump_clock: Clock) -> None:
    """Its slot is given back, its place is kept: with all places held the line stands, and goes on after."""
    broker = MemoryBroker()
    broker.fill("q", numbered(6))
    broker.refuse_settlements("q", 3)
    handler = Calls()
    queue = broker.queue("q", limit=3)
    async with open_runtime(Subscription(queue, handler, concurrency=concurrency)) as runtime:
        await trio.sleep(0.9)
        assert [body for _, body in handler.seen] == numbered(3)
        assert runtime.statistics()["q"].in_hand == 3
        await broker.until_empty("q")
    assert [body for _, body in sorted(handler.seen)] == numbered(6)
    assert lines(runtime.ledger("q")) == {"received": 6, "acked": 6}


async def test_a_lease_is_kept_meanwhile(autojump_clock: Clock) -> None:
    """Nobody else gets it, however often it must be said."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    broker.refuse_settlements("q", 6)
    handler = Calls()
    queue = broker.queue("q", lease=3.0)
    async with (
        open_runtime(Subscription(queue, handler), Subscription(queue, handler, name="rival")) as runtime,
    ):
        await trio.sleep(100.0)
        assert stored(broker, "q") == []
    assert len(handler.seen) == 1
    assert runtime.ledger("q").acked + runtime.ledger("rival").acked == 1


async def test_one_that_is_lost_while_it_waits_returns_its_place(autojump_clock: Clock) -> None:
    """Superseded by the link's own word: nothing more is said for it, and another delivery is taken."""
    broker = MemoryBroker()
    broker.fill("q", numbered(2))
    broker.refuse_settlements("q", 1)
    queue = broker.queue("q", lease=30.0, limit=1)
    async with open_runtime(Subscription(queue, answers(None, None, then=Drop()))) as runtime:
        await trio.sleep(0.5)
        broker.refuse_settlements("q", 0)
        broker.expire("q")
        await broker.until_empty("q")
        assert runtime.statistics()["q"].degraded == ()
    books = runtime.ledger("q")
    assert (books.superseded, books.acked + books.dropped) == (1, 2)


async def test_a_verdict_of_a_later_try_counts(autojump_clock: Clock) -> None:
    """The second try may find that somebody else has the row."""
    queue = StageQueue(StageBroker(), [b"x"], verdicts=[NotApplied("no"), LeaseLost("gone")])
    async with open_runtime(Subscription(queue, answers())) as runtime:
        await trio.sleep(2.0)
    assert lines(runtime.ledger("q")) == {"received": 1, "superseded": 1}


async def test_the_copy_goes_out_once_when_the_verb_was_said(autojump_clock: Clock) -> None:
    """Its room is kept while it waits: not applied owes no copy, said owes one."""
    broker = StageBroker()
    queue = StageQueue(broker, [b"x"], copies=1, verdicts=[NotApplied("no")] * 2)
    async with open_runtime(Subscription(queue, answers(RetryAfter(5.0)))) as runtime:
        await trio.sleep(2.5)
        assert lines(runtime.ledger("q")) == {"received": 1, "in_hand": 1}
        await trio.sleep(10.0)
    assert [at for at, _, _ in broker.published] == [3.0 + 5.0]
    assert lines(runtime.ledger("q")) == {"received": 1, "delayed": 1, "owed": 1, "published": 1}


@pytest.mark.parametrize("settles", Settles)
async def test_a_drain_tries_soon_and_leaves_it_at_the_end_of_grace(settles: Settles, autojump_clock: Clock) -> None:
    """A drain does not wait out a minute's backoff; what is never applied is unsettled when the grace is over."""
    verdicts = [NotApplied("no")] * 6
    queue = StageQueue(StageBroker(), [b"x"], settles=settles, verdicts=verdicts)
    async with open_runtime(Subscription(queue, answers()), grace=10.0) as runtime:
        await trio.sleep(40.0)
        assert lines(runtime.ledger("q")) == {"received": 1, "in_hand": 1}
    assert trio.current_time() < 41.0
    assert lines(runtime.ledger("q")) == {"received": 1, "acked": 1}
    queue = StageQueue(StageBroker(), [b"x"], settles=settles, verdicts=[NotApplied("no")] * 10_000)
    begun = trio.current_time()
    async with open_runtime(Subscription(queue, answers()), grace=10.0) as runtime:
        await trio.sleep(1.0)
    assert trio.current_time() == begun + 11.0
    assert lines(runtime.ledger("q")) == {"received": 1, "unsettled": 1}
    assert 9_000 < len(queue.verdicts) < 9_990


async def test_grace_ends_while_it_is_being_said_again(autojump_clock: Clock) -> None:
    """A verb that is on the wire when the grace ends is waited for: its verdict decides."""
    queue = StageQueue(StageBroker(), [b"x"], verdicts=[NotApplied("no")])
    async with open_runtime(Subscription(queue, answers()), grace=1.0) as runtime:
        await trio.sleep(0.8)
        queue.settling = 1.0
    assert lines(runtime.ledger("q")) == {"received": 1, "acked": 1}


@pytest.mark.parametrize("what", ["sever", "cancel"])
async def test_nothing_is_marked_when_the_life_has_ended(what: str, autojump_clock: Clock) -> None:
    """What waits is unsettled, and *degraded* does not outlive it."""
    broker = MemoryBroker()
    broker.fill("q", numbered(20))
    broker.refuse_settlements("q", 7)
    with trio.CancelScope() as scope:
        async with open_runtime(
            Subscription(broker.queue("q"), answers(then=RetryAfter(0.2), taking=0.01), concurrency=4)
        ) as runtime:
            await trio.sleep(0.5)
            (mark,) = runtime.statistics()["q"].degraded
            assert mark.startswith("settling: ")
            if what == "cancel":
                scope.cancel()
            else:
                broker.sever("q")
            await trio.sleep(5.0)
            assert runtime.statistics()["q"].degraded == ()
    assert runtime.statistics()["q"].degraded == ()
    assert runtime.ledger("q").unsettled >= 7


async def test_many_are_said_together(autojump_clock: Clock) -> None:
    """Two thousand refused ones are no hot loop: so many tries of each, each try one call for all."""
    broker = MemoryBroker()
    broker.fill("q", numbered(2000))
    broker.refuse_settlements("q", 4000)
    handler = Calls()
    settled: list[int] = []
    queue = broker.queue("q", limit=2000)
    async with open_runtime(Subscription(queue, handler, concurrency=8), observers=[]) as runtime:
        link = broker.store("q").links[0]
        assert isinstance(link, MemoryLink)
        settle = link.settle

        async def counted(settlements: Any) -> Any:
            settled.append(len(settlements))
            return await settle(settlements)

        link.settle = counted  # type: ignore[method-assign]
        await trio.sleep(10.0)
    assert runtime.ledger("q").acked == len(handler.seen) == 2000
    assert len([count for count in settled if count == 2000]) >= 2
    assert len(settled) < 400


async def test_a_batch_is_said_again_row_by_row_as_it_was_refused(autojump_clock: Clock) -> None:
    """Where verbs are said alone a batch is one call; what of it was not applied is said again, the rest is not."""
    queue = StageQueue(StageBroker(), numbered(4), settles=Settles.ALONE, verdicts=[None, NotApplied("no"), None])
    calls: list[int] = []

    async def handler(batch: list[Delivery[bytes]]) -> None:
        calls.append(len(batch))
        await trio.lowlevel.checkpoint()

    async with open_runtime(BatchSubscription(queue, handler, size=4)) as runtime:
        await trio.sleep(2.0)
    assert calls == [4]
    assert queue.said == [(b"0", "accept"), (b"2", "accept"), (b"3", "accept"), (b"1", "accept")]
    assert lines(runtime.ledger("q")) == {"received": 4, "acked": 4}


@pytest.mark.parametrize("settles", Settles)
async def test_a_finish_that_is_refused_after_a_dead_letter_publishes_no_second_one(
    settles: Settles, autojump_clock: Clock
) -> None:
    """What stood before the verb is done: only the verb is said again."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    abroad = MemoryBroker("abroad")
    policy = Policy(max_attempts=1, dead_letter=abroad.publisher("dead"))
    broker.refuse_settlements("q", 3)
    queue = broker.queue("q", settles=settles)
    async with open_runtime(Subscription(queue, answers(then=Retry()), policy=policy)) as runtime:
        await broker.until_empty("q")
    assert bodies(abroad.ready("dead")) == [b"x"]
    assert lines(runtime.ledger("q")) == {"received": 1, "dead_lettered": 1}


async def test_a_settlement_that_hangs_while_it_is_said_again_is_bounded(autojump_clock: Clock) -> None:
    """Cancelled on the wire, also of a second try: unknown."""
    queue = StageQueue(StageBroker(), [b"x"], verdicts=[NotApplied("no")])
    with trio.move_on_after(5.0):
        async with open_runtime(Subscription(queue, answers())) as runtime:
            await trio.sleep(0.5)
            queue.settling = HANGS
            await trio.sleep_forever()
    assert lines(runtime.ledger("q")) == {"received": 1, "unknown": 1}
