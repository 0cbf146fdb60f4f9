"""What a link holds on a real SQLite file: leases on the real clock, what a cancel leaves, and a locked file."""

import math
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from links.errors import CallBroken, LeaseLost, NotApplied, SettlementUnknown
from links.sql import Lease, SqlQueue
from links.sql.sqlite import times
from settlement.sql import Delay
from tests.links.sqlite_kit import (
    TIMES,
    Database,
    Foreigner,
    Gate,
    attached,
    bodies,
    finish,
    near,
    now,
    open_link,
    say,
    until,
)

pytestmark = pytest.mark.sqlite


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


# --- the lease


@pytest.mark.parametrize("times", TIMES)
async def test_extend_moves_the_token_forward(times: str, tmp_path: Path) -> None:
    """S-5.3: a new expiry in the row, the token and `expires` moved; the settlement carries the new one."""
    database = Database(tmp_path / "q.db", times).create()
    database.add(b"a", b"b")
    async with open_link(database.broker().queue(database.table(), claim=Lease(30.0))) as link:
        received = await link.receive(2)
        old = [(each.token, each.expires) for each in received]
        await trio.sleep(0.01)
        assert await link.extend(received) == []
        for each, (token, expires), row in zip(received, old, database.rows(), strict=True):
            assert each.token == (row["id"], row["locked_until"], 2) != token
            assert None not in (each.expires, expires)
            assert (each.expires or 0) > (expires or 0) + 0.009
        assert await link.settle(finish(received)) == [None, None]
    assert database.rows() == []


async def test_extend_returns_those_that_are_lost(tmp_path: Path) -> None:
    """S-5.4: 0 rows: lost, and its settlement is LeaseLost; the others are extended."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a", b"b")
    async with open_link(database.broker().queue(database.table())) as link:
        lost, kept = await link.receive(2)
        database.run("UPDATE jobs SET attempt = 9 WHERE id = 1")
        assert await link.extend([lost, kept]) == [lost]
        verdicts = await link.settle(finish([lost, kept]))
        assert [type(verdict) for verdict in verdicts] == [LeaseLost, type(None)]


async def test_a_row_is_kept_over_several_leases(tmp_path: Path) -> None:
    """S-5.5: extended in time, nobody else gets it."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"body")
    queue = database.broker().queue(database.table(), claim=Lease(0.3))
    other = database.broker(0.02).queue(database.table())
    async with open_link(queue) as link, open_link(other) as rival:
        received = await link.receive(1)
        with trio.move_on_after(1.0) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(rival.receive, 1)
                while True:
                    await trio.sleep(0.1)
                    assert await link.extend(received) == []
        assert scope.cancelled_caught
        assert await link.settle(finish(received)) == [None]


async def test_the_lease_is_a_duration_on_our_own_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DESIGN 6: this machine's clock may jump by a day; `expires` is monotonic time, and the tokens still hold."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a")
    real = times.now
    async with open_link(database.broker().queue(database.table(), claim=Lease(30.0))) as link:
        (received,) = await link.receive(1)
        for jump in (86_400, -86_400):
            monkeypatch.setattr(times, "now", lambda jump=jump: real() + jump * 1_000_000)
            started = trio.current_time()
            assert await link.extend([received]) == []
            assert received.expires is not None
            assert started + 30 <= received.expires <= trio.current_time() + 30
            assert near(received.token[1], now() + jump + 30)
        assert await link.settle(finish([received])) == [None]


async def test_a_settlement_waits_for_an_extension_in_flight(gate: Gate, tmp_path: Path) -> None:
    """S-5.4: never both at once for one delivery: the settlement carries the token that the extension wrote."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a")
    broker = database.broker()
    verdicts: list[Any] = []
    async with open_link(broker.queue(database.table())) as link:
        received = await link.receive(1)

        async def settle() -> None:
            verdicts.extend(await link.settle(finish(received)))

        gate.shut()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(broker.publisher("jobs").publish, b"b")
            await until(lambda: gate.entered)  # so that what follows would share a hop
            nursery.start_soon(link.extend, received)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(settle)
            await trio.testing.wait_all_tasks_blocked()
            assert await link.extend(received) == []  # one that is being settled is left alone
            gate.open()
    assert verdicts == [None]
    assert [row["payload"] for row in database.rows()] == [b"b"]


async def test_an_extension_that_is_cancelled_in_flight_moves_the_token_all_the_same(
    gate: Gate, tmp_path: Path
) -> None:
    """S-5.4: nobody waits any more, the row has its new expiry, and the settlement knows it."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a")
    async with open_link(database.broker().queue(database.table())) as link:
        (received,) = await link.receive(1)
        expires = received.expires
        gate.shut()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(link.extend, [received])
                await until(lambda: gate.entered)
                scope.cancel()
        assert received.expires == expires
        gate.open()
        assert await link.settle(finish([received])) == [None]
    assert database.rows() == []


async def test_give_back_restores_the_attempt(tmp_path: Path) -> None:
    """DESIGN 4, drain: a handler that was never called spent no attempt; another link gets the row at once."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a", b"b")
    async with open_link(database.broker().queue(database.table())) as link:
        received = await link.receive(2)
        await link.give_back(received[:1])
        rows = [(row["attempt"], row["locked_until"] is None) for row in database.rows()]
        assert rows == [(1, True), (2, False)]
        await link.give_back(received[:1])  # once is enough
        assert database.rows()[0]["attempt"] == 1
        received[1].started = True
        await link.give_back(received)
        assert [(row["attempt"], row["locked_until"]) for row in database.rows()] == [(1, None), (2, None)]


# --- cancellation


async def claim_and_cancel(queue: SqlQueue[bytes], gate: Gate) -> None:
    async with open_link(queue) as link:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                gate.shut()
                nursery.start_soon(link.receive, 2)
                await until(lambda: gate.entered)
                scope.cancel()
                gate.open()
        assert [(row["attempt"], row["locked_until"]) for row in link_rows(queue)] == [(1, None), (1, None)]


def link_rows(queue: SqlQueue[bytes]) -> list[dict[str, Any]]:
    return Database(Path(queue.broker.name.removeprefix("sqlite:///"))).rows()


async def test_a_claim_that_is_cancelled_in_flight_is_given_back(gate: Gate, tmp_path: Path) -> None:
    """S-13.1, OQ-S13: a cancelled `receive` has taken nothing: when it has ended, the rows are as they were."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a", b"b")
    await claim_and_cancel(database.broker().queue(database.table()), gate)


async def test_a_claim_that_is_cancelled_before_it_began_is_withdrawn(gate: Gate, tmp_path: Path) -> None:
    """S-13.1: it stood behind another hop and never reached the database."""
    database = Database(tmp_path / "q.db").create()
    broker = database.broker()
    async with open_link(broker.queue(database.table())) as link:
        gate.shut()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(broker.publisher("jobs").publish, b"a")
            await until(lambda: gate.entered)
            with trio.move_on_after(0.05):
                await link.receive(2)
            gate.open()
        await until(database.rows)
        assert (database.row()["attempt"], database.row()["locked_until"]) == (1, None)


@pytest.mark.parametrize("delay", [0.0, 0.0002, 0.0005, 0.001, 0.002])
async def test_a_cancel_at_any_moment_leaves_no_row_held(delay: float, tmp_path: Path) -> None:
    """S-13.1: after the goodbye every row is free; a row that was never handed over has spent no attempt."""
    database = Database(tmp_path / "q.db").create()
    database.add(*[b"%d" % number for number in range(30)])
    broker = database.broker(0.01)
    handed: dict[str, int] = {}
    finished = 0
    async with broker.connect():
        for _ in range(6):
            with trio.move_on_after(0.004 + delay):
                async with attached(broker.queue(database.table())) as link:
                    while True:
                        received = await link.receive(2)
                        for each in received:
                            each.started = True
                            handed[each.delivery.id] = each.delivery.attempt
                        finished += (await link.settle(finish(received[:1]))).count(None)
            assert not [row for row in database.rows() if row["locked_until"] is not None]
    rows = database.rows()
    assert len(rows) == 30 - finished
    assert [row["attempt"] for row in rows] == [handed.get(str(row["id"]), 0) + 1 for row in rows]


async def test_a_settlement_is_shielded(gate: Gate, tmp_path: Path) -> None:
    """DESIGN 4: cancelled while its COMMIT is under way, it says what became of it."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a")
    verdicts: list[Any] = []
    async with open_link(database.broker().queue(database.table())) as link:
        received = await link.receive(1)
        gate.shut()

        async def settle() -> None:
            verdicts.extend(await link.settle(finish(received)))

        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(settle)
                await until(lambda: gate.entered)
                scope.cancel()
                threading.Timer(0.05, gate.open).start()
    assert verdicts == [None]
    assert database.rows() == []


async def test_a_cancel_from_outside_releases_what_is_held(tmp_path: Path) -> None:
    """DESIGN 4, first row: broker and link are cancelled together, and the leases are let go all the same.

    A handler that was never called has spent no attempt.
    """
    database = Database(tmp_path / "q.db").create()
    database.add(b"a", b"b")
    with trio.CancelScope() as scope:
        async with open_link(database.broker().queue(database.table())) as link:
            received = await link.receive(2)
            received[0].started = True
            scope.cancel()
            await trio.sleep_forever()
    assert [(row["attempt"], row["locked_until"]) for row in database.rows()] == [(2, None), (1, None)]


async def test_the_connection_waits_for_the_goodbye_of_its_links(tmp_path: Path) -> None:
    """DESIGN 4: lives first, then connections, also where a life takes a moment to end."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a")
    with trio.CancelScope() as scope:
        async with open_link(database.broker().queue(database.table())) as link:
            await link.receive(1)
            scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.sleep(0.2)
    assert database.row()["locked_until"] is None


async def test_a_goodbye_that_fails_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """S-3.6: the file stays locked by another: within the goodbye, one warning, and the lease runs out by itself."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a", b"b")
    broker = database.broker()
    async with broker.connect(goodbye=1.0):
        queue = broker.queue(database.table(), claim=Lease(2.0))
        with trio.fail_after(5):
            async with attached(queue, goodbye=0.2) as link:
                await link.receive(2)
                foreigner = Foreigner(database)
                foreigner.__enter__()
        assert [record.message for record in caplog.records] == [
            "'test' could not let go 2 rows; they come back when their lease ends, within 2 s"
        ]
        foreigner.__exit__()
    assert len(database.rows()) == 2


async def test_a_statement_that_does_not_end_is_interrupted_by_the_goodbye(tmp_path: Path) -> None:
    """A thread never goes on using a connection that is closed: what runs is interrupted, its row stays as it was."""
    database = Database(tmp_path / "q.db").create()
    database.run(
        "CREATE TRIGGER slow BEFORE DELETE ON jobs BEGIN SELECT count(*) FROM "
        "(WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 4000000000) SELECT x FROM n); END"
    )
    database.add(b"a")
    broker = database.broker()
    started = trio.current_time()
    with trio.move_on_after(0.3) as scope:
        async with broker.connect(goodbye=0.5), attached(broker.queue(database.table()), goodbye=0.3) as link:
            received = await link.receive(1)
            (verdict,) = await link.settle(finish(received))
            assert isinstance(verdict, SettlementUnknown)
    assert scope.cancelled_caught
    assert trio.current_time() - started < 5
    database.run("INSERT INTO dead (payload) VALUES ('the lock is free')")
    assert database.row()["payload"] == b"a"


async def test_a_settlement_without_answer_is_unknown(gate: Gate, tmp_path: Path) -> None:
    """S-5: it is waited for while the lease lasts; what the thread does later is taken in."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a", b"b")
    broker = database.broker()
    queue = broker.queue(database.table(), claim=Lease(1.0))
    async with broker.connect(), attached(queue, goodbye=0.2) as link:
        received = await link.receive(1)
        gate.shut()
        (verdict,) = await link.settle(finish(received))
        assert isinstance(verdict, SettlementUnknown)
        gate.open()
        (following,) = await link.receive(1)
        assert following.delivery.body == b"b"
        assert await link.settle(finish([following])) == [None]
        database.add(b"c")
    assert [(row["payload"], row["locked_until"]) for row in database.rows()] == [(b"c", None)]


# --- a locked file


async def test_a_claim_that_waits_for_the_lock_is_withdrawn_by_stop(tmp_path: Path) -> None:
    """S-2.13: it never begins, or is given back; the `receive` waits until it is cancelled."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a")
    async with open_link(database.broker().queue(database.table())) as link:
        with trio.move_on_after(0.5) as scope:
            async with trio.open_nursery() as nursery:
                with Foreigner(database):
                    nursery.start_soon(link.receive, 1)
                    await trio.sleep(0.15)
                    link.stop()
                await trio.sleep_forever()
        assert scope.cancelled_caught
        await until(lambda: database.row()["locked_until"] is None)
        assert (database.row()["attempt"], database.row()["locked_until"]) == (1, None)


@pytest.mark.parametrize("verb", ["receive", "extend", "settle", "give_back"])
async def test_a_file_that_another_process_locks_is_waited_for(verb: str, tmp_path: Path) -> None:
    """No "database is locked" reaches a user: the verb begins while the lock is held, and ends when it is free."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a", b"b")
    ended: list[Any] = []
    async with open_link(database.broker().queue(database.table())) as link:
        received = await link.receive(1)
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "receive": lambda: link.receive(1),
            "extend": lambda: link.extend(received),
            "settle": lambda: link.settle(finish(received)),
            "give_back": lambda: link.give_back(received),
        }

        async def call() -> None:
            ended.append(await calls[verb]())

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                with Foreigner(database):
                    nursery.start_soon(call)
                    await trio.sleep(0.3)
                    assert ended == []
                    assert database.rows()[0]["locked_until"] == received[0].token[1]
        expected = {"extend": [], "settle": [None], "give_back": None}
        assert bodies(ended[0]) == [b"b"] if verb == "receive" else ended[0] == expected[verb]


async def test_a_file_that_stays_locked_breaks_the_call_not_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its patience: `CallBroken` for a claim and an extension, `NotApplied` for a settlement; all goes on."""
    for module in ("lease_link", "patience"):
        monkeypatch.setattr(f"links.sql.{module}.PATIENCE", 0.3)
    database = Database(tmp_path / "q.db").create()
    database.add(b"a", b"b")
    broker = database.broker()
    async with broker.connect(), attached(broker.queue(database.table()), goodbye=1.0) as link:
        received = await link.receive(1)
        with Foreigner(database):
            for call in (link.receive(1), link.extend(received)):
                with pytest.raises(CallBroken, match="another process has held the lock") as caught:
                    await call
                assert "database is locked" not in repr(caught.getrepr())
            (verdict,) = await link.settle(finish(received))
            assert isinstance(verdict, NotApplied)
            assert "database is locked" not in str(verdict)
        assert [row["id"] for row in database.rows()] == [1, 2]
        with trio.fail_after(5):
            others = await link.receive(2)
        assert bodies(others) == [b"b"]
        assert await link.settle(finish([*received, *others])) == [None, None]


async def test_no_delay_is_too_long(tmp_path: Path) -> None:
    """C-1.9: any finite delay is legal; what no column can hold is cut to the end of year 9999."""
    database = Database(tmp_path / "q.db", "TEXT").create()
    database.add(b"a")
    async with open_link(database.broker().queue(database.table())) as link:
        (received,) = await link.receive(1)
        assert await link.settle([say(received, Delay(math.nextafter(math.inf, 0), count=False))]) == [None]
    assert database.row()["retry_after"] == "9999-12-31T23:59:59.999999Z"
