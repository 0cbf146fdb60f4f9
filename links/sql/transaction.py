"""A handler's writes, in the transaction that holds its row: they commit with its `Ack`, and with nothing else."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from links.sql.slot import Claimed
from settlement.delivery import Delivery

__all__ = ["transaction"]


@asynccontextmanager
async def transaction(delivery: Delivery[Any]) -> AsyncGenerator[Any, None]:
    """Lend the connection that holds this delivery's row to its handler, for the block: a `psycopg.AsyncConnection`.

        async def ship(delivery: Delivery[bytes]) -> Outcome:
            async with links.sql.transaction(delivery) as connection:
                await connection.execute("INSERT INTO shipments (body) VALUES (%s)", [delivery.body])
            return Ack()

    What is written there is committed by the handler's `Ack`, in one transaction with the row's own end; by any other
    outcome, a failure or a cancellation it is undone. Savepoints are `connection.transaction()`. Neither commit nor
    rollback nor close works on it: they raise `TransactionHeld`, and so does everything behind the block. A handler
    that ends the transaction by SQL is found out when its outcome is said: *unknown*, `TransactionEnded`.

    Raises `ValueError` for a delivery that has no transaction: of another transport, or of a table that is leased;
    `TransactionHeld` outside the handler, and where it is lent already.

    Cancellation: what was written is undone with the delivery.
    """
    claimed = delivery._handle  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] -- the transport's own handle
    if not isinstance(claimed, Claimed):
        raise ValueError(
            f"delivery {delivery.id} of {delivery.source!r} has no transaction to lend: claim its table by RowLock()"
        )
    connection = await claimed.lend(delivery)
    try:
        yield connection
    finally:
        claimed.take_back()
