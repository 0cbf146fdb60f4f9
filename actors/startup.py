"""The start of a runtime: every subscription is tried, none takes a delivery before all are attached.

Owns who has reported what. Hears plain calls of the supervised links and connections. Tells them by the gate, or the
runtime by raising what was refused, once everybody has attached, been refused, or failed its first attempt. Cancelled,
the gate stays shut.
"""
# DESIGN 2

from __future__ import annotations

from collections.abc import Hashable, Iterable

import trio

from links.errors import LinkRefused

__all__ = ["StartUp"]


class StartUp:
    """One per runtime. Who is tried: a subscription by its name, a broker by itself (their names may be the same)."""

    def __init__(self, tried: Iterable[Hashable]) -> None:
        self.gate = trio.Event()
        """Set when all are attached: deliveries may be taken, a refusal is weather from now on."""
        self._tried = frozenset(tried)
        self._unheard = set(self._tried)
        self._unattached = set(self._tried)
        self._refusals: dict[Hashable, LinkRefused] = {}
        self._changed = trio.Event()

    def tries(self, who: Hashable) -> bool:
        """Is this one tried here? A broker that somebody else keeps open is not."""
        return who in self._tried

    def attached(self, who: Hashable) -> None:
        """A link was attached, or a connection made."""
        self._unattached.discard(who)
        self._heard(who)

    def refused(self, who: Hashable, error: LinkRefused) -> None:
        """They said no."""
        self._refusals.setdefault(who, error)
        self._heard(who)

    def failed(self, who: Hashable) -> None:
        """The first attempt failed, or cannot be made for want of a connection; others follow."""
        self._heard(who)

    def _heard(self, who: Hashable) -> None:
        self._unheard.discard(who)
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def complete(self) -> None:
        """Wait until all are attached, then open the gate. Raises the refusal, or a group of them.

        Cancellation: the gate stays shut.
        """
        while self._unheard or (self._unattached and not self._refusals):
            await self._changed.wait()
        refusals = list(self._refusals.values())
        if len(refusals) == 1:
            raise refusals[0]
        if refusals:
            raise ExceptionGroup(f"{len(refusals)} refusals at start-up", refusals)
        self.gate.set()
