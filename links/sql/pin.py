"""What a dialect must provide for the forms that hold a connection for each claim in hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs

from links.abc import Verdict
from links.sql.dialect import Writer
from links.sql.jobs import Form, Passing
from links.sql.rows import Row
from settlement.sql import Verb

__all__ = ["Pin", "PinForm", "Settled"]


@attrs.frozen
class Settled:
    """What became of verbs that were said on a connection.

    Attributes:
        verdicts: One for each.
        lost: The rows that stayed in the claim, and are held no more.
        claimed: The rows of the next claim; None: nothing was looked for.
        crossed: Other transactions only got into the way, so the rows may soon be claimed again.
    """

    verdicts: Sequence[Verdict]
    lost: Sequence[Row] = ()
    claimed: Sequence[Row] | None = None
    crossed: bool = False


class Pin(Protocol):
    """One connection, for one claim at a time: it holds what it has claimed until it is settled, let go, or lost.

    One task at a time uses it, but for `close`. Cancellation, anywhere: the connection is closed, and with it the claim
    ended; whether a verb was carried out is not known, but where it is `committed`.
    """

    @property
    def committed(self) -> bool:
        """Was what `settle` was called for last carried out, as far as was heard? Asked after a cancellation."""
        ...

    async def claim(self, passing: Passing, room: int) -> Sequence[Row]:
        """Claim the first rows of the queue that can be had, up to `room`, but for those that are passed over.

        Raises `ConnectionBroken` where there is no connection, `LinkRefused` where the table is no queue any more,
        `CallBroken` where the statement failed.
        """
        ...

    async def settle(
        self, said: Sequence[tuple[Row, Verb]], rest: Sequence[Row], *, keep: bool, then: Passing | None
    ) -> Settled:
        """Carry out these verbs by one commit; what was *not applied*, and the rest of the claim, is held as before.

        `keep`: what a handler has written on the connection stands; else it is undone first. `then`: where nothing is
        held any more, claim up to as many rows as the claim before might have, but for those; or look for none.
        """
        ...

    async def lend(self) -> Any:
        """The connection as a handler may have it, within the claim: it ends no transaction.

        Raises `ValueError` where this link may have none, `CallBroken` where there is none to be had.
        """
        ...

    def take_back(self) -> None:
        """What was lent is of no more use; a plain call."""
        ...

    async def undo(self) -> None:
        """Undo what a handler has written on the connection. The claim lives on, if it has not ended it."""
        ...

    async def let_go(self, rows: Sequence[tuple[Row, bool]], *, whole: bool) -> None:
        """Let these go, each with whether a handler began with it: if not, it is as it was before the claim.

        `whole`: they are all that is held, and the claim ends.
        """
        ...

    async def until_lost(self) -> str:
        """Wait until the connection has ended, and the claim with it; gives why. Cancellation: it is as it was."""
        ...

    def close(self) -> None:
        """Close the connection; a claim that it holds has ended."""
        ...


class PinForm(Form, Protocol):
    """A queue of which each claim that is in hand has a connection of its own."""

    def pin(self, writer: Writer, limit: int) -> Pin:
        """A new one, not connected yet; `writer`: for jobs, where it has no connection of its own.

        `limit`: how many rows the link may have in hand, by all of its claims.
        """
        ...
