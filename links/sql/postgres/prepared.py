"""The claims that one session of the server has prepared, for strings of the simple protocol, which prepares none.

https://www.postgresql.org/docs/current/sql-prepare.html. A claim that stands in full in its string is planned each
time, and planning reads the ends of an index, with the dead rows there: that may take longer than the claim.

Cancellation: a statement is prepared or not, and its name is used by nobody.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from links.sql.postgres.strings import bound, results
from links.sql.postgres.trio_connection import TrioConnection

__all__ = ["Prepared"]

_PLACE = re.compile(r"%\((\w+)\)s|%%")


class Prepared:
    """What this connection's session has prepared, by text; behind a pooler nothing, for the session is not ours."""

    def __init__(self, connection: TrioConnection) -> None:
        self.connection = connection
        self._names: dict[str, str] = {}
        self._count = 0

    async def prepare(self, text: str) -> None:
        """Have this prepared, if it is not. Raises `psycopg.Error`."""
        if text in self._names or self.connection.pooled:
            return
        self._count += 1
        name = f"claim_{self._count}"
        await results(self.connection, [f"PREPARE {name} AS {_numbered(text)[0]}"])
        self._names[text] = name

    def forget(self) -> None:
        """Somebody has taken them away, or their tables have changed: each is prepared anew, by another name."""
        self._names.clear()

    def said(self, text: str, values: dict[str, Any]) -> str:
        """How to carry it out with these values: as prepared, or in full."""
        name = self._names.get(text)
        if name is None:
            return bound(self.connection, text, values)
        places = _numbered(text)[1]
        return f"EXECUTE {name}" + (f"({bound(self.connection, places, values)})" if places else "")


@cache
def _numbered(text: str) -> tuple[str, str]:
    """The statement with its values as $1, $2 …, and these by name, as a statement binds them, between commas."""
    names = list(dict.fromkeys(name for name in _PLACE.findall(text) if name))
    numbered = _PLACE.sub(lambda found: f"${names.index(found[1]) + 1}" if found[1] else "%", text)
    return numbered, ", ".join(f"%({name})s" for name in names)
