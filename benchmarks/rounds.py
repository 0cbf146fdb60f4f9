"""Interleaved rounds of two sides, on messages of 100 bytes."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from typing import Final

from benchmarks.result import Result
from benchmarks.stopwatch import Spent, median

BODY: Final = b"x" * 100
TEXT: Final = BODY.decode()
"""The same, for those who send texts."""
WORKERS: Final = 8
"""Handlers of a peer that runs several at once."""
LONGEST: Final = 600.0
"""Seconds for one round: a queue that holds fewer messages than were asked for ends it, too."""
LEASE: Final = 30.0


def compared(
    case: str,
    peer: str,
    ours: Callable[[], Spent],
    theirs: Callable[[], Spent],
    rounds: int,
    *,
    aside: str = "",
    target: float | None = None,
) -> Result:
    """Rounds of the two, one after the other; the medians of their rates, and beside them their CPU, and the target."""
    pairs: list[tuple[Spent, Spent]] = []
    for _ in range(rounds):
        gc.collect()
        mine = ours()
        gc.collect()
        pairs.append((mine, theirs()))
    middle, other = median([mine for mine, _ in pairs]), median([their for _, their in pairs])
    cpu = f"CPU of the client: ours {middle.cpu:.0f}, peer {other.cpu:.0f} µs per message"
    beside = [f"target {target:g}"] if target is not None else []
    return Result(
        case=case,
        ours=middle.rate,
        peer=other.rate,
        peer_name=peer,
        ratio=statistics.median(mine.rate / their.rate for mine, their in pairs),
        unit="messages per second",
        aside="; ".join(filter(None, [*beside, cpu, aside])),
    )
