"""Statements of the user's own, in place of ours: which names they bind, and how a driver takes them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Final

from settlement.sql import EVENTS

__all__ = ["NAMES", "check_custom", "for_psycopg"]

NAMES: Final = ("id", "token", "attempt", "now", "delay", "group")
"""What a statement may bind, each with a colon in front."""

_PART = re.compile(
    r"""'(?:[^']|'')*' | "(?:[^"]|"")*" | `[^`]*` | --[^\n]* | /\*.*?\*/ | \$(\w*)\$.*?\$\1\$ | ::
    | :(?P<name>[A-Za-z_]\w*)""",
    re.VERBOSE | re.DOTALL,
)
"""Texts, quoted names, comments and casts, in which a colon is no name's; and names."""


def check_custom(custom: Mapping[str, str]) -> dict[str, str]:
    """The statements as they are carried out. Raises `ValueError` for an unknown event or name."""
    for event, text in custom.items():
        if event not in EVENTS:
            raise ValueError(f"custom must be statements for {', '.join(EVENTS)}, not {event!r}")
        if not isinstance(text, str) or not text.strip(" \t\n;"):
            raise ValueError(f"custom[{event!r}] must be a statement, not {text!r}")
        for found in _PART.finditer(text):
            if (name := found["name"]) is not None and name not in NAMES:
                raise ValueError(f"custom[{event!r}] binds :{name}, which is none of {', '.join(NAMES)}")
    return {event: text.strip(" \t\n;") for event, text in custom.items()}


@cache
def for_psycopg(text: str) -> str:
    """The statement as psycopg takes it; the time is the server's, when it runs."""
    said: list[str] = []
    end = 0
    for found in _PART.finditer(text):
        if (name := found["name"]) is not None:
            said += [
                text[end : found.start()].replace("%", "%%"),
                "clock_timestamp()" if name == "now" else f"%({name})s",
            ]
            end = found.end()
    return "".join([*said, text[end:].replace("%", "%%")])
