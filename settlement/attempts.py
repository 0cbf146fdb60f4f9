"""The brokers' counters, and the one number that a handler sees: the attempt, 1 on the first delivery.

Rule: attempt = retry-count header (0 if absent) + the broker's count (0 if absent) + 1,
and the header of every copy is the attempt of the delivery that is copied. So the attempt never falls, and any
mix of `Retry` and `RetryAfter` under a cap of n calls the handler exactly n times.
"""
# DESIGN 6, Counting

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["RETRY_HEADER", "attempt", "copied_headers", "header_count"]

RETRY_HEADER = "x-ruststream-retry-count"
"""The family's name, so that its services on the same queue count alike; configurable per broker."""

_DECIMAL = re.compile(rb"[0-9]{1,18}")


def header_count(headers: Mapping[str, bytes], name: str = RETRY_HEADER) -> int:
    """How many copies stand behind this message: a decimal ASCII integer, anything else counts as absent."""
    # C-2.3
    value = headers.get(name)
    if value is None or not _DECIMAL.fullmatch(value):
        return 0
    return int(value)


def attempt(copies: int, redeliveries: int | None) -> int:
    """The attempt of a delivery whose header counts `copies` and whose broker counts `redeliveries` (or does not)."""
    return copies + (redeliveries or 0) + 1


def copied_headers(headers: Mapping[str, bytes], attempt: int, name: str = RETRY_HEADER) -> Mapping[str, bytes]:
    """The headers of a copy of a delivery: its own, with the retry count set to that delivery's attempt."""
    return {**headers, name: b"%d" % attempt}
