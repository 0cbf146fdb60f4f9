"""The transaction of a handler on SQLite: it locks the whole file for as long as the handler takes.

So there is one at a time, of a queue that has one delivery in hand; on a connection of its own, so that nothing else
gets into it. Nobody else claims meanwhile, and a lease need not be renewed. What is not committed at once is rolled
back: to keep the writes until a verb is applied would keep everybody else waiting.

Cancellation, anywhere: the statement that runs is interrupted, its thread is waited for, `LANDING` at most; `give_up`
closes the connection, and with that it is rolled back.
"""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import trio

from links.abc import Verdict
from links.errors import (
    CallBroken,
    ConnectionBroken,
    LeaseLost,
    LinkError,
    LinkRefused,
    SettlementUnknown,
    TransactionHeld,
)
from links.sql.patience import PATIENCE
from links.sql.rows import Token
from links.sql.sqlite import times
from links.sql.sqlite.codes import BINDING, is_busy, is_fatal
from links.sql.sqlite.lent import LentConnection
from links.sql.sqlite.schema import SqliteSession
from links.sql.thread_writer import Busy, Fatal
from settlement.sql import Verb

__all__ = ["Beside", "Says", "SqliteLender", "SqliteLoan", "barred"]

T = TypeVar("T")

_NONE: Final = "there is no transaction for a handler"
LANDING: Final = 5.0
"""Seconds for which the end of a statement that was interrupted is waited for."""


class Says(Protocol):
    """The queue's statements, as `SqliteLease` and `SqliteAdvisory` have them."""

    def say(self, connection: sqlite3.Connection, now: int, token: Token, verb: Verb) -> bool:
        """Carry this out; False: nothing was touched."""
        ...

    def holds(self, connection: sqlite3.Connection, token: Token) -> bool:
        """Is the row still ours?"""
        ...


class Beside(Protocol):
    """One more connection to the file, as `SqliteConnection`: used in a thread, but for `interrupt`."""

    path: Path

    def open(self) -> None:
        """Raises `LinkRefused`, `ConnectionBroken`, `Busy`."""
        ...

    def use(self, call: Callable[[SqliteSession], T]) -> T:
        """Call this with it. Raises `Fatal` where the file was taken away meanwhile."""
        ...

    def interrupt(self) -> None:
        """End the statement that runs."""
        ...

    def close(self) -> None:
        """Close it, now or when the call that is under way ends; what was not committed is rolled back."""
        ...


class SqliteLender:
    """For a link with so many deliveries in hand, at most."""

    whole = True

    def __init__(self, form: Says, beside: Callable[[], Beside], limit: int) -> None:
        self._form, self._beside, self._limit = form, beside, limit

    def loan(self) -> SqliteLoan:
        """As `Lender.loan`. Raises `ValueError` where more than one delivery may be in hand."""
        if self._limit != 1:
            raise ValueError(
                "a delivery on SQLite has a transaction only where no other is in hand, since it locks the whole file, "
                f"and here {self._limit} may be; give its subscription concurrency=1, and its queue no limit"
            )
        return SqliteLoan(self._form, self._beside())

    def close(self) -> None:
        """As `Lender.close`: no connection is kept."""


class SqliteLoan:
    """One delivery's, on `connection`, which is not open yet."""

    def __init__(self, form: Says, connection: Beside) -> None:
        self._form, self._connection = form, connection
        self._lent: LentConnection | None = None
        self._committing = False
        self._lock = trio.Lock()
        self.open = False

    @property
    def path(self) -> Path:
        """The file that it locks."""
        return self._connection.path

    async def lend(self) -> LentConnection:
        """As `Loan.lend`; others that keep the file locked are waited for, for 10 s."""
        if self.open:
            await trio.lowlevel.checkpoint()
        else:
            await self._begin()
        _INSIDE.set(self)
        self._lent = LentConnection(self._execute)
        return self._lent

    async def _begin(self) -> None:
        connection, end = self._connection, trio.current_time() + PATIENCE
        steps: tuple[Callable[[], None], ...] = (connection.open, partial(connection.use, _begin))
        try:
            for step in steps:
                while not await self._tried(step):
                    if trio.current_time() >= end:
                        raise CallBroken(f"{_NONE}: others have kept the file locked for {PATIENCE:g} s")
                    await trio.sleep(random.uniform(0.005, 0.05))  # noqa: S311 -- spread, not secrecy
        except (LinkRefused, ConnectionBroken, Fatal) as error:
            self._close()
            raise CallBroken(f"{_NONE}: {error}") from error
        except BaseException:
            self._close()
            raise
        self.open = True

    async def _tried(self, step: Callable[[], None]) -> bool:
        try:
            await self._thread(step)
        except Busy:
            return False
        return True

    async def _execute(self, statement: str, parameters: Sequence[Any] | Mapping[str, Any]) -> list[tuple[Any, ...]]:
        async with self._lock:
            return await self._thread(partial(self._connection.use, partial(_execute, statement, parameters)))

    def take_back(self) -> None:
        """As `Loan.take_back`."""
        if self._lent is not None:
            self._lent.end()
            self._lent = None

    async def finish(self, token: Token, verb: Verb) -> Verdict:
        """As `Loan.finish`, but that it has ended in any case."""
        async with self._lock:
            try:
                verdict = await self._thread(partial(self._connection.use, partial(self._finish, token, verb)))
            except Fatal as error:
                kind = SettlementUnknown if self._committing else LeaseLost
                verdict = kind(f"the file failed: {error}")
                verdict.__cause__ = error
            await self._thread(self._connection.close)
        self.open = False
        return verdict

    def _finish(self, token: Token, verb: Verb, session: SqliteSession) -> Verdict:
        """In the thread."""
        if not session.in_transaction:
            return LeaseLost("an error has rolled back what the handler wrote, so nothing could be committed")
        session.version = None  # the handler may have altered a table
        why = "the row is gone, or was claimed or changed by somebody else"
        cause: BaseException | None = None
        try:
            if self._form.say(session, times.now(), token, verb):
                self._committing = True
                session.execute("COMMIT")
                return None
            if self._form.holds(session, token):
                why = "it touched no row, although it is ours: a trigger has ignored it"
        except (LinkError, *BINDING) as error:
            why, cause = str(error), error
            if self._committing and is_fatal(error):
                raise Fatal(why) from error
        self._committing = False
        if session.in_transaction:
            session.execute("ROLLBACK")
        lost = LeaseLost(f"{why}; what the handler wrote is rolled back")
        lost.__cause__ = cause
        return lost

    async def undo(self) -> Verdict:
        """As `Loan.undo`: a handler cannot have ended it."""
        async with self._lock:
            await self._thread(self._connection.close)
        self.open = False
        return None

    def give_up(self) -> Verdict:
        """As `Loan.give_up`."""
        self.take_back()
        self._connection.interrupt()
        self._close()
        return SettlementUnknown("COMMIT was not answered in time") if self._committing else None

    def _close(self) -> None:
        """Nobody waits for it."""
        self.open = False
        trio.lowlevel.start_thread_soon(self._connection.close, lambda _: None)

    async def _thread(self, call: Callable[[], T]) -> T:
        """Call it in a thread, whose end is waited for. Cancellation: as this module says."""
        token, landed, came = trio.lowlevel.current_trio_token(), trio.Event(), list[Any]()

        def deliver(outcome: Any) -> None:
            came.append(outcome)
            with contextlib.suppress(trio.RunFinishedError):  # it was left alone, and trio has ended meanwhile
                token.run_sync_soon(landed.set)

        trio.lowlevel.start_thread_soon(call, deliver)
        try:
            await landed.wait()
        except trio.Cancelled:
            self._connection.interrupt()
            with trio.move_on_after(LANDING, shield=True):
                await landed.wait()
            raise
        result: T = came[0].unwrap()
        return result


_INSIDE: ContextVar[SqliteLoan | None] = ContextVar("_INSIDE", default=None)
"""The last loan of this task, or of the one that has started it."""


def barred(path: Path) -> str | None:
    """Why this task would wait for itself in that file; None: it would not."""
    loan = _INSIDE.get()
    if loan is None or not loan.open or loan.path != path:
        return None
    return (
        "the transaction of this very handler locks the file, so this would wait for itself; write by the connection "
        "that links.sql.transaction gives, or without one"
    )


# --- in the thread


def _begin(session: SqliteSession) -> None:
    try:
        session.begin()
    except sqlite3.Error as error:
        if is_busy(error):
            raise Busy from None
        raise Fatal(str(error)) from error


def _execute(
    statement: str, parameters: Sequence[Any] | Mapping[str, Any], session: SqliteSession
) -> list[tuple[Any, ...]]:
    if not session.in_transaction:
        raise sqlite3.OperationalError("an error has rolled the transaction back; there is none any more")
    session.set_authorizer(_all_but_its_end)
    try:
        return session.execute(statement, parameters).fetchall()
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_AUTH:
            raise TransactionHeld("this connection is lent: the handler's outcome ends its transaction") from error
        raise
    finally:
        session.set_authorizer(None)


def _all_but_its_end(action: int, *_: object) -> int:
    return sqlite3.SQLITE_DENY if action == sqlite3.SQLITE_TRANSACTION else sqlite3.SQLITE_OK
