"""One handler slot: asks the handler, has the outcome decided, orders the verb.

Owns the cancel scope of the delivery that it works on; where nobody but the end of grace could cancel that (no lease,
more than one handler at once), one scope serves all its deliveries, one after the other. Hears received deliveries over
a channel, one at a time, and parks only when that is empty. Tells the settler by `Order`; where a plan has steps before
its verb, a before-step task; where it has steps after, it takes room among the copies first. Cancelled, it says
nothing: the delivery is left unsettled, and the life books it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import trio

from actors.errors import HandlerFailed
from actors.events import HandlerErred, ids, log
from links.abc import Order, Received, Settles
from settlement.delivery import Delivery
from settlement.groups import raise_bare
from settlement.outcomes import Ack, is_outcome, no_outcome
from settlement.plans import Wait
from settlement.policy import Answer, Ending, FailFast

if TYPE_CHECKING:
    from actors.link import Life
    from actors.subscription import Subscription

__all__ = ["Worker"]

ACK = Ack()


class Worker:
    """What single and batch workers share: from an ending to an order."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._hand = life.hand
        self._keeper = life.keeper
        self._subscription = life.seat.subscription
        self._serial = self._subscription.concurrency == 1
        self._says = life.link_settles is Settles.ALONE
        """Verbs by a plain call, rather than through the settler's channel."""
        self.scope: trio.CancelScope | None = None
        """Of the handler that runs now; the end of grace cancels it."""

    async def run(self, work: trio.MemoryReceiveChannel[Received[Any]], orders: trio.MemorySendChannel[Order]) -> None:
        """Until the channel ends. Raises `HandlerFailed`, and in ALONE mode what ends the life."""
        raise NotImplementedError

    def _ours(self, received: Received[Any]) -> bool:
        """Asked when a delivery has left its channel: is it still ours? Else its place returns."""
        if received in self._hand.open and (self._keeper is None or not self._keeper.expired(received)):
            return True
        self._hand.free(received)
        return False

    def _decoded(self, received: Received[Any]) -> Delivery[Any] | Ending:
        """The delivery for the handler, or the answer to its being undecodable. Raises `HandlerFailed`."""
        delivery, decode = received.delivery, self._subscription.decode
        error = received.unreadable
        if error is None and decode is None:
            return delivery
        if error is None and decode is not None:
            try:
                message = decode(delivery.message)
            except Exception as failure:  # noqa: BLE001 -- a decoder may raise anything; the policy answers (C-6.3)
                error = failure
            else:
                return Delivery(
                    body=delivery.body,
                    message=message,
                    headers=delivery.headers,
                    attempt=delivery.attempt,
                    redelivery_count=delivery.redelivery_count,
                    source=delivery.source,
                    id=delivery.id,
                    key=delivery.key,
                    handle=delivery._handle,  # noqa: SLF001 -- the same delivery, with its message decoded
                )
        assert error is not None  # noqa: S101 -- the two cases above
        return self._answer(delivery, error, undecodable=True)

    def _answer(self, delivery: Delivery[Any], error: Exception, *, undecodable: bool = False) -> Ending:
        """The policy's answer to a failure. Raises `HandlerFailed` from it where that is `FailFast`."""
        policy, name = self._subscription.policy, self._subscription.name
        try:
            answer: Answer = (policy.undecodable if undecodable else policy.failed)(delivery, error)
        except Exception as failure:
            raise HandlerFailed(name, delivery) from failure
        self._life.seat.tell(HandlerErred(name, delivery, error, answer))
        if isinstance(answer, FailFast):
            raise HandlerFailed(name, delivery) from error
        what = "cannot be decoded" if undecodable else "failed"
        log.error("%s: delivery %s %s, answered %s", name, delivery.id, what, answer, exc_info=error)
        return answer

    async def _order(
        self, received: Received[Any], ending: Ending, orders: trio.MemorySendChannel[Order]
    ) -> trio.Event | None:
        """Have the ending decided and carried out.

        Returns what a worker at concurrency 1 waits for before its next delivery: the place's return, unless that has
        come already, or the delivery is held (DESIGN 3.1).
        """
        life, keeper = self._life, self._keeper
        plan = life.seat.source.decide(ending, received.delivery, self._subscription.policy)
        if plan.notice is not None:
            life.seat.books.noticed(received.delivery, plan.notice)
        if plan.before:
            life.walk(received, plan, orders)
            held = isinstance(plan.before[0], Wait)
            return self._hand.freeing(received) if self._serial and not held else None
        if plan.after and not await self._reserved(received):
            return None
        if keeper is not None and keeper.expired(received):
            self._hand.release(received)
            self._hand.free(received)
            return None
        order = Order(received, plan)
        if self._says:
            await life.settler.say([order])
            return None
        orders.send_nowait(order)
        return self._hand.freeing(received) if self._serial else None

    async def _reserved(self, received: Received[Any]) -> bool:
        """Take room among the copies, in the delivery's scope: the end of grace leaves it unsettled (DESIGN 3.7)."""
        with self._delivery_scope([received]) as scope:
            await self._hand.reserve(received)
        if scope.cancel_called:
            self._hand.release(received)
            self._hand.leave(received)
            return False
        return True

    async def _called(
        self, handler: Callable[[Any], Awaitable[object]], argument: Any, batch: Sequence[Received[Any]]
    ) -> tuple[object, Exception | None] | None:
        """Call the handler in a scope of its own: what it returned, and its failure; None where it was cancelled.

        Cancellation: nothing is answered, also where the handler swallowed `Cancelled` (DESIGN 3.5); an error of the
        handler is logged.
        """
        called: tuple[object, Exception | None] | None = None
        with self._delivery_scope(batch) as scope:
            called = await self._answered(handler, argument, batch)
        self.scope = None
        failure = None if called is None else called[1]
        await self._not_cancelled(batch, failure)
        if scope.cancel_called:
            self._log_late(batch, failure)
            return None
        return called

    async def _answered(
        self, handler: Callable[[Any], Awaitable[object]], argument: Any, batch: Sequence[Received[Any]]
    ) -> tuple[object, Exception | None]:
        """What the handler returned, and its failure. Cancellation: an error of the handler beside it is logged."""
        within = self._subscription.within
        for received in batch:
            received.started = True
        try:
            if within is None:
                return await handler(argument), None
            with trio.fail_after(within):
                return await handler(argument), None
        except Exception as error:  # noqa: BLE001 -- a handler may raise anything; the policy answers (C-1.3)
            return None, error
        except BaseExceptionGroup as group:
            errors, rest = group.split(Exception)
            self._log_late(batch, errors)
            raise_bare(cast("BaseException", rest))  # never empty: else the group were an Exception

    async def _not_cancelled(self, batch: Sequence[Received[Any]], failure: Exception | None) -> None:
        """A handler that swallowed `Cancelled` has answered nothing (DESIGN 3.5): raises it again."""
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
        except trio.Cancelled:
            self._log_late(batch, failure)
            raise

    def _log_late(self, batch: Sequence[Received[Any]], error: BaseException | None) -> None:
        """A handler failed although it was cancelled: no failure that a policy answers, and no secret either."""
        if error is not None:
            which = ids(received.delivery for received in batch)
            log.error("%s: delivery %s failed while it was cancelled", self._subscription.name, which, exc_info=error)

    def _delivery_scope(self, batch: Sequence[Received[Any]]) -> trio.CancelScope:
        """A scope that the end of grace and the keeper may cancel. `self.scope` stays set until the next one."""
        self.scope = scope = trio.CancelScope()
        if self._life.grace_over:
            scope.cancel()
        if self._keeper is not None:
            for received in batch:
                self._keeper.attend(received, scope)
        return scope


class SingleWorker(Worker):
    """Takes deliveries one by one."""

    _subscription: Subscription[Any]

    def __init__(self, life: Life) -> None:
        super().__init__(life)
        self._says = self._says or self._serial  # there is nothing to say together
        self._shares_scope = self._keeper is None and not self._says
        """Nobody but the end of grace cancels a delivery here, and no verb is said where it would be cancelled, too."""

    async def run(self, work: trio.MemoryReceiveChannel[Received[Any]], orders: trio.MemorySendChannel[Order]) -> None:
        """As `Worker.run`."""
        with work, orders:
            if self._shares_scope:
                await self._until_drained(work, orders)
            while (received := await _next(work)) is not None:
                if self._life.draining:
                    await self._life.give_back([received])
                elif self._ours(received):
                    await self._handle(received, orders)

    async def _until_drained(
        self, work: trio.MemoryReceiveChannel[Received[Any]], orders: trio.MemorySendChannel[Order]
    ) -> None:
        """Handle what comes, all in one scope, until the channel ends or a drain has begun."""
        received: Received[Any] | None = None
        with trio.CancelScope() as self.scope:
            if self._life.grace_over:
                self.scope.cancel()
            while (received := await _next(work)) is not None and not self._life.draining:
                if self._ours(received):
                    await self._handle_shared(received, orders)
                received = None
        if received is None:
            return
        if self.scope.cancel_called:  # by the end of grace, in the handler or before the first one
            self._hand.leave(received)
        else:
            await self._life.give_back([received])

    async def _handle_shared(self, received: Received[Any], orders: trio.MemorySendChannel[Order]) -> None:
        delivery = self._decoded(received)
        ending: Ending
        if isinstance(delivery, Delivery):
            result, failure = await self._answered(self._subscription.handler, delivery, (received,))
            await self._not_cancelled((received,), failure)
            ending = self._ending(delivery, result, failure)
        else:
            ending = delivery
        shared = self.scope
        await self._order(received, ending, orders)
        self.scope = shared

    async def _handle(self, received: Received[Any], orders: trio.MemorySendChannel[Order]) -> None:
        delivery = self._decoded(received)
        if not isinstance(delivery, Delivery):
            await self._carry_out(received, delivery, orders)
            return
        called = await self._called(self._subscription.handler, delivery, (received,))
        if called is None:
            self._hand.leave(received)
            return
        await self._carry_out(received, self._ending(delivery, *called), orders)

    def _ending(self, delivery: Delivery[Any], result: object, failure: Exception | None) -> Ending:
        """What a handler answered, or the policy for it. Raises `HandlerFailed`."""
        if failure is None and result is not None and not is_outcome(result):
            failure = no_outcome(result)
        return cast("Ending", result or ACK) if failure is None else self._answer(delivery, failure)

    async def _carry_out(self, received: Received[Any], ending: Ending, orders: trio.MemorySendChannel[Order]) -> None:
        if (freeing := await self._order(received, ending, orders)) is not None:
            await freeing.wait()


async def _next(work: trio.MemoryReceiveChannel[Received[Any]]) -> Received[Any] | None:
    """The next delivery, without a checkpoint where there is one; None: the channel has ended."""
    try:
        return work.receive_nowait()
    except trio.WouldBlock:
        try:
            return await work.receive()
        except trio.EndOfChannel:
            return None
    except trio.EndOfChannel:
        return None
