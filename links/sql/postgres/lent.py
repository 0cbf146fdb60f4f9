"""A connection as it is lent to a handler: psycopg's own in all but its end."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

from psycopg.waiting import Ready, Wait

from links.errors import TransactionHeld
from links.sql.postgres.trio_connection import TrioConnection

__all__ = ["LentConnection"]

R = TypeVar("R")


class LentConnection(TrioConnection):
    """The same connection to the server, under an object of its own, so that cursors die with it. Made by `of`."""

    _over = False

    @classmethod
    def of(cls, connection: TrioConnection) -> LentConnection:
        """Lend this one."""
        lent = cls(connection.pgconn)
        lent.lock = connection.lock  # a statement that somebody forgot is waited for by the settlement
        lent._autocommit = True  # psycopg sends no BEGIN: there is a transaction
        lent.prepare_threshold = None  # names of prepared statements would meet those of the other object
        return lent

    def end(self) -> None:
        """It is lent no more; a plain call."""
        self._over = True

    async def wait(self, gen: Generator[Wait, Ready, R], interval: float = 0.0, timeout: float | None = None) -> R:  # noqa: ASYNC109 -- psycopg's signature
        """As `TrioConnection.wait`. Raises `TransactionHeld` when it is lent no more."""
        if self._over:
            gen.close()
            raise TransactionHeld("this connection was lent for the time of a handler, and that is over")
        return await super().wait(gen, interval, timeout)

    async def commit(self) -> None:
        """Raises `TransactionHeld`: the handler's outcome commits."""
        raise TransactionHeld("this connection is lent: the handler's Ack commits, and nothing else")

    async def rollback(self) -> None:
        """Raises `TransactionHeld`: the handler's outcome rolls back."""
        raise TransactionHeld("this connection is lent: any outcome but Ack rolls back, and nothing else")

    async def close(self) -> None:
        """Raises `TransactionHeld`: it is the link's."""
        raise TransactionHeld("this connection is lent: it is closed by the link")

    def __del__(self, *_: Any) -> None:
        """Nothing: psycopg would warn of a connection that was not closed."""
