"""One database, as the queues and publishers of one broker share it.

Owns the present life, and which subscription is attached to which queue. Tells queues that there is something.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from links.abc import Broker
from links.errors import ConnectionBroken, LinkBroken, LinkRefused
from links.sql.dialect import Dialect, SqlLife
from links.sql.jobs import Call, Run
from links.sql.patience import PATIENCE
from links.sql.table import Table
from links.sql.wakes import Wakes

__all__ = ["Database"]

T = TypeVar("T")


class Database:
    """Plain calls, but for the run of a life, and what is asked of it."""

    def __init__(self, broker: Broker, dialect: Dialect) -> None:
        self.broker, self.dialect = broker, dialect
        self._life: SqlLife | None = None
        self._attached: dict[tuple[str, str | None], tuple[str, Wakes]] = {}

    @property
    def life(self) -> SqlLife:
        """The connections of the present life."""
        assert self._life is not None, "asked for while up"  # noqa: S101 -- an invariant of ours
        return self._life

    async def run(self, goodbye: float, started: Callable[[], None]) -> None:
        """One life. Raises `LinkRefused`, `ConnectionBroken`.

        Cancellation: links say goodbye, then the connections are closed, within `goodbye`.
        """
        self._life = self.dialect.life(self.wake, first=self.broker.lives == 0)
        await self._life.run(goodbye, self.broker.up, started)

    async def ask(self, call: Call[T], where: str, *, again: bool = True) -> T:
        """Have this run, in the present life or the next one; `again`: also where the connection broke amid it.

        `where`: what for, for errors. Raises `LinkBroken` unless `again`, `CallBroken`, another `LinkError` of the
        call, and `NotConnected`. Cancellation: a call that has not begun is not run; another is, once.
        """
        while True:
            await self.broker.until_up()
            job: Run[T] = Run(call, PATIENCE, again=again)
            await self.life.publishing.carry_out(job)
            if isinstance(job.error, ConnectionBroken):
                if again or job.sent == 0:
                    continue
                raise LinkBroken(f"{where}: {job.error}; it was done or not") from job.error
            job.check(where)
            result: Any = job.result  # None may be what it gave
            given: T = result
            return given

    @contextmanager
    def attached(
        self, table: Table[Any], group: str | None, subscription: str, wakes: Wakes
    ) -> Generator[None, None, None]:
        """This subscription has the queue for the block. Raises `LinkRefused` where another one has it."""
        name = self.dialect.spelled(table.name)
        for (other, part), (holder, _) in self._attached.items():
            if other == name and (part == group or part is None or group is None):
                queue = f"group {group!r} of table {table.name!r}" if group is not None else f"table {table.name!r}"
                raise LinkRefused(
                    f"subscription {subscription!r}: {queue} is already subscribed on this broker, by {holder!r}; "
                    "use concurrency, or a second broker"
                )
        self._attached[name, group] = (subscription, wakes)
        try:
            if self.life.news is not None:
                self.life.news.listen(name, subscription)
            yield
        finally:
            del self._attached[name, group]

    def wake(self, table: str, group: str | None) -> None:
        """Let this process's queue on that table and group look at once; None: its queues on every group."""
        name = self.dialect.spelled(table)
        if found := self._attached.get((name, group)):
            found[1].wake()
            return
        for (other, part), (_, wakes) in self._attached.items():
            if other == name and (group is None or part is None):
                wakes.wake()

    def published(self, table: str, group: str | None) -> None:
        """There is something new: here, and where other processes shall hear of it."""
        self.wake(table, group)
        if self.life.news is not None:
            self.life.news.tell(self.dialect.spelled(table), group)
