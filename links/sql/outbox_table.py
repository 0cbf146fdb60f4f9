"""What a user says about the record table of an outbox: which column plays which role. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from links.sql.table import Table, check_roles, split

__all__ = ["OutboxTable"]

_ROLES = ("id", "name", "payload", "sent_at", "headers", "partition_key", "processed_at")
_REQUIRED = _ROLES[:4]


@attrs.frozen
class OutboxTable:
    """A record table by its column roles; each value is a column's name. `Outbox.ddl()` is one that fits.

    The table is yours: nothing here creates or alters one. Raises `ValueError` for an empty name, one such as "a.b.c",
    or one column in two roles.

    Attributes:
        table: `"table"` or `"schema.table"`; quoted wherever it is used.
        id: The key, a whole number that the database gives: it travels with the message.
        name: What the record is for, as it is registered.
        payload: The message's bytes.
        sent_at: When it was recorded, and, once it was sent again, when that was: the age of a record counts from it.
            A time, NOT NULL, the default now: on SQLite REAL (Unix seconds), INTEGER (Unix microseconds) or TEXT (ISO
            8601 in UTC), on PostgreSQL timestamptz, on MySQL and MariaDB DATETIME(6), which holds UTC, or TIMESTAMP(6).
        headers: A JSON object, as in a queue table. None, the default: a message with headers is not accepted.
        partition_key: The message's key. None, the default: a message with a key is not accepted.
        processed_at: Set when a consumer has finished with the message, a time. None, the default: the record is
            deleted then, so that nobody can tell a message that comes twice.
    """

    table: str
    id: str = attrs.field(kw_only=True)
    name: str = attrs.field(kw_only=True)
    payload: str = attrs.field(kw_only=True)
    sent_at: str = attrs.field(kw_only=True)
    headers: str | None = attrs.field(default=None, kw_only=True)
    partition_key: str | None = attrs.field(default=None, kw_only=True)
    processed_at: str | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        split(self.table)
        check_roles(self.table, {role: getattr(self, role) for role in _ROLES}, _REQUIRED)

    @property
    def roles(self) -> Mapping[str, str]:
        """The roles that this table plays, each with its column."""
        return {role: column for role in _ROLES if (column := getattr(self, role)) is not None}

    @property
    def letters(self) -> Table[bytes]:
        """The same as a queue table, a group for each name: so that letters are written in as into any other."""
        return Table(
            self.table,
            id=self.id,
            payload=self.payload,
            group=self.name,
            headers=self.headers,
            partition_key=self.partition_key,
            processed_at=self.processed_at,
            generated=[self.id],
        )
