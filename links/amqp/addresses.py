"""Where messages come from and go to: a queue, a topic, or an address as it stands. Pure.

What a name means is known when the peer is: RabbitMQ has its queues under `/queues/`, percent-encoded; elsewhere the
name is the address.
"""

from __future__ import annotations

from urllib.parse import quote, unquote

import attrs

from links.amqp.engine.events import Terminus
from links.amqp.rabbitmq import Peer

__all__ = ["Address", "Queue", "Raw", "Topic", "is_text"]

_QUEUES = "/queues/"
_DEFAULT_EXCHANGE = "/exchanges/amq.default/"


def is_text(text: str) -> bool:
    """Can a name on the wire say it? C would cut it at a NUL, into the name of something else."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _name(name: str) -> str:
    given: object = name
    if not isinstance(given, str) or not given:
        raise ValueError(f"name must be a str of 1 character or more, not {given!r}")
    if not is_text(name):
        raise ValueError(f"name must be Unicode text without NUL, not {name!r}")
    return name


@attrs.frozen
class Address:
    """An address. A `Destination` by its name. Raises `ValueError` for an empty one.

    Attributes:
        name: How it is spelled: 1 character or more, Unicode without NUL.
    """

    name: str = attrs.field(converter=_name)

    def on(self, peer: Peer) -> Terminus:  # noqa: ARG002 -- subclasses ask
        """The source or target of a link to this peer."""
        return Terminus(self.name)

    def queue(self, peer: Peer) -> str | None:  # noqa: ARG002 -- the same
        """The name of the queue, as the management of this peer knows it; None: it is no queue."""
        return None

    def is_place_of(self, other: Address) -> bool:
        """May a message to this address come out of the other one, however each is spelled, and whoever the peer is?"""
        return self == other or bool(self._queues() & other._queues())

    def _queues(self) -> frozenset[str]:
        """The queues that it may mean."""
        return frozenset()


@attrs.frozen
class Queue(Address):
    """A queue by its name.

    Attributes:
        name: Its name as it is, not percent-encoded: 1 character or more, Unicode without NUL.
    """

    def on(self, peer: Peer) -> Terminus:
        """As `Address.on`."""
        return Terminus(_QUEUES + quote(self.name, safe="") if peer.is_rabbitmq else self.name, ("queue",))

    def queue(self, peer: Peer) -> str | None:  # noqa: ARG002
        """As `Address.queue`."""
        return self.name

    def _queues(self) -> frozenset[str]:
        return frozenset((self.name,))


@attrs.frozen
class Topic(Address):
    """A topic: each link that takes from it gets every message (RabbitMQ 4 has none to take from).

    Attributes:
        name: Its address, which goes out as it stands: 1 character or more, Unicode without NUL.
    """

    def on(self, peer: Peer) -> Terminus:  # noqa: ARG002
        """As `Address.on`."""
        return Terminus(self.name, ("topic",))


@attrs.frozen
class Raw(Address):
    """An address that goes out as it stands, such as RabbitMQ's `/exchanges/<exchange>/<key>`.

    Attributes:
        name: The address, percent-encoded where the peer wants it so: 1 character or more, Unicode without NUL.
    """

    def queue(self, peer: Peer) -> str | None:
        """As `Address.queue`."""
        if peer.is_rabbitmq and self.name.startswith(_QUEUES):
            return unquote(self.name.removeprefix(_QUEUES))
        return None

    def _queues(self) -> frozenset[str]:
        """As it stands, and as RabbitMQ reads it: its default exchange routes by the queue's name."""
        ours = [self.name.removeprefix(start) for start in (_QUEUES, _DEFAULT_EXCHANGE) if self.name.startswith(start)]
        return frozenset((self.name, *map(unquote, ours)))
