"""What an error of SQLite means to us, by its primary code. Pure."""

from __future__ import annotations

import sqlite3

__all__ = ["BINDING", "is_busy", "is_fatal", "is_of_the_row", "is_weather", "primary_code"]

BINDING = (sqlite3.Error, ValueError, OverflowError)
"""What a statement and the binding of its values raise, having changed nothing: lone surrogates are a `ValueError`."""

_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})
_SPACE = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_NOMEM})
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


def is_weather(error: BaseException) -> bool:
    """The disk is full or fails: no word on what was asked, and it may be otherwise in a while."""
    return primary_code(error) in _SPACE or primary_code(error) == sqlite3.SQLITE_IOERR


def is_of_the_row(error: BaseException) -> bool:
    """Did a statement fail by its row, with what its table, its triggers and its constraints say of it?"""
    return not is_busy(error) and not is_fatal(error) and primary_code(error) not in _SPACE
