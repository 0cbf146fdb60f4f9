"""Says the verbs of one life.

Owns nothing: what is with the link stands in the hand. Hears orders from workers and before-steps; takes one and then
all that is ready. At concurrency 1 there is nothing to take together, and the worker says its verb by a plain call.
Tells the hand what was said, hands owed copies over, and tells the prover what must be proved before it is booked.
Cancelled while a settlement is on the wire, its orders stay *with the link*, and the life books them as unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import trio

from actors.books import Books
from actors.events import log
from actors.hand import Hand
from actors.messages import Said
from links.abc import Link, Order
from links.errors import LeaseLost, LetGo, NotApplied, SettlementError, SettlementUnknown
from settlement.ledger import Line

__all__ = ["Settler"]

_LINES: dict[type[SettlementError], Line] = {LeaseLost: Line.SUPERSEDED, LetGo: Line.REFUSED}


class Settler:
    """One per life. Where a link settles alone, and at concurrency 1, workers call `say` themselves."""

    def __init__(
        self, books: Books, link: Link[Any], hand: Hand, said: trio.MemorySendChannel[Said], *, serial: bool
    ) -> None:
        self._books = books
        self._link = link
        self._hand = hand
        self._said = said
        self._serial = serial
        """The next handler waits until the verb is on the wire."""

    async def run(self, orders: trio.MemoryReceiveChannel[Order]) -> None:
        """Until the last sender has closed. Raises what ends the life. Cancellation: as the module says."""
        with orders, self._said:
            async for first in orders:
                batch = [first]
                try:
                    while True:
                        batch.append(orders.receive_nowait())
                except (trio.WouldBlock, trio.EndOfChannel):
                    pass
                await self.say(batch)

    async def say(self, orders: Sequence[Order]) -> None:
        """Say these, book the verdicts, return the places. Raises and is cancelled as `run`."""
        # where everything around is cancelled nothing is said, whatever the handlers answered (DESIGN 3.5)
        await trio.lowlevel.checkpoint_if_cancelled()
        hand = self._hand
        spoken: list[Order] = []
        ended: Said = {}
        for order in orders:
            if order.received not in hand.open:  # superseded while it waited here
                hand.release(order.received)
                hand.free(order.received)
            elif order.plan.verb is None:
                self._link.let_go(order.received)
                self._done(order, ended)
            else:
                hand.open[order.received] = order
                spoken.append(order)
        said: Said = {} if self._link.proves else ended
        if spoken:
            verdicts = await self._link.settle(spoken)
            if self._serial:
                await self._link.flush()
            for order, verdict in zip(spoken, verdicts, strict=True):
                if verdict is None:
                    self._done(order, said)
                    if self._books.degraded:
                        self._books.recover(f"to {order.plan.verb}")
                else:
                    self._not_said(order, verdict, ended)
        for line, batch in ended.items():
            hand.ended(line, batch)
            for received in batch:
                hand.free(received)
        if said and said is not ended:
            for batch in said.values():
                for received in batch:
                    hand.free(received)
            self._said.send_nowait(said)

    def _done(self, order: Order, lines: Said) -> None:
        lines.setdefault(order.plan.line, []).append(order.received)
        if order.plan.after:
            self._hand.owe(order)

    def _not_said(self, order: Order, verdict: SettlementError, lines: Said) -> None:
        if isinstance(verdict, SettlementUnknown):
            line = Line.UNKNOWN
            if order.plan.after:
                self._hand.owe(order)
        else:
            line = _LINES.get(type(verdict), self._hand.rest)
            self._hand.release(order.received)
            if isinstance(verdict, NotApplied):
                self._books.degrade(f"to {order.plan.verb}", verdict)
        lines.setdefault(line, []).append(order.received)
        which = f"{self._books.subscription}: delivery {order.received.delivery.id} of {order.received.delivery.source}"
        log.warning("%s: %s is %s: %s", which, order.plan.verb, line.value, verdict)
