"""The SQL texts of the forms that hold a connection, on MySQL and MariaDB. Pure.

`links.sql.mysql.statements` says what is the same in every form.
"""

# ruff: noqa: S608 -- identifiers are quoted, values are bound

from __future__ import annotations

from typing import Any

from links.sql.mysql.schema import MysqlSchema, quote
from links.sql.mysql.statements import LOCKED, NOW, Rows, quoted
from links.sql.table import Table
from settlement.sql import AdvisoryLock

__all__ = ["AdvisoryStatements", "HeldStatements", "RowLockStatements"]


class HeldStatements(Rows):
    """What the texts of the forms have in common that hold a connection; one whose column the table has not is empty.

    The rows that are meant are bound as `ids`.
    """

    counts = True
    """Does a settlement count the attempt?"""
    finish: str
    """Mark as processed, or delete."""
    put_back: str
    """Count the attempt."""
    delay: str
    """Not due before `micros` have passed."""
    regroup: str
    """The rows are of group `to`."""

    def __init__(self, table: Table[Any], schema: MysqlSchema) -> None:
        super().__init__(table, schema)
        count = self.counted if self.counts else ""
        self.put_back = self.set(count)
        self.finish = self.put(table.processed_at, NOW) or self.delete
        self.delay = self.due_later(count)
        self.regroup = self.put(table.group, "%(to)s")


class RowLockStatements(HeldStatements):
    """Every text of the row-lock form for one table."""

    events = ("look", "claim", "again", "chosen", "finish", "put_back", "delay", "regroup")
    claim: str
    """Lock up to `room` due rows of `group`, but for `over`; gives id, attempt after the next count, and so on."""
    again: str
    """Lock those of `ids` that are due still, behind a COMMIT; gives their ids."""

    def __init__(self, table: Table[Any], schema: MysqlSchema) -> None:
        super().__init__(table, schema)
        selected = self.selected()
        self.claim = f"SELECT {selected} {self.due()} {LOCKED}"
        self.chosen = (
            f"SELECT {selected} FROM {self.name} AS j WHERE j.{self.id} IN %(ids)s AND {self.claimable} {LOCKED}"
        )
        self.again = (
            f"SELECT j.{self.id} FROM {self.name} AS j WHERE j.{self.id} IN %(ids)s AND {self.claimable} {LOCKED}"
        )


class AdvisoryStatements(HeldStatements):
    """Every text of the advisory form for one table; `lock` has the columns of its key.

    The server's lock is named after the database and the key, so that all programs mean the same one; where that is
    longer than the 64 characters that a name may have, after its SHA-256
    (https://dev.mysql.com/doc/refman/en/locking-functions.html).
    """

    counts = False
    events = ("look", "candidates", "take", "taken", "uncount", "finish", "delay", "regroup")
    candidates: str
    """Id, lock and attempt of the first `room` due rows whose lock nobody holds, in the queue's order."""
    take: str
    """Count the attempt of the row `id`, if it is claimable still and the lock was won; empty where nothing counts."""
    taken: str
    """What a claim gives of the row `id`, if it is claimable still and the lock was won."""
    uncount: str
    """The attempt is what it was before the claim."""

    def __init__(self, table: Table[Any], schema: MysqlSchema, lock: AdvisoryLock) -> None:
        super().__init__(table, schema)
        text = ", ".join(quoted(part) if isinstance(part, str) else self._read(part.name) for part in lock.parts)
        name = f"CONCAT(LOWER(DATABASE()), '.', {text})"
        name = f"IF(CHAR_LENGTH({name}) > 64, SHA2({name}, 256), {name})"
        count = quote(table.attempt) if table.attempt else ""
        before = f"COALESCE(j.{count}, 1)" if count else "NULL"
        self.candidates = f"SELECT j.{self.id}, {name}, {before} {self.due(f' AND IS_FREE_LOCK({name})')}"
        one = f"j.{self.id} = %(id)s AND {self.claimable} AND @won = 1"
        self.take = f"UPDATE {self.name} AS j SET j.{count} = COALESCE(j.{count}, 1) + 1 WHERE {one}" if count else ""
        self.taken = f"SELECT {self.selected(counts=False)} FROM {self.name} AS j WHERE {one}"
        self.uncount = self.set(self.uncounted)

    def _read(self, column: str) -> str:
        """The column as a text that is the same in every session; NULL is an empty one."""
        name = f"j.{quote(column)}"
        text = f"HEX({name})" if self.schema[column].binary else f"CAST({name} AS CHAR)"
        return f"COALESCE({text}, '')"
