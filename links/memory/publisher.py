"""Publishes to one queue of a `MemoryBroker`."""

from __future__ import annotations

import trio

from links.abc import Publisher
from links.errors import LinkBroken, PublishNotAccepted
from links.memory.store import MemoryStore, StoringBroker
from settlement.delivery import Letter

__all__ = ["MemoryPublisher"]


class MemoryPublisher(Publisher):
    """A publisher to one queue, which is made by the first letter."""

    def __init__(self, broker: StoringBroker, name: str) -> None:
        if not name:
            raise ValueError("a queue's name must be 1 character or more, not an empty one")
        self.broker = self._broker = broker
        self.name = name

    def __repr__(self) -> str:
        return f"<MemoryPublisher to {self.name!r} on {self.broker.name}>"

    async def send(self, letter: Letter) -> None:
        """Store a letter, as `Publisher.send` says.

        Cancellation: nothing was stored (it is stored at the end of the time that this takes).
        """
        await trio.lowlevel.checkpoint()
        await self._broker.until_up()
        store = self._broker.store(self.name)
        if store.weather.slow_publishes:
            await self._on_the_wire(store.weather.slow_publishes)
        self._store(store, letter)

    async def _on_the_wire(self, seconds: float) -> None:
        severed = self._broker.severed
        with trio.move_on_after(seconds):
            await severed.wait()
        if severed.is_set():
            raise LinkBroken(f"{self.name!r} on {self.broker.name}: the connection broke while a message was sent")

    def _store(self, store: MemoryStore, letter: Letter) -> None:
        """There is no checkpoint in here: a message is stored and confirmed, or not."""
        weather = store.weather
        if weather.closed:
            raise PublishNotAccepted(f"{self.name!r} on {self.broker.name} is closed")
        store.add(letter)
        store.wake()
        if weather.lost_confirmations:
            weather.lost_confirmations -= 1
            raise LinkBroken(f"{self.name!r} on {self.broker.name}: the confirmation was lost")
