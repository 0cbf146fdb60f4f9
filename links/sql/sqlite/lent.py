"""A connection as it is lent to a handler: it executes statements, and that is all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import trio

from links.errors import TransactionHeld

__all__ = ["Execute", "LentConnection"]

Execute: TypeAlias = Callable[[str, Sequence[Any] | Mapping[str, Any]], Awaitable[list[tuple[Any, ...]]]]


class LentConnection:
    """Made by `SqliteLoan`: statements run in the transaction that locks the file, in a thread, one after the other."""

    def __init__(self, execute: Execute) -> None:
        self._execute = execute
        self._over = False

    def end(self) -> None:
        """It is lent no more; a plain call."""
        self._over = True

    async def execute(
        self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = ()
    ) -> list[tuple[Any, ...]]:
        """Carry out one statement; all its rows, of Python's `sqlite3` values (a text that is not UTF-8: bytes).

        A statement that fails has changed nothing; the transaction goes on. Raises `sqlite3.Error`, or `ValueError` for
        a value that cannot be bound; `TransactionHeld` when it is lent no more, and for BEGIN, COMMIT and ROLLBACK.

        Cancellation: the statement is interrupted, and the transaction is of no more use.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._over:
            raise TransactionHeld("this connection was lent for the time of a handler, and that is over")
        return await self._execute(statement, parameters)
