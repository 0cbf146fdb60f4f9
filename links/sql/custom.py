"""Statements of the user's own, in place of ours: which there may be, what they bind, and what they gave. Pure.

A statement for claim gives ids. Our own look at these rows follows in the same transaction, and decides: one that is
not held by this very claim is passed over, whatever the statement says.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from links.errors import CallBroken
from links.sql.jobs import Passing
from links.sql.rows import Row, name_of
from links.sql.table import Table
from settlement.sql import EVENTS, AdvisoryLock, ClaimForm, Lease, RowLock

__all__ = ["BINDS", "NAMES", "check_custom", "fetched", "for_psycopg", "ids_of", "ours_of", "yes"]

_SETTLING = ("id", "token", "attempt", "now", "delay", "group")
BINDS: Final[Mapping[str, Sequence[str]]] = MappingProxyType(
    {
        **dict.fromkeys(EVENTS, _SETTLING),
        "claim": ("now", "group", "room", "until"),
        "fetch": ("id", "group"),
        "extend": ("id", "token", "attempt", "now", "group", "until"),
        "lock": ("key",),
        "unlock": ("key",),
    }
)
"""By each event, what its statement may bind, each with a colon in front."""
NAMES: Final = tuple(sorted({name for names in BINDS.values() for name in names}))
"""All of them."""
_NEEDS: Final = {"fetch": ("id",), "extend": ("id", "until"), "lock": ("key",), "unlock": ("key",)}
"""What it must bind, else it could not do what it is for."""

_PART = re.compile(
    r"""'(?:[^']|'')*' | "(?:[^"]|"")*" | `[^`]*` | --[^\n]* | /\*.*?\*/ | \$(\w*)\$.*?\$\1\$ | ::
    | :(?P<name>[A-Za-z_]\w*)""",
    re.VERBOSE | re.DOTALL,
)
"""Texts, quoted names, comments and casts, in which a colon is no name's; and names."""

_PSYCOPG: Final = {"now": "clock_timestamp()", "until": "%(until)s::timestamptz", "key": "%(key)s::text"}
"""How a name is said where it is more than bound: the time is the server's, when it runs."""


# --- at construction


def check_custom(custom: Mapping[str, str], claim: ClaimForm, table: Table[Any]) -> dict[str, str]:
    """The statements as they are carried out. Raises `ValueError` for what they cannot be, with the way out."""
    for event, text in custom.items():
        if event not in BINDS:
            raise ValueError(f"custom must be statements for {', '.join(BINDS)}, not {event!r}")
        if not isinstance(text, str) or not text.strip(" \t\n;"):
            raise ValueError(f"custom[{event!r}] must be a statement, not {text!r}")
    _check_together(custom, claim, table)
    for event, text in custom.items():
        _check_names(event, text, claim)
    return {event: text.strip(" \t\n;") for event, text in custom.items()}


def _check_together(custom: Mapping[str, str], claim: ClaimForm, table: Table[Any]) -> None:
    for one, other in (("lock", "unlock"), ("unlock", "lock")):
        if one in custom and other not in custom:
            raise ValueError(f"custom[{one!r}] needs custom[{other!r}] as well: what locks a key must also free it")
    if "lock" in custom and not isinstance(claim, AdvisoryLock):
        raise ValueError(
            f"custom['lock'] and custom['unlock'] need claim=AdvisoryLock(key), not {claim!r}, under which no key is "
            "locked; leave them out"
        )
    if "claim" in custom and isinstance(claim, AdvisoryLock):
        raise ValueError(
            f"custom['claim'] cannot be under {claim!r}, where a claim tries the key of row by row; use custom['lock'] "
            "and custom['unlock'], or claim by RowLock() or Lease(seconds)"
        )
    if "extend" in custom and not isinstance(claim, Lease):
        raise ValueError(
            f"custom['extend'] needs claim=Lease(seconds), not {claim!r}, under which nothing is extended; leave it out"
        )
    if "fetch" in custom and "claim" not in custom:
        raise ValueError("custom['fetch'] needs custom['claim'] as well: it reads the rows whose ids that gives")
    for event in ("claim", "extend"):
        if event in custom and table.fifo:
            raise ValueError(
                f"custom[{event!r}] cannot be for the FIFO table {table.name!r}, whose order is kept by the library's "
                "own claim and extend; leave it out, or leave fifo out of Table(…)"
            )


def _check_names(event: str, text: str, claim: ClaimForm) -> None:
    bound = {found["name"] for found in _PART.finditer(text) if found["name"] is not None}
    names, needs = BINDS[event], _NEEDS.get(event, ())
    if event == "claim" and isinstance(claim, RowLock):
        names = [name for name in names if name != "until"]
    elif event == "claim":
        needs = ("until",)
    for name in sorted(bound.difference(names)):
        raise ValueError(f"custom[{event!r}] binds :{name}, which is none of {', '.join(names)}")
    for name in needs:
        if name not in bound:
            why = ": it must write that, the lease's end, into locked_until" if name == "until" else ""
            raise ValueError(f"custom[{event!r}] must bind :{name}{why}")


@cache
def for_psycopg(text: str) -> str:
    """The statement as psycopg takes it."""
    said: list[str] = []
    end = 0
    for found in _PART.finditer(text):
        if (name := found["name"]) is not None:
            said += [text[end : found.start()].replace("%", "%%"), _PSYCOPG.get(name, f"%({name})s")]
            end = found.end()
    return "".join([*said, text[end:].replace("%", "%%")])


# --- what they gave


def ids_of(found: Sequence[Sequence[Any]], room: int) -> list[Any]:
    """The ids that a statement for claim gave, each once; NULL is none, as of a function that has found nothing.

    Raises `CallBroken` for more than `room`, and for what is no id.
    """
    ids: dict[Any, None] = {}
    for row in found:
        key = row[0] if row else None
        if not isinstance(key, Hashable):
            raise CallBroken(f"the statement for 'claim' must give ids, not {key!r}")
        if key is not None:
            ids[key] = None
    if len(ids) > room:
        raise CallBroken(
            f"the statement for 'claim' gave {len(ids)} rows, and there is room for {room}: let it end with LIMIT :room"
        )
    return list(ids)


def ours_of(ids: Sequence[Any], looked: Sequence[Row], passing: Passing, missing: str) -> list[Row]:
    """The rows that are worked on, of those that a statement for claim gave; the others are `passing`'s.

    `looked`: of each that this claim holds, in their order, its place in `ids`, whether it may be claimed, and the row.
    `missing`: why the others are not there. Raises `CallBroken` for one that is in hand already, and whose lease was
    written over: then nothing of the claim may stand.
    """
    there = {row[0] for row in looked}
    ours: dict[Any, Row] = {}
    for place, key in enumerate(ids):
        if place not in there:
            passing.failed[key] = ValueError(f"the statement for 'claim' gave it, but it is {missing}")
    for _, claimable, *row in looked:
        if row[0] in passing.held:
            raise CallBroken(
                f"the statement for 'claim' has leased row {name_of(row[0])}, which is in hand; let it take those "
                "alone whose locked_until is NULL or over"
            )
        if claimable:
            ours.setdefault(row[0], tuple(row))
        else:
            passing.failed[row[0]] = ValueError(
                "the statement for 'claim' gave it, but it is not due, or finished, or of another group"
            )
    return list(ours.values())


def fetched(table: Table[Any], row: Row, names: Sequence[str], found: Sequence[Sequence[Any]]) -> Row:
    """A claimed row with the content that the statement for fetch gave, by the names of the table's columns.

    Where that is none, the row holds an error in its place, and is read as a delivery that is undecodable.
    """
    content = dict(zip(names, found[0], strict=True)) if len(found) == 1 else {}
    roles = (table.payload, table.headers, table.partition_key)
    lacks = [column for column in roles if column is not None and column not in content]
    wrong: Exception | None = None
    if len(found) != 1:
        wrong = ValueError(f"the statement for 'fetch' gave {len(found)} rows for row {name_of(row[0])}, not 1")
    elif lacks:
        wrong = ValueError(
            f"the statement for 'fetch' gave no column {lacks[0]!r} for row {name_of(row[0])}; it gave "
            f"{', '.join(names)}"
        )
    if wrong is not None:
        return (*row[:3], wrong, None, None, *([] if table.payload else [wrong]))
    read = [None if column is None else content[column] for column in roles]
    return (*row[:3], *read, *([] if table.payload else [content]))


def yes(event: str, found: Sequence[Sequence[Any]]) -> bool:
    """What a statement for lock or unlock has answered. Raises `CallBroken` where that is not one true or false."""
    answer = found[0][0] if len(found) == 1 and found[0] else None
    if answer not in (True, False):
        what = f"{answer!r}" if len(found) == 1 else f"{len(found)} rows"
        raise CallBroken(f"the statement for {event!r} must give one row with true or false, not {what}")
    return bool(answer)
