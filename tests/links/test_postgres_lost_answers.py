"""A connection that breaks amid a statement: what was done is done once, and *unknown* where nobody can tell."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import trio

from links.errors import CallBroken, LeaseLost, LinkBroken, SettlementUnknown
from links.sql import Lease
from settlement.sql import Delay, Finish, MoveToTable, PutBack
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import bodies, broker_of, finish, open_link, say
from tests.weather.postgres_faults import Faults, faulty_connections

pytestmark = [pytest.mark.postgres, pytest.mark.servers]

VERBS = [Finish(), PutBack(count=False), Delay(5.0, count=False), MoveToTable("dead")]


@pytest.fixture
def faults(database: str) -> Generator[Faults, None, None]:
    faults = Faults()
    with faulty_connections({database.rpartition("/")[2]: faults}):
        yield faults


@pytest.mark.parametrize("verb", VERBS[:-1], ids=lambda each: type(each).__name__)
async def test_what_was_said_and_not_answered_is_unknown(verb: Any, faults: Faults, database: str) -> None:
    """It was done, once; said again on another connection it touches nothing, and that is *unknown*, never lost."""
    tables = PostgresTables(database).create()
    tables.add(b"a")
    async with open_link(tables.broker().queue(tables.table())) as link:
        (received,) = await link.receive(1)
        faults.order("lose_answer")
        (verdict,) = await link.settle([say(received, verb)])
        assert isinstance(verdict, SettlementUnknown)
    assert faults.happened == ["lose_answer"]
    left = [row["locked_until"] for name in ("jobs", "dead") for row in tables.rows(name)]
    assert left == [None] * (not isinstance(verb, Finish))


async def test_a_move_that_was_not_committed_was_not_done(faults: Faults, database: str) -> None:
    """It is a transaction of several statements: an answer that is lost within it leaves the row where it was."""
    tables = PostgresTables(database).create()
    tables.add(b"a")
    async with open_link(tables.broker().queue(tables.table())) as link:
        (received,) = await link.receive(1)
        faults.order("lose_answer")
        assert list(await link.settle([say(received, MoveToTable("dead"))])) == [None]
    assert faults.happened == ["lose_answer"]
    assert (tables.rows(), [row["locked_until"] for row in tables.rows("dead")]) == ([], [None])


@pytest.mark.parametrize("verb", VERBS, ids=lambda each: type(each).__name__)
async def test_what_was_not_said_is_said_on_another_connection(verb: Any, faults: Faults, database: str) -> None:
    """The lease holds, and the verdict is that it was done."""
    tables = PostgresTables(database).create()
    tables.add(b"a")
    async with open_link(tables.broker().queue(tables.table())) as link:
        (received,) = await link.receive(1)
        faults.order("sever")
        assert list(await link.settle([say(received, verb)])) == [None]
    assert faults.happened == ["sever"]


async def test_of_several_statements_only_one_is_unknown(faults: Faults, database: str) -> None:
    """One settlement, two statements: the answer of the first is lost; what the second says is known."""
    tables = PostgresTables(database).create()
    tables.add(b"a", b"b", b"lost")
    async with open_link(tables.broker().queue(tables.table())) as link:
        first, second, lost = await link.receive(3)
        tables.run("UPDATE jobs SET attempt = 9 WHERE payload = 'lost'")
        faults.order("lose_answer")
        verdicts = await link.settle(
            [say(first, Finish()), say(second, PutBack(count=False)), say(lost, PutBack(count=False))]
        )
        assert [type(verdict) for verdict in verdicts] == [SettlementUnknown, type(None), LeaseLost]
    assert [row["payload"] for row in tables.rows()] == [b"b", b"lost"]


@pytest.mark.parametrize("fault", ["lose_answer", "sever"])
async def test_an_extension_that_broke_loses_no_lease(fault: str, faults: Faults, database: str) -> None:
    """DESIGN 6: the tokens are read back by id and attempt; what another one has claimed meanwhile is lost."""
    tables = PostgresTables(database).create()
    tables.add(b"a", b"taken")
    async with open_link(tables.broker().queue(tables.table())) as link:
        kept, taken = await link.receive(2)
        tables.run("UPDATE jobs SET attempt = 9 WHERE payload = 'taken'")
        faults.order(fault)
        assert list(await link.extend([kept, taken])) == [taken]
        assert list(await link.settle(finish([kept]))) == [None]
    assert faults.happened == [fault]


async def test_a_claim_whose_answer_was_lost_comes_back_with_its_lease(faults: Faults, database: str) -> None:
    """One `CallBroken`; the rows are known to nobody, until their lease ends; the attempt that it cost is counted."""
    tables = PostgresTables(database).create()
    tables.add(b"a", b"b")
    queue = tables.broker().queue(tables.table(), claim=Lease(0.5))
    faults.order("lose_answer")
    async with open_link(queue) as link:
        with pytest.raises(CallBroken):
            await link.receive(5)
        assert [row["attempt"] for row in tables.rows()] == [2, 2]
        with trio.fail_after(5):
            received = await link.receive(5)
        assert [each.delivery.attempt for each in received] == [2, 2]
        assert list(await link.settle(finish(received))) == [None, None]


async def test_what_was_let_go_and_not_answered_is_let_go(
    faults: Faults, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The goodbye ends well: it finds that nothing is held any more, and takes no attempt back twice."""
    tables = PostgresTables(database).create()
    tables.add(b"a")
    async with open_link(tables.broker().queue(tables.table())) as link:
        assert bodies(await link.receive(1)) == [b"a"]
        faults.order("lose_answer")
    assert (tables.row()["attempt"], tables.row()["locked_until"]) == (1, None)
    assert "could not let go" not in caplog.text


async def test_a_terminated_backend_costs_a_publisher_one_call(database: str) -> None:
    """The connection that lay idle was ended: what is published next arrives, or says that nobody knows."""
    tables = PostgresTables(database).create()
    queue = tables.broker().queue(tables.table())
    async with queue.broker.connect():
        publisher = broker_of(queue).publisher(tables.table())
        await publisher.publish(b"a")
        tables.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'trio-settlement'")
        with trio.fail_after(10):
            sent = False
            while not sent:
                try:
                    await publisher.publish(b"b")
                    sent = True
                except LinkBroken:
                    assert tables.run("SELECT count(*) FROM jobs WHERE payload = 'b'") == [(0,)], "it was not sent"
    assert sorted(row["payload"] for row in tables.rows()) == [b"a", b"b"]
