"""Does a claim walk along an index? SQLite's own plan of the real statement is asked. Runs in the thread."""

from __future__ import annotations

import re
import sqlite3
from typing import Any

from links.sql.sqlite.ddl import in_work_index, index
from links.sql.sqlite.schema import explain, where
from links.sql.sqlite.statements import SqliteStatements, quote
from links.sql.table import Table, split

__all__ = ["unmarked", "unserved"]


def unserved(connection: sqlite3.Connection, table: Table[Any], texts: SqliteStatements) -> str | None:
    """One line with the index to create, where a claim reads more rows than it takes; None where it does not."""
    values: dict[str, int] = dict.fromkeys(("now", "due", "group", "room"), 0)
    plan = [str(row[3]) for row in explain(connection, texts.claim, values, "EXPLAIN QUERY PLAN")]
    asked = _asked(plan)
    if any("TEMP B-TREE" in step for step in plan):
        why = "reads and sorts every row that is due"
    elif table.group and table.group.lower() not in asked:
        why = "passes over the rows of other groups"
    elif (
        table.processed_at
        and table.processed_at.lower() not in asked
        and not _is_partial(connection, table, table.processed_at, plan)
    ):
        why = "passes over the rows that are finished"
    else:
        return None
    nullable = "" if table.retry_after not in texts.nullable else ", with retry_after NOT NULL"
    return f"a claim {why}, so it grows slow with the table; create the index{nullable}: " + index(
        split(table.name), table.roles, texts.order
    )


def _asked(plan: list[str]) -> set[str]:
    """The columns that an index is asked for by `=`, lower case: `SEARCH jobs USING INDEX i (grp=? AND due<?)`."""
    conditions = [step.rpartition(" (")[2].removesuffix(")") for step in plan if step.endswith(")")]
    parts = [part for condition in conditions for part in condition.split(" AND ")]
    return {part.removesuffix("=?").lower() for part in parts if part.endswith("=?")}


def unmarked(connection: sqlite3.Connection, table: Table[Any], texts: SqliteStatements) -> str | None:
    """One line with the index to create, where a FIFO claim reads its whole group to see whether a row is in work."""
    if not table.fifo or table.locked_until is None:
        return None
    plan = explain(connection, texts.leased, {"now": 0, "group": 0}, "EXPLAIN QUERY PLAN")
    if _is_partial(connection, table, table.locked_until, [str(row[3]) for row in plan]):
        return None
    return (
        "a claim reads every row of its FIFO group to see whether one is in work, so it grows slow with the group; "
        "create the index: " + in_work_index(split(table.name), table.roles)
    )


def _is_partial(connection: sqlite3.Connection, table: Table[Any], column: str, plan: list[str]) -> bool:
    """Does the index that the plan names hold those rows alone that this column, NULL or not, is to tell?"""
    schema, name = where(table.name)
    for row in connection.execute(f"PRAGMA {quote(schema)}.index_list({quote(name)})").fetchall():
        if row[4] and any(re.search(rf"INDEX {re.escape(row[1])}( \(|$)", step) for step in plan):
            text = f"SELECT sql FROM {quote(schema)}.sqlite_master WHERE type = 'index' AND name = ?"  # noqa: S608
            (made,) = connection.execute(text, (row[1],)).fetchone()
            condition = re.split(r"\bWHERE\b", made, flags=re.IGNORECASE)[-1].lower()
            return column.lower() in condition and "null" in condition
    return False
