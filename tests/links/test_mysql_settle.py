"""What a settlement does to the row on MySQL and MariaDB, in each form: compared column by column, in every shape."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import attrs
import pytest
import trio

from links.abc import Link, Received
from links.errors import LeaseLost
from links.sql import AdvisoryLock, Lease, RowLock, SqlQueue
from settlement import Ack, Drop, Policy, Retry, RetryAfter
from settlement.policy import Ending
from settlement.sql import ClaimForm
from tests.links.mysql_kit import Mysqls, a_database
from tests.links.mysql_tables import MysqlTables
from tests.links.sqlite_kit import nothing_lost, open_link, order
from tests.servers.mysql import KINDS

pytestmark = [pytest.mark.mysql, pytest.mark.servers]

BEGINNING = datetime(2000, 1, 1)  # noqa: DTZ001 -- as a column holds it
CLAIMS: dict[str, ClaimForm] = {"lease": Lease(30.0), "row lock": RowLock(), "advisory": AdvisoryLock("job-{id}")}


@attrs.frozen
class Shape:
    """A table, and whether the whole row is the message."""

    counts: bool = True
    grouped: bool = False
    marks: bool = False
    whole: bool = False


SHAPES = {
    "plain": Shape(),
    "groups, marks": Shape(grouped=True, marks=True),
    "row mode, no attempt": Shape(whole=True, counts=False),
    "row mode, marks": Shape(whole=True, marks=True),
    "groups": Shape(grouped=True),
}
QUICK = ("plain", "groups, marks", "row mode, no attempt")


@attrs.define
class World:
    """One form, with a table of one shape."""

    form: str
    shape: Shape
    tables: MysqlTables

    @property
    def claim(self) -> ClaimForm:
        return CLAIMS[self.form]

    @property
    def group(self) -> str | None:
        return "mail" if self.shape.grouped else None

    def queue(self, **roles: Any) -> SqlQueue[Any]:
        table: Any = self.tables.table(**roles)
        if self.shape.whole:
            table = attrs.evolve(table, payload=None)
        return self.tables.broker().queue(table, group=self.group, claim=self.claim)

    def add(self, *payloads: bytes) -> None:
        self.tables.add(*payloads, group=self.group)

    def row(self, attempt: int = 1, **changes: Any) -> dict[str, Any]:
        """The row as it was inserted, but for these."""
        row: dict[str, Any] = {"id": 1, "payload": b"body", "headers": None, "lane": None, "retry_after": BEGINNING}
        if self.form == "lease":
            row["locked_until"] = None
        if self.shape.counts:
            row["attempt"] = attempt
        if self.shape.grouped:
            row["grp"] = "mail"
        if self.shape.marks:
            row["processed_at"] = None
        return row | changes

    def now(self) -> datetime:
        ((moment,),) = self.tables.run("SELECT UTC_TIMESTAMP(6)")
        found: datetime = moment
        return found

    async def settle(self, *outcomes: Ending, policy: Policy | None = None) -> datetime:
        """Claim the only row and settle it so, one outcome after the other; the server's time before the last one."""
        self.add(b"body")
        queue, before = self.queue(), self.now()
        async with open_link(queue) as link:
            for number, outcome in enumerate(outcomes):
                received = await one(link)
                assert received.delivery.attempt == (number + 1 if self.shape.counts else 1)
                before = self.now()
                if outcome is outcomes[-1]:
                    link.stop()  # so that nothing is claimed behind it
                assert list(await link.settle([order(queue, received, outcome, policy)])) == [None]
        return before


async def one(link: Link[Any]) -> Received[Any]:
    with trio.fail_after(10):
        (received,) = await link.receive(1)
    return received


@pytest.fixture
def world(request: pytest.FixtureRequest, mysqls: Mysqls) -> Any:
    kind, form, shape = request.param
    with a_database(mysqls.url(kind)) as url:
        tables = MysqlTables(
            url, counts=shape.counts, grouped=shape.grouped, marks=shape.marks, leased=form == "lease"
        ).create()
        yield World(form, shape, tables)


def worlds(**wanted: bool) -> pytest.MarkDecorator:
    """Each form on MariaDB, and on MySQL and in every shape where there is time; `wanted`: the shapes that are so."""
    shapes = {name: each for name, each in SHAPES.items() if wanted.items() <= attrs.asdict(each).items()}
    found = [
        pytest.param(
            (kind, form, shape),
            marks=[] if kind == "mariadb" and name in QUICK else [pytest.mark.long],
            id=f"{kind} {form}, {name}",
        )
        for kind in KINDS
        for form in CLAIMS
        for name, shape in shapes.items()
    ]
    return pytest.mark.parametrize("world", found, indirect=True)


def soon(moment: datetime, expected: datetime) -> bool:
    """Not before it, and little later: both are the server's."""
    return expected <= moment < expected + timedelta(seconds=5)


@worlds(marks=True)
@pytest.mark.parametrize("outcome", [Ack(), Drop("poison")], ids=["ack", "drop"])
async def test_finish_marks_the_row(outcome: Ending, world: World) -> None:
    """S-3.4: processed_at = now, the lease cleared, nothing else; the attempt as the form counts it (S-4.1)."""
    before = await world.settle(outcome)
    row = world.tables.row()
    assert soon(row["processed_at"], before)
    assert row == world.row(1 if world.form == "row lock" else 2, processed_at=row["processed_at"])
    assert world.tables.rows("dead") == []


@worlds(marks=False)
@pytest.mark.parametrize("outcome", [Ack(), Drop()], ids=["ack", "drop"])
async def test_finish_deletes_the_row(outcome: Ending, world: World) -> None:
    """S-3.4: without processed_at it is deleted, and goes to no dead-letter table."""
    await world.settle(outcome)
    assert (world.tables.rows(), world.tables.rows("dead")) == ([], [])


@worlds()
async def test_retry_counts_once(world: World) -> None:
    """S-3, retry: the row is free, due as it was, and one delivery is counted."""
    await world.settle(Retry())
    assert world.tables.row() == world.row(2)


@worlds()
async def test_retry_after_sets_the_due_time(world: World) -> None:
    """S-3, retry_after(d): retry_after = now + d, free, one delivery counted."""
    before = await world.settle(RetryAfter(90.5))
    row = world.tables.row()
    assert soon(row["retry_after"], before + timedelta(seconds=90.5))
    assert row == world.row(2, retry_after=row["retry_after"])


@worlds(grouped=True, counts=True)
async def test_the_cap_moves_to_a_group(world: World) -> None:
    """S-4.6, S-4.2: one UPDATE; a row lock leaves attempt 3 on it, the others 4; it is unfinished (OQ-S10)."""
    await world.settle(Retry(), RetryAfter(0), Retry(), policy=Policy(max_attempts=3, dead_letter="dead mail"))
    row = world.tables.row()
    assert BEGINNING < row["retry_after"] <= world.now()
    attempt = 3 if world.form == "row lock" else 4
    assert row == world.row(attempt, grp="dead mail", retry_after=row["retry_after"])


@worlds(grouped=False, counts=True)
async def test_the_cap_moves_to_a_table(world: World) -> None:
    """S-3.9, S-3.10, S-4.7: it leaves as it is, with its id, with an empty lease, unfinished."""
    due = datetime(2001, 9, 9, 1, 46, 40, 250_000)  # noqa: DTZ001 -- as a column holds it
    world.tables.add_to(
        "jobs", id=7, payload=b"body", headers='{"a": "b"}', lane="k", retry_after=due, attempt=3
    )  # fmt: skip
    queue = world.queue()
    policy = Policy(max_attempts=3, dead_letter="dead")
    async with queue.broker.connect(), queue.attach("test", nothing_lost, 5.0, policy, limit=1) as link:
        received = await one(link)
        assert received.delivery.attempt == 3
        assert list(await link.settle([order(queue, received, RetryAfter(5), policy)])) == [None]
    assert world.tables.rows() == []
    attempt = 3 if world.form == "row lock" else 4
    (row,) = world.tables.rows("dead")
    assert row.pop("headers").replace(" ", "") == '{"a":"b"}'
    expected = world.row(attempt, id=7, lane="k", retry_after=due)
    del expected["headers"]
    assert row == expected


@worlds()
async def test_dropped_unsettled(world: World) -> None:
    """S-3, the last line: what no handler has begun is as it was; what one has begun has spent its attempt, or not."""
    world.add(b"body", b"other")
    queue = world.queue()
    async with queue.broker.connect(), queue.attach("test", nothing_lost, 5.0, limit=2) as link:
        received = await one(link)
        received.started = True
        assert received.delivery.id == "1"
        assert (await one(link)).delivery.id == "2"
    begun, fresh = world.tables.rows()
    assert begun == world.row(1 if world.form == "row lock" else 2)
    assert fresh == world.row(1, id=2, payload=b"other")
    queue = world.queue()
    async with queue.broker.connect(), queue.attach("test", nothing_lost, 5.0, limit=2) as link:  # nothing is locked
        assert {(await one(link)).delivery.id, (await one(link)).delivery.id} == {"1", "2"}


@worlds(counts=True, grouped=False, marks=False, whole=False)
async def test_a_delay_without_its_column_is_a_retry(world: World) -> None:
    """S-3.5: there is nowhere to keep it, and the plan says so."""
    world.tables.run("ALTER TABLE jobs DROP INDEX due")
    world.add(b"body")
    queue = world.queue(retry_after=None)
    async with open_link(queue) as link:
        received = await one(link)
        spoken = order(queue, received, RetryAfter(90))
        assert spoken.plan.notice is not None
        link.stop()
        assert list(await link.settle([spoken])) == [None]
    assert world.tables.row() == world.row(2)


@pytest.mark.parametrize("outcome", [Ack(), Retry(), RetryAfter(9)], ids=str)
async def test_a_row_that_is_gone(outcome: Ending, mariadb_database: str) -> None:
    """S-3.2: somebody has deleted it; a lease that is not there is lost."""
    world = World("lease", Shape(), MysqlTables(mariadb_database).create())
    world.add(b"body")
    queue = world.queue()
    async with open_link(queue) as link:
        received = await one(link)
        world.tables.run("DELETE FROM jobs")
        (verdict,) = await link.settle([order(queue, received, outcome)])
        assert type(verdict) is LeaseLost
    assert world.tables.rows() == []
