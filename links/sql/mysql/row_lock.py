"""The row-lock form on MySQL and MariaDB: a claim is a transaction that holds its row, its COMMIT is the settlement.

A claim is one message to the server (START TRANSACTION and a SELECT … FOR UPDATE SKIP LOCKED), a settlement another one
(the verbs, COMMIT), with the next claim behind it while there are rows.

A verb that fails undoes itself alone, but what a trigger has read stays locked: so the row is locked again in a
transaction of its own, unless a handler has written in this one. A deadlock takes the whole transaction with it.
Where a part of a batch is settled, that COMMIT frees the other rows too, and they are locked again by the same message:
what somebody else has taken in between is lost.

Of a FIFO group a claim first takes the guard, a named lock that the connection holds until the claim has ended: while
it is held, the group has a row in work.

Cancellation, anywhere: the connection is closed, and the server rolls back what was not committed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import pymysql

from links.abc import Verdict
from links.errors import CallBroken, LinkError, NotApplied
from links.sql.custom import fetched, ids_of
from links.sql.dialect import Writer
from links.sql.jobs import Passing
from links.sql.mysql.codes import BINDING, is_undone
from links.sql.mysql.custom import asked
from links.sql.mysql.held_statements import RowLockStatements
from links.sql.mysql.looked import BEGIN, Ignored
from links.sql.mysql.pin import MysqlPin, PinnedForm, lost, not_applied
from links.sql.mysql.session import MysqlSession
from links.sql.mysql.statements import none_of
from links.sql.pin import Settled
from links.sql.rows import Row
from settlement.sql import Custom, MoveToTable, RowLock, Verb

__all__ = ["MysqlRowLock", "RowLockPin"]

_BUSY: Final = (0.001, 0.004)
"""Seconds to another try where another claim has the guard of a FIFO group: it may only have looked."""


class MysqlRowLock(PinnedForm[RowLockStatements]):
    """A queue whose rows are locked."""

    @property
    def begin(self) -> list[str]:
        """What begins a claim."""
        claim = self.claim_form
        assert isinstance(claim, RowLock), "it was asked for"  # noqa: S101 -- an invariant of ours
        if claim.isolation == "read committed":
            return [BEGIN]
        return [f"SET TRANSACTION ISOLATION LEVEL {claim.isolation.upper()}", BEGIN]

    def pin(self, writer: Writer, limit: int) -> RowLockPin:  # noqa: ARG002 -- it has a connection of its own
        """A new one, not connected yet."""
        return RowLockPin(self)


class RowLockPin(MysqlPin[RowLockStatements]):
    """One connection, and the rows that it has locked."""

    _form: MysqlRowLock
    _room = 1
    """Rows of a claim, at most."""
    _guarded = False
    """It holds the guard."""

    # --- claim -------------------------------------------------------------------------------------------------------

    def _claim(self, session: MysqlSession, passing: Passing, room: int) -> Sequence[Row]:
        self._room = room
        if "claim" in self._form.own:
            return self._own_claim(session, passing, room)
        if self._form.texts.guard and not self._take_guard(session):
            return []
        rows = session.say(*self._claiming(passing, room))[-1].rows
        return self._found(session, rows, passing)

    def _claiming(self, passing: Passing, room: int) -> list[str]:
        claim = self._form.text(self._form.texts.claim, over=none_of([*passing.over]), room=room)
        return [*self._form.begin, claim]

    def _found(self, session: MysqlSession, rows: Sequence[Any], passing: Passing) -> Sequence[Row]:
        """Where a claim finds nothing the transaction is ended."""
        passing.complete = not rows
        if not rows:
            self._end(session)
        return [self._form.row(row, None) for row in rows]

    def _take_guard(self, session: MysqlSession) -> bool:
        guard = self._form.text(self._form.texts.guard)
        for pause in (*_BUSY, None):
            (got,) = session.say(f"SELECT GET_LOCK({guard}, 0)")
            if got.rows[0][0] == 1:
                self._guarded = True
                return True
            if pause is not None:
                time.sleep(pause)
        return False

    def _own_claim(self, session: MysqlSession, passing: Passing, room: int) -> Sequence[Row]:
        """By the statement for claim; ours locks each row, too, so that none is worked on that is not locked."""
        form = self._form
        most = room + len(passing.over)  # behind a lock they are free again, and may all stand in front
        session.say(*form.begin)
        try:
            names, found = asked(session, "claim", form.own["claim"], {"group": form.group, "room": most})
            if not names:
                raise CallBroken("the statement for 'claim' gives no rows, and must give ids")
            ids = ids_of(found, most)
            passing.complete = len(ids) < most
            locked = session.say(form.text(form.texts.chosen, ids=ids))[0].rows if ids else ()
            there = {row[0]: row for row in locked}
            for key in ids:
                if key not in there:
                    passing.failed[key] = ValueError(
                        "the statement for 'claim' gave it, but it is not there, not due, finished, of another group, "
                        "or locked by somebody else"
                    )
            rows = [form.row(there[key], None) for key in ids if key in there and key not in passing.over][:room]
            if "fetch" in form.own:
                given = [{"id": row[0], "group": form.group} for row in rows]
                rows = [
                    fetched(form.table, row, *asked(session, "fetch", form.own["fetch"], values))
                    for row, values in zip(rows, given, strict=True)
                ]
        except LinkError:
            self._end(session)
            raise
        if not rows:
            self._end(session)
        return rows

    def _end(self, session: MysqlSession) -> None:
        self._roll_back(session)
        self._release(session)

    def _release(self, session: MysqlSession) -> None:
        guarded, self._guarded = self._guarded, False
        if guarded and not session.closed:
            try:
                session.say(f"DO RELEASE_LOCK({self._form.text(self._form.texts.guard)})")
            except pymysql.MySQLError:
                session.close()

    def _let_go(self, session: MysqlSession, rows: Sequence[tuple[Row, bool]], *, whole: bool) -> None:  # noqa: ARG002
        """A part of a claim ends with it."""
        if whole:
            self._end(session)

    # --- settle ------------------------------------------------------------------------------------------------------

    def _settle(
        self, session: MysqlSession, said: Sequence[tuple[Row, Verb]], rest: Sequence[Row], then: Passing | None
    ) -> Settled:
        """All by one message, and what follows by the same."""
        if len(said) > 1 and (
            self._form.schema.triggers or any(isinstance(verb, MoveToTable | Custom) for _, verb in said)
        ):
            return self._one_by_one(session, said, rest)
        alike: dict[Verb, list[Any]] = {}
        for row, verb in said:
            alike.setdefault(verb, []).append(row[0])
        try:
            if isinstance(said[0][1], MoveToTable | Custom):
                verdict = self._say(session, *said[0])
                if verdict is not None:
                    return self._again(session, verdict, said)
                texts = list[str]()
            else:
                texts = [text for verb, ids in alike.items() for text in self._texts(verb, ids)]
            return self._said(session, texts, said, rest, then)
        except BINDING as error:
            if session.closed:
                raise
            if self._ended:  # it is what came behind that has failed
                self._end(session)
                return Settled([None] * len(said), rest)
            if is_undone(error):
                self._end(session)
                return self._not_committed(error, said, rest)
            if len(said) == 1:
                return self._again(session, not_applied(error), said)
        return self._one_by_one(session, said, rest)

    def _again(self, session: MysqlSession, refused: NotApplied, said: Sequence[tuple[Row, Verb]]) -> Settled:
        """Lock the one row again, behind a ROLLBACK: between the two whoever waits to mend the table has his turn.

        What a handler has written would be gone by that, so its transaction is left as it is.
        """
        if self._written:
            return Settled([refused])
        again = self._form.text(self._form.texts.again, ids=[said[0][0][0]])
        found = session.say("ROLLBACK", *self._form.begin, again)[-1]
        if found.rows:
            return Settled([refused])
        self._end(session)
        return Settled([lost(refused, "it was not applied, and somebody else has it now")], crossed=True)

    def _said(
        self,
        session: MysqlSession,
        texts: Sequence[str],
        said: Sequence[Any],
        rest: Sequence[Row],
        then: Passing | None,
    ) -> Settled:
        """Carry these out, commit, and what comes behind. Raises `BINDING`: the claim lives on, but `_ended` tells."""
        done: list[Verdict] = [None] * len(said)
        if rest or then is None or self._form.texts.guard or not self._form.known:  # a claim of its own looks again
            return Settled(done, self._committed(session, texts, rest))
        answers = self._heard(session, [*texts, "COMMIT"], self._claiming(then, self._room))
        self._written = False
        return Settled(done, claimed=self._found(session, answers[-1].rows, then))

    def _heard(self, session: MysqlSession, texts: Sequence[str], behind: Sequence[str]) -> Sequence[Any]:
        """Say these, of which the last one is COMMIT, and what comes behind."""
        after = ["SET SESSION autocommit = 1"] if self._written else []
        try:
            return session.say(*texts, *after, *behind)
        finally:
            self._ended = self._ended or (texts[-1] == "COMMIT" and session.done >= len(texts))

    def _committed(
        self, session: MysqlSession, texts: Sequence[str], rest: Sequence[Row], end: str = "COMMIT"
    ) -> Sequence[Row]:
        """Carry out these and commit, and lock the rest again; those of it that are lost."""
        again: list[str] = []
        if rest:
            again = [*self._form.begin, self._form.text(self._form.texts.again, ids=[row[0] for row in rest])]
        answers = self._heard(session, [*texts, end], again)
        self._written = False
        if not rest:
            self._release(session)
            return []
        held = {row[0] for row in answers[-1].rows}
        return [row for row in rest if row[0] not in held]

    def _one_by_one(self, session: MysqlSession, said: Sequence[tuple[Row, Verb]], rest: Sequence[Row]) -> Settled:
        """Each by itself, so that one that fails does not touch the others; then one COMMIT."""
        verdicts: list[Verdict] = []
        try:
            for row, verb in said:
                verdicts.append(self._say(session, row, verb))
            stays = [row for (row, _), verdict in zip(said, verdicts, strict=True) if verdict is not None]
            none = len(stays) == len(said)  # then as `_again`
            self._partly = bool(stays) and not none
            end = "ROLLBACK" if none else "COMMIT"
            gone = {row[0] for row in self._committed(session, [], [*stays, *rest], end)}
        except pymysql.MySQLError as error:
            if session.closed:
                raise
            self._end(session)
            if not self._ended:
                return self._not_committed(error, said, rest)
            gone = {row[0] for row in [*(row for row, _ in said), *rest]}
        for number, (row, _) in enumerate(said):
            if verdicts[number] is not None and row[0] in gone:
                why = verdicts[number] or Ignored("")
                verdicts[number] = lost(why, "it was not applied, and its claim has ended with the others'")
        return Settled(verdicts, [row for row in rest if row[0] in gone])

    @staticmethod
    def _not_committed(why: BaseException, said: Sequence[Any], rest: Sequence[Row]) -> Settled:
        gone = lost(why, "the transaction was rolled back")
        return Settled([gone] * len(said), rest, crossed=is_undone(why))
