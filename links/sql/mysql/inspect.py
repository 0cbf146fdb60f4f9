"""May a `Table` be a queue in this database? What must not be is refused, what is only slow or odd is told.

Asked when a link attaches, and again when the table's columns have changed under it. Runs in a thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import attrs
import pymysql

from links.errors import LinkRefused
from links.sql.mysql.codes import DENIED, code_of, first_line, is_again, is_weather
from links.sql.mysql.custom import values_of
from links.sql.mysql.ddl import DUE, in_work_index, index
from links.sql.mysql.held_statements import AdvisoryStatements, RowLockStatements
from links.sql.mysql.schema import COUNTING, LONGEST, TIMES, MysqlSchema, bound, read_schema
from links.sql.mysql.session import MysqlSession
from links.sql.mysql.statements import LeaseStatements, Rows, none_of
from links.sql.row_class import lacking
from links.sql.table import Table, split
from settlement.sql import AdvisoryLock, ClaimForm, Lease, RowLock

__all__ = ["GRANT", "MysqlLook", "check_engine", "check_key", "check_message", "check_names", "check_times", "inspect"]

GRANT: Final = "grant this user SELECT, INSERT, UPDATE and DELETE on its tables"
_KEYS: Final = COUNTING | {
    "decimal", "char", "varchar", "binary", "varbinary", "uuid", "inet4", "inet6", "datetime", "timestamp", "date",
    "enum",
}  # fmt: skip
"""What an id may be: one plain value that is found again as it was read."""


@attrs.frozen
class MysqlLook:
    """What was found.

    Attributes:
        schema: The table's columns.
        texts: The statements for it.
        warnings: What is no reason to refuse: one line each.
    """

    schema: MysqlSchema
    texts: Rows
    warnings: Sequence[str]


def inspect(
    session: MysqlSession,
    table: Table[Any],
    claim: ClaimForm,
    *,
    subscription: str,
    dead_letter: str | None = None,
    custom: Mapping[str, str] = MappingProxyType({}),
) -> MysqlLook:
    """A look at a queue table, and at the table `dead_letter`, where rows shall move.

    Raises `LinkRefused` naming subscription, table, column and the way out, and `pymysql.MySQLError`.
    """
    here = f"subscription {subscription!r}, table {table.name!r}"
    check_names((*table.name.split("."), *table.roles.values(), *(dead_letter or "").split(".")), here)
    schema = read_schema(session, table.name)
    if schema is None:
        raise LinkRefused(f"{here}: there is no such table; create it, the library creates none")
    if not schema.columns:
        raise LinkRefused(f"{here}: this user may not see its columns; {GRANT}")
    for role, column in table.roles.items():
        if column not in schema:
            raise LinkRefused(
                f"{here}: there is no column {column!r} for the role {role}; it has {', '.join(schema.names)}; "
                "add the column, or leave the role out of Table(…)"
            )
    if table.row is not None and (fields := lacking(table.row, schema.names)):
        raise LinkRefused(
            f"{here}: there is no column {fields[0]!r} for that field of {table.row.__name__}, which has no default; "
            f"it has {', '.join(schema.names)}; add the column, or give the field a default"
        )
    check_engine(schema, here)
    check_times(table, schema, here)
    check_message(table, schema, here)
    _check_attempt(session, table, schema, here)
    check_key(table, schema, here)
    if isinstance(claim, AdvisoryLock):
        for column in claim.columns:
            if column not in schema:
                raise LinkRefused(
                    f"{here}: there is no column {column!r} for the key {claim.key!r}; it has {', '.join(schema.names)}"
                )
    texts = _statements(table, schema, claim)
    warnings = _warnings(table, schema)
    if "claim" not in custom:
        warnings += _check_walk(table, schema, texts, here)
    _try(session, texts, here)
    for event, text in custom.items():
        if not text.lower().startswith("call"):
            _explain(session, values_of(text, _NOTHING), here=here, what=f"custom[{event!r}]")
    if dead_letter is not None:
        warnings += _check_dead_letter(session, table, (schema, texts), dead_letter, here)
    return MysqlLook(schema, texts, [f"{here}: {line}" for line in warnings])


def _statements(table: Table[Any], schema: MysqlSchema, claim: ClaimForm) -> Rows:
    match claim:
        case Lease():
            return LeaseStatements(table, schema)
        case AdvisoryLock():
            return AdvisoryStatements(table, schema, claim)
        case RowLock():
            return RowLockStatements(table, schema)


def check_names(names: Iterable[str], here: str) -> None:
    """Raise `LinkRefused` for one that no table or column can have."""
    for name in names:
        if len(name) > LONGEST:
            raise LinkRefused(f"{here}: {name!r} is longer than {LONGEST} characters; give it a shorter name")


def check_engine(schema: MysqlSchema, here: str) -> None:
    """Raise `LinkRefused` for a table without transactions."""
    if schema.engine.lower() != "innodb":
        raise LinkRefused(
            f"{here}: its engine is {schema.engine}, which has no transactions; say ALTER TABLE … ENGINE=InnoDB"
        )


def check_times(table: Table[Any], schema: MysqlSchema, here: str) -> None:
    """Raise `LinkRefused` for a column that cannot hold its time."""
    for role in ("locked_until", "retry_after", "processed_at"):
        name: str | None = getattr(table, role)
        if name is None:
            continue
        column = schema[name]
        what = f"{here}: column {name!r} ({role})"
        if column.type not in TIMES:
            declare = DUE if role == "retry_after" else "DATETIME(6) NULL"
            raise LinkRefused(f"{what} is {column.declared}; a time is DATETIME(6), in UTC: declare it {declare}")
        if role == "locked_until" and column.precision != 6:  # noqa: PLR2004 -- decimals
            raise LinkRefused(
                f"{what} is {column.declared}, without microseconds, so two leases could not be told from each other; "
                "declare it DATETIME(6) NULL"
            )
        if column.on_update:
            raise LinkRefused(
                f"{what} has ON UPDATE CURRENT_TIMESTAMP, so every claim would write the time into it; declare it "
                f"{DUE if role == 'retry_after' else 'DATETIME(6) NULL'}"
            )
        if role != "retry_after" and not column.nullable:
            free = "a free row" if role == "locked_until" else "an unfinished row"
            raise LinkRefused(f"{what} is NOT NULL, but NULL is what {free} holds")
        if role != "retry_after" and column.default is not None:
            state = "is finished" if role == "processed_at" else "is leased"
            raise LinkRefused(f"{what} has the default {column.default}, so every row {state} when it is inserted")
        if column.computed:
            raise LinkRefused(f"{what} is GENERATED ALWAYS AS an expression, so no claim can write it")
        if role == "retry_after" and column.local:
            raise LinkRefused(
                f"{what} is {column.declared} with the default {column.default}, which is the time of the session's "
                f"own zone, and a DATETIME has none: it holds UTC here; declare it {DUE}, or TIMESTAMP(6)"
            )


def check_message(table: Table[Any], schema: MysqlSchema, here: str) -> None:
    """Raise `LinkRefused` for a column that cannot hold its part of a message."""
    for role, kinds in (("payload", "LONGBLOB, LONGTEXT or JSON"), ("headers", "JSON or LONGTEXT")):
        name: str | None = getattr(table, role)
        if name is None:
            continue
        column = schema[name]
        if not column.textual and not (role == "payload" and column.binary):
            raise LinkRefused(f"{here}: column {name!r} ({role}) is {column.declared}; declare it {kinds}")
    if table.group is None:
        return
    column = schema[table.group]
    if not column.textual:
        raise LinkRefused(
            f"{here}: column {table.group!r} (group) is {column.declared}; a group's name is a text: declare it "
            "VARCHAR(190) NOT NULL"
        )
    if table.fifo and column.folds:
        raise LinkRefused(
            f"{here}: the collation of column {table.group!r} (group) takes several spellings for one, and a FIFO "
            "group has one name for everybody; declare it VARCHAR(190) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin "
            "NOT NULL"
        )


def _check_attempt(session: MysqlSession, table: Table[Any], schema: MysqlSchema, here: str) -> None:
    """The default is asked of the database itself."""
    if table.attempt is None:
        return
    column = schema[table.attempt]
    what = f"{here}: column {table.attempt!r} (attempt)"
    if column.type not in COUNTING:
        raise LinkRefused(f"{what} is {column.declared}; it counts, so declare it INT NOT NULL DEFAULT 1")
    if column.default is None:
        return
    try:
        found = session.say(f"SELECT ({column.default}) + 0")[0].rows[0][0]
    except pymysql.MySQLError:
        if session.closed:
            raise
        return  # such as one that asks another column: an insert will tell
    if found != 1:
        raise LinkRefused(
            f"{what} has the default {column.default}, but the first delivery is attempt 1, so a cap would come late; "
            "declare it INT NOT NULL DEFAULT 1"
        )


def check_key(table: Table[Any], schema: MysqlSchema, here: str) -> None:
    """Raise `LinkRefused` unless the id is a key of its own, and one that can be told from another."""
    column = schema[table.id]
    what = f"{here}: column {table.id!r} (id)"
    if column.type not in _KEYS:
        raise LinkRefused(f"{what} is {column.declared}; an id is one plain value, such as BIGINT or VARCHAR(190)")
    alone = (table.id.lower(),)
    if not any(index.unique and index.whole and index.columns == alone for index in schema.indexes):
        raise LinkRefused(
            f"{what} is no key of its own, so a settlement could touch a second row; declare it PRIMARY KEY or UNIQUE"
        )
    if column.nullable:
        raise LinkRefused(f"{what} may be NULL, and such a row could never be settled; declare it NOT NULL")
    if table.id in table.generated and not schema.fills(table.id):
        raise LinkRefused(
            f"{what} is filled by nothing, so a row that is inserted without it is refused; declare it BIGINT "
            "AUTO_INCREMENT, or leave it out of generated=(…)"
        )


def _check_walk(table: Table[Any], schema: MysqlSchema, texts: Rows, here: str) -> list[str]:
    """Is there an index in the queue's order? Without one a claim would sort, and lock, every row that is due."""
    create = index(split(table.name), table.roles, texts.order)
    if texts.walk is None:
        raise LinkRefused(
            f"{here}: no index has the queue's order ({', '.join(texts.order)}), so every claim would sort and lock "
            f"all rows that are due; create it: {create}"
        )
    same = [column for column in (table.group, table.processed_at) if column]
    found: list[str] = []
    if texts.walk.among < len(same):
        why = "the rows of other groups" if table.group else "the rows that are finished"
        found.append(f"a claim passes over {why}, so it grows slow with the table; create the index: {create}")
    if table.fifo and table.locked_until is not None and table.group is not None:
        wanted = (table.group.lower(), table.locked_until.lower())
        if not any(each.columns[:2] == wanted for each in schema.indexes):
            found.append(
                "a claim reads every row of its FIFO group to see whether one is in work, so it grows slow with the "
                "group; create the index: " + in_work_index(split(table.name), table.roles)
            )
    return found


_NOTHING: Final[dict[str, Any]] = {
    "ids": [], "over": none_of([]), "held": none_of([]), "group": None, "to": None, "lease": 1, "until": None,
    "micros": 1, "room": 0, "id": None, "token": None, "attempt": None, "delay": None, "key": None,
}  # fmt: skip


def _try(session: MysqlSession, texts: Rows, here: str) -> None:
    """Have every statement carried out once, for no row: what is missing, and what this user may not, is told now."""
    for event in texts.events:
        if text := getattr(texts, event):
            _dry(session, bound(text, _NOTHING), here, f"the statement {event!r}")


def _dry(session: MysqlSession, text: str, here: str, what: str) -> None:
    try:
        session.say("START TRANSACTION", text, "ROLLBACK")
    except pymysql.MySQLError as error:
        _refuse(session, error, here, what)


def _explain(session: MysqlSession, text: str, *, here: str, what: str) -> None:
    try:
        session.say(f"EXPLAIN {text}")
    except pymysql.MySQLError as error:
        _refuse(session, error, here, what)


_READ_ONLY: Final = frozenset({1290, 1792, 1836, 3100})


def _refuse(session: MysqlSession, error: pymysql.MySQLError, here: str, what: str) -> None:
    """Raise `LinkRefused`, or the error where it is weather."""
    if session.closed:
        raise error
    session.say("ROLLBACK")
    read_only = code_of(error) in _READ_ONLY
    if is_again(error) or (is_weather(error) and not read_only):
        raise error
    way_out = ""
    if code_of(error) in DENIED:
        way_out = f"; {GRANT}"
    elif read_only:
        way_out = "; the server takes no writes: name the one that does"
    raise LinkRefused(f"{here}: {what} cannot be carried out: {first_line(error)}{way_out}") from error


def _check_dead_letter(
    session: MysqlSession, table: Table[Any], known: tuple[MysqlSchema, Rows], dead_letter: str, here: str
) -> list[str]:
    """Can a row move there? Asked at start-up, not by the first message at its cap. One line for each change."""
    schema, texts = known
    here = f"{here}: dead-letter table {dead_letter!r}"
    dead = read_schema(session, dead_letter)
    if dead is None:
        raise LinkRefused(f"{here}: there is no such table; create it with the columns of {table.name!r}")
    check_engine(dead, here)
    for column in schema.stored:
        if column not in dead or dead[column].computed:
            raise LinkRefused(
                f"{here}: there is no column {column!r} to write to, and a row moves there whole; add it, as in "
                f"{table.name!r}"
            )
    for column in dead.stored:
        if column not in schema and dead[column].required:
            raise LinkRefused(
                f"{here}: column {column!r} is NOT NULL without a default, and {table.name!r} has no such column, so "
                "no row could move there; give it a default"
            )
    lock = table.locked_until
    if lock is not None and not dead[lock].nullable:
        raise LinkRefused(
            f"{here}: column {lock!r} (locked_until) is NOT NULL, but a row moves there with an empty lease"
        )
    _dry(session, bound(texts.copy(dead_letter, schema.stored), _NOTHING), here, "the move")
    return [
        f"dead-letter table {dead_letter!r}: column {name!r} is another type than in {table.name!r} "
        f"({dead[name].declared}, {schema[name].declared}), so a row that moves there may change or be refused; "
        "declare both alike"
        for name in schema.stored
        if name.lower() != (lock or "").lower() and dead[name].declared != schema[name].declared
    ]


def _warnings(table: Table[Any], schema: MysqlSchema) -> list[str]:
    found: list[str] = []
    if table.priority is not None and schema[table.priority].nullable:
        found.append(
            f"column {table.priority!r} (priority) may be NULL, so it does not order the queue; declare it INT NOT "
            "NULL DEFAULT 0"
        )
    if table.retry_after is not None and schema[table.retry_after].nullable:
        found.append(
            f"column {table.retry_after!r} (retry_after) may be NULL, so it does not order the queue; declare it {DUE}"
        )
    if table.group is not None and schema[table.group].folds:
        found.append(
            f"the collation of column {table.group!r} (group) takes several spellings for one, such as 'a' and 'A', so "
            "their queues are one; declare it VARCHAR(190) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL"
        )
    return found
