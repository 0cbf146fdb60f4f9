"""A connection as it is lent to a handler: it executes statements, and that is all."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pymysql
import trio

from links.errors import TransactionHeld
from links.sql.mysql.codes import is_undone
from links.sql.mysql.session import MysqlSession
from links.sql.mysql.trio_session import TrioSession

__all__ = ["HANDLING", "LentConnection", "lending"]

HANDLING: Final = "handling"
"""The savepoint behind which a handler writes."""

_ENDS: Final = re.compile(
    r"(?:\s|/\*.*?\*/|--\s[^\n]*\n|\#[^\n]*\n)*"
    r"(?:COMMIT\b|ROLLBACK\b(?!\s+(?:WORK\s+)?TO\b)|BEGIN\b|START\s+TRANSACTION\b|SET\s+.*\bautocommit\b|XA\b)",
    re.IGNORECASE | re.DOTALL,
)
"""What ends a transaction by its name; what does so besides, such as DDL, is found out by the settlement."""


def lending(session: MysqlSession) -> list[str]:
    """What is said before a handler has the session: its settings are the user's own, and a transaction is always open.

    Without autocommit, what it writes behind a deadlock, by which the server rolls all back, is not committed at once.
    """
    return [f"SET SESSION {session.server.theirs}, autocommit = 0", f"SAVEPOINT {HANDLING}"]


class LentConnection:
    """Statements run in the transaction that holds the row, in a thread, one after the other.

    Its session has the settings of the user's own connections (time zone, SQL mode, lock wait), but READ COMMITTED, or
    the isolation that `RowLock(isolation)` names.
    """

    def __init__(self, connection: TrioSession, before: LentConnection | None = None) -> None:
        """`before`: as what it was lent in the same transaction; None: this is the first time."""
        self._connection = connection
        self._over = False
        self._lock = trio.Lock()
        self.undone: bool = before is not None and before.undone
        """The server has rolled the transaction back."""

    def end(self) -> None:
        """It is lent no more; a plain call."""
        self._over = True

    async def execute(
        self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = ()
    ) -> list[tuple[Any, ...]]:
        """Carry out one statement; all its rows, of PyMySQL's values. Parameters stand as `%s` or `%(name)s` in it.

        A statement that fails has changed nothing, and the transaction goes on; but a deadlock (1213) rolls all of it
        back. Raises `pymysql.MySQLError`; `TransactionHeld` when it is lent no more, and for what ends a transaction by
        its name. DDL commits, and is found out when the delivery is settled: `TransactionEnded`, and the outcome is
        unknown.

        Cancellation: the statement is killed on the server, and the connection is closed; with it the claim has ended.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._over:
            raise TransactionHeld("this connection was lent for the time of a handler, and that is over")
        if _ENDS.match(statement):
            raise TransactionHeld("this connection is lent: the handler's outcome ends its transaction")
        if self.undone:
            raise pymysql.OperationalError(1213, "the server has rolled the transaction back; there is none any more")
        async with self._lock:
            try:
                return await self._connection.run(lambda session: session.execute(statement, parameters))
            except pymysql.MySQLError as error:
                self.undone = self.undone or is_undone(error)
                raise
