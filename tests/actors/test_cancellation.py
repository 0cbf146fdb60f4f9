"""An outside cancel, Ctrl-C and crashes: everything ends in time, nothing is said, nothing is hidden (DESIGN 4)."""

# pyright: reportPossiblyUnboundVariable=false
# ruff: noqa: PT012 -- a scenario raises where it ends

import signal

import pytest
import trio

from actors import HandlerFailed, LinkGaveUp, Runtime, Subscription, open_runtime
from links.abc import Settles
from links.memory import MemoryBroker, Returned
from settlement import Ack, Copies, Delivery, FailFast, Policy, Retry, RetryAfter
from tests.actors.scenery import HANGS, Clock, StageBroker, StageQueue, answers, lines, numbered, stored


@pytest.mark.parametrize("hanging", ["settling", "extending", "detaching", "publishing", "closing", "all"])
@pytest.mark.parametrize("settles", Settles)
async def test_an_outside_cancel_ends_within_two_goodbyes(
    hanging: str, settles: Settles, autojump_clock: Clock
) -> None:
    """DESIGN 4: lives, copies, connections: 2 × `goodbye` in all, also when all of them hang."""
    broker = StageBroker()
    queue = StageQueue(broker, numbered(6), lease=9.0, settles=settles, limit=6)
    handler = answers(RetryAfter(100.0), Ack(), taking=2.0)
    with trio.CancelScope() as scope:
        async with open_runtime(Subscription(queue, handler, concurrency=2), goodbye=4.0) as runtime:
            await trio.sleep(2.5)
            for call in ("settling", "extending", "detaching"):
                if hanging in (call, "all"):
                    setattr(queue, call, HANGS)
            for call in ("publishing", "closing"):
                if hanging in (call, "all"):
                    setattr(broker, call, HANGS)
            await trio.sleep(2.0)
            scope.cancel()
    assert scope.cancelled_caught
    assert trio.current_time() <= 4.5 + 2 * 4.0
    assert runtime.ledger("q").received == 6


async def test_the_order_of_goodbyes(autojump_clock: Clock) -> None:
    """DESIGN 4: goodbyes run from the inside out: a copy of a verb cut off by the cancel still finds its connection."""
    broker = MemoryBroker()
    broker.fill("q", numbered(3))
    broker.slow_settlements("q", HANGS)
    with trio.move_on_after(1.0):
        async with open_runtime(
            Subscription(broker.queue("q", delays=Copies()), answers(then=RetryAfter(9.0)), concurrency=3)
        ) as runtime:
            await trio.sleep_forever()
    books = runtime.ledger("q")
    assert books.unknown >= 1
    assert (books.owed, books.published) == (books.unknown, books.unknown)


@pytest.mark.parametrize("again", range(25))
async def test_a_cancel_at_any_moment_of_a_busy_service(again: int, autojump_clock: Clock) -> None:
    """DESIGN 0.6: whenever a cancel comes, every message is accepted, in a queue, or published again: none is gone."""
    broker = MemoryBroker()
    broker.fill("q", numbered(60))
    policy = Policy(max_attempts=3, dead_letter="dead")
    for call in (broker.slow_settlements, broker.slow_publishes):
        call("q", 0.05)
    broker.slow_publishes("dead", 0.05)

    async def handler(delivery: Delivery[bytes]) -> Ack | Retry | RetryAfter:
        await trio.sleep(0.11)
        return (Ack(), Retry(), RetryAfter(0.3), RetryAfter(40.0))[int(delivery.body) % 4]

    queue = broker.queue("q", delays=Copies(), lease=10.0, settles=Settles.TOGETHER if again % 2 else Settles.ALONE)
    with trio.move_on_after(0.083 * (again + 1)):
        async with open_runtime(Subscription(queue, handler, policy=policy, concurrency=1 + again % 5)) as runtime:
            await trio.sleep_forever()
    books = runtime.ledger("q")
    assert books.lost == 0
    found = {*stored(broker, "q"), *stored(broker, "dead")}
    assert 60 - books.acked - books.unknown <= len(found) <= 60 - books.acked


async def test_a_sibling_that_crashes_drops_everything(autojump_clock: Clock) -> None:
    """DESIGN 4, row 'a sibling crashes': everything in hand is unsettled; the sibling's error alone leaves."""
    broker = MemoryBroker()
    broker.fill("q", numbered(3))

    async def sibling() -> None:
        await trio.sleep(2.0)
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sibling)
            async with open_runtime(Subscription(broker.queue("q"), answers(taking=60.0))) as runtime:
                await trio.sleep_forever()
    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError]
    assert runtime.ledger("q").unsettled == runtime.ledger("q").received == 2
    assert trio.current_time() == 2.0


async def test_ctrl_c(autojump_clock: Clock) -> None:
    """DESIGN 4, row 'Ctrl-C': `KeyboardInterrupt` is nobody's failure: it leaves, and the delivery is unsettled."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])

    async def handler(delivery: Delivery[bytes]) -> None:
        raise KeyboardInterrupt

    policy = Policy(on_error=Retry())
    with pytest.raises(BaseExceptionGroup) as caught:
        async with open_runtime(Subscription(broker.queue("q"), handler, policy=policy)) as runtime:
            await trio.sleep_forever()
    assert [type(error) for error in caught.value.exceptions] == [KeyboardInterrupt]
    assert lines(runtime.ledger("q")) == {"received": 1, "unsettled": 1}


def test_the_library_installs_no_signal_handler() -> None:
    """DESIGN 2: the library installs no signal handler."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    during: dict[int, object] = {}

    async def main() -> None:
        async with open_runtime(Subscription(MemoryBroker().queue("q"), answers())):
            during[signal.SIGTERM] = signal.getsignal(signal.SIGTERM)

    trio.run(main)
    assert during[signal.SIGTERM] == before[signal.SIGTERM]
    assert {number: signal.getsignal(number) for number in before} == before


async def test_a_failure_leaves_the_others_unsettled(autojump_clock: Clock) -> None:
    """DESIGN 2: `FailFast` leaves its own delivery and all others unsettled, and ends at once."""
    broker = MemoryBroker()
    broker.fill("q", numbered(4))
    with pytest.raises(ExceptionGroup) as caught:
        async with open_runtime(
            Subscription(
                broker.queue("q"),
                answers(ZeroDivisionError(), taking=1.0),
                concurrency=1,
                policy=Policy(max_attempts=9, on_error=FailFast()),
            ),
            Subscription(broker.queue("r"), answers(taking=60.0)),
        ) as runtime:
            broker.fill("r", [b"x"])
            await trio.sleep_forever()
    assert [type(error) for error in caught.value.exceptions] == [HandlerFailed]
    assert runtime.ledger("q").unsettled == 2
    assert runtime.ledger("r").unsettled == 1
    assert trio.current_time() == 1.0


async def test_a_failure_gives_copies_a_goodbye(autojump_clock: Clock) -> None:
    """DESIGN 4: also when the runtime fails the waiting copies get one bounded attempt."""
    broker = MemoryBroker()
    broker.fill("q", numbered(2))
    queue = broker.queue("q", delays=Copies())
    with pytest.raises(ExceptionGroup):
        async with open_runtime(
            Subscription(queue, answers(RetryAfter(60.0), ZeroDivisionError(), taking=1.0))
        ) as runtime:
            await trio.sleep_forever()
    assert lines(runtime.ledger("q")) == {"received": 2, "delayed": 1, "unsettled": 1, "owed": 1, "published": 1}


async def test_a_connection_that_gives_up_takes_the_runtime_with_it(autojump_clock: Clock) -> None:
    """DESIGN 4: only the connection's supervisor counts `ConnectionBroken` and gives up; then copies are lost, in
    time.
    """
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    with pytest.raises(ExceptionGroup) as caught:
        async with open_runtime(
            Subscription(broker.queue("q", delays=Copies()), answers(RetryAfter(9999.0)))
        ) as runtime:
            await trio.sleep(1.0)
            broker.break_connects(10**6)
            broker.sever_connection()
            await trio.sleep_forever()
    (error,) = caught.value.exceptions
    assert isinstance(error, LinkGaveUp)
    assert error.name == broker.name
    assert lines(runtime.ledger("q")) == {"received": 1, "delayed": 1, "owed": 1, "lost": 1}
    assert trio.current_time() < 660.0


async def test_the_ledger_balances_at_every_moment(autojump_clock: Clock) -> None:
    """DESIGN 0.6: the books balance at every moment, not only at a stop, also when an observer looks."""
    broker = MemoryBroker()
    broker.fill("q", numbered(50))
    looked = 0

    def balanced(_: object = None) -> None:
        nonlocal looked
        looked += 1
        books = runtime.ledger("q")
        assert books.balanced, f"{books.deliveries}; {books.copies}"

    async def handler(delivery: Delivery[bytes]) -> Ack | RetryAfter:
        balanced()
        await trio.sleep(0.1)
        balanced()
        return RetryAfter(0.1) if delivery.attempt < 3 else Ack()

    queue = broker.queue("q", delays=Copies(), lease=10.0)
    runtime = Runtime(Subscription(queue, handler, concurrency=5), observers=[balanced])
    with trio.move_on_after(4.0):
        await runtime.run()
    assert looked > 500


@pytest.mark.parametrize("concurrency", [1, 2])
async def test_a_cancel_spends_no_attempt_of_what_was_not_started(concurrency: int, autojump_clock: Clock) -> None:
    """DESIGN 4, row 'user cancels': unsettled; an attempt is a handler's, so three Ctrl-C cost the others none."""
    broker = MemoryBroker()
    broker.fill("q", numbered(4))
    policy = Policy(max_attempts=3, dead_letter="dead")
    attempts: dict[bytes, list[int]] = {body: [] for body in numbered(4)}
    healthy = False

    async def handler(delivery: Delivery[bytes]) -> Retry | None:
        attempts[delivery.body].append(delivery.attempt)
        if not healthy:
            await trio.sleep_forever()
        return None if delivery.body < b"2" or delivery.attempt == 3 else Retry()

    subscription = Subscription(broker.queue("q", limit=4), handler, policy=policy, concurrency=concurrency)
    for _ in range(3):
        with trio.move_on_after(1.0):
            async with open_runtime(subscription) as runtime:
                await trio.sleep_forever()
        assert lines(runtime.ledger("q")) == {"received": 4, "unsettled": 4}
    healthy = True
    async with open_runtime(subscription) as runtime:
        await broker.until_empty("q")
    started = numbered(4)[:concurrency]
    assert attempts == {body: [1, 2, 3, 4] if body in started else [1, *([2, 3] * (body >= b"2"))] for body in attempts}
    assert stored(broker, "dead") == []
    returned = [entry for entry in broker.log or () if isinstance(entry, Returned)]
    assert {(entry.id, entry.counted) for entry in returned} == {
        (str(number), number <= concurrency) for number in range(1, 5)
    }
