"""Whose turn it is, on SQLite: a lock file beside the database (`flock`), one for each record table.

A write transaction would lock out everybody else for as long as messages are sent. The lock ends with the process,
however that ends; the file stays where it is: whoever deletes it lets a second one in.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

import trio

from links.errors import LinkRefused
from links.sql.sqlite.schema import name_in_file

__all__ = ["SqliteTurn"]


class SqliteTurn:
    """As `Turn`: for this table of this file."""

    def __init__(self, path: Path, table: str) -> None:
        self._path = os.path.realpath(path)
        self.name = f"{self._path}.outbox-{quote(name_in_file(table), safe='')}-lock"
        """The lock file."""
        self._descriptor: int | None = None

    async def tried(self) -> bool:
        """As `Turn.tried`. Cancellation: the thread is waited for, and `leave` lets go of it."""
        return await trio.to_thread.run_sync(self._try)

    def _try(self) -> bool:
        try:
            import fcntl  # noqa: PLC0415 -- not on Windows
        except ImportError:
            raise LinkRefused(
                "an outbox on SQLite needs flock, so that one process at a time sends records again, and this system "
                "has none"
            ) from None
        try:
            mode = os.stat(self._path).st_mode & 0o666  # noqa: PTH116 -- a text
            descriptor = os.open(self.name, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, mode)
        except OSError as error:
            raise self._refused(error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError as error:
            os.close(descriptor)
            raise self._refused(error) from error
        self._descriptor = descriptor
        if self._stands():
            return True
        self.leave()
        return False

    def _refused(self, error: OSError) -> LinkRefused:
        return LinkRefused(
            f"the lock file {self.name} cannot be locked: {error.strerror}; give this user the right to read and "
            "create it"
        )

    def _stands(self) -> bool:
        """Is it the file of this name still?"""
        if self._descriptor is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.name))  # noqa: PTH116 -- a text
        except OSError:
            return False

    async def holds(self) -> bool:
        """As `Turn.holds`."""
        return await trio.to_thread.run_sync(self._stands)

    def leave(self) -> None:
        """As `Turn.leave`. It is unlocked, too: a child that was forked has it open."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            import fcntl  # noqa: PLC0415 -- as above

            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
