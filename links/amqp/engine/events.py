"""What an engine tells, and the handles and values in its orders: small, frozen, without a pointer into proton.

Words are those of AMQP 1.0 part 2 (transport) and part 3.4 (delivery state).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeAlias

import attrs

from links.amqp.engine.handles import Arrival, LinkHandle, SessionHandle

__all__ = [
    "ACCEPTED",
    "DELIVERY_TIME",
    "FAILED",
    "REJECTED",
    "RELEASED",
    "Aborted",
    "Arrived",
    "Closed",
    "Condition",
    "CreditGranted",
    "Disposition",
    "DispositionOf",
    "Drained",
    "Event",
    "Failed",
    "LinkAttached",
    "LinkDetached",
    "LinkRequested",
    "Opened",
    "Proved",
    "SessionEnded",
    "SessionOpened",
    "Spoken",
    "State",
    "Terminus",
]


# --- values ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Condition:
    """Why the other side ended or refused something."""

    name: str
    """A symbol, as `amqp:not-found`; empty: it is nobody's but ours."""
    description: str = ""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.name, self.description) if part)


class State(IntEnum):
    """The terminal delivery states (part 3.4); the numbers are their descriptors."""

    ACCEPTED = 0x24
    REJECTED = 0x25
    RELEASED = 0x26
    MODIFIED = 0x27


@attrs.frozen
class Disposition:
    """What is said of a delivery."""

    state: State
    failed: bool = False
    """*modified*: the delivery-count grows."""
    undeliverable: bool = False
    """*modified*: not to this link again."""
    annotations: Mapping[str, object] | None = None
    """*modified*: to be merged into the message's annotations."""
    condition: Condition | None = None
    """*rejected*: why."""

    def __str__(self) -> str:
        return self.state.name.lower()


DELIVERY_TIME = "x-opt-delivery-time"
"""The annotation of a *modified* that says when the message is due again: milliseconds since 1970 (`Native`)."""

ACCEPTED = Disposition(State.ACCEPTED)
REJECTED = Disposition(State.REJECTED)
RELEASED = Disposition(State.RELEASED)
FAILED = Disposition(State.MODIFIED, failed=True)
"""*modified* with delivery-failed."""


@attrs.frozen
class Terminus:
    """A source or a target, as it stands in an attach."""

    address: str | None = None
    capabilities: tuple[str, ...] = ()
    dynamic: bool = False


# --- events ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Opened:
    """The other side opened the connection."""

    container: str
    hostname: str | None
    properties: Mapping[str, Any]
    """As RabbitMQ's `product` and `version`."""
    capabilities: tuple[str, ...]
    """Offered, as `ANONYMOUS-RELAY`."""
    sessions: int
    """How many sessions it allows at once."""
    max_frame: int


@attrs.frozen
class SessionOpened:
    """A session is open at both ends."""

    session: SessionHandle


@attrs.frozen
class SessionEnded:
    """The other side ended the session, or answered our end. Its links are gone with it, unsettled."""

    session: SessionHandle
    condition: Condition | None


@attrs.frozen
class LinkAttached:
    """The other side answered our attach."""

    link: LinkHandle
    remote: Terminus | None
    """The source of a receiver, the target of a sender; None: refused, `LinkDetached` follows with the reason."""
    properties: Mapping[str, Any]
    max_message: int | None = None
    """The longest message that it takes, in bytes, all sections together; None: it names no limit."""


@attrs.frozen
class LinkRequested:
    """The other side attaches a link: answer with `Engine.accept` or `Engine.refuse`. Seen from our end."""

    link: LinkHandle
    source: Terminus | None
    target: Terminus | None
    properties: Mapping[str, Any]


@attrs.frozen
class LinkDetached:
    """The other side detached the link, or answered our detach."""

    link: LinkHandle
    condition: Condition | None


@attrs.frozen
class Arrived:
    """Deliveries, in order."""

    link: LinkHandle
    arrivals: Sequence[Arrival]


@attrs.frozen
class Aborted:
    """A delivery was given up by its sender, or was longer than we allow; it has spent one credit."""

    link: LinkHandle


@attrs.frozen
class DispositionOf:
    """What became of a message that was sent."""

    link: LinkHandle
    number: int
    """As `Engine.send` returned it."""
    disposition: Disposition | None
    """None: settled, and nothing was said."""


@attrs.frozen
class Spoken:
    """The sender has said an outcome of deliveries that came, or has settled them: they are not ours any more."""

    link: LinkHandle
    which: frozenset[object]
    """As `Arrival.pointer`; also of deliveries that nobody here holds."""


@attrs.frozen
class CreditGranted:
    """The receiver at the other end wants messages."""

    link: LinkHandle
    credit: int
    """How many may be sent now."""
    drain: bool
    """It wants them now, or to be told that there are none (`Engine.drained`)."""


@attrs.frozen
class Drained:
    """Our drain was answered: no credit is left, `unused` of it was not spent. Echoes waited for it."""

    link: LinkHandle
    unused: int


@attrs.frozen
class Proved:
    """The other side answered an echo: what was written before it was seen there."""

    link: LinkHandle
    number: int
    """As `Engine.echo` returned it; earlier ones are proved, too."""


@attrs.frozen
class Closed:
    """The other side closed the connection, or answered our close."""

    condition: Condition | None


@attrs.frozen
class Failed:
    """The connection cannot go on: a protocol error, a failed login, silence, the end of the stream."""

    condition: Condition
    refused: bool
    """A failed login, or a peer that speaks something else."""


Event: TypeAlias = (
    Opened
    | SessionOpened
    | SessionEnded
    | LinkAttached
    | LinkRequested
    | LinkDetached
    | Arrived
    | Aborted
    | DispositionOf
    | Spoken
    | CreditGranted
    | Drained
    | Proved
    | Closed
    | Failed
)
