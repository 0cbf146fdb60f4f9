"""The advisory form on MySQL and MariaDB: a claim is a named lock of a connection (GET_LOCK), in no transaction.

A claim first looks for due rows whose lock nobody holds; then it tries the lock of one after the other, without
waiting, and counts the attempt of what it has won, by one message. A settlement is one message: the verbs in one
transaction, then the unlocking. A verb that fails releases its lock all the same, and its row is as it was when it was
claimed. (https://dev.mysql.com/doc/refman/en/locking-functions.html)

Cancellation, anywhere: the connection is closed, and the server releases what it had locked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import pymysql

from links.abc import Verdict
from links.sql.dialect import Writer
from links.sql.jobs import Passing
from links.sql.mysql.codes import BINDING, first_line, is_of_the_row
from links.sql.mysql.held_statements import AdvisoryStatements
from links.sql.mysql.looked import BEGIN, Ignored
from links.sql.mysql.pin import MysqlPin, PinnedForm, lost
from links.sql.mysql.session import MysqlSession, text_of
from links.sql.mysql.statements import none_of
from links.sql.pin import Settled
from links.sql.rows import Row
from settlement.sql import Custom, MoveToTable, PutBack, Verb

__all__ = ["AdvisoryPin", "MysqlAdvisory"]

_log = logging.getLogger("trio_settlement")

_AHEAD: Final = 15
"""Rows that are looked at beyond those that are wanted: others may take the first ones."""
_FREED: Final = "it was not applied, and the lock was released, so the row is as it was"


class MysqlAdvisory(PinnedForm[AdvisoryStatements]):
    """A queue whose rows are in work under a lock on their key."""

    def __init__(self, *asked: Any, **names: Any) -> None:
        super().__init__(*asked, **names)
        self.taken: dict[str, object] = {}
        """The locks that this link holds or tries now, each with its pin: so its places do not try each other's."""

    def pin(self, writer: Writer, limit: int) -> AdvisoryPin:  # noqa: ARG002 -- it has a connection of its own
        """A new one, not connected yet."""
        return AdvisoryPin(self)


class AdvisoryPin(MysqlPin[AdvisoryStatements]):
    """One connection, and the keys that it has locked."""

    _form: MysqlAdvisory

    def __init__(self, form: MysqlAdvisory) -> None:
        super().__init__(form)
        self._keys: dict[Any, str] = {}
        """By the row's id."""

    def close(self) -> None:
        """As `Pin.close`."""
        self._forget(list(self._keys))
        super().close()

    def _forget(self, ids: Sequence[Any]) -> list[str]:
        """The locks of these rows are released, or are about to be."""
        locks = [self._keys.pop(key) for key in ids]
        for lock in locks:
            self._form.taken.pop(lock, None)
        return locks

    def _claim(self, session: MysqlSession, passing: Passing, room: int) -> Sequence[Row]:
        size = room + _AHEAD
        over = none_of([*passing.over, *passing.failed])
        (found,) = session.say(self._form.text(self._form.texts.candidates, over=over, room=size))
        passing.complete = len(found.rows) < size
        rows: list[Row] = []
        for key, lock, attempt in found.rows:
            if len(rows) == room or passing.enough:
                passing.complete = False
                break
            if lock in self._keys.values() or self._form.taken.setdefault(lock, self) is not self:
                continue
            try:
                rows += self._taken(session, (key, lock, attempt), passing)
            except BINDING as error:
                if session.closed:
                    raise
                session.say(f"DO RELEASE_LOCK({text_of(lock)})")  # whatever failed: else nobody had the row any more
                if not is_of_the_row(error):
                    raise
                passing.failed[key] = error
            finally:
                if key not in self._keys:
                    self._form.taken.pop(lock, None)
        return rows

    def _taken(self, session: MysqlSession, candidate: tuple[Any, str, Any], passing: Passing) -> Sequence[Row]:
        """The row, if its lock was won, and it is to be had still. One whose attempt a trigger keeps is passed over."""
        key, lock, before = candidate
        texts = self._form.texts
        text = text_of(lock)
        take = [self._form.text(each, id=key) for each in (texts.take, texts.taken) if each]
        won, *counted, found = session.say(f"SELECT @won := GET_LOCK({text}, 0)", *take)
        if won.rows[0][0] != 1:
            return []
        # what the second statement did not find claimable may have come due for the third one
        rows = [self._form.row(row, None) for row in found.rows if all(answer.touched for answer in counted)]
        if rows and (not counted or rows[0][2] > before):
            self._keys[key] = lock
            return rows
        session.say(f"DO RELEASE_LOCK({text})")
        if rows:
            passing.failed[key] = Ignored("its attempt could not be counted")
        return []

    def _settle(
        self,
        session: MysqlSession,
        said: Sequence[tuple[Row, Verb]],
        rest: Sequence[Row],  # noqa: ARG002 -- it has its own keys
        then: Passing | None,  # noqa: ARG002 -- a claim says by itself what it has locked
    ) -> Settled:
        """One transaction, then the unlocking; what failed is unlocked, too."""
        lent, self._written = self._written, False
        if not lent and self._at_once(session, said):
            return Settled([None] * len(said))
        verdicts = self._said(session, said, lent=lent)
        self._unlock(session, self._forget([row[0] for row, _ in said]))
        return Settled(verdicts)

    def _at_once(self, session: MysqlSession, said: Sequence[tuple[Row, Verb]]) -> bool:
        """All by one message, where each is one statement; False: one of them has failed, and nothing was done."""
        if any(isinstance(verb, MoveToTable | Custom) for _, verb in said):
            return False
        texts, whole = list[str](), list[str]()
        try:
            texts = [text for row, verb in said for text in self._texts(verb, [row[0]])]
            whole = [BEGIN, *texts, "COMMIT"] if texts else []
            unlock = ", ".join(f"RELEASE_LOCK({text_of(self._keys[row[0]])})" for row, _ in said)
            *_, released = session.say(*whole, f"SELECT {unlock}")
        except BINDING:
            self._ended = bool(texts) and session.done >= len(whole)
            if session.closed or self._ended:
                raise
            self._roll_back(session)
            return False
        self._forget([row[0] for row, _ in said])
        if not all(released.rows[0]):
            session.close()
        return True

    def _said(self, session: MysqlSession, said: Sequence[tuple[Row, Verb]], *, lent: bool) -> list[Verdict]:
        verbs = [(row, verb) for row, verb in said if not isinstance(verb, PutBack)]
        if not verbs and not lent:
            return [None] * len(said)
        verdicts: list[Verdict] = [None] * len(said)
        try:
            if not lent:
                session.say(BEGIN)
            for number, (row, verb) in enumerate(said):
                verdict = self._say(session, row, verb)
                verdicts[number] = None if verdict is None else lost(verdict, _FREED)
            self._commit(session, lent=lent, whole=not any(verdicts))
        except pymysql.MySQLError as error:
            if session.closed:
                raise
            self._roll_back(session)
            if len(said) == 1 or lent:
                return [lost(error, _FREED)] * len(said)
            self._partly = True  # each by its own COMMIT
            return [verdict for each in said for verdict in self._said(session, [each], lent=False)]
        return verdicts

    def _commit(self, session: MysqlSession, *, lent: bool, whole: bool) -> None:
        """What a handler wrote stands only with its verb."""
        end = "ROLLBACK" if lent and not whole else "COMMIT"
        try:
            session.say(end, *([f"SET SESSION {session.ours}"] if lent else []))
        finally:
            self._ended = self._ended or (end == "COMMIT" and session.done > 0)

    def _let_go(self, session: MysqlSession, rows: Sequence[tuple[Row, bool]], *, whole: bool) -> None:
        """Where an attempt cannot be counted back, it stays counted."""
        ids = [row[0] for row, began in rows if not began]
        uncount = self._form.texts.uncount
        try:
            self._roll_back(session)
            if ids and uncount:
                session.say(self._form.text(uncount, ids=ids))
        except pymysql.MySQLError as error:
            _log.warning("table %r: an attempt stays counted: %s", self._form.table.name, first_line(error))
        if whole:
            self._end(session)
        else:
            self._unlock(session, self._forget([row[0] for row, _ in rows]))

    def _unlock(self, session: MysqlSession, keys: Sequence[str]) -> None:
        """Release these. Where the server does not confirm it the connection is closed, and that releases all."""
        if not keys or session.closed:
            return
        text = ", ".join(f"RELEASE_LOCK({text_of(key)})" for key in keys)
        try:
            (released,) = session.say(f"SELECT {text}")
        except pymysql.MySQLError:
            session.close()
            return
        if not all(released.rows[0]):
            session.close()

    def _end(self, session: MysqlSession) -> None:
        keys = self._forget(list(self._keys))
        self._roll_back(session)
        self._unlock(session, keys)
