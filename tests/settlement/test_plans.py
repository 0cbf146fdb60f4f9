"""A decision as a value, and what a log says of it."""

from __future__ import annotations

import attrs
import pytest

from settlement.amqp import Accepted, Modified, Rejected
from settlement.delivery import Letter
from settlement.ledger import Line
from settlement.plans import (
    CapReached,
    DelayBeyondLease,
    DelayIgnored,
    Notice,
    Outlived,
    Plan,
    Publish,
    Unsayable,
    Wait,
)


@attrs.frozen
class Elsewhere:
    name: str


LETTER = Letter(b"body")


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (Plan(Line.ACKED, Accepted()), "accepted"),
        (Plan(Line.REFUSED, None), "nothing said"),
        (
            Plan(Line.DELAYED, Rejected(), after=(Wait(5.0), Publish(LETTER, "orders"))),
            "rejected → wait 5 s → publish to orders",
        ),
        (
            Plan(Line.DELAYED, Accepted(), before=(Wait(0.5), Publish(LETTER, Elsewhere("audit"))), instead=Modified()),
            "wait 0.5 s → publish to audit → accepted",
        ),
    ],
)
def test_a_plan_reads_from_left_to_right(plan: Plan[object], text: str) -> None:
    """DESIGN 0.2: steps before the verb, the verb, steps after it."""
    assert text == str(plan)


@pytest.mark.parametrize(
    ("notice", "text"),
    [
        (CapReached(5, "orders.dead"), "attempt 5 was the last one allowed; goes to orders.dead"),
        (CapReached(5, None), "attempt 5 was the last one allowed; goes to no dead letter of ours"),
        (DelayIgnored(5.0, "no column"), "RetryAfter(5) retried at once: no column"),
        (DelayIgnored(900.0, "too long", 600.0), "RetryAfter(900) kept for 600 s: too long"),
        (DelayBeyondLease(7200.0, 3600.0), "RetryAfter(7200) is longer than max_lease=3600; nacked at once"),
        (Unsayable("Ack"), "Ack cannot be said to a delivery that was settled on arrival (at most once)"),
        (
            Outlived(7, 5),
            (
                "attempt 7 although the dead-letter policy allows 5: give the Pub/Sub service agent "
                "roles/pubsub.publisher on the dead-letter topic and roles/pubsub.subscriber on the subscription"
            ),
        ),
    ],
)
def test_a_notice_says_what_happened(notice: Notice, text: str) -> None:
    """C-3.5, S-3.5, P-2.6, A-2.2, DESIGN 6: the texts of the log."""
    assert text == str(notice)


def test_a_plan_has_one_verb_and_nothing_else_by_default() -> None:
    """DESIGN 0.2: one thing is said to the broker."""
    plan = Plan(Line.ACKED, Accepted())

    assert (plan.before, plan.after, plan.instead, plan.notice) == ((), (), None, None)


def test_a_plan_cannot_be_changed() -> None:
    """DESIGN 3.2: constants are shared by every delivery."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Plan(Line.ACKED, Accepted()).line = Line.DROPPED  # type: ignore[misc]
