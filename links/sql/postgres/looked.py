"""A queue table on PostgreSQL as it was looked at: its columns and the texts for it; the same for every form.

The table is looked at again once a second at most, before a claim, and whenever a statement fails as one would on
columns that are others: what no longer fits is a `LinkRefused` from every call, with nothing written, until it does.

Cancellation, anywhere: the statement is cancelled on the server, and took effect or not.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar, cast

import psycopg
import trio

from links.errors import LinkRefused
from links.sql.custom import for_psycopg
from links.sql.postgres.inspect import inspect
from links.sql.postgres.schema import PostgresSchema, fingerprint, quote, quote_table, read_schema
from links.sql.postgres.statements import Rows
from links.sql.postgres.trio_connection import TrioConnection
from links.sql.rows import Row, Token
from links.sql.table import Table
from settlement.sql import ClaimForm, Custom

__all__ = ["Ignored", "Looked"]

T = TypeVar("T", bound=Rows)

_log = logging.getLogger("trio_settlement")

AGAIN: Final = 1.0
"""Seconds for which the table's columns count as known."""
_TRIES: Final = 5
"""So often is a row moved anew, where the tables are altered meanwhile."""


PAUSES: Final = (0.001, 0.004, 0.016)
"""Seconds before a verb for a row that is ours and locked is said again: a claim of somebody else's locks, for its own
length, each row that was due when it began, also one that has been leased since."""

LOCKED: Final = (
    "it touched no row, although the lease is ours: another transaction has locked the row, or a trigger ignores it"
)


class Ignored(Exception):
    """A statement touched no row, and the row was there."""


class _Altered(Exception):
    """The tables are not what they were: what was written is rolled back."""


class Looked(Generic[T]):
    """One queue of one table, once `look` has been called."""

    def __init__(
        self,
        table: Table[Any],
        group: str | None,
        claim: ClaimForm,
        *,
        subscription: str,
        dead_letter: str | None = None,
        custom: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.table, self.group, self.claim_form = table, group, claim
        self.warnings: list[str] = []
        """What was told so far: said once."""
        self._subscription, self._dead_letter, self.own = subscription, dead_letter, custom
        self._known: list[tuple[Any, ...]] = []
        self._looked = 0.0
        self.schema: PostgresSchema
        self.texts: T

    async def look(self, connection: TrioConnection) -> None:
        """Look at the table. Raises `LinkRefused` where it is no queue, and `psycopg.Error`."""
        self._known = []  # where it is refused, the next one looks again
        known = await self._fingerprint(connection)
        look = await inspect(
            connection,
            self.table,
            self.group,
            self.claim_form,
            subscription=self._subscription,
            dead_letter=self._dead_letter,
            custom=self.own,
        )
        self._known, self.schema, self.texts = known, look.schema, cast("T", look.texts)
        self._looked = trio.current_time()
        for line in look.warnings:
            if line not in self.warnings:
                self.warnings.append(line)

    @property
    def known(self) -> bool:
        """Is the last look at the tables not long ago?"""
        return trio.current_time() < self._looked + AGAIN

    async def look_again(self, connection: TrioConnection, *, now: bool = False) -> None:
        """Look at the tables where they have changed; not `now`: if the last look is a while ago.

        Raises as `look`.
        """
        if not now and self.known:
            return
        if await self._fingerprint(connection) != self._known:
            told = len(self.warnings)
            await self.look(connection)
            for line in self.warnings[told:]:
                _log.warning("%s", line)
        self._looked = trio.current_time()

    async def _fingerprint(self, connection: TrioConnection) -> list[tuple[Any, ...]]:
        tables = [self.table.name, *([self._dead_letter] if self._dead_letter else [])]
        try:
            return await fingerprint(connection, *tables)
        except psycopg.errors.InsufficientPrivilege as error:
            raise LinkRefused(
                f"subscription {self._subscription!r}, table {self.table.name!r}: {error}; grant this user USAGE on "
                f"the schema of {' and '.join(map(repr, tables))}"
            ) from error

    def row(self, row: tuple[Any, ...]) -> Row:
        """In row mode the columns as one `dict`, as they were before the claim, with an empty lease."""
        if self.table.payload is not None:
            return row
        columns = dict(zip(self.schema.names, row[6:], strict=True))
        if self.table.locked_until is not None:
            columns[self.table.locked_until] = None
        return (*row[:6], columns)

    async def moved(self, connection: TrioConnection, values: dict[str, Any], to: str, key: Any) -> bool:
        """Move the row of this key to the table `to`; False: nothing was touched. `values`: what `Rows.move` binds.

        Raises `psycopg.Error` and `LinkRefused`.

        Its id goes with it; where that is taken, and the other table fills its own, the database gives a new one.
        """
        try:
            return bool(await self._moved(connection, values, to))
        except psycopg.errors.UniqueViolation as error:
            taken = error
        if connection.closed or not await self._fills_itself(connection, to, key):
            raise taken
        moved = await self._moved(connection, values, to, self.table.id)
        for new in moved:
            _log.warning(
                "subscription %r, table %r: row %s is row %s of the dead-letter table %r, where its own id was taken; "
                "an identity gives no id twice",
                self._subscription,
                self.table.name,
                key,
                new,
                to,
            )
        return bool(moved)

    async def _moved(self, connection: TrioConnection, values: dict[str, Any], to: str, *without: str) -> list[str]:
        """Move it, and look at the tables again while nobody can alter them: no column is left behind.

        The id there, or nothing. Raises `Ignored` where the row would be nowhere.
        """
        for _ in range(_TRIES):
            columns = [column for column in self.schema.stored if column not in without]
            try:
                async with connection.transaction():
                    ((gone, arrived, new),) = await self.rows(connection, self.texts.move(to, columns), values)
                    if await self._fingerprint(connection) != self._known:
                        raise _Altered
                    if gone and not arrived:
                        raise Ignored(f"a trigger of table {to!r} has ignored the row, so it stays where it is")
            except _Altered:
                await self.look_again(connection, now=True)
            else:
                return [new] if arrived else []
        raise Ignored(f"the tables are altered all the time, and a row of {self.table.name!r} moves whole")

    async def _fills_itself(self, connection: TrioConnection, to: str, key: Any) -> bool:
        """Is this id taken in the table `to`, and does that table give a row an id by itself?"""
        dead = await read_schema(connection, to)
        if dead is None or self.table.id not in dead or not dead[self.table.id].filled:
            return False
        query = f"SELECT FROM {quote_table(to)} WHERE {quote(self.table.id)} = %(id)s::{dead[self.table.id].array}"
        return bool(await self.rows(connection, query, {"id": key}))

    async def carry_out(self, connection: TrioConnection, verb: Custom, token: Token) -> None:
        """Carry out a statement of the user's own. Raises `Ignored` where it touched nothing, and `psycopg.Error`."""
        key, until, attempt = token
        values = {
            "id": key,
            "token": until,
            "attempt": attempt,
            "delay": verb.delay,
            "group": self.group if verb.group is None else verb.group,
        }
        async with connection.transaction():
            if not (await connection.execute(for_psycopg(verb.text).encode(), values)).rowcount:
                raise Ignored(f"the statement for {verb.event!r} touched no row")

    @staticmethod
    async def rows(connection: TrioConnection, statement: str, values: dict[str, Any]) -> list[tuple[Any, ...]]:
        """What one statement gives. Raises `psycopg.Error`."""
        cursor = await connection.execute(statement.encode(), values)
        return await cursor.fetchall()
