"""The row-lock form on PostgreSQL: a claim is a transaction that holds its row, and its COMMIT is the settlement.

A claim is one message to the server (BEGIN and a SELECT … FOR NO KEY UPDATE SKIP LOCKED), a settlement another one
(a savepoint, the verbs, COMMIT), with the next claim behind it while there are rows: several statements in one string,
sent by the simple protocol. A row is locked no more than it must be, so a handler may insert rows elsewhere that refer
to it.

A verb that fails goes back to the savepoint, and the claim lives on; one that fails at COMMIT (a deferred constraint)
has ended it. Where a part of a batch is settled, that COMMIT frees the other rows too, and they are locked again by the
same message: what somebody else has taken in between is lost.

Cancellation, anywhere: the connection is closed, and the server rolls back what was not committed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
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
from links.sql.jobs import Passing, Settled
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

    async def claim(self, passing: Passing, room: int) -> Sequence[Row]:
        """As `Pin.claim`."""
        connection = await self._connected()
        try:
            return await self._claim(connection, passing, room)
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

    async def _claim(self, connection: TrioConnection, passing: Passing, room: int) -> Sequence[Row]:
        await self._look_again(connection, now=False)
        self._written = False
        return await self._found(connection, self._claiming(connection, passing, room), passing)

    def _claiming(self, connection: TrioConnection, passing: Passing, room: int) -> list[str]:
        values = {"group": self._form.group, "over": [*passing.over], "room": room}
        return [_BEGIN, _bound(connection, self._form.texts.claim, values)]

    async def _found(self, connection: TrioConnection, texts: Sequence[str], passing: Passing) -> Sequence[Row]:
        """Carry out these, of which the last one is a claim. Where it finds nothing the transaction is ended."""
        rows = await _last(connection, texts)
        passing.complete = not rows
        if not rows:
            await self._roll_back(connection)
        return [self._form.row(row) for row in rows]

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

    async def settle(
        self, said: Sequence[tuple[Row, Verb]], rest: Sequence[Row], *, keep: bool, then: Passing | None
    ) -> Settled:
        """As `Pin.settle`."""
        connection = self._connection
        assert connection is not None, "it has claimed"  # noqa: S101 -- an invariant of ours
        verdict: Verdict
        try:
            if not self._written or (verdict := await self._after_handler(connection, keep=keep)) is None:
                if not self._plain(said):
                    return await self._one_by_one(connection, said, rest)
                return await self._at_once(connection, said, rest, then)
        except psycopg.Error as error:
            self.close()
            verdict = SettlementUnknown(f"the connection broke while it was said: {_first_line(error)}")
            verdict.__cause__ = error
        return Settled([verdict] * len(said), rest)

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

    def _plain(self, said: Sequence[tuple[Row, Verb]]) -> bool:
        """Is each verb one statement, of which there is nothing to look at?"""
        return not self._form.schema.triggers and not any(isinstance(verb, MoveToTable) for _, verb in said)

    async def _at_once(
        self, connection: TrioConnection, said: Sequence[tuple[Row, Verb]], rest: Sequence[Row], then: Passing | None
    ) -> Settled:
        """All by one message, and what follows by the same. Raises `psycopg.Error` where the connection broke."""
        alike: dict[Verb, list[Any]] = {}
        for row, verb in said:
            if not isinstance(verb, PutBack) or verb.count:
                alike.setdefault(verb, []).append(row[0])
        texts = ["SAVEPOINT settling", *[self._text(connection, verb, ids) for verb, ids in alike.items()], "COMMIT"]
        done: list[Verdict] = [None] * len(said)
        try:
            if rest:
                return Settled(done, await self._committed(connection, texts, rest))
            if then is None:
                await _last(connection, texts)
                return Settled(done)
            texts += self._claiming(connection, then, len(said))
            self._written = False
            return Settled(done, claimed=await self._found(connection, texts, then))
        except psycopg.Error as error:
            if connection.closed:
                raise
            failure = error
        if connection.info.transaction_status == TransactionStatus.IDLE:
            return self._not_committed(failure, said, rest)
        try:
            await connection.execute(b"ROLLBACK TO SAVEPOINT settling")
        except psycopg.errors.InvalidSavepointSpecification:  # what came behind the COMMIT has failed
            await self._roll_back(connection)
            return Settled(done, rest)
        if len(said) == 1:
            return Settled([_not_applied(failure)])
        return await self._one_by_one(connection, said, rest)

    async def _one_by_one(
        self, connection: TrioConnection, said: Sequence[tuple[Row, Verb]], rest: Sequence[Row]
    ) -> Settled:
        """Each by itself, so that one that fails does not touch the others; then one COMMIT."""
        verdicts = [await self._say(connection, row, verb) for row, verb in said]
        stays = [row for (row, _), verdict in zip(said, verdicts, strict=True) if verdict is not None]
        if len(stays) == len(said):
            return Settled(verdicts)
        try:
            lost = await self._committed(connection, ["COMMIT"], [*stays, *rest])
        except psycopg.Error as error:
            if connection.closed:
                raise
            if connection.info.transaction_status == TransactionStatus.IDLE:
                return self._not_committed(error, said, rest)
            await self._roll_back(connection)
            lost = [*stays, *rest]
        gone = {row[0] for row in lost}
        for number, (row, _) in enumerate(said):
            if row[0] in gone:
                verdicts[number] = LeaseLost("it was not applied, and its claim has ended with the others'")
        return Settled(verdicts, [row for row in rest if row[0] in gone])

    async def _say(self, connection: TrioConnection, row: Row, verb: Verb) -> Verdict:
        """Carry out one verb. Raises `psycopg.Error` where the connection broke."""
        try:
            if isinstance(verb, MoveToTable):
                touched = await self._form.moved(connection, {"ids": [row[0]]}, verb.table, row[0])
            elif isinstance(verb, PutBack) and not verb.count:
                return None
            else:
                async with connection.transaction():  # a savepoint
                    cursor = await connection.execute(_sql(self._text(connection, verb, [row[0]])))
                    touched = cursor.rowcount > 0
            return None if touched else _not_applied(Ignored("it touched no row: a trigger has ignored it"))
        except (LinkError, Ignored) as error:
            return _not_applied(error)
        except psycopg.Error as error:
            if connection.closed:
                raise
            return _not_applied(error)

    async def _committed(self, connection: TrioConnection, texts: Sequence[str], rest: Sequence[Row]) -> Sequence[Row]:
        """Carry out these, of which the last one is COMMIT, and lock the rest again; those of it that are lost."""
        if not rest:
            await _last(connection, texts)
            return []
        again = _bound(connection, self._form.texts.again, {"ids": [row[0] for row in rest], "group": self._form.group})
        held = {row[0] for row in await _last(connection, [*texts, _BEGIN, again])}
        return [row for row in rest if row[0] not in held]

    @staticmethod
    def _not_committed(why: Exception, said: Sequence[Any], rest: Sequence[Row]) -> Settled:
        lost = LeaseLost(f"the transaction was rolled back at its COMMIT: {_first_line(why)}")
        lost.__cause__ = why
        return Settled([lost] * len(said), rest)

    def _text(self, connection: TrioConnection, verb: Verb, ids: Sequence[Any]) -> str:
        texts, values = self._form.texts, {"ids": [*ids]}
        match verb:
            case Finish():
                return _bound(connection, texts.finish, values)
            case PutBack():
                return _bound(connection, texts.put_back, values)
            case Delay(seconds):
                return _bound(connection, texts.delay, values | {"seconds": seconds})
            case MoveToGroup(group):
                return _bound(connection, texts.regroup, values | {"to": group})
            case _:
                raise TypeError(f"{verb!r} is no verb of a row lock")

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


_BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"


def _bound(connection: TrioConnection, text: str, values: dict[str, Any]) -> str:
    """The statement with its values written into it."""
    return AsyncClientCursor(connection).mogrify(_sql(text), values)


async def _last(connection: TrioConnection, texts: Sequence[str]) -> list[tuple[Any, ...]]:
    """Carry out these by one message: the rows of the last one. Raises `psycopg.Error`."""
    cursor = AsyncClientCursor(connection)
    await cursor.execute(_sql("; ".join(texts)))
    while cursor.nextset():
        pass
    return await cursor.fetchall() if cursor.description else []


def _sql(text: str) -> bytes:
    return text.encode()


def _not_applied(why: Exception) -> NotApplied:
    refused = NotApplied(_first_line(why))
    refused.__cause__ = why
    return refused


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
