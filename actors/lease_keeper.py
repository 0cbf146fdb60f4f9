"""Keeps the leases of one life: renews them at a third of their length, and takes back what it could not renew.

Owns which deliveries are held under a lease, and the cancel scope of each that is being worked on. Hears `watch`,
`attend`, `forget`, `expired`, all plain synchronous calls. Tells the hand what is superseded, and cancels its scope
before somebody else can start: at the lease's end minus a margin. Cancelled in `extend`, the old expiry holds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import trio

from actors.events import log
from links.abc import Link, Received
from links.errors import CallBroken
from settlement.ledger import Line

if TYPE_CHECKING:
    from actors.hand import Hand

__all__ = ["LeaseKeeper", "margin"]


def margin(lease: float) -> float:
    """How long before its end a lease counts as lost: 10 %, at least 0.5 s, at most half of it (DESIGN 3.4)."""
    return min(max(lease / 10, 0.5), lease / 2)


class LeaseKeeper:
    """One per life whose deliveries have a lease or a connection of their own."""

    def __init__(self, subscription: str, lease: float | None) -> None:
        self.hand: Hand
        self._subscription = subscription
        self._lease = lease
        self._margin = 0.0 if lease is None else margin(lease)
        self._held: dict[Received[Any], trio.CancelScope | None] = {}
        self._parked: trio.Event | None = None

    def watch(self, received: Received[Any]) -> None:
        """Hold this lease from now on; from receipt, also while it waits for a handler."""
        self._held[received] = None
        if self._parked is not None:
            self._parked.set()
            self._parked = None

    def attend(self, received: Received[Any], scope: trio.CancelScope) -> None:
        """Cancel this scope when the lease is lost; a scope that was not entered yet keeps the cancel."""
        if received in self._held:
            self._held[received] = scope
        else:
            scope.cancel()

    def forget(self, received: Received[Any]) -> None:
        """It has ended."""
        self._held.pop(received, None)

    def expired(self, received: Received[Any]) -> bool:
        """Is the lease lost, or as good as lost? Then it is booked superseded, now."""
        if received not in self._held:
            return True
        if received.expires is not None and trio.current_time() >= received.expires - self._margin:
            self._supersede(received)
            return True
        return False

    def lost(self, received: Received[Any], line: Line) -> None:
        """The link says that this delivery is no longer ours: it ends in `line`, and its scope is cancelled."""
        self._drop(received, line)

    async def run(self, link: Link[Any]) -> None:
        """Renew until cancelled. Raises what ends the life."""
        if self._lease is None:
            return
        third = self._lease / 3
        due = trio.current_time() + third  # deliveries may be here before this task has its first turn
        while True:
            if not self._held:
                self._parked = trio.Event()
                await self._parked.wait()
                due = trio.current_time() + third
            await trio.sleep_until(min(due, self._earliest() - self._margin))
            self._sweep()
            if trio.current_time() >= due:
                due = trio.current_time() + third
                await self._renew(link)

    async def _renew(self, link: Link[Any]) -> None:
        # an order that is with the link is settled now: its verdict decides, and no extension runs beside it
        held = [received for received in self._held if self.hand.open[received] is None]
        if not held:
            return
        with trio.move_on_at(min(_expiry(received) for received in held) - self._margin):
            try:
                lost = await link.extend(held)
            except CallBroken as error:
                log.warning("%s: leases were not extended: %s", self._subscription, error)
            else:
                for received in lost:
                    self._supersede(received)

    def _earliest(self) -> float:
        return min(map(_expiry, self._held), default=math.inf)

    def _sweep(self) -> None:
        now = trio.current_time()
        for received in [received for received in self._held if _expiry(received) - self._margin <= now]:
            self._supersede(received)

    def _supersede(self, received: Received[Any]) -> None:
        if self._drop(received, Line.SUPERSEDED):
            log.warning("%s: the lease of delivery %s was lost", self._subscription, received.delivery.id)

    def _drop(self, received: Received[Any], line: Line) -> bool:
        if received not in self._held:
            return False
        scope = self._held.pop(received)
        if scope is not None:
            scope.cancel()
        self.hand.lose(line, received)
        return True


def _expiry(received: Received[Any]) -> float:
    return math.inf if received.expires is None else received.expires
