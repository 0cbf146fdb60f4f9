"""Deletes rows that nobody needs any more, in batches: no transaction stands for long, and others have their turns."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from links.errors import ConnectionBroken, LinkBroken
from links.sql.database import Database
from links.sql.jobs import Purge
from links.sql.letters import span
from links.sql.patience import PATIENCE
from links.sql.table import Table

__all__ = ["purge"]

_ROOM: Final = 1000
"""Rows by one transaction."""


def _column(table: Table[Any], group: str | None, dead_since: str | None) -> str:
    """The column that says how old a row is. Raises `ValueError`."""
    if group is not None or (dead_since is not None and table.group is not None):
        table.check_group(group)
    if dead_since is None:
        if table.processed_at is None:
            raise ValueError(
                f"table {table.name!r} must have a processed_at column: without one a row is deleted when it is "
                "finished; dead letters are deleted by dead_since=…, a time column of your own"
            )
        return table.processed_at
    if not isinstance(dead_since, str) or not dead_since or "\0" in dead_since:
        raise ValueError(f"dead_since must be a column name of 1 character or more, not {dead_since!r}")
    if role := next((role for role, column in table.roles.items() if column == dead_since), None):
        raise ValueError(
            f"dead_since must be a column that says since when a row is a dead letter, not {dead_since!r}, which is "
            f"{role} and was written before"
        )
    return dead_since


async def purge(
    database: Database,
    table: Table[Any],
    older_than: float | timedelta,
    *,
    group: str | None,
    dead_since: str | None,
) -> int:
    """As `SqlBroker.purge`.

    Cancellation: what was deleted is deleted.
    """
    age = span("older_than", older_than)
    by = _column(table, group, dead_since)
    deleted, after = 0, None
    while True:
        await database.broker.until_up()
        job = Purge(
            table, group, by, age, unfinished=dead_since is not None, room=_ROOM, after=after, patience=PATIENCE
        )
        await database.life.publishing.carry_out(job)
        if isinstance(job.error, ConnectionBroken):
            if job.sent == 0:
                continue  # it has not begun: the next life may carry it out
            raise LinkBroken(f"purge of table {table.name!r}, after {deleted} rows: {job.error}") from job.error
        job.check(f"purge of table {table.name!r}, after {deleted} rows")
        deleted += job.deleted
        if job.found < _ROOM:
            return deleted
        after = job.last
