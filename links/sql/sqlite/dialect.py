"""SQLite as a dialect: one file, in WAL mode, with leases and advisory locks."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from links.sql.dialect import refuse_fifo
from links.sql.life import Life
from links.sql.outbox_table import OutboxTable
from links.sql.sqlite.connection import SqliteConnection
from links.sql.sqlite.outbox import SqliteRecords
from links.sql.sqlite.schema import name_in_file
from links.sql.table import Table
from links.sql.thread_writer import HopTurn, ThreadWriter
from links.sql.wakes import Tell
from settlement.sql import AdvisoryLock, ClaimForm, Lease, RowLock

__all__ = ["SqliteDialect"]

_LEGAL = "'sqlite:///relative/path.db' or 'sqlite:////absolute/path.db'"


def _path(url: str) -> Path:
    """The file of a URL."""
    rest = url.removeprefix("sqlite://")
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


class SqliteDialect:
    """One file, which must exist. Raises `ValueError` for a URL that names no file."""

    def __init__(self, url: str, direct_url: str | None = None, *, listen_notify: bool = False) -> None:
        if direct_url is not None or listen_notify:
            what = "direct_url must be None" if direct_url is not None else "listen_notify must be False"
            raise ValueError(
                f"{what} for SQLite, which has no server that tells other processes: they look each poll_interval, so "
                "make that shorter"
            )
        self.path = Path(os.path.abspath(_path(url)))  # noqa: PTH100 -- Path.absolute leaves the ".." in
        """The file, as it was named; absolute, symbolic links in it are not followed."""
        self.name = url

    def life(self, wake: Tell, *, first: bool) -> Life:  # noqa: ARG002 -- a file tells nobody
        """A new life, not yet begun."""
        turn = HopTurn()
        # a claim or settlement that a power cut forgets is a redelivery; a publish would be a loss
        queues, publishing = (SqliteConnection(self.path, self.name, how) for how in ("NORMAL", "FULL"))
        return Life(self.name, ThreadWriter(queues, self.name, turn), ThreadWriter(publishing, self.name, turn))

    def form(self, claim: ClaimForm | None, table: Table[Any]) -> ClaimForm:
        """`Lease(…)` where the table has a locked_until column, or None for `Lease(30.0)`; else `AdvisoryLock(…)`.

        Raises `ValueError` for one where the other fits, and for the row lock: SQLite locks the whole file.
        """
        refuse_fifo(claim, table)
        leases = table.locked_until is not None
        if isinstance(claim, RowLock):
            raise ValueError(
                f"claim must be Lease(seconds) or AdvisoryLock(key), not {claim!r}: SQLite locks the whole file"
            )
        if claim is None and not leases:
            raise ValueError(
                f"table must have a locked_until column, and {table.name!r} has none: so its form is RowLock(), and "
                "SQLite locks the whole file; add the column for Lease(seconds), or say AdvisoryLock(key)"
            )
        if isinstance(claim, Lease) and not leases:
            raise ValueError(f"table must have a locked_until column for Lease(…), and {table.name!r} has none")
        if isinstance(claim, AdvisoryLock) and leases:
            raise ValueError(
                f"claim must be Lease(seconds), not {claim!r}, for a table with a locked_until column: {table.name!r} "
                "may be leased by others; leave the role out of Table(…) where it is not"
            )
        return claim or Lease(30.0)

    def check_custom(self, events: Collection[str]) -> None:
        """Raise `ValueError` for a lock, which nothing would end, and for a claim without a fetch."""
        if "lock" in events:
            raise ValueError(
                "custom['lock'] and custom['unlock'] cannot be on SQLite, where no lock ends with its connection or "
                "process: one that a crash leaves would hold its rows for ever; leave them out, and the library holds "
                "the keys itself"
            )
        if "claim" in events and "fetch" not in events:
            raise ValueError(
                "custom['claim'] needs custom['fetch'] as well on SQLite, where a claim gives ids alone: such as "
                "SELECT … WHERE id = :id"
            )

    def records(self, table: OutboxTable) -> SqliteRecords:
        """As `Dialect.records`."""
        return SqliteRecords(table, self.path)

    def spelled(self, table: str) -> str:
        """Schema `main` is left out, case does not count."""
        return name_in_file(table)

    def is_named_as(self, other: object) -> bool:
        """Is it the same path?"""
        return isinstance(other, SqliteDialect) and other.path == self.path

    def is_one_with(self, other: object) -> bool:
        """Is it the same file? Asks the disk."""
        try:
            return isinstance(other, SqliteDialect) and self.path.samefile(other.path)
        except OSError:
            return False
