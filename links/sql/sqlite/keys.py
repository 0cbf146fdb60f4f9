"""The keys that this process holds in each file, and the lock file that keeps other processes out.

SQLite has no locks by name. So the keys in work are in this process's memory, shared by all of its brokers, and a file
beside the database is locked while one of them is in use (`flock`): a second process is refused. The lock ends with
the process, however that ends. The lock file stays where it is: whoever deletes it lets a second process in.

Used in threads, but for `leave` and `free`, which are plain calls that wait for no disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Container, Hashable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["LockedOut", "Ring"]

Identity: TypeAlias = tuple[int, int]

_TRIES = 3
"""So often is the lock file made again that somebody deletes while it is locked."""


class LockedOut(Exception):
    """Another process has the file, or it cannot be locked: why, and the way out."""


def _identity(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino


class _File:
    """One database file of this process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.name = f"{path}.advisory-lock"
        self.rings: set[Ring] = set()
        self.held: dict[Hashable, Ring] = {}
        self.descriptor: int | None = None
        self.locking = threading.Lock()

    def lock(self) -> None:
        """Lock the lock file, unless it is locked. Raises `LockedOut`."""
        with self.locking:
            if self.descriptor is not None and self._stands(self.descriptor):
                return
            new = self._locked()
            with _FILES.guard:
                old, self.descriptor = self.descriptor, new if self.rings else None
            for each in (old, None if self.descriptor is not None else new):
                _close(each)

    def _stands(self, descriptor: int) -> bool:
        """Is it the file of this name still?"""
        try:
            return _identity(os.fstat(descriptor)) == _identity(os.stat(self.name))  # noqa: PTH116 -- each claim
        except OSError:
            return False

    def _locked(self) -> int:
        try:
            import fcntl  # noqa: PLC0415 -- not on Windows
        except ImportError:
            raise LockedOut(
                "advisory locks on SQLite need flock, and this system has none; use Lease(seconds)"
            ) from None
        for _ in range(_TRIES):
            try:
                mode = os.stat(self.path).st_mode & 0o666  # noqa: PTH116 -- as above
                descriptor = os.open(self.name, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, mode)
            except OSError as error:
                raise self._refused(error) from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise LockedOut(
                    f"another process has advisory locks in this file (its lock file is {self.name}), and on SQLite "
                    "one process alone can; run one process, or use Lease(seconds)"
                ) from None
            except OSError as error:
                os.close(descriptor)
                raise self._refused(error) from error
            if self._stands(descriptor):
                return descriptor
            os.close(descriptor)
        raise LockedOut(f"the lock file {self.name} is deleted all the time; leave it where it is")

    def _refused(self, error: OSError) -> LockedOut:
        return LockedOut(
            f"the lock file {self.name} cannot be locked: {error.strerror}; give this user the right to read and "
            "create it, or use Lease(seconds)"
        )


class _Files(dict[Identity, _File]):
    """Those of this process, by what they are, not by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.guard = threading.Lock()

    def forget(self) -> None:
        """In a child that was forked: its parent's locks are not its own."""
        self.guard = threading.Lock()
        for file in self.values():
            for ring in file.rings:
                ring.gone()
            if file.descriptor is not None:
                os.close(file.descriptor)
        self.clear()


def _close(descriptor: int | None) -> None:
    """Unlock it, too: a child that is just being forked has it open for a moment."""
    if descriptor is not None:
        import fcntl  # noqa: PLC0415 -- as above

        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


_FILES = _Files()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_FILES.forget)


class Ring:
    """What one user holds in one file: rows, each with a key. Once it has left it holds nothing more."""

    def __init__(self, path: Path) -> None:
        self._path = os.path.realpath(path)
        self._file: _File | None = None
        self._left = False
        self._rows: dict[Any, Sequence[Hashable]] = {}

    def enter(self) -> None:
        """See to it that this process has the file. Raises `LockedOut`."""
        try:
            identity = _identity(os.stat(self._path))  # noqa: PTH116 -- each claim
        except OSError as error:
            raise LockedOut(f"{self._path}: {error.strerror}") from error
        with _FILES.guard:
            if self._left:
                raise LockedOut("it was left meanwhile")
            file = self._file
            if file is None:
                file = self._file = _FILES.setdefault(identity, _File(self._path))
                file.rings.add(self)
        try:
            file.lock()
        except LockedOut:
            self._leave()
            raise

    @property
    def held(self) -> Container[Hashable]:
        """The keys that are held in this file now, by whomever."""
        file = self._file
        return () if file is None else file.held

    def take(self, row: Any, keys: Sequence[Hashable]) -> bool:
        """Hold this row by all of these keys, or by none where one is held, or this has left."""
        with _FILES.guard:
            file = self._file
            if file is None or any(key in file.held for key in keys):
                return False
            file.held.update(dict.fromkeys(keys, self))
            self._rows[row] = keys
            return True

    def free(self, rows: Sequence[Any]) -> None:
        """The keys of these rows are free."""
        with _FILES.guard:
            for row in rows:
                for key in self._rows.pop(row, ()):
                    if self._file is not None:
                        del self._file.held[key]

    def free_all(self) -> None:
        """No row is held."""
        self.free([*self._rows])

    def leave(self) -> None:
        """No row is held, now or ever; the last one of this process unlocks the file."""
        self._left = True
        self._leave()

    def _leave(self) -> None:
        self.free_all()
        with _FILES.guard:
            file, self._file = self._file, None
            if file is None:
                return
            file.rings.discard(self)
            if file.rings:
                return
            for identity in [identity for identity, each in _FILES.items() if each is file]:
                del _FILES[identity]
            descriptor, file.descriptor = file.descriptor, None
        _close(descriptor)

    def gone(self) -> None:
        """As `leave`, in a child that was forked."""
        self._left, self._file = True, None
        self._rows.clear()
