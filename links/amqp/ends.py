"""Sessions and receivers, as a `Pump` offers them. They live no longer than their connection.

Every coroutine here waits for an answer and changes nothing: cancelled, its order stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import trio

from links.amqp.events import ACCEPTED, RELEASED, Condition, Disposition, LinkAttached, Terminus
from links.amqp.handles import Arrival, LinkHandle, SessionHandle
from links.errors import LinkBroken, LinkError, LinkRefused

if TYPE_CHECKING:
    from links.amqp.pump import Pump

__all__ = ["End", "Receiver", "Session"]


class _Awaited:
    """Something whose state changes, and whose life ends with a reason."""

    def __init__(self, pump: Pump) -> None:
        self.pump = pump
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


class Session(_Awaited):
    """A session of ours."""

    def __init__(self, pump: Pump, handle: SessionHandle) -> None:
        super().__init__(pump)
        self.handle = handle
        self.ended_at: float | None = None
        """When we ended it, on trio's clock."""

    async def opened(self) -> None:
        """Wait until the peer has opened it."""
        await self._until(lambda: self.handle.opened)

    def end(self) -> None:
        """End it, and its links with it."""
        self.ended_at = self.ended_at or trio.current_time()
        self.pump.engine.end(self.handle)
        self.pump.hurry()

    async def ended(self) -> None:
        """Wait until it has ended, or the connection has."""
        while self.broken is None:
            await self._changed.park()

    def on_opened(self) -> None:
        """The peer opened it."""
        self._changed.unpark_all()

    def on_ended(self, condition: Condition | None) -> None:
        """The peer ended it."""
        self.break_(LinkBroken(_because("the session ended", condition)))


class End(_Awaited):
    """Our end of a link."""

    def __init__(self, pump: Pump, session: Session, handle: LinkHandle | None, address: str) -> None:
        super().__init__(pump)
        self.session = session
        self.address = address
        self.remote: Terminus | None = None
        """The source or target at the other end, once attached."""
        self.properties: Mapping[str, Any] = {}
        """The peer's, once attached."""
        self.max_message: int | None = None
        """The longest message that the peer takes on this link, once attached; None: it names no limit."""
        self._handle = handle
        self._detaching = False
        self._gone = False
        if handle is None:
            self.break_(session.broken or LinkBroken(f"{address}: the session ended"))

    async def attached(self) -> None:
        """Wait for the answer to the attach. `LinkRefused`: the peer detached the link or ended the session instead."""
        await self._until(lambda: self.remote is not None)

    def detach(self) -> None:
        """Detach: what is unsettled goes back to the peer."""
        self._detaching = True
        if self._handle is not None:
            self.pump.engine.detach(self._handle)
            self.pump.hurry()

    async def detached(self) -> None:
        """Wait until the peer has answered the detach, or the session or the connection is over."""
        while self.broken is None:
            await self._changed.park()

    @property
    def proof_by_detach(self) -> bool:
        """Did the peer answer our own detach or end? Then it has seen all that was written before."""
        return self._gone and self._detaching

    def on_attached(self, event: LinkAttached) -> None:
        """The peer answered the attach."""
        self.remote, self.properties, self.max_message = event.remote, event.properties, event.max_message
        self._changed.unpark_all()

    def on_detached(self, condition: Condition | None, how: str) -> None:
        """The link is over."""
        self._gone = True
        said = f"{self.address}: {_because(how, condition)}"
        self.break_(LinkRefused(said) if self.remote is None and not self._detaching else LinkBroken(said))

    def on_arrived(self, arrivals: Sequence[Arrival]) -> None:
        """A receiver's."""

    def on_aborted(self) -> None:
        """A receiver's."""

    def on_drained(self) -> None:
        """A receiver's."""

    def on_proved(self, number: int) -> None:
        """A receiver's."""

    def on_spoken(self, which: frozenset[object]) -> None:
        """A receiver's."""

    def on_outcome(self, number: int, disposition: Disposition | None) -> None:
        """A sender's."""

    def on_credit(self, drain: bool) -> None:
        """A sender's."""


class Receiver(End):
    """Takes deliveries from an address."""

    def __init__(self, pump: Pump, session: Session, handle: LinkHandle | None, address: str) -> None:
        super().__init__(pump, session, handle, address)
        self.arrived: deque[Arrival] = deque()
        """What came and was not taken yet; never more than the credit that was granted."""
        self.aborted = 0
        """Deliveries that were given up half way: each has spent a credit."""
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
        return len(self.arrived) + (0 if self._handle is None else self.pump.engine.credit(self._handle))

    def grant(self, credit: int) -> None:
        """Give credit, after `attached`: written at once where the peer may run out of it, else within 2 ms."""
        if self._handle is None or self._taken_back or not self.pump.engine.grant(self._handle, credit):
            return
        if self._pulls != self.pump.pulls:
            self._pulls, self._unwritten = self.pump.pulls, 0
        self._unwritten += credit
        self._window = max(self._window, credit)
        if self._unwritten * 2 >= self._window:
            self.pump.hurry()
        else:
            self.pump.kick()

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
        said = self.pump.engine.settle(arrival, disposition)
        if said:
            self.pump.kick()
        return said

    def accept_all(self, arrivals: Sequence[Arrival]) -> list[bool]:
        """As `settle` with *accepted*, for many."""
        said = self.pump.engine.accept_all(arrivals)
        self.pump.kick()
        return said

    def concede(self, arrival: Arrival) -> None:
        """Settle a delivery as the peer has said itself."""
        self.pump.engine.concede(arrival)
        self.pump.hurry()

    async def drain(self) -> None:
        """Take the credit back: what the peer has ready still comes. Returns when it has answered."""
        handle = self._handle
        if handle is None or not self.pump.engine.drain(handle):
            return
        self.pump.hurry()
        await self._until(lambda: not handle.draining)

    def take_back(self) -> None:
        """Take the credit back for good, as `drain`, without waiting for the answer.

        What came and was not taken is released, and so is what comes all the same: nobody acts on it.
        """
        self._taken_back = True
        self._release()
        if self._handle is not None and self.pump.engine.drain(self._handle):
            self.pump.hurry()

    async def proved(self, patience: float = 1.0) -> bool:
        """Wait until the peer has shown that it saw what was ordered on this link before.

        True: it answered a flow with echo. False: it answers none within `patience`, but has sent some frame since the
        write, which is weak. Raises what ended the link before that: then nobody knows, unless `proof_by_detach`.
        """
        handle = self._handle
        if handle is None:
            raise self.broken or LinkBroken(self.address)
        if self._answers is not False:
            number = self.pump.engine.echo(handle)
            self.pump.hurry()
            with trio.move_on_after(patience):
                await self._until(lambda: self._proved >= number)
                self._answers = True
                return True
            if self._answers is None:
                self._answers = False
        await self.pump.written()
        await self.pump.next_frames(self.pump.engine.frames_received)
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
        self.aborted += 1
        self.grant(1)

    def on_drained(self) -> None:
        """The peer answered the drain."""
        self._changed.unpark_all()

    def on_proved(self, number: int) -> None:
        """The peer answered an echo."""
        self._proved = number
        self._changed.unpark_all()


def _ignore(_which: frozenset[object]) -> None:
    """Nobody holds what was taken."""


def _because(how: str, condition: Condition | None) -> str:
    return how if condition is None else f"{how}: {condition}"
