"""The pieces of work that a link or a publisher hands to the writer. `run` is called in the thread, `finish` in trio.

A job is carried out inside somebody's transaction, beside others, and may be run again after a ROLLBACK: so `run` sets
results and changes nothing else. A single statement that fails undoes itself and harms no other; what takes more than
one stands in a savepoint.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import trio

from links.abc import Received, Verdict
from links.errors import LeaseLost, NotApplied
from links.sql.sqlite_schema import read_schema
from links.sql.sqlite_statements import Statements
from links.sql.sqlite_times import Encoder, later
from settlement.sql import Delay, Finish, MoveToGroup, MoveToTable, PutBack, Verb

__all__ = ["BINDING", "BadText", "Call", "Claim", "Extend", "Insert", "Job", "Lease", "Release", "Said", "Settle"]

BINDING = (sqlite3.Error, ValueError, OverflowError)
"""What a statement or the binding of its values raises: `ValueError` for a text with lone surrogates, say."""


class BadText(bytes):
    """A text of the database that is not UTF-8."""

    __slots__ = ()


def text(value: bytes) -> str | BadText:
    """The `text_factory` of our connections: a text that cannot be decoded is one row's trouble, not the claim's."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return BadText(value)
