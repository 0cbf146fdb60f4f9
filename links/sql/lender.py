"""What a dialect of the lease form must provide, so that what a handler writes ends with its row."""

from __future__ import annotations

from typing import Any, Protocol

from links.abc import Verdict
from links.sql.rows import Token
from settlement.sql import Verb

__all__ = ["Lender", "Loan"]


class Loan(Protocol):
    """One transaction, for one delivery, beside its lease. One task at a time uses it, but for the plain calls."""

    @property
    def open(self) -> bool:
        """Is there a transaction that has not ended?"""
        ...

    async def lend(self) -> Any:
        """The connection as a handler may have it; the first call begins the transaction.

        Raises `CallBroken` where there is none to be had. Cancellation: what had begun before is as it was.
        """
        ...

    def take_back(self) -> None:
        """What was lent is of no more use; a plain call."""
        ...

    async def finish(self, token: Token, verb: Verb) -> Verdict:
        """Carry out an ack's verb on the row that this token holds, and commit it and the handler's writes together.

        *Not applied*: the transaction stands as before, and this may be called again. Else it has ended. Cancellation:
        `give_up` tells.
        """
        ...

    async def undo(self) -> Verdict:
        """Roll back; a verdict where the handler had ended the transaction. Cancellation: `give_up` tells."""
        ...

    def give_up(self) -> Verdict:
        """End it at once, a plain call: unknown where its COMMIT was under way, else nothing of it stands."""
        ...


class Lender(Protocol):
    """The connections of one link's transactions.

    Attributes:
        whole: A transaction locks the whole database: no lease can be written beside it, by us or by anybody else.
    """

    whole: bool

    def loan(self) -> Loan:
        """A new one, not begun yet. Raises `ValueError` where this link may have none."""
        ...

    def close(self) -> None:
        """Close the connections that nobody uses, and each other one when it is given up; a plain call."""
        ...
