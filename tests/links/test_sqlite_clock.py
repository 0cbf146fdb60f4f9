"""A clock that is set while rows are held: the wall clock says what is due and free, trio's how long a lease lasts."""

from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from links.errors import LeaseLost
from links.sql import Lease
from links.sql.sqlite import times
from settlement.sql import Delay, PutBack
from tests.links.sqlite_kit import Database, bodies, finish, open_link, say

pytestmark = pytest.mark.sqlite


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the clock by so many seconds."""
    real = times.now

    def set_by(seconds: float) -> None:
        monkeypatch.setattr(times, "now", lambda: real() + round(seconds * 1e6))

    return set_by


@pytest.mark.parametrize("counts", [True, False], ids=["attempt", "no attempt"])
async def test_a_process_never_claims_what_it_holds(
    counts: bool, tmp_path: Path, step: Callable[[float], None]
) -> None:
    """The clock leaps over every lease: the rows behind come, those in hand do not, and settle as ever."""
    database = Database(tmp_path / "q.db", counts=counts).create()
    database.add(*[b"%d" % number for number in range(6)])
    async with open_link(database.broker(0.02).queue(database.table(), claim=Lease(5.0))) as link:
        held = [*await link.receive(3)]
        step(3600)
        assert bodies(await link.receive(2)) == [b"3", b"4"]
        assert bodies(await link.receive(9)) == [b"5"]
        with trio.move_on_after(0.2):
            raise AssertionError(bodies(await link.receive(9)))
        assert await link.extend(held) == []
        assert await link.settle(finish(held)) == [None, None, None]


async def test_what_was_claimed_ahead_is_held_too(tmp_path: Path, step: Callable[[float], None]) -> None:
    """Each row is handed over once."""
    database = Database(tmp_path / "q.db").create()
    database.add(*[b"%d" % number for number in range(6)])
    async with open_link(database.broker().queue(database.table(), claim=Lease(5.0))) as link:
        first = await link.receive(2)
        assert await link.settle(finish(first)) == [None, None]
        step(3600)
        seen = [*bodies(await link.receive(2)), *bodies(await link.receive(2))]
        assert seen == [b"2", b"3", b"4", b"5"]


async def test_another_process_takes_what_has_lapsed_by_its_clock(
    tmp_path: Path, step: Callable[[float], None]
) -> None:
    """A step forward ends the leases of others: two handlers at once, and the first is told."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a")
    queues = [database.broker(0.02).queue(database.table(), claim=Lease(5.0)) for _ in range(2)]
    async with open_link(queues[0]) as one, open_link(queues[1]) as other:
        first = await one.receive(1)
        step(3600)
        with trio.fail_after(5):
            second = await other.receive(1)
        (verdict,) = await one.settle(finish(first))
        assert isinstance(verdict, LeaseLost)
        assert await other.settle(finish(second)) == [None]


async def test_a_step_back_delays_and_loses_nothing(tmp_path: Path, step: Callable[[float], None]) -> None:
    """What is held is extended and settled, what was put back is free at once, what was delayed comes later."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a", b"b", b"c")
    async with open_link(database.broker(0.02).queue(database.table(), claim=Lease(5.0))) as link:
        one, two, three = await link.receive(3)
        assert await link.settle([say(two, Delay(0.01, count=False))]) == [None]
        step(-3600)
        assert await link.extend([one, three]) == []
        assert await link.settle([say(one, PutBack(count=False)), *finish([three])]) == [None, None]
        (again,) = await link.receive(3)
        assert (again.delivery.body, again.delivery.attempt) == (b"a", 2)
        with trio.move_on_after(0.2):
            raise AssertionError(bodies(await link.receive(3)))
        step(0)
        with trio.fail_after(5):
            assert bodies(await link.receive(3)) == [b"b"]


async def test_a_lease_that_lapsed_while_the_loop_was_blocked_is_still_ours(tmp_path: Path) -> None:
    """DESIGN 3.4: neither this process's claim takes it before its verb is said, nor is the verb refused."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a")
    async with open_link(database.broker(0.02).queue(database.table(), claim=Lease(0.1))) as link:
        held = await link.receive(1)
        with trio.move_on_after(0.4):
            raise AssertionError(bodies(await link.receive(1)))
        assert await link.extend(held) == []
        with trio.move_on_after(0.4):
            raise AssertionError(bodies(await link.receive(1)))
        assert await link.settle(finish(held)) == [None]
    assert database.rows() == []
