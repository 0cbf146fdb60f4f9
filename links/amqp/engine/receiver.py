"""A receiver, as a `ClientConnection` offers it: deliveries that come, and what is said of them.

It owns what came and was not taken. It hears the peer by the connection's plain calls; it tells who takes, and
`superseded`, of what the peer itself has said. Cancelled, its order stands; a `receive` has taken nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import trio

from links.amqp.engine.driver import Driver
from links.amqp.engine.events import ACCEPTED, RELEASED, Disposition
from links.amqp.engine.handles import Arrival, LinkHandle
from links.amqp.engine.link_end import LinkEnd
from links.amqp.engine.session import Session
from links.errors import LinkBroken

__all__ = ["Receiver"]


class Receiver(LinkEnd):
    """Takes deliveries from an address."""

    def __init__(self, driver: Driver, session: Session, handle: LinkHandle | None, address: str) -> None:
        super().__init__(driver, session, handle, address)
        self.arrived: deque[Arrival] = deque()
        """What came and was not taken yet; never more than the credit that was granted."""
        self.superseded: Callable[[frozenset[object]], None] = _ignore
        """Told which deliveries, of those that were taken, the peer itself has said something of; as `Arrival.pointer`.
        Who holds one lets `concede` settle it.
        """
        self._window = 1
        self._unwritten = 0
        self._pulls = -1
        self._proved = 0
        self._answers: bool | None = None
        self._taken_back = False

    @property
    def ahead(self) -> int:
        """How many deliveries may still be taken: the credit that is out, and what came and was not taken yet."""
        return len(self.arrived) + (0 if self._handle is None else self.driver.engine.credit(self._handle))

    def grant(self, credit: int) -> None:
        """Give credit, after `attached`: written at once where the peer may run out of it, else within 2 ms."""
        if self._handle is None or self._taken_back or not self.driver.engine.grant(self._handle, credit):
            return
        if self._pulls != self.driver.pulls:
            self._pulls, self._unwritten = self.driver.pulls, 0
        self._unwritten += credit
        self._window = max(self._window, credit)
        if self._unwritten * 2 >= self._window:
            self.driver.hurry()
        else:
            self.driver.kick()

    async def receive(self, room: int) -> list[Arrival]:
        """Wait for deliveries and take up to `room` of them, in order. What came before a break is still taken.

        Cancellation: nothing was taken; there is no checkpoint between taking and returning.
        """
        await trio.lowlevel.checkpoint()
        arrived = self.arrived
        if not arrived:
            await self._until(lambda: bool(arrived))
        if len(arrived) <= room:
            taken = list(arrived)
            arrived.clear()
            return taken
        return [arrived.popleft() for _ in range(room)]

    def settle(self, arrival: Arrival, disposition: Disposition = ACCEPTED) -> bool:
        """Say what becomes of a delivery; False: it is dead or was settled before, and nothing is said."""
        said = self.driver.engine.settle(arrival, disposition)
        if said:
            self.driver.kick()
        return said

    def accept_all(self, arrivals: Sequence[Arrival]) -> list[Arrival]:
        """As `settle` with *accepted*, for many: those for which nothing was said."""
        unsaid = self.driver.engine.accept_all(arrivals)
        self.driver.kick()
        return unsaid

    def concede(self, arrival: Arrival) -> None:
        """Settle a delivery as the peer has said itself."""
        self.driver.engine.concede(arrival)
        self.driver.hurry()

    def take_back(self) -> None:
        """Take the credit back for good, without waiting for the answer.

        What came and was not taken is released, and so is what comes all the same: nobody acts on it.
        """
        self._taken_back = True
        self._release()
        if self._handle is not None and self.driver.engine.drain(self._handle):
            self.driver.hurry()

    async def emptied(self) -> None:
        """Behind `take_back`: wait until what was on its way has come, or until the link's life is over.

        Cancellation: it comes all the same, while the link lives.
        """
        while self.broken is None and self.ahead:
            await self._changed.park()

    async def proved(self, patience: float = 1.0) -> bool:
        """Wait until the peer has shown that it saw what was ordered on this link before.

        True: it answered a flow with echo. False: it answers none within `patience`, but has sent some frame since the
        write, which is weak. Raises what ended the link before that: then nobody knows.
        """
        handle = self._handle
        if handle is None:
            raise self.broken or LinkBroken(self.address)
        if self._answers is not False:
            number = self.driver.engine.echo(handle)
            self.driver.hurry()
            with trio.move_on_after(patience):
                await self._until(lambda: self._proved >= number)
                self._answers = True
                return True
            if self._answers is None:
                self._answers = False
        await self.driver.written()
        await self.driver.next_frames(self.driver.engine.frames_received)
        return False

    def on_arrived(self, arrivals: Sequence[Arrival]) -> None:
        """Deliveries came."""
        self.arrived.extend(arrivals)
        if self._taken_back:
            self._release()
        self._changed.unpark_all()

    def _release(self) -> None:
        while self.arrived:
            self.settle(self.arrived.popleft(), RELEASED)

    def on_spoken(self, which: frozenset[object]) -> None:
        """The peer has said something of deliveries that came: those that were not taken yet are nobody's."""
        conceded = [arrival for arrival in self.arrived if arrival.pointer in which]
        for arrival in conceded:
            self.arrived.remove(arrival)
            self.concede(arrival)
        self.grant(len(conceded))
        self.superseded(which)

    def on_aborted(self) -> None:
        """A delivery was given up: its credit is given again."""
        self.grant(1)

    def on_drained(self) -> None:
        """No credit is out any more."""
        self._changed.unpark_all()

    def on_proved(self, number: int) -> None:
        """The peer answered an echo."""
        self._proved = number
        self._changed.unpark_all()


def _ignore(_which: frozenset[object]) -> None:
    """Nobody holds what was taken."""
