"""NOTIFY: tells the sessions that listen to a table's channel that there is something new."""

from __future__ import annotations

from typing import Final

import psycopg

from links.errors import ConnectionBroken
from links.sql.jobs import Job
from links.sql.patience import PATIENCE
from links.sql.postgres.trio_connection import TrioConnection

__all__ = ["Notify", "payload"]

_LONGEST: Final = 7999
"""Bytes of a payload (https://www.postgresql.org/docs/current/sql-notify.html)."""


def payload(group: str | None) -> str:
    """A group as a payload; empty, which means all, where there is none, or its name is too long."""
    return group if group is not None and len(group.encode()) <= _LONGEST else ""


class Notify(Job):
    """One notification: a job of a writer, and the work itself. It comes behind what it tells of."""

    def __init__(self, channel: str, group: str | None) -> None:
        super().__init__(PATIENCE)
        self.channel, self.group = channel, group

    async def run(self, connection: TrioConnection) -> None:
        """As `Work.run`. A transaction of its own: where it fails nothing else does."""
        self.error = None
        try:
            told = [self.channel, payload(self.group)]
            await connection.execute(b"SELECT pg_notify(%s, %s)", told, prepare=False)  # nobody has to unprepare it
        except psycopg.Error as error:
            if connection.closed:
                raise
            self.error = error

    def lost(self, error: ConnectionBroken) -> bool:  # noqa: ARG002 -- twice does no harm
        """As `Work.lost`."""
        return True
