"""What a dialect must provide for an outbox: its statements on the record table, and whose turn it is to send again."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, TypeAlias

from links.sql.inserting import Style, Written
from links.sql.jobs import Call
from settlement.delivery import Letter

__all__ = ["Record", "Records", "Turn"]

Record: TypeAlias = tuple[int, str, Any, Any, Any]
"""A record as it is stored: id, name, payload, headers, key."""


class Turn(Protocol):
    """One process at a time; let go of when that ends, however it does."""

    async def tried(self) -> bool:
        """Is it ours now? False: somebody else has it. Raises `LinkRefused`, `ConnectionBroken`.

        Cancellation: ours or not; `leave` lets go of it.
        """
        ...

    async def holds(self) -> bool:
        """Is it ours still? Cancellation: nothing was done."""
        ...

    def leave(self) -> None:
        """Let go of it, also where it is not ours. A plain call."""
        ...


class Records(Protocol):
    """One record table. What is a `Call` is run by a job of the dialect, in a transaction; the rest does no I/O."""

    driver: str
    """The package that a connection to this database comes from."""

    def ddl(self) -> str:
        """A table that fits, as SQL text with its reasons."""
        ...

    def look(self, age: float) -> Call[Any]:
        """May the table be one? Gives the instant `age` seconds ago, by the database's clock. Raises `LinkRefused`."""
        ...

    def add(self, name: str, letter: Letter) -> Call[int]:
        """Write a record; its id. Raises `PublishNotAccepted`."""
        ...

    def is_processed(self, name: str, key: int) -> Call[bool | None]:
        """Was it? None: there is no such record."""
        ...

    def one(self, key: int) -> Call[Record | None]:
        """This record, unless it is processed; None: there is none."""
        ...

    def page(self, names: Sequence[str], until: Any, after: int | None, room: int) -> Call[list[Record]]:
        """Up to `room` records that are not processed, sent until then or at no time, in the order of their ids.

        From the one behind `after` on; None: from the first.
        """
        ...

    def sent(self, keys: Sequence[int]) -> Call[None]:
        """These were sent now."""
        ...

    def mark(self, name: str, key: int) -> Call[None]:
        """It is processed now, or deleted; a record that is there no more is left alone."""
        ...

    def record(self, connection: Any, what: Written) -> int | Awaitable[int]:
        """Write one by a connection of the user's; its id, awaited where the connection is asynchronous."""
        ...

    def record_statement(self, what: Written, style: Style) -> tuple[str, dict[str, Any]]:
        """The statement of that, and its parameters."""
        ...

    def turn(self) -> Turn:
        """To send records again; not ours yet."""
        ...
