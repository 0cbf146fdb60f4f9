"""A database of queue tables."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, TypeVar

import trio
from trio.testing import MockClock

from links.abc import Broker
from links.errors import LinkRefused
from links.sql.database import Database
from links.sql.dialect import SqlLife, dialect_of
from links.sql.publisher import SqlPublisher
from links.sql.purge import purge
from links.sql.queue import SqlQueue
from links.sql.table import Table
from settlement.outcomes import seconds
from settlement.sql import ClaimForm

__all__ = ["SqlBroker"]

R = TypeVar("R")


class SqlBroker(Broker):
    """Queue tables in one database, by its URL.

    `sqlite:///path`: a file, which must exist; it is put into WAL mode, and must not be on a network disk.
    `postgresql://user:password@host:5432/database`: as libpq takes it; by psycopg, the extra
    `postgres` (`ModuleNotFoundError` without it). `mysql://user:password@host:3306/database`, or `mariadb://…`: by
    PyMySQL, the extra `mysql`; behind a `?` its unix_socket and ssl_… arguments.

    `poll_interval`: seconds above 0 between two looks at an empty queue, ±20 %. `listen_notify`: publishing tells other
    processes on the database, and this one hears of theirs, by PostgreSQL's NOTIFY on a channel of the table's name;
    polling goes on underneath. False by default. `direct_url`: the same database without a pooler that shares sessions,
    where `url` is that of one; None: there is none.

    Raises `ValueError` for a URL that names no database, and anywhere but on PostgreSQL for the last two.
    """

    def __init__(
        self, url: str, *, poll_interval: float = 1.0, listen_notify: bool = False, direct_url: str | None = None
    ) -> None:
        dialect = dialect_of(url, direct_url, listen_notify=listen_notify)
        super().__init__(dialect.name)
        self._database = Database(self, dialect)
        self.poll_interval = seconds("poll_interval", poll_interval, zero=False)
        self._routes: dict[str, list[tuple[Table[Any], str | None]]] = {}

    def __repr__(self) -> str:
        return f"<SqlBroker {self.name}>"

    @property
    def database(self) -> Database:
        """What its queues, publishers and outboxes share."""
        return self._database

    @property
    def life(self) -> SqlLife:
        """The connections of the present life."""
        return self._database.life

    async def run(  # noqa: ASYNC128 -- the life calls started
        self, goodbye: float = 5.0, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """One life: connect, report started, serve until cancelled.

        Raises `LinkRefused` where there is no such database, this user may not use it, or it takes no writes, and under
        a mock clock; `ConnectionBroken` where a server is not reached, or ended the connections and gave no others
        within 5 s; of a file where others keep it locked for 10 s, the disk is full or fails, or it is taken away.

        Cancellation: links say goodbye, then the connections are closed, within `goodbye`.
        """
        if isinstance(trio.lowlevel.current_clock(), MockClock):
            raise LinkRefused(
                f"{self.name}: this trio.run has a mock clock, and a database answers in real time: a mock clock runs "
                "ahead of it; test in virtual time with MemoryBroker, or without autojump_clock"
            )
        await self._database.run(goodbye, task_status.started)

    def queue(
        self,
        table: Table[R],
        *,
        group: str | None = None,
        claim: ClaimForm | None = None,
        limit: int | None = None,
        poll_interval: float | None = None,
        custom: Mapping[str, str] = MappingProxyType({}),
    ) -> SqlQueue[R]:
        """A queue: the table, or one group of it. No I/O.

        `claim`: `Lease(duration)`, `AdvisoryLock(key)`, or anywhere but on SQLite `RowLock()`; None: by the columns,
        where locked_until means `Lease(30.0)`, and none of it `RowLock()`. `limit`: how many deliveries may be
        unsettled at once, 1 or more; None: concurrency × size. `poll_interval`: seconds above 0; None: the broker's.
        Raises `ValueError` for a claim form that this table or this database has not, a group where the table has none
        (or the reverse), and a `custom` statement of an unknown event or name, or one that this form has no use for.

        `custom`: statements of your own, one for each event that shall have one, in place of the library's; none by
        default. docs/queue-tables.md has an example.

        "ack", "drop", "retry", "retry_after", "dead_letter" are carried out in the transaction that settles the row,
        and must touch 1 row or more (or, a SELECT, give as many): else the row is *not applied*, and it is said again.
        They bind `:id`, `:token` (locked_until), `:attempt` (as the table has it), `:now`, `:delay` (seconds, of
        retry_after) and `:group` (of dead_letter the dead letter's name, else the row's group). Under a lease they run
        if the row is ours still; they must let go of the row, by deleting it or emptying locked_until.

        "claim" gives the ids of up to `:room` rows that it holds: it has written `:until` into locked_until, or, under
        a row lock, locked them. It binds `:now` and `:group`, too. A row that it gives and does not hold, or that is
        not to be had, is passed over. Not under advisory locks. "fetch" gives the content of the row `:id`, by the
        names of its columns; it goes with "claim", which on SQLite needs it. "extend" writes `:until` into locked_until
        where that is `:token`; it binds what a settlement does, but for `:delay`. Neither "claim" nor "extend" is for a
        FIFO table. "lock" and "unlock", under advisory locks on PostgreSQL, give true or false for `:key`, its text.
        """
        interval = self.poll_interval if poll_interval is None else seconds("poll_interval", poll_interval, zero=False)
        queue = SqlQueue(self._database, table, group, claim=claim, limit=limit, poll_interval=interval, custom=custom)
        self._route(queue.name, table, group)
        return queue

    def table(self, table: Table[Any]) -> None:
        """Let `publisher(name)` find this table, which has no groups, by its name. Raises `ValueError` for groups."""
        if table.group is not None:
            raise ValueError(f"table must have no groups, not {table.name!r}: use publisher(table, group=…)")
        self._route(table.name, table, None)

    def _route(self, name: str, table: Table[Any], group: str | None) -> None:
        routes = self._routes.setdefault(name, [])
        if (table, group) not in routes:
            routes.append((table, group))

    def publisher(self, to: str | Table[Any], *, group: str | None = None) -> SqlPublisher:
        """A publisher to a table (and its group), or by name to what `queue` or `table` made known here. No I/O.

        Raises `ValueError` for a name that nothing or more than one thing has, and for a group where the table
        has none, or the reverse.
        """
        if isinstance(to, Table):
            to.check_group(group)
            return SqlPublisher(self._database, to, group)
        if group is not None:
            raise ValueError(f"group must be None where to is a name, not {group!r}: the name is the group's")
        routes = self._routes.get(to, [])
        if len(routes) != 1:
            known = ", ".join(sorted(map(repr, self._routes))) or "none yet"
            raise ValueError(
                f"to must be a name with one route here ({known}), not {to!r} with {len(routes)}: make a queue of it, "
                "call broker.table(table), or use publisher(table, group=…)"
            )
        return SqlPublisher(self._database, *routes[0])

    async def purge(
        self,
        table: Table[Any],
        *,
        older_than: float | timedelta,
        group: str | None = None,
        dead_since: str | None = None,
    ) -> int:
        """Delete finished rows for good, 1,000 by a transaction, and say how many; the broker must be open.

        `older_than`: seconds or a `timedelta`, 0 or more, since a row was finished (its processed_at), by the
        database's clock. `group`: of this group alone; None: of all. Rows that are not finished, leased or locked stay.

        Dead letters are not finished. They are deleted where `dead_since` names a time column of your own that says
        since when each of them is one, such as `died_at timestamptz DEFAULT now()` of a dead-letter table, declared as
        retry_after is: all rows of `table` (where it has groups, of `group`) whose time there is older, but for those
        that are leased or locked.

        Raises `ValueError` for a table without processed_at and no `dead_since`, a `dead_since` that plays a role or is
        said of all groups, and a group where the table has none; `LinkRefused` where table or columns are not such;
        `CallBroken` where the database refuses a deletion; `LinkBroken` where the connection broke; `NotConnected`.

        Cancellation: what was deleted is deleted.
        """
        return await purge(self._database, table, older_than, group=group, dead_since=dead_since)
