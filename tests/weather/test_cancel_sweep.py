"""The sweep (tests/weather/sweep.py) in memory.

The cut is a cancellation from outside; in the second test it is a drain, a broken link or connection, a lost lease, a
verb that is not applied, or a delivery that is taken back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from links.abc import Settles
from settlement import Ack, Copies, DeadLetter, Drop, Policy, Retry, RetryAfter
from tests.weather.memory_world import MemoryOptions, MemoryWorld
from tests.weather.schedule import sized
from tests.weather.sweep import ACTION, CAP, Answer, Case, Sweep, failing, returning, stubborn
from tests.weather.world import DEAD, ELSEWHERE, QUEUE

pytestmark = pytest.mark.memory


def slow(world: MemoryWorld) -> None:
    world.story.slowest = 0.05
    for name in (QUEUE, DEAD, ELSEWHERE):
        world.main.slow_settlements(name, 0.05)
        world.main.slow_publishes(name, 0.05)
        world.main.slow_extensions(name, 0.2)


def closed(world: MemoryWorld) -> None:
    slow(world)
    world.main.close(DEAD)


def unextended(world: MemoryWorld) -> None:
    slow(world)
    world.main.slow_extensions(QUEUE, math.inf)


def case(answer: Answer, *, brisk: bool = False, **given: Any) -> Case:
    """A case in a slow world, if it is not `brisk`; the options of the queue beside the rest."""
    known = MemoryOptions.__annotations__
    options = MemoryOptions(**{name: given.pop(name) for name in [*given] if name in known})
    given.setdefault("weather", (lambda _: None) if brisk else slow)
    return Case(answer, options, **given)


CASES = {
    "ack": case(returning(Ack()), brisk=True),
    "ack_slowly_settled": case(returning(Ack())),
    "ack_one_by_one": case(returning(None), concurrency=1),
    "retry": case(returning(Retry())),
    "retry_after_native": case(returning(RetryAfter(2.0))),
    "retry_after_copies": case(returning(RetryAfter(2.0)), delays=Copies()),
    "retry_after_scarce_copies": case(returning(RetryAfter(2.0)), delays=Copies(1)),
    "drop": case(returning(Drop("no use"))),
    "raise": case(failing, policy=CAP, brisk=True),
    "dead_letter": case(failing, policy=Policy(dead_letter=DEAD, on_error=DeadLetter())),
    "dead_letter_one_by_one": case(failing, policy=CAP, concurrency=1),
    "batch": case(returning(RetryAfter(1.0)), size=3, delays=Copies(2)),
    "renewal": case(returning(Ack(), pause=3.5), lease=3.0),
    "alone": case(returning(RetryAfter(1.0)), delays=Copies(), settles=Settles.ALONE),
    "alone_dead_letter": case(failing, policy=CAP, settles=Settles.ALONE, lease=6.0),
    "stubborn": case(stubborn),
    "stubborn_over_grace": case(stubborn, until=0.5, grace=0.2),
    "stubborn_failing_over_grace": case(stubborn, policy=CAP, until=0.5, grace=0.2, concurrency=4),
    "stubborn_batch_over_grace": case(stubborn, size=3, until=0.5, grace=0.2, brisk=True),
    "stubborn_without_lease": case(stubborn, lease=1.0, until=1.2, grace=0.2, weather=unextended),
    "drain": case(returning(Ack(), pause=1.0), until=0.5),
    "drain_over_grace": case(returning(Ack(), pause=9.0), until=0.5, grace=1.0, lease=6.0),
    "drain_with_copies": case(returning(RetryAfter(100.0)), delays=Copies(), until=0.5, grace=1.0),
    "drain_with_closed_dead_letter": case(failing, policy=CAP, until=0.5, grace=1.0, weather=closed),
    "publish": case(returning(Ack()), policy=Policy(on_error=Retry()), publishes=True),
}
SWEEP = Sweep(MemoryWorld, CASES, "tests/weather/test_cancel_sweep.py")
FAULTS = ("sever", "sever_connection", "expire", "break_calls", "refuse_settlements", "lose_confirmations", "take_back")


@pytest.mark.skipif(ACTION not in (None, "cancel"), reason="SETTLEMENT_ACTION asks for another one")
def test_cancelled_at_every_step(tell: Callable[[str], None]) -> None:
    """A cancellation from outside, whenever it comes, loses nothing, says nothing wrong, and ends in time."""
    SWEEP.cancelled(sized(fast=9, full=3, long=1), 0, 1, sized(fast=30, full=300, long=300), tell)


@pytest.mark.skipif(ACTION == "cancel", reason="SETTLEMENT_ACTION asks for another one")
@pytest.mark.parametrize("action", [ACTION] if ACTION else ["drain", *FAULTS])
def test_weather_at_every_step(action: str, tell: Callable[[str], None]) -> None:
    """A drain, a break, a lost lease or confirmation, whenever it comes, loses nothing either."""
    SWEEP.struck(action, sized(fast=60, full=11, long=1), tell)
