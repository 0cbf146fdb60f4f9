"""The advisory form's verbs on SQLite: a row is in work while this process holds its key. Runs in the thread.

A claim walks along the due rows in the queue's order, in one transaction: it reads no more of them than id and key,
passes those whose key is held, and stops when it has enough. It counts the attempt of what it takes, which with the id
tells later whether somebody changed the row. `links.sql.sqlite.keys` knows what is held, and keeps other processes out.

A verb that fails leaves its row as it was when it was claimed, and the key is released all the same.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from links.abc import Verdict
from links.errors import LeaseLost, LinkError, LinkRefused
from links.sql.dialect import Writer
from links.sql.jobs import Passing
from links.sql.rows import BadText, Row
from links.sql.sqlite.codes import BINDING, is_busy, is_fatal, is_of_the_row
from links.sql.sqlite.keys import LockedOut, Ring
from links.sql.sqlite.lender import Beside, SqliteLender
from links.sql.sqlite.looked import Ignored, SqliteLooked
from links.sql.sqlite.pin import SqlitePin, lost
from links.sql.sqlite.schema import name_in_file, undone
from settlement.sql import PutBack, Verb

__all__ = ["SqliteAdvisory"]


class SqliteAdvisory(SqliteLooked):
    """A queue whose rows are in work under a lock on their key. Raises `LinkRefused` where the table is no queue."""

    def __init__(
        self, connection: sqlite3.Connection, *asked: Any, path: Path, beside: Callable[[], Beside], **names: Any
    ) -> None:
        """`path`: the database file. `beside` makes one more connection to it, for a handler's transaction."""
        self.path, self._beside = path, beside
        super().__init__(connection, *asked, **names)
        self._spelled = name_in_file(self.table.name)
        ring = self.ring()
        self.enter(ring)  # refused now, and not by the first claim
        ring.leave()

    def pin(self, writer: Writer, limit: int) -> SqlitePin:
        """As `PinForm.pin`."""
        return SqlitePin(self, writer, SqliteLender(self, self._beside, limit))

    def ring(self) -> Ring:
        """A new one, for this file."""
        return Ring(self.path)

    def enter(self, ring: Ring) -> None:
        """Raises `LinkRefused` where another process has the file."""
        try:
            ring.enter()
        except LockedOut as error:
            raise LinkRefused(f"{self.here}: {error}") from error.__cause__

    # --- claim -------------------------------------------------------------------------------------------------------

    def claim(self, connection: sqlite3.Connection, now: int, room: int, passing: Passing, *, ring: Ring) -> list[Row]:
        """Take up to `room` due rows, one of a key, into `ring`, which holds nothing but what a try before has taken.

        A row that cannot be taken is `passing`'s, and its key free again. Raises as `SqliteLease.claim`.
        """
        ring.free_all()
        self._again(connection)
        self.enter(ring)
        taken: list[Row] = []
        passing.complete = False
        wanted = room
        while True:
            failed = len(passing.failed)
            for key, name in self._walk(connection, now, passing, wanted, ring):
                if len(taken) == room or passing.enough:
                    break
                taken += self._take(connection, key, name, passing, ring)
            if len(taken) == room or passing.enough:
                return taken
            if len(passing.failed) == failed:
                passing.complete = True
                self._look_for_odd_times(connection, now)
                return taken
            wanted = 2 * max(wanted, 1)  # behind those that failed there may be others of the same keys

    def _walk(
        self, connection: sqlite3.Connection, now: int, passing: Passing, wanted: int, ring: Ring
    ) -> list[tuple[Any, bytes]]:
        """Id and key of the first rows that may be taken, one of a key."""
        found: dict[bytes, Any] = {}
        values = {"due": self._due(now), "group": self.group, "room": -1}
        held = ring.held
        cursor = connection.execute(self.texts.claim, values)
        for key, name in cursor:
            if name in held or name in found or passing.passes(key) or self._row_of(key) in held:
                continue
            found[name] = key
            if len(found) == wanted:
                break
        cursor.close()
        return [(key, name) for name, key in found.items()]

    def _row_of(self, key: Any) -> tuple[str, Any]:
        """The row itself is held beside its key: a handler may write to the columns that the key is made of."""
        return (self._spelled, key)

    def _take(self, connection: sqlite3.Connection, key: Any, name: bytes, passing: Passing, ring: Ring) -> list[Row]:
        if not ring.take(key, (name, self._row_of(key))):
            return []
        try:
            return [self._counted(connection, key)]
        except Ignored as error:
            passing.failed[key] = error
        except BINDING as error:
            if not is_of_the_row(error):
                raise
            passing.failed[key] = error
            if not connection.in_transaction:
                raise
        ring.free([key])
        return []

    def _counted(self, connection: sqlite3.Connection, key: Any) -> Row:
        """The row, its attempt counted as it is stored now. Raises `Ignored`."""
        texts = self._odd_texts if type(key) is BadText else self.texts
        row = connection.execute(texts.read, {"id": key}).fetchone()
        if row is None:
            raise Ignored("a trigger has deleted it meanwhile")
        count = row[1]
        if texts.take:
            with self._whole(connection):
                touched = connection.execute(texts.take, {"id": key, "attempt": count}).rowcount
            if self.schema.triggers:
                stored = connection.execute(texts.taken, {"id": key}).fetchone()
                if not touched or stored is None:
                    raise Ignored("a trigger has ignored the attempt, so it would not be counted")
                (count,) = stored
        head = (row[0], None, count, *row[2:5])
        if self.table.payload is not None:
            return head
        return (*head, dict(zip(self.schema.names, row[5:], strict=True)))

    # --- settle ------------------------------------------------------------------------------------------------------

    def settle(self, connection: sqlite3.Connection, now: int, said: Sequence[tuple[Row, Verb]]) -> list[Verdict]:
        """A verdict for each verb. Raises what has ended the transaction."""
        self._again(connection)
        return [self._verdict(connection, now, row, verb) for row, verb in said]

    def _verdict(self, connection: sqlite3.Connection, now: int, row: Row, verb: Verb) -> Verdict:
        if isinstance(verb, PutBack):
            return None
        token = row[:3]
        try:
            with undone(connection, "verb"):
                if self.say(connection, now, token, verb):
                    return None
            if self.holds(connection, token):
                raise Ignored("it touched no row: a trigger has ignored it")
        except (LinkError, Ignored) as error:
            return lost(error)
        except BINDING as error:
            if not connection.in_transaction or is_busy(error) or is_fatal(error):
                raise
            return lost(error)
        return LeaseLost("the row is gone, or was changed by somebody else")

    def uncount(self, connection: sqlite3.Connection, now: int, rows: Sequence[Row]) -> None:  # noqa: ARG002
        """Their attempts are what they were before the claim. Raises `LinkRefused`, and what a statement raises."""
        self._again(connection)
        for row in rows:
            texts = self._odd_texts if type(row[0]) is BadText else self.texts
            with undone(connection, "uncount"):
                connection.execute(texts.give_back, {"id": row[0], "attempt": row[2]})
