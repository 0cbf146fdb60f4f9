"""The thread's side of SQLite: one connection, and one transaction for all jobs of a hop.

Everything here runs in a worker thread, one call at a time. BEGIN is always IMMEDIATE: a transaction that reads first
and writes later fails at once where somebody else wrote in between (lab/SQL.md 4).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from links.errors import LinkRefused
from links.sql.sqlite_jobs import Job
from links.sql.sqlite_times import now

__all__ = ["Busy", "BadText", "Connection", "Fatal"]

_BUSY_TIMEOUT = 0.1
"""Seconds that a thread waits for another process; then trio waits."""

_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_FATAL = (
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_READONLY,
)
