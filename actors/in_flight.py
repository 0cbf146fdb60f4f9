"""What one life of a link has in flight: each delivery that was received and has not ended, and the places for them.

Owns `open`, the places and the reserved room among the copies. Told by plain calls, in the tick in which something
became true; whoever learns that a verb was said (and proved, where the link proves) removes the delivery here. What is
still open when the life ends is booked by `close`, so that no delivery is without a line. Nothing here waits but
`place`, `hold` and `reserve`; cancelled there, nothing was taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import trio

from actors.books import Books
from actors.messages import Owed
from actors.owed_copies import OwedCopies
from links.abc import Received, Settlement
from settlement.ledger import Line

__all__ = ["Holder", "InFlight"]

_GONE: Any = object()


class Holder(Protocol):
    """Who works on a delivery: a worker, or a before-step task."""

    def cancel(self, received: Received[Any]) -> bool:
        """Stop the work on this one; False: its verb is ordered already."""
        ...


class InFlight:
    """The deliveries of one life. `rest`: the line of what nothing is said for."""

    def __init__(self, limit: int, books: Books, copies: OwedCopies, rest: Line, held: int | None = None) -> None:
        self.limit = limit
        self.taken = 0
        self.open: dict[Received[Any], Holder | Settlement | None] = {}
        """Where each one is: None waits for a handler, a holder works on it, a settlement is with the link."""
        self.rest = rest
        self.proves = False
        """As `Link.proves`."""
        self.forget: Callable[[Received[Any]], None]
        """As `Link.forget`."""
        self._books = books
        self._copies = copies
        self._reserved: set[Received[Any]] = set()
        self._room_to_hold = None if held is None else trio.Semaphore(held)
        self._held: set[Received[Any]] = set()
        self._parked: trio.Event | None = None
        self._awaited: dict[Received[Any], trio.Event] = {}

    # --- places

    def take(self, batch: Sequence[Received[Any]]) -> None:
        """The link handed these over."""
        self.taken += len(batch)
        self.open.update(dict.fromkeys(batch))
        self._books.took(batch)

    async def place(self) -> int:
        """Wait until there is a free place; how many there are. Cancellation: nothing was done."""
        while self.taken >= self.limit:
            self._parked = trio.Event()
            await self._parked.wait()
        return self.limit - self.taken

    def free(self, batch: Sequence[Received[Any]]) -> None:
        """Nobody here works on these any more: their places return. Called once for each delivery."""
        self.taken -= len(batch)
        if self._parked is not None:
            self._parked.set()
            self._parked = None
        if self._awaited:
            for received in batch:
                self.free_slot(received)

    def free_slot(self, received: Received[Any]) -> None:
        """The worker that waits for this one may go on, whether or not its place returns."""
        if (event := self._awaited.pop(received, None)) is not None:
            event.set()

    def slot(self, received: Received[Any]) -> trio.Event:
        """Set by `free` or `free_slot`, which is still to come."""
        event = self._awaited[received] = trio.Event()
        return event

    # --- ends

    def ended(self, line: Line, batch: Sequence[Received[Any]]) -> None:
        """These have ended in `line`."""
        for received in batch:
            del self.open[received]
        self._books.ended(line, batch)

    def proved(self, line: Line, batch: Sequence[Received[Any]]) -> None:
        """These have ended in `line`, but for those that the other side took back before it saw what was said."""
        take = self.open.pop
        self._books.ended(line, [received for received in batch if take(received, _GONE) is not _GONE])

    def leave(self, received: Received[Any], line: Line | None = None) -> None:
        """Nothing is said for this one (it ends in `line`, else in `rest`), and nobody here works on it any more."""
        if received in self.open:
            self._unsaid(self.rest if line is None else line, received)
        self.release(received)
        self.end_hold(received)
        self.free([received])

    def lose(self, line: Line, received: Received[Any]) -> bool:
        """Somebody learned that it is no longer ours. Who works on it is stopped, and frees the place.

        False where nothing changes: it has ended already, or its settlement is on the wire and the verdict decides.
        """
        if received not in self.open:
            return False
        holder = self.open[received]
        if isinstance(holder, Settlement):
            if self.proves:  # said, not proved: the other side took it back before it saw that
                self.ended(line, [received])
            return self.proves
        self._unsaid(line, received)
        if holder is not None:
            holder.cancel(received)
        return True

    def lapse(self, received: Received[Any]) -> bool:
        """The lease of one that is open is at its end by our clock: the work on it is stopped, and it is superseded.

        False where its verb is ordered already: it is said all the same, and the token judges.
        """
        holder = self.open[received]
        if holder is not None and (isinstance(holder, Settlement) or not holder.cancel(received)):
            return False
        self._unsaid(Line.SUPERSEDED, received)
        return True

    def _unsaid(self, line: Line, received: Received[Any]) -> None:
        self.ended(line, [received])
        self.forget(received)

    # --- those that wait before their verb

    async def hold(self, received: Received[Any]) -> None:
        """Wait for room among the held, where it is bounded. Cancellation: no room was taken."""
        if self._room_to_hold is not None:
            await self._room_to_hold.acquire()
            self._held.add(received)

    def end_hold(self, received: Received[Any]) -> None:
        """Its wait is over: give the room back, if there is one for this delivery."""
        if received in self._held and self._room_to_hold is not None:
            self._held.remove(received)
            self._room_to_hold.release()

    # --- copies

    async def reserve(self, received: Received[Any]) -> None:
        """Wait for room among the copies. Cancellation: no room was taken."""
        await self._copies.reserve()
        self._reserved.add(received)

    def release(self, received: Received[Any]) -> None:
        """Give the room back, if there is one for this delivery: no copy is owed."""
        if received in self._reserved:
            self._reserved.remove(received)
            self._copies.release()

    def owe(self, settlement: Settlement) -> None:
        """The verb was said, or may have been: hand the copy over into the room that was taken for it."""
        self._reserved.remove(settlement.received)
        self._copies.owe(Owed(settlement.received.delivery, settlement.plan.after))

    def close(self) -> None:
        """The life is over: book what is open. What was with the link is unknown, and its copy goes out."""
        with_link = [settlement for settlement in self.open.values() if isinstance(settlement, Settlement)]
        for settlement in with_link:
            if settlement.plan.after and settlement.received in self._reserved:
                # else it was said, and its copy is owed already
                self.owe(settlement)
        for received in list(self._reserved):
            self.release(received)
        self.ended(Line.UNKNOWN, [settlement.received for settlement in with_link])
        self.ended(self.rest, list(self.open))
