"""FIFO groups (S-7, K-90) in each form that has them: lease and row lock on PostgreSQL, lease on SQLite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from actors import BatchSubscription, Subscription, open_runtime
from links.errors import LeaseLost
from links.sql import AdvisoryLock, Lease, RowLock, SqlBroker, Table
from settlement import Ack, Delivery, Drop, Outcome, Policy, Retry, RetryAfter
from settlement.sql import Finish
from tests.links.fifo_kit import FORMS, FifoTable, linked, nothing, some, whoever
from tests.links.sqlite_kit import finish, order, say, until

SERVER = [pytest.mark.postgres, pytest.mark.servers]
MARKS = {"lease": SERVER, "row lock": SERVER, "sqlite": [pytest.mark.sqlite]}
CAPPED = Policy(max_attempts=1, dead_letter="dead")


@pytest.fixture
def fifo(request: pytest.FixtureRequest, tmp_path: Path) -> FifoTable:
    form = request.param
    return FifoTable.of(form, tmp_path, None if form == "sqlite" else request.getfixturevalue("database"))


def in_forms(*forms: str) -> pytest.MarkDecorator:
    params = [pytest.param(form, marks=MARKS[form]) for form in forms or FORMS]
    return pytest.mark.parametrize("fifo", params, indirect=True)


# --- the head, and nothing but the head


@in_forms()
async def test_the_head_alone_and_nothing_while_it_is_in_work(fifo: FifoTable) -> None:
    """S-7.1: one row at a time over all consumers, in order; another group is another queue."""
    fifo.add(b"a", b"b", b"c")
    fifo.add(b"other", group="h")
    one, two, other = fifo.queue(), fifo.queue(), fifo.queue("h")
    async with linked(one) as first, linked(two) as second, linked(other) as third:
        for body in (b"a", b"b", b"c"):
            link, received = await whoever(first, second)
            assert received.delivery.body == body
            await nothing(first)
            await nothing(second)
            assert await link.settle([order(one, received, Ack())]) == [None]
        assert (await some(third)).delivery.body == b"other"


@in_forms()
@pytest.mark.parametrize("outcome", [Ack(), Drop(), Retry()], ids=str)
async def test_what_is_settled_frees_the_group(fifo: FifoTable, outcome: Outcome) -> None:
    """S-7.2: behind what is finished comes the next, behind a retry the same head, to the consumer that asks."""
    fifo.add(b"a", b"b")
    queue = fifo.queue()
    async with linked(queue) as link:
        received = await some(link)
        assert await link.settle([order(queue, received, outcome)]) == [None]
        again = await some(link)
        expected = (b"a", 2) if isinstance(outcome, Retry) else (b"b", 1)
        assert (again.delivery.body, again.delivery.attempt) == expected


@in_forms()
async def test_a_delay_moves_the_head_behind_those_that_are_due_earlier(fifo: FifoTable) -> None:
    """S-7.2: the order goes by due time within a priority; alone again at the head it blocks until it is due."""
    fifo.add(b"a", b"b")
    queue = fifo.queue()
    async with linked(queue) as link:
        received = await some(link)
        assert await link.settle([order(queue, received, RetryAfter(1.0))]) == [None]
        begun = trio.current_time()
        received = await some(link)
        assert received.delivery.body == b"b"
        assert await link.settle([order(queue, received, Ack())]) == [None]
        received = await some(link)
        assert (received.delivery.body, received.delivery.attempt) == (b"a", 2)
        assert trio.current_time() > begun + 0.5


@in_forms()
async def test_a_delayed_head_that_is_still_first_blocks_its_group(fifo: FifoTable) -> None:
    """S-7.1: a claim takes the head and only if it is due; a lower priority does not overtake it."""
    fifo.add(b"urgent", rank=0)
    fifo.add(b"later", rank=1)
    queue = fifo.queue()
    async with linked(queue) as link:
        received = await some(link)
        assert await link.settle([order(queue, received, RetryAfter(3600.0))]) == [None]
        await nothing(link)
        fifo.run("UPDATE jobs SET due = (SELECT due FROM jobs WHERE rank = 1)")
        assert (await some(link)).delivery.body == b"urgent"


@in_forms()
async def test_a_row_that_enters_ahead_waits(fifo: FifoTable) -> None:
    """S-7.1: while the former head is in work a row of higher priority is not claimed; then it is the next."""
    fifo.add(b"a", b"b", rank=1)
    one, two = fifo.queue(), fifo.queue()
    async with linked(one) as first, linked(two) as second:
        received = await some(first)
        assert received.delivery.body == b"a"
        fifo.add(b"urgent", rank=0)
        await nothing(first)
        await nothing(second)
        assert await first.settle([order(one, received, Retry())]) == [None]
    async with linked(fifo.queue()) as link:
        assert (await some(link)).delivery.body == b"urgent"


@in_forms()
async def test_a_dead_letter_leaves_its_group_and_frees_it(fifo: FifoTable) -> None:
    """S-4.6: a group is the dead letter, and a FIFO one too; the row is in order there."""
    fifo.add(b"a", b"b")
    queue = fifo.queue()
    async with linked(queue) as link, linked(fifo.queue("dead")) as dead:
        for body in (b"a", b"b"):
            received = await some(link)
            assert received.delivery.body == body
            assert await link.settle([order(queue, received, Retry(), CAPPED)]) == [None]
        assert (await some(dead)).delivery.body == b"a"
        await nothing(dead)


@in_forms()
async def test_the_goodbye_keeps_the_order(fifo: FifoTable) -> None:
    """S-13.1: what a drain gives back, begun or claimed ahead, is the head again, its attempt as it was."""
    fifo.add(b"a", b"b")
    queue = fifo.queue()
    async with linked(queue) as link:
        received = await some(link)
        assert await link.settle([order(queue, received, Ack())]) == [None]
    assert fifo.run("SELECT attempt FROM jobs") == [(1,)]
    fifo.add(b"c")
    async with linked(fifo.queue()) as link:
        await some(link)
    async with linked(fifo.queue()) as link:
        received = await some(link)
        assert (received.delivery.body, received.delivery.attempt) == (b"b", 1)


@in_forms()
async def test_a_runtime_goes_through_its_group_in_order(fifo: FifoTable) -> None:
    """Settlement and next claim together: 30 rows, each third is retried once; nothing overtakes, nothing is left."""
    fifo.add(*[b"%d" % number for number in range(30)])
    seen: list[tuple[bytes, int]] = []

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        seen.append((delivery.body, delivery.attempt))
        return Retry() if int(delivery.body) % 3 == 0 and delivery.attempt == 1 else Ack()

    subscription = Subscription(fifo.queue(poll_interval=30.0), handler, policy=Policy(on_error=Retry()))
    async with open_runtime(subscription) as runtime:
        await until(lambda: runtime.ledger("g").acked == 30, 20)
    expected = [(b"%d" % number, attempt) for number in range(30) for attempt in ((1, 2) if number % 3 == 0 else (1,))]
    assert (seen, fifo.left()) == (expected, [])


# --- a consumer that is gone, and rows that cannot be had


@in_forms("lease", "sqlite")
async def test_a_lease_that_runs_out_lets_the_same_head_be_claimed(fifo: FifoTable) -> None:
    """S-5.7, S-7.1: a crash costs an attempt and no place; the late holder changes nothing."""
    fifo.add(b"a", b"b")
    fifo.lease = 0.3
    one, two = fifo.queue(), fifo.queue()
    async with linked(one) as first, linked(two) as second:
        received = await some(first)
        again = await some(second)
        assert (again.delivery.body, again.delivery.attempt) == (b"a", 2)
        (verdict,) = await first.settle([order(one, received, Ack())])
        assert isinstance(verdict, LeaseLost)
        assert fifo.left() == [b"a", b"b"]


@in_forms("lease", "sqlite")
async def test_what_this_process_still_holds_blocks_its_group_here(fifo: FifoTable) -> None:
    """Its lease is over by the server's clock, and its handler may be at it: no second one beside it, or ahead."""
    fifo.add(b"a", b"b", rank=1)
    fifo.lease = 0.3
    queue = fifo.queue()
    async with linked(queue) as link:
        received = await some(link)
        fifo.add(b"urgent", rank=0)
        await fifo.until_over()
        await nothing(link)
        assert await link.settle([say(received, Finish())]) == [None]
        assert (await some(link)).delivery.body == b"urgent"


@in_forms("lease", "sqlite")
async def test_a_lease_that_is_over_is_not_renewed(fifo: FifoTable) -> None:
    """Another row, that had entered ahead, may be in work by then; so this one is lost, and its handler is told."""
    fifo.add(b"a", rank=1)
    fifo.lease = 1.0
    one, two = fifo.queue(), fifo.queue()
    async with linked(one) as first, linked(two) as second:
        received = await some(first)
        assert await first.extend([received]) == []
        fifo.add(b"urgent", rank=0)
        await fifo.until_over()
        assert (await some(second)).delivery.body == b"urgent"
        before = fifo.run("SELECT locked_until, attempt FROM jobs WHERE id = 1")
        assert await first.extend([received]) == [received]
        assert fifo.run("SELECT locked_until, attempt FROM jobs WHERE id = 1") == before


@in_forms("lease", "sqlite")
async def test_a_head_that_cannot_be_claimed_blocks_its_group(fifo: FifoTable) -> None:
    """It is named *degraded* and never overtaken; when it can be claimed it comes first."""
    fifo.add(b"bad", b"b")
    fifo.run("CREATE UNIQUE INDEX one ON jobs (attempt) WHERE locked_until IS NOT NULL")
    fifo.run(
        "INSERT INTO jobs (payload, grp, attempt, locked_until) SELECT payload, 'x', 2, due FROM jobs WHERE id = 1"
    )
    told: list[str | None] = []
    async with linked(fifo.queue()) as link:
        link.degraded = lambda _, why: told.append(why)
        await nothing(link, 0.5)
        assert "row 1" in (told[-1] or "")
        fifo.run("DROP INDEX one")
        received = await some(link)
        assert (received.delivery.body, received.delivery.attempt) == (b"bad", 1)
        assert told[-1] is None
        assert await link.settle(finish([received])) == [None]
        assert (await some(link)).delivery.body == b"b"


# --- its index


@in_forms("lease", "sqlite")
async def test_the_index_by_which_a_row_in_work_is_found(fifo: FifoTable, caplog: pytest.LogCaptureFixture) -> None:
    """The recommended table attaches without a word; without the index one line names it, and that one serves."""
    async with linked(fifo.queue()):
        assert caplog.messages == []
    fifo.run("DROP INDEX jobs_in_work")
    async with linked(fifo.queue()):
        (line,) = caplog.messages
    assert line.startswith("subscription 'test', table 'jobs': a claim reads every row of its FIFO group")
    caplog.clear()
    fifo.run(line.partition("create the index: ")[2])
    async with linked(fifo.queue()):
        assert caplog.messages == []


@in_forms("row lock")
async def test_a_row_lock_needs_no_other_index(fifo: FifoTable, caplog: pytest.LogCaptureFixture) -> None:
    """Its guard tells that a row is in work."""
    assert "in_work" not in fifo.table().ddl("postgresql")
    async with linked(fifo.queue()):
        assert caplog.messages == []


# --- what is refused


def test_a_table_without_groups_is_not_fifo() -> None:
    """S-1.2: the role *group* may be marked FIFO; without it there is nothing to mark."""
    with pytest.raises(ValueError, match="fifo must be False for 'jobs', which has no group column"):
        Table("jobs", id="id", payload="body", fifo=True)
    assert Table("jobs", id="id", group="grp", fifo=True).renamed("dead").fifo


@pytest.mark.parametrize("url", ["sqlite:///q.db", pytest.param("postgresql://h/d", marks=pytest.mark.postgres)])
def test_advisory_locks_are_refused(url: str) -> None:
    """S-7.4: put the group into the key instead."""
    table = Table("jobs", id="id", payload="body", group="grp", locked_until="lock", fifo=True)
    with pytest.raises(ValueError, match=r"for the FIFO table 'jobs', not .*AdvisoryLock\('queue-\{grp\}'\)"):
        SqlBroker(url).queue(table, group="g", claim=AdvisoryLock("order-{lane}"))


@pytest.mark.sqlite
def test_more_than_one_at_once_is_refused_when_it_is_made() -> None:
    """S-2.12: exactly one claim is in flight; handlers side by side and batches would be one all the same."""
    table = Table("jobs", id="id", payload="body", group="grp", locked_until="lock", fifo=True)
    broker = SqlBroker("sqlite:///q.db")

    async def one(delivery: Delivery[bytes]) -> None: ...

    async def many(deliveries: list[Delivery[bytes]]) -> None: ...

    queue = broker.queue(table, group="g", limit=1)
    Subscription(queue, one)
    BatchSubscription(queue, many, size=1)
    for make in (
        lambda: Subscription(queue, one, concurrency=2),
        lambda: BatchSubscription(queue, many, size=2),
        lambda: broker.queue(table, group="g", limit=2),
    ):
        with pytest.raises(
            ValueError, match=r"must be 1, not 2: table 'jobs' is FIFO, so its group 'g' has one row in"
        ):
            make()


FORMS_OF: dict[str, Any] = {"lease": Lease(1.0), "row lock": RowLock()}


@pytest.mark.postgres
@pytest.mark.parametrize("form", FORMS_OF)
def test_both_other_forms_are_had_on_postgresql(form: str) -> None:
    """S-7.3: row lock and lease."""
    lock = "lock" if form == "lease" else None
    table: Table[bytes] = Table("jobs", id="id", payload="body", group="grp", locked_until=lock, fifo=True)
    assert SqlBroker("postgresql://h/d").queue(table, group="g", claim=FORMS_OF[form]).limit(1) == 1
