"""The writer's side in the thread: one connection, its jobs one after the other, each in transactions of its own.

A connection that breaks costs the call that was under way, and no lease: there is another one, once a second at most;
where that does not come within `RECONNECT`, the life is over. What was under way is run again and goes on where it
stood (`links.sql.mysql.work`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import pymysql

from links.errors import ConnectionBroken, LinkRefused
from links.sql.jobs import Job
from links.sql.mysql.codes import first_line
from links.sql.mysql.session import MysqlSession
from links.sql.mysql.work import MysqlWork, Work
from links.sql.thread_writer import Fatal

__all__ = ["RECONNECT", "MysqlConnection", "New"]

_log = logging.getLogger("trio_settlement")

New: TypeAlias = Callable[[], MysqlSession]
"""Makes a session that is not open yet."""

RECONNECT: Final = 5.0
"""Seconds for which another connection is tried."""
_PAUSE: Final = 1.0
"""Seconds between two connections, at least: so a server that ends each at once costs little."""


class MysqlConnection:
    """As `ThreadConnection`. `new` makes a session, `work` says how its jobs are carried out."""

    def __init__(self, new: New, work: MysqlWork, name: str) -> None:
        self._new, self._work, self._name = new, work, name
        self._session: MysqlSession | None = None
        self._opened = 0.0
        self._over = threading.Event()
        """Nobody may use it any more."""
        self._lock = threading.Lock()
        """For `_used`, and what follows from it."""
        self._used = False

    def barred(self) -> str | None:
        """As `ThreadConnection.barred`: no transaction of a handler's locks the database."""
        return None

    def open(self) -> None:
        """Connect. Raises `LinkRefused`, `ConnectionBroken`."""
        session = self._new()
        with self._lock:
            if self._over.is_set():
                raise ConnectionBroken(f"{self._name} was closed")
            self._session = session
        session.open()
        self._opened = time.monotonic()

    def transact(self, jobs: Sequence[Job]) -> None:
        """Carry out all jobs. Raises `Fatal`: one that was not done may have been."""
        with self._lock:
            if self._over.is_set():
                raise Fatal("the connection was closed")
            self._used = True
        try:
            for job in jobs:
                self._carry_out(self._work.of(job))
        finally:
            with self._lock:
                self._used = False
                over = self._over.is_set()
            if over:
                self.close()

    def _carry_out(self, work: Work) -> None:
        while not self._tried(work):
            self._reconnect()

    def _tried(self, work: Work) -> bool:
        """Run it on this connection; False: the connection broke, and it is to be run again on another one."""
        session = self._session
        if session is None or session.was_ended():
            return False
        try:
            work.run(session)
        except pymysql.MySQLError as error:
            if not session.closed:
                work.fail(error)
                return True
            broken = ConnectionBroken(f"{self._name}: {first_line(error)}")
            broken.__cause__ = error
            if self._over.is_set():
                raise Fatal(first_line(error)) from error
            _log.warning("%s: a connection broke: %s", self._name, first_line(error))
            return not work.lost(broken)
        except Exception as error:  # noqa: BLE001 -- a mistake in one job must not end the others
            if not session.closed:
                session.say("ROLLBACK")
            work.fail(error)
        return True

    def _reconnect(self) -> None:
        """Raises `Fatal` where there is no other connection in time."""
        if self._session is not None:
            self._session.close()
        end = time.monotonic() + RECONNECT
        self._over.wait(max(0.0, min(end, self._opened + _PAUSE) - time.monotonic()))
        pause = 0.05
        while True:
            try:
                self.open()
            except (ConnectionBroken, LinkRefused) as error:
                if time.monotonic() + pause >= end or self._over.is_set():
                    why = f"the connection broke, and there is no other: {error}"
                    raise Fatal(why) from error  # noqa: ASYNC104 -- in a thread
            else:
                return
            self._over.wait(pause)
            pause = min(pause * 2, 1.0)

    def interrupt(self) -> None:
        """End what runs, from another thread; there is no other connection then."""
        self._over.set()
        if self._session is not None:
            self._session.interrupt()

    def close(self) -> None:
        """Close it, now or by the call that is under way when that ends. May be called twice."""
        self._over.set()
        with self._lock:
            if self._used:
                return
        if self._session is not None:
            self._session.close()
