"""What each answer of a handler means: rules that were typed by hand, and no code of ours.

They stand beside `settlement.memory`, `settlement.amqp` and `settlement.policy`, which decide the same, so that a test
can hold what was decided, said and booked against what the handler really answered. Values are imported from there,
never a decision. What a transport has of its own (how a retry is said) its world adds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, TypeAlias, cast

import attrs
import trio

from settlement import Ack, DeadLetter, Drop, FailFast, Retry, RetryAfter
from settlement.ledger import Line

__all__ = ["CUT", "Call", "Cut", "Ending", "Fate", "Rules", "Say", "is_cut"]


class Cut:
    """The handler was cancelled from around it: whatever it answered, nothing is said."""

    def __repr__(self) -> str:
        return "cut"


CUT = Cut()
Ending: TypeAlias = Ack | Retry | RetryAfter | Drop | DeadLetter | FailFast | Cut


class Say(Enum):
    """What a broker hears: two verbs that finish a message, and one that puts it back."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    BACK = "put back"


@attrs.frozen
class Fate:
    """What must become of one delivery. `before`, `after`: what is published, `copy` or `dead`; and is there a wait?"""

    line: Line
    verb: object
    """None: nothing is said."""
    before: str = ""
    """Published in front of the verb; where that fails until a drain's end, it is put back instead."""
    after: str = ""
    waits: bool = False

    def publishes(self, what: str) -> bool:
        """Does it publish a `copy`, a `dead` letter?"""
        return what in (self.before, self.after)


@attrs.define(eq=False)
class Call:
    """One call of a handler, with so many deliveries, and what it really answered."""

    count: int
    result: object = None
    failure: BaseException | None = None
    cut: bool = False
    """At its end the scope around it was cancelled: the grace was over, a lease lost, everything cancelled."""


@attrs.frozen(kw_only=True)
class Rules:
    """What a subscription was told, in the test's own words."""

    accept: ClassVar[object]
    reject: ClassVar[object]
    back: ClassVar[object]
    """The verbs of the transport; the last one without a delay."""

    cap: int | None = None
    dead: bool = False
    delays: str = "native"
    """copies, native, hold or scheduled."""
    at_most_once: bool = False
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
        count, result = call.count, call.result
        if call.cut:
            return [CUT] * count
        if call.failure is not None:
            return [self._failed(call.failure)] * count
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

    def becomes(self, ending: Ending, attempt: int, *, counted: bool) -> Fate:
        """What the ending of a delivery of this attempt must become. `counted`: by the broker."""
        last = self.cap is not None and attempt >= self.cap
        retried = isinstance(ending, Retry | RetryAfter)
        if isinstance(ending, DeadLetter) or (retried and self.dead and (last or self.cap is None)):
            if self.at_most_once:
                return Fate(Line.DEAD_LETTERED, None, after="dead")
            return Fate(Line.DEAD_LETTERED, self.accept, before="dead")
        if retried and not last:
            counted = counted or self.cap is None
            return self.later(ending.delay, counted) if isinstance(ending, RetryAfter) else self.again(counted)
        if self.at_most_once:
            return Fate(Line.REFUSED, None)
        return Fate(Line.ACKED, self.accept) if isinstance(ending, Ack) else Fate(Line.DROPPED, self.reject)

    def again(self, counted: bool) -> Fate:
        """A retry below the cap."""
        raise NotImplementedError

    def later(self, delay: float, counted: bool) -> Fate:
        """One with a delay."""
        raise NotImplementedError

    def says(self, verb: object) -> Say | None:
        """What the broker hears of it; None: nothing."""
        heard = {type(self.accept): Say.ACCEPTED, type(self.reject): Say.REJECTED, type(self.back): Say.BACK}
        return heard.get(type(verb))


def is_cut(rules: Rules) -> bool:
    """At the end of a handler, in its task: is the scope around it cancelled? Its own time limit is not meant."""
    status: Any = getattr(trio.lowlevel.current_task(), "_cancel_status")  # noqa: B009 -- there is no public way
    if rules.limited:
        status = status._parent
    cut: bool = status.effectively_cancelled
    return cut
