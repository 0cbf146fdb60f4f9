"""A queue of a `MemoryBroker` as a source of deliveries."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import trio

from links.abc import Link, Lost, Settles, Source
from links.errors import ConnectionBroken, LinkBroken, LinkRefused
from links.memory.link import MemoryLink
from links.memory.publisher import MemoryPublisher
from links.memory.store import StoringBroker
from settlement.delays import Copies, Native
from settlement.delivery import Delivery
from settlement.memory import Delays, Facts, Verb, decide
from settlement.outcomes import seconds
from settlement.plans import Plan
from settlement.policy import Ending, Policy, positive

__all__ = ["MemoryQueue"]


class MemoryQueue(Source[bytes]):
    """A queue. Several sources of one name, and several links of one source, compete for its messages."""

    def __init__(
        self,
        broker: StoringBroker,
        name: str,
        *,
        delays: Delays,
        lease: float | None,
        limit: int | None,
        settles: Settles,
    ) -> None:
        if not name:
            raise ValueError("name must be 1 character or more, not an empty one")
        given: object = delays
        if not isinstance(given, Native | Copies):
            raise ValueError(f"delays must be Native() or Copies(...), not {given!r}")
        self.broker = self._broker = broker
        self.name = name
        self.settles = settles
        self.lease = None if lease is None else seconds("lease", lease, zero=False)
        self.copies = delays.max_waiting if isinstance(delays, Copies) else 0
        self._limit = None if limit is None else positive("limit", limit)
        self._facts = Facts(name, delays, broker.retry_header)

    def __repr__(self) -> str:
        return f"<MemoryQueue {self.name!r} on {self.broker.name}>"

    def limit(self, concurrency: int, size: int = 1) -> int:
        """As given; by default 2 × concurrency × size."""
        return 2 * concurrency * size if self._limit is None else self._limit

    def check(self, policy: Policy) -> None:
        """Refuse, by `ValueError`, a dead letter that is the queue itself: it would go round for ever."""
        to = policy.dead_letter
        if to == self.name or (isinstance(to, MemoryPublisher) and to.broker is self.broker and to.name == self.name):
            raise ValueError(f"dead_letter must be another queue than {self.name!r} itself")

    def decide(self, outcome: Ending, delivery: Delivery[Any], policy: Policy) -> Plan[Verb]:
        """The decision table of `settlement.memory`."""
        return decide(outcome, delivery, self._facts, policy)

    @asynccontextmanager
    async def attach(
        self,
        subscription: str,
        lost: Lost,
        goodbye: float,  # noqa: ARG002 -- the goodbye takes no time
        policy: Policy = Policy(),  # noqa: ARG002 -- takes every policy
        *,
        limit: int = 1,  # noqa: ARG002 -- `receive` is told how much room there is
        size: int = 1,  # noqa: ARG002
    ) -> AsyncGenerator[Link[bytes], None]:
        """Attach a link; its goodbye puts back what is unsettled, and takes no time.

        Cancellation: on the way in nothing is attached; the goodbye has no checkpoint.
        """
        await trio.lowlevel.checkpoint()
        broker, store = self._broker, self._broker.store(self.name)
        if broker.severed.is_set():
            raise ConnectionBroken(f"{subscription}: {broker.name} is {broker.presence.value}")
        if store.weather.refusing:
            raise LinkRefused(f"{subscription}: {broker.name} refuses {self.name!r} until admit({self.name!r})")
        if store.weather.broken_attaches:
            store.weather.broken_attaches -= 1
            raise LinkBroken(f"{subscription}: {self.name!r} on {broker.name} broke while it was attached")
        link = MemoryLink(store, lost, lease=self.lease, settles=self.settles)
        store.links.append(link)
        try:
            yield link
        finally:
            link.end(LinkBroken, "detached", orderly=True)
