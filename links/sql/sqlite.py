"""The thread's side of SQLite: one connection, and one transaction for all the jobs of a hop.

Everything here runs in a worker thread, one call at a time. BEGIN is always IMMEDIATE: a transaction that reads first
and writes later fails at once where somebody else wrote in between (lab/SQL.md 4).

A call that hangs is not waited for: `close` leaves the connection to it, and it closes the file when it ends.
"""

from __future__ import annotations

import contextlib
import sqlite3
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from links.errors import ConnectionBroken, LinkRefused
from links.sql import sqlite_times
from links.sql.sqlite_codes import is_busy, is_fatal, is_weather, primary_code
from links.sql.sqlite_jobs import Job, Work
from links.sql.sqlite_lease import text
from links.sql.sqlite_schema import Database
from links.sql.sqlite_watch import Watch

__all__ = ["Busy", "Connection", "Fatal"]

_BUSY_TIMEOUT = 0.05
"""Seconds that the thread itself waits for another process; then trio does, where it can be cancelled."""


class Busy(Exception):
    """Another connection holds the lock; nothing was changed."""


class Fatal(Exception):
    """The file or its disk failed: this connection is of no more use."""


class Connection:
    """One connection. `synchronous`: NORMAL may forget the last commits at a power cut, FULL does not."""

    def __init__(self, path: Path, name: str, synchronous: Literal["NORMAL", "FULL"]) -> None:
        self._path, self._name, self._synchronous = path, name, synchronous
        self._connection: Database | None = None
        self._watch: Watch | None = None
        self._lock = threading.Lock()
        """For the two flags."""
        self._used = False
        """A call is under way."""
        self._closed = False
        """Nobody may use it any more; a call that is under way closes the file when it ends."""

    @property
    def _open(self) -> Database:
        assert self._connection is not None, "opened before it is used"  # noqa: S101 -- an invariant of ours
        return self._connection

    def _enter(self) -> None:
        with self._lock:
            if self._closed:
                raise Fatal("the connection was closed")
            self._used = True

    def _leave(self) -> None:
        with self._lock:
            self._used = False
            closed = self._closed
        if closed:
            self._shut()

    def open(self) -> None:
        """Open the file, which must exist.

        Raises `LinkRefused`; `ConnectionBroken` where its disk is full or fails; `Busy` where another connection holds
        it.
        """
        self._enter()
        try:
            self._connect()
        finally:
            self._leave()

    def _connect(self) -> None:
        try:
            found = self._path.stat()
        except OSError as error:
            raise LinkRefused(
                f"{self._name}: {error.strerror}; create the database and its tables first, where this user may read it"
            ) from error
        if stat.S_ISDIR(found.st_mode):
            raise LinkRefused(f"{self._name}: this is a folder; name the database file")
        try:
            connection = sqlite3.connect(
                f"{self._path.as_uri()}?mode=rw",
                uri=True,
                timeout=_BUSY_TIMEOUT,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=256,
                factory=Database,
            )
        except sqlite3.Error as error:
            raise self._refused(error) from error
        try:
            connection.text_factory = text
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                stays = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
                if stays != "wal":
                    raise LinkRefused(f"{self._name}: the file cannot be put into WAL mode, it stays in {stays}")
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
            connection.execute("BEGIN IMMEDIATE")
            # on a file that cannot be written BEGIN IMMEDIATE is a read transaction, silently: only a write tells
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            connection.execute(f"PRAGMA user_version = {version}")
            connection.execute("ROLLBACK")
            watch = Watch(self._path, (found.st_dev, found.st_ino))
        except sqlite3.Error as error:
            connection.close()
            if is_busy(error):
                raise Busy from None
            if is_weather(error):
                raise ConnectionBroken(f"{self._name}: {error}") from error
            raise self._refused(error) from error
        except OSError as error:
            connection.close()
            raise ConnectionBroken(f"{self._name}: taken away while it was opened: {error.strerror}") from error
        except BaseException:
            connection.close()
            raise
        self._connection, self._watch = connection, watch

    def _refused(self, error: sqlite3.Error) -> LinkRefused:
        match primary_code(error):
            case sqlite3.SQLITE_NOTADB | sqlite3.SQLITE_CORRUPT:
                way_out = "it is no SQLite database, or a damaged one; restore it from a backup"
            case sqlite3.SQLITE_READONLY:
                way_out = "it cannot be written; give this user the right to write file and folder"
            case _:
                way_out = "give this user the right to read and write file and folder"
        return LinkRefused(f"{self._name}: {error}; {way_out}")

    def transact(self, jobs: Sequence[Job]) -> None:
        """Carry out all jobs in one transaction; where one of them ends it for all, each part in one of its own.

        Raises `Busy` (nothing was changed, call again) and `Fatal` (a job that was not done may have been). Anything
        else that a job raises is that job's failure, with nothing of it written.
        """
        self._enter()
        try:
            self._transact(jobs)
        finally:
            self._leave()

    def _transact(self, jobs: Sequence[Job]) -> None:
        try:
            self._together(jobs)
        except (Busy, Fatal):
            raise
        except Exception as error:  # noqa: BLE001 -- a mistake in one job must not end the others
            parts = [part for job in jobs for part in job.parts()]
            if len(parts) == 1 and not parts[0].learned():
                jobs[0].fail(error)
                return
            for part in parts:
                self._alone(part)

    def _alone(self, part: Work) -> None:
        while True:
            try:
                self._together([part])
            except Busy:
                part.fail(TimeoutError("another process holds the lock of the file"))
            except Fatal:
                raise
            except Exception as error:  # noqa: BLE001 -- as above
                if part.learned():
                    continue
                part.fail(error)
            return

    def _together(self, works: Sequence[Work]) -> None:
        connection = self._open
        try:
            connection.begin()
            now = sqlite_times.now()
            for work in works:
                work.run(connection, now)
            connection.execute("COMMIT")
        except BaseException as error:
            with contextlib.suppress(sqlite3.Error):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            if is_busy(error):
                raise Busy from None  # noqa: ASYNC104 -- in a thread, where nothing is ever cancelled
            if is_fatal(error) or connection.in_transaction:
                raise Fatal(str(error)) from error  # noqa: ASYNC104 -- as above
            raise
        self._look()  # after COMMIT: what went into files that nobody will find is confirmed to nobody

    def _look(self) -> None:
        if self._watch is not None and (why := self._watch.look()) is not None:
            raise Fatal(why)

    def interrupt(self) -> None:
        """End the statement that runs, from another thread."""
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):  # closed meanwhile
                self._connection.interrupt()

    def close(self) -> None:
        """Close the file, now or by the call that is under way when that ends. May be called twice."""
        with self._lock:
            self._closed = True
            if self._used:
                return
        self._shut()

    def _shut(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()
