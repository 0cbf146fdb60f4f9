"""The writer: all that is ready goes into one thread call, and there into one transaction.

Owns one connection and the jobs that wait for it. Hears: `submit`, `withdraw`, `close`, plain calls. Tells: each job's
`finish`. A cancellation leaves nothing behind: `run` is shielded, and ends when its owner says `close` and no thread
uses the connection any more, or at the deadline of `close_at_once`: a thread that hangs is left with its connection.

A hop is started by whoever submits, and landed by trio itself: no task wakes up in between, which would cost more than
the statements do. Only a rest after a locked file is a task's, and it is `run`'s.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import trio

from links.errors import CallBroken, ConnectionBroken
from links.sql.job_queue import JobQueue
from links.sql.jobs import Job
from links.sql.patience import PATIENCE

__all__ = ["Busy", "Fatal", "HopTurn", "ThreadConnection", "ThreadWriter"]


class Busy(Exception):
    """Another connection holds the lock; nothing was changed."""


class Fatal(Exception):
    """The database or its disk failed: this connection is of no more use."""


class ThreadConnection(Protocol):
    """One connection of a driver that blocks: used in a thread, one call at a time, but for `interrupt` and `close`."""

    def open(self) -> None:
        """Connect. Raises `LinkRefused`; `ConnectionBroken`; `Busy` where another connection holds the lock."""
        ...

    def transact(self, jobs: Sequence[Job]) -> None:
        """Carry out all jobs in one transaction, or where one of them ends it for all, each part in one of its own.

        Raises `Busy` (nothing was changed, call again) and `Fatal` (a job that was not done may have been). Anything
        else that a job raises is that job's failure, with nothing of it written.
        """
        ...

    def barred(self) -> str | None:
        """Why a job of this task would wait for the task itself; None: it would not. A plain call, in trio."""
        ...

    def interrupt(self) -> None:
        """End the statement that runs, from another thread."""
        ...

    def close(self) -> None:
        """Close it, now or by the call that is under way when that ends. May be called twice."""
        ...


def _rest() -> float:
    """Seconds between two tries at a locked file, at random, so that processes do not march in step."""
    return random.uniform(0.005, 0.05)  # noqa: S311 -- spread, not secrecy


class Outcome(Protocol):
    """What a thread call came to."""

    def unwrap(self) -> object:
        """Raise what it raised."""
        ...


class HopTurn:
    """Whose hop it is: two connections of one process would only wait for each other in the file."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: deque[Callable[[], None]] = deque()

    def take(self, start: Callable[[], None]) -> None:
        """Call `start` when it is our turn; it is until `pass_on`."""
        if self._taken:
            self._waiting.append(start)
        else:
            self._taken = True
            start()

    def pass_on(self) -> None:
        """The next one's turn."""
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._taken = False


class ThreadWriter(JobQueue):
    """One connection's jobs, hop by hop."""

    def __init__(self, connection: ThreadConnection, name: str, turn: HopTurn) -> None:
        super().__init__(name)
        self._connection = connection
        self._turn = turn
        self._token: trio.lowlevel.TrioToken | None = None
        self._flying: list[Job] = []
        """Those that a thread has."""
        self._hopping = False
        self._resting = False
        self._closing = False
        self._changed = trio.Event()
        self._shield = trio.CancelScope(shield=True)
        self._bug: BaseException | None = None

    async def open(self) -> None:
        """Open the file. Raises `LinkRefused`; `ConnectionBroken` where others keep it locked.

        Cancellation: open or not, or a thread still tries: `shut` closes it, and that thread's too.
        """
        self._token = trio.lowlevel.current_trio_token()
        started = trio.current_time()
        limiter = trio.CapacityLimiter(1)  # a thread that hangs shall not take one of everybody's
        while True:
            try:
                await trio.to_thread.run_sync(self._connection.open, abandon_on_cancel=True, limiter=limiter)
            except Busy:
                if trio.current_time() >= started + PATIENCE:
                    raise ConnectionBroken(self._held(started)) from None
                await trio.sleep(_rest())
            else:
                return

    def _held(self, since: float) -> str:
        waited = trio.current_time() - since
        return f"{self._name}: another process has held the lock of the file for {waited:.1f} s; nothing was changed"

    def _late(self, job: Job) -> str:
        return self._held(job.since) if self._resting else super()._late(job)

    def submit(self, job: Job) -> None:
        """As `JobQueue.submit`. It fails at once where it would wait for the transaction of who asks for it."""
        if (why := self._connection.barred()) is None:
            super().submit(job)
        else:
            job.fail(CallBroken(why))
            job.finish()

    # --- hops ----------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        if self._pending and not self._hopping and not self._resting:
            self._hopping = True
            self._turn.take(self._start)

    def _start(self) -> None:
        jobs, self._pending = self._pending, []
        if not jobs:  # all were withdrawn while we waited for our turn
            self._hopping = False
            self._turn.pass_on()
            self._change()
            return
        self._flying = jobs
        sent = trio.current_time()
        for job in jobs:
            job.sent = sent
        # not trio.to_thread: it would need a task here, and the thread is waited for by `run` all the same
        trio.lowlevel.start_thread_soon(partial(self._connection.transact, jobs), partial(self._deliver, jobs))

    def _deliver(self, jobs: list[Job], outcome: Outcome) -> None:
        """In the thread: hand the outcome to trio."""
        assert self._token is not None  # noqa: S101 -- set by `open`
        with contextlib.suppress(trio.RunFinishedError):  # it was left alone, and trio has ended meanwhile
            self._token.run_sync_soon(self._land, jobs, outcome)

    def _land(self, jobs: list[Job], outcome: Outcome) -> None:
        self._hopping = False
        self._turn.pass_on()
        if self._flying is not jobs:  # they have ended without it
            return
        self._flying = []
        try:
            self._take_in(jobs, outcome)
        except BaseException as bug:  # noqa: ASYNC103, BLE001 -- called outside every task: `run` raises it
            self._bug = bug
            self._end(ConnectionBroken(f"{self._name}: a bug ended the connection"))
        self._next()
        if self._closing or self._resting or self.error:
            self._change()

    def _take_in(self, jobs: list[Job], outcome: Outcome) -> None:
        try:
            outcome.unwrap()
        except Busy:
            self._keep(jobs)
        except BaseException as error:  # noqa: ASYNC103 -- what a thread raised, where nothing is ever cancelled
            broken = ConnectionBroken(f"{self._name}: {error}")
            broken.__cause__ = error.__cause__ or error
            self._end(broken)
            for job in jobs:
                job.fail(broken)
                job.finish()
            if not isinstance(error, Fatal):
                raise
        else:
            for job in jobs:
                job.finish()

    def _keep(self, jobs: list[Job]) -> None:
        """Nothing was done: try again, after a rest, those that still have time."""
        now = trio.current_time()
        for job in jobs:
            job.sent = 0.0
        self._resting = True
        self._pending[:0] = [job for job in jobs if now < job.deadline]
        for job in jobs:
            if now >= job.deadline:
                job.fail(CallBroken(self._held(job.since)))
                job.finish()

    # --- life ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until `close` and the last job, or until the file fails: then `error` says why, and all jobs have failed.

        Cancellation: not heard; `close` is, and it bounds the shield.
        """
        with self._shield:
            while self._hopping or not (self.error or (self._closing and not self._pending)):
                if self._resting and self.error is None:
                    await trio.sleep(_rest())
                    self._resting = False
                    self._next()
                else:
                    self._changed = trio.Event()
                    await self._changed.wait()
        self._end(ConnectionBroken(f"{self._name} was closed"))
        left, self._flying = self._flying, []
        for job in left:
            job.leave(ConnectionBroken(f"{self._name} was closed, and the thread that had this has not ended"))
        if self._bug is not None:
            raise self._bug

    def close(self) -> None:
        """End `run` when nothing is pending."""
        self._closing = True
        self._change()

    def close_at_once(self, deadline: float) -> None:
        """End `run` by then: what runs is interrupted, what waits has failed."""
        self._closing = True
        self._end(ConnectionBroken(f"{self._name} was closed"))
        self._connection.interrupt()
        self._shield.deadline = min(self._shield.deadline, deadline)
        self._change()

    async def shut(self) -> None:
        """Close the file, after `run`; a thread that still uses it closes it when it ends.

        Cancellation: it is closed all the same, in a thread that nobody waits for.
        """
        token, shut = trio.lowlevel.current_trio_token(), trio.Event()

        def deliver(_: Outcome) -> None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(shut.set)

        trio.lowlevel.start_thread_soon(self._connection.close, deliver)
        await shut.wait()

    def _change(self) -> None:
        self._changed.set()
