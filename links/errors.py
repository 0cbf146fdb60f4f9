"""Whose fault it is. Transports map their library's errors to these, and keep the original as `__cause__`.

    LinkError
    ├── LinkBroken             weather: this link's life is over, the next one may do better
    ├── ConnectionBroken       weather: the connection's life is over, and with it the lives of its links
    ├── CallBroken             weather: one call failed, the link lives on
    ├── LinkRefused            they said no: the queue is missing, the password is wrong, the table has no such column
    ├── NotConnected           nobody has opened this broker, or it was closed
    ├── PublishNotAccepted     they did not take this message
    └── SettlementError        one delivery's verb
        ├── LeaseLost          refused: the delivery is somebody else's now
        ├── AlreadySettled     nothing can be said: its sender had settled the message before it came
        ├── NotApplied         not carried out: the delivery stays unsettled
        └── SettlementUnknown  said, and no answer came
            └── TransactionEnded   the handler ended the transaction that was lent to it

A `TransactionHeld` is a mistake of the program, not of the other side: a `RuntimeError`.

No message, repr or note of these holds a credential.
"""

from __future__ import annotations

__all__ = [
    "AlreadySettled",
    "CallBroken",
    "ConnectionBroken",
    "LeaseLost",
    "LinkBroken",
    "LinkError",
    "LinkRefused",
    "NotApplied",
    "NotConnected",
    "PublishNotAccepted",
    "SettlementError",
    "SettlementUnknown",
    "TransactionEnded",
    "TransactionHeld",
]


class LinkError(Exception):
    """Anything that a transport says went wrong outside this program."""


class LinkBroken(LinkError):
    """A link's life is over: its supervisor starts the next one. Its deliveries are unsettled or unknown."""


class ConnectionBroken(LinkError):
    """A connection's life is over. No subclass of `LinkBroken`: a link's supervisor does not count it."""

    # DESIGN 4


class CallBroken(LinkError):
    """One call failed and changed nothing that its caller holds; the link lives on, try again."""


class LinkRefused(LinkError):
    """The other side said no. At start-up that is final; later it is weather, within the supervisor's patience."""


class NotConnected(LinkError):
    """The broker was not opened yet, or is closed: enter `open_runtime`, or `actors.connected(broker)`."""


class PublishNotAccepted(LinkError):
    """The message was not taken: it is nowhere but with you."""


class SettlementError(LinkError):
    """What became of one delivery's verb, where it was not simply said. A verdict of `Link.settle`, never raised."""


class LeaseLost(SettlementError):
    """The lease ran out or the ack id was refused: the delivery belongs to somebody else, nothing was changed."""


class AlreadySettled(SettlementError):
    """The message came settled, although at least once was asked for: nothing can be said of it, and it is gone."""


class NotApplied(SettlementError):
    """The verb was not carried out: the delivery stays unsettled and comes back."""


class SettlementUnknown(SettlementError):
    """The verb was said and its answer lost: settled or not, the message may come back."""


class TransactionEnded(SettlementUnknown):
    """The handler has committed or rolled back the transaction that was lent to it: what stands, nobody here knows."""


class TransactionHeld(RuntimeError):
    """A connection that was lent to a handler is used when it is lent no more."""
