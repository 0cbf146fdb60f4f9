"""What an observer is told: facts, in the past tense, by a plain synchronous call in the task that learned of them.

The ledger is a fold over `Booked` alone, so an observer that keeps its own ledger ends with the same books.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeAlias

import attrs
import trio

from actors.errors import ObserverFailed
from settlement.delivery import Delivery
from settlement.ledger import Entry, Line
from settlement.plans import Notice
from settlement.policy import Answer

__all__ = [
    "Attached",
    "Booked",
    "Broke",
    "Degraded",
    "DrainBegan",
    "Event",
    "GivenUp",
    "HandlerErred",
    "Noticed",
    "Observer",
    "Recovered",
    "log",
]

log = logging.getLogger("trio_settlement")


@attrs.frozen
class Attached:
    """A link was attached, or a connection made.

    Attributes:
        name: The subscription's, or the broker's.
    """

    name: str


@attrs.frozen
class Broke:
    """A life ended in bad weather; the next one starts after `delay` seconds (None: when the connection is back).

    Attributes:
        name: The subscription's, or the broker's.
        error: What ended the life.
        delay: Seconds until the next life, 0 or more; None: it starts when the connection is back.
    """

    name: str
    error: Exception
    delay: float | None


@attrs.frozen
class Booked:
    """An entry of a subscription's ledger, and the deliveries that it is about (none for copies).

    Attributes:
        subscription: Its name.
        entry: How many were taken over, or ended in which line, or what became of copies.
        deliveries: Those that the entry is about; empty for copies.
    """

    subscription: str
    entry: Entry
    deliveries: tuple[Delivery[Any], ...] = ()


@attrs.frozen
class HandlerErred:
    """A handler or decoder raised, and the policy answered.

    Attributes:
        subscription: Its name.
        delivery: Of a batch: one event for each.
        error: What was raised, a `trio.TooSlowError` where `within` was over.
        answer: What the policy answered.
    """

    subscription: str
    delivery: Delivery[Any]
    error: Exception
    answer: Answer


@attrs.frozen
class Noticed:
    """A plan carried a notice: the cap was reached, a delay cannot be kept, …

    Attributes:
        subscription: Its name.
        delivery: The one it is about.
        notice: One of `settlement.plans`; `str(notice)` is its log line.
    """

    subscription: str
    delivery: Delivery[Any]
    notice: Notice


@attrs.frozen
class GivenUp:
    """A delivery will not be tried again: it is dropped or dead-lettered. Told when that was decided.

    Attributes:
        subscription: Its name.
        delivery: The one it is about.
        line: `Line.DROPPED` or `Line.DEAD_LETTERED`.
        why: The reason of `Drop(reason)`, else type and text of the failure that led here; empty where there was
            neither.
    """

    subscription: str
    delivery: Delivery[Any]
    line: Line
    why: str


@attrs.frozen
class Degraded:
    """A subscription works on, but something it needs does not: a closed dead letter, a refused copy or attach.

    Attributes:
        subscription: Its name.
        why: What does not work, and the reason.
    """

    subscription: str
    why: str


@attrs.frozen
class Recovered:
    """What was degraded works again.

    Attributes:
        subscription: Its name; `Runtime.statistics` says what is still degraded.
    """

    subscription: str


@attrs.frozen
class DrainBegan:
    """`Runtime.drain` was called."""


Event: TypeAlias = Attached | Broke | Booked | HandlerErred | Noticed | GivenUp | Degraded | Recovered | DrainBegan
Observer: TypeAlias = Callable[[Event], None]


class Tell:
    """Tells every observer. One that raises fails the runtime, but not who told: the books are kept to the end."""

    def __init__(self, observers: tuple[Observer, ...]) -> None:
        for observer in observers:
            if not callable(observer) or inspect.iscoroutinefunction(observer):
                raise TypeError(f"an observer is a plain function of an event, not {observer!r}")
        self.observers = observers
        self.failure: ObserverFailed | None = None
        """The first."""
        self._failed = trio.Event()

    def __bool__(self) -> bool:
        return bool(self.observers)

    def __call__(self, event: Event) -> None:
        for observer in self.observers:
            try:
                observer(event)
            except Exception as error:
                if self.failure is None:
                    log.exception("observer %r failed at %s", observer, type(event).__name__)
                    self.failure = ObserverFailed(observer, event)
                    self.failure.__cause__ = error
                    self._failed.set()

    async def until_failed(self) -> NoReturn:
        """Raise `ObserverFailed` when an observer has raised. Cancellation: nothing was done."""
        await self._failed.wait()
        assert self.failure is not None  # noqa: S101 -- it is set before the event
        raise self.failure


def ids(deliveries: Iterable[Delivery[Any]]) -> str:
    """A few ids for a log line."""
    names = [delivery.id for delivery in deliveries]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")  # noqa: PLR2004
