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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from links.errors import ConnectionBroken, LinkRefused
from links.sql.jobs import Job
from links.sql.rows import BadText
from links.sql.sqlite import times
from links.sql.sqlite.codes import is_busy, is_fatal, is_weather, primary_code
from links.sql.sqlite.lender import barred
from links.sql.sqlite.schema import SqliteSession
from links.sql.sqlite.watch import SqliteWatch
from links.sql.sqlite.work import SqliteWork, Work
from links.sql.thread_writer import Busy, Fatal

__all__ = ["SqliteConnection"]

T = TypeVar("T")

_BUSY_TIMEOUT = 0.05
"""Seconds that the thread itself waits for another process; then trio does, where it can be cancelled."""


def _text(value: bytes) -> str | BadText:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return BadText(value)


class SqliteConnection:
    """One connection. `synchronous`: NORMAL may forget the last commits at a power cut, FULL does not."""

    def __init__(self, path: Path, name: str, synchronous: Literal["NORMAL", "FULL"]) -> None:
        self.path, self._name = path, name
        self._synchronous: Literal["NORMAL", "FULL"] = synchronous
        self._connection: SqliteSession | None = None
        self._watch: SqliteWatch | None = None
        self._work = SqliteWork(path, self._beside)
        self._lock = threading.Lock()
        """For the two flags."""
        self._used = False
        """A call is under way."""
        self._closed = False
        """Nobody may use it any more; a call that is under way closes the file when it ends."""

    def _beside(self) -> SqliteConnection:
        return SqliteConnection(self.path, self._name, self._synchronous)

    def barred(self) -> str | None:
        """As `ThreadConnection.barred`."""
        return barred(self.path)

    @property
    def _open(self) -> SqliteSession:
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
            found = self.path.stat()
        except OSError as error:
            raise LinkRefused(
                f"{self._name}: {error.strerror}; create the database and its tables first, where this user may read it"
            ) from error
        if stat.S_ISDIR(found.st_mode):
            raise LinkRefused(f"{self._name}: this is a folder; name the database file")
        if found.st_nlink > 1:
            raise LinkRefused(
                f"{self._name}: the file has {found.st_nlink} names (hard links), and SQLite keeps its log beside the "
                "one that it was opened by, so whoever opens another one damages it; remove the other names, or give "
                "them a copy"
            )
        try:
            connection = sqlite3.connect(
                f"{self.path.as_uri()}?mode=rw",
                uri=True,
                timeout=_BUSY_TIMEOUT,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=256,
                factory=SqliteSession,
            )
        except sqlite3.Error as error:
            raise self._refused(error) from error
        try:
            connection.text_factory = _text
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
            watch = SqliteWatch(self.path, (found.st_dev, found.st_ino))
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

    def use(self, call: Callable[[SqliteSession], T]) -> T:
        """Call this with the connection. Raises `Fatal` where the file was taken away meanwhile, whatever it gave."""
        self._enter()
        try:
            result = call(self._open)
            self._look()
            return result
        finally:
            self._leave()

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
        works = [self._work.of(job) for job in jobs]
        try:
            self._together(works)
        except (Busy, Fatal):
            raise
        except Exception as error:  # noqa: BLE001 -- a mistake in one job must not end the others
            parts = [part for work in works for part in work.parts()]
            if len(parts) == 1 and not parts[0].learned():
                works[0].fail(error)
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
            now = times.now()
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
