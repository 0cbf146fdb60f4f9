"""What an error of SQLite means to us, by its primary code. Pure."""

from __future__ import annotations

import sqlite3

__all__ = ["BINDING", "is_busy", "is_fatal", "primary_code"]

BINDING = (sqlite3.Error, ValueError, OverflowError)
"""What a statement and the binding of its values raise, having changed nothing: lone surrogates are a `ValueError`."""

_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_FATAL = frozenset(
    {
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_READONLY,
    }
)


def primary_code(error: BaseException) -> int:
    """The primary result code; 0 where the error is not SQLite's."""
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)
    return code & 0xFF


def is_busy(error: BaseException) -> bool:
    """Another connection holds a lock: try again."""
    return primary_code(error) in _BUSY


def is_fatal(error: BaseException) -> bool:
    """The file or its disk failed, or we were told to stop: the connection is of no more use."""
    return primary_code(error) in _FATAL
