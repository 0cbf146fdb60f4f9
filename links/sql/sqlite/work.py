"""How the jobs are carried out on SQLite: in a transaction, whole or in parts. Runs in the thread.

A statement that fails touches its own job alone, as long as its transaction is whole; what ends the transaction is
raised, and the parts of all its jobs are then carried out in one of their own each.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from links.abc import Received
from links.errors import LeaseLost, LinkError, PublishNotAccepted
from links.sql.jobs import Claim, Each, Extend, Insert, Job, Look, Purge, Release, Run, Saying, Settling
from links.sql.sqlite.advisory import SqliteAdvisory
from links.sql.sqlite.codes import BINDING, is_busy, is_fatal
from links.sql.sqlite.insert import SqliteInserter
from links.sql.sqlite.lease import SqliteLease
from links.sql.sqlite.lender import Beside
from links.sql.sqlite.looked import Ignored
from links.sql.sqlite.purge import purge
from links.sql.table import Table
from settlement.sql import AdvisoryLock, Finish, lease_of

__all__ = ["SqliteWork", "Work"]

J = TypeVar("J", bound=Job)
T = TypeVar("T")


def _is_its_own(error: BaseException, connection: sqlite3.Connection) -> bool:
    """Did a statement fail by itself, with its transaction still whole?"""
    return connection.in_transaction and not is_busy(error) and not is_fatal(error)


class Work(Protocol):
    """What can stand in a transaction."""

    def run(self, connection: sqlite3.Connection, now: int) -> None:
        """Carry it out in the transaction that is open. Raises only what ends the whole transaction."""
        ...

    def parts(self) -> Sequence[Work]:
        """The same work in pieces that can stand in a transaction each."""
        ...

    def learned(self) -> bool:
        """May it be run again after an error, since it goes round what has failed? Asked after each try."""
        ...

    def fail(self, error: BaseException) -> None:
        """It was not carried out."""
        ...


class _Whole(Generic[J]):
    """A job in one piece."""

    def __init__(self, job: J) -> None:
        self.job = job

    def run(self, connection: sqlite3.Connection, now: int) -> None:
        self.job.error = None
        try:
            self.work(connection, now)
        except LinkError as error:
            self.job.error = error
        except BINDING as error:
            if not _is_its_own(error, connection):
                raise
            self.job.error = error

    def work(self, connection: sqlite3.Connection, now: int) -> None:
        """The statements."""
        raise NotImplementedError

    def parts(self) -> Sequence[Work]:
        return [self]

    def learned(self) -> bool:
        return False

    def fail(self, error: BaseException) -> None:
        self.job.fail(error)


class _Look(_Whole[Look]):
    def __init__(self, job: Look, path: Path, beside: Callable[[], Beside]) -> None:
        super().__init__(job)
        self._path, self._beside = path, beside

    def work(self, connection: sqlite3.Connection, now: int) -> None:  # noqa: ARG002 -- no time
        job = self.job
        asked = (connection, job.table, job.group)
        names: dict[str, Any] = {"subscription": job.subscription, "dead_letter": job.dead_letter, "custom": job.custom}
        if isinstance(job.claim, AdvisoryLock):
            job.form = SqliteAdvisory(*asked, key=job.claim, path=self._path, beside=self._beside, **names)
        else:
            job.form = SqliteLease(*asked, lease=lease_of(job.claim), beside=self._beside, **names)


class _Claim(_Whole[Claim]):
    def __init__(self, job: Claim, settling: Settling | None = None) -> None:
        super().__init__(job)
        self._settling = settling
        """Whose claim ahead it is: for as many as have left."""
        self._learned = job.passing.learned

    def run(self, connection: sqlite3.Connection, now: int) -> None:
        self.job.rows = []
        if self._settling is not None:
            self.job.room = self._settling.places
        if self.job.room:
            super().run(connection, now)

    def work(self, connection: sqlite3.Connection, now: int) -> None:
        job = self.job
        job.rows = _form(job).claim(connection, now, job.room, job.passing)

    def learned(self) -> bool:
        """A row that ended its transaction is looked for, and then passed over, by the next try."""
        before, self._learned = self._learned, self.job.passing.learned
        return self._learned > before


class _Run(_Whole[Run[Any]]):
    def __init__(self, job: Run[Any]) -> None:
        super().__init__(job)
        self._learned = 0 if job.passing is None else job.passing.learned

    def work(self, connection: sqlite3.Connection, now: int) -> None:
        self.job.result = None
        self.job.result = self.job.call(connection, now)

    def learned(self) -> bool:
        """As of a claim."""
        passing = self.job.passing
        before, self._learned = self._learned, 0 if passing is None else passing.learned
        return self._learned > before


class _Each(Generic[T]):
    """Each item by itself; `job` is an `Each`."""

    def __init__(self, job: Each[T]) -> None:
        self.job = job
        self.form = _form(job)

    def run(self, connection: sqlite3.Connection, now: int) -> None:
        self.job.error = None
        for item in self.job.items:
            self.run_one(item, connection, now)

    def run_one(self, item: T, connection: sqlite3.Connection, now: int) -> None:
        """Carry out one. Raises only what ends the whole transaction."""
        try:
            self.one(item, connection, now)
        except BINDING as error:
            if not _is_its_own(error, connection):
                raise
            self.job.refuse(item, error)

    def one(self, item: T, connection: sqlite3.Connection, now: int) -> None:
        """The statements for one. Raises `Ignored` where its row is there and was not touched."""
        raise NotImplementedError

    def parts(self) -> Sequence[Work]:
        return [_Piece(self, item) for item in self.job.items]

    def learned(self) -> bool:
        return False

    def fail(self, error: BaseException) -> None:
        self.job.fail(error)


class _Piece(Generic[T]):
    """One of an `Each`, in a transaction of its own."""

    def __init__(self, whole: _Each[T], item: T) -> None:
        self._whole, self._item = whole, item

    def run(self, connection: sqlite3.Connection, now: int) -> None:
        self._whole.run_one(self._item, connection, now)

    def parts(self) -> Sequence[Work]:
        return [self]

    def learned(self) -> bool:
        return False

    def fail(self, error: BaseException) -> None:
        self._whole.job.refuse(self._item, error)


class _Settle(_Each[Saying]):
    def __init__(self, job: Settling) -> None:
        super().__init__(job)
        self._where = job.where
        self._ahead = None if job.claim is None else _Claim(job.claim, job)

    def run(self, connection: sqlite3.Connection, now: int) -> None:
        """Say each verb; one that fails is one verdict. The claim comes last, so it may find what was put back."""
        if not self._all_finished(connection, now):
            super().run(connection, now)
        if self._ahead is not None:
            self._ahead.run(connection, now)

    def _all_finished(self, connection: sqlite3.Connection, now: int) -> bool:
        """Where all are *finish*, and none is lost, one call says them."""
        items = self.job.items
        if len(items) <= 1 or any(type(item.verb) is not Finish for item in items):
            return False
        try:
            finished = self.form.finish_all(connection, now, [item.received.token for item in items])
        except BINDING as error:
            if not _is_its_own(error, connection):
                raise
            return False
        if finished:
            self.job.error = None
            for item in items:
                item.verdict = None
        return finished

    def one(self, item: Saying, connection: sqlite3.Connection, now: int) -> None:
        item.verdict = None
        if not self.form.say(connection, now, item.received.token, item.verb):
            if self.form.holds(connection, item.received.token):
                raise Ignored("it touched no row, although the lease is ours: a trigger has ignored it")
            item.verdict = LeaseLost(
                f"{self._where(item)}: the lease was lost: the row is gone, or was claimed or changed by somebody else"
            )

    def parts(self) -> Sequence[Work]:
        pieces = super().parts()
        return pieces if self._ahead is None else [*pieces, self._ahead]


class _Extend(_Each[Received[Any]]):
    def __init__(self, job: Extend) -> None:
        super().__init__(job)
        self._tokens, self._failed = job.tokens, job.failed

    def one(self, item: Received[Any], connection: sqlite3.Connection, now: int) -> None:
        self._failed.pop(item, None)
        token = self.form.extend(connection, now, item.token)
        if token is None and self.form.holds(connection, item.token, now):
            raise Ignored("the lease was not extended: a trigger has ignored it")
        self._tokens[item] = token


class _Release(_Each[Received[Any]]):
    def __init__(self, job: Release) -> None:
        super().__init__(job)
        self._failed = job.failed

    def one(self, item: Received[Any], connection: sqlite3.Connection, now: int) -> None:  # noqa: ARG002 -- no time
        self._failed.pop(item, None)
        gone = self.form.let_go(connection, item.token, counted=item.started)
        if not gone and self.form.holds(connection, item.token):
            raise Ignored("the lease was not let go: a trigger has ignored it")


class _Insert(_Whole[Insert]):
    def __init__(self, job: Insert, inserter: SqliteInserter) -> None:
        super().__init__(job)
        self._inserter = inserter

    def work(self, connection: sqlite3.Connection, now: int) -> None:
        """More than one stand in a savepoint."""
        job = self.job
        job.inserted = job.number = 0
        if len(job.letters) == 1:
            key, letter = job.letters[0]
            job.inserted = int(self._inserter.insert(connection, now, letter, key, once=job.once))
            return
        connection.execute("SAVEPOINT letters")
        try:
            for key, letter in job.letters:
                job.number += 1
                job.inserted += self._inserter.insert(connection, now, letter, key, once=job.once)
        except (PublishNotAccepted, *BINDING):
            if connection.in_transaction:
                connection.execute("ROLLBACK TO letters")
                connection.execute("RELEASE letters")
            raise
        job.number = 0
        connection.execute("RELEASE letters")


class _Purge(_Whole[Purge]):
    def work(self, connection: sqlite3.Connection, now: int) -> None:
        purge(connection, now, self.job)


def _form(job: Claim | Each[Any]) -> SqliteLease:
    form = job.form
    assert isinstance(form, SqliteLease), "made by a Look on this dialect"  # noqa: S101 -- an invariant of ours
    return form


_EACH: Mapping[type[Job], Callable[[Any], Work]] = {
    Claim: _Claim,
    Settling: _Settle,
    Extend: _Extend,
    Release: _Release,
    Purge: _Purge,
    Run: _Run,
}


class SqliteWork:
    """One connection's: it remembers what it has learned of the tables that are inserted into.

    `path`: the file; `beside` makes one more connection to it.
    """

    def __init__(self, path: Path, beside: Callable[[], Beside]) -> None:
        self._path, self._beside = path, beside
        self._inserters: dict[tuple[Table[Any], str | None], SqliteInserter] = {}

    def of(self, job: Job) -> Work:
        """How this job is carried out."""
        if isinstance(job, Insert):
            target = (job.table, job.group)
            inserter = self._inserters.get(target)
            if inserter is None:
                inserter = self._inserters[target] = SqliteInserter(*target)
            return _Insert(job, inserter)
        if isinstance(job, Look):
            return _Look(job, self._path, self._beside)
        return _EACH[type(job)](job)
