"""Whose turn it is, on PostgreSQL: an advisory lock of a transaction, on a connection of its own.

Of a transaction, not of a session, so that it holds behind a pooler too. It ends with the connection, and that with the
process, however it ends. The lock is the table's, by its number in the database, however the table is named.
"""

from __future__ import annotations

from typing import Final

import psycopg

from links.errors import ConnectionBroken
from links.sql.postgres.pin import Connect
from links.sql.postgres.trio_connection import TrioConnection
from links.sql.table import split

__all__ = ["PostgresTurn"]

_BEGIN: Final = b"BEGIN; SET LOCAL idle_in_transaction_session_timeout = 0"
_BEGIN_17: Final = _BEGIN + b"; SET LOCAL transaction_timeout = 0"
_WITH_BOTH: Final = 170000
_LOCK: Final = (
    b"SELECT pg_try_advisory_xact_lock(hashtextextended("
    b"'trio-settlement outbox ' || coalesce(to_regclass(%(name)s)::oid::text, %(name)s), 0))"
)


class PostgresTurn:
    """As `Turn`: for this table."""

    def __init__(self, connect: Connect, table: str) -> None:
        self._connect = connect
        self._name = ".".join('"' + part.replace('"', '""') + '"' for part in split(table))
        self._connection: TrioConnection | None = None

    async def tried(self) -> bool:
        """As `Turn.tried`."""
        try:
            if self._connection is None:
                self._connection = await self._connect()
                both = self._connection.info.server_version >= _WITH_BOTH
                await self._connection.execute(_BEGIN_17 if both else _BEGIN, prepare=False)
            cursor = await self._connection.execute(_LOCK, {"name": self._name}, prepare=False)
            found = await cursor.fetchone()
        except psycopg.Error as error:
            self.leave()
            raise ConnectionBroken(str(error).partition("\n")[0]) from error
        return found is not None and bool(found[0])

    async def holds(self) -> bool:
        """As `Turn.holds`."""
        if self._connection is None:
            return False
        try:
            await self._connection.execute(b"SELECT 1", prepare=False)
        except psycopg.Error:
            self.leave()
            return False
        return True

    def leave(self) -> None:
        """As `Turn.leave`."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.finish()
