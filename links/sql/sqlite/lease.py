"""The lease form's verbs on SQLite, one call each: claim, say, extend, let go. Runs in the thread, in a transaction.

Each reads the time that it is given, writes what its text says, and tells whether it touched the row. A single
statement that fails undoes itself; a claim, and the move to another table, take several and stand in a savepoint.

A transaction is always IMMEDIATE, so between a claim's SELECT and its UPDATE nobody writes. RETURNING is not used: up
to SQLite 3.40 it gives integers as floats where the table's first column is REAL.

The table is looked at again whenever its schema has changed: no statement runs on columns that are not there, or not of
the type that they were. What no longer fits is a `LinkRefused` from every call, with nothing written, until it does.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

from links.sql.jobs import Passing
from links.sql.rows import BadText, Row, Token
from links.sql.sqlite import times
from links.sql.sqlite.codes import BINDING, is_of_the_row
from links.sql.sqlite.inspect import SqliteLook, inspect, odd_times
from links.sql.sqlite.lender import Beside, SqliteLender
from links.sql.sqlite.schema import SqliteSchema, read_schema, schema_version, undone
from links.sql.sqlite.statements import SqliteStatements, quote, quote_table
from links.sql.sqlite.times import later
from links.sql.table import Table
from settlement.sql import Custom, Delay, Finish, MoveToGroup, MoveToTable, PutBack, Verb

__all__ = ["Ignored", "SqliteLease"]

_log = logging.getLogger("trio_settlement")

_MINUTE = 60_000_000
"""Microseconds between two looks for times of another form, when there is nothing else to do."""


class Ignored(Exception):
    """A statement touched no row, and the row was there: a trigger had its say. The transaction is undone."""


class SqliteLease:
    """The verbs for one queue of one table. Raises `LinkRefused` where the table is no queue."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        table: Table[Any],
        group: str | None,
        lease: float,
        *,
        subscription: str,
        beside: Callable[[], Beside],
        dead_letter: str | None = None,
        custom: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`beside` makes one more connection to the file, for a handler's transaction."""
        self.table, self.group, self.lease, self._beside = table, group, lease, beside
        self._subscription, self._dead_letter, self._custom = subscription, dead_letter, custom
        self._last = 0
        self._version = schema_version(connection)
        look = self._look(connection)
        odd = self._odd_times(connection)
        self._odd = set(odd)
        """The columns that hold times of another form, as far as was told."""
        self._looked = times.now()
        self.warnings = [*look.warnings, *odd.values()]
        """What was told so far: said once."""

    def _look(self, connection: sqlite3.Connection) -> SqliteLook:
        look = inspect(connection, self.table, self._subscription, self._dead_letter, self._custom)
        schema, table = look.schema, self.table
        self.schema = schema
        self.texts = schema.statements(table)
        self._odd_texts = schema.statements(table, "CAST(:id AS TEXT)")
        self._lock = schema.encoder(table.locked_until)
        self._due = schema.encoder(table.retry_after)
        self._finished = schema.encoder(table.processed_at)
        self._dead: dict[str, SqliteSchema | None] = {}
        return look

    def _again(self, connection: sqlite3.Connection) -> None:
        """SqliteLook at the table again where the schema has changed."""
        version = schema_version(connection)
        if version != self._version:
            self._tell(self._look(connection).warnings)
            self._version = version

    def _tell(self, warnings: Sequence[str]) -> None:
        for line in warnings:
            if line not in self.warnings:
                self.warnings.append(line)
                _log.warning("%s", line)

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

    def _look_for_odd_times(self, connection: sqlite3.Connection, now: int) -> None:
        """Once a minute, when there is nothing else to do."""
        if not -_MINUTE < now - self._looked < _MINUTE:
            self._looked = now
            odd = self._odd_times(connection)
            self._tell([line for column, line in odd.items() if column not in self._odd])
            self._odd.update(odd)

    def _odd_times(self, connection: sqlite3.Connection) -> dict[str, str]:
        """A time of another form may never be due: then only a look at the rows tells. By column, what to say."""
        here = f"subscription {self._subscription!r}, table {self.table.name!r}"
        found = odd_times(connection, self.table, self.schema)
        return {column: f"{here}: {line}" for column, line in found.items()}

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

    def say(self, connection: sqlite3.Connection, now: int, token: Token, verb: Verb) -> bool:
        """Carry out the verb; False: nothing was touched. `holds` tells whether the lease was lost then."""
        self._again(connection)
        texts = self._odd_texts if isinstance(token[0], BadText) else self.texts
        values: dict[str, Any] = {"id": token[0], "token": token[1], "attempt": token[2]}
        statement = ""
        match verb:
            case MoveToTable(table):
                with undone(connection, "move"):
                    return self._move(connection, table, texts, values)
            case Finish():
                values["finished"] = self._finished(now)
                statement = texts.finish
            case PutBack():
                statement = texts.release
            case Delay(seconds):
                values["due"] = self._due(later(now, seconds))
                statement = texts.delay
            case MoveToGroup(group):
                values["to"] = group
                statement = texts.regroup
            case Custom():
                with undone(connection, "custom"):
                    return self._carry_out(connection, now, token, verb)
        if not statement:
            raise ValueError(f"table {self.table.name!r} has no column for it")
        with self._whole(connection):
            return connection.execute(statement, values).rowcount > 0

    def _carry_out(self, connection: sqlite3.Connection, now: int, token: Token, verb: Custom) -> bool:
        """A statement of the user's own, where the row is still ours. Raises `Ignored` where it touched nothing."""
        if not self.holds(connection, token):
            return False
        key, until, attempt = token
        group = self.group if verb.group is None else verb.group
        values = {"id": key, "token": until, "attempt": attempt, "delay": verb.delay, "group": group}
        cursor = connection.execute(verb.text, values | {"now": self._lock(now)})
        if not (len(cursor.fetchall()) if cursor.description else cursor.rowcount):
            raise Ignored(f"the statement for {verb.event!r} touched no row")
        return True

    def _whole(self, connection: sqlite3.Connection) -> AbstractContextManager[None]:
        """For a statement that fails: a trigger that says RAISE(FAIL) would keep what it has done so far."""
        return undone(connection, "statement") if self.schema.triggers else contextlib.nullcontext()

    def _move(self, connection: sqlite3.Connection, to: str, texts: SqliteStatements, values: dict[str, Any]) -> bool:
        columns = self.schema.stored
        dead = self._dead_schema(connection, to)
        abort = dead is None or not dead.triggers
        new = None
        try:
            touched = connection.execute(texts.copy(to, columns, abort=abort), values).rowcount > 0
        except sqlite3.IntegrityError:
            if not connection.in_transaction or not self._fills_itself(connection, to, values["id"]):
                raise
            others = [column for column in columns if column.lower() != self.table.id.lower()]
            copied = connection.execute(texts.copy(to, others, abort=abort), values)
            touched, new = copied.rowcount > 0, copied.lastrowid
        if touched:
            touched = connection.execute(texts.delete, values).rowcount > 0
            if not touched:
                raise Ignored("the row was copied, and a trigger has ignored its DELETE")
        if touched and new is not None:
            _log.warning(
                "subscription %r, table %r: row %s is row %s of the dead-letter table %r, where its own id was taken; "
                "a key that is AUTOINCREMENT gives no id twice",
                self._subscription,
                self.table.name,
                values["id"],
                self._id_of(connection, to, new),
                to,
            )
        return touched

    def _dead_schema(self, connection: sqlite3.Connection, to: str) -> SqliteSchema | None:
        if to not in self._dead:
            self._dead[to] = read_schema(connection, to)
        return self._dead[to]

    def _fills_itself(self, connection: sqlite3.Connection, to: str, key: Any) -> bool:
        """Is this id taken in the table `to`, and does that table give a row an id by itself?"""
        dead = self._dead_schema(connection, to)
        if dead is None or self.table.id not in dead or not dead[self.table.id].filled:
            return False
        value = "CAST(? AS TEXT)" if isinstance(key, BadText) else "?"
        query = f"SELECT 1 FROM {quote_table(to)} WHERE {quote(self.table.id)} = {value}"  # noqa: S608
        return connection.execute(query, (key,)).fetchone() is not None

    def _id_of(self, connection: sqlite3.Connection, to: str, rowid: int) -> Any:
        query = f"SELECT {quote(self.table.id)} FROM {quote_table(to)} WHERE _rowid_ = ?"  # noqa: S608
        with contextlib.suppress(sqlite3.Error):  # a table WITHOUT ROWID
            if found := connection.execute(query, (rowid,)).fetchone():
                return found[0]
        return "of another id"

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
        if not self._touch(connection, "extend", token, expiry, self._lock(now)):
            return None
        if self.schema.triggers:
            texts = self._odd_texts if isinstance(token[0], BadText) else self.texts
            found = connection.execute(texts.taken, {"id": token[0], "now": self._lock(now)}).fetchone()
            return None if found is None else (token[0], *found)
        return (token[0], expiry, token[2])

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
