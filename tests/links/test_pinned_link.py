"""The link of slots, over connections of the tests' own, in virtual time: what no real server can be made to show."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from links.abc import Received, Settlement, Verdict, beside
from links.errors import (
    CallBroken,
    ConnectionBroken,
    LeaseLost,
    NotApplied,
    SettlementUnknown,
    TransactionHeld,
)
from links.sql import Table
from links.sql.jobs import Passing
from links.sql.pin import Settled
from links.sql.pinned_link import PinnedLink
from links.sql.rows import Row
from links.sql.transaction import transaction
from links.sql.wakes import Wakes
from settlement.ledger import Line
from settlement.plans import Plan
from settlement.sql import Finish, Verb

pytestmark = pytest.mark.sqlite  # it belongs to links.sql, and needs no server

POLL = 1000.0
CONNECTIONS = "to claim on a connection for each delivery"


@attrs.define
class Server:
    """Rows that are claimed once, in order; a claim takes a second."""

    rows: list[int]
    table: Table[bytes] = attrs.field(factory=lambda: Table("jobs", id="id", payload="p"))
    warnings: list[str] = attrs.Factory(list[str])
    schema: Any = None
    """Nobody looks at its columns."""
    at_once: int = 0
    most: int = 0
    claims: int = 0
    trouble: list[Exception] = attrs.Factory(list[Exception])
    hangs: bool = False
    verdicts: list[Verdict] = attrs.Factory(list[Verdict])
    lost: list[int] = attrs.Factory(list[int])
    said: list[tuple[int, str]] = attrs.Factory(list[tuple[int, str]])
    settled: list[tuple[set[int], set[int]]] = attrs.Factory(list[tuple[set[int], set[int]]])
    """By each commit: what was said, and what stayed."""
    never: set[int] = attrs.Factory(set[int])
    """Whose COMMIT fails, with all that is said by it."""
    crossed: bool = False
    """Does it fail as if others got into the way?"""
    lending: float = 0.0
    pins: list[FakePin] = attrs.Factory(list["FakePin"])

    def take(self, passing: Passing, room: int) -> Sequence[Row]:
        found = [row for row in self.rows if row not in passing.over][:room]
        for row in found:
            self.rows.remove(row)
        return [(row, None, 2, b"%d" % row, None, None) for row in found]

    def pin(self, writer: object, limit: int) -> FakePin:  # noqa: ARG002 -- it has its own
        self.pins.append(FakePin(self))
        return self.pins[-1]


class FakePin:
    """One connection."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.ended = trio.Event()
        self.closed = 0
        self.committed = False

    async def claim(self, passing: Passing, room: int) -> Sequence[Row]:
        server = self.server
        server.claims += 1
        server.at_once += 1
        server.most = max(server.most, server.at_once)
        try:
            await trio.sleep(1)
        finally:
            server.at_once -= 1
        if server.trouble:
            raise server.trouble.pop()
        return server.take(passing, room)

    async def lend(self) -> Any:
        await trio.sleep(self.server.lending)
        return self

    def take_back(self) -> None:
        self.server.said.append((-1, "take back"))

    async def settle(
        self, said: Sequence[tuple[Row, Verb]], rest: Sequence[Row], *, keep: bool, then: Passing | None
    ) -> Settled:
        assert keep
        if self.server.hangs:
            await trio.sleep_forever()
        self.server.settled.append(({row[0] for row, _ in said}, {row[0] for row in rest}))
        self.server.said += [(row[0], str(verb)) for row, verb in said]
        await trio.lowlevel.checkpoint()
        if keys := {row[0] for row, _ in said} & self.server.never:
            self.server.rows = sorted([*self.server.rows, *(row[0] for row, _ in said)])
            return Settled([LeaseLost(f"by {keys}")] * len(said), crossed=self.server.crossed)
        verdicts = [self.server.verdicts.pop() if self.server.verdicts else None for _ in said]
        lost, self.server.lost = [row for row in rest if row[0] in self.server.lost], []
        if then is None or any(verdicts) or rest:
            return Settled(verdicts, lost)
        return Settled(verdicts, lost, self.server.take(then, len(said)))

    async def undo(self) -> None:
        self.server.said.append((-1, "undo"))

    async def let_go(self, rows: Sequence[tuple[Row, bool]], *, whole: bool) -> None:
        assert rows
        if whole:
            self.server.said.append((-1, "let go"))
        await trio.lowlevel.checkpoint()

    async def until_lost(self) -> str:
        await self.ended.wait()
        self.ended = trio.Event()
        return "the test has ended it"

    def close(self) -> None:
        self.closed += 1


async def never() -> ConnectionBroken:
    await trio.sleep_forever()
    raise AssertionError


@asynccontextmanager
async def linked(
    server: Server, *, limit: int = 4, size: int = 1
) -> AsyncGenerator[tuple[PinnedLink[Any], list[Any]], None]:
    lost: list[Any] = []

    def lose(received: Received[Any], line: Line) -> None:
        lost.append((received, line))

    link: PinnedLink[Any] = PinnedLink(
        server,
        never,
        Wakes(POLL),
        lambda *_: None,
        lose,
        writer=NotImplemented,
        source="jobs",
        subscription="test",
        goodbye=5.0,
        limit=limit,
        size=size,
    )
    async with beside(link.run):
        try:
            yield link, lost
        finally:
            await link.say_goodbye()  # noqa: ASYNC102 -- it shields itself, with a deadline


async def some(link: PinnedLink[Any], count: int) -> list[Received[Any]]:
    found: list[Received[Any]] = []
    while len(found) < count:
        found += await link.receive(count - len(found))
    return found


def finish(received: Received[Any]) -> Settlement:
    return Settlement(received, Plan(Line.ACKED, Finish()))


async def test_slots_look_side_by_side_while_there_are_rows(autojump_clock: MockClock) -> None:
    """DESIGN 3.8: whoever finds a row sends the next one, so that four places are busy after three claims in a row."""
    server = Server([*range(100)])
    async with linked(server) as (link, _):
        began = trio.current_time()
        await link.give_back(await some(link, 4))
        assert trio.current_time() - began == 4
        await link.give_back(await some(link, 4))
        assert server.most == 4
        assert trio.current_time() - began <= 6


async def test_the_next_claim_travels_with_a_settlement(autojump_clock: MockClock) -> None:
    """DESIGN 3.8: while there are rows; a claim of its own takes a second here, and one behind a settlement none."""
    server = Server([*range(100)])
    async with linked(server, limit=1) as (link, _):
        for _ in range(50):
            (received,) = await some(link, 1)
            await link.settle([finish(received)])
        assert (trio.current_time(), server.claims) == (1, 1)
        link.stop()


async def test_one_looks_at_an_empty_queue(autojump_clock: MockClock) -> None:
    """DESIGN 3.8: the others wait for it: one claim for each poll, and not four."""
    server = Server([])
    async with linked(server) as (link, _):
        with trio.move_on_after(10 * POLL):
            await link.receive(1)
        assert (server.most, 7 <= server.claims <= 14) == (1, True)


async def test_a_place_takes_one_row(autojump_clock: MockClock) -> None:
    """DESIGN 3.1: two places, two rows in hand, whatever waits; a third one when one of them has left."""
    server = Server([*range(9)])
    async with linked(server, limit=2) as (link, _):
        first, _ = await some(link, 2)
        with trio.move_on_after(100) as scope:
            await link.receive(1)
        assert scope.cancelled_caught
        await link.settle([finish(first)])
        assert [each.delivery.body for each in await some(link, 1)] == [b"2"]
    assert server.rows == [*range(3, 9)]


async def test_a_claim_that_comes_behind_the_stop_is_let_go(autojump_clock: MockClock) -> None:
    """S-13.1: at once, and not when the link says goodbye."""
    server = Server([1])
    async with linked(server) as (link, _):
        await trio.sleep(0.5)
        link.stop()
        await trio.sleep(1)
        assert server.said == [(-1, "let go")]


async def test_a_connection_that_ends_under_a_handler(autojump_clock: MockClock) -> None:
    """DESIGN 4: that one delivery is unsettled, its place goes on with another connection."""
    server = Server([1, 2])
    async with linked(server, limit=1) as (link, lost):
        (received,) = await some(link, 1)
        server.pins[0].ended.set()
        (other,) = await some(link, 1)
        assert lost == [(received, Line.UNSETTLED)]
        assert server.pins[0].closed == 1
        assert [type(each) for each in await link.settle([finish(received), finish(other)])] == [LeaseLost, type(None)]
    assert server.said == [(2, "finish")]


async def test_nobody_has_seen_the_row_that_is_lost(autojump_clock: MockClock) -> None:
    """It was claimed and not handed over: nothing to tell."""
    server = Server([1])
    async with linked(server, limit=1) as (link, lost):
        await trio.sleep(2)
        server.pins[0].ended.set()
        with trio.move_on_after(5):
            await link.receive(1)
        assert lost == []


async def test_a_settlement_that_hangs_is_unknown(autojump_clock: MockClock) -> None:
    """DESIGN 4: one goodbye; then its connection is closed."""
    server = Server([1], hangs=True)
    async with linked(server, limit=1) as (link, _):
        (received,) = await some(link, 1)
        verdicts: list[Verdict] = []
        with trio.CancelScope() as scope:
            scope.cancel()
            verdicts += await link.settle([finish(received)])
        assert [type(verdict) for verdict in verdicts] == [SettlementUnknown]
        await wait_all_tasks_blocked()
        assert server.pins[0].closed


async def test_what_was_not_applied_is_held(autojump_clock: MockClock) -> None:
    """DESIGN 3.8: said again on the same connection; what ended its claim is passed over for a second, then for two."""
    server = Server([1], verdicts=[LeaseLost("rolled back"), NotApplied("no")])
    async with linked(server, limit=1) as (link, _):
        (received,) = await some(link, 1)
        assert [type(each) for each in await link.settle([finish(received)])] == [NotApplied]
        assert [type(each) for each in await link.settle([finish(received)])] == [LeaseLost]
        server.rows.append(1)
        began = trio.current_time()
        await some(link, 1)
        assert 1 <= trio.current_time() - began <= 3


async def test_a_claim_that_hangs_is_given_up(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has locked the table, or the server is mute: degraded after half a minute, and tried again."""
    server = Server([1])
    usual = FakePin.claim
    hung = 0

    async def hangs(pin: FakePin, passing: Passing, room: int) -> Sequence[Row]:
        nonlocal hung
        hung += 1
        if hung == 1:
            await trio.sleep_forever()
        return await usual(pin, passing, room)

    monkeypatch.setattr(FakePin, "claim", hangs)
    told: list[str | None] = []
    async with linked(server, limit=1) as (link, _):
        link.degraded = lambda what, why: told.append(why) if what == CONNECTIONS else None
        began = trio.current_time()
        await some(link, 1)
        assert 31 <= trio.current_time() - began <= 32
    assert told == ["'test': no answer to a claim within 30 s", None]


@pytest.mark.parametrize("trouble", [ConnectionBroken("full"), CallBroken("no")])
async def test_connections_that_cannot_be_had(trouble: Exception, autojump_clock: MockClock) -> None:
    """DESIGN 4: degraded, tried again with backoff, and told when it is over."""
    server = Server([1], trouble=[trouble] * 5)
    told: list[str | None] = []
    async with linked(server, limit=1) as (link, _):
        link.degraded = lambda what, why: told.append(why) if what == CONNECTIONS else None
        await some(link, 1)
        assert trio.current_time() < 10, "it is not the poll that tries again"
    assert told == [str(trouble)] * 5 + [None]


async def test_a_batch_is_one_claim(autojump_clock: MockClock) -> None:
    """DESIGN 3.8: its rows on one connection, settled by one order; so two places for four rows in batches of two."""
    server = Server([*range(4)])
    async with linked(server, limit=4, size=2) as (link, _):
        first, second = [*await some(link, 2)], [*await some(link, 2)]
        assert len(server.pins) == 2
        assert first[0].claim is first[1].claim is not second[0].claim
        await link.settle([finish(received) for received in first])
    assert server.said[:2] == [(0, "finish"), (1, "finish")]


async def test_a_part_of_a_batch(autojump_clock: MockClock) -> None:
    """S-6.2: what is settled is, the rest is held; what was taken in between is lost, one dropped goes with the end."""
    server = Server([*range(4)], lost=[2])
    async with linked(server, limit=4, size=4) as (link, lost):
        one, two, three, four = await some(link, 4)
        assert list(await link.settle([finish(one)])) == [None]
        assert [received for received, _ in lost] == [three]
        link.forget(two)
        await wait_all_tasks_blocked()
        assert server.said == [(0, "finish")], "the claim lives on"
        assert [type(each) for each in await link.settle([finish(two), finish(three)])] == [LeaseLost, LeaseLost]
        assert list(await link.settle([finish(four)])) == [None]
    assert server.said == [(0, "finish"), (3, "finish")]


@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize("size", [1, 3])
async def test_one_whose_commit_fails_for_ever(size: int, crossed: bool, autojump_clock: MockClock) -> None:
    """S-6.2: it keeps no other back that is claimed with it, and is no hot loop, whatever the database says of it."""
    server = Server([*range(6)], never={0}, crossed=crossed)
    async with linked(server, limit=size, size=size) as (link, _):
        with trio.move_on_after(120):
            while True:
                await link.settle([finish(received) for received in await link.receive(size)])
    assert server.rows == [0]
    said = [row for row, _ in server.said if row >= 0]
    assert 6 <= said.count(0) <= 16
    assert all(said.count(row) <= 3 for row in range(1, 6))


async def test_a_connection_that_ends_under_a_batch(autojump_clock: MockClock) -> None:
    """DESIGN 4: each of its deliveries is unsettled."""
    server = Server([*range(3)])
    async with linked(server, limit=3, size=3) as (link, lost):
        batch = await some(link, 3)
        server.pins[0].ended.set()
        await trio.sleep(1)  # a claim that lasts is watched
        assert lost == [(received, Line.UNSETTLED) for received in batch]


async def test_what_a_handler_wrote_is_undone_before_other_steps(autojump_clock: MockClock) -> None:
    """`Link.undo`: on the connection that it had; where it had none nothing is said."""
    server = Server([1, 2])
    async with linked(server, limit=2) as (link, _):
        one, two = await some(link, 2)
        async with transaction(one.delivery):
            pass
        for received in (one, two):
            link.undo(received)
        await link.settle([finish(one), finish(two)])
    assert [said for said in server.said if said[1] == "undo"] == [(-1, "undo")]


def handle_of(received: Received[Any]) -> Any:
    return received.delivery._handle  # pyright: ignore[reportPrivateUsage] -- the transport's own


async def test_what_was_let_go_while_it_was_being_lent_is_not_lent(autojump_clock: MockClock) -> None:
    """DESIGN 3.8: a handler that shields itself gets no connection of which the claim has ended meanwhile."""
    server = Server([1], lending=1.0)
    async with linked(server, limit=1) as (link, _):
        (received,) = await some(link, 1)
        lent: list[Any] = []

        async def handler() -> None:
            try:
                lent.append(await handle_of(received).lend(received.delivery))
            except TransactionHeld as error:
                lent.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(handler)
            await trio.sleep(0.5)
            link.forget(received)
        assert [str(error) for error in lent] == ["'jobs': delivery 1 is in hand no more"]


async def test_what_is_lost_while_it_is_being_lent_is_not_lent(autojump_clock: MockClock) -> None:
    """DESIGN 4: the connection has ended in the tick in which it was asked for."""
    server = Server([1])
    async with linked(server, limit=1) as (link, lost):
        (received,) = await some(link, 1)
        await trio.sleep(1)  # a claim that lasts is watched
        server.pins[0].ended.set()
        with pytest.raises(TransactionHeld, match="'jobs': delivery 1 is in hand no more"):
            await handle_of(received).lend(received.delivery)
        assert lost == [(received, Line.UNSETTLED)]


async def test_two_settlements_of_one_claim_at_once(autojump_clock: MockClock) -> None:
    """S-6.2: a before-step's verb and the worker's: each commits its own, what stays is what the other is to say."""
    server = Server([*range(3)])
    async with linked(server, limit=3, size=3) as (link, _):
        one, two, three = await some(link, 3)
        verdicts: list[Verdict] = []

        async def settle(*some: Received[Any]) -> None:
            verdicts.extend(await link.settle([finish(received) for received in some]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(settle, one)
            nursery.start_soon(settle, two, three)
        assert verdicts == [None] * 3
        assert sorted(map(len, [said for said, _ in server.settled])) == [1, 2]
        assert server.settled[0][0] | server.settled[0][1] == {0, 1, 2}
        assert server.settled[1][1] == set()


async def test_the_same_row_twice(autojump_clock: MockClock) -> None:
    """DESIGN 4: it is settled once; who comes second hears that the claim has ended."""
    server = Server([1])
    async with linked(server, limit=1) as (link, _):
        (received,) = await some(link, 1)
        verdicts: list[Verdict] = []

        async def settle() -> None:
            verdicts.extend(await link.settle([finish(received)]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(settle)
            nursery.start_soon(settle)
        assert sorted(type(verdict).__name__ for verdict in verdicts) == ["LeaseLost", "NoneType"]
        assert server.said == [(1, "finish")]


async def test_one_that_is_forgotten_while_it_is_settled(autojump_clock: MockClock) -> None:
    """S-6.2: the verb that is under way decides."""
    server = Server([1, 2])
    async with linked(server, limit=2, size=2) as (link, lost):
        one, two = await some(link, 2)
        verdicts: list[Verdict] = []

        async def settle() -> None:
            verdicts.extend(await link.settle([finish(one), finish(two)]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(settle)
            while not server.said:
                await trio.lowlevel.checkpoint()
            link.forget(one)
            link.forget(two)
        assert (verdicts, lost) == ([None, None], [])
        assert server.said == [(1, "finish"), (2, "finish")]


async def test_a_connection_that_dies_while_orders_wait(autojump_clock: MockClock) -> None:
    """DESIGN 4: each of them is told: none waits for ever, and the place goes on with another connection."""
    server = Server([*range(4)])
    server.verdicts = [SettlementUnknown("broken")]
    server.lost = [1, 2]
    async with linked(server, limit=3, size=3) as (link, _):
        one, two, three = await some(link, 3)
        verdicts: dict[str, Verdict] = {}

        async def settle(received: Received[Any]) -> None:
            (verdicts[received.delivery.id],) = await link.settle([finish(received)])

        with trio.fail_after(3):
            async with trio.open_nursery() as nursery:
                for received in (one, two, three):
                    nursery.start_soon(settle, received)
                await trio.lowlevel.checkpoint()
        kinds = sorted(type(verdict).__name__ for verdict in verdicts.values())
        assert kinds in (
            ["LeaseLost", "LeaseLost", "SettlementUnknown"],
            ["LeaseLost", "NoneType", "SettlementUnknown"],
        )
        assert len(await some(link, 1)) == 1


async def test_a_claim_behind_the_stop_that_travels_with_a_settlement(autojump_clock: MockClock) -> None:
    """S-13.1: what it has found is let go at once, and nobody has seen it."""
    server = Server([1, 2])
    async with linked(server, limit=1) as (link, _):
        (received,) = await some(link, 1)

        async def settle() -> None:
            assert list(await link.settle([finish(received)])) == [None]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(settle)
            while not server.said:
                await trio.lowlevel.checkpoint()
            link.stop()
        await wait_all_tasks_blocked()
        assert server.said == [(1, "finish"), (-1, "let go")]
        with trio.move_on_after(2000) as scope:
            await link.receive(1)
        assert scope.cancelled_caught


@pytest.mark.parametrize(("limit", "size", "places", "most"), [(2, 5, 1, 2), (7, 3, 2, 3), (3, 3, 1, 3), (1, 9, 1, 1)])
async def test_a_limit_that_is_no_multiple_of_the_size(
    limit: int, size: int, places: int, most: int, autojump_clock: MockClock
) -> None:
    """S-2.5: never more in hand than the limit; claims are as large as a batch, or as the limit."""
    server = Server([*range(20)])
    async with linked(server, limit=limit, size=size) as (link, _):
        await some(link, places * most)
        assert len(server.pins) == places
        with trio.move_on_after(10) as scope:
            await link.receive(1)
        assert scope.cancelled_caught
    assert places * most <= limit
    assert len(server.rows) == 20 - places * most


async def test_cancelled_at_every_step(autojump_clock: MockClock) -> None:
    """DESIGN 4: wherever the life is cancelled each connection is closed, and each verdict that was given is true."""
    for step in range(1, 60):
        server = Server([*range(6)])
        told: dict[int, Verdict] = {}
        with trio.CancelScope() as scope:
            async with linked(server, limit=4, size=2) as (link, _):

                async def cancel(scope: trio.CancelScope = scope, step: int = step) -> None:
                    for _ in range(step):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()

                async with trio.open_nursery() as nursery:
                    batch = await some(link, 2)
                    nursery.start_soon(cancel)
                    while True:
                        said = [finish(received) for received in batch]
                        for received, verdict in zip(batch, await link.settle(said), strict=True):
                            told[int(received.delivery.id)] = verdict
                        batch = await some(link, 2)
        assert scope.cancelled_caught
        assert all(pin.closed for pin in server.pins)
        finished = [row for row, verb in server.said if verb == "finish"]
        assert len(finished) == len({*finished})
        assert {row for row, verdict in told.items() if verdict is None} <= {*finished}
        assert {row for row, verdict in told.items() if isinstance(verdict, LeaseLost)}.isdisjoint(finished)
