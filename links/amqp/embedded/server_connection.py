"""One connection of the embedded broker: its links, their credit, and what is unsettled on them.

It owns the links of one client. It hears the client by the engine's events and the exchange by plain calls, and tells
the exchange what was published and said. What a cancellation leaves: the client is gone without a goodbye, and what it
had unsettled is with its queue again, counted as failed.
"""

from __future__ import annotations

from collections.abc import Mapping

import trio

from links.amqp.embedded.exchange import Consumer, Exchange
from links.amqp.embedded.sasl_server import SaslServer
from links.amqp.embedded.server_engine import ServerEngine
from links.amqp.embedded.store import Message
from links.amqp.engine.driver import Driver
from links.amqp.engine.events import (
    ACCEPTED,
    Aborted,
    Arrived,
    Closed,
    Condition,
    CreditGranted,
    Disposition,
    DispositionOf,
    Event,
    LinkDetached,
    LinkRequested,
    Opened,
    SessionEnded,
    State,
)
from links.amqp.engine.handles import LinkHandle
from links.amqp.engine.settings import Settings
from links.amqp.wire.sections import split
from links.amqp.wire.values import Undecodable

__all__ = ["ServerConnection"]

_CREDIT = 256
"""Messages that a publisher may send ahead."""
_AHEAD = 1 << 20
"""Bytes that are sent to a connection before the last ones are written."""
_NOWHERE = Disposition(
    State.REJECTED,
    condition=Condition("amqp:precondition-failed", "neither the link nor the message says where it goes"),
)


class ServerConnection(Driver):
    """One client's connection."""

    def __init__(
        self,
        broker: Exchange,
        stream: trio.abc.Stream,
        settings: Settings,
        *,
        users: Mapping[str, str],
        anonymous: bool,
    ) -> None:
        self.sasl = SaslServer(users, anonymous=anonymous)
        """Who logged in."""
        self.gate = _Gate(stream)
        super().__init__(self.gate, ServerEngine(settings, self.sasl), self._on)
        self.broker = broker
        self.container = ""
        self.consumers: dict[LinkHandle, Consumer] = {}
        self.producers: dict[LinkHandle, str | None] = {}
        """Links that send to an address; None: each message says its own."""
        self.ahead = 0
        """Bytes sent and not written yet."""
        self._said_goodbye = False

    # --- for tests

    @property
    def unsettled(self) -> int:
        """How many deliveries this client has not settled."""
        return sum(len(consumer.unsettled) for consumer in self.consumers.values())

    def sever(self) -> None:
        """Cut the connection, without a word."""
        self.break_off("severed")

    def freeze(self) -> None:
        """Neither read nor write: as a process that is stopped, or a cable that is out."""
        self.gate.shut()

    def thaw(self) -> None:
        """Go on."""
        self.gate.open()

    def detach(self, address: str, condition: Condition) -> None:
        """Detach the links of this address, as for a queue that was deleted."""
        links = [each.link for each in self.consumers.values() if each.address == address]
        links += [link for link, to in self.producers.items() if to == address]
        for link in links:
            self.engine.detach(link, condition)
        self.hurry()

    # --- sending

    @property
    def has_room(self) -> bool:
        """May more be sent before the last bytes are written?"""
        return self.ahead < _AHEAD

    def deliver(self, consumer: Consumer, message: Message) -> None:
        """Send a message."""
        raw = message.encoded()
        number = self.engine.send(consumer.link, raw)
        self.ahead += len(raw)
        if consumer.link.presettled:
            consumer.queue.unsettled -= 1
        else:
            consumer.unsettled[number] = message
        self.hurry()

    def wrote(self) -> None:
        """All that was sent is written, but for what a client's session has no window for."""
        if self.ahead and not any(self.engine.queued(consumer.link) for consumer in self.consumers.values()):
            full, self.ahead = not self.has_room, 0
            if full:
                self.broker.dispatch(consumer.queue for consumer in self.consumers.values())

    # --- hearing

    def _on(self, event: Event) -> None:
        match event:
            case Arrived(link, arrivals):
                address = self.producers.get(link)
                for arrival in arrivals:
                    self.engine.settle(arrival, self._publish(address, arrival.raw))
                self.engine.grant(link, len(arrivals))
                self.hurry()  # a publisher waits for it
            case Aborted(link):
                self.engine.grant(link, 1)
                self.kick()
            case DispositionOf(link, number, disposition):
                consumer = self.consumers.get(link)
                message = None if consumer is None else consumer.unsettled.pop(number, None)
                if consumer is not None and message is not None:
                    self.broker.settle(consumer, message, disposition)
            case CreditGranted(link, _, drain):
                self.kick()  # it may ask for an echo
                if (consumer := self.consumers.get(link)) is not None:
                    consumer.draining = drain
                    self.broker.dispatch((consumer.queue,))
                    self.end_drain(consumer)
            case LinkRequested():
                self._requested(event)
            case LinkDetached(link):
                self._gone(link, failed=False)
            case SessionEnded(session):
                for link in [*self.consumers, *self.producers]:
                    if link.session is session:
                        self._gone(link, failed=False)
            case Opened(container):
                self.container = container
                self.engine.open()
                self.hurry()
            case Closed():
                self._said_goodbye = True
            case _:
                pass

    def _publish(self, address: str | None, raw: bytes) -> Disposition:
        if address is None:
            address = _destination(raw)
            if address is None:
                return _NOWHERE
            if (refusal := self.broker.refusal(address)) is not None:
                return Disposition(State.REJECTED, condition=refusal)
        self.broker.publish(address, raw)
        return ACCEPTED

    def end_drain(self, consumer: Consumer) -> None:
        """Answer a drain when the queue has nothing more, or the credit is used up."""
        if consumer.draining and not (len(consumer.queue) and consumer.credit > 0):
            consumer.draining = False
            self.engine.drained(consumer.link)
            self.hurry()

    def _requested(self, event: LinkRequested) -> None:
        link, source, target = event.link, event.source, event.target
        self.hurry()
        end = source if link.is_sender else target
        address = None if end is None else end.address
        refusal = self.broker.refusal(address)
        if end is None or refusal is not None or (address is None and (link.is_sender or end.dynamic)):
            condition = refusal or Condition(
                "amqp:not-implemented", "an address is needed; dynamic ones there are none"
            )
            if self.broker.refuses_by_session:
                self.engine.end(link.session, condition)
            else:
                self.engine.refuse(link, condition)
            return
        self.engine.accept(link, source, target)
        if link.is_sender and address is not None:
            subscribes = self.broker.is_topic(end)
            queue = self.broker.store.subscribe(address) if subscribes else self.broker.store.queue(address)
            self.consumers[link] = Consumer(self, link, queue, address, subscribes)
            self.broker.join(self.consumers[link])
        else:
            self.producers[link] = address
            self.engine.grant(link, _CREDIT)

    def _gone(self, link: LinkHandle, *, failed: bool) -> None:
        self.producers.pop(link, None)
        consumer = self.consumers.pop(link, None)
        if consumer is not None:
            self.broker.leave(consumer, failed=failed)

    def _ended(self) -> None:
        for link in tuple(self.consumers):
            self._gone(link, failed=not self._said_goodbye)
        self.producers.clear()


def _destination(raw: bytes) -> str | None:
    """Where a message itself says that it goes; None: it does not, or cannot be read."""
    try:
        to = split(raw).properties.to
    except (Undecodable, IndexError):
        return None
    return to if isinstance(to, str) and to else None


class _Gate(trio.abc.Stream):
    """A stream that can be shut."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._open = trio.Event()
        self._open.set()

    def shut(self) -> None:
        if self._open.is_set():
            self._open = trio.Event()

    def open(self) -> None:
        self._open.set()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._open.wait()
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data = await self._stream.receive_some(max_bytes)
        await self._open.wait()
        return data

    async def aclose(self) -> None:
        await self._stream.aclose()
