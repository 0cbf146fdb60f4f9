"""A database of queue tables."""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import trio
from trio.testing import MockClock

from links.abc import Broker
from links.errors import LinkRefused
from links.sql.publisher import SqlPublisher
from links.sql.queue import SqlQueue
from links.sql.sqlite_life import SqliteLife
from links.sql.sqlite_schema import name_in_file
from links.sql.table import Table
from links.sql.wakes import Wakes
from settlement.outcomes import seconds
from settlement.sql import Claim, Lease

__all__ = ["SqlBroker"]

R = TypeVar("R")

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_LEGAL = "'sqlite:///relative/path.db' or 'sqlite:////absolute/path.db'"


def _path(url: str) -> Path:
    """The file of a URL. Never shows more of a URL than its scheme: it may hold a password."""
    scheme, found, rest = url.partition("://") if isinstance(url, str) else ("", "", "")
    if not found or scheme != "sqlite":
        other = f"one of scheme {scheme!r}" if found and _SCHEME.fullmatch(scheme) else "one without a scheme"
        raise ValueError(f"url must be {_LEGAL}, not {other}")
    if not rest.startswith("/"):
        raise ValueError(f"url must be {_LEGAL}: there is no host in front of the path")
    path = rest[1:]
    if not path or path.endswith("/"):
        raise ValueError(f"url must be {_LEGAL}: it names no file")
    if path == ":memory:":
        raise ValueError(f"url must be {_LEGAL}: a database in memory has one connection, and this takes two")
    if "?" in path or "\0" in path:
        raise ValueError(f"url must be {_LEGAL}, without options: they are arguments")
    return Path(path)


class SqlBroker(Broker):
    """Queue tables in one SQLite file, which must exist; it is put into WAL mode, and must not be on a network disk.

    `poll_interval`: seconds above 0 between two looks at an empty queue, ±20 % (S-2.9). Raises `ValueError` for a URL
    that names no file.
    """

    def __init__(self, url: str, *, poll_interval: float = 1.0) -> None:
        self.path = Path(os.path.abspath(_path(url)))  # noqa: PTH100 -- Path.absolute leaves the ".." in
        """The file, as it was named; absolute, symbolic links in it are not followed."""
        super().__init__(url)
        self.poll_interval = seconds("poll_interval", poll_interval, zero=False)
        self._life: SqliteLife | None = None
        self._routes: dict[str, list[tuple[Table[Any], str | None]]] = {}
        self._attached: dict[tuple[str, str | None], tuple[str, Wakes]] = {}

    def __repr__(self) -> str:
        return f"<SqlBroker {self.name}>"

    @property
    def life(self) -> SqliteLife:
        """The connections of the present life."""
        assert self._life is not None, "asked for while up"  # noqa: S101 -- an invariant of ours
        return self._life

    async def run(  # noqa: ASYNC128 -- the life calls started
        self, goodbye: float = 5.0, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """One life: open the file, report started, serve until cancelled.

        Raises `LinkRefused` where there is no such file, it is no database, or may not be written, and under a mock
        clock; `ConnectionBroken` where others keep it locked for 10 s, the disk is full or fails, or a file of the
        database is taken away.

        Cancellation: links say goodbye, then the file is closed, within `goodbye`.
        """
        if isinstance(trio.lowlevel.current_clock(), MockClock):
            raise LinkRefused(
                f"{self.name}: this trio.run has a mock clock, and a database answers in real time: a mock clock runs "
                "ahead of it; test in virtual time with MemoryBroker, or without autojump_clock"
            )
        self._life = SqliteLife(self.path, self.name)
        await self._life.run(goodbye, self.up, task_status.started)

    def queue(
        self,
        table: Table[R],
        *,
        group: str | None = None,
        claim: Claim = Lease(30.0),
        limit: int | None = None,
        poll_interval: float | None = None,
    ) -> SqlQueue[R]:
        """A queue: the table, or one group of it. No I/O.

        `claim`: on SQLite `Lease(duration)` alone. `limit`: how many deliveries may be unsettled at once, 1 or more;
        None: concurrency × size. `poll_interval`: seconds above 0; None: the broker's. Raises `ValueError` for another
        claim form, a table without locked_until, or a group where the table has none (or the reverse).
        """
        interval = self.poll_interval if poll_interval is None else seconds("poll_interval", poll_interval, zero=False)
        queue = SqlQueue(self, table, group, claim=claim, limit=limit, poll_interval=interval)
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

        Raises `ValueError` for a name that nothing or more than one thing has (S-11.2), and for a group where the table
        has none, or the reverse.
        """
        if isinstance(to, Table):
            to.check_group(group)
            return SqlPublisher(self, to, group)
        if group is not None:
            raise ValueError(f"group must be None where to is a name, not {group!r}: the name is the group's")
        routes = self._routes.get(to, [])
        if len(routes) != 1:
            known = ", ".join(sorted(map(repr, self._routes))) or "none yet"
            raise ValueError(
                f"to must be a name with one route here ({known}), not {to!r} with {len(routes)}: make a queue of it, "
                "call broker.table(table), or use publisher(table, group=…)"
            )
        return SqlPublisher(self, *routes[0])

    # --- for queues and publishers -------------------------------------------------------------------------------

    @contextmanager
    def attached(
        self, table: Table[Any], group: str | None, subscription: str, wakes: Wakes
    ) -> Generator[None, None, None]:
        """This subscription has the queue for the block. Raises `LinkRefused` where another one has it (S-12.1)."""
        name = name_in_file(table.name)
        for (other, part), (holder, _) in self._attached.items():
            if other == name and (part == group or part is None or group is None):
                queue = f"group {group!r} of table {table.name!r}" if group is not None else f"table {table.name!r}"
                raise LinkRefused(
                    f"subscription {subscription!r}: {queue} is already subscribed on this broker, by {holder!r}; "
                    "use concurrency, or a second broker"
                )
        self._attached[name, group] = (subscription, wakes)
        try:
            yield
        finally:
            del self._attached[name, group]

    def wake(self, table: str, group: str | None) -> None:
        """Let this process's queue on that table and group look at once (S-9.1)."""
        if found := self._attached.get((name_in_file(table), group)):
            found[1].wake()
