"""A handler's writes, in a transaction that ends with its row: they commit with its `Ack`, and with nothing else."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Protocol, runtime_checkable

from settlement.delivery import Delivery

__all__ = ["Lends", "transaction"]


@runtime_checkable
class Lends(Protocol):
    """The handle of a delivery that has a transaction."""

    async def lend(self, delivery: Delivery[Any]) -> Any:
        """The connection, for its handler. Raises `TransactionHeld`; `ValueError`, `CallBroken` where there is none.

        Cancellation: nothing is lent.
        """
        ...

    def take_back(self) -> None:
        """It is lent no more; a plain call, and nothing where it was not."""
        ...


@asynccontextmanager
async def transaction(delivery: Delivery[Any]) -> AsyncGenerator[Any, None]:
    """Lend the connection of this delivery's transaction to its handler, for the block.

        async def ship(delivery: Delivery[bytes]) -> Outcome:
            async with links.sql.transaction(delivery) as connection:
                await connection.execute("INSERT INTO shipments (body) VALUES (%s)", [delivery.body])
            return Ack()

    What is written there is committed by the handler's `Ack`, in one transaction with the row's own end; by any other
    outcome, a failure or a cancellation it is undone. Everything behind the block raises `TransactionHeld`.

    PostgreSQL: a `psycopg.AsyncConnection`; savepoints are `connection.transaction()`. Neither commit nor rollback nor
    close works on it (`TransactionHeld`); a handler that ends the transaction by SQL is found out when its outcome is
    said: *unknown*, `TransactionEnded`. Under a row lock it is the transaction that holds the row. Beside a lease it is
    one of its own, on a connection of its own, from the first block on; the lease goes on being renewed.

    MySQL and MariaDB: a connection with one method, `await execute(sql, parameters)`, which gives a list of rows; else
    as on PostgreSQL. DDL ends the transaction, and is found out so. A deadlock undoes all of it; the row comes back.

    SQLite: a connection with one method, `await execute(sql, parameters)`, which gives a list of rows. The whole file
    is locked from the first block until the outcome was said, so it takes concurrency 1.

    Raises `ValueError` for a delivery of another transport, and on SQLite where more than one may be in hand;
    `TransactionHeld` outside the handler, and where it is lent already; `CallBroken` where the server gives no
    connection for it, or others keep the file locked for 10 s.

    Cancellation: what was written is undone with the delivery.
    """
    handle = delivery._handle  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] -- the transport's own handle
    if not isinstance(handle, Lends):
        raise ValueError(f"delivery {delivery.id} of {delivery.source!r} has no transaction: it is no row of a table")
    connection = await handle.lend(delivery)
    try:
        yield connection
    finally:
        handle.take_back()
