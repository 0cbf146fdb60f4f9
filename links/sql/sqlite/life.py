"""One life of a SQLite file: two connections, one for the queues and one for publishers.

Owns both writers. Hears: links that come and go. Tells: `until_over`; its end is an exception. A cancellation, and the
end of the publishing connection alone, let the links say goodbye first, within the time given; then both are closed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import trio

from links.errors import ConnectionBroken
from links.sql.sqlite.connection import SqliteConnection
from links.sql.thread_writer import HopTurn, ThreadWriter

__all__ = ["SqliteLife"]


class SqliteLife:
    """The connections of one life."""

    def __init__(self, path: Path, name: str) -> None:
        turn = HopTurn()
        self._name = name
        self.queues = ThreadWriter(SqliteConnection(path, name, "NORMAL"), name, turn)
        """A claim or settlement that a power cut forgets is a redelivery."""
        self.publishing = ThreadWriter(SqliteConnection(path, name, "FULL"), name, turn)
        """A publish that a power cut forgets would be a loss."""
        self._writers = (self.queues, self.publishing)
        self._links = 0
        self._changed = trio.Event()
        self._over = trio.Event()
        self._why: ConnectionBroken | None = None

    async def run(
        self, goodbye: float, up: Callable[[], AbstractContextManager[None]], started: Callable[[], None]
    ) -> None:
        """Open the file, serve until cancelled. Raises `LinkRefused`, `ConnectionBroken`.

        Cancellation: links say goodbye, then both connections are closed, within `goodbye`; a thread that hangs then is
        left alone with its connection, which it closes when it ends.
        """
        end = math.inf
        try:
            for writer in self._writers:
                await writer.open()
            async with trio.open_nursery() as nursery:
                for writer in self._writers:
                    nursery.start_soon(self._write, writer)
                try:
                    with up():
                        started()
                        while self._broken is None:
                            await self._changed.wait()
                finally:
                    end = trio.current_time() + goodbye
                    self._why = self._broken
                    self._over.set()
                    await self._wind_up(end, goodbye)  # noqa: ASYNC102 -- it shields itself, with a deadline
        finally:
            with trio.CancelScope(deadline=min(end, trio.current_time() + goodbye), shield=True):
                async with trio.open_nursery() as nursery:
                    for writer in self._writers:
                        nursery.start_soon(writer.shut)
        if self._why is not None:  # not what the winding up made of the other connection
            raise ConnectionBroken(str(self._why)) from self._why.__cause__

    async def until_over(self) -> ConnectionBroken:
        """Wait until this life is over, or about to be: links say goodbye now. Returns why.

        Cancellation: nothing was done.
        """
        await self._over.wait()
        return self._why or ConnectionBroken(f"{self._name} was closed")

    @property
    def _broken(self) -> ConnectionBroken | None:
        return next((writer.error for writer in self._writers if writer.error is not None), None)

    async def _write(self, writer: ThreadWriter) -> None:
        try:
            await writer.run()
        finally:
            self._change()

    async def _wind_up(self, end: float, goodbye: float) -> None:
        """Let the links say goodbye, while there is a connection for it; at nine tenths of the time, interrupt."""
        try:
            with trio.CancelScope(deadline=end - goodbye / 10, shield=True):
                while self._links and self.queues.error is None:
                    await self._changed.wait()
                for writer in self._writers:
                    writer.close()
                while not (self.queues.error and self.publishing.error):
                    await self._changed.wait()
        finally:
            for writer in self._writers:
                writer.close_at_once(end)

    @contextmanager
    def link(self) -> Generator[None, None, None]:
        """A link uses this life for the block."""
        self._links += 1
        try:
            yield
        finally:
            self._links -= 1
            self._change()

    def _change(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()
