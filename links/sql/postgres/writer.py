"""The writer: one connection, and the jobs that wait for it, carried out one after the other.

Owns its connection. Hears: `submit`, `withdraw`, `close`, plain calls. Tells: each job's `finish`. Where the connection
breaks it gets another one and goes on, once a second at most; where that does not come within `RECONNECT`, its life is
over. So a connection that is ended on the server costs the call that was under way, and no lease.

A cancellation leaves nothing behind: `run` is shielded, and ends when its owner says `close`, or at the deadline of
`close_at_once`, which closes the connection under whatever it does.
"""

from __future__ import annotations

import logging
from typing import Final

import psycopg
import trio

from links.errors import ConnectionBroken, LinkRefused
from links.sql.job_queue import JobQueue
from links.sql.jobs import Job
from links.sql.postgres.pin import Connect
from links.sql.postgres.trio_connection import TrioConnection
from links.sql.postgres.work import PostgresWork, Work

__all__ = ["RECONNECT", "STATEMENT", "PostgresWriter"]

_log = logging.getLogger("trio_settlement")

RECONNECT: Final = 5.0
"""Seconds for which another connection is tried."""
STATEMENT: Final = 30.0
"""Seconds after which a job is cancelled on the server."""
_PAUSE: Final = 1.0
"""Seconds between two connections, at least: so a server that ends each at once costs little."""


class PostgresWriter(JobQueue):
    """One connection's jobs. `connect` and `session` raise `LinkRefused`, `ConnectionBroken`.

    `session`: a connection whose session of the server nobody else gets.
    """

    def __init__(self, connect: Connect, session: Connect, name: str) -> None:
        super().__init__(name)
        self._connect = connect
        self._work = PostgresWork(connect, session)
        self._connection: TrioConnection | None = None
        self._opened = 0.0
        self._closing = False
        self._changed = trio.Event()
        self._shield = trio.CancelScope(shield=True)

    async def open(self) -> None:
        """Connect. Raises `LinkRefused`, `ConnectionBroken`.

        Cancellation: there is no connection.
        """
        self._connection = await self._connect()
        self._opened = trio.current_time()

    def _next(self) -> None:
        self._change()

    def _change(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Until `close` and the last job, or until there is no connection: then `error` says why, and all have failed.

        Cancellation: not heard; `close` is, and `close_at_once` bounds the shield.
        """
        with self._shield:
            while not (self.error or (self._closing and not self._pending)):
                if self._pending:
                    await self._carry_out(self._pending.pop(0))
                else:
                    self._changed = trio.Event()
                    await self._changed.wait()
        self._end(ConnectionBroken(f"{self._name} was closed"))

    async def _carry_out(self, job: Job) -> None:
        """Carry out one. Cancellation: it has failed, as far as anybody knows."""
        job.sent = trio.current_time()
        work = self._work.of(job)
        try:
            while not await self._tried(work):
                await self._reconnect()
        except ConnectionBroken as error:
            self._end(error)
            work.fail(error)
        except BaseException:
            work.fail(ConnectionBroken(f"{self._name} was closed"))
            raise
        finally:
            job.finish()

    async def _tried(self, work: Work) -> bool:
        """Run it on this connection; False: the connection broke, and it is to be run again on another one."""
        connection = self._connection
        if connection is None or connection.was_ended():
            return False
        try:
            with trio.move_on_after(STATEMENT) as limit:
                await work.run(connection)
            if limit.cancelled_caught:  # it took effect or not
                late = ConnectionBroken(f"{self._name}: the server has not answered within {STATEMENT:g} s")
                if work.lost(late):
                    work.fail(TimeoutError(str(late)))
        except psycopg.Error as error:
            broken = ConnectionBroken(f"{self._name}: {str(error).partition(chr(10))[0]}")
            broken.__cause__ = error
            if self.error is not None:  # closed by us
                raise broken from error
            _log.warning("%s: a connection broke: %s", self._name, broken.__cause__)
            return not work.lost(broken)
        return True

    async def _reconnect(self) -> None:
        """Raises `ConnectionBroken` where there is no other connection in time."""
        end = trio.current_time() + RECONNECT
        await trio.sleep_until(min(end, self._opened + _PAUSE))
        pause = 0.05
        while True:
            try:
                with trio.fail_at(end):
                    await self.open()
                return
            except (ConnectionBroken, LinkRefused, trio.TooSlowError) as error:
                if trio.current_time() + pause >= end or self.error is not None:
                    why = str(error) or "no answer in time"
                    raise ConnectionBroken(
                        f"{self._name}: the connection broke, and there is no other: {why}"
                    ) from error
            await trio.sleep(pause)
            pause = min(pause * 2, 1.0)

    def close(self) -> None:
        """End `run` when nothing is pending."""
        self._closing = True
        self._change()

    def close_at_once(self, deadline: float) -> None:
        """End `run` by then: what runs loses its connection, what waits has failed."""
        self._closing = True
        self._end(ConnectionBroken(f"{self._name} was closed"))
        self._shield.deadline = min(self._shield.deadline, deadline)
        if self._connection is not None:
            self._connection.finish()
        self._change()

    async def shut(self) -> None:
        """Close the connection, after `run`. There is no checkpoint here."""
        if self._connection is not None:
            self._connection.finish()
