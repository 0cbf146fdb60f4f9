"""actors.settler: what each verdict is booked as, and what a break or a cancel on the wire leaves (DESIGN 3.7 to
3.9).
"""

# pyright: reportPossiblyUnboundVariable=false

import random

import pytest
import trio

from actors import Subscription, open_runtime
from links.abc import Settles
from links.errors import LeaseLost, NotApplied, SettlementUnknown
from links.memory import MemoryBroker
from settlement import Ack, Copies, Delivery, Retry, RetryAfter
from tests.actors.scenery import HANGS, Clock, StageBroker, StageQueue, answers, lines, numbered, stored


@pytest.mark.parametrize(
    ("verdict", "line"),
    [
        (None, "delayed"),
        (NotApplied("no"), "delayed"),
        (LeaseLost("gone"), "superseded"),
        (SettlementUnknown("?"), "unknown"),
    ],
)
@pytest.mark.parametrize("settles", Settles)
async def test_verdicts_are_booked_and_decide_about_the_copy(
    verdict: LeaseLost | None, line: str, settles: Settles, autojump_clock: Clock
) -> None:
    """DESIGN 3.7: said, at last, or unknown: the copy goes out; lost: no copy, and its room returns."""
    broker = StageBroker()
    queue = StageQueue(broker, [b"x", b"y"], verdicts=[verdict], settles=settles, copies=1)
    async with open_runtime(Subscription(queue, answers(RetryAfter(5.0), RetryAfter(5.0)))) as runtime:
        await trio.sleep(30.0)
    copies = 2 if line in ("delayed", "unknown") else 1
    expected = {"received": 2, "delayed": 1, "owed": copies, "published": copies}
    expected[line] = expected.get(line, 0) + 1
    assert lines(runtime.ledger("q")) == expected
    assert len(broker.published) == copies


async def test_a_settlement_that_fails_does_not_leave_the_loop(autojump_clock: Clock) -> None:
    """C-1.6: a verb that was not applied is one warning, and is said again; the next delivery is handled meanwhile."""
    broker = MemoryBroker()
    broker.fill("q", numbered(3))
    broker.refuse_settlements("q", 1)
    async with open_runtime(Subscription(broker.queue("q"), answers())) as runtime:
        await trio.sleep(0.5)
        assert lines(runtime.ledger("q")) == {"received": 3, "acked": 2, "in_hand": 1}
        await trio.sleep(1.0)
    assert lines(runtime.ledger("q")) == {"received": 3, "acked": 3}
    assert stored(broker, "q") == []


async def test_a_verb_that_was_not_applied_degrades_until_one_is_said(autojump_clock: Clock) -> None:
    """DESIGN 3.8: a settlement that fails marks the subscription degraded, until it is said."""
    queue = StageQueue(StageBroker(), [b"x", b"y"], verdicts=[NotApplied("a constraint")])
    said: list[tuple[str, ...]] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        await trio.sleep(1.0)
        said.append(runtime.statistics()["q"].degraded)

    async with open_runtime(Subscription(queue, handler)) as runtime:
        await trio.sleep(10.0)
        assert runtime.statistics()["q"].degraded == ()
    assert said == [(), ("settling: a constraint",)]


@pytest.mark.parametrize("settles", Settles)
@pytest.mark.parametrize("what", ["sever", "sever_connection", "cancel"])
async def test_cancelled_or_broken_on_the_wire_is_unknown(what: str, settles: Settles, autojump_clock: Clock) -> None:
    """DESIGN 4, row 'cancelled while a settlement is on the wire': unknown; what had not been ordered: unsettled."""
    broker = MemoryBroker()
    broker.fill("q", numbered(3))
    broker.slow_settlements("q", HANGS)
    queue = broker.queue("q", settles=settles, limit=3)
    with trio.CancelScope() as scope:
        async with open_runtime(Subscription(queue, answers())) as runtime:
            await trio.sleep(1.0)
            broker.slow_settlements("q", 0.0)
            if what == "cancel":
                scope.cancel()
            elif what == "sever":
                broker.sever("q")
            else:
                broker.sever_connection()
            await broker.until_empty("q")
    again = 0 if what == "cancel" else 3
    books = runtime.ledger("q")
    assert (books.received, books.acked, books.unknown, books.unsettled) == (3 + again, again, 1, 2)


@pytest.mark.parametrize("what", ["sever", "sever_connection", "cancel"])
async def test_the_copy_of_an_unknown_verb_goes_out(what: str, autojump_clock: Clock) -> None:
    """DESIGN 3.7: unknown: the copy goes out; twice beats lost."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    broker.slow_settlements("q", HANGS)
    with trio.CancelScope() as scope:
        async with open_runtime(Subscription(broker.queue("q", delays=Copies()), answers(RetryAfter(1.0)))) as runtime:
            await trio.sleep(1.0)
            broker.slow_settlements("q", 0.0)
            if what == "cancel":
                scope.cancel()
            elif what == "sever":
                broker.sever("q")
            else:
                broker.sever_connection()
            await trio.sleep(5.0)
    books = runtime.ledger("q")
    assert (books.unknown, books.owed, books.published, books.lost) == (1, 1, 1, 0)
    assert len(stored(broker, "q")) == (2 if what == "cancel" else 0)


@pytest.mark.parametrize("seed", range(5))
async def test_calls_that_break_are_unknown_and_the_life_goes_on(seed: int, autojump_clock: Clock) -> None:
    """DESIGN 4, row 'a pooled connection breaks': the call in flight alone; handlers and leases go on."""
    broker = MemoryBroker(dice=random.Random(seed))  # noqa: S311 -- not a secret
    broker.fill("q", numbered(20))
    broker.slow_settlements("q", 1.0)
    async with open_runtime(
        Subscription(broker.queue("q", lease=30.0), answers(taking=1.0), concurrency=10)
    ) as runtime:
        await trio.sleep(1.5)
        broker.break_calls("q")
        await broker.until_empty("q")
        assert runtime.statistics()["q"].restarts == 0
    books = runtime.ledger("q")
    assert books.unknown == 10
    assert books.acked >= 10


async def test_a_late_outcome_of_an_old_life_says_nothing(autojump_clock: Clock) -> None:
    """DESIGN 4, row 'AMQP link breaks': unsettled; the old handler is cancelled, and its outcome is not said."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    said: list[object] = []

    async def handler(delivery: object) -> Ack | Retry:
        if len(said) == 0:
            said.append(delivery)
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                return Ack()
        return Retry() if len(said) == 1 and not said.append(delivery) else Ack()  # type: ignore[func-returns-value]

    async with open_runtime(Subscription(broker.queue("q"), handler)) as runtime:
        await trio.sleep(1.0)
        broker.sever("q")
        await broker.until_empty("q")
    assert lines(runtime.ledger("q")) == {"received": 3, "unsettled": 1, "retried": 1, "acked": 1}


async def test_an_order_whose_lease_runs_out_before_its_turn_is_said(autojump_clock: Clock) -> None:
    """DESIGN 3.4: a lease that has run out here and was taken by nobody is still ours: the token judges."""
    queue = StageQueue(StageBroker(), numbered(3), lease=10.0, settling=12.0, extending=HANGS, limit=2)

    async def handler(delivery: Delivery[bytes]) -> None:
        await trio.sleep(1.0 + int(delivery.body))

    async with open_runtime(Subscription(queue, handler, concurrency=2), grace=60.0) as runtime:
        await trio.sleep(12.5)
        assert lines(runtime.ledger("q")) == {"received": 2, "in_hand": 2}
        queue.settling = 0.0
    assert queue.said[:2] == [(b"0", "accept"), (b"1", "accept")]
    books = runtime.ledger("q")
    assert (books.acked, books.superseded) == (books.received, 0)
