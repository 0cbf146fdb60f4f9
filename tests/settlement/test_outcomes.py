"""The four outcomes: plain values, and the only ones."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest

from settlement.outcomes import Ack, Drop, Retry, RetryAfter, is_outcome, seconds
from settlement.policy import DeadLetter, FailFast


@pytest.mark.parametrize("delay", [-1, -0.001, -math.inf, math.inf, math.nan, True, False, "5", None, 10**400])
def test_a_delay_that_is_none_is_refused(delay: Any) -> None:
    """C-1.9: negative or non-finite is a mistake at construction; the message names the argument and its range."""
    with pytest.raises(ValueError, match=r"^RetryAfter\(delay\) must be a finite number of seconds, 0 or more, not "):
        RetryAfter(delay)


@pytest.mark.parametrize(("delay", "kept"), [(0, 0.0), (0.0, 0.0), (3, 3.0), (0.25, 0.25), (1e9, 1e9)])
def test_a_legal_delay_is_kept_in_seconds(delay: float, kept: float) -> None:
    """C-1.9: zero is legal."""
    delay = RetryAfter(delay).delay

    assert (kept, float) == (delay, type(delay))


@pytest.mark.parametrize("value", [0, 0.0, -1, math.nan, math.inf, True, "1"])
def test_seconds_above_zero(value: object) -> None:
    """C-1.9: where zero would mean nothing, the range says so."""
    with pytest.raises(ValueError, match=r"^lease must be a finite number of seconds above 0, not "):
        seconds("lease", value, zero=False)


def test_outcomes_are_values() -> None:
    """C-1.1: two of the same are equal, two of different kinds are not, and none can be changed."""
    assert (Ack(), Retry(), RetryAfter(1), Drop("a")) == (Ack(), Retry(), RetryAfter(1.0), Drop("a"))
    assert len({Ack(), Retry(), RetryAfter(0), RetryAfter(1), Drop(), Drop("a")}) == 6
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        RetryAfter(1).delay = 2  # type: ignore[misc]


def test_a_drop_needs_no_reason() -> None:
    """C-1.4: the reason is for logs; no broker is told."""
    assert Drop().reason == ""


@pytest.mark.parametrize("value", [Ack(), Retry(), RetryAfter(2), Drop("why")])
def test_the_four_are_outcomes(value: object) -> None:
    """C-1.1: exactly these."""
    assert is_outcome(value)


class LooksLikeAck(Ack):
    """A subclass of ours by somebody else."""


@pytest.mark.parametrize("value", [None, True, "ack", Ack, Retry, LooksLikeAck(), DeadLetter(), FailFast(), 5.0])
def test_nothing_else_is(value: object) -> None:
    """C-1.1, C-1.3: a class, a look-alike and a policy's answer are mistakes of a handler (None is the runtime's)."""
    assert not is_outcome(value)
