"""What a transport implements: a broker, its sources and publishers, and the link that is one life of a source.

Cancellation: every coroutine here says what it leaves behind. A link shields three things and no more, each with a
deadline: its goodbye, the giving back of a half-taken `receive`, and a SQL settlement with its COMMIT or ROLLBACK.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from enum import Enum
from functools import partial
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

import attrs
import trio

from links.beside import beside
from links.errors import NotConnected, SettlementError
from settlement.delivery import NO_HEADERS, Delivery, Letter
from settlement.ledger import Line
from settlement.plans import Plan, Publish
from settlement.policy import Ending, Policy

__all__ = [
    "Broker",
    "Link",
    "Lost",
    "Presence",
    "Publisher",
    "Received",
    "Settlement",
    "Settles",
    "Source",
    "Verdict",
    "beside",
]

R = TypeVar("R")


class Settles(Enum):
    """How a link wants its verbs said.

    Attributes:
        TOGETHER: Verbs that are ready at once are said by one call (AMQP, SQL lease, Pub/Sub).
        ALONE: Each delivery has a connection of its own; its worker says its verb (SQL row lock, advisory lock).
    """

    TOGETHER = "together"
    ALONE = "alone"


@attrs.define(eq=False)
class Received(Generic[R]):
    """One message as the link handed it over. Compared by identity.

    Attributes:
        delivery: What the handler gets.
        token: The link's own handle; nobody else looks at it.
        expires: When the lease ends, on `trio.current_time()`; moved forward by `Link.extend`; None: there is no lease.
        started: A handler was called for it. What was never started goes back uncounted, where the transport can.
        unreadable: Why the transport itself could not read the message; then `delivery.message` must not be used.
        claim: The same object for those that end by one commit: a batch has those of one. None: each ends by itself.
    """

    delivery: Delivery[R]
    token: Any = None
    expires: float | None = None
    started: bool = False
    unreadable: Exception | None = None
    claim: object = None


@attrs.define(eq=False)
class Settlement:
    """Say the verb of this plan for this delivery.

    Attributes:
        received: Which delivery.
        plan: Its verb is said; its other steps are not the link's.
    """

    received: Received[Any]
    plan: Plan[Any]


Verdict: TypeAlias = SettlementError | None
"""None: the verb was said. Else why not."""

Lost: TypeAlias = Callable[[Received[Any], Line], None]
"""How a link tells that a delivery is no longer ours, and in which line it ends: `UNSETTLED` where its own connection
broke, `SUPERSEDED` where the other side took it back. A plain call; nothing happens where it has ended already."""


def _unheard(what: str, why: str | None) -> None: ...


class Link(ABC, Generic[R]):
    """One attached link: one life.

    Attributes:
        spreads: Wake as many workers as there are deliveries, so that verbs are said together; else one by one.
        proves: Verbs get no answer: they were said when `settle` returns, and `proved` tells when they were seen.
        degraded: Set by the runtime: `degraded(what, why)`, a plain call, says what does not work now and ends neither
            the life nor a call, such as a row that cannot be claimed; `why` None: it works again.
    """

    spreads: bool = False
    proves: bool = False
    degraded: Callable[[str, str | None], None] = staticmethod(_unheard)

    @abstractmethod
    async def receive(self, room: int) -> Sequence[Received[R]]:
        """Wait for messages and hand over between 1 and `room` of them.

        Raises `LinkBroken` or `ConnectionBroken` when the life is over, `CallBroken` when this call alone failed.

        Cancellation: all or nothing; cancelled, it has taken nothing, or gives back what it took (bounded, shielded).
        """

    @abstractmethod
    def stop(self) -> None:
        """Take nothing more: a drain has begun. `receive` is not called again."""

    @abstractmethod
    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Verdict]:
        """Say the verb of each settlement, in this order, and give one verdict for each.

        Two calls may be under way at once, for different deliveries.

        Raises `LinkBroken` or `ConnectionBroken` only where the life is over; then every one is unknown.

        Cancellation: each settlement is unknown.
        """

    async def flush(self) -> None:
        """Wait until what was settled is on the wire: at concurrency 1 the next handler waits for it.

        Raises as `settle`. Cancellation: it is there or not.
        """

    async def proved(self) -> None:
        """Wait until the other side has shown that it saw every verb that was said before this call (`proves`).

        Raises as `settle`. Cancellation: nobody knows.
        """
        raise NotImplementedError("a link that proves knows how")

    def forget(self, received: Received[R]) -> None:
        """Nothing is said for this one, now or later: it was superseded, given up, or settled on arrival. A plain call.

        Told once, while the life goes on, for each delivery that ends neither by a verdict nor by `give_back`.
        """

    def undo(self, received: Received[R]) -> None:
        """Undo what its handler wrote by this link: other steps come before the verb of this one. A plain call."""

    async def until_broken(self) -> NoReturn:
        """Wait until this life is over, and raise what ended it: heard also while nothing else is asked of the link.

        A link that learns of it by its other calls alone waits for ever. Cancellation: nothing was done.
        """
        await trio.sleep_forever()

    async def extend(self, held: Sequence[Received[R]]) -> Sequence[Received[R]]:
        """Extend the leases, move `expires` of those that were confirmed, and return those that are lost.

        Raises as `receive`; after `CallBroken` the old expiry holds. It is not called for a delivery whose `settle` is
        under way; a `settle` that comes while it runs is the link's to put behind it.

        Cancellation: the old expiry holds.
        """
        # DESIGN 3.4
        raise NotImplementedError("a source with a lease has a link that extends it")

    async def give_back(self, unsettled: Sequence[Received[R]]) -> None:
        """Give these back now, where the transport can, uncounted where not `started` (AMQP: only those are).

        Raises as `receive`; after `CallBroken` they go back with the link's goodbye, or when their lease ends.

        Cancellation: what was not given back goes back with the link's goodbye.
        """


class Source(ABC, Generic[R]):
    """Where deliveries come from: a queue, a topic, a table, a subscription. Constructing one does no I/O.

    Attributes:
        name: The address; the default name of a subscription.
        broker: Where it is.
        settles: How the link wants its verbs said; together by default.
        at_most_once: Each delivery was settled when it arrived; its place returns when its handler ended.
        lease: Seconds for which a received delivery is ours unless extended; None: until the link ends.
        held: How many deliveries may wait before their verb at once; None: as many as are in hand.
        copies: How many copies may wait for their time at once; 0: no plan of this source has a step after its verb.
        store: Where its delayed copies wait (`Stored`): the runtime publishes what is due there, as `forwarded` says,
            by a subscription of its own; one for all sources whose stores are one `place`.
    """

    name: str
    broker: Broker
    settles: Settles = Settles.TOGETHER
    at_most_once: bool = False
    lease: float | None = None
    held: int | None = None
    copies: int = 0
    store: Source[Any] | None = None

    def renewal(self) -> float:
        """Seconds until the next renewal of all leases, asked before each: a third of a lease, where not said else."""
        return (self.lease or 0.0) / 3

    @abstractmethod
    def limit(self, concurrency: int, size: int = 1) -> int:
        """How many may be unsettled at once, as said or for so many handlers of `size`; `ValueError` for too many."""

    @abstractmethod
    def decide(self, outcome: Ending, delivery: Delivery[Any], policy: Policy) -> Plan[Any]:
        """The decision table of this transport, with this source's facts filled in; pure."""

    @abstractmethod
    def attach(
        self, subscription: str, lost: Lost, goodbye: float, policy: Policy = Policy(), *, limit: int = 1, size: int = 1
    ) -> AbstractAsyncContextManager[Link[R]]:
        """Attach a link for one life; on the way out it detaches and gives back what is unsettled, within `goodbye`.

        `limit`: how many deliveries may be unsettled at once, 1 or more; `size`: how many a handler takes at once.

        What the policy will ask of this transport is looked at here: a dead-letter table that is not there is refused.

        Raises `LinkRefused` naming subscription, address or table, and the way out; `LinkBroken`, `ConnectionBroken`.

        Cancellation: attached or not, nothing stays held beyond the goodbye.
        """

    def check(self, policy: Policy) -> None:
        """Refuse a policy that this transport cannot carry out: `ValueError`, naming argument and legal range."""

    def brokers(self) -> Sequence[Broker]:
        """The brokers that this source needs open: its own, and those that its copies are stored on."""
        return (self.broker,)

    @property
    def place(self) -> Hashable:
        """Where it takes from: the same for sources of one broker that take each other's deliveries."""
        return self

    def storage(self) -> tuple[Source[Any], Publisher]:
        """This source as a `store`, and a publisher that keeps `deliver_after`; `ValueError` where it cannot."""
        raise ValueError(f"{self.name!r} on {self.broker.name} keeps no letters until they are due: use a queue table")

    def forwarded(self, delivery: Delivery[Any]) -> Publish:
        """What a delivery of its `store` is published as; pure. Raises `ValueError` for what is no stored copy."""
        raise NotImplementedError("a source with a store knows how")


class Publisher(ABC):
    """Publishes to one address. A `Destination`: it may be a policy's dead letter, also of another transport.

    Attributes:
        broker: Where it publishes.
        name: The address, for errors and logs; never a credential.
    """

    broker: Broker
    name: str

    async def publish(self, body: bytes, headers: Mapping[str, bytes] = NO_HEADERS, *, key: str | None = None) -> None:
        """Publish a message; returns when the broker has confirmed it.

        In weather it waits for the connection's next life: bound it with a scope of your own. Raises `NotConnected`
        before the broker is opened and after it was closed, `RuntimeError` in another `trio.run` than the one it is
        open in (a thread comes in by `trio.from_thread.run(publisher.publish, …)`), `PublishNotAccepted` where the
        broker does not take the message, `LinkBroken` where the connection broke while the message was on the wire (it
        may or may not have arrived, and is never sent again by itself).

        Cancellation: the message was published or not.
        """
        await self.send(Letter(body, headers, key))

    @abstractmethod
    async def send(self, letter: Letter) -> None:
        """Publish a letter; as `publish`."""


class Presence(Enum):
    """Is this broker open, and is there a connection now?

    Attributes:
        NEW: Not opened yet.
        DOWN: Open, between two connections.
        UP: Connected.
        CLOSED: It was open; a runtime may open it again.
    """

    NEW = "not opened yet"
    DOWN = "between two connections"
    UP = "connected"
    CLOSED = "closed"


class Broker(ABC):
    """A broker: sources and publishers on it, and one connection at a time. Constructing one does no I/O.

    Attributes:
        name: The URL without credentials, for errors and logs.
    """

    # C-9.1

    name: str

    def __init__(self, name: str) -> None:
        self.name = name
        self.presence = Presence.NEW
        self.lives = 0
        """How many connections there have been: the number of the present one."""
        self._changed = trio.Event()
        self._home: trio.lowlevel.TrioToken | None = None
        """The `trio.run` that it is open in."""

    @abstractmethod
    async def run(self, goodbye: float = 5.0, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """One life of the connection: connect, report `started` between `with self.up()`, run until cancelled.

        Raises `LinkRefused` where the other side says no, `ConnectionBroken` when the life is over.

        Cancellation: the connection is closed within `goodbye`.
        """

    @abstractmethod
    def publisher(self, to: str) -> Publisher:
        """A publisher to this address; no I/O. Raises `ValueError` for an empty name."""

    @asynccontextmanager
    async def connect(self, goodbye: float = 5.0) -> AsyncGenerator[None, None]:
        """Open this broker for the block, for one life: a runtime inside shares it and does not close it.

        When the connection breaks, the block is cancelled and `ConnectionBroken` leaves it. A connection that shall
        outlive weather is kept by a runtime, or by `actors.connected(broker)`. An exception of the block leaves bare.
        """
        with self.opened():
            async with beside(partial(self.run, goodbye)):
                yield

    @contextmanager
    def opened(self) -> Generator[None, None, None]:
        """Somebody keeps this broker open for the block. Raises `RuntimeError` where somebody already does."""
        if self.is_open:
            raise RuntimeError(f"{self.name} is open already: share that connection, or make a second broker")
        self._home = trio.lowlevel.current_trio_token()
        self._become(Presence.DOWN)
        try:
            yield
        finally:
            self._become(Presence.CLOSED)

    @contextmanager
    def up(self) -> Generator[None, None, None]:
        """There is a connection for the block; for implementations of `run`."""
        self.lives += 1
        self._become(Presence.UP)
        try:
            yield
        finally:
            self._become(Presence.DOWN)

    @property
    def is_open(self) -> bool:
        """Does somebody keep this broker open?"""
        return self.presence in (Presence.DOWN, Presence.UP)

    async def until_up(self, after: int = 0) -> None:
        """Wait for a connection, later than life number `after`. Does not yield if there is one.

        Raises `NotConnected` where nobody keeps this broker open, and `RuntimeError` in another `trio.run` than the one
        it is open in: a thread comes in by `trio.from_thread.run`. Cancellation: nothing was done.
        """
        if self.is_open:
            self.check_home()
        while self.presence is not Presence.UP or self.lives <= after:
            if not self.is_open:
                raise NotConnected(
                    f"{self.name} is {self.presence.value}: enter open_runtime or actors.connected(broker) first"
                )
            await self._changed.wait()

    def check_home(self) -> None:
        """Raise `RuntimeError` in another `trio.run` than the one that this broker is open in."""
        if self._home is not trio.lowlevel.current_trio_token():
            raise RuntimeError(f"{self.name} is open in another trio.run: come in by trio.from_thread.run")

    def _become(self, presence: Presence) -> None:
        self.presence = presence
        changed, self._changed = self._changed, trio.Event()
        changed.set()
