"""Says the verbs of one life.

Owns nothing: what is with the link stands in the hand. Hears orders from workers and before-steps; takes one and then
all that is ready. At concurrency 1 there is nothing to take together, and the worker says its verb by a plain call.
Tells the hand what was said, and hands owed copies over. Cancelled while a settlement is on the wire, its orders stay
*with the link*, and the life books them as unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import trio

from actors.books import Books
from actors.events import log
from actors.hand import Hand
from links.abc import Link, Order, Received
from links.errors import LeaseLost, NotApplied, SettlementError, SettlementUnknown
from settlement.ledger import Line

__all__ = ["Settler"]


class Settler:
    """One per life. Where a link settles alone, and at concurrency 1, workers call `say` themselves."""

    def __init__(self, books: Books, link: Link[Any], hand: Hand) -> None:
        self._books = books
        self._link = link
        self._hand = hand

    async def run(self, orders: trio.MemoryReceiveChannel[Order]) -> None:
        """Until the last sender has closed. Raises what ends the life. Cancellation: as the module says."""
        with orders:
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
        lines: dict[Line, list[Received[Any]]] = {}
        for order in orders:
            if order.received not in hand.open:  # superseded while it waited here
                hand.release(order.received)
                hand.free(order.received)
            elif order.plan.verb is None:
                self._done(order, lines)
            else:
                hand.open[order.received] = order
                spoken.append(order)
        if spoken:
            verdicts = await self._link.settle(spoken)
            for order, verdict in zip(spoken, verdicts, strict=True):
                if verdict is None:
                    self._done(order, lines)
                    if self._books.degraded:
                        self._books.recover(f"to {order.plan.verb}")
                else:
                    self._not_said(order, verdict, lines)
        for line, batch in lines.items():
            hand.ended(line, batch)
            for received in batch:
                hand.free(received)

    def _done(self, order: Order, lines: dict[Line, list[Received[Any]]]) -> None:
        lines.setdefault(order.plan.line, []).append(order.received)
        if order.plan.after:
            self._hand.owe(order)

    def _not_said(self, order: Order, verdict: SettlementError, lines: dict[Line, list[Received[Any]]]) -> None:
        if isinstance(verdict, SettlementUnknown):
            line = Line.UNKNOWN
            if order.plan.after:
                self._hand.owe(order)
        else:
            line = Line.SUPERSEDED if isinstance(verdict, LeaseLost) else self._hand.rest
            self._hand.release(order.received)
            if isinstance(verdict, NotApplied):
                self._books.degrade(f"to {order.plan.verb}", verdict)
        lines.setdefault(line, []).append(order.received)
        which = f"{self._books.subscription}: delivery {order.received.delivery.id} of {order.received.delivery.source}"
        log.warning("%s: %s is %s: %s", which, order.plan.verb, line.value, verdict)
