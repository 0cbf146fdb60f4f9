"""How the jobs are carried out on MySQL and MariaDB: by few statements, each job in transactions of its own.

A statement for many rows that fails by one of them is said again row by row, so that it touches its own row alone.

A connection may break while a statement runs: then nobody knows what became of it. The same work is run again on
another connection, and goes on where it stood; what touches nothing then may have been done before: *unknown*, never
*lost*. Runs in a thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import pymysql

from links.abc import Received
from links.errors import CallBroken, ConnectionBroken, LeaseLost, LinkError, SettlementUnknown
from links.sql.jobs import Claim, Each, Extend, Insert, Job, Look, Purge, Release, Run, Saying, Settling
from links.sql.mysql.codes import BINDING, is_again, is_reshaped
from links.sql.mysql.insert import MysqlInserter
from links.sql.mysql.lease import MysqlLease
from links.sql.mysql.looked import PAUSES, Ignored, again
from links.sql.mysql.purge import purge
from links.sql.mysql.session import MysqlSession
from links.sql.rows import Row, Token
from links.sql.table import Table
from settlement.sql import Custom, Delay, MoveToTable, Verb

__all__ = ["Forms", "MysqlWork", "Work"]

_log = logging.getLogger("trio_settlement")

J = TypeVar("J", bound=Job)
T = TypeVar("T")

LOCKED = "it touched no row, although the lease is ours: another transaction has locked the row"


class Forms(Protocol):
    """How a look is had at a queue of any form."""

    def __call__(self, session: MysqlSession, job: Look) -> Any:
        """The form, looked at. Raises `LinkRefused`, `pymysql.MySQLError`."""
        ...


class Work(Protocol):
    """One job, which may be run again on another connection."""

    def run(self, session: MysqlSession) -> None:
        """Carry it out. Raises `pymysql.MySQLError` where the connection broke amid it."""
        ...

    def lost(self, error: ConnectionBroken) -> bool:
        """The connection broke while it ran: shall it be run again? Else it has failed, as far as anybody knows."""
        ...

    def fail(self, error: BaseException) -> None:
        """It was not carried out."""
        ...


class _Whole(Generic[J]):
    """A job in one piece."""

    def __init__(self, job: J) -> None:
        self.job = job

    def run(self, session: MysqlSession) -> None:
        self.job.error = None
        try:
            self.work(session)
        except LinkError as error:
            self.job.error = error
        except BINDING as error:
            if session.closed:
                raise
            self.job.error = error

    def work(self, session: MysqlSession) -> None:
        """The statements."""
        raise NotImplementedError

    def lost(self, error: ConnectionBroken) -> bool:
        self.fail(CallBroken(str(error)))
        return False

    def fail(self, error: BaseException) -> None:
        self.job.fail(error)


class _Look(_Whole[Look]):
    def __init__(self, job: Look, forms: Forms) -> None:
        super().__init__(job)
        self._forms = forms

    def work(self, session: MysqlSession) -> None:
        self.job.form = self._forms(session, self.job)


class _Claim(_Whole[Claim]):
    def work(self, session: MysqlSession) -> None:
        job, form = self.job, _form(self.job)
        form.look_again(session)
        try:
            job.rows = form.claim(session, job.room, job.passing)
            return
        except pymysql.MySQLError as error:
            if session.closed or not is_reshaped(error):
                raise
        form.look_again(session, now=True)
        job.rows = form.claim(session, job.room, job.passing)


class _Each(Generic[T]):
    """Each item; `job` is an `Each`."""

    def __init__(self, job: Each[T]) -> None:
        self.job, self.form = job, _form(job)
        self.left: list[list[T]] = []
        """What is still to be done: those of one entry by one statement."""
        self.again = False
        """The first of them may have been done by a connection that broke."""

    def run(self, session: MysqlSession) -> None:
        self.job.error = None
        try:
            while self.left:
                self._group(session, self.left[0])
                self.again = False
                del self.left[0]
        except LinkError as error:
            for group in self.left:
                for item in group:
                    self.job.refuse(item, error)

    def _group(self, session: MysqlSession, items: list[T]) -> None:
        """Leave none of these: each was done or refused."""
        if items:
            self._tried(session, items)
        for pause in PAUSES:
            if not items:
                return
            self.again = False  # these were not done
            time.sleep(pause)
            self._tried(session, items)
        for item in items:
            self.job.refuse(item, Ignored(LOCKED))

    def _tried(self, session: MysqlSession, items: list[T]) -> None:
        """Leave those that are ours and locked."""
        for last in (False, True):
            try:
                items[:] = self.some(session, items)
                return
            except BINDING as error:
                if session.closed:
                    raise
                failure = error
            if last or not is_reshaped(failure):
                self._failed(session, items, failure)
                return
            self.form.look_again(session, now=True)

    def _failed(self, session: MysqlSession, items: list[T], error: BaseException) -> None:
        """One by one, so that one that fails does not touch the others."""
        if len(items) == 1 or is_again(error):
            for item in items:
                self.job.refuse(item, error)
            items.clear()
        while items:
            self._group(session, items[:1])
            del items[0]

    def some(self, session: MysqlSession, items: Sequence[T]) -> list[T]:
        """The statements for these; those that were not touched and are ours. Raises `BINDING`: none was done."""
        raise NotImplementedError

    def ours(
        self, session: MysqlSession, items: Sequence[T], tokens: Sequence[Token], touched: Collection[int]
    ) -> list[T]:
        """Of those that were not touched, the ones that this process still has."""
        missed = [number for number in range(len(items)) if number not in touched]
        ours = self.form.holds(session, [tokens[number] for number in missed]) if missed else ()
        return [items[missed[place]] for place in sorted(ours)]

    def lost(self, error: ConnectionBroken) -> bool:  # noqa: ARG002 -- it goes on
        self.again = True
        return True

    def fail(self, error: BaseException) -> None:
        self.job.fail(error)


_ALONE = (MoveToTable, Custom)
"""Said one by one."""


def _kind(verb: Verb) -> Hashable:
    """Those of one kind are said by one statement."""
    return Delay if isinstance(verb, Delay) else verb


class _Settle(_Each[Saying]):
    def __init__(self, job: Settling) -> None:
        super().__init__(job)
        self._settling = job
        self._ahead: list[Row] | None = None
        """What was claimed by the messages of the verbs; None: nobody has looked."""
        groups: dict[Hashable, list[Saying]] = {}
        for item in job.items:
            groups.setdefault(item if isinstance(item.verb, _ALONE) else _kind(item.verb), []).append(item)
        self.left = list(groups.values())

    def run(self, session: MysqlSession) -> None:
        """Say each verb; one that fails is one verdict. The claim comes last, so it may find what was put back."""
        claim = self._settling.claim
        if claim is not None and self._ahead is None:
            self._at_once(session, claim)
        super().run(session)
        if claim is None:
            return
        claim.room = self._settling.places
        if self._ahead is None:
            if claim.room:
                _Claim(claim).run(session)
            return
        claim.error, claim.rows = None, self._ahead[: claim.room]
        if surplus := self._ahead[claim.room :]:  # a verb that was not applied keeps its place
            self.form.let_go(session, [(row[0], row[1], row[2]) for row in surplus], counted=False)

    def _at_once(self, session: MysqlSession, claim: Claim) -> None:
        """Where all verbs are of one kind, say them and claim by the same messages; else, or if that fails, nothing."""
        if len(self.left) != 1 or self.again or claim.passing.singly or isinstance(self.left[0][0].verb, _ALONE):
            return
        items = self.left[0]
        tokens = [item.received.token for item in items]
        try:
            self.form.look_again(session)
            touched, self._ahead = self.form.say_and_claim(
                session, [item.verb for item in items], tokens, len(items), claim.passing
            )
        except (LinkError, *BINDING):
            if session.closed:
                raise
            return  # each for itself, then
        items[:] = self._judged(session, items, touched)
        if items:
            _log.debug(
                "table %r: %d verbs are said behind a claim: the rows were locked", self.form.table.name, len(items)
            )

    def some(self, session: MysqlSession, items: Sequence[Saying]) -> list[Saying]:
        tokens = [item.received.token for item in items]
        verb = items[0].verb
        if isinstance(verb, _ALONE):
            try:
                if isinstance(verb, MoveToTable):
                    done = self.form.move(session, tokens[0], verb.table)
                else:
                    done = self.form.custom(session, tokens[0], verb)
                touched = {0} if done else set[int]()
            except Ignored as error:
                self.job.refuse(items[0], error)
                return []
        else:
            touched = self.form.say(session, [item.verb for item in items], tokens)
        return self._judged(session, items, touched)

    def _judged(self, session: MysqlSession, items: Sequence[Saying], touched: set[int]) -> list[Saying]:
        """The verdicts, but for those that are not touched and ours."""
        ours = self.ours(session, items, [item.received.token for item in items], touched)
        for number, item in enumerate(items):
            if number in touched:
                item.verdict = None
            elif item not in ours:
                where = self._settling.where(item)
                item.verdict = (
                    SettlementUnknown(f"{where}: the connection broke while it was said")
                    if self.again
                    else LeaseLost(
                        f"{where}: the lease was lost: the row is gone, or somebody else claimed or changed it"
                    )
                )
        return ours


class _Extend(_Each[Received[Any]]):
    def __init__(self, job: Extend) -> None:
        super().__init__(job)
        self._tokens, self._failed_ones = job.tokens, job.failed
        self.left = [list(job.items)]

    def some(self, session: MysqlSession, items: Sequence[Received[Any]]) -> list[Received[Any]]:
        tokens = [item.token for item in items]
        found = self.form.extend(session, tokens)
        if self.again and len(found) < len(items):
            missed = [number for number in range(len(items)) if number not in found]
            old = [tokens[number] for number in missed]
            found |= {missed[place]: token for place, token in self.form.extended(session, old).items()}
        ours = self.ours(session, items, tokens, found)
        for number, item in enumerate(items):
            if number in found:
                self._failed_ones.pop(item, None)
            if item not in ours:
                self._tokens[item] = found.get(number)
        return ours


class _Release(_Each[Received[Any]]):
    def __init__(self, job: Release) -> None:
        super().__init__(job)
        groups = ([item for item in job.items if item.started is started] for started in (True, False))
        self.left = [group for group in groups if group]

    def some(self, session: MysqlSession, items: Sequence[Received[Any]]) -> list[Received[Any]]:
        tokens = [item.token for item in items]
        touched = self.form.let_go(session, tokens, counted=items[0].started)
        return self.ours(session, items, tokens, touched)


class _Insert(_Whole[Insert]):
    def __init__(self, job: Insert, inserter: MysqlInserter) -> None:
        super().__init__(job)
        self._inserter = inserter

    def work(self, session: MysqlSession) -> None:
        job = self.job
        job.inserted = job.number = 0
        if len(job.letters) == 1:
            key, letter = job.letters[0]
            job.inserted = int(self._inserter.insert(session, letter, key, once=job.once))
            return
        self._inserter.insert_all(session, job)

    def lost(self, error: ConnectionBroken) -> bool:
        """It may be there or not, and is not sent again."""
        self.fail(error)
        return False


class _Run(_Whole[Run[Any]]):
    """A call, in a transaction of its own. Where its connection broke amid it, it is run again if that does no harm."""

    def work(self, session: MysqlSession) -> None:
        self.job.result = None
        self.job.result = again(partial(self.job.call, session, None), session)

    def lost(self, error: ConnectionBroken) -> bool:
        if not self.job.again:
            self.fail(error)
        return self.job.again


class _Purge(_Whole[Purge]):
    def work(self, session: MysqlSession) -> None:
        again(partial(purge, session, self.job), session)


def _form(job: Claim | Each[Any]) -> MysqlLease:
    form = job.form
    assert isinstance(form, MysqlLease), "made by a Look on this dialect"  # noqa: S101 -- an invariant of ours
    return form


_EACH: Mapping[type[Job], Callable[[Any], Work]] = {
    Claim: _Claim,
    Settling: _Settle,
    Extend: _Extend,
    Release: _Release,
    Purge: _Purge,
    Run: _Run,
}


class MysqlWork:
    """One connection's: it remembers what it has learned of the tables that are inserted into."""

    def __init__(self, forms: Forms) -> None:
        self._forms = forms
        self._inserters: dict[tuple[Table[Any], str | None], MysqlInserter] = {}

    def of(self, job: Job) -> Work:
        """How this job is carried out."""
        if isinstance(job, Insert):
            target = (job.table, job.group)
            inserter = self._inserters.get(target)
            if inserter is None:
                inserter = self._inserters[target] = MysqlInserter(*target)
            return _Insert(job, inserter)
        if isinstance(job, Look):
            return _Look(job, self._forms)
        return _EACH[type(job)](job)
