"""A queue table on MySQL or MariaDB as it was looked at: its columns and the texts for it; the same for every form.

The table is looked at again once a second at most, before a claim, and whenever a statement fails as one would on
columns that are others: what no longer fits is a `LinkRefused` from every call, with nothing written, until it does.
Runs in a thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar, cast

import pymysql

from links.errors import LinkRefused
from links.sql.mysql.codes import DENIED, TAKEN, code_of, first_line, is_again
from links.sql.mysql.custom import values_of
from links.sql.mysql.inspect import GRANT, inspect
from links.sql.mysql.schema import MysqlSchema, bound, fingerprint, quote, quote_table, read_schema
from links.sql.mysql.session import Answer, MysqlSession
from links.sql.mysql.statements import Rows
from links.sql.rows import Row, Token
from links.sql.table import Table
from settlement.sql import ClaimForm, Custom

__all__ = ["BEGIN", "PAUSES", "Ignored", "Looked", "again", "rolled_back"]

T = TypeVar("T", bound=Rows)
R = TypeVar("R")

_log = logging.getLogger("trio_settlement")

BEGIN: Final = "START TRANSACTION"
AGAIN: Final = 1.0
"""Seconds for which the table's columns count as known."""
PAUSES: Final = (0.001, 0.004, 0.016)
"""Seconds before a verb for a row that is ours and locked is said again: a claim of somebody else's locks, for its own
length, each row that it looks at."""
_TRIES: Final = 8
"""So often is a transaction begun anew that others only got into the way of."""


class Ignored(Exception):
    """A statement touched no row, and the row was there."""


@contextmanager
def rolled_back(session: MysqlSession) -> Generator[None, None, None]:
    """What fails in here leaves no transaction open."""
    try:
        yield
    except BaseException:
        if not session.closed:
            session.say("ROLLBACK")
        raise


def again(call: Callable[[], R], session: MysqlSession) -> R:
    """Call it; a transaction that others only got into the way of (a deadlock, a wait for a lock) is begun anew.

    Raises what the last try did.
    """
    for number in range(1, _TRIES):
        try:
            with rolled_back(session):
                return call()
        except pymysql.MySQLError as error:
            if session.closed or not is_again(error):
                raise
        time.sleep(0.002 * number)  # in a thread
    with rolled_back(session):
        return call()


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
        self._known: list[Any] = []
        self._looked = 0.0
        self.schema: MysqlSchema
        self.texts: T

    def look(self, session: MysqlSession) -> None:
        """Look at the table. Raises `LinkRefused` where it is no queue, and `pymysql.MySQLError`."""
        self._known = []  # where it is refused, the next one looks again
        known = self._fingerprint(session)
        look = inspect(
            session,
            self.table,
            self.claim_form,
            subscription=self._subscription,
            dead_letter=self._dead_letter,
            custom=self.own,
        )
        self._known, self.schema, self.texts = known, look.schema, cast("T", look.texts)
        self._looked = time.monotonic()
        for line in look.warnings:
            if line not in self.warnings:
                self.warnings.append(line)

    @property
    def known(self) -> bool:
        """Is the last look at the tables not long ago?"""
        return time.monotonic() < self._looked + AGAIN

    def look_again(self, session: MysqlSession, *, now: bool = False) -> None:
        """Look at the tables where they have changed; not `now`: if the last look is a while ago.

        Raises as `look`.
        """
        if not now and self.known:
            return
        if self._fingerprint(session) != self._known:
            told = len(self.warnings)
            self.look(session)
            for line in self.warnings[told:]:
                _log.warning("%s", line)
        self._looked = time.monotonic()

    def _fingerprint(self, session: MysqlSession) -> list[Any]:
        try:
            return fingerprint(session, self.table.name, *([self._dead_letter] if self._dead_letter else []))
        except pymysql.MySQLError as error:
            if code_of(error) not in DENIED:
                raise
            raise LinkRefused(
                f"subscription {self._subscription!r}, table {self.table.name!r}: {first_line(error)}; {GRANT}"
            ) from error

    def text(self, text: str, **values: Any) -> str:
        """A text with its values; those that every one of this queue has need not be named."""
        return bound(text, {"group": self.group, **values})

    def row(self, row: Sequence[Any], token: Any) -> Row:
        """A row of `Rows.selected`, with its token; in row mode the columns as one `dict`, as before the claim."""
        (key, *fixed), rest = self.texts.read_as(row)
        head = (key, token, *fixed)
        if self.table.payload is not None:
            return head
        columns = dict(zip(self.schema.names, rest, strict=True))
        if self.table.locked_until is not None:
            columns[self.schema[self.table.locked_until].name] = None
        return (*head, columns)

    def moved(self, session: MysqlSession, key: Any, to: str) -> None:
        """Move the row of this key, which this transaction has locked, to the table `to`.

        Its id goes with it; where that is taken, and the other table fills its own, the database gives a new one. The
        tables are looked at while nobody can alter them: no column is left behind. Raises `pymysql.MySQLError`,
        `LinkRefused`, and `Ignored` where the row would be nowhere; then nothing of it stands when the transaction, or
        what has begun behind a savepoint, is rolled back.
        """
        new = self._copied(session, key, to)
        (deleted,) = session.say(self.text(self.texts.delete, ids=[key]))
        if not deleted.touched:
            raise Ignored("the row was copied, and could not be deleted")
        if new is not None:
            _log.warning(
                "subscription %r, table %r: row %s is row %s of the dead-letter table %r, where its own id was taken; "
                "an AUTO_INCREMENT gives no id twice",
                self._subscription,
                self.table.name,
                key,
                new,
                to,
            )

    def _copied(self, session: MysqlSession, key: Any, to: str) -> Any:
        """The id of the copy, where it is another one."""
        lock = f"SELECT 1 FROM {quote_table(to)} LIMIT 0"  # noqa: S608 -- from here on nobody alters it
        session.say(bound(lock, {}))
        self.look_again(session, now=True)
        columns = self.schema.stored
        try:
            session.say(self.text(self.texts.copy(to, columns), ids=[key]))
        except pymysql.MySQLError as error:
            if session.closed or code_of(error) not in TAKEN or not self._fills_itself(session, to, key):
                raise
        else:
            return None
        others = [column for column in columns if column.lower() != self.table.id.lower()]
        *_, new = session.say(self.text(self.texts.copy(to, others), ids=[key]), "SELECT LAST_INSERT_ID()")
        return new.rows[0][0]

    def _fills_itself(self, session: MysqlSession, to: str, key: Any) -> bool:
        """Is this id taken in the table `to`, and does that table give a row an id by itself?"""
        dead = read_schema(session, to)
        if dead is None or self.table.id not in dead or not dead[self.table.id].filled:
            return False
        query = f"SELECT 1 FROM {quote_table(to)} WHERE {quote(self.table.id)} = %(id)s"  # noqa: S608 -- bound
        return bool(session.say(bound(query, {"id": key}))[0].rows)

    def carry_out(self, session: MysqlSession, verb: Custom, token: Token) -> None:
        """Carry out a statement of the user's own. Raises `Ignored` where it touched nothing, and what it raises."""
        key, until, attempt = token
        values = {
            "id": key,
            "token": until,
            "attempt": attempt,
            "delay": verb.delay,
            "group": self.group if verb.group is None else verb.group,
        }
        answers = session.say(values_of(verb.text, values))
        if not any(map(_did, answers)):
            raise Ignored(f"the statement for {verb.event!r} touched no row")


def _did(answer: Answer) -> bool:
    return bool(answer.rows or (not answer.columns and answer.touched))
