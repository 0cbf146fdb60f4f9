"""The world of the weathers on PostgreSQL, whatever holds a row: its tables, what befalls it, and who runs it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import psycopg
import trio

from links.sql import SqlBroker, SqlQueue
from settlement.sql import ClaimForm
from tests.links.postgres_kit import a_database
from tests.links.postgres_tables import PostgresTables
from tests.weather.postgres_faults import AUDIT, FAULTS, OURS, PINNED, Faults, faulty_connections
from tests.weather.schedule import same_schedule
from tests.weather.table_world import Scenario, TableWorld, play

__all__ = ["PostgresWorld", "run_worlds"]


class PostgresWorld(TableWorld):
    """A database. `leased`: its rows have a locked_until."""

    leased = True

    def __init__(self, url: str, scenario: Any, seed: int) -> None:
        super().__init__(scenario, seed, Faults())
        shape = {"grouped": scenario.grouped, "marks": scenario.marks, "leased": self.leased}
        self.tables = PostgresTables(url, **shape).create()
        self.tables.run(self.audit())
        self.lives = 0
        self.locked = False
        """Rows were, some time."""
        self.tables.add(*self.bodies, group=self.group)

    def run(self, statement: str) -> list[tuple[Any, ...]]:
        """As of a world."""
        return self.tables.run(statement)

    def audit(self) -> str:
        """What is made of tables and triggers of the test's own."""
        return AUDIT

    def claim(self) -> ClaimForm:
        """How rows are claimed."""
        raise NotImplementedError

    def queue(self) -> SqlQueue[bytes]:
        """As of a world."""
        self.lives += 1
        broker = SqlBroker(f"{self.tables.url}?application_name={OURS}{self.lives}", poll_interval=0.03)
        return broker.queue(self.tables.table(), group=self.group, claim=self.claim(), limit=self.scenario.limit)

    def fault(self, name: str, seconds: float) -> None:
        """As of a world."""
        match name:
            case "sever_link":
                self.severed += 1
            case "close_dead":
                self.closed = True
                self.reopen()
                what = "UPDATE OF grp ON jobs" if self.scenario.grouped else "INSERT ON dead"
                self.tables.run(f"CREATE TRIGGER shut BEFORE {what} FOR EACH ROW EXECUTE FUNCTION closed()")
            case "terminate" | "terminate_all":
                self.terminate("true", most=1 if name == "terminate" else None)
            case "lock" | "lock_table" | "terminate_waiting":
                self.lock(name, seconds)
            case _:
                assert name in (*FAULTS, *PINNED)
                self.faults.order(name)

    def lock(self, name: str, seconds: float) -> None:
        """Hold rows, or the table, for a while."""
        self.locked = True
        with psycopg.connect(self.tables.url) as stranger:
            if name == "lock":
                stranger.execute("SELECT FROM jobs WHERE mod(id, 2) = %s FOR UPDATE", (self.dice.randint(0, 1),))
            else:
                stranger.execute("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE")
            time.sleep(seconds)
            if name == "terminate_waiting":
                self.terminate("wait_event_type = 'Lock'", most=None)

    def terminate(self, which: str, most: int | None) -> None:
        """End backends of ours, whatever they do."""
        for (pid,) in self.tables.run(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE "  # noqa: S608
            f"'{OURS}%' AND {which} ORDER BY md5(pid::text) LIMIT {'ALL' if most is None else most}"
        ):
            self.faults.broken.add(pid)
            self.faults.happened.append("terminated")
            self.tables.run("SELECT pg_terminate_backend(%s)", pid)

    def reopen(self) -> None:
        """As of a world."""
        self.tables.run(f"DROP TRIGGER IF EXISTS shut ON {'jobs' if self.scenario.grouped else 'dead'}")


def run_worlds(
    made: Callable[[str, Any, int], PostgresWorld], scenarios: Mapping[int, Scenario], server: str, again: str
) -> None:
    """Play these, by their seeds, each in a database of its own."""
    with contextlib.ExitStack() as databases:
        urls = [databases.enter_context(a_database(server)) for _ in scenarios]
        worlds = {seed: made(url, each, seed) for url, (seed, each) in zip(urls, scenarios.items(), strict=True)}
        watched = {url.rpartition("/")[2]: world.faults for url, world in zip(urls, worlds.values(), strict=True)}
        with same_schedule(min(scenarios)) as warnings, faulty_connections(watched):
            for world in worlds.values():
                world.said = warnings
            trio.run(play, worlds, again, 30.0)
