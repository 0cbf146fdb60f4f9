"""actors.backlog: the seam between a link and its workers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import trio
import trio.testing

from actors.backlog import Backlog
from links.abc import Received
from settlement import Delivery


def some(count: int) -> list[Received[bytes]]:
    return [
        Received(
            Delivery(
                body=b"", message=b"", headers={}, attempt=1, redelivery_count=0, source="q", id=str(number), key=None
            )
        )
        for number in range(count)
    ]


async def work(backlog: Backlog, name: int, taken: list[tuple[int, str]], *, pause: bool) -> None:
    while (received := backlog.take() or await backlog.until_ready()) is not None:
        taken.append((name, received.delivery.id))
        if pause:
            await trio.sleep(1.0)


@pytest.mark.parametrize("spreads", [False, True])
@pytest.mark.parametrize("pause", [False, True])
async def test_everything_is_taken_once_in_order(
    spreads: bool, pause: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """Arrival order, by however many workers; all of them work where handlers wait."""
    backlog, taken = Backlog(spreads=spreads), list[tuple[int, str]]()
    with trio.fail_after(1000.0):
        async with trio.open_nursery() as nursery:
            for name in range(8):
                nursery.start_soon(partial(work, backlog, name, taken, pause=pause))
            await trio.testing.wait_all_tasks_blocked()
            for size in (1, 40, 3, 0, 17):
                backlog.put(some(size))
                await trio.sleep(20.0)
            backlog.close()
    ids = [each for size in (1, 40, 3, 0, 17) for each in map(str, range(size))]
    if pause:
        assert sorted(each for _, each in taken) == sorted(ids)
        assert len({name for name, _ in taken}) == 8
        assert trio.current_time() == 100.0
    else:
        assert [each for _, each in taken] == ids


async def test_one_worker_wakes_the_next(autojump_clock: trio.testing.MockClock) -> None:
    """Handlers that never wait wake at most two workers, whatever comes; a link that spreads wakes as many as come."""
    for spreads, expected in ((False, 2), (True, 8)):
        backlog, begun = Backlog(spreads=spreads), list[int]()

        async def worker(name: int, backlog: Backlog = backlog, begun: list[int] = begun) -> None:
            while await backlog.until_ready() is not None:
                begun.append(name)
                while backlog.take() is not None:
                    pass

        async with trio.open_nursery() as nursery:
            for name in range(8):
                nursery.start_soon(worker, name)
            await trio.testing.wait_all_tasks_blocked()
            backlog.put(some(100))
            assert backlog._woken == expected
            await trio.testing.wait_all_tasks_blocked()
            assert (backlog._woken, len(backlog)) == (0, 0)
            backlog.close()


@pytest.mark.parametrize("spreads", [False, True])
async def test_no_cancel_loses_a_wake(spreads: bool, autojump_clock: trio.testing.MockClock) -> None:
    """Workers that are cancelled while they wait, at any moment, leave the others awake for what is there."""
    for moment in range(6):
        backlog, taken = Backlog(spreads=spreads), list[tuple[int, str]]()
        with trio.fail_after(10.0):
            async with trio.open_nursery() as nursery:
                scopes: list[trio.CancelScope] = []

                async def cancelled(
                    name: int, backlog: Backlog = backlog, taken: list[tuple[int, str]] = taken
                ) -> None:
                    with trio.CancelScope() as scope:
                        scopes.append(scope)  # noqa: B023 -- of this round
                        await work(backlog, name, taken, pause=True)

                for name in range(4):
                    nursery.start_soon(cancelled, name)
                await trio.testing.wait_all_tasks_blocked()
                acts: list[Callable[[], None]] = [
                    partial(backlog.put, some(3)),
                    scopes[0].cancel,
                    scopes[1].cancel,
                    partial(backlog.put, some(3)),
                ]
                for act in acts[moment % 4 :] + acts[: moment % 4]:
                    act()
                    if moment > 3:
                        await trio.lowlevel.checkpoint()
                await trio.sleep(4.0)
                assert len(backlog) == 0
                assert backlog._woken == 0
                backlog.close()
        assert len(taken) == 6


async def test_the_rest_is_given_back_and_nobody_waits_for_ever(autojump_clock: trio.testing.MockClock) -> None:
    """After `close` a worker that comes gets None, now and later."""
    backlog = Backlog(spreads=False)
    backlog.put(some(5))
    assert len(backlog.rest()) == 5
    backlog.close()
    assert await backlog.until_ready() is None
    assert await backlog.until_ready() is None
    assert backlog.take() is None
