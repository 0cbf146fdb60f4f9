"""The world of the weathers on MySQL and MariaDB, whatever holds a row: its tables, what befalls it, who runs it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pymysql
import trio

from links.sql import SqlBroker, SqlQueue
from settlement.sql import ClaimForm
from tests.links.mysql_kit import a_database, connect
from tests.links.mysql_tables import MysqlTables
from tests.weather.mysql_faults import FAULTS, OURS, PINNED, Faults, audit, faulty_connections
from tests.weather.schedule import same_schedule
from tests.weather.table_world import Scenario, TableWorld, play

__all__ = ["MysqlWorld", "run_worlds"]

_PATIENT = "SET SESSION lock_wait_timeout = 3, innodb_lock_wait_timeout = 3, time_zone = '+00:00'"
"""Of a stranger, who shall not wait for ever."""


class MysqlWorld(TableWorld):
    """A database. `leased`: its rows have a locked_until."""

    leased = True

    def __init__(self, url: str, scenario: Any, seed: int) -> None:
        super().__init__(scenario, seed, Faults())
        shape = {"grouped": scenario.grouped, "marks": scenario.marks, "leased": self.leased}
        self.tables = MysqlTables(url, **shape, stamps=seed % 2 == 1).create()
        parts = urlsplit(url)
        self.database = parts.path.lstrip("/")
        self.ours = urlunsplit(parts._replace(netloc=f"{OURS}:{OURS}@{parts.netloc.rpartition('@')[2]}"))
        self.run(f"CREATE USER IF NOT EXISTS {OURS}@'%' IDENTIFIED BY '{OURS}'")
        self.run(f"GRANT ALL ON {self.database}.* TO {OURS}@'%'")
        self.tables.add(*self.bodies, group=self.group)
        self.prepare()
        for statement in self.audit(shape):
            self.run(statement)
        self.locked = False
        """Rows were, some time."""

    def run(self, statement: str) -> list[tuple[Any, ...]]:
        """As of a world."""
        return self.tables.run(statement)

    def prepare(self) -> None:
        """Change the rows, before anything is written down of them."""

    def audit(self, shape: Mapping[str, bool]) -> list[str]:
        """What is made of tables and triggers of the test's own."""
        return audit(**shape)

    def claim(self) -> ClaimForm:
        """How rows are claimed."""
        raise NotImplementedError

    def queue(self) -> SqlQueue[bytes]:
        """As of a world."""
        broker = SqlBroker(self.ours, poll_interval=0.03)
        return broker.queue(self.tables.table(), group=self.group, claim=self.claim(), limit=self.scenario.limit)

    @contextlib.contextmanager
    def stranger(self, **more: Any) -> Generator[Any, None, None]:
        """A cursor of somebody else, at READ COMMITTED, in autocommit where nothing else is said."""
        with connect(self.tables.url, init_command=_PATIENT, **more) as connection, connection.cursor() as cursor:
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
            yield cursor

    def fault(self, name: str, seconds: float) -> None:
        """As of a world."""
        match name:
            case "sever_link":
                self.severed += 1
            case "close_dead":
                self.close_dead()
            case "kill" | "kill_all":
                self.kill("TRUE", most=1 if name == "kill" else None)
            case "lock" | "lock_table" | "kill_waiting":
                self.lock(name, seconds)
            case _:
                assert name in (*FAULTS, *PINNED)
                self.faults.order(name)

    def close_dead(self) -> None:
        """Nothing becomes a dead letter any more; where others let nobody alter the table in time, it does."""
        self.closed = True
        what, when = ("UPDATE ON jobs", "NEW.grp = 'dead'") if self.scenario.grouped else ("INSERT ON dead", "TRUE")
        body = f"BEGIN IF {when} THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'closed'; END IF; END"
        with self.stranger() as cursor, contextlib.suppress(pymysql.OperationalError):
            cursor.execute("DROP TRIGGER IF EXISTS shut")
            cursor.execute(f"CREATE TRIGGER shut BEFORE {what} FOR EACH ROW {body}")

    def reopen(self) -> None:
        """As of a world."""
        self.run("DROP TRIGGER IF EXISTS shut")

    def lock(self, name: str, seconds: float) -> None:
        """Hold rows, or the table, for a while."""
        self.locked = True
        with self.stranger(autocommit=False) as cursor, contextlib.suppress(pymysql.OperationalError):
            if name == "lock":
                cursor.execute(f"SELECT id FROM jobs WHERE id % 2 = {self.dice.randint(0, 1)} FOR UPDATE")  # noqa: S608
            else:
                cursor.execute("LOCK TABLES jobs WRITE")
            time.sleep(seconds)
            if name == "kill_waiting":
                self.kill("STATE LIKE 'Waiting for table%'", most=None)

    def kill(self, which: str, most: int | None) -> None:
        """End connections of ours, whatever they do."""
        limit = "" if most is None else f" LIMIT {most}"
        found = self.run(
            f"SELECT ID FROM information_schema.PROCESSLIST WHERE DB = '{self.database}' AND USER = '{OURS}' "  # noqa: S608
            f"AND {which} ORDER BY ID % 7, ID{limit}"
        )
        for (number,) in found:
            self.faults.broken.add(number)
            self.faults.happened.append("killed")
            with contextlib.suppress(pymysql.OperationalError):  # it has ended meanwhile
                self.run(f"KILL {number}")


def run_worlds(
    made: Callable[[str, Any, int], MysqlWorld], scenarios: Mapping[int, Scenario], server: str, again: str
) -> None:
    """Play these, by their seeds, each in a database of its own."""
    with contextlib.ExitStack() as databases:
        urls = [databases.enter_context(a_database(server)) for _ in scenarios]
        worlds = {seed: made(url, each, seed) for url, (seed, each) in zip(urls, scenarios.items(), strict=True)}
        watched = {world.database: world.faults for world in worlds.values()}
        with same_schedule(min(scenarios)) as warnings, faulty_connections(watched):
            for world in worlds.values():
                world.said = warnings
            trio.run(play, worlds, again, 30.0)
