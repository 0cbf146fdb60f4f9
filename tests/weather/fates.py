"""What each answer of a handler means on a `MemoryBroker`: a table that was typed by hand, and no code of ours.

It stands beside `settlement.memory` and `settlement.policy`, which decide the same, so that a test can hold what was
decided, said and booked against what the handler really answered. It imports values from there, never a decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import attrs
import trio

from settlement import Ack, DeadLetter, Drop, FailFast, Retry, RetryAfter
from settlement.ledger import Line
from settlement.memory import Accept, PutBack, Reject, Verb

__all__ = ["CUT", "Call", "Cut", "Ending", "Fate", "Rules", "is_cut"]


class Cut:
    """The handler was cancelled from around it: whatever it answered, nothing is said."""

    def __repr__(self) -> str:
        return "cut"


CUT = Cut()
Ending: TypeAlias = Ack | Retry | RetryAfter | Drop | DeadLetter | FailFast | Cut


@attrs.frozen
class Fate:
    """What must become of one delivery."""

    line: Line
    verb: Verb
    letter: bool = False
    """A dead letter is published before the verb; where that fails until a drain's end, it is put back instead."""
    copy: bool = False
    """A copy is published after the verb."""


# the answer | is a retry below the cap (or is there none), above it with a dead letter, without | delays | becomes
TABLE: Mapping[tuple[str, str, str], Fate] = {
    ("Ack", "below", "native"): Fate(Line.ACKED, Accept()),
    ("Ack", "below", "copies"): Fate(Line.ACKED, Accept()),
    ("Ack", "last, dead letter", "native"): Fate(Line.ACKED, Accept()),
    ("Ack", "last, dead letter", "copies"): Fate(Line.ACKED, Accept()),
    ("Ack", "last", "native"): Fate(Line.ACKED, Accept()),
    ("Ack", "last", "copies"): Fate(Line.ACKED, Accept()),
    ("Drop", "below", "native"): Fate(Line.DROPPED, Reject()),
    ("Drop", "below", "copies"): Fate(Line.DROPPED, Reject()),
    ("Drop", "last, dead letter", "native"): Fate(Line.DROPPED, Reject()),
    ("Drop", "last, dead letter", "copies"): Fate(Line.DROPPED, Reject()),
    ("Drop", "last", "native"): Fate(Line.DROPPED, Reject()),
    ("Drop", "last", "copies"): Fate(Line.DROPPED, Reject()),
    ("Retry", "below", "native"): Fate(Line.RETRIED, PutBack()),
    ("Retry", "below", "copies"): Fate(Line.RETRIED, PutBack()),
    ("Retry", "last, dead letter", "native"): Fate(Line.DEAD_LETTERED, Accept(), letter=True),
    ("Retry", "last, dead letter", "copies"): Fate(Line.DEAD_LETTERED, Accept(), letter=True),
    ("Retry", "last", "native"): Fate(Line.DROPPED, Reject()),
    ("Retry", "last", "copies"): Fate(Line.DROPPED, Reject()),
    ("RetryAfter", "below", "native"): Fate(Line.DELAYED, PutBack()),  # and its delay
    ("RetryAfter", "below", "copies"): Fate(Line.DELAYED, Reject(), copy=True),
    ("RetryAfter", "last, dead letter", "native"): Fate(Line.DEAD_LETTERED, Accept(), letter=True),
    ("RetryAfter", "last, dead letter", "copies"): Fate(Line.DEAD_LETTERED, Accept(), letter=True),
    ("RetryAfter", "last", "native"): Fate(Line.DROPPED, Reject()),
    ("RetryAfter", "last", "copies"): Fate(Line.DROPPED, Reject()),
    ("DeadLetter", "below", "native"): Fate(Line.DEAD_LETTERED, Accept(), letter=True),
    ("DeadLetter", "below", "copies"): Fate(Line.DEAD_LETTERED, Accept(), letter=True),
    ("DeadLetter", "last, dead letter", "native"): Fate(Line.DEAD_LETTERED, Accept(), letter=True),
    ("DeadLetter", "last, dead letter", "copies"): Fate(Line.DEAD_LETTERED, Accept(), letter=True),
}


@attrs.define(eq=False)
class Call:
    """One call of a handler, and what it really answered."""

    which: tuple[tuple[str, int], ...]
    """Id and attempt, which together name a hand-over that a handler is called for."""
    result: object = None
    failure: BaseException | None = None
    cut: bool = False
    """At its end the scope around it was cancelled: the grace was over, a lease lost, everything cancelled."""


@attrs.frozen(kw_only=True)
class Rules:
    """What a subscription was told, in the test's own words."""

    cap: int | None = None
    dead: bool = False
    copies: bool = False
    on_error: Any = None
    failures: Mapping[type[Exception], Ending] = {}
    bad: bytes | None = None
    """How a body begins that cannot be decoded."""
    on_undecodable: Ending = Drop()
    limited: bool = False
    """Is there a time limit, `within`?"""

    def undecodable(self, body: bytes) -> bool:
        """Must no handler see this?"""
        return self.bad is not None and body.startswith(self.bad)

    def endings(self, call: Call) -> Sequence[Ending]:
        """What the call means, for each of its deliveries."""
        count = len(call.which)
        if call.cut:
            return [CUT] * count
        if call.failure is not None:
            return [self._failed(call.failure)] * count
        result = call.result
        if not isinstance(result, list):
            return [self._ending(result)] * count
        results = cast("list[object]", result)
        return [self._ending(each) for each in [*results, *[Retry()] * count][:count]]

    def _ending(self, result: object) -> Ending:
        if result is None:
            return Ack()
        return result if isinstance(result, Ack | Retry | RetryAfter | Drop) else self._failed(TypeError())

    def _failed(self, error: BaseException) -> Ending:
        """`Cancelled` is here that of the time limit; the groups in these tests never agree on another answer."""
        found = self.failures.get(type(error)) if isinstance(error, Exception) else None
        if found is None:
            found = self.on_error
        if found is None:
            found = FailFast() if self.cap is None and not self.dead else Retry()
        ending: Ending = found
        return ending

    def fate(self, ending: Ending, attempt: int) -> Fate:
        """What the ending of a delivery of this attempt must become."""
        if self.cap is None:
            turn = "last, dead letter" if self.dead else "below"
        elif attempt < self.cap:
            turn = "below"
        else:
            turn = "last, dead letter" if self.dead else "last"
        fate = TABLE[type(ending).__name__, turn, "copies" if self.copies else "native"]
        if isinstance(ending, RetryAfter) and isinstance(fate.verb, PutBack):
            return attrs.evolve(fate, verb=PutBack(ending.delay))
        return fate


def is_cut(rules: Rules) -> bool:
    """At the end of a handler, in its task: is the scope around it cancelled? Its own time limit is not meant."""
    status: Any = getattr(trio.lowlevel.current_task(), "_cancel_status")  # noqa: B009 -- there is no public way
    if rules.limited:
        status = status._parent
    cut: bool = status.effectively_cancelled
    return cut
