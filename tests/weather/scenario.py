"""Draws a scenario from a seed: subscriptions of some shape, handlers of some temper, weather, an end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from random import Random
from typing import Any

import attrs
import trio

from actors import BatchSubscription, HandlerFailed, LinkGaveUp, Runtime, Subscription, connected, open_runtime
from actors.subscription import AnySubscription
from links.abc import Settles
from links.errors import LinkRefused
from links.memory import MemoryBroker
from settlement import (
    Ack,
    Copies,
    DeadLetter,
    Delivery,
    Drop,
    FailFast,
    Ledger,
    Native,
    Outcome,
    Policy,
    Retry,
    RetryAfter,
)
from settlement.groups import leaves
from tests.weather.fates import Rules
from tests.weather.schedule import dice_of
from tests.weather.story import Consumer, Story, Verdict, judge

__all__ = ["DEAD", "ELSEWHERE", "QUEUE", "Oops", "Scenario", "World", "draw", "play"]

QUEUE, DEAD, ELSEWHERE = "orders", "orders.dead", "elsewhere"
LONG = 50_000.0
"""Virtual seconds after which a run is said to hang."""


class Oops(Exception):
    """What a handler raises."""


class Boom(Exception):
    """What a block raises."""


@attrs.frozen
class Scenario:
    """One draw; its repr is all there is to know."""

    lease: float | None
    settles: Settles
    delays: Native | Copies
    limit: int | None
    concurrency: int
    size: int
    within: float | None
    cap: int | None
    dead: str
    """`none`, `here`, or `abroad`: on another broker."""
    on_error: object
    decoding: bool
    subscriptions: int
    runtimes: int
    messages: int
    faults: tuple[tuple[float, str], ...]
    early: bool
    """The weather begins before the start-up is complete."""
    temper: str
    """Of the handlers: `brisk`, `slow`, `wild`, or `stubborn`, who answer although they were cancelled."""
    end: str
    """`natural`, `drain`, `cancel`, or `crash`."""
    end_at: float
    grace: float
    goodbye: float

    @property
    def calm(self) -> bool:
        """No weather at all."""
        return not self.faults


FAULTS = (
    *("sever", "sever", "sever_connection", "expire", "expire", "break_calls", "break_calls", "many_broken_calls"),
    *("lose_confirmations", "lose_dead_confirmations", "refuse_settlements", *["close_dead"] * 4, "close"),
    *("refuse", "break_attaches", "refuse_connection", "break_connects", "slow_settlements", "slow_settlements"),
    *("hanging_settlements", "slow_extensions", "hanging_extensions", "slow_publishes", "slow_dead_publishes"),
    *("sever_delivery", "sever_delivery", "sever_abroad", "hanging_dead_publishes", "stuck", "stuck"),
)


def draw(dice: Random) -> Scenario:
    """A scenario."""
    choice = dice.choice
    calm = dice.random() < 0.2
    span = choice([5.0, 30.0, 120.0])
    faults = () if calm else tuple(sorted((dice.uniform(0, span), choice(FAULTS)) for _ in range(dice.randint(1, 12))))
    dead = choice(["none", "none", "here", "here", "abroad"])
    cap = choice([None, 1, 2, 3, 5])
    answers: list[object] = [None, Retry(), RetryAfter(3.0), Drop(), Ack(), FailFast()]
    if dead != "none":
        answers += [DeadLetter()]
    on_error = choice(answers)
    if on_error is None and cap is None and dead == "none":
        on_error = Retry()
    subscriptions, runtimes = choice([(1, 1), (1, 1), (1, 1), (2, 1), (1, 2)])
    size = choice([0, 0, 0, 1, 3, 7])
    delays: list[Native | Copies] = [Native(), Native(), Copies(1), Copies(3), Copies(50), Copies()]
    settles = choice([Settles.TOGETHER, Settles.TOGETHER, Settles.ALONE])
    return Scenario(
        lease=choice([None, None, 1.0, 6.0, 30.0]),
        settles=settles,
        delays=choice(delays),
        limit=choice([None, None, 1, 9, 40]),
        concurrency=choice([1, 1, 2, 3, 5, 8]),
        size=size,
        within=choice([None, None, None, 2.0]),
        cap=cap,
        dead=dead,
        on_error=on_error,
        decoding=choice([False, True]),
        subscriptions=subscriptions,
        runtimes=runtimes,
        messages=dice.randint(30, 80),
        faults=faults,
        early=dice.random() < 0.1,
        temper=choice(["brisk", "slow", "wild", "stubborn"]),
        end=choice(["natural", "natural", "drain", "drain", "cancel", "crash"]),
        end_at=dice.uniform(0, span),
        grace=choice([0.0, 1.0, 15.0]),
        goodbye=choice([1.0, 5.0]),
    )


@attrs.frozen
class Order:
    """What `decode` makes of a body."""

    body: bytes


def decode(body: bytes) -> Order:
    if body.startswith(b"bad"):
        raise ValueError("no order")
    return Order(body)


class World:
    """Brokers, the story, and the means to make subscriptions on them."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.dice = dice_of(seed)
        self.main = MemoryBroker("main", dice=dice_of(seed))
        self.abroad = MemoryBroker("abroad", dice=dice_of(seed))
        self.story = Story(self.main, self.abroad)
        self.dead = (self.abroad if scenario.dead == "abroad" else self.main, DEAD)
        self.originals = [
            b"%s%d" % (b"bad" if scenario.decoding and number % 13 == 7 else b"", number)
            for number in range(scenario.messages)
        ]
        self.unconfirmed = 0
        self.hanging = False
        self.filled = 0
        self.patient = False
        """The second life: handlers finish what is left."""
        self.names = 0

    # --- subscriptions

    def policy(self) -> Policy:
        scenario = self.scenario
        dead: Any = {"none": None, "here": DEAD, "abroad": self.abroad.publisher(DEAD)}[scenario.dead]
        return Policy(
            max_attempts=scenario.cap,
            dead_letter=dead,
            on_error=scenario.on_error,  # type: ignore[arg-type]
            on_undecodable=DeadLetter() if dead else Drop(),
            failures={ZeroDivisionError: Drop()},
        )

    def subscription(self) -> AnySubscription:
        """One more, with a name of its own."""
        scenario = self.scenario
        self.names += 1
        name = f"consumer {self.names}"
        queue = self.main.queue(
            QUEUE, delays=scenario.delays, lease=scenario.lease, limit=scenario.limit, settles=scenario.settles
        )
        rules = Rules(
            cap=scenario.cap,
            dead=scenario.dead != "none",
            copies=isinstance(scenario.delays, Copies),
            on_error=scenario.on_error,
            failures={ZeroDivisionError: Drop()},
            bad=b"bad" if scenario.decoding else None,
            on_undecodable=Drop() if scenario.dead == "none" else DeadLetter(),
            limited=scenario.within is not None,
        )
        consumer = self.story.consumer(name, queue, concurrency=scenario.concurrency, size=scenario.size, rules=rules)
        options: dict[str, Any] = {
            "name": name,
            "policy": self.policy(),
            "concurrency": scenario.concurrency,
            "within": scenario.within,
        }
        if scenario.decoding:
            options["decode"] = decode
        if scenario.size:
            many = partial(self.handle_many, consumer)
            return BatchSubscription(queue, many, size=scenario.size, wait=0.05, **options)
        return Subscription(queue, partial(self.handle_one, consumer), **options)

    async def handle_one(self, consumer: Consumer, delivery: Delivery[Any]) -> Outcome | None:
        with self.story.call(consumer, [delivery]) as call:
            outcome: Outcome | None
            outcome = call.result = await self.answer(delivery)
        return outcome

    async def handle_many(self, consumer: Consumer, deliveries: list[Delivery[Any]]) -> Any:
        if not 1 <= len(deliveries) <= consumer.size:
            self.story.wrong.append(f"a batch of {len(deliveries)}, not of 1 to {consumer.size}")
        with self.story.call(consumer, deliveries) as call:
            call.result = await self.answer_many(deliveries)
        return call.result

    async def answer_many(self, deliveries: list[Delivery[Any]]) -> Any:
        first = await self.answer(deliveries[0])
        match self.dice.randrange(4):
            case 0:
                return first
            case 1:
                return [first] * max(0, len(deliveries) - self.dice.randrange(2))
            case _:
                return [first, *[self.outcome() for _ in deliveries[1:]]]

    def outcome(self) -> Outcome | None:
        """A random one."""
        if self.patient and self.dice.random() < 0.9:
            return Ack()
        delay = self.dice.choice([0.0, 0.5, 5.0, 100.0])
        outcomes: list[Outcome | None] = [
            Ack(),
            Ack(),
            Ack(),
            None,
            Retry(),
            RetryAfter(delay),
            RetryAfter(delay),
            Drop(),
        ]
        return self.dice.choice(outcomes)

    async def answer(self, delivery: Delivery[Any]) -> Any:
        """What a handler may do."""
        dice, scenario = self.dice, self.scenario
        if self.patient:
            return self.outcome()
        if scenario.decoding and delivery.message != Order(delivery.body):
            self.story.wrong.append(f"not decoded: {delivery}")
        longest = 60.0 if scenario.lease is None else 2.5 * scenario.lease
        pauses: dict[str, list[float | None]] = {
            "brisk": [None, None, 0.0, 0.01],
            "slow": [0.0, 0.1, 1.0, 1.0, longest],
            "wild": [None, 0.0, 0.3, longest],
            "stubborn": [0.1, 1.0, longest],
        }
        pause = dice.choice(pauses[scenario.temper])
        act = dice.random() if scenario.temper == "wild" else dice.random() * 0.8
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
        elif act > 0.88:
            await self.main.publisher(ELSEWHERE).publish(delivery.body)
        elif act > 0.86:
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

    # --- weather

    def fault(self, name: str) -> None:
        """Let it happen."""
        main, dice = self.main, self.dice
        dead_broker, dead = self.dead
        match name:
            case "sever":
                self.story.stolen = True
                main.sever(QUEUE)
            case "sever_connection":
                self.story.stolen = True
                main.sever_connection()
            case "expire":
                self.story.stolen = True
                main.expire(QUEUE)
            case "break_calls":
                main.break_calls(QUEUE, dice.randint(1, 3))
            case "many_broken_calls":
                main.break_calls(QUEUE, 7)
            case "lose_confirmations":
                number = dice.randint(1, 4)
                self.unconfirmed += number
                main.lose_confirmations(QUEUE, number)
            case "lose_dead_confirmations":
                number = dice.randint(1, 4)
                self.unconfirmed += number
                dead_broker.lose_confirmations(dead, number)
            case "refuse_settlements":
                main.refuse_settlements(QUEUE, dice.randint(1, 5))
            case "close_dead":
                (dead_broker.close if dice.random() < 0.7 else dead_broker.reopen)(dead)
            case "close":
                (main.close if dice.random() < 0.5 else main.reopen)(QUEUE)
            case "refuse":
                self.story.stolen = True
                (main.refuse if dice.random() < 0.5 else main.admit)(QUEUE)
                main.sever(QUEUE)
            case "break_attaches":
                main.break_attaches(QUEUE, dice.randint(1, 3))
            case "refuse_connection":
                self.story.stolen = True
                (main.refuse_connection if dice.random() < 0.5 else main.admit_connection)()
                main.sever_connection()
            case "break_connects":
                main.break_connects(dice.randint(1, 3))
            case "slow_settlements":
                main.slow_settlements(QUEUE, dice.choice([0.0, 0.1, 2.0, 10.0]))
            case "hanging_settlements":
                self.hanging = True
                main.slow_settlements(QUEUE, math.inf)
            case "slow_extensions":
                main.slow_extensions(QUEUE, dice.choice([0.0, 0.1, 1.0]))
            case "hanging_extensions":
                main.slow_extensions(QUEUE, math.inf)
            case "stuck":  # what waits behind a settlement loses its lease there
                main.slow_settlements(QUEUE, 10.0)
                main.slow_extensions(QUEUE, math.inf)
            case "slow_publishes":
                main.slow_publishes(QUEUE, dice.choice([0.0, 0.2, 3.0]))
            case "slow_dead_publishes":
                dead_broker.slow_publishes(dead, dice.choice([0.0, 0.2, 3.0]))
            case "hanging_dead_publishes":
                self.hanging = True
                dead_broker.slow_publishes(dead, math.inf)
            case "sever_delivery":
                self.story.stolen = True
                for each in main.held(QUEUE)[:2]:
                    main.sever_delivery(QUEUE, each)
            case "sever_abroad":
                self.abroad.sever_connection()
            case _:
                raise ValueError(name)

    def calm_down(self) -> None:
        """From now on all is well."""
        for broker, name in ((self.main, QUEUE), (self.main, ELSEWHERE), self.dead):
            weather = broker.store(name).weather
            self.unconfirmed -= weather.lost_confirmations
            weather.broken_calls = weather.broken_attaches = weather.refused_settlements = 0
            weather.lost_confirmations = 0
            broker.slow_settlements(name, 0)
            broker.slow_extensions(name, 0)
            broker.slow_publishes(name, 0)
            broker.reopen(name)
            broker.admit(name)
            broker.store(name).wake()
        self.main.admit_connection()
        self.main.break_connects(-self.main._broken_connects)
        if self.scenario.lease is None:  # what a verdict left unsettled comes back with the end of its link
            self.story.stolen = True
            self.main.sever(QUEUE)
        if self.hanging:  # what hangs now would hang for ever
            self.story.stolen = True
            self.main.sever_connection()
            self.abroad.sever_connection()

    async def storm(self, go: trio.Event) -> None:
        """The programme, then fair weather."""
        if self.scenario.calm:
            return
        await go.wait()
        began = trio.current_time()
        for at, name in self.scenario.faults:
            await trio.sleep_until(began + at)
            self.fault(name)
        await trio.sleep(30.0)
        self.calm_down()

    # --- the end

    def keep_books(self, subscriptions: Sequence[AnySubscription], runtime: Runtime | None) -> None:
        """As they are at the end; a runtime that did not start has empty ones."""
        for each in subscriptions:
            self.story.ledgers[each.name] = Ledger() if runtime is None else runtime.ledger(each.name)

    async def until_done(self, *runtimes: Runtime) -> None:
        """Nothing is stored, in hand, or waiting."""
        while True:
            await self.main.until_empty(QUEUE)
            if not any(each.waiting for runtime in runtimes for each in runtime.statistics().values()):
                return
            await trio.sleep(1.0)

    async def publish_later(self) -> None:
        """The rest of the messages, in portions."""
        while self.filled < len(self.originals):
            await trio.sleep(self.dice.choice([0.0, 0.5, 4.0]))
            self.fill(self.dice.randint(1, 30))

    def fill(self, count: int) -> None:
        self.main.fill(QUEUE, self.originals[self.filled : self.filled + count])
        self.filled = min(self.filled + count, len(self.originals))


async def play(scenario: Scenario, seed: int) -> tuple[World, Verdict]:
    """Play it to its end, let a second life in fair weather finish what is left, and judge."""
    world = World(scenario, seed)
    world.fill(world.dice.randint(1, scenario.messages))
    with trio.move_on_after(LONG) as hanging:
        await lives(world)
        world.calm_down()
        world.fill(scenario.messages)
        world.patient = True
        again = [world.subscription() for _ in range(scenario.subscriptions)]
        async with open_runtime(*again, observers=[world.story.observer]) as runtime:
            await world.until_done(runtime)
        world.keep_books(again, runtime)
    assert not hanging.cancelled_caught, "it hangs"
    assert world.main.store(QUEUE).is_empty, "the second life did not finish"
    return world, judge(
        world.story, QUEUE, world.dead, world.originals, cap=scenario.cap, unconfirmed=world.unconfirmed
    )


async def lives(world: World) -> None:
    """The first lives, of one runtime or of two that compete."""
    scenario = world.scenario
    go = trio.Event()
    if scenario.early:
        go.set()
    async with trio.open_nursery() as around:
        around.start_soon(world.publish_later)
        around.start_soon(world.storm, go)
        try:
            async with AsyncExitStack() as shared:
                if scenario.runtimes > 1:
                    await shared.enter_async_context(connected(world.main, goodbye=scenario.goodbye))
                    if scenario.dead == "abroad":
                        await shared.enter_async_context(connected(world.abroad, goodbye=scenario.goodbye))
                async with trio.open_nursery() as nursery:
                    for _ in range(scenario.runtimes):
                        nursery.start_soon(one_life, world, go)
        except (LinkGaveUp, LinkRefused, BaseExceptionGroup) as error:
            allowed(world, error, "connected")
        around.cancel_scope.cancel()


async def one_life(world: World, go: trio.Event) -> None:
    """One runtime until its end; what leaves it, when, and how."""
    scenario = world.scenario
    subscriptions = [world.subscription() for _ in range(scenario.subscriptions)]
    runtime: Runtime | None = None
    bound = math.inf
    with trio.CancelScope() as scope:
        try:
            async with open_runtime(
                *subscriptions, grace=scenario.grace, goodbye=scenario.goodbye, observers=[world.story.observer]
            ) as runtime:
                go.set()
                if scenario.end == "natural":
                    await world.until_done(runtime)
                else:
                    await trio.sleep(scenario.end_at)
                now = trio.current_time()
                bound = now + 2 * scenario.goodbye
                for each in subscriptions:
                    drains = scenario.end in ("natural", "drain")
                    world.story.named(each.name).until = now + (scenario.grace if drains else 0)
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
            allowed(world, error, scenario.end)
        finally:
            world.keep_books(subscriptions, runtime)
    assert trio.current_time() <= bound + 1e-6, f"ended {trio.current_time() - bound:g} s too late"


def allowed(world: World, error: BaseException, end: str) -> None:
    """Is this what may leave a runtime? Re-raises `Cancelled`."""
    scenario = world.scenario
    found = [leaf for leaf in leaves(error) if not isinstance(leaf, trio.Cancelled)]
    if isinstance(error, BaseExceptionGroup) and end != "connected":
        assert not [each for each in error.exceptions if isinstance(each, BaseExceptionGroup)], "not flat"
    kinds: list[type[BaseException]] = []
    if not scenario.calm:
        kinds.append(LinkGaveUp)
    if scenario.early:
        kinds.append(LinkRefused)
    if isinstance(scenario.on_error, FailFast):
        kinds.append(HandlerFailed)
    if end == "crash":
        kinds.append(Boom)
    wrong = [each for each in found if not isinstance(each, tuple(kinds))]
    if wrong:
        raise wrong[0]
    if isinstance(error, BaseExceptionGroup) and (rest := error.split(trio.Cancelled)[0]) is not None:
        raise rest
