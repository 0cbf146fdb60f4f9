"""actors.restarts, pure: when the next life starts, and when it is enough (DESIGN 4, Weather)."""

import pytest

from actors.restarts import GiveUp, Restart, Restarts, backoff


@pytest.mark.parametrize(
    ("failures", "least", "most"), [(1, 0.05, 0.1), (2, 0.1, 0.2), (5, 0.8, 1.6), (20, 15.0, 30.0)]
)
def test_backoff_doubles_and_is_capped(failures: int, least: float, most: float) -> None:
    """DESIGN 4: backoff doubles, stays below its cap, and the dice spread it over the upper half."""
    assert backoff(failures, 0.0) == pytest.approx(least)
    assert backoff(failures, 1.0) == pytest.approx(most)


def test_backoff_of_very_many_failures_is_finite() -> None:
    """DESIGN 4: an outage that is allowed to last for days does not overflow."""
    assert backoff(10**9, 0.5) == pytest.approx(22.5)


def test_flapping_gives_up_at_the_sixth_break_within_the_period() -> None:
    """DESIGN 4: more than `intensity` (5) lives that had attached broke within `period` (60 s)."""
    history = Restarts(0.0)
    decisions = [history.broke(10.0 * n, had_attached=True, dice=0.5) for n in range(6)]
    assert [type(each) for each in decisions] == [Restart] * 5 + [GiveUp]
    assert isinstance(decisions[-1], GiveUp)
    assert "flapping" in decisions[-1].why


def test_breaks_that_are_far_apart_never_give_up() -> None:
    """DESIGN 4: flapping counts within 60 s only."""
    history = Restarts(0.0)
    for n in range(1000):
        history.attached()
        assert isinstance(history.broke(13.0 * n, had_attached=True, dice=0.5), Restart)


def test_an_outage_gives_up_after_its_patience() -> None:
    """DESIGN 4: attempts that never attach go on for `patience` (600 s), with backoff of at most 30 s."""
    history = Restarts(0.0)
    now, tries = 0.0, 0
    while isinstance(decision := history.broke(now, had_attached=False, dice=0.999), Restart):
        assert decision.delay <= 30.0
        now, tries = now + decision.delay, tries + 1
    assert 600.0 < now <= 630.0
    assert tries > 20
    assert "outage" in decision.why


def test_patience_begins_when_the_last_life_ended() -> None:
    """DESIGN 4: `patience` counts since last attached; a life of a day spends nothing of it."""
    history = Restarts(0.0)
    history.attached()
    assert isinstance(history.broke(86_400.0, had_attached=True, dice=0.5), Restart)
    assert isinstance(history.broke(86_999.0, had_attached=False, dice=0.5), Restart)
    assert isinstance(history.broke(87_001.0, had_attached=False, dice=0.5), GiveUp)


def test_attaching_starts_the_backoff_anew() -> None:
    """DESIGN 4: after a success the first failure waits as the very first."""
    history = Restarts(0.0)
    for n in range(8):
        history.broke(float(n), had_attached=False, dice=0.5)
    history.attached()
    again = history.broke(300.0, had_attached=False, dice=0.5)
    assert isinstance(again, Restart)
    assert again.delay == pytest.approx(backoff(1, 0.5))
