"""The table that a queue on MySQL or MariaDB is best served by, as text with its reasons. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["DUE", "ddl", "in_work_index", "index", "outbox_ddl", "plain"]

_BIN: Final = "CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
DUE: Final = "DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6))"
"""How a column is declared that says when a row is due."""

_COLUMNS: Mapping[str, tuple[str, str]] = {
    "id": ("BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY", "the database gives it"),
    "group": (
        f"VARCHAR(190) {_BIN} NOT NULL",
        "the queue's name, for several queues in one table; 'a' is not 'A'",
    ),
    "priority": ("INT NOT NULL DEFAULT 0", "smaller first; a column that may be NULL does not order"),
    "retry_after": (DUE, "due from then on, in UTC, whatever a session's time zone is"),
    "attempt": ("INT NOT NULL DEFAULT 1", "the number of the next delivery: the first is 1"),
    "locked_until": ("DATETIME(6) NULL", "NULL or past: free; else leased until then, in UTC"),
    "processed_at": ("DATETIME(6) NULL", "NULL: not finished; finished rows stay, with the time in UTC"),
    "partition_key": (f"VARCHAR(255) {_BIN} NULL", "the delivery's key"),
    "headers": ("JSON NULL", "an object"),
    "payload": ("LONGBLOB NOT NULL", "the message's bytes"),
}
"""Each role's declaration and its reason, in the order of the columns."""

_LONGEST: Final = 64


def plain(name: str) -> str:
    """The identifier in backticks: so it is itself whatever words a version reserves, and in every SQL mode."""
    return "`" + name.replace("`", "``") + "`"


def _named(table: str, what: str) -> str:
    return plain(table[: _LONGEST - len(what) - 1] + "_" + what)


def _due(roles: Mapping[str, str], order: Sequence[str]) -> str:
    same = [roles[role] for role in ("group", "processed_at") if role in roles]
    return f"({', '.join(map(plain, [*same, *order]))})"


def index(parts: Sequence[str], roles: Mapping[str, str], order: Sequence[str]) -> str:
    """The CREATE INDEX that a claim walks along. `parts`: database, if any, and table; `order`: the queue's columns."""
    return f"CREATE INDEX {_named(parts[-1], 'due')} ON {'.'.join(map(plain, parts))} {_due(roles, order)};"


def in_work_index(parts: Sequence[str], roles: Mapping[str, str]) -> str:
    """The CREATE INDEX by which a claim finds the rows of a group that are in work. Arguments as of `index`."""
    name, on = _named(parts[-1], "in_work"), ".".join(map(plain, parts))
    return f"CREATE INDEX {name} ON {on} ({plain(roles['group'])}, {plain(roles['locked_until'])});"


def ddl(parts: Sequence[str], roles: Mapping[str, str], *, fifo: bool = False) -> str:
    """CREATE TABLE with its indexes, the same for its dead letters, each column with its reason; what is there stays.

    It is two statements, or one where the table has groups.
    """
    *schema, table = parts
    order = [roles[role] for role in ("priority", "retry_after", "id") if role in roles]
    indexes: list[str] = []
    if order != [roles["id"]] or "group" in roles or "processed_at" in roles:
        why = "-- a claim walks along it; it holds neither lease nor attempt, for every claim writes both"
        if "processed_at" in roles:
            why += ";\n    -- finished rows stand apart in it, so they cost a claim nothing"
        indexes.append(f"    {why}\n    INDEX {_named(table, 'due')} {_due(roles, order)}")
    if fifo and "locked_until" in roles:
        why = "-- first in, first out: a claim asks whether a row of its group is in work"
        columns = f"({plain(roles['group'])}, {plain(roles['locked_until'])})"
        indexes.append(f"    {why}\n    INDEX {_named(table, 'in_work')} {columns}")
    rows = "; the message is the whole row: put its columns in here, and into the dead-letter table too"
    texts = [f"-- the queue{rows if 'payload' not in roles else ''}\n{_create(parts, roles, indexes)}"]
    if "group" not in roles:
        why = "-- where dead letters move to: the same columns; it needs no index until it is a queue itself"
        texts.append(f"{why}\n{_create((*schema, f'dead_{table}'), roles, [])}")
    return "\n\n".join(texts) + "\n"


_OUTBOX: Mapping[str, tuple[str, str]] = {
    "id": ("BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY", "it travels with the message"),
    "name": (f"VARCHAR(190) {_BIN} NOT NULL", "what the record is for, as it is registered"),
    "sent_at": (DUE, "when it was recorded, or sent again, in UTC"),
    "processed_at": ("DATETIME(6) NULL", "NULL: not processed; else since when, in UTC"),
    "partition_key": _COLUMNS["partition_key"],
    "headers": _COLUMNS["headers"],
    "payload": _COLUMNS["payload"],
}


def outbox_ddl(parts: Sequence[str], roles: Mapping[str, str]) -> str:
    """The record table of an outbox, with an index of those that wait; what is there stays."""
    indexes: list[str] = []
    if "processed_at" in roles:
        why = "-- those that are to be sent again are found by it"
        columns = f"({plain(roles['processed_at'])}, {plain(roles['id'])})"
        indexes.append(f"    {why}\n    INDEX {_named(parts[-1], 'waiting')} {columns}")
    return f"-- the records of an outbox\n{_create(parts, roles, indexes, _OUTBOX)}\n"


def _create(
    parts: Sequence[str],
    roles: Mapping[str, str],
    indexes: Sequence[str],
    known: Mapping[str, tuple[str, str]] = _COLUMNS,
) -> str:
    columns = [
        f"    -- {reason}\n    {plain(roles[role])} {declared}"
        for role, (declared, reason) in known.items()
        if role in roles
    ]
    body = ",\n".join([*columns, *indexes])
    # the engine has transactions and row locks; the other ones have none
    return f"CREATE TABLE IF NOT EXISTS {'.'.join(map(plain, parts))} (\n{body}\n) ENGINE=InnoDB;"
