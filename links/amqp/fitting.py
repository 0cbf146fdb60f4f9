"""What becomes of a plan whose copy or dead letter is longer than the peer takes. Pure."""

from __future__ import annotations

from collections.abc import Callable

from settlement.amqp import Modified, Verb
from settlement.ledger import Line
from settlement.plans import Plan, Publish, TooLong, Wait

__all__ = ["fitted"]


def fitted(plan: Plan[Verb], excess: Callable[[Publish], TooLong | None]) -> Plan[Verb]:
    """The plan, where each letter that it publishes fits; else the original goes back, after the plan's waits.

    `excess` looks at one letter. At most once there is no original to go back: the plan stays.
    """
    if plan.verb is None:
        return plan
    steps = (*plan.before, *plan.after)
    too_long = next(filter(None, (excess(step) for step in steps if isinstance(step, Publish))), None)
    if too_long is None:
        return plan
    waits = tuple(step for step in steps if isinstance(step, Wait))
    line = Line.DELAYED if waits else Line.RETRIED
    return Plan(line, Modified(), before=waits, instead=Modified() if waits else None, notice=too_long)
