"""The lease form's verbs on MySQL and MariaDB: claim, say, extend, let go; each a transaction of two messages.

The first message locks what it is about, skipping what others have locked, and says what stands there; the second one
writes, and commits. So nothing here waits for a row that another transaction has locked: it is told as not touched, and
`holds` tells whether it is still ours. A settlement and the next claim share both messages.

A statement that fails has changed nothing: its transaction is rolled back. Runs in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import pymysql

from links.sql.jobs import Passing
from links.sql.lender import Lender
from links.sql.mysql.codes import is_of_the_row, is_reshaped
from links.sql.mysql.custom import claimed, leased_again
from links.sql.mysql.looked import BEGIN, Ignored, Looked, again
from links.sql.mysql.session import Answer, MysqlSession, Raw, text_of
from links.sql.mysql.statements import LeaseStatements, micros, none_of
from links.sql.rows import Row, Token
from settlement.sql import Custom, Delay, Finish, MoveToGroup, PutBack, Verb, lease_of

__all__ = ["MysqlLease"]

_PAUSES: Final = (0.001, 0.002, 0.004, 0.008, 0.016)
"""Seconds behind each try to get the guard of a FIFO group: another claim has it for the time of its own."""


class MysqlLease(Looked[LeaseStatements]):
    """The verbs for one queue of one table; `lend` gives what makes a handler's transactions."""

    def __init__(self, *asked: Any, lend: Any, **names: Any) -> None:
        super().__init__(*asked, **names)
        self._lend = lend

    def lender(self, limit: int) -> Lender:  # noqa: ARG002 -- as many connections as there are deliveries
        """As `LeaseForm.lender`."""
        lender: Lender = self._lend(self)
        return lender

    @property
    def lease(self) -> float:
        """Seconds."""
        return lease_of(self.claim_form)

    # --- claim -------------------------------------------------------------------------------------------------------

    def claim(self, session: MysqlSession, room: int, passing: Passing) -> list[Row]:
        """Lease up to `room` due rows in the queue's order, but for those that are passed over.

        One that cannot be leased is `passing`'s, and the claim goes on behind it. Raises what says nothing of a row.
        """
        if "claim" in self.own:
            return again(partial(claimed, self, session, room, passing), session)
        taken: list[Row] = []
        passing.complete = False
        while not passing.enough:
            wanted = room - len(taken)
            if passing.singly:
                found = self._one_by_one(session, wanted, passing, taken)
            else:
                try:
                    found = self._claimed(session, wanted, passing, taken)
                except (pymysql.MySQLError, ValueError) as error:
                    if session.closed or not (is_of_the_row(error) or is_reshaped(error)):
                        raise
                    if is_reshaped(error):  # by a column that is gone, or else by a row's trigger
                        self.look_again(session, now=True)
                    passing.singly = True
                    continue
            taken += [row for row in found if row[1] is not None]
            if len(found) < wanted:
                passing.complete = True
                break
            if len(taken) == room:
                break
        return taken

    def _claimed(
        self, session: MysqlSession, room: int, passing: Passing, taken: Sequence[Row] = (), key: Any = None
    ) -> list[Row]:
        """One transaction; what a trigger has not let be leased has no token, and is `passing`'s."""
        if self.texts.guard:
            return self._behind_guard(session, room, passing, taken, key)
        return again(partial(self._locked, session, self._claiming(room, passing, taken, key), passing), session)

    def _claiming(self, room: int, passing: Passing, taken: Sequence[Row] = (), key: Any = None) -> str:
        over = [*passing.held, *passing.over, *passing.failed, *(row[0] for row in taken)]
        which = none_of(over) if key is None else Raw(f"IN {text_of([key])}")
        return self.text(self.texts.claim, lease=micros(self.lease), room=room, over=which)

    def _locked(self, session: MysqlSession, claim: str, passing: Passing) -> list[Row]:
        """Both messages."""
        _, found = session.say(BEGIN, claim)
        if not found.rows:
            session.say("COMMIT")
            return []
        texts = self._taking(found)
        answers = session.say(*texts, "COMMIT")
        return self._taken(found, answers[1 : len(texts)], passing)

    def _taking(self, found: Answer) -> list[str]:
        """What leases the rows that were found; where there are triggers, and how they stand then."""
        ids = [row[1] for row in found.rows]
        texts = [self.text(self.texts.take, ids=ids, until=found.rows[0][0])]
        if self.schema.triggers:
            texts.append(self.text(self.texts.read, ids=ids))
        return texts

    def _taken(self, found: Answer, stored: Sequence[Answer], passing: Passing) -> list[Row]:
        rows: list[Row] = []
        state = {row[0]: row for row in stored[0].rows} if stored else None
        for until, *found_row in found.rows:
            row = self.row(found_row, until)
            if state is not None:
                _, token, attempt, lasts = state.get(row[0], (row[0], None, row[2], False))
                row = (row[0], token if lasts else None, attempt, *row[3:])
            if row[1] is None:
                passing.failed[row[0]] = Ignored("a trigger has changed the lease, or taken it back")
            rows.append(row)
        return rows

    def _behind_guard(
        self, session: MysqlSession, room: int, passing: Passing, taken: Sequence[Row], key: Any
    ) -> list[Row]:
        """Of a FIFO group: nothing while a row is leased, by the row itself or by this process.

        One whose lease is over is locked, so that it is not being renewed right now.
        """
        guard = self.text(self.texts.guard)
        for pause in (*_PAUSES, None):
            (got,) = session.say(f"SELECT GET_LOCK({guard}, 0)")
            if got.rows[0][0] == 1:
                break
            if pause is None:
                return []
            time.sleep(pause)
        try:
            return again(partial(self._head, session, room, passing, taken, key), session)
        finally:
            if not session.closed:
                session.say(f"DO RELEASE_LOCK({guard})")

    def _head(self, session: MysqlSession, room: int, passing: Passing, taken: Sequence[Row], key: Any) -> list[Row]:
        over = self.text(self.texts.over, held=none_of([*passing.held]))
        _, leased, free = session.say(BEGIN, self.text(self.texts.in_work), over)
        if leased.rows[0][0] != len(free.rows):
            session.say("COMMIT")
            return []
        return self._locked(session, self._claiming(room, passing, taken, key), passing)

    def _one_by_one(self, session: MysqlSession, room: int, passing: Passing, taken: Sequence[Row]) -> list[Row]:
        over = [*passing.held, *passing.over, *passing.failed, *(row[0] for row in taken)]
        (found,) = session.say(self.text(self.texts.look, room=room, over=none_of(over)))
        rows: list[Row] = []
        for (key,) in found.rows:
            if passing.enough:
                break
            try:
                rows += self._claimed(session, 1, passing, key=key)
            except (pymysql.MySQLError, ValueError) as error:
                if session.closed or not is_of_the_row(error):
                    raise
                passing.failed[key] = error
                rows.append((key, None, error))
        return rows if len(found.rows) == room else rows[: room - 1]

    # --- settle ------------------------------------------------------------------------------------------------------

    def say(self, session: MysqlSession, verbs: Sequence[Verb], tokens: Sequence[Token]) -> set[int]:
        """Carry out these verbs, of one kind, and not a move; the places in the list of those that were touched.

        Raises `pymysql.MySQLError`: none was.
        """
        return again(lambda: self._said(session, verbs, tokens, "", None)[0], session)

    def say_and_claim(
        self, session: MysqlSession, verbs: Sequence[Verb], tokens: Sequence[Token], room: int, passing: Passing
    ) -> tuple[set[int], list[Row] | None]:
        """As `say`, then as `claim`, by the same messages and one transaction.

        No rows but None: nobody has looked behind what was said. Raises `pymysql.MySQLError`: nothing was done.
        """
        if "claim" in self.own or self.texts.guard:
            return self.say(session, verbs, tokens), None
        claim = self._claiming(room, passing)
        touched, found = again(lambda: self._said(session, verbs, tokens, claim, passing), session)
        passing.complete = found is not None and len(found) < room
        return touched, None if found is None else [row for row in found if row[1] is not None]

    def _said(
        self, session: MysqlSession, verbs: Sequence[Verb], tokens: Sequence[Token], claim: str, passing: Passing | None
    ) -> tuple[set[int], list[Row] | None]:
        """One transaction: lock, look, say, commit."""
        _, held, *due = session.say(BEGIN, self._held(tokens), *filter(None, (claim,)))
        ours = ours_among(held, tokens)
        texts = self._saying(verbs, tokens, ours)
        check = self._check(verbs, tokens, ours) if self.schema.triggers else []
        taking = self._taking(due[0]) if due and due[0].rows else []
        answers = session.say(*texts, *check, *taking, "COMMIT")
        if check:
            so = {row[0] for row in answers[len(texts)].rows}
            ours = {number for number in ours if tokens[number][0] in so}
        if not due or passing is None:
            return ours, None
        start = len(texts) + len(check) + 1
        return ours, self._taken(due[0], answers[start : start + len(taking) - 1], passing) if taking else []

    def _held(self, tokens: Sequence[Token]) -> str:
        return self.text(self.texts.held, ids=[token[0] for token in tokens])

    def _saying(self, verbs: Sequence[Verb], tokens: Sequence[Token], ours: set[int]) -> list[str]:
        ids = [tokens[number][0] for number in sorted(ours)]
        statement, values = "", dict[str, Any]()
        match verbs[0]:
            case Finish():
                statement = self.texts.finish
            case PutBack():
                statement = self.texts.release
            case Delay():
                return self._delays(verbs, tokens, ours)
            case MoveToGroup(group):
                statement = self.texts.regroup
                values["to"] = group
            case _:
                pass
        if not statement:
            raise ValueError(f"table {self.table.name!r} has no column for it")
        return [self.text(statement, ids=ids, **values)] if ids else []

    def _delays(self, verbs: Sequence[Verb], tokens: Sequence[Token], ours: set[int]) -> list[str]:
        column = self.table.retry_after
        if column is None:
            raise ValueError(f"table {self.table.name!r} has no column for it")
        alike: dict[float, list[Any]] = {}
        for number in sorted(ours):
            verb = verbs[number]
            assert isinstance(verb, Delay), "they are of one kind"  # noqa: S101 -- an invariant of ours
            alike.setdefault(verb.seconds, []).append(tokens[number][0])
        return [
            self.text(self.texts.delay, ids=ids, micros=micros(seconds, self.schema[column]))
            for seconds, ids in alike.items()
        ]

    def _check(self, verbs: Sequence[Verb], tokens: Sequence[Token], ours: set[int]) -> list[str]:
        """Which of them have become what was written? A trigger may have changed it."""
        if not ours or (isinstance(verbs[0], Finish) and self.texts.gone):
            return []
        ids = [tokens[number][0] for number in sorted(ours)]
        return [self.text(self.texts.let_go, ids=ids)]

    def move(self, session: MysqlSession, token: Token, to: str) -> bool:
        """Move the row to the table `to`, by its token; False: it is not ours, or somebody has locked it."""

        def call() -> bool:
            _, held = session.say(BEGIN, self._held([token]))
            if ours := bool(ours_among(held, [token])):
                self.moved(session, token[0], to)
            session.say("COMMIT")
            return ours

        return again(call, session)

    def custom(self, session: MysqlSession, token: Token, verb: Custom) -> bool:
        """As `Looked.carry_out`, where the row is still ours; False: it is not, or somebody has locked it."""

        def call() -> bool:
            _, held = session.say(BEGIN, self._held([token]))
            if ours := bool(ours_among(held, [token])):
                self.carry_out(session, verb, token)
            session.say("COMMIT")
            return ours

        return again(call, session)

    def within(self, session: MysqlSession, token: Token, verb: Verb) -> bool:
        """Carry this out in the transaction that is open; False: the row is not ours, or somebody has locked it."""
        (held,) = session.say(self._held([token]))
        ours = ours_among(held, [token])
        if not ours:
            return False
        if isinstance(verb, Custom):
            self.carry_out(session, verb, token)
        else:
            session.say(*self._saying([verb], [token], ours))
        return True

    def holds(self, session: MysqlSession, tokens: Sequence[Token]) -> set[int]:
        """Which of these rows are still ours? Raises `pymysql.MySQLError`."""
        (found,) = session.say(self.text(self.texts.read, ids=[token[0] for token in tokens]))
        return ours_among(found, tokens, lasting=self.table.fifo)

    # --- extend, let go ----------------------------------------------------------------------------------------------

    def extend(self, session: MysqlSession, tokens: Sequence[Token]) -> dict[int, Token]:
        """Lease these again: the tokens that now hold those that were touched. Raises: none was."""
        return again(partial(self._extended, session, tokens), session)

    def _extended(self, session: MysqlSession, tokens: Sequence[Token]) -> dict[int, Token]:
        renew = self.text(self.texts.renew, ids=[token[0] for token in tokens], lease=micros(self.lease))
        _, held = session.say(BEGIN, renew)
        # where a lease is over another row of a FIFO group may be in work, so it is not ours to renew any more
        ours = ours_among(held, tokens, lasting=self.table.fifo)
        if not ours:
            session.say("COMMIT")
            return {}
        until = str(held.rows[0][4])
        if "extend" in self.own:
            new = leased_again(self, session, [tokens[number] for number in ours], until)
            session.say("COMMIT")
            return {number: (tokens[number][0], until, tokens[number][2]) for number in ours if tokens[number] in new}
        ids = [tokens[number][0] for number in ours]
        texts = [self.text(self.texts.extend, ids=ids, until=until)]
        if self.schema.triggers:
            texts.append(self.text(self.texts.read, ids=ids))
        answers = session.say(*texts, "COMMIT")
        stored = {row[0]: row[1] if row[3] else None for row in answers[1].rows} if self.schema.triggers else {}
        given = {number: stored.get(tokens[number][0], None if stored else until) for number in ours}
        return {
            number: (tokens[number][0], token, tokens[number][2])
            for number, token in given.items()
            if token is not None
        }

    def extended(self, session: MysqlSession, tokens: Sequence[Token]) -> dict[int, Token]:
        """After a renewal that may have been made: the tokens of those that are of the same attempt, and so ours.

        Without an attempt column nothing tells. Raises `pymysql.MySQLError`.
        """
        if self.table.attempt is None:
            return {}
        (found,) = session.say(self.text(self.texts.read, ids=[token[0] for token in tokens]))
        state = {row[0]: row for row in found.rows}
        return {
            number: (key, state[key][1], attempt)
            for number, (key, _, attempt) in enumerate(tokens)
            if key in state and state[key][2] == attempt and state[key][3]
        }

    def let_go(self, session: MysqlSession, tokens: Sequence[Token], *, counted: bool) -> set[int]:
        """Let leases go; not `counted`: the attempts are what they were before the claim. Which were touched.

        Raises `pymysql.MySQLError`: none was.
        """

        def call() -> set[int]:
            _, held = session.say(BEGIN, self._held(tokens))
            ours = ours_among(held, tokens)
            ids = [tokens[number][0] for number in ours]
            statement = self.texts.release if counted else self.texts.give_back
            session.say(*([self.text(statement, ids=ids)] if ids else []), "COMMIT")
            return ours

        return again(call, session)


def ours_among(found: Answer, tokens: Sequence[Token], *, lasting: bool = False) -> set[int]:
    """The places of those whose token stands there still; `lasting`: and whose lease is not over."""
    state = {row[0]: row for row in found.rows}
    return {
        number
        for number, (key, token, attempt) in enumerate(tokens)
        if key in state and state[key][1] == token and state[key][2] == attempt and (not lasting or state[key][3])
    }
