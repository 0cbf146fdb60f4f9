"""A connection that holds a claim on MySQL and MariaDB: what row locks and advisory locks have in common.

It connects when it first claims, looks at the table again, lends itself to a handler behind the savepoint `handling`,
and carries out verbs, each of which may fail by itself. How a claim is made and what ends it is each form's own: that
runs in a thread, one call at a time.

Cancellation, anywhere: the connection is closed, and the server ends the claim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Generic, TypeVar

import pymysql

from links.abc import Verdict
from links.errors import (
    CallBroken,
    ConnectionBroken,
    LeaseLost,
    LinkError,
    LinkRefused,
    NotApplied,
    SettlementUnknown,
    TransactionEnded,
    TransactionHeld,
)
from links.sql.jobs import Passing
from links.sql.mysql.codes import BINDING, NO_SAVEPOINT, code_of, first_line, is_again, is_reshaped, is_undone
from links.sql.mysql.held_statements import HeldStatements
from links.sql.mysql.lent import HANDLING, LentConnection, lending
from links.sql.mysql.looked import Ignored, Looked
from links.sql.mysql.session import MysqlSession
from links.sql.mysql.statements import micros
from links.sql.mysql.trio_session import New, TrioSession
from links.sql.pin import Settled
from links.sql.rows import Row
from settlement.sql import Custom, Delay, Finish, MoveToGroup, MoveToTable, PutBack, Verb

__all__ = ["MysqlPin", "PinnedForm", "lost", "not_applied"]

_TRIES: Final = 8
"""So often is a claim made that others only got into the way of."""

T = TypeVar("T", bound=HeldStatements)
R = TypeVar("R")


class PinnedForm(Looked[T]):
    """A queue of which each claim has a connection of its own; `new` makes one."""

    def __init__(self, *asked: Any, new: New, **names: Any) -> None:
        super().__init__(*asked, **names)
        self.new = new


class MysqlPin(Generic[T]):
    """One connection, and the rows that it holds."""

    def __init__(self, form: PinnedForm[T]) -> None:
        self._form = form
        self._connection: TrioSession | None = None
        self._lent: LentConnection | None = None
        self._written = False
        """A handler may have written in this transaction, behind the savepoint `handling`."""
        self._ended = self._partly = False
        """A COMMIT was heard; it carried out a part of what was said."""

    # --- what each form has of its own, in the thread ----------------------------------------------------------------

    def _claim(self, session: MysqlSession, passing: Passing, room: int) -> Sequence[Row]:
        """As `claim`. Raises `BINDING`, too."""
        raise NotImplementedError

    def _settle(
        self, session: MysqlSession, said: Sequence[tuple[Row, Verb]], rest: Sequence[Row], then: Passing | None
    ) -> Settled:
        """As `settle`, when the handler's writes are out of the way. Raises `pymysql.MySQLError`: nobody knows."""
        raise NotImplementedError

    def _end(self, session: MysqlSession) -> None:
        """End the claim, whatever is open, or close the connection."""
        raise NotImplementedError

    def _let_go(self, session: MysqlSession, rows: Sequence[tuple[Row, bool]], *, whole: bool) -> None:
        """As `let_go`."""
        raise NotImplementedError

    # --- claim, lend, let go ------------------------------------------------------------------------------------------

    async def claim(self, passing: Passing, room: int) -> Sequence[Row]:
        """As `Pin.claim`."""
        connection = await self._connected()
        try:
            return await connection.run(partial(self._claimed, passing, room))
        except LinkError:
            raise
        except BaseException:
            self.close()  # nobody can tell whether it holds a row
            raise

    def _claimed(self, passing: Passing, room: int, session: MysqlSession) -> Sequence[Row]:
        failure: BaseException | None = None
        for _ in range(_TRIES):
            try:
                self._form.look_again(session)
                return self._claim(session, passing, room)
            except BINDING as error:
                if session.closed:
                    raise ConnectionBroken(first_line(error)) from error
                failure = error
            except LinkRefused:
                self._end(session)
                raise
            self._end(session)
            if not is_again(failure):
                break
        assert failure is not None, "else it has returned"  # noqa: S101 -- an invariant of ours
        try:
            if is_reshaped(failure):
                self._form.look_again(session, now=True)
        except pymysql.MySQLError as error:
            raise ConnectionBroken(first_line(error)) from error
        raise CallBroken(first_line(failure)) from failure

    async def _connected(self) -> TrioSession:
        connection = self._connection
        if connection is None or connection.was_ended():
            if connection is not None:
                connection.close()
            self._connection = connection = TrioSession(self._form.new)
            try:
                await connection.open()
            except LinkRefused as error:  # not by the table: rows that are in hand on other connections are sound
                raise ConnectionBroken(str(error)) from error.__cause__
        return connection

    async def lend(self) -> LentConnection:
        """As `Pin.lend`. Raises `pymysql.MySQLError`, and `TransactionHeld` where there is no connection."""
        connection = self._connection
        if connection is None:  # it was closed, and nobody has heard of it yet
            raise TransactionHeld("its connection has ended, and the claim with it")
        if not self._written:
            await connection.run(self._lend)
            self._written = True
        self._lent = LentConnection(connection, self._lent)
        return self._lent

    def _lend(self, session: MysqlSession) -> None:
        session.say(*lending(session))

    def take_back(self) -> None:
        """As `Pin.take_back`."""
        if self._lent is not None:
            self._lent.end()

    async def undo(self) -> None:
        """As `Pin.undo`."""
        if self._written and self._connection is not None:
            await self._connection.run(_undo)

    async def let_go(self, rows: Sequence[tuple[Row, bool]], *, whole: bool) -> None:
        """As `Pin.let_go`."""
        if self._connection is not None:
            await self._connection.run(partial(self._let_go, rows=rows, whole=whole))

    async def until_lost(self) -> str:
        """As `Pin.until_lost`."""
        return "there is no connection" if self._connection is None else await self._connection.until_ended()

    def close(self) -> None:
        """As `Pin.close`."""
        connection, self._connection = self._connection, None
        self._written, self._lent = False, None
        if connection is not None:
            connection.close()

    def _roll_back(self, session: MysqlSession) -> None:
        """End the transaction; what a handler had set is as it was."""
        written, self._written = self._written, False
        try:
            if not session.closed:
                session.say("ROLLBACK", *([f"SET SESSION {session.ours}"] if written else []))
        except pymysql.MySQLError:
            session.close()

    # --- settle ------------------------------------------------------------------------------------------------------

    async def settle(
        self, said: Sequence[tuple[Row, Verb]], rest: Sequence[Row], *, keep: bool, then: Passing | None
    ) -> Settled:
        """As `Pin.settle`."""
        connection = self._connection
        self._ended = self._partly = False
        if connection is None or connection.was_ended():  # and nobody has heard of it yet
            self.close()
            return Settled(
                [LeaseLost("its connection has ended, and the claim with it")] * len(said), rest, crossed=True
            )
        undone = self._lent is not None and self._lent.undone
        call: Callable[[MysqlSession], Settled] = partial(
            self._settled, said=said, rest=rest, keep=keep, undone=undone, then=then
        )
        self._lent = None
        try:
            return await connection.run(call)
        except pymysql.MySQLError as error:
            self.close()
            verdict: Verdict = None
            if not self.committed:
                verdict = SettlementUnknown(f"the connection broke while it was said: {first_line(error)}")
                verdict.__cause__ = error
            return Settled([verdict] * len(said), rest)

    def _settled(
        self,
        session: MysqlSession,
        *,
        said: Sequence[tuple[Row, Verb]],
        rest: Sequence[Row],
        keep: bool,
        undone: bool,
        then: Passing | None,
    ) -> Settled:
        if self._written and (verdict := self._after_handler(session, keep=keep, undone=undone)) is not None:
            return Settled([verdict] * len(said), rest, crossed=undone)
        return self._settle(session, said, rest, None if "claim" in self._form.own else then)

    @property
    def committed(self) -> bool:
        """As `Pin.committed`: all of it, since one that was not applied was not."""
        return self._ended and not self._partly

    def _after_handler(self, session: MysqlSession, *, keep: bool, undone: bool) -> Verdict:
        """Undo what the handler wrote, unless it is to be kept; a verdict where the claim is no more."""
        release = f"RELEASE SAVEPOINT {HANDLING}"
        try:
            session.say(
                *([] if keep else [f"ROLLBACK TO SAVEPOINT {HANDLING}"]),
                release,
                f"SET SESSION {session.ours_but_autocommit}",
            )
        except pymysql.MySQLError as error:
            if session.closed:
                raise
            lost_it = undone or is_undone(error)
            if code_of(error) != NO_SAVEPOINT and not lost_it:
                raise
        else:
            return None
        self._end(session)
        if lost_it:
            return LeaseLost("the server has rolled back what the handler wrote, and its claim: a deadlock")
        return TransactionEnded("the handler has ended the transaction that was lent to it")

    def _say(self, session: MysqlSession, row: Row, verb: Verb) -> NotApplied | None:
        """Carry out one verb. Raises `pymysql.MySQLError` where the connection broke, or the claim is no more."""
        single = not isinstance(verb, MoveToTable | Custom)
        try:
            if single:
                texts = self._texts(verb, [row[0]])
                if texts and not session.say(*texts)[0].touched:
                    raise Ignored("it touched no row: the row is gone")
            else:
                session.say("SAVEPOINT saying")
                if isinstance(verb, MoveToTable):
                    self._form.moved(session, row[0], verb.table)
                elif isinstance(verb, Custom):
                    self._form.carry_out(session, verb, (row[0], None, self._attempt(row)))
        except (LinkError, Ignored, *BINDING) as error:
            if session.closed or is_undone(error):
                raise
            if not single:
                session.say("ROLLBACK TO SAVEPOINT saying")
            return not_applied(error)
        return None

    def _attempt(self, row: Row) -> Any:
        """As the table has it: where the settlement counts, nothing has counted yet."""
        return row[2] - 1 if row[2] is not None and self._form.texts.counts else row[2]

    def _texts(self, verb: Verb, ids: Sequence[Any]) -> list[str]:
        texts, form = self._form.texts, self._form
        match verb:
            case Finish():
                return [form.text(texts.finish, ids=ids)]
            case PutBack(count):
                return [form.text(texts.put_back, ids=ids)] if count else []
            case Delay(seconds):
                column = form.schema[form.table.retry_after or ""]
                return [form.text(texts.delay, ids=ids, micros=micros(seconds, column))]
            case MoveToGroup(group):
                return [form.text(texts.regroup, ids=ids, to=group)]
            case _:
                raise TypeError(f"{verb!r} is no verb of one statement")


def _undo(session: MysqlSession) -> None:
    """A claim that is no more is told by the settlement."""
    try:
        session.say(f"ROLLBACK TO SAVEPOINT {HANDLING}")
    except pymysql.MySQLError:
        if session.closed:
            return


def not_applied(why: BaseException) -> NotApplied:
    """Why a verb was not carried out, and its row is held as before."""
    refused = NotApplied(first_line(why))
    refused.__cause__ = why
    return refused


def lost(why: BaseException, what: str) -> LeaseLost:
    """Why a claim has ended without its verb."""
    gone = LeaseLost(f"{what}: {first_line(why)}")
    gone.__cause__ = why
    return gone
