"""PostgreSQL as a dialect: a server's database."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from links.errors import ConnectionBroken, LinkRefused
from links.sql.dialect import refuse_fifo
from links.sql.life import Life
from links.sql.outbox_table import OutboxTable
from links.sql.postgres.codes import is_refusal
from links.sql.postgres.listener import Listener
from links.sql.postgres.outbox import PostgresRecords
from links.sql.postgres.session import begin, is_pooled
from links.sql.postgres.trio_connection import TrioConnection
from links.sql.postgres.values import tolerate
from links.sql.postgres.writer import PostgresWriter
from links.sql.table import Table, split
from links.sql.wakes import Tell
from settlement.sql import AdvisoryLock, ClaimForm, Lease, RowLock

__all__ = ["PostgresDialect"]

_LEGAL = "'postgresql://user:password@host:5432/database'"
_OLDEST = 120000
"""PostgreSQL 12: MATERIALIZED."""
_ONE = 5
"""Seconds for each look whether two URLs name one database."""


class PostgresDialect:
    """One database of a server, by a URL as libpq takes it.

    https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-CONNSTRING-URIS. `direct_url`: the same database
    without a pooler. Raises `ValueError` for a URL that libpq cannot read, or that names no database.
    """

    def __init__(self, url: str, direct_url: str | None = None, *, listen_notify: bool = False) -> None:
        self._listen = listen_notify
        self.direct = None if direct_url is None else _direct(direct_url)
        """The same database, without a pooler; None: as this."""
        parts = urlsplit(url)
        try:
            given = conninfo_to_dict(f"postgresql://{url.partition('://')[2]}")
        except psycopg.ProgrammingError:
            raise ValueError(f"url must be {_LEGAL}, with the parameters of libpq behind a '?'") from None
        if not given.get("dbname"):
            raise ValueError(f"url must be {_LEGAL}: it names no database")
        self._given = {key: str(value) for key, value in given.items()}
        self.where = tuple(self._given.get(key) for key in ("host", "hostaddr", "port", "dbname"))
        where = parts.netloc.rpartition("@")[2]
        self.name = f"postgresql://{where}/{quote(unquote(parts.path.lstrip('/')) or self._given['dbname'])}"

    @property
    def conninfo(self) -> str:
        """For libpq; it holds the password."""
        return make_conninfo("", **{"application_name": "trio-settlement", **self._given, "client_encoding": "UTF8"})

    def life(self, wake: Tell, *, first: bool) -> Life:
        """A new life, not yet begun."""
        queues, publishing = (PostgresWriter(self.connect, self.session, self.name) for _ in range(2))
        if not self._listen:
            return Life(self.name, queues, publishing)
        direct = None if self.direct is None else self.direct.connect
        news = Listener(self.name, self.connect, direct, publishing, wake, first=first)
        return Life(self.name, queues, publishing, news)

    async def connect(self) -> TrioConnection:
        """A connection that may write, in autocommit.

        Raises `LinkRefused` where the server says no, is too old or takes no writes; `ConnectionBroken` else.
        Cancellation: there is none.
        """
        try:
            connection = await TrioConnection.open(self.conninfo)
        except psycopg.OperationalError as error:
            why = f"{self.name}: {' '.join(str(error).split())}"
            if is_refusal(error):
                raise LinkRefused(why) from None
            raise ConnectionBroken(why) from None
        try:
            await self._check(connection)
        except psycopg.Error as error:
            connection.finish()
            raise ConnectionBroken(f"{self.name}: {error}") from error
        except BaseException:
            connection.finish()
            raise
        tolerate(connection)
        return connection

    async def session(self) -> TrioConnection:
        """A connection whose session of the server is ours alone, by `direct_url` where there is one.

        Raises as `connect`, and `LinkRefused` behind a pooler. Cancellation: there is none.
        """
        connection = await (self.direct or self).connect()
        try:
            if not await is_pooled(connection):
                return connection
        except psycopg.Error as error:
            connection.finish()
            raise ConnectionBroken(f"{self.name}: {error}") from error
        except BaseException:
            connection.finish()
            raise
        connection.finish()
        raise LinkRefused(
            f"{self.name}: there is a pooler in front of the server, so a session and its locks are not ours alone; "
            "name the server itself by SqlBroker(…, direct_url=…), or claim by Lease(seconds) or RowLock()"
        )

    async def _check(self, connection: TrioConnection) -> None:
        if connection.info.server_version < _OLDEST:
            raise LinkRefused(f"{self.name}: the server is older than PostgreSQL 12")
        await begin(connection, self.name)

    def form(self, claim: ClaimForm | None, table: Table[Any]) -> ClaimForm:
        """`Lease(…)` where the table has a locked_until column, `RowLock()` or `AdvisoryLock(…)` where it has none.

        None: `Lease(30.0)` or `RowLock()`. Raises `ValueError` for one where the other fits, and for what a FIFO table
        cannot have: `AdvisoryLock(…)`, and another isolation level.
        """
        refuse_fifo(claim, table)
        leases = table.locked_until is not None
        if claim is None:
            return Lease(30.0) if leases else RowLock()
        if isinstance(claim, Lease) and not leases:
            raise ValueError(f"table must have a locked_until column for Lease(…), and {table.name!r} has none")
        if isinstance(claim, RowLock) and claim.isolation == "read uncommitted":
            raise ValueError("RowLock(isolation) must be 'read committed' or more on PostgreSQL, which has no less")
        if isinstance(claim, RowLock) and table.fifo and claim.isolation != "read committed":
            raise ValueError(
                f"RowLock(isolation) must be 'read committed' for {table.name!r}, which is FIFO: a claim looks at what "
                "others have committed since its transaction began"
            )
        if isinstance(claim, RowLock | AdvisoryLock) and leases:
            raise ValueError(
                f"claim must be Lease(seconds), not {claim!r}, for a table with a locked_until column: {table.name!r} "
                "may be leased by others; leave the role out of Table(…) where it is not"
            )
        return claim

    def check_custom(self, events: Collection[str]) -> None:
        """Every one can be."""

    def records(self, table: OutboxTable) -> PostgresRecords:
        """As `Dialect.records`."""
        return PostgresRecords(table, self.connect)

    def spelled(self, table: str) -> str:
        """Schema `public` is left out."""
        schema, *rest = split(table)
        return rest[0] if rest and schema == "public" else table

    def is_named_as(self, other: object) -> bool:
        """Do both name the same database of the same host and port?"""
        return isinstance(other, PostgresDialect) and other.where == self.where

    def is_one_with(self, other: object) -> bool:
        """Is it the same database, by its server's start and its own number? Blocks: in a thread."""
        if not isinstance(other, PostgresDialect):
            return False
        try:
            return self.identity() == other.identity()
        except psycopg.Error:
            return False

    def identity(self) -> tuple[Any, ...] | None:
        """What no two databases have in common. Blocks. Raises `psycopg.Error`."""
        with psycopg.connect(self.conninfo, connect_timeout=_ONE, autocommit=True) as connection:
            return connection.execute(
                b"SELECT pg_postmaster_start_time()::text, oid FROM pg_database WHERE datname = current_database()"
            ).fetchone()


def _direct(url: str) -> PostgresDialect:
    """Of `direct_url`. Raises `ValueError`."""
    if not isinstance(url, str) or url.partition("://")[0] not in {"postgresql", "postgres"}:
        raise ValueError(f"direct_url must be {_LEGAL}, of the same database as url")
    try:
        return PostgresDialect(url)
    except ValueError as wrong:
        raise ValueError(f"direct_{wrong}") from None
