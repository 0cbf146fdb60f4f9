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
    """Lend the connection of this delivery's transaction to its handler, for the block: a `psycopg.AsyncConnection`.

        async def ship(delivery: Delivery[bytes]) -> Outcome:
            async with links.sql.transaction(delivery) as connection:
                await connection.execute("INSERT INTO shipments (body) VALUES (%s)", [delivery.body])
            return Ack()

    What is written there is committed by the handler's `Ack`, in one transaction with the row's own end; by any other
    outcome, a failure or a cancellation it is undone. Savepoints are `connection.transaction()`. Neither commit nor
    rollback nor close works on it: they raise `TransactionHeld`, and so does everything behind the block. A handler
    that ends the transaction by SQL is found out when its outcome is said: *unknown*, `TransactionEnded`.

    Under a row lock it is the transaction that holds the row. Beside a lease it is one of its own, on a connection of
    its own, which begins with the first block; the lease goes on being renewed.

    Raises `ValueError` for a delivery of another transport; `TransactionHeld` outside the handler, and where it is lent
    already; `CallBroken` where the server gives no connection for it.

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
