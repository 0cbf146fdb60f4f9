"""The copies of one subscription: what must be published although its original is gone, when its time has come.

Owns the waiting copies (a heap by due time) and the room for them. Hears `Owed` from settlers, over a channel that
outlives their lives; the room was taken before the verb was said, so the hand-over never waits. Tells the books.
Outlives lives, and a cancellation: it runs in a shield of its own, whose deadline its owner sets when what is inside
has ended. A copy
that fails waits again, with backoff, until it is confirmed; it is *lost* only where the goodbye ends first.
"""

from __future__ import annotations

import heapq
import math
import random
from functools import partial
from itertools import count

import attrs
import trio

from actors.books import Books
from actors.drain import HURRY, Drain
from actors.events import log
from actors.letterbox import PUBLISH_FAILED, Letterbox
from actors.messages import Owed
from actors.restarts import MOST, backoff
from settlement.delivery import name_of
from settlement.plans import Publish, Step, Wait

__all__ = ["OwedCopies"]

AT_ONCE = 16
"""How many copies are on their way at the same time."""


@attrs.define(eq=False)
class _Copy:
    owed: Owed
    steps: tuple[Step, ...]
    failures: int = 0


class OwedCopies:
    """The delay timer and its publishers."""

    def __init__(self, room: int, letterbox: Letterbox, books: Books, drain: Drain) -> None:
        self._room = trio.Semaphore(room)
        self._letterbox = letterbox
        self._books = books
        self._drain = drain
        self._owed, self._heard = trio.open_memory_channel[Owed](math.inf)
        self._due: list[tuple[float, int, _Copy]] = []
        self._order = count()
        self._waiting: set[Owed] = set()
        self._early = False
        self._open = True
        self._sleeping: trio.CancelScope | None = None
        self._shield = trio.CancelScope(shield=True)
        self._finished = trio.Event()

    @property
    def waiting(self) -> int:
        """How many copies are owed and neither published nor lost; counted from what is there."""
        return len(self._waiting)

    async def reserve(self) -> None:
        """Wait for room for one copy. Cancellation: no room was taken."""
        await self._room.acquire()

    def release(self) -> None:
        """Give room back."""
        self._room.release()

    def owe(self, owed: Owed) -> None:
        """Take a copy over, into room that was reserved; never waits."""
        self._waiting.add(owed)
        self._books.owed()
        if self._finished.is_set():  # the life's own end took longer than the goodbye
            self._waiting.remove(owed)
            self._lose(1)
        else:
            self._owed.send_nowait(owed)

    def close(self) -> None:
        """No more copies come: the supervised link has ended."""
        self._open = False
        self._owed.close()

    async def finished(self) -> None:
        """Wait until every copy is published or lost. Cancellation: nothing was done."""
        await self._finished.wait()

    def finish(self, deadline: float) -> None:
        """Publish everything now, whatever its time, and end by `deadline`: early beats lost."""
        self.hurry()
        self._shield.deadline = min(self._shield.deadline, deadline)

    def hurry(self) -> None:
        """No copy waits for its time any more."""
        if self._early:
            return
        self._early = True
        if self._waiting:
            log.warning("%s: publishing %d copies before their time", self._books.subscription, len(self._waiting))
            # in order of time; also those that failed: the backoff may be longer than what is left
            self._due = [(0.0, n, copy) for n, (_, _, copy) in enumerate(sorted(self._due), -len(self._due))]
        self._wake()

    async def run(self) -> None:
        """Until closed and empty, or the deadline. A cancellation from outside is not heard before that."""
        due, taking = trio.open_memory_channel[_Copy](math.inf)
        try:
            with self._heard, self._shield:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._end_of_grace)
                    async with trio.open_nursery() as publishers:
                        with taking, due:
                            for _ in range(AT_ONCE):
                                publishers.start_soon(self._publish, taking.clone())
                            await self._time(due)
                    nursery.cancel_scope.cancel()
        finally:
            self._finished.set()
            if self._waiting:
                lost = len(self._waiting)
                self._waiting.clear()
                self._lose(lost)

    def _lose(self, count: int) -> None:
        log.error("%s: %d copies are lost: the goodbye ended first", self._books.subscription, count)
        self._books.lost(count)

    async def _end_of_grace(self) -> None:
        await self._drain.grace_over.wait()
        self.hurry()

    async def _time(self, due: trio.MemorySendChannel[_Copy]) -> None:
        while self._open or self._waiting:
            now = trio.current_time()
            while self._due and self._due[0][0] <= now:
                due.send_nowait(heapq.heappop(self._due)[2])
            with trio.CancelScope(deadline=self._due[0][0] if self._due else math.inf) as self._sleeping:
                try:
                    owed = await self._heard.receive()
                except trio.EndOfChannel:
                    if not self._waiting:
                        return
                    await trio.sleep_forever()  # until a copy is due, has failed, or all are to go
                else:
                    self._walk(_Copy(owed, owed.steps))
            self._sleeping = None

    def _walk(self, copy: _Copy) -> None:
        """Take the steps that only wait; what is left begins with a publish."""
        delay = 0.0
        while copy.steps and isinstance(copy.steps[0], Wait):
            delay += copy.steps[0].seconds
            copy.steps = copy.steps[1:]
        due = 0.0 if self._early else trio.current_time() + delay
        heapq.heappush(self._due, (due, next(self._order), copy))

    async def _publish(self, taking: trio.MemoryReceiveChannel[_Copy]) -> None:
        with taking:
            async for copy in taking:
                await self._post(copy)

    async def _post(self, copy: _Copy) -> None:
        step = copy.steps[0]
        assert isinstance(step, Publish)  # noqa: S101 -- `_walk` took the others
        what = f"copies to {name_of(step.to)}"
        try:
            await self._letterbox.post(step, partial(self._books.degrade, what, who=self))
        except PUBLISH_FAILED as error:
            copy.failures += 1
            self._books.degrade(what, error, self)
            wait = backoff(copy.failures, random.random(), most=HURRY if self._early else MOST)  # noqa: S311
            heapq.heappush(self._due, (trio.current_time() + wait, next(self._order), copy))
        else:
            self._books.recover(what)
            copy.steps = copy.steps[1:]
            if copy.steps:
                self._walk(copy)
            else:
                self._waiting.remove(copy.owed)
                self._books.published()
                self._room.release()
        self._wake()

    def _wake(self) -> None:
        if self._sleeping is not None:
            self._sleeping.cancel()
