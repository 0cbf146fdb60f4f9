"""The sweep of test_cancel_sweep.py on AMQP: small scenarios on the embedded broker, cut at every scheduler's step.

The cut is a cancellation from outside; in the second test it is a drain, or something that the network or the broker
does. Afterwards the invariants of tests/weather/amqp_story.py hold, nothing but `Cancelled` has left, it has ended in
time, no connection is left at the broker, and a second life finishes what is left. A failure prints the command that
repeats it.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Awaitable, Callable, Generator
from functools import cache
from typing import Any

import attrs
import pytest
import trio
import trio.testing

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from actors import BatchSubscription, Runtime, Subscription, open_runtime
from actors.subscription import AnySubscription
from links.amqp.broker import AmqpBroker
from links.amqp.embedded import QueuePolicy
from links.amqp.events import Condition
from links.amqp.messages import encode
from links.errors import LinkBroken, LinkRefused, NotConnected, PublishNotAccepted
from settlement import Ack, Copies, Delivery, Drop, Hold, Letter, Native, Outcome, Policy, Retry, RetryAfter, Scheduled
from settlement.amqp import AT_LEAST_ONCE, AT_MOST_ONCE, Delays
from tests.weather.amqp_fates import AmqpRules
from tests.weather.amqp_story import AmqpStory
from tests.weather.amqp_verdict import judge
from tests.weather.amqp_watched import WatchedBroker, watched_broker
from tests.weather.amqp_weather import DEAD, QUEUE, Weather
from tests.weather.schedule import chosen, dice_of, same_schedule, sized, steps
from tests.weather.story import Consumer, watched_places

pytestmark = pytest.mark.amqp

GRAVEYARD = "graveyard"
NAMES = [b"m%04d" % number for number in range(4)]
GOODBYE = 5.0
LATENCY = 0.01
EVERY = sized(fast=47, full=19, long=1)
"""The sweep takes each step, or one in so many."""
ENOUGH = sized(fast=30, full=80, long=1800)
"""Points of cancellation, over a quarter of the scenarios."""

Answer = Callable[[Delivery[Any]], Awaitable[Outcome | None]]


@attrs.frozen
class Case:
    """One scenario."""

    answer: Answer
    policy: Policy = Policy()
    delays: Delays = Copies()
    at_most_once: bool = False
    durable: bool = True
    concurrency: int = 2
    size: int = 0
    grace: float = 15.0
    until: float | None = None
    """When the drain begins; None: when all is done."""
    closed: bool = False
    """The dead letter is refused."""
    publishes: bool = False
    """The block publishes the messages itself."""


def returning(outcome: Outcome | None, pause: float = 0.05, then: Outcome | None = None) -> Answer:
    """A handler that answers `outcome` at first, then `then`."""

    async def answer(delivery: Delivery[Any]) -> Outcome | None:
        await trio.sleep(pause)
        return outcome if delivery.attempt == 1 else then

    return answer


async def failing(delivery: Delivery[Any]) -> Outcome:
    await trio.sleep(0.05)
    raise ValueError(delivery.id)


async def stubborn(delivery: Delivery[Any]) -> Outcome:
    """Swallows its cancellation, or fails while it is cancelled."""
    try:
        await trio.sleep(1.0)
    except trio.Cancelled:  # noqa: ASYNC103 -- that is what it is about
        if delivery.id == "m0001":
            raise ValueError("failed while it was cancelled") from None  # noqa: ASYNC104
    return Ack()  # noqa: ASYNC104


CAP = Policy(max_attempts=2, dead_letter=DEAD)
CASES = {
    "ack": Case(returning(Ack())),
    "ack_one_by_one": Case(returning(None), concurrency=1),
    "retry": Case(returning(Retry())),
    "retry_as_a_copy": Case(returning(Retry()), policy=Policy(max_attempts=3), durable=False),
    "copies": Case(returning(RetryAfter(2.0))),
    "scarce_copies": Case(returning(RetryAfter(2.0)), delays=Copies(1)),
    "hold": Case(returning(RetryAfter(2.0)), delays=Hold(2)),
    "native": Case(returning(RetryAfter(2.0)), delays=Native()),
    "scheduled": Case(returning(RetryAfter(2.0)), delays=Scheduled("x-opt-delivery-delay")),
    "drop": Case(returning(Drop("no use"))),
    "dead_letter": Case(failing, policy=CAP),
    "dead_letter_one_by_one": Case(failing, policy=CAP, concurrency=1),
    "batch": Case(returning(RetryAfter(1.0)), size=3, delays=Copies(2)),
    "at_most_once": Case(returning(RetryAfter(1.0)), at_most_once=True),
    "stubborn": Case(stubborn),
    "stubborn_over_grace": Case(stubborn, until=0.5, grace=0.2),
    "drain": Case(returning(Ack(), pause=1.0), until=0.5),
    "drain_with_copies": Case(returning(RetryAfter(100.0)), until=0.5, grace=1.0),
    "drain_with_closed_dead_letter": Case(failing, policy=CAP, until=0.5, grace=1.0, closed=True),
    "publish": Case(returning(Ack()), publishes=True),
}
WEATHER = ("drain", "cut", "sever", "detach", "end_session", "close_connection", "freeze_out", "freeze_back")


class Run:
    """One run of a case, cut at a step or not."""

    def __init__(self, case: Case, action: str, at: int | None) -> None:
        self.case = case
        self.action = action
        self.steps = steps(at, self.cut)
        self.story = AmqpStory(QUEUE, DEAD, at_most_once=case.at_most_once)
        self.server = WatchedBroker(self.story, {QUEUE: QueuePolicy(dead_letter=GRAVEYARD)}, idle_timeout=20.0)
        self.weather = Weather(self.server, LATENCY, dice_of(at))
        self.scope = trio.CancelScope()
        self.blocking = trio.CancelScope()
        self.runtime: Runtime | None = None
        self.cut_at = math.inf

    def cut(self) -> None:
        """Called by the instrument, before the step."""
        self.cut_at = trio.current_time()
        self.story.stolen = self.action not in ("cancel", "drain")
        cables = [each for each in self.weather.cables if not each.is_cut]
        match self.action:
            case "cancel":
                self.scope.cancel()
            case "drain":
                self.blocking.cancel()
                if self.runtime is not None:
                    self.runtime.drain()
            case "cut":
                for cable in cables:
                    cable.cut()
            case "freeze_out" | "freeze_back":  # for good: silence ends it
                for cable in cables:
                    (cable.out if self.action == "freeze_out" else cable.back).freeze()
            case _:
                for peer in self.server.peers[:]:
                    self.strike(peer)

    def strike(self, peer: Any) -> None:
        match self.action:
            case "sever":
                peer.sever()
            case "detach":
                for address in (QUEUE, DEAD):
                    peer.detach(address, Condition("amqp:resource-deleted"))
            case "end_session":
                self.server.end_sessions(peer, at_most=10)
            case "close_connection":
                peer.close(Condition("amqp:connection:forced"))
            case _:
                raise ValueError(self.action)

    def broker(self) -> AmqpBroker:
        return AmqpBroker("amqp://localhost", connect=self.weather.connect, heartbeat=4.0, durable=self.case.durable)

    def subscription(self, broker: AmqpBroker, name: str, case: Case) -> AnySubscription:
        settle = AT_MOST_ONCE if case.at_most_once else AT_LEAST_ONCE
        source = broker.queue(QUEUE, delays=case.delays, settle=settle)
        rules = AmqpRules(
            cap=case.policy.max_attempts,
            dead=case.policy.dead_letter is not None,
            delays=type(case.delays).__name__.lower(),
            at_most_once=case.at_most_once,
            on_error=case.policy.on_error,
        )
        consumer = self.story.consumer(name, source, concurrency=case.concurrency, size=case.size, rules=rules)
        options: dict[str, Any] = {"name": name, "policy": case.policy, "concurrency": case.concurrency}

        async def one(delivery: Delivery[bytes]) -> Outcome | None:
            return await self.handle(consumer, case, [delivery])

        async def many(deliveries: list[Delivery[bytes]]) -> Outcome | None:
            return await self.handle(consumer, case, deliveries)

        if case.size:
            return BatchSubscription(source, many, size=case.size, wait=0.02, **options)
        return Subscription(source, one, **options)

    async def handle(self, consumer: Consumer, case: Case, deliveries: list[Delivery[bytes]]) -> Outcome | None:
        with self.story.call(consumer, deliveries) as call:
            outcome: Outcome | None
            outcome = call.result = await case.answer(deliveries[0])
        return outcome

    def fill(self) -> None:
        for name in NAMES:
            self.story.sent[QUEUE][name] = "confirmed"
            self.server.publish(QUEUE, encode(Letter(name, {"message-id": name}), durable=self.case.durable))

    async def __call__(self) -> None:
        """The life that is cut, and one that finishes the rest."""
        case = self.case
        async with self.server.running(), trio.open_nursery() as self.weather.nursery:
            if not case.publishes:
                self.fill()
            if case.closed:
                self.server.refuse(DEAD, Condition("amqp:unauthorized-access", "it is closed"))
            await self.first(case)
            self.steps.stop()
            ended = trio.current_time()
            if self.action == "cancel":
                assert ended <= self.cut_at + 2 * GOODBYE, f"it took {ended - self.cut_at} s to end"
            for cable in self.weather.cables:
                assert cable.is_cut, "a connection is left"
            with trio.fail_after(40.0):
                while self.server.peers:  # the broker hears of it, at the latest by the silence
                    await trio.sleep(0.1)
            self.server.refuse(DEAD, None)
            again = self.subscription(self.broker(), "again", attrs.evolve(case, answer=returning(Ack(), 0.0)))
            with trio.fail_after(1000.0):
                async with open_runtime(again, observers=[self.story.observer], goodbye=GOODBYE) as second:
                    await self.until_empty()
            self.story.ledgers["again"] = second.ledger("again")
            self.weather.nursery.cancel_scope.cancel()
        if self.action in ("cancel", "drain"):  # it went back by our goodbye
            assert not [each for each in self.story.handed if each.returned == "broken"]
        verdict = judge(self.story, graveyard=GRAVEYARD)
        lost = sum(ledger.lost for ledger in self.story.ledgers.values())
        assert verdict.vanished <= lost
        assert lost == 0 or self.action in ("freeze_out", "freeze_back"), (
            "lost"
        )  # the goodbye was over before the silence

    async def first(self, case: Case) -> None:
        broker = self.broker()
        subscription = self.subscription(broker, "first", case)
        runtime = self.runtime = Runtime(
            subscription, grace=case.grace, goodbye=GOODBYE, observers=[self.story.observer]
        )
        self.steps.start()
        try:
            with self.scope, self.refused():
                async with trio.open_nursery() as nursery:
                    await nursery.start(runtime.run)
                    try:
                        with trio.move_on_after(math.inf if case.until is None else case.until) as self.blocking:
                            await self.block(broker, runtime)
                    finally:
                        runtime.drain()
        finally:
            self.story.ledgers["first"] = runtime.ledger("first")

    @contextlib.contextmanager
    def refused(self) -> Generator[None, None, None]:
        """A peer that ends the stream in the middle of a login is taken for a stranger, which is final at start-up."""
        try:
            yield
        except ExceptionGroup as group:
            if self.action != "sever" or group.split(LinkRefused)[1] is not None:
                raise

    async def block(self, broker: AmqpBroker, runtime: Runtime) -> None:
        if self.case.publishes:
            sent = self.story.sent[QUEUE]
            for name in NAMES:
                sent[name] = "unknown"
                self.story.published[broker].append(name)
                try:
                    await broker.publisher(QUEUE).publish(name, {"message-id": name})
                    sent[name] = "confirmed"
                except LinkBroken:
                    pass
                except (PublishNotAccepted, NotConnected):
                    sent[name] = "refused"
        with contextlib.suppress(trio.TooSlowError):
            with trio.fail_after(300.0):
                await self.until_empty()
                while runtime.statistics()["first"].waiting or runtime.statistics()["first"].in_hand:
                    await trio.sleep(0.1)

    async def until_empty(self) -> None:
        """Nothing is in the queue, with a link, or held by the broker; copies are not looked at."""
        queue = self.server.store.queue(QUEUE)
        quiet = 0
        while quiet < 30:  # and no copy follows
            quiet = 0 if len(queue) or queue.delayed or queue.unsettled else quiet + 1
            await trio.sleep(0.1)


def run(name: str, action: str, at: int | None) -> Run:
    """One run; its failure says how to repeat it."""
    it = Run(CASES[name], action, at)
    with same_schedule(sum(name.encode())), watched_places(), watched_broker():
        try:
            trio.run(it, clock=trio.testing.MockClock(autojump_threshold=0), instruments=[it.steps])
        except BaseException as error:
            error.add_note(
                f"scenario {name}, {action} before step {at}\nagain: SETTLEMENT_SCENARIO={name} SETTLEMENT_STEP={at} "
                f"SETTLEMENT_ACTION={action} tests/run --only amqp -- tests/weather/test_cancel_sweep_amqp.py"
            )
            raise
    return it


@cache
def whole(name: str) -> int:
    """How many steps the scenario takes when nobody cuts it."""
    return run(name, "cancel", None).steps.taken


def sweep(name: str, action: str, every: int) -> int:
    """Cut the scenario at each step (or every so many); how many points that were."""
    points = chosen("SETTLEMENT_STEP", range(1 + sum(name.encode()) % every, whole(name) + 1, every))
    for at in points:
        run(name, action, at)
    return len(points)


SCENARIO, ACTION = os.environ.get("SETTLEMENT_SCENARIO"), os.environ.get("SETTLEMENT_ACTION")
SCENARIOS = [SCENARIO] if SCENARIO in CASES else [*CASES]


@pytest.mark.parametrize("quarter", range(4))
def test_cancelled_at_every_step(quarter: int, tell: Callable[[str], None]) -> None:
    """A cancellation from outside, whenever it comes, loses nothing, says nothing wrong, and ends in time."""
    if ACTION not in (None, "cancel"):
        pytest.skip("SETTLEMENT_ACTION asks for another one")
    points = {name: sweep(name, "cancel", EVERY) for name in SCENARIOS[quarter::4]}
    tell(f"cancelled at {sum(points.values())} points of {len(points)} scenarios: {points}")
    assert SCENARIO or sum(points.values()) >= ENOUGH


@pytest.mark.parametrize("action", [ACTION] if ACTION and ACTION != "cancel" else WEATHER)
def test_weather_at_every_step(action: str) -> None:
    """A drain, a cut, a silence, whatever the broker ends, whenever it comes, loses nothing either."""
    if ACTION == "cancel":
        pytest.skip("SETTLEMENT_ACTION asks for another one")
    for name in SCENARIOS:
        sweep(name, action, sized(fast=397, full=149, long=3))
