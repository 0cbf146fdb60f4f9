"""The two moments of a graceful stop that every actor may look at: it was asked for, and its grace is over.

Drain has no other signal than these and the closing of channels: to finish, work flows out downstream.
"""
# DESIGN 0.4

from __future__ import annotations

import trio

from settlement.outcomes import seconds

__all__ = ["HURRY", "Drain"]

HURRY = 0.5
"""Seconds between two tries, at most, when the end is near."""


class Drain:
    """Owned by the runtime; everybody else reads."""

    def __init__(self, grace: float, goodbye: float) -> None:
        self.grace = seconds("grace", grace)
        self.goodbye = seconds("goodbye", goodbye, zero=False)
        self.exit = self.goodbye / 3
        """For a call under way, for the way out of its link, and for that of the connection: together one goodbye."""
        self.requested = trio.Event()
        self.grace_over = trio.Event()

    async def unless_requested(self, delay: float) -> bool:
        """Sleep; False when a drain came first. Cancellation: nothing was done."""
        with trio.move_on_after(delay):
            await self.requested.wait()
        return not self.requested.is_set()

    async def unless_grace_over(self, delay: float) -> bool:
        """Sleep; False when the grace ended first. Cancellation: nothing was done."""
        with trio.move_on_after(delay):
            await self.grace_over.wait()
        return not self.grace_over.is_set()
