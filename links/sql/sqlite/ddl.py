"""The table that a queue on SQLite is best served by, as text with its reasons. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from links.sql.sqlite.times import DEFAULTS

__all__ = ["ddl", "in_work_index", "index", "outbox_ddl", "plain"]

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEYWORDS = """ABORT ACTION ADD AFTER ALL ALTER ALWAYS ANALYZE AND AS ASC ATTACH AUTOINCREMENT BEFORE BEGIN BETWEEN BY
CASCADE CASE CAST CHECK COLLATE COLUMN COMMIT CONFLICT CONSTRAINT CREATE CROSS CURRENT CURRENT_DATE CURRENT_TIME
CURRENT_TIMESTAMP DATABASE DEFAULT DEFERRABLE DEFERRED DELETE DESC DETACH DISTINCT DO DROP EACH ELSE END ESCAPE EXCEPT
EXCLUDE EXCLUSIVE EXISTS EXPLAIN FAIL FALSE FILTER FIRST FOLLOWING FOR FOREIGN FROM FULL GENERATED GLOB GROUP GROUPS
HAVING IF IGNORE IMMEDIATE IN INDEX INDEXED INITIALLY INNER INSERT INSTEAD INTERSECT INTO IS ISNULL JOIN KEY LAST LEFT
LIKE LIMIT MATCH MATERIALIZED NATURAL NO NOT NOTHING NOTNULL NULL NULLS OF OFFSET ON OR ORDER OTHERS OUTER OVER
PARTITION PLAN PRAGMA PRECEDING PRIMARY QUERY RAISE RANGE RECURSIVE REFERENCES REGEXP REINDEX RELEASE RENAME REPLACE
RESTRICT RETURNING RIGHT ROLLBACK ROW ROWS SAVEPOINT SELECT SET TABLE TEMP TEMPORARY THEN TIES TO TRANSACTION TRIGGER
TRUE UNBOUNDED UNION UNIQUE UPDATE USING VACUUM VALUES VIEW VIRTUAL WHEN WHERE WINDOW WITH WITHOUT"""

_COLUMNS: Mapping[str, tuple[str, str]] = {
    "id": ("INTEGER PRIMARY KEY AUTOINCREMENT", "no id is given twice, so a row that moves finds its own free"),
    "group": ("TEXT NOT NULL", "the queue's name, for several queues in one table"),
    "priority": ("INTEGER NOT NULL DEFAULT 0", "smaller first; a column that may be NULL does not order"),
    "retry_after": (
        f"REAL NOT NULL DEFAULT {DEFAULTS['REAL']}",
        "due from then on, Unix seconds; the default is now; a column that may be NULL does not order",
    ),
    "attempt": ("INTEGER NOT NULL DEFAULT 1", "the number of the next delivery: the first is 1"),
    "locked_until": ("REAL", "NULL or past: free; else leased until then, Unix seconds"),
    "processed_at": ("REAL", "NULL: not finished; finished rows stay, with the time in Unix seconds"),
    "partition_key": ("TEXT", "the delivery's key"),
    "headers": ("TEXT", "a JSON object"),
    "payload": ("BLOB NOT NULL", "the message's bytes; last, so that the rest is read without it"),
}
"""Each role's declaration and its reason, in the order of the columns."""


def plain(name: str) -> str:
    """The identifier as a person would write it: in double quotes where it must be."""
    if _PLAIN.fullmatch(name) and not re.search(rf"\b{name}\b", _KEYWORDS, re.IGNORECASE):
        return name
    return '"' + name.replace('"', '""') + '"'


def index(parts: Sequence[str], roles: Mapping[str, str], order: Sequence[str], *, new: bool = True) -> str:
    """The CREATE INDEX that a claim walks along. `parts`: schema, if any, and table; `order`: the queue's columns.

    Not `new`: an index of this name may be there, and stays.
    """
    *schema, table = parts
    columns = [roles["group"], *order] if "group" in roles else list(order)
    name = ".".join(map(plain, (*schema, f"{table}_due")))
    where = f" WHERE {plain(roles['processed_at'])} IS NULL" if "processed_at" in roles else ""
    create = "CREATE INDEX" if new else "CREATE INDEX IF NOT EXISTS"
    return f"{create} {name} ON {plain(table)} ({', '.join(map(plain, columns))}){where};"


def in_work_index(parts: Sequence[str], roles: Mapping[str, str], *, new: bool = True) -> str:
    """The CREATE INDEX by which a claim finds the rows of a group that are in work. Arguments as of `index`."""
    *schema, table = parts
    create = "CREATE INDEX" if new else "CREATE INDEX IF NOT EXISTS"
    name = ".".join(map(plain, (*schema, f"{table}_in_work")))
    return (
        f"{create} {name} ON {plain(table)} ({plain(roles['group'])}) WHERE {plain(roles['locked_until'])} IS NOT NULL;"
    )


def ddl(parts: Sequence[str], roles: Mapping[str, str], *, fifo: bool = False) -> str:
    """CREATE TABLE, the same for its dead letters, and the index, each column with its reason; what is there stays."""
    *schema, table = parts
    ordering = [roles[role] for role in ("priority", "retry_after", "id") if role in roles]
    queue = _create((*schema, table), roles)
    texts = [f"-- the queue{_ROWS if 'payload' not in roles else ''}\n{queue}"]
    if ordering != [roles["id"]] or "group" in roles or "processed_at" in roles:
        why = "-- a claim walks along it; it holds neither lease nor attempt, for every claim writes both"
        if "processed_at" in roles:
            why += ";\n-- finished rows are not in it, so they cost a claim nothing"
        texts.append(f"{why}\n{index(parts, roles, ordering, new=False)}")
    if fifo and "locked_until" in roles:
        why = "-- first in, first out: a claim asks whether a row of its group is in work; it holds those rows alone"
        texts.append(f"{why}\n{in_work_index(parts, roles, new=False)}")
    if "group" not in roles:
        why = "-- where dead letters move to: the same columns; it needs no index until it is a queue itself"
        texts.append(f"{why}\n{_create((*schema, f'dead_{table}'), roles)}")
    return "\n\n".join(texts) + "\n"


_ROWS = "; the message is the whole row: put its columns in here, and into the dead-letter table too"


_OUTBOX: Mapping[str, tuple[str, str]] = {
    "id": ("INTEGER PRIMARY KEY AUTOINCREMENT", "it travels with the message; no id is given twice"),
    "name": ("TEXT NOT NULL", "what the record is for, as it is registered"),
    "sent_at": (
        f"REAL NOT NULL DEFAULT {DEFAULTS['REAL']}",
        "when it was recorded, or sent again, Unix seconds; the default is now",
    ),
    "processed_at": ("REAL", "NULL: not processed; else since when, Unix seconds"),
    "partition_key": _COLUMNS["partition_key"],
    "headers": _COLUMNS["headers"],
    "payload": _COLUMNS["payload"],
}


def outbox_ddl(parts: Sequence[str], roles: Mapping[str, str]) -> str:
    """The record table of an outbox, and an index of those that wait; what is there stays."""
    *schema, table = parts
    texts = [f"-- the records of an outbox\n{_create(parts, roles, _OUTBOX)}"]
    if "processed_at" in roles:
        name, where = ".".join(map(plain, (*schema, f"{table}_waiting"))), plain(roles["processed_at"])
        texts.append(
            f"-- those that are to be sent again are found by it\nCREATE INDEX IF NOT EXISTS {name} ON {plain(table)} "
            f"({plain(roles['id'])}) WHERE {where} IS NULL;"
        )
    return "\n\n".join(texts) + "\n"


def _create(parts: Sequence[str], roles: Mapping[str, str], known: Mapping[str, tuple[str, str]] = _COLUMNS) -> str:
    columns = [
        f"    -- {reason}\n    {plain(roles[role])} {declared}"
        for role, (declared, reason) in known.items()
        if role in roles
    ]
    body = ",\n".join(columns)
    return f"CREATE TABLE IF NOT EXISTS {'.'.join(map(plain, parts))} (\n{body}\n);"
