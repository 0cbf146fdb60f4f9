"""One life of a database: two connections, one for the queues and one for publishers, and its news where it has any.

Owns both writers, and what hears the news. Hears: links that come and go. Tells: `until_over`; its end is an exception.
A cancellation, and the end of the publishing connection alone, let the links say goodbye first, within the time given;
then all are closed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import trio

from links.errors import ConnectionBroken
from links.sql.dialect import News, Writer

__all__ = ["Life", "LivingWriter"]


class LivingWriter(Writer, Protocol):
    """A writer, as its life sees it: a connection that is opened, runs and is closed."""

    async def open(self) -> None:
        """Connect. Raises `LinkRefused`, `ConnectionBroken`. Cancellation: connected or not; `shut` closes it."""
        ...

    async def run(self) -> None:
        """Until `close` and the last job, or until the connection has failed: then `error` says why.

        Cancellation: not heard; `close` is.
        """
        ...

    def close(self) -> None:
        """End `run` when nothing is pending."""
        ...

    def close_at_once(self, deadline: float) -> None:
        """End `run` by then: what runs is interrupted, what waits has failed."""
        ...

    async def shut(self) -> None:
        """Close the connection, after `run`. Cancellation: it is closed all the same."""
        ...


class Life:
    """The connections of one life. `name`: the database, for errors."""

    def __init__(self, name: str, queues: LivingWriter, publishing: LivingWriter, news: News | None = None) -> None:
        self._name = name
        self.queues = queues
        self.publishing = publishing
        self.news = news
        self._writers = (queues, publishing)
        self._links = 0
        self._changed = trio.Event()
        self._over = trio.Event()
        self._why: ConnectionBroken | None = None

    async def run(
        self, goodbye: float, up: Callable[[], AbstractContextManager[None]], started: Callable[[], None]
    ) -> None:
        """Connect, serve until cancelled. Raises `LinkRefused`, `ConnectionBroken`.

        Cancellation: links say goodbye, then both connections are closed, within `goodbye`; a thread that hangs then is
        left alone with its connection, which it closes when it ends.
        """
        end = math.inf
        try:
            for writer in self._writers:
                await writer.open()
            if self.news is not None:
                await self.news.open()
            async with trio.open_nursery() as nursery:
                for writer in self._writers:
                    nursery.start_soon(self._write, writer)
                if self.news is not None:
                    nursery.start_soon(self.news.run)
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
                    nursery.cancel_scope.cancel()  # the writers are shielded, and end by themselves
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

    async def _write(self, writer: LivingWriter) -> None:
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
