"""The row-lock form on PostgreSQL: a claim is a transaction that holds its row, and its COMMIT is the settlement.

A claim is one message to the server (BEGIN and a SELECT … FOR NO KEY UPDATE SKIP LOCKED), a settlement another one
(the verbs, COMMIT), with the next claim behind it while there are rows: several statements in one string,
sent by the simple protocol. A row is locked no more than it must be, so a handler may insert rows elsewhere that refer
to it.

Of a FIFO group a claim first takes the guard, an advisory lock that the transaction holds to its end: while it is held,
the group has a row in work.

A verb that fails takes the transaction with it: the rows are locked again at once, and what somebody else has taken in
between is lost. With a savepoint before the verbs they would stay locked, but a row that is locked by a transaction and
deleted behind its savepoint is deleted by a MultiXact, and such a dead row is looked at by every claim until a vacuum:
at 10,000 rows that was five times slower. What a handler has written is rolled back with a verb that fails, and the
handler is called again, once; from then on there is a savepoint for a while, and what it writes waits with its verb.

What fails at COMMIT (a deferred constraint) has ended the claim. Where a part of a batch is settled, that COMMIT frees
the other rows too, and they are locked again by the same message: what somebody else has taken in between is lost.

Cancellation, anywhere: the connection is closed, and the server rolls back what was not committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import psycopg
import trio
from psycopg.pq import TransactionStatus

from links.abc import Verdict
from links.errors import CallBroken, LeaseLost, LinkError
from links.sql.dialect import Writer
from links.sql.jobs import Passing
from links.sql.pin import Settled
from links.sql.postgres.codes import is_again, is_doomed, is_reshaped, is_unprepared
from links.sql.postgres.custom import claimed
from links.sql.postgres.held_statements import RowLockStatements
from links.sql.postgres.looked import Ignored
from links.sql.postgres.pin import PinnedForm, PostgresPin, first_line, not_applied
from links.sql.postgres.prepared import Prepared
from links.sql.postgres.statements import limited
from links.sql.postgres.strings import bound, results
from links.sql.postgres.trio_connection import TrioConnection
from links.sql.rows import Row
from settlement.sql import Custom, MoveToTable, PutBack, RowLock, Verb

__all__ = ["PostgresRowLock", "RowLockPin"]

_BUSY: Final = 0.005
"""Seconds to a second try where another transaction has the guard of a FIFO group: it may only have looked."""
_CAREFUL: Final = 60.0
"""Seconds for which a savepoint is set, when a verb has failed behind what a handler had written."""


class PostgresRowLock(PinnedForm[RowLockStatements]):
    """A queue whose rows are locked."""

    careful_until = 0.0
    """Until when by trio's clock a settlement is behind a savepoint, where a handler's writes shall stand."""

    @property
    def begin(self) -> str:
        """What begins a claim."""
        claim = self.claim_form
        assert isinstance(claim, RowLock), "it was asked for"  # noqa: S101 -- an invariant of ours
        return f"BEGIN ISOLATION LEVEL {claim.isolation.upper()}"

    def pin(self, writer: Writer, limit: int) -> RowLockPin:  # noqa: ARG002 -- it has a connection of its own
        """A new one, not connected yet."""
        return RowLockPin(self)


class RowLockPin(PostgresPin[RowLockStatements]):
    """One connection, and the rows that it has locked."""

    _form: PostgresRowLock
    _prepared: Prepared | None = None
    _room = 1
    """Rows of a claim, at most."""
    _carried_out = 0
    """How many statements of a settlement were."""
    _stays = False
    """They are behind a savepoint."""
    _touched = 0
    """How many rows they touched."""

    async def _claim(self, connection: TrioConnection, passing: Passing, room: int) -> Sequence[Row]:
        await self._look_again(connection, now=False)
        self._written, self._kept, self._room = False, False, room
        if "claim" in self._form.own:
            return await self._own_claim(connection, passing, room)
        if self._prepared is None or self._prepared.connection is not connection:
            self._prepared = Prepared(connection)
        try:
            await self._prepared.prepare(limited(self._form.texts.claim, room))
            return await self._claim_now(connection, passing, room)
        except psycopg.Error as error:
            if is_unprepared(error) or is_reshaped(error):
                self._prepared.forget()
            raise

    async def _claim_now(self, connection: TrioConnection, passing: Passing, room: int) -> Sequence[Row]:
        texts = self._claiming(connection, passing, room)
        if self._form.texts.guard:
            return await self._head(connection, texts, passing)
        return await self._found(connection, texts, passing)

    async def _own_claim(self, connection: TrioConnection, passing: Passing, room: int) -> Sequence[Row]:
        """By the statement for claim; ours locks each row, too, so that none is worked on that is not locked.

        What else it has written is undone where a verb fails, and the rows are locked again.
        """
        rows: Sequence[Row] = ()
        failure: LinkError | None = None
        try:
            await connection.execute(self._form.begin.encode())
            rows = await claimed(self._form, connection, room, passing)
        except LinkError as error:
            failure = error
        if not rows:
            await self._roll_back(connection)
        if failure is not None:
            raise failure
        return rows

    async def _head(self, connection: TrioConnection, texts: Sequence[str], passing: Passing) -> Sequence[Row]:
        """The head of a FIFO group, where it is to be had, behind the guard."""
        for pause in (_BUSY, 0.0):
            *_, guard, rows = await results(connection, texts)
            if rows:
                return [self._form.row(row) for row in rows]
            await self._roll_back(connection)
            passing.complete = guard == [(True,)]
            if passing.complete:
                break
            await trio.sleep(pause)
        return []

    def _claiming(self, connection: TrioConnection, passing: Passing, room: int) -> list[str]:
        values = {"group": self._form.group, "over": [*passing.over]}
        text = limited(self._form.texts.claim, room)
        claim = self._prepared.said(text, values) if self._prepared else bound(connection, text, values)
        return [self._form.begin, *self._guard(connection), claim]

    async def _found(self, connection: TrioConnection, texts: Sequence[str], passing: Passing) -> Sequence[Row]:
        """Carry out these, of which the last one is a claim. Where it finds nothing the transaction is ended."""
        rows = (await results(connection, texts, self._heard))[-1]
        passing.complete = not rows
        if not rows:
            await self._roll_back(connection)
        return [self._form.row(row) for row in rows]

    async def _end(self, connection: TrioConnection) -> None:
        await self._roll_back(connection)

    async def _settle(
        self, connection: TrioConnection, said: Sequence[tuple[Row, Verb]], rest: Sequence[Row], then: Passing | None
    ) -> Settled:
        """All by one message, and what follows by the same."""
        if connection.info.transaction_status != TransactionStatus.INTRANS:  # such as by a cancel that came late
            await self._roll_back(connection)
            return self._not_committed(CallBroken("a statement of its transaction had failed"), said, rest)
        if any(isinstance(verb, MoveToTable | Custom) for _, verb in said):
            return await self._one_by_one(connection, said, rest)
        alike: dict[Verb, list[Any]] = {}
        for row, verb in said:
            if not isinstance(verb, PutBack) or verb.count:
                alike.setdefault(verb, []).append(row[0])
        texts = [self._text(connection, verb, ids) for verb, ids in alike.items()]
        self._stays = self._kept and trio.current_time() < self._form.careful_until
        if self._stays:
            texts.insert(0, "SAVEPOINT settling")
        self._carried_out, self._touched, before = 0, 0, len(texts)
        done: list[Verdict] = [None] * len(said)
        failure: Exception
        try:
            if self._form.schema.triggers and alike:
                await results(connection, texts, self._heard)
                if self._touched != sum(map(len, alike.values())):
                    raise Ignored("it touched no row: a trigger has ignored it")
                texts.clear()
            texts.append("COMMIT")
            if rest:
                return Settled(done, await self._committed(connection, texts, rest))
            if then is None or self._form.texts.guard or not self._form.known:  # a claim of its own looks again
                await results(connection, texts, self._heard)
                return Settled(done)
            texts += self._claiming(connection, then, self._room)
            found = await self._found(connection, texts, then)
            self._written = self._kept = False
            return Settled(done, claimed=found)
        except Ignored as error:
            failure = error
        except psycopg.Error as error:
            if connection.closed:
                raise
            failure = error
        if self.committed:  # it is what came behind that has failed
            await self._roll_back(connection)
            return Settled(done, rest)
        if self._carried_out == before and not isinstance(failure, Ignored):  # by its COMMIT
            await self._roll_back(connection)
            return self._not_committed(failure, said, rest)
        return await self._not_said(connection, said, rest, failure)

    async def _not_said(
        self, connection: TrioConnection, said: Sequence[tuple[Row, Verb]], rest: Sequence[Row], failure: Exception
    ) -> Settled:
        """A verb has failed, and the transaction with it, but for its savepoint."""
        if isinstance(failure, Ignored) and self._kept:  # nothing has failed, and it has no batch
            return Settled([not_applied(failure)])
        doomed = is_doomed(failure)
        if doomed or (self._kept and not self._stays):
            if not doomed:
                self._form.careful_until = trio.current_time() + _CAREFUL
            await self._roll_back(connection)
            return self._not_committed(failure, said, rest)
        if not self._kept:
            return await self._again(connection, said, rest, failure)
        await connection.execute(b"ROLLBACK TO SAVEPOINT settling")
        return Settled([not_applied(failure)])  # what is lent has no batch

    def _heard(self, command: bytes) -> None:
        self._carried_out += 1
        self._touched += int(command.rpartition(b" ")[2]) if command[-1:].isdigit() else 0
        super()._heard(command)

    async def _again(
        self, connection: TrioConnection, said: Sequence[tuple[Row, Verb]], rest: Sequence[Row], failure: Exception
    ) -> Settled:
        """A verb has failed, and the transaction with it: lock the rows again, and say each by itself.

        Between the two whoever waits to alter the table has his turn.
        """
        await self._roll_back(connection)
        rows = [*[row for row, _ in said], *rest]
        try:
            lost = await self._committed(connection, [], rows)
        except psycopg.Error:  # nothing was done, whatever came between
            lost = rows
        gone = {row[0] for row in lost}
        why = LeaseLost(f"it was not applied, and somebody else has it now: {first_line(failure)}")
        verdicts: dict[Any, Verdict] = dict.fromkeys(gone, why)
        left = [(row, verb) for row, verb in said if row[0] not in gone]
        if len(lost) == len(rows):
            await self._roll_back(connection)
        elif len(said) > 1:
            settled = await self._one_by_one(connection, left, [row for row in rest if row[0] not in gone])
            verdicts |= {row[0]: verdict for (row, _), verdict in zip(left, settled.verdicts, strict=True)}
            gone |= {row[0] for row in settled.lost}
        elif left:
            verdicts[left[0][0][0]] = not_applied(failure)
        return Settled(
            [verdicts[row[0]] for row, _ in said], [row for row in rest if row[0] in gone], crossed=bool(lost)
        )

    async def _one_by_one(
        self, connection: TrioConnection, said: Sequence[tuple[Row, Verb]], rest: Sequence[Row]
    ) -> Settled:
        """Each by itself, so that one that fails does not touch the others; then one COMMIT."""
        verdicts = [await self._say(connection, row, verb) for row, verb in said]
        for verdict in verdicts:
            if verdict is not None and isinstance(why := verdict.__cause__, psycopg.Error) and is_doomed(why):
                await self._roll_back(connection)
                return self._not_committed(why, said, rest)
        stays = [row for (row, _), verdict in zip(said, verdicts, strict=True) if verdict is not None]
        if len(stays) == len(said):
            return Settled(verdicts)
        self._partly = bool(stays)
        try:
            lost = await self._committed(connection, ["COMMIT"], [*stays, *rest])
        except psycopg.Error as error:
            if connection.closed:
                raise
            await self._roll_back(connection)
            if not self._ended:
                return self._not_committed(error, said, rest)
            lost = [*stays, *rest]
        gone = {row[0] for row in lost}
        for number, (row, _) in enumerate(said):
            if row[0] in gone:
                verdicts[number] = LeaseLost("it was not applied, and its claim has ended with the others'")
        return Settled(verdicts, [row for row in rest if row[0] in gone])

    async def _committed(self, connection: TrioConnection, texts: Sequence[str], rest: Sequence[Row]) -> Sequence[Row]:
        """Carry out these, of which the last one is COMMIT, and lock the rest again; those of it that are lost."""
        if not rest:
            await results(connection, texts, self._heard)
            return []
        values = {"ids": [row[0] for row in rest], "group": self._form.group}
        again = [self._form.begin, *self._guard(connection), bound(connection, self._form.texts.again, values)]
        *_, guard, found = await results(connection, [*texts, *again], self._heard)
        held = {row[0] for row in found} if not self._form.texts.guard or guard == [(True,)] else set[Any]()
        return [row for row in rest if row[0] not in held]

    def _guard(self, connection: TrioConnection) -> list[str]:
        """What takes the guard of a FIFO group; what stands behind it has a snapshot of its own, so of behind it."""
        guard = self._form.texts.guard
        return [bound(connection, guard, {"group": self._form.group})] if guard else []

    @staticmethod
    def _not_committed(why: Exception, said: Sequence[Any], rest: Sequence[Row]) -> Settled:
        lost = LeaseLost(f"the transaction was rolled back: {first_line(why)}")
        lost.__cause__ = why
        return Settled([lost] * len(said), rest, crossed=is_again(why))
