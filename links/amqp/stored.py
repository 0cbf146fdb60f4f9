"""Copies that wait as rows of a queue table (`Stored`): the whole message as it will go out, and whither. Pure, but for
`StoringPublisher.send`.

The payload is the message, encoded: its sections spliced as in any copy, its retry count set. One header of the row
says the address: `amqp-queue`, `amqp-topic` or `amqp-raw`, with the name. So a row needs nobody who remembers it, and
any process that has the same store may publish it.
"""

from __future__ import annotations

from typing import Any, Final

import attrs

from links.abc import Publisher
from links.amqp.addresses import Address, Queue, Raw, Topic
from links.amqp.publisher import AmqpPublisher, Encoded
from links.amqp.wire.sections import walk
from links.amqp.wire.values import Undecodable
from links.errors import PublishNotAccepted
from settlement.delivery import Delivery, Letter
from settlement.plans import TooLong

__all__ = ["StoringPublisher", "address_of", "letter_of"]

_KINDS: Final[dict[str, type[Address]]] = {"amqp-queue": Queue, "amqp-topic": Topic, "amqp-raw": Raw}


class StoringPublisher(Publisher):
    """Stores letters to one address. `into`: the store; `to`: who will publish them."""

    def __init__(self, into: Publisher, to: AmqpPublisher) -> None:
        self.broker, self.name = into.broker, into.name
        self._into, self._to = into, to
        kind = next(name for name, each in _KINDS.items() if type(to.address) is each)
        self._headers = {kind: to.address.name.encode()}

    def __repr__(self) -> str:
        return f"<StoringPublisher to {self.name!r} on {self.broker.name}, for {self._to.name!r}>"

    async def send(self, letter: Letter) -> None:
        """Store one letter for its `deliver_after`; returns when that is committed.

        Raises as the store's publisher, and `PublishNotAccepted` where AMQP cannot carry the letter.

        Cancellation: it was stored or not.
        """
        try:
            raw = self._to.encoded(_at_once(letter))
        except ValueError as mistake:
            raise PublishNotAccepted(f"{self._to.name!r}: {mistake}") from None
        await self._into.send(Letter(raw, self._headers, deliver_after=letter.deliver_after))

    def excess(self, letter: Letter) -> TooLong | None:
        """As `AmqpPublisher.excess`: what could never be forwarded is not stored."""
        return self._to.excess(_at_once(letter))


def _at_once(letter: Letter) -> Letter:
    """The letter as it goes out when its time has come."""
    return attrs.evolve(letter, deliver_after=None)


def address_of(delivery: Delivery[Any]) -> Address:
    """Where a row's message goes. Raises `ValueError` for a row that does not say it, or says it twice."""
    said = [name for name in _KINDS if name in delivery.headers]
    if len(said) != 1:
        raise ValueError(f"it is no stored copy: one of the headers {', '.join(_KINDS)} must say where it goes")
    return _KINDS[said[0]](delivery.headers[said[0]].decode())


def letter_of(delivery: Delivery[Any]) -> Letter:
    """A row's message. Raises `ValueError` for what is none: a peer would break the connection at it."""
    try:
        walk(delivery.body)
    except Undecodable as error:
        raise ValueError(f"its payload is no AMQP message: {error}") from None
    if not delivery.body:
        raise ValueError("its payload is no AMQP message: it is empty")
    return Encoded(delivery.body)
