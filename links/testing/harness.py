"""What an author of a transport writes for the conformance suite: a `Harness`, and what it can as `Capabilities`.

A difference between transports is a named capability: where it excludes what a check asks for, the check asserts the
alternative that stands here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Any

import attrs

from links.abc import Broker, Publisher, Settles, Source
from settlement.attempts import RETRY_HEADER

__all__ = ["Capabilities", "Caps", "Harness", "Routing"]


class Routing(Enum):
    """What two subscriptions of one name get."""

    SHARE = "each message goes to one of them"
    BOTH = "each message goes to both"


class Caps(Enum):
    """Which halves of a cap (`max_attempts`, `dead_letter`) a source takes."""

    EITHER = "each half may stand alone"
    BOTH = "both or none: half a cap is a ValueError at construction"
    NONE = "nothing counts: a cap is a ValueError at construction"


@attrs.frozen(kw_only=True)
class Capabilities:
    """What the sources of a harness can. The defaults are those of a queue that counts and delays by itself.

    Attributes:
        settles: As `Source.settles`.
        lease: The shortest lease, in seconds, that `Harness.source` can make; None: a delivery is ours until the link
            ends.
        native_delay: After `RetryAfter` the message itself comes back. False: a copy of it is published.
        delays: `RetryAfter` is kept. False: it is a `Retry` with a warning (a table without retry_after).
        counts: The attempt grows with every delivery. False: it stays 1 (a table without attempt).
        counts_redeliveries: `Delivery.redelivery_count` is the broker's count. False: it is None.
        counts_at_first: The first delivery is counted, as 0. False: its count is None (AMQP: no header section before a
            redelivery).
        counts_detach: A delivery that goes back with the detach, unsettled, is counted all the same (RabbitMQ 4.3
            classic).
        caps: What a policy may declare of a cap and a dead letter.
        least_cap: The lowest `max_attempts` that the transport takes.
        backlog: What is published while nobody subscribes arrives later. False: it never does, also not on a new
            connection.
        routing: What becomes of a message where two subscriptions have one queue's name.
        twice: One broker takes two subscriptions of one name. False: the second is a `LinkRefused` out of
            `open_runtime`.
        ordered: Messages arrive in the order in which they were published. False: in any order.
        gives_back: `Link.give_back` returns deliveries at once, uncounted. False: they return with the detach.
        batch: A `BatchSubscription` can be made. False: it is a `ValueError` at construction.
        byte_headers: Every header value arrives byte for byte. False: some are refused at `publish`, and then never
            arrive.
        retry_header: Where a copy counts (only without `native_delay`).
        virtual_time: The transport waits for nothing outside this process, so that it may run under trio's autojump
            clock.
        patience: Seconds within which something that must happen has happened.
        quiet: Seconds of watching for something that must not come, beyond the marker that is published behind it. 0
            where what was there before the marker also arrives before it.
    """

    settles: Settles = Settles.TOGETHER
    lease: float | None = None
    native_delay: bool = True
    delays: bool = True
    counts: bool = True
    counts_redeliveries: bool = True
    counts_at_first: bool = True
    counts_detach: bool = False
    caps: Caps = Caps.EITHER
    least_cap: int = 1
    backlog: bool = True
    routing: Routing = Routing.SHARE
    twice: bool = True
    ordered: bool = True
    gives_back: bool = True
    batch: bool = True
    byte_headers: bool = True
    retry_header: str = RETRY_HEADER
    virtual_time: bool = False
    patience: float = 10.0
    quiet: float = 0.0


class Harness(ABC):
    """One place where messages are, such as a server, and how brokers, sources and publishers there are made.

    Every check asks `prepare` for queues of its own, so that one harness may serve all checks.

    Attributes:
        capabilities: What the transport can do.
    """

    capabilities: Capabilities

    @abstractmethod
    def broker(self) -> Broker:
        """A broker that nobody has opened, for a new connection to the same messages; no I/O.

        Two are open at once only where `capabilities.twice` is False.
        """

    @abstractmethod
    def source(self, broker: Broker, name: str, *, lease: float | None = None) -> Source[Any]:
        """A source of this queue on this broker; no I/O. `lease`: `capabilities.lease`, where the check needs it so."""

    def publisher(self, broker: Broker, name: str) -> Publisher:
        """A publisher to this queue; no I/O."""
        return broker.publisher(name)

    async def prepare(self, name: str) -> None:  # noqa: B027 -- where sending to a queue makes it, nothing is to be done
        """Make this queue exist, empty. It serves as a dead letter, too. Names are letters, digits and `_`."""
