"""A drain, row by row of DESIGN 4: what is finished, what is given back, what hangs, and when it is over."""

# pyright: reportPossiblyUnboundVariable=false

import logging

import pytest
import trio
import trio.testing

from actors import BatchSubscription, Runtime, Subscription, open_runtime
from actors.events import Attached, Event
from links.abc import Settles
from links.memory import MemoryBroker
from settlement import Ack, Copies, Delivery, Policy, Retry, RetryAfter
from tests.actors.scenery import HANGS, Clock, StageBroker, StageQueue, acked, answers, lines, numbered, stored


@pytest.mark.parametrize("settles", Settles)
async def test_finished_within_grace_is_settled_normally(settles: Settles, autojump_clock: Clock) -> None:
    """DESIGN 4, row 'drain, finished within grace': nothing dies; settled normally, and not a second longer."""
    broker = MemoryBroker()
    broker.fill("q", numbered(4))
    queue = broker.queue("q", settles=settles)
    async with open_runtime(Subscription(queue, answers(taking=9.0), concurrency=4), grace=10.0) as runtime:
        await trio.sleep(1.0)
    assert lines(runtime.ledger("q")) == {"received": 4, "acked": 4}
    assert trio.current_time() == 9.0


async def test_received_and_not_started_is_given_back_at_once(autojump_clock: Clock) -> None:
    """DESIGN 4, row 'received but not started': workers pass it over; given back at once, not when the handlers end."""
    queue = StageQueue(StageBroker(), numbered(4), limit=4)
    async with open_runtime(Subscription(queue, answers(taking=10.0))) as runtime:
        await trio.sleep(1.0)
        runtime.drain()
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(queue.given_back) == numbered(4)[1:]
        assert lines(runtime.ledger("q")) == {"received": 4, "unsettled": 3, "in_hand": 1}
    assert lines(runtime.ledger("q")) == {"received": 4, "unsettled": 3, "acked": 1}


async def test_what_was_given_back_counts_as_no_attempt(autojump_clock: Clock) -> None:
    """DESIGN 4, row 'received but not started': memory takes it back uncounted, so that no attempt is spent."""
    broker = MemoryBroker()
    broker.fill("q", numbered(3))
    attempts: list[int] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        attempts.append(delivery.attempt)
        await trio.sleep(1.0)

    for _ in range(3):
        async with open_runtime(Subscription(broker.queue("q", limit=3), handler)):
            await trio.sleep(0.5)
    assert attempts == [1, 1, 1]


@pytest.mark.parametrize("again", range(10))
async def test_nothing_is_taken_after_a_drain_began(again: int, autojump_clock: Clock) -> None:
    """DESIGN 4: the intake of all ends first: what arrives after `drain()` stays."""
    broker = MemoryBroker()
    async with open_runtime(Subscription(broker.queue("q"), answers(), concurrency=2)) as runtime:
        await trio.testing.wait_all_tasks_blocked()
        broker.fill("q", numbered(3))
        runtime.drain()
        await runtime.finished()
    assert len(stored(broker, "q")) + acked(runtime) == 3
    assert runtime.ledger("q").received in (0, 3)


async def test_grace_over_cancels_handlers(autojump_clock: Clock) -> None:
    """DESIGN 4, row 'drain, grace over': handler scopes are cancelled, their deliveries unsettled, in bounded time."""
    broker = MemoryBroker()
    broker.fill("q", numbered(3))
    queue = broker.queue("q", limit=3)
    async with open_runtime(Subscription(queue, answers(taking=HANGS), concurrency=2), grace=7.0) as runtime:
        await trio.sleep(1.0)
    assert trio.current_time() == 8.0
    assert lines(runtime.ledger("q")) == {"received": 3, "unsettled": 3}
    assert stored(broker, "q") == numbered(3)


async def test_grace_of_zero(autojump_clock: Clock) -> None:
    """DESIGN 4: a grace of 0 cancels handlers at once; what was ordered is still said."""
    broker = MemoryBroker()
    broker.fill("q", numbered(2))
    broker.slow_settlements("q", 2.0)
    async with open_runtime(
        Subscription(broker.queue("q", limit=2), answers(taking=1.0), concurrency=1), grace=0.0
    ) as runtime:
        await trio.sleep(2.0)
    assert lines(runtime.ledger("q")) == {"received": 2, "acked": 1, "unsettled": 1}


async def test_grace_over_does_not_cancel_settlements(autojump_clock: Clock) -> None:
    """DESIGN 3.5: grace over cancels handler scopes, not hand-overs: a slow settlement is finished in the goodbye."""
    queue = StageQueue(StageBroker(), numbered(3), settling=6.0, limit=3)
    async with open_runtime(Subscription(queue, answers(taking=0.5), concurrency=3), grace=2.0, goodbye=9.0) as runtime:
        await trio.sleep(1.0)
    assert lines(runtime.ledger("q")) == {"received": 3, "acked": 3}


@pytest.mark.parametrize(
    "hanging", ["settling", "extending", "giving_back", "detaching", "publishing", "closing", "all"]
)
@pytest.mark.parametrize("settles", Settles)
async def test_a_drain_is_over_in_time_whatever_hangs(hanging: str, settles: Settles, autojump_clock: Clock) -> None:
    """DESIGN 4: `grace` bounds everything up to the copies, then one `goodbye` for last tries, one for the exits."""
    broker = StageBroker()
    queue = StageQueue(broker, numbered(6), lease=30.0, settles=settles, limit=6)
    handler = answers(RetryAfter(1.0), Ack(), taking=2.0)
    subscription = Subscription(queue, handler, concurrency=2)
    async with open_runtime(subscription, grace=20.0, goodbye=4.0) as runtime:
        await trio.sleep(1.0)
        for call in ("settling", "extending", "giving_back", "detaching"):
            if hanging in (call, "all"):
                setattr(queue, call, HANGS)
        for call in ("publishing", "closing"):
            if hanging in (call, "all"):
                setattr(broker, call, HANGS)
    assert trio.current_time() <= 1.0 + 20.0 + 2 * 4.0
    assert runtime.ledger("q").received == 6


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_a_drain_at_start_up(concurrency: int, autojump_clock: Clock) -> None:
    """DESIGN 2, trap 'drain at start-up': `run` reports started and returns; nothing was taken; the block goes on."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    broker.break_attaches("r", 10**6)
    runtime = Runtime(
        Subscription(broker.queue("q"), answers(), concurrency=concurrency), Subscription(broker.queue("r"), answers())
    )

    async def later() -> None:
        await trio.sleep(20.0)
        runtime.drain()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(later)
        await nursery.start(runtime.run)
        assert trio.current_time() == 20.0
        await runtime.finished()
    assert trio.current_time() == 20.0
    assert lines(runtime.ledger("q")) == {}


async def test_a_drain_before_the_start(autojump_clock: Clock) -> None:
    """DESIGN 2: `drain` may come before `run`; then that reports started and returns."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    runtime = Runtime(Subscription(broker.queue("q"), answers()))
    runtime.drain()
    async with trio.open_nursery() as nursery:
        await nursery.start(runtime.run)
        await runtime.finished()
    assert trio.current_time() == 0.0
    assert stored(broker, "q") == [b"x"]


async def test_a_drain_during_start_up_is_not_said_to_run(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """DESIGN 2: what was drained while it started never ran, and the log does not say so."""
    caplog.set_level(logging.INFO)
    runtime = Runtime(Subscription(MemoryBroker().queue("q"), answers()))
    runtime.drain()
    await runtime.run()
    assert "running" not in caplog.text
    assert "draining" in caplog.text


@pytest.mark.parametrize("what", ["sever", "sever_connection"])
async def test_a_break_during_a_drain(what: str, autojump_clock: Clock) -> None:
    """DESIGN 4: a link that breaks during a drain is not started again: its deliveries are unsettled, it ends."""
    broker = MemoryBroker()
    broker.fill("q", numbered(2))
    async with open_runtime(Subscription(broker.queue("q"), answers(taking=10.0), concurrency=2)) as runtime:
        await trio.sleep(1.0)
        runtime.drain()
        await trio.sleep(1.0)
        if what == "sever":
            broker.sever("q")
        else:
            broker.sever_connection()
        await runtime.finished()
    assert trio.current_time() < 3.0
    assert lines(runtime.ledger("q")) == {"received": 2, "unsettled": 2}
    assert stored(broker, "q") == numbered(2)


@pytest.mark.parametrize("what", ["sever", "sever_connection", "refuse"])
async def test_a_drain_between_two_lives(what: str, autojump_clock: Clock) -> None:
    """DESIGN 4: a drain does not wait for a link that is not there."""
    broker = MemoryBroker()
    async with open_runtime(Subscription(broker.queue("q"), answers())) as runtime:
        broker.break_connects(10**6)
        broker.break_attaches("q", 10**6)
        if what == "refuse":
            broker.refuse("q")
        if what == "sever_connection":
            broker.sever_connection()
        else:
            broker.sever("q")
        await trio.sleep(100.0)
    assert trio.current_time() == 100.0
    assert lines(runtime.ledger("q")) == {}


async def test_drain_between_two_lives_with_copies(autojump_clock: Clock) -> None:
    """DESIGN 4: a connection that is away when a drain begins is brought back while copies are owed."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    async with open_runtime(
        Subscription(broker.queue("q", delays=Copies()), answers(RetryAfter(5.0))), grace=30.0
    ) as runtime:
        await trio.sleep(1.0)
        broker.break_connects(3)
        broker.sever_connection()
        await trio.lowlevel.checkpoint()
        runtime.drain()
        await runtime.finished()
        assert trio.current_time() == pytest.approx(5.0)
    assert runtime.ledger("q").published == 1


async def test_a_drain_ends_all_subscriptions(autojump_clock: Clock) -> None:
    """DESIGN 4: drain is global; each subscription's handlers get the same grace."""
    broker = MemoryBroker()
    for name in "abc":
        broker.fill(name, [b"x"])
    async with open_runtime(
        *(
            Subscription(broker.queue(name), answers(taking=after))
            for name, after in zip("abc", (3, 8, 99), strict=True)
        ),
        grace=10.0,
    ) as runtime:
        await trio.sleep(1.0)
    assert trio.current_time() == 11.0
    assert [runtime.ledger(name).acked for name in "abc"] == [1, 1, 0]
    assert runtime.ledger("c").unsettled == 1


async def test_a_handler_may_publish_during_a_drain(autojump_clock: Clock) -> None:
    """DESIGN 4: connections close last, so what a handler publishes while a drain runs goes out."""
    here, there = MemoryBroker("here"), MemoryBroker("there")
    here.fill("q", [b"x"])

    async def handler(delivery: Delivery[bytes]) -> None:
        await trio.sleep(5.0)
        await there.publisher("out").publish(b"done")

    async with open_runtime(
        Subscription(here.queue("q"), handler), Subscription(there.queue("idle"), answers())
    ) as runtime:
        await trio.sleep(1.0)
    assert acked(runtime) == 1
    assert stored(there, "out") == [b"done"]


async def test_a_batch_that_waits_for_more_is_given_back(autojump_clock: Clock) -> None:
    """DESIGN 4, row 'received but not started': so is a batch that was not handed to its handler yet."""
    queue = StageQueue(StageBroker(), numbered(3))

    async def handler(batch: list[Delivery[bytes]]) -> None:
        raise AssertionError(batch)

    async with open_runtime(BatchSubscription(queue, handler, size=5, wait=100.0)) as runtime:
        await trio.sleep(1.0)
    assert trio.current_time() == 1.0
    assert sorted(queue.given_back) == numbered(3)
    assert lines(runtime.ledger("q")) == {"received": 3, "unsettled": 3}


async def test_a_drain_from_inside_a_handler(autojump_clock: Clock) -> None:
    """DESIGN 2: `drain` is a plain call, from anywhere; the handler that called it is finished and settled."""
    broker = MemoryBroker()
    broker.fill("q", numbered(5))

    async def handler(delivery: Delivery[bytes]) -> None:
        if delivery.body == b"2":
            runtime.drain()
        await trio.sleep(1.0)

    async with open_runtime(Subscription(broker.queue("q", limit=1), handler)) as runtime:
        await runtime.finished()
    assert lines(runtime.ledger("q")) == {"received": 3, "acked": 3}


async def test_a_cancel_during_a_drain(autojump_clock: Clock) -> None:
    """DESIGN 4: an outside cancel ends a drain: what is in hand is unsettled, at once."""
    broker = MemoryBroker()
    broker.fill("q", numbered(2))
    with trio.move_on_after(5.0):
        async with open_runtime(Subscription(broker.queue("q"), answers(taking=60.0)), grace=600.0) as runtime:
            await trio.sleep(1.0)
    assert trio.current_time() == 5.0
    assert lines(runtime.ledger("q")) == {"received": 2, "unsettled": 2}


@pytest.mark.parametrize("moment", [0.0, 0.5, 1.0, 2.0, 3.7, 10.0])
async def test_a_drain_at_any_moment_of_a_busy_service(moment: float, autojump_clock: Clock) -> None:
    """DESIGN 0.6: whenever a drain comes, every message is accepted, in a queue, or in the dead letter, once."""
    broker = MemoryBroker()
    broker.fill("q", numbered(100))
    policy = Policy(max_attempts=3, dead_letter="dead")

    async def handler(delivery: Delivery[bytes]) -> Ack | Retry | RetryAfter:
        await trio.sleep(0.3)
        return (Ack(), Retry(), RetryAfter(1.0), RetryAfter(40.0))[int(delivery.body) % 4]

    queue = broker.queue("q", delays=Copies(), lease=10.0)
    async with open_runtime(Subscription(queue, handler, policy=policy, concurrency=8), grace=5.0) as runtime:
        await trio.sleep(moment)
    books = runtime.ledger("q")
    assert (books.lost, books.unknown) == (0, 0)
    found = [*stored(broker, "q"), *stored(broker, "dead")]
    assert len(found) == len(set(found)) == 100 - books.acked


@pytest.mark.parametrize("owed", [False, True])
async def test_a_connection_is_restarted_only_while_copies_are_owed(owed: bool, autojump_clock: Clock) -> None:
    """DESIGN 4: a connection that breaks during a drain is restarted only while copies are owed."""
    near, far = MemoryBroker("near"), MemoryBroker("far")
    near.fill("long", [b"x"])
    if owed:
        far.fill("q", [b"x"])
    attached: list[float] = []

    def observer(event: Event) -> None:
        if isinstance(event, Attached) and event.name == "far":
            attached.append(trio.current_time())

    async with open_runtime(
        Subscription(far.queue("q", delays=Copies()), answers(RetryAfter(30.0))),
        Subscription(near.queue("long"), answers(taking=50.0)),
        grace=60.0,
        observers=[observer],
    ) as runtime:
        await trio.sleep(1.0)
        runtime.drain()
        await trio.sleep(1.0)
        far.sever_connection()
        await runtime.finished()
    assert trio.current_time() == 50.0
    assert len(attached) == 1 + owed
    assert runtime.ledger("q").published == owed
