"""The sweep (tests/weather/sweep.py) on AMQP: on the embedded broker, at the other end of a cable.

The cut is a cancellation from outside; in the second test it is a drain, or something that the network or the broker
does. Afterwards no connection is left at the broker either.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from settlement import Ack, Copies, Drop, Hold, Native, Policy, Retry, RetryAfter, Scheduled
from tests.weather.amqp_world import AmqpOptions, AmqpWorld
from tests.weather.schedule import sized
from tests.weather.sweep import ACTION, CAP, Answer, Case, Sweep, failing, stubborn
from tests.weather.sweep import returning as returning_after

pytestmark = pytest.mark.amqp

returning = partial(returning_after, pause=0.05)


def case(answer: Answer, **given: Any) -> Case:
    """A case; the options of the queue beside the rest."""
    known = AmqpOptions.__annotations__
    options = AmqpOptions(**{name: given.pop(name) for name in [*given] if name in known})
    return Case(answer, options, **given)


CASES = {
    "ack": case(returning(Ack())),
    "ack_one_by_one": case(returning(None), concurrency=1),
    "retry": case(returning(Retry())),
    "retry_as_a_copy": case(returning(Retry()), policy=Policy(max_attempts=3), durable=False),
    "copies": case(returning(RetryAfter(2.0))),
    "scarce_copies": case(returning(RetryAfter(2.0)), delays=Copies(1)),
    "hold": case(returning(RetryAfter(2.0)), delays=Hold(2)),
    "native": case(returning(RetryAfter(2.0)), delays=Native()),
    "scheduled": case(returning(RetryAfter(2.0)), delays=Scheduled("x-opt-delivery-delay")),
    "drop": case(returning(Drop("no use"))),
    "dead_letter": case(failing, policy=CAP),
    "dead_letter_one_by_one": case(failing, policy=CAP, concurrency=1),
    "batch": case(returning(RetryAfter(1.0)), size=3, delays=Copies(2)),
    "at_most_once": case(returning(RetryAfter(1.0)), at_most_once=True),
    "stubborn": case(stubborn),
    "stubborn_over_grace": case(stubborn, until=0.5, grace=0.2),
    "drain": case(returning(Ack(), pause=1.0), until=0.5),
    "drain_with_copies": case(returning(RetryAfter(100.0)), until=0.5, grace=1.0),
    "drain_with_closed_dead_letter": case(failing, policy=CAP, until=0.5, grace=1.0, weather=AmqpWorld.close_dead),
    "publish": case(returning(Ack()), policy=Policy(on_error=Retry()), publishes=True),
}
SWEEP = Sweep(AmqpWorld, CASES, "tests/weather/test_cancel_sweep_amqp.py")
BREAKS = ("cut", "sever", "detach", "end_session", "close_connection", "freeze_out", "freeze_back")
WORDS = ("take_back", "finish")


@pytest.mark.skipif(ACTION not in (None, "cancel"), reason="SETTLEMENT_ACTION asks for another one")
@pytest.mark.parametrize("quarter", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in range(1, 4))])
def test_cancelled_at_every_step(quarter: int, tell: Callable[[str], None]) -> None:
    """A cancellation from outside, whenever it comes, loses nothing, says nothing wrong, and ends in time."""
    SWEEP.cancelled(sized(fast=47, full=27, long=1), quarter, 4, sized(fast=30, full=80, long=1800), tell)


@pytest.mark.skipif(ACTION == "cancel", reason="SETTLEMENT_ACTION asks for another one")
@pytest.mark.parametrize("action", [ACTION] if ACTION else ["drain", *BREAKS, *WORDS])
def test_weather_at_every_step(action: str, tell: Callable[[str], None]) -> None:
    """A drain, a cut, a silence, whatever the broker ends or takes back, whenever it comes, loses nothing either."""
    SWEEP.struck(action, sized(fast=797, full=143, long=3), tell)
