"""A decision is a value: what is done before the one thing that is said to the broker, that thing, what is done after.

Who carries it out: *before* belongs to the delivery, a task of its own walks it while lease and place
are kept; the *verb* belongs to the link's life, the settler says it; *after* belongs to the subscription and outlives
lives.
"""
# DESIGN 0.3

from __future__ import annotations

from typing import Generic, TypeAlias, TypeVar

import attrs

from settlement.delivery import Destination, Letter, name_of
from settlement.ledger import Line

__all__ = [
    "CapReached",
    "DelayBeyondLease",
    "DelayIgnored",
    "Notice",
    "Outlived",
    "Plan",
    "Publish",
    "Step",
    "TooLong",
    "Unsayable",
    "Wait",
]

V_co = TypeVar("V_co", covariant=True)


@attrs.frozen
class Wait:
    """Let `seconds` pass. A drain cuts it short.

    Attributes:
        seconds: 0 or more.
    """

    # DESIGN 4

    seconds: float


@attrs.frozen
class Publish:
    """Publish `letter` to `to`, and go on when the broker has confirmed it.

    Attributes:
        letter: What is published.
        to: A name on the delivery's own broker, or a publisher of another one.
    """

    letter: Letter
    to: str | Destination


Step: TypeAlias = Wait | Publish


@attrs.frozen
class CapReached:
    """The delivery was the last that `max_attempts` allows: a warning, once per delivery.

    Attributes:
        attempt: Of this delivery.
        to: Where it goes; None where the broker's own policy decides.
    """

    # C-3.5

    attempt: int
    to: str | None

    def __str__(self) -> str:
        return f"attempt {self.attempt} was the last one allowed; goes to {self.to or 'no dead letter of ours'}"


@attrs.frozen
class DelayIgnored:
    """`RetryAfter(delay)` cannot be kept here and becomes a plain retry, or is cut to `kept` seconds.

    Attributes:
        delay: Seconds that were asked for.
        why: In words.
        kept: Seconds that are kept; 0: none.
    """

    # S-3.5

    delay: float
    why: str
    kept: float = 0.0

    def __str__(self) -> str:
        kept = f"kept for {self.kept:g} s" if self.kept else "retried at once"
        return f"RetryAfter({self.delay:g}) {kept}: {self.why}"


@attrs.frozen
class DelayBeyondLease:
    """A delay above `max_lease`: an error, nacked at once instead.

    Attributes:
        requested: Seconds that were asked for.
        lease: Seconds of `max_lease`.
    """

    # P-2.6

    requested: float
    lease: float

    def __str__(self) -> str:
        return f"RetryAfter({self.requested:g}) is longer than max_lease={self.lease:g}; nacked at once"


@attrs.frozen
class TooLong:
    """A copy or a dead letter is longer than its broker takes: the original goes back to its queue instead.

    Attributes:
        to: The address.
        length: Bytes.
        most: Bytes that the broker takes.
    """

    to: str
    length: int
    most: int

    def __str__(self) -> str:
        return (
            f"its copy to {self.to!r} would have {self.length} bytes, and the broker takes {self.most} at most: "
            "it goes back to its queue; raise that limit, or drop such a message"
        )


@attrs.frozen
class Unsayable:
    """At most once: the outcome cannot be said, the message was let go on arrival.

    Attributes:
        outcome: The outcome's name, such as `Retry`.
    """

    #

    outcome: str

    def __str__(self) -> str:
        return f"{self.outcome} cannot be said to a delivery that was settled on arrival (at most once)"


@attrs.frozen
class Outlived:
    """The service goes on delivering well above the cap: its dead-letter policy has no effect.

    Attributes:
        attempt: Of this delivery.
        cap: What the service's dead-letter policy allows.
    """

    # DESIGN 6, Pub/Sub

    attempt: int
    cap: int

    def __str__(self) -> str:
        return (
            f"attempt {self.attempt} although the dead-letter policy allows {self.cap}: give the Pub/Sub service agent "
            "roles/pubsub.publisher on the dead-letter topic and roles/pubsub.subscriber on the subscription"
        )


Notice: TypeAlias = CapReached | DelayIgnored | DelayBeyondLease | TooLong | Unsayable | Outlived


@attrs.frozen
class Plan(Generic[V_co]):
    """What one outcome means on one transport for one delivery.

    Attributes:
        line: The line of the ledger that the delivery ends in, once the verb was said.
        verb: The one thing that is said to the broker; None: nothing is (at most once).
        before: Steps before the verb, in order: while they are walked, lease and place are kept.
        after: Steps after it, in order: they outlive the link's life.
        instead: Said (and booked *retried*) where a drain ends before a step of `before` succeeded; set whenever
            `before` is.
        notice: What a log line must say of it.
        plain: Nothing but a verb, and nothing to tell anybody.
    """

    line: Line
    verb: V_co | None
    before: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()
    instead: V_co | None = None
    notice: Notice | None = None
    plain: bool = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        told = self.notice is not None or self.line in (Line.DROPPED, Line.DEAD_LETTERED)
        object.__setattr__(self, "plain", not (self.before or self.after or told))

    def __str__(self) -> str:
        """The plan in words, as README's table has it."""
        said = "nothing said" if self.verb is None else str(self.verb)
        return " → ".join([*map(_step, self.before), said, *map(_step, self.after)])


def _step(step: Step) -> str:
    if isinstance(step, Wait):
        return f"wait {step.seconds:g} s"
    delay = step.letter.deliver_after
    return f"publish to {name_of(step.to)}" + ("" if delay is None else f", due in {delay:g} s")
