"""A scenario for each way a delivery can go, cut short at every step that trio's scheduler takes in it.

The cut is a cancellation from outside; in the second test it is a drain, a broken link or connection, or a lost lease.
Afterwards the invariants of tests/weather/story.py hold, nothing but `Cancelled` has left, it has ended in time, no
message is lost, and a second life finishes what is left. A failure prints the command that repeats it.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from actors import BatchSubscription, Runtime, Subscription, open_runtime
from actors.subscription import AnySubscription
from links.abc import Settles
from links.errors import LinkBroken, NotConnected
from links.memory import MemoryBroker
from settlement import Ack, Copies, DeadLetter, Delivery, Drop, Native, Outcome, Policy, Retry, RetryAfter
from tests.weather.fates import Rules
from tests.weather.schedule import chosen, dice_of, same_schedule, sized, steps
from tests.weather.story import Consumer, Story, judge, watched_places

pytestmark = pytest.mark.memory

QUEUE, DEAD, ELSEWHERE = "orders", "orders.dead", "elsewhere"
MESSAGES = 4
GOODBYE = 5.0
EVERY = sized(fast=9, full=1, long=1)
"""The sweep takes each step, or each ninth."""
ENOUGH = sized(fast=30, full=300, long=300)
"""Points of cancellation, over all scenarios."""

Answer = Callable[[Delivery[Any]], Awaitable[Outcome | None]]


@attrs.frozen
class Case:
    """One scenario."""

    answer: Answer
    policy: Policy = Policy()
    delays: Native | Copies = Native()
    lease: float | None = None
    settles: Settles = Settles.TOGETHER
    concurrency: int = 2
    size: int = 0
    grace: float = 15.0
    weather: Callable[[MemoryBroker], None] = lambda _: None
    until: float | None = None
    """When the drain begins; None: when all is done."""
    publishes: bool = False
    """The block publishes the messages itself."""


def returning(outcome: Outcome | None, pause: float = 0.1, then: Outcome | None = None) -> Answer:
    """A handler that answers `outcome` at first, then `then`."""

    async def answer(delivery: Delivery[Any]) -> Outcome | None:
        await trio.sleep(pause)
        return outcome if delivery.attempt == 1 else then

    return answer


async def failing(delivery: Delivery[Any]) -> Outcome:
    await trio.sleep(0.1)
    raise ValueError(delivery.id)


async def stubborn(delivery: Delivery[Any]) -> Outcome:
    """Swallows its cancellation, or fails while it is cancelled."""
    try:
        await trio.sleep(1.0)
    except trio.Cancelled:  # noqa: ASYNC103 -- that is what it is about
        if delivery.body == b"1":
            raise ValueError("failed while it was cancelled") from None  # noqa: ASYNC104
    return Ack()  # noqa: ASYNC104


def slow(broker: MemoryBroker) -> None:
    for name in (QUEUE, DEAD, ELSEWHERE):
        broker.slow_settlements(name, 0.05)
        broker.slow_publishes(name, 0.05)
        broker.slow_extensions(name, 0.2)


def closed(broker: MemoryBroker) -> None:
    slow(broker)
    broker.close(DEAD)


def unextended(broker: MemoryBroker) -> None:
    slow(broker)
    broker.slow_extensions(QUEUE, math.inf)


CAP = Policy(max_attempts=2, dead_letter=DEAD)
CASES = {
    "ack": Case(returning(Ack())),
    "ack_slowly_settled": Case(returning(Ack()), weather=slow),
    "ack_one_by_one": Case(returning(None), concurrency=1, weather=slow),
    "retry": Case(returning(Retry()), weather=slow),
    "retry_after_native": Case(returning(RetryAfter(2.0)), weather=slow),
    "retry_after_copies": Case(returning(RetryAfter(2.0)), delays=Copies(), weather=slow),
    "retry_after_scarce_copies": Case(returning(RetryAfter(2.0)), delays=Copies(1), weather=slow),
    "drop": Case(returning(Drop("no use")), weather=slow),
    "raise": Case(failing, policy=CAP),
    "dead_letter": Case(failing, policy=Policy(dead_letter=DEAD, on_error=DeadLetter()), weather=slow),
    "dead_letter_one_by_one": Case(failing, policy=CAP, concurrency=1, weather=slow),
    "batch": Case(returning(RetryAfter(1.0)), size=3, delays=Copies(2), weather=slow),
    "renewal": Case(returning(Ack(), pause=3.5), lease=3.0, weather=slow),
    "alone": Case(returning(RetryAfter(1.0)), delays=Copies(), settles=Settles.ALONE, weather=slow),
    "alone_dead_letter": Case(failing, policy=CAP, settles=Settles.ALONE, lease=6.0, weather=slow),
    "stubborn": Case(stubborn, weather=slow),
    "stubborn_over_grace": Case(stubborn, until=0.5, grace=0.2, weather=slow),
    "stubborn_failing_over_grace": Case(stubborn, policy=CAP, until=0.5, grace=0.2, weather=slow, concurrency=4),
    "stubborn_batch_over_grace": Case(stubborn, size=3, until=0.5, grace=0.2),
    "stubborn_without_lease": Case(stubborn, lease=1.0, until=1.2, grace=0.2, weather=unextended),
    "drain": Case(returning(Ack(), pause=1.0), until=0.5, weather=slow),
    "drain_over_grace": Case(returning(Ack(), pause=9.0), until=0.5, grace=1.0, lease=6.0, weather=slow),
    "drain_with_copies": Case(returning(RetryAfter(100.0)), delays=Copies(), until=0.5, grace=1.0, weather=slow),
    "drain_with_closed_dead_letter": Case(failing, policy=CAP, until=0.5, grace=1.0, weather=closed),
    "publish": Case(returning(Ack()), policy=Policy(on_error=Retry()), weather=slow, publishes=True),
}
WEATHER = ("drain", "sever", "sever_connection", "expire", "break_calls", "refuse_settlements", "lose_confirmations")


class Run:
    """One run of a case, cut at a step or not."""

    def __init__(self, case: Case, action: str, at: int | None) -> None:
        self.case = case
        self.action = action
        self.steps = steps(at, self.cut)
        self.main = MemoryBroker("main", dice=dice_of(at))
        self.story = Story(self.main)
        self.scope = trio.CancelScope()
        self.blocking = trio.CancelScope()
        self.runtime: Runtime | None = None
        self.cut_at = math.inf
        self.bodies = [b"%d" % number for number in range(MESSAGES)]

    def cut(self) -> None:
        """Called by the instrument, before the step."""
        self.cut_at = trio.current_time()
        self.story.stolen = self.action in ("sever", "sever_connection", "expire")
        match self.action:
            case "cancel":
                self.scope.cancel()
            case "drain":
                self.blocking.cancel()
                if self.runtime is not None:
                    self.runtime.drain()
            case "sever_connection":
                self.main.sever_connection()
            case _:
                getattr(self.main, self.action)(QUEUE)

    def subscription(self, name: str, answer: Answer, **changes: Any) -> tuple[AnySubscription, Consumer]:
        case = attrs.evolve(self.case, **changes)
        queue = self.main.queue(QUEUE, delays=case.delays, lease=case.lease, settles=case.settles)
        rules = Rules(
            cap=case.policy.max_attempts,
            dead=case.policy.dead_letter is not None,
            copies=isinstance(case.delays, Copies),
            on_error=case.policy.on_error,
        )
        consumer = self.story.consumer(name, queue, concurrency=case.concurrency, size=case.size, rules=rules)
        options: dict[str, Any] = {"name": name, "policy": case.policy, "concurrency": case.concurrency}

        async def one(delivery: Delivery[bytes]) -> Outcome | None:
            return await many([delivery])

        async def many(deliveries: list[Delivery[bytes]]) -> Outcome | None:
            with self.story.call(consumer, deliveries) as call:
                if case.publishes:
                    await self.main.publisher(ELSEWHERE).publish(deliveries[0].body)
                outcome: Outcome | None
                outcome = call.result = await answer(deliveries[0])
            return outcome

        if case.size:
            return BatchSubscription(queue, many, size=case.size, wait=0.02, **options), consumer
        return Subscription(queue, one, **options), consumer

    async def __call__(self) -> None:
        """The life that is cut, and one that finishes the rest."""
        case = self.case
        case.weather(self.main)
        if not case.publishes:
            self.main.fill(QUEUE, self.bodies)
        await self.first(case)
        self.steps.stop()
        ended = trio.current_time()
        if self.action == "cancel":
            assert ended <= self.cut_at + 2 * GOODBYE, f"it took {ended - self.cut_at} s to end"
        again, _ = self.subscription("again", returning(Ack(), 0.0), publishes=False, policy=Policy())
        self.main.slow_settlements(QUEUE, 0)
        self.main.store(QUEUE).weather.broken_calls = self.main.store(QUEUE).weather.refused_settlements = 0
        with trio.fail_after(10_000.0):
            async with open_runtime(again, observers=[self.story.observer], goodbye=GOODBYE) as second:
                await self.main.until_empty(QUEUE)
        self.story.ledgers["again"] = second.ledger("again")
        lost = self.main.store(QUEUE).weather.lost_confirmations
        unconfirmed = int(self.action == "lose_confirmations" and not lost and math.isfinite(self.cut_at))
        there = {self.bodies[int(body)] for body in {delivery.body for delivery in self.taken()}}
        verdict = judge(
            self.story, QUEUE, (self.main, DEAD), sorted(there), cap=case.policy.max_attempts, unconfirmed=unconfirmed
        )
        assert verdict.vanished == sum(ledger.lost for ledger in self.story.ledgers.values()) == 0, "lost"
        assert case.publishes or there == {*self.bodies}

    def taken(self) -> Iterator[Delivery[Any]]:
        for item in self.story.timeline:
            yield from getattr(getattr(item, "entry", None), "deliveries", ())

    async def first(self, case: Case) -> None:
        subscription, _ = self.subscription("first", case.answer)
        runtime = self.runtime = Runtime(
            subscription, grace=case.grace, goodbye=GOODBYE, observers=[self.story.observer]
        )
        self.steps.start()
        try:
            with self.scope:
                async with trio.open_nursery() as nursery:
                    await nursery.start(runtime.run)
                    try:
                        with trio.move_on_after(math.inf if case.until is None else case.until) as self.blocking:
                            await self.block(case, runtime)
                    finally:
                        runtime.drain()
        finally:
            self.story.ledgers["first"] = runtime.ledger("first")

    async def block(self, case: Case, runtime: Runtime) -> None:
        if case.publishes:
            for body in self.bodies:
                with contextlib.suppress(LinkBroken, NotConnected):
                    await self.main.publisher(QUEUE).publish(body)
        with trio.move_on_after(300.0):  # what a verdict left unsettled comes back with the end of its link
            while True:
                await self.main.until_empty(QUEUE)
                if not runtime.statistics()["first"].waiting:
                    return
                await trio.sleep(1.0)


def run(name: str, action: str, at: int | None) -> Run:
    """One run; its failure says how to repeat it."""
    it = Run(CASES[name], action, at)
    with same_schedule(sum(name.encode())), watched_places():
        try:
            trio.run(it, clock=trio.testing.MockClock(autojump_threshold=0), instruments=[it.steps])
        except BaseException as error:
            error.add_note(
                f"scenario {name}, {action} before step {at}\nagain: SETTLEMENT_SCENARIO={name} SETTLEMENT_STEP={at} "
                f"SETTLEMENT_ACTION={action} tests/run --only memory -- tests/weather/test_cancel_sweep.py"
            )
            raise
    return it


def sweep(name: str, action: str, every: int) -> int:
    """Cut the scenario at each step (or every so many); how many points that were."""
    whole = run(name, action, None).steps.taken
    points = chosen("SETTLEMENT_STEP", range(1 + sum(name.encode()) % every, whole + 1, every))
    for at in points:
        run(name, action, at)
    return len(points)


SCENARIO, ACTION = os.environ.get("SETTLEMENT_SCENARIO"), os.environ.get("SETTLEMENT_ACTION")
NAMES = [SCENARIO] if SCENARIO else [*CASES]


def test_cancelled_at_every_step(tell: Callable[[str], None]) -> None:
    """A cancellation from outside, whenever it comes, loses nothing, says nothing wrong, and ends in time."""
    if ACTION not in (None, "cancel"):
        pytest.skip("SETTLEMENT_ACTION asks for another one")
    points = {name: sweep(name, "cancel", EVERY) for name in NAMES}
    tell(f"cancelled at {sum(points.values())} points of {len(points)} scenarios: {points}")
    assert SCENARIO or sum(points.values()) >= ENOUGH


@pytest.mark.parametrize("action", [ACTION] if ACTION and ACTION != "cancel" else WEATHER)
def test_weather_at_every_step(action: str) -> None:
    """A drain, a break, a lost lease or confirmation, whenever it comes, loses nothing either."""
    if ACTION == "cancel":
        pytest.skip("SETTLEMENT_ACTION asks for another one")
    for name in NAMES:
        sweep(name, action, sized(fast=60, full=5, long=1))
