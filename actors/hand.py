"""What one life of a link has in hand: each delivery that was received and has not ended, and the places for them.

Owns `open`, the places and the reserved room among the copies. Told by plain calls, in the tick in which something
became true; whoever learns that a verb was said (and proved, where the link proves) removes the delivery here. What is
still open when the life ends is booked by `close`, so that no delivery is without a line. Nothing here waits but
`place` and `reserve`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import trio

from actors.messages import Owed
from links.abc import Order, Received
from settlement.ledger import Line

if TYPE_CHECKING:
    from actors.books import Books
    from actors.delay_timer import OwedCopies
    from actors.lease_keeper import LeaseKeeper

__all__ = ["Hand"]


class Hand:
    """The deliveries of one life."""

    def __init__(self, limit: int, books: Books, copies: OwedCopies, keeper: LeaseKeeper | None, rest: Line) -> None:
        self.limit = limit
        self.taken = 0
        self.open: dict[Received[Any], Order | None] = {}
        """The order where it is with the link, else None."""
        self._books = books
        self._copies = copies
        self._keeper = keeper
        self.rest = rest
        """The line of what nothing is said for."""
        self._reserved: set[Received[Any]] = set()
        self._parked: trio.Event | None = None
        self._awaited: dict[Received[Any], trio.Event] = {}

    def take(self, batch: Sequence[Received[Any]]) -> None:
        """The link handed these over."""
        self.taken += len(batch)
        for received in batch:
            self.open[received] = None
        self._books.took(batch)
        if self._keeper is not None:
            for received in batch:
                self._keeper.watch(received)

    async def place(self) -> int:
        """Wait until there is a free place; how many there are. Cancellation: nothing was done."""
        while self.taken >= self.limit:
            self._parked = trio.Event()
            await self._parked.wait()
        return self.limit - self.taken

    def free(self, received: Received[Any]) -> None:
        """Nobody here works on this delivery any more: its place returns. Called once for each delivery."""
        self.taken -= 1
        if self._parked is not None:
            self._parked.set()
            self._parked = None
        if self._awaited and (event := self._awaited.pop(received, None)) is not None:
            event.set()

    def freeing(self, received: Received[Any]) -> trio.Event:
        """Set by `free(received)`, which is still to come."""
        event = self._awaited[received] = trio.Event()
        return event

    def ended(self, line: Line, batch: Sequence[Received[Any]]) -> None:
        """These have ended in `line`."""
        for received in batch:
            del self.open[received]
            if self._keeper is not None:
                self._keeper.forget(received)
        self._books.ended(line, batch)

    def leave(self, received: Received[Any]) -> None:
        """Nothing is said for this one, and nobody here works on it any more."""
        if received in self.open:
            self.ended(self.rest, [received])
        self.free(received)

    def lose(self, line: Line, received: Received[Any]) -> None:
        """Somebody learned that it is no longer ours; who works on it will notice, and free the place."""
        if received in self.open and self.open[received] is None:
            self.ended(line, [received])

    async def reserve(self, received: Received[Any]) -> None:
        """Wait for room among the copies. Cancellation: no room was taken."""
        await self._copies.reserve()
        self._reserved.add(received)

    def release(self, received: Received[Any]) -> None:
        """Give the room back, if there is one for this delivery: no copy is owed."""
        if received in self._reserved:
            self._reserved.remove(received)
            self._copies.release()

    def owe(self, order: Order) -> None:
        """The verb was said, or may have been: hand the copy over into the room that was taken for it."""
        self._reserved.remove(order.received)
        self._copies.owe(Owed(order.received.delivery, order.plan.after))

    def close(self) -> None:
        """The life is over: book what is open. An order that was with the link is unknown, and its copy goes out."""
        with_link = [order for order in self.open.values() if order is not None]
        for order in with_link:
            if order.plan.after and order.received in self._reserved:  # else it was said, and its copy is owed already
                self.owe(order)
        for received in list(self._reserved):
            self.release(received)
        self.ended(Line.UNKNOWN, [order.received for order in with_link])
        self.ended(self.rest, list(self.open))
