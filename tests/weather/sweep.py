"""A small scenario for each way a delivery can go, cut short at every step that trio's scheduler takes in it.

The cut is a cancellation from outside, a drain, or a fault that the world knows. Afterwards the invariants of
tests/weather/story.py hold, nothing but `Cancelled` has left, it has ended in time, no message is lost, and a second
life finishes what is left. The same for each transport; what differs is the world's (tests/weather/world.py).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from functools import cache
from typing import Any

import attrs
import trio
import trio.testing

from actors import BatchSubscription, Runtime, Subscription, open_runtime
from actors.subscription import AnySubscription
from links.errors import LinkBroken, LinkRefused, NotConnected, PublishNotAccepted
from settlement import Ack, Delivery, Outcome, Policy
from tests.weather.schedule import chosen, dice_of, same_schedule, steps
from tests.weather.story import watched_places
from tests.weather.verdict import judge
from tests.weather.world import DEAD, ELSEWHERE, World

__all__ = ["ACTION", "CAP", "Answer", "Case", "Sweep", "failing", "returning", "stubborn"]

NAMES = [b"m%04d" % number for number in range(4)]
GOODBYE = 5.0
CAP = Policy(max_attempts=2, dead_letter=DEAD)
SCENARIO, ACTION = os.environ.get("SETTLEMENT_SCENARIO"), os.environ.get("SETTLEMENT_ACTION")

Answer = Callable[[Delivery[Any]], Awaitable[Outcome | None]]


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
        if delivery.body == NAMES[1]:
            raise ValueError("failed while it was cancelled") from None  # noqa: ASYNC104
    return Ack()  # noqa: ASYNC104


@attrs.frozen
class Case:
    """One scenario."""

    answer: Answer
    options: Any
    """Of the world."""
    policy: Policy = Policy()
    concurrency: int = 2
    size: int = 0
    grace: float = 15.0
    weather: Callable[[Any], None] = lambda _: None
    """What is wrong in the world from the beginning."""
    until: float | None = None
    """When the drain begins; None: when all is done."""
    publishes: bool = False
    """The block publishes the messages itself, and each handler one."""


class Run:
    """One run of a case, cut at a step or not."""

    def __init__(self, world: type[World], case: Case, action: str, at: int | None) -> None:
        self.case, self.action = case, action
        self.steps = steps(at, self.cut)
        self.world = world(case.options, dice_of(at))  # type: ignore[call-arg]
        self.story = self.world.story
        self.scope, self.blocking = trio.CancelScope(), trio.CancelScope()
        self.runtime: Runtime | None = None
        self.cut_at = math.inf

    def cut(self) -> None:
        """Called by the instrument, before the step."""
        self.cut_at = trio.current_time()
        match self.action:
            case "cancel":
                self.scope.cancel()
            case "drain":
                self.blocking.cancel()
                if self.runtime is not None:
                    self.runtime.drain()
            case _:
                self.world.strike(self.action)

    def subscription(self, client: Any, name: str, case: Case) -> AnySubscription:
        source, policy = self.world.source(client), case.policy
        rules = self.world.rules(cap=policy.max_attempts, dead=policy.dead_letter is not None, on_error=policy.on_error)
        consumer = self.story.consumer(name, source, concurrency=case.concurrency, size=case.size, rules=rules)
        options: dict[str, Any] = {"name": name, "policy": policy, "concurrency": case.concurrency}

        async def one(delivery: Delivery[bytes]) -> Outcome | None:
            return await many([delivery])

        async def many(deliveries: list[Delivery[bytes]]) -> Outcome | None:
            with self.story.call(consumer, deliveries) as call:
                if case.publishes:
                    first = len(self.story.sent[ELSEWHERE])
                    await self.world.publish(client, ELSEWHERE, b"x%04d" % first)
                outcome: Outcome | None
                outcome = call.result = await case.answer(deliveries[0])
            return outcome

        if case.size:
            return BatchSubscription(source, many, size=case.size, wait=0.02, **options)
        return Subscription(source, one, **options)

    async def __call__(self) -> None:
        """The life that is cut, and one that finishes the rest."""
        case, world = self.case, self.world
        async with world.running():
            case.weather(world)
            if not case.publishes:
                for name in NAMES:
                    self.story.sent[self.story.queue][name] = "confirmed"
                    world.put(name)
            await self.first()
            self.steps.stop()
            ended = trio.current_time()
            if self.action == "cancel":
                assert ended <= self.cut_at + 2 * GOODBYE, f"it took {ended - self.cut_at} s to end"
            await world.hushed()
            world.calm_down()
            rest = attrs.evolve(case, answer=returning(Ack(), 0.0), publishes=False)
            again = self.subscription(world.client(), "again", rest)
            with trio.fail_after(10_000.0):
                async with open_runtime(again, observers=[self.story.observer], goodbye=GOODBYE) as second:
                    await world.until_empty()
            self.story.ledgers["again"] = second.ledger("again")
        if self.action in ("cancel", "drain"):  # it went back by our goodbye
            assert not [each for each in self.story.handed if each.returned == "broken"]
        verdict = judge(self.story)
        # where nobody hears the other the goodbye may be over before the silence is
        assert verdict.lost == 0 or self.action in ("freeze_out", "freeze_back"), "lost"

    async def first(self) -> None:
        case, client = self.case, self.world.client()
        subscription = self.subscription(client, "first", case)
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
                            await self.block(client, runtime)
                    finally:
                        runtime.drain()
        finally:
            self.story.ledgers["first"] = runtime.ledger("first")

    @contextlib.contextmanager
    def refused(self) -> Generator[None]:
        """A peer that ends the stream in the middle of a login is taken for a stranger, which is final at start-up."""
        try:
            yield
        except ExceptionGroup as group:
            if self.action != "sever" or not self.world.strangers or group.split(LinkRefused)[1] is not None:
                raise

    async def block(self, client: Any, runtime: Runtime) -> None:
        if self.case.publishes:
            published: list[bytes] = []
            self.story.published.append(published)
            for name in NAMES:
                published.append(name)
                with contextlib.suppress(LinkBroken, NotConnected, PublishNotAccepted):
                    await self.world.publish(client, self.story.queue, name)
        with trio.move_on_after(300.0):  # what a verdict left unsettled comes back with the end of its link
            while True:
                await self.world.until_empty()
                now = runtime.statistics()["first"]
                if not (now.waiting or now.in_hand):
                    return
                await trio.sleep(self.world.idle)


@attrs.frozen(eq=False)
class Sweep:
    """All cases of a world. `file`: whose test says how to repeat a failure."""

    world: type[World]
    cases: Mapping[str, Case]
    file: str

    @property
    def names(self) -> Sequence[str]:
        """Those that the environment asks for, else all."""
        return [each for each in self.cases if SCENARIO in (None, each)]

    def run(self, name: str, action: str, at: int | None) -> Run:
        """One run; its failure says how to repeat it."""
        it = Run(self.world, self.cases[name], action, at)
        with same_schedule(sum(name.encode())), watched_places(), self.world.watched():
            try:
                trio.run(it, clock=trio.testing.MockClock(autojump_threshold=0), instruments=[it.steps])
            except BaseException as error:
                error.add_note(
                    f"scenario {name}, {action} before step {at}\nagain: SETTLEMENT_SCENARIO={name} "
                    f"SETTLEMENT_STEP={at} SETTLEMENT_ACTION={action} tests/run --only {self.world.mark} -- {self.file}"
                )
                raise
        return it

    @cache  # noqa: B019 -- there are two of them
    def whole(self, name: str) -> int:
        """How many steps the scenario takes when nobody cuts it."""
        return self.run(name, "cancel", None).steps.taken

    def cut(self, name: str, action: str, every: int) -> int:
        """Cut the scenario at each step (or every so many); how many points that were."""
        points = chosen("SETTLEMENT_STEP", range(1 + sum(name.encode()) % every, self.whole(name) + 1, every))
        for at in points:
            self.run(name, action, at)
        return len(points)

    def cancelled(self, every: int, part: int, parts: int, enough: int, tell: Callable[[str], None]) -> None:
        """Cancel a part of the scenarios, at not less than so many points."""
        points = {name: self.cut(name, "cancel", every) for name in self.names[part::parts]}
        tell(f"cancelled at {sum(points.values())} points of {len(points)} scenarios: {points}")
        assert SCENARIO or sum(points.values()) >= enough

    def struck(self, action: str, every: int, tell: Callable[[str], None]) -> None:
        """Let something happen to each scenario."""
        tell(f"{action} at {sum(self.cut(name, action, every) for name in self.names)} points")
