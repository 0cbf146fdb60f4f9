"""An INSERT on a connection of the user's own, in the user's own transaction: the message is there if that commits.

Nothing is looked up: which columns are written follows from the table's roles alone. Pure, but for `insert`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from datetime import datetime, timedelta
from importlib import import_module
from typing import Any, Literal, Protocol, TypeAlias, overload

import attrs

from links.errors import PublishNotAccepted
from links.sql.headers import dump
from links.sql.letters import When, moment
from links.sql.table import Table
from settlement.delivery import NO_HEADERS, Letter, check_letter

__all__ = ["Binding", "Message", "Style", "Written", "insert", "insert_statement"]

Message: TypeAlias = bytes | str | Mapping[str, Any]
"""The payload column's value; in row mode the columns, each with a value that the driver takes."""

Style: TypeAlias = Literal["pyformat", "named", "text"]
"""How a statement names a parameter: `%(name)s` or `:name`, as DB-API calls them, or `:name` in SQLAlchemy's `text`."""

_FOLDERS = {"psycopg": "postgres", "pymysql": "mysql", "sqlite3": "sqlite"}
"""By the package that a connection comes from."""
_DIALECTS = {"mariadb": "mysql", "mysql": "mysql", "postgresql": "postgres", "sqlite": "sqlite"}


class Blocking(Protocol):
    """A `psycopg.Connection`, a `pymysql.Connection`, or a `sqlite3.Connection`."""

    def __enter__(self) -> Any: ...

    def cursor(self) -> Any:
        """As DB-API has it."""
        ...


class Awaited(Protocol):
    """A `psycopg.AsyncConnection`."""

    async def __aenter__(self) -> Any: ...

    def cursor(self) -> Any:
        """Of psycopg."""
        ...


@attrs.frozen(eq=False)
class Written:
    """What is written: pure values, before any dialect.

    Attributes:
        table: Where to.
        columns: Each with its value, but for a time that the database or its dialect computes.
        due: When it is due; None: at once, and the column is left out.
        once: Do nothing where a row has the id?
    """

    table: Table[Any]
    columns: Mapping[str, Any]
    due: When | None
    once: bool


def written(
    table: Table[Any],
    body: Message,
    headers: Mapping[str, bytes],
    *,
    key: str | None,
    group: str | None,
    delay: float | timedelta | None,
    due: datetime | None,
    id: Any,  # noqa: A002 -- the role's name
    once: bool,
) -> Written:
    """Raises `ValueError` for what contradicts itself, `PublishNotAccepted` for what the table has no column for."""
    table.check_group(group)
    when = moment(delay, due)
    row = _message(table, body)
    check_letter(Letter(b"", headers, key))
    roles = {
        "group": group,
        "headers": dump(headers) if headers else None,
        "partition_key": key,
        "retry_after": when,
        "id": id,
    }
    for role, value in roles.items():
        if value is None:
            continue
        column: str | None = getattr(table, role)
        if column is None:
            raise PublishNotAccepted(f"table {table.name!r} cannot hold what is given as {role}: it has no such column")
        if column in table.generated and role != "id":
            raise PublishNotAccepted(
                f"table {table.name!r} cannot hold what is given as {role}: column {column!r} is in generated=(…)"
            )
        if column in row:
            raise ValueError(f"column {column!r} of {table.name!r} is given twice, as {role} and in the message")
        if role != "retry_after":
            row[column] = value
    if once and row.get(table.id) is None:
        raise ValueError(f"once=True needs an id: by it a row of {table.name!r} is known again")
    return Written(table, row, when, once)


def _message(table: Table[Any], body: object) -> dict[str, Any]:
    if table.payload is not None:
        if not isinstance(body, bytes | str):
            raise ValueError(
                f"body must be bytes or str, not {type(body).__name__}: {table.name!r} has a payload column"
            )
        return {table.payload: body}
    if not isinstance(body, Mapping):
        raise ValueError(f"body must be a mapping of columns, not {type(body).__name__}: {table.name!r} is in row mode")
    given: Mapping[Any, Any] = body  # pyright: ignore[reportUnknownVariableType] -- looked at below
    for column in given:
        if not isinstance(column, str) or not column or "\0" in column:
            raise ValueError(f"a column is a name of 1 character or more, not {column!r}")
        if column in table.generated:
            raise ValueError(f"column {column!r} of {table.name!r} is in generated=(…): leave it out of the message")
    return dict(given)


class Binding:
    """The parameters of one statement of this style, and how they and its identifiers are written in it."""

    def __init__(self, style: Style) -> None:
        self._style = style
        self.values: dict[str, Any] = {}

    def value(self, value: Any) -> str:
        """Bind it; gives its place in the statement."""
        name = f"v{len(self.values)}"
        self.values[name] = value
        return f"%({name})s" if self._style == "pyformat" else f":{name}"

    def name(self, quoted: str) -> str:
        """A quoted identifier, so that the driver sees no parameter in it."""
        match self._style:
            case "pyformat":
                return quoted.replace("%", "%%")
            case "text":
                return quoted.replace(":", "\\:")
            case _:
                return quoted


@overload
def insert(
    connection: Awaited,
    table: Table[Any],
    body: Message,
    headers: Mapping[str, bytes] = ...,
    *,
    key: str | None = ...,
    group: str | None = ...,
    delay: float | timedelta | None = ...,
    due: datetime | None = ...,
    id: Any = ...,
    once: bool = ...,
) -> Awaitable[bool]: ...
@overload
def insert(
    connection: Blocking,
    table: Table[Any],
    body: Message,
    headers: Mapping[str, bytes] = ...,
    *,
    key: str | None = ...,
    group: str | None = ...,
    delay: float | timedelta | None = ...,
    due: datetime | None = ...,
    id: Any = ...,
    once: bool = ...,
) -> bool: ...
def insert(
    connection: Any,
    table: Table[Any],
    body: Message,
    headers: Mapping[str, bytes] = NO_HEADERS,
    *,
    key: str | None = None,
    group: str | None = None,
    delay: float | timedelta | None = None,
    due: datetime | None = None,
    id: Any = None,  # noqa: A002 -- the role's name
    once: bool = False,
) -> bool | Awaitable[bool]:
    """Insert one message by a connection of your own, in the transaction that it is in; True: the row was inserted.

        with psycopg.connect(url) as connection:                  # or PyMySQL's, or a sqlite3.Connection
            connection.execute("INSERT INTO shipments …")
            links.sql.insert(connection, ORDERS, b"…", delay=60.0)
        await links.sql.insert(connection, ORDERS, b"…")           # a psycopg.AsyncConnection, also a lent one

    One INSERT: nothing is begun or committed here, but by the driver itself, as for any INSERT there. The row is
    found when the transaction has been committed, by the queue's next poll: what is inserted past the broker wakes
    nobody.

    On MySQL and MariaDB a DATETIME is written in UTC, whatever the session's time zone is; a TIMESTAMP within the hour
    that the session's clock passes twice may be due up to that hour late, and never early. A session whose sql_mode is
    not strict is refused, for there a value that does not fit is cut without a word, and so is an id of 0 where that
    means the next number.

    `body`: bytes for a column that holds bytes, str for one that holds text or JSON (PostgreSQL refuses the one for the
    other); in row mode a mapping of columns. A table that PostgreSQL has a type of the same name for, such as "date" or
    "path", is named with its schema. `group`: where the table has groups. `delay`: seconds or a `timedelta`, 0
    or more, by the database's clock. `due`: a `datetime` with a time zone. `id`: of your own. `once`: do nothing, and
    give False, where a row has that id.

    Written are payload (or the message's columns), group, headers, key, retry_after and id, each where it is given.
    The database must fill the rest: the id where none is given, attempt with 1, retry_after with now or NULL,
    locked_until and processed_at with NULL, and every column of your own that is NOT NULL.

    Raises, with nothing written, `ValueError` for arguments that contradict each other, `TypeError` for a connection of
    another driver (there is `insert_statement`), `PublishNotAccepted` where the table has no column for one of them, or
    a trigger ignores the row; the driver's own error where the statement fails, the transaction as it leaves it.

    Cancellation, of an `AsyncConnection`: as the driver has it.
    """
    what = written(table, body, headers, key=key, group=group, delay=delay, due=due, id=id, once=once)
    drivers = (each.__module__.partition(".")[0] for each in type(connection).__mro__)
    folder = next((_FOLDERS[driver] for driver in drivers if driver in _FOLDERS), None)
    if folder is None:
        kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
        raise TypeError(
            f"connection must be psycopg's, pymysql's or sqlite3's, not {kind}: for others: insert_statement(…)"
        )
    inserted: bool | Awaitable[bool] = import_module(f"links.sql.{folder}.inserting").insert(connection, what)
    return inserted


def insert_statement(
    dialect: str,
    table: Table[Any],
    body: Message,
    headers: Mapping[str, bytes] = NO_HEADERS,
    *,
    key: str | None = None,
    group: str | None = None,
    delay: float | timedelta | None = None,
    due: datetime | None = None,
    id: Any = None,  # noqa: A002 -- the role's name
    once: bool = False,
    style: Style = "text",
) -> tuple[str, dict[str, Any]]:
    """The statement of `insert` and its parameters by name, for a connection of any other driver.

        session.execute(sqlalchemy.text(statement), parameters)

    `dialect`: "postgresql", "mysql", "mariadb" or "sqlite". `style`: "text", as SQLAlchemy's `text` takes it; "named"
    (`:name`) or "pyformat" (`%(name)s`), as DB-API calls them. The driver says how many rows were inserted: none under
    `once` where the id is there (on MySQL and MariaDB that is the driver's error 1062), or where a trigger ignores the
    row. The rest is as for `insert`; no I/O, so nobody looks whether a session of MySQL or MariaDB is strict: it must
    be. Raises `ValueError`, also for another dialect or style, and `PublishNotAccepted`.
    """
    if dialect not in _DIALECTS:
        raise ValueError(f"dialect must be one of {', '.join(sorted(_DIALECTS))}, not {dialect!r}")
    if style not in ("pyformat", "named", "text"):
        raise ValueError(f"style must be 'text', 'named' or 'pyformat', not {style!r}")
    what = written(table, body, headers, key=key, group=group, delay=delay, due=due, id=id, once=once)
    module = import_module(f"links.sql.{_DIALECTS[dialect]}.inserting")
    text: tuple[str, dict[str, Any]] = module.statement(what, style)
    return text
