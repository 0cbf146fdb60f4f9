"""What a DEFAULT gives: SQLite itself is asked, in a database of its own in memory, so that no spelling is missed."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

__all__ = ["evaluate"]


def evaluate(kind: str, default: str) -> Any:
    """The value that a column declared as `kind` gets by this default; None where it is NULL, or no default at all.

    A number or text as the column's type makes it: '5' in an INTEGER column is 5.
    """
    with closing(sqlite3.connect(":memory:")) as memory:
        # a lone word and a text in double quotes are taken without parentheses, an expression needs them
        for spelled in (f"({default}\n)", default):
            try:
                memory.execute(f"CREATE TABLE t (v {kind} DEFAULT {spelled})")
                memory.execute("INSERT INTO t DEFAULT VALUES")
                return memory.execute("SELECT v FROM t").fetchone()[0]
            except sqlite3.Error:
                continue
    return None
