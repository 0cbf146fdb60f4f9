"""The SQL texts of the lease form on SQLite. Pure: a description in, texts out (S-19).

Identifiers are quoted, values are bound by name: `:id :token :attempt` say whose delivery it is, the rest is said at
each text. A statement that carries the token touches one row, or none where the lease was lost (S-3.2).
"""

# ruff: noqa: S608 -- identifiers are quoted, values are bound

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from links.sql.table import Table, split

__all__ = ["Statements", "insert", "quote", "quote_table"]


def quote(name: str) -> str:
    """The identifier in double quotes; quotes in it are doubled."""
    return '"' + name.replace('"', '""') + '"'


def quote_table(name: str) -> str:
    """The quoted `table`, or `schema.table`."""
    return ".".join(map(quote, split(name)))


class Statements:
    """Every text for one table; one whose column the table has not is empty."""

    claim: str
    """Lease up to `:room` due rows until `:expiry`; binds `:now` and `:due` (now, as retry_after holds it), `:group`.

    Returns id, token, attempt, payload, headers, key, what else it was ordered by, and in row mode the whole row.
    """
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
        self, table: Table[Any], columns: Sequence[str], nullable: Collection[str], id_value: str = ":id"
    ) -> None:
        """`columns` are all that the table has, `nullable` those of its roles that may hold NULL.

        `id_value` is what the id is compared with: `CAST(:id AS TEXT)` for a text that is not UTF-8, bound as bytes.
        """
        if not table.locked_until:
            raise ValueError(f"{table.name!r} has no locked_until column, and SQLite has the lease form alone")
        self.table, self.columns, self.nullable = table, columns, nullable
        self._name, self._id, self._lock = quote_table(table.name), quote(table.id), quote(table.locked_until)
        self._mine = f"WHERE {self._id} = {id_value} AND {self._lock} = :token"
        free = back = f"UPDATE {self._name} SET {self._lock} = NULL"
        if table.attempt:
            self._mine += f" AND {quote(table.attempt)} = :attempt"
            back += f", {quote(table.attempt)} = {quote(table.attempt)} - 1"
        self.claim = self.claim_without(0)
        self.delete = f"DELETE FROM {self._name} {self._mine}"
        self.release = f"{free} {self._mine}"
        self.give_back = f"{back} {self._mine}"
        self.extend = f"UPDATE {self._name} SET {self._lock} = :expiry {self._mine}"
        self.finish = self._freed(free, table.processed_at, ":finished") or self.delete
        self.delay = self._freed(free, table.retry_after, ":due")
        self.regroup = self._freed(free, table.group, ":to")

    def _freed(self, free: str, column: str | None, value: str) -> str:
        return f"{free}, {quote(column)} = {value} {self._mine}" if column else ""

    @property
    def order(self) -> tuple[str, ...]:
        """The columns that order the queue: priority and retry_after where they cannot be NULL, then the id (S-2.2)."""
        ordering = (self.table.priority, self.table.retry_after)
        return (*(column for column in ordering if column and column not in self.nullable), self.table.id)

    def claim_without(self, paused: int) -> str:
        """The claim that passes over `:paused0`, `:paused1`, …: rows whose settlement failed (DESIGN 6)."""
        table, key, lock = self.table, self._id, self._lock
        due: list[str] = []
        if table.group:
            due.append(f"{quote(table.group)} = :group")
        if table.retry_after:
            visible = f"{quote(table.retry_after)} <= :due"
            nullable = table.retry_after in self.nullable
            due.append(f"({quote(table.retry_after)} IS NULL OR {visible})" if nullable else visible)
        if table.processed_at:
            due.append(f"{quote(table.processed_at)} IS NULL")
        due.append(f"({lock} IS NULL OR {lock} <= :now)")
        if table.id in self.nullable:
            due.append(f"{key} IS NOT NULL")
        if paused:
            due.append(f"{key} NOT IN ({', '.join(f':paused{number}' for number in range(paused))})")
        count = f", {quote(table.attempt)} = COALESCE({quote(table.attempt)}, 1) + 1" if table.attempt else ""
        return (
            f"UPDATE {self._name} SET {lock} = :expiry{count} WHERE {key} IN ("
            f"SELECT {key} FROM {self._name} WHERE {' AND '.join(due)} "
            f"ORDER BY {', '.join(map(quote, self.order))} LIMIT :room) "
            f"RETURNING {', '.join(self._returned())}"
        )

    def _returned(self) -> list[str]:
        table = self.table
        fixed = (table.id, table.locked_until, table.attempt, table.payload, table.headers, table.partition_key)
        row = () if table.payload else self.columns
        return [quote(column) if column else "NULL" for column in (*fixed, *self.order[:-1], *row)]

    def copy(self, to: str, columns: Sequence[str]) -> str:
        """The first half of a move to the table `to`: `columns` by name, with an empty lease (S-3.10)."""
        lock = (self.table.locked_until or "").lower()
        values = ("NULL" if column.lower() == lock else quote(column) for column in columns)
        return (
            f"INSERT INTO {quote_table(to)} ({', '.join(map(quote, columns))}) "
            f"SELECT {', '.join(values)} FROM {self._name} {self._mine}"
        )


def insert(table: str, columns: Sequence[str], *, once: str | None = None) -> str:
    """Insert a row, binding `:v0`, `:v1`, …; `once`: do nothing where that column has the value already."""
    name = quote_table(table)
    if not columns:
        return f"INSERT INTO {name} DEFAULT VALUES"
    values = ", ".join(f":v{number}" for number in range(len(columns)))
    text = f"INSERT INTO {name} ({', '.join(map(quote, columns))}) VALUES ({values})"
    return text if once is None else f"{text} ON CONFLICT ({quote(once)}) DO NOTHING"
