"""What a user says about a queue table: which column plays which role. Pure.

The table is the user's own: nothing here creates or alters one. `Table.ddl` is a text to run or to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar, overload

import attrs

from links.sql.sqlite.ddl import ddl as sqlite_ddl

__all__ = ["Table", "split"]

R = TypeVar("R")

_ROLES = (
    "id",
    "payload",
    "group",
    "priority",
    "partition_key",
    "retry_after",
    "attempt",
    "processed_at",
    "locked_until",
    "headers",
)


def split(name: str) -> tuple[str, ...]:
    """The parts of `"table"` or `"schema.table"`. Raises `ValueError` for any other shape."""
    parts = tuple(name.split(".")) if isinstance(name, str) else ()
    if len(parts) not in (1, 2) or not all(parts) or "\0" in name:
        raise ValueError(f"a table must be 'table' or 'schema.table', each 1 character or more, not {name!r}")
    return parts


@attrs.frozen(init=False)
class Table(Generic[R]):
    """A queue table by its column roles; each value is a column's name.

    None, the default of every role but `id`, says that the table has no such column.

    `ddl("sqlite")` is a table that fits. Raises `ValueError` for an empty name, a name such as "a.b.c", one column in
    two roles, or a generated column that plays no role.

    Attributes:
        name: `"table"` or `"schema.table"`; quoted wherever it is used.
        id: The key, one column, unique; orders the queue last. Recommended: INTEGER PRIMARY KEY AUTOINCREMENT.
        payload: The message's bytes. None, the default, is *row mode*: the message is the whole row, a `dict` by column
            name.
        group: Several queues in one table; the value is the queue's name.
        priority: Smaller first. NOT NULL: a column that may be NULL does not order, and one warning says so.
        partition_key: The delivery's `key`.
        retry_after: Not visible before this time, by the column's declared type REAL (Unix seconds), INTEGER (Unix
            microseconds) or TEXT (ISO 8601 in UTC with six decimals); NULL means due. Recommended: NOT NULL, the
            default now.
        attempt: The number of the next delivery, INTEGER NOT NULL DEFAULT 1: the first is 1, and NULL counts as 1. A
            cap (`max_attempts`) needs it.
        processed_at: Set when the row was finished, a time as retry_after; without it, finishing deletes the row.
        locked_until: The lease, a time as retry_after: NULL or past is free, otherwise it is the token of the delivery
            in work. SQLite needs it.
        headers: A JSON object: values are texts, or `{"base64": …}` where they are not UTF-8.
        generated: Columns that the database fills: left out of inserts. None of them by default; one may be given by
            its name alone.
    """

    name: str
    id: str
    payload: str | None
    group: str | None
    priority: str | None
    partition_key: str | None
    retry_after: str | None
    attempt: str | None
    processed_at: str | None
    locked_until: str | None
    headers: str | None
    generated: frozenset[str]

    @overload
    def __init__(
        self: Table[bytes],
        name: str,
        *,
        id: str,
        payload: str,
        group: str | None = None,
        priority: str | None = None,
        partition_key: str | None = None,
        retry_after: str | None = None,
        attempt: str | None = None,
        processed_at: str | None = None,
        locked_until: str | None = None,
        headers: str | None = None,
        generated: Iterable[str] = (),
    ) -> None: ...
    @overload
    def __init__(
        self: Table[dict[str, Any]],
        name: str,
        *,
        id: str,
        payload: None = None,
        group: str | None = None,
        priority: str | None = None,
        partition_key: str | None = None,
        retry_after: str | None = None,
        attempt: str | None = None,
        processed_at: str | None = None,
        locked_until: str | None = None,
        headers: str | None = None,
        generated: Iterable[str] = (),
    ) -> None: ...
    def __init__(
        self,
        name: str,
        *,
        id: str,  # noqa: A002 -- the role's name
        payload: str | None = None,
        group: str | None = None,
        priority: str | None = None,
        partition_key: str | None = None,
        retry_after: str | None = None,
        attempt: str | None = None,
        processed_at: str | None = None,
        locked_until: str | None = None,
        headers: str | None = None,
        generated: Iterable[str] = (),
    ) -> None:
        columns = frozenset([generated] if isinstance(generated, str) else generated)
        fill: Callable[..., None] = getattr(self, "__attrs_init__")  # noqa: B009 -- made by attrs, unknown to pyright
        fill(
            name,
            id,
            payload,
            group,
            priority,
            partition_key,
            retry_after,
            attempt,
            processed_at,
            locked_until,
            headers,
            columns,
        )

    def __attrs_post_init__(self) -> None:
        split(self.name)
        played: dict[str, str] = {}
        for role in _ROLES:
            column = getattr(self, role)
            if column is None and role != "id":
                continue
            if not isinstance(column, str) or not column or "\0" in column:
                raise ValueError(f"{role} must be a column name of 1 character or more, not {column!r}")
            if column in played:
                raise ValueError(f"column {column!r} of {self.name!r} plays two roles, {played[column]} and {role}")
            played[column] = role
        if strangers := sorted(self.generated - played.keys()):
            raise ValueError(f"generated must name columns that play a role in {self.name!r}, not {strangers}")

    def ddl(self, dialect: str) -> str:
        """The table to create for these roles, as SQL text with its reasons: queue, index, dead-letter table.

        `dialect`: `"sqlite"`. The dead-letter table is `dead_` and the name; a table with groups has none, for there
        the dead letter is a group. In row mode the message's columns are yours to add. Times are REAL, Unix seconds.
        Run it at every start: what is there stays as it is.

        Raises `ValueError` for another dialect, and where locked_until is None: SQLite has the lease form alone.
        """
        if dialect != "sqlite":
            raise ValueError(f"dialect must be 'sqlite', not {dialect!r}")
        if self.locked_until is None:
            raise ValueError(f"table {self.name!r} must have a locked_until column: SQLite has the lease form alone")
        return sqlite_ddl(split(self.name), self.roles)

    def renamed(self, name: str) -> Table[R]:
        """Another table with the same columns, such as a dead-letter table."""
        return attrs.evolve(self, name=name)  # type: ignore[misc]  # mypy loses attrs at an overloaded __init__

    @property
    def roles(self) -> Mapping[str, str]:
        """The roles that this table plays, each with its column."""
        return {role: column for role in _ROLES if (column := getattr(self, role)) is not None}

    def check_group(self, group: str | None) -> None:
        """Raise `ValueError` unless a group is given exactly where the table has groups."""
        if self.group is None and group is not None:
            raise ValueError(f"group must be None, not {group!r}: table {self.name!r} has no group column")
        if self.group is not None and (not isinstance(group, str) or not group):
            raise ValueError(f"group must be a name of 1 character or more, not {group!r}: {self.name!r} has groups")
