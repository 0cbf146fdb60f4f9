"""The consumer's side of an outbox: which message has which record, and when that is finished with.

Owns what observers have told and is not marked yet. Plain calls, but for those that ask the database.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Container
from typing import Any, Final, TypeVar

import trio

from links.errors import LinkError, NotConnected
from links.sql.database import Database
from links.sql.records import Records
from settlement.delivery import Delivery
from settlement.ledger import Ended, Line
from settlement.outcomes import Ack, Drop, Outcome, Retry

__all__ = ["Tracking", "check_name"]

_log = logging.getLogger("trio_settlement")

T = TypeVar("T")

_REMEMBERED: Final = 10_000
"""Deliveries, at most, that observers have told of and that are not marked yet; or that are marked and in hand."""
_NUMBER: Final = re.compile(rb"-?[0-9]{1,19}")
_FINISHED: Final = (Line.ACKED, Line.DROPPED, Line.DEAD_LETTERED)


def check_name(name: object) -> None:
    """Raise `ValueError` unless it is a name."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"name must be a text of 1 character or more, not {name!r}")


def _is_async(handler: object) -> bool:
    called = getattr(type(handler), "__call__", None)  # noqa: B004 -- of a callable object
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(called)


class Tracking:
    """Of one outbox; `table`: its name, for logs; `registered`: the names that it sends."""

    def __init__(
        self, database: Database, records: Records, table: str, header: str, registered: Container[str]
    ) -> None:
        self._ask, self._records, self._table = database.ask, records, table
        self._header, self._registered = header, registered
        self._names: set[str] = set()
        """Those that a handler was tracked for, registered or not."""
        self._named: dict[str, str] = {}
        """Under which name the deliveries of a source are tracked, where that is another one."""
        self._observing = False
        self._marked: set[tuple[str, int]] = set()
        """Those that are in hand, and whose records are marked; kept where there is an observer, who empties it."""
        self._told: dict[tuple[str, int], None] = {}
        """Those that have ended, and whose records are not marked yet."""
        self.news = trio.Event()
        """An observer has told of one."""

    def tracked(
        self, handler: Callable[[Delivery[T]], Awaitable[Outcome | None]], name: str | None
    ) -> Callable[[Delivery[T]], Awaitable[Outcome | None]]:
        """As `Outbox.tracked`."""
        if not _is_async(handler):
            raise TypeError(f"handler must be an async function (async def), not {handler!r}")
        if name is not None:
            check_name(name)
            self._names.add(name)

        async def tracked(delivery: Delivery[T]) -> Outcome | None:
            if name is not None:
                self._named[delivery.source] = name
            record = self._record_of(delivery)
            if record is None:
                return await handler(delivery)
            try:
                processed = await self._ask(self._records.is_processed(*record), self._where(record))
            except NotConnected:
                raise
            except LinkError as error:
                _log.warning("%s: not looked up, so it is retried: %s", self._where(record), error)
                return Retry()
            if processed:
                return Ack()
            outcome = await handler(delivery)
            await trio.lowlevel.checkpoint_if_cancelled()  # who swallowed `Cancelled` has answered nothing
            if processed is not None and (outcome is None or isinstance(outcome, Ack | Drop)):
                if self._observing and len(self._marked) < _REMEMBERED:  # beyond, it is marked twice
                    self._marked.add(record)
                await self._mark(record)
            return outcome

        return tracked

    def _where(self, record: tuple[str, int]) -> str:
        return f"record {record[1]} of {record[0]!r}, table {self._table!r}"

    def _record_of(self, delivery: Delivery[Any]) -> tuple[str, int] | None:
        """Name and id; None: it is not tracked."""
        name = self._named.get(delivery.source, delivery.source)
        value = delivery.headers.get(self._header)
        if value is None or not (name in self._registered or name in self._names) or not _NUMBER.fullmatch(value):
            return None
        key = int(value)
        return (name, key) if -(2**63) <= key < 2**63 else None

    async def _mark(self, record: tuple[str, int]) -> None:
        """Cancellation: marked or not."""
        try:
            await self._ask(self._records.mark(*record), self._where(record))
        except LinkError as error:
            _log.warning("%s: not marked, so it may be sent again: %s", self._where(record), error)

    def observe(self, event: object) -> None:
        """As `Outbox.observe`: an event that books the end of deliveries, by its `entry` and its `deliveries`."""
        entry, deliveries = getattr(event, "entry", None), getattr(event, "deliveries", ())
        self._observing = True
        if not isinstance(entry, Ended):
            return
        for delivery in deliveries:
            record = self._record_of(delivery)
            if record is None:
                continue
            known = record in self._marked
            self._marked.discard(record)
            if known or entry.line not in _FINISHED:
                continue
            if len(self._told) >= _REMEMBERED:
                _log.warning("%s: not marked, so it is sent again: too many wait for that", self._where(record))
                continue
            self._told[record] = None
            self.news.set()

    async def mark_observed(self) -> None:
        """As `Outbox.mark_observed`."""
        self.news = trio.Event()
        for record in list(self._told):
            await self._mark(record)
            self._told.pop(record, None)
