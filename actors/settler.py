"""Says the verbs of one life.

Owns the settlements that are ready; what is with the link stands in `InFlight`. Hears workers and before-steps, by
`order`: a channel carries one wake for all that is ready then, since a hand-over for each would cost more than the
verb, and its end says that nobody orders any more. Where verbs are said alone there is nothing to take together, and
workers say them by a plain call. Tells `InFlight` what was said, hands owed copies over, tells the prover what must be
proved before it is booked, and the repeater what was not applied. Cancelled on the wire, what was being said stays
*with the link*, and the life books it as unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import trio

from actors.books import Books
from actors.drain import Drain
from actors.events import log
from actors.in_flight import InFlight
from actors.messages import Said
from actors.repeater import Repeater
from links.abc import Link, Settlement
from links.errors import AlreadySettled, LeaseLost, NotApplied, SettlementError, SettlementUnknown
from settlement.ledger import Line

__all__ = ["Settler"]

_LINES: dict[type[SettlementError], Line] = {LeaseLost: Line.SUPERSEDED, AlreadySettled: Line.REFUSED}


class Settler:
    """One per life. `alone`: who orders calls `say` (a link that settles alone, and at concurrency 1).

    `serial`: the next handler waits until the verb is on the wire.
    """

    def __init__(
        self,
        link: Link[Any],
        in_flight: InFlight,
        books: Books,
        drain: Drain,
        said: trio.MemorySendChannel[Said],
        *,
        alone: bool,
        serial: bool,
    ) -> None:
        self.alone = alone
        self._link = link
        self._in_flight = in_flight
        self._books = books
        self._said = said
        self._serial = serial
        self._ready: list[Settlement] = []
        """Ordered, and not taken yet: behind the first one a wake is in the channel."""
        self._repeater = Repeater(self.say, in_flight, books, drain)

    def order(self, settlement: Settlement, wake: trio.MemorySendChannel[None]) -> None:
        """Have this verb said with all that is ready then; never waits. `wake`: the caller's own end of the channel."""
        if not self._ready:
            wake.send_nowait(None)
        self._ready.append(settlement)

    async def run(self, wakes: trio.MemoryReceiveChannel[None]) -> None:
        """Until the last sender has closed, and nothing waits to be said again. Raises what ends the life."""
        with wakes, self._said:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._repeater.run)
                async for _ in wakes:
                    ready, self._ready = self._ready, []
                    await self.say(ready)
                self._repeater.close()

    async def say(self, settlements: Sequence[Settlement]) -> None:
        """Say these, book the verdicts, return the places. Raises and is cancelled as `run`."""
        # where everything around is cancelled nothing is said, whatever the handlers answered (DESIGN 3.5)
        await trio.lowlevel.checkpoint_if_cancelled()
        in_flight, opened = self._in_flight, self._in_flight.open
        spoken: list[Settlement] = []
        ended: Said = {}
        for settlement in settlements:
            received = settlement.received
            if received not in opened:  # superseded while it waited here
                in_flight.leave(received)
            elif settlement.plan.verb is None:
                self._link.forget(received)
                self._done(settlement, ended)
            else:
                opened[received] = settlement
                spoken.append(settlement)
        said: Said = {} if in_flight.proves else ended
        if spoken:
            verdicts = await self._link.settle(spoken)
            if self._serial:
                await self._link.flush()
            if any(verdicts):
                for settlement, verdict in zip(spoken, verdicts, strict=True):
                    if verdict is None:
                        self._done(settlement, said)
                    else:
                        self._not_said(settlement, verdict, ended)
            else:
                self._all_done(spoken, said)
        for line, batch in ended.items():
            in_flight.ended(line, batch)
            in_flight.free(batch)
        if said and said is not ended:
            for batch in said.values():
                in_flight.free(batch)
            self._said.send_nowait(said)

    def _all_done(self, settlements: Sequence[Settlement], lines: Said) -> None:
        """As `_done`, for many that are mostly of one plan."""
        plan = settlements[0].plan
        if not plan.after and all(settlement.plan is plan for settlement in settlements):
            lines.setdefault(plan.line, []).extend([settlement.received for settlement in settlements])
        else:
            for settlement in settlements:
                self._done(settlement, lines)

    def _done(self, settlement: Settlement, lines: Said) -> None:
        lines.setdefault(settlement.plan.line, []).append(settlement.received)
        if settlement.plan.after:
            self._in_flight.owe(settlement)

    def _not_said(self, settlement: Settlement, verdict: SettlementError, lines: Said) -> None:
        delivery = settlement.received.delivery
        which = f"{self._books.subscription}: delivery {delivery.id} of {delivery.source}"
        if isinstance(verdict, NotApplied):
            wait = self._repeater.add(settlement, verdict)
            log.warning("%s: not applied, %s again in %g s: %s", which, settlement.plan.verb, wait, verdict)
            return
        if isinstance(verdict, SettlementUnknown):
            line = Line.UNKNOWN
            if settlement.plan.after:
                self._in_flight.owe(settlement)
        else:
            line = _LINES[type(verdict)]
            self._in_flight.release(settlement.received)
        lines.setdefault(line, []).append(settlement.received)
        log.warning("%s: %s is %s: %s", which, settlement.plan.verb, line.value, verdict)
