"""What each answer of a handler means on AMQP: a table that was typed by hand, and no code of ours.

It stands beside `settlement.amqp`, which decides the same (as tests/weather/fates.py beside `settlement.memory`).
"""

from __future__ import annotations

import attrs

from links.amqp.events import State
from settlement import Ack, DeadLetter, Drop, RetryAfter
from settlement.amqp import Accepted, Modified, Rejected, Verb
from settlement.ledger import Line
from tests.weather.fates import Ending, Rules

__all__ = ["AmqpRules", "Fate", "is_sequence", "state_of"]


@attrs.frozen
class Fate:
    """What must become of one delivery. `before`, `after`: what is published, `copy` or `dead`; and is there a wait?"""

    line: Line
    verb: Verb | None
    before: str = ""
    after: str = ""
    waits: bool = False


@attrs.frozen(kw_only=True)
class AmqpRules(Rules):
    """What a subscription was told."""

    delays: str = "copies"
    """copies, hold, native or scheduled."""
    at_most_once: bool = False
    counts: bool = True
    """The broker's count is asked for."""

    def becomes(self, ending: Ending, attempt: int, *, counted: bool) -> Fate:
        """The table of links.amqp. `counted`: by the broker."""
        last = self.cap is not None and attempt >= self.cap
        if isinstance(ending, Ack):
            return Fate(Line.REFUSED, None) if self.at_most_once else Fate(Line.ACKED, Accepted())
        if isinstance(ending, Drop):
            return Fate(Line.REFUSED, None) if self.at_most_once else Fate(Line.DROPPED, Rejected())
        if isinstance(ending, DeadLetter) or (self.dead and (last or self.cap is None)):
            if self.at_most_once:
                return Fate(Line.DEAD_LETTERED, None, after="dead")
            return Fate(Line.DEAD_LETTERED, Accepted(), before="dead")
        if last:
            return Fate(Line.REFUSED, None) if self.at_most_once else Fate(Line.DROPPED, Rejected())
        if isinstance(ending, RetryAfter):
            return self._later(ending.delay, counted=counted or self.cap is None)
        if counted or self.cap is None:
            return Fate(Line.REFUSED, None) if self.at_most_once else Fate(Line.RETRIED, Modified())
        if self.at_most_once:
            return Fate(Line.RETRIED, None, after="copy")
        return Fate(Line.RETRIED, Accepted(), before="copy")

    def _later(self, delay: float, *, counted: bool) -> Fate:
        if self.at_most_once:
            return Fate(Line.DELAYED, None, after="copy", waits=self.delays == "copies")
        match self.delays, counted:
            case "copies", _:
                return Fate(Line.DELAYED, Rejected(), after="copy", waits=True)
            case "hold", True:
                return Fate(Line.DELAYED, Modified(), waits=True)
            case "native", True:
                return Fate(Line.DELAYED, Modified(delay))
            case "hold" | "native", False:
                return Fate(Line.DELAYED, Accepted(), before="copy", waits=True)
            case "scheduled", _:
                return Fate(Line.DELAYED, Accepted(), before="copy")
            case _:
                raise ValueError(self.delays)


def is_sequence(name: bytes) -> bool:
    """Has this message a body that the transport cannot read?"""
    return name.startswith(b"bad") and name[-1] % 2 == 0


def state_of(verb: Verb | None) -> State | None:
    match verb:
        case Accepted():
            return State.ACCEPTED
        case Rejected():
            return State.REJECTED
        case Modified():
            return State.MODIFIED
        case _:
            return None
