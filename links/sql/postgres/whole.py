"""A job that is carried out in one piece, and what a writer knows of every job.

Cancellation: as `links.sql.postgres.lease` says; what was carried out stands in the job.
"""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

import psycopg

from links.errors import CallBroken, ConnectionBroken, LinkError
from links.sql.jobs import Job, Run
from links.sql.postgres.codes import BINDING
from links.sql.postgres.trio_connection import TrioConnection

__all__ = ["RunOnce", "Whole", "Work"]

J = TypeVar("J", bound=Job)


class Work(Protocol):
    """One job, which may be run again on another connection."""

    async def run(self, connection: TrioConnection) -> None:
        """Carry it out. Raises `psycopg.Error` where the connection broke amid it."""
        ...

    def lost(self, error: ConnectionBroken) -> bool:
        """The connection broke while it ran: shall it be run again? Else it has failed, as far as anybody knows."""
        ...

    def fail(self, error: BaseException) -> None:
        """It was not carried out."""
        ...


class Whole(Generic[J]):
    """A job in one piece."""

    def __init__(self, job: J) -> None:
        self.job = job

    async def run(self, connection: TrioConnection) -> None:
        """As `Work.run`."""
        self.job.error = None
        try:
            await self.work(connection)
        except LinkError as error:
            self.job.error = error
        except psycopg.Error as error:
            if connection.closed:
                raise
            self.job.error = error

    async def work(self, connection: TrioConnection) -> None:
        """The statements."""
        raise NotImplementedError

    def lost(self, error: ConnectionBroken) -> bool:
        """As `Work.lost`: it has failed."""
        self.fail(CallBroken(str(error)))
        return False

    def fail(self, error: BaseException) -> None:
        """As `Work.fail`."""
        self.job.fail(error)


class RunOnce(Whole[Run[Any]]):
    """A call. Where its connection broke amid it, it is run again if twice does no harm; else nobody knows."""

    async def run(self, connection: TrioConnection) -> None:
        """As `Work.run`."""
        try:
            await super().run(connection)
        except BINDING as error:  # a value that cannot be sent, such as a text with a lone surrogate
            if connection.closed:
                raise
            self.job.error = error

    async def work(self, connection: TrioConnection) -> None:
        """The call."""
        self.job.result = None
        self.job.result = await self.job.call(connection, None)

    def lost(self, error: ConnectionBroken) -> bool:
        """As `Work.lost`."""
        if not self.job.again:
            self.fail(error)
        return self.job.again
