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
    """Why the other side ended or refused something.

    Attributes:
        name: A symbol, as `amqp:not-found` (part 2 §2.8.14); empty: it is nobody's but ours.
        description: In words; empty by default.
    """

    name: str
    description: str = ""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.name, self.description) if part)


class State(IntEnum):
    """The terminal delivery states (part 3 §3.4); the numbers are their descriptors.

    Attributes:
        ACCEPTED: It was handled (§3.4.2).
        REJECTED: It cannot be handled (§3.4.3): RabbitMQ dead-letters it, or throws it away.
        RELEASED: It was not acted on, and is to be delivered again (§3.4.4).
        MODIFIED: As released, and what is said of it changes the message (§3.4.5).
    """

    ACCEPTED = 0x24
    REJECTED = 0x25
    RELEASED = 0x26
    MODIFIED = 0x27


@attrs.frozen
class Disposition:
    """What is said of a delivery.

    Attributes:
        state: The terminal delivery state (part 3 §3.4).
        failed: *modified*: the delivery-count grows; False by default.
        undeliverable: *modified*: not to this link again; False by default.
        annotations: *modified*: to be merged into the message's annotations; None, the default: none.
        condition: *rejected*: why; None, the default: not said.
    """

    state: State
    failed: bool = False
    undeliverable: bool = False
    annotations: Mapping[str, object] | None = None
    condition: Condition | None = None

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
    """A source or a target, as it stands in an attach.

    Attributes:
        address: None, the default: it has none (a target without one: each message says where it goes).
        capabilities: Symbols, as `queue`; none by default.
        dynamic: The other side shall make a node, and say its address (part 3 §3.5.3); False by default.
    """

    address: str | None = None
    capabilities: tuple[str, ...] = ()
    dynamic: bool = False


# --- events ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Opened:
    """The other side opened the connection.

    Attributes:
        container: What it calls itself (container-id, part 2 §2.7.1).
        hostname: The host that it wants to speak to; None: it does not say.
        properties: As RabbitMQ's `product` and `version`; empty where it says none.
        capabilities: Offered, as `ANONYMOUS-RELAY`.
        sessions: How many sessions it allows at once, 1 or more (channel-max, and one).
        max_frame: The longest frame that it takes, in bytes.
    """

    container: str
    hostname: str | None
    properties: Mapping[str, Any]
    capabilities: tuple[str, ...]
    sessions: int
    max_frame: int


@attrs.frozen
class SessionOpened:
    """A session is open at both ends.

    Attributes:
        session: Which one: begun by us, or by the other side.
    """

    session: SessionHandle


@attrs.frozen
class SessionEnded:
    """The other side ended the session, or answered our end. Its links are gone with it, unsettled.

    Attributes:
        session: Which one.
        condition: Why; None: not said.
    """

    session: SessionHandle
    condition: Condition | None


@attrs.frozen
class LinkAttached:
    """The other side answered our attach.

    Attributes:
        link: Which one.
        remote: The source of a receiver, the target of a sender; None: refused, `LinkDetached` follows with the reason.
        properties: Of its attach (part 2 §2.7.3); empty where it says none.
        max_message: The longest message that it takes, in bytes, all sections together; None, the default: it names no
            limit.
    """

    link: LinkHandle
    remote: Terminus | None
    properties: Mapping[str, Any]
    max_message: int | None = None


@attrs.frozen
class LinkRequested:
    """The other side attaches a link: answer with `Engine.accept` or `Engine.refuse`. Seen from our end.

    Attributes:
        link: Our end: a sender where the other side wants to receive.
        source: As the other side wants it; None: there is none.
        target: The same.
        properties: Of its attach (part 2 §2.7.3); empty where it says none.
    """

    link: LinkHandle
    source: Terminus | None
    target: Terminus | None
    properties: Mapping[str, Any]


@attrs.frozen
class LinkDetached:
    """The other side detached the link, or answered our detach.

    Attributes:
        link: Which one.
        condition: Why; None: not said.
    """

    link: LinkHandle
    condition: Condition | None


@attrs.frozen
class Arrived:
    """Deliveries, in order.

    Attributes:
        link: On which link.
        arrivals: 1 or more, whole.
    """

    link: LinkHandle
    arrivals: Sequence[Arrival]


@attrs.frozen
class Aborted:
    """A delivery was given up by its sender, or was longer than we allow; it has spent one credit.

    Attributes:
        link: On which link.
    """

    link: LinkHandle


@attrs.frozen
class DispositionOf:
    """What became of a message that was sent.

    Attributes:
        link: On which link.
        number: As `Engine.send` returned it.
        disposition: What was said; None: settled, and nothing was said.
    """

    link: LinkHandle
    number: int
    disposition: Disposition | None


@attrs.frozen
class Spoken:
    """The sender has said an outcome of deliveries that came, or has settled them: they are not ours any more.

    Attributes:
        link: On which link.
        which: As `Arrival.pointer`, 1 or more; also of deliveries that nobody here holds.
    """

    link: LinkHandle
    which: frozenset[object]


@attrs.frozen
class CreditGranted:
    """The receiver at the other end wants messages.

    Attributes:
        link: On which link.
        credit: How many may be sent now, 0 or more (part 2 §2.6.7).
        drain: It wants them now, or to be told that there are none (`Engine.drained`).
    """

    link: LinkHandle
    credit: int
    drain: bool


@attrs.frozen
class Drained:
    """Our drain was answered: no credit is left, `unused` of it was not spent. Echoes waited for it.

    Attributes:
        link: On which link.
        unused: How much credit was left, in deliveries, 0 or more.
    """

    link: LinkHandle
    unused: int


@attrs.frozen
class Proved:
    """The other side answered an echo: what was written before it was seen there.

    Attributes:
        link: On which link.
        number: As `Engine.echo` returned it; earlier ones are proved, too.
    """

    link: LinkHandle
    number: int


@attrs.frozen
class Closed:
    """The other side closed the connection, or answered our close.

    Attributes:
        condition: Why; None: not said.
    """

    condition: Condition | None


@attrs.frozen
class Failed:
    """The connection cannot go on: a protocol error, a failed login, silence, the end of the stream.

    Attributes:
        condition: Why.
        refused: A failed login, or a peer that speaks something else.
    """

    condition: Condition
    refused: bool


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
