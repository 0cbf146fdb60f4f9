"""A connection that holds a claim on PostgreSQL: what row locks and advisory locks have in common.

It connects when it first claims, looks at the table again, lends itself to a handler behind the savepoint `handling`,
and carries out verbs, each of which may fail by itself. How a claim is made and what ends it is each form's own.

Cancellation, anywhere: the connection is closed, and the server ends the claim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

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
from links.sql.pin import Settled
from links.sql.postgres.codes import is_again, is_reshaped, is_unprepared
from links.sql.postgres.held_statements import HeldStatements
from links.sql.postgres.lent import LentConnection
from links.sql.postgres.looked import Ignored, Looked
from links.sql.postgres.session import as_before
from links.sql.postgres.strings import bound, results
from links.sql.postgres.trio_connection import TrioConnection
from links.sql.rows import Row
from settlement.sql import Custom, Delay, Finish, MoveToGroup, MoveToTable, PutBack, Verb

__all__ = ["BEGIN", "Connect", "PinnedForm", "PostgresPin", "first_line", "not_applied"]

Connect: TypeAlias = Callable[[], Awaitable[TrioConnection]]
"""How to get a connection; raises `LinkRefused`, `ConnectionBroken`."""

BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"

_TRIES = 5
"""So often is a claim made that others only got into the way of."""

T = TypeVar("T", bound=HeldStatements)


class PinnedForm(Looked[T]):
    """A queue of which each claim has a connection of its own; `connect` gives one."""

    def __init__(self, *asked: Any, connect: Connect, **names: Any) -> None:
        super().__init__(*asked, **names)
        self.connect = connect


class PostgresPin(Generic[T]):
    """One connection, and the rows that it holds."""

    opening: Sequence[str] = ()
    """What begins the transaction that is lent."""

    def __init__(self, form: PinnedForm[T]) -> None:
        self._form = form
        self._connection: TrioConnection | None = None
        self._lent: LentConnection | None = None
        self._written = self._kept = False
        """A handler may have written in this transaction: behind the savepoint `handling`; what it wrote stands."""
        self._ended = self._partly = False
        """A COMMIT was heard; it carried out a part of what was said."""

    # --- what each form has of its own -------------------------------------------------------------------------------

    async def _claim(self, connection: TrioConnection, passing: Passing, room: int) -> Sequence[Row]:
        """As `claim`. Raises `psycopg.Error`, too."""
        raise NotImplementedError

    async def _settle(
        self, connection: TrioConnection, said: Sequence[tuple[Row, Verb]], rest: Sequence[Row], then: Passing | None
    ) -> Settled:
        """As `settle`, when the handler's writes are out of the way. Raises `psycopg.Error`: nobody knows."""
        raise NotImplementedError

    async def _end(self, connection: TrioConnection) -> None:
        """End the claim, whatever is open, or close the connection."""
        raise NotImplementedError

    # --- claim, lend, let go ------------------------------------------------------------------------------------------

    async def claim(self, passing: Passing, room: int) -> Sequence[Row]:
        """As `Pin.claim`."""
        connection = await self._connected()
        failure: psycopg.Error | None = None
        try:
            for _ in range(_TRIES):
                try:
                    return await self._claim(connection, passing, room)
                except psycopg.Error as error:
                    if connection.closed:
                        raise ConnectionBroken(first_line(error)) from error
                    failure = error
                await self._end(connection)
                if not (is_again(failure) or is_unprepared(failure)):
                    break
        except LinkError:
            raise
        except BaseException:
            self.close()  # nobody can tell whether it holds a row
            raise
        assert failure is not None, "else it has returned"  # noqa: S101 -- an invariant of ours
        if is_reshaped(failure):
            await self._look_again(connection)
        raise CallBroken(first_line(failure)) from failure

    async def _connected(self) -> TrioConnection:
        connection = self._connection
        if connection is None or connection.was_ended():
            try:
                self._connection = connection = await self._form.connect()
            except LinkRefused as error:  # not by the table: rows that are in hand on other connections are sound
                raise ConnectionBroken(str(error)) from error.__cause__
        return connection

    async def _look_again(self, connection: TrioConnection, *, now: bool = True) -> None:
        try:
            await self._form.look_again(connection, now=now)
        except psycopg.Error as error:
            raise (ConnectionBroken if connection.closed else CallBroken)(first_line(error)) from error

    async def lend(self) -> LentConnection:
        """As `Pin.lend`. Raises `psycopg.Error`, and `TransactionHeld` where there is no connection."""
        connection = self._connection
        if connection is None:  # it was closed, and nobody has heard of it yet
            raise TransactionHeld("its connection has ended, and the claim with it")
        if not self._written:
            await results(connection, [*self.opening, "SAVEPOINT handling"])
            self._written = True
        self._lent = LentConnection.of(connection)
        return self._lent

    def take_back(self) -> None:
        """As `Pin.take_back`."""
        if self._lent is not None:
            self._lent.end()
            self._lent = None

    async def undo(self) -> None:
        """As `Pin.undo`."""
        if self._written and self._connection is not None:
            with contextlib.suppress(psycopg.Error):  # a claim that is no more is told by the settlement
                await self._connection.execute(b"ROLLBACK TO SAVEPOINT handling")

    async def let_go(self, rows: Sequence[tuple[Row, bool]], *, whole: bool) -> None:  # noqa: ARG002
        """As `Pin.let_go`: a part of a claim ends with it."""
        if self._connection is not None and whole:
            await self._end(self._connection)

    async def _roll_back(self, connection: TrioConnection) -> None:
        self._written = self._kept = False
        try:
            if not connection.closed and connection.info.transaction_status != TransactionStatus.IDLE:
                await connection.execute(b"ROLLBACK")
        except psycopg.Error:
            self.close()

    async def until_lost(self) -> str:
        """As `Pin.until_lost`."""
        connection = self._connection
        return "there is no connection" if connection is None else await connection.until_ended()

    def close(self) -> None:
        """As `Pin.close`."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.finish()

    # --- settle ------------------------------------------------------------------------------------------------------

    async def settle(
        self, said: Sequence[tuple[Row, Verb]], rest: Sequence[Row], *, keep: bool, then: Passing | None
    ) -> Settled:
        """As `Pin.settle`."""
        connection = self._connection
        verdict: Verdict
        self._ended = self._partly = False
        if connection is None or connection.was_ended():  # and nobody has heard of it yet
            return Settled(
                [LeaseLost("its connection has ended, and the claim with it")] * len(said), rest, crossed=True
            )
        try:
            if not self._written or (verdict := await self._after_handler(connection, keep=keep)) is None:
                return await self._settle(connection, said, rest, None if "claim" in self._form.own else then)
        except psycopg.Error as error:
            self.close()
            verdict = None
            if not self.committed:
                verdict = SettlementUnknown(f"the connection broke while it was said: {first_line(error)}")
                verdict.__cause__ = error
        return Settled([verdict] * len(said), rest)

    def _heard(self, command: bytes) -> None:
        """A statement of ours was carried out."""
        self._ended = self._ended or command == b"COMMIT"

    @property
    def committed(self) -> bool:
        """As `Pin.committed`: all of it, since one that was not applied was not."""
        return self._ended and not self._partly

    async def _after_handler(self, connection: TrioConnection, *, keep: bool) -> Verdict:
        """Undo what the handler wrote, unless it is to be kept; a verdict where the claim is no more."""
        status = connection.info.transaction_status
        if keep and status == TransactionStatus.INERROR:
            await self._end(connection)
            return LeaseLost(
                "a statement of the handler's had failed, so nothing could be committed; it is rolled back"
            )
        try:
            if status == TransactionStatus.IDLE:
                raise psycopg.errors.InvalidSavepointSpecification("there is no transaction")
            if keep:  # what it wrote stands; as whom, and where it looked for tables, is not how we say the verb
                await results(connection, [*as_before(connection), "RELEASE SAVEPOINT handling"])
            else:
                await connection.execute(b"ROLLBACK TO SAVEPOINT handling")
        except psycopg.errors.InvalidSavepointSpecification:
            ended = True
        else:
            ended = False
        self._written, self._kept = not keep and not ended, keep and not ended
        if not ended:
            return None
        await self._end(connection)
        return TransactionEnded("the handler has ended the transaction that was lent to it")

    def _attempt(self, row: Row) -> Any:
        """As the table has it: where the settlement counts, nothing has counted yet."""
        return row[2] - 1 if row[2] is not None and self._form.texts.counts else row[2]

    def _plain(self, said: Sequence[tuple[Row, Verb]]) -> bool:
        """Is each verb one statement, of which there is nothing to look at?"""
        return not self._form.schema.triggers and not any(isinstance(verb, MoveToTable | Custom) for _, verb in said)

    async def _say(self, connection: TrioConnection, row: Row, verb: Verb) -> Verdict:
        """Carry out one verb. Raises `psycopg.Error` where the connection broke."""
        try:
            if isinstance(verb, MoveToTable):
                touched = await self._form.moved(connection, {"ids": [row[0]]}, verb.table, row[0])
            elif isinstance(verb, Custom):
                await self._form.carry_out(connection, verb, (row[0], None, self._attempt(row)))
                touched = True
            elif isinstance(verb, PutBack) and not verb.count:
                return None
            else:
                async with connection.transaction():  # a savepoint
                    cursor = await connection.execute(self._text(connection, verb, [row[0]]).encode())
                    touched = cursor.rowcount > 0
            return None if touched else not_applied(Ignored("it touched no row: a trigger has ignored it"))
        except (LinkError, Ignored) as error:
            return not_applied(error)
        except psycopg.Error as error:
            if connection.closed:
                raise
            return not_applied(error)

    def _text(self, connection: TrioConnection, verb: Verb, ids: Sequence[Any]) -> str:
        texts, values = self._form.texts, {"ids": [*ids]}
        match verb:
            case Finish():
                return bound(connection, texts.finish, values)
            case PutBack():
                return bound(connection, texts.put_back, values)
            case Delay(seconds):
                return bound(connection, texts.delay, values | {"seconds": seconds})
            case MoveToGroup(group):
                return bound(connection, texts.regroup, values | {"to": group})
            case _:
                raise TypeError(f"{verb!r} is no verb of a row lock")


def not_applied(why: Exception) -> NotApplied:
    """Why a verb was not carried out, and its row is held as before."""
    refused = NotApplied(first_line(why))
    refused.__cause__ = why
    return refused


def first_line(error: BaseException) -> str:
    """What went wrong, in one line."""
    return str(error).partition("\n")[0]
