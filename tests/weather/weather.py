"""Plays a scenario in a world: handlers of some temper, publishers, a storm, lives that compete, and one that finishes.

The same for each transport; what differs is the world's (tests/weather/world.py).
"""

from __future__ import annotations

import math
from contextlib import nullcontext, suppress
from functools import partial
from random import Random
from typing import Any

import attrs
import trio
import trio.testing

from actors import BatchSubscription, HandlerFailed, LinkGaveUp, Runtime, Subscription, open_runtime
from actors.subscription import AnySubscription
from links.errors import LinkBroken, LinkRefused, NotConnected, PublishNotAccepted
from settlement import Ack, DeadLetter, Delivery, Drop, FailFast, Ledger, Outcome, Policy, Retry, RetryAfter
from settlement.groups import leaves
from settlement.ledger import Line
from settlement.plans import CapReached
from tests.weather.scenario import Scenario, draw
from tests.weather.schedule import dice_of, same_schedule
from tests.weather.story import Consumer, watched_places
from tests.weather.verdict import Verdict, judge
from tests.weather.world import ELSEWHERE, World

__all__ = ["run_seed", "weather"]


class Oops(Exception):
    """What a handler raises."""


class Boom(Exception):
    """What a block raises."""


@attrs.frozen
class Order:
    """What `decode` makes of a body."""

    body: bytes


def decode(body: bytes) -> Order:
    if body.startswith(b"bad"):
        raise ValueError("no order")
    return Order(body)


class Play:
    """One scenario, in its world."""

    def __init__(self, scenario: Scenario, world: World, dice: Random) -> None:
        self.scenario, self.world, self.dice = scenario, world, dice
        self.story = world.story
        self.names = [
            b"%s%04d" % (b"bad" if scenario.decoding and number % 5 == 3 else b"m", number)
            for number in range(scenario.messages)
        ]
        self.filled = 0
        self.extra = 0
        self.patient = False
        """The second life: handlers finish what is left."""
        self.go = trio.Event()

    # --- messages

    def fill(self, count: int) -> None:
        """Put messages into the queue."""
        for name in self.names[self.filled : self.filled + count]:
            self.filled += 1
            self.story.sent[self.story.queue][name] = "confirmed"
            self.world.put(name)

    async def publish_the_rest(self, client: Any) -> None:
        """A publisher of the user's, in the weather."""
        published: list[bytes] = []
        self.story.published.append(published)
        while self.filled < len(self.names):
            name = self.names[self.filled]
            if name.startswith(b"bad"):  # a world may have a form of its own for these
                self.fill(1)
                continue
            self.filled += 1
            await trio.sleep(self.dice.choice([0.0, 0.0, 0.3, 2.0]))
            published.append(name)
            with suppress(LinkBroken, PublishNotAccepted, NotConnected):
                await self.world.publish(client, self.story.queue, name)

    # --- subscriptions

    def subscription(self, client: Any) -> AnySubscription:
        """One more, with a name of its own."""
        scenario, buries = self.scenario, self.scenario.dead != "none"
        name = f"consumer {len(self.story.consumers) + 1}"
        source = self.world.source(client)
        undecodable = DeadLetter() if buries else Drop()
        rules = self.world.rules(
            cap=scenario.cap,
            dead=buries,
            on_error=scenario.on_error,
            failures={ZeroDivisionError: Drop()},
            bad=b"bad" if scenario.decoding else None,
            on_undecodable=undecodable,
            limited=scenario.within is not None,
        )
        policy = Policy(
            max_attempts=scenario.cap,
            dead_letter=self.world.dead(abroad=scenario.dead == "abroad") if buries else None,
            on_error=scenario.on_error,  # type: ignore[arg-type]
            on_undecodable=undecodable,
            failures={ZeroDivisionError: Drop()},
        )
        consumer = self.story.consumer(name, source, concurrency=scenario.concurrency, size=scenario.size, rules=rules)
        options: dict[str, Any] = {"name": name, "policy": policy, "concurrency": scenario.concurrency}
        options["within"] = scenario.within
        if scenario.decoding:
            options["decode"] = decode
        if scenario.size:
            many = partial(self.handle_many, consumer, client)
            return BatchSubscription(source, many, size=scenario.size, wait=0.05, **options)
        return Subscription(source, partial(self.handle_one, consumer, client), **options)

    def subscriptions(self, client: Any) -> list[AnySubscription]:
        """Those of one runtime."""
        return [self.subscription(client) for _ in range(self.scenario.subscriptions)]

    async def handle_one(self, consumer: Consumer, client: Any, delivery: Delivery[Any]) -> Outcome | None:
        with self.story.call(consumer, [delivery]) as call:
            outcome: Outcome | None
            outcome = call.result = await self.answer(client, delivery)
        return outcome

    async def handle_many(self, consumer: Consumer, client: Any, deliveries: list[Delivery[Any]]) -> Any:
        with self.story.call(consumer, deliveries) as call:
            first = await self.answer(client, deliveries[0])
            match self.dice.randrange(4):
                case 0:
                    call.result = first
                case 1:
                    call.result = [first] * max(0, len(deliveries) - self.dice.randrange(2))
                case _:
                    call.result = [first, *[self.outcome() for _ in deliveries[1:]]]
        return call.result

    def outcome(self) -> Outcome | None:
        """A random one."""
        if self.patient and self.dice.random() < 0.9:
            return Ack()
        delay = self.dice.choice([0.0, 0.5, 5.0, 100.0])
        outcomes: list[Outcome | None] = [Ack(), Ack(), None, Retry(), Retry(), RetryAfter(delay), RetryAfter(delay)]
        return self.dice.choice([*outcomes, Drop()])

    async def answer(self, client: Any, delivery: Delivery[Any]) -> Any:
        """What a handler may do."""
        dice, scenario = self.dice, self.scenario
        if self.patient:
            return self.outcome()
        if scenario.decoding:
            self.story.check(delivery.message == Order(delivery.body), f"not decoded: {delivery}")
        longest: float = scenario.options.longest
        pauses: dict[str, list[float | None]] = {
            "brisk": [None, None, 0.0, 0.01],
            "slow": [0.0, 0.1, 1.0, 1.0, longest],
            "wild": [None, 0.0, 0.3, longest],
            "stubborn": [0.1, 1.0, longest],
        }
        pause = dice.choice(pauses[scenario.temper])
        act = dice.random() if scenario.temper == "wild" else 0.0
        if act > 0.97 or scenario.temper == "stubborn":
            with suppress(trio.Cancelled):  # the handler that swallows
                await trio.sleep(pause if scenario.temper == "stubborn" and pause is not None else longest)
        elif act > 0.94:
            try:
                await trio.sleep(longest)
            except trio.Cancelled:
                raise Oops("failed while it was cancelled") from None  # noqa: ASYNC104
        elif act > 0.92:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.fail_cancelled, longest)
                await trio.sleep(0.5)
                nursery.cancel_scope.cancel()
        elif act > 0.84:
            self.extra += 1
            await self.world.publish(client, ELSEWHERE, b"x%04d" % self.extra)
        elif act > 0.82:
            with trio.move_on_after(0.2):
                await trio.sleep(10)
        elif pause is not None:
            await trio.sleep(pause)
        failing = dice.random()
        if failing < 0.05:
            raise Oops("failed")
        if failing < 0.07:
            raise ExceptionGroup("both", [Oops("one"), ZeroDivisionError("two")])
        if failing < 0.09:
            return 1 / 0
        if failing < 0.10:
            return "no outcome"
        return self.outcome()

    async def fail_cancelled(self, seconds: float) -> None:
        try:
            await trio.sleep(seconds)
        finally:
            raise Oops("failed while it was cancelled")

    # --- until the end

    async def storm(self) -> None:
        """The programme, then fair weather."""
        if self.scenario.calm:
            return
        if not self.scenario.early:
            await self.go.wait()
        began = trio.current_time()
        for at, name in self.scenario.faults:
            await trio.sleep_until(began + at)
            self.world.fault(name)
        await trio.sleep(30.0)
        self.world.calm_down()

    async def until_done(self, runtime: Runtime) -> None:
        """Nothing is stored, in hand, or waiting."""
        while (
            self.filled < len(self.names)
            or not self.world.is_empty
            or any(each.waiting or each.in_hand for each in runtime.statistics().values())
        ):
            await trio.sleep(self.world.idle)

    async def __call__(self) -> Verdict:
        """Play it to its end, let a second life in fair weather finish what is left, and judge."""
        scenario, world = self.scenario, self.world
        with trio.move_on_after(world.long) as hanging:
            async with world.running():
                self.fill(self.dice.randint(0, scenario.messages))
                async with trio.open_nursery() as around:
                    around.start_soon(self.storm)
                    await self.lives()
                    around.cancel_scope.cancel()
            async with world.running():
                world.calm_down()
                self.fill(scenario.messages)
                self.patient = True
                again = self.subscriptions(world.client())
                async with open_runtime(*again, observers=[self.story.observer]) as runtime:
                    await self.until_done(runtime)
                self.keep_books(again, runtime)
                await world.hushed()
        assert not hanging.cancelled_caught, "\n".join(["it hangs", *self.story.wrong])
        return judge(self.story)

    async def lives(self) -> None:
        """The first lives, of one runtime or of two that compete."""
        try:
            shares = self.scenario.runtimes > 1
            around = self.world.connected(self.scenario.goodbye) if shares else nullcontext()
            async with around, trio.open_nursery() as nursery:
                for _ in range(self.scenario.runtimes):
                    nursery.start_soon(self.one_life)
        except (LinkGaveUp, LinkRefused, BaseExceptionGroup) as error:
            self.allowed(error, flat=False)

    async def one_life(self) -> None:
        """One runtime until its end; what leaves it, when, and how."""
        scenario, client = self.scenario, self.world.client()
        subscriptions = self.subscriptions(client)
        runtime: Runtime | None = None
        bound = math.inf
        with trio.CancelScope() as scope:
            try:
                async with open_runtime(
                    *subscriptions, grace=scenario.grace, goodbye=scenario.goodbye, observers=[self.story.observer]
                ) as runtime:
                    self.go.set()
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self.publish_the_rest, client)
                        if scenario.end == "natural":
                            await self.until_done(runtime)
                        else:
                            await trio.sleep(scenario.end_at)
                        nursery.cancel_scope.cancel()
                    now = trio.current_time()
                    bound = now + 2 * scenario.goodbye
                    for each in subscriptions:
                        drains = scenario.end in ("natural", "drain")
                        self.story.named(each.name).until = now + (scenario.grace if drains else 0)
                    if scenario.end == "crash":
                        raise Boom
                    if scenario.end == "cancel":
                        scope.cancel()
                        await trio.sleep_forever()
                    bound += scenario.grace
                    if scenario.end == "drain" and scenario.end_at % 2 < 1:
                        runtime.drain()
                        await runtime.finished()
            except (LinkGaveUp, LinkRefused, HandlerFailed, Boom, BaseExceptionGroup) as error:
                self.allowed(error)
            finally:
                self.keep_books(subscriptions, runtime)
        assert trio.current_time() <= bound + 1e-6, f"ended {trio.current_time() - bound:g} s too late"

    def keep_books(self, subscriptions: list[AnySubscription], runtime: Runtime | None) -> None:
        """As they are at the end; a runtime that did not start has empty ones."""
        for each in subscriptions:
            self.story.ledgers[each.name] = Ledger() if runtime is None else runtime.ledger(each.name)

    def allowed(self, error: BaseException, *, flat: bool = True) -> None:
        """Is this what may leave a runtime? Re-raises `Cancelled`."""
        scenario = self.scenario
        found = [leaf for leaf in leaves(error) if not isinstance(leaf, trio.Cancelled)]
        if flat and isinstance(error, BaseExceptionGroup):
            assert not [each for each in error.exceptions if isinstance(each, BaseExceptionGroup)], "not flat"
        kinds = [*[LinkGaveUp] * (not scenario.calm), *[LinkRefused] * (scenario.early and not scenario.calm)]
        kinds += [*[HandlerFailed] * isinstance(scenario.on_error, FailFast), *[Boom] * (scenario.end == "crash")]
        wrong = [each for each in found if not isinstance(each, tuple(kinds))]
        if wrong:
            raise wrong[0]
        if isinstance(error, BaseExceptionGroup) and (rest := error.split(trio.Cancelled)[0]) is not None:
            raise rest

    def in_fair_weather(self, verdict: Verdict) -> None:
        """What is exact where nothing went wrong: a drain gives back, and proves what it has said; uncut nothing is
        said twice.
        """
        scenario, story = self.scenario, self.story
        ledgers = [*story.ledgers.values()]
        if story.exact:
            assert verdict.lost == verdict.vanished == 0
        if scenario.end == "drain" and story.exact:
            for each in story.handed:
                passed_over = each.line is Line.UNSETTLED and not each.calls and each.fate is None
                assert not passed_over or each.returned == "given back", f"not given back by the drain: {each}"
        if scenario.end == "natural" or (scenario.end == "drain" and scenario.goodbye == 5.0):
            assert not [ledger.deliveries for ledger in ledgers if ledger.unknown]
        if scenario.end != "natural" or any(ledger.unsettled for ledger in ledgers):
            return  # cut: something may have been on the wire
        assert (verdict.doubled, verdict.vanished) == (0, 0)
        for ledger in ledgers:
            assert ledger.superseded == 0, ledger.deliveries
            assert ledger.owed == ledger.published, ledger.copies
        if scenario.cap is not None:
            assert max(verdict.calls.values(), default=0) <= scenario.cap, verdict.calls
        for each in story.handed:
            if isinstance(each.notice, CapReached):
                assert verdict.calls[each.name] == scenario.cap, f"the cap was said to be reached: {each}"


def weather(world: type[World], seed: int, scenario: Scenario) -> tuple[Play, Verdict]:
    """Play one, with a schedule that comes again."""

    async def play() -> tuple[Play, Verdict]:
        dice = dice_of(seed)
        it = Play(scenario, world(scenario.options, dice), dice)  # type: ignore[call-arg]
        return it, await it()

    with same_schedule(seed), watched_places(), world.watched():
        return trio.run(play, clock=trio.testing.MockClock(autojump_threshold=0))


def run_seed(world: type[World], seed: int) -> None:
    """Draw it, play it, and judge; its failure says how to repeat it."""
    scenario = draw(dice_of(seed), world)
    try:
        play, verdict = weather(world, seed, scenario)
        if scenario.calm and not isinstance(scenario.on_error, FailFast):
            play.in_fair_weather(verdict)
    except BaseException as error:
        again = f"SETTLEMENT_SEED={seed} tests/run --only {world.mark} -- tests/weather/test_weather_{world.mark}.py"
        error.add_note(f"{scenario}\nagain: {again}")
        raise
