"""Draws a scenario on AMQP from a seed: subscriptions, publishers, handlers of some temper, weather, an end."""

from __future__ import annotations

from random import Random

import attrs

from settlement import Ack, Copies, DeadLetter, Drop, FailFast, Hold, Native, Retry, RetryAfter, Scheduled
from settlement.amqp import Delays
from tests.weather.amqp_weather import FAULTS

__all__ = ["Scenario", "draw"]


@attrs.frozen
class Scenario:
    """One draw; its repr is all there is to know."""

    delays: Delays
    at_most_once: bool
    count: str
    durable: bool
    """Messages have a header section, so that the broker counts from the first delivery on."""
    credit: int | None
    concurrency: int
    size: int
    within: float | None
    cap: int | None
    dead: str
    """`none`, `here`, or `abroad`: over a connection of its own."""
    on_error: object
    decoding: bool
    subscriptions: int
    runtimes: int
    messages: int
    latency: float
    heartbeat: float
    faults: tuple[tuple[float, str], ...]
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


def draw(dice: Random) -> Scenario:
    """A scenario."""
    choice = dice.choice
    calm = dice.random() < 0.15
    span = choice([2.0, 10.0, 60.0])
    faults = () if calm else tuple(sorted((dice.uniform(0, span), choice(FAULTS)) for _ in range(dice.randint(1, 10))))
    dead = choice(["none", "none", "here", "here", "abroad"])
    cap = choice([None, 1, 2, 3, 5])
    answers: list[object] = [None, Retry(), RetryAfter(3.0), Drop(), Ack(), FailFast()]
    if dead != "none":
        answers += [DeadLetter()]
    on_error = choice(answers)
    if on_error is None and cap is None and dead == "none":
        on_error = Retry()
    at_most_once = dice.random() < 0.12
    copies: list[Delays] = [Copies(1), Copies(3), Copies(), Scheduled("x-opt-delivery-delay")]
    others: list[Delays] = [Hold(1), Hold(4, max_delay=3.0), Hold(50), Native(), Native()]
    subscriptions, runtimes = choice([(1, 1), (1, 1), (1, 1), (2, 1), (1, 2)])
    return Scenario(
        delays=choice(copies if at_most_once else copies + others),
        at_most_once=at_most_once,
        count=choice(["broker", "broker", "broker", "copies"]),
        durable=choice([False, True]),
        credit=choice([None, None, 1, 9, 40]),
        concurrency=choice([1, 1, 2, 3, 5]),
        size=choice([0, 0, 0, 1, 3, 7]),
        within=choice([None, None, None, 2.0]),
        cap=cap,
        dead=dead,
        on_error=on_error,
        decoding=choice([False, True]),
        subscriptions=subscriptions,
        runtimes=runtimes,
        messages=dice.randint(8, 25),
        latency=choice([0.0, 0.001, 0.02, 0.3]),
        heartbeat=choice([2.0, 10.0, 30.0]),
        faults=faults,
        temper=choice(["brisk", "slow", "wild", "stubborn"]),
        end=choice(["natural", "natural", "drain", "drain", "cancel", "crash"]),
        end_at=dice.uniform(0, span),
        grace=choice([0.0, 1.0, 15.0]),
        goodbye=choice([1.0, 5.0]),
    )
