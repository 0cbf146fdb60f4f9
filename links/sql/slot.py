"""One place of a pinned link: a connection, and the rows that it holds by one claim.

Owns its connection; nobody else touches it, but for `close`, and a worker that says its verbs while the slot rests.
Hears orders of the link, plain calls: say verbs, let go, lend the connection. Tells the link what it has found, what it
has lost, and what each order came to. A claim ends when each of its rows was settled, let go or lost; then the slot
claims again, by the same message as the last settlement while there are rows. The connection of a claim that lasts is
watched; one that a quick handler has would cost more to watch than to use.

Cancellation: nothing stays claimed, since the connection is closed at the latest. An order under way is shielded, for
one goodbye, and so is the giving back of what no handler began with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import attrs
import trio

from links.abc import Received, Verdict
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
from links.sql.jobs import Passing
from links.sql.pin import Pin
from links.sql.rows import Row
from settlement.delivery import Delivery
from settlement.sql import Verb

__all__ = ["Claimed", "Order", "Owner", "Slot"]

CLAIM: Final = 30.0
"""Seconds after which a claim is given up: somebody has locked the whole table, or the server is mute."""
_RECONNECT: Final = (0.05, 5.0)
"""Seconds between two tries to connect: the first, and the longest."""


@attrs.define(eq=False)
class Order:
    """What a slot is to do with rows of its claim, and what came of it.

    Attributes:
        verbs: What to say of each, by one commit; None: let it go.
        keep: What a handler wrote on the connection stands; False by default.
        undo: Undo it now, and nothing else; False by default.
        verdicts: One for each, when it is done.
        done: Set then.
    """

    verbs: Mapping[Received[Any], Verb | None]
    keep: bool = False
    undo: bool = False
    verdicts: dict[Received[Any], Verdict] = attrs.Factory(dict[Received[Any], Verdict])
    done: trio.Event = attrs.Factory(trio.Event)


class Claimed:
    """One claim of a slot, the handle of its deliveries: a later claim of the same row is another one."""

    __slots__ = ("slot",)

    def __init__(self, slot: Slot) -> None:
        self.slot = slot

    async def lend(self, delivery: Delivery[Any]) -> Any:
        """As `Slot.lend`, while this claim lasts."""
        return await self.slot.lend(delivery, self)

    def take_back(self) -> None:
        """What was lent by this claim is lent no more; a plain call."""
        if self.slot.claimed is self:
            self.slot.take_back()


class Owner(Protocol):
    """The link, as its slots see it. Plain calls, but for `turn`."""

    subscription: str
    goodbye: float
    """Seconds for an order."""
    size: int
    """Rows of one claim, at most."""

    @property
    def room(self) -> int:
        """Rows of the next claim, at most; `size` or fewer."""
        ...

    async def turn(self, slot: Slot) -> Passing:
        """Wait until it is worth to look. Cancellation: nothing was done."""
        ...

    def following(self) -> Passing | None:
        """What a claim behind a settlement passes over; None: it is not worth to look at once."""
        ...

    def looked(
        self, slot: Slot, rows: Sequence[Row], passing: Passing, *, asked: bool = True
    ) -> dict[Received[Any], Row]:
        """What a claim has found; not `asked`: one behind a settlement, without a turn."""
        ...

    def ended(self, received: Received[Any]) -> None:
        """The claim of this one has ended."""
        ...

    def lose(self, received: Received[Any], why: str) -> None:
        """The claim of this one has ended, and nobody wanted it."""
        ...

    def pass_over(self, received: Received[Any], *, crossed: bool) -> None:
        """It could not be settled, and is free again: not at once; soon, where others only `crossed`."""
        ...

    def refuse(self, error: LinkRefused) -> None:
        """The table is no queue any more."""
        ...

    def trouble(self, why: str | None) -> None:
        """Claims cannot be made, or (None) can again."""
        ...


class Slot:
    """One place."""

    def __init__(self, owner: Owner, pin: Pin) -> None:
        self._owner, self.pin = owner, pin
        self.claimed: Claimed | None = None
        """The last claim."""
        self._rows: dict[Received[Any], Row] = {}
        """Those in hand."""
        self._orders: deque[Order] = deque()
        self._busy = False
        """A worker says its verbs: the slot rests."""
        self._over = False
        """Has it ended? Then its connection is closed, whoever still says a verb."""
        self._lasting = False
        """Has this claim lasted long enough to be watched?"""
        self._watch: trio.CancelScope | None = None
        self._at_work: trio.CancelScope | None = None
        self._lent = False
        self._borrowed = False
        """Was it lent by this claim?"""
        self._told = trio.lowlevel.ParkingLot()
        """Where the slot waits while its connection is lent, and who borrows it until the watch is off."""

    def undo(self) -> None:
        """Undo what a handler wrote on the connection, if it had it; a plain call."""
        if self._borrowed:
            self.do(Order({}, undo=True))

    def do(self, order: Order) -> Order:
        """Have this done; a plain call. What was lent is taken back."""
        self._orders.append(order)
        self.take_back()
        if self._over and not self._busy:
            self._close_orders()
        elif self._watch is not None:
            self._watch.cancel()
        else:
            self._told.unpark_all()
        return order

    @property
    def rests(self) -> bool:
        """Does nobody use the connection, and nobody watch it?"""
        return not (self._busy or self._lent or self._orders or self._watch is not None)

    @property
    def unwatched(self) -> Claimed | None:
        """The claim that is held, where its connection should be watched and is not."""
        return self.claimed if self._rows and not self._lasting else None

    def watch(self, claimed: Claimed) -> None:
        """This claim lasts: watch its connection; a plain call."""
        if self.claimed is claimed and self._rows:
            self._lasting = True
            self._told.unpark_all()

    async def settle(self, order: Order) -> None:
        """Carry this out in the caller's task, where the slot `rests`. Cancellation: shielded, for one goodbye."""
        self._busy = True
        self._orders.append(order)  # so nothing is lent, and what comes now waits behind it
        try:
            await self._next(order)
        finally:
            self._busy = False
            if self._orders or not self._rows:
                self._told.unpark_all()

    async def lend(self, delivery: Delivery[Any], claimed: Claimed) -> Any:
        """The connection that holds this delivery's row by this claim, for its handler.

        Raises `TransactionHeld` where it holds it no more, or is lent already, and `ValueError` in a batch.
        Cancellation: nothing is lent.
        """
        if self._owner.size > 1:
            raise ValueError(
                f"{delivery.source!r}: the rows of a batch share one transaction, so a handler's writes would be those "
                "of each; use Subscription(…) for a handler that writes in it"
            )
        self._check_held(delivery, claimed)
        if self._lent:
            raise TransactionHeld(f"{delivery.source!r}: the connection of delivery {delivery.id} is lent already")
        self._lent = self._borrowed = True
        try:
            while self._watch is not None:
                self._watch.cancel()
                await self._told.park()
            self._check_held(delivery, claimed)
            lent = await self.pin.lend()
            self._check_held(delivery, claimed)
        except BaseException:
            claimed.take_back()
            raise
        return lent

    def _check_held(self, delivery: Delivery[Any], claimed: Claimed) -> None:
        """Raises `TransactionHeld`."""
        if not self._rows or self.claimed is not claimed or self._orders:
            raise TransactionHeld(f"{delivery.source!r}: delivery {delivery.id} is in hand no more")

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
        try:
            while True:
                await self._claim()
                while self._rows:
                    await self._hold()
        finally:
            self._over = True

    async def _claim(self) -> None:
        """Until there is something. Cancellation: nothing was claimed, or the connection is closed."""
        pause = _RECONNECT[0]
        while not self._rows:
            passing = await self._owner.turn(self)
            rows: Sequence[Row] = ()
            trouble: Exception | None = None
            try:
                with trio.move_on_after(CLAIM) as limit:
                    rows = await self.pin.claim(passing, self._owner.room)
                if limit.cancelled_caught:
                    trouble = CallBroken(f"{self._owner.subscription!r}: no answer to a claim within {CLAIM:g} s")
            except LinkRefused as error:
                self._owner.refuse(error)
            except (ConnectionBroken, CallBroken) as error:
                trouble = error
            finally:
                self._rows = self._owner.looked(self, rows, passing)
            if trouble is not None:
                self._owner.trouble(str(trouble))
                await trio.sleep(pause)
                pause = min(2 * pause, _RECONNECT[1])
            elif pause != _RECONNECT[0]:
                self._owner.trouble(None)
                pause = _RECONNECT[0]

    async def _hold(self) -> None:
        """Until the claim has ended, one way or another. Cancellation: so it has, and each order is told.

        Shielded, for one goodbye: what no handler began with is as it was before the claim.
        """
        self._borrowed = self._lasting = False
        try:
            while self._rows or self._busy:
                if self._busy or self._lent:
                    await self._told.park()
                elif self._orders:
                    await self._next(self._orders[0])
                elif self._lasting:
                    await self._until_told()
                else:
                    await self._told.park()
        finally:
            self._close_orders()
            if self._rows:  # cancelled
                await self._drop()  # noqa: ASYNC102 -- it shields itself, with a deadline

    async def _next(self, order: Order) -> None:
        """Carry out the first order, and take in what was claimed behind it."""
        found, passing = await self._carry_out(order)
        if found is not None and passing is not None:
            self._close_orders()
            if self._over:  # its connection is closed, and what was claimed behind is free
                return
            self._borrowed = self._lasting = False
            self._rows = self._owner.looked(self, found, passing, asked=False)

    def _close_orders(self) -> None:
        """Those that came behind the claim's end."""
        for order in self._orders:
            self._tell(order)
        self._orders.clear()

    @staticmethod
    def _tell(order: Order) -> None:
        for received in order.verbs:
            order.verdicts.setdefault(received, LeaseLost("its connection has ended, and the claim with it"))
        order.done.set()

    async def _until_told(self) -> None:
        with trio.CancelScope() as self._watch:
            why = await self.pin.until_lost()
            self.pin.close()
            self._lose_all(why)
        self._watch = None
        self._told.unpark_all()

    async def _carry_out(self, order: Order) -> tuple[Sequence[Row] | None, Passing | None]:
        """Carry out one; what was claimed behind it, where something was looked for."""
        said = {received: verb for received, verb in order.verbs.items() if verb and received in self._rows}
        order.verdicts.update(dict.fromkeys(said, SettlementUnknown("the connection was closed while it was said")))
        dropped = [received for received, verb in order.verbs.items() if verb is None and received in self._rows]
        let_go = [(self._rows[received], received.started) for received in dropped]
        for received in dropped:
            self._end(received)
            order.verdicts[received] = None
        found: Sequence[Row] | None = None
        passing = self._owner.following() if said and len(said) == len(self._rows) else None
        with trio.move_on_after(self._owner.goodbye, shield=True) as self._at_work:
            if order.undo:
                await self.pin.undo()
            if let_go:
                await self.pin.let_go(let_go, whole=not self._rows)
            if said:
                found = await self._say(order, said, passing)
        if self._at_work.cancelled_caught:
            self.pin.close()
            for received in said:
                if self.pin.committed:
                    order.verdicts[received] = None
                self._end(received)
            self._lose_all("its connection was closed: an order was not carried out in time")
        if order in self._orders:  # else the slot has ended
            self._orders.remove(order)
        self._tell(order)
        return found, passing

    async def _say(
        self, order: Order, said: Mapping[Received[Any], Verb], passing: Passing | None
    ) -> Sequence[Row] | None:
        rest = [row for received, row in self._rows.items() if received not in said]
        sayings = [(self._rows[received], verb) for received, verb in said.items()]
        settled = await self.pin.settle(sayings, rest, keep=order.keep, then=passing)
        for received, verdict in zip(said, settled.verdicts, strict=True):
            order.verdicts[received] = verdict
            if isinstance(verdict, LeaseLost | TransactionEnded):
                self._owner.pass_over(received, crossed=settled.crossed)
            if not isinstance(verdict, NotApplied):
                self._end(received)
        if settled.lost:
            gone = {row[0] for row in settled.lost}
            for received in [received for received, row in self._rows.items() if row[0] in gone]:
                self._end(received)
                self._owner.lose(received, "somebody else has it: the claim ended with a part of its rows")
        return settled.claimed

    def _end(self, received: Received[Any]) -> None:
        """The claim of this one has ended."""
        self._rows.pop(received, None)
        self._owner.ended(received)

    async def _drop(self) -> None:
        """End the claim where it is. Shielded, for one goodbye."""
        rows = [(row, received.started) for received, row in self._rows.items()]
        used = self._busy or self._lent
        for received in [*self._rows]:
            self._end(received)
        if not used and not all(started for _, started in rows):
            with trio.move_on_after(self._owner.goodbye, shield=True):
                await self.pin.let_go(rows, whole=True)

    def _lose_all(self, why: str) -> None:
        for received in [*self._rows]:
            self._end(received)
            self._owner.lose(received, why)
