"""actors.supervisor: what is weather, what is a bug, what is counted (DESIGN 0.5 and 4)."""

import logging
from collections.abc import Awaitable, Callable

import pytest
import trio

from actors import LinkGaveUp
from actors.events import Attached, Broke, Event, Tell
from actors.supervisor import Supervisor
from links.errors import ConnectionBroken, LinkBroken, LinkError, LinkRefused, NotConnected
from tests.actors.scenery import Clock


class Stage:
    """Supervises lives that end as the test says."""

    def __init__(self, *endings: BaseException | None, attaches: bool = True, link: bool = True) -> None:
        self.endings = list(endings)
        self.attaches = attaches
        self.link = link
        self.lives: list[float] = []
        self.events: list[Event] = []
        self.waits: list[float] = []
        """What `reconnected` takes, time after time; then nothing."""
        self.supervisor = Supervisor("it", Tell((self.events.append,)))

    async def life(self, attached: Callable[[], None], worked: Callable[[], None]) -> None:
        self.lives.append(trio.current_time())
        await trio.lowlevel.checkpoint()
        if self.attaches:
            attached()
            worked()
            assert self.supervisor.attached
        ending = self.endings.pop(0) if self.endings else None
        if ending is not None:
            raise ending

    async def reconnected(self) -> None:
        await trio.sleep(self.waits.pop(0) if self.waits else 0.0)

    async def run(self, pause: Callable[[float], Awaitable[bool]] | None = None) -> None:
        async def failed(_: LinkError) -> None:
            await trio.lowlevel.checkpoint()

        async def paused(delay: float) -> bool:
            await trio.sleep(delay)
            return True

        try:
            await self.supervisor.run(
                self.life,
                failed=failed,
                pause=pause or paused,
                reconnected=self.reconnected if self.link else None,
            )
        finally:
            assert not self.supervisor.attached


@pytest.mark.parametrize("weather", [LinkBroken("x"), ConnectionBroken("x"), LinkRefused("x")])
@pytest.mark.parametrize("wrapped", [False, True])
async def test_weather_starts_the_next_life(weather: LinkError, wrapped: bool, autojump_clock: Clock) -> None:
    """DESIGN 0.5: a supervisor starts the next life after bad weather, also out of nested groups."""
    ending = ExceptionGroup("", [ExceptionGroup("", [weather])]) if wrapped else weather
    stage = Stage(ending)
    await stage.run()
    assert len(stage.lives) == 2
    assert stage.supervisor.restarts == 1
    broke = [event for event in stage.events if isinstance(event, Broke)]
    assert [event.error for event in broke] == [weather]
    assert len([event for event in stage.events if isinstance(event, Attached)]) == 2


async def test_a_bug_propagates(autojump_clock: Clock) -> None:
    """DESIGN 4: anything else is a bug and propagates."""
    for bug in (ZeroDivisionError(), NotConnected("x"), AssertionError()):
        stage = Stage(bug)
        with pytest.raises(type(bug)) as caught:
            await stage.run()
        assert caught.value is bug
        assert len(stage.lives) == 1


async def test_a_bug_beside_weather_is_what_propagates(autojump_clock: Clock) -> None:
    """DESIGN 4, trap: a supervisor re-raises the *rest* of a group, never the whole."""
    stage = Stage(ExceptionGroup("", [LinkBroken("x"), ExceptionGroup("", [ZeroDivisionError(), LinkBroken("y")])]))
    with pytest.raises(ExceptionGroup) as caught:
        await stage.run()
    assert caught.value.split(ZeroDivisionError)[1] is None
    assert len(stage.lives) == 1


async def test_cancelled_beside_weather_is_never_swallowed(autojump_clock: Clock) -> None:
    """DESIGN 4, trap: a supervisor never swallows `Cancelled`: a cancel that comes with a break ends it."""
    stage = Stage()
    scope = trio.CancelScope()

    async def life(attached: Callable[[], None], worked: Callable[[], None]) -> None:
        stage.lives.append(0.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            await trio.lowlevel.checkpoint()
            scope.cancel()
            raise LinkBroken

    stage.life = life  # type: ignore[method-assign]
    with scope:
        await stage.run()
        pytest.fail("went on")
    assert scope.cancelled_caught
    assert len(stage.lives) == 1


async def test_flapping_gives_up_from_the_last_break(autojump_clock: Clock) -> None:
    """DESIGN 4: the sixth break within 60 s of lives that had attached is `LinkGaveUp` from that break."""
    endings = [LinkBroken(str(number)) for number in range(99)]
    stage = Stage(*endings)
    with pytest.raises(LinkGaveUp, match="flapping") as caught:
        await stage.run()
    assert len(stage.lives) == 6
    assert caught.value.__cause__ is endings[5]
    assert caught.value.name == "it"


async def test_an_outage_gives_up_from_the_last_break(autojump_clock: Clock) -> None:
    """DESIGN 4: attempts that never attach go on for 600 s; a refusal after start-up is weather within that bound."""
    stage = Stage(*[LinkRefused("no")] * 10**4, attaches=False)
    with pytest.raises(LinkGaveUp, match="outage") as caught:
        await stage.run()
    assert isinstance(caught.value.__cause__, LinkRefused)
    assert 600.0 < trio.current_time() < 631.0


async def test_a_link_does_not_count_its_connections_breaks(autojump_clock: Clock) -> None:
    """DESIGN 4: the link's supervisor does not count `ConnectionBroken` and waits for the connection's next life."""
    stage = Stage(*[ConnectionBroken("x")] * 100)
    await stage.run()
    assert len(stage.lives) == 101
    assert all(event.delay is None for event in stage.events if isinstance(event, Broke))


async def test_a_connection_counts_them(autojump_clock: Clock) -> None:
    """DESIGN 4: only the connection's supervisor counts `ConnectionBroken` and gives up."""
    stage = Stage(*[ConnectionBroken("x")] * 100, link=False)
    with pytest.raises(LinkGaveUp, match="flapping"):
        await stage.run()
    assert len(stage.lives) == 6


async def test_waiting_for_the_connection_spends_no_patience(autojump_clock: Clock) -> None:
    """DESIGN 4: `patience` is for attempts; while there is no connection a link cannot attempt anything."""
    stage = Stage(ConnectionBroken("x"), LinkBroken("once"), LinkBroken("twice"), attaches=False)
    stage.waits = [599.0, 599.0, 599.0, 0.0]
    await stage.run()
    assert len(stage.lives) == 4


async def test_a_long_life_that_ends_with_its_connection_spends_no_patience(autojump_clock: Clock) -> None:
    """DESIGN 4: `patience` counts since last attached, also where the break itself was not counted."""
    stage = Stage()
    turn = 0

    async def life(attached: Callable[[], None], worked: Callable[[], None]) -> None:
        nonlocal turn
        turn += 1
        if turn == 1:
            attached()
            await trio.sleep(86_400.0)
            raise ConnectionBroken
        if turn == 2:
            raise LinkBroken

    stage.life = life  # type: ignore[method-assign]
    await stage.run()
    assert turn == 3


async def test_pause_may_end_it(autojump_clock: Clock) -> None:
    """DESIGN 4: during a drain no further life follows: `pause` says so, and the supervisor returns."""
    stage = Stage(LinkBroken("x"))

    async def pause(_: float) -> bool:
        await trio.lowlevel.checkpoint()
        return False

    await stage.run(pause)
    assert len(stage.lives) == 1


async def test_each_break_is_logged(autojump_clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """DESIGN 4, OQ-8: never silent: a warning for each break, an error where they refused."""
    await Stage(LinkBroken("a"), LinkRefused("b"), ConnectionBroken("c")).run()
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR, logging.WARNING]
    assert all(record.getMessage().startswith("it: ") for record in caplog.records)
