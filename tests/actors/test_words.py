"""What a person reads: refusals of a wrong handler, reasons of drops and dead letters, one traceback per failure."""

# ruff: noqa: ARG002, ARG004 -- a handler need not look at its delivery

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import trio

from actors import BatchSubscription, Subscription, open_runtime
from actors.events import Degraded, Event, GivenUp, Recovered
from actors.testing import a_delivery, run_once
from links.errors import PublishNotAccepted
from links.memory import MemoryBroker
from settlement import Ack, DeadLetter, Delivery, Drop, Letter, Outcome, Plan, Policy, Publish, Retry
from settlement.ledger import Line
from settlement.policy import Ending
from tests.actors.scenery import Clock, StageBroker, StageQueue, answers, bodies, lines, numbered


def dead_lettered(_: Ending, delivery: Delivery[Any], __: Policy) -> Plan[str]:
    step = Publish(Letter.of(delivery), "dead")
    return Plan(Line.DEAD_LETTERED, "accept", before=(step,), instead="modify")


async def handler(delivery: Delivery[bytes]) -> Outcome:
    return Ack()


def plain(delivery: Delivery[bytes]) -> None:
    raise AssertionError("called")


def declared(delivery: Delivery[bytes]) -> Awaitable[Outcome]:
    return handler(delivery)


def declared_in_words(delivery: Delivery[bytes]) -> Coroutine[Any, Any, Outcome]:
    return handler(delivery)


declared_in_words.__annotations__["return"] = "Coroutine[Any, Any, Outcome]"


@functools.wraps(handler)
def wrapped(*arguments: Any) -> Any:
    return handler(*arguments)


class Handlers:
    async def method(self, delivery: Delivery[bytes]) -> Outcome:
        return Ack()

    def plain(self, delivery: Delivery[bytes]) -> None:
        raise AssertionError("called")

    @staticmethod
    async def static(delivery: Delivery[bytes]) -> Outcome:
        return Ack()


class AsyncCallable:
    async def __call__(self, delivery: Delivery[bytes]) -> Outcome:
        return Ack()


class PlainCallable:
    def __call__(self, delivery: Delivery[bytes]) -> None:
        raise AssertionError("called")


GOOD: list[Callable[..., Any]] = [
    handler,
    declared,
    declared_in_words,
    wrapped,
    Handlers().method,
    Handlers.static,
    AsyncCallable(),
    functools.partial(handler),
    functools.partial(functools.partial(Handlers().method)),
]
BAD: list[Any] = [
    plain,
    Handlers().plain,
    PlainCallable(),
    functools.partial(plain),
    lambda delivery: Ack(),  # noqa: ARG005 -- says nothing of what it returns
    Handlers,
    Ack,
    print,
    None,
    "handler",
]


@pytest.mark.parametrize("good", GOOD, ids=range(len(GOOD)))
async def test_what_is_awaited_is_a_handler(good: Callable[..., Any], autojump_clock: Clock) -> None:
    """DESIGN 6, Runtime: a coroutine function, or a callable that returns an awaitable by its declaration."""
    assert await run_once(good, a_delivery(b"")) == Ack()
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    async with open_runtime(Subscription(broker.queue("q"), good)) as runtime:
        await broker.until_empty("q")
    assert lines(runtime.ledger("q")) == {"received": 1, "acked": 1}


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
async def test_a_plain_function_is_refused_before_it_is_called(bad: Any) -> None:
    """DESIGN 6, Runtime: five mails, then a dead letter: such a handler is refused when the subscription is made."""
    broker = MemoryBroker()
    with pytest.raises(TypeError, match=r"^q: handler .*must be an async function"):
        Subscription(broker.queue("q"), bad)
    with pytest.raises(TypeError, match=r"^q: handler .*must be an async function"):
        BatchSubscription(broker.queue("q"), bad, size=2)
    with pytest.raises(TypeError, match=r"handler .*must be an async function"):
        await run_once(bad, a_delivery(b""))


@pytest.mark.parametrize(
    ("policy", "outcome", "line", "why", "level"),
    [
        (Policy(), Drop("paid already"), Line.DROPPED, "paid already", logging.INFO),
        (Policy(), Drop(), Line.DROPPED, "", logging.INFO),
        (Policy(on_error=Drop()), KeyError("no such order"), Line.DROPPED, "KeyError: 'no such order'", logging.INFO),
        (Policy(dead_letter="dead", max_attempts=1), Retry(), Line.DEAD_LETTERED, "", logging.WARNING),
        (
            Policy(dead_letter="dead", max_attempts=1, on_error=Retry()),
            ValueError("bad"),
            Line.DEAD_LETTERED,
            "ValueError: bad",
            logging.WARNING,
        ),
        (
            Policy(dead_letter="dead", on_error=DeadLetter()),
            ValueError("bad"),
            Line.DEAD_LETTERED,
            "ValueError: bad",
            logging.WARNING,
        ),
    ],
)
async def test_why_a_delivery_is_given_up_is_seen(  # noqa: PLR0917 -- as pytest passes them
    policy: Policy,
    outcome: Outcome | Exception,
    line: Line,
    why: str,
    level: int,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: Clock,
) -> None:
    """DESIGN 6, Runtime: `Drop(reason)` and a dead letter's cause are an event, and a line at INFO or WARNING."""
    caplog.set_level(logging.INFO)
    broker, seen = MemoryBroker(), list[GivenUp]()

    def observe(event: Event) -> None:
        if isinstance(event, GivenUp):
            seen.append(event)

    broker.fill("q", [b"x"])
    async with open_runtime(Subscription(broker.queue("q"), answers(outcome), policy=policy), observers=[observe]):
        await broker.until_empty("q")
    (event,) = seen
    assert (event.subscription, event.delivery.body, event.line, event.why) == ("q", b"x", line, why)
    said = [each for each in caplog.records if each.message.startswith("q: delivery 1: ")]
    assert [(each.levelno, each.message.endswith(f" ({why})")) for each in said] == [(level, bool(why))]
    (letter,) = broker.ready("dead") if line is Line.DEAD_LETTERED else [None]
    assert letter is None or (letter.body, dict(letter.headers)) == (b"x", {})


def broken(body: bytes) -> str:
    raise ValueError("no JSON")


@pytest.mark.parametrize("dead", [None, "dead"])
async def test_what_nobody_could_read_is_kept_where_there_is_a_dead_letter(
    dead: str | None, autojump_clock: Clock
) -> None:
    """DESIGN 6, Runtime: `on_undecodable` is `DeadLetter()` where a dead letter is declared, else `Drop()`."""
    broker = MemoryBroker()
    broker.fill("q", [b"{oops"])

    async def never(delivery: Delivery[str]) -> None:
        raise AssertionError("called")

    async with open_runtime(
        Subscription(broker.queue("q"), never, decode=broken, policy=Policy(dead_letter=dead))
    ) as runtime:
        await broker.until_empty("q")
    assert bodies(broker.ready("dead")) == ([] if dead is None else [b"{oops"])
    assert lines(runtime.ledger("q")) == {"received": 1, "dropped" if dead is None else "dead_lettered": 1}


async def test_a_handler_that_takes_too_long_is_named(caplog: pytest.LogCaptureFixture, autojump_clock: Clock) -> None:
    """DESIGN 2: the failure of `within` says whose it is, and the limit."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    slow = Subscription(
        broker.queue("q"), answers(taking=9.0), name="orders", within=2.5, policy=Policy(on_error=Drop())
    )
    async with open_runtime(slow):
        await broker.until_empty("q")
    assert "orders: a handler ran longer than within=2.5 s" in caplog.text


async def test_a_failed_batch_is_one_traceback(caplog: pytest.LogCaptureFixture, autojump_clock: Clock) -> None:
    """Eight deliveries of one failed call: one line, one traceback; each is answered."""
    broker = MemoryBroker()
    broker.fill("q", numbered(8))
    calls = 0

    async def failing(batch: list[Delivery[bytes]]) -> None:
        nonlocal calls
        calls += 1
        raise ValueError("all of them")

    batches = BatchSubscription(broker.queue("q", limit=8), failing, size=8, policy=Policy(on_error=Drop()))
    async with open_runtime(batches) as runtime:
        await broker.until_empty("q")
    assert (calls, runtime.ledger("q").dropped) == (1, 8)
    assert len([each for each in caplog.records if each.exc_info]) == 1
    assert "q: delivery 1, 2, 3, 4, 5 and 3 more failed, answered Drop" in caplog.text


async def test_recovery_is_as_loud_as_degradation(caplog: pytest.LogCaptureFixture, autojump_clock: Clock) -> None:
    """Who was woken by the one hears the other: both are warnings, and events."""
    broker, told = StageBroker(), list[Event]()
    broker.errors = [PublishNotAccepted("full")]

    def observe(event: Event) -> None:
        if isinstance(event, Degraded | Recovered):
            told.append(event)

    queue = StageQueue(broker, [b"x"], table=dead_lettered)
    async with open_runtime(Subscription(queue, answers()), observers=[observe]):
        await trio.sleep(10.0)
    assert [type(event) for event in told] == [Degraded, Recovered]
    about = [each.levelno for each in caplog.records if "degraded" in each.message or "works again" in each.message]
    assert about == [logging.WARNING, logging.WARNING]


async def test_a_loop_that_was_blocked_asks_before_it_gives_up_leases(autojump_clock: Clock) -> None:
    """DESIGN 3.4: a handler that blocks for longer than a lease, again and again, is called once for each message."""
    broker = MemoryBroker()
    broker.fill("q", numbered(6))
    attempts: list[int] = []

    async def blocks(delivery: Delivery[bytes]) -> None:
        attempts.append(delivery.attempt)
        await trio.lowlevel.checkpoint()
        autojump_clock.jump(7.0)

    policy = Policy(max_attempts=3, dead_letter="dead")
    async with open_runtime(Subscription(broker.queue("q", lease=5.0, limit=1), blocks, policy=policy)) as runtime:
        await broker.until_empty("q")
    assert attempts == [1] * 6
    assert lines(runtime.ledger("q")) == {"received": 6, "acked": 6}


async def test_a_batch_that_blocks_for_longer_than_its_lease_is_called_once(autojump_clock: Clock) -> None:
    """DESIGN 3.4: the same for batches."""
    broker = MemoryBroker()
    broker.fill("q", numbered(6))
    calls: list[list[int]] = []

    async def blocks(batch: list[Delivery[bytes]]) -> None:
        calls.append([delivery.attempt for delivery in batch])
        autojump_clock.jump(7.0)

    async with open_runtime(BatchSubscription(broker.queue("q", lease=5.0, limit=3), blocks, size=3)) as runtime:
        await broker.until_empty("q")
    assert calls == [[1, 1, 1]] * 2
    assert lines(runtime.ledger("q")) == {"received": 6, "acked": 6}
