"""Random weather on the advisory form of SQLite, rows and batches.

As tests/weather/test_weather_sqlite.py, of which the judge and most of the weather are the same. A stranger changes or
finishes rows in work, and deletes the lock file; handlers write by `links.sql.transaction` where one row is in hand.
Half of the tables have no trigger at all. What is true here beyond what the judge says:

1. A key is in work once, whatever breaks, over all runtimes; and who works on a row holds its key all the time, but for
   a handler that still ends where its runtime was cancelled from outside.
2. What a handler wrote is there once where its delivery was acked, never where it was not, and where that is unknown it
   is there if the row has ended by this very claim.
3. Each attempt was handed over, or given back, or a stranger was at the row, or the connection of its claim broke.
4. None is superseded, but where a stranger was at the row, its transaction had ended, a verb could not be said, or its
   runtime was cancelled.
5. While there is nothing to do no key is held; and in the end nobody holds the file.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import attrs
import pytest
import trio

from links.sql.sqlite.keys import _FILES, _File  # pyright: ignore[reportPrivateUsage] -- what this process holds
from settlement import Delivery, Policy, Retry
from settlement.ledger import Line
from settlement.sql import AdvisoryLock
from tests.links.sqlite_kit import KEY, Foreigner, Unleased
from tests.weather.pinned_world import PinnedScenario, PinnedWorld, Work
from tests.weather.schedule import chosen, dice_of, sized
from tests.weather.sqlite_faults import COUNTED, FAULTS, UNTOLD
from tests.weather.sqlite_world import SqliteWorld, run_worlds

pytestmark = pytest.mark.sqlite

SEEDS = chosen("SETTLEMENT_SEED", range(sized(fast=5, full=60, long=300)))
AGAIN = "SETTLEMENT_SEED={seed} tests/run --only sqlite -- tests/weather/test_weather_sqlite_advisory.py"
AT_ONCE = 5


@attrs.frozen(kw_only=True)
class AdvisoryScenario(PinnedScenario):
    """One draw. `times`: the type of its columns."""

    times: str


def draw(dice: Random) -> AdvisoryScenario:
    faults = (
        *("lock", "lock", "steal", "steal_and_finish", "steal_all", "delete_lock_file", "sever_link"),
        *("close_dead", "close_dead", *FAULTS),
    )
    capped = Policy(max_attempts=dice.choice([1, 1, 2, 3]), dead_letter="dead")
    writes = dice.random() < 0.4
    return AdvisoryScenario(
        times=dice.choice(["REAL", "REAL", "INTEGER", "TEXT"]),
        size=1 if writes else dice.choice([1, 2, 5]),
        lanes=dice.choice([1, 3, 100]),
        writes=writes,
        quiet=dice.random() < 0.5,
        messages=dice.randint(10, 40),
        grouped=dice.random() < 0.4,
        marks=dice.random() < 0.4,
        concurrency=1 if writes else dice.choice([1, 2, 5]),
        limit=None if writes else dice.choice([None, None, 3, 8]),
        policy=dice.choice([capped, capped, Policy(on_error=Retry())]),
        rivals=dice.choice([1, 1, 2]),
        faults=tuple(sorted((dice.uniform(0, 0.6), dice.choice(faults)) for _ in range(dice.randint(0, 8)))),
        early=dice.random() < 0.2,
        stubborn=dice.random() < 0.3,
        end=dice.choice(["drain", "cancel"]),
        end_at=dice.uniform(0, 2.0 if writes else dice.choice([0.5, 2.0])),
        grace=dice.choice([0.0, 0.5]),
        goodbye=dice.choice([1.0, 2.5]),
    )


class World(SqliteWorld, PinnedWorld):
    """A file whose rows are held by their keys."""

    def __init__(self, path: Path, scenario: AdvisoryScenario, seed: int) -> None:
        super().__init__(path, scenario, seed, UNTOLD if scenario.quiet else COUNTED)
        self.stolen: Counter[tuple[int, int]] = Counter()
        """Claims that a stranger was at."""
        self.thief: Counter[bytes] = Counter()
        """What a stranger has finished."""

    def made(self, path: Path) -> Unleased:
        """As of a world."""
        scenario = self.scenario
        return Unleased(path, times=scenario.times, grouped=scenario.grouped, marks=scenario.marks).create()

    def claim(self) -> AdvisoryLock:
        """As of a world."""
        return KEY

    def audit(self) -> str:
        """As of a world."""
        ours = f"""
            UPDATE jobs SET lane = id % {self.scenario.lanes};
            CREATE TABLE notes (call INTEGER PRIMARY KEY, id INTEGER);
        """  # noqa: S608 -- the test's own words
        return ours if self.scenario.quiet else ours + super().audit()

    def taken(self) -> Counter[bytes]:
        """As of a world."""
        return self.thief

    # --- handlers

    def holder_of(self, delivery: Delivery[bytes]) -> Any:
        """As of a world: the claim."""
        return delivery._handle  # pyright: ignore[reportPrivateUsage] -- the transport's own

    def is_excused(self, work: Work) -> bool:
        """As of a world: whatever breaks, a handler has ended before its key is free.

        Where all is cancelled from outside, links and handlers end side by side.
        """
        return work.life.cut

    async def note(self, connection: Any, work: Work) -> None:
        """As of a world."""
        note = [work.call, int(work.delivery.id)]
        await connection.execute("INSERT INTO notes VALUES (?, ?)", note)
        if self.dice.random() < 0.1:
            work.spoiled = True
            with contextlib.suppress(sqlite3.IntegrityError):
                await connection.execute("INSERT OR ROLLBACK INTO notes VALUES (?, ?)", note)
        elif self.dice.random() < 0.1:
            with contextlib.suppress(sqlite3.IntegrityError):
                await connection.execute("INSERT INTO notes VALUES (?, ?)", note)

    # --- weather

    def fault(self, name: str, seconds: float) -> None:
        """As of a world."""
        if name.startswith("steal"):
            self.steal(name)
        elif name == "delete_lock_file":
            Path(f"{self.database.path}.advisory-lock").unlink(missing_ok=True)
        else:
            super().fault(name, seconds)

    def steal(self, name: str) -> None:
        """Change or finish rows that were claimed, whoever is at them."""
        with contextlib.closing(Foreigner(self.database).connection) as connection:
            connection.execute("BEGIN IMMEDIATE")
            claimed = self.here.replace("payload", "id, attempt, payload", 1) + " AND attempt > 1 ORDER BY id"
            found = connection.execute(claimed).fetchall()
            for key, attempt, payload in found if name == "steal_all" else found[:1]:
                self.stolen[key, attempt] += 1
                if name == "steal_and_finish":
                    connection.execute("DELETE FROM jobs WHERE id = ?", (key,))
                    self.thief[payload] += 1
                else:
                    connection.execute("UPDATE jobs SET attempt = attempt + 1 WHERE id = ?", (key,))
            connection.execute("COMMIT")

    async def storm(self) -> None:
        """As of a world; all the time it is looked at whether what is in work is held."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.probe)
            await super().storm()
            await trio.sleep(0.3)
            nursery.cancel_scope.cancel()

    async def probe(self) -> None:
        """Is the key of each that is in work held by its claim?"""
        while True:
            for work in self.working:
                ring = work.holder.slot.pin._ring
                free = ring is None or int(work.delivery.id) not in ring._rows
                if free and not self.is_excused(work):
                    self.wrong.append(f"{work} is in work, and held by nobody")
            await trio.sleep(0.01)

    def file(self) -> _File | None:
        """What this process has of the file."""
        found = os.stat(self.database.path)  # noqa: PTH116 -- as it is kept
        return _FILES.get((found.st_dev, found.st_ino))

    async def until_done(self) -> None:
        """As of a world; and no key is held where there is nothing to do."""
        await super().until_done()
        with trio.move_on_after(5) as bound:
            while (file := self.file()) is not None and file.held:
                await trio.sleep(0.02)
        if bound.cancelled_caught:
            self.wrong.append("keys are held, and nothing is in work")

    # --- the end

    def judge_claims(self, total: Counter[str]) -> None:
        """As of a world."""
        assert self.file() is None, "the file is still held"
        self.judge_notes()
        if not (self.closed or self.faults.happened or self.scenario.end == "cancel"):
            lost = self.stolen.total() + sum(work.spoiled for work in self.works.values())
            assert total["superseded"] <= lost, f"{total['superseded']} superseded, for which there are {lost} reasons"
        if not self.scenario.quiet:
            self.judge_attempts_of_claims()

    def judge_notes(self) -> None:
        """What was written stands or falls with the row."""
        self.judge_works()
        for work in self.works.values():
            assert not (work.spoiled and work.line is Line.ACKED), f"{work} was acked, and its transaction had ended"
        claim = {work.call: (int(work.delivery.id), work.delivery.attempt + 1) for work in self.works.values()}
        here = {key for (key,) in self.run(self.here.replace("payload", "id", 1))}
        for call, key in self.run("SELECT call, id FROM notes"):
            assert key == claim[call][0]
            assert key not in here, f"note {call} was written, and row {key} is here"
        if not self.scenario.quiet:
            gone = {*self.run("SELECT id, attempt FROM audit WHERE what = 'gone'")}
            alone = [call for (call,) in self.run("SELECT call FROM notes") if claim[call] not in gone]
            assert not alone, f"notes whose row ended otherwise: {alone}"

    def judge_attempts_of_claims(self) -> None:
        """Each was handed over, or there is a reason."""
        claims = self.run("SELECT id, attempt, life FROM claims ORDER BY rowid")
        careless = self.faults.broken | self.faults.full
        excused = self.stolen + Counter((key, attempt) for key, attempt, life in claims if life in careless)
        kept = sum("an attempt stays counted" in line for line in self.said)
        self.judge_received(Counter((key, attempt) for key, attempt, _ in claims), excused, kept * self.scenario.size)


@pytest.mark.parametrize(
    "seeds", [SEEDS[at : at + AT_ONCE] for at in range(0, len(SEEDS), AT_ONCE)], ids=lambda seeds: f"{seeds[0]}"
)
def test_weather(seeds: Sequence[int], tmp_path: Path) -> None:
    """Nothing is lost, done twice at once or said twice, whoever else is at the file; some seeds at a time."""
    run_worlds(World, {seed: draw(dice_of(seed)) for seed in seeds}, tmp_path, AGAIN)
