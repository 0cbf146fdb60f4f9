"""What a link or a publisher wants done, as data: look at a table, claim, settle, extend, release, insert.

A job names what shall be done and takes what came of it; the dialect carries it out, in one transaction with others,
and may do so again after a ROLLBACK: so it sets results and changes nothing else. Nothing here knows a statement.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import attrs
import trio

from links.abc import Received, Verdict
from links.errors import CallBroken, LinkError, NotApplied
from links.sql.lender import Lender
from links.sql.letters import Columns
from links.sql.rows import Row, Token
from links.sql.table import Table
from settlement.delivery import Letter
from settlement.sql import ClaimForm, Verb

__all__ = [
    "Call",
    "Claim",
    "Each",
    "Extend",
    "Form",
    "Held",
    "Insert",
    "Job",
    "LeaseForm",
    "Look",
    "Passing",
    "Purge",
    "Release",
    "Run",
    "Saying",
    "Settling",
]

T = TypeVar("T")

Call: TypeAlias = Callable[[Any, Any], T | Awaitable[T]]
"""What a `Run` runs: a function of the connection, in its transaction, and of the time; that is None on a server."""


class Form(Protocol):
    """One queue of one table, as the dialect has looked at it: what it needs to carry out the jobs there."""

    table: Table[Any]
    warnings: list[str]
    """What was found and is no reason to refuse, one line each."""

    @property
    def schema(self) -> Columns:
        """The table's columns."""
        ...


class LeaseForm(Form, Protocol):
    """A queue whose rows are leased."""

    lease: float
    """Seconds."""

    def lender(self, limit: int) -> Lender:
        """For the transactions of a link with so many deliveries in hand, at most."""
        ...


class Job:
    """One piece of work. `patience`: seconds for which a locked database is waited for."""

    def __init__(self, patience: float, then: Callable[[], object] | None = None) -> None:
        self.since = trio.current_time()
        """When it was made."""
        self.deadline = self.since + patience
        """Until when a locked database is waited for."""
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


class Look(Job):
    """Look at a queue's table, and at the table that its dead letters shall move to.

    `places`: how many claims may be in hand, where each needs a connection of its own.
    """

    def __init__(
        self,
        table: Table[Any],
        group: str | None,
        claim: ClaimForm,
        *,
        subscription: str,
        dead_letter: str | None,
        custom: Mapping[str, str],
        places: int,
        patience: float,
    ) -> None:
        super().__init__(patience)
        self.table, self.group, self.claim, self.places = table, group, claim, places
        self.subscription, self.dead_letter, self.custom = subscription, dead_letter, custom
        self.form: Form | None = None
        """What the other jobs of this queue are for; None: not looked yet."""


class Held(Collection[Any], Protocol):
    """The ids that this process holds. Asked in the thread, changed in trio, where no hop is under way."""


@attrs.define(eq=False)
class Passing:
    """The rows that one claim passes over, and those that it could not lease.

    Attributes:
        held: The ids that this process holds. By the row's own lease they are not to be had; by a clock that was set
            forward they are.
        over: The ids of those that could not be leased a short while ago.
        most: How many may fail; then the claim ends with what it has. 500 by default.
        failed: Those that could not be leased now, by id, and why; empty at first.
        singly: Did leasing several at once fail? Then each is leased by itself; also by the next try, if it ended this
            one. False at first.
        complete: Was every row that is due looked at? False at first.
    """

    held: Held
    over: frozenset[Any]
    most: int = 500
    failed: dict[Any, BaseException] = attrs.Factory(dict[Any, BaseException])
    singly: bool = False
    complete: bool = False

    def passes(self, key: Any) -> bool:
        """Not this one?"""
        return key in self.held or key in self.over or key in self.failed

    @property
    def size(self) -> int:
        """How many there may be in front of the next row."""
        return len(self.held) + len(self.over) + len(self.failed)

    @property
    def learned(self) -> int:
        """Is it more than at the last try? Then the next one goes otherwise."""
        return self.singly + len(self.failed)

    @property
    def enough(self) -> bool:
        """Have too many failed?"""
        return len(self.failed) >= self.most


class Claim(Job):
    """Lease up to `room` rows, but for those that are passed over."""

    def __init__(self, form: Form, room: int, passing: Passing, patience: float) -> None:
        super().__init__(patience)
        self.form, self.room, self.passing = form, room, passing
        self.rows: list[Row] = []
        self.received: list[Received[Any]] = []
        """What the rows were read as, when they have landed."""
        self.orphan = False
        """Nobody waits for the rows any more."""

    def fail(self, error: BaseException) -> None:
        """Nothing was claimed, whatever a try before found."""
        super().fail(error)
        self.rows = []

    @property
    def full(self) -> bool:
        """Were there as many rows as were asked for?"""
        return len(self.rows) >= self.room


class Run(Job, Generic[T]):
    """Call this with what the dialect has: its open transaction, and the time of that.

    `passing`: of a claim: it is run again as long as it goes round what has failed. `again`: twice does no harm, so
    that it may be run again where a connection broke amid it. On PostgreSQL the call is awaited.
    """

    def __init__(self, call: Call[T], patience: float, *, passing: Passing | None = None, again: bool = False) -> None:
        super().__init__(patience)
        self.call, self.passing, self.again = call, passing, again
        self.result: T | None = None
        """What it gave; None: it was not carried out."""

    def fail(self, error: BaseException) -> None:
        """It gave nothing, whatever a try before did."""
        super().fail(error)
        self.result = None


class Each(Job, Generic[T]):
    """The same for each of several deliveries; one that fails does not touch the others."""

    def __init__(self, form: Form, items: Sequence[T], patience: float) -> None:
        super().__init__(patience)
        self.form, self.items = form, items

    def refuse(self, item: T, error: BaseException) -> None:
        """This one was not carried out."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """None was carried out."""
        super().fail(error)
        for item in self.items:
            self.refuse(item, error)


class Saying:
    """One verb for one delivery, and what came of it."""

    __slots__ = ("received", "verb", "verdict")

    def __init__(self, received: Received[Any], verb: Verb) -> None:
        self.received, self.verb = received, verb
        self.verdict: Verdict = None


class Settling(Each[Saying]):
    """Say verbs, then claim where the link has room: one transaction, one hop."""

    def __init__(self, form: Form, items: Sequence[Saying], claim: Claim | None, patience: float) -> None:
        super().__init__(form, items, patience)
        self.claim = claim
        """For as many rows as have left, whatever room it was made with."""
        self.alone = False
        """Nobody waits for the verdicts any more."""

    def refuse(self, item: Saying, error: BaseException) -> None:
        """This verb was not said."""
        item.verdict = NotApplied(f"{self.where(item)}: {error}")
        item.verdict.__cause__ = error

    def where(self, item: Saying) -> str:
        """What was to be said of which row, for an error."""
        delivery = item.received.delivery
        return f"{type(item.verb).__name__} of row {delivery.id} of {delivery.source!r}, table {self.form.table.name!r}"

    @property
    def places(self) -> int:
        """How many places under the limit return: a verb that was not applied keeps its own."""
        return sum(not isinstance(item.verdict, NotApplied) for item in self.items)


class Extend(Each[Received[Any]]):
    """Lease rows again."""

    def __init__(self, form: Form, items: Sequence[Received[Any]], patience: float) -> None:
        super().__init__(form, items, patience)
        self.tokens: dict[Received[Any], Token | None] = {}
        """The new token, or None where the lease was lost; what failed has none."""
        self.failed: dict[Received[Any], BaseException] = {}

    def refuse(self, item: Received[Any], error: BaseException) -> None:
        """The old lease holds."""
        self.tokens.pop(item, None)
        self.failed[item] = error


class Release(Each[Received[Any]]):
    """Let leases go; the attempt stays counted where a handler was called, else it is as before the claim."""

    def __init__(self, form: Form, items: Sequence[Received[Any]], patience: float) -> None:
        super().__init__(form, items, patience)
        self.failed: dict[Received[Any], BaseException] = {}

    def refuse(self, item: Received[Any], error: BaseException) -> None:
        """Its lease ends by itself."""
        self.failed[item] = error


class Insert(Job):
    """Insert letters, all or none, each with its id or None; `once`: one, and not where its id is there already."""

    def __init__(
        self,
        table: Table[Any],
        group: str | None,
        letters: Sequence[tuple[Any, Letter]],
        patience: float,
        *,
        once: bool = False,
    ) -> None:
        super().__init__(patience)
        self.table, self.group, self.letters, self.once = table, group, letters, once
        self.inserted = 0
        self.number = 0
        """Which letter it was at, from 1; 0: at none."""

    @property
    def which(self) -> str:
        """The letter that it was at, where there is more than one."""
        return f", letter {self.number} of {len(self.letters)}" if self.number else ""


class Purge(Job):
    """Delete up to `room` rows whose time in the column `by` is older than `age` seconds, from the id `after` on.

    But for those that are held, and, unless `unfinished`, for those that are not finished.
    """

    def __init__(
        self,
        table: Table[Any],
        group: str | None,
        by: str,
        age: float,
        *,
        unfinished: bool,
        room: int,
        after: Any,
        patience: float,
    ) -> None:
        super().__init__(patience)
        self.table, self.group, self.by, self.age, self.unfinished = table, group, by, age, unfinished
        self.room, self.after = room, after
        self.found = self.deleted = 0
        self.last: Any = None
        """The id of the last one that was found."""
