"""MySQL and MariaDB as a dialect: a server's database."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from links.errors import ConnectionBroken, LinkRefused
from links.sql.dialect import refuse_fifo
from links.sql.jobs import Look
from links.sql.life import Life
from links.sql.mysql.advisory import MysqlAdvisory
from links.sql.mysql.connection import MysqlConnection
from links.sql.mysql.lease import MysqlLease
from links.sql.mysql.lender import MysqlLender
from links.sql.mysql.looked import Looked
from links.sql.mysql.outbox import MysqlRecords
from links.sql.mysql.row_lock import MysqlRowLock
from links.sql.mysql.session import MysqlSession
from links.sql.mysql.work import MysqlWork
from links.sql.outbox_table import OutboxTable
from links.sql.table import Table, split
from links.sql.thread_writer import HopTurn, ThreadWriter
from links.sql.wakes import Tell
from settlement.sql import AdvisoryLock, ClaimForm, Lease, RowLock

__all__ = ["MysqlDialect"]

_LEGAL: Final = "'mysql://user:password@host:3306/database' (or mariadb://…)"
_PORT: Final = 3306
_FLAGS: Final = ("ssl_verify_cert", "ssl_verify_identity", "ssl_disabled")
_OPTIONS: Final = ("unix_socket", "ssl_ca", "ssl_cert", "ssl_key", *_FLAGS)
_MARK: Final = "trio_settlement"


class MysqlDialect:
    """One database of a server. Raises `ValueError` for a URL that cannot be read, or that names no database.

    Behind a `?` stand those arguments of PyMySQL that name a socket or TLS: unix_socket, ssl_ca, ssl_cert, ssl_key,
    ssl_verify_cert, ssl_verify_identity, ssl_disabled; a flag is 1 or 0.
    """

    def __init__(self, url: str, direct_url: str | None = None, *, listen_notify: bool = False) -> None:
        if direct_url is not None or listen_notify:
            what = "direct_url must be None" if direct_url is not None else "listen_notify must be False"
            raise ValueError(
                f"{what} for MySQL and MariaDB, whose server tells other processes nothing: they look each "
                "poll_interval, so make that shorter"
            )
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ValueError(f"url must be {_LEGAL}") from None
        self.database = unquote(parts.path.lstrip("/"))
        if not self.database:
            raise ValueError(f"url must be {_LEGAL}: it names no database")
        options = _options(parts.query)
        host, port = parts.hostname or "localhost", port or _PORT
        self._address: str | tuple[str, int] = options.pop("unix_socket", None) or (host, port)
        self._arguments: Mapping[str, Any] = {
            "user": unquote(parts.username or ""),
            "password": unquote(parts.password or "").encode(),
            "database": self.database,
            "host": host,
            "port": port,
            **options,
        }
        where = parts.netloc.rpartition("@")[2]
        self.name = f"{parts.scheme}://{where}/{quote(self.database)}"
        self.where = (self._address, self.database)

    def new(self) -> MysqlSession:
        """A session that is not open yet."""
        return MysqlSession(self._arguments, self._address, self.name)

    def life(self, wake: Tell, *, first: bool) -> Life:  # noqa: ARG002 -- the server tells nobody
        """A new life, not yet begun."""
        queues, publishing = (
            ThreadWriter(MysqlConnection(self.new, MysqlWork(self.look), self.name), self.name, HopTurn())
            for _ in range(2)
        )
        return Life(self.name, queues, publishing)

    def look(self, session: MysqlSession, job: Look) -> Looked[Any]:
        """The form of a queue, looked at. Raises `LinkRefused`, `pymysql.MySQLError`."""
        asked = job.table, job.group, job.claim
        names: dict[str, Any] = {"subscription": job.subscription, "dead_letter": job.dead_letter, "custom": job.custom}
        form: Looked[Any]
        match job.claim:
            case Lease():
                form = MysqlLease(*asked, lend=partial(MysqlLender, new=self.new), **names)
            case RowLock():
                form = MysqlRowLock(*asked, new=self.new, **names)
            case AdvisoryLock():
                form = MysqlAdvisory(*asked, new=self.new, **names)
        if not isinstance(job.claim, Lease):
            _check_room(session, job)
        form.look(session)
        return form

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
        """Raise `ValueError` for what a claim cannot have here."""
        if "claim" in events and "fetch" not in events:
            raise ValueError(
                "custom['claim'] needs custom['fetch'] as well on MySQL and MariaDB, where a claim gives ids alone: "
                "such as SELECT … WHERE id = :id"
            )
        if "lock" in events:
            raise ValueError(
                "custom['lock'] and custom['unlock'] cannot be on MySQL and MariaDB: leave them out, and the library "
                "takes a named lock of the server by GET_LOCK"
            )

    def records(self, table: OutboxTable) -> MysqlRecords:
        """As `Dialect.records`."""
        return MysqlRecords(table, self.new)

    def spelled(self, table: str) -> str:
        """The database is left out where it is the URL's."""
        schema, *rest = split(table)
        return rest[0] if rest and schema == self.database else table

    def is_named_as(self, other: object) -> bool:
        """Do both name the same database of the same host and port?"""
        return isinstance(other, MysqlDialect) and other.where == self.where

    def is_one_with(self, other: object) -> bool:
        """Is it the same database? A lock of the one is asked for in the other. Blocks: in a thread."""
        if not isinstance(other, MysqlDialect) or other.database.lower() != self.database.lower():
            return False
        here, there = self.new(), other.new()
        try:
            with contextlib.closing(here), contextlib.closing(there):
                here.open()
                there.open()
                name = f"{_MARK}.{here.server.number}.{id(here)}"
                here.say(f"SELECT GET_LOCK('{name}', 0)")
                holder = there.say(f"SELECT IS_USED_LOCK('{name}')")[0].rows[0][0]
                return bool(holder == here.server.number)
        except (ConnectionBroken, LinkRefused):
            return False


def _options(query: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in _OPTIONS:
            raise ValueError(f"url must be {_LEGAL}, with {', '.join(_OPTIONS)} behind a '?', not {name!r}")
        if name in _FLAGS and value not in ("0", "1"):
            raise ValueError(f"{name} in the url must be 1 or 0")
        found[name] = value == "1" if name in _FLAGS else value
    return found


def _check_room(session: MysqlSession, job: Look) -> None:
    """Raise `LinkRefused` where the server never lets us have a connection for each place, and those of the life."""
    (room, own) = session.say("SELECT @@max_connections, @@max_user_connections")[0].rows[0]
    room = min(room, own) if own else room
    if job.places + 2 > room:
        raise LinkRefused(
            f"subscription {job.subscription!r}, table {job.table.name!r}: each of {job.places} places holds a "
            f"connection of its own, two more look at tables and publish, and the server allows {room} "
            "(max_connections, max_user_connections); lower the concurrency, raise that limit, or use a lease, which "
            "needs one connection for all"
        )
