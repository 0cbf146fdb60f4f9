"""What was said in a `MemoryBroker`, as an append-only list of small values: the truth at the queue.

`replay` reads one from its beginning, and proves that every message was finished once at most, never handed out to two
at once, and never lost from sight.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import attrs

from settlement.memory import PutBack, Reject, Verb

__all__ = ["Delivered", "Entry", "Fates", "Published", "Returned", "Said", "Unsaid", "replay"]


@attrs.frozen
class Published:
    """The message was stored.

    Attributes:
        queue: Its name.
        id: The message's.
    """

    queue: str
    id: str


@attrs.frozen
class Delivered:
    """The message was handed over: it is unsettled from here.

    Attributes:
        queue: Its name.
        id: The message's.
        attempt: 1 or more.
    """

    queue: str
    id: str
    attempt: int


@attrs.frozen
class Said:
    """The verb was carried out (whether its sayer learnt of it or not).

    Attributes:
        queue: Its name.
        id: The message's.
        verb: What was carried out.
    """

    queue: str
    id: str
    verb: Verb


@attrs.frozen
class Unsaid:
    """The verb was not carried out, and that was not for a lost lease: the message stays unsettled.

    Attributes:
        queue: Its name.
        id: The message's.
        why: In words.
    """

    queue: str
    id: str
    why: str


@attrs.frozen
class Returned:
    """Nobody said a verb, and the message is back at its old place.

    Attributes:
        queue: Its name.
        id: The message's.
        why: In words.
        counted: Does the next delivery count this one? Not where no handler was called for it, and the link could say
            so.
    """

    queue: str
    id: str
    why: str
    counted: bool = True


Entry: TypeAlias = Published | Delivered | Said | Unsaid | Returned


@attrs.frozen
class Fates:
    """Where each message of a log is at its end, by id: in exactly one of these, in order of getting there.

    Attributes:
        stored: In the queue: ready, or waiting for its time.
        unsettled: In somebody's hands.
        accepted: Gone, handled or copied elsewhere.
        rejected: Gone, refused.
    """

    stored: tuple[str, ...]
    unsettled: tuple[str, ...]
    accepted: tuple[str, ...]
    rejected: tuple[str, ...]


def replay(log: Iterable[Entry]) -> Fates:
    """Follow every message through a whole log. Raises `ValueError` at the first entry that cannot be."""
    places: dict[str, str] = {}

    def move(entry: Entry, before: str, after: str) -> None:
        if places.pop(entry.id, "nowhere") != before:
            raise ValueError(f"{entry!r} of a message that is not {before}")
        places[entry.id] = after

    for entry in log:
        match entry:
            case Published():
                move(entry, "nowhere", "stored")
            case Delivered():
                move(entry, "stored", "unsettled")
            case Unsaid():
                move(entry, "unsettled", "unsettled")
            case Returned() | Said(verb=PutBack()):
                move(entry, "unsettled", "stored")
            case Said(verb=Reject()):
                move(entry, "unsettled", "rejected")
            case Said():
                move(entry, "unsettled", "accepted")

    def at(place: str) -> tuple[str, ...]:
        return tuple(id for id, where in places.items() if where == place)  # noqa: A001 -- as Delivery.id

    return Fates(at("stored"), at("unsettled"), at("accepted"), at("rejected"))
