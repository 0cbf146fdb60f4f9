"""A broker in this process: queues that count, lease and delay on trio's clock, and weather on demand.

The messages live in the broker, not in a connection: lives come and go. Everything that is not a coroutine is a plain
synchronous call that takes effect at once, for tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import trio

from links.abc import Presence, Settles
from links.errors import ConnectionBroken, LinkBroken, LinkRefused
from links.memory.publisher import MemoryPublisher
from links.memory.source import MemoryQueue
from links.memory.store import HoldingLink, StoringBroker
from settlement.attempts import RETRY_HEADER
from settlement.delays import Native
from settlement.delivery import Letter
from settlement.memory import Delays
from settlement.outcomes import seconds as _seconds

__all__ = ["MemoryBroker"]

_NATIVE = Native()


class MemoryBroker(StoringBroker):
    """Queues in memory, and one connection at a time.

    A queue is there once something was published to it, or it was asked for. All is forgotten with the object.

    Args:
        name: For errors and logs.
        retry_header: The header that counts copies.
        dice: Decides what became of settlements that broke on the wire; the same each time by default.
        log: Keep a list of everything that happens, in `log`.

    Attributes:
        log: A list of `links.memory.Entry`, which `links.memory.replay` reads; None: nothing is logged, which costs
            nothing. A list may be assigned at any time.
        published: How many messages were ever stored: the number of the last one.
        severed: Set while there is no connection.
        dice: As given.
        retry_header: As given.
    """

    def __init__(
        self,
        name: str = "memory",
        *,
        retry_header: str = RETRY_HEADER,
        dice: Random | None = None,
        log: bool = False,
    ) -> None:
        super().__init__(name, retry_header=retry_header, dice=dice or Random(0), log=log)  # noqa: S311 -- not a secret
        self._refusing = False
        self._broken_connects = 0

    def __repr__(self) -> str:
        return f"<MemoryBroker {self.name}: {self.presence.value}, {len(self._stores)} queues>"

    # --- what a user calls

    def queue(
        self,
        name: str,
        *,
        delays: Delays = _NATIVE,
        lease: float | None = None,
        limit: int | None = None,
        settles: Settles = Settles.TOGETHER,
    ) -> MemoryQueue:
        """A source of deliveries. Raises `ValueError` that names the argument and its legal range.

        Args:
            name: 1 character or more.
            delays: `Native()`, by default: the queue itself keeps a delayed message; or `Copies()`, as AMQP does.
            lease: Seconds, above 0, for which a delivery is ours unless extended; None: until the link ends.
            limit: How many deliveries may be unsettled at once, 1 or more; by default 2 × concurrency × size.
            settles: How verbs are said; together by default.
        """
        return MemoryQueue(self, name, delays=delays, lease=lease, limit=limit, settles=settles)

    def publisher(self, to: str) -> MemoryPublisher:
        """A publisher to this queue, which is made by the first message. Raises `ValueError` for an empty name."""
        return MemoryPublisher(self, to)

    async def run(
        self,
        goodbye: float = 5.0,  # noqa: ARG002 -- closing takes no time
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """One life of the connection.

        Cancellation: the links that are still attached end with `ConnectionBroken`; that takes no time.
        """
        await trio.lowlevel.checkpoint()
        if self._refusing:
            raise LinkRefused(f"{self.name} refuses connections until admit_connection()")
        if self._broken_connects:
            self._broken_connects -= 1
            raise ConnectionBroken(f"{self.name}: broke while it was opened")
        severed = self.severed = trio.Event()
        try:
            with self.up():
                task_status.started()
                await severed.wait()
        finally:
            self._hang_up("the connection was closed")
        raise ConnectionBroken(f"{self.name}: severed")

    # --- what a test puts in and looks at

    def fill(self, name: str, letters: Iterable[Letter | bytes]) -> None:
        """Store many letters at once, connected or not, past the weather."""
        store = self.store(name)
        for letter in letters:
            store.add(Letter(letter) if isinstance(letter, bytes) else letter)
        store.wake()

    def ready(self, name: str) -> list[Letter]:
        """What could be delivered now, in order."""
        return [message.letter() for message in self.store(name).ready()]

    def delayed(self, name: str) -> list[Letter]:
        """What waits for its time, in order of time."""
        store = self.store(name)
        store.tick()
        return [message.letter() for _, _, message in sorted(store.delayed, key=lambda entry: entry[:2])]

    def unsettled(self, name: str) -> int:
        """How many deliveries are in somebody's hands."""
        self.store(name).tick()
        return self.store(name).unsettled

    def held(self, name: str) -> list[str]:
        """The ids of the deliveries that are in somebody's hands."""
        self.store(name).tick()
        return [message.id for link in self.store(name).links for message in link.unsettled.values()]

    def most_unsettled(self, name: str) -> int:
        """How many deliveries one link had in hand at once, at most.

        Without those that a verdict had left unsettled: they have no place under the limit.
        """
        return self.store(name).most_unsettled

    async def until_empty(self, name: str) -> None:
        """Wait until nothing is ready, delayed or unsettled.

        Cancellation: nothing was done.
        """
        await trio.lowlevel.checkpoint()
        while not self.store(name).is_empty:
            await self.store(name).emptied.park()

    # --- weather

    def sever(self, name: str) -> None:
        """Break every link life on this queue: `LinkBroken`; what is unsettled goes back."""
        for link in self._links(name):
            link.end(LinkBroken, "severed")

    def sever_connection(self) -> None:
        """Break the connection's life, where there is one: `ConnectionBroken` out of `run` and every link's calls."""
        self._hang_up("the connection was severed")

    def sever_delivery(self, name: str, id: str) -> bool:  # noqa: A002 -- as Delivery.id
        """Break the own connection of one delivery in hand (`Settles.ALONE`): it goes back. Was it there?"""
        for link in self._links(name):
            for received, message in link.unsettled.items():
                if message.id == id and link.settles is Settles.ALONE:
                    link.sever(received)
                    return True
        return False

    def expire(self, name: str) -> None:
        """All leases on this queue are lost now."""
        store = self.store(name)
        for link in self._links(name):
            if link.lease is not None:
                for received in [*link.unsettled]:
                    store.return_unsettled(link.release(received), "lease expired")
        store.wake()

    def break_calls(self, name: str, n: int = 1) -> None:
        """The next `n` calls of `receive`, `extend` and `settle`, in flight or to come, fail alone.

        Orders that were on the wire are unknown; the dice say which of them were carried out. The others stay
        unsettled until their lease ends, or the link.
        """
        store = self.store(name)
        store.weather.broken_calls += n
        store.wake()

    def refuse_settlements(self, name: str, n: int = 1) -> None:
        """The next `n` settlements are not applied: their deliveries stay unsettled."""
        self.store(name).weather.refused_settlements += n

    def lose_confirmations(self, name: str, n: int = 1) -> None:
        """The next `n` messages are stored, but their publishers get `LinkBroken`."""
        self.store(name).weather.lost_confirmations += n

    def slow_settlements(self, name: str, seconds: float) -> None:
        """From now on a settlement takes so long; its verbs are carried out at its end. 0: no time."""
        self.store(name).weather.slow_settlements = _time(seconds)

    def slow_extensions(self, name: str, seconds: float) -> None:
        """From now on an extension takes so long; `math.inf`: it hangs."""
        self.store(name).weather.slow_extensions = _time(seconds)

    def slow_publishes(self, name: str, seconds: float) -> None:
        """From now on a publish takes so long; the message is stored at its end."""
        self.store(name).weather.slow_publishes = _time(seconds)

    def close(self, name: str) -> None:
        """Take no message any more: `PublishNotAccepted`."""
        self.store(name).weather.closed = True

    def reopen(self, name: str) -> None:
        """Undo `close`."""
        self.store(name).weather.closed = False

    def refuse(self, name: str) -> None:
        """Refuse links to this queue from now on: `LinkRefused`. Those that are attached stay."""
        self.store(name).weather.refusing = True

    def admit(self, name: str) -> None:
        """Undo `refuse`."""
        self.store(name).weather.refusing = False

    def break_attaches(self, name: str, n: int = 1) -> None:
        """The next `n` links break while they are attached: `LinkBroken`."""
        self.store(name).weather.broken_attaches += n

    def refuse_connection(self) -> None:
        """Refuse connections from now on: `LinkRefused`. One that is open stays."""
        self._refusing = True

    def admit_connection(self) -> None:
        """Undo `refuse_connection`."""
        self._refusing = False

    def break_connects(self, n: int = 1) -> None:
        """The next `n` connections break while they are opened: `ConnectionBroken`."""
        self._broken_connects += n

    # --- within

    def _links(self, name: str) -> list[HoldingLink]:
        return [*self.store(name).links]

    def _hang_up(self, why: str) -> None:
        if self.severed.is_set():
            return
        self.severed.set()
        if self.presence is Presence.UP:  # before `run` comes to it: nobody publishes on a broken connection
            self._become(Presence.DOWN)
        for store in [*self._stores.values()]:
            for link in [*store.links]:
                link.end(ConnectionBroken, why)


def _time(seconds: float) -> float:
    return seconds if seconds == float("inf") else _seconds("seconds", seconds)
