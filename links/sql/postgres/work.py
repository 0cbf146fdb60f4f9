"""How the jobs are carried out on PostgreSQL: by few statements, each a transaction of its own.

A statement for many rows that fails by one of them is said again row by row, so that it touches its own row alone.

A connection may break while a statement runs: then nobody knows what became of it. The same work is run again on
another connection, and goes on where it stood; what touches nothing then may have been done before: *unknown*, never
*lost*.

Cancellation: as `links.sql.postgres.lease` says; what was carried out stands in the job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import psycopg
import trio

from links.abc import Received
from links.errors import ConnectionBroken, LeaseLost, LinkError, SettlementUnknown
from links.sql.jobs import Claim, Each, Extend, Insert, Job, Look, Purge, Release, Run, Saying, Settling
from links.sql.postgres.advisory import PostgresAdvisory
from links.sql.postgres.codes import is_again, is_reshaped
from links.sql.postgres.custom_lock import PostgresCustomLock
from links.sql.postgres.insert import PostgresInserter
from links.sql.postgres.lease import PostgresLease
from links.sql.postgres.looked import LOCKED, PAUSES, Ignored
from links.sql.postgres.notify import Notify
from links.sql.postgres.pin import Connect
from links.sql.postgres.purge import purge
from links.sql.postgres.row_lock import PostgresRowLock
from links.sql.postgres.session import check_room
from links.sql.postgres.trio_connection import TrioConnection
from links.sql.postgres.whole import RunOnce, Whole, Work
from links.sql.rows import Row, Token
from links.sql.table import Table
from settlement.sql import AdvisoryLock, Custom, Delay, Lease, MoveToTable, RowLock, Verb

__all__ = ["PostgresWork", "Work"]

_log = logging.getLogger("trio_settlement")

T = TypeVar("T")

_TRIES = 5
"""So often is a statement run that others only got into the way of."""


class _Look(Whole[Look]):
    def __init__(self, job: Look, connect: Connect, session: Connect) -> None:
        super().__init__(job)
        self._connect, self._session = connect, session

    async def work(self, connection: TrioConnection) -> None:
        job = self.job
        asked = job.table, job.group, job.claim
        if not isinstance(job.claim, Lease):
            where = f"subscription {job.subscription!r}, table {job.table.name!r}"
            await check_room(connection, job.places, where)
        names: dict[str, Any] = {"subscription": job.subscription, "dead_letter": job.dead_letter, "custom": job.custom}
        names["connect"] = self._session if isinstance(job.claim, AdvisoryLock) else self._connect
        form: PostgresLease | PostgresRowLock | PostgresAdvisory
        match job.claim:
            case Lease():
                form = PostgresLease(*asked, **names)
            case RowLock():
                form = PostgresRowLock(*asked, **names)
            case AdvisoryLock():
                (await self._session()).finish()  # refused now, behind a pooler
                form = (PostgresCustomLock if "lock" in job.custom else PostgresAdvisory)(*asked, **names)
        await form.look(connection)
        job.form = form


class _Claim(Whole[Claim]):
    async def work(self, connection: TrioConnection) -> None:
        job, form = self.job, _form(self.job)
        await form.look_again(connection)
        for left in range(_TRIES, 0, -1):
            try:
                job.rows = await form.claim(connection, job.room, job.passing)
                return
            except psycopg.Error as error:
                reshaped = is_reshaped(error)
                if connection.closed or left == 1 or not (reshaped or is_again(error)):
                    raise
            if reshaped:
                connection.unprepare()  # a statement that was prepared for other columns fails for ever
                await form.look_again(connection, now=True)


class _Each(Generic[T]):
    """Each item; `job` is an `Each`."""

    def __init__(self, job: Each[T]) -> None:
        self.job, self.form = job, _form(job)
        self.left: list[list[T]] = []
        """What is still to be done: those of one entry by one statement."""
        self.again = False
        """The first of them may have been done by a connection that broke."""

    async def run(self, connection: TrioConnection) -> None:
        self.job.error = None
        try:
            while self.left:
                await self._group(connection, self.left[0])
                self.again = False
                del self.left[0]
        except LinkError as error:
            for group in self.left:
                for item in group:
                    self.job.refuse(item, error)

    async def _group(self, connection: TrioConnection, items: list[T]) -> None:
        """Leave none of these: each was done or refused."""
        if items:
            await self._tried(connection, items)
        for pause in PAUSES:
            if not items:
                return
            self.again = False  # these were not done
            await trio.sleep(pause)
            await self._tried(connection, items)
        for item in items:
            self.job.refuse(item, Ignored(LOCKED))

    async def _tried(self, connection: TrioConnection, items: list[T]) -> None:
        """Leave those that are ours and locked."""
        for left in range(_TRIES, 0, -1):
            try:
                items[:] = await self.some(connection, items)
                return
            except psycopg.Error as error:
                if connection.closed:
                    raise
                failure = error
            reshaped = is_reshaped(failure)
            if left == 1 or not (reshaped or is_again(failure)):
                await self._failed(connection, items, failure)
                return
            if reshaped:
                connection.unprepare()
                await self.form.look_again(connection, now=True)

    async def _failed(self, connection: TrioConnection, items: list[T], error: BaseException) -> None:
        """One by one, so that one that fails does not touch the others."""
        if len(items) == 1:
            self.job.refuse(items.pop(), error)
        while items:
            await self._group(connection, items[:1])
            del items[0]

    async def some(self, connection: TrioConnection, items: Sequence[T]) -> list[T]:
        """The statements for these; those that were not touched and are ours. Raises `psycopg.Error`: none was done."""
        raise NotImplementedError

    async def ours(
        self, connection: TrioConnection, items: Sequence[T], tokens: Sequence[Token], touched: Collection[int]
    ) -> list[T]:
        """Of those that were not touched, the ones that this process still has. Raises `psycopg.Error`."""
        missed = [number for number in range(len(items)) if number not in touched]
        ours = await self.form.holds(connection, [tokens[number] for number in missed]) if missed else ()
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
        """What was claimed by the message of the verbs; None: nobody has looked."""
        groups: dict[Hashable, list[Saying]] = {}
        for item in job.items:
            groups.setdefault(item if isinstance(item.verb, _ALONE) else _kind(item.verb), []).append(item)
        self.left = list(groups.values())

    async def run(self, connection: TrioConnection) -> None:
        """Say each verb; one that fails is one verdict. The claim comes last, so it may find what was put back."""
        claim = self._settling.claim
        if claim is not None and self._ahead is None:
            await self._at_once(connection, claim)
        await super().run(connection)
        if claim is None:
            return
        claim.room = self._settling.places
        if self._ahead is None:
            if claim.room:
                await _Claim(claim).run(connection)
            return
        claim.error, claim.rows = None, self._ahead[: claim.room]
        if surplus := self._ahead[claim.room :]:  # a verb that was not applied keeps its place
            await self.form.let_go(connection, [(row[0], row[1], row[2]) for row in surplus], counted=False)

    async def _at_once(self, connection: TrioConnection, claim: Claim) -> None:
        """Where all verbs are of one kind, say them and claim by one message; else, or where it fails, do nothing."""
        if len(self.left) != 1 or self.again or claim.passing.singly or isinstance(self.left[0][0].verb, _ALONE):
            return
        items = self.left[0]
        tokens = [item.received.token for item in items]
        try:
            await self.form.look_again(connection)
            touched, self._ahead = await self.form.say_and_claim(
                connection, [item.verb for item in items], tokens, len(items), claim.passing
            )
        except (psycopg.Error, LinkError):
            if connection.closed:
                raise
            return  # each for itself, then
        items[:] = await self._judged(connection, items, touched)
        if items:
            _log.debug(
                "table %r: %d verbs are said behind a claim: the rows were locked", self.form.table.name, len(items)
            )

    async def some(self, connection: TrioConnection, items: Sequence[Saying]) -> list[Saying]:
        tokens = [item.received.token for item in items]
        verb = items[0].verb
        if isinstance(verb, _ALONE):
            try:
                if isinstance(verb, MoveToTable):
                    done = await self.form.move(connection, tokens[0], verb.table)
                else:
                    done = await self.form.custom(connection, tokens[0], verb)
                touched = {0} if done else set[int]()
            except Ignored as error:
                self.job.refuse(items[0], error)
                return []
        else:
            touched = await self.form.say(connection, [item.verb for item in items], tokens)
        return await self._judged(connection, items, touched)

    async def _judged(self, connection: TrioConnection, items: Sequence[Saying], touched: set[int]) -> list[Saying]:
        """The verdicts, but for those that are not touched and ours."""
        ours = await self.ours(connection, items, [item.received.token for item in items], touched)
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

    async def some(self, connection: TrioConnection, items: Sequence[Received[Any]]) -> list[Received[Any]]:
        tokens = [item.token for item in items]
        found = await self.form.extend(connection, tokens)
        if self.again and len(found) < len(items):
            missed = [number for number in range(len(items)) if number not in found]
            old = [tokens[number] for number in missed]
            found |= {missed[place]: token for place, token in (await self.form.extended(connection, old)).items()}
        ours = await self.ours(connection, items, tokens, found)
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

    async def some(self, connection: TrioConnection, items: Sequence[Received[Any]]) -> list[Received[Any]]:
        tokens = [item.token for item in items]
        touched = await self.form.let_go(connection, tokens, counted=items[0].started)
        return await self.ours(connection, items, tokens, touched)


class _Insert(Whole[Insert]):
    def __init__(self, job: Insert, inserter: PostgresInserter) -> None:
        super().__init__(job)
        self._inserter = inserter

    async def work(self, connection: TrioConnection) -> None:
        job = self.job
        job.inserted = job.number = 0
        if len(job.letters) == 1:
            key, letter = job.letters[0]
            job.inserted = int(await self._inserter.insert(connection, letter, key, once=job.once))
            return
        await self._inserter.insert_all(connection, job)

    def lost(self, error: ConnectionBroken) -> bool:
        """It may be there or not, and is not sent again."""
        self.fail(error)
        return False


class _Purge(Whole[Purge]):
    async def work(self, connection: TrioConnection) -> None:
        await purge(connection, self.job)


def _form(job: Claim | Each[Any]) -> PostgresLease:
    form = job.form
    assert isinstance(form, PostgresLease), "made by a Look on this dialect"  # noqa: S101 -- an invariant of ours
    return form


_EACH: Mapping[type[Job], Callable[[Any], Work]] = {
    Claim: _Claim,
    Settling: _Settle,
    Extend: _Extend,
    Release: _Release,
    Run: RunOnce,
}


class PostgresWork:
    """One connection's: it remembers what it has learned of the tables that are inserted into."""

    def __init__(self, connect: Connect, session: Connect) -> None:
        self._connect, self._session = connect, session
        self._inserters: dict[tuple[Table[Any], str | None], PostgresInserter] = {}

    def of(self, job: Job) -> Work:
        """How this job is carried out."""
        if isinstance(job, Insert):
            target = (job.table, job.group)
            inserter = self._inserters.get(target)
            if inserter is None:
                inserter = self._inserters[target] = PostgresInserter(*target)
            return _Insert(job, inserter)
        if isinstance(job, Look):
            return _Look(job, self._connect, self._session)
        if isinstance(job, Purge):
            return _Purge(job)
        if isinstance(job, Notify):
            return job
        return _EACH[type(job)](job)
