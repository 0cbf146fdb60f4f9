"""What an error of PostgreSQL means to us, by its SQLSTATE (https://www.postgresql.org/docs/current/errcodes-appendix.html).

Pure.
"""

from __future__ import annotations

import psycopg

__all__ = [
    "BINDING",
    "is_again",
    "is_doomed",
    "is_of_the_row",
    "is_refusal",
    "is_reshaped",
    "is_unprepared",
    "is_weather",
]

BINDING = (psycopg.Error, ValueError, OverflowError)
"""What a statement and the binding of its values raise: lone surrogates are a `ValueError`, and nothing was sent."""

_AGAIN = frozenset({"40001", "40P01"})
_RESHAPED = frozenset({"0A000", "26000", "3F000", "42703", "42704", "42804", "42846", "42883", "42P01", "42P10"})
_PASSING = ("08", "25", "28", "40", "53", "55006", "55P03", "57", "58", "XX")
"""Classes, and codes: another time the same may do better."""
_NO_ROW = (*_PASSING, "26", "55", "42501")
"""Nothing that a row is to blame for."""
_BY_A_ROW = ("ExecWithCheckOptions", "exec_stmt_raise")
"""Where the server is when a row's policy or a trigger's RAISE says no, whatever its code: such as that of a right."""

_REFUSALS = (
    "password authentication failed",
    "authentication failed",
    "no password supplied",
    "no pg_hba.conf entry",
    "does not exist",
    "is not permitted to log in",
    "permission denied for database",
    "server does not support SSL",
    "certificate",
    "SSL error",
    "unsupported frontend protocol",
    "received invalid response",
    "expected authentication request",
)
"""What libpq says of a connection carries no code: these need somebody's hand, the rest is weather."""


def is_again(error: BaseException) -> bool:
    """Did two transactions only get into each other's way? The same may be tried again at once."""
    return getattr(error, "sqlstate", None) in _AGAIN


def is_doomed(error: BaseException | None) -> bool:
    """Can nothing be done any more in this transaction, by what others did, but to begin it anew?"""
    return getattr(error, "sqlstate", None) == "40001"


def is_reshaped(error: BaseException) -> bool:
    """Is the table perhaps no longer what it was? It is looked at again then."""
    return getattr(error, "sqlstate", None) in _RESHAPED


def is_unprepared(error: BaseException) -> bool:
    """Has somebody taken away what was prepared in this session?"""
    return getattr(error, "sqlstate", None) == "26000"


def is_weather(error: BaseException) -> bool:
    """Is it a passing thing: a lock, a time limit, a server that has no room?"""
    state = getattr(error, "sqlstate", None)
    return state is not None and state.startswith(_PASSING)


def is_of_the_row(error: BaseException) -> bool:
    """Did a statement fail by its row, with what its table, its triggers and its constraints say of it?"""
    state = getattr(error, "sqlstate", None)
    if state is None:  # a value that the driver itself could not send, such as a text with a NUL
        return isinstance(error, psycopg.DataError | psycopg.ProgrammingError | ValueError | OverflowError)
    if isinstance(error, psycopg.Error) and error.diag.source_function in _BY_A_ROW:
        return True
    return not state.startswith(_NO_ROW)


def is_refusal(error: psycopg.OperationalError) -> bool:
    """Did the server refuse a connection for good?"""
    text = str(error)
    return any(each in text for each in _REFUSALS)
