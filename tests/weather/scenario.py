"""Draws a scenario from a seed: subscriptions, handlers of some temper, weather, an end; for every transport."""

from __future__ import annotations

from random import Random
from typing import Any

import attrs

from settlement import Ack, DeadLetter, Drop, FailFast, Retry, RetryAfter
from tests.weather.world import World

__all__ = ["Scenario", "draw"]


@attrs.frozen
class Scenario:
    """One draw; its repr is all there is to know."""

    options: Any
    """Of the world."""
    concurrency: int
    size: int
    within: float | None
    cap: int | None
    dead: str
    """`none`, `here`, or `abroad`."""
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


def draw(dice: Random, world: type[World]) -> Scenario:
    """A scenario."""
    choice = dice.choice
    calm = dice.random() < 0.2
    span = choice(world.spans)
    many = dice.randint(1, 12)
    faults = () if calm else tuple(sorted((dice.uniform(0, span), choice(world.faults)) for _ in range(many)))
    dead = choice(["none", "none", "here", "here", "abroad"])
    cap = choice([None, 1, 2, 3, 5])
    answers: list[object] = [None, Retry(), RetryAfter(3.0), Drop(), Ack(), FailFast()]
    if dead != "none":
        answers += [DeadLetter()]
    on_error = choice(answers)
    if on_error is None and cap is None and dead == "none":
        on_error = Retry()
    subscriptions, runtimes = choice([(1, 1), (1, 1), (1, 1), (2, 1), (1, 2)])
    return Scenario(
        options=world.draw(dice),
        concurrency=choice([1, 1, 2, 3, 5, 8]),
        size=choice([0, 0, 0, 1, 3, 7]),
        within=choice([None, None, None, 2.0]),
        cap=cap,
        dead=dead,
        on_error=on_error,
        decoding=choice([False, True]),
        subscriptions=subscriptions,
        runtimes=runtimes,
        messages=dice.randint(*world.messages),
        faults=faults,
        early=dice.random() < world.early,
        temper=choice(["brisk", "slow", "wild", "stubborn"]),
        end=choice(["natural", "natural", "drain", "drain", "cancel", "crash"]),
        end_at=dice.uniform(0, span),
        grace=choice([0.0, 1.0, 15.0]),
        goodbye=choice([1.0, 5.0]),
    )
