"""Are the files that were opened still those that stand at their names?

In WAL mode SQLite does not notice that its files were taken away, by `rm`, or by another process that closes the
database when our locks are gone (closing any descriptor of the file drops them): it would go on and confirm what is
lost. The database, its `-wal` and its `-shm` are there from our first write until our last connection closes, and keep
their inodes through a checkpoint and a VACUUM.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TypeAlias

__all__ = ["SqliteWatch"]

_QUIET = 3_000_000_000
"""Nanoseconds since the folder was last changed, before its time is believed to tell the next change: file systems keep
it to 2 s at worst."""

_OFTEN = 1.0
"""Seconds for which it is believed at most: a file system that keeps no such time is found out."""

Mark: TypeAlias = tuple[int, int, int]


class SqliteWatch:
    """The three files of one database. Made after the first write; called in the thread.

    Each look is one `stat`, of the folder, while nothing in that was created, removed or renamed; else four.
    """

    def __init__(self, path: Path, opened: tuple[int, int]) -> None:
        """`opened`: device and inode of the database before it was opened. Raises `OSError` where a file is missing."""
        self._path = path
        real = Path(os.path.realpath(path))
        self._folder = str(real.parent)
        self._direct = real == path
        """No symbolic link stands in the path: what it names changes with the folder alone."""
        self._files = {
            str(path): opened,
            **{name: _identity(name) for name in (f"{real}-wal", f"{real}-shm")},
        }
        self._believed: Mark = (0, 0, 0)
        self._until = 0.0

    def look(self) -> str | None:
        """What has happened to the files; None: nothing."""
        try:
            found = os.stat(self._folder)  # noqa: PTH116 -- half the price of Path.stat, and this is every hop
            mark = (found.st_dev, found.st_ino, found.st_mtime_ns)
            if mark == self._believed and time.monotonic() < self._until:
                return None
            for name, identity in self._files.items():
                if _identity(name) != identity:
                    return f"the file was replaced by another: {Path(name).name}"
        except OSError as error:
            gone = Path(error.filename or self._folder).name
            return f"the file is gone: {gone}: {error.strerror}"
        if self._direct and time.time_ns() - found.st_mtime_ns > _QUIET:
            self._believed, self._until = mark, time.monotonic() + _OFTEN
        return None


def _identity(name: str) -> tuple[int, int]:
    found = os.stat(name)  # noqa: PTH116 -- as above
    return found.st_dev, found.st_ino
