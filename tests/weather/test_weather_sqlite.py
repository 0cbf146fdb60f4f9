"""Random weather on SQLite, on a real clock with short times: the file is locked, leases are stolen, runtimes are cut.

A seed fixes what happens and when it is meant to; threads and disks are as they are. Triggers in the database write
down what was done to each row, whoever did it, and the judgement is made by SELECT. The invariants: each message is in
the queue, finished, or dead, and that once; no row is held at the end; what was booked was done, and what was done is
booked, or *unknown*; both books balance and are the fold of their events; never more handlers than `concurrency`.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random

import attrs
import pytest
import trio

from actors import Runtime, Subscription, open_runtime
from actors.events import Booked, Event
from links.sql import Lease
from settlement import Ack, Delivery, Drop, Ledger, Outcome, Policy, Retry, RetryAfter
from tests.links.sqlite_kit import Database, Foreigner
from tests.weather.schedule import chosen, dice_of, same_schedule, sized

pytestmark = pytest.mark.sqlite

SEEDS = chosen("SETTLEMENT_SEED", range(sized(fast=5, full=60, long=400)))
SLACK = 3.0
"""Seconds that a busy machine may take on top of a bound."""

AUDIT = """
CREATE TABLE audit (what TEXT, id INTEGER, payload BLOB);
CREATE TRIGGER gone AFTER DELETE ON jobs
    BEGIN INSERT INTO audit VALUES ('gone', OLD.id, OLD.payload); END;
CREATE TRIGGER buried AFTER INSERT ON dead
    BEGIN INSERT INTO audit VALUES ('buried', NEW.id, NEW.payload); END;
CREATE TRIGGER claimed AFTER UPDATE ON jobs WHEN NEW.attempt > OLD.attempt
    BEGIN INSERT INTO audit VALUES ('claimed', NEW.id, NEW.payload); END;
CREATE TRIGGER restored AFTER UPDATE ON jobs WHEN NEW.attempt < OLD.attempt
    BEGIN INSERT INTO audit VALUES ('restored', NEW.id, NEW.payload); END;
"""


@attrs.frozen
class Scenario:
    """One draw."""

    messages: int
    concurrency: int
    limit: int | None
    lease: float
    policy: Policy
    rivals: int
    """Runtimes at once, each as a process of its own would be."""
    faults: tuple[tuple[float, str], ...]
    end: str
    end_at: float
    grace: float


def draw(dice: Random) -> Scenario:
    faults = ("lock", "lock", "steal", "steal_and_finish", "steal_all")
    capped = Policy(max_attempts=dice.randint(1, 4), dead_letter="dead")
    return Scenario(
        messages=dice.randint(10, 40),
        concurrency=dice.choice([1, 2, 5]),
        limit=dice.choice([None, 8]),
        lease=dice.choice([0.6, 2.0]),
        policy=dice.choice([capped, capped, Policy(on_error=Retry())]),
        rivals=dice.choice([1, 1, 2]),
        faults=tuple(sorted((dice.uniform(0, 0.3), dice.choice(faults)) for _ in range(dice.randint(0, 5)))),
        end=dice.choice(["drain", "cancel"]),
        end_at=dice.uniform(0, 0.5),
        grace=dice.choice([0.0, 0.5]),
    )


class World:
    """A database, what was booked about it, and what was done to it."""

    def __init__(self, path: Path, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.dice = dice_of(seed)
        self.database = Database(path / "weather.db").create()
        with contextlib.closing(Foreigner(self.database).connection) as connection:
            connection.executescript(AUDIT)
        self.bodies = [b"%d" % number for number in range(scenario.messages)]
        self.database.add(*self.bodies)
        self.ledgers: list[tuple[Ledger, Ledger]] = []
        self.wrong: list[str] = []
        """What a handler saw."""
        self.stolen: list[tuple[int, float]] = []
        """Leases that a thief took: id and expiry."""
        self.thief: Counter[bytes] = Counter()
        """What a thief has finished."""

    async def life(self, *, patient: bool = False) -> None:
        """One runtime, on a broker of its own; cut, unless it is patient."""
        scenario, goodbye = self.scenario, 1.0
        folded, running, bound = Ledger(), [0], float("inf")
        queue = self.database.broker(poll_interval=0.03).queue(
            self.database.table(), claim=Lease(scenario.lease), limit=scenario.limit
        )
        queue.broker.table(self.database.table("dead"))  # type: ignore[attr-defined]  # an SqlBroker
        told = partial(self.hear, folded)
        subscription = Subscription(
            queue,
            partial(self.handle, running, patient),
            policy=scenario.policy,
            concurrency=scenario.concurrency,
        )
        runtime: Runtime | None = None
        with trio.CancelScope() as scope:
            try:
                async with open_runtime(
                    subscription, grace=scenario.grace, goodbye=goodbye, observers=[told]
                ) as runtime:
                    if patient:
                        while self.database.run("SELECT count(*) FROM jobs") != [(0,)]:
                            await trio.sleep(0.02)
                    else:
                        await trio.sleep(scenario.end_at)
                    bound = trio.current_time() + 2 * goodbye + SLACK
                    if scenario.end == "cancel" and not patient:
                        scope.cancel()
                        await trio.sleep_forever()
                    bound += scenario.grace
            finally:
                if runtime is not None:
                    self.ledgers.append((runtime.ledger("jobs"), folded))
        assert trio.current_time() < bound, "it took too long to end"
        assert running == [0], "a handler runs on"

    def hear(self, folded: Ledger, event: Event) -> None:
        if isinstance(event, Booked):
            folded.enter(event.entry)

    async def handle(self, running: list[int], patient: bool, delivery: Delivery[bytes]) -> Outcome | None:
        running[0] += 1
        if running[0] > self.scenario.concurrency or delivery.body not in self.bodies:
            self.wrong.append(f"{running[0]} handlers at once, {delivery}")
        try:
            return Ack() if patient else await self.answer()
        finally:
            running[0] -= 1

    async def answer(self) -> Outcome | None:
        await trio.sleep(self.dice.choice([0.0, 0.0, 0.01, 0.05, 0.7 * self.scenario.lease]))
        if self.dice.random() < 0.1:
            raise ValueError("failed")
        delay = self.dice.choice([0.0, 0.01, 0.1])
        return self.dice.choice([Ack(), Ack(), None, Retry(), RetryAfter(delay), Drop()])

    # --- weather

    async def storm(self) -> None:
        began = trio.current_time()
        for at, name in self.scenario.faults:
            await trio.sleep_until(began + at)
            await trio.to_thread.run_sync(self.fault, name, self.dice.uniform(0.01, 0.25))

    def fault(self, name: str, seconds: float) -> None:
        """What another process does, in a thread."""
        if name == "lock":
            with Foreigner(self.database):
                time.sleep(seconds)
            return
        connection = Foreigner(self.database).connection
        with contextlib.closing(connection):
            connection.execute("BEGIN IMMEDIATE")
            held = connection.execute(
                "SELECT id, payload FROM jobs WHERE locked_until > ? ORDER BY id", (time.time(),)
            ).fetchall()
            if name != "steal_all":
                held = held[:1]
            for key, payload in held:
                if name == "steal_and_finish":
                    connection.execute("DELETE FROM jobs WHERE id = ?", (key,))
                    self.thief[payload] += 1
                else:
                    until = time.time() + seconds
                    self.stolen.append((key, until))
                    connection.execute(
                        "UPDATE jobs SET locked_until = ?, attempt = attempt + 1 WHERE id = ?", (until, key)
                    )
            connection.execute("COMMIT")

    # --- the end

    def count(self, what: str) -> Counter[bytes]:
        return Counter(payload for (payload,) in self.database.run("SELECT payload FROM audit WHERE what = ?", what))

    def judge(self, *, done: bool) -> None:
        """Hold the books against the database."""
        assert not self.wrong, "; ".join(self.wrong)
        held = self.database.run("SELECT id, locked_until FROM jobs WHERE locked_until > ?", time.time())
        assert {*held} <= {*self.stolen}, f"rows are held by nobody: {held}"
        here = Counter(row["payload"] for row in self.database.rows())
        dead = Counter(row["payload"] for row in self.database.rows("dead"))
        gone, buried = self.count("gone"), self.count("buried")
        assert buried == dead
        for body in self.bodies:
            assert here[body] + gone[body] == 1, f"{body!r}: {here[body]} times here, {gone[body]} times gone"
            assert dead[body] <= gone[body], f"{body!r} is dead and here"
        if done:
            assert not here, "the second life did not finish"
        total = Counter[str]()
        for ledger, folded in self.ledgers:
            assert ledger.balanced, f"{ledger.deliveries}; {ledger.copies}"
            assert (ledger.in_hand, ledger.owed) == (0, 0)
            assert ledger == folded, "the books are not the fold of the events"
            total.update({name: getattr(ledger, name) for name in attrs.fields_dict(Ledger)})
        finished = gone.total() - buried.total() - self.thief.total()
        said = total["acked"] + total["dropped"]
        assert said <= finished <= said + total["unknown"], f"{said} booked, {finished} finished, {total}"
        said = total["dead_lettered"]
        assert said <= dead.total() <= said + total["unknown"], f"{said} booked, {dead.total()} dead, {total}"
        claims = self.count("claimed").total() - len(self.stolen)
        thefts = (
            len(self.stolen) + self.thief.total()
        )  # each may be of a row that was claimed ahead: not to be restored
        handed = claims - self.count("restored").total() - thefts
        assert handed <= total["received"] <= claims, f"{claims} claims, {handed} handed over at least, {total}"


async def play(path: Path, seed: int) -> World:
    """One seed; its failure says how to repeat it."""
    scenario = draw(dice_of(seed))
    world = World(path, scenario, seed)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.storm)
            for _ in range(scenario.rivals):
                nursery.start_soon(world.life)
        world.judge(done=False)
        with trio.fail_after(20):
            await world.life(patient=True)
        world.judge(done=True)
    except Exception as error:
        again = f"SETTLEMENT_SEED={seed} tests/run --only sqlite -- tests/weather/test_weather_sqlite.py"
        error.add_note(f"{scenario}\nagain: {again}")
        raise
    return world


@pytest.mark.parametrize(
    "seeds", [SEEDS[at : at + 5] for at in range(0, len(SEEDS), 5)], ids=lambda seeds: f"{seeds[0]}"
)
def test_weather(seeds: Sequence[int], tmp_path: Path) -> None:
    """Nothing is lost or said twice, whoever else is at the file, and whenever a runtime is cut.

    Five seeds at a time, each with a database of its own: most of their time they wait.
    """

    async def all_of_them() -> None:
        async with trio.open_nursery() as nursery:
            for seed in seeds:
                folder = tmp_path / str(seed)
                folder.mkdir()
                nursery.start_soon(play, folder, seed)

    with same_schedule(seeds[0]):
        trio.run(all_of_them)
