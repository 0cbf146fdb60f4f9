"""A claim by statements of the user's own: it chooses, and nothing is worked on that it does not hold."""

# ruff: noqa: S608 -- the statements are our own

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
import trio

from actors import BatchSubscription, Subscription, open_runtime
from links.abc import Link, Received
from links.errors import CallBroken, LeaseLost, LinkRefused, NotApplied
from settlement import Ack, Delivery, Retry
from tests.links.custom_kit import LEASE, ROW_LOCK, SQLITE, World, world_of
from tests.links.sqlite_kit import bodies, order, until

ALL = [SQLITE, LEASE, ROW_LOCK]


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return world_of(request, tmp_path)


each_form = pytest.mark.parametrize("world", ALL, indirect=True)
on_the_server = pytest.mark.parametrize("world", ALL[1:], indirect=True)
where_it_leases = pytest.mark.parametrize("world", ALL[:2], indirect=True)


async def one(link: Link[Any]) -> Received[Any]:
    with trio.fail_after(10):
        (received,) = await link.receive(1)
    return received


async def until_told(world: World, link: Link[Any], what: str) -> None:
    """Claim, and get nothing, until the link has told this."""
    with trio.fail_after(10), trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def receive() -> None:
                raise AssertionError(f"received {bodies(await link.receive(1))}")

            nursery.start_soon(receive)
            await until(lambda: any(what in line for line in world.told))
            scope.cancel()


# --- what it is for


@each_form
async def test_it_chooses_and_the_other_fetches(world: World) -> None:
    """S-10.1: the newest row, which no claim of ours would take first, with what fetch gives of it; attempts count."""
    world.add(3)
    queue = world.queue({"claim": world.claim, "fetch": world.fetch})
    async with world.linked(queue) as link:
        received = await one(link)
        assert (received.delivery.id, received.delivery.body, received.delivery.attempt) == ("3", b"fetched 3", 1)
        assert list(await link.settle([order(queue, received, Retry())])) == [None]
        again = await one(link)
        assert (again.delivery.id, again.delivery.attempt) == ("3", 2)
        assert list(await link.settle([order(queue, again, Ack())])) == [None]
        link.stop()
    assert world.rows("id, done IS NOT NULL") == [(1, False), (2, False), (3, True)]


@each_form
async def test_all_of_a_queue(world: World) -> None:
    """What is claimed behind a settlement is claimed by that statement, too."""
    world.add(7)
    seen: list[str] = []

    async def handle(delivery: Delivery[bytes]) -> None:
        seen.append(delivery.id)

    queue = world.queue({"claim": world.claim})
    with trio.fail_after(20):
        async with open_runtime(Subscription(queue, handle)) as runtime:
            await until(lambda: runtime.ledger("here").acked == 7)
    assert seen == ["7", "6", "5", "4", "3", "2", "1"]


@each_form
async def test_a_batch(world: World) -> None:
    """Several rows of one claim, each with its own content."""
    world.add(4)
    seen: list[set[bytes]] = []

    async def handle(deliveries: list[Delivery[bytes]]) -> None:
        seen.append({each.body for each in deliveries})

    queue = world.queue({"claim": world.claim, "fetch": world.fetch})
    with trio.fail_after(20):
        async with open_runtime(BatchSubscription(queue, handle, size=2, wait=1.0)) as runtime:
            await until(lambda: runtime.ledger("here").acked == 4)
    assert seen == [{b"fetched 4", b"fetched 3"}, {b"fetched 2", b"fetched 1"}]


@on_the_server
async def test_without_a_fetch_the_row_is_read_by_us(world: World) -> None:
    world.add(2)
    async with world.linked(world.queue({"claim": world.claim})) as link:
        assert (await one(link)).delivery.body == b"2"


@each_form
async def test_in_row_mode(world: World) -> None:
    """The row as a `dict`: as it was before the claim, or, by fetch, what that gives."""
    world.add()
    fetch = {} if world.name != "sqlite" else {"fetch": "SELECT id, 1 AS attempt FROM jobs WHERE id = :id"}
    async with world.linked(world.queue({"claim": world.claim, **fetch}, payload=None)) as link:
        message = (await one(link)).delivery.message
    assert (message["id"], message["attempt"]) == (1, 1)
    assert message.get("locked_until") is None


@each_form
async def test_an_empty_claim_fetches_nothing(world: World) -> None:
    """K-93; NULL is no row, as a function gives it that has found none."""
    world.run("CREATE TABLE calls (id integer)")
    world.run("CREATE TABLE looks (id integer)" if world.name == "sqlite" else "CREATE SEQUENCE looks START 1")
    if world.name == "sqlite":
        claim = "INSERT INTO looks VALUES (nullif(:until, :until)) RETURNING id"
        looks = "SELECT count(*) FROM looks"
    else:
        claim = world.given("SELECT CASE WHEN nextval('looks') < 0 THEN 1::bigint END")
        looks = "SELECT last_value FROM looks"
    fetch = f"INSERT INTO calls VALUES (:id) RETURNING {world.bytes('a')} AS payload"
    async with world.linked(world.queue({"claim": claim, "fetch": fetch})) as link:
        with trio.fail_after(10), trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(link.receive, 1)
                await until(lambda: world.run(looks)[0][0] >= 3)
                scope.cancel()
    assert world.run("SELECT count(*) FROM calls") == [(0,)]
    assert world.told == []


@each_form
@pytest.mark.parametrize(
    ("fetch", "why"),
    [
        (
            "SELECT payload FROM jobs WHERE id = :id AND id > 1",
            "the statement for 'fetch' gave 0 rows for row 1, not 1",
        ),
        (
            "SELECT payload FROM jobs WHERE id >= :id AND id < 3",
            "the statement for 'fetch' gave 2 rows for row 1, not 1",
        ),
        (
            "SELECT note, done FROM jobs WHERE id = :id",
            "the statement for 'fetch' gave no column 'payload' for row 1; it gave note, done",
        ),
    ],
)
async def test_what_cannot_be_fetched_is_undecodable(world: World, fetch: str, why: str) -> None:
    """S-10.3: the decode policy answers, the default of which drops it; no handler is called."""
    world.add(2)
    world.run("UPDATE jobs SET grp = 'elsewhere' WHERE id = 2")
    async with world.linked(world.queue({"claim": world.claim, "fetch": fetch})) as link:
        received = await one(link)
        assert str(received.unreadable) == why
        link.stop()
        await link.give_back([received])

    async def handle(_: Delivery[bytes]) -> None:
        raise AssertionError

    with trio.fail_after(20):
        async with open_runtime(
            Subscription(world.queue({"claim": world.claim, "fetch": fetch}), handle, name="s")
        ) as runtime:
            await until(lambda: runtime.ledger("s").dropped == 1)
    assert world.rows("done IS NOT NULL") == [(True,), (False,)]


@on_the_server
async def test_a_table_that_is_altered_meanwhile(world: World) -> None:
    """What was prepared for other columns is prepared anew."""
    world.add(9)
    queue = world.queue({"claim": world.claim, "fetch": "SELECT * FROM jobs WHERE id = :id"})
    async with world.linked(queue) as link:
        for number in range(9, 0, -1):
            received = await one(link)
            assert received.delivery.body == str(number).encode()
            assert list(await link.settle([order(queue, received, Ack())])) == [None]
        await trio.to_thread.run_sync(world.run, "ALTER TABLE jobs ADD COLUMN more int")
        world.run("INSERT INTO jobs (id, payload) VALUES (10, 'more')")
        assert (await one(link)).delivery.body == b"more"


# --- what it may not do


@where_it_leases
async def test_one_that_forgets_the_lease(world: World) -> None:
    """It is passed over and told, never worked on, and the row is as it was."""
    world.add()
    async with world.linked(world.queue({"claim": "SELECT id FROM jobs WHERE :until IS NOT NULL"})) as link:
        await until_told(
            world, link, "row 1 passed over: the statement for 'claim' gave it, but it is not there, or not leased"
        )
    assert world.rows("attempt, locked_until") == [(1, None)]


@where_it_leases
async def test_one_that_leases_otherwise(world: World) -> None:
    """Until another time than :until: nobody knows how long it is ours."""
    world.add()
    claim = f"UPDATE jobs SET locked_until = {world.now(7)} WHERE :until IS NOT NULL RETURNING id"
    async with world.linked(world.queue({"claim": claim})) as link:
        await until_told(world, link, "not leased until :until")


@where_it_leases
async def test_a_row_that_somebody_else_has_leased(world: World) -> None:
    """Whoever it is: its lease is not the claim's."""
    world.add()
    world.run(f"UPDATE jobs SET locked_until = {world.now(60)}, attempt = 2")
    before = world.rows("attempt, locked_until")
    async with world.linked(world.queue({"claim": "SELECT id FROM jobs WHERE :until IS NOT NULL"})) as link:
        await until_told(world, link, "row 1 passed over")
    assert world.rows("attempt, locked_until") == before


@where_it_leases
async def test_a_row_that_is_in_hand_is_not_leased_anew(world: World) -> None:
    """The claim fails whole: else its handler would lose it to itself."""
    world.add()
    claim = "UPDATE jobs SET locked_until = :until, attempt = attempt + 1 RETURNING id"
    queue = world.queue({"claim": claim})
    async with world.linked(queue, limit=2) as link:
        with trio.fail_after(10):
            (received,) = await link.receive(2)
            with pytest.raises(CallBroken, match="the statement for 'claim' has leased row 1, which is in hand"):
                await link.receive(1)
        link.stop()
        assert list(await link.settle([order(queue, received, Ack())])) == [None]
    assert world.rows() == [(1, 2, True)]


@pytest.mark.parametrize("world", [LEASE], indirect=True)
async def test_one_that_waits_for_a_lock(world: World) -> None:
    """It does not hold up the queue's other work for long."""
    world.add()
    async with world.linked(world.queue({"claim": world.claim.replace("SKIP LOCKED", "")})) as link:
        with psycopg.connect(world.url) as other:
            other.execute("SELECT FROM jobs FOR UPDATE")
            why = "the statement for 'claim': canceling statement due to lock timeout"
            with trio.fail_after(10), pytest.raises(CallBroken, match=why):
                await link.receive(1)
        assert (await one(link)).delivery.id == "1"


@pytest.mark.parametrize("world", [ROW_LOCK], indirect=True)
async def test_a_row_that_somebody_else_has_locked(world: World) -> None:
    """It is passed over, whatever the statement says; free again, it is claimed."""
    world.add()
    async with world.linked(world.queue({"claim": "SELECT id FROM jobs"})) as link:
        with psycopg.connect(world.url) as other:
            other.execute("SELECT FROM jobs FOR UPDATE")
            await until_told(world, link, "row 1 passed over: the statement for 'claim' gave it, but it is not there")
        assert (await one(link)).delivery.id == "1"


@pytest.mark.parametrize("world", [ROW_LOCK], indirect=True)
async def test_a_verb_that_fails_behind_it(world: World) -> None:
    """The row stays in hand; what the statement wrote is undone with the verb."""
    world.add()
    world.run("ALTER TABLE jobs ADD CHECK (done IS NULL)")
    queue = world.queue({"claim": "UPDATE jobs SET note = 'mine' WHERE done IS NULL RETURNING id"})
    async with world.linked(queue) as link:
        received = await one(link)
        link.stop()
        (verdict,) = await link.settle([order(queue, received, Ack())])
        assert isinstance(verdict, NotApplied)
        assert list(await link.settle([order(queue, received, Retry())])) == [None]
    assert world.rows("note, attempt") == [(None, 2)]


@pytest.mark.parametrize("world", [ROW_LOCK], indirect=True)
async def test_a_row_that_cannot_be_committed_stops_no_other(world: World) -> None:
    """It comes first each time, and is passed over for a while."""
    world.add(3)
    world.run("CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'never'; END $$")
    world.run(
        "CREATE CONSTRAINT TRIGGER refuse AFTER UPDATE ON jobs DEFERRABLE INITIALLY DEFERRED FOR EACH ROW "
        "WHEN (NEW.id = 3) EXECUTE FUNCTION refuse()"
    )
    queue = world.queue({"claim": world.claim})
    async with world.linked(queue) as link:
        received = await one(link)
        assert received.delivery.id == "3"
        (verdict,) = await link.settle([order(queue, received, Ack())])
        assert isinstance(verdict, LeaseLost)
        for name in ("2", "1"):
            received = await one(link)
            assert received.delivery.id == name
            assert list(await link.settle([order(queue, received, Ack())])) == [None]
        link.stop()
    assert world.rows("done IS NOT NULL") == [(True,), (True,), (False,)]


@each_form
@pytest.mark.parametrize("what", ["due = {later}", "done = {later}", "grp = 'elsewhere'"])
async def test_a_row_that_is_not_to_be_had(world: World, what: str) -> None:
    """Not due, finished, of another group: passed over and told, and the others go on."""
    world.add(2)
    world.run(f"UPDATE jobs SET {what.format(later=world.now(60))} WHERE id = 1")
    some = "(SELECT id FROM jobs WHERE locked_until IS NULL ORDER BY id LIMIT :room)"
    claim = (
        f"UPDATE jobs SET locked_until = :until, attempt = attempt + 1 WHERE id IN {some} RETURNING id"
        if world.leased
        else "SELECT id FROM jobs ORDER BY id FOR UPDATE SKIP LOCKED"
    )
    async with world.linked(world.queue({"claim": claim}), limit=2, size=2) as link:
        with trio.fail_after(10):
            (received,) = await link.receive(2)
    assert received.delivery.id == "2"
    assert len(world.told) == 1
    assert "row 1 passed over: the statement for 'claim' gave it, but it is not " in world.told[0]


@each_form
async def test_an_id_that_is_not_there(world: World) -> None:
    claim = world.given("SELECT 999")
    async with world.linked(world.queue({"claim": claim})) as link:
        await until_told(world, link, "row 999 passed over: the statement for 'claim' gave it, but it is not there")


@on_the_server
async def test_the_same_id_twice(world: World) -> None:
    """It is one delivery."""
    world.add()
    twice = "SELECT id FROM jobs, generate_series(1, 2) WHERE done IS NULL FOR UPDATE OF jobs SKIP LOCKED"
    if world.leased:
        twice = f"WITH c AS ({world.claim}) SELECT id FROM c UNION ALL SELECT id FROM c"
    async with world.linked(world.queue({"claim": twice}), limit=2, size=2) as link:
        with trio.fail_after(10):
            (received,) = await link.receive(2)
    assert received.delivery.id == "1"
    assert world.told == []


@each_form
async def test_more_than_there_is_room_for(world: World) -> None:
    """The claim fails, and says how to end the statement; nothing of it stands."""
    world.add(3)
    claim = world.claim.replace("LIMIT :room", "")
    why = "the statement for 'claim' gave 3 rows, and there is room for 1: let it end with LIMIT :room"
    async with world.linked(world.queue({"claim": claim})) as link:
        if world.leased:
            with trio.fail_after(10), pytest.raises(CallBroken, match=why):
                await link.receive(1)
        else:
            await until_told(world, link, why)
    assert world.rows() == [(1, 1, False), (2, 1, False), (3, 1, False)]


@each_form
async def test_one_that_gives_no_rows(world: World) -> None:
    world.add()
    claim = "UPDATE jobs SET attempt = 9" + (" WHERE :until IS NOT NULL" if world.leased else "")
    why = "the statement for 'claim' gives no rows, and must give ids"
    async with world.linked(world.queue({"claim": claim})) as link:
        if world.leased:
            with trio.fail_after(10), pytest.raises(CallBroken, match=why):
                await link.receive(1)
        else:
            await until_told(world, link, why)
    assert world.rows() == [(1, 1, False)]


@each_form
@pytest.mark.parametrize("event", ["claim", "fetch"])
async def test_one_that_fails(world: World, event: str) -> None:
    """S-2.10, K-92: the claim fails and names the statement, nothing is lost, and it does when it can."""
    world.add()
    world.run("CREATE TABLE flag (number text)")
    world.run("INSERT INTO flag VALUES ('nonsense')")
    wrong = "json((SELECT number FROM flag)) IS NOT NULL" if world.name == "sqlite" else (
        "(SELECT number::int FROM flag) > 0"
    )  # fmt: skip
    custom = {"claim": world.claim.replace("grp = :group", f"grp = :group AND {wrong}"), "fetch": world.fetch}
    if event == "fetch":
        custom = {"claim": world.claim, "fetch": f"{world.fetch} AND {wrong}"}
    queue = world.queue(custom)
    async with world.linked(queue) as link:
        why = f"the statement for '{event}': (malformed JSON|invalid input syntax for type integer)"
        if world.leased:
            with trio.fail_after(10), pytest.raises(CallBroken, match=why):
                await link.receive(1)
        else:
            await until_told(world, link, f"the statement for '{event}': invalid input syntax for type integer")
        assert world.rows("attempt") == [(1,)]
        world.run("UPDATE flag SET number = '1'")
        received = await one(link)
        assert (received.delivery.attempt, received.delivery.body) == (1, b"fetched 1")
        assert list(await link.settle([order(queue, received, Ack())])) == [None]
        link.stop()


@each_form
@pytest.mark.parametrize("event", ["claim", "fetch"])
async def test_one_that_cannot_be_prepared(world: World, event: str) -> None:
    """S-12.3: refused at start-up, naming the event."""
    custom = {"claim": world.claim, "fetch": world.fetch}
    queue = world.queue({**custom, event: custom[event].replace("grp", "nothing")})
    with pytest.raises(LinkRefused, match=rf"'test', table 'jobs': custom\['{event}'\] cannot be .*nothing"):
        async with world.linked(queue):
            pass


@each_form
async def test_two_claimers(world: World) -> None:
    """S-2.11: 60 rows, two runtimes: each row once."""
    world.add(60)
    seen: list[str] = []

    async def handle(delivery: Delivery[bytes]) -> None:
        seen.append(delivery.id)

    queues = [world.queue({"claim": world.claim}) for _ in range(2)]
    with trio.fail_after(30):
        async with (
            open_runtime(Subscription(queues[0], handle, name="a", concurrency=3)) as one_of_them,
            open_runtime(Subscription(queues[1], handle, name="b", concurrency=3)) as other,
        ):
            await until(lambda: one_of_them.ledger("a").acked + other.ledger("b").acked == 60, within=25)
    assert sorted(map(int, seen)) == [*range(1, 61)]
