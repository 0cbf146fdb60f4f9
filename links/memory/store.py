"""One queue of a `MemoryBroker`: its messages, who holds which, and its weather. Synchronous; no task of its own.

Every message is at one place: *ready* (`fresh`, or `returned` where it was handed out before), *delayed*, *unsettled*
with one link (`MemoryLink.unsettled`), or gone. One whose lease has run out stays unsettled with its link until another
one comes for it: what nobody took can still be settled. Time passes lazily: who comes by calls `tick`, who waits asks
`next_time` how long at most.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from random import Random
from types import MappingProxyType
from typing import Protocol

import attrs
import trio

from links.abc import Broker, Received, Settles
from links.errors import LinkError, PublishNotAccepted
from links.memory.log import Entry, Published, Returned
from settlement.attempts import attempt, header_count
from settlement.delivery import NO_HEADERS, Letter, check_letter

__all__ = ["HoldingLink", "MemoryMessage", "MemoryStore", "StoringBroker", "Weather"]

_STALE = 256
"""So many leases of settled deliveries may lie in the heap before it is made anew."""


@attrs.define(eq=False)
class MemoryMessage:
    """A stored message.

    Attributes:
        number: Its place: a returned message stands where it stood.
        id: Its number as text.
        body: Bytes.
        headers: As published.
        key: As published.
        copies: What its retry header counts.
        attempt: Of the delivery to come, or in hand: kept here so that a hand-over need not compute it.
        count: Its earlier deliveries.
    """

    number: int
    id: str
    body: bytes
    headers: Mapping[str, bytes]
    key: str | None
    copies: int
    attempt: int
    count: int = 0

    def letter(self) -> Letter:
        """As it was published."""
        return Letter(self.body, self.headers, self.key)


@attrs.define(eq=False)
class Weather:
    """What is wrong with a queue now, or will be.

    Attributes:
        broken_calls: So many calls to come fail.
        broken_attaches: So many links to come break while they are attached.
        refused_settlements: So many settlements to come are not applied.
        lost_confirmations: So many messages to come are stored and not confirmed.
        closed: No message is taken.
        refusing: No link is taken.
        slow_settlements: Seconds that a settlement takes.
        slow_extensions: Seconds that an extension takes; infinite: it hangs.
        slow_publishes: Seconds that a publish takes.
    """

    broken_calls: int = 0
    broken_attaches: int = 0
    refused_settlements: int = 0
    lost_confirmations: int = 0
    closed: bool = False
    refusing: bool = False
    slow_settlements: float = 0.0
    slow_extensions: float = 0.0
    slow_publishes: float = 0.0


class HoldingLink(Protocol):
    """A link, as its queue and its broker see it: it holds what is unsettled."""

    unsettled: dict[Received[bytes], MemoryMessage]
    forgotten: set[Received[bytes]]
    """Unsettled still, and nothing more will be said for them."""
    lease: float | None
    settles: Settles

    def is_lapsed(self, received: Received[bytes]) -> bool:
        """Has its lease run out, and is it unsettled with this link all the same?"""
        ...

    def release(self, received: Received[bytes]) -> MemoryMessage:
        """It is unsettled with this link no longer."""
        ...

    def sever(self, received: Received[bytes]) -> None:
        """The own connection of this delivery broke."""

    def end(self, kind: type[LinkError], why: str, *, orderly: bool = False) -> None:
        """This life is over."""


class StoringBroker(Broker):
    """A broker as far as it keeps messages: what its sources and publishers stand on."""

    def __init__(self, name: str, *, retry_header: str, dice: Random, log: bool) -> None:
        super().__init__(name)
        self.retry_header = retry_header
        self.dice = dice
        self.log: list[Entry] | None = [] if log else None
        self.published = 0
        """How many messages were ever stored: the number of the last one."""
        self.severed = trio.Event()
        """Set while there is no connection."""
        self.severed.set()
        self._stores: dict[str, MemoryStore] = {}

    def store(self, name: str) -> MemoryStore:
        """The queue itself, made where there was none."""
        if name not in self._stores:
            self._stores[name] = MemoryStore(name, self)
        return self._stores[name]


class MemoryStore:
    """One queue."""

    def __init__(self, name: str, broker: StoringBroker) -> None:
        self.name = name
        self.broker = broker
        self.weather = Weather()
        self.links: list[HoldingLink] = []
        self.fresh: deque[MemoryMessage] = deque()
        """Ready, never handed out, in order of number: the common case, without a heap."""
        self.returned: list[tuple[int, MemoryMessage]] = []
        """Ready again: a heap by number. It may hold numbers above those in `fresh` (published with a delay)."""
        self.delayed: list[tuple[float, int, MemoryMessage]] = []
        """A heap by the time when they are ready."""
        self.leases: list[tuple[float, int, Received[bytes], HoldingLink]] = []
        """A heap by expiry, one entry per hand-over, which may lag behind `Received.expires` and behind settlements."""
        self.lapsed: list[tuple[int, int, Received[bytes], HoldingLink]] = []
        """A heap by number: their leases have run out, and nobody has come for them yet; it may lag behind as well."""
        self.most_unsettled = 0
        self.changed = trio.lowlevel.ParkingLot()
        """Where calls on the wire wait."""
        self.emptied = trio.lowlevel.ParkingLot()
        self._serial = 0

    @property
    def log(self) -> list[Entry] | None:
        """The broker's; None: nothing is logged."""
        return self.broker.log

    # --- coming in

    def add(self, letter: Letter) -> None:
        """Store a letter at the end of the queue. Raises `PublishNotAccepted`, and stores nothing, for what is none."""
        headers = _checked(letter)
        broker = self.broker
        broker.published += 1
        number = broker.published
        copies = header_count(headers, broker.retry_header)
        message = MemoryMessage(number, str(number), letter.body, headers, letter.key, copies, attempt(copies, 0))
        if self.log is not None:
            self.log.append(Published(self.name, message.id))
        if letter.deliver_after:
            heappush(self.delayed, (trio.current_time() + letter.deliver_after, number, message))
        else:
            self.fresh.append(message)

    # --- going out

    def take(self, room: int, link: HoldingLink) -> list[MemoryMessage]:
        """Take up to `room` ready messages, in order of number; none that `link` holds itself, lapsed it may be."""
        fresh, returned = self.fresh, self.returned
        if self.lapsed:
            self._take_over(room, link)
        if not returned:
            return [fresh.popleft() for _ in range(min(room, len(fresh)))]
        taken: list[MemoryMessage] = []
        while len(taken) < room and (returned or fresh):
            if not fresh or (returned and returned[0][0] < fresh[0].number):
                taken.append(heappop(returned)[1])
            else:
                taken.append(fresh.popleft())
        return taken

    def _take_over(self, room: int, link: HoldingLink) -> None:
        """Another link comes: up to `room` messages with lapsed leases are ready."""
        held: list[tuple[int, int, Received[bytes], HoldingLink]] = []
        while room and self.lapsed:
            entry = heappop(self.lapsed)
            _, _, received, holder = entry
            if not holder.is_lapsed(received):
                continue
            if holder is link:
                held.append(entry)
            else:
                self.return_unsettled(holder.release(received), "lease expired")
                room -= 1
        for each in held:
            heappush(self.lapsed, each)

    def claimable(self, link: HoldingLink) -> bool:
        """Is there a message with a lapsed lease, for this link?"""
        return any(holder is not link and holder.is_lapsed(received) for *_, received, holder in self.lapsed)

    def lend(self, handed: Sequence[Received[bytes]], expires: float, link: HoldingLink) -> None:
        """Remember when these leases end."""
        if len(self.leases) > 2 * self.unsettled + _STALE:
            self.leases = [entry for entry in self.leases if entry[2] in entry[3].unsettled]
            heapify(self.leases)
        for received in handed:
            self._serial += 1
            heappush(self.leases, (expires, self._serial, received, link))

    # --- coming back

    def back(self, message: MemoryMessage, *, delay: float = 0.0, counted: bool = True) -> None:
        """Put a message back at its old place, now or after `delay`; call `wake` after the last one."""
        if counted:
            message.count += 1
            message.attempt = attempt(message.copies, message.count)
        if delay:
            heappush(self.delayed, (trio.current_time() + delay, message.number, message))
        else:
            heappush(self.returned, (message.number, message))

    def return_unsettled(self, message: MemoryMessage, why: str, *, counted: bool = True) -> None:
        """Put back a message for which no verb was said."""
        self.back(message, counted=counted)
        if self.log is not None:
            self.log.append(Returned(self.name, message.id, why, counted))

    def wake(self) -> None:
        """Let all who wait look again."""
        if self.changed:
            self.changed.unpark_all()
        if self.emptied and self.is_empty:
            self.emptied.unpark_all()

    # --- time

    def tick(self) -> None:
        """Let happen what is due by now. Outside `trio.run` there is no now: nothing happens.

        Nobody need be woken: who waits for this wakes by itself at `next_time`.
        """
        if not (self.delayed or self.leases) or not trio.lowlevel.in_trio_run():
            return
        now = trio.current_time()
        while self.delayed and self.delayed[0][0] <= now:
            _, number, message = heappop(self.delayed)
            heappush(self.returned, (number, message))
        while self.leases and self.leases[0][0] <= now:
            _, serial, received, link = heappop(self.leases)
            if received not in link.unsettled or received.expires is None:
                continue
            if received.expires > now:  # extended meanwhile
                heappush(self.leases, (received.expires, serial, received, link))
            else:
                self.lapse(received, link)

    def lapse(self, received: Received[bytes], link: HoldingLink) -> None:
        """A lease has run out: whoever comes may have the message; its own link too, where that has given it up."""
        if received in link.forgotten:
            self.return_unsettled(link.release(received), "lease expired")
            return
        if len(self.lapsed) > _STALE:
            self.lapsed = [entry for entry in self.lapsed if entry[3].is_lapsed(entry[2])]
            heapify(self.lapsed)
        self._serial += 1
        heappush(self.lapsed, (link.unsettled[received].number, self._serial, received, link))

    def next_time(self) -> float:
        """When `tick` has something to do again, at the earliest."""
        while self.leases and self.leases[0][2] not in self.leases[0][3].unsettled:
            heappop(self.leases)
        due = self.delayed[0][0] if self.delayed else math.inf
        return min(due, self.leases[0][0]) if self.leases else due

    # --- looking

    @property
    def unsettled(self) -> int:
        """How many deliveries are in somebody's hands."""
        return sum(len(link.unsettled) for link in self.links)

    @property
    def is_empty(self) -> bool:
        """Is nothing ready, delayed or unsettled?"""
        return not (self.fresh or self.returned or self.delayed or self.unsettled)

    def ready(self) -> list[MemoryMessage]:
        """What is ready, in order."""
        self.tick()
        returned = (message for _, message in self.returned)
        return sorted((*returned, *self.fresh), key=lambda message: message.number)


def _checked(letter: Letter) -> Mapping[str, bytes]:
    """The letter's headers, as nobody can change them any more."""
    try:
        check_letter(letter)
    except ValueError as error:
        raise PublishNotAccepted(str(error)) from None
    return NO_HEADERS if letter.headers is NO_HEADERS else MappingProxyType(dict(letter.headers))
