"""An extension by a statement of the user's own: a lease that is lost stays lost, and no other than :until counts."""

# ruff: noqa: S608 -- the statements are our own

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from actors import Subscription, open_runtime
from links.errors import CallBroken
from settlement import Ack, Delivery
from tests.links.custom_kit import LEASE, SQLITE, World, world_of
from tests.links.sqlite_kit import order, until

EXTEND = (
    "UPDATE jobs SET locked_until = :until, note = coalesce(note, '') || :group "
    "WHERE id = :id AND locked_until = :token AND attempt = :attempt AND locked_until > :now"
)


@pytest.fixture(params=[SQLITE, LEASE])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return world_of(request, tmp_path)


async def test_it_extends(world: World) -> None:
    """S-10.1: in place of ours; the token is the new one, by which the row is settled."""
    world.add(2)
    queue = world.queue({"extend": EXTEND}, lease=10.0)
    async with world.linked(queue, limit=2) as link:
        with trio.fail_after(10):
            held = list(await link.receive(2))
            before = [each.token for each in held]
            assert list(await link.extend(held)) == []
        assert world.rows("note") == [("here",), ("here",)]
        assert [each.token[0] for each in held] == [1, 2]
        assert all(each.token[1] > old[1] for each, old in zip(held, before, strict=True))
        assert world.rows(f"locked_until > {world.now(8)}") == [(True,), (True,)]
        link.stop()
        assert list(await link.settle([order(queue, each, Ack()) for each in held])) == [None, None]
    assert world.rows() == [(1, 2, True), (2, 2, True)]


async def test_under_a_lost_lease_it_never_runs(world: World) -> None:
    """S-10.2, K-89."""
    world.add(2)
    extend = "UPDATE jobs SET locked_until = :until, note = 'ran' WHERE id = :id"
    async with world.linked(world.queue({"extend": extend}), limit=2) as link:
        with trio.fail_after(10):
            first, second = await link.receive(2)
            world.run("UPDATE jobs SET attempt = attempt + 1 WHERE id = 1")
            assert list(await link.extend([first, second])) == [first]
        assert world.rows("note") == [(None,), ("ran",)]


@pytest.mark.parametrize(
    "extend",
    [
        "UPDATE jobs SET locked_until = :until WHERE id = :id AND id < 0",
        "UPDATE jobs SET locked_until = NULL, note = :until WHERE id = :id",
        "UPDATE jobs SET locked_until = :until, attempt = attempt + 1 WHERE id = :id",
    ],
    ids=["touches nothing", "lets go", "counts"],
)
async def test_one_that_does_not_extend(world: World, extend: str) -> None:
    """What it did is undone, and it is told; the old lease holds as long as it lasts."""
    world.add()
    queue = world.queue({"extend": extend})
    async with world.linked(queue) as link:
        with trio.fail_after(10):
            (received,) = await link.receive(1)
            before = world.rows("locked_until, attempt, note")
            with pytest.raises(CallBroken, match="extension of 'test': "):
                await link.extend([received])
        assert world.rows("locked_until, attempt, note") == before
        link.stop()
        assert list(await link.settle([order(queue, received, Ack())])) == [None]


async def test_one_that_fails_for_one_row(world: World) -> None:
    """The other one is extended."""
    world.add(2)
    wrong = "json(CASE id WHEN 1 THEN 'x' ELSE '{}' END)" if world.name == "sqlite" else "(1 / (id - 1))::text"
    extend = f"UPDATE jobs SET locked_until = :until, note = {wrong} WHERE id = :id"
    async with world.linked(world.queue({"extend": extend}), limit=2) as link:
        with trio.fail_after(10):
            held = list(await link.receive(2))
            before = [each.token for each in held]
            assert list(await link.extend(held)) == []
        assert held[0].token == before[0]
        assert held[1].token[1] > before[1][1]
        (told,) = world.told
        assert "to extend each lease: 1 not extended, such as row 1: " in told
        assert "malformed JSON" in told or "division by zero" in told


@pytest.mark.slow
async def test_the_keeper_extends_by_it(world: World) -> None:
    """S-5.5: a handler of more than one lease keeps its row."""
    world.add()
    queue = world.queue({"extend": EXTEND}, lease=3.0)
    seen: list[int] = []

    async def handle(delivery: Delivery[bytes]) -> None:
        seen.append(delivery.attempt)
        while world.rows("note") != [("herehere",)]:
            await trio.sleep(0.1)

    with trio.fail_after(20):
        async with open_runtime(Subscription(queue, handle)) as runtime:
            await until(lambda: runtime.ledger("here").acked == 1)
    assert seen == [1]
