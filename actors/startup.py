"""The start of a runtime: every subscription is tried, none takes a delivery before all are attached (DESIGN 2).

Owns who has reported what. Hears plain calls of the supervised links and connections. Opens the gate, or raises what
was refused, once everybody has attached, been refused, or failed its first attempt.
"""

from __future__ import annotations

from collections.abc import Iterable

import trio

from links.errors import LinkRefused

__all__ = ["StartUp"]


class StartUp:
    """One per runtime."""

    def __init__(self, names: Iterable[str]) -> None:
        self.gate = trio.Event()
        """Set when all are attached: deliveries may be taken, a refusal is weather from now on."""
        self._unheard = set(names)
        self._unattached = set(self._unheard)
        self._refusals: dict[str, LinkRefused] = {}
        self._changed = trio.Event()

    def attached(self, name: str) -> None:
        """A link was attached, or a connection made."""
        self._unattached.discard(name)
        self._heard(name)

    def refused(self, name: str, error: LinkRefused) -> None:
        """They said no."""
        self._refusals.setdefault(name, error)
        self._heard(name)

    def failed(self, name: str) -> None:
        """The first attempt failed, or cannot be made for want of a connection; others follow."""
        self._heard(name)

    def _heard(self, name: str) -> None:
        self._unheard.discard(name)
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
