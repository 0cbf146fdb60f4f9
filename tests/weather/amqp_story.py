"""The story on an `EmbeddedBroker` that tells it what it does.

The broker stamps each message that it hands out with a number, as a delivery annotation, which no copy may carry on. By
it both sides of one hand-over are known as the same. A verb gets no answer here, so that what was written may be
unknown, and proved is what is booked (`exact` is false). Beside the invariants of tests/weather/story.py: there are
never more deliveries with a link than its credit, *released* is what no handler began, and the attempt is the count of
copies, the broker's count and one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import pytest
import trio

import links.amqp.embedded.broker
import links.amqp.embedded.exchange
import links.amqp.embedded.store
import links.amqp.link
import links.amqp.publisher
from links.amqp.embedded.broker import EmbeddedBroker, QueuePolicy
from links.amqp.embedded.exchange import Consumer as BrokersLink
from links.amqp.embedded.server_connection import ServerConnection
from links.amqp.embedded.store import Message, Store, StoredQueue
from links.amqp.engine.binding import lib
from links.amqp.engine.events import Condition, Disposition, State
from links.amqp.publisher import AmqpPublisher
from links.amqp.wire.sections import DELIVERY_ANNOTATIONS, HEADER, walk
from links.amqp.wire.values import MAP, compound, items, scalar, symbol, unsigned
from links.errors import LinkBroken
from settlement import Delivery, Letter
from settlement.amqp import Accepted, Modified, Rejected
from settlement.ledger import Line
from tests.weather.fates import Fate, Rules, Say
from tests.weather.story import HandOver, Story
from tests.weather.world import DEAD, QUEUE

__all__ = ["GRAVEYARD", "AmqpRules", "AmqpStory", "WatchedBroker", "is_sequence", "virtual_wall", "watched_broker"]

GRAVEYARD = "graveyard"
"""Where the broker puts what is rejected."""
_NAME: Final = re.compile(rb"(?:m|bad|x)[0-9]{4}")
"""Each message has one, as its message-id; a copy has the same."""
_STAMP: Final = "x-opt-hand-over"
_HEADER_CODE: Final = b"\x00\x53\x70"
_EPOCH: Final = 1.7e9
_SAYS: Final = {State.ACCEPTED: Say.ACCEPTED, State.REJECTED: Say.REJECTED, State.MODIFIED: Say.BACK}


class AmqpRules(Rules):
    """Of `settlement.amqp`."""

    accept, reject, back = Accepted(), Rejected(), Modified()
    counts = True
    """The broker's count is asked for."""

    def again(self, counted: bool) -> Fate:
        if self.at_most_once:
            return Fate(Line.REFUSED, None) if counted else Fate(Line.RETRIED, None, after="copy")
        return Fate(Line.RETRIED, Modified()) if counted else Fate(Line.RETRIED, Accepted(), before="copy")

    def later(self, delay: float, counted: bool) -> Fate:
        if self.at_most_once:
            return Fate(Line.DELAYED, None, after="copy", waits=self.delays == "copies")
        match self.delays, counted:
            case "copies", _:
                return Fate(Line.DELAYED, Rejected(), after="copy", waits=True)
            case "hold", True:
                return Fate(Line.DELAYED, Modified(), waits=True)
            case "native", True:
                return Fate(Line.DELAYED, Modified(delay))
            case "hold" | "native", False:
                return Fate(Line.DELAYED, Accepted(), before="copy", waits=True)
            case "scheduled", _:
                return Fate(Line.DELAYED, Accepted(), before="copy")
            case _:
                raise ValueError(self.delays)


class UncountedRules(AmqpRules):
    """Where the broker's count is not asked for."""

    counts = False


def is_sequence(name: bytes) -> bool:
    """Has this message a body that the transport cannot read?"""
    return name.startswith(b"bad") and name[-1] % 2 == 0


class AmqpStory(Story):
    """Hears a `WatchedBroker`."""

    exact = False
    broker: EmbeddedBroker

    def __init__(self, *, at_most_once: bool = False) -> None:
        super().__init__(QUEUE, DEAD, at_most_once=at_most_once)
        self.bases: dict[Message, int] = {}
        """The copies that each message counts."""

    def find(self, delivery: Delivery[Any]) -> HandOver:
        raw: bytes = delivery._handle.raw
        found = [scalar(raw, items(raw, at)[_STAMP]) for code, _, at, _ in walk(raw) if code == DELIVERY_ANNOTATIONS]
        assert len(found) == 1
        assert isinstance(found[0], int)
        return self.handed[found[0]]

    def on_disposition(self, message: Message, disposition: Disposition | None) -> None:
        """A client has said this."""
        it = self.present[message]
        if disposition is not None and disposition.state is State.RELEASED:
            self.on_returned(message, "taken back" if it.taken_back else "released", spent=False)
            return
        self.on_said(message, None if disposition is None else _SAYS[disposition.state])
        if disposition is not None and it.said is Say.BACK and not it.taken_back:
            verb = it.fate and it.fate.verb
            delayed = isinstance(verb, Modified) and verb.deliver_after is not None
            right = disposition.failed and not disposition.undeliverable and bool(disposition.annotations) == delayed
            self.check(right, f"{disposition}: {it}")

    def on_taken(self, it: HandOver, delivery: Delivery[Any]) -> None:
        assert isinstance(it.message, Message)
        assert isinstance(it.rules, AmqpRules)
        it.counted = delivery.redelivery_count is not None
        says = not it.first or it.message.raw.startswith(_HEADER_CODE)
        count = it.count if says and (it.rules.counts or is_sequence(it.name)) else None
        self.check(delivery.redelivery_count == count, f"{delivery.redelivery_count}, and {count} is the count: {it}")
        base = it.attempt - 1 - (count or 0)
        known = self.bases.setdefault(it.message, base)
        self.check(base == known, f"copies count {base}, and counted {known} before: {it}")
        if it.message not in self.copies:
            self.check(base == 0, f"{base} copies, and it is none: {it}")
        elif it.first:
            of = [each.attempt for each in self.handed if each.name == it.name and each.publishes("copy")]
            self.check(base in of, f"a copy counts {base}, those that were copied {of}: {it}")

    def judge_broker(self) -> None:
        queue = self.broker.store.queue(QUEUE)
        assert (len(queue), len(queue.delayed), queue.unsettled) == (0, 0, 0), "the queue is not empty"
        rejected = Counter(each.name for each in self.handed if each.said is Say.REJECTED)
        assert Counter(self.stored[GRAVEYARD]) == rejected, "the broker's own dead letters"


class WatchedStore(Store):
    story: AmqpStory

    def publish(self, address: str, raw: bytes, delivery_count: int = 0) -> list[StoredQueue]:
        queues = super().publish(address, raw, delivery_count)
        for queue in queues:
            message = queue._fresh[-1]
            self.story.on_stored(queue.name, _name_of(raw), message)
        return queues


class WatchedBroker(EmbeddedBroker):
    """Tells the story what it does."""

    latest: WatchedBroker

    def __init__(self, story: AmqpStory) -> None:
        policies = {QUEUE: QueuePolicy(dead_letter=GRAVEYARD)}
        super().__init__(policies=policies, idle_timeout=20.0)
        self.store = WatchedStore(policies, QueuePolicy())
        self.store.story = self.story = story
        story.broker = WatchedBroker.latest = self

    def settle(self, consumer: BrokersLink, message: Message, disposition: Disposition | None) -> None:
        self.story.on_disposition(message, disposition)
        super().settle(consumer, message, disposition)

    def leave(self, consumer: BrokersLink, *, failed: bool) -> None:
        for message in consumer.unsettled.values():
            self.story.on_returned(message, "broken" if failed else "detached")
        super().leave(consumer, failed=failed)

    def end_sessions(self, peer: ServerConnection, at_most: int) -> None:
        """End some sessions of a connection: their links are gone with them."""
        sessions = dict.fromkeys(link.session for link in [*peer.consumers, *peer.producers])
        for session in [*sessions][:at_most]:
            peer.engine.end(session, Condition("amqp:internal-error"))
            for link in [each for each in [*peer.consumers, *peer.producers] if each.session is session]:
                peer._gone(link, failed=False)
        peer.hurry()

    def take_back(self, peer: ServerConnection, state: State, at_most: int) -> None:
        """Say this of deliveries that a client holds, as RabbitMQ's consumer timeout does; the client settles them."""
        sent = {known: pointer for pointer, (_, known) in peer.engine._reader.sent.items()}
        held = [each for consumer in peer.consumers.values() for each in consumer.unsettled.items() if each[0] in sent]
        for number, message in held[:at_most]:
            self.story.present[message].taken_back = True
            lib.pn_delivery_update(sent[number], int(state))
        peer.hurry()


class _Stamped(Message):
    def encoded(self) -> bytes:
        broker = WatchedBroker.latest
        it = broker.story.on_handed(_name_of(self.raw), self, self.count, first=not self.returned)
        return _stamped(super().encoded(), it.number)


class _WatchedPeer(ServerConnection):
    broker: WatchedBroker

    def _tell(self) -> None:
        super()._tell()  # what came at once is one: a disposition, and behind it its credit
        story = self.broker.story
        for consumer in self.consumers.values():
            limit = max(each.limit for each in story.consumers)
            # what a drain has passed over has ended for us, and goes back with the detach
            held = [each for each in consumer.unsettled.values() if story.present[each].line is None]
            story.check(len(held) <= limit, f"{len(held)} with a link, of {limit}")


def _name_of(raw: bytes) -> bytes:
    """The message's name; empty: it has none."""
    found = _NAME.search(raw)
    return b"" if found is None else found[0]


def _stamped(raw: bytes, number: int) -> bytes:
    parts = walk(raw)
    assert all(code != DELIVERY_ANNOTATIONS for code, *_ in parts), "a copy carries delivery annotations"
    at = parts[0][3] if parts[0][0] == HEADER else 0
    entry = symbol(_STAMP) + unsigned(number)
    return raw[:at] + b"\x00\x53\x71" + compound(MAP, 2, entry) + raw[at:]


@contextmanager
def virtual_wall() -> Generator[None]:
    """Inside, the wall clock is trio's: a broker's own delay runs in virtual time, too."""
    wall = SimpleNamespace(time=lambda: _EPOCH + trio.current_time())
    with pytest.MonkeyPatch.context() as patch:
        for module in (links.amqp.embedded.exchange, links.amqp.link, links.amqp.publisher):
            patch.setattr(module, "time", wall)
        yield


@contextmanager
def watched_broker() -> Generator[None]:
    """Inside, one `WatchedBroker` works: its messages are stamped, and the wall clock is trio's."""
    send = AmqpPublisher.send

    async def sending(publisher: AmqpPublisher, letter: Letter) -> None:
        try:
            await send(publisher, letter)
        except LinkBroken:
            if letter.original is not None:
                name: bytes = letter.headers["message-id"]
                WatchedBroker.latest.story.on_unconfirmed(publisher.name, letter, name)
            raise

    with virtual_wall(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(links.amqp.embedded.store, "Message", _Stamped)
        patch.setattr(links.amqp.embedded.broker, "ServerConnection", _WatchedPeer)
        patch.setattr(AmqpPublisher, "send", sending)
        yield
