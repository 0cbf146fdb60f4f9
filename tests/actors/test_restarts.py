"""actors.restarts, pure: when the next life starts, and when it is enough (DESIGN 4, Weather)."""

import pytest

from actors.restarts import Decision, GiveUp, Restart, Restarts, backoff


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


def a_life(history: Restarts, broke: float) -> Decision:
    """One that attached, did one thing, and broke."""
    history.attached()
    history.worked()
    return history.broke(broke, dice=0.5)


def test_flapping_gives_up_at_the_sixth_break_within_the_period() -> None:
    """DESIGN 4: more than `intensity` (5) lives that had attached broke within `period` (60 s)."""
    history = Restarts(0.0)
    decisions = [a_life(history, 10.0 * n) for n in range(6)]
    assert [type(each) for each in decisions] == [Restart] * 5 + [GiveUp]
    assert isinstance(decisions[-1], GiveUp)
    assert "flapping" in decisions[-1].why


def test_breaks_that_are_far_apart_never_give_up() -> None:
    """DESIGN 4: flapping counts within 60 s only."""
    history = Restarts(0.0)
    for n in range(1000):
        assert isinstance(a_life(history, 13.0 * n), Restart)


def test_an_outage_gives_up_after_its_patience() -> None:
    """DESIGN 4: attempts that never attach go on for `patience` (600 s), with backoff of at most 30 s."""
    history = Restarts(0.0)
    now, tries = 0.0, 0
    while isinstance(decision := history.broke(now, dice=0.999), Restart):
        assert decision.delay <= 30.0
        now, tries = now + decision.delay, tries + 1
    assert 600.0 < now <= 630.0
    assert tries > 20
    assert "outage" in decision.why


def test_patience_begins_when_the_last_life_ended() -> None:
    """DESIGN 4: `patience` counts since last attached; a life of a day spends nothing of it."""
    history = Restarts(0.0)
    assert isinstance(a_life(history, 86_400.0), Restart)
    assert isinstance(history.broke(86_999.0, dice=0.5), Restart)
    assert isinstance(history.broke(87_001.0, dice=0.5), GiveUp)


def test_attaching_starts_the_backoff_anew() -> None:
    """DESIGN 4: after a success the first failure waits as the very first."""
    history = Restarts(0.0)
    for n in range(8):
        history.broke(float(n), dice=0.5)
    a_life(history, 200.0)
    again = history.broke(300.0, dice=0.5)
    assert isinstance(again, Restart)
    assert again.delay == pytest.approx(backoff(1, 0.5))


def test_lives_that_attach_and_get_nothing_through_are_an_outage() -> None:
    """DESIGN 4: a life that attached and got no call through counts as outage: its backoff grows, for `patience`."""
    history = Restarts(0.0)
    now, delays = 0.0, list[float]()
    while True:
        history.attached()
        decision = history.broke(now + 2.0, dice=0.999)
        if not isinstance(decision, Restart):
            break
        delays.append(decision.delay)
        now += 2.0 + decision.delay
    assert 600.0 < now + 2.0 <= 635.0
    assert delays[:3] == pytest.approx([0.1, 0.2, 0.4], rel=0.01)
    assert "nothing got through" in decision.why


def test_one_life_says_nothing_of_the_next() -> None:
    """DESIGN 4: what the last life did does not count for one that attaches and does nothing."""
    history = Restarts(0.0)
    for n in range(20):
        history.attached()
        history.broke(n + 0.5, dice=0.5)
    assert isinstance(a_life(history, 31.0), Restart)
    history.attached()
    assert history.broke(33.0, dice=0.0) == Restart(backoff(1, 0.0))
