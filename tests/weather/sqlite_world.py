"""The world of the weathers on SQLite, whatever holds a row: its file, what befalls it, and who runs it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import trio

from links.sql import SqlQueue
from settlement.sql import ClaimForm
from tests.links.sqlite_kit import Database, Foreigner
from tests.weather.schedule import same_schedule
from tests.weather.sqlite_faults import FAULTS, Faults, faulty_connections
from tests.weather.table_world import Scenario, TableWorld, play

__all__ = ["SqliteWorld", "run_worlds"]

AUDIT = """
CREATE TABLE audit (what TEXT, id INTEGER, attempt INTEGER, payload BLOB);
CREATE TABLE claims (id INTEGER, attempt INTEGER, life INTEGER, at REAL);
CREATE TRIGGER gone AFTER DELETE ON jobs
    BEGIN INSERT INTO audit VALUES ('gone', OLD.id, OLD.attempt, OLD.payload); END;
CREATE TRIGGER buried AFTER INSERT ON dead
    BEGIN INSERT INTO audit VALUES ('buried', NEW.id, NEW.attempt, NEW.payload); END;
CREATE TRIGGER restored AFTER UPDATE ON jobs WHEN NEW.attempt < OLD.attempt
    BEGIN INSERT INTO audit VALUES ('restored', NEW.id, OLD.attempt, NEW.payload); END;
"""
MARKED = """
CREATE TRIGGER marked AFTER UPDATE OF processed_at ON jobs WHEN NEW.processed_at IS NOT NULL
    BEGIN INSERT INTO audit VALUES ('gone', NEW.id, NEW.attempt, NEW.payload); END;
"""
REGROUPED = """
CREATE TRIGGER regrouped AFTER UPDATE OF grp ON jobs WHEN NEW.grp <> OLD.grp BEGIN
    INSERT INTO audit VALUES ('gone', NEW.id, NEW.attempt, NEW.payload);
    INSERT INTO audit VALUES ('buried', NEW.id, NEW.attempt, NEW.payload);
END;
"""


class SqliteWorld(TableWorld):
    """A file, and what was done to it. `told`: what its connections write down."""

    database: Database

    def __init__(self, path: Path, scenario: Any, seed: int, told: str) -> None:
        super().__init__(scenario, seed, Faults(told))
        self.database = self.made(path / "weather.db")
        self.database.add(*self.bodies, group=self.group)
        with contextlib.closing(Foreigner(self.database).connection) as connection:
            connection.executescript(self.audit())

    def made(self, path: Path) -> Database:
        """The file."""
        raise NotImplementedError

    def claim(self) -> ClaimForm:
        """How rows are claimed."""
        raise NotImplementedError

    def audit(self) -> str:
        """What is made of tables and triggers of the test's own."""
        return "".join([AUDIT, MARKED * self.scenario.marks, REGROUPED * self.scenario.grouped])

    def run(self, statement: str) -> list[tuple[Any, ...]]:
        """As of a world."""
        return self.database.run(statement)

    def queue(self) -> SqlQueue[bytes]:
        """As of a world."""
        scenario = self.scenario
        return self.database.queue(self.claim(), self.group, limit=scenario.limit, poll=0.03)

    def fault(self, name: str, seconds: float) -> None:
        """As of a world."""
        match name:
            case "sever_link":
                self.severed += 1
            case "lock":
                with Foreigner(self.database):
                    time.sleep(seconds)
            case "close_dead":
                self.closed = True
                how = "ABORT" if seconds < 0.13 else "ROLLBACK"
                what = "UPDATE OF grp ON jobs" if self.scenario.grouped else "INSERT ON dead"
                self.reopen()
                self.database.run(f"CREATE TRIGGER shut BEFORE {what} BEGIN SELECT RAISE({how}, 'closed'); END")
            case _:
                assert name in FAULTS
                self.faults.order(name)

    def reopen(self) -> None:
        """As of a world."""
        self.database.run("DROP TRIGGER IF EXISTS shut")


def run_worlds(
    made: Callable[[Path, Any, int], SqliteWorld], scenarios: Mapping[int, Scenario], path: Path, again: str
) -> None:
    """Play these, by their seeds, each in a file of its own."""
    worlds: dict[int, SqliteWorld] = {}
    for seed, scenario in scenarios.items():
        folder = path / str(seed)
        folder.mkdir()
        worlds[seed] = made(folder, scenario, seed)
    files = {world.database.path: world.faults for world in worlds.values()}
    with same_schedule(min(scenarios)) as warnings, faulty_connections(files):
        for world in worlds.values():
            world.said = warnings
        trio.run(play, worlds, again, 20.0)
