"""The transactions that a link of the lease form has lent to handlers: whose they are, and how they end.

Owns the loans, one for each delivery in hand at most. Hears handlers, by `Leased`; the link, by plain calls and
`settle`. Tells the link's rows what has ended. A cancellation leaves no transaction behind: one that nobody says a verb
for is given up, and its connection closed. Shielded is the end of those that are settled, for one `goodbye` at most.

A transaction ends as its lease does or not at all: the row is finished in the same transaction by the token that holds
it, so where the token is gone the writes are, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, TypeVar, cast

import trio

from links.abc import Received, Settlement, Verdict
from links.errors import LeaseLost, NotApplied, TransactionHeld
from links.sql.holdings import Holdings
from links.sql.lender import Lender, Loan
from settlement.delivery import Delivery
from settlement.ledger import Line
from settlement.sql import Verb

__all__ = ["Leased", "Loans"]

R = TypeVar("R")

_LATE = "its COMMIT was not reached in time; what the handler wrote is rolled back"


class Leased:
    """One claim of a row, the handle of its delivery: a later claim of the same row is another one."""

    __slots__ = ("_loans", "key")

    def __init__(self, loans: Loans, key: Any) -> None:
        self._loans, self.key = loans, key

    async def lend(self, delivery: Delivery[Any]) -> Any:
        """As `Lends.lend`."""
        return await self._loans.lend(delivery, self)

    def take_back(self) -> None:
        """As `Lends.take_back`."""
        self._loans.take_back(self)


class Loans:
    """One link's. `settling`: what is being settled now. `still`: wait until none of these is being extended."""

    def __init__(
        self,
        lender: Lender,
        rows: Holdings[Any],
        settling: Collection[Received[Any]],
        still: Callable[[Collection[Received[Any]]], Awaitable[None]],
        goodbye: float,
    ) -> None:
        self._lender, self._rows, self._settling, self._still = lender, rows, settling, still
        self._goodbye = goodbye
        self._at: dict[Leased, Loan] = {}
        self._lent: dict[Leased, Loan] = {}
        """Those that a handler has now."""

    def __bool__(self) -> bool:
        return bool(self._at)

    # --- what handlers ask -------------------------------------------------------------------------------------------

    async def lend(self, delivery: Delivery[Any], leased: Leased) -> Any:
        """The connection of this delivery's transaction, for its handler.

        Raises `TransactionHeld` where it is in hand no more, or lent already; else as `Lender.loan` and `Loan.lend`.
        Cancellation: nothing is lent.
        """
        which = f"{delivery.source!r}: delivery {delivery.id}"
        received = self._rows.held.get(leased.key)
        if received is None or _handle(received) is not leased or received in self._settling:
            raise TransactionHeld(f"{which} is in hand no more")
        if leased in self._lent:
            raise TransactionHeld(f"{which}: its connection is lent already")
        if (loan := self._at.get(leased)) is None:
            loan = self._at[leased] = self._lender.loan()
        self._lent[leased] = loan
        try:
            if self._lender.whole:  # an extension that waits for our lock would be waited for by the settlement
                await self._still([received])
            lent = await loan.lend()
            if self._at.get(leased) is not loan:
                raise TransactionHeld(f"{which} is in hand no more")
        except BaseException:
            if self._at.get(leased) is not loan:  # it was settled or forgotten meanwhile
                loan.give_up()
            elif not loan.open:
                del self._at[leased]
            self.take_back(leased)
            raise
        return lent

    def take_back(self, leased: Leased) -> None:
        """It is lent no more; a plain call. Where it was forgotten meanwhile its transaction ends."""
        if (loan := self._lent.pop(leased, None)) is not None:
            loan.take_back()
            if self._at.get(leased) is not loan:
                loan.give_up()

    # --- what the link asks ------------------------------------------------------------------------------------------

    def kept(self, held: list[Received[Any]], expires: float) -> list[Received[Any]]:
        """Those of them whose lease must be written. Beside a transaction that locks all nobody else can claim.

        Such a lease ends at `expires`, without a word to the database.
        """
        if not self._lender.whole:
            return held
        for each in held:
            loan = self._at.get(_handle(each))
            if loan is not None and loan.open:
                each.expires = expires
        return [each for each in held if _handle(each) not in self._at]

    async def settle(
        self, settlements: Sequence[Settlement], say: Callable[[Sequence[Settlement]], Awaitable[Sequence[Verdict]]]
    ) -> Sequence[Verdict]:
        """Finish in its transaction what was acked there; undo the other ones, and `say` their verbs.

        Cancellation: shielded for a goodbye at most; so the verdicts are true.
        """
        ended = await self._end([each for each in settlements if _handle(each.received) in self._at])
        rest = [each for each in settlements if each not in ended]
        said = iter(await say(rest) if rest else ())
        return [ended[each] if each in ended else next(said) for each in settlements]

    async def _end(self, settlements: Sequence[Settlement]) -> dict[Settlement, Verdict]:
        """The verdicts of those of which nothing more is to be said."""
        loans = {each: self._at[_handle(each.received)] for each in settlements}
        acked = {each for each, loan in loans.items() if each.plan.line is Line.ACKED and loan.open}
        done: dict[Settlement, Verdict] = {}

        async def end(each: Settlement, loan: Loan) -> None:
            done[each] = await (
                loan.finish(each.received.token, cast("Verb", each.plan.verb)) if each in acked else loan.undo()
            )

        for each in settlements:
            self.take_back(_handle(each.received))
        with trio.move_on_after(self._goodbye, shield=True):
            async with trio.open_nursery() as nursery:
                for each, loan in loans.items():
                    nursery.start_soon(end, each, loan)
        for each, loan in loans.items():
            if each not in done:
                done[each] = loan.give_up() or (LeaseLost(_LATE) if each in acked else None)
            if not isinstance(done[each], NotApplied):
                del self._at[_handle(each.received)]
                self._left(each.received, done[each], gone=each in acked)
        return {each: verdict for each, verdict in done.items() if each in acked or verdict is not None}

    def _left(self, received: Received[Any], verdict: Verdict, *, gone: bool) -> None:
        if verdict is not None:  # the lease may be ours still: it ends by itself, or with the goodbye
            self._rows.leave([received])
        elif gone:
            self._rows.drop(received)

    def forget(self, *gone: Received[Any]) -> None:
        """Nothing is said in the transactions of these: each ends, when its handler has given it back."""
        for leased in map(_handle, gone if self._at else ()):
            if (loan := self._at.pop(leased, None)) is not None and leased not in self._lent:
                loan.give_up()

    def close(self) -> None:
        """Nobody works on any of them any more."""
        for loan in {*self._at.values(), *self._lent.values()}:
            loan.take_back()
            loan.give_up()
        self._at.clear()
        self._lent.clear()
        self._lender.close()


def _handle(received: Received[Any]) -> Any:
    return received.delivery._handle  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] -- the transport's own handle
