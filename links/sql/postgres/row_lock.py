"""The row-lock form on PostgreSQL: a claim is a transaction that holds its row, and its COMMIT is the settlement.

A claim is one message to the server (BEGIN and a SELECT … FOR NO KEY UPDATE SKIP LOCKED), a settlement another one
(a savepoint, the verb, COMMIT): several statements in one string, sent by the simple protocol. The row is locked no
more than it must be, so a handler may insert rows elsewhere that refer to it.

A verb that fails goes back to the savepoint, and the claim lives on; one that fails at COMMIT (a deferred constraint)
has ended it.

Cancellation, anywhere: the connection is closed, and the server rolls back what was not committed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import psycopg
from psycopg import AsyncClientCursor
from psycopg.pq import TransactionStatus

from links.abc import Verdict
from links.errors import (
    CallBroken,
    ConnectionBroken,
    LeaseLost,
    LinkError,
    NotApplied,
    SettlementUnknown,
    TransactionEnded,
)
from links.sql.jobs import Passing
from links.sql.postgres.codes import is_reshaped
from links.sql.postgres.lent import LentConnection
from links.sql.postgres.looked import Ignored, Looked
from links.sql.postgres.statements import RowLockStatements
from links.sql.postgres.trio_connection import TrioConnection
from links.sql.rows import Row
from settlement.sql import Delay, Finish, MoveToGroup, MoveToTable, PutBack, Verb

__all__ = ["Connect", "PostgresPin", "PostgresRowLock"]

Connect: TypeAlias = Callable[[], Awaitable[TrioConnection]]
"""How to get a connection; raises `LinkRefused`, `ConnectionBroken`."""


class PostgresRowLock(Looked[RowLockStatements]):
    """A queue whose rows are locked; `connect` gives a connection for a row."""

    def __init__(self, *asked: Any, connect: Connect, **names: Any) -> None:
        super().__init__(*asked, **names)
        self.connect = connect

    def pin(self) -> PostgresPin:
        """A new one, not connected yet."""
        return PostgresPin(self)


class PostgresPin:
    """One connection, and the row that it holds."""

    def __init__(self, form: PostgresRowLock) -> None:
        self._form = form
        self._connection: TrioConnection | None = None
        self._lent: LentConnection | None = None
        self._written = False
        """A handler may have written in this transaction: behind the savepoint `handling`."""

    async def claim(self, passing: Passing) -> Row | None:
        """As `Pin.claim`."""
        connection = await self._connected()
        try:
            return await self._claim(connection, passing)
        except LinkError:
            raise
        except psycopg.Error as error:
            if connection.closed:
                raise ConnectionBroken(_first_line(error)) from error
            failure = error
        except BaseException:
            self.close()  # nobody can tell whether it holds a row
            raise
        await self._roll_back(connection)
        if is_reshaped(failure):
            await self._look_again(connection)
        raise CallBroken(_first_line(failure)) from failure

    async def _connected(self) -> TrioConnection:
        connection = self._connection
        if connection is None or connection.was_ended():
            self._connection = connection = await self._form.connect()
        return connection

    async def _look_again(self, connection: TrioConnection, *, now: bool = True) -> None:
        try:
            await self._form.look_again(connection, now=now)
        except psycopg.Error as error:
            raise (ConnectionBroken if connection.closed else CallBroken)(_first_line(error)) from error

    async def _claim(self, connection: TrioConnection, passing: Passing) -> Row | None:
        await self._look_again(connection, now=False)
        values = {"group": self._form.group, "over": [*passing.over], "room": 1}
        self._written = False
        cursor = AsyncClientCursor(connection)
        await cursor.execute(f"BEGIN ISOLATION LEVEL READ COMMITTED; {self._form.texts.claim}".encode(), values)
        cursor.nextset()
        found = await cursor.fetchone()
        if found is None:
            await self._roll_back(connection)
            return None
        return self._form.row(found)

    async def lend(self) -> LentConnection:
        """As `Pin.lend`. Raises `psycopg.Error`."""
        connection = self._connection
        assert connection is not None, "it has claimed"  # noqa: S101 -- an invariant of ours
        if not self._written:
            await connection.execute(b"SAVEPOINT handling")
            self._written = True
        self._lent = LentConnection.of(connection)
        return self._lent

    def take_back(self) -> None:
        """As `Pin.take_back`."""
        if self._lent is not None:
            self._lent.end()
            self._lent = None

    async def settle(self, row: Row, verb: Verb, *, keep: bool) -> Verdict:
        """As `Pin.settle`."""
        connection = self._connection
        assert connection is not None, "it has claimed"  # noqa: S101 -- an invariant of ours
        try:
            if self._written and (ended := await self._after_handler(connection, keep=keep)) is not None:
                return ended
            return await self._settle(connection, row, verb)
        except psycopg.Error as error:
            if connection.closed:
                self.close()
                unknown = SettlementUnknown(f"the connection broke while it was said: {_first_line(error)}")
                unknown.__cause__ = error
                return unknown
            failure: Exception = error
        except (LinkError, Ignored) as error:
            failure = error
        return await self._failed(connection, failure)

    async def _after_handler(self, connection: TrioConnection, *, keep: bool) -> Verdict:
        """Undo what the handler wrote, unless it is to be kept; a verdict where the claim is no more."""
        status = connection.info.transaction_status
        if keep and status == TransactionStatus.INERROR:
            await self._roll_back(connection)
            return LeaseLost(
                "a statement of the handler's had failed, so nothing could be committed; it is rolled back"
            )
        try:
            if status == TransactionStatus.IDLE:
                raise psycopg.errors.InvalidSavepointSpecification("there is no transaction")
            await connection.execute(b"RELEASE SAVEPOINT handling" if keep else b"ROLLBACK TO SAVEPOINT handling")
        except psycopg.errors.InvalidSavepointSpecification:
            ended = True
        else:
            ended = False
        self._written = not keep and not ended
        if not ended:
            return None
        await self._roll_back(connection)
        return TransactionEnded("the handler has ended the transaction that was lent to it")

    async def _settle(self, connection: TrioConnection, row: Row, verb: Verb) -> Verdict:
        if isinstance(verb, PutBack) and not verb.count:
            await self._roll_back(connection)
            return None
        values: dict[str, Any] = {"id": row[0]}
        if isinstance(verb, MoveToTable):
            if not await self._form.moved(connection, values, verb.table, row[0]):
                raise Ignored("it touched no row: a trigger has ignored it")
        else:
            text = self._text(verb, values)
            if not self._form.schema.triggers:
                statements = f"SAVEPOINT settling; {text}; COMMIT"
                await AsyncClientCursor(connection).execute(statements.encode(), values)
                return None
            async with connection.transaction():  # a savepoint
                if not (await connection.execute(text.encode(), values)).rowcount:
                    raise Ignored("it touched no row: a trigger has ignored it")
        await connection.execute(b"COMMIT")
        return None

    def _text(self, verb: Verb, values: dict[str, Any]) -> str:
        texts = self._form.texts
        match verb:
            case Finish():
                return texts.finish
            case PutBack():
                return texts.put_back
            case Delay(seconds):
                values["seconds"] = seconds
                return texts.delay
            case MoveToGroup(group):
                values["to"] = group
                return texts.regroup
            case _:
                raise TypeError(f"{verb!r} is no verb of a row lock")

    async def _failed(self, connection: TrioConnection, why: Exception) -> Verdict:
        """The claim lives on where the transaction does: within, a verb that failed has gone back to its savepoint."""
        status = connection.info.transaction_status
        if status == TransactionStatus.INERROR:
            await connection.execute(b"ROLLBACK TO SAVEPOINT settling")
        if status == TransactionStatus.IDLE:
            lost = LeaseLost(f"the transaction was rolled back at its COMMIT: {_first_line(why)}")
            lost.__cause__ = why
            return lost
        refused = NotApplied(_first_line(why))
        refused.__cause__ = why
        return refused

    async def let_go(self) -> None:
        """As `Pin.let_go`."""
        if self._connection is not None:
            await self._roll_back(self._connection)

    async def _roll_back(self, connection: TrioConnection) -> None:
        self._written = False
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


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
