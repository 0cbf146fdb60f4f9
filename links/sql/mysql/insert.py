"""Writes letters as rows: one by one statement, many by few. Runs in a thread.

`once` is a plain INSERT; where a key is taken it is looked whether it is the id's. INSERT IGNORE would pass over every
other error, too, and ON DUPLICATE KEY UPDATE takes a row of any unique key for the same.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, TypeVar

import attrs
import pymysql

from links.errors import PublishNotAccepted
from links.sql.jobs import Insert
from links.sql.letters import When, row_of
from links.sql.mysql.codes import BINDING, TAKEN, code_of, first_line, is_of_the_row, is_reshaped
from links.sql.mysql.looked import BEGIN, again
from links.sql.mysql.schema import MysqlColumn, MysqlSchema, bound, quote, quote_table, read_schema
from links.sql.mysql.session import MysqlSession
from links.sql.mysql.statements import in_utc, insert, later, micros
from links.sql.table import Table
from settlement.delivery import Letter

__all__ = ["MysqlInserter", "as_stored"]

T = TypeVar("T")

_FILLS: Final = "BIGINT AUTO_INCREMENT"
_MOST: Final = 1000
"""Rows by one statement."""
_EARLIEST: Final = datetime(1970, 1, 1, 0, 0, 1)  # noqa: DTZ001 -- as a column holds it
_LATEST: Final = datetime(2038, 1, 19, 3, 14, 7)  # noqa: DTZ001
"""The first and the last second of a TIMESTAMP."""


@attrs.frozen
class _Later:
    """So many seconds from now, by the database's clock."""

    seconds: float


def _due(_column: str, when: When) -> _Later | datetime:
    return when if isinstance(when, datetime) else _Later(when)


def as_stored(due: datetime, column: MysqlColumn) -> datetime:
    """An instant as the column holds it, in UTC, never earlier; one in the past may be the column's first moment.

    Raises `PublishNotAccepted` for one behind the column's last.
    """
    unit: int = 10 ** (6 - column.precision)
    try:
        when = in_utc(due)
        when += timedelta(microseconds=-when.microsecond % unit)
    except OverflowError:
        raise PublishNotAccepted(f"column {column.name!r} is {column.declared}, which ends before {due}") from None
    if column.type == "timestamp":
        if when > _LATEST:
            raise PublishNotAccepted(f"column {column.name!r} is {column.declared}, which ends before {due}")
        return max(when, _EARLIEST)
    return when


@attrs.define(eq=False)
class MysqlInserter:
    """Inserts into one table, for one group.

    Attributes:
        table: Which one.
        group: Which of its groups; None: it has none.
    """

    table: Table[Any]
    group: str | None
    _schema: MysqlSchema | None = None

    def insert(self, session: MysqlSession, letter: Letter, key: Any, *, once: bool) -> bool:
        """Insert one row; `once`: False where the id is there already.

        Raises `PublishNotAccepted`, and `BINDING` where the row is not to blame.
        """
        known = self._schema is not None
        schema = self._look(session)
        failure: Exception
        try:
            return again(partial(self._write, session, schema, letter, key, once=once), session)
        except PublishNotAccepted as error:
            failure = error
            reshaped = True  # the table may hold it by now
        except BINDING as error:
            reshaped = is_reshaped(error)
            if session.closed or not (reshaped or is_of_the_row(error)):
                raise
            failure = error
        if reshaped:
            self._schema = None
            if known:
                return self.insert(session, letter, key, once=once)
        raise self._refused(failure) from failure

    def _refused(self, failure: Exception) -> PublishNotAccepted:
        if isinstance(failure, PublishNotAccepted):
            return failure
        return PublishNotAccepted(f"table {self.table.name!r}: {first_line(failure)}")

    def _look(self, session: MysqlSession) -> MysqlSchema:
        """The table as it is known. Raises `PublishNotAccepted` where there is none, or it has no transactions."""
        if self._schema is None:
            schema = read_schema(session, self.table.name)
            if schema is None:
                raise PublishNotAccepted(f"there is no table {self.table.name!r}")
            self._schema = schema
        return self._schema

    def _write(self, session: MysqlSession, schema: MysqlSchema, letter: Letter, key: Any, *, once: bool) -> bool:
        row = row_of(self.table, schema, letter, key, group=self.group, due=_due, fills=_FILLS)
        try:
            session.say(self._text(schema, [row]))
        except pymysql.MySQLError as error:
            if not once or session.closed or code_of(error) not in TAKEN or not self._is_there(session, key):
                raise
            return False
        return True

    def _is_there(self, session: MysqlSession, key: Any) -> bool:
        text = f"SELECT 1 FROM {quote_table(self.table.name)} WHERE {quote(self.table.id)} = %(id)s"  # noqa: S608
        return bool(session.say(bound(text, {"id": key}))[0].rows)

    def _text(self, schema: MysqlSchema, rows: Sequence[dict[str, Any]]) -> str:
        """One INSERT for rows of the same columns. Raises `PublishNotAccepted`, and `ValueError`."""
        values = dict[str, Any]()
        texts = [
            [self._written(schema, column, value, f"v{number}_{place}", values) for place, (column, value) in each]
            for number, each in enumerate(map(enumerate, (row.items() for row in rows)))
        ]
        return bound(insert(self.table.name, list(rows[0]), texts), values)

    def _written(self, schema: MysqlSchema, column: str, value: Any, name: str, values: dict[str, Any]) -> str:
        if isinstance(value, _Later):
            values[name] = micros(value.seconds, schema[column])
            return later(schema[column], name)
        if isinstance(value, datetime) and column == self.table.retry_after:
            value = as_stored(value, schema[column])
        if isinstance(value, bytes) and column in schema and schema[column].textual:
            raise PublishNotAccepted(
                f"table {self.table.name!r}: column {column!r} is {schema[column].declared}, and the value is no UTF-8"
            )
        values[name] = value
        return f"%({name})s"

    def insert_all(self, session: MysqlSession, job: Insert) -> None:
        """Insert the job's letters in their order, in one transaction; its `number` says at which of them it failed.

        Those that follow each other and have the same columns are one statement. Where that fails they are said again
        one by one, all from the beginning. Raises as `insert`: none was inserted.
        """
        singly = set[int]()
        fresh = self._schema is None
        while True:
            try:
                again(partial(self._all, session, job, singly), session)
                job.inserted, job.number = len(job.letters), 0
                return
            except (PublishNotAccepted, *BINDING) as error:
                refused = isinstance(error, PublishNotAccepted)
                if session.closed or not (refused or is_reshaped(error) or is_of_the_row(error)):
                    job.number = 0  # no letter is to blame
                    raise
                if fresh and self._size <= 1:
                    raise self._refused(error) from error
            singly.update(range(job.number - 1, job.number - 1 + max(self._size, 1)))
            self._schema, fresh = None, True  # it may be another table by now

    _size: int = 0
    """How many rows the last statement of `insert_all` had."""

    def _all(self, session: MysqlSession, job: Insert, singly: Container[int]) -> None:
        self._size, job.number, done = 1, 0, 0
        schema = self._look(session)
        session.say(BEGIN)
        while done < len(job.letters):
            self._size, job.number = 1, done + 1
            rows = self._alike(session, schema, job.letters, done, singly)
            self._size = len(rows)
            session.say(self._text(schema, rows))
            done += len(rows)
        self._size = job.number = 0  # what COMMIT refuses is no one letter's
        session.say("COMMIT")

    def _alike(
        self,
        session: MysqlSession,
        schema: MysqlSchema,
        letters: Sequence[tuple[Any, Letter]],
        first: int,
        singly: Container[int],
    ) -> list[dict[str, Any]]:
        """The rows of the letters from `first` on that one statement may write: 1 or more.

        Raises `PublishNotAccepted` where the table cannot hold the first.
        """
        rows: list[dict[str, Any]] = []
        size = 0
        for number in range(first, min(first + _MOST, len(letters))):
            key, letter = letters[number]
            size += 4 * len(letter.body) + 1000  # as digits, and a text may be escaped
            if rows and (number in singly or size > session.packet):
                break
            try:
                row = row_of(self.table, schema, letter, key, group=self.group, due=_due, fills=_FILLS)
            except PublishNotAccepted:
                if rows:
                    break  # its turn comes
                raise
            if rows and list(row) != list(rows[0]):
                break
            rows.append(row)
            if first in singly or not row:
                break
        return rows
