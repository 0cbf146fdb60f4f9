"""The lease form on PostgreSQL: a first look at what `links.sql.sqlite` has tests of, on the real server."""

from __future__ import annotations

import pytest
import trio

from links.errors import LeaseLost
from settlement import Ack, Outcome, Policy, Retry, RetryAfter
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import bodies, broker_of, open_link, order

pytestmark = [pytest.mark.postgres, pytest.mark.servers]


async def test_published_claimed_and_settled(database: str) -> None:
    """S-11.1, S-2.4, S-3.2: in order of publishing; finished rows are deleted, a retry counts at the next claim."""
    tables = PostgresTables(database).create()
    queue = tables.broker().queue(tables.table())
    async with open_link(queue) as link:
        publisher = broker_of(queue).publisher(tables.table())
        await publisher.publish_many([b"a", b"b", b"c"])
        received = await link.receive(3)
        assert (bodies(received), [each.delivery.attempt for each in received]) == ([b"a", b"b", b"c"], [1, 1, 1])
        outcomes: list[Outcome] = [Ack(), Retry(), RetryAfter(3600.0)]
        verdicts = await link.settle(
            [order(queue, each, outcome) for each, outcome in zip(received, outcomes, strict=True)]
        )
        assert list(verdicts) == [None, None, None]
        (again,) = await link.receive(3)
        assert (again.delivery.body, again.delivery.attempt) == (b"b", 2)
        assert list(await link.settle([order(queue, again, Ack())])) == [None]
    assert [row["payload"] for row in tables.rows()] == [b"c"]
    assert tables.row()["locked_until"] is None


async def test_at_the_cap_a_row_moves(database: str) -> None:
    """S-4.5, S-3.9: in one statement, with its attempt and an empty lease."""
    tables = PostgresTables(database).create()
    policy = Policy(max_attempts=1, dead_letter="dead")
    queue = tables.broker().queue(tables.table())
    tables.add(b"a")
    async with open_link(queue) as link:
        (received,) = await link.receive(1)
        assert list(await link.settle([order(queue, received, Retry(), policy)])) == [None]
    assert tables.rows() == []
    dead = tables.row("dead")
    assert (dead["payload"], dead["attempt"], dead["locked_until"]) == (b"a", 2, None)


async def test_a_row_that_another_one_claimed_is_left_alone(database: str) -> None:
    """S-5.7: the late holder's settlement is refused, and changes nothing."""
    tables = PostgresTables(database).create()
    queue = tables.broker().queue(tables.table())
    tables.add(b"a")
    async with open_link(queue) as link:
        (received,) = await link.receive(1)
        tables.run("UPDATE jobs SET attempt = 3, locked_until = clock_timestamp() + interval '1 minute'")
        before = tables.row()
        (verdict,) = await link.settle([order(queue, received, Ack())])
        assert isinstance(verdict, LeaseLost)
        assert tables.row() == before


async def test_what_nobody_began_goes_back_uncounted(database: str) -> None:
    """The goodbye lets go what is held."""
    tables = PostgresTables(database).create()
    queue = tables.broker().queue(tables.table())
    tables.add(b"a", b"b")
    async with open_link(queue) as link:
        received = await link.receive(2)
        received[0].started = True
        await trio.lowlevel.checkpoint()
    assert [(row["attempt"], row["locked_until"]) for row in tables.rows()] == [(2, None), (1, None)]
