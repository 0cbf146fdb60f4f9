"""The link of the forms that hold a connection for each claim in hand, for every dialect: claim, settle, let go.

Owns as many slots as there are places (`links.sql.slot`), each an actor with a connection of its own; a claim has one
row, or as many as a batch has. On an empty queue one slot looks and the others wait for it. Whoever finds a row sends
the next one to look, and while there are rows they look side by side.

Tells `lost` where a connection ended under a delivery: its claim has ended with it, and the row is free again. A
cancellation leaves no row claimed: the connection of each slot is closed, at the latest. What is shielded, and how
long: a settlement, the giving back and the goodbye, for one `goodbye` at most each.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, NoReturn, TypeVar

import trio

from links.abc import Link, Lost, Received, Settlement, Verdict
from links.errors import ConnectionBroken, LeaseLost, LinkRefused, SettlementUnknown
from links.sql.dialect import Writer
from links.sql.jobs import Passing
from links.sql.passed_over import PassedOver
from links.sql.patience import Patience
from links.sql.pin import PinForm
from links.sql.rows import Row, RowReader
from links.sql.slot import Claimed, Order, Slot
from links.sql.wakes import Tell, Wakes, wake_for
from settlement.ledger import Line
from settlement.sql import Verb

__all__ = ["PinnedLink"]

R = TypeVar("R")

_log = logging.getLogger("trio_settlement")

_FIRST: Final = 1.0
_LONGEST: Final = 60.0
"""Seconds for which a row is passed over that could not be settled; the first time, and the longest."""
_CROSSED: Final = 0.01
"""Seconds, the first time, where other transactions only got into the way: as far as anybody knows."""
_WATCH: Final = 0.05
"""Seconds for which a claim lasts before its connection is watched."""


class PinnedLink(Link[R]):
    """One life of a queue in the row-lock or advisory form; made by `SqlQueue.attach`, which runs it."""

    def __init__(
        self,
        form: PinForm,
        over: Callable[[], Awaitable[ConnectionBroken]],
        wakes: Wakes,
        tell: Tell,
        lost: Lost,
        *,
        writer: Writer,
        source: str,
        subscription: str,
        goodbye: float,
        limit: int,
        size: int = 1,
    ) -> None:
        self._form, self._wakes, self._tell, self._lost = form, wakes, tell, lost
        self._reader: RowReader[R] = RowReader(form.table, source)
        self._over = over
        self.subscription, self.goodbye = subscription, goodbye
        self.size = min(size, limit)
        self._running = trio.CancelScope(shield=True)
        self._slots = [Slot(self, form.pin(writer, limit)) for _ in range(limit // self.size)]
        self._at: dict[Received[R], Slot] = {}
        """Where each row in hand is."""
        self._ready: deque[Received[R]] = deque()
        self._taken = trio.lowlevel.ParkingLot()
        """Where `receive` waits."""
        self._turns = trio.lowlevel.ParkingLot()
        """Where slots wait for their turn to look."""
        self._empty = True
        """Has the last look found nothing?"""
        self._holding = trio.lowlevel.ParkingLot()
        """Where the watch waits for claims."""
        self._claims = 0
        """How many claims are under way."""
        self._claimed = trio.lowlevel.ParkingLot()
        """Where the goodbye waits for their ends."""
        self._looker: Slot | None = None
        """Who looks at the empty queue."""
        self._stopped = False
        self._refused: LinkRefused | None = None
        self._over_at: dict[Any, tuple[float, float]] = {}
        """Rows that could not be settled, by id: until when they are passed over, and for how long."""
        self._passed = PassedOver(subscription, form.table.name, self._say)

    def _say(self, what: str, why: str | None) -> None:
        self.degraded(what, why)  # set after this link was made

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the slots, up to the goodbye: then no row is claimed; a statement under way has one goodbye to end in.

        Cancellation: not heard once it has started, for a handler that is cancelled may still be at work on what the
        slots hold. The goodbye is, and bounds the shield.
        """
        task_status.started()
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            with self._running:
                async with trio.open_nursery() as nursery:
                    for slot in self._slots:
                        nursery.start_soon(slot.run)
                    nursery.start_soon(self._watch)
        finally:
            for slot in self._slots:
                slot.pin.close()

    async def _watch(self) -> None:
        """Have each connection watched whose claim lasts. Cancellation: nothing was done."""
        while True:
            held = [(slot, claimed) for slot in self._slots if (claimed := slot.unwatched) is not None]
            if not held:
                await self._holding.park()
                continue
            await trio.sleep(_WATCH)
            for slot, claimed in held:
                slot.watch(claimed)

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
        self._let_go([*self._ready])
        self._ready.clear()

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
        orders: dict[Slot, Order] = {}
        for slot, some in self._by_slot([each.received for each in settlements]).items():
            of = [each for each in settlements if each.received in some]
            keep = all(each.plan.line is Line.ACKED for each in of)
            order = orders[slot] = Order({each.received: each.plan.verb for each in of}, keep)
            if slot.rests:
                await slot.settle(order)
            else:
                slot.do(order)
        verdicts: dict[Received[Any], Verdict] = {}
        for slot, order in orders.items():
            if await patience.until(order.done):
                verdicts.update(order.verdicts)
                continue
            slot.give_up()
            why = f"{self.subscription!r}: the database has not answered within {patience.waited:.1f} s"
            verdicts.update({received: SettlementUnknown(why) for received in order.verbs})
        return [self._verdict(each.received, each.plan.verb, verdicts) for each in settlements]

    def _verdict(self, received: Received[Any], verb: Verb | None, verdicts: dict[Received[Any], Verdict]) -> Verdict:
        if received not in verdicts:
            which = f"{self.subscription!r}: row {received.delivery.id}"
            return LeaseLost(f"{which}: its connection has ended, and the claim with it")
        verdict = verdicts[received]
        if verdict is None and verb is not None:
            self._over_at.pop(received.token[0], None)
            wake_for(verb, self._form.table.name, self._wakes, self._tell)
        return verdict

    def _by_slot(self, some: Iterable[Received[R]]) -> dict[Slot, list[Received[R]]]:
        """Those that are in hand still, by where they are."""
        found: dict[Slot, list[Received[R]]] = {}
        for received in some:
            if (slot := self._at.get(received)) is not None:
                found.setdefault(slot, []).append(received)
        return found

    def _let_go(self, some: Iterable[Received[R]]) -> list[Order]:
        return [slot.do(Order(dict.fromkeys(of))) for slot, of in self._by_slot(some).items()]

    def forget(self, received: Received[R]) -> None:
        """Nothing will be said for this one: let it go. A plain call."""
        self._let_go([received])

    def undo(self, received: Received[R]) -> None:
        """As `Link.undo`."""
        if (slot := self._at.get(received)) is not None:
            slot.undo()

    async def give_back(self, unsettled: Sequence[Received[R]]) -> None:
        """Let these go, the rows as they were.

        Cancellation: they are let go all the same.
        """
        for order in self._let_go(unsettled):
            await order.done.wait()

    async def say_goodbye(self) -> None:
        """Let go all that is still held: shielded, within `goodbye`; then the connections are closed."""
        self.stop()
        with trio.move_on_after(self.goodbye, shield=True):
            while self._at or self._claims:
                await self.give_back([*self._at])
                if self._claims:  # it may count an attempt, and no handler will begin with it
                    await self._claimed.park()
        self._running.cancel()

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
        self._claims += 1
        return self._passing()

    def following(self) -> Passing | None:
        """As `Owner.following`: while there are rows, and nobody waits for a turn."""
        return None if self._stopped or self._empty or self.room < self.size else self._passing()

    @property
    def room(self) -> int:
        """As `Owner.room`: one for a while when rows are due again that could not be settled.

        Else one that a deferred constraint refuses would keep those back for ever that are claimed with it.
        """
        now = trio.current_time()
        due = (until <= now < until + max(length, _FIRST) for until, length in self._over_at.values())
        return 1 if self.size > 1 and any(due) else self.size

    def _passing(self) -> Passing:
        now = trio.current_time()
        unsettled = [row for row, (until, _) in self._over_at.items() if now < until]
        return Passing((), self._passed.now().union(unsettled))

    def looked(
        self, slot: Slot, rows: Sequence[Row], passing: Passing, *, asked: bool = True
    ) -> dict[Received[Any], Row]:
        """What a slot has found: the next one's turn, at once where there was something."""
        if self._looker is slot:
            self._looker = None
        if asked:
            self._claims -= 1
            self._claimed.unpark_all()
        self._empty = not rows
        for moment in self._passed.learn(passing, rows, None):
            self._wakes.wake_at(moment)
        self._turns.unpark()
        if not rows:
            return {}
        slot.claimed = claimed = Claimed(slot)
        self._holding.unpark()
        found = {self._reader.read(row, None, claimed): row for row in rows}
        for received in found:
            received.claim = claimed
            self._at[received] = slot
        if self._stopped:
            slot.do(Order(dict.fromkeys(found)))
        else:
            self._ready.extend(found)
            self._taken.unpark()
        return found

    def ended(self, received: Received[R]) -> None:
        """The claim of this one has ended: others may be free by that, those of the same key."""
        self._at.pop(received, None)
        if self._empty:
            self._wakes.wake()

    def lose(self, received: Received[R], why: str) -> None:
        """The connection of this one has ended."""
        self.ended(received)
        if received in self._ready:  # nobody has seen it
            self._ready.remove(received)
            return
        _log.warning("%s: the claim of delivery %s has ended: %s", self.subscription, received.delivery.id, why)
        self._lost(received, Line.UNSETTLED)

    def pass_over(self, received: Received[R], *, crossed: bool) -> None:
        """As `Owner.pass_over`."""
        now = trio.current_time()
        for row in [row for row, (until, _) in self._over_at.items() if until < now - _LONGEST]:
            del self._over_at[row]
        _, length = self._over_at.get(received.token[0], (0.0, (_CROSSED if crossed else _FIRST) / 2))
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
