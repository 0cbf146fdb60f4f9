"""One handler slot: asks the handler, has the outcome decided, orders the verb.

Owns the cancel scope in which handlers run: the end of grace cancels it, a lost lease, or a link that says that its
delivery is somebody else's. Where verbs are said together, one scope serves one delivery after the other, since a scope
costs more than all else here; who cancels a delivery cancels it only while it is the worker's current one, and the
worker goes on in a new scope. Hears received deliveries from the backlog, one at a time, and parks only when that is
empty. Tells the settler by `order`; where a plan has steps before its verb, a before-step task; where it has steps
after, it takes room among the copies first. Cancelled from outside, it says nothing: the delivery is left unsettled,
and the life books it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn, cast

import attrs
import trio

from actors.backlog import Backlog
from actors.books import Books
from actors.drain import Drain
from actors.errors import HandlerFailed
from actors.events import ids, log
from actors.in_flight import InFlight
from actors.lease_keeper import LeaseKeeper
from actors.settler import Settler
from actors.subscription import AnySubscription, Subscription
from links.abc import Received, Settlement
from settlement.delivery import Delivery, decoded
from settlement.groups import raise_bare
from settlement.ledger import Line
from settlement.outcomes import Ack, is_outcome, no_outcome
from settlement.plans import Plan, Wait
from settlement.policy import Answer, Ending, FailFast

__all__ = ["Answered", "SingleWorker", "Tools", "Worker"]

ACK = Ack()


@attrs.frozen
class Tools:
    """What a life gives to its workers.

    Attributes:
        subscription: What the user declared.
        books: Hear failures.
        in_flight: Holds the places.
        keeper: Keeps leases; None: there are none.
        settler: Says verbs.
        drain: When handlers are cancelled.
        walk: Start the steps before a verb.
        give_back: These shall go back now, nothing is said for them.
    """

    subscription: AnySubscription
    books: Books
    in_flight: InFlight
    keeper: LeaseKeeper | None
    settler: Settler
    drain: Drain
    walk: Callable[[Received[Any], Plan[Any], trio.MemorySendChannel[None]], None]
    give_back: Callable[[Sequence[Received[Any]]], Awaitable[None]]


@attrs.define(eq=False)
class Answered:
    """A delivery that was answered, by its handler or by the policy.

    Attributes:
        received: Which one.
        ending: The answer.
        cause: The failure that the policy answered.
        plan: Where it was decided already.
    """

    received: Received[Any]
    ending: Ending
    cause: Exception | None = None
    plan: Plan[Any] | None = None


class Worker:
    """What single and batch workers share: from an ending to a settlement."""

    def __init__(self, tools: Tools) -> None:
        self._subscription = tools.subscription
        self._source = tools.subscription.source
        self._policy = tools.subscription.policy
        self._books = tools.books
        self._in_flight = tools.in_flight
        self._keeper = tools.keeper
        self._settler = tools.settler
        self._drain = tools.drain
        self._walk = tools.walk
        self._give_back = tools.give_back
        self._serial = tools.subscription.concurrency == 1
        self._scope: trio.CancelScope | None = None
        self._current: Sequence[Received[Any]] = ()
        """What the handler works on in that scope."""
        self._cancelled = False
        """The present scope was cancelled."""

    async def run(self, backlog: Backlog, wake: trio.MemorySendChannel[None]) -> None:
        """Until the backlog has ended. Raises `HandlerFailed`, and where verbs are said alone what ends the life."""
        raise NotImplementedError

    def cancel(self, received: Received[Any]) -> bool:
        """As `Holder.cancel`: only while it is the current one."""
        if received not in self._current:
            return False
        self.stop()
        return True

    def stop(self) -> None:
        """Cancel what runs now: the grace is over."""
        self._cancelled = True
        if self._scope is not None:
            self._scope.cancel()

    def _new_scope(self) -> trio.CancelScope:
        self._scope = scope = trio.CancelScope()
        self._cancelled = self._drain.grace_over.is_set()
        if self._cancelled:
            scope.cancel()
        return scope

    def _ours(self, received: Received[Any]) -> bool:
        """Asked before a handler starts: is it still ours? Else its place returns."""
        if received in self._in_flight.open and (self._keeper is None or not self._keeper.expired(received)):
            return True
        self._in_flight.leave(received, Line.SUPERSEDED)
        return False

    def _decoded(self, received: Received[Any]) -> Delivery[Any] | Answered:
        """The delivery for the handler, or the answer to its being undecodable. Raises `HandlerFailed`."""
        delivery, decode = received.delivery, self._subscription.decode
        error = received.unreadable
        if error is None:
            if decode is None:
                return delivery
            try:
                return decoded(delivery, decode(delivery.message))
            except Exception as failure:  # noqa: BLE001 -- a decoder may raise anything; the policy answers (C-6.3)
                error = failure
        answer = self._answered_by(self._policy.undecodable, [delivery], error, "cannot be decoded")[0]
        return Answered(received, answer, error)

    def _answered_by(
        self,
        policy: Callable[[Delivery[Any], Exception], Answer],
        deliveries: Sequence[Delivery[Any]],
        error: Exception,
        what: str = "failed",
    ) -> list[Ending]:
        """The policy's answer for each of these: one failure, one traceback in the log.

        Raises `HandlerFailed` from the failure where an answer is `FailFast`.
        """
        name = self._subscription.name
        answers: list[Ending] = []
        for delivery in deliveries:
            try:
                answer = policy(delivery, error)
            except Exception as failure:
                raise HandlerFailed(name, delivery) from failure
            self._books.erred(delivery, error, answer)
            if isinstance(answer, FailFast):
                raise HandlerFailed(name, delivery) from error
            answers.append(answer)
        said = ", ".join(dict.fromkeys(map(str, answers)))
        log.error("%s: delivery %s %s, answered %s", name, ids(deliveries), what, said, exc_info=error)
        return answers

    async def _carry_out(self, batch: Sequence[Answered], wake: trio.MemorySendChannel[None]) -> None:
        """Have these endings decided, and order what is to be said: by one call where verbs are said alone.

        At concurrency 1 it waits until each verb was said, or its delivery is held. Cancellation: what was
        not ordered is unsettled; what was is with the settler.
        """
        # DESIGN 3.1
        alone: list[Settlement] = []
        slots: list[trio.Event] = []
        for answered in batch:
            received = answered.received
            plan = self._decide(answered)
            if plan.before:
                waits = isinstance(plan.before[0], Wait)
                if waits and not await self._has_room(received, self._in_flight.hold):
                    continue
                self._walk(received, plan, wake)
                if self._serial and not waits:
                    slots.append(self._in_flight.slot(received))
                continue
            if plan.after:
                if alone:  # the copies of these may be what the room waits for
                    await self._settler.say(alone)
                    alone = []
                if not await self._has_room(received, self._in_flight.reserve):
                    continue
            settlement = Settlement(received, plan)
            if self._settler.alone:
                alone.append(settlement)
            else:
                self._settler.order(settlement, wake)
        if alone:
            await self._settler.say(alone)
        for slot in slots:
            await slot.wait()

    def _decide(self, answered: Answered) -> Plan[Any]:
        delivery = answered.received.delivery
        plan = answered.plan or self._source.decide(answered.ending, delivery, self._policy)
        if not plan.plain:
            self._books.decided(delivery, plan, answered.ending, answered.cause)
        return plan

    async def _has_room(self, received: Received[Any], take: Callable[[Received[Any]], Awaitable[None]]) -> bool:
        """Take room, in the delivery's scope: the end of grace leaves it unsettled."""
        # DESIGN 3.7
        self._current = (received,)
        with self._new_scope() as scope:
            await take(received)
        self._current = ()
        if scope.cancelled_caught:
            self._in_flight.leave(received)
            return False
        return True

    async def _call(
        self, handler: Callable[[Any], Awaitable[object]], argument: Any, batch: Sequence[Received[Any]]
    ) -> tuple[object, Exception | None] | None:
        """Call the handler in a scope of its own: what it returned, and its failure; None where nothing counts."""
        called: tuple[object, Exception | None] | None = None
        self._current = batch
        with self._new_scope():
            called = await self._answered(handler, argument, batch)
        self._current = ()
        return await self._counts(called, batch)

    async def _answered(
        self, handler: Callable[[Any], Awaitable[object]], argument: Any, batch: Sequence[Received[Any]]
    ) -> tuple[object, Exception | None]:
        """What the handler returned, and its failure. Cancellation: an error of the handler beside it is logged."""
        for received in batch:
            self._in_flight.open[received] = self
            received.started = True
        try:
            return await self._in_time(handler)(argument), None
        except Exception as error:  # noqa: BLE001 -- a handler may raise anything; the policy answers (C-1.3)
            return None, error
        except BaseExceptionGroup as group:
            self._raise_rest(group, batch)

    def _in_time(self, handler: Callable[[Any], Awaitable[object]]) -> Callable[[Any], Awaitable[object]]:
        """The handler, which fails when it takes too long."""
        name, within = self._subscription.name, self._subscription.within
        if within is None:
            return handler

        async def limited(argument: Any) -> object:
            with trio.move_on_after(within):
                return await handler(argument)
            raise trio.TooSlowError(f"{name}: a handler ran longer than within={within:g} s")

        return limited

    def _raise_rest(self, group: BaseExceptionGroup[BaseException], batch: Sequence[Received[Any]]) -> NoReturn:
        """A handler has failed while it was cancelled: log the failure, raise the rest."""
        errors, rest = group.split(Exception)
        self._log_late(batch, errors)
        raise_bare(cast("BaseException", rest))  # never empty: else the group were an Exception

    async def _counts(
        self, called: tuple[object, Exception | None] | None, batch: Sequence[Received[Any]]
    ) -> tuple[object, Exception | None] | None:
        """What was answered, asked when the scope has closed. None where it was cancelled.

        A handler that swallowed `Cancelled` has answered nothing. Cancellation: the same.
        """
        # DESIGN 3.5
        failure = None if called is None else called[1]
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
        except trio.Cancelled:
            self._log_late(batch, failure)
            raise
        if self._cancelled:
            self._log_late(batch, failure)
            return None
        return called

    def _log_late(self, batch: Sequence[Received[Any]], error: BaseException | None) -> None:
        """A handler failed although it was cancelled: no failure that a policy answers, and no secret either."""
        if error is not None:
            which = ids(received.delivery for received in batch)
            log.error("%s: delivery %s failed while it was cancelled", self._subscription.name, which, exc_info=error)


class SingleWorker(Worker):
    """Takes deliveries one by one."""

    _subscription: Subscription[Any]

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._handler = self._in_time(self._subscription.handler)

    async def run(self, backlog: Backlog, wake: trio.MemorySendChannel[None]) -> None:
        """As `Worker.run`."""
        with wake:
            received = await backlog.until_ready()
            while received is not None:
                following: Received[Any] | None = None
                if self._drain.requested.is_set():
                    await self._give_back([received])
                elif self._ours(received):
                    following = await self._handle(received, backlog, wake)
                received = following or backlog.take() or await backlog.until_ready()

    async def _handle(
        self, received: Received[Any], backlog: Backlog, wake: trio.MemorySendChannel[None]
    ) -> Received[Any] | None:
        """Handle this one, and in the same scope those after it, while a settlement is all that each of them needs.

        Returns a delivery that was taken and not begun.
        """
        handler, together, drain = self._handler, not self._settler.alone, self._drain.requested
        opened, decide, policy, keeper = self._in_flight.open, self._source.decide, self._policy, self._keeper
        undecoded = self._subscription.decode is None
        delivery = self._decoded(received)
        called: tuple[object, Exception | None] | None = None
        plan: Plan[Any] | None = None
        with self._new_scope():
            while isinstance(delivery, Delivery):
                called = plan = None
                self._current = (received,)
                opened[received] = self
                received.started = True
                try:
                    result = await handler(delivery)
                except Exception as error:  # noqa: BLE001 -- a handler may raise anything; the policy answers (C-1.3)
                    called = None, error
                    break
                except BaseExceptionGroup as group:
                    self._raise_rest(group, self._current)
                called = result, None
                await trio.lowlevel.checkpoint_if_cancelled()  # who swallowed `Cancelled` has answered nothing
                ending = ACK if result is None else result
                if not is_outcome(ending):
                    break
                plan = decide(ending, received.delivery, policy)
                if not (together and plan.plain):
                    break
                self._settler.order(Settlement(received, plan), wake)
                self._current = ()
                following = backlog.take() or await backlog.until_ready()
                if following is None or drain.is_set():
                    return following
                if following not in opened or (keeper is not None and keeper.expired(following)):
                    return following  # `_ours` says no, and what becomes of it
                received = following
                usual = undecoded and received.unreadable is None
                delivery = received.delivery if usual else self._decoded(received)
        if isinstance(delivery, Answered):
            await self._carry_out([delivery], wake)
        elif self._current:  # else the grace ended while it waited for the next one
            self._current = ()
            await self._finish(received, await self._counts(called, [received]), plan, wake)
        return None

    async def _finish(
        self,
        received: Received[Any],
        called: tuple[object, Exception | None] | None,
        plan: Plan[Any] | None,
        wake: trio.MemorySendChannel[None],
    ) -> None:
        if called is None:
            self._in_flight.leave(received)
            return
        result, failure = called
        if failure is None and result is not None and not is_outcome(result):
            failure = no_outcome(result, self._subscription.name)
        if failure is None:
            answered = Answered(received, cast("Ending", result or ACK), None, plan)
        else:
            (answer,) = self._answered_by(self._policy.failed, [received.delivery], failure)
            answered = Answered(received, answer, failure)
        await self._carry_out([answered], wake)
