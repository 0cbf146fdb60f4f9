"""A claim of the advisory form on SQLite, as a slot has it: no connection of its own, jobs for that of the queues.

A handler's transaction is a loan (`links.sql.sqlite.lender`), which locks the file. So it ends before a job is done for
its row, or the job would wait for it: by an ack, which is said in it, or undone.

Cancellation, anywhere: a job that has not begun is withdrawn; another ends in its thread, and then the keys are
released. A claim that was cancelled is waited for, a few seconds at most, and its attempts are counted back. A loan is
given up by `close`.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import trio

from links.abc import Verdict
from links.errors import ConnectionBroken, LeaseLost, SettlementUnknown, TransactionHeld
from links.sql.dialect import Writer
from links.sql.jobs import Passing, Run
from links.sql.patience import PATIENCE
from links.sql.pin import Settled
from links.sql.rows import Row
from links.sql.sqlite.keys import Ring
from links.sql.sqlite.lender import LANDING, SqliteLender, SqliteLoan
from links.sql.sqlite.lent import LentConnection
from links.sql.table import Table
from settlement.sql import PutBack, Verb

__all__ = ["Keyed", "SqlitePin", "lost"]

_log = logging.getLogger("trio_settlement")


class Keyed(Protocol):
    """The queue's statements, as `SqliteAdvisory` has them: in the thread, but for `ring`."""

    table: Table[Any]

    def ring(self) -> Ring:
        """A new one."""
        ...

    def claim(self, connection: sqlite3.Connection, now: int, room: int, passing: Passing, *, ring: Ring) -> list[Row]:
        """Take rows into the ring."""
        ...

    def settle(self, connection: sqlite3.Connection, now: int, said: Sequence[tuple[Row, Verb]]) -> list[Verdict]:
        """A verdict for each verb."""
        ...

    def uncount(self, connection: sqlite3.Connection, now: int, rows: Sequence[Row]) -> None:
        """The attempts are what they were."""
        ...


class SqlitePin:
    """The keys of one claim, and the transaction of its handler."""

    def __init__(self, form: Keyed, writer: Writer, lender: SqliteLender) -> None:
        self._form, self._writer, self._lender = form, writer, lender
        self._ring: Ring | None = None
        self._loan: SqliteLoan | None = None
        self.committed = False
        """As `Pin.committed`: a verdict says so, or nobody knows."""

    async def claim(self, passing: Passing, room: int) -> Sequence[Row]:
        """As `Pin.claim`."""
        ring = self._ring = self._ring or self._form.ring()
        call = partial(self._form.claim, room=room, passing=passing, ring=ring)
        job: Run[list[Row]] = Run(call, PATIENCE, passing=passing)
        try:
            await self._writer.carry_out(job)
            job.check(f"claim from table {self._form.table.name!r}")
        except trio.Cancelled:
            with trio.move_on_after(LANDING, shield=True):
                await job.done.wait()
                if job.result:  # its keys are held until then: who took the row meanwhile would have counted it, too
                    await self._uncount(job.result)
            self._leave_behind(job)
            raise
        except Exception:
            self.close()
            raise
        return job.result or []

    async def _carry_out(self, job: Run[Any]) -> None:
        """As `Writer.carry_out`. Cancellation: the keys are released as soon as no thread is at it."""
        try:
            await self._writer.carry_out(job)
        except trio.Cancelled:
            self._leave_behind(job)
            raise

    def _leave_behind(self, job: Run[Any]) -> None:
        """Nothing is held any more when this has ended."""
        ring, self._ring = self._ring, None
        if ring is not None and job.done.is_set():
            ring.leave()
        elif ring is not None:
            job.then = ring.leave

    async def settle(
        self,
        said: Sequence[tuple[Row, Verb]],
        rest: Sequence[Row],  # noqa: ARG002 -- it has its own keys
        *,
        keep: bool,
        then: Passing | None,  # noqa: ARG002 -- a claim passes over the keys that this one holds still
    ) -> Settled:
        """As `Pin.settle`: one transaction, then the keys are free; those of what failed, too."""
        loan = self._loan
        if keep and loan is not None and loan.open:
            verdicts = [await loan.finish(row[:3], verb) for row, verb in said]  # one: a batch has no loan
            self._loan = None
        else:
            await self.undo()
            verdicts = await self._said(said)
        if self._ring is not None:
            self._ring.free([row[0] for row, _ in said])
        return Settled(verdicts)

    async def _said(self, said: Sequence[tuple[Row, Verb]]) -> list[Verdict]:
        if all(isinstance(verb, PutBack) for _, verb in said):
            await trio.lowlevel.checkpoint()
            return [None] * len(said)
        job: Run[list[Verdict]] = Run(partial(self._form.settle, said=said), PATIENCE)
        await self._carry_out(job)
        if job.error is None and job.result is not None:
            return job.result
        if isinstance(job.error, ConnectionBroken):
            if not job.sent:
                return [lost(job.error)] * len(said)
            unknown = SettlementUnknown(f"the file failed while it was said: {job.error}")
            unknown.__cause__ = job.error
            return [unknown] * len(said)
        if len(said) == 1:
            return [lost(job.error or RuntimeError("it came to nothing"))]
        return [verdict for each in said for verdict in await self._said([each])]

    async def lend(self) -> LentConnection:
        """As `Pin.lend`: in a transaction of the handler's own, from the first call on.

        Raises `TransactionHeld` where the claim ends meanwhile. Cancellation: what had begun before is as it was.
        """
        loan = self._loan = self._loan or self._lender.loan()
        try:
            lent = await loan.lend()
            if self._loan is not loan:
                raise TransactionHeld(f"table {self._form.table.name!r}: the claim has ended")
        except BaseException:
            if self._loan is not loan:  # it was ended while it began
                loan.give_up()
            elif not loan.open:
                self._loan = None
            raise
        return lent

    def take_back(self) -> None:
        """As `Pin.take_back`."""
        if self._loan is not None:
            self._loan.take_back()

    async def undo(self) -> None:
        """As `Pin.undo`: the transaction ends, and the file is free. Cancellation: `close` ends it."""
        if (loan := self._loan) is None:
            return
        if loan.open:
            await loan.undo()
        else:  # somebody lets it begin
            loan.give_up()
        self._loan = None

    async def let_go(self, rows: Sequence[tuple[Row, bool]], *, whole: bool) -> None:  # noqa: ARG002 -- each by its key
        """As `Pin.let_go`. Where an attempt cannot be counted back, it stays counted."""
        await self.undo()
        await self._uncount([row for row, began in rows if not began])
        if self._ring is not None:
            self._ring.free([row[0] for row, _ in rows])

    async def _uncount(self, rows: Sequence[Row]) -> None:
        if not rows or self._form.table.attempt is None:
            return
        job: Run[None] = Run(partial(self._form.uncount, rows=rows), PATIENCE)
        await self._carry_out(job)
        if job.error is not None:
            _log.warning("table %r: an attempt stays counted: %s", self._form.table.name, job.error)

    async def until_lost(self) -> str:
        """As `Pin.until_lost`: only the end of the life ends it, and the link hears of that."""
        await trio.sleep_forever()

    def close(self) -> None:
        """As `Pin.close`. What is free by that cannot be claimed before the loan has ended: it locks the file."""
        loan, self._loan = self._loan, None
        if loan is not None:
            loan.give_up()
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.leave()


def lost(why: BaseException) -> LeaseLost:
    """A verb was not carried out, and the key is released all the same."""
    verdict = LeaseLost(f"it was not applied, and the lock was released, so the row is as it was: {why}")
    verdict.__cause__ = why
    return verdict
