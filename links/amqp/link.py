"""One attached receiver: deliveries come as credit was given, a disposition and its credit go out together.

Credit stands for the free places of the subscription: `receive` gives as much as it was told that there is room for,
`settle` gives back one for each verb, behind it on the wire. So the peer never has more than the limit unsettled here,
also while what was said is not written yet; at most once it is the handler's end that gives credit back.

Cancellation: a settlement is with the engine when `settle` returns, and goes out; the goodbye detaches, shielded and
bounded, and what is unsettled goes back to the queue.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Final, NoReturn

import trio

from links.abc import Link, Lost, Received, Settlement, Verdict
from links.amqp.deliveries import disposition, received
from links.amqp.engine.events import ACCEPTED, RELEASED
from links.amqp.engine.handles import Arrival
from links.amqp.engine.receiver import Receiver
from links.amqp.unlearned import Unlearned
from links.errors import AlreadySettled, LeaseLost, LinkBroken
from settlement.amqp import Accepted
from settlement.groups import alone, raise_bare
from settlement.ledger import Line

__all__ = ["AmqpLink"]

PATIENCE: Final = 1.0
"""Seconds for which an unknown peer may leave the first echo unanswered, before it counts as one that answers none."""
PROOF: Final = 60.0
"""Seconds within which a peer shows that it saw what was said; it answers an echo in milliseconds."""
DRAINED: Final = 1.0
"""Seconds within which a peer answers a drain, in milliseconds if at all."""
TAKING: Final = 1.0
"""Seconds for which the accepting of what was received at most once is written in spite of a cancellation."""


class AmqpLink(Link[bytes]):
    """One life."""

    proves = True

    def __init__(
        self,
        receiver: Receiver,
        *,
        source: str,
        retry_header: str,
        counts: bool,
        at_most_once: bool,
        echoes: bool,
        lost: Lost,
        unlearned: Unlearned | None = None,
    ) -> None:
        self._receiver = receiver
        self._source = source
        self._retry_header = retry_header
        self.counts = counts
        """May change while it is attached: what was not known counts as no."""
        self._unlearned = unlearned
        self._at_most_once = at_most_once
        self._echoes = echoes
        self._numbers = 0
        self._stopped = False
        self._lost = lost
        self._held: dict[Arrival, Received[bytes]] = {}
        """What was handed over at least once, and was neither settled nor forgotten."""
        receiver.superseded = self._superseded

    async def receive(self, room: int) -> Sequence[Received[bytes]]:
        """As `Link.receive`. What came before a break is not handed over: it is with the queue again.

        At most once each is accepted, and that is written, before it is handed over.

        Cancellation: nothing was taken; what is being accepted is handed over all the same (shielded, 1 s).
        """
        receiver = self._receiver
        self._check()
        await trio.lowlevel.checkpoint_if_cancelled()  # no credit goes out in front of the goodbye
        if not self._stopped and (short := room - receiver.ahead) > 0:
            receiver.grant(short)
        arrivals = await receiver.receive(room)
        self._check()
        if self._unlearned is not None:
            self._unlearned.look(arrivals)
        if self._at_most_once:
            for arrival in arrivals:
                receiver.settle(arrival, ACCEPTED)
            await self._taken()
        before = self._numbers
        self._numbers += len(arrivals)
        handed = received(
            arrivals, source=self._source, before=before, retry_header=self._retry_header, counts=self.counts
        )
        if not self._at_most_once:
            self._held.update(zip(arrivals, handed, strict=True))
        return handed

    async def _taken(self) -> None:
        """Wait until it is written; behind a cancellation no longer than `TAKING`, else as long as the peer stalls."""
        waits = True
        while waits:
            with trio.move_on_after(TAKING, shield=True) as scope:
                await self._receiver.driver.written()
            waits = scope.cancelled_caught and trio.current_effective_deadline() > trio.current_time()

    def _superseded(self, which: frozenset[object]) -> None:
        """The peer has taken these back, or has settled them: RabbitMQ's consumer timeout says *released*."""
        taken = [(arrival, held) for arrival, held in self._held.items() if arrival.pointer in which]
        for arrival, held in taken:
            del self._held[arrival]
            self._receiver.concede(arrival)
            self._lost(held, Line.SUPERSEDED)

    def stop(self) -> None:
        """Take the credit back; what comes all the same is released."""
        self._stopped = True
        self._receiver.take_back()

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Verdict]:
        """As `Link.settle`: each disposition is with the engine, in order, and written within 2 ms.

        There is no checkpoint here.
        """
        self._check()
        receiver, held = self._receiver, self._held
        arrivals: list[Arrival] = []
        accepted = True
        for settlement in settlements:
            arrival = settlement.received.token
            held.pop(arrival, None)
            arrivals.append(arrival)
            if type(settlement.plan.verb) is not Accepted:
                accepted = False
        if accepted:
            unsaid = receiver.accept_all(arrivals)
        else:
            wall, settle = time.time(), receiver.settle
            unsaid = [
                arrival
                for arrival, settlement in zip(arrivals, settlements, strict=True)
                if not settle(arrival, disposition(settlement.plan.verb, wall))
            ]
        if not self._stopped:
            receiver.grant(len(settlements))
        verdicts: list[Verdict] = [None] * len(arrivals)
        for arrival in unsaid:
            index = arrivals.index(arrival)
            verdicts[index] = self._unsaid(settlements[index], arrival)
        return verdicts

    def _unsaid(self, settlement: Settlement, arrival: Arrival) -> Verdict:
        what = f"{self._source}: delivery {settlement.received.delivery.id}"
        if not arrival.settled:
            return LeaseLost(f"{what} was settled before, or is not this link's")
        if isinstance(settlement.plan.verb, Accepted):
            return None
        return AlreadySettled(
            f"{what} came settled; let its sender send unsettled, or subscribe with settle=AT_MOST_ONCE"
        )

    def forget(self, received: Received[bytes]) -> None:
        """As `Link.forget`: where it is settled (at most once, superseded) its credit goes out again.

        What nothing was said for goes by the detach.
        """
        self._held.pop(received.token, None)
        if received.token.pointer is None and not self._stopped:
            self._receiver.grant(1)

    async def give_back(self, unsettled: Sequence[Received[bytes]]) -> None:
        """As `Link.give_back`: *released* for what no handler began; the rest goes back by the detach.

        There is no checkpoint here: it is written at once, in front of whatever is ordered afterwards.
        """
        self._check()
        unbegun = [each for each in unsettled if not each.started]
        for each in unbegun:
            self._release(each.token)
        if not self._stopped:
            self._receiver.grant(len(unbegun))
        self._receiver.driver.hurry()

    def _release(self, arrival: Arrival) -> None:
        self._held.pop(arrival, None)
        self._receiver.settle(arrival, RELEASED)

    async def flush(self) -> None:
        """As `Link.flush`: all is written, at once."""
        await self._receiver.driver.written()

    async def proved(self) -> None:
        """As `Link.proved`: the peer has answered a flow with echo (weaker where it answers none: README).

        Raises `LinkBroken` after 60 s without a proof: then nobody knows what the peer has seen.
        """
        with trio.move_on_after(PROOF):
            await self._receiver.proved(math.inf if self._echoes else PATIENCE)
            return
        raise LinkBroken(f"{self._source}: the peer has not shown within {PROOF:g} s that it saw what was said")

    async def until_broken(self) -> NoReturn:
        """As `Link.until_broken`; beside it, what was not known is asked again: `LinkRefused` where it is a no."""
        try:
            async with trio.open_nursery() as nursery:
                if self._unlearned is not None:
                    nursery.start_soon(self._learn, self._unlearned)
                await self._receiver.until_broken()
        except BaseExceptionGroup as group:
            raise_bare(alone(group))

    async def _learn(self, unlearned: Unlearned) -> None:
        if await unlearned.ask():
            self._unlearned = None

    async def say_goodbye(self, goodbye: float) -> None:
        """Detach and end the session, within `goodbye` seconds; shielded. After it every call raises `LinkBroken`.

        What no handler began is released in front of that, which no broker takes for a try; the detach may be one.
        So what is still on its way is waited for: for half of the goodbye, and no longer than 1 s, since there are
        peers that never answer a drain.

        Cancellation: not heard before the deadline; then the end of the connection says the same.
        """
        receiver = self._receiver
        with trio.CancelScope(deadline=trio.current_time() + goodbye, shield=True):
            for arrival in [arrival for arrival, held in self._held.items() if not held.started]:
                self._release(arrival)
            receiver.take_back()
            with trio.move_on_after(min(goodbye / 2, DRAINED)):
                await receiver.emptied()
            receiver.detach()
            receiver.session.end()
            await receiver.session.ended()
        receiver.break_(LinkBroken(f"{self._source}: detached"))

    def _check(self) -> None:
        if self._receiver.broken is not None:
            raise self._receiver.broken
