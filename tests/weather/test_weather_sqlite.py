"""Random weather on SQLite, on a real clock with short times.

The file is locked, leases are stolen, links are severed, connections break before, within or after a transaction
(tests/weather/sqlite_faults.py), the dead letter is closed by a trigger, handlers answer although they were cancelled,
and runtimes are cut. A seed fixes what happens and when it is meant to; threads and disks are as they are. Triggers in
the database write down what was done to each row, and by whom, and the judgement is made by SELECT. The invariants:

1. Each message is in the queue, finished, or dead, and that once. No row is held at the end, but by a connection that
   broke, or a thief, or where a link has said in the log that its goodbye was too short for it (a machine that stalls).
2. What was booked was done, and what was done is booked, or *unknown*. Nothing is acked or dropped that no handler has
   answered so without being cancelled.
3. Each claim was handed over; or it was given back (or a link has said that it could not be), stolen, ran out, or its
   connection broke; claim by claim, which have an id and an attempt.
4. Both books balance and are the fold of their events. Never more handlers than `concurrency`, never more in hand than
   the limit, and never more rows leased by one connection, but for those that were lost or could not be settled.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import attrs
import pytest

from links.sql import Lease
from settlement import Policy, Retry
from tests.links.sqlite_kit import Database, Foreigner, stored
from tests.weather.schedule import chosen, dice_of, sized
from tests.weather.sqlite_faults import FAULTS, LEASED
from tests.weather.sqlite_world import SqliteWorld, run_worlds
from tests.weather.table_world import LeasedScenario, LeasedWorld

pytestmark = pytest.mark.sqlite

SEEDS = chosen("SETTLEMENT_SEED", range(sized(fast=5, full=60, long=400)))
AGAIN = "SETTLEMENT_SEED={seed} tests/run --only sqlite -- tests/weather/test_weather_sqlite.py"

HOLDERS = """
CREATE TABLE holders (id INTEGER PRIMARY KEY, life INTEGER, until);
CREATE TRIGGER ended AFTER DELETE ON jobs BEGIN DELETE FROM holders WHERE id = OLD.id; END;
CREATE TRIGGER freed AFTER UPDATE OF locked_until ON jobs WHEN NEW.locked_until IS NULL
    BEGIN DELETE FROM holders WHERE id = NEW.id; END;
"""


@attrs.frozen(kw_only=True)
class SqliteScenario(LeasedScenario):
    """One draw. `times`: the type of its columns."""

    times: str


def draw(dice: Random) -> SqliteScenario:
    faults = (
        *("lock", "lock", "steal", "steal_and_finish", "steal_all", "sever_link", "close_dead", "close_dead"),
        *FAULTS,
    )
    capped = Policy(max_attempts=dice.choice([1, 1, 2, 3]), dead_letter="dead")
    return SqliteScenario(
        messages=dice.randint(10, 40),
        times=dice.choice(["REAL", "REAL", "INTEGER", "TEXT"]),
        grouped=dice.random() < 0.4,
        marks=dice.random() < 0.4,
        concurrency=dice.choice([1, 2, 5]),
        limit=dice.choice([None, 8]),
        lease=dice.choice([0.6, 1.2]),
        policy=dice.choice([capped, capped, Policy(on_error=Retry())]),
        rivals=dice.choice([1, 1, 2]),
        faults=tuple(sorted((dice.uniform(0, 0.3), dice.choice(faults)) for _ in range(dice.randint(0, 8)))),
        stubborn=dice.random() < 0.3,
        end=dice.choice(["drain", "cancel"]),
        end_at=dice.uniform(0, 0.5),
        grace=dice.choice([0.0, 0.5]),
    )


class World(SqliteWorld, LeasedWorld):
    """A file whose rows are leased."""

    def __init__(self, path: Path, scenario: SqliteScenario, seed: int) -> None:
        super().__init__(path, scenario, seed, LEASED)

    def made(self, path: Path) -> Database:
        """As of a world."""
        scenario = self.scenario
        return Database(path, times=scenario.times, grouped=scenario.grouped, marks=scenario.marks).create()

    def claim(self) -> Lease:
        """As of a world."""
        return Lease(self.scenario.lease)

    def audit(self) -> str:
        """As of a world."""
        return HOLDERS + super().audit()

    # --- weather

    def fault(self, name: str, seconds: float) -> None:
        """As of a world."""
        if name.startswith("steal"):
            self.steal(name, seconds)
        else:
            super().fault(name, seconds)

    def steal(self, name: str, seconds: float) -> None:
        times = self.scenario.times
        with contextlib.closing(Foreigner(self.database).connection) as connection:
            connection.execute("BEGIN IMMEDIATE")
            held = connection.execute(
                "SELECT id, attempt, payload FROM jobs WHERE locked_until > ? ORDER BY id",
                (stored(time.time(), times),),
            ).fetchall()
            for key, attempt, payload in held if name == "steal_all" else held[:1]:
                self.stolen[key, attempt] += 1
                if name == "steal_and_finish":
                    connection.execute("DELETE FROM jobs WHERE id = ?", (key,))
                    self.thief[payload] += 1
                else:
                    until = stored(time.time() + seconds, times)
                    connection.execute(
                        "UPDATE jobs SET locked_until = ?, attempt = attempt + 1 WHERE id = ?", (until, key)
                    )
                    connection.execute("UPDATE holders SET life = 0, until = ? WHERE id = ?", (until, key))
            connection.execute("COMMIT")

    # --- the end

    def judge_claims(self, total: Counter[str]) -> None:
        """As of a world."""
        careless = self.faults.broken | self.faults.full
        now = stored(time.time(), self.scenario.times)
        held = self.database.run(
            "SELECT jobs.id, life FROM jobs LEFT JOIN holders USING (id) WHERE locked_until > ?", now
        )
        strangers = [(key, life) for key, life in held if life and life not in careless]
        assert len(strangers) <= self.kept, f"rows are held by nobody (id, connection): {strangers}"
        self.judge_made(self.run("SELECT id, attempt, life, at FROM claims ORDER BY rowid"), careless)
        late = total["superseded"] + total["unsettled"] * (self.closed or "full" in self.faults.happened)
        for life, most in self.faults.most.items():
            assert most <= self.scenario.most + late, (
                f"connection {life}: {most} leased, the limit is {self.scenario.most}"
            )


@pytest.mark.parametrize(
    "seeds", [SEEDS[at : at + 5] for at in range(0, len(SEEDS), 5)], ids=lambda seeds: f"{seeds[0]}"
)
def test_weather(seeds: Sequence[int], tmp_path: Path) -> None:
    """Nothing is lost or said twice, whoever else is at the file, and whenever a runtime is cut.

    Five seeds at a time, each with a database of its own: most of their time they wait.
    """
    run_worlds(World, {seed: draw(dice_of(seed)) for seed in seeds}, tmp_path, AGAIN)
