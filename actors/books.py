"""The books of one subscription: one place where its ledger is written, its observers told, its log lines made.

Owns the ledger and the *degraded* marks. Hears everybody, by plain calls that never wait, so that no cancellation can
come between a fact and its entry. Tells the observers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.events import Booked, Degraded, Noticed, Recovered, Tell, log
from links.abc import Received
from settlement.delivery import Delivery
from settlement.ledger import CopiesLost, CopiesOwed, CopiesPublished, Ended, Entry, Ledger, Line, Took
from settlement.plans import DelayBeyondLease, Notice, Unsaid


class Books:
    """Entries go in here, in the same tick in which somebody learned of them."""

    def __init__(self, subscription: str, tell: Tell) -> None:
        self.subscription = subscription
        self.ledger = Ledger()
        self.degraded: dict[str, str] = {}
        self._tell = tell
        self._unsaid: set[str] = set()

    def took(self, received: Sequence[Received[Any]]) -> None:
        """These were taken over from the link."""
        self._enter(Took(len(received)), received)

    def ended(self, line: Line, received: Sequence[Received[Any]]) -> None:
        """These ended in `line`."""
        if received:
            self._enter(Ended(line, len(received)), received)

    def owed(self) -> None:
        """One copy must be published."""
        self._enter(CopiesOwed(), ())

    def published(self) -> None:
        """One copy was confirmed."""
        self._enter(CopiesPublished(), ())

    def lost(self, count: int) -> None:
        """The goodbye ended before these copies were confirmed."""
        self._enter(CopiesLost(count), ())

    def _enter(self, entry: Entry, received: Sequence[Received[Any]]) -> None:
        self.ledger.enter(entry)
        if self._tell:
            self._tell(Booked(self.subscription, entry, tuple([each.delivery for each in received])))

    def noticed(self, delivery: Delivery[Any], notice: Notice) -> None:
        """A plan carried a notice: one log line, but *unsaid* once per outcome (DESIGN 6, Runtime)."""
        if isinstance(notice, DelayBeyondLease):
            log.error("%s: delivery %s: %s", self.subscription, delivery.id, notice)
        elif isinstance(notice, Unsaid) and notice.outcome in self._unsaid:
            log.debug("%s: delivery %s: %s", self.subscription, delivery.id, notice)
        else:
            log.warning("%s: delivery %s: %s", self.subscription, delivery.id, notice)
            if isinstance(notice, Unsaid):
                self._unsaid.add(notice.outcome)
        if self._tell:
            self._tell(Noticed(self.subscription, delivery, notice))

    def degrade(self, what: str, why: object) -> None:
        """`what` does not work now; a warning when that begins."""
        began = what not in self.degraded
        self.degraded[what] = str(why)
        if began:
            log.warning("%s is degraded: %s: %s", self.subscription, what, why)
            if self._tell:
                self._tell(Degraded(self.subscription, f"{what}: {why}"))

    def recover(self, what: str) -> None:
        """`what` works again."""
        if self.degraded.pop(what, None) is not None:
            log.info("%s: %s works again", self.subscription, what)
            if self._tell:
                self._tell(Recovered(self.subscription))
