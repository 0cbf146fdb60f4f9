"""What actors send each other over memory channels, but for `links.abc.Received` and `links.abc.Settlement`."""

from __future__ import annotations

from typing import Any, TypeAlias

import attrs

from links.abc import Received
from settlement.delivery import Delivery
from settlement.ledger import Line
from settlement.plans import Step

__all__ = ["Owed", "Said"]

Said: TypeAlias = dict[Line, list[Received[Any]]]
"""Verbs that were said, by the line in which their deliveries end once that is proved (settler → prover)."""


@attrs.frozen(eq=False)
class Owed:
    """A verb was said, or may have been: these steps are now the subscription's (settler → copies).

    Attributes:
        delivery: The original.
        steps: What is still to be done, in order.
    """

    delivery: Delivery[Any]
    steps: tuple[Step, ...]
