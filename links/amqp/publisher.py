"""Publishes to one address; a message is confirmed when the peer has accepted it."""

from __future__ import annotations

import time
from typing import Final

import attrs

from links.abc import Publisher
from links.amqp.addresses import Address
from links.amqp.connecting_broker import ConnectingBroker
from links.amqp.deliveries import due_at, raw_of
from links.amqp.engine.events import State
from links.amqp.engine.sender import Sent
from links.amqp.wire.messages import copy, encode, with_annotation
from links.errors import ConnectionBroken, LinkBroken, LinkRefused, PublishNotAccepted
from settlement.attempts import header_count
from settlement.delivery import Letter, check_letter
from settlement.plans import TooLong

__all__ = ["AmqpPublisher", "Encoded"]

_ADDED: Final = 1024
"""Bytes, at most, that a copy is longer than its original, without the name of the header."""


@attrs.frozen(eq=False)
class Encoded(Letter):
    """A letter whose body is a whole message, as this transport encoded it before: it goes out as it is.

    Attributes:
        body: The message; what follows is nobody's concern.
        headers: None by default.
        key: None by default.
        deliver_after: None by default.
        original: None by default.
    """


class AmqpPublisher(Publisher):
    """Made by `AmqpBroker.publisher`. `annotation`: how this broker is told when a message is due (`Scheduled`)."""

    def __init__(self, broker: ConnectingBroker, address: Address, *, annotation: str | None = None) -> None:
        self.broker = self._broker = broker
        self.name = address.name
        self.address = address
        self._annotation = annotation
        self._letters = broker.letters(address)

    def __repr__(self) -> str:
        return f"<AmqpPublisher to {self.name!r} on {self.broker.name}>"

    def reaches(self, source: Address, broker: ConnectingBroker) -> bool:
        """May what it publishes come out of this source, of this broker?"""
        return self.address.is_place_of(source) and self._broker.shares_queues_with(broker)

    async def send(self, letter: Letter) -> None:
        """Send one message and wait until it is accepted; others may be on their way at the same time.

        A copy of a delivery of this transport is spliced from its raw form. Raises `PublishNotAccepted` where the peer
        answers with another outcome (RabbitMQ's *released*: no queue is bound) or refuses a link to the address, and
        where AMQP cannot carry the letter; else as `Publisher.publish`.

        Cancellation: the message was sent or not; one that had no credit yet was not.
        """
        try:
            raw = self.encoded(letter)
        except ValueError as mistake:
            raise PublishNotAccepted(f"{self.name!r}: {mistake}") from None
        sent = await self._sent(raw)
        try:
            answer = await sent.answered()
        except (ConnectionBroken, LinkBroken) as error:
            text = f"{self.name!r} on {self.broker.name}: {error}; the message may be there or not"
            raise LinkBroken(text) from error
        if answer is None or answer.state is not State.ACCEPTED:
            answered = "settled without an outcome" if answer is None else str(answer)
            why = f": {answer.condition}" if answer is not None and answer.condition is not None else ""
            unrouted = "; is a queue bound there?" if answer is not None and answer.state is State.RELEASED else ""
            raise PublishNotAccepted(f"{self.name!r} on {self.broker.name}: {answered}{why}{unrouted}")

    def excess(self, letter: Letter) -> TooLong | None:
        """How much too long a letter is for what is known of the peer; None: it fits, or nothing is known. Plain."""
        most = self._broker.life.most(self.address) if self._broker.lives else None
        raw = raw_of(letter.original)
        if most is None or (raw is not None and len(raw) + len(self._broker.retry_header) + _ADDED <= most):
            return None
        try:
            length = len(self.encoded(letter))
        except ValueError:
            return None  # `send` says why it cannot be encoded
        return TooLong(self.name, length, most) if length > most else None

    async def _sent(self, raw: bytes) -> Sent:
        """Send in this life of the connection, or the next one. Whatever it raises, nothing was sent."""
        try:
            return await self._letters.send(raw)
        except (LinkRefused, LinkBroken) as error:
            text = f"{self.name!r} on {self.broker.name}: {error}; nothing was sent"
            raise PublishNotAccepted(text) from error

    def encoded(self, letter: Letter) -> bytes:
        """The message that is sent for it. Raises `ValueError` for what AMQP cannot carry. Plain."""
        check_letter(letter)
        if isinstance(letter, Encoded):  # whoever is logged in now may be another than when it was stored
            return copy(letter.body, user=self._broker.user, lasting=False)
        raw = raw_of(letter.original)
        if raw is None:
            raw = encode(letter, durable=self._broker.durable)
        elif letter.headers is letter.original.headers:
            raw = copy(raw, user=self._broker.user)
        else:
            name = self._broker.retry_header
            count = header_count(letter.headers, name)
            raw = copy(raw, retry_header=name, attempt=count, user=self._broker.user)
        if letter.deliver_after is None:
            return raw
        if self._annotation is None:
            raise ValueError("only Scheduled(annotation) lets an AMQP broker wait; this publisher has no annotation")
        if self._annotation.endswith("time"):
            return with_annotation(raw, self._annotation, due_at(time.time(), letter.deliver_after))
        return with_annotation(raw, self._annotation, int(due_at(0.0, letter.deliver_after)))
