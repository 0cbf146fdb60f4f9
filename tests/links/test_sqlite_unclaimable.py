"""Rows that a user's constraint, index or trigger does not let be claimed: the others go on, and they are named."""

import logging
import sqlite3
from pathlib import Path

import pytest
import trio

from actors import Subscription, open_runtime
from links.abc import Received
from links.sql import Lease
from links.sql.jobs import Claim, Passing
from links.sql.passed_over import PassedOver
from links.sql.sqlite.lease import SqliteLease
from settlement import Ack, Delivery
from tests.links.sqlite_kit import Database, Gate, bodies, finish, open_link, until

pytestmark = pytest.mark.sqlite

BAD = "UPDATE ON jobs WHEN OLD.payload = x'626164' BEGIN"
REFUSALS = {
    "index": "CREATE UNIQUE INDEX one ON jobs (lane) WHERE locked_until IS NOT NULL",
    "abort": f"CREATE TRIGGER no BEFORE {BAD} SELECT RAISE(ABORT, 'not this one'); END",
    "ignore": f"CREATE TRIGGER no BEFORE {BAD} SELECT RAISE(IGNORE); END",
    "rollback": f"CREATE TRIGGER no BEFORE {BAD} SELECT RAISE(ROLLBACK, 'not this one'); END",
    "taken back": f"CREATE TRIGGER no AFTER {BAD} UPDATE jobs SET locked_until = NULL WHERE id = OLD.id; END",  # noqa: S608
}
"""Each refuses the row `bad`."""


class Told:
    """What a link says is degraded."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str | None]] = []

    def __call__(self, what: str, why: str | None) -> None:
        self.lines.append((what, why))

    @property
    def last(self) -> str | None:
        return self.lines[-1][1]


@pytest.mark.parametrize("kind", REFUSALS)
async def test_the_others_are_claimed(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """DESIGN 6: the claim goes on behind a row that it cannot have; that row is named, and comes when it can."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"good", b"bad", b"also good")
    database.run("UPDATE jobs SET lane = id")
    if kind == "index":
        database.run("UPDATE jobs SET lane = 1, payload = 'bad' WHERE id = 2")
    database.run(REFUSALS[kind])
    told = Told()
    async with open_link(database.broker().queue(database.table())) as link:
        link.degraded = told
        received = [*await link.receive(2)]
        assert bodies(received) == [b"good", b"also good"]
        assert told.last is not None
        assert "row 2" in told.last
        assert [record.message for record in caplog.records if "row 2 of table 'jobs' cannot" in record.message]
        assert database.rows()[1]["attempt"] == 1 or kind == "taken back"
        assert await link.settle(finish(received)) == [None, None]
        database.run("DROP INDEX one" if kind == "index" else "DROP TRIGGER no")
        with trio.fail_after(5):
            (bad,) = await link.receive(2)
        assert bad.delivery.body == b"bad"
        assert told.last is None


async def test_a_claim_ahead_passes_over_it_too(tmp_path: Path) -> None:
    """The settlement that it shares a transaction with is said, whatever the row behind does."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"1", b"bad", b"2")
    database.run(REFUSALS["rollback"])
    async with open_link(database.broker().queue(database.table())) as link:
        first = await link.receive(1)
        assert await link.settle(finish(first)) == [None]
        with trio.fail_after(5):
            assert bodies(await link.receive(1)) == [b"2"]
    assert [row["payload"] for row in database.rows()] == [b"bad", b"2"]


@pytest.mark.parametrize("kind", ["abort", "rollback"])
async def test_many_are_passed_without_a_hot_loop(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is forgotten, none of them is tried more than once a second, and what stands behind them all is reached."""
    database = Database(tmp_path / "q.db").create()
    count = 1200 if kind == "abort" else 60
    database.add(*[b"bad"] * count, b"good")
    database.run(REFUSALS[kind])
    gate = Gate(monkeypatch)
    async with open_link(database.broker(poll_interval=3600.0).queue(database.table())) as link:
        told = Told()
        link.degraded = told
        began = trio.current_time()
        with trio.fail_after(20):
            (good,) = await link.receive(4)
        assert good.delivery.body == b"good"
        hops = gate.entered
        assert hops < 10
        with trio.move_on_after(0.5):
            await link.receive(4)
        seconds = trio.current_time() - began
        assert gate.entered <= hops * (1 + seconds) + 2, seconds
        database.run("DROP TRIGGER no")
        with trio.fail_after(30):
            found = 0
            while found < count:
                received = await link.receive(500)
                found += len(received)
                await link.settle(finish(received))
        assert told.last is None


async def test_a_full_disk_is_no_fault_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the call that fails then; no row is passed over for it."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a")
    told = Told()

    def full(*_: object) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    async with open_link(database.broker().queue(database.table())) as link:
        link.degraded = told
        with monkeypatch.context() as patch:
            patch.setattr(SqliteLease, "_expiry", full)
            with pytest.raises(Exception, match="disk is full"):
                await link.receive(1)
        with trio.fail_after(0.9):
            assert bodies(await link.receive(1)) == [b"a"]
    assert [why for _, why in told.lines] == [None]


async def test_a_runtime_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One row beyond its CHECK neither ends the runtime nor keeps the others waiting."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"bad", *[b"good"] * 5)
    database.run(REFUSALS["abort"])
    done: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> Ack:
        done.append(delivery.body)
        return Ack()

    with caplog.at_level(logging.INFO):
        queue = database.broker().queue(database.table(), claim=Lease(30.0))
        async with open_runtime(Subscription(queue, handler, concurrency=2)):
            await until(lambda: len(done) == 5)
            database.run("DROP TRIGGER no")
            await until(lambda: len(done) == 6)
    said = [record.message for record in caplog.records]
    assert any("is degraded: to claim each row: table 'jobs': row 1 passed over: not this one" in line for line in said)
    assert any("to claim each row works again" in line for line in said)


# --- for how long


def claim(failed: dict[int, BaseException], *, complete: bool = True) -> Claim:
    form: SqliteLease = None  # type: ignore[assignment]
    passing = Passing({}, frozenset())
    passing.failed.update(failed)
    passing.complete = complete
    return Claim(form, 5, passing, 1.0)


def learn(passed: PassedOver, claim: Claim) -> list[float]:
    return passed.learn(claim.passing, claim.rows, claim.error)


async def test_the_pause_doubles_to_a_minute(autojump_clock: trio.abc.Clock) -> None:
    """1, 2, 4, … 60 s; once the row is gone its pause begins anew."""
    passed = PassedOver("test", "jobs", Told())
    pauses = []
    for _ in range(8):
        (again,) = learn(passed, claim({1: ValueError("no")}))
        assert passed.now() == {1}
        pauses.append(again - trio.current_time())
        await trio.sleep_until(again)
        assert passed.now() == frozenset()
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    learn(passed, claim({}))
    (again,) = learn(passed, claim({1: ValueError("no")}))
    assert again - trio.current_time() == 1


async def test_what_cannot_be_remembered_waits_for_the_poll(autojump_clock: trio.abc.Clock) -> None:
    """So many failed that the claim did not come to its end: look on at once, but only while that brings something."""
    passed = PassedOver("test", "jobs", Told(), most=700)
    now = trio.current_time()
    first = learn(passed, claim({row: ValueError("no") for row in range(500)}, complete=False))
    assert first == [now + 1] * 500 + [now]
    second = learn(passed, claim({row: ValueError("no") for row in range(500, 1000)}, complete=False))
    assert second == [now + 1] * 200 + [now]
    assert learn(passed, claim({row: ValueError("no") for row in range(1000, 1500)}, complete=False)) == []
    assert len(passed.now()) == 700


async def test_those_that_fail_again_are_passed_at_once(autojump_clock: trio.abc.Clock) -> None:
    """Where a claim takes longer than the pause, it goes on all the same: each fails later than the time before."""
    passed = PassedOver("test", "jobs", Told())
    failing = claim({row: ValueError("no") for row in range(500)}, complete=False)
    learn(passed, failing)
    await trio.sleep(3)
    assert learn(passed, failing) == [trio.current_time() + 2] * 500 + [trio.current_time()]


def test_a_received_is_compared_by_identity() -> None:
    """Two deliveries of one row are two: what a link holds is one of them."""
    delivery = Delivery(
        body=b"", message=b"", headers={}, attempt=1, redelivery_count=None, source="jobs", id="1", key=None
    )
    assert Received(delivery) != Received(delivery)
