"""The link of the forms that hold a connection for each row in hand, for every dialect: claim, settle, let go.

Owns as many slots as there are places. A slot is an actor of its own: it owns one connection, claims a row with it,
watches the connection while a handler works, and carries out what a worker orders; nobody else touches that connection.
On an empty queue one slot looks and the others wait for it. Whoever finds a row sends the next one to look, and while
there are rows they look side by side.

Tells `lost` where a connection ended under a delivery: its claim has ended with it, and the row is free again. A
cancellation leaves no row claimed: the connection of each slot is closed, at the latest. What is shielded, and how
long: a settlement, the giving back and the goodbye, for one `goodbye` at most each.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NoReturn, TypeVar

import attrs
import trio

from links.abc import Link, Lost, Received, Settlement, Verdict
from links.errors import (
    CallBroken,
    ConnectionBroken,
    LeaseLost,
    LinkRefused,
    NotApplied,
    SettlementUnknown,
    TransactionEnded,
    TransactionHeld,
)
from links.sql.jobs import Passing, Pin, PinForm
from links.sql.patience import Patience
from links.sql.rows import Row, RowReader
from links.sql.wakes import Tell, Wakes, wake_for
from settlement.delivery import Delivery
from settlement.ledger import Line
from settlement.sql import Verb

__all__ = ["Claimed", "PinnedLink"]

R = TypeVar("R")

_log = logging.getLogger("trio_settlement")

_FIRST: Final = 1.0
_LONGEST: Final = 60.0
"""Seconds for which a row is passed over that could not be settled; the first time, and the longest."""
CLAIM: Final = 30.0
"""Seconds after which a claim is given up: somebody has locked the whole table, or the server is mute."""
_RECONNECT: Final = (0.05, 5.0)
"""Seconds between two tries to connect: the first, and the longest."""


@attrs.define(eq=False)
class _Order:
    """What a slot is to do with its row: say a verb, or (None) let it go."""

    verb: Verb | None
    keep: bool = False
    """What the handler wrote on the connection stands."""
    verdict: Verdict = None
    done: trio.Event = attrs.Factory(trio.Event)


class Claimed:
    """One claim of a slot, the handle of its delivery: a later claim of the same row is another one."""

    __slots__ = ("slot",)

    def __init__(self, slot: Slot) -> None:
        self.slot = slot


class PinnedLink(Link[R]):
    """One life of a queue in the row-lock form; made by `SqlQueue.attach`, which runs it."""

    def __init__(
        self,
        form: PinForm,
        over: Callable[[], Awaitable[ConnectionBroken]],
        wakes: Wakes,
        tell: Tell,
        lost: Lost,
        *,
        source: str,
        subscription: str,
        goodbye: float,
        limit: int,
    ) -> None:
        self._form, self._wakes, self._tell, self._lost = form, wakes, tell, lost
        self._reader: RowReader[R] = RowReader(form.table, source)
        self._over = over
        self.subscription, self.goodbye = subscription, goodbye
        self._slots = [Slot(self, form.pin()) for _ in range(limit)]
        self._at: dict[Received[R], Slot] = {}
        """Where each row in hand is."""
        self._ready: deque[Received[R]] = deque()
        self._taken = trio.lowlevel.ParkingLot()
        """Where `receive` waits."""
        self._turns = trio.lowlevel.ParkingLot()
        """Where slots wait for their turn to look."""
        self._empty = True
        """Has the last look found nothing?"""
        self._looker: Slot | None = None
        """Who looks at the empty queue."""
        self._stopped = False
        self._refused: LinkRefused | None = None
        self._over_at: dict[Any, tuple[float, float]] = {}
        """Rows that are passed over, by id: until when, and for how long."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the slots, until cancelled.

        Cancellation: no row is claimed; a statement that is under way has one goodbye to end in.
        """
        try:
            async with trio.open_nursery() as nursery:
                for slot in self._slots:
                    nursery.start_soon(slot.run)
                task_status.started()
        finally:
            for slot in self._slots:
                slot.pin.close()

    # --- what workers and the intake ask -----------------------------------------------------------------------------

    async def receive(self, room: int) -> Sequence[Received[R]]:
        """Take what slots have claimed. Raises `LinkRefused` where the table is no queue any more.

        Cancellation: nothing was taken; what is claimed waits here.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._ready:
            if self._refused is not None:
                raise LinkRefused(str(self._refused)) from self._refused.__cause__
            await self._taken.park()
        return [self._ready.popleft() for _ in range(min(room, len(self._ready)))]

    def stop(self) -> None:
        """Claim nothing more; what is claimed and was not taken is let go."""
        self._stopped = True
        while self._ready:
            self._order(self._ready.popleft(), None)

    async def until_broken(self) -> NoReturn:
        """Wait until the connections' life is over, and raise why. Cancellation: nothing was done."""
        why = await self._over()
        raise ConnectionBroken(f"{self.subscription!r}: {why}") from why.__cause__

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Verdict]:
        """Carry out each verb on the connection of its row, and end the claim.

        Where a verb was not applied the claim lives on. Cancellation: shielded for a goodbye at most; so the verdicts
        are true, and a cancellation is noticed at the caller's next checkpoint.
        """
        patience = Patience(self.goodbye, ())
        orders = [self._order(each.received, each.plan.verb, keep=each.plan.line is Line.ACKED) for each in settlements]
        verdicts: list[Verdict] = []
        for settlement, order in zip(settlements, orders, strict=True):
            verb: Verb | None = settlement.plan.verb
            what = f"{self.subscription!r}: row {settlement.received.delivery.id}"
            if order is None:
                verdicts.append(LeaseLost(f"{what}: its connection has ended, and the claim with it"))
            elif await patience.until(order.done):
                verdicts.append(order.verdict)
                if order.verdict is None and verb is not None:
                    wake_for(verb, self._form.table.name, self._wakes, self._tell)
            else:
                if (slot := self._at.get(settlement.received)) is not None:
                    slot.give_up()
                why = f"{what}: the database has not answered within {patience.waited:.1f} s"
                verdicts.append(SettlementUnknown(why))
        return verdicts

    def forget(self, received: Received[R]) -> None:
        """Nothing will be said for this one: let it go. A plain call."""
        self._order(received, None)

    async def give_back(self, unsettled: Sequence[Received[R]]) -> None:
        """Let these go, the rows as they were.

        Cancellation: they are let go all the same.
        """
        for order in [self._order(received, None) for received in unsettled]:
            if order is not None:
                await order.done.wait()

    async def say_goodbye(self) -> None:
        """Let go all that is still held: shielded, within `goodbye`; then the connections are closed."""
        self.stop()
        with trio.move_on_after(self.goodbye, shield=True):
            await self.give_back([*self._at])

    def _order(self, received: Received[R], verb: Verb | None, *, keep: bool = False) -> _Order | None:
        slot = self._at.get(received)
        return None if slot is None else slot.order(verb, keep=keep)

    # --- what slots ask ----------------------------------------------------------------------------------------------

    async def turn(self, slot: Slot) -> Passing:
        """Wait until it is worth to look. Cancellation: nothing was done."""
        while self._stopped or (self._empty and self._looker is not None):
            await self._turns.park()
        if self._empty:
            self._looker = slot
            try:
                await self._wakes.until_due()
            except BaseException:
                self._looker = None
                self._turns.unpark()
                raise
            self._wakes.look()
        now = trio.current_time()
        return Passing((), frozenset(row for row, (until, _) in self._over_at.items() if now < until))

    def looked(self, slot: Slot, row: Row | None) -> Received[R] | None:
        """What a slot has found: the next one's turn, at once where there was something."""
        if self._looker is slot:
            self._looker = None
        self._empty = row is None
        self._turns.unpark()
        if row is None:
            return None
        slot.claimed = Claimed(slot)
        received = self._reader.read(row, None, slot.claimed)
        self._at[received] = slot
        if self._stopped:
            slot.order(None)
        else:
            self._ready.append(received)
            self._taken.unpark()
        return received

    def ended(self, received: Received[R]) -> None:
        """The claim of this one has ended."""
        self._at.pop(received, None)

    def lose(self, received: Received[R], why: str) -> None:
        """The connection of this one has ended."""
        self.ended(received)
        if received in self._ready:  # nobody has seen it
            self._ready.remove(received)
            return
        _log.warning("%s: the claim of delivery %s has ended: %s", self.subscription, received.delivery.id, why)
        self._lost(received, Line.UNSETTLED)

    def pass_over(self, received: Received[R]) -> None:
        """It could not be settled, and is free again: not at once a second time."""
        now = trio.current_time()
        for row in [row for row, (until, _) in self._over_at.items() if until < now - _LONGEST]:
            del self._over_at[row]
        _, length = self._over_at.get(received.token[0], (0.0, _FIRST / 2))
        length = min(2 * length, _LONGEST)
        self._over_at[received.token[0]] = (now + length, length)
        self._wakes.wake_at(now + length)

    def refuse(self, error: LinkRefused) -> None:
        """The table is no queue any more."""
        self._refused = error
        self._taken.unpark_all()

    def trouble(self, why: str | None) -> None:
        """Claims cannot be made, or (None) can again."""
        if why is not None:
            self._wakes.wake()  # nobody has seen what there is
        self.degraded("to claim on a connection for each delivery", why)


class Slot:
    """One place: a connection, and the row that it holds."""

    def __init__(self, link: PinnedLink[Any], pin: Pin) -> None:
        self._link, self.pin = link, pin
        self.claimed: Claimed | None = None
        """The last claim."""
        self._held: Received[Any] | None = None
        self._orders: deque[_Order] = deque()
        self._watch: trio.CancelScope | None = None
        self._at_work: trio.CancelScope | None = None
        self._lent = False
        self._told = trio.lowlevel.ParkingLot()
        """Where the slot waits while its connection is lent, and who borrows it until the watch is off."""

    def order(self, verb: Verb | None, *, keep: bool = False) -> _Order:
        """Have this done with the row; a plain call. What was lent is taken back."""
        order = _Order(verb, keep)
        self._orders.append(order)
        self.take_back()
        if self._watch is not None:
            self._watch.cancel()
        return order

    async def lend(self, delivery: Delivery[Any], claimed: Claimed) -> Any:
        """The connection that holds this delivery's row by this claim, for its handler.

        Raises `TransactionHeld` where it holds it no more, or is lent already. Cancellation: nothing is lent.
        """
        if self._held is None or self.claimed is not claimed or self._orders:
            raise TransactionHeld(f"{delivery.source!r}: delivery {delivery.id} is in hand no more")
        if self._lent:
            raise TransactionHeld(f"{delivery.source!r}: the connection of delivery {delivery.id} is lent already")
        self._lent = True
        try:
            while self._watch is not None:
                self._watch.cancel()
                await self._told.park()
            return await self.pin.lend()
        except BaseException:
            self.take_back()
            raise

    def take_back(self) -> None:
        """It is lent no more; a plain call."""
        if self._lent:
            self._lent = False
            self.pin.take_back()
            self._told.unpark_all()

    def give_up(self) -> None:
        """What is under way does not end: end the connection."""
        if self._at_work is not None:
            self._at_work.cancel()

    async def run(self) -> None:
        """Claim, hold, settle, until cancelled. Cancellation: nothing is held, the connection is closed."""
        pause = _RECONNECT[0]
        while True:
            passing = await self._link.turn(self)
            row: Row | None = None
            trouble: Exception | None = None
            try:
                with trio.move_on_after(CLAIM) as limit:
                    row = await self.pin.claim(passing)
                if limit.cancelled_caught:
                    trouble = CallBroken(f"{self._link.subscription!r}: no answer to a claim within {CLAIM:g} s")
            except LinkRefused as error:
                self._link.refuse(error)
            except (ConnectionBroken, CallBroken) as error:
                trouble = error
            finally:
                received = self._link.looked(self, row)
            if trouble is not None:
                self._link.trouble(str(trouble))
                await trio.sleep(pause)
                pause = min(2 * pause, _RECONNECT[1])
                continue
            if pause != _RECONNECT[0]:
                self._link.trouble(None)
                pause = _RECONNECT[0]
            if received is not None and row is not None:
                await self._hold(received, row)

    async def _hold(self, received: Received[Any], row: Row) -> None:
        """Until the claim has ended, one way or another."""
        self._held = received
        try:
            while self._held is not None:
                if self._orders:
                    await self._carry_out(received, row, self._orders[0])
                elif self._lent:
                    await self._told.park()
                else:
                    await self._until_told(received)
        finally:
            self._link.ended(received)
            self._held = None
            for order in self._orders:
                order.verdict = order.verdict or LeaseLost("its connection has ended, and the claim with it")
                order.done.set()
            self._orders.clear()

    async def _until_told(self, received: Received[Any]) -> None:
        with trio.CancelScope() as self._watch:
            why = await self.pin.until_lost()
            self.pin.close()
            self._held = None
            self._link.lose(received, why)
        self._watch = None
        self._told.unpark_all()

    async def _carry_out(self, received: Received[Any], row: Row, order: _Order) -> None:
        order.verdict = SettlementUnknown("the connection was closed while it was said")
        with trio.move_on_after(self._link.goodbye, shield=True) as self._at_work:
            if order.verb is None:
                await self.pin.let_go()
                order.verdict = None
            else:
                order.verdict = await self.pin.settle(row, order.verb, keep=order.keep)
                if isinstance(order.verdict, LeaseLost | TransactionEnded):
                    self._link.pass_over(received)
        if self._at_work.cancelled_caught:
            self.pin.close()
        if not isinstance(order.verdict, NotApplied):
            self._held = None
            self._link.ended(received)
        self._orders.popleft()
        order.done.set()
