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
from links.sql.sqlite_lease import LeaseForm, Row, Token
from settlement.sql import Verb

__all__ = ["Call", "Claim", "Extend", "Job", "LetGo", "Said", "Settle", "Work"]

T = TypeVar("T")


def is_its_own(error: BaseException, connection: sqlite3.Connection) -> bool:
    """Did a statement fail by itself, with its transaction still whole?"""
    return connection.in_transaction and not is_busy(error) and not is_fatal(error)


class Work(Protocol):
    """What can stand in a transaction."""

    def run(self, connection: sqlite3.Connection, now: int) -> None:
        """Carry it out in the transaction that is open. Raises only what ends the whole transaction."""
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

    def __init__(self, form: LeaseForm, room: int, paused: Sequence[Any], patience: float) -> None:
        super().__init__(patience)
        self._form, self._paused = form, paused
        self.room = room
        self.rows: list[Row] = []
        self.orphan = False
        """Nobody waits for the rows any more."""

    def work(self, connection: sqlite3.Connection, now: int) -> None:
        """Claim."""
        self.rows = []
        self.rows = self._form.claim(connection, now, self.room, self._paused)

    def fail(self, error: BaseException) -> None:
        """Nothing was claimed, whatever a try before found."""
        super().fail(error)
        self.rows = []

    @property
    def full(self) -> bool:
        """Were there as many rows as were asked for?"""
        return len(self.rows) >= self.room


class Said:
    """One verb for one delivery, and what came of it."""

    __slots__ = ("received", "verb", "verdict")

    def __init__(self, received: Received[Any], verb: Verb) -> None:
        self.received, self.verb = received, verb
        self.verdict: Verdict = None


class Settle(Job):
    """Say verbs, then claim where the link has room: one transaction, one hop."""

    def __init__(self, form: LeaseForm, said: Sequence[Said], claim: Claim | None, patience: float) -> None:
        super().__init__(patience)
        self._form = form
        self.said, self.claim = said, claim

    def run(self, connection: sqlite3.Connection, now: int) -> None:
        """Say each verb; one that fails is one verdict. The claim comes last, so it may find what was put back."""
        self.error = None
        for said in self.said:
            self.say(said, connection, now)
        if self.claim is not None:
            self.claim.run(connection, now)

    def say(self, said: Said, connection: sqlite3.Connection, now: int) -> None:
        """Say one verb. Raises only what ends the whole transaction."""
        try:
            touched = self._form.say(connection, now, said.received.token, said.verb)
        except BINDING as error:
            if not is_its_own(error, connection):
                raise
            self.refuse(said, error)
        else:
            said.verdict = None if touched else self._lost(said)

    def refuse(self, said: Said, error: BaseException) -> None:
        """This verb was not said."""
        said.verdict = NotApplied(f"{self._where(said)}: {error}")
        said.verdict.__cause__ = error

    def _where(self, said: Said) -> str:
        delivery = said.received.delivery
        return (
            f"{type(said.verb).__name__} of row {delivery.id} of {delivery.source!r}, table {self._form.table.name!r}"
        )

    def _lost(self, said: Said) -> LeaseLost:
        return LeaseLost(f"{self._where(said)}: the lease was lost, the row belongs to a later claim")

    def parts(self) -> Sequence[Work]:
        """Each verb alone, and the claim."""
        pieces: list[Work] = [_Piece(self, said) for said in self.said]
        return pieces if self.claim is None else [*pieces, self.claim]

    def fail(self, error: BaseException) -> None:
        """None of the verbs was said."""
        super().fail(error)
        for said in self.said:
            self.refuse(said, error)


class _Piece:
    """One verb of a `Settle`, in a transaction of its own; made in the thread."""

    def __init__(self, whole: Settle, said: Said) -> None:
        self._whole, self._said = whole, said

    def run(self, connection: sqlite3.Connection, now: int) -> None:
        self._whole.say(self._said, connection, now)

    def fail(self, error: BaseException) -> None:
        self._whole.refuse(self._said, error)


class Extend(Job):
    """Lease rows again."""

    def __init__(self, form: LeaseForm, held: Sequence[Received[Any]], patience: float) -> None:
        super().__init__(patience)
        self._form = form
        self.held = held
        self.tokens: list[Token | None] = []
        """One per delivery: the new token, or None where the lease was lost."""

    def work(self, connection: sqlite3.Connection, now: int) -> None:
        """Extend each."""
        self.tokens = [self._form.extend(connection, now, received.token) for received in self.held]


class LetGo(Job):
    """Let leases go; the attempt stays counted where a handler was called, else it is as before the claim."""

    def __init__(self, form: LeaseForm, held: Sequence[Received[Any]], patience: float) -> None:
        super().__init__(patience)
        self._form = form
        self.held = held

    def work(self, connection: sqlite3.Connection, now: int) -> None:  # noqa: ARG002 -- no time is written
        """Let each go."""
        for received in self.held:
            self._form.let_go(connection, received.token, counted=received.started)
