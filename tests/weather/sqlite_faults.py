"""Faults between `links.sql` and its file: a connection that breaks before, within or after a transaction.

`faulty_connections` lets the connections that `links.sql` opens to a watched file be `Faulty` ones. What was ordered by
`Faults.order` befalls the next transaction that it fits. Each connection has a number, which its own triggers write
down with each claim, so that a test can say by SELECT who holds what.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Generator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from links.sql.sqlite.schema import SqliteSession

__all__ = ["COUNTED", "FAULTS", "LEASED", "UNTOLD", "Faults", "faulty_connections"]

FAULTS = ("sever", "sever_within", "lose_confirmation", "full", "refuse_claim")
LEASED = """
CREATE TEMP TRIGGER mine AFTER UPDATE OF locked_until ON jobs WHEN NEW.attempt > OLD.attempt
    BEGIN INSERT INTO claims VALUES (NEW.id, NEW.attempt, {life}, (julianday('now') - 2440587.5) * 86400); END;
CREATE TEMP TRIGGER holding AFTER UPDATE OF locked_until ON jobs WHEN NEW.locked_until IS NOT NULL
    BEGIN INSERT OR REPLACE INTO holders VALUES (NEW.id, {life}, NEW.locked_until); END;
"""
"""What a connection of ours writes down of leases; `claims` and `holders` are the test's own tables."""
COUNTED = """
CREATE TEMP TRIGGER mine AFTER UPDATE OF attempt ON jobs WHEN NEW.attempt > OLD.attempt
    BEGIN INSERT INTO claims VALUES (NEW.id, NEW.attempt, {life}, (julianday('now') - 2440587.5) * 86400); END;
"""
"""The same where nothing is leased."""
UNTOLD = ""
"""Nothing: then the table has no trigger."""

_lives = count(1)


def _failure(code: int, what: str) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(f"{what} (by the test)")
    error.sqlite_errorcode = code
    return error


class Faults:
    """What shall befall the connections to one file. `told`: what they write down, `LEASED`, `COUNTED` or `UNTOLD`."""

    def __init__(self, told: str = LEASED) -> None:
        self.told = told
        self._lock = threading.Lock()
        self._ordered: list[str] = []
        self.happened: list[str] = []
        self.broken: set[int] = set()
        """Connections that broke, and could not let anything go."""
        self.full: set[int] = set()
        """Connections with a transaction that failed: if it was to let go, that comes later, or when leases run out."""
        self.most: dict[int, int] = {}
        """The most rows that a connection had leased at once."""

    def order(self, name: str) -> None:
        """Let this befall the next transaction that it fits."""
        with self._lock:
            self._ordered.append(name)

    def clear(self) -> None:
        """Fair weather."""
        with self._lock:
            self._ordered.clear()

    def befalls(self, name: str) -> bool:
        """Does it happen now?"""
        with self._lock:
            if name not in self._ordered:
                return False
            self._ordered.remove(name)
            self.happened.append(name)
            return True


class Faulty(SqliteSession):
    """A connection that may break. It is one with the file as soon as it was opened, and only then does it."""

    faults: Faults
    life = 0
    _opened = False
    _before = 0

    def watch(self, faults: Faults) -> None:
        """Count what this connection claims."""
        self.faults, self.life = faults, next(_lives)
        self.executescript(faults.told.format(life=self.life))

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """As SQLite does, in its weather."""
        if sql == "BEGIN IMMEDIATE":
            if self._opened and self.faults.befalls("sever"):
                raise self._breaks("severed")
            cursor = super().execute(sql)
            self._before = self.total_changes
            return cursor
        if sql == "ROLLBACK":
            self._opened = True
        elif sql == "COMMIT" and self.total_changes > self._before:
            return self._commit()
        elif sql.startswith("SELECT") and "LIMIT :room" in sql and self.faults.befalls("refuse_claim"):
            raise _failure(sqlite3.SQLITE_ERROR, "refused")
        return super().execute(sql, parameters)

    def _breaks(self, what: str) -> sqlite3.OperationalError:
        self.faults.broken.add(self.life)
        return _failure(sqlite3.SQLITE_IOERR, what)

    def _commit(self) -> sqlite3.Cursor:
        faults = self.faults
        if faults.befalls("full"):
            faults.full.add(self.life)
            raise _failure(sqlite3.SQLITE_FULL, "the disk is full")
        if faults.befalls("sever_within"):
            super().execute("ROLLBACK")
            raise self._breaks("severed")
        if faults.befalls("lose_confirmation"):
            super().execute("COMMIT")
            raise self._breaks("severed after COMMIT")
        if faults.told is LEASED:
            ((held,),) = super().execute("SELECT count(*) FROM holders WHERE life = ?", (self.life,)).fetchall()
            faults.most[self.life] = max(held, faults.most.get(self.life, 0))
        return super().execute("COMMIT")


@contextmanager
def faulty_connections(files: dict[Path, Faults]) -> Generator[None, None, None]:
    """Inside, what is opened by URI and stands in `files` is `Faulty`; the test's own connections are as they are."""
    connect: Any = sqlite3.connect

    def connecting(database: Any, *arguments: Any, **options: Any) -> Any:
        faults = next((each for path, each in files.items() if f"{path.as_uri()}?mode=rw" == database), None)
        if faults is None:
            return connect(database, *arguments, **options)
        connection: Faulty = connect(database, *arguments, **{**options, "factory": Faulty})
        try:
            connection.watch(faults)
        except BaseException:
            connection.close()
            raise
        return connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", connecting)
        yield
