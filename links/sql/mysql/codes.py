"""What an error of MySQL and MariaDB means to us, by its number. Pure.

https://dev.mysql.com/doc/mysql-errors/en/server-error-reference.html, https://mariadb.com/kb/en/mariadb-error-codes/.
"""

from __future__ import annotations

import pymysql

__all__ = [
    "BINDING",
    "DENIED",
    "MISSING",
    "NO_SAVEPOINT",
    "TAKEN",
    "TOO_LARGE",
    "code_of",
    "first_line",
    "is_again",
    "is_lost",
    "is_of_the_row",
    "is_refusal",
    "is_reshaped",
    "is_undone",
    "is_weather",
]

BINDING = (pymysql.MySQLError, ValueError, OverflowError)
"""What a statement and the binding of its values raise: lone surrogates are a `ValueError`, and nothing was sent."""

MISSING = frozenset({1049, 1059, 1103, 1146})
"""There is no such database or table, nor could there be one of such a name."""
DENIED = frozenset({1044, 1142, 1143, 1370})
"""This user has not the right to it."""
NO_SAVEPOINT = 1305
"""There is no such savepoint (or routine)."""
TOO_LARGE = 1153
"""A message beyond max_allowed_packet; it is not sent."""
TAKEN = frozenset({1022, 1062, 1586})
"""The value of a key is there already."""

_DEADLOCK = frozenset({1213, 1614, 3101})
"""The server has rolled the whole transaction back, for others' sake."""
_AGAIN = frozenset({1020, 1205, 3572, *_DEADLOCK})
_LOST = frozenset({1053, 1152, 1158, 1159, 1160, 1161, 1184, 1927, 2006, 2013, 2014, 2027, 2055, 4031})
_RESHAPED = frozenset({1051, 1054, 1072, 1091, 1109, 1146, 1176, 1265, 1356, 1364, 1412, 1615, 3105})
_PASSING = frozenset(
    {
        1021, 1040, 1041, 1114, 1129, 1203, 1226, 1290, 1317, 1426, 1637, 1792, 1836, 1878, 1969, 3024, 3032, 3098,
        3100, 3572, *_AGAIN, *_LOST,
    }
)  # fmt: skip
"""Another time the same may do better: a lock, a limit, a full disk, a server that takes no writes."""
_RIGHTS = frozenset({1044, 1045, 1142, 1143, 1227, 1370, 1410})
_REFUSALS = frozenset(
    {1044, 1045, 1049, 1130, 1133, 1251, 1275, 1524, 1698, 1820, 1862, 2026, 2058, 2059, 2061, 3118, 3159, 4151}
)
"""Of a connection: these need somebody's hand, the rest is weather."""


def code_of(error: BaseException | None) -> int:
    """The number of an error; 0 where it is not the server's, nor the driver's."""
    found = error.args[0] if isinstance(error, pymysql.MySQLError) and error.args else 0
    return found if isinstance(found, int) else 0


def first_line(error: BaseException) -> str:
    """What went wrong, in one line, without the number that Python's driver puts in front."""
    text = error.args[-1] if isinstance(error, pymysql.MySQLError) and error.args else error
    return str(text).partition("\n")[0]


def is_again(error: BaseException) -> bool:
    """Did two transactions only get into each other's way? The same may be tried again at once, from its beginning."""
    return code_of(error) in _AGAIN


def is_undone(error: BaseException) -> bool:
    """Has the server rolled the whole transaction back, and not the statement alone?"""
    return code_of(error) in _DEADLOCK


def is_lost(error: BaseException) -> bool:
    """Is the connection of no more use?"""
    return isinstance(error, pymysql.InterfaceError) or code_of(error) in _LOST


def is_reshaped(error: BaseException) -> bool:
    """Is the table perhaps no longer what it was? It is looked at again then."""
    return code_of(error) in _RESHAPED


def is_weather(error: BaseException) -> bool:
    """Is it a passing thing?"""
    return code_of(error) in _PASSING


def is_of_the_row(error: BaseException) -> bool:
    """Did a statement fail by its row, with what its table, its triggers and its constraints say of it?"""
    if not isinstance(error, pymysql.MySQLError):
        return isinstance(error, ValueError | OverflowError)
    number = code_of(error)
    if number == 0:  # a value that the driver itself could not send, such as NaN
        return isinstance(error, pymysql.DataError | pymysql.ProgrammingError)
    return number == TOO_LARGE or (number not in _PASSING and number not in _RIGHTS)


def is_refusal(error: BaseException) -> bool:
    """Did the server refuse a connection for good?"""
    return code_of(error) in _REFUSALS
