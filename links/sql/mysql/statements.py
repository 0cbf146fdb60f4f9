"""The SQL texts of each form on MySQL and MariaDB. Pure: a description in, texts out.

They hold `%(name)s` where `bound` writes a value. The clock is the server's, as it is when the statement begins; our
sessions have their time zone at UTC, so UTC_TIMESTAMP(6) is right for a DATETIME, which has no zone and holds UTC, and
for a TIMESTAMP. A token is the expiry as a text in UTC, to the microsecond.

Nothing here waits for a row that another transaction has locked, but for what follows a lock of our own: SKIP LOCKED
(https://dev.mysql.com/doc/refman/en/innodb-locking-reads.html). A claim names the index that it walks along.
"""

# ruff: noqa: S608 -- identifiers are quoted, values are bound

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from links.sql.mysql.plans import Walk, walk
from links.sql.mysql.schema import MysqlColumn, MysqlSchema, quote, quote_table
from links.sql.mysql.session import Raw, text_of
from links.sql.table import Table

__all__ = ["LOCKED", "NOW", "LeaseStatements", "Rows", "in_utc", "insert", "later", "micros", "none_of", "quoted"]

NOW = "UTC_TIMESTAMP(6)"
LOCKED = "FOR UPDATE SKIP LOCKED"
_EXPIRY = f"CAST({NOW} + INTERVAL %(lease)s MICROSECOND AS CHAR)"
_LAST = "TIMESTAMP'2038-01-19 03:14:07'"
"""Of a TIMESTAMP; that of newer servers ends later, and a delay of that length is cut to this."""
_LONGEST = 10**17
"""Microseconds, some 3,000 years: a DATETIME ends with the year 9999."""


def micros(seconds: float, column: MysqlColumn | None = None) -> int:
    """Microseconds of a duration, rounded up, also to what the column can hold: it rounds to the nearest."""
    whole = min(-int(-seconds * 1_000_000 // 1), _LONGEST)
    unit: int = 10 ** (6 - column.precision) if column is not None else 1
    return whole + max(unit // 2 - 1, 0)


def in_utc(due: datetime) -> datetime:
    """An instant as a DATETIME holds it; one before the year 1 is its first. Raises `OverflowError` behind 9999."""
    try:
        return due.astimezone(UTC).replace(tzinfo=None)
    except OverflowError:
        if due.year == 1:
            return datetime.min  # noqa: DTZ901 -- as a column holds it
        raise


def none_of(ids: Sequence[Any]) -> Raw:
    """What is said of an id that is none of these."""
    return Raw(f"NOT IN {text_of(ids)}" if ids else "IS NOT NULL")


def later(column: MysqlColumn, name: str) -> str:
    """So many microseconds from now, as the column can hold it; `name`: how they are bound, by `micros`."""
    moment = f"{NOW} + INTERVAL %({name})s MICROSECOND"
    return moment if column.type == "datetime" else f"LEAST({moment}, {_LAST})"


class Rows:
    """What the texts of every form are made of: which rows a claim may have, in which order, and what it reads.

    Attributes:
        table: Which one.
        schema: Its columns.
        name: Its name, quoted.
        id: The id's column, quoted.
        walk: Along which index a claim goes; None: there is none.
        guard: The name of a lock that a claim of the group `group` of a FIFO table takes; else empty.
        gone: Does finishing delete the row?
        events: The names of its texts, to be tried when the table is looked at.
    """

    events: tuple[str, ...] = ()
    look: str
    """The ids of up to `room` due rows but for `over` (of `none_of`), in the queue's order; binds `group`."""
    chosen: str
    """Of each row of `ids`: whether it may be claimed, and what a claim gives of it."""

    def __init__(self, table: Table[Any], schema: MysqlSchema) -> None:
        self.table, self.schema = table, schema
        self.name, self.id = quote_table(table.name), quote(table.id)
        there = (table.id, table.attempt, *self._roles)
        self._width = sum(column is not None for column in there)
        self._places = [
            None if column is None else sum(each is not None for each in there[:number])
            for number, column in enumerate(there)
        ]
        same = [column for column in (table.group, table.processed_at) if column]
        self.walk: Walk | None = walk(schema, same, self.order)
        self.guard = self._guard() if table.fifo else ""
        self.gone = not table.processed_at
        self.look = f"SELECT {self.id} {self.due()}"
        self.mine = f"WHERE {self.id} IN %(ids)s"

    @property
    def order(self) -> tuple[str, ...]:
        """The columns that order the queue: priority and retry_after where they cannot be NULL, then the id."""
        ordering = (self.table.priority, self.table.retry_after)
        return (*(column for column in ordering if column and not self.schema[column].nullable), self.table.id)

    def _guard(self) -> str:
        """At most 64 characters, whatever the names are; the server holds it for the connection."""
        text = f"CONCAT(DATABASE(), '.', {quoted(self.table.name)}, ':', %(group)s)"
        return f"CONCAT('trio-settlement.', LEFT(SHA2({text}, 256), 40))"

    def unfinished(self, alias: str) -> str:
        """The rows of the group that are not finished, as a condition."""
        done = f" AND {alias}.{quote(self.table.processed_at)} IS NULL" if self.table.processed_at else ""
        return f"{alias}.{quote(self.table.group or '')} = %(group)s{done}"

    def ordered(self, alias: str) -> str:
        """ORDER BY what orders the queue."""
        return "ORDER BY " + ", ".join(f"{alias}.{quote(column)}" for column in self.order)

    @property
    def claimable(self) -> str:
        """What is true of a row that a claim may have."""
        if not self.table.locked_until:
            return self.waiting
        lock = f"j.{quote(self.table.locked_until)}"
        return f"{self.waiting} AND ({lock} IS NULL OR {lock} <= {NOW})"

    @property
    def waiting(self) -> str:
        """What is true of a row that is due and not finished, whoever holds it."""
        table = self.table
        due: list[str] = []
        if table.group:
            due.append(f"j.{quote(table.group)} = %(group)s")
        if table.retry_after:
            column = f"j.{quote(table.retry_after)}"
            visible = f"{column} <= {NOW}"
            due.append(f"({column} IS NULL OR {visible})" if self.schema[table.retry_after].nullable else visible)
        if table.processed_at:
            due.append(f"j.{quote(table.processed_at)} IS NULL")
        return " AND ".join(due) or "TRUE"

    @property
    def along(self) -> str:
        """The hint that names the index."""
        return f" FORCE INDEX ({quote(self.walk.index)})" if self.walk is not None else ""

    def due(self, more: str = "") -> str:
        """FROM to LIMIT: the rows that a claim may have; where the table is FIFO the head of the group, or nothing."""
        over = f" AND j.{self.id} %(over)s"
        if self.table.fifo:  # by its id: skipping a head that somebody has locked would give the row behind it
            head = (
                f"SELECT h.{self.id} FROM {self.name} AS h{self.along} WHERE {self.unfinished('h')} "
                f"{self.ordered('h')} LIMIT 1"
            )
            return f"FROM {self.name} AS j WHERE j.{self.id} = ({head}) AND {self.claimable}{over}{more} LIMIT %(room)s"
        return (
            f"FROM {self.name} AS j{self.along} WHERE {self.claimable}{over}{more} {self.ordered('j')} LIMIT %(room)s"
        )

    def selected(self, *, counts: bool = True) -> str:
        """Id, attempt after the claim, payload, headers, key, as far as the table has them; in row mode every column.

        What is not there is not asked for: the driver takes longer for a column than for its value. `counts`: a claim
        has not counted the attempt yet.
        """
        table = self.table
        count = f"j.{quote(table.attempt)}" if table.attempt else None
        if count is not None and counts:
            count = f"COALESCE({count}, 1) + 1"
        roles = [f"j.{quote(column)}" if column else None for column in self._roles]
        row = [] if table.payload else [f"j.{quote(column)}" for column in self.schema.names]
        return ", ".join(filter(None, (f"j.{self.id}", count, *roles, *row)))

    @property
    def _roles(self) -> tuple[str | None, ...]:
        return self.table.payload, self.table.headers, self.table.partition_key

    def read_as(self, row: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Of what `selected` gave: id, attempt, payload, headers, key, each None where it is not there; the rest."""
        places = self._places
        return [None if place is None else row[place] for place in places], row[self._width :]

    @property
    def counted(self) -> str:
        """Count the attempt; empty where nothing counts."""
        count = quote(self.table.attempt) if self.table.attempt else ""
        return f"{count} = COALESCE({count}, 1) + 1" if count else ""

    @property
    def uncounted(self) -> str:
        """Take it back."""
        count = quote(self.table.attempt) if self.table.attempt else ""
        return f"{count} = {count} - 1" if count else ""

    def set(self, *what: str) -> str:
        """Set these for the rows of `ids`; empty where there is nothing to set."""
        values = ", ".join(filter(None, what))
        return f"UPDATE {self.name} SET {values} {self.mine}" if values else ""

    def put(self, column: str | None, value: str, *more: str) -> str:
        """Set this column, and these; empty where the table has no such column."""
        return self.set(f"{quote(column)} = {value}", *more) if column else ""

    def due_later(self, *more: str) -> str:
        """Not due before `micros` have passed; empty where the table has no such column."""
        column = self.table.retry_after
        return self.put(column, later(self.schema[column], "micros"), *more) if column else ""

    @property
    def delete(self) -> str:
        """Delete the rows of `ids`."""
        return f"DELETE FROM {self.name} {self.mine}"

    def copy(self, to: str, columns: Sequence[str]) -> str:
        """The first half of a move to the table `to`: these columns by name, with an empty lease."""
        lock = (self.table.locked_until or "").lower()
        values = ("NULL" if column.lower() == lock else quote(column) for column in columns)
        return (
            f"INSERT INTO {quote_table(to)} ({', '.join(map(quote, columns))}) "
            f"SELECT {', '.join(values)} FROM {self.name} {self.mine}"
        )


class LeaseStatements(Rows):
    """Every text of the lease form for one table; one whose column the table has not is empty.

    The rows that are meant are bound as `ids`.
    """

    events = (
        "look", "claim", "take", "held", "renew", "read", "let_go", "in_work", "over", "finish", "release", "give_back",
        "delay", "regroup", "extend",
    )  # fmt: skip
    claim: str
    """Lock up to `room` due rows but for `over`; gives the expiry of a lease of `lease` microseconds from now, then id,
    attempt after the claim, payload, headers, key, and in row mode every column."""
    take: str
    """Lease them until `until`, and count."""
    held: str
    """Lock those of `ids` that nobody else has locked; gives id, token, attempt."""
    renew: str
    """The same; gives whether the lease lasts, too, and the end of one of `lease` microseconds from now."""
    read: str
    """Lock nothing; gives id, token, attempt, whether the lease lasts."""
    let_go: str
    """The ids of those that have no lease."""
    in_work: str
    """Of a FIFO group: how many rows have a lease, over or not."""
    over: str
    """Lock those whose lease is over, but for `held`; gives their ids."""
    finish: str
    release: str
    give_back: str
    delay: str
    regroup: str
    extend: str

    def __init__(self, table: Table[Any], schema: MysqlSchema) -> None:
        super().__init__(table, schema)
        assert table.locked_until is not None, "the lease form has a lease"  # noqa: S101 -- an invariant of ours
        lock = quote(table.locked_until)
        free = f"{lock} = NULL"
        self.claim = f"SELECT {_EXPIRY}, {self.selected()} {self.due()} {LOCKED}"
        self.take = self.set(f"{lock} = %(until)s", self.counted)
        count = f"j.{quote(table.attempt)}" if table.attempt else "NULL"
        state, those = (
            f"j.{self.id}, CAST(j.{lock} AS CHAR), {count}",
            f"FROM {self.name} AS j WHERE j.{self.id} IN %(ids)s",
        )
        self.read = f"SELECT {state}, j.{lock} > {NOW} {those}"
        self.held = f"SELECT {state} {those} {LOCKED}"
        self.renew = f"SELECT {state}, j.{lock} > {NOW}, {_EXPIRY} {those} {LOCKED}"
        self.chosen = (
            f"SELECT {self.waiting}, CAST(j.{lock} AS CHAR), {self.selected(counts=False)} "
            f"FROM {self.name} AS j WHERE j.{self.id} IN %(ids)s"
        )
        self.let_go = f"SELECT {self.id} FROM {self.name} {self.mine} AND {lock} IS NULL"
        self.in_work = self.over = ""
        if table.fifo:
            leased = f"FROM {self.name} AS w WHERE {self.unfinished('w')} AND w.{lock}"
            self.in_work = f"SELECT COUNT(*) {leased} IS NOT NULL"
            self.over = f"SELECT w.{self.id} {leased} <= {NOW} AND w.{self.id} %(held)s {LOCKED}"
        self.release = self.set(free)
        self.give_back = self.set(free, self.uncounted)
        self.finish = self.put(table.processed_at, NOW, free) or self.delete
        self.delay = self.due_later(free)
        self.regroup = self.put(table.group, "%(to)s", free)
        self.extend = self.set(f"{lock} = %(until)s")


def quoted(text: str) -> str:
    """A text as it stands in a text with `%(…)s` in it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "''").replace("%", "%%") + "'"


def insert(table: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Insert rows: for each of these columns an expression."""
    names = ", ".join(map(quote, columns))
    values = ", ".join(f"({', '.join(row)})" for row in rows)
    return f"INSERT INTO {quote_table(table)} ({names}) VALUES {values}"
