"""What a session and a link's end have in common: others wait until it changes, or until its life is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import trio

from links.amqp.engine.driver import Driver
from links.errors import LinkError

__all__ = ["Awaited"]


class Awaited:
    """Something whose state changes, and whose life ends with a reason."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.broken: LinkError | None = None
        """Why its life is over."""
        self._changed = trio.lowlevel.ParkingLot()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds; raises what ended this life. Does not yield to others if it holds already."""
        while not condition():
            if self.broken is not None:
                raise self.broken
            await self._changed.park()

    async def until_broken(self) -> NoReturn:
        """Wait until this life is over, and raise what ended it."""
        while self.broken is None:
            await self._changed.park()
        raise self.broken

    def break_(self, error: LinkError) -> None:
        """Its life is over."""
        if self.broken is None:
            self.broken = error
        self._changed.unpark_all()
