"""The lease form's verbs on SQLite, one call each: claim, say, extend, let go. Runs in the thread, in a transaction.

Each reads the time that it is given, writes what its text says, and tells whether it touched the row. A single
statement that fails undoes itself; a claim, and the move to another table, take several and stand in a savepoint.

A transaction is always IMMEDIATE, so between a claim's SELECT and its UPDATE nobody writes. RETURNING is not used: up
to SQLite 3.40 it gives integers as floats where the table's first column is REAL.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from links.errors import CallBroken
from links.sql.custom import fetched, ids_of, ours_of
from links.sql.jobs import Passing
from links.sql.rows import BadText, Row, Token
from links.sql.sqlite.codes import BINDING, is_of_the_row
from links.sql.sqlite.custom import asked
from links.sql.sqlite.inspect import SqliteLook
from links.sql.sqlite.lender import Beside, SqliteLender
from links.sql.sqlite.looked import Ignored, SqliteLooked
from links.sql.sqlite.schema import undone
from links.sql.sqlite.times import later

__all__ = ["SqliteLease"]

_log = logging.getLogger("trio_settlement")


class SqliteLease(SqliteLooked):
    """The verbs for one queue of one table. Raises `LinkRefused` where the table is no queue."""

    def __init__(self, *asked: Any, lease: float, beside: Callable[[], Beside], **names: Any) -> None:
        """`lease`: seconds. `beside` makes one more connection to the file, for a handler's transaction."""
        super().__init__(*asked, **names)
        self.lease, self._beside = lease, beside
        self._last = 0

    def _look(self, connection: sqlite3.Connection) -> SqliteLook:
        look = super()._look(connection)
        self._lock = self.schema.encoder(self.table.locked_until)
        return look

    def lender(self, limit: int) -> SqliteLender:
        """As `LeaseForm.lender`."""
        return SqliteLender(self, self._beside, limit)

    # --- claim -------------------------------------------------------------------------------------------------------

    def claim(self, connection: sqlite3.Connection, now: int, room: int, passing: Passing) -> list[Row]:
        """Lease up to `room` due rows in the queue's order, but for those that are passed over.

        One that cannot be leased is `passing`'s, and the claim goes on behind it. Raises what says nothing of a row,
        and what has ended the transaction.
        """
        self._again(connection)
        if "claim" in self.own:
            with undone(connection, "claim"):
                return self._own_claim(connection, now, room, passing)
        due: dict[str, Any] = {"now": self._lock(now), "due": self._due(now), "group": self.group}
        expiry: Any = None
        taken: list[Row] = []
        passing.complete = False
        if self.texts.leased and self._in_work(connection, due, passing):
            return []
        look = room
        while True:
            found = connection.execute(self.texts.claim, {**due, "room": look}).fetchall()
            rows = [row for row in found if not passing.passes(row[0])]
            while rows and len(taken) < room and not passing.enough:
                if expiry is None:
                    expiry = self._lock(self._expiry(now))
                some, rows = rows[: room - len(taken)], rows[room - len(taken) :]
                taken += self._take(connection, some, due["now"], expiry, passing)
            if len(found) < look and not rows and not passing.enough:
                passing.complete = True
                self._look_for_odd_times(connection, now)
                return taken
            if len(taken) == room or passing.enough:
                return taken
            # those that were leased are not found again, those that are passed over may all stand in front
            look = min(2 * look, room - len(taken) + passing.size)

    def _own_claim(self, connection: sqlite3.Connection, now: int, room: int, passing: Passing) -> list[Row]:
        """By the statements for claim and fetch. Raises `CallBroken`."""
        until = self._lock(self._expiry(now))
        values = {"now": self._lock(now), "group": self.group, "room": room, "until": until}
        names, found = asked(connection, "claim", self.own["claim"], values)
        if not names:
            raise CallBroken("the statement for 'claim' gives no rows, and must give ids, such as by RETURNING")
        ids = ids_of(found, room)
        passing.complete = len(ids) < room
        looked: list[Row] = []
        for place, key in enumerate(ids):
            texts = self._odd_texts if type(key) is BadText else self.texts
            given = {"id": key, "expiry": until, "due": self._due(now), "group": self.group}
            looked += [(place, *row) for row in connection.execute(texts.chosen, given).fetchall()]
        rows = ours_of(ids, looked, passing, "not there, or not leased until :until")
        return [self._fetched(connection, row) for row in rows]

    def _fetched(self, connection: sqlite3.Connection, row: Row) -> Row:
        values = {"id": row[0], "group": self.group}
        return fetched(self.table, row, *asked(connection, "fetch", self.own["fetch"], values))

    def _in_work(self, connection: sqlite3.Connection, due: dict[str, Any], passing: Passing) -> bool:
        """Is a row of this FIFO group in work: leased, or held by this process, whose handler may still be at it?"""
        rows = connection.execute(self.texts.leased, due).fetchall()
        return any(lasts or key in passing.held for key, lasts in rows)

    def _take(
        self, connection: sqlite3.Connection, rows: list[Row], now: Any, expiry: Any, passing: Passing
    ) -> list[Row]:
        """Lease these rows: all at once, or one by one where one of them cannot be leased."""
        if len(rows) > 1 and not passing.singly:
            try:
                return self._leased(connection, rows, now, expiry, passing)
            except BINDING as error:
                if not is_of_the_row(error):
                    raise
                passing.singly = True
                if not connection.in_transaction:
                    raise
        taken: list[Row] = []
        for row in rows:
            if passing.enough:
                break
            try:
                taken += self._leased(connection, [row], now, expiry, passing)
            except BINDING as error:
                if not is_of_the_row(error):
                    raise
                passing.failed[row[0]] = error
                if not connection.in_transaction:
                    raise
        return taken

    def _leased(
        self, connection: sqlite3.Connection, rows: list[Row], now: Any, expiry: Any, passing: Passing
    ) -> list[Row]:
        """Lease them, all or none: as they are stored, which is as they were written where no trigger has its say."""
        plain, odd = self._values(rows, expiry)
        touched = 0
        with undone(connection, "claim") if len(rows) > 1 else self._whole(connection):
            for text, some in ((self.texts.take, plain), (self._odd_texts.take, odd)):
                if some:
                    touched += connection.executemany(text, some).rowcount
        if not self.schema.triggers and touched == len(rows):
            return [self._row(row, expiry) for row in rows]
        taken: list[Row] = []
        for row in rows:
            texts = self._odd_texts if type(row[0]) is BadText else self.texts
            stored = connection.execute(texts.taken, {"id": row[0], "now": now}).fetchone()
            if stored is None:
                passing.failed[row[0]] = Ignored("a trigger has ignored the lease, or taken it back")
            else:
                taken.append(self._row((row[0], stored[1], *row[2:]), stored[0]))
        return taken

    @staticmethod
    def _values(rows: list[Row], expiry: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """What is bound for each, and for those whose id is not UTF-8."""
        values = [{"id": row[0], "expiry": expiry, "attempt": row[1]} for row in rows]
        odd = [each for each in values if type(each["id"]) is BadText]
        return ([each for each in values if type(each["id"]) is not BadText] if odd else values), odd

    def _row(self, row: Row, stored: Any) -> Row:
        """With the lease in its place; in row mode the columns as one `dict`, as they were before the claim."""
        head = (row[0], stored, *row[1:5])
        if self.table.payload is not None:
            return head
        columns = dict(zip(self.schema.names, row[5:], strict=True))
        columns[self.schema[self.table.locked_until or ""].name] = None
        return (*head, columns)

    def _expiry(self, now: int) -> int:
        """The expiry of a claim at `now`; no claim of the last second had it, so that two claims of a row differ.

        Also by a clock that stands still or is set back a little; one that is set back by more makes new times.
        """
        expiry = later(now, self.lease)
        if self._last - 1_000_000 < expiry <= self._last:
            expiry = self._last + 1
        self._last = expiry
        return expiry

    # --- settle ------------------------------------------------------------------------------------------------------

    def finish_all(self, connection: sqlite3.Connection, now: int, tokens: Sequence[Token]) -> bool:
        """Finish all of these by one call; False: they are to be said one by one, and nothing was touched."""
        self._again(connection)
        if self.schema.triggers or any(type(token[0]) is BadText for token in tokens):
            return False
        finished = self._finished(now)
        values = [{"id": key, "token": token, "attempt": count, "finished": finished} for key, token, count in tokens]
        with contextlib.suppress(Ignored), undone(connection, "finish"):
            if connection.executemany(self.texts.finish, values).rowcount != len(values):
                raise Ignored
            return True
        return False

    def holds(self, connection: sqlite3.Connection, token: Token, now: int | None = None) -> bool:
        """Is the row still ours? `now`: for a renewal, so not where its lease is over and the table is FIFO."""
        self._again(connection)
        texts = self._odd_texts if isinstance(token[0], BadText) else self.texts
        values = {"id": token[0], "token": token[1], "attempt": token[2]}
        if now is not None and self.table.fifo:
            stored: tuple[Any, ...] | None = connection.execute(
                texts.taken, values | {"now": self._lock(now)}
            ).fetchone()
            return stored == (token[1], token[2])
        return connection.execute(texts.holds, values).fetchone() is not None

    def extend(self, connection: sqlite3.Connection, now: int, token: Token) -> Token | None:
        """The token that now holds the row; None: the lease was lost."""
        self._again(connection)
        expiry = self._lock(later(now, self.lease))
        if "extend" in self.own:
            return self._own_extend(connection, now, token, expiry)
        if not self._touch(connection, "extend", token, expiry, self._lock(now)):
            return None
        if self.schema.triggers:
            texts = self._odd_texts if isinstance(token[0], BadText) else self.texts
            found = connection.execute(texts.taken, {"id": token[0], "now": self._lock(now)}).fetchone()
            return None if found is None else (token[0], *found)
        return (token[0], expiry, token[2])

    def _own_extend(self, connection: sqlite3.Connection, now: int, token: Token, expiry: Any) -> Token | None:
        """By the statement for extend, where the lease is still ours. Raises `Ignored` where it leased otherwise."""
        if not self.holds(connection, token):
            return None
        key, until, attempt = token
        values = {"id": key, "token": until, "attempt": attempt, "now": self._lock(now), "group": self.group}
        new = (key, expiry, attempt)
        with undone(connection, "extend"):
            connection.execute(self.own["extend"], values | {"until": expiry}).fetchall()
            if not self.holds(connection, new):
                raise Ignored("the statement for 'extend' has not leased it until :until")
        return new

    def let_go(self, connection: sqlite3.Connection, token: Token, *, counted: bool) -> bool:
        """Let the lease go; not `counted`: the attempt is what it was before the claim. False: it was lost."""
        self._again(connection)
        return self._touch(connection, "release" if counted else "give_back", token)

    def _touch(
        self, connection: sqlite3.Connection, event: str, token: Token, expiry: Any = None, now: Any = None
    ) -> bool:
        texts = self._odd_texts if isinstance(token[0], BadText) else self.texts
        values = {"id": token[0], "token": token[1], "attempt": token[2], "expiry": expiry, "now": now}
        with self._whole(connection):
            return connection.execute(getattr(texts, event), values).rowcount > 0
