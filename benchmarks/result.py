"""What a case reports."""

from __future__ import annotations

import attrs


@attrs.frozen
class Result:
    """Ours against a peer, in the same run; `ratio` above 1: ours is better."""

    case: str
    ours: float
    peer: float
    peer_name: str
    ratio: float
    unit: str
    aside: str = ""
    """Printed beside it; not in the JSON."""
