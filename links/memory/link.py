"""One life of a `MemoryQueue`.

It owns the deliveries that it handed over and that are unsettled. It has no task of its own, and its goodbye is
synchronous: `end` puts back what is unsettled. A late settlement of an older hand-over of the same message, also of an
older life, finds its delivery no longer among `unsettled`, and so changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import trio

from links.abc import Link, Lost, Received, Settlement, Settles, Verdict
from links.errors import CallBroken, LeaseLost, LinkError, NotApplied, SettlementUnknown
from links.memory.log import Delivered, Said, Unsaid
from links.memory.store import MemoryMessage, MemoryStore
from settlement.delivery import made
from settlement.ledger import Line
from settlement.memory import Accept, PutBack, Reject

__all__ = ["MemoryLink"]

_ACCEPT = Accept


class MemoryLink(Link[bytes]):
    """One attached link."""

    def __init__(self, store: MemoryStore, lost: Lost, *, lease: float | None, settles: Settles) -> None:
        self.store = store
        self.lost = lost
        self.lease = lease
        self.settles = settles
        self.unsettled: dict[Received[bytes], MemoryMessage] = {}
        self.stopped = False
        self._over: tuple[type[LinkError], str] | None = None
        self._ended = trio.Event()
        self.forgotten: set[Received[bytes]] = set()
        """Unsettled still, and nothing more will be said for them: not in the caller's books."""
        self._saying: set[Received[bytes]] = set()
        """Their settlement is on the wire."""
        self._severed: set[Received[bytes]] = set()
        """Their own connection broke before the settlement."""
        self._cut: set[Received[bytes]] = set()
        """Their own connection broke during the settlement."""

    # --- calls

    async def receive(self, room: int) -> Sequence[Received[bytes]]:
        """Wait for messages and hand over between 1 and `room` of them. Several may wait at once.

        Raises as the ABC says, and `ValueError` for a room below 1.

        Cancellation: nothing was taken; there is no checkpoint between taking and returning.
        """
        if room < 1:
            raise ValueError(f"room must be a whole number, 1 or more, not {room!r}")
        await trio.lowlevel.checkpoint()
        store = self.store
        while True:
            self._check()
            self._check_call()
            if store.delayed or store.leases:
                store.tick()
            if not self.stopped and (store.fresh or store.returned or (store.lapsed and store.claimable(self))):
                return self._hand_over(store.take(room, self))
            with trio.move_on_at(store.next_time()):
                await store.changed.park()

    def stop(self) -> None:
        """Take nothing more; a `receive` that waits goes on waiting until it is cancelled."""
        self.stopped = True

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Verdict]:
        """Carry out the verbs.

        Cancellation: nothing was carried out (they are carried out at the end of the time that this takes).
        """
        store, weather = self.store, self.store.weather
        if weather.slow_settlements:
            await self._settle_slowly(settlements, weather.slow_settlements)
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        if self._over is not None:
            self._check()
        if store.leases:
            store.tick()
        verdicts: list[Verdict] = [None] * len(settlements)
        if weather.broken_calls:
            weather.broken_calls -= 1
            return [self._unknown(settlement) for settlement in settlements]
        if weather.refused_settlements:
            return [self._maybe_refused(settlement) for settlement in settlements]
        release, quiet = self.unsettled.pop, store.log is None
        put_back = False
        for index, settlement in enumerate(settlements):
            message = release(settlement.received, None)
            if message is None:
                verdicts[index] = self._not_ours(settlement.received)
            elif quiet and type(settlement.plan.verb) is _ACCEPT:
                pass
            else:
                put_back |= self._carry_out(message, settlement.plan.verb)
        if self.forgotten:
            self.forgotten.difference_update(settlement.received for settlement in settlements)
        if put_back or store.emptied:
            store.wake()
        return verdicts

    async def until_broken(self) -> NoReturn:
        """Wait until this life is over, and raise what ended it.

        Cancellation: nothing was done.
        """
        await self._ended.wait()
        self._check()
        raise AssertionError("unreachable: a life that is over says why")

    async def extend(self, held: Sequence[Received[bytes]]) -> Sequence[Received[bytes]]:
        """Extend the leases: each confirmed one ends a whole lease from now.

        Cancellation: the old expiry holds.
        """
        if self.lease is None:
            raise NotImplementedError(f"{self.store.name!r} has no lease")
        if self.store.weather.slow_extensions:
            await self._on_the_wire(self.store.weather.slow_extensions)
        else:
            await trio.lowlevel.checkpoint()
        self._check()
        self._check_call()
        self.store.tick()
        expires = trio.current_time() + self.lease
        lost: list[Received[bytes]] = []
        for received in held:
            if received not in self.unsettled:
                lost.append(received)
                continue
            if received.expires is not None and received.expires <= trio.current_time():  # it had lapsed
                self.store.lend([received], expires, self)
            received.expires = expires
        return lost

    def forget(self, received: Received[bytes]) -> None:
        """Nothing will be said for this one: it goes back when its lease ends, or the link."""
        if received in self.unsettled:
            self.forgotten.add(received)
            if self.is_lapsed(received):
                self.store.lapse(received, self)
                self.store.wake()

    def is_lapsed(self, received: Received[bytes]) -> bool:
        """Has its lease run out, and is it unsettled with this link all the same?"""
        expires = received.expires
        return received in self.unsettled and expires is not None and expires <= trio.current_time()

    async def give_back(self, unsettled: Sequence[Received[bytes]]) -> None:
        """Give these back now; one whose handler was never started counts as no delivery.

        Cancellation: they were given back all the same.
        """
        for received in unsettled:
            if received in self.unsettled:
                self.store.return_unsettled(self.release(received), "given back", counted=received.started)
        self.store.wake()
        await trio.lowlevel.checkpoint()

    # --- what befalls it

    def end(self, kind: type[LinkError], why: str, *, orderly: bool = False) -> None:
        """This life is over: what is unsettled goes back, and every call raises `kind` from now on.

        `orderly`, with a goodbye: what was never started counts as no delivery. A break says nothing, and all count.
        """
        if self._over is not None:
            return
        self._over = (kind, why)
        self._ended.set()
        for received, message in self.unsettled.items():
            self.store.return_unsettled(message, why, counted=received.started or not orderly)
        self.unsettled.clear()
        self.forgotten.clear()
        self.store.links.remove(self)
        self.store.wake()

    def sever(self, received: Received[bytes]) -> None:
        """The own connection of this delivery broke."""
        (self._cut if received in self._saying else self._severed).add(received)
        self.store.return_unsettled(self.release(received), "its connection broke")
        self.store.wake()
        self.lost(received, Line.UNSETTLED)

    def release(self, received: Received[bytes]) -> MemoryMessage:
        """It is unsettled with this link no longer."""
        self.forgotten.discard(received)
        return self.unsettled.pop(received)

    # --- within

    def _check(self) -> None:
        if self._over is not None:
            kind, why = self._over
            raise kind(f"{self.store.name!r} on {self.store.broker.name}: {why}")

    def _check_call(self) -> None:
        weather = self.store.weather
        if weather.broken_calls:
            weather.broken_calls -= 1
            raise CallBroken(f"{self.store.name!r} on {self.store.broker.name}: this call broke")

    async def _settle_slowly(self, settlements: Sequence[Settlement], seconds: float) -> None:
        asked = {settlement.received for settlement in settlements}
        self._saying |= asked
        try:
            await self._on_the_wire(seconds, asked)
        finally:
            self._saying -= asked

    async def _on_the_wire(self, seconds: float, asked: set[Received[bytes]] | None = None) -> None:
        """Let the call take so long, or until weather ends it."""
        deadline = trio.current_time() + seconds
        weather = self.store.weather
        await trio.lowlevel.checkpoint()
        while trio.current_time() < deadline and self._over is None and not weather.broken_calls:
            if asked and asked <= self._cut:
                return
            with trio.move_on_at(deadline):
                await self.store.changed.park()

    def _hand_over(self, messages: Sequence[MemoryMessage]) -> Sequence[Received[bytes]]:
        store, unsettled = self.store, self.unsettled
        source = store.name
        expires = None if self.lease is None else trio.current_time() + self.lease
        handed: list[Received[bytes]] = []
        for message in messages:
            body = message.body
            delivery = made(
                body, body, message.headers, message.attempt, message.count, source, message.id, message.key
            )
            received = Received(delivery, message, expires)
            unsettled[received] = message
            handed.append(received)
        if expires is not None:
            store.lend(handed, expires, self)
        if (held := len(unsettled) - len(self.forgotten)) > store.most_unsettled:
            store.most_unsettled = held
        if store.log is not None:
            store.log.extend(Delivered(source, message.id, message.attempt) for message in messages)
        return handed

    def _carry_out(self, message: MemoryMessage, verb: object) -> bool:
        """Carry out one verb for a message that was released; is it ready (or will be) again?"""
        match verb:
            case PutBack(delay):
                self.store.back(message, delay=delay)
            case Accept() | Reject():
                pass
            case _:
                raise TypeError(f"{verb!r} is no verb of links.memory")
        if self.store.log is not None:
            self.store.log.append(Said(self.store.name, message.id, verb))
        return isinstance(verb, PutBack)

    def _not_ours(self, received: Received[bytes]) -> Verdict:
        name, broker = self.store.name, self.store.broker.name
        what = f"message {received.delivery.id} of {name!r} on {broker}"
        if received in self._cut:
            self._cut.discard(received)
            return SettlementUnknown(f"{what}: its connection broke while it was settled")
        if received in self._severed:
            self._severed.discard(received)
            return NotApplied(f"{what}: its connection broke before it was settled")
        return LeaseLost(f"{what} is not this link's any more")

    def _maybe_refused(self, settlement: Settlement) -> Verdict:
        received, weather = settlement.received, self.store.weather
        if received not in self.unsettled:
            return self._not_ours(received)
        if not weather.refused_settlements:
            self._say(settlement)
            return None
        weather.refused_settlements -= 1
        if self.store.log is not None:
            self.store.log.append(Unsaid(self.store.name, received.delivery.id, "refused"))
        return NotApplied(f"message {received.delivery.id} of {self.store.name!r}: refused")

    def _unknown(self, settlement: Settlement) -> Verdict:
        received = settlement.received
        if received not in self.unsettled:
            self._cut.discard(received)
            self._severed.discard(received)
        elif self.store.broker.dice.random() < 0.5:  # noqa: PLR2004 -- a coin
            self._say(settlement)
        else:
            self._leave(received, "call broken")
        return SettlementUnknown(f"message {received.delivery.id} of {self.store.name!r}: the call broke")

    def _say(self, settlement: Settlement) -> None:
        self._carry_out(self.release(settlement.received), settlement.plan.verb)
        self.store.wake()

    def _leave(self, received: Received[bytes], why: str) -> None:
        if self.store.log is not None:
            self.store.log.append(Unsaid(self.store.name, received.delivery.id, why))
        self.forget(received)  # it goes back at once where its lease has run out already
