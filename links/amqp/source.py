"""A queue, a topic or a raw address of an AMQP broker as a source of deliveries."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import attrs
import trio

from links.abc import Broker, Link, Lost, Source
from links.amqp.addresses import Address, Queue, Topic
from links.amqp.connecting_broker import ConnectingBroker
from links.amqp.connection_life import AGAIN, ATTACH, ConnectionLife
from links.amqp.deliveries import can_be_counted
from links.amqp.engine.receiver import Receiver
from links.amqp.fitting import fitted
from links.amqp.link import AmqpLink
from links.amqp.publisher import AmqpPublisher
from links.amqp.rabbitmq import IS_A_STREAM, QueueInfo, advice, counts, delays_natively
from links.amqp.stored import StoringPublisher, address_of, letter_of
from links.amqp.unlearned import Unlearned
from links.errors import LinkBroken, LinkRefused
from settlement.amqp import AT_MOST_ONCE, Delays, Facts, Settle, Verb, decide
from settlement.delays import Copies, Hold, Native, Scheduled, Stored
from settlement.delivery import Delivery, Destination
from settlement.outcomes import RetryAfter
from settlement.plans import Plan, Publish, TooLong
from settlement.policy import Ending, Policy, positive

__all__ = ["AmqpSource"]

_log = logging.getLogger("trio_settlement")

PERSISTENT: Final = 60.0
"""Seconds for which a life waits for a management that was mute before."""


class AmqpSource(Source[bytes]):
    """Made by `AmqpBroker.queue`, `.topic` and `.raw`."""

    def __init__(
        self,
        broker: ConnectingBroker,
        address: Address,
        *,
        delays: Delays,
        settle: Settle,
        credit: int | None,
        count: str,
    ) -> None:
        given: object = delays
        if not isinstance(given, Copies | Hold | Native | Scheduled | Stored):
            raise ValueError(f"delays must be Copies(), Hold(…), Native(), Scheduled(…) or Stored(…), not {given!r}")
        if not isinstance(settle, Settle):
            raise ValueError(f"settle must be AT_LEAST_ONCE or AT_MOST_ONCE, not {settle!r}")
        if count not in ("broker", "copies"):
            raise ValueError(f"count must be 'broker' or 'copies', not {count!r}")
        self.broker = self._broker = broker
        self.name = address.name
        self.at_most_once = settle is AT_MOST_ONCE
        after = delays if isinstance(delays, Copies) else Copies() if self.at_most_once else None
        self.copies = 0 if after is None else after.max_waiting
        self.held = delays.max_held if isinstance(delays, Hold) else None
        self._address = address
        self._credit = None if credit is None else positive("credit", credit)
        self._delays = delays
        self._counted_by_broker = count == "broker"
        if isinstance(delays, Stored):
            delays = self._stored(delays.queue)
        to: str | Destination = address.name
        if isinstance(delays, Scheduled):
            to = AmqpPublisher(broker, address, annotation=delays.annotation)
        elif not isinstance(address, Queue):
            to = AmqpPublisher(broker, address)
        self._facts = Facts(to, delays, settle, broker.retry_header)
        copied = isinstance(delays, Copies | Scheduled | Stored) and not self.at_most_once
        self._uncounted = attrs.evolve(self._facts, delays=Hold(1)) if copied else None
        self._advised: set[str] = set()
        self._is_unlearned = False

    def __repr__(self) -> str:
        return f"<AmqpSource {self.name!r} on {self.broker.name}>"

    def _stored(self, queue: Destination) -> Stored:
        """The delays of the decision table, which publishes: into the store. It is remembered as ours."""
        if not isinstance(queue, Source):
            raise ValueError(f"Stored(queue) must be a queue, sql_broker.queue(table), not {queue!r}")
        self.store, into = queue.storage()
        return Stored(StoringPublisher(into, AmqpPublisher(self._broker, self._address)))

    def forwarded(self, delivery: Delivery[Any]) -> Publish:
        """As `Source.forwarded`: the row says where it goes."""
        to = AmqpPublisher(self._broker, address_of(delivery))
        return Publish(letter_of(delivery), to)

    def brokers(self) -> Sequence[Broker]:
        """As `Source.brokers`."""
        return (self.broker,) if self.store is None else (self.broker, self.store.broker)

    def limit(self, concurrency: int, size: int = 1) -> int:
        """The credit: as given, else 2 × concurrency × size; `Hold` adds the places of what it holds."""
        share = 2 * concurrency * size if self._credit is None else self._credit
        return share + (self._delays.max_held if isinstance(self._delays, Hold) else 0)

    def check(self, policy: Policy) -> None:
        """Refuse, by `ValueError`, a dead letter that is the queue itself: it would go round for ever."""
        to = policy.dead_letter
        publisher = self._broker.publisher(to) if isinstance(to, str) else to
        if isinstance(publisher, AmqpPublisher) and publisher.reaches(self._address, self._broker):
            raise ValueError(f"dead_letter must be another address than {self.name!r} itself")

    def decide(self, outcome: Ending, delivery: Delivery[Any], policy: Policy) -> Plan[Verb]:
        """The decision table of `settlement.amqp`.

        But a message that cannot be read at all is held for the delay of a `RetryAfter`, since no count can be written
        into a copy of it, which would go round for ever: the broker's own limit ends it. One whose copy or dead letter
        is longer than the peer takes goes back itself.
        """
        facts = self._facts
        if self._uncounted is not None and isinstance(outcome, RetryAfter) and not can_be_counted(delivery):
            facts = self._uncounted
        plan = decide(outcome, delivery, facts, policy)
        return fitted(plan, self._excess) if plan.before or plan.after else plan

    def _excess(self, step: Publish) -> TooLong | None:
        to = self._broker.publisher(step.to) if isinstance(step.to, str) else step.to
        return to.excess(step.letter) if isinstance(to, AmqpPublisher | StoringPublisher) else None

    @asynccontextmanager
    async def attach(
        self,
        subscription: str,
        lost: Lost,
        goodbye: float,
        policy: Policy = Policy(),
        *,
        limit: int = 1,  # noqa: ARG002 -- `receive` is told how much room there is
        size: int = 1,  # noqa: ARG002
    ) -> AsyncGenerator[Link[bytes], None]:
        """Ask the management of a RabbitMQ about the queue, begin a session, attach a receiver.

        Raises `LinkRefused` where the peer refuses the address, has no `Native` delay there, or it is a stream;
        `LinkBroken`, also where `Native` hangs on what cannot be learned now; `ConnectionBroken`. On the way out it
        detaches: what is unsettled goes back.

        Cancellation: the session is ended; the goodbye is shielded, within `goodbye`.
        """
        await self._broker.until_up()
        life = self._broker.life
        named = partial(self._named, subscription)

        def learned(info: QueueInfo) -> None:
            self._examine(life, info, subscription, policy)
            link.counts = self._counted_by_broker and counts(life.peer, info.kind)
            _log.info("subscription %r: queue %r is a %s queue", subscription, info.name, info.kind)

        try:
            queue = self._address.queue(life.peer) if life.peer.is_rabbitmq else None
            info = None if queue is None else await self._look(life, queue, subscription)
            self._examine(life, info, subscription, policy)
            unlearned = Unlearned(life, queue, learned, named) if info is None and queue is not None else None
            link = await self._attached(life, info, lost, unlearned)
        except LinkRefused as error:
            raise named(error) from error
        try:
            yield link
        finally:
            await link.say_goodbye(goodbye)  # noqa: ASYNC102 -- it shields itself, with a deadline

    def _named(self, subscription: str, error: LinkRefused) -> LinkRefused:
        return LinkRefused(f"subscription {subscription!r}: {self.name!r} on {self.broker.name}: {error}")

    async def _look(self, life: ConnectionLife, queue: str, subscription: str) -> QueueInfo | None:
        """What the peer says of the queue; None: it does not say, and the link asks again.

        Where `Native` hangs on it, that is weather: `LinkBroken`. Once it was said, the next lives are patient, so that
        no backoff stands between the answer and them.
        """
        until = trio.current_time() + (PERSISTENT if self._is_unlearned else 0.0)
        while True:
            try:
                info = await life.queue(queue)
            except LinkBroken as error:
                why = f"subscription {subscription!r}: the type of queue {queue!r} cannot be read: {error}"
                if not (isinstance(self._delays, Native) and delays_natively(life.peer, "quorum")):
                    self._advise(f"{why}; until it can, copies count")
                    return None
                self._is_unlearned = True
                if trio.current_time() >= until:
                    raise LinkBroken(f"{why}; delays=Native() needs to know it, it is asked again") from error
                await trio.sleep(AGAIN)
            else:
                self._is_unlearned = False
                return info

    def _examine(self, life: ConnectionLife, info: QueueInfo | None, subscription: str, policy: Policy) -> None:
        """Refuse what this peer cannot do, and say once what an operator should know."""
        kind = None if info is None else info.kind
        if kind == "stream":
            raise LinkRefused(IS_A_STREAM)
        if isinstance(self._delays, Native) and not delays_natively(life.peer, kind):
            where = life.peer.name if kind is None else f"a {kind} queue of {life.peer.name}"
            raise LinkRefused(
                f"delays=Native() needs a quorum queue of RabbitMQ 4.3 or newer, this is {where}; "
                "use Hold(…) or Copies() instead"
            )
        if isinstance(self._address, Topic):
            if life.peer.is_rabbitmq:
                raise LinkRefused("RabbitMQ has no topic to take from: bind a queue to the exchange, take from that")
            if policy.max_attempts is not None:
                self._advise(
                    f"subscription {subscription!r}: copies for max_attempts={policy.max_attempts} go to the topic "
                    f"{self.name!r}, so that every subscription of it gets them, also those that have acked"
                )
        if info is not None:
            has_dead_letter = policy.dead_letter is not None
            warning = advice(info, max_attempts=policy.max_attempts, has_dead_letter=has_dead_letter)
            if warning is not None:  # at every attach: it may be declared anew in between, and be lost all the same
                _log.warning("subscription %r: %s", subscription, warning)

    def _advise(self, warning: str) -> None:
        """Once per source: every life looks again."""
        if warning not in self._advised:
            self._advised.add(warning)
            _log.warning("%s", warning)

    async def _attached(
        self, life: ConnectionLife, info: QueueInfo | None, lost: Lost, unlearned: Unlearned | None
    ) -> AmqpLink:
        session = await life.connection.begin()
        receiver: Receiver | None = None
        try:
            terminus = self._address.on(life.peer)
            receiver = life.connection.attach_receiver(session, terminus, name=life.link_name("receiver"))
            with trio.move_on_after(ATTACH):
                await receiver.attached()
                return AmqpLink(
                    receiver,
                    source=self.name,
                    retry_header=self._broker.retry_header,
                    counts=self._counted_by_broker and counts(life.peer, None if info is None else info.kind),
                    at_most_once=self.at_most_once,
                    echoes=life.peer.is_rabbitmq or life.peer.is_embedded,
                    lost=lost,
                    unlearned=unlearned,
                )
        except BaseException:
            session.end()
            raise
        session.end()
        raise LinkBroken(f"{self.name!r} on {self.broker.name}: no answer to the attach within {ATTACH:g} s")
