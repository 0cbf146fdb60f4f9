"""The record table of an outbox on PostgreSQL: what it must be, and its statements.

Cancellation: the statement is cancelled on the server; it took effect or not.
"""

# ruff: noqa: S608 -- identifiers are quoted, values are bound

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from typing import Any

import psycopg
from psycopg.pq import PipelineStatus

from links.errors import LinkRefused, PublishNotAccepted
from links.sql.inserting import Style, Written, written
from links.sql.jobs import Call
from links.sql.outbox_table import OutboxTable
from links.sql.postgres.codes import BINDING, is_of_the_row, is_reshaped
from links.sql.postgres.ddl import outbox_ddl, plain
from links.sql.postgres.inserting import statement
from links.sql.postgres.inspect import check_key, check_message, check_times, instead
from links.sql.postgres.pin import Connect
from links.sql.postgres.schema import LONGEST, TIME, PostgresSchema, quote, quote_table, read_schema
from links.sql.postgres.trio_connection import TrioConnection
from links.sql.postgres.turn import PostgresTurn
from links.sql.records import Record
from links.sql.table import split
from settlement.delivery import Letter

__all__ = ["PostgresRecords"]

_NUMBERS = ("int2", "int4", "int8")
_SENT_AT = f"declare it {TIME} NOT NULL DEFAULT now()"
_AGO = "SELECT (clock_timestamp() - make_interval(secs => LEAST(%(age)s::float8, 1e11)))::text"
_NOW = "SELECT abs(extract(epoch FROM ({})::timestamptz - clock_timestamp())) < 60"


class PostgresRecords:
    """As `Records`. `connect`: a connection of its own, for the turn."""

    driver = "psycopg"

    def __init__(self, table: OutboxTable, connect: Connect) -> None:
        self.table, self._connect = table, connect
        self._letters = table.letters
        self._schema: PostgresSchema | None = None
        self._name, self._id, self._for = quote_table(table.table), f"j.{quote(table.id)}", f"j.{quote(table.name)}"
        done = table.processed_at
        self._open = f" AND j.{quote(done)} IS NULL" if done else ""

    def ddl(self) -> str:
        """As `Records.ddl`."""
        return outbox_ddl(split(self.table.table), self.table.roles)

    def turn(self) -> PostgresTurn:
        """As `Records.turn`."""
        return PostgresTurn(self._connect, self.table.table)

    async def _known(self, connection: TrioConnection) -> PostgresSchema:
        if self._schema is None:
            self._schema = await read_schema(connection, self.table.table)
        if self._schema is None:
            raise LinkRefused(f"there is no table {self.table.table!r}; create it, the library creates none")
        return self._schema

    async def _said(self, connection: TrioConnection, text: str, values: Mapping[str, Any]) -> psycopg.AsyncCursor[Any]:
        """Raises `psycopg.Error`; where the table may be another one by now, it is looked at by the next statement."""
        try:
            return await connection.execute(text.encode(), values)
        except psycopg.Error as error:
            if is_reshaped(error):
                self._schema = None
                connection.unprepare()
            raise

    # --- may it be one? --------------------------------------------------------------------------------------------

    def look(self, age: float) -> Call[Any]:
        """As `Records.look`."""
        return partial(self._look, age=age)

    async def _look(self, connection: TrioConnection, _: None, *, age: float) -> str:
        table, here = self.table, f"outbox table {self.table.table!r}"
        for name in (*split(table.table), *table.roles.values()):
            if len(name.encode()) > LONGEST:
                raise LinkRefused(f"{here}: PostgreSQL cuts {name!r} off at {LONGEST} bytes; give it a shorter name")
        self._schema = None
        schema = await read_schema(connection, table.table)
        if schema is None:
            why = await instead(connection, table.table)
            raise LinkRefused(f"{here}: there is no such table{why}; create it, the library creates none")
        for role, column in table.roles.items():
            if column not in schema:
                raise LinkRefused(
                    f"{here}: there is no column {column!r} for the role {role}; it has {', '.join(schema.names)}; "
                    "add the column, or leave the role out of OutboxTable(…)"
                )
        if schema.unlogged:
            raise LinkRefused(
                f"{here}: it is UNLOGGED, so a crash of the server empties it; say ALTER TABLE … SET LOGGED"
            )
        check_times(self._letters, schema, here)
        if not schema[table.name].textual:
            raise LinkRefused(
                f"{here}: column {table.name!r} (name) is {schema[table.name].type}; declare it text NOT NULL"
            )
        check_message(self._letters, schema, here)
        key = schema[table.id]
        if key.type not in _NUMBERS or not schema.fills(table.id):
            raise LinkRefused(
                f"{here}: column {table.id!r} (id) must be a whole number that the database gives; declare it bigint "
                "GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY"
            )
        await check_key(connection, self._letters, schema, here)
        await self._check_sent_at(connection, schema, here)
        self._schema = schema
        (ago,) = await (await connection.execute(_AGO.encode(), {"age": age})).fetchone() or ("",)
        return str(ago)

    async def _check_sent_at(self, connection: TrioConnection, schema: PostgresSchema, here: str) -> None:
        column = schema[self.table.sent_at]
        what = f"{here}: column {column.name!r} (sent_at)"
        if column.type != TIME:
            raise LinkRefused(
                f"{what} is {column.type}; a time is {TIME}, so that it means the same in every session: {_SENT_AT}"
            )
        if column.computed:
            raise LinkRefused(f"{what} is GENERATED ALWAYS AS an expression, so nothing can be written; {_SENT_AT}")
        if column.default is None:
            raise LinkRefused(f"{what} has no default, so a record would have no age; {_SENT_AT}")
        asked = _NOW.format(column.default.replace("%", "%%"))
        found = await (await connection.execute(asked.encode())).fetchone()
        if found is None or not found[0]:
            raise LinkRefused(f"{what} has the default {column.default}, which is not now; {_SENT_AT}")

    # --- statements --------------------------------------------------------------------------------------------------

    def add(self, name: str, letter: Letter) -> Call[int]:
        """As `Records.add`."""
        return partial(self._add, name=name, letter=letter)

    async def _add(self, connection: TrioConnection, _: None, *, name: str, letter: Letter) -> int:
        schema = await self._known(connection)
        table = self._letters
        body: bytes | str = letter.body
        if self.table.payload in schema and schema[self.table.payload].textual:
            try:
                body = letter.body.decode()
            except UnicodeDecodeError:
                raise PublishNotAccepted(
                    f"column {self.table.payload!r} is {schema[self.table.payload].type}, and the body is no UTF-8"
                ) from None
        what = written(
            table,
            body,
            letter.headers,
            key=letter.key,
            group=name,
            delay=letter.deliver_after,
            due=None,
            id=None,
            once=False,
        )
        try:
            cursor = await self._said(connection, *self.record_statement(what, "pyformat"))
        except BINDING as error:
            if connection.closed or not (is_reshaped(error) or is_of_the_row(error)):
                raise
            raise PublishNotAccepted(str(error)) from error
        return _key_of(await cursor.fetchone())

    def is_processed(self, name: str, key: int) -> Call[bool | None]:
        """As `Records.is_processed`."""
        done = self.table.processed_at
        state = f"j.{quote(done)} IS NOT NULL" if done else "false"
        text = f"SELECT {state} FROM {self._name} j WHERE {self._id} = %(id)s::int8 AND {self._for} = %(name)s"

        async def call(connection: TrioConnection, _: None) -> bool | None:
            found = await (await self._said(connection, text, {"id": key, "name": name})).fetchone()
            return None if found is None else bool(found[0])

        return call

    def _row(self, schema: PostgresSchema) -> str:
        table = self.table
        read = (schema.read(each, "j") if each else "NULL" for each in (table.payload, table.headers))
        partition = f"j.{quote(table.partition_key)}" if table.partition_key else "NULL"
        return f"SELECT {self._id}::int8, {self._for}::text, {', '.join(read)}, {partition} FROM {self._name} j"

    def one(self, key: int) -> Call[Record | None]:
        """As `Records.one`."""

        async def call(connection: TrioConnection, _: None) -> Record | None:
            text = f"{self._row(await self._known(connection))} WHERE {self._id} = %(id)s::int8{self._open}"
            found: Any = await (await self._said(connection, text, {"id": key})).fetchone()
            row: Record | None = found
            return row

        return call

    def page(self, names: Sequence[str], until: Any, after: int | None, room: int) -> Call[list[Record]]:
        """As `Records.page`."""
        at = f"j.{quote(self.table.sent_at)}"
        beyond = "" if after is None else f" AND {self._id} > %(after)s::int8"
        where = (
            f"WHERE {self._for} = ANY(%(names)s::text[]){self._open}{beyond} "
            f"AND ({at} IS NULL OR {at} <= %(until)s::timestamptz) ORDER BY {self._id} LIMIT %(room)s"
        )
        values = {"names": [*names], "until": until, "after": after, "room": room}

        async def call(connection: TrioConnection, _: None) -> list[Record]:
            text = f"{self._row(await self._known(connection))} {where}"
            rows: Any = await (await self._said(connection, text, values)).fetchall()
            found: list[Record] = rows
            return found

        return call

    def sent(self, keys: Sequence[int]) -> Call[None]:
        """As `Records.sent`."""
        text = (
            f"UPDATE {self._name} j SET {quote(self.table.sent_at)} = clock_timestamp() "
            f"WHERE {self._id} = ANY(%(ids)s::int8[])"
        )

        async def call(connection: TrioConnection, _: None) -> None:
            await self._said(connection, text, {"ids": [*keys]})

        return call

    def mark(self, name: str, key: int) -> Call[None]:
        """As `Records.mark`."""
        done = self.table.processed_at
        where = f"WHERE {self._id} = %(id)s::int8 AND {self._for} = %(name)s"
        text = (
            f"UPDATE {self._name} j SET {quote(done)} = clock_timestamp() {where}{self._open}"
            if done
            else f"DELETE FROM {self._name} j {where}"
        )

        async def call(connection: TrioConnection, _: None) -> None:
            await self._said(connection, text, {"id": key, "name": name})

        return call

    # --- by a connection of the user's -------------------------------------------------------------------------------

    def record_statement(self, what: Written, style: Style) -> tuple[str, dict[str, Any]]:
        """As `Records.record_statement`; it gives one row, the id."""
        text, values = statement(what, style)
        name = plain(self.table.id)
        escaped = {"pyformat": name.replace("%", "%%"), "text": name.replace(":", "\\:")}.get(style, name)
        return f"{text} RETURNING {escaped}", values

    def record(
        self, connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], what: Written
    ) -> int | Awaitable[int]:
        """As `Records.record`."""
        if connection.pgconn.pipeline_status != PipelineStatus.OFF:
            raise ValueError("connection must not be in pipeline mode: there is no answer there")
        text, values = self.record_statement(what, "pyformat")
        if isinstance(connection, psycopg.AsyncConnection):
            return _awaited(connection, text, values)
        with psycopg.Cursor(connection) as cursor:
            return _key_of(cursor.execute(text.encode(), values).fetchone())


async def _awaited(connection: psycopg.AsyncConnection[Any], text: str, values: Mapping[str, Any]) -> int:
    async with psycopg.AsyncCursor(connection) as cursor:
        return _key_of(await (await cursor.execute(text.encode(), values)).fetchone())


def _key_of(row: tuple[Any, ...] | None) -> int:
    if row is None:
        raise PublishNotAccepted("no record was written: a trigger has ignored it")
    return int(row[0])
