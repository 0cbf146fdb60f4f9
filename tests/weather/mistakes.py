"""Mistakes that are planted in `actors`, for any transport: the weather must notice each."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio

import actors.in_flight
from actors.before_steps import BeforeSteps
from actors.in_flight import InFlight
from actors.repeater import Repeater
from settlement.ledger import Line
from tests.weather.scenario import draw
from tests.weather.schedule import dice_of
from tests.weather.weather import weather
from tests.weather.world import World

__all__ = ["MISTAKES", "named", "noticed"]

Mistake = Callable[[pytest.MonkeyPatch], None]


def noticed(world: type[World]) -> bool:
    """Does one of the first 200 seeds fail?"""
    for seed in range(200):
        try:
            weather(world, seed, draw(dice_of(seed), world))
        except (AssertionError, ExceptionGroup):
            return True
    return False


def named(*mistakes: Mistake) -> dict[str, Mistake]:
    """By their names."""
    return {each.__name__: each for each in mistakes}


def copy_dropped_when_unknown(patch: pytest.MonkeyPatch) -> None:
    """A copy is owed when its original is known to be gone; where nobody knows it does not go out."""
    owe, ended = InFlight.owe, InFlight.ended
    orders: dict[Any, Any] = {}

    def owing(hand: InFlight, order: Any) -> None:
        orders[order.received] = order

    def ending(hand: InFlight, line: Line, batch: Any) -> None:
        for received in batch:
            order = orders.pop(received, None)
            if order is not None and line is not Line.UNKNOWN:
                owe(hand, order)
        ended(hand, line, batch)

    patch.setattr(InFlight, "owe", owing)
    patch.setattr(InFlight, "ended", ending)


def unknown_called_unsettled(patch: pytest.MonkeyPatch) -> None:
    """What was with the link is said to come back for sure."""
    patch.setattr(actors.in_flight, "Line", SimpleNamespace(UNKNOWN=Line.UNSETTLED, SUPERSEDED=Line.SUPERSEDED))


def dead_letter_skipped(patch: pytest.MonkeyPatch) -> None:
    """A dead letter that does not get through is passed over."""
    published = BeforeSteps._published

    async def publishing(steps: BeforeSteps, step: Any) -> bool:
        with trio.move_on_after(1.0):
            return await published(steps, step)
        return True

    patch.setattr(BeforeSteps, "_published", publishing)


def taken_back_and_acked(patch: pytest.MonkeyPatch) -> None:
    """What the other side took back is booked as if it had been said."""
    lose = InFlight.lose

    def losing(hand: InFlight, line: Line, received: Any) -> bool:
        return lose(hand, Line.ACKED if line is Line.SUPERSEDED else line, received)

    patch.setattr(InFlight, "lose", losing)


def verb_not_repeated(patch: pytest.MonkeyPatch) -> None:
    """Of what was not applied one is forgotten: each third one."""
    add = Repeater.add
    added: list[object] = []

    def adding(repeater: Repeater, order: Any, why: object) -> float:
        wait = add(repeater, order, why)
        added.append(order)
        if len(added) % 3 == 0:
            del repeater._tries[order.received]
        return wait

    patch.setattr(Repeater, "add", adding)


MISTAKES = named(
    copy_dropped_when_unknown,
    unknown_called_unsettled,
    dead_letter_skipped,
    taken_back_and_acked,
    verb_not_repeated,
)
