"""Keeps the leases of one life: renews them when their source says so, and stops the work on what it could not renew.

Owns nothing: which deliveries are held stands in `InFlight.open`, when their leases end in `Received.expires`. Hears
`expired`, a plain call. Tells `InFlight` what is superseded, and stops who works on it before somebody else can start:
at the lease's end minus a margin. Cancelled in `extend`, the old expiry holds.

A verb that was ordered is said all the same, also after the lease's end by our clock: the token judges, since a lease
that nobody took is still ours. And where the loop was blocked, so that no renewal could be made in time, the link is
asked before anything is called lost: else the delivery of a handler that blocks would come back for ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import trio

from actors.events import log
from actors.in_flight import InFlight
from links.abc import Link, Received, Settlement
from links.errors import CallBroken
from settlement.ledger import Line

__all__ = ["LeaseKeeper", "margin"]


def margin(lease: float) -> float:
    """How long before its end a lease counts as lost: 10 %, at least 0.5 s, at most half of it."""
    # DESIGN 3.4
    return min(max(lease / 10, 0.5), lease / 2)


class LeaseKeeper:
    """One per life whose deliveries have a lease. `renewal()`: seconds until the next renewal of all of them."""

    def __init__(self, subscription: str, lease: float, renewal: Callable[[], float], in_flight: InFlight) -> None:
        self._subscription = subscription
        self._margin = margin(lease)
        self._renewal = renewal
        self._in_flight = in_flight
        self._now = trio.lowlevel.current_clock().current_time
        """As `trio.current_time`, at half its price: `expired` is asked for each delivery."""

    def expired(self, received: Received[Any]) -> bool:
        """Is the lease at its end, as far as this clock knows?"""
        return received.expires is not None and self._now() >= received.expires - self._margin

    async def run(self, link: Link[Any]) -> None:
        """Renew until cancelled. Raises what ends the life."""
        while True:
            due = trio.current_time() + self._renewal()
            late = False
            while not late and trio.current_time() < due:
                wake = min(due, self._earliest() - self._margin)
                await trio.sleep_until(wake)
                late = trio.current_time() - wake > self._margin / 2  # somebody has blocked the loop
                if not late:
                    self._sweep()
            await self._renew(link, late=late)
            self._sweep()

    async def _renew(self, link: Link[Any], *, late: bool) -> None:
        held = self._held()
        if not held:
            return
        deadline = self._earliest() - self._margin
        if late or deadline == math.inf:  # all are at their end: what is ordered, or waits to be said again
            deadline = trio.current_time() + self._margin
        with trio.move_on_at(deadline):
            try:
                lost = await link.extend(held)
            except CallBroken as error:
                log.warning("%s: leases were not extended: %s", self._subscription, error)
            else:
                for received in lost:
                    if self._in_flight.lose(Line.SUPERSEDED, received):
                        self._log(received)

    def _held(self) -> list[Received[Any]]:
        """What may be renewed. A settlement that is with the link may not: its verdict decides."""
        # DESIGN 3.4
        return [
            received
            for received, at in self._in_flight.open.items()
            if received.expires is not None and not isinstance(at, Settlement)
        ]

    def _earliest(self) -> float:
        """When the next lease comes to its end."""
        return min((_expiry(received) for received in self._held() if not self.expired(received)), default=math.inf)

    def _sweep(self) -> None:
        """Stop the work on what has come to its end."""
        for received in filter(self.expired, self._held()):
            if self._in_flight.lapse(received):
                self._log(received)

    def _log(self, received: Received[Any]) -> None:
        log.warning("%s: the lease of delivery %s was lost", self._subscription, received.delivery.id)


def _expiry(received: Received[Any]) -> float:
    return math.inf if received.expires is None else received.expires
