"""Random weather on `links.memory`, in virtual time: whatever happens, no message is lost and the books balance.

Each seed draws a scenario (tests/weather/scenario.py), plays it with a schedule that comes again, and is judged by the
invariants of tests/weather/story.py. A failure prints the command that repeats it.
"""

from __future__ import annotations

import pytest
import trio
import trio.testing

from settlement import FailFast
from settlement.ledger import Line
from settlement.plans import CapReached
from tests.weather.scenario import Scenario, World, draw, play
from tests.weather.schedule import chosen, dice_of, same_schedule, sized
from tests.weather.story import Verdict, watched_places

pytestmark = pytest.mark.memory

SEEDS = chosen("SETTLEMENT_SEED", range(sized(fast=40, full=600, long=5000)))


@pytest.mark.parametrize("seed", SEEDS)
def test_weather(seed: int) -> None:
    """Nothing is lost, in any weather; in fair weather nothing is said twice either."""
    scenario = draw(dice_of(seed))
    with same_schedule(seed), watched_places():
        try:
            world, verdict = trio.run(play, scenario, seed, clock=trio.testing.MockClock(autojump_threshold=0))
            if scenario.calm:
                in_fair_weather(scenario, world, verdict)
        except BaseException as error:
            error.add_note(
                f"{scenario}\nagain: SETTLEMENT_SEED={seed} tests/run --only memory -- "
                "tests/weather/test_weather_memory.py"
            )
            raise


def in_fair_weather(scenario: Scenario, world: World, verdict: Verdict) -> None:
    """What is exact where nothing went wrong: however it ended, no copy is lost, and uncut nothing is said twice."""
    ledgers = [*world.story.ledgers.values()]
    assert sum(ledger.lost for ledger in ledgers) == verdict.vanished == 0
    if scenario.end == "drain" and not isinstance(scenario.on_error, FailFast):
        for each in world.story.handed:
            passed_over = each.line is Line.UNSETTLED and not each.calls and each.fate is None
            assert not passed_over or each.returned == "given back", f"not given back by the drain: {each}"
    if scenario.end != "natural" or any(ledger.unsettled for ledger in ledgers):
        return  # cut, or failed fast: something may have been on the wire
    assert verdict.doubled == 0
    for ledger in ledgers:
        assert (ledger.superseded, ledger.unknown) == (0, 0), ledger.deliveries
        assert ledger.owed == ledger.published, ledger.copies
    if scenario.cap is not None:
        for each in world.story.handed:
            calls = verdict.calls[each.body]
            assert calls <= scenario.cap, f"{calls} calls under a cap of {scenario.cap}: {each}"
            if isinstance(each.notice, CapReached):
                assert calls == scenario.cap, f"the cap of {scenario.cap} was said to be reached: {each}"
