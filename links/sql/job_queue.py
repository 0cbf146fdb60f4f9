"""The jobs that wait for a connection, as every writer keeps them. Plain calls, but for one that waits."""

from __future__ import annotations

import trio

from links.errors import CallBroken, ConnectionBroken
from links.sql.jobs import Job

__all__ = ["JobQueue"]


class JobQueue:
    """Owns the jobs that have not begun. `name`: the database, for errors."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pending: list[Job] = []
        self.error: ConnectionBroken | None = None
        """Why the connection's life is over."""

    def _next(self) -> None:
        """Something is pending: begin, unless something is under way."""
        raise NotImplementedError

    def submit(self, job: Job) -> None:
        """Carry this out; its `then` is called when it has ended."""
        if self.error is not None:
            job.fail(self.error)
            job.finish()
            return
        self._pending.append(job)
        self._next()

    def withdraw(self, job: Job) -> bool:
        """Forget a job that has not begun; False: it has."""
        if job not in self._pending:
            return False
        self._pending.remove(job)
        job.fail(CallBroken(self._late(job)))
        job.finish()
        return True

    def _late(self, job: Job) -> str:
        """Why it has not begun."""
        return f"{self._name}: not begun within {trio.current_time() - job.since:.1f} s; nothing was changed"

    async def carry_out(self, job: Job) -> None:
        """Submit the job and wait for its end.

        Cancellation: a job that has not begun is withdrawn; another is carried out, and its `then` is called.
        """
        self.submit(job)
        try:
            await job.done.wait()
        except trio.Cancelled:
            self.withdraw(job)
            raise

    def _end(self, error: ConnectionBroken) -> None:
        """The connection's life is over: what waits has failed."""
        self.error = self.error or error
        pending, self._pending = self._pending, []
        for job in pending:
            job.fail(self.error)
            job.finish()
