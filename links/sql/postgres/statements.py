"""The SQL texts of each form on PostgreSQL. Pure: a description in, texts out.

Of the lease form each is one statement, so a transaction of its own. Those that carry tokens take arrays, one entry for
each delivery, and give the number of each that they touched, from 1, and whether that has become of the row what was
written: a trigger may leave it as it was. They wait for nobody: a row that another transaction has locked is skipped,
and is held by its token as before.

The clock is the server's, as it is when the statement runs: `(SELECT clock_timestamp())` is read once, so that an index
serves the comparison; `now()` would be that of BEGIN. A token is the expiry as a text in UTC, to the microsecond,
whatever the session's time zone and date style.

First in, first out (`Table.fifo`): a claim is two statements in one transaction, `guard` and then the claim, with a
snapshot that was taken behind it. One from before could miss what another claimer has just committed, and the group
would have two rows in work. Where the guard was not to be had the claim finds nothing.
"""

# ruff: noqa: S608 -- identifiers are quoted, values are bound

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from links.sql.postgres.schema import PostgresSchema, quote, quote_table
from links.sql.table import Table

__all__ = ["LeaseStatements", "Rows", "insert", "later", "limited"]

_NONE: Mapping[str, str] = MappingProxyType({})
_NOW = "(SELECT clock_timestamp())"
_EXPIRY = "clock_timestamp() + make_interval(secs => %(lease)s)"
_LOCKED = "1s"
"""For so long a statement of the user's own may wait for a lock: the queue's other work waits with it."""
_GUARD = "trio_settlement.guard"
"""A setting of the transaction: has it got the guard of its group?"""


def later(seconds: str) -> str:
    """So many seconds from now; a timestamptz ends in the year 294276, so more than 3,000 years are cut to that."""
    return f"clock_timestamp() + make_interval(secs => LEAST({seconds}, 1e11))"


def _token(column: str) -> str:
    # not 'UTC', which from PostgreSQL 18 on is what the session's own time zone calls so, such as of 'UTC+12'
    return f"""to_char({column} AT TIME ZONE INTERVAL '0', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00"')"""


class Rows:
    """What the texts of every form are made of: which rows a claim may have, in which order, and what it reads.

    Attributes:
        table: Which one.
        schema: Its columns.
        name: Its name, quoted.
        id: The id's column, quoted.
        ids: The type of an array of ids.
        events: The names of its texts, to be tried when the table is looked at.
        delays: What may be bound as `seconds`.
        guard: Have this transaction hold the group `group` of the table, unless another one does; gives whether. Empty
            where the table is not FIFO.
    """

    events: tuple[str, ...] = ()
    delays: Any = None
    chosen: str
    """Of each row of `ids` that this claim holds, in their order: its place there, whether it may be claimed, and what
    a lease's claim gives. Binds `group`, and `until` of a lease."""
    look: str
    """The ids of up to `room` due rows but for `over`, in the queue's order; binds `group`."""

    def __init__(self, table: Table[Any], schema: PostgresSchema) -> None:
        self.table, self.schema = table, schema
        self.name, self.id = quote_table(table.name), quote(table.id)
        self.kind = schema[table.id].array
        self.ids = f"{self.kind}[]"
        self.given = f"unnest(%(ids)s::{self.ids}) WITH ORDINALITY AS g(id, n)"
        self.guard = self._guard() if table.fifo else ""
        self.guarded = f" AND current_setting('{_GUARD}', true) = 'true'" if table.fifo else ""
        self.look = f"SELECT {schema.key(table.id, 'j')} {self.due()}"

    @property
    def order(self) -> tuple[str, ...]:
        """The columns that order the queue: priority and retry_after where they cannot be NULL, then the id."""
        ordering = (self.table.priority, self.table.retry_after)
        return (*(column for column in ordering if column and not self.schema[column].nullable), self.table.id)

    def _guard(self) -> str:
        """An advisory lock until the transaction's end; one row, so it is asked for once. The table by its number."""
        name = self.name.replace("'", "''")
        key = f"hashtextextended('{name}'::regclass::oid::text || ':' || %(group)s::text, 0)"
        return f"SELECT set_config('{_GUARD}', pg_try_advisory_xact_lock({key})::text, true) = 'true'"

    def unfinished(self, alias: str) -> str:
        """The rows of the group that are not finished, as a condition."""
        table = self.table
        done = f" AND {alias}.{quote(table.processed_at)} IS NULL" if table.processed_at else ""
        return f"{alias}.{quote(table.group or '')} = %(group)s{done}"

    def ordered(self, alias: str) -> str:
        """ORDER BY what orders the queue."""
        return "ORDER BY " + ", ".join(f"{alias}.{quote(column)}" for column in self.order)

    @property
    def claimable(self) -> str:
        """What is true of a row that a claim may have."""
        if not self.table.locked_until:
            return self.waiting
        lock = f"j.{quote(self.table.locked_until)}"
        return f"{self.waiting} AND ({lock} IS NULL OR {lock} <= {_NOW})"

    @property
    def waiting(self) -> str:
        """What is true of a row that is due and not finished, whoever holds it."""
        table = self.table
        due: list[str] = []
        if table.group:
            due.append(f"j.{quote(table.group)} = %(group)s")
        if table.retry_after:
            column = f"j.{quote(table.retry_after)}"
            visible = f"{column} <= {_NOW}"
            due.append(f"({column} IS NULL OR {visible})" if self.schema[table.retry_after].nullable else visible)
        if table.processed_at:
            due.append(f"j.{quote(table.processed_at)} IS NULL")
        return " AND ".join(due) or "true"

    def due(self, more: str = "", end: str = "") -> str:
        """FROM to LIMIT: the rows that a claim may have; where the table is FIFO the head of the group, or nothing."""
        which, order = self.claimable, f"{self.ordered('j')} "
        if self.table.fifo:  # by its id: skipping a head that somebody has locked would give the row behind it
            head = f"SELECT h.{self.id} FROM {self.name} h WHERE {self.unfinished('h')} {self.ordered('h')} LIMIT 1"
            which, order = f"j.{self.id} = ({head}) AND {which}", ""  # it is one row
        over = f"NOT (j.{self.id} = ANY (%(over)s::{self.ids}))"
        return f"FROM {self.name} j WHERE {which} AND {over}{more} {order}LIMIT %(room)s{end}"

    @property
    def selected(self) -> list[str]:
        """Id, payload, headers, key; in row mode every column too."""
        table, schema = self.table, self.schema
        roles = (table.payload, table.headers, table.partition_key)
        fixed = [schema.read(column, "j") if column else "NULL" for column in roles]
        row = [] if table.payload else [f"j.{quote(column)}" for column in schema.names]
        return [schema.key(table.id, "j"), *fixed, *row]

    def move(self, to: str, columns: Sequence[str]) -> str:
        """Move a row to the table `to`: these columns by name, with an empty lease.

        Gives how many have left and arrived, and the id there; where one has not arrived, it is to be rolled back.
        """
        raise NotImplementedError

    def _moved(self, gone: str, to: str, columns: Sequence[str]) -> str:
        values = ["NULL" if column == self.table.locked_until else f"gone.{quote(column)}" for column in columns]
        return (
            f"{gone}, moved AS (INSERT INTO {quote_table(to)} ({', '.join(map(quote, columns))}) "
            f"OVERRIDING SYSTEM VALUE SELECT {', '.join(values)} FROM gone RETURNING {self.id} AS id) "
            "SELECT (SELECT count(*) FROM gone), (SELECT count(*) FROM moved), (SELECT id::text FROM moved)"
        )


class LeaseStatements(Rows):
    """Every text of the lease form for one table; one whose column the table has not is empty.

    Tokens are bound as `ids`, `tokens`, `attempts`.
    """

    events = (
        "guard",
        "look",
        "claim",
        "claim_one",
        "hold",
        "holds",
        "finish",
        "release",
        "give_back",
        "delay",
        "regroup",
        "extend",
    )
    delays: Any = []  # noqa: RUF012 -- never changed
    claim: str
    """Lease up to `room` due rows but for those whose ids are in `over`; binds `group` and `lease`, seconds, and, where
    the table is FIFO, `held`, the ids that this process holds.

    Gives, in the queue's order, id, token (NULL: a trigger has ignored the lease), attempt after the claim, payload,
    headers, key; in row mode then every column, as it was before.
    """
    claim_one: str
    """The same for the row of this `id` alone, which must be due."""
    hold: str
    """Lock the rows whose token is still there, and give their numbers."""
    holds: str
    """The numbers of those whose token is still there."""
    finish: str
    """Mark as processed, or delete."""
    release: str
    """Let the lease go; the attempt stays counted."""
    give_back: str
    """Let the lease go; the attempt is what it was before the claim."""
    delay: str
    """Let the lease go; each not due before its own entry of `seconds` has passed."""
    regroup: str
    """Let the lease go; the rows are of group `to`."""
    extend: str
    """Lease for `lease` seconds from now; gives number and new token."""
    expiry: str
    """The end of a lease of `lease` seconds from now; what follows in the transaction waits for no lock for long."""
    extended: str
    """Number and token of those that are of the same attempt still: whatever became of a renewal, they are ours."""

    def __init__(self, table: Table[Any], schema: PostgresSchema) -> None:
        super().__init__(table, schema)
        assert table.locked_until is not None, "the lease form has a lease"  # noqa: S101 -- an invariant of ours
        self._lock = quote(table.locked_until)
        self._count = quote(table.attempt) if table.attempt else None
        given = f"unnest(%(ids)s::{self.ids}, %(tokens)s::timestamptz[], %(attempts)s::bigint[], %(seconds)s::float8[])"
        self._given = f"{given} WITH ORDINALITY AS g(id, token, attempt, seconds, n)"
        same = f"j.{self.id} = g.id"
        if self._count:
            same += f" AND j.{self._count} = g.attempt"
        self._mine = f"{same} AND j.{self._lock} = g.token"
        free, back = f"{self._lock} = NULL", f"{self._lock} = NULL"
        if self._count:
            back += f", {self._count} = j.{self._count} - 1"
        one = f" AND j.{self.id} = %(id)s::{self.kind}"
        self.claim, self.claim_one = self._claim(""), self._claim(one)
        # where a lease is over another row of a FIFO group may be in work, so it is not ours to renew any more
        ours = f" AND j.{self._lock} > clock_timestamp()" if table.fifo else ""
        self.holds = f"SELECT g.n FROM {self.name} j JOIN {self._given} ON {self._mine}{ours}"
        self.hold = f"{self._held('UPDATE')} SELECT n FROM held"
        self.release, self.give_back = self._update(free), self._update(back)
        self.finish = self._freed(free, table.processed_at, "clock_timestamp()") or self._delete()
        self.delay = self._freed(free, table.retry_after, later("held.seconds"))
        self.regroup = self._freed(free, table.group, "%(to)s")
        self.extend = self._update(f"{self._lock} = {_EXPIRY}", so=self._leased, ours=ours)
        self.expiry = f"SELECT {_token(f'({_EXPIRY})')}, set_config('lock_timeout', '{_LOCKED}', true)"
        self.chosen = self._chosen()
        self.extended = (
            f"SELECT g.n, {_token(f'j.{self._lock}')} FROM {self.name} j JOIN {self._given} "
            f"ON {same} AND j.{self._lock} > clock_timestamp()"
            if self._count
            else ""
        )

    def _claim(self, more: str) -> str:
        columns = [f"{value} AS c{number}" for number, value in enumerate((f"j.{self.id}", *self.selected))]
        names = [f"d.c{number}" for number in range(len(columns))]
        count = f", {self._count} = COALESCE(j.{self._count}, 1) + 1" if self._count else ""
        after = f"j.{self._count}" if self._count else "NULL::bigint"
        over = ""
        if self.table.fifo:
            # nothing while a row of the group is leased, by the row itself or by this process; one whose lease is over
            # is locked, so that it is not being renewed right now
            leased = f"FROM {self.name} w WHERE {self.unfinished('w')} AND w.{self._lock}"
            over = (
                f"over AS MATERIALIZED (SELECT w.{self.id} {leased} <= {_NOW} "
                f"AND NOT (w.{self.id} = ANY (%(held)s::{self.ids})) FOR NO KEY UPDATE OF w SKIP LOCKED), "
            )
            more += f"{self.guarded} AND (SELECT count(*) {leased} IS NOT NULL) = (SELECT count(*) FROM over)"
        return (
            f"WITH {over}due AS MATERIALIZED (SELECT {', '.join(columns)} "
            f"{self.due(more, ' FOR NO KEY UPDATE OF j SKIP LOCKED')}), "
            "numbered AS MATERIALIZED (SELECT row_number() OVER () AS n, * FROM due), "
            f"leased AS (UPDATE {self.name} j SET {self._lock} = {_EXPIRY}{count} FROM numbered d "
            f"WHERE j.{self.id} = d.c0 RETURNING d.n, {self._leased} AS token, {after} AS attempt) "
            f"SELECT {names[1]}, l.token, l.attempt, {', '.join(names[2:])} "
            "FROM numbered d LEFT JOIN leased l USING (n) ORDER BY n"
        )

    def _chosen(self) -> str:
        key, *rest = self.selected
        count = f"j.{self._count}" if self._count else "NULL::bigint"
        return (
            f"SELECT g.n - 1, {self.waiting}, {key}, {_token(f'j.{self._lock}')}, {count}, {', '.join(rest)} "
            f"FROM {self.given} JOIN {self.name} j ON j.{self.id} = g.id AND j.{self._lock} = %(until)s::timestamptz "
            "ORDER BY g.n"
        )

    @property
    def _leased(self) -> str:
        """The token that is stored now; NULL where a trigger has left none, or one that is over."""
        return f"CASE WHEN j.{self._lock} > clock_timestamp() THEN {_token(f'j.{self._lock}')} END"

    def _held(self, how: str, ours: str = "") -> str:
        return (
            f"WITH held AS MATERIALIZED (SELECT j.{self.id} AS id, g.n, g.seconds FROM {self.name} j "
            f"JOIN {self._given} ON {self._mine}{ours} ORDER BY j.{self.id} FOR {how} OF j SKIP LOCKED)"
        )

    def _update(self, what: str, *, so: str = "", ours: str = "") -> str:
        """`so`: what tells of the row that it has become so, for a trigger may leave it as it was."""
        return (
            f"{self._held('NO KEY UPDATE', ours)} UPDATE {self.name} j SET {what} FROM held "
            f"WHERE j.{self.id} = held.id RETURNING held.n, {so or f'j.{self._lock} IS NULL'}"
        )

    def _freed(self, free: str, column: str | None, value: str) -> str:
        if not column:
            return ""
        so = f"j.{self._lock} IS NULL AND j.{quote(column)} IS NOT NULL"
        return self._update(f"{free}, {quote(column)} = {value}", so=so)

    def _delete(self) -> str:
        return (
            f"{self._held('UPDATE')} DELETE FROM {self.name} j USING held WHERE j.{self.id} = held.id RETURNING held.n"
        )

    def move(self, to: str, columns: Sequence[str]) -> str:
        """As `Rows.move`, by its token."""
        gone = f"DELETE FROM {self.name} j USING held WHERE j.{self.id} = held.id RETURNING j.*"
        return self._moved(f"{self._held('UPDATE')}, gone AS ({gone})", to, columns)


def insert(
    table: str, values: Sequence[tuple[str, str]], *, once: str | None = None, arrays: Mapping[str, str] = _NONE
) -> str:
    """Insert a row: each column with its expression; `once`: do nothing where that column has the value already.

    `arrays`: a row for each of their elements, in their order; by name, each as it is bound. An expression calls the
    element `g.` and that name.
    """
    name = quote_table(table)
    if not values:
        return f"INSERT INTO {name} DEFAULT VALUES"
    columns = ", ".join(quote(column) for column, _ in values)
    expressions = ", ".join(expression for _, expression in values)
    rows = f"VALUES ({expressions})"
    if arrays:
        given, names = ", ".join(arrays.values()), ", ".join(arrays)
        rows = f"SELECT {expressions} FROM unnest({given}) WITH ORDINALITY AS g({names}, n) ORDER BY g.n"
    end = f" ON CONFLICT ({quote(once)}) DO NOTHING" if once else ""
    return f"INSERT INTO {name} ({columns}) OVERRIDING SYSTEM VALUE {rows}{end}"


def limited(claim: str, room: int) -> str:
    """A claim of so many rows. Where the number is bound the server takes it for a tenth of the table, and plans anew
    for each claim, which in a table with many dead rows costs more than the claim.
    """
    return claim.replace("%(room)s", str(room))
