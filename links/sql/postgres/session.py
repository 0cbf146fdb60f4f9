"""What a session must be for our statements to mean what they say; and whether it is ours alone.

A pooler in transaction mode (pgbouncer's pool_mode = transaction, and others) gives each transaction another session
of the server, and each session to others in between: nothing that is set, prepared, locked or listened to there stays
ours. Behind one we set nothing and prepare nothing, and look that the settings are what they must be.
"""

from __future__ import annotations

from typing import Any, Final

from links.errors import LinkRefused
from links.sql.postgres.trio_connection import TrioConnection

__all__ = ["as_before", "begin", "check_room", "is_pooled"]

_SETTINGS: Final = {
    "DateStyle": "ISO",
    "extra_float_digits": "3",
    "default_transaction_isolation": "read committed",
}
"""What a database or a role may set otherwise: times and floats are read as they are, the order of day and month in a
text stays; and each statement looks at what others have committed before it, not before its transaction."""


_SET: Final = [f"set_config('{name}', '{value}', false)" for name, value in _SETTINGS.items()]


def as_before(connection: TrioConnection) -> list[str]:
    """Statements for a transaction that a handler had: whatever it has set for the session is as it was."""
    said = ["RESET SESSION AUTHORIZATION", "RESET ROLE", "RESET ALL"]
    return said if connection.pooled else [*said, f"SELECT {', '.join(_SET)}"]


async def is_pooled(connection: TrioConnection) -> bool:
    """Is there a pooler in front of the server, so that others may get the session between two transactions?

    A pooler says another number of the server's process than that process does. One in session mode is a pooler, too:
    it cannot be told from the others. Raises `psycopg.Error`. Cancellation: nothing was done.
    """
    (process,) = await _row(connection, "SELECT pg_backend_pid()")
    return bool(process != connection.info.backend_pid)


async def begin(connection: TrioConnection, where: str) -> None:
    """Set what must be set; behind a pooler look that it is. `where`: the database, for errors.

    Raises `LinkRefused` where it is not, or the server takes no writes; and `psycopg.Error`. Cancellation: there is a
    connection of no use.
    """
    connection.pooled = pooled = await is_pooled(connection)
    said = [f"current_setting('{name}')" for name in _SETTINGS] if pooled else _SET
    read_only, *found = await _row(connection, f"SELECT current_setting('transaction_read_only'), {', '.join(said)}")
    if read_only != "off":
        raise LinkRefused(
            f"{where}: the server takes no writes (a standby, or default_transaction_read_only is on); name the "
            "primary, such as by target_session_attrs=read-write in the URL"
        )
    if not pooled:
        return
    connection.prepare_threshold = None  # another session has it under the same name, or another statement
    for (name, value), given in zip(_SETTINGS.items(), found, strict=True):
        if not _serves(given, value):
            raise LinkRefused(
                f"{where}: a pooler in front of the server keeps no settings of ours, and {name} is {given!r} behind "
                f"it; say ALTER ROLE … SET {name} = '{value}' and have the pooler connect anew, or name the server "
                "itself in the URL"
            )


_ROOM: Final = """SELECT least(
    current_setting('max_connections')::int - CASE WHEN r.rolsuper THEN 0 ELSE
        current_setting('superuser_reserved_connections')::int
        + coalesce(nullif(current_setting('reserved_connections', true), '')::int, 0) END,
    CASE WHEN r.rolsuper OR r.rolconnlimit < 0 THEN NULL ELSE r.rolconnlimit END,
    CASE WHEN r.rolsuper OR d.datconnlimit < 0 THEN NULL ELSE d.datconnlimit END)
    FROM pg_catalog.pg_roles r, pg_catalog.pg_database d
    WHERE r.rolname = current_user AND d.datname = current_database()"""
"""https://www.postgresql.org/docs/current/runtime-config-connection.html; a limit of -1 is none."""


async def check_room(connection: TrioConnection, places: int, where: str) -> None:
    """Raise `LinkRefused` where the server never lets this user have a connection for each place; and `psycopg.Error`.

    One more is for what is looked at. A pooler's own limits are not known. Cancellation: nothing was done.
    """
    if connection.pooled:
        return
    (room,) = await _row(connection, _ROOM)
    if places + 1 > room:
        raise LinkRefused(
            f"{where}: each of {places} places holds a connection of its own, one more looks at the table, and the "
            f"server allows this user {room} (max_connections less those that are reserved, or a limit of the role or "
            "the database); lower the concurrency, raise that limit, or use a lease, which needs one connection for all"
        )


def _serves(given: str, wanted: str) -> bool:
    if wanted.isdecimal():  # digits: 1 and more are all that a float has
        return int(given) > 0
    return given.partition(",")[0].lower() == wanted.lower()


async def _row(connection: TrioConnection, statement: str) -> tuple[Any, ...]:
    found = await (await connection.execute(statement.encode(), prepare=False)).fetchone()
    assert found is not None, "a SELECT without FROM"  # noqa: S101 -- an invariant of PostgreSQL
    return found
