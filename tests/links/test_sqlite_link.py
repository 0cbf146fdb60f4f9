"""A link on a real SQLite file: what is claimed, in which order, when, and how far ahead."""

from pathlib import Path
from typing import Any

import pytest
import trio

from links.abc import Link, Received
from links.sql import Lease, Table
from settlement.attempts import RETRY_HEADER
from settlement.sql import Delay, PutBack
from tests.links.sqlite_kit import (
    TIMES,
    Database,
    Gate,
    bodies,
    finish,
    near,
    now,
    open_link,
    say,
    seconds,
    stored,
    until,
)

pytestmark = pytest.mark.sqlite


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


# --- the claim


@pytest.mark.parametrize("times", TIMES)
async def test_the_claim_writes_expiry_and_attempt(times: str, tmp_path: Path) -> None:
    """S-2.5: the row holds now + lease and attempt + 1; the delivery reports the value before, the first is 1."""
    database = Database(tmp_path / "q.db", times).create()
    database.add(b"body")
    before, clock = now(), trio.current_time()
    async with open_link(database.broker().queue(database.table(), claim=Lease(30.0))) as link:
        (received,) = await link.receive(3)
        row = database.row()
        assert received.token == (1, row["locked_until"], 2)
    assert near(seconds(row["locked_until"]), before + 30)
    assert (received.delivery.attempt, received.delivery.redelivery_count) == (1, 0)
    assert (received.delivery.id, received.delivery.source, received.delivery.key) == ("1", "jobs", None)
    assert received.expires is not None
    assert clock + 30 <= received.expires <= trio.current_time() + 30


async def test_a_null_attempt_counts_as_one(tmp_path: Path) -> None:
    """DESIGN 6: the claim writes COALESCE(attempt, 1) + 1."""
    database = Database(tmp_path / "q.db")
    database.run("CREATE TABLE jobs (id INTEGER PRIMARY KEY, p BLOB, attempt INTEGER, locked_until REAL)")
    database.run("INSERT INTO jobs (p) VALUES ('x')")
    table = Table("jobs", id="id", payload="p", attempt="attempt", locked_until="locked_until")
    async with open_link(database.broker().queue(table)) as link:
        (received,) = await link.receive(1)
        assert received.delivery.attempt == 1
        assert database.row()["attempt"] == 2


async def test_without_attempt_column_the_header_counts(tmp_path: Path) -> None:
    """C-2.2: the retry-count header, and no redelivery count."""
    database = Database(tmp_path / "q.db", counts=False).create()
    database.run("INSERT INTO jobs (payload, headers) VALUES ('x', ?)", f'{{"{RETRY_HEADER}": "4"}}')
    async with open_link(database.broker().queue(database.table())) as link:
        (received,) = await link.receive(1)
    assert (received.delivery.attempt, received.delivery.redelivery_count) == (5, None)


@pytest.mark.parametrize("times", TIMES)
async def test_only_what_is_due_free_and_unfinished_is_claimed(times: str, tmp_path: Path) -> None:
    """S-2.1: group, retry_after ≤ now, processed_at NULL, locked_until NULL or past."""
    database = Database(tmp_path / "q.db", times, grouped=True, marks=True, retries="").create()
    past, future = stored(now() - 5, times), stored(now() + 500, times)
    for group, due, done, lease, payload in [
        ("mail", None, None, None, b"null is due"),
        ("mail", past, None, past, b"due, and its lease has passed"),
        ("mail", future, None, None, b"not due"),
        ("mail", past, past, None, b"finished"),
        ("mail", past, None, future, b"leased"),
        ("else", past, None, None, b"another group's"),
    ]:
        database.run(
            "INSERT INTO jobs (grp, retry_after, processed_at, locked_until, payload) VALUES (?, ?, ?, ?, ?)",
            *(group, due, done, lease, payload),
        )
    async with open_link(database.broker().queue(database.table(), group="mail")) as link:
        assert bodies(await link.receive(10)) == [b"null is due", b"due, and its lease has passed"]


async def test_the_order_is_priority_retry_after_id(tmp_path: Path) -> None:
    """S-2.2: in the claim and within it, whatever order the rows have in the file."""
    database = Database(tmp_path / "q.db")
    database.run(
        "CREATE TABLE jobs (id INTEGER PRIMARY KEY, p BLOB, prio INTEGER NOT NULL, due REAL NOT NULL, lease REAL)"
    )
    for key, prio, due in [(1, 2, 1.0), (2, 1, 2.0), (3, 1, 1.0), (5, 1, 1.0), (4, 1, 1.0), (6, 0, 9.0)]:
        database.run("INSERT INTO jobs VALUES (?, ?, ?, ?, NULL)", key, b"%d" % key, prio, due)
    table = Table("jobs", id="id", payload="p", priority="prio", retry_after="due", locked_until="lease")
    async with open_link(database.broker().queue(table)) as link:
        assert bodies(await link.receive(4)) == [b"6", b"3", b"4", b"5"]
        assert bodies(await link.receive(4)) == [b"2", b"1"]


async def test_two_brokers_never_get_the_same_row(tmp_path: Path) -> None:
    """S-2.11: 200 rows, two links on one file: disjoint and complete, nothing left."""
    database = Database(tmp_path / "q.db").create()
    database.add(*[b"%d" % number for number in range(200)])
    seen: list[list[bytes]] = [[], []]

    async def consume(found: list[bytes], nursery: trio.Nursery) -> None:
        async with open_link(database.broker(0.02).queue(database.table())) as link:
            while True:
                received = await link.receive(7)
                found += bodies(received)
                assert not any(await link.settle(finish(received)))
                if len(seen[0]) + len(seen[1]) >= 200:
                    nursery.cancel_scope.cancel()

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for found in seen:
                nursery.start_soon(consume, found, nursery)
    assert sorted(map(int, [*seen[0], *seen[1]])) == list(range(200))
    assert database.rows() == []


# --- when it looks


async def test_an_empty_queue_is_polled(tmp_path: Path) -> None:
    """S-9.5: a row that somebody else inserts is found within the poll interval, ±20 %."""
    database = Database(tmp_path / "q.db").create()
    async with open_link(database.broker(poll_interval=0.05).queue(database.table())) as link:
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, database.add, b"late")
                assert bodies(await link.receive(1)) == [b"late"]


async def test_a_publish_wakes_at_once(tmp_path: Path) -> None:
    """S-9.1: a publish through this broker does not wait for a poll, neither in a table nor in a group."""
    database = Database(tmp_path / "q.db", grouped=True).create()
    broker = database.broker(poll_interval=3600.0)
    async with open_link(broker.queue(database.table(), group="mail")) as link:
        with trio.move_on_after(0.1):
            await link.receive(1)
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(broker.publisher("mail").publish, b"now")
                assert bodies(await link.receive(1)) == [b"now"]


async def test_what_is_put_back_or_delayed_wakes_when_it_is_due(tmp_path: Path) -> None:
    """S-2.9: this link's own settlements need no poll."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"body")
    async with open_link(database.broker(poll_interval=3600.0).queue(database.table())) as link:
        with trio.fail_after(10):
            (first,) = await link.receive(2)
            await link.settle([say(first, PutBack(count=False))])
            (second,) = await link.receive(2)
            started = trio.current_time()
            await link.settle([say(second, Delay(0.2, count=False))])
            (third,) = await link.receive(2)
            assert trio.current_time() - started >= 0.2
    assert [each.delivery.attempt for each in (first, second, third)] == [1, 2, 3]


async def test_an_earlier_due_time_shortens_a_wait_under_way(tmp_path: Path) -> None:
    database = Database(tmp_path / "q.db").create()
    database.add(b"body")
    found: list[Received[Any]] = []

    async def receive(link: Link[bytes]) -> None:
        found.extend(await link.receive(1))

    async with open_link(database.broker(poll_interval=3600.0).queue(database.table())) as link:
        (first,) = await link.receive(2)
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(receive, link)
                await trio.sleep(0.1)
                await link.settle([say(first, Delay(0.1, count=False))])
    assert bodies(found) == [b"body"]


# --- claimed ahead


async def hops(link: Link[bytes], gate: Gate, count: int, room: int) -> int:
    """The hops that it takes to receive and finish so many."""
    gate.entered = 0
    done = 0
    while done < count:
        received = await link.receive(room)
        assert not any(await link.settle(finish(received)))
        done += len(received)
    return gate.entered


@pytest.mark.parametrize("room", [1, 5])
async def test_a_settlement_and_the_next_claim_share_a_hop(room: int, gate: Gate, tmp_path: Path) -> None:
    """DESIGN 6: one transaction per settlement, and one for the first claim; every row once, in order."""
    database = Database(tmp_path / "q.db").create()
    database.add(*[b"%d" % number for number in range(20)])
    async with open_link(database.broker().queue(database.table())) as link:
        assert await hops(link, gate, 20, room) == 20 // room + 1
    assert database.rows() == []


async def test_after_a_short_claim_nothing_is_claimed_ahead(tmp_path: Path) -> None:
    """S-2.9: the queue was empty then; the next look is the poll's, or a wake's."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"0")
    async with open_link(database.broker().queue(database.table())) as link:
        received = await link.receive(2)
        database.add(b"1")
        await link.settle(finish(received))
        assert database.row()["locked_until"] is None


async def test_never_more_is_held_than_room_was_given(tmp_path: Path) -> None:
    """DESIGN 3.1: what is claimed ahead takes the places that the settled ones gave free."""
    database = Database(tmp_path / "q.db").create()
    database.add(*[b"%d" % number for number in range(20)])
    async with open_link(database.broker().queue(database.table())) as link:
        received = await link.receive(6)
        await link.settle(finish(received[:2]))
        await link.settle(finish(received[2:3]))
        locked = [row for row in database.rows() if row["locked_until"] is not None]
        assert len(locked) == 6
        assert bodies(await link.receive(2)) == [b"6", b"7"]
        assert bodies(await link.receive(2)) == [b"8"]


async def test_what_was_claimed_ahead_is_given_back_by_stop(tmp_path: Path) -> None:
    """DESIGN 4, drain: received but not started: given back at once, the attempt as before the claim."""
    database = Database(tmp_path / "q.db").create()
    database.add(*[b"%d" % number for number in range(4)])
    async with open_link(database.broker().queue(database.table())) as link:
        received = await link.receive(2)
        await link.settle(finish(received))
        assert [row["attempt"] for row in database.rows()] == [2, 2]
        link.stop()
        await until(lambda: all(row["locked_until"] is None for row in database.rows()))
        assert [row["attempt"] for row in database.rows()] == [1, 1]


async def test_after_stop_nothing_is_claimed(tmp_path: Path) -> None:
    """S-2.13: neither by a settlement nor by a `receive` that was waiting."""
    database = Database(tmp_path / "q.db").create()
    database.add(*[b"%d" % number for number in range(4)])
    async with open_link(database.broker(0.02).queue(database.table())) as link:
        received = await link.receive(2)
        link.stop()
        await link.settle(finish(received))
        with trio.move_on_after(0.1):
            await link.receive(2)
        assert [(row["attempt"], row["locked_until"]) for row in database.rows()] == [(1, None), (1, None)]


async def test_what_was_claimed_ahead_is_given_back_by_the_goodbye(tmp_path: Path) -> None:
    """Its attempt is as before; that of a delivery in hand stays counted (S-3, last row)."""
    database = Database(tmp_path / "q.db").create()
    database.add(*[b"%d" % number for number in range(3)])
    async with open_link(database.broker().queue(database.table())) as link:
        received = await link.receive(2)
        received[1].started = True
        await link.settle(finish(received[:1]))
    rows = [(row["id"], row["attempt"], row["locked_until"]) for row in database.rows()]
    assert rows == [(2, 2, None), (3, 1, None)]


async def test_what_was_claimed_ahead_too_long_ago_is_claimed_anew(tmp_path: Path) -> None:
    """DESIGN 3.4: with less than three quarters of its lease it is given back first: the keeper can renew in time."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"0", b"1")
    async with open_link(database.broker().queue(database.table(), claim=Lease(0.4))) as link:
        await link.settle(finish(await link.receive(1)))
        await trio.sleep(0.15)
        with trio.fail_after(5):
            (received,) = await link.receive(1)
        assert received.expires is not None
        assert received.expires - trio.current_time() > 0.3
        assert (received.delivery.body, received.delivery.attempt) == (b"1", 1)


async def test_a_claim_ahead_that_is_not_full_wakes_who_waits(tmp_path: Path) -> None:
    """What a settlement has claimed is handed over at once, not at the next poll, though it was less than asked for."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"0", b"1", b"2")
    found: list[bytes] = []

    async def receive(link: Link[bytes]) -> None:
        found.extend(bodies(await link.receive(1)))

    async with open_link(database.broker(poll_interval=3600.0).queue(database.table())) as link:
        received = await link.receive(2)
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(link.settle, finish(received))
                await trio.lowlevel.checkpoint()
                nursery.start_soon(receive, link)
    assert found == [b"2"]


async def test_a_claim_ahead_takes_no_place_of_a_verb_that_was_not_applied(tmp_path: Path) -> None:
    """Two of three keep their places: one row is claimed, not three."""
    database = Database(tmp_path / "q.db").create()
    database.add(*[b"%d" % number for number in range(9)])
    database.run("CREATE TRIGGER t BEFORE DELETE ON jobs WHEN OLD.id < 3 BEGIN SELECT RAISE(ABORT, 'no'); END")
    async with open_link(database.broker().queue(database.table())) as link:
        received = await link.receive(3)
        await link.settle(finish(received))
        assert [row["id"] for row in database.rows() if row["locked_until"] is not None] == [1, 2, 4]
        await link.settle(finish(received[:2]))
        assert [row["id"] for row in database.rows() if row["locked_until"] is not None] == [1, 2, 4]
