"""A psycopg connection that waits with trio: cursors, transactions, pipelines and COPY are psycopg's own.

It owns its socket. A cancellation amid a statement cancels that on the server and hears its end, shielded and for
`LANDING` at most; so the connection is usable when `Cancelled` goes on, or it is closed. Whether the statement took
effect is not known then. A transaction ends in spite of a cancellation: its COMMIT or ROLLBACK is shielded as long.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from typing import Any, Final, Self, TypeVar, cast

import trio
from psycopg import AsyncConnection, AsyncPipeline, AsyncTransaction, errors
from psycopg.conninfo import conninfo_to_dict, make_conninfo, timeout_from_conninfo
from psycopg.generators import notifies
from psycopg.pq import ExecStatus, PipelineStatus, PollingStatus, TransactionStatus
from psycopg.rows import TupleRow
from psycopg.waiting import Ready, Wait

from links.sql.postgres.waiting import Alone, Driven, Turns, drive_connecting, readable, ready

__all__ = ["LANDING", "TrioConnection"]

R = TypeVar("R")

_log = logging.getLogger("trio_settlement")

LANDING: Final = 5.0
"""Seconds for which the end of a statement that was cancelled, and that of a transaction, are waited for."""
_LAST_WORDS: Final = 4
"""How many reads find the end of what a server says before it goes."""


class TrioConnection(AsyncConnection[TupleRow]):
    """Made by `open`. One task at a time uses it, or they queue for `lock`, as psycopg's own do."""

    def __init__(self, pgconn: Any, *arguments: Any) -> None:
        super().__init__(pgconn, *arguments)
        self._turns = Turns()
        self.lock: Any = Alone()  # of an asyncio.Lock nothing else is in use
        self._why_ended = ""
        self.pooled = False
        """Is its session not ours alone? Told by who has asked."""
        self.add_notice_handler(self._hear)

    @classmethod
    async def open(cls, conninfo: str, **parameters: Any) -> TrioConnection:
        """Connect, in autocommit: to each host in turn, to each of its addresses.

        `parameters` stand above those of `conninfo` (https://www.postgresql.org/docs/current/libpq-connect.html);
        `connect_timeout`, in seconds, counts for each address. Raises `psycopg.OperationalError` of the last try.

        Cancellation: there is no connection.
        """
        given = conninfo_to_dict(conninfo, **parameters)
        error: Exception = errors.OperationalError("there is no host to connect to")
        for host in _hosts(given):
            try:
                for attempt in await _addresses(host):
                    try:
                        return await cls._try(make_conninfo("", **attempt), timeout_from_conninfo(attempt))
                    except errors.OperationalError as failed:
                        error = failed
            except OSError as unknown:
                error = errors.OperationalError(f"host {host['host']!r} cannot be found: {unknown}")
        raise error

    @classmethod
    async def _try(cls, conninfo: str, seconds: float) -> TrioConnection:
        with trio.move_on_after(seconds):
            connection = await drive_connecting(cls._connect_gen(conninfo))
            connection._autocommit = True  # noqa: SLF001 -- no statement is due for it, and set_autocommit() takes a lock
            return connection
        raise errors.ConnectionTimeout(f"no connection within {seconds:g} s")

    # --- psycopg's hooks -----------------------------------------------------------------------------------------

    async def wait(self, gen: Generator[Wait, Ready, R], interval: float = 0.0, timeout: float | None = None) -> R:  # noqa: ARG002, ASYNC109 -- psycopg's signature
        """Drive a generator of this connection to its end: every statement comes through here.

        Cancellation: before it has begun, nothing was sent; else as this module says.
        """
        if self.pgconn.transaction_status != TransactionStatus.ACTIVE:  # amid COPY the cancel must be heard to its end
            await trio.lowlevel.checkpoint_if_cancelled()
        driven = Driven(gen, self.pgconn, self._turns)
        self.lock.waits = self.pgconn.socket
        with contextlib.nullcontext() if timeout is None else trio.move_on_after(timeout):
            try:
                return await driven.to_end()
            except trio.Cancelled:
                await self._land(driven)  # noqa: ASYNC102 -- it shields itself, with a deadline
                raise
            finally:
                self.lock.waits = None
        raise getattr(errors, "_WaitTimeout", errors.OperationalError)("nothing came in time")

    async def _land(self, driven: Driven[Any]) -> None:
        """Cancel what runs and hear its end; where that does not come in time the connection is closed.

        A step of COPY ends before the statement does: whoever copies ends that, by psycopg's own way out.
        """
        if self.pgconn.pipeline_status != PipelineStatus.OFF:  # then nothing tells what is still to come
            self._give_up("a pipeline was cancelled")
            return
        if self.pgconn.transaction_status != TransactionStatus.ACTIVE:
            return
        with trio.move_on_after(LANDING, shield=True) as landing:
            try:
                await self.cancel_safe()
                await driven.to_end()
            except errors.QueryCanceled:
                pass
            except errors.Error as error:
                _log.debug("a statement that was cancelled ended otherwise: %s", error)
        if landing.cancelled_caught:
            self._give_up(f"a statement did not end after its cancellation, within {LANDING:g} s")

    def _give_up(self, why: str) -> None:
        _log.warning("a connection to PostgreSQL is closed: %s", why)
        self._finish()

    def was_ended(self) -> bool:
        """Has the other side ended it while it was idle? What has come is read; a plain call."""
        for _ in range(_LAST_WORDS):
            if self.closed or not readable(self.pgconn.socket):
                break
            try:
                self.pgconn.consume_input()
                self.pgconn.is_busy()  # what a server says before it goes is a notice, and parsed by this
            except errors.OperationalError as error:
                self._why_ended = self._why_ended or str(error).partition("\n")[0]
                self.finish()
        return self.closed

    def _hear(self, notice: errors.Diagnostic) -> None:
        if notice.severity_nonlocalized == "FATAL":
            self._why_ended = notice.message_primary or ""

    async def until_ended(self) -> str:
        """Wait until the other side ends it, while nobody uses it; gives why.

        Cancellation: it is as it was.
        """
        while not self.was_ended():
            self.lock.waits = self.pgconn.socket
            try:
                with contextlib.suppress(errors.OperationalError):
                    await ready(self.pgconn.socket, Wait.R)
            finally:
                self.lock.waits = None
        return self._why_ended or "the connection was closed"

    def finish(self) -> None:
        """Close it, a plain call; who waits on it hears `psycopg.OperationalError`."""
        self._closed = True
        self._finish()

    def _finish(self) -> None:
        if self.lock.waits is not None:  # also where libpq has closed it already: the next one gets the same number
            trio.lowlevel.notify_closing(self.lock.waits)
        self.pgconn.finish()

    async def cancel_safe(self, *, timeout: float = 30.0) -> None:  # noqa: ASYNC109 -- psycopg's signature
        """Ask the server to end the statement that runs; that it has ended is heard by who waits for it.

        Raises `psycopg.OperationalError`. Cancellation: the server was asked, or not.
        """
        if self.closed:
            return
        with trio.fail_after(timeout):
            try:
                asking = self.pgconn.cancel_conn()  # libpq 17
            except errors.NotSupportedError:
                await trio.to_thread.run_sync(self.cancel, abandon_on_cancel=True)
                return
            try:
                asking.start()
                while (status := asking.poll()) not in (PollingStatus.OK, PollingStatus.FAILED):
                    await ready(asking.socket, Wait.R if status == PollingStatus.READING else Wait.W)
                if status == PollingStatus.FAILED:
                    raise errors.OperationalError(f"the server was not asked to cancel: {asking.get_error_message()}")
            finally:
                asking.finish()  # nobody waits for its socket any more

    async def close(self) -> None:
        """Close it; who waits on it hears `psycopg.OperationalError`. There is no checkpoint here."""
        if not self.closed:
            self.finish()

    @asynccontextmanager
    async def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> AsyncGenerator[AsyncTransaction]:
        """As psycopg's, and its end is not cancelled: COMMIT or ROLLBACK are shielded, for `LANDING` at most.

        Raises `psycopg.OperationalError` where COMMIT was not answered in that time: nobody knows what became of it.
        """
        transaction = _Transaction(self, savepoint_name, force_rollback)
        async with transaction:
            yield transaction

    @asynccontextmanager
    async def pipeline(self) -> AsyncGenerator[AsyncPipeline]:
        """As psycopg's, and what fails at its very end, as a deferred constraint does, leaves a usable connection.

        psycopg leaves it amid the pipeline then, and every statement behind would get another one's answer.
        """
        all_were_sent = False
        try:
            async with super().pipeline() as pipeline:
                yield pipeline
                all_were_sent = True
        except (errors.Error, IndexError) as error:
            if not self.closed and self.pgconn.pipeline_status != PipelineStatus.OFF:
                self._leave_pipeline()
            if isinstance(error, IndexError) and all_were_sent:  # psycopg's own: more answers than statements
                raise errors.OperationalError("a pipeline has failed at its end") from error
            raise

    def _leave_pipeline(self) -> None:
        """Throw away what is left of it; where its end has not come yet, the connection is closed."""
        for _ in range(_LAST_WORDS):
            if self.pgconn.is_busy():
                break
            left = self.pgconn.get_result()
            if left is not None and left.status == ExecStatus.PIPELINE_SYNC:
                self.pgconn.exit_pipeline_mode()
                return
        self._give_up("a pipeline has failed at its end")

    def unprepare(self) -> None:
        """Forget what was prepared, and tell the server so behind the next statement.

        Not `execute("DEALLOCATE ALL")`: psycopg heeds that the first time only, and goes on with names that are gone.
        """
        self._prepared.clear()

    # --- LISTEN --------------------------------------------------------------------------------------------------

    async def until_notified(self) -> list[str]:
        """Wait for notifications on what this connection listens to: the channel of each, in order.

        Raises `psycopg.OperationalError` where the connection is lost. Cancellation: none was taken.
        """
        async with self.lock:
            while True:
                found = await self.wait(notifies(self.pgconn))
                if found:
                    return [each.relname.decode(errors="replace") for each in found]


class _Transaction(AsyncTransaction):
    async def __aenter__(self) -> Self:
        await trio.lowlevel.checkpoint_if_cancelled()
        with trio.move_on_after(LANDING, shield=True):  # amid BEGIN nobody could tell whether there is a transaction
            return await super().__aenter__()
        self._close()
        raise errors.OperationalError(f"BEGIN was not answered within {LANDING:g} s")

    async def __aexit__(self, *raised: object) -> bool:
        with trio.move_on_after(LANDING, shield=True):
            return await super().__aexit__(*cast("Any", raised))
        self._close()
        if raised[0] is None:
            raise errors.OperationalError(
                f"COMMIT was not answered within {LANDING:g} s: whether it took effect is not known"
            )
        return False

    def _close(self) -> None:
        connection: Any = self.connection
        connection._finish()  # noqa: SLF001 -- one of ours


# --- where to connect to


def _hosts(given: dict[str, Any]) -> list[dict[str, Any]]:
    """One set of parameters for each host that is named: `host`, `hostaddr` and `port` may be lists, between commas.

    Raises `psycopg.ProgrammingError` where they do not match in number.
    """
    lists = {name: str(given[name]).split(",") for name in ("host", "hostaddr", "port") if given.get(name) is not None}
    count = max((len(lists[name]) for name in ("host", "hostaddr") if name in lists), default=1)
    found: list[dict[str, Any]] = []
    for number in range(count):
        one = dict(given)
        for name, values in lists.items():
            if len(values) not in (1, count) or (name != "port" and len(values) != count):
                raise errors.ProgrammingError(f"{name} names {len(values)}, and there are {count} hosts")
            one[name] = values[number] if len(values) > 1 else values[0]
        found.append(one)
    return found


async def _addresses(one: dict[str, Any]) -> list[dict[str, Any]]:
    """The same for each address of its host: libpq itself would look it up, and block. Raises `OSError`."""
    host = one.get("host")
    if not host or host.startswith(("/", "@")) or one.get("hostaddr"):
        return [one]
    answers = await trio.socket.getaddrinfo(host, one.get("port") or 5432, type=trio.socket.SOCK_STREAM)
    return [{**one, "hostaddr": answer[4][0]} for answer in answers]
