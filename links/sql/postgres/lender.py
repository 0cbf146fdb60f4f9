"""The transactions of handlers beside their leases on PostgreSQL: each on a connection of its own.

The row itself is not locked while a handler runs, so renewals go on; it is finished in the handler's transaction, by
the token that holds it then. Whatever is not certain is rolled back: nothing is acked without the writes, nothing is
written without the ack.

Cancellation, anywhere: `give_up` closes the connection, and the server rolls back what was not committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import psycopg
import trio
from psycopg.pq import TransactionStatus

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
from links.sql.postgres.lent import LentConnection
from links.sql.postgres.looked import LOCKED, PAUSES, Ignored
from links.sql.postgres.pin import Connect
from links.sql.postgres.session import begin
from links.sql.postgres.trio_connection import TrioConnection
from links.sql.rows import Token
from settlement.sql import Custom, Verb

__all__ = ["PostgresLender", "PostgresLoan", "Says"]

_BEGIN: Final = b"BEGIN ISOLATION LEVEL READ COMMITTED; SAVEPOINT handling"
"""Each statement looks at what others have committed before it: so the settlement sees a lease that was renewed."""
# S-8.6
_OURS: Final = b"RELEASE SAVEPOINT handling; RESET ROLE; RESET search_path; SAVEPOINT settling"
"""What a handler has set for itself shall not name another table, or another user, for the settlement."""
_AGAIN: Final = b"ROLLBACK TO SAVEPOINT settling; RELEASE SAVEPOINT settling; SAVEPOINT handling"
_UNDO: Final = b"ROLLBACK TO SAVEPOINT handling; ROLLBACK"
_PATIENCE: Final = 10.0
"""Seconds for which a connection is waited for."""


class Says(Protocol):
    """The queue's statements, as `PostgresLease` has them."""

    async def say(self, connection: TrioConnection, verbs: Sequence[Verb], tokens: Sequence[Token]) -> set[int]:
        """Carry these out; the places of those that were touched."""
        ...

    async def custom(self, connection: TrioConnection, token: Token, verb: Custom) -> bool:
        """Carry this out; False: the row is not ours. Raises `Ignored` where it touched nothing."""
        ...

    async def holds(self, connection: TrioConnection, tokens: Sequence[Token]) -> set[int]:
        """The places of those that are still ours."""
        ...


class PostgresLender:
    """Owns the connections that nobody uses now: as many as were in use at once."""

    whole = False

    def __init__(self, form: Says, connect: Connect) -> None:
        self.form = form
        self._connect = connect
        self._free: list[TrioConnection] = []
        self._closed = False

    def loan(self) -> PostgresLoan:
        """As `Lender.loan`."""
        return PostgresLoan(self)

    async def begun(self) -> TrioConnection:
        """A connection in a transaction of its own. Raises `CallBroken`. Cancellation: there is none."""
        why = f"no answer within {_PATIENCE:g} s"
        with trio.move_on_after(_PATIENCE):
            try:
                while self._free:
                    if (used := await self._as_new(self._free.pop())) is not None:
                        return used
                connection = await self._connect()
                connection.prepare_threshold = None  # a handler's DISCARD would take what was prepared with it
                if await _says(connection, _BEGIN):
                    return connection
                why = "the connection was ended"
            except (ConnectionBroken, LinkRefused) as error:
                why = str(error)
        raise CallBroken(f"there is no connection for a handler's transaction: {why}")

    async def _as_new(self, connection: TrioConnection) -> TrioConnection | None:
        """Without what the handler before has set, prepared, locked or made; None: it was ended meanwhile."""
        if connection.was_ended() or not await _says(connection, b"DISCARD ALL"):
            return None
        try:
            await begin(connection, "a connection that another handler had")
        except psycopg.Error:
            connection.finish()
            return None
        except BaseException:
            connection.finish()
            raise
        return connection if await _says(connection, _BEGIN) else None

    def give_back(self, connection: TrioConnection) -> None:
        """It has no transaction any more; a plain call."""
        if self._closed:
            connection.finish()
        else:
            self._free.append(connection)

    def close(self) -> None:
        """As `Lender.close`."""
        self._closed = True
        while self._free:
            self._free.pop().finish()


async def _says(connection: TrioConnection, statement: bytes) -> bool:
    """False: it failed, and the connection is closed. Cancellation: it is closed."""
    try:
        await connection.execute(statement)
    except psycopg.Error:
        connection.finish()
        return False
    except BaseException:
        connection.finish()
        raise
    return True


class PostgresLoan:
    """One delivery's."""

    def __init__(self, lender: PostgresLender) -> None:
        self._lender = lender
        self._connection: TrioConnection | None = None
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
        self._lent = LentConnection.of(self._connection)
        return self._lent

    def take_back(self) -> None:
        """As `Loan.take_back`."""
        if self._lent is not None:
            self._lent.end()
            self._lent = None

    async def finish(self, token: Token, verb: Verb) -> Verdict:
        """As `Loan.finish`."""
        connection = self._connection
        assert connection is not None, "it is open"  # noqa: S101 -- an invariant of ours
        verdict = self._unfit(connection)
        if verdict is None:
            try:
                verdict = await self._finish(connection, token, verb)
            except psycopg.Error as error:
                verdict = self._broken(connection, error)
                verdict.__cause__ = error
        if verdict is None:
            self._return(connection)
        elif not isinstance(verdict, NotApplied):
            self._close()
        return verdict

    @staticmethod
    def _unfit(connection: TrioConnection) -> Verdict:
        """Why this transaction cannot be committed."""
        if connection.was_ended():
            return LeaseLost("the connection of the handler's transaction has ended, and that was rolled back")
        match connection.info.transaction_status:
            case TransactionStatus.INTRANS:
                return None
            case TransactionStatus.IDLE:
                return _ended()
            case TransactionStatus.INERROR:
                return LeaseLost(
                    "a statement of the handler's had failed, so nothing could be committed; it is rolled back"
                )
            case _:
                return LeaseLost("a statement of the handler's was still under way; it is rolled back")

    async def _finish(self, connection: TrioConnection, token: Token, verb: Verb) -> Verdict:
        form = self._lender.form
        try:
            await connection.execute(_OURS)
        except psycopg.errors.InvalidSavepointSpecification:
            return _ended()
        why, done = LOCKED, False
        cause: Exception | None = None
        try:
            for pause in (*PAUSES, None):
                if isinstance(verb, Custom):
                    done = await form.custom(connection, token, verb)
                else:
                    done = bool(await form.say(connection, [verb], [token]))
                if not done and not await form.holds(connection, [token]):
                    return LeaseLost(
                        "the lease was lost: the row is gone, or was claimed or changed by somebody else; what the "
                        "handler wrote is rolled back"
                    )
                if done or pause is None:
                    break
                await trio.sleep(pause)
        except (psycopg.Error, Ignored) as error:
            if connection.closed:
                raise
            done, cause, why = False, error, _first_line(error)
        if not done:
            await connection.execute(_AGAIN)
            refused = NotApplied(f"{why}; what the handler wrote waits with it")
            refused.__cause__ = cause
            return refused
        self._committing = True
        await connection.execute(b"COMMIT")
        return None

    def _broken(self, connection: TrioConnection, error: psycopg.Error) -> LeaseLost | SettlementUnknown:
        if not self._committing:
            return LeaseLost(f"what the handler wrote is rolled back: {_first_line(error)}")
        if not connection.closed:
            return LeaseLost(f"the transaction was rolled back at its COMMIT: {_first_line(error)}")
        return SettlementUnknown(f"the connection broke amid COMMIT: {_first_line(error)}")

    async def undo(self) -> Verdict:
        """As `Loan.undo`."""
        connection = self._connection
        if connection is None or connection.was_ended():
            self._close()
            return None
        match connection.info.transaction_status:
            case TransactionStatus.INTRANS | TransactionStatus.INERROR:
                pass
            case TransactionStatus.IDLE:
                self._close()
                return _ended()
            case _:
                self._close()
                return None
        try:
            await connection.execute(_UNDO)
        except psycopg.errors.InvalidSavepointSpecification:
            self._close()
            return _ended()
        except psycopg.Error:
            self._close()  # and that rolls it back, too
            return None
        self._return(connection)
        return None

    def _return(self, connection: TrioConnection) -> None:
        self._connection = None
        self._lender.give_back(connection)

    def give_up(self) -> Verdict:
        """As `Loan.give_up`."""
        self._close()
        return SettlementUnknown("COMMIT was not answered in time") if self._committing else None

    def _close(self) -> None:
        self.take_back()
        if self._connection is not None:
            self._connection.finish()
            self._connection = None


def _ended() -> TransactionEnded:
    return TransactionEnded("the handler has ended the transaction that was lent to it")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
