"""The advisory form on PostgreSQL with statements of the user's own for lock and unlock.

A claim looks at due rows, one of each key, and tries the key of one after the other by the statement for lock, until it
has won enough; each is then taken as it is now, and its attempt counted. Whoever ends the claim has the statement for
unlock carried out for each key; where that does not answer true the connection is closed, and the session's locks end.

Cancellation, anywhere: the connection is closed. A lock that does not end with its session is the user's to end.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from links.errors import CallBroken, ConnectionBroken
from links.sql.custom import yes
from links.sql.dialect import Writer
from links.sql.jobs import Passing
from links.sql.postgres.advisory import AdvisoryPin, PostgresAdvisory
from links.sql.postgres.codes import is_of_the_row
from links.sql.postgres.custom import asked
from links.sql.postgres.looked import Ignored
from links.sql.postgres.pin import first_line
from links.sql.postgres.trio_connection import TrioConnection
from links.sql.rows import Row

__all__ = ["CustomLockPin", "PostgresCustomLock"]

_log = logging.getLogger("trio_settlement")

_AHEAD = 15
"""Rows that one look gives beyond those that are wanted: others may be at work on the first ones."""


class PostgresCustomLock(PostgresAdvisory):
    """A queue whose rows are in work under a lock of the user's own."""

    def pin(self, writer: Writer, limit: int) -> CustomLockPin:  # noqa: ARG002 -- it has a connection of its own
        """A new one, not connected yet."""
        return CustomLockPin(self)


class CustomLockPin(AdvisoryPin):
    """One connection, and the keys that it has locked; a key is its text."""

    async def _claim(self, connection: TrioConnection, passing: Passing, room: int) -> Sequence[Row]:
        await self._look_again(connection, now=False)
        self._written = False
        self._keys.clear()  # of a connection that was closed
        connection.prepare_threshold = None  # where the table is altered, no row is to blame
        rows: list[Row] = []
        tried: list[str] = []
        passing.complete = False
        try:
            while len(rows) < room and not passing.complete and not passing.enough:
                await self._walk(connection, passing, room, rows, tried)
                if connection.closed:
                    raise ConnectionBroken("a key was not unlocked, so the connection was closed")
        except CallBroken as error:
            failure = error
        else:
            return rows
        await self._end(connection)
        self.close()  # nobody can tell whether that key is locked
        raise failure

    async def _walk(
        self, connection: TrioConnection, passing: Passing, room: int, rows: list[Row], tried: list[str]
    ) -> None:
        """Look at the first rows whose keys were not tried yet, and take those whose keys are won."""
        over = [*passing.over, *passing.failed]
        size = room + _AHEAD
        values = {"group": self._form.group, "over": over, "room": size, "tried": tried}
        found = await self._form.rows(connection, self._form.texts.candidates, values)
        passing.complete = len(found) < size
        for key, name in found:
            if len(rows) == room or passing.enough:
                passing.complete = False
                break
            if name in tried:
                continue
            tried.append(name)
            if await self._says(connection, "lock", name):
                self._keys[key] = name
                rows += await self._take(connection, key, passing)

    async def _says(self, connection: TrioConnection, event: str, name: str) -> bool:
        return yes(event, (await asked(connection, event, self._form.own[event], {"key": name}))[1])

    async def _take(self, connection: TrioConnection, key: Any, passing: Passing) -> list[Row]:
        """The row, whose key is locked, as it is now; nothing where it is gone: then the key is free again."""
        try:
            found = await self._form.rows(
                connection, self._form.texts.take_locked, {"id": key, "group": self._form.group}
            )
        except psycopg.Error as error:
            if connection.closed or not is_of_the_row(error):
                raise
            passing.failed[key] = error
            found = []
        taken = [self._form.row(row[1:]) for row in found if row[0]]
        if not taken:
            if found:
                passing.failed[key] = Ignored("a trigger has ignored the attempt, so it would not be counted")
            await self._unlock(connection, [self._keys.pop(key)])
        return taken

    async def _unlock(self, connection: TrioConnection, keys: Sequence[str]) -> None:
        """Free these by the statement for unlock; where that does not answer true the connection is closed."""
        for name in keys:
            why = "it has answered false"
            try:
                if await self._says(connection, "unlock", name):
                    continue
            except (CallBroken, psycopg.Error) as error:
                why = first_line(error)
            table = self._form.table.name
            _log.warning("table %r: key %r was not unlocked, so its connection was closed: %s", table, name, why)
            self.close()
            break

    async def _end(self, connection: TrioConnection) -> None:
        keys = [*self._keys.values()]
        self._keys.clear()
        self._written = False
        try:
            if not connection.closed:
                if connection.info.transaction_status != TransactionStatus.IDLE:
                    await connection.execute(b"ROLLBACK")
                await self._unlock(connection, keys)
        except psycopg.Error:
            self.close()
