"""The runtime as a user sees it: what enters, what leaves, what is shared, and the answers to failures (DESIGN 2)."""

# pyright: reportPossiblyUnboundVariable=false
# ruff: noqa: PT012 -- a scenario raises where it ends

import threading
from collections.abc import Callable

import pytest
import trio
import trio.testing

from actors import HandlerFailed, LinkGaveUp, Runtime, Subscription, connected, open_runtime
from links.errors import LinkBroken, NotConnected
from links.memory import MemoryBroker
from settlement import Ack, DeadLetter, Delivery, Drop, FailFast, Policy, Retry, RetryAfter
from tests.actors.scenery import Clock, acked, answers, lines, numbered, stored


class Oops(Exception):
    pass


class Worse(Oops):
    pass


def integer(body: bytes) -> int:
    return int(body)


# --- answers to failures


async def test_none_means_ack(autojump_clock: Clock) -> None:
    """DESIGN 2: `None` from a handler means `Ack()`."""
    broker = MemoryBroker()
    broker.fill("q", [b"x", b"y"])
    async with open_runtime(Subscription(broker.queue("q"), answers(None, Ack()))) as runtime:
        await broker.until_empty("q")
    assert lines(runtime.ledger("q")) == {"received": 2, "acked": 2}


@pytest.mark.parametrize("where", ["handler", "decoder", "outcome", "policy"])
async def test_fail_fast_is_the_default_without_cap_or_dead_letter(where: str, autojump_clock: Clock) -> None:
    """DESIGN 2: nothing declared → `HandlerFailed(subscription, delivery)` from the cause; it is unsettled."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    error = Oops("no")

    def broken(*_: object) -> bytes:
        raise error

    match where:
        case "handler":
            subscription = Subscription(broker.queue("q"), answers(error))
        case "decoder":
            subscription = Subscription(
                broker.queue("q"), answers(), decode=broken, policy=Policy(on_undecodable=FailFast())
            )
        case "policy":
            subscription = Subscription(broker.queue("q"), answers(Oops()), policy=Policy(on_error=broken))  # type: ignore[arg-type]
        case _:
            subscription = Subscription(broker.queue("q"), answers("ack"))  # type: ignore[arg-type]
    with pytest.raises(ExceptionGroup) as caught:
        async with open_runtime(subscription) as runtime:
            await runtime.finished()
    (failed,) = caught.value.exceptions
    assert isinstance(failed, HandlerFailed)
    assert (failed.subscription, failed.delivery.body) == ("q", b"x")
    if where == "outcome":
        assert isinstance(failed.__cause__, TypeError)
    else:
        assert failed.__cause__ is error
    assert lines(runtime.ledger("q")) == {"received": 1, "unsettled": 1}
    assert stored(broker, "q") == [b"x"]


@pytest.mark.parametrize("policy", [Policy(max_attempts=2), Policy(max_attempts=2, dead_letter="dead")])
async def test_retry_is_the_default_with_a_cap(policy: Policy, autojump_clock: Clock) -> None:
    """DESIGN 2: `on_error` defaults to `Retry()` where a cap or a dead letter is declared; the cap then ends it."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    calls: list[int] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        calls.append(delivery.attempt)
        raise Oops

    async with open_runtime(Subscription(broker.queue("q"), handler, policy=policy)) as runtime:
        await broker.until_empty("q")
    assert calls == [1, 2]
    if policy.dead_letter is None:
        assert lines(runtime.ledger("q")) == {"received": 2, "retried": 1, "dropped": 1}
    else:
        assert lines(runtime.ledger("q")) == {"received": 2, "retried": 1, "dead_lettered": 1}
        assert stored(broker, "dead") == [b"x"]


async def test_retry_is_the_default_with_a_dead_letter_alone(autojump_clock: Clock) -> None:
    """DESIGN 2 and C-3.4: a dead letter without a cap takes every retry, so a failure goes there at once."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    async with open_runtime(
        Subscription(broker.queue("q"), answers(Oops()), policy=Policy(dead_letter="dead"))
    ) as runtime:
        await broker.until_empty("q")
    assert lines(runtime.ledger("q")) == {"received": 1, "dead_lettered": 1}


async def test_failures_are_answered_by_mro(autojump_clock: Clock) -> None:
    """DESIGN 2: an exception is answered by `failures`, looked up by MRO, else by `on_error`."""
    broker = MemoryBroker()
    broker.fill("q", numbered(4))
    policy = Policy(failures={Oops: Drop(), KeyError: RetryAfter(5.0)}, on_error=Retry())
    handler = answers(Worse(), KeyError(), ValueError())
    async with open_runtime(Subscription(broker.queue("q"), handler, policy=policy)) as runtime:
        await broker.until_empty("q")
    assert lines(runtime.ledger("q")) == {"received": 6, "dropped": 1, "delayed": 1, "retried": 1, "acked": 3}


@pytest.mark.parametrize(
    ("group", "line"),
    [
        (lambda: ExceptionGroup("", [Oops(), ExceptionGroup("", [Worse()])]), "dropped"),
        (lambda: ExceptionGroup("", [Oops(), ValueError()]), "retried"),
    ],
    ids=["all the same", "mixed"],
)
async def test_an_exception_group_is_answered_by_its_leaves(
    group: Callable[[], Exception], line: str, autojump_clock: Clock
) -> None:
    """DESIGN 2: a group is answered as its leaves where all have the same answer, else by `on_error`."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    policy = Policy(failures={Oops: Drop(), ValueError: Ack()}, on_error=Retry())
    async with open_runtime(Subscription(broker.queue("q"), answers(group()), policy=policy)) as runtime:
        await broker.until_empty("q")
    assert getattr(runtime.ledger("q"), line) == 1


async def test_within_is_a_failure_like_any_other(autojump_clock: Clock) -> None:
    """DESIGN 2: `within=` ends in `TooSlowError`, which `failures` may answer."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    policy = Policy(failures={trio.TooSlowError: Drop()})
    async with open_runtime(
        Subscription(broker.queue("q"), answers(taking=10.0), within=3.0, policy=policy)
    ) as runtime:
        await broker.until_empty("q")
        assert trio.current_time() == 3.0
    assert runtime.ledger("q").dropped == 1


async def test_too_slow_is_fail_fast_by_default(autojump_clock: Clock) -> None:
    """DESIGN 2: a handler that is too slow is a failure, and a failure is answered by `on_error`."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    with pytest.raises(ExceptionGroup) as caught:
        async with open_runtime(Subscription(broker.queue("q"), answers(taking=10.0), within=3.0)):
            await trio.sleep_forever()
    (failed,) = caught.value.exceptions
    assert isinstance(failed.__cause__, trio.TooSlowError)


@pytest.mark.parametrize("answer", [FailFast(), Ack(), Drop()])
async def test_a_value_that_is_no_outcome_is_a_failure(answer: object, autojump_clock: Clock) -> None:
    """DESIGN 2, C-1.1: what is no outcome is a `TypeError`, answered as one; `FailFast()` is no outcome."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    policy = Policy(failures={TypeError: answer}) if not isinstance(answer, FailFast) else Policy()  # type: ignore[dict-item]
    subscription = Subscription(broker.queue("q"), answers(FailFast()), policy=policy)  # type: ignore[arg-type]
    if isinstance(answer, FailFast):
        with pytest.raises(ExceptionGroup) as caught:
            async with open_runtime(subscription):
                await trio.sleep_forever()
        assert isinstance(caught.value.exceptions[0].__cause__, TypeError)
    else:
        async with open_runtime(subscription):
            await broker.until_empty("q")


async def test_dead_letter_is_an_answer_whatever_the_attempt(autojump_clock: Clock) -> None:
    """DESIGN 2: `DeadLetter()` sends it to the dead letter now, although the cap is far."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    policy = Policy(max_attempts=99, dead_letter="dead", failures={Oops: DeadLetter()})
    async with open_runtime(Subscription(broker.queue("q"), answers(Oops()), policy=policy)) as runtime:
        await broker.until_empty("q")
    assert lines(runtime.ledger("q")) == {"received": 1, "dead_lettered": 1}
    assert stored(broker, "dead") == [b"x"]


async def test_undecodable_is_dropped_by_default(autojump_clock: Clock) -> None:
    """DESIGN 6 (Runtime), C-6.3: what breaks the decoder is answered by `on_undecodable`; the handler is not called."""
    broker = MemoryBroker()
    broker.fill("q", [b"1", b"x", b"2"])
    seen: list[int] = []

    async def handler(delivery: Delivery[int]) -> None:
        seen.append(delivery.message)

    async with open_runtime(Subscription(broker.queue("q"), handler, decode=integer)) as runtime:
        await broker.until_empty("q")
    assert seen == [1, 2]
    assert lines(runtime.ledger("q")) == {"received": 3, "acked": 2, "dropped": 1}


async def test_undecodable_under_retry_meets_the_cap(autojump_clock: Clock) -> None:
    """C-6.4: *decode* under retry goes through the same cap and dead letter."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    policy = Policy(max_attempts=3, dead_letter="dead", on_undecodable=Retry())

    async def handler(delivery: Delivery[int]) -> None:
        pytest.fail(f"called for {delivery}")

    async with open_runtime(Subscription(broker.queue("q"), handler, decode=integer, policy=policy)) as runtime:
        await broker.until_empty("q")
    assert lines(runtime.ledger("q")) == {"received": 3, "retried": 2, "dead_lettered": 1}


async def test_a_broken_publisher_of_the_handler_is_no_weather(autojump_clock: Clock) -> None:
    """DESIGN 4, trap: `FailFast` from a `LinkBroken` of the handler's own publisher ends the runtime, restarts
    nothing.
    """
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    broker.lose_confirmations("other")

    async def handler(delivery: Delivery[bytes]) -> None:
        await broker.publisher("other").publish(b"")

    with pytest.raises(ExceptionGroup) as caught:
        async with open_runtime(Subscription(broker.queue("q"), handler)) as runtime:
            await trio.sleep_forever()
    (failed,) = caught.value.exceptions
    assert isinstance(failed, HandlerFailed)
    assert isinstance(failed.__cause__, LinkBroken)
    assert runtime.statistics()["q"].restarts == 0


# --- what leaves, and when


async def test_an_exception_of_the_block_alone_leaves_bare(autojump_clock: Clock) -> None:
    """DESIGN 2: an exception of the block alone leaves as it is, and what is in hand is dropped."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    with pytest.raises(KeyError):
        async with open_runtime(Subscription(broker.queue("q"), answers(taking=99.0))) as runtime:
            await trio.sleep(1.0)
            raise KeyError
    assert trio.current_time() == 1.0
    assert lines(runtime.ledger("q")) == {"received": 1, "unsettled": 1}


async def test_a_group_of_the_block_leaves_as_it_is(autojump_clock: Clock) -> None:
    """DESIGN 2: an exception of the block alone leaves bare, also where it is a group."""
    group = ExceptionGroup("mine", [KeyError(), ExceptionGroup("inner", [ValueError()])])
    with pytest.raises(ExceptionGroup) as caught:
        async with open_runtime(Subscription(MemoryBroker().queue("q"), answers())):
            raise group
    assert repr(caught.value) == repr(group)


async def test_block_and_runtime_leave_as_one_flat_group(autojump_clock: Clock) -> None:
    """DESIGN 2: the block fails while the runtime fails: one flat group with both."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    with pytest.raises(ExceptionGroup) as caught:
        async with open_runtime(Subscription(broker.queue("q"), answers(Oops()))):
            try:
                await trio.sleep_forever()
            finally:
                raise KeyError
    assert {type(error) for error in caught.value.exceptions} == {HandlerFailed, KeyError}


async def test_two_failures_leave_as_one_flat_group(autojump_clock: Clock) -> None:
    """DESIGN 2: what the runtime raises later leaves as one flat `ExceptionGroup`."""
    broker = MemoryBroker()
    release = trio.Event()

    async def handler(delivery: Delivery[bytes]) -> None:
        await release.wait()
        raise Oops

    with pytest.raises(ExceptionGroup) as caught:
        async with open_runtime(*(Subscription(broker.queue(name), handler, concurrency=2) for name in "ab")):
            for name in "ab":
                broker.fill(name, [b"x", b"y"])
            await trio.testing.wait_all_tasks_blocked()
            release.set()
            await trio.sleep_forever()
    assert {type(error) for error in caught.value.exceptions} == {HandlerFailed}


async def test_an_error_beside_a_cancel_leaves_as_one_flat_base_group(autojump_clock: Clock) -> None:
    """DESIGN 2: with `Cancelled` among its leaves it is one flat `BaseExceptionGroup`; outside only the error is
    left.
    """
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    inside: list[BaseException] = []
    scope = trio.CancelScope()

    async def handler(delivery: Delivery[bytes]) -> None:
        scope.cancel()
        raise Oops

    with pytest.raises(ExceptionGroup) as caught, scope:
        try:
            async with open_runtime(Subscription(broker.queue("q"), answers(taking=5.0))):
                try:
                    await trio.sleep(1.0)
                    scope.cancel()
                    await trio.sleep_forever()
                finally:
                    raise KeyError
        except BaseException as error:
            inside.append(error)
            raise
    assert {type(error) for error in caught.value.exceptions} == {KeyError}
    (group,) = inside
    assert isinstance(group, BaseExceptionGroup)
    assert {type(error) for error in group.exceptions} == {KeyError, trio.Cancelled}


async def test_the_body_is_cancelled_when_the_runtime_fails(autojump_clock: Clock) -> None:
    """DESIGN 2: the block's body is cancelled when the runtime fails."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    ended: list[str] = []
    with pytest.raises(ExceptionGroup):
        async with open_runtime(Subscription(broker.queue("q"), answers(Oops(), taking=2.0))):
            try:
                await trio.sleep(99.0)
            except trio.Cancelled:
                ended.append("cancelled")
                raise
    assert ended == ["cancelled"]
    assert trio.current_time() == 2.0


@pytest.mark.parametrize("again", range(20))
async def test_finished_is_cancelled_with_the_body_on_failure(again: int, autojump_clock: Clock) -> None:
    """DESIGN 2: on failure `finished()` is cancelled with the body, so that a line after it means success."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    with pytest.raises(ExceptionGroup):
        async with open_runtime(Subscription(broker.queue("q"), answers(Oops()))) as runtime:
            await runtime.finished()
            pytest.fail("finished although it failed")


async def test_finished_returns_after_a_drain(autojump_clock: Clock) -> None:
    """DESIGN 2: after a drain the body goes on, and `finished()` returns once all has been settled."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    async with open_runtime(Subscription(broker.queue("q"), answers(taking=3.0))) as runtime:
        await trio.sleep(1.0)
        assert not runtime.draining
        runtime.drain()
        runtime.drain()
        assert runtime.draining
        await runtime.finished()
        assert trio.current_time() == 3.0
        assert acked(runtime) == 1
        await trio.sleep(10.0)
    assert trio.current_time() == 13.0


async def test_finished_returns_beside_run_that_raises(autojump_clock: Clock) -> None:
    """DESIGN 2: under `nursery.start(runtime.run)` `finished()` returns on failure, and `run` raises."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    runtime = Runtime(Subscription(broker.queue("q"), answers(Oops())))
    returned: list[bool] = []

    async def waiting() -> None:
        await runtime.finished()
        returned.append(True)

    async with trio.open_nursery() as outer:
        outer.start_soon(waiting)
        with pytest.raises(ExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:
                await nursery.start(runtime.run)
                await runtime.finished()
                returned.append(True)
    assert returned == [True, True]
    (group,) = caught.value.exceptions
    assert isinstance(group, ExceptionGroup)
    assert [type(error) for error in group.exceptions] == [HandlerFailed]


async def test_leaving_the_block_drains(autojump_clock: Clock) -> None:
    """DESIGN 2: leaving the block normally drains: what is in hand is settled normally, the rest stays."""
    broker = MemoryBroker()
    broker.fill("q", numbered(5))
    async with open_runtime(Subscription(broker.queue("q", limit=1), answers(taking=2.0))) as runtime:
        await trio.sleep(3.0)
    assert trio.current_time() == 4.0
    assert lines(runtime.ledger("q")) == {"received": 2, "acked": 2}
    assert stored(broker, "q") == numbered(5)[2:]


async def test_cancelling_the_block_drops(autojump_clock: Clock) -> None:
    """DESIGN 2: leaving by cancellation drops: what is in hand is unsettled, at once."""
    broker = MemoryBroker()
    broker.fill("q", numbered(5))
    with trio.move_on_after(3.0):
        async with open_runtime(Subscription(broker.queue("q"), answers(taking=2.0))) as runtime:
            await trio.sleep_forever()
    assert trio.current_time() == 3.0
    assert lines(runtime.ledger("q")) == {"received": 3, "acked": 1, "unsettled": 2}
    assert stored(broker, "q") == numbered(5)[1:]


async def test_one_that_gives_up_takes_the_runtime_with_it(autojump_clock: Clock) -> None:
    """DESIGN 2: one subscription that gives up takes the runtime with it; the others' deliveries are unsettled."""
    broker = MemoryBroker()
    broker.fill("b", [b"x"])
    with pytest.raises(ExceptionGroup) as caught:
        async with open_runtime(
            Subscription(broker.queue("a"), answers()), Subscription(broker.queue("b"), answers(taking=1e6))
        ) as runtime:
            broker.break_attaches("a", 10**6)
            broker.sever("a")
            await trio.sleep_forever()
    assert [type(error) for error in caught.value.exceptions] == [LinkGaveUp]
    assert runtime.ledger("b").unsettled == 1


async def test_a_runtime_runs_once(autojump_clock: Clock) -> None:
    """DESIGN 2: a `Runtime` is for one `run`."""
    runtime = Runtime(Subscription(MemoryBroker().queue("q"), answers()))
    runtime.drain()
    await runtime.run()
    with pytest.raises(RuntimeError, match="once"):
        await runtime.run()


def test_what_a_runtime_refuses() -> None:
    """DESIGN 2: bad arguments are `ValueError` at construction, without a running loop."""
    queue = MemoryBroker().queue("q")
    with pytest.raises(ValueError, match="1 subscription"):
        Runtime()
    with pytest.raises(ValueError, match="'q'"):
        Runtime(Subscription(queue, answers()), Subscription(queue, answers()))
    for options in ({"grace": -1.0}, {"goodbye": 0.0}, {"grace": float("inf")}, {"goodbye": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Runtime(Subscription(queue, answers()), **options)  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        Runtime(Subscription(queue, answers())).ledger("r")


def test_what_a_subscription_refuses() -> None:
    """DESIGN 2: so do subscriptions, each naming its argument."""
    queue = MemoryBroker().queue("q")

    class Named:
        name = "not a publisher"

    for error, options in (
        ("concurrency", {"concurrency": 0}),
        ("within", {"within": 0.0}),
        ("name", {"name": ""}),
        ("dead_letter", {"policy": Policy(dead_letter=Named())}),
    ):
        with pytest.raises(ValueError, match=error):
            Subscription(queue, answers(), **options)  # pyright: ignore[reportCallIssue, reportArgumentType]


# --- brokers


async def test_publishing_needs_an_open_broker(autojump_clock: Clock) -> None:
    """DESIGN 2, C-9.2: `NotConnected` before opening and after closing; a publisher made before works in between."""
    broker = MemoryBroker()
    publisher = broker.publisher("q")
    with pytest.raises(NotConnected):
        await publisher.publish(b"")
    async with open_runtime(Subscription(broker.queue("q"), answers())) as runtime:
        await publisher.publish(b"x")
        await broker.until_empty("q")
    with pytest.raises(NotConnected):
        await publisher.publish(b"")
    assert acked(runtime) == 1


async def test_a_publish_waits_for_the_next_life(autojump_clock: Clock) -> None:
    """DESIGN 2: in weather `publish` waits for the connection's next life, and goes out once."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])

    async def handler(delivery: Delivery[bytes]) -> None:
        if delivery.attempt == 1:
            broker.sever_connection()

    async with open_runtime(Subscription(broker.queue("q"), handler), observers=[]):
        await trio.testing.wait_all_tasks_blocked()
        await broker.publisher("other").publish(b"late")
        assert trio.current_time() > 0.0
    assert stored(broker, "other") == [b"late"]


async def test_a_publish_on_the_wire_breaks(autojump_clock: Clock) -> None:
    """DESIGN 2: a publish that was on the wire at the break raises `LinkBroken` and is never resent by itself."""
    broker = MemoryBroker()
    broker.slow_publishes("other", 5.0)
    async with open_runtime(Subscription(broker.queue("q"), answers())), trio.open_nursery() as nursery:

        async def publishing() -> None:
            with pytest.raises(LinkBroken):
                await broker.publisher("other").publish(b"")

        nursery.start_soon(publishing)
        await trio.sleep(1.0)
        broker.sever_connection()
        await trio.sleep(60.0)
    assert stored(broker, "other") == []


@pytest.mark.parametrize("through", ["connect", "connected"])
async def test_a_runtime_shares_a_broker_that_is_open(through: str, autojump_clock: Clock) -> None:
    """DESIGN 2: a broker that somebody opened is shared by a runtime, and not closed by it."""
    broker = MemoryBroker()
    async with broker.connect() if through == "connect" else connected(broker):
        for number in range(3):
            await broker.publisher("q").publish(b"x")
            async with open_runtime(Subscription(broker.queue("q"), answers())) as runtime:
                await broker.until_empty("q")
            assert acked(runtime) == 1, number
            assert broker.is_open
    assert not broker.is_open


async def test_two_runtimes_share_a_broker(autojump_clock: Clock) -> None:
    """DESIGN 2: who wants independence runs two runtimes: the failure of one does not touch the other."""
    broker = MemoryBroker()
    broker.fill("bad", [b"x"])
    async with connected(broker), open_runtime(Subscription(broker.queue("good"), answers())) as good:
        with pytest.raises(ExceptionGroup):
            async with open_runtime(Subscription(broker.queue("bad"), answers(Oops()))) as bad:
                await bad.finished()
        broker.fill("good", [b"x"])
        await broker.until_empty("good")
    assert acked(good, "good") == 1


async def test_a_dead_letter_on_another_broker(autojump_clock: Clock) -> None:
    """DESIGN 2: `dead_letter` may be a publisher of another broker; the runtime opens that one too."""
    here, there = MemoryBroker("here"), MemoryBroker("there")
    here.fill("q", [b"x"])
    policy = Policy(max_attempts=1, dead_letter=there.publisher("dead"))
    async with open_runtime(Subscription(here.queue("q"), answers(Retry()), policy=policy)):
        await here.until_empty("q")
        assert there.is_open
    assert stored(there, "dead") == [b"x"]
    assert not there.is_open


async def test_the_runtime_reads_as_a_service(autojump_clock: Clock) -> None:
    """DESIGN 2: `runtime.statistics()` says what each subscription is doing."""
    broker = MemoryBroker()
    broker.fill("q", numbered(3))
    async with open_runtime(Subscription(broker.queue("q"), answers(taking=1.0))) as runtime:
        await trio.sleep(0.5)
        statistics = runtime.statistics()["q"]
        assert (statistics.attached, statistics.degraded, statistics.restarts) == (True, (), 0)
        assert (statistics.in_hand, statistics.waiting) == (2, 0)
        assert runtime.ledger("q").in_hand == 2
        assert runtime.ledger("q").balanced
        await broker.until_empty("q")


def test_a_drain_from_another_thread_is_carried_into_the_loop() -> None:
    """DESIGN 4: from a thread it begins a moment later, and leaves no later drain deaf."""

    async def main(early: bool) -> Runtime:
        broker = MemoryBroker()
        runtime = Runtime(Subscription(broker.queue("q"), answers()), grace=1.0)
        if early:
            await trio.to_thread.run_sync(runtime.drain)
        with trio.fail_after(5.0):
            async with trio.open_nursery() as nursery:
                await nursery.start(runtime.run)
                if not early:
                    await trio.to_thread.run_sync(runtime.drain)
                    runtime.drain()
        return runtime

    for early in (False, True):
        runtime = trio.run(main, early)
        assert runtime.draining
        runtime.drain()
        thread = threading.Thread(target=runtime.drain)
        thread.start()
        thread.join()
