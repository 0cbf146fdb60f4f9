"""actors.lease_keeper: leases are renewed from receipt on, and a lost one takes its handler with it (DESIGN 3.3,
3.4).
"""

# pyright: reportPossiblyUnboundVariable=false

from collections.abc import Sequence
from typing import Any

import pytest
import trio

from actors import Subscription, open_runtime
from actors.lease_keeper import margin
from links.abc import Received
from links.errors import NotApplied
from links.memory import MemoryBroker
from settlement import Ack, Copies, Delivery, Outcome, Plan, Policy, Retry, RetryAfter, Wait
from settlement.ledger import Line
from settlement.policy import Ending
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


@pytest.mark.parametrize(
    ("lease", "expected"), [(30.0, 3.0), (600.0, 60.0), (5.0, 0.5), (2.0, 0.5), (1.0, 0.5), (0.2, 0.1)]
)
def test_margin(lease: float, expected: float) -> None:
    """DESIGN 3.4: the margin is 10 %, at least 0.5 s; of a very short lease at most the half."""
    assert margin(lease) == pytest.approx(expected)


@pytest.mark.parametrize("again", range(12))
async def test_a_lease_is_kept_for_as_long_as_the_handler_runs(again: int, autojump_clock: Clock) -> None:
    """DESIGN 3.4: leases are renewed at a third, however long the handler takes, also one that was there at the
    start.
    """
    broker = MemoryBroker()
    broker.fill("q", numbered(3))
    async with open_runtime(
        Subscription(broker.queue("q", lease=30.0, limit=3), answers(taking=1000.0)), grace=1.0
    ) as runtime:
        await broker.until_empty("q")
    assert lines(runtime.ledger("q")) == {"received": 3, "acked": 3}
    assert trio.current_time() == 3000.0


async def test_a_lease_that_is_lost_supersedes(autojump_clock: Clock) -> None:
    """DESIGN 4, row 'lease lost': that delivery's scope is cancelled, it is superseded; others go on."""
    queue = StageQueue(StageBroker(), numbered(2), lease=30.0, extending=HANGS, limit=2)
    cancelled: list[float] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        try:
            await trio.sleep(100.0 if delivery.body == b"0" else 5.0)
        except trio.Cancelled:
            cancelled.append(trio.current_time())
            raise

    async with open_runtime(Subscription(queue, handler, concurrency=2)) as runtime:
        await trio.sleep(50.0)
        queue.extending = 0.0
        queue.messages = [b"1"]
        await trio.sleep(20.0)
        assert runtime.statistics()["q"].restarts == 0
    assert cancelled == [27.0]
    assert lines(runtime.ledger("q")) == {"received": 3, "acked": 2, "superseded": 1}
    assert queue.said == [(b"1", "accept"), (b"1", "accept")]


async def test_a_hanging_extend_takes_the_rest_with_it_in_time(autojump_clock: Clock) -> None:
    """DESIGN 3.4, trap 'a hanging extend': it has a deadline before the earliest expiry; the handler ends before it."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    broker.slow_extensions("q", HANGS)
    overlapping = 0
    most = 0

    async def handler(delivery: Delivery[bytes]) -> None:
        nonlocal overlapping, most
        overlapping += 1
        most = max(most, overlapping)
        try:
            await trio.sleep(100.0)
        finally:
            overlapping -= 1

    async with open_runtime(Subscription(broker.queue("q", lease=20.0), handler, concurrency=2), grace=0.0) as runtime:
        await trio.sleep(70.0)
    assert most == 1
    books = runtime.ledger("q")
    assert (books.received, books.superseded, books.unsettled) == (4, 3, 1)


async def test_a_delivery_that_waits_for_a_handler_keeps_its_lease(autojump_clock: Clock) -> None:
    """DESIGN 3.3: from receipt on a delivery is known to the keeper, also while it waits in the channel."""
    broker = MemoryBroker()
    broker.fill("q", numbered(4))
    async with open_runtime(Subscription(broker.queue("q", lease=10.0, limit=4), answers(taking=25.0))) as runtime:
        await broker.until_empty("q")
    assert lines(runtime.ledger("q")) == {"received": 4, "acked": 4}


async def test_an_expired_delivery_is_not_run(autojump_clock: Clock) -> None:
    """DESIGN 3.4: `expired` is asked before the handler starts: not run, superseded."""
    queue = StageQueue(StageBroker(), numbered(2), lease=10.0, extending=HANGS, limit=2)
    begun: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        begun.append(delivery.body)
        with trio.CancelScope(shield=True):
            await trio.sleep(15.0)

    async with open_runtime(Subscription(queue, handler)) as runtime:
        await trio.sleep(20.0)
    assert begun == [b"0"]
    assert lines(runtime.ledger("q")) == {"received": 2, "superseded": 2}
    assert queue.said == []


@pytest.mark.parametrize("concurrency", [1, 2])
async def test_the_answer_of_a_handler_that_shields_itself_is_not_said(concurrency: int, autojump_clock: Clock) -> None:
    """DESIGN 3.4: a handler that shields itself cannot be stopped; it was cancelled, so its answer is not said."""
    queue = StageQueue(StageBroker(), [b"x"], lease=10.0, extending=HANGS)

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        with trio.CancelScope(shield=True):
            await trio.sleep(15.0)
        return Ack()

    async with open_runtime(Subscription(queue, handler, concurrency=concurrency)) as runtime:
        await trio.sleep(20.0)
    assert lines(runtime.ledger("q")) == {"received": 1, "superseded": 1}


async def test_no_letter_is_published_for_a_lease_that_is_lost(autojump_clock: Clock) -> None:
    """DESIGN 3.4: `expired` is asked before a letter is published; the walk's scope is the keeper's."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    broker.close("dead")
    policy = Policy(max_attempts=1, dead_letter="dead")
    async with open_runtime(
        Subscription(broker.queue("q", lease=10.0), answers(then=Retry()), policy=policy), grace=0.0
    ) as runtime:
        await trio.sleep(5.0)
        broker.slow_extensions("q", HANGS)
        await trio.sleep(20.0)
        assert runtime.ledger("q").superseded > 0
        assert stored(broker, "dead") == []


async def test_a_lease_is_kept_while_a_dead_letter_is_closed(autojump_clock: Clock) -> None:
    """DESIGN 0.3: *before* belongs to the delivery: its lease and its place are kept while a letter is tried."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    broker.close("dead")
    policy = Policy(max_attempts=1, dead_letter="dead")
    async with open_runtime(
        Subscription(broker.queue("q", lease=10.0), answers(then=Retry()), policy=policy)
    ) as runtime:
        await trio.sleep(500.0)
        broker.reopen("dead")
        await broker.until_empty("q")
    assert lines(runtime.ledger("q")) == {"received": 1, "dead_lettered": 1}


async def test_a_failed_extend_is_tried_again(autojump_clock: Clock) -> None:
    """DESIGN 4, row 'a pooled connection breaks': after a broken call the old expiry holds, the next third renews."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    async with open_runtime(
        Subscription(broker.queue("q", lease=30.0, limit=1), answers(taking=100.0)), grace=200.0
    ) as runtime:
        await trio.sleep(9.0)
        broker.break_calls("q")
        await trio.sleep(5.0)
        await broker.until_empty("q")
    assert lines(runtime.ledger("q")) == {"received": 1, "acked": 1}


async def test_leases_that_the_broker_took_are_superseded(autojump_clock: Clock) -> None:
    """DESIGN 3.4: what an `extend` names as lost is superseded, and its handler cancelled, others are not."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    async with open_runtime(
        Subscription(broker.queue("q", lease=30.0), answers(taking=50.0), concurrency=2)
    ) as runtime:
        await trio.sleep(5.0)
        broker.expire("q")
        await broker.until_empty("q")
    assert lines(runtime.ledger("q")) == {"received": 2, "superseded": 1, "acked": 1}


async def test_an_outcome_for_a_lease_that_the_broker_took(autojump_clock: Clock) -> None:
    """DESIGN 3.9: a verb that is refused for a lost lease is *superseded*, and no copy goes out."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    async with open_runtime(
        Subscription(broker.queue("q", lease=300.0, delays=Copies()), answers(RetryAfter(1.0), taking=5.0))
    ) as runtime:
        await trio.sleep(1.0)
        broker.expire("q")
        await broker.until_empty("q")
    assert lines(runtime.ledger("q")) == {"received": 2, "superseded": 1, "acked": 1}


async def test_no_extension_begins_beside_a_settlement(autojump_clock: Clock) -> None:
    """DESIGN 3.4: `extend` and `settle` of one delivery never run at the same time: one on the wire is left out."""
    queue = StageQueue(StageBroker(), numbered(20), lease=9.0, settling=5.0, limit=4)
    async with open_runtime(Subscription(queue, answers(), concurrency=4), grace=60.0) as runtime:
        await trio.sleep(60.0)
    assert acked(runtime) == 20
    assert queue.overlaps == 0


@pytest.mark.parametrize("concurrency", [1, 2])
async def test_a_handler_that_blocks_the_loop_beyond_its_lease(concurrency: int, autojump_clock: Clock) -> None:
    """DESIGN 3.4: its verb is said all the same. The other one was superseded before its start, or is renewed first."""
    queue = StageQueue(StageBroker(), numbered(2), lease=10.0, limit=2)
    begun: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> Ack:
        begun.append(delivery.body)
        autojump_clock.jump(15.0)
        return Ack()

    async with open_runtime(Subscription(queue, handler, concurrency=concurrency)) as runtime:
        await trio.sleep(40.0)
    books = runtime.ledger("q")
    assert queue.said == [(body, "accept") for body in begun]
    assert (books.acked, books.superseded) == (len(begun), 2 - len(begun))


async def test_a_held_delivery_whose_lease_is_lost_returns_its_place(autojump_clock: Clock) -> None:
    """DESIGN 3.4 and 3.1: the keeper holds the scope of a walk, so that a lost one ends, and its place returns."""

    def held(outcome: Ending, _: Delivery[Any], __: Policy) -> Plan[str]:
        return Plan(Line.DELAYED, "put back", before=(Wait(1000.0),), instead="put back")

    queue = StageQueue(StageBroker(), numbered(2), table=held, lease=10.0, extending=HANGS, limit=1)
    async with open_runtime(Subscription(queue, answers())) as runtime:
        await trio.sleep(12.0)
        assert lines(runtime.ledger("q")) == {"received": 2, "superseded": 1, "in_hand": 1}


class Steps(trio.abc.Instrument):
    """Counts the steps of all tasks; at `most` it cancels `scope`, so that a loop without end fails, and hangs not."""

    def __init__(self, most: int, scope: trio.CancelScope) -> None:
        self.taken = 0
        self.most = most
        self.scope = scope

    def before_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002 -- trio calls it so
        self.taken += 1
        if self.taken == self.most:
            self.scope.cancel()


@pytest.mark.parametrize("after", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("lease", [1.0, 3.0, 5.2, 7.7, 10.4, 12.9, 15.4, 30.0])
async def test_the_keeper_sleeps_whatever_the_rounding(lease: float, after: float, autojump_clock: Clock) -> None:
    """DESIGN 3.4: at the lease's end minus the margin the scope is cancelled, also where (e - m) + m is less than e."""
    broker = MemoryBroker()
    broker.slow_extensions("q", HANGS)
    cancelled: list[float] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            cancelled.append(trio.current_time())
            raise

    with trio.CancelScope() as spinning:
        async with open_runtime(Subscription(broker.queue("q", lease=lease), handler), grace=0.0) as runtime:
            await trio.sleep(after)
            broker.fill("q", [b"x"])
            steps = Steps(10_000, spinning)
            trio.lowlevel.add_instrument(steps)
            await trio.sleep(10 * lease - margin(lease) / 2)
            trio.lowlevel.remove_instrument(steps)
    assert not spinning.cancelled_caught
    assert cancelled[:10] == pytest.approx([after + n * lease - margin(lease) for n in range(1, 11)])
    assert lines(runtime.ledger("q")) == {"received": 10, "superseded": 10}


async def test_a_renewal_of_what_has_lapsed_has_a_deadline_too(autojump_clock: Clock) -> None:
    """DESIGN 3.4: each `extend` has a deadline, also where all that is held has lapsed and waits to be said."""
    calls: list[float] = []

    class Counted(StageLink):
        async def extend(self, held: Sequence[Received[bytes]]) -> Sequence[Received[bytes]]:
            calls.append(trio.current_time())
            return await super().extend(held)

    refused = [NotApplied("no")] * 9
    queue = StageQueue(StageBroker(), [b"x"], lease=9.0, extending=HANGS, verdicts=refused, link=Counted)
    with trio.move_on_after(40.0):
        async with open_runtime(Subscription(queue, answers())):
            await trio.sleep_forever()
    assert len(calls) > 6
    assert calls[-1] > 30.0
