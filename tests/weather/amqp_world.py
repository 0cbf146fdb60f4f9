"""Plays a scenario on AMQP: a broker, cables to it, runtimes that compete, and a second life that finishes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import attrs
import trio

from actors import BatchSubscription, HandlerFailed, LinkGaveUp, Runtime, Subscription, open_runtime
from actors.subscription import AnySubscription
from links.amqp.broker import AmqpBroker
from links.amqp.embedded import QueuePolicy
from links.amqp.messages import encode
from links.amqp.values import LIST, compound, string
from links.errors import LinkBroken, LinkRefused, NotConnected, PublishNotAccepted
from settlement import Ack, DeadLetter, Delivery, Drop, FailFast, Outcome, Policy, Retry, RetryAfter
from settlement.amqp import AT_LEAST_ONCE, AT_MOST_ONCE
from settlement.delivery import Letter
from settlement.groups import leaves
from settlement.ledger import Ledger
from tests.weather.amqp_fates import AmqpRules, is_sequence
from tests.weather.amqp_scenario import Scenario
from tests.weather.amqp_story import AmqpStory
from tests.weather.amqp_verdict import Verdict, judge
from tests.weather.amqp_watched import WatchedBroker
from tests.weather.amqp_weather import DEAD, QUEUE, Weather
from tests.weather.schedule import dice_of
from tests.weather.story import Consumer

__all__ = ["World", "play"]

ELSEWHERE, GRAVEYARD = "elsewhere", "graveyard"
LONG = 5_000.0
"""Virtual seconds after which a run is said to hang."""


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


class World:
    """A broker, cables to it, the story, and the means to make subscriptions."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.dice = dice_of(seed)
        self.story = AmqpStory(QUEUE, DEAD, at_most_once=scenario.at_most_once)
        self.server = WatchedBroker(self.story, {QUEUE: QueuePolicy(dead_letter=GRAVEYARD)}, idle_timeout=20.0)
        self.weather = Weather(self.server, scenario.latency, self.dice)
        self.names = [
            b"%s%04d" % (b"bad" if scenario.decoding and number % 5 == 3 else b"m", number)
            for number in range(scenario.messages)
        ]
        self.filled = 0
        self.extra = 0
        self.patient = False
        """The second life: handlers finish what is left."""
        self.subscribed = 0

    def broker(self) -> AmqpBroker:
        scenario = self.scenario
        return AmqpBroker(
            "amqp://localhost", connect=self.weather.connect, heartbeat=scenario.heartbeat, durable=scenario.durable
        )

    # --- messages

    def raw(self, name: bytes) -> bytes:
        """As its publisher encodes it, but for those whose body is a sequence."""
        letter = Letter(name, {"message-id": name})
        raw = encode(letter, durable=self.scenario.durable)
        if is_sequence(name):
            data = raw.index(b"\x00\x53\x75")
            return raw[:data] + b"\x00\x53\x76" + compound(LIST, 1, string(name))
        return raw

    def fill(self, count: int) -> None:
        """Put messages into the queue."""
        for name in self.names[self.filled : self.filled + count]:
            self.story.sent[QUEUE][name] = "confirmed"
            self.server.publish(QUEUE, self.raw(name))
            self.filled += 1

    async def publish(self, broker: AmqpBroker, address: str, name: bytes) -> None:
        """As a user does, and remember what came of it."""
        sent = self.story.sent[address]
        sent[name] = "unknown"
        try:
            await broker.publisher(address).publish(name, {"message-id": name})
        except (PublishNotAccepted, NotConnected):
            sent[name] = "refused"
            raise
        sent[name] = "confirmed"

    async def publish_the_rest(self, broker: AmqpBroker) -> None:
        """A publisher of the user's, in the weather."""
        while self.filled < len(self.names):
            name = self.names[self.filled]
            if is_sequence(name):
                self.fill(1)
                continue
            self.filled += 1
            await trio.sleep(self.dice.choice([0.0, 0.0, 0.3, 2.0]))
            self.story.published[broker].append(name)
            with suppress(LinkBroken, PublishNotAccepted, NotConnected):
                await self.publish(broker, QUEUE, name)

    # --- subscriptions

    def policy(self, abroad: AmqpBroker) -> Policy:
        scenario = self.scenario
        dead: Any = {"none": None, "here": DEAD, "abroad": abroad.publisher(DEAD)}[scenario.dead]
        return Policy(
            max_attempts=scenario.cap,
            dead_letter=dead,
            on_error=scenario.on_error,  # type: ignore[arg-type]
            on_undecodable=DeadLetter() if dead else Drop(),
            failures={ZeroDivisionError: Drop()},
        )

    def subscriptions(self, broker: AmqpBroker) -> list[AnySubscription]:
        """Those of one runtime."""
        abroad = self.broker()
        return [self.subscription(broker, abroad) for _ in range(self.scenario.subscriptions)]

    def subscription(self, broker: AmqpBroker, abroad: AmqpBroker) -> AnySubscription:
        """One more, with a name of its own."""
        scenario = self.scenario
        self.subscribed += 1
        name = f"consumer {self.subscribed}"
        source = broker.queue(
            QUEUE,
            delays=scenario.delays,
            settle=AT_MOST_ONCE if scenario.at_most_once else AT_LEAST_ONCE,
            credit=scenario.credit,
            count=scenario.count,
        )
        rules = AmqpRules(
            cap=scenario.cap,
            dead=scenario.dead != "none",
            delays=type(scenario.delays).__name__.lower(),
            at_most_once=scenario.at_most_once,
            counts=scenario.count == "broker",
            on_error=scenario.on_error,
            failures={ZeroDivisionError: Drop()},
            bad=b"bad" if scenario.decoding else None,
            on_undecodable=Drop() if scenario.dead == "none" else DeadLetter(),
            limited=scenario.within is not None,
        )
        consumer = self.story.consumer(name, source, concurrency=scenario.concurrency, size=scenario.size, rules=rules)
        options: dict[str, Any] = {
            "name": name,
            "policy": self.policy(abroad),
            "concurrency": scenario.concurrency,
            "within": scenario.within,
        }
        if scenario.decoding:
            options["decode"] = decode
        if scenario.size:
            many = partial(self.handle_many, consumer, broker)
            return BatchSubscription(source, many, size=scenario.size, wait=0.05, **options)
        return Subscription(source, partial(self.handle_one, consumer, broker), **options)

    async def handle_one(self, consumer: Consumer, broker: AmqpBroker, delivery: Delivery[Any]) -> Outcome | None:
        with self.story.call(consumer, [delivery]) as call:
            outcome: Outcome | None
            outcome = call.result = await self.answer(broker, delivery)
        return outcome

    async def handle_many(self, consumer: Consumer, broker: AmqpBroker, deliveries: list[Delivery[Any]]) -> Any:
        self.story.check(1 <= len(deliveries) <= consumer.size, f"a batch of {len(deliveries)}")
        with self.story.call(consumer, deliveries) as call:
            first = await self.answer(broker, deliveries[0])
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

    async def answer(self, broker: AmqpBroker, delivery: Delivery[Any]) -> Any:
        """What a handler may do."""
        dice, scenario = self.dice, self.scenario
        if self.patient:
            return self.outcome()
        if scenario.decoding:
            self.story.check(delivery.message == Order(delivery.body), f"not decoded: {delivery}")
        pauses: dict[str, list[float | None]] = {
            "brisk": [None, None, 0.0, 0.01],
            "slow": [0.0, 0.1, 1.0, 1.0, 30.0],
            "wild": [None, 0.0, 0.3, 30.0],
            "stubborn": [0.1, 1.0, 30.0],
        }
        pause = dice.choice(pauses[scenario.temper])
        act = dice.random() if scenario.temper == "wild" else 0.0
        if act > 0.96 or scenario.temper == "stubborn":
            with suppress(trio.Cancelled):  # the handler that swallows
                await trio.sleep(pause if scenario.temper == "stubborn" and pause is not None else 30.0)
        elif act > 0.92:
            try:
                await trio.sleep(30.0)
            except trio.Cancelled:
                raise Oops("failed while it was cancelled") from None  # noqa: ASYNC104
        elif act > 0.8:
            self.extra += 1
            await self.publish(broker, ELSEWHERE, b"x%04d" % self.extra)
        elif pause is not None:
            await trio.sleep(pause)
        failing = dice.random()
        if failing < 0.05:
            raise Oops("failed")
        if failing < 0.07:
            return 1 / 0
        if failing < 0.08:
            return "no outcome"
        return self.outcome()

    # --- until the end

    async def storm(self) -> None:
        """The programme, then fair weather."""
        if self.scenario.calm:
            return
        began = trio.current_time()
        for at, name in self.scenario.faults:
            await trio.sleep_until(began + at)
            self.weather.fault(name)
        await trio.sleep(30.0)
        self.weather.calm_down()

    @property
    def is_done(self) -> bool:
        queue = self.server.store.queue(QUEUE)
        return self.filled == len(self.names) and not (len(queue) or queue.delayed or queue.unsettled)

    async def until_done(self, runtime: Runtime) -> None:
        """Nothing is stored, in hand, or waiting."""
        while not self.is_done or any(each.waiting or each.in_hand for each in runtime.statistics().values()):
            await trio.sleep(0.5)

    def keep_books(self, subscriptions: Sequence[AnySubscription], runtime: Runtime | None) -> None:
        """As they are at the end; a runtime that did not start has empty ones."""
        for each in subscriptions:
            self.story.ledgers[each.name] = Ledger() if runtime is None else runtime.ledger(each.name)


async def play(scenario: Scenario, seed: int) -> tuple[World, Verdict]:
    """Play it to its end, let a second life in fair weather finish what is left, and judge."""
    world = World(scenario, seed)
    with trio.move_on_after(LONG) as hanging:
        async with world.server.running(), trio.open_nursery() as world.weather.nursery:
            world.fill(world.dice.randint(0, scenario.messages))
            async with trio.open_nursery() as around:
                around.start_soon(world.storm)
                async with trio.open_nursery() as lives:
                    for _ in range(scenario.runtimes):
                        lives.start_soon(one_life, world)
                around.cancel_scope.cancel()
            world.weather.nursery.cancel_scope.cancel()
        async with world.server.running(), trio.open_nursery() as world.weather.nursery:
            world.weather.calm_down()
            world.fill(scenario.messages)
            world.patient = True
            again = world.subscriptions(world.broker())
            async with open_runtime(*again, observers=[world.story.observer]) as runtime:
                await world.until_done(runtime)
            world.keep_books(again, runtime)
            assert not world.server.peers or all(not peer.consumers for peer in world.server.peers), "a link is left"
            world.weather.nursery.cancel_scope.cancel()
    assert not hanging.cancelled_caught, "\n".join(["it hangs", *world.story.wrong])
    return world, judge(world.story, graveyard=GRAVEYARD)


async def one_life(world: World) -> None:
    """One runtime until its end; what leaves it, when, and how."""
    scenario, broker = world.scenario, world.broker()
    subscriptions = world.subscriptions(broker)
    runtime: Runtime | None = None
    bound = math.inf
    with trio.CancelScope() as scope:
        try:
            async with open_runtime(
                *subscriptions, grace=scenario.grace, goodbye=scenario.goodbye, observers=[world.story.observer]
            ) as runtime:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(world.publish_the_rest, broker)
                    if scenario.end == "natural":
                        await world.until_done(runtime)
                    else:
                        await trio.sleep(scenario.end_at)
                    nursery.cancel_scope.cancel()
                now = trio.current_time()
                bound = now + 2 * scenario.goodbye
                for each in subscriptions:
                    consumer = next(known for known in world.story.consumers if known.name == each.name)
                    consumer.until = now + (scenario.grace if scenario.end in ("natural", "drain") else 0)
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
            allowed(world, error)
        finally:
            world.keep_books(subscriptions, runtime)
    assert trio.current_time() <= bound + 1e-6, f"ended {trio.current_time() - bound:g} s too late"


def allowed(world: World, error: BaseException) -> None:
    """Is this what may leave a runtime? Re-raises `Cancelled`."""
    scenario = world.scenario
    found = [leaf for leaf in leaves(error) if not isinstance(leaf, trio.Cancelled)]
    if isinstance(error, BaseExceptionGroup):
        assert not [each for each in error.exceptions if isinstance(each, BaseExceptionGroup)], "not flat"
    kinds: list[type[BaseException]] = []
    if not scenario.calm:
        kinds += [LinkGaveUp, LinkRefused]
    if isinstance(scenario.on_error, FailFast):
        kinds.append(HandlerFailed)
    if scenario.end == "crash":
        kinds.append(Boom)
    wrong = [each for each in found if not isinstance(each, tuple(kinds))]
    if wrong:
        raise wrong[0]
    if isinstance(error, BaseExceptionGroup) and (rest := error.split(trio.Cancelled)[0]) is not None:
        raise rest
