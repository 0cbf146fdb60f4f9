"""The books of one subscription: one place where its ledger is written, its observers told, its log lines made.

Owns the ledger and the *degraded* marks. Hears everybody, by plain calls that never wait, so that no cancellation can
come between a fact and its entry. Tells the observers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from actors.events import Booked, Degraded, GivenUp, HandlerErred, Noticed, Recovered, Tell, log
from links.abc import Received
from settlement.delivery import Delivery
from settlement.ledger import CopiesLost, CopiesOwed, CopiesPublished, Ended, Entry, Ledger, Line, Took
from settlement.outcomes import Drop
from settlement.plans import DelayBeyondLease, Plan, Unsayable
from settlement.policy import Answer, Ending


class Books:
    """Entries go in here, in the same tick in which somebody learned of them."""

    def __init__(self, subscription: str, tell: Tell) -> None:
        self.subscription = subscription
        self.ledger = Ledger()
        self.degraded: dict[str, str] = {}
        """What does not work, and the latest reason."""
        self._troubled: dict[str, set[object]] = {}
        """Who has trouble with it."""
        self._tell = tell
        self._unsayable: set[str] = set()

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

    def erred(self, delivery: Delivery[Any], error: Exception, answer: Answer) -> None:
        """A handler or decoder failed, and the policy has answered."""
        if self._tell:
            self._tell(HandlerErred(self.subscription, delivery, error, answer))

    def decided(self, delivery: Delivery[Any], plan: Plan[Any], ending: Ending, cause: Exception | None) -> None:
        """Where a plan carries a notice, or ends the tries of a delivery: one log line, and events.

        `cause`: the failure that was answered. *Unsayable* is one warning per outcome.
        """
        # DESIGN 6, Runtime
        why = ending.reason if isinstance(ending, Drop) else ""
        if cause is not None:
            why = f"{type(cause).__name__}: {cause}"
        given_up = plan.line in (Line.DROPPED, Line.DEAD_LETTERED)
        if plan.notice is None and not given_up:
            return
        said = plan.line.value if plan.notice is None else str(plan.notice)
        if given_up and why:
            said += f" ({why})"
        log.log(self._level(plan), "%s: delivery %s: %s", self.subscription, delivery.id, said)
        if self._tell:
            if plan.notice is not None:
                self._tell(Noticed(self.subscription, delivery, plan.notice))
            if given_up:
                self._tell(GivenUp(self.subscription, delivery, plan.line, why))

    def _level(self, plan: Plan[Any]) -> int:
        match plan.notice:
            case DelayBeyondLease():
                return logging.ERROR
            case Unsayable(outcome) if outcome in self._unsayable:
                return logging.DEBUG
            case Unsayable(outcome):
                self._unsayable.add(outcome)
                return logging.WARNING
            case None:
                return logging.INFO if plan.line is Line.DROPPED else logging.WARNING
            case _:
                return logging.WARNING

    def degrade(self, what: str, why: object, who: object) -> None:
        """`what` does not work for `who` now; a warning when that begins."""
        began = what not in self.degraded
        self.degraded[what] = str(why)
        self._troubled.setdefault(what, set()).add(who)
        if began:
            log.warning("%s is degraded: %s: %s", self.subscription, what, why)
            if self._tell:
                self._tell(Degraded(self.subscription, f"{what}: {why}"))

    def ceased(self, what: str, who: object) -> None:
        """`who` has no trouble with it any more, or tries no more; the mark goes with the last one."""
        if what in self._troubled:
            self._troubled[what].discard(who)
            if not self._troubled[what]:
                self.recover(what)

    def recover(self, what: str) -> None:
        """`what` works again, for everybody."""
        self._troubled.pop(what, None)
        if self.degraded.pop(what, None) is not None:
            log.warning("%s: %s works again", self.subscription, what)
            if self._tell:
                self._tell(Recovered(self.subscription))

    def heard(self, link: object, what: str, why: str | None) -> None:
        """A link says that `what` does not work now, or (`why` is None) that it works again."""
        if why is None:
            self.recover(what)
        else:
            self.degrade(what, why, link)

    def left(self, link: object) -> None:
        """This link's life has ended, and with it what it had trouble with."""
        for what in [what for what, troubled in self._troubled.items() if link in troubled]:
            self.ceased(what, link)
