"""The letters for one address, of all publishers to it, in the order in which they were asked for.

Outlives the lives of the connection: what waits for one, for the attach or for credit keeps its place over a reconnect.
Owns no task: whoever is first attaches, waits for credit, and then sends for all who stand behind, so that a thousand
tasks cost one hand-over for each credit and not for each letter. Cancelled, a letter leaves the queue and was not sent;
the next one is first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import trio

from links.abc import Broker, Presence
from links.amqp.addresses import Address
from links.amqp.connection_life import ConnectionLife
from links.amqp.engine.sender import Sender, Sent
from links.errors import ConnectionBroken, LinkError

__all__ = ["Letters"]


class _Letter:
    """One that waits."""

    __slots__ = ("error", "lot", "raw", "sent")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.lot = trio.lowlevel.ParkingLot()
        self.sent: Sent | None = None
        self.error: LinkError | None = None


class Letters:
    """The queue."""

    def __init__(self, broker: Broker, life: Callable[[], ConnectionLife], address: Address) -> None:
        self._broker = broker
        self._life = life
        self._address = address
        self._waiting: OrderedDict[_Letter, None] = OrderedDict()  # whose first one is found at once

    async def send(self, raw: bytes) -> Sent:
        """Send in this life of the connection, or the next one, behind those that were asked for before.

        Whatever it raises, nothing was sent: `LinkRefused`, `LinkBroken`, `NotConnected`. Cancellation: the same.
        """
        if not self._waiting and self._broker.presence is Presence.UP:
            self._broker.check_home()
            await trio.lowlevel.checkpoint_if_cancelled()
            sender = self._life().sender_now(self._address)
            if sender is not None and not self._waiting and (sent := sender.send_nowait(raw)) is not None:
                return sent
        letter = _Letter(raw)
        self._waiting[letter] = None
        try:
            while letter.sent is None and letter.error is None:
                if next(iter(self._waiting)) is letter:
                    await self._carry(letter)
                else:
                    await letter.lot.park()
        finally:
            self._waiting.pop(letter, None)
            for following in self._waiting:
                following.lot.unpark()
                break
        if letter.error is not None:
            raise letter.error
        assert letter.sent is not None  # noqa: S101 -- the loop
        return letter.sent

    async def _carry(self, first: _Letter) -> None:
        """Send the first letter, and all for which there is credit then. Raises what keeps the first one."""
        after = 0
        while True:
            await self._broker.until_up(after)
            life = self._life()
            try:
                sender = await life.sender(self._address)
                await sender.until_credit()
            except ConnectionBroken:
                after = life.number
                await trio.lowlevel.checkpoint()
                continue
            self._pour(sender, first)
            return

    def _pour(self, sender: Sender, first: _Letter) -> None:
        """Send while there is credit. Those behind the first are not woken before the outcome of theirs is known."""
        while self._waiting:
            letter = next(iter(self._waiting))
            if letter is first or letter.lot:  # else it was cancelled in this tick: nothing is sent
                try:
                    letter.sent = sender.send_nowait(letter.raw)
                except LinkError as error:  # this one alone is none to be sent
                    letter.error = error
                    letter.lot.unpark()
                else:
                    if letter.sent is None:
                        return
                    letter.sent.wakes(letter.lot)
            del self._waiting[letter]
