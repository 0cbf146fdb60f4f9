"""The listener: hears what other processes have published, and has them told what this one has (LISTEN, NOTIFY).

Owns one connection, to the server itself, and the channels that it hears: one for each table with a queue here, of the
table's name; the payload is the group, and an empty one means every group. Hears: the server's notifications; `listen`
and `tell`, which are plain calls. Tells: the queues here, to look; the publishing writer, to notify.

A connection that breaks or is mute is made again, with pauses that grow; when it hears again, every queue looks once.
What it does not hear meanwhile is found by the queues' polling, and one warning says so. A cancellation closes the
connection, and the server forgets that anybody listened.
"""

from __future__ import annotations

import logging
import random
import uuid
from functools import partial
from typing import Final

import psycopg
import trio

from links.errors import ConnectionBroken, LinkRefused
from links.sql.dialect import Writer
from links.sql.postgres.notify import Notify
from links.sql.postgres.pin import Connect
from links.sql.postgres.schema import LONGEST, quote
from links.sql.postgres.session import is_pooled
from links.sql.postgres.trio_connection import TrioConnection
from links.sql.wakes import Tell

__all__ = ["Listener"]

_log = logging.getLogger("trio_settlement")

HEARING: Final = 5.0
"""Seconds within which a notification must come, where it is tried."""
HEARTBEAT: Final = 60.0
"""Seconds of silence after which the server is asked whether it is there."""
ANSWER: Final = 10.0
"""Seconds for the answer to one statement."""
PAUSE: Final = (1.0, 30.0)
"""Seconds between two connections: the first, and the longest, which doubling comes to; ±20 %."""

_LISTEN: Final = "hear of what other processes publish"
_TELL: Final = "tell other processes of what is published here"


class Listener:
    """One life's. `name`: the database, for errors; `usual`: a connection as publishers have one.

    `direct`: a connection to the server itself, where that is another one; None: `usual` is. `first`: no life was up
    before this one.
    """

    def __init__(
        self, name: str, usual: Connect, direct: Connect | None, publishing: Writer, wake: Tell, *, first: bool
    ) -> None:
        self._name, self._usual, self._direct = name, usual, direct
        self._publishing, self._wake, self._first = publishing, wake, first
        self._connection: TrioConnection | None = None
        self._wanted: set[str] = set()
        self._waiting = trio.CancelScope()
        """Around the wait for notifications."""
        self._untold: set[tuple[str, str | None]] = set()
        self._troubles: set[str] = set()

    # --- plain calls -------------------------------------------------------------------------------------------------

    def listen(self, table: str, subscription: str) -> None:
        """Hear of this table, from now on. Raises `LinkRefused` where its name is too long for a channel."""
        if len(table.encode()) > LONGEST:
            raise LinkRefused(
                f"subscription {subscription!r}, table {table!r}: listen_notify has a channel of the table's name, and "
                f"PostgreSQL takes {LONGEST} bytes for one; leave the schema to the search_path, or listen_notify out"
            )
        if table not in self._wanted:
            self._wanted.add(table)
            self._waiting.cancel()

    def tell(self, table: str, group: str | None) -> None:
        """Something was published there: have the others told, once for all that is told before it is said."""
        if (table, group) in self._untold:  # it has not begun: one connection inserts and notifies
            return
        self._untold.add((table, group))
        job = Notify(table, group)
        job.then = partial(self._told, job)
        self._publishing.submit(job)

    def _told(self, job: Notify) -> None:
        self._untold.remove((job.channel, job.group))
        if not isinstance(job.error, ConnectionBroken):  # that is the life's, which says so
            self._say(_TELL, job.error)

    def _say(self, what: str, error: BaseException | None) -> None:
        """Log it once when it begins to fail, and once when it works again."""
        if error is not None and what not in self._troubles:
            self._troubles.add(what)
            why = str(error).partition("\n")[0]
            _log.warning("%s: cannot %s; they find it by polling: %s", self._name, what, why)
        elif error is None and what in self._troubles:
            self._troubles.discard(what)
            _log.warning("%s: can %s again", self._name, what)

    # --- the connection ----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """In the first life connect, so that who gave a wrong URL is told; in a later one `run` does, and nobody waits.

        Raises as `_connect`. Cancellation: there is no connection.
        """
        if self._first:
            self._connection = await self._connect()

    async def _connect(self) -> TrioConnection:
        """A connection to which notifications come.

        Raises `LinkRefused` where they do not, which is so behind a pooler in transaction mode; `ConnectionBroken`.
        Cancellation: there is none.
        """
        connection = await (self._direct or self._usual)()
        try:
            if self._direct is not None:
                await self._try(connection)
            elif await is_pooled(connection):
                raise LinkRefused(
                    f"{self._name}: listen_notify needs a session of its own, and there is a pooler in front of the "
                    "server; give SqlBroker the server's own URL, or that of a pooler in session mode, as direct_url=…"
                )
        except psycopg.Error as error:
            connection.finish()
            raise ConnectionBroken(f"{self._name}: {str(error).partition(chr(10))[0]}") from error
        except BaseException:
            connection.finish()
            raise
        connection.add_notify_handler(lambda heard: self._wake(heard.channel, heard.payload or None))
        return connection

    async def _try(self, connection: TrioConnection) -> None:
        """Does it hear what is notified where the publishers are? Raises `LinkRefused`, `psycopg.Error`."""
        channel = f"trio-settlement {uuid.uuid4().hex}"
        await self._ask(connection, f"LISTEN {quote(channel)}")
        other = await self._usual()
        try:
            await other.execute(b"SELECT pg_notify(%s, '')", [channel])
            with trio.move_on_after(HEARING) as limit:
                while channel not in await connection.until_notified():
                    pass
        finally:
            other.finish()
        await self._ask(connection, f"UNLISTEN {quote(channel)}")
        if limit.cancelled_caught:
            raise LinkRefused(
                f"{self._name}: nothing is heard at direct_url of what is notified here, within {HEARING:g} s; it must "
                "name the same database, and the server itself or a pooler in session mode"
            )

    async def run(self) -> None:
        """Hear, until cancelled. Cancellation: the connection is closed."""
        pause = PAUSE[0]
        try:
            while True:
                since = trio.current_time()
                try:
                    if self._connection is None:
                        with trio.fail_after(ANSWER + HEARING):
                            self._connection = await self._connect()
                    await self._hear()
                except (psycopg.Error, ConnectionBroken, LinkRefused, trio.TooSlowError) as error:
                    self._say(_LISTEN, error if str(error) else TimeoutError("no answer in time"))
                self._close()
                if trio.current_time() > since + PAUSE[1]:  # it was connected
                    pause = PAUSE[0]
                await trio.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311 -- spread, not secrecy
                pause = min(2 * pause, PAUSE[1])
        finally:
            self._close()

    async def _hear(self) -> None:
        """Until the connection breaks. Raises `psycopg.Error`, `trio.TooSlowError`."""
        connection, heard = self._connection, set[str]()
        assert connection is not None, "it was opened"  # noqa: S101 -- an invariant of ours
        while True:
            while fresh := self._wanted - heard:
                channel = fresh.pop()
                await self._ask(connection, f"LISTEN {quote(channel)}")
                heard.add(channel)
                self._wake(channel, None)  # for what was published before
            self._say(_LISTEN, None)
            with trio.move_on_after(HEARTBEAT) as self._waiting:
                while True:
                    await connection.until_notified()
            await self._ask(connection, "SELECT 1")

    @staticmethod
    async def _ask(connection: TrioConnection, statement: str) -> None:
        with trio.fail_after(ANSWER):
            await connection.execute(statement.encode(), ())  # with values: percent signs are doubled

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.finish()
