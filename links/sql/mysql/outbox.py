"""The record table of an outbox on MySQL and MariaDB: what it must be, and its statements. Runs in a thread."""

# ruff: noqa: S608 -- identifiers are quoted, values are bound

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import pymysql
from pymysql.cursors import Cursor

from links.errors import LinkRefused
from links.sql.inserting import Style, Written
from links.sql.jobs import Call
from links.sql.mysql.ddl import outbox_ddl
from links.sql.mysql.insert import MysqlInserter
from links.sql.mysql.inserting import check_strict, statement
from links.sql.mysql.inspect import check_engine, check_key, check_message, check_names, check_times
from links.sql.mysql.schema import COUNTING, TIMES, MysqlSchema, bound, quote, quote_table, read_schema
from links.sql.mysql.session import Answer, MysqlSession
from links.sql.mysql.statements import NOW, micros
from links.sql.mysql.trio_session import New
from links.sql.mysql.turn import MysqlTurn
from links.sql.outbox_table import OutboxTable
from links.sql.records import Record
from links.sql.table import split
from settlement.delivery import Letter

__all__ = ["MysqlRecords"]

_SENT_AT: Final = "declare it DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6))"
_MINUTE: Final = 60


class MysqlRecords:
    """As `Records`. `new` makes a connection of its own, for the turn."""

    driver = "pymysql"

    def __init__(self, table: OutboxTable, new: New) -> None:
        self.table, self._new = table, new
        self._letters = table.letters
        self._inserters: dict[str, MysqlInserter] = {}
        self._name, self._id, self._for = quote_table(table.table), quote(table.id), quote(table.name)
        done = table.processed_at
        self._open = f" AND {quote(done)} IS NULL" if done else ""
        columns = (table.id, table.name, table.payload, table.headers, table.partition_key)
        self._row = ", ".join(quote(column) if column else "NULL" for column in columns)

    def ddl(self) -> str:
        """As `Records.ddl`."""
        return outbox_ddl(split(self.table.table), self.table.roles)

    def turn(self) -> MysqlTurn:
        """As `Records.turn`."""
        return MysqlTurn(self._new, self.table.table)

    def _said(self, session: MysqlSession, text: str, values: Mapping[str, Any]) -> Answer:
        return session.say(bound(text, values))[0]

    # --- may it be one? --------------------------------------------------------------------------------------------

    def look(self, age: float) -> Call[Any]:
        """As `Records.look`."""
        return partial(self._look, age=age)

    def _look(self, session: MysqlSession, _: None, *, age: float) -> str:
        table, here = self.table, f"outbox table {self.table.table!r}"
        check_names((*split(table.table), *table.roles.values()), here)
        schema = read_schema(session, table.table)
        if schema is None:
            raise LinkRefused(f"{here}: there is no such table; create it, the library creates none")
        for role, column in table.roles.items():
            if column not in schema:
                raise LinkRefused(
                    f"{here}: there is no column {column!r} for the role {role}; it has {', '.join(schema.names)}; "
                    "add the column, or leave the role out of OutboxTable(…)"
                )
        check_engine(schema, here)
        check_times(self._letters, schema, here)
        if not schema[table.name].textual:
            raise LinkRefused(
                f"{here}: column {table.name!r} (name) is {schema[table.name].declared}; declare it VARCHAR(190) NOT "
                "NULL"
            )
        check_message(self._letters, schema, here)
        key = schema[table.id]
        if key.type not in COUNTING or not schema.fills(table.id):
            raise LinkRefused(
                f"{here}: column {table.id!r} (id) must be a whole number that the database gives; declare it BIGINT "
                "AUTO_INCREMENT PRIMARY KEY"
            )
        check_key(self._letters, schema, here)
        self._check_sent_at(session, schema, here)
        ago = f"SELECT CAST({NOW} - INTERVAL %(age)s MICROSECOND AS CHAR)"
        longest = 50 if schema[table.sent_at].type == "timestamp" else 1000
        age = min(age, longest * 365 * 86_400.0)
        return str(self._said(session, ago, {"age": micros(age)}).rows[0][0])

    def _check_sent_at(self, session: MysqlSession, schema: MysqlSchema, here: str) -> None:
        column = schema[self.table.sent_at]
        what = f"{here}: column {column.name!r} (sent_at)"
        if column.type not in TIMES:
            raise LinkRefused(f"{what} is {column.declared}; a time is DATETIME(6), in UTC: {_SENT_AT}")
        if column.computed or column.on_update:
            raise LinkRefused(f"{what} is written by the database itself; {_SENT_AT}")
        if column.default is None:
            raise LinkRefused(f"{what} has no default, so a record would have no age; {_SENT_AT}")
        if column.local:
            raise LinkRefused(
                f"{what} has the default {column.default}, which is the time of the session's own zone, and a DATETIME "
                f"holds UTC here; {_SENT_AT}"
            )
        found = session.say(f"SELECT ABS(TIMESTAMPDIFF(SECOND, ({column.default}), {NOW}))")[0].rows[0][0]
        if found is None or found >= _MINUTE:
            raise LinkRefused(f"{what} has the default {column.default}, which is not now; {_SENT_AT}")

    # --- statements --------------------------------------------------------------------------------------------------

    def add(self, name: str, letter: Letter) -> Call[int]:
        """As `Records.add`."""
        return partial(self._add, name=name, letter=letter)

    def _add(self, session: MysqlSession, _: None, *, name: str, letter: Letter) -> int:
        inserter = self._inserters.setdefault(name, MysqlInserter(self._letters, name))
        inserter.insert(session, letter, None, once=False)
        return int(session.say("SELECT LAST_INSERT_ID()")[0].rows[0][0])

    def is_processed(self, name: str, key: int) -> Call[bool | None]:
        """As `Records.is_processed`."""
        done = self.table.processed_at
        state = f"{quote(done)} IS NOT NULL" if done else "0"
        text = f"SELECT {state} FROM {self._name} WHERE {self._id} = %(id)s AND {self._for} = %(name)s"

        def call(session: MysqlSession, _: None) -> bool | None:
            found = self._said(session, text, {"id": key, "name": name}).rows
            return bool(found[0][0]) if found else None

        return call

    def one(self, key: int) -> Call[Record | None]:
        """As `Records.one`."""
        text = f"SELECT {self._row} FROM {self._name} WHERE {self._id} = %(id)s{self._open}"

        def call(session: MysqlSession, _: None) -> Record | None:
            found: Any = self._said(session, text, {"id": key}).rows
            row: Record | None = found[0] if found else None
            return row

        return call

    def page(self, names: Sequence[str], until: Any, after: int | None, room: int) -> Call[list[Record]]:
        """As `Records.page`."""
        at = quote(self.table.sent_at)
        beyond = "" if after is None else f" AND {self._id} > %(after)s"
        text = (
            f"SELECT {self._row} FROM {self._name} WHERE {self._for} IN %(names)s{self._open}{beyond} "
            f"AND ({at} IS NULL OR {at} <= %(until)s) ORDER BY {self._id} LIMIT %(room)s"
        )
        values = {"names": [*names], "until": until, "after": after, "room": room}

        def call(session: MysqlSession, _: None) -> list[Record]:
            rows: Any = self._said(session, text, values).rows
            found: list[Record] = [*rows]
            return found

        return call

    def sent(self, keys: Sequence[int]) -> Call[None]:
        """As `Records.sent`."""
        text = f"UPDATE {self._name} SET {quote(self.table.sent_at)} = {NOW} WHERE {self._id} IN %(ids)s"

        def call(session: MysqlSession, _: None) -> None:
            self._said(session, text, {"ids": [*keys]})

        return call

    def mark(self, name: str, key: int) -> Call[None]:
        """As `Records.mark`."""
        done = self.table.processed_at
        where = f"WHERE {self._id} = %(id)s AND {self._for} = %(name)s"
        text = (
            f"UPDATE {self._name} SET {quote(done)} = {NOW} {where}{self._open}"
            if done
            else f"DELETE FROM {self._name} {where}"
        )

        def call(session: MysqlSession, _: None) -> None:
            self._said(session, text, {"id": key, "name": name})

        return call

    # --- by a connection of the user's -------------------------------------------------------------------------------

    def record(self, connection: pymysql.Connection[Any], what: Written) -> int:
        """As `Records.record`. Raises `PublishNotAccepted` where the session's sql_mode is not strict."""
        with connection.cursor(Cursor) as cursor:
            check_strict(cursor, what.table.name)
            cursor.execute(*statement(what, "pyformat"))
            return int(cursor.lastrowid or 0)

    def record_statement(self, what: Written, style: Style) -> tuple[str, dict[str, Any]]:
        """As `Records.record_statement`; the id is the cursor's `lastrowid`."""
        return statement(what, style)
