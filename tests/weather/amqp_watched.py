"""An `EmbeddedBroker` that tells an `AmqpStory` what it does, and stamps what it hands out."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Final

import pytest
import trio

import links.amqp.embedded
import links.amqp.embedded_store
import links.amqp.link
import links.amqp.publisher
from links.amqp.embedded import EmbeddedBroker, QueuePolicy
from links.amqp.embedded_peer import Consumer as BrokersLink
from links.amqp.embedded_peer import Peer
from links.amqp.embedded_store import Message, Queue, Store
from links.amqp.events import Condition, Disposition
from links.amqp.publisher import AmqpPublisher
from links.amqp.sections import DELIVERY_ANNOTATIONS, HEADER, walk
from links.amqp.values import MAP, compound, symbol, unsigned
from links.errors import LinkBroken
from settlement.delivery import Letter
from tests.weather.amqp_story import STAMP, AmqpStory

__all__ = ["WatchedBroker", "virtual_wall", "watched_broker"]

_EPOCH: Final = 1.7e9


class WatchedStore(Store):
    story: AmqpStory

    def publish(self, address: str, raw: bytes, delivery_count: int = 0) -> list[Queue]:
        queues = super().publish(address, raw, delivery_count)
        for queue in queues:
            self.story.on_stored(queue.name, queue._fresh[-1])
        return queues


class WatchedBroker(EmbeddedBroker):
    """Tells the story what it does."""

    latest: WatchedBroker

    def __init__(self, story: AmqpStory, policies: dict[str, QueuePolicy], *, idle_timeout: float = 60.0) -> None:
        super().__init__(policies=policies, idle_timeout=idle_timeout)
        self.store = WatchedStore(policies, QueuePolicy())
        self.store.story = self.story = story
        self.delivering: BrokersLink
        story.broker = WatchedBroker.latest = self

    def settle(self, consumer: BrokersLink, message: Message, disposition: Disposition | None) -> None:
        self.story.on_said(message, disposition)
        super().settle(consumer, message, disposition)

    def leave(self, consumer: BrokersLink, *, failed: bool) -> None:
        for message in consumer.unsettled.values():
            self.story.on_returned(message, failed=failed)
        super().leave(consumer, failed=failed)

    def end_sessions(self, peer: Peer, at_most: int) -> None:
        """End some sessions of a connection: their links are gone with them."""
        sessions = dict.fromkeys(link.session for link in [*peer.consumers, *peer.producers])
        for session in [*sessions][:at_most]:
            peer.engine.end(session, Condition("amqp:internal-error"))
            for link in [each for each in [*peer.consumers, *peer.producers] if each.session is session]:
                peer._gone(link, failed=False)
        peer.hurry()


class _Stamped(Message):
    def encoded(self) -> bytes:
        broker = WatchedBroker.latest
        return _stamped(super().encoded(), broker.story.on_handed(broker.delivering, self))


class _WatchedPeer(Peer):
    broker: WatchedBroker

    def deliver(self, consumer: BrokersLink, message: Message) -> None:
        self.broker.delivering = consumer
        super().deliver(consumer, message)

    def _tell(self) -> None:
        super()._tell()  # what came at once is one: a disposition, and behind it its credit
        story = self.broker.story
        for consumer in self.consumers.values():
            limit = max(each.limit for each in story.consumers)
            # what a drain has passed over has ended for us, and goes back with the detach
            held = [each for each in consumer.unsettled.values() if story.present[each].line is None]
            story.check(len(held) <= limit, f"{len(held)} with a link, of {limit}")


def _stamped(raw: bytes, number: int) -> bytes:
    parts = walk(raw)
    assert all(code != DELIVERY_ANNOTATIONS for code, *_ in parts), "a copy carries delivery annotations"
    at = parts[0][3] if parts[0][0] == HEADER else 0
    entry = symbol(STAMP) + unsigned(number)
    return raw[:at] + b"\x00\x53\x71" + compound(MAP, 2, entry) + raw[at:]


@contextmanager
def virtual_wall() -> Generator[None, None, None]:
    """Inside, the wall clock is trio's: a broker's own delay runs in virtual time, too."""
    wall = SimpleNamespace(time=lambda: _EPOCH + trio.current_time())
    with pytest.MonkeyPatch.context() as patch:
        for module in (links.amqp.embedded, links.amqp.link, links.amqp.publisher):
            patch.setattr(module, "time", wall)
        yield


@contextmanager
def watched_broker() -> Generator[None, None, None]:
    """Inside, one `WatchedBroker` works: its messages are stamped, and the wall clock is trio's."""
    send = AmqpPublisher.send

    async def sending(publisher: AmqpPublisher, letter: Letter) -> None:
        try:
            await send(publisher, letter)
        except LinkBroken:
            WatchedBroker.latest.story.on_unconfirmed(publisher.name, letter)
            raise

    with virtual_wall(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(links.amqp.embedded_store, "Message", _Stamped)
        patch.setattr(links.amqp.embedded, "Peer", _WatchedPeer)
        patch.setattr(AmqpPublisher, "send", sending)
        yield
