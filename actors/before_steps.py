"""The steps before a verb: a task of its own walks them, while lease and place of the delivery are kept.

Owns the delivery's second cancel scope, which the lease keeper may cancel. Tells the settler by `order`, with a
wake of its own. A drain cuts a wait short; it gives a publish one last try, then says the plan's `instead`.
Cancelled, nothing is said: the delivery is unsettled, a letter may have been published twice.
"""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

import attrs
import trio

from actors.books import Books
from actors.drain import HURRY, Drain
from actors.events import log
from actors.in_flight import InFlight
from actors.lease_keeper import LeaseKeeper
from actors.letterbox import PUBLISH_FAILED, Letterbox
from actors.restarts import backoff
from actors.settler import Settler
from links.abc import Received, Settlement
from settlement.delivery import name_of
from settlement.ledger import Line
from settlement.plans import Plan, Publish, Wait

__all__ = ["BeforeSteps"]


@attrs.define(eq=False)
class BeforeSteps:
    """One walk, for one delivery.

    Attributes:
        received: Of which delivery.
        plan: Its steps are walked, then its verb is ordered.
        in_flight: Holds its place.
        keeper: Keeps its lease; None: there is none.
        settler: Says its verb.
        letterbox: Takes its letters.
        books: Hear what is degraded.
        drain: Cuts a wait short.
        scope: Cancelled where the delivery is no longer ours.
    """

    received: Received[Any]
    plan: Plan[Any]
    in_flight: InFlight
    keeper: LeaseKeeper | None
    settler: Settler
    letterbox: Letterbox
    books: Books
    drain: Drain
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _ordered: bool = attrs.field(default=False, init=False)
    _trying: trio.CancelScope | None = attrs.field(default=None, init=False)

    def cancel(self, received: Received[Any]) -> bool:  # noqa: ARG002 -- as `Holder.cancel`
        """The delivery is no longer ours, or its lease has lapsed. Before the walk has begun the cancel is kept."""
        if self._ordered:
            return False
        self.scope.cancel()
        return True

    async def run(self, wake: trio.MemorySendChannel[None]) -> None:
        """Walk, then order. Raises, where verbs are said alone, what ends the life."""
        with wake:
            plan: Plan[Any] | None = None
            with self.scope:
                plan = await self._walk()
                if plan is not None and plan.after:
                    await self.in_flight.reserve(self.received)
            self._ordered = plan is not None and not self.scope.cancel_called
            if plan is None or not self._ordered:
                self.in_flight.leave(self.received, Line.SUPERSEDED)  # nobody but the keeper and the link cancels it
            elif self.settler.alone:
                await self.settler.say([Settlement(self.received, plan)])
            else:
                self.settler.order(Settlement(self.received, plan), wake)

    async def _walk(self) -> Plan[Any] | None:
        """The plan whose verb is to be said; None where the lease has lapsed before a letter was published."""
        for step in self.plan.before:
            if isinstance(step, Wait):
                await self.drain.unless_requested(step.seconds)
                self.in_flight.end_hold(self.received)
            elif self._expired():
                return None
            elif not await self._published(step):
                return Plan(Line.RETRIED, self.plan.instead)
        return self.plan

    async def _published(self, step: Publish) -> bool:
        """Publish until confirmed; False where a drain's last try failed. A closed dead letter stops the line."""
        # DESIGN 3.6
        what = f"publishing to {name_of(step.to)}"
        failures = 0
        try:
            while True:
                last = self.drain.grace_over.is_set()
                error: object = "no answer within the goodbye"
                with trio.CancelScope() as self._trying:
                    if last:
                        self.last_try()
                    try:
                        await self.letterbox.post(step, partial(self.books.degrade, what, who=self))
                    except PUBLISH_FAILED as failed:
                        error = failed
                    else:
                        self.books.recover(what)
                        return True
                if last or self._trying.deadline < math.inf:  # it became the last one while it ran
                    log.warning(
                        "%s: delivery %s: %s failed until the drain's end, retried instead: %s",
                        *(self.books.subscription, self.received.delivery.id, what, error),
                    )
                    return False
                failures += 1
                self.books.degrade(what, error, self)
                await self._back_off(failures)
                if self._expired():
                    self.scope.cancel()
                    await trio.lowlevel.checkpoint_if_cancelled()
        finally:
            self.books.ceased(what, self)

    async def _back_off(self, failures: int) -> None:
        """Wait for the next try; a drain makes it come soon, the end of grace makes it the last."""
        delay = backoff(failures, random.random())  # noqa: S311
        if await self.drain.unless_requested(delay):
            return
        await self.drain.unless_grace_over(min(delay, HURRY))

    def last_try(self) -> None:
        """The grace is over: what is being tried is the last try, with half of the goodbye for it."""
        if self._trying is not None:
            self._trying.deadline = trio.current_time() + self.drain.goodbye / 2

    def _expired(self) -> bool:
        return self.keeper is not None and self.keeper.expired(self.received)
