"""The steps before a verb: a task of its own walks them, while lease and place of the delivery are kept.

Owns the delivery's second cancel scope, which the lease keeper may cancel. Tells the settler by `Order`, through a
sender of its own. A drain cuts a wait short; it gives a publish one last try, then says the plan's `instead`.
Cancelled, nothing is said: the delivery is unsettled, a letter may have been published twice.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import attrs
import trio

from actors.drain import HURRY
from actors.events import log
from actors.publisher import PUBLISH_FAILED
from actors.restarts import backoff
from links.abc import Order, Received, Settles
from settlement.delivery import name_of
from settlement.ledger import Line
from settlement.plans import Plan, Publish, Wait

if TYPE_CHECKING:
    from actors.link import Life

__all__ = ["BeforeSteps"]


class BeforeSteps:
    """One walk, for one delivery."""

    def __init__(self, life: Life, received: Received[Any], plan: Plan[Any]) -> None:
        self._life = life
        self._received = received
        self._plan = plan
        self.scope = trio.CancelScope()
        self._trying: trio.CancelScope | None = None

    async def run(self, orders: trio.MemorySendChannel[Order]) -> None:
        """Walk, then order. Raises in ALONE mode what ends the life."""
        life, received = self._life, self._received
        with orders:
            plan: Plan[Any] | None = None
            with self.scope:
                plan = await self._walk()
            if plan is None or self.scope.cancel_called or self._lost():
                life.hand.leave(received)
                return
            order = Order(received, plan)
            if life.link_settles is Settles.ALONE:
                await life.settler.say([order])
            else:
                orders.send_nowait(order)

    async def _walk(self) -> Plan[Any] | None:
        """The plan whose verb is to be said; None where the delivery was lost on the way."""
        for step in self._plan.before:
            if isinstance(step, Wait):
                await self._life.seat.drain.unless_requested(step.seconds)
            elif self._lost():
                return None
            elif not await self._published(step):
                return attrs.evolve(self._plan, line=Line.RETRIED, verb=self._plan.instead, before=(), after=())
        return self._plan

    async def _published(self, step: Publish) -> bool:
        """Publish until confirmed; False where a drain's last try failed. A closed dead letter stops the line (3.6)."""
        seat = self._life.seat
        what = f"publishing to {name_of(step.to)}"
        failures = 0
        while True:
            last = seat.drain.grace_over.is_set()
            error: object = "no answer within the goodbye"
            with trio.CancelScope() as self._trying:
                if last:
                    self.last_try()
                try:
                    await seat.letterbox.post(step)
                except PUBLISH_FAILED as failed:
                    error = failed
                else:
                    seat.books.recover(what)
                    return True
            if last or self._trying.deadline < math.inf:  # it became the last one while it ran
                log.warning(
                    "%s: delivery %s: %s failed until the drain's end, retried instead: %s",
                    *(seat.subscription.name, self._received.delivery.id, what, error),
                )
                return False
            failures += 1
            seat.books.degrade(what, error)
            await self._back_off(failures)
            if self._lost():
                return False

    async def _back_off(self, failures: int) -> None:
        """Wait for the next try; a drain makes it come soon, the end of grace makes it the last."""
        drain = self._life.seat.drain
        delay = backoff(failures, random.random())  # noqa: S311
        if await drain.unless_requested(delay):
            return
        await drain.unless_grace_over(min(delay, HURRY))

    def last_try(self) -> None:
        """The grace is over: what is being tried is the last try, with half of the goodbye for it."""
        if self._trying is not None:
            self._trying.deadline = trio.current_time() + self._life.seat.drain.goodbye / 2

    def _lost(self) -> bool:
        keeper = self._life.keeper
        return keeper is not None and keeper.expired(self._received)
