"""One connection to MySQL or MariaDB, as a task has it: each call runs in a thread, whose end is waited for.

Cancellation, anywhere: the connection is closed, the thread ends, and what it asked for is killed on the server
(https://dev.mysql.com/doc/refman/en/kill.html); so no thread is left with a connection that somebody else gets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

import trio

from links.errors import LinkError
from links.sql.mysql.session import MysqlSession

__all__ = ["LANDING", "New", "TrioSession"]

T = TypeVar("T")

New = Callable[[], MysqlSession]
"""Makes a session that is not open yet."""

LANDING: Final = 5.0
"""Seconds for which the end of a call that was interrupted is waited for, and for the server to hear of it."""


class TrioSession:
    """One connection; not open yet."""

    def __init__(self, new: New) -> None:
        self._new = new
        self.session = new()

    async def open(self) -> None:
        """Connect. Raises `LinkRefused`, `ConnectionBroken`. Cancellation: there is none."""
        await self._thread(self.session.open)

    @property
    def closed(self) -> bool:
        """Is it of no more use, as far as was heard?"""
        return self.session.closed

    def was_ended(self) -> bool:
        """As `MysqlSession.was_ended`."""
        return self.session.was_ended()

    async def run(self, call: Callable[[MysqlSession], T]) -> T:
        """Call this with the session, in a thread. Cancellation: as this module says."""
        return await self._thread(partial(call, self.session))

    async def _thread(self, call: Callable[[], T]) -> T:
        token, landed, came = trio.lowlevel.current_trio_token(), trio.Event(), list[Any]()

        def deliver(outcome: Any) -> None:
            came.append(outcome)
            with contextlib.suppress(trio.RunFinishedError):  # it was left alone, and trio has ended meanwhile
                token.run_sync_soon(landed.set)

        trio.lowlevel.start_thread_soon(call, deliver)
        try:
            await landed.wait()
        except trio.Cancelled:
            asked = not landed.is_set()
            self.session.interrupt()
            with trio.move_on_after(LANDING, shield=True):
                await landed.wait()
                if asked and hasattr(self.session, "server"):
                    await self._kill(self.session.server.number)
            self.close()
            raise
        result: T = came[0].unwrap()
        return result

    async def _kill(self, number: int) -> None:
        """End what the server does for us, by another connection. Cancellation: a thread tries, and is left alone."""
        limiter = trio.CapacityLimiter(1)  # a thread that hangs shall not take one of everybody's
        await trio.to_thread.run_sync(partial(_kill, self._new(), number), abandon_on_cancel=True, limiter=limiter)

    async def until_ended(self) -> str:
        """Wait until the server has ended it, while nothing is asked; gives why. Cancellation: it is as it was."""
        if self.session.was_ended():
            await trio.lowlevel.checkpoint()
        else:
            try:
                await trio.lowlevel.wait_readable(self.session.socket)
            except (trio.ClosedResourceError, OSError, LinkError):
                return "the connection was closed"
        return "the server has ended the connection"

    def close(self) -> None:
        """Close it; a plain call. What was not committed is rolled back."""
        if self.session.closed:
            self.session.close()
            return
        self.session.interrupt()
        trio.lowlevel.start_thread_soon(self.session.close, lambda _: None)


def _kill(session: MysqlSession, number: int) -> None:
    try:
        session.open()
        session.say(f"KILL {number}")
    except Exception:  # noqa: BLE001, S110 -- it has ended, or the server cannot be reached, and will hear of the socket
        pass
    finally:
        session.close()
