"""What a server must provide, so that its tables can be queues; which one a URL names.

A dialect is made for one URL. Its life carries out jobs (links.sql.jobs), with the statements and the clock of that
server; what it lacks it refuses by name when a queue is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Protocol

from links.errors import ConnectionBroken
from links.sql.jobs import Job
from links.sql.outbox_table import OutboxTable
from links.sql.records import Records
from links.sql.table import Table
from links.sql.wakes import Tell
from settlement.sql import AdvisoryLock, ClaimForm

__all__ = ["Dialect", "News", "SqlLife", "Writer", "dialect_of", "refuse_fifo"]

_DIALECTS = {
    "sqlite": ("links.sql.sqlite.dialect", "SqliteDialect"),
    "postgresql": ("links.sql.postgres.dialect", "PostgresDialect"),
    "postgres": ("links.sql.postgres.dialect", "PostgresDialect"),
    "mysql": ("links.sql.mysql.dialect", "MysqlDialect"),
    "mariadb": ("links.sql.mysql.dialect", "MysqlDialect"),
}
"""By the URL's scheme, module and class: imported when they are asked for, since a driver may not be installed."""

_LEGAL = {
    "sqlite": "'sqlite:///relative/path.db', 'sqlite:////absolute/path.db'",
    "postgresql": "'postgresql://user:password@host/database'",
    "mysql": "'mysql://user:password@host/database' (or mariadb://…)",
}

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")


class Writer(Protocol):
    """Carries out jobs, as many in one transaction as are ready."""

    @property
    def error(self) -> ConnectionBroken | None:
        """Why there is no connection any more."""
        ...

    def submit(self, job: Job) -> None:
        """Carry this out; its `then` is called when it has ended."""
        ...

    def withdraw(self, job: Job) -> bool:
        """Forget a job that has not begun; False: it has."""
        ...

    async def carry_out(self, job: Job) -> None:
        """Submit the job and wait for its end.

        Cancellation: a job that has not begun is withdrawn; another is carried out, and its `then` is called.
        """
        ...


class News(Protocol):
    """How processes tell each other that there is something. Plain calls, but for its connection's."""

    def listen(self, table: str, subscription: str) -> None:
        """Hear of what others publish to this table. Raises `LinkRefused` where that cannot be."""
        ...

    def tell(self, table: str, group: str | None) -> None:
        """Let others hear that something was published to this table."""
        ...

    async def open(self) -> None:
        """At start-up, connect. Raises `LinkRefused`, `ConnectionBroken`. Cancellation: there is no connection."""
        ...

    async def run(self) -> None:
        """Hear, until cancelled: it outlives its connection. Cancellation: the connection is closed."""
        ...


class SqlLife(Protocol):
    """The connections of one life."""

    @property
    def news(self) -> News | None:
        """What other processes publish and hear; None: nobody tells."""
        ...

    @property
    def queues(self) -> Writer:
        """For the links."""
        ...

    @property
    def publishing(self) -> Writer:
        """For the publishers: what it has confirmed is on the disk."""
        ...

    async def run(
        self, goodbye: float, up: Callable[[], AbstractContextManager[None]], started: Callable[[], None]
    ) -> None:
        """Connect, serve until cancelled. Raises `LinkRefused`, `ConnectionBroken`.

        Cancellation: links say goodbye, then the connections are closed, within `goodbye`.
        """
        ...

    async def until_over(self) -> ConnectionBroken:
        """Wait until this life is over, or about to be: links say goodbye now. Returns why.

        Cancellation: nothing was done.
        """
        ...

    def link(self) -> AbstractContextManager[None]:
        """A link uses this life for the block."""
        ...


class Dialect(Protocol):
    """One database, by its URL. No call does I/O but `is_one_with` and what a life does."""

    @property
    def name(self) -> str:
        """The URL without credentials."""
        ...

    def life(self, wake: Tell, *, first: bool) -> SqlLife:
        """A new life, not yet begun. `wake`: called where another process has published; `first`: none was up yet."""
        ...

    def form(self, claim: ClaimForm | None, table: Table[Any]) -> ClaimForm:
        """How rows of this table are claimed; None: by its columns, locked_until means `Lease(30.0)`, else `RowLock()`.

        Raises `ValueError` for a form that this server or this table has not.
        """
        ...

    def check_custom(self, events: Collection[str]) -> None:
        """Raise `ValueError` for statements of the user's own, by their events, that this server cannot have."""
        ...

    def records(self, table: OutboxTable) -> Records:
        """What an outbox does with its record table."""
        ...

    def spelled(self, table: str) -> str:
        """One spelling for one table, however it is named."""
        ...

    def is_named_as(self, other: Dialect) -> bool:
        """Do both URLs name the same database?"""
        ...

    def is_one_with(self, other: Dialect) -> bool:
        """Are both the same database, by whatever names? May block: called in a thread."""
        ...


def refuse_fifo(claim: ClaimForm | None, table: Table[Any]) -> None:
    """Raise `ValueError` for advisory locks on a FIFO table: a lock of the group's would be the order already."""
    if table.fifo and isinstance(claim, AdvisoryLock):
        raise ValueError(
            f"claim must be Lease(seconds) or RowLock() for the FIFO table {table.name!r}, not {claim!r}: leave fifo "
            "out, and put the group into the key, such as AdvisoryLock('queue-{" + str(table.group) + "}')"
        )


def dialect_of(url: str, direct_url: str | None = None, *, listen_notify: bool = False) -> Dialect:
    """The dialect for this URL.

    Raises `ValueError` where there is none, a URL names no database, or the dialect has no use for the others; it never
    shows more of a URL than its scheme, since the rest may hold a password.
    """
    scheme, found, _ = url.partition("://") if isinstance(url, str) else ("", "", "")
    if not found or scheme not in _DIALECTS:
        other = f"one of scheme {scheme!r}" if found and _SCHEME.fullmatch(scheme) else "one without a scheme"
        raise ValueError(f"url must be {' or '.join(_LEGAL.values())}, not {other}")
    module, name = _DIALECTS[scheme]
    try:
        made: Dialect = getattr(import_module(module), name)(url, direct_url, listen_notify=listen_notify)
    except ModuleNotFoundError as error:
        extra = "postgres" if scheme.startswith("postgres") else "mysql"
        raise ModuleNotFoundError(
            f"{scheme} needs {error.name}: pip install 'trio-settlement[{extra}]'", name=error.name
        ) from error
    return made
