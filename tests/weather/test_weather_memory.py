"""Random weather on `links.memory`, in virtual time: whatever happens, no message is lost and the books balance.

Each seed draws a scenario, plays it (tests/weather/weather.py) and is judged by the invariants of
tests/weather/story.py. A failure prints the command that repeats it.
"""

from __future__ import annotations

import pytest

from tests.weather.memory_world import MemoryWorld
from tests.weather.mistakes import MISTAKES, noticed
from tests.weather.schedule import chosen, sized
from tests.weather.weather import run_seed

pytestmark = pytest.mark.memory

SEEDS = chosen("SETTLEMENT_SEED", range(sized(fast=40, full=300, long=5000)))


@pytest.mark.parametrize("seed", SEEDS)
def test_weather(seed: int) -> None:
    """Nothing is lost, in any weather; in fair weather nothing is said twice either."""
    run_seed(MemoryWorld, seed)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests can fail."""
    MISTAKES[mistake](monkeypatch)
    assert noticed(MemoryWorld), "nobody noticed"
