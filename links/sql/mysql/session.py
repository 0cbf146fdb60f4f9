"""One connection to MySQL or MariaDB, as a thread has it: messages of several statements, and what they gave.

Everything here blocks, and one thread at a time uses it, but for `interrupt`, `was_ended` and what is plain to read.

What a session must be for our statements to mean what they say is set when it opens: READ COMMITTED, so that each
statement looks at what others have committed before it; times in UTC; strict, so that a value that does not fit is an
error and never cut; no wait of more than a second for a row that others have locked. What the server or the user had
set instead is kept for the handlers that a connection is lent to (`theirs`).
"""

from __future__ import annotations

import contextlib
import datetime as dt
import select
import socket
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, cast

import attrs
import pymysql
from pymysql.constants import CLIENT
from pymysql.converters import conversions, escape_item, escape_string

from links.errors import ConnectionBroken, LinkRefused
from links.sql.mysql.codes import TOO_LARGE, first_line, is_refusal

__all__ = ["Answer", "MysqlSession", "Raw", "Server", "text_of"]

CONNECT: Final = 5.0
"""Seconds for a connection."""
ANSWER: Final = 30.0
"""Seconds after which a server that says nothing is taken for lost."""
_OLDEST: Final = {"MySQL": (8, 0, 1), "MariaDB": (10, 6, 0)}
"""SKIP LOCKED."""

_OURS: Final = (
    "time_zone = '+00:00', innodb_lock_wait_timeout = 1, lock_wait_timeout = 10, wait_timeout = 31536000, "
    "sql_mode = '{mode}'"
)
_STRICT: Final = ("STRICT_ALL_TABLES", "NO_ENGINE_SUBSTITUTION", "NO_AUTO_VALUE_ON_ZERO")
_ROUNDS: Final = {"MySQL": (), "MariaDB": ("TIME_ROUND_FRACTIONAL",)}
"""So that a time is rounded to the decimals of its column, and not cut, which MariaDB does."""
_LAX: Final = frozenset({"TIME_TRUNCATE_FRACTIONAL", "PAD_CHAR_TO_FULL_LENGTH", "NO_BACKSLASH_ESCAPES"})
"""Modes that would make our statements mean something else."""


def _tolerant(convert: Any) -> Any:
    def read(value: Any) -> Any:
        try:
            return convert(value)
        except (ValueError, OverflowError, ArithmeticError):
            return value

    return read


_ENCODERS: Final[Mapping[Any, Any]] = {kind: each for kind, each in conversions.items() if not isinstance(kind, int)}
_CONVERSIONS: Final[Mapping[Any, Any]] = {
    kind: _tolerant(each) if isinstance(kind, int) and callable(each) else each for kind, each in conversions.items()
}
"""How values are read: what Python's type cannot hold is a text, and no reason to fail for all rows."""


class Raw(str):
    """A part of a statement, that stands in it as it is."""

    __slots__ = ()


def text_of(value: Any) -> str:
    """How this stands in a statement. Raises `ValueError` for what has no form: a text with a lone surrogate."""
    match value:
        case None:
            return "NULL"
        case Raw():
            return value
        case bool():
            return str(int(value))
        case int():
            return str(int(value))
        case str():
            value.encode()
            return f"'{escape_string(value)}'"
        case bytes() | bytearray():
            return f"X'{value.hex()}'"
        case list() | tuple():
            return f"({', '.join(map(text_of, cast('Sequence[Any]', value)))})" if value else "(NULL)"
        case float() | Decimal() | dt.date() | dt.time() | dt.timedelta():
            return str(escape_item(value, "utf8mb4", _ENCODERS))
        case _:
            raise ValueError(f"no column can hold {type(value).__name__}")


@attrs.frozen
class Answer:
    """What one statement gave.

    Attributes:
        rows: Its rows; none of one that gives none.
        touched: How many rows it found, where it changed some: those too that it left as they were.
        columns: The names of what it gives, in their order.
    """

    rows: Sequence[tuple[Any, ...]]
    touched: int
    columns: Sequence[str]


@attrs.frozen
class Server:
    """What a server said of itself.

    Attributes:
        kind: "MySQL" or "MariaDB".
        version: Such as (10, 11, 19).
        packet: Bytes of one message, at most.
        number: The connection's, for KILL.
        database: Its name.
        theirs: Our settings as they were before, for `SET SESSION`.
    """

    kind: str
    version: tuple[int, ...]
    packet: int
    number: int
    database: str
    theirs: str


class MysqlSession:
    """One connection; not open yet. `arguments`: PyMySQL's; `address`: a path, or host and port; `name`: for errors."""

    def __init__(self, arguments: Mapping[str, Any], address: str | tuple[str, int], name: str) -> None:
        self._arguments, self._address, self.name = arguments, address, name
        self._connection: pymysql.Connection[Any] | None = None
        self._watched: socket.socket | None = None
        self.closed = False
        """It is of no more use."""
        self.server: Server
        self.ours = self.ours_but_autocommit = ""
        """Our settings, for `SET SESSION`; to set autocommit commits what is open."""
        self.done = 0
        """How many statements of the last message were carried out."""

    # --- open, close -------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect. Raises `LinkRefused` where the server says no, is too old, or cannot do; `ConnectionBroken` else."""
        try:
            self._connect()
            self._begin()
        except (LinkRefused, ConnectionBroken):
            self.close()
            raise
        except pymysql.MySQLError as error:
            self.close()
            kind = LinkRefused if is_refusal(error) else ConnectionBroken
            raise kind(f"{self.name}: {first_line(error)}") from None
        except OSError as error:
            self.close()
            raise ConnectionBroken(f"{self.name}: {error}") from None
        except Exception as error:  # noqa: BLE001 -- what is read by no rule of the protocol
            self.close()
            if isinstance(error, RuntimeError) and "cryptography" in str(error):
                raise LinkRefused(
                    f"{self.name}: the server asks for the password by its own key; pip install "
                    "'trio-settlement[mysql]', which brings what that needs, or connect by TLS"
                ) from None
            raise LinkRefused(f"{self.name}: what answers there is no MySQL server: {error!r}") from None

    def _connect(self) -> None:
        if isinstance(self._address, str):
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            link.settimeout(CONNECT)
            try:
                link.connect(self._address)
            except OSError:
                link.close()
                raise
        else:
            link = socket.create_connection(self._address, CONNECT)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._watched = link.dup()  # TLS takes the other one
        self._connection = pymysql.Connection(
            **self._arguments,
            defer_connect=True,
            charset="utf8mb4",
            conv={**_CONVERSIONS},
            client_flag=CLIENT.FOUND_ROWS | CLIENT.MULTI_STATEMENTS,
            read_timeout=ANSWER,
            write_timeout=ANSWER,
            program_name="trio-settlement",
        )
        self._connection.connect(link)
        if self.closed:
            raise ConnectionBroken(f"{self.name} was closed")

    def _begin(self) -> None:
        ((version, packet, number, database, zone, mode, wait, meta, idle, binlog),) = self.say(
            "SELECT VERSION(), @@max_allowed_packet, CONNECTION_ID(), DATABASE(), @@time_zone, @@sql_mode, "
            "@@innodb_lock_wait_timeout, @@lock_wait_timeout, @@wait_timeout, "
            "IF(@@log_bin, @@binlog_format, '')"
        )[0].rows
        kind = "MariaDB" if "MariaDB" in version else "MySQL"
        numbers = tuple(int(part) for part in version.removeprefix("5.5.5-").partition("-")[0].split(".")[:3])
        if numbers < _OLDEST[kind]:
            oldest = ".".join(map(str, _OLDEST[kind]))
            raise LinkRefused(f"{self.name}: the server is {kind} {version}, and SKIP LOCKED came with {oldest}")
        if binlog == "STATEMENT":
            raise LinkRefused(
                f"{self.name}: binlog_format is STATEMENT, which takes no writes at READ COMMITTED; set it to ROW or "
                "MIXED on the server"
            )
        theirs = f"time_zone = {text_of(zone)}, innodb_lock_wait_timeout = {wait}, lock_wait_timeout = {meta}, "
        theirs += f"wait_timeout = {idle}, sql_mode = {text_of(mode)}"
        self.server = Server(kind, numbers, packet, number, database, theirs)
        strict = (*_STRICT, *_ROUNDS[kind])
        modes = [each for each in mode.split(",") if each and each not in _LAX and each not in strict]
        self.ours_but_autocommit = _OURS.format(mode=",".join([*modes, *strict]))
        self.ours = f"{self.ours_but_autocommit}, autocommit = 1"
        self.say(f"SET SESSION {self.ours}", "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")

    def interrupt(self) -> None:
        """End the call that is under way, from another thread: the connection is of no more use."""
        self.closed = True
        if self._watched is not None:
            with contextlib.suppress(OSError):
                self._watched.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it; the server rolls back what was not committed, and releases its locks. May be called twice."""
        self.closed = True
        connection, self._connection = self._connection, None
        watched, self._watched = self._watched, None
        if watched is not None:
            with contextlib.suppress(OSError):
                watched.shutdown(socket.SHUT_RDWR)
            watched.close()
        if connection is not None:
            with contextlib.suppress(pymysql.MySQLError, OSError):
                connection.close()

    @property
    def socket(self) -> socket.socket:
        """What is readable when the server has ended the connection. Raises `ConnectionBroken` where there is none."""
        if self._watched is None:
            raise ConnectionBroken(f"{self.name}: there is no connection")
        return self._watched

    def was_ended(self) -> bool:
        """Has somebody ended it, while nothing was asked? A plain call, which asks nobody."""
        if self.closed or self._watched is None:
            return True
        return bool(select.select([self._watched], [], [], 0)[0])

    # --- say ---------------------------------------------------------------------------------------------------------

    def say(self, *texts: str) -> list[Answer]:
        """Carry out these by one message, each behind the other; where one fails, nothing behind it.

        `done` says how many were carried out. Raises `pymysql.MySQLError`; where the connection is of no more use it is
        `closed`, and nobody knows what the server did.
        """
        self.done = 0
        connection = self._connection
        if connection is None or self.closed:
            raise pymysql.InterfaceError(0, "the connection was closed")
        message = "; ".join(texts)
        if len(message) * 4 > self.packet and len(message.encode()) >= self.packet:
            raise pymysql.DataError(TOO_LARGE, f"a message of {len(message)} characters is beyond max_allowed_packet")
        try:
            with connection.cursor() as cursor:
                cursor.execute(message)
                answers = [self._answer(cursor)]
                while cursor.nextset():
                    answers.append(self._answer(cursor))
                return answers
        except (pymysql.MySQLError, OSError, AttributeError, ValueError, AssertionError) as error:
            if not isinstance(error, pymysql.MySQLError):  # it lost its socket amid a call, or reads nonsense
                self.close()
                raise pymysql.OperationalError(2013, f"the connection broke: {error}") from error
            if not connection.open:
                self.close()
            raise

    def execute(self, statement: str, parameters: Sequence[Any] | Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """A statement of the user's own, as PyMySQL takes it; its rows. Raises as `say`, and `ValueError`."""
        connection = self._connection
        if connection is None or self.closed:
            raise pymysql.InterfaceError(0, "the connection was closed")
        try:
            with connection.cursor() as cursor:
                cursor.execute(statement, parameters or None)
                return list(cursor.fetchall())
        finally:
            if not connection.open:
                self.close()

    def _answer(self, cursor: Any) -> Answer:
        self.done += 1
        return Answer(cursor.fetchall(), cursor.rowcount, [column[0] for column in cursor.description or ()])

    @property
    def packet(self) -> int:
        """Bytes of one message, at most."""
        return self.server.packet if hasattr(self, "server") else 2**20
