"""What actors send each other over memory channels, but for `links.abc.Received` and `links.abc.Order`."""

from __future__ import annotations

from typing import Any

import attrs

from settlement.delivery import Delivery
from settlement.plans import Step

__all__ = ["Owed"]


@attrs.frozen(eq=False)
class Owed:
    """A verb was said, or may have been: these steps are now the subscription's (settler → copies)."""

    delivery: Delivery[Any]
    steps: tuple[Step, ...]
