"""The transactions of handlers beside their leases on MySQL and MariaDB: each on a connection of its own.

The row itself is not locked while a handler runs, so renewals go on; it is finished in the handler's transaction, by
the token that holds it then. Whatever is not certain is rolled back: nothing is acked without the writes, nothing is
written without the ack.

Cancellation, anywhere: `give_up` closes the connection, and the server rolls back what was not committed.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Final, Protocol

import pymysql
import trio

from links.abc import Verdict
from links.errors import (
    CallBroken,
    ConnectionBroken,
    LeaseLost,
    LinkRefused,
    NotApplied,
    SettlementUnknown,
    TransactionEnded,
)
from links.sql.mysql.codes import BINDING, NO_SAVEPOINT, code_of, first_line, is_again, is_undone
from links.sql.mysql.lent import HANDLING, LentConnection, lending
from links.sql.mysql.looked import BEGIN, PAUSES, Ignored
from links.sql.mysql.session import MysqlSession
from links.sql.mysql.trio_session import New, TrioSession
from links.sql.rows import Token
from settlement.sql import Verb

__all__ = ["MysqlLender", "MysqlLoan", "Says"]

_PATIENCE: Final = 10.0
"""Seconds for which a connection is waited for."""
_LOCKED: Final = "it touched no row, although the lease is ours: another transaction has locked the row"


class Says(Protocol):
    """The queue's statements, as `MysqlLease` has them; in a thread."""

    def within(self, session: MysqlSession, token: Token, verb: Verb) -> bool:
        """Carry this out in the transaction that is open; False: the row is not ours, or somebody has locked it."""
        ...

    def holds(self, session: MysqlSession, tokens: list[Token]) -> set[int]:
        """The places of those that are still ours."""
        ...


class MysqlLender:
    """Owns the connections that nobody uses now: as many as were in use at once."""

    whole = False

    def __init__(self, form: Says, new: New) -> None:
        self.form = form
        self._new = new
        self._free: list[TrioSession] = []
        self._closed = False

    def loan(self) -> MysqlLoan:
        """As `Lender.loan`."""
        return MysqlLoan(self)

    async def begun(self) -> TrioSession:
        """A connection in a transaction of its own. Raises `CallBroken`. Cancellation: there is none."""
        why = f"no answer within {_PATIENCE:g} s"
        with trio.move_on_after(_PATIENCE):
            try:
                while self._free:
                    if await self._begins(used := self._free.pop()):
                        return used
                connection = TrioSession(self._new)
                await connection.open()
                if await self._begins(connection):
                    return connection
                why = "the connection was ended"
            except (ConnectionBroken, LinkRefused) as error:
                why = str(error)
        raise CallBroken(f"there is no connection for a handler's transaction: {why}")

    @staticmethod
    async def _begins(connection: TrioSession) -> bool:
        """False: it was ended meanwhile. Cancellation: it is closed."""
        if connection.was_ended():
            connection.close()
            return False
        try:
            await connection.run(_begin)
        except pymysql.MySQLError:
            connection.close()
            return False
        return True

    def give_back(self, connection: TrioSession) -> None:
        """It has no transaction any more; a plain call."""
        if self._closed:
            connection.close()
        else:
            self._free.append(connection)

    def close(self) -> None:
        """As `Lender.close`."""
        self._closed = True
        while self._free:
            self._free.pop().close()


def _begin(session: MysqlSession) -> None:
    session.say("ROLLBACK", f"SET SESSION {session.ours}", BEGIN, *lending(session))


class MysqlLoan:
    """One delivery's."""

    def __init__(self, lender: MysqlLender) -> None:
        self._lender = lender
        self._connection: TrioSession | None = None
        self._lent: LentConnection | None = None
        self._committing = False

    @property
    def open(self) -> bool:
        """As `Loan.open`."""
        return self._connection is not None

    async def lend(self) -> LentConnection:
        """As `Loan.lend`."""
        if self._connection is None:
            self._connection = await self._lender.begun()
        else:
            await trio.lowlevel.checkpoint()
        self._lent = LentConnection(self._connection, self._lent)
        return self._lent

    def take_back(self) -> None:
        """As `Loan.take_back`."""
        if self._lent is not None:
            self._lent.end()

    async def finish(self, token: Token, verb: Verb) -> Verdict:
        """As `Loan.finish`."""
        connection = self._connection
        assert connection is not None, "it is open"  # noqa: S101 -- an invariant of ours
        if connection.was_ended():
            self._close()
            return LeaseLost("the connection of the handler's transaction has ended, and that was rolled back")
        verdict: Verdict
        try:
            verdict = await connection.run(partial(self._finish, token, verb))
        except pymysql.MySQLError as error:
            verdict = self._broken(connection, error)
            verdict.__cause__ = error
        if verdict is None:
            self._connection = None
            self._lender.give_back(connection)
        elif not isinstance(verdict, NotApplied):
            self._close()
        return verdict

    def _finish(self, token: Token, verb: Verb, session: MysqlSession) -> Verdict:
        """In the thread. Raises `pymysql.MySQLError` where the connection broke, or the transaction is no more."""
        if (ended := self._unfit(session)) is not None:
            return ended
        form = self._lender.form
        why, done = _LOCKED, False
        cause: BaseException | None = None
        try:
            for pause in (*PAUSES, None):
                done = form.within(session, token, verb)
                if not done and not form.holds(session, [token]):
                    return LeaseLost(
                        "the lease was lost: the row is gone, or was claimed or changed by somebody else; what the "
                        "handler wrote is rolled back"
                    )
                if done or pause is None:
                    break
                time.sleep(pause)
        except (Ignored, *BINDING) as error:
            if session.closed or is_undone(error):
                raise
            done, cause, why = False, error, first_line(error)
        if not done:
            session.say("ROLLBACK TO SAVEPOINT settling", f"SAVEPOINT {HANDLING}")
            refused = NotApplied(f"{why}; what the handler wrote waits with it")
            refused.__cause__ = cause
            return refused
        self._committing = True
        session.say("COMMIT")
        return None

    def _unfit(self, session: MysqlSession) -> Verdict:
        """Why this transaction cannot be committed; None: the savepoint `settling` is set for the verb."""
        if self._lent is not None and self._lent.undone:
            return LeaseLost("the server has rolled back what the handler wrote: a deadlock")
        try:
            session.say(
                f"RELEASE SAVEPOINT {HANDLING}", f"SET SESSION {session.ours_but_autocommit}", "SAVEPOINT settling"
            )
        except pymysql.MySQLError as error:
            if session.closed or code_of(error) != NO_SAVEPOINT:
                raise
            return _ended()
        return None

    def _broken(self, connection: TrioSession, error: pymysql.MySQLError) -> LeaseLost | SettlementUnknown:
        if not self._committing:
            return LeaseLost(f"what the handler wrote is rolled back: {first_line(error)}")
        if not connection.closed:
            return LeaseLost(f"the transaction was rolled back at its COMMIT: {first_line(error)}")
        return SettlementUnknown(f"the connection broke amid COMMIT: {first_line(error)}")

    async def undo(self) -> Verdict:
        """As `Loan.undo`."""
        connection = self._connection
        if connection is None or connection.was_ended() or (self._lent is not None and self._lent.undone):
            self._close()
            return None
        try:
            await connection.run(_undo)
        except pymysql.MySQLError as error:
            self._close()  # and that rolls it back, too
            return _ended() if code_of(error) == NO_SAVEPOINT and not is_again(error) else None
        self._connection = None
        self._lender.give_back(connection)
        return None

    def give_up(self) -> Verdict:
        """As `Loan.give_up`."""
        self._close()
        return SettlementUnknown("COMMIT was not answered in time") if self._committing else None

    def _close(self) -> None:
        self.take_back()
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _undo(session: MysqlSession) -> None:
    session.say(f"ROLLBACK TO SAVEPOINT {HANDLING}", "ROLLBACK")


def _ended() -> TransactionEnded:
    return TransactionEnded("the handler has ended the transaction that was lent to it")
