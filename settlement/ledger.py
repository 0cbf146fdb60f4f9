"""The two books: every delivery ends in exactly one line, and the books balance at every stop.

Deliveries: received = acked + retried + delayed + dropped + dead-lettered + refused + superseded + unsettled + unknown
            + in hand.
Copies:     owed = published + lost + waiting.

`Ledger` is a fold over `Entry` values, and knows nothing else. *Received* is entered by who takes deliveries over from
a link, the ends by who learns of them; *in hand* and *waiting* are counted from what is really there, so that no side
of an equation is derived from the other.
"""
# DESIGN 3.9

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

import attrs

__all__ = ["Balance", "CopiesLost", "CopiesOwed", "CopiesPublished", "Ended", "Entry", "Ledger", "Line", "Took"]


class Line(Enum):
    """How a delivery ended.

    Attributes:
        ACKED: It was handled and has left the queue.
        RETRIED: It is back in its queue, or is copied there, without a delay.
        DELAYED: It comes again when its delay is over.
        DROPPED: It has left the queue unhandled: `Drop`, or the cap without a dead letter.
        DEAD_LETTERED: It went to the dead letter.
        REFUSED: At most once: an outcome that cannot be said, or none.
        SUPERSEDED: The lease was lost or the ack id refused: it is somebody else's now.
        UNSETTLED: Nothing was said for it: it comes back.
        UNKNOWN: A verb was said and no answer came: it may come back.
    """

    ACKED = "acked"
    RETRIED = "retried"
    DELAYED = "delayed"
    DROPPED = "dropped"
    DEAD_LETTERED = "dead-lettered"
    REFUSED = "refused"
    SUPERSEDED = "superseded"
    UNSETTLED = "unsettled"
    UNKNOWN = "unknown"


@attrs.frozen
class Took:
    """`count` deliveries were taken over from the link.

    Attributes:
        count: 1 or more.
    """

    count: int


@attrs.frozen
class Ended:
    """`count` deliveries ended in `line`.

    Attributes:
        line: How they ended.
        count: 1 or more; 1 by default.
    """

    line: Line
    count: int = 1


@attrs.frozen
class CopiesOwed:
    """The originals of `count` copies are gone (or may be): the copies must be published.

    Attributes:
        count: 1 or more; 1 by default.
    """

    count: int = 1


@attrs.frozen
class CopiesPublished:
    """The broker has confirmed `count` copies.

    Attributes:
        count: 1 or more; 1 by default.
    """

    count: int = 1


@attrs.frozen
class CopiesLost:
    """The goodbye ended before `count` copies were confirmed: these messages are gone. *Lost* has no other sense.

    Attributes:
        count: 1 or more; 1 by default.
    """

    count: int = 1


_FIELDS = {line: line.name.lower() for line in Line}

Entry: TypeAlias = Took | Ended | CopiesOwed | CopiesPublished | CopiesLost


@attrs.frozen
class Balance:
    """One equation: `left` against the sum of `right`.

    Attributes:
        name: What is balanced: `received`, or `owed`.
        left: The count on the left.
        right: The lines on the right, each a name and its count.
    """

    name: str
    left: int
    right: tuple[tuple[str, int], ...]

    @property
    def difference(self) -> int:
        """0 when the book balances; above 0: that many are missing on the right."""
        return self.left - sum(count for _, count in self.right)

    def __str__(self) -> str:
        terms = " + ".join(f"{count} {name}" for name, count in self.right)
        total = sum(count for _, count in self.right)
        verdict = "" if self.difference == 0 else f"  (does not balance: {self.left} ≠ {total})"
        return f"{self.left} {self.name} = {terms}{verdict}"


@attrs.define
class Ledger:
    """The two books of one subscription, folded in place.

    Attributes:
        received: Deliveries taken over from the link.
        acked: `Ack()`, or None, was said.
        retried: Put back, or copied, without a delay.
        delayed: `RetryAfter(delay)` was said.
        dropped: `Drop` was said, or the cap was reached without a dead letter.
        dead_lettered: They went to the dead letter.
        refused: At most once: an outcome that cannot be said, or none.
        superseded: The lease was lost, or the other side took them back: they are somebody else's now.
        unsettled: Nothing was said for them: they come back.
        unknown: A verb was said and no answer came: they may come back.
        in_hand: Counted from the deliveries that are open (`snapshot`), not from the other lines.
        owed: Copies whose originals are gone, or may be (`Copies()`, at most once).
        published: Copies that the broker has confirmed.
        lost: Copies that were not confirmed when the goodbye ended: these messages are gone.
        waiting: Counted from the copies that are there (`snapshot`), not from the other lines.
    """

    received: int = 0
    acked: int = 0
    retried: int = 0
    delayed: int = 0
    dropped: int = 0
    dead_lettered: int = 0
    refused: int = 0
    superseded: int = 0
    unsettled: int = 0
    unknown: int = 0
    in_hand: int = 0
    owed: int = 0
    published: int = 0
    lost: int = 0
    waiting: int = 0

    def enter(self, entry: Entry) -> None:
        """Fold one entry in. A count below 1 is a `ValueError`."""
        count = entry.count
        if count < 1:
            raise ValueError(f"an entry counts 1 or more, not {count}")
        match entry:
            case Ended(line):
                field = _FIELDS[line]
                setattr(self, field, getattr(self, field) + count)
            case Took():
                self.received += count
            case CopiesOwed():
                self.owed += count
            case CopiesPublished():
                self.published += count
            case CopiesLost():
                self.lost += count

    def snapshot(self, *, in_hand: int, waiting: int) -> Ledger:
        """A copy that no later entry changes, with what is open now."""
        return attrs.evolve(self, in_hand=in_hand, waiting=waiting)

    @property
    def deliveries(self) -> Balance:
        """The first book's equation."""
        ends = tuple((line.value, int(getattr(self, _FIELDS[line]))) for line in Line)
        return Balance("received", self.received, (*ends, ("in hand", self.in_hand)))

    @property
    def copies(self) -> Balance:
        """The second book's equation."""
        right = (("published", self.published), ("lost", self.lost), ("waiting", self.waiting))
        return Balance("owed", self.owed, right)

    @property
    def balanced(self) -> bool:
        """Do both books balance?"""
        return self.deliveries.difference == 0 and self.copies.difference == 0
