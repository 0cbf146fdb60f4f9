"""One subscription at work: its copies, which outlive lives, and beside them the supervised link.

Owns the books, the copies and the current life. Hears the drain. Tells the start-up. A cancellation reaches the life
first; then the copies get one goodbye.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from actors.books import Books
from actors.drain import Drain
from actors.events import Tell
from actors.letterbox import Letterbox
from actors.link_life import LinkLife
from actors.owed_copies import OwedCopies
from actors.startup import StartUp
from actors.subscription import AnySubscription
from actors.supervisor import Supervisor
from links.abc import Presence
from links.errors import ConnectionBroken, LinkError, LinkRefused
from settlement.ledger import Ledger

__all__ = ["RunningSubscription", "Statistics"]


@attrs.frozen
class Statistics:
    """What one subscription is doing now.

    Attributes:
        attached: Is there a link?
        degraded: What does not work, in words; empty when all is well.
        in_hand: Deliveries received and not ended.
        waiting: Copies owed and not published.
        restarts: Lives of the link after the first.
    """

    attached: bool
    degraded: tuple[str, ...]
    in_hand: int
    waiting: int
    restarts: int


class RunningSubscription:
    """The runtime's side of a `Subscription`."""

    def __init__(self, subscription: AnySubscription, drain: Drain, tell: Tell) -> None:
        self.subscription = subscription
        self.source = subscription.source
        self.drain = drain
        self.tell = tell
        self.books = Books(subscription.name, tell)
        self.letterbox = Letterbox(self.source.broker)
        self.copies = OwedCopies(self.source.copies, self.letterbox, self.books, drain)
        self._supervisor = Supervisor(subscription.name, tell)
        self._life: LinkLife | None = None
        self._links = trio.CancelScope()
        self._mute = False
        """The last life attached, and broke before it had done one thing: attaching again proves nothing."""

    async def run(self, startup: StartUp) -> None:
        """Until drained. Raises `LinkGaveUp`, `HandlerFailed`, and bugs."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.copies.run)
            try:
                with self._links:
                    async with trio.open_nursery() as beside:
                        beside.start_soon(self._stop_attaching)
                        await self._supervise(startup)
                        beside.cancel_scope.cancel()
                self.copies.close()
                await self.copies.finished()
            finally:
                self.copies.close()
                self.copies.finish(trio.current_time() + self.drain.goodbye)

    async def _supervise(self, startup: StartUp) -> None:
        name, broker = self.subscription.name, self.source.broker
        seen = over = 0

        async def reconnected() -> None:
            if broker.presence is not Presence.UP and not startup.tries(broker):
                startup.failed(name)  # somebody else keeps that broker, and it is between two lives
            await broker.until_up(after=over)

        async def life(attached: Callable[[], None], worked: Callable[[], None]) -> None:
            nonlocal seen
            seen = broker.lives
            mute, self._mute = self._mute, False

            def attached_now() -> None:
                if not mute:
                    self.books.recover("the link")
                self._mute = True
                attached()
                startup.attached(name)

            def worked_now() -> None:
                if self._mute:
                    self._mute = False
                    worked()
                    self.books.recover("the link")

            self._life = LinkLife(self.subscription, self.books, self.letterbox, self.copies, self.drain)
            try:
                await self._life.run(attached_now, worked_now, startup.gate)
            finally:
                self._life = None

        async def failed(error: LinkError) -> None:
            nonlocal over
            if isinstance(error, ConnectionBroken):
                over = seen
                self._mute = False  # that says nothing of the link
            if not startup.gate.is_set():
                if isinstance(error, LinkRefused):
                    startup.refused(name, error)
                    await trio.sleep_forever()  # the start-up raises it, when everybody was heard
                startup.failed(name)
            self.books.degrade("the link", error, self)

        await self._supervisor.run(life, failed=failed, pause=self.drain.unless_requested, reconnected=reconnected)

    async def _stop_attaching(self) -> None:
        """A drain does not wait for a link that is not there: it has nothing in hand."""
        await self.drain.requested.wait()
        if not self._supervisor.attached:
            self._links.cancel()

    @property
    def publishing(self) -> bool:
        """Is there something that must be published yet: a copy that is owed, a dead letter before its verb?"""
        return self.copies.waiting > 0 or (self._life is not None and self._life.publishing)

    def stop(self) -> None:
        """Grace and goodbye are over: the life ends now. Copies that it leaves behind get as long as its exit."""
        now = trio.current_time()
        self.copies.finish(now if self._life is None else now + self.drain.exit)
        self._links.cancel()

    @property
    def ledger(self) -> Ledger:
        """The books as they stand."""
        return self.books.ledger.snapshot(in_hand=self._in_hand, waiting=self.copies.waiting)

    @property
    def statistics(self) -> Statistics:
        """What it is doing."""
        return Statistics(
            attached=self._supervisor.attached,
            degraded=tuple(f"{what}: {why}" for what, why in self.books.degraded.items()),
            in_hand=self._in_hand,
            waiting=self.copies.waiting,
            restarts=self._supervisor.restarts,
        )

    @property
    def _in_hand(self) -> int:
        return 0 if self._life is None else len(self._life.in_flight.open)
