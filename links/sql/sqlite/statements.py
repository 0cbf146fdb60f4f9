"""The SQL texts of the lease form on SQLite. Pure: a description in, texts out.

Identifiers stand in backticks: SQLite takes a name in double quotes for a text where no column has it, one in backticks
never. Values are bound by name: `:id :token :attempt` say whose delivery it is, the rest is said at each
text. A statement that carries the token touches one row, or none where the lease was lost.

What is written is written `OR ABORT`: a constraint of the table that says ON CONFLICT IGNORE or REPLACE would lose our
row, or another one, without a word. But not where a trigger stands: its own statements would be OR ABORT too, whatever
they say themselves (INSERT OR REPLACE into a tally would fail).
"""

# ruff: noqa: S608 -- identifiers are quoted, values are bound

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from links.sql.table import Table, split

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

    Gives id, attempt after the claim, payload, headers, key, and in row mode the whole row.
    """
    leased: str
    """Id of each row of the FIFO group that has a lease, and whether it lasts at `:now`."""
    take: str
    """Lease one of them until `:expiry`, its attempt being `:attempt`."""
    taken: str
    """Its token as it is stored, if it is leased at `:now`: a trigger may have had its say."""
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
    ) -> None:
        """`columns` are all that the table has, `nullable` those of its roles that may hold NULL.

        `id_value` is what the id is compared with: `CAST(:id AS TEXT)` for a text that is not UTF-8, bound as bytes.
        """
        if not table.locked_until:
            raise ValueError(f"{table.name!r} has no locked_until column, and SQLite has the lease form alone")
        self.table, self.columns, self.nullable = table, columns, nullable
        self._name, self._id, self._lock = quote_table(table.name), quote(table.id), quote(table.locked_until)
        row = f"WHERE {self._id} = {id_value}"
        self._mine = f"{row} AND {self._lock} = :token"
        update = f"UPDATE{_or_abort(abort)} {self._name} SET {self._lock}"
        free = back = f"{update} = NULL"
        count = ""
        if table.attempt:
            attempt = quote(table.attempt)
            self._mine += f" AND {attempt} = :attempt"
            back += f", {attempt} = {attempt} - 1"
            count = f", {attempt} = :attempt"
        self.claim = self._claim()
        self.leased = self._leased() if table.fifo else ""
        self.take = f"{update} = :expiry{count} {row}"
        counted = quote(table.attempt) if table.attempt else "NULL"
        self.taken = f"SELECT {self._lock}, {counted} FROM {self._name} {row} AND {self._lock} > :now"
        self.holds = f"SELECT 1 FROM {self._name} {self._mine}"
        self.delete = f"DELETE FROM {self._name} {self._mine}"
        self.release = f"{free} {self._mine}"
        self.give_back = f"{back} {self._mine}"
        # where a lease is over another row of a FIFO group may be in work, so it is not ours to renew any more
        self.extend = f"{update} = :expiry {self._mine}" + (f" AND {self._lock} > :now" if table.fifo else "")
        self.finish = self._freed(free, table.processed_at, ":finished") or self.delete
        self.delay = self._freed(free, table.retry_after, ":due")
        self.regroup = self._freed(free, table.group, ":to")

    def _freed(self, free: str, column: str | None, value: str) -> str:
        return f"{free}, {quote(column)} = {value} {self._mine}" if column else ""

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

    def _claim(self) -> str:
        """Where the table is FIFO it is the head of the group, or nothing."""
        table, key, lock = self.table, self._id, self._lock
        group = [f"{quote(table.group)} = :group"] if table.group else []
        due: list[str] = []
        if table.retry_after:
            visible = f"{quote(table.retry_after)} <= :due"
            nullable = table.retry_after in self.nullable
            due.append(f"({quote(table.retry_after)} IS NULL OR {visible})" if nullable else visible)
        unfinished = [f"{quote(table.processed_at)} IS NULL"] if table.processed_at else []
        free = [f"({lock} IS NULL OR {lock} <= :now)"]
        known = [f"{key} IS NOT NULL"] if table.id in self.nullable else []
        select, order = f"SELECT {', '.join(self._selected())}", f"ORDER BY {', '.join(map(quote, self.order))}"
        if table.fifo:
            head = f"SELECT * FROM {self._name} WHERE {' AND '.join(group + unfinished + known)} {order} LIMIT 1"
            return f"{select} FROM ({head}) WHERE {' AND '.join(due + free)} LIMIT :room"
        where = " AND ".join(group + due + unfinished + free + known)
        return f"{select} FROM {self._name} WHERE {where} {order} LIMIT :room"

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


def insert(table: str, columns: Sequence[str], *, once: str | None = None, abort: bool = True) -> str:
    """Insert a row, binding `:v0`, `:v1`, …; `once`: do nothing where that column has the value already."""
    name = quote_table(table)
    if not columns:
        return f"INSERT{_or_abort(abort)} INTO {name} DEFAULT VALUES"
    values = ", ".join(f":v{number}" for number in range(len(columns)))
    text = f"INSERT{_or_abort(abort)} INTO {name} ({', '.join(map(quote, columns))}) VALUES ({values})"
    return text if once is None else f"{text} ON CONFLICT ({quote(once)}) DO NOTHING"
