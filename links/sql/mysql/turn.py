"""Whose turn it is, on MySQL and MariaDB: a named lock (GET_LOCK) of a connection of its own.

It ends with the connection, and that with the process, however it ends. The lock is the table's, in its database.
"""

from __future__ import annotations

from typing import Final

import pymysql

from links.errors import ConnectionBroken
from links.sql.mysql.codes import first_line
from links.sql.mysql.session import MysqlSession, text_of
from links.sql.mysql.trio_session import New, TrioSession
from links.sql.table import split

__all__ = ["MysqlTurn"]

_NAME: Final = "CONCAT('trio-settlement.', LEFT(SHA2(LOWER(CONCAT('outbox ', {database}, '.', {table})), 256), 40))"


class MysqlTurn:
    """As `Turn`: for this table."""

    def __init__(self, new: New, table: str) -> None:
        self._new = new
        *schema, name = split(table)
        self._name = _NAME.format(database=text_of(schema[0]) if schema else "DATABASE()", table=text_of(name))
        self._connection: TrioSession | None = None

    async def tried(self) -> bool:
        """As `Turn.tried`."""
        try:
            if self._connection is None:
                self._connection = TrioSession(self._new)
                await self._connection.open()
            return await self._connection.run(self._try)
        except pymysql.MySQLError as error:
            self.leave()
            raise ConnectionBroken(first_line(error)) from error
        except ConnectionBroken:
            self.leave()
            raise

    def _try(self, session: MysqlSession) -> bool:
        return bool(session.say(f"SELECT GET_LOCK({self._name}, 0)")[0].rows[0][0] == 1)

    async def holds(self) -> bool:
        """As `Turn.holds`."""
        if self._connection is None:
            return False
        try:
            return await self._connection.run(self._hold)
        except pymysql.MySQLError:
            self.leave()
            return False

    def _hold(self, session: MysqlSession) -> bool:
        return bool(session.say(f"SELECT IS_USED_LOCK({self._name}) = CONNECTION_ID()")[0].rows[0][0])

    def leave(self) -> None:
        """As `Turn.leave`."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
