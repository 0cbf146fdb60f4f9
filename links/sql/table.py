"""What a user says about a queue table: which column plays which role. Pure.

The table is the user's own: nothing here creates or alters one (S-1.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar, overload

import attrs

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
    """The parts of `"table"` or `"schema.table"`. Raises `ValueError` for any other shape (S-1.5)."""
    parts = tuple(name.split(".")) if isinstance(name, str) else ()
    if len(parts) not in (1, 2) or not all(parts) or "\0" in name:
        raise ValueError(f"a table must be 'table' or 'schema.table', each 1 character or more, not {name!r}")
    return parts


@attrs.frozen(init=False)
class Table(Generic[R]):
    """A queue table by its column roles; each value is a column's name, None where the table has no such column.

    Raises `ValueError` for an empty name, a name such as "a.b.c", one column in two roles (S-1.2), or a generated
    column that plays no role.
    """

    name: str
    """`"table"` or `"schema.table"`; quoted wherever it is used."""
    id: str
    """The key, one column, unique; orders the queue last."""
    payload: str | None
    """The message's bytes. None is *row mode*: the message is the whole row, a `dict` by column name."""
    group: str | None
    """Several queues in one table: the value is the queue's name."""
    priority: str | None
    """Smaller first. A nullable column does not order (DESIGN 6)."""
    partition_key: str | None
    """The delivery's `key`."""
    retry_after: str | None
    """Not visible before this time; NULL means due. Recommended: NOT NULL DEFAULT now."""
    attempt: str | None
    """Deliveries so far, INTEGER; a fresh row holds 1 (the column's default), and NULL counts as 1."""
    processed_at: str | None
    """Set when the row was finished; without it, finishing deletes the row."""
    locked_until: str | None
    """The lease: NULL or past is free, otherwise it is the token of the delivery in work."""
    headers: str | None
    """A JSON object: values are texts, or `{"base64": …}` where they are not UTF-8."""
    generated: frozenset[str]
    """Columns that the database fills: left out of inserts (S-1.3)."""

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
