"""Rows that cannot be claimed: a constraint, an index or a trigger of the user's table refuses the lease.

Owns which rows are passed over, until when, and what was said of them. Hears of each claim. Tells `degraded`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import trio

from links.sql.jobs import Passing
from links.sql.rows import Row, name_of

__all__ = ["PassedOver"]

_log = logging.getLogger("trio_settlement")

_MOST_NAMED = 20
"""How many rows have a log line of their own in one life."""

_WHAT = "to claim each row"


@attrs.define
class _Passed:
    until: float
    length: float
    why: BaseException


class PassedOver:
    """One queue's: each is looked at again after 1 s, then after twice as long, at most after 60 s."""

    def __init__(
        self,
        subscription: str,
        table: str,
        degraded: Callable[[str, str | None], None],
        *,
        first: float = 1.0,
        longest: float = 60.0,
        most: int = 10_000,
    ) -> None:
        self._subscription, self._table, self._degraded = subscription, table, degraded
        self._first, self._longest, self._most = first, longest, most
        self._rows: dict[Any, _Passed] = {}
        self._named = 0
        self._well: bool | None = None
        """Was it said that all is well? A link before this one may have said otherwise."""

    def now(self) -> frozenset[Any]:
        """The rows to pass over now."""
        if not self._rows:
            return frozenset()
        now = trio.current_time()
        return frozenset([row for row, passed in self._rows.items() if now < passed.until])

    def learn(self, passing: Passing, rows: Sequence[Row], error: BaseException | None) -> list[float]:
        """From what became of a claim (its rows, or why it failed): when to look again, on trio's clock.

        For each that failed, and at once where so many failed that the claim did not come to the end: what is passed
        over now stands no longer in front of the rest. Too many to be remembered are looked at when the queue is
        polled.
        """
        if not self._rows and not passing.failed:
            if error is None and not self._well:
                self._tell()
            return []
        again = [until for row, why in passing.failed.items() if (until := self._failed(row, why)) is not None]
        if error is None:
            for row in rows:
                self._rows.pop(row[0], None)
            if passing.complete:  # what did not fail is gone, or due later
                for row in [row for row in self._rows if row not in passing.over and row not in passing.failed]:
                    del self._rows[row]
        if self._rows or error is None:
            self._tell()
        if passing.enough and again:
            again.append(trio.current_time())
        return again

    def _failed(self, row: Any, why: BaseException) -> float | None:
        before = self._rows.get(row)
        if before is None:
            if len(self._rows) >= self._most:
                return None
            self._name(row, why)
        length = self._first if before is None else min(before.length * 2, self._longest)
        until = trio.current_time() + length
        self._rows[row] = _Passed(until, length, why)
        return until

    def _name(self, row: Any, why: BaseException) -> None:
        self._named += 1
        if self._named <= _MOST_NAMED:
            which = (self._subscription, name_of(row), self._table)
            _log.warning("%s: row %s of table %r cannot be claimed, it is passed over: %s", *which, why)
        elif self._named == _MOST_NAMED + 1:
            _log.warning("%s: more rows of table %r cannot be claimed", self._subscription, self._table)

    def _tell(self) -> None:
        self._well = not self._rows
        if self._well:
            self._degraded(_WHAT, None)
            return
        row, passed = next(iter(self._rows.items()))
        count = len(self._rows)
        others = f" and {count - 1} more" if count > 1 else ""
        self._degraded(_WHAT, f"table {self._table!r}: row {name_of(row)}{others} passed over: {passed.why}")
