"""What a MySQL or MariaDB table is like: its columns, its indexes, whether it has triggers; and how names are quoted.

https://dev.mysql.com/doc/refman/en/information-schema.html. What a user has no right to see is not there for him: so
triggers, which need a right of their own, may stand where none is seen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from links.sql.mysql.codes import MISSING, code_of
from links.sql.mysql.session import MysqlSession, text_of
from links.sql.table import split

__all__ = [
    "COUNTING",
    "LONGEST",
    "TIMES",
    "Index",
    "MysqlColumn",
    "MysqlSchema",
    "bound",
    "fingerprint",
    "quote",
    "quote_table",
    "read_schema",
]

LONGEST: Final = 64
"""Characters of a name, at most."""
TIMES: Final = frozenset({"datetime", "timestamp"})
COUNTING: Final = frozenset({"tinyint", "smallint", "mediumint", "int", "bigint"})
_TEXTS: Final = frozenset(
    {"char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum", "set", "json", "uuid"}
)
_LOCAL: Final = ("current_timestamp", "now(", "localtime", "sysdate")
_BYTES: Final = frozenset({"binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"})


def quote(name: str) -> str:
    """As an identifier of a text with `%(…)s` in it."""
    return "`" + name.replace("`", "``").replace("%", "%%") + "`"


def quote_table(name: str) -> str:
    """The same of "table" or "database.table"."""
    return ".".join(map(quote, split(name)))


def bound(text: str, values: Mapping[str, Any]) -> str:
    """A text with its values written into it. Raises `ValueError` for a value that has no form."""
    return text % _Written(values)


class _Written(dict[str, str]):
    """Values as they stand in a statement; each is written when it is asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        self._values = values

    def __missing__(self, name: str) -> str:
        return text_of(self._values[name])


@attrs.frozen
class MysqlColumn:
    """One column.

    Attributes:
        name: As it is spelled.
        type: Such as "bigint" or "datetime".
        declared: Such as "bigint unsigned" or "datetime(6)".
        nullable: May it be NULL?
        default: As an expression; None: NULL, or none at all.
        computed: Is it GENERATED ALWAYS AS an expression?
        auto: Does it count by itself (AUTO_INCREMENT)?
        on_update: Does an UPDATE write the time into it?
        precision: Decimals of a time's seconds.
        folds: Does its collation take several spellings for one?
    """

    name: str
    type: str
    declared: str
    nullable: bool
    default: str | None
    computed: bool
    auto: bool
    on_update: bool
    precision: int
    folds: bool

    @property
    def filled(self) -> bool:
        """Does an insert that leaves it out get a value for it?"""
        return self.auto or self.default is not None

    @property
    def required(self) -> bool:
        """NOT NULL, and nothing fills it."""
        return not self.nullable and not self.filled and not self.computed

    @property
    def local(self) -> bool:
        """Does it hold no time zone, and is filled with the time of the session's own?"""
        default = (self.default or "").lower()
        return self.type == "datetime" and any(each in default for each in _LOCAL)

    @property
    def textual(self) -> bool:
        """Does it hold texts, JSON too?"""
        return self.type in _TEXTS

    @property
    def binary(self) -> bool:
        """Does it hold bytes?"""
        return self.type in _BYTES


@attrs.frozen
class Index:
    """One index that may be used.

    Attributes:
        name: As it is spelled.
        unique: Does no value occur twice?
        columns: In their order, up to the first one that is not ascending and whole.
        whole: Are these all?
    """

    name: str
    unique: bool
    columns: tuple[str, ...]
    whole: bool


@attrs.frozen
class MysqlSchema:
    """One table.

    Attributes:
        columns: Each by its name, in lower case, for names of columns have no case; in the table's order.
        indexes: Those that the optimizer may use.
        triggers: Are there triggers to be seen?
        engine: Such as "InnoDB".
    """

    columns: Mapping[str, MysqlColumn]
    indexes: Sequence[Index]
    triggers: bool
    engine: str

    def __getitem__(self, name: str) -> MysqlColumn:
        return self.columns[name.lower()]

    def __contains__(self, name: str) -> bool:
        return name.lower() in self.columns

    @property
    def names(self) -> Sequence[str]:
        """All columns, in the table's order."""
        return [column.name for column in self.columns.values()]

    @property
    def stored(self) -> Sequence[str]:
        """The columns that can be inserted, in the table's order."""
        return [column.name for column in self.columns.values() if not column.computed]

    @property
    def key(self) -> tuple[str, ...]:
        """The columns of the primary key, which ends every index; empty where there is none."""
        return next((index.columns for index in self.indexes if index.name == "PRIMARY"), ())

    def fills(self, name: str) -> bool:
        """Is there something that gives this column a value where an insert leaves it out?"""
        column = self[name]
        return column.filled or column.computed or self.triggers


_COLUMNS = """SELECT COLUMN_NAME, DATA_TYPE, COLUMN_TYPE, IS_NULLABLE, COLUMN_DEFAULT, EXTRA, DATETIME_PRECISION,
COLLATION_NAME FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = {schema} AND TABLE_NAME = {table}
ORDER BY ORDINAL_POSITION"""
_INDEXES = """SELECT * FROM information_schema.STATISTICS WHERE TABLE_SCHEMA = {schema} AND TABLE_NAME = {table}
ORDER BY INDEX_NAME, SEQ_IN_INDEX"""
_TABLE = """SELECT ENGINE, TABLE_TYPE, (SELECT COUNT(*) FROM information_schema.TRIGGERS
WHERE EVENT_OBJECT_SCHEMA = {schema} AND EVENT_OBJECT_TABLE = {table}) FROM information_schema.TABLES
WHERE TABLE_SCHEMA = {schema} AND TABLE_NAME = {table}"""
_TRIGGERS = """SELECT TRIGGER_NAME, CREATED FROM information_schema.TRIGGERS
WHERE EVENT_OBJECT_SCHEMA = {schema} AND EVENT_OBJECT_TABLE = {table} ORDER BY TRIGGER_NAME"""
_NEXT = re.compile(r" AUTO_INCREMENT=\d+")


def _where(session: MysqlSession, table: str) -> dict[str, str]:
    *schema, name = split(table)
    return {"schema": text_of(schema[0] if schema else session.server.database), "table": text_of(name)}


def fingerprint(session: MysqlSession, *tables: str) -> list[Any]:
    """Another one, when these tables' columns, indexes or triggers are others. Raises `pymysql.MySQLError`."""
    found: list[Any] = []
    for table in tables:
        try:
            shown, triggers = session.say(
                f"SHOW CREATE TABLE {quote_table(table).replace('%%', '%')}", _TRIGGERS.format(**_where(session, table))
            )
        except Exception as error:
            if code_of(error) not in MISSING:
                raise
            found.append(None)
        else:
            found.append((_NEXT.sub("", str(shown.rows[0][1])), list(triggers.rows)))
    return found


def read_schema(session: MysqlSession, table: str) -> MysqlSchema | None:
    """What this table is like; None where there is no such table (a view is none). Raises `pymysql.MySQLError`."""
    where = _where(session, table)
    tables, columns, indexes = session.say(*(text.format(**where) for text in (_TABLE, _COLUMNS, _INDEXES)))
    if not tables.rows or tables.rows[0][1] not in ("BASE TABLE", "SYSTEM VERSIONED"):
        return None
    engine, _, triggers = tables.rows[0]
    known = {row[0].lower(): _column(row) for row in columns.rows}
    return MysqlSchema(known, _indexes([dict(zip(indexes.columns, row, strict=True)) for row in indexes.rows]),
                       bool(triggers), engine or "")  # fmt: skip


def _column(row: Sequence[Any]) -> MysqlColumn:
    name, kind, declared, nullable, default, extra, precision, collation = row
    extra = extra.lower()
    text = None if default is None or default == "NULL" else str(default)
    if text is not None and "default_generated" not in extra and kind in _TEXTS and not text.startswith("'"):
        text = text_of(text)  # MySQL shows a text without its quotes
    return MysqlColumn(
        name=name,
        type=kind.lower(),
        declared=declared.lower(),
        nullable=nullable == "YES",
        default=text,
        computed=" generated" in f" {extra.replace('default_generated', '')}",
        auto="auto_increment" in extra,
        on_update="on update" in extra,
        precision=precision or 0,
        folds=collation is not None and not collation.endswith(("_bin", "_as_cs", "_cs", "_nopad_bin")),
    )


def _indexes(rows: Sequence[Mapping[str, Any]]) -> list[Index]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        unused = row.get("IS_VISIBLE") == "NO" or row.get("IGNORED") == "YES"  # MySQL; MariaDB
        if row["INDEX_TYPE"] == "BTREE" and not unused:
            found.setdefault(row["INDEX_NAME"], []).append(row)
    indexes: list[Index] = []
    for name, parts in found.items():
        columns: list[str] = []
        for part in parts:
            if part["COLUMN_NAME"] is None or part["SUB_PART"] is not None or part["COLLATION"] != "A":
                break
            columns.append(part["COLUMN_NAME"].lower())
        indexes.append(Index(name, not parts[0]["NON_UNIQUE"], tuple(columns), len(columns) == len(parts)))
    return indexes
