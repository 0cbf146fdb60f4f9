"""One life of a SQLite file: two connections, one for the queues and one for publishers.

Owns both writers. Hears: links that come and go. Tells nobody; its end is an exception. A cancellation lets the links
say goodbye first, within the time given, and then closes both connections.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import trio

from links.errors import ConnectionBroken
from links.sql.sqlite_writer import Turn, Writer

__all__ = ["SqliteLife"]


class SqliteLife:
    """The connections of one life."""

    def __init__(self, path: Path, name: str) -> None:
        turn = Turn()
        self.queues = Writer(path, name, "NORMAL", turn)
        """A claim or settlement that a power cut forgets is a redelivery."""
        self.publishing = Writer(path, name, "FULL", turn)
        """A publish that a power cut forgets would be a loss."""
        self._writers = (self.queues, self.publishing)
        self._links = 0
        self._changed = trio.Event()

    async def run(
        self, goodbye: float, up: Callable[[], AbstractContextManager[None]], started: Callable[[], None]
    ) -> None:
        """Open the file, serve until cancelled. Raises `LinkRefused`, `ConnectionBroken`.

        Cancellation: links say goodbye, then both connections are closed, within `goodbye`.
        """
        broken: ConnectionBroken | None = None
        try:
            for writer in self._writers:
                await writer.open()
            async with trio.open_nursery() as nursery:
                for writer in self._writers:
                    nursery.start_soon(self._write, writer)
                try:
                    with up():
                        started()
                        while (broken := self._broken) is None:
                            await self._changed.wait()
                finally:
                    await self._wind_up(goodbye)  # noqa: ASYNC102 -- it shields itself, with a deadline
        finally:
            with trio.move_on_after(goodbye, shield=True):
                for writer in self._writers:
                    await writer.shut()
        if broken is not None:  # not what the winding up made of the other connection
            raise ConnectionBroken(str(broken)) from broken.__cause__

    @property
    def _broken(self) -> ConnectionBroken | None:
        return next((writer.error for writer in self._writers if writer.error is not None), None)

    async def _write(self, writer: Writer) -> None:
        try:
            await writer.run()
        finally:
            self._change()

    async def _wind_up(self, goodbye: float) -> None:
        if self._broken is None:
            with trio.move_on_after(goodbye, shield=True):
                while self._links:
                    await self._changed.wait()
                for writer in self._writers:
                    writer.close(at_once=False)
                while not all(writer.error for writer in self._writers):
                    await self._changed.wait()
        for writer in self._writers:
            writer.close(at_once=True)

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
