"""The SQL texts of the lease and advisory forms on SQLite. Pure: a description in, texts out.

Identifiers stand in backticks: SQLite takes a name in double quotes for a text where no column has it, one in backticks
never. Values are bound by name: `:id :token :attempt` say whose delivery it is, the rest is said at each
text. A statement that carries the token touches one row, or none where the lease was lost; without a lease the attempt
is all that the token has.

What is written is written `OR ABORT`: a constraint of the table that says ON CONFLICT IGNORE or REPLACE would lose our
row, or another one, without a word. But not where a trigger stands: its own statements would be OR ABORT too, whatever
they say themselves (INSERT OR REPLACE into a tally would fail).
"""

# ruff: noqa: S608 -- identifiers are quoted, values are bound

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from links.sql.table import Table, split
from settlement.sql import AdvisoryLock, Column

__all__ = ["SqliteStatements", "insert", "quote", "quote_table"]


def quote(name: str) -> str:
    """The identifier in backticks; backticks in it are doubled."""
    return "`" + name.replace("`", "``") + "`"


def quote_table(name: str) -> str:
    """The quoted `table`, or `schema.table`."""
    return ".".join(map(quote, split(name)))


def _or_abort(abort: bool) -> str:
    return " OR ABORT" if abort else ""


class SqliteStatements:
    """Every text for one table; one whose column the table has not is empty."""

    claim: str
    """Up to `:room` due rows in the queue's order; binds `:now` and `:due` (now, as retry_after holds it), `:group`.

    Gives id, attempt after the claim, payload, headers, key, and in row mode the whole row. In the advisory form id and
    the lock's key alone, as bytes.
    """
    read: str
    """What the claim of a lease gives, of the row `:id`; in the advisory form."""
    chosen: str
    """Of the row `:id`, where it is leased until `:expiry`: whether it may be claimed, id, lease, attempt; binds `:due`
    and `:group`."""
    leased: str
    """Id of each row of the FIFO group that has a lease, and whether it lasts at `:now`."""
    take: str
    """Lease one of them until `:expiry`, its attempt being `:attempt`; in the advisory form the attempt alone."""
    taken: str
    """Its token as it is stored, if it is leased at `:now`: a trigger may have had its say. Or the attempt alone."""
    holds: str
    """One row if the token is still there."""
    finish: str
    """Mark as processed at `:finished`, or delete."""
    release: str
    """Let the lease go; the attempt stays counted."""
    give_back: str
    """Let the lease go; the attempt is what it was before the claim."""
    delay: str
    """Let the lease go; not due before `:due`."""
    regroup: str
    """Let the lease go; the row is one of group `:to`."""
    extend: str
    """Lease until `:expiry`: the new token."""
    delete: str
    """The second half of a move to another table."""

    def __init__(
        self,
        table: Table[Any],
        columns: Sequence[str],
        nullable: Collection[str],
        id_value: str = ":id",
        *,
        abort: bool = True,
        key: AdvisoryLock | None = None,
    ) -> None:
        """`columns` are all that the table has, `nullable` those of its roles that may hold NULL.

        `id_value` is what the id is compared with: `CAST(:id AS TEXT)` for a text that is not UTF-8, bound as bytes.
        `key`: for the advisory form; else the table has a locked_until column.
        """
        self.table, self.columns, self.nullable = table, columns, nullable
        self._name, self._id = quote_table(table.name), quote(table.id)
        self._update = f"UPDATE{_or_abort(abort)} {self._name} SET "
        self._row = self._mine = f"WHERE {self._id} = {id_value}"
        if table.locked_until:
            self._lock = quote(table.locked_until)
            self._mine += f" AND {self._lock} = :token"
            free = f"{self._lock} = NULL"
        else:
            self._lock = free = ""
        back = count = ""
        if table.attempt:
            attempt = quote(table.attempt)
            self._mine += f" AND {attempt} = :attempt"
            back, count = f"{attempt} = {attempt} - 1", f"{attempt} = :attempt"
        self.holds = f"SELECT 1 FROM {self._name} {self._mine}"
        self.delete = f"DELETE FROM {self._name} {self._mine}"
        self.release = self._set(free)
        self.give_back = self._set(free, back) if back or free else ""
        self.finish = self._freed(free, table.processed_at, ":finished") or self.delete
        self.delay = self._freed(free, table.retry_after, ":due")
        self.regroup = self._freed(free, table.group, ":to")
        counted = quote(table.attempt) if table.attempt else "NULL"
        if table.locked_until:
            self.claim, self.read = self._claim(self._selected()), ""
            waiting = " AND ".join([*self._group(), *self._due(), *self._unfinished()]) or "1"
            self.chosen = (
                f"SELECT {waiting}, {self._id}, {self._lock}, {counted} FROM {self._name} {self._row} "
                f"AND {self._lock} = :expiry"
            )
            self.leased = self._leased() if table.fifo else ""
            self.take = self._set(f"{self._lock} = :expiry", count, where=self._row)
            self.taken = f"SELECT {self._lock}, {counted} FROM {self._name} {self._row} AND {self._lock} > :now"
            self.extend = self._set(f"{self._lock} = :expiry")
            if table.fifo:  # where a lease is over another row of the group may be in work: it is not ours any more
                self.extend += f" AND {self._lock} > :now"
            return
        if key is None:
            raise ValueError(f"{table.name!r} has no locked_until column, so it can be locked by keys alone")
        self.claim = self._claim([self._id, _key(key)])
        self.read = f"SELECT {', '.join(self._selected())} FROM {self._name} {self._row}"
        self.chosen = self.leased = self.extend = ""
        self.take = self._set(count, where=self._row)
        self.taken = f"SELECT {counted} FROM {self._name} {self._row}"

    def _set(self, *what: str, where: str = "") -> str:
        """Set these; empty where there is nothing to set."""
        values = ", ".join(filter(None, what))
        return f"{self._update}{values} {where or self._mine}" if values else ""

    def _freed(self, free: str, column: str | None, value: str) -> str:
        return self._set(free, f"{quote(column)} = {value}") if column else ""

    @property
    def order(self) -> tuple[str, ...]:
        """The columns that order the queue: priority and retry_after where they cannot be NULL, then the id."""
        ordering = (self.table.priority, self.table.retry_after)
        return (*(column for column in ordering if column and column not in self.nullable), self.table.id)

    def _leased(self) -> str:
        done = f" AND {quote(self.table.processed_at)} IS NULL" if self.table.processed_at else ""
        return (
            f"SELECT {self._id}, {self._lock} > :now FROM {self._name} "
            f"WHERE {quote(self.table.group or '')} = :group{done} AND {self._lock} IS NOT NULL"
        )

    def _claim(self, selected: Sequence[str]) -> str:
        """Where the table is FIFO it is the head of the group, or nothing."""
        table, key, lock = self.table, self._id, self._lock
        group, due, unfinished = self._group(), self._due(), self._unfinished()
        free = [f"({lock} IS NULL OR {lock} <= :now)"] if lock else []
        known = [f"{key} IS NOT NULL"] if table.id in self.nullable else []
        select, order = f"SELECT {', '.join(selected)}", f"ORDER BY {', '.join(map(quote, self.order))}"
        if table.fifo:
            head = f"SELECT * FROM {self._name} WHERE {' AND '.join(group + unfinished + known)} {order} LIMIT 1"
            return f"{select} FROM ({head}) WHERE {' AND '.join(due + free)} LIMIT :room"
        conditions = group + due + unfinished + free + known
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        return f"{select} FROM {self._name}{where} {order} LIMIT :room"

    def _group(self) -> list[str]:
        return [f"{quote(self.table.group)} = :group"] if self.table.group else []

    def _due(self) -> list[str]:
        column = self.table.retry_after
        if not column:
            return []
        visible = f"{quote(column)} <= :due"
        return [f"({quote(column)} IS NULL OR {visible})" if column in self.nullable else visible]

    def _unfinished(self) -> list[str]:
        return [f"{quote(self.table.processed_at)} IS NULL"] if self.table.processed_at else []

    def _selected(self) -> list[str]:
        table = self.table
        count = f"COALESCE({quote(table.attempt)}, 1) + 1" if table.attempt else "NULL"
        fixed = (quote(column) if column else "NULL" for column in (table.payload, table.headers, table.partition_key))
        row = () if table.payload else map(quote, self.columns)
        return [self._id, count, *fixed, *row]

    def copy(self, to: str, columns: Sequence[str], *, abort: bool = True) -> str:
        """The first half of a move to the table `to`: `columns` by name, with an empty lease."""
        lock = (self.table.locked_until or "").lower()
        values = ("NULL" if column.lower() == lock else quote(column) for column in columns)
        return (
            f"INSERT{_or_abort(abort)} INTO {quote_table(to)} ({', '.join(map(quote, columns))}) "
            f"SELECT {', '.join(values)} FROM {self._name} {self._mine}"
        )


def _key(key: AdvisoryLock) -> str:
    """The key as bytes, whatever its columns hold: a BLOB is taken for a text, NULL for an empty one."""
    parts = (
        f"COALESCE(CAST({quote(part.name)} AS TEXT), '')"
        if isinstance(part, Column)
        else "'" + part.replace("'", "''") + "'"
        for part in key.parts
    )
    return f"CAST({' || '.join(parts)} AS BLOB)"


def insert(table: str, columns: Sequence[str], *, once: str | None = None, abort: bool = True) -> str:
    """Insert a row, binding `:v0`, `:v1`, …; `once`: do nothing where that column has the value already."""
    name = quote_table(table)
    if not columns:
        return f"INSERT{_or_abort(abort)} INTO {name} DEFAULT VALUES"
    values = ", ".join(f":v{number}" for number in range(len(columns)))
    text = f"INSERT{_or_abort(abort)} INTO {name} ({', '.join(map(quote, columns))}) VALUES ({values})"
    return text if once is None else f"{text} ON CONFLICT ({quote(once)}) DO NOTHING"
