"""The SQL texts of the forms that hold a connection, on PostgreSQL. Pure.

They are sent with the values written into them, several in one string; `links.sql.postgres.statements` says what is the
same in every form.
"""

# ruff: noqa: S608 -- identifiers are quoted, values are bound

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from links.sql.postgres.schema import PostgresSchema, quote
from links.sql.postgres.statements import Rows, later
from links.sql.table import Table
from settlement.sql import AdvisoryLock

__all__ = ["AdvisoryStatements", "HeldStatements", "RowLockStatements"]

_LOCKED = "FOR NO KEY UPDATE OF j SKIP LOCKED"


def _set(column: str | None, value: str) -> str:
    return f"{quote(column)} = {value}" if column else ""


class HeldStatements(Rows):
    """What the texts of the forms have in common that hold a connection; one whose column the table has not is empty.

    The rows that are meant are bound as `ids`.
    """

    delays = 0.0
    counts = True
    """Does a settlement count the attempt?"""
    finish: str
    """Mark as processed, or delete."""
    put_back: str
    """Count the attempt."""
    delay: str
    """Not due before `seconds` have passed."""
    regroup: str
    """The rows are of group `to`."""

    def __init__(self, table: Table[Any], schema: PostgresSchema) -> None:
        super().__init__(table, schema)
        self.counted = f"COALESCE(j.{quote(table.attempt)}, 1) + 1" if table.attempt else "NULL::bigint"
        self.mine = f"WHERE j.{self.id} = ANY (%(ids)s::{self.ids})"
        self.put_back = self.update(_set(table.attempt, self.counted))
        self.finish = self.update(_set(table.processed_at, "clock_timestamp()")) or self._delete
        due = _set(table.retry_after, later("%(seconds)s"))
        count = _set(table.attempt, self.counted) if self.counts else ""
        self.delay = self.update(", ".join(filter(None, (due, count)))) if due else ""
        self.regroup = self.update(_set(table.group, "%(to)s"))

    @property
    def _delete(self) -> str:
        return f"DELETE FROM {self.name} j {self.mine}"

    def update(self, what: str) -> str:
        """Set this; empty where it is."""
        return f"UPDATE {self.name} j SET {what} {self.mine}" if what else ""

    def move(self, to: str, columns: Sequence[str]) -> str:
        """As `Rows.move`, by its id."""
        return self._moved(f"WITH gone AS ({self._delete} RETURNING j.*)", to, columns)


class RowLockStatements(HeldStatements):
    """Every text of the row-lock form for one table."""

    events = ("guard", "look", "claim", "again", "finish", "put_back", "delay", "regroup")
    claim: str
    """Lock up to `room` due rows of `group`, but for those in `over`; gives what the claim of a lease gives."""
    again: str
    """Lock those of `ids` that are due still, behind a COMMIT; gives their ids."""

    def __init__(self, table: Table[Any], schema: PostgresSchema) -> None:
        super().__init__(table, schema)
        key, *rest = self.selected
        head = ", ".join((key, "NULL", self.counted, *rest))
        self.claim = f"SELECT {head} {self.due(self.guarded, f' {_LOCKED}')}"
        self.chosen = (
            f"SELECT g.n - 1, true, {head} FROM {self.given} JOIN {self.name} j ON j.{self.id} = g.id "
            f"WHERE {self.claimable} ORDER BY g.n {_LOCKED}"
        )
        self.again = f"SELECT {key} FROM {self.name} j {self.mine} AND {self.claimable} {_LOCKED}"


_HELD = """held AS MATERIALIZED (
    SELECT (classid::bigint << 32) | objid::bigint AS key FROM pg_catalog.pg_locks
    WHERE locktype = 'advisory' AND objsubid = 1 AND granted
      AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())), """


class AdvisoryStatements(HeldStatements):
    """Every text of the advisory form for one table; `lock` has the columns of its key.

    A claim tries the locks of due rows one by one, in the queue's order, one row for each key, and stops when it has
    won enough: a lock function in a WHERE could be called for every row of the table. What it has won it looks at
    again, as it is now: its owner may have settled it since. It gives one line at least: how many due rows were looked
    at, then, of each that was won, its key, whether the row is there still, whether its attempt was counted, and what
    a lease's claim gives.
    """

    counts = False
    events = ("look", "take", "take_free", "take_one", "uncount", "finish", "delay", "regroup")
    take: str
    """Claim up to `wanted` of the first `room` rows."""
    take_free: str
    """The same of the first rows whose lock nobody holds; it asks for all locks of the server."""
    take_one: str
    """The same of the row `id` alone."""
    candidates: str
    """Id and key's text of the first `room` due rows, but for those whose keys are in `tried`."""
    take_locked: str
    """Claim the row `id`, whose lock is won; whether its attempt was counted, and what a lease's claim gives."""
    uncount: str
    """The attempt is what it was before the claim."""

    def __init__(self, table: Table[Any], schema: PostgresSchema, lock: AdvisoryLock) -> None:
        super().__init__(table, schema)
        text = ", ".join(_text(part) if isinstance(part, str) else self._read(part.name) for part in lock.parts)
        count = quote(table.attempt) if table.attempt else ""
        self.uncount = self.update(f"{count} = j.{count} - 1" if count else "")
        self._name = f"pg_catalog.concat({text})"
        self._key = f"pg_catalog.hashtextextended({self._name}, 0)"
        fresh = f" AND NOT ({self._name} = ANY (%(tried)s::text[]))"
        self.candidates = f"SELECT {schema.key(table.id, 'j')}, {self._name} {self.due(fresh)}"
        self.take = self._take()
        self.take_free = self._take(f" AND {self._key} NOT IN (SELECT key FROM held)", _HELD)
        self.take_one = self._take(f" AND j.{self.id} = %(id)s::{self.kind}")
        self.take_locked = self._take_locked()

    def _read(self, column: str) -> str:
        """The column as a text that is the same in every session."""
        name, kind = f"j.{quote(column)}", self.schema[column].type
        if kind == "timestamptz":
            return f"({name} AT TIME ZONE 'UTC')"
        return f"encode({name}, 'hex')" if kind == "bytea" else name

    def _take(self, more: str = "", held: str = "") -> str:
        which = f"j.{self.id} = ANY (ARRAY(SELECT id FROM walk WHERE won))"
        mine, names = self._mine(which)
        return (
            f"WITH RECURSIVE {held}"
            f"due AS MATERIALIZED (SELECT j.{self.id} AS id, {self._key} AS key {self.due(more)}), "
            "numbered AS MATERIALIZED (SELECT row_number() OVER () AS n, id, key FROM due), "
            "first AS (SELECT n, id, key, row_number() OVER (PARTITION BY key ORDER BY n) AS nth FROM numbered), "
            "tried AS MATERIALIZED (SELECT row_number() OVER (ORDER BY n) AS n, id, key FROM first WHERE nth = 1), "
            "walk AS (SELECT n, id, key, pg_catalog.pg_try_advisory_lock(key) AS won, 0 AS before "
            "FROM tried WHERE n = 1 "
            "UNION ALL SELECT t.n, t.id, t.key, pg_catalog.pg_try_advisory_lock(t.key), w.before + w.won::int "
            "FROM walk w JOIN tried t ON t.n = w.n + 1 WHERE w.before + w.won::int < %(wanted)s), "
            f"{mine} "
            "SELECT (SELECT count(*) FROM due), w.key, m.c0 IS NOT NULL, t.c0 IS NOT NULL, "
            f"{names[0]}, NULL, t.attempt, {', '.join(names[1:])} FROM (SELECT) one LEFT JOIN walk w ON w.won "
            "LEFT JOIN mine m ON m.c0 = w.id LEFT JOIN taken t ON t.c0 = w.id ORDER BY w.n"
        )

    def _mine(self, which: str) -> tuple[str, list[str]]:
        """The rows that may be claimed still, as `mine`, and those whose attempt was counted, as `taken`.

        And the names of what a lease's claim gives, but for token and attempt.
        """
        columns = [f"{value} AS c{number}" for number, value in enumerate((f"j.{self.id}", *self.selected))]
        names = [f"m.c{number}" for number in range(1, len(columns))]
        count = _set(self.table.attempt, self.counted)
        taken = "SELECT c0, NULL::bigint AS attempt FROM mine"
        if count:
            after = f"j.{self.id} AS c0, j.{quote(self.table.attempt or '')} AS attempt"
            those = f"WHERE j.{self.id} = ANY (ARRAY(SELECT c0 FROM mine))"
            taken = f"UPDATE {self.name} j SET {count} {those} RETURNING {after}"
        mine = f"SELECT {', '.join(columns)} FROM {self.name} j WHERE {which} AND {self.claimable} {_LOCKED}"
        return f"mine AS MATERIALIZED ({mine}), taken AS ({taken})", names

    def _take_locked(self) -> str:
        mine, names = self._mine(f"j.{self.id} = %(id)s::{self.kind}")
        return (
            f"WITH {mine} SELECT t.c0 IS NOT NULL, {names[0]}, NULL, t.attempt, {', '.join(names[1:])} "
            "FROM mine m LEFT JOIN taken t ON t.c0 = m.c0"
        )


def _text(part: str) -> str:
    return "'" + part.replace("'", "''").replace("%", "%%") + "'"
