"""The advisory form on PostgreSQL: a claim is a session's lock on the key of its row, in no transaction.

A claim is one statement that tries the locks of due rows one by one, and counts the attempt of what it has won; where
the first ones are all held by others, a second statement asks the server which locks are held, and passes these rows.
A settlement is one message: the verbs in one transaction, then the unlocking. A verb that fails releases its lock all
the same, and its row is as it was when it was claimed.
(https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS)

Cancellation, anywhere: the connection is closed, and the server releases what it had locked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import psycopg
from psycopg.pq import TransactionStatus

from links.abc import Verdict
from links.errors import LeaseLost
from links.sql.dialect import Writer
from links.sql.jobs import Passing
from links.sql.pin import Settled
from links.sql.postgres.codes import is_of_the_row
from links.sql.postgres.held_statements import AdvisoryStatements
from links.sql.postgres.looked import Ignored
from links.sql.postgres.pin import BEGIN, PinnedForm, PostgresPin, first_line
from links.sql.postgres.strings import bound, results
from links.sql.postgres.trio_connection import TrioConnection
from links.sql.rows import Row
from settlement.sql import PutBack, Verb

__all__ = ["AdvisoryPin", "PostgresAdvisory"]

_log = logging.getLogger("trio_settlement")

_AHEAD: Final = 15
"""Rows that one statement looks at beyond those it wants: others may be at work on the first ones."""
_TRIES: Final = 3
"""So often is it looked for rows whose lock is free, where others take them meanwhile."""


class PostgresAdvisory(PinnedForm[AdvisoryStatements]):
    """A queue whose rows are in work under a lock on their key."""

    def pin(self, writer: Writer, limit: int) -> AdvisoryPin:  # noqa: ARG002 -- it has a connection of its own
        """A new one, not connected yet."""
        return AdvisoryPin(self)


class AdvisoryPin(PostgresPin[AdvisoryStatements]):
    """One connection, and the keys that it has locked."""

    opening = (BEGIN,)

    def __init__(self, form: PinnedForm[AdvisoryStatements]) -> None:
        super().__init__(form)
        self._keys: dict[Any, Any] = {}
        """By the row's id."""

    async def _claim(self, connection: TrioConnection, passing: Passing, room: int) -> Sequence[Row]:
        await self._look_again(connection, now=False)
        self._written = False
        texts = self._form.texts
        for text in (texts.take, *[texts.take_free] * _TRIES):
            passing.complete = False
            try:
                rows = await self._taken(connection, text, passing, room)
            except psycopg.Error as error:
                if connection.closed or not is_of_the_row(error):
                    raise
                passing.singly = True
                await self._end(connection)
                rows = await self._one_of_them(connection, passing)
            if rows or passing.complete or passing.enough:
                return rows
        return []

    async def _taken(
        self, connection: TrioConnection, text: str, passing: Passing, room: int, key: Any = None
    ) -> Sequence[Row]:
        """What one statement claims; what it has locked in vain is unlocked."""
        size = room + _AHEAD
        values = {
            "group": self._form.group,
            "over": [*passing.over, *passing.failed],
            "room": size,
            "wanted": room,
            "id": key,
        }
        (found,) = await results(connection, [bound(connection, text, values)])
        passing.complete = found[0][0] < size
        rows: list[Row] = []
        in_vain: list[int] = []
        for _, lock, there, counted, *row in found:
            if lock is None:
                continue
            if there and counted:
                self._keys[row[0]] = lock
                rows.append(self._form.row(tuple(row)))
                continue
            in_vain.append(lock)
            if there:
                passing.failed[row[0]] = Ignored("a trigger has ignored the attempt, so it would not be counted")
        await self._unlock(connection, in_vain)
        return rows

    async def _one_of_them(self, connection: TrioConnection, passing: Passing) -> Sequence[Row]:
        """The first that can be claimed: row by row, since one of them cannot. Raises `psycopg.Error`."""
        values = {"group": self._form.group, "over": [*passing.over, *passing.failed], "room": passing.most}
        for (key,) in await self._form.rows(connection, self._form.texts.look, values):
            if passing.enough:
                break
            try:
                rows = await self._taken(connection, self._form.texts.take_one, passing, 1, key)
            except psycopg.Error as error:
                if connection.closed or not is_of_the_row(error):
                    raise
                passing.failed[key] = error
                await self._end(connection)
                continue
            passing.complete = False
            if rows:
                return rows
        return []

    async def _settle(
        self,
        connection: TrioConnection,
        said: Sequence[tuple[Row, Verb]],
        rest: Sequence[Row],  # noqa: ARG002 -- it has its own keys
        then: Passing | None,  # noqa: ARG002 -- a claim says by itself what it has locked
    ) -> Settled:
        """One transaction, then the unlocking; what failed is unlocked, too."""
        if connection.info.transaction_status == TransactionStatus.INERROR:  # such as by a cancel that came late
            await connection.execute(b"ROLLBACK")
        verdicts = await self._said(connection, said)
        await self._unlock(connection, [self._keys.pop(row[0]) for row, _ in said])
        return Settled(verdicts)

    async def _said(self, connection: TrioConnection, said: Sequence[tuple[Row, Verb]]) -> list[Verdict]:
        verbs = [(row, verb) for row, verb in said if not isinstance(verb, PutBack)]
        lent = connection.info.transaction_status == TransactionStatus.INTRANS
        if not verbs and not lent:
            return [None] * len(said)
        try:
            if self._plain(said):
                texts = [self._text(connection, verb, [row[0]]) for row, verb in verbs]
                await results(connection, [*([] if lent else [BEGIN]), *texts, "COMMIT"], self._heard)
                return [None] * len(said)
            if not lent:
                await connection.execute(BEGIN.encode())
            verdicts: list[Verdict] = []
            for row, verb in said:
                verdict = await self._say(connection, row, verb)
                verdicts.append(None if verdict is None else _lost(verdict))
            await connection.execute(b"ROLLBACK" if lent and any(verdicts) else b"COMMIT")
        except psycopg.Error as error:
            if connection.closed:
                raise
            failure = error
        else:
            return verdicts
        if connection.info.transaction_status != TransactionStatus.IDLE:
            await connection.execute(b"ROLLBACK")
        if len(said) == 1 or lent:
            return [_lost(failure)] * len(said)
        self._partly = True  # each by its own COMMIT
        return [verdict for each in said for verdict in await self._said(connection, [each])]

    async def let_go(self, rows: Sequence[tuple[Row, bool]], *, whole: bool) -> None:
        """As `Pin.let_go`. Where an attempt cannot be counted back, it stays counted."""
        connection, uncount = self._connection, self._form.texts.uncount
        if connection is None:
            return
        ids = [row[0] for row, began in rows if not began]
        try:
            if connection.info.transaction_status != TransactionStatus.IDLE:
                await connection.execute(b"ROLLBACK")
            if ids and uncount:
                await results(connection, [bound(connection, uncount, {"ids": ids})])
        except psycopg.Error as error:
            _log.warning("table %r: an attempt stays counted: %s", self._form.table.name, first_line(error))
        if whole:
            await self._end(connection)
        else:
            await self._unlock(connection, [self._keys.pop(row[0]) for row, _ in rows])

    async def _unlock(self, connection: TrioConnection, keys: Sequence[Any]) -> None:
        """Release these. Where the server does not confirm it the connection is closed, and that releases all."""
        if not keys:
            return
        text = ", ".join(f"pg_catalog.pg_advisory_unlock({key})" for key in keys)
        ((released,),) = await results(connection, [f"SELECT {text}"])
        if not all(released):
            self.close()

    async def _end(self, connection: TrioConnection) -> None:
        self._keys.clear()
        self._written = False
        try:
            if not connection.closed:
                texts = [] if connection.info.transaction_status == TransactionStatus.IDLE else ["ROLLBACK"]
                await results(connection, [*texts, "SELECT pg_catalog.pg_advisory_unlock_all()"])
        except psycopg.Error:
            self.close()


def _lost(why: Exception) -> LeaseLost:
    lost = LeaseLost(f"it was not applied, and the lock was released, so the row is as it was: {first_line(why)}")
    lost.__cause__ = why
    return lost
