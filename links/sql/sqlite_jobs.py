"""The pieces of work that a link or a publisher hands to its writer: `run` is called in the thread, the rest in trio.

A job is carried out in one transaction with others, and may be run again after a ROLLBACK: so `run` sets results and
changes nothing else, and a statement that fails touches this job alone.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import trio

from links.abc import Received, Verdict
from links.errors import CallBroken, LeaseLost, LinkError, NotApplied
from links.sql.sqlite_codes import BINDING, is_busy, is_fatal
from links.sql.sqlite_lease import Ignored, LeaseForm, Passing, Row, Token
from settlement.sql import Verb

__all__ = ["Call", "Claim", "Each", "Extend", "Job", "LetGo", "Said", "Settle", "Work"]

T = TypeVar("T")


def is_its_own(error: BaseException, connection: sqlite3.Connection) -> bool:
    """Did a statement fail by itself, with its transaction still whole?"""
    return connection.in_transaction and not is_busy(error) and not is_fatal(error)


class Work(Protocol):
    """What can stand in a transaction."""

    def run(self, connection: sqlite3.Connection, now: int) -> None:
        """Carry it out in the transaction that is open. Raises only what ends the whole transaction."""
        ...

    def learned(self) -> bool:
        """May it be run again after an error, since it goes round what has failed? Asked after each try."""
        ...

    def fail(self, error: BaseException) -> None:
        """It was not carried out."""
        ...


class Job:
    """One piece of work."""

    def __init__(self, patience: float, then: Callable[[], object] | None = None) -> None:
        self.since = trio.current_time()
        """When it was made."""
        self.deadline = self.since + patience
        """Until when a locked file is waited for."""
        self.then = then
        """Called in trio when the job has ended, whoever still waits for it."""
        self.sent = 0.0
        """`trio.current_time()` before the transaction began; 0: not begun."""
        self.done = trio.Event()
        self._error: BaseException | None = None
        self._left: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        """Why the job as a whole was not carried out: a `LinkError`, or what the statement raised."""
        return self._left or self._error

    @error.setter
    def error(self, error: BaseException | None) -> None:
        self._error = error

    def leave(self, error: BaseException) -> None:
        """It ends with this error, whatever the thread that has it still does."""
        self._left = error
        self.finish()

    def run(self, connection: sqlite3.Connection, now: int) -> None:
        """Carry it out in the transaction that is open. Raises only what ends the whole transaction."""
        self.error = None
        try:
            self.work(connection, now)
        except LinkError as error:
            self.error = error
        except BINDING as error:
            if not is_its_own(error, connection):
                raise
            self.error = error

    def work(self, connection: sqlite3.Connection, now: int) -> None:
        """The statements."""
        raise NotImplementedError

    def parts(self) -> Sequence[Work]:
        """The same work in pieces that can stand in a transaction each."""
        return [self]

    def learned(self) -> bool:
        """Run again, it would fail again."""
        return False

    def fail(self, error: BaseException) -> None:
        """It was not carried out."""
        self.error = error

    def finish(self) -> None:
        """It has ended, one way or another."""
        if self.then is not None:
            self.then()
        self.done.set()

    def check(self, doing: str) -> None:
        """Raise what a caller shall see where the job was not carried out; a new exception for each caller."""
        if isinstance(self.error, LinkError):
            raise type(self.error)(f"{doing}: {self.error}") from self.error.__cause__
        if self.error is not None:
            raise CallBroken(f"{doing}: {self.error}") from self.error


class Call(Job, Generic[T]):
    """Any function of the connection and the time."""

    def __init__(self, patience: float, function: Callable[[sqlite3.Connection, int], T]) -> None:
        super().__init__(patience)
        self._function = function
        self.result: list[T] = []

    def work(self, connection: sqlite3.Connection, now: int) -> None:
        """Call it."""
        self.result = [self._function(connection, now)]


class Claim(Job):
    """Lease rows."""

    def __init__(self, form: LeaseForm, room: int, passing: Passing, patience: float) -> None:
        super().__init__(patience)
        self._form = form
        self.passing = passing
        self.room = room
        self.rows: list[Row] = []
        self.received: list[Received[Any]] = []
        """What the rows were read as, when they have landed."""
        self.orphan = False
        """Nobody waits for the rows any more."""
        self._learned = 0

    def work(self, connection: sqlite3.Connection, now: int) -> None:
        """Claim."""
        self.rows = []
        self.rows = self._form.claim(connection, now, self.room, self.passing)

    def learned(self) -> bool:
        """A row that ended its transaction is looked for, and then passed over, by the next try."""
        before, self._learned = self._learned, self.passing.learned
        return self._learned > before

    def fail(self, error: BaseException) -> None:
        """Nothing was claimed, whatever a try before found."""
        super().fail(error)
        self.rows = []

    @property
    def full(self) -> bool:
        """Were there as many rows as were asked for?"""
        return len(self.rows) >= self.room


class Each(Job, Generic[T]):
    """The same for each of several deliveries; one that fails does not touch the others."""

    def __init__(self, form: LeaseForm, items: Sequence[T], patience: float) -> None:
        super().__init__(patience)
        self._form = form
        self.items = items

    def run(self, connection: sqlite3.Connection, now: int) -> None:
        """Carry out each by itself. Raises only what ends the whole transaction."""
        self.error = None
        for item in self.items:
            self.run_one(item, connection, now)

    def run_one(self, item: T, connection: sqlite3.Connection, now: int) -> None:
        """Carry out one. Raises only what ends the whole transaction."""
        try:
            self.one(item, connection, now)
        except BINDING as error:
            if not is_its_own(error, connection):
                raise
            self.refuse(item, error)

    def one(self, item: T, connection: sqlite3.Connection, now: int) -> None:
        """The statements for one. Raises `Ignored` where its row is there and was not touched."""
        raise NotImplementedError

    def refuse(self, item: T, error: BaseException) -> None:
        """This one was not carried out."""
        raise NotImplementedError

    def parts(self) -> Sequence[Work]:
        """Each alone."""
        return [_Piece(self, item) for item in self.items]

    def fail(self, error: BaseException) -> None:
        """None was carried out."""
        super().fail(error)
        for item in self.items:
            self.refuse(item, error)


class _Piece(Generic[T]):
    """One of an `Each`, in a transaction of its own; made in the thread."""

    def __init__(self, whole: Each[T], item: T) -> None:
        self._whole, self._item = whole, item

    def run(self, connection: sqlite3.Connection, now: int) -> None:
        self._whole.run_one(self._item, connection, now)

    def learned(self) -> bool:
        return False

    def fail(self, error: BaseException) -> None:
        self._whole.refuse(self._item, error)


class Said:
    """One verb for one delivery, and what came of it."""

    __slots__ = ("received", "verb", "verdict")

    def __init__(self, received: Received[Any], verb: Verb) -> None:
        self.received, self.verb = received, verb
        self.verdict: Verdict = None


class Settle(Each[Said]):
    """Say verbs, then claim where the link has room: one transaction, one hop."""

    def __init__(self, form: LeaseForm, said: Sequence[Said], claim: Claim | None, patience: float) -> None:
        super().__init__(form, said, patience)
        self.claim = claim
        self.alone = False
        """Nobody waits for the verdicts any more."""

    def run(self, connection: sqlite3.Connection, now: int) -> None:
        """Say each verb; one that fails is one verdict. The claim comes last, so it may find what was put back."""
        super().run(connection, now)
        if self.claim is not None:
            _Ahead(self, self.claim).run(connection, now)

    def one(self, item: Said, connection: sqlite3.Connection, now: int) -> None:
        """Say one verb."""
        item.verdict = None
        if not self._form.say(connection, now, item.received.token, item.verb):
            if self._form.holds(connection, item.received.token):
                raise Ignored("it touched no row, although the lease is ours: a trigger has ignored it")
            item.verdict = self._lost(item)

    def refuse(self, item: Said, error: BaseException) -> None:
        """This verb was not said."""
        item.verdict = NotApplied(f"{self._where(item)}: {error}")
        item.verdict.__cause__ = error

    def _where(self, said: Said) -> str:
        delivery = said.received.delivery
        return (
            f"{type(said.verb).__name__} of row {delivery.id} of {delivery.source!r}, table {self._form.table.name!r}"
        )

    def _lost(self, said: Said) -> LeaseLost:
        return LeaseLost(
            f"{self._where(said)}: the lease was lost: the row is gone, or was claimed or changed by somebody else"
        )

    def parts(self) -> Sequence[Work]:
        """Each verb alone, and the claim."""
        pieces = super().parts()
        return pieces if self.claim is None else [*pieces, _Ahead(self, self.claim)]

    @property
    def places(self) -> int:
        """How many places under the limit return: a verb that was not applied keeps its own."""
        return sum(not isinstance(said.verdict, NotApplied) for said in self.items)


class _Ahead:
    """The claim of a settlement: for as many as have left."""

    def __init__(self, whole: Settle, claim: Claim) -> None:
        self._whole, self._claim = whole, claim

    def run(self, connection: sqlite3.Connection, now: int) -> None:
        self._claim.room = self._whole.places
        self._claim.rows = []
        if self._claim.room:
            self._claim.run(connection, now)

    def learned(self) -> bool:
        return self._claim.learned()

    def fail(self, error: BaseException) -> None:
        self._claim.fail(error)


class Extend(Each[Received[Any]]):
    """Lease rows again."""

    def __init__(self, form: LeaseForm, held: Sequence[Received[Any]], patience: float) -> None:
        super().__init__(form, held, patience)
        self.tokens: dict[Received[Any], Token | None] = {}
        """The new token, or None where the lease was lost; what failed has none."""
        self.failed: dict[Received[Any], BaseException] = {}

    def one(self, item: Received[Any], connection: sqlite3.Connection, now: int) -> None:
        """Extend one."""
        self.failed.pop(item, None)
        token = self._form.extend(connection, now, item.token)
        if token is None and self._form.holds(connection, item.token):
            raise Ignored("the lease was not extended: a trigger has ignored it")
        self.tokens[item] = token

    def refuse(self, item: Received[Any], error: BaseException) -> None:
        """The old lease holds."""
        self.tokens.pop(item, None)
        self.failed[item] = error


class LetGo(Each[Received[Any]]):
    """Let leases go; the attempt stays counted where a handler was called, else it is as before the claim."""

    def __init__(self, form: LeaseForm, held: Sequence[Received[Any]], patience: float) -> None:
        super().__init__(form, held, patience)
        self.failed: dict[Received[Any], BaseException] = {}

    def one(self, item: Received[Any], connection: sqlite3.Connection, now: int) -> None:  # noqa: ARG002 -- no time
        """Let one go."""
        self.failed.pop(item, None)
        gone = self._form.let_go(connection, item.token, counted=item.started)
        if not gone and self._form.holds(connection, item.token):
            raise Ignored("the lease was not let go: a trigger has ignored it")

    def refuse(self, item: Received[Any], error: BaseException) -> None:
        """Its lease ends by itself."""
        self.failed[item] = error
