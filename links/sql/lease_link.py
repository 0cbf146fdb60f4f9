"""The link of the lease form, for every dialect: claim, settle, extend, let go.

Owns the rows that this life has claimed, and those that it has claimed ahead of `receive`. Every verb is a job of the
broker's writer; what a job brings is taken in by its `then`, in trio, whether or not somebody still waits for it. A
cancellation leaves no row behind: a claim that nobody waits for any more is given back, and the goodbye lets go the
rest. A row whose verb was not applied stays held, since it is said again; what is held here is never claimed here, by
any clock. What is shielded, and how long: the giving back of a cancelled claim, a settlement, the goodbye; each for one
`goodbye` at most.

A settlement and the next claim share one transaction and one hop: where the last claim was full, `settle` claims as
many rows as it has settled, and holds them until `receive` asks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import NoReturn, TypeVar

import trio

from links.abc import Link, Received, Settlement, Verdict
from links.errors import CallBroken, ConnectionBroken, NotApplied, SettlementUnknown
from links.sql.dialect import Writer
from links.sql.holdings import Holdings
from links.sql.jobs import Claim, Extend, Job, LeaseForm, Passing, Release, Saying, Settling
from links.sql.loans import Leased, Loans
from links.sql.passed_over import PassedOver
from links.sql.patience import PATIENCE, Patience
from links.sql.rows import RowReader
from links.sql.wakes import Tell, Wakes, wake_for
from settlement.sql import Finish

__all__ = ["LeaseLink"]

R = TypeVar("R")

_log = logging.getLogger("trio_settlement")

_HOP = 0.01  # seconds: with a goodbye of less a verb under way could never say what became of it


class LeaseLink(Link[R]):
    """One life of a queue in the lease form; made by `SqlQueue.attach`."""

    spreads = True

    def __init__(
        self,
        form: LeaseForm,
        writer: Writer,
        over: Callable[[], Awaitable[ConnectionBroken]],
        wakes: Wakes,
        tell: Tell,
        *,
        source: str,
        subscription: str,
        goodbye: float,
        limit: int,
    ) -> None:
        self._form, self._writer, self._wakes, self._tell = form, writer, wakes, tell
        self._reader: RowReader[R] = RowReader(form.table, source)
        self._over = over
        self._subscription, self._goodbye = subscription, max(goodbye, _HOP)
        self._rows: Holdings[R] = Holdings(form.lease)
        self._ahead: deque[Received[R]] = deque()
        self._settling: set[Received[R]] = set()
        self._extending: set[Received[R]] = set()
        self._extended = trio.Event()
        self._loans = Loans(form.lender(limit), self._rows, self._settling, self._still, self._goodbye)
        self._passed = PassedOver(subscription, form.table.name, self._say)
        self._unextended = True
        """Are there rows whose lease could not be extended? A link before this one may have said so."""
        self._open: set[Job] = set()
        self._returning: set[Release] = set()
        self._full = False
        self._stopped = False

    def _say(self, what: str, why: str | None) -> None:
        self.degraded(what, why)  # set after this link was made

    # --- claim ---------------------------------------------------------------------------------------------------

    async def receive(self, room: int) -> Sequence[Received[R]]:
        """Hand over what was claimed ahead, or claim; else wait for a wake or the next poll, and claim again.

        Raises `CallBroken` where the claim failed or the file stayed locked, `ConnectionBroken` where the file failed.

        Cancellation: a claim that was under way is waited for and given back, its attempts as they were, shielded and
        within the goodbye.
        """
        while True:
            if self._ahead:
                await trio.lowlevel.checkpoint_if_cancelled()
                if fresh := self._take_ahead(room):
                    return fresh
            if self._stopped:
                await trio.sleep_forever()
            await self._wakes.until_due()
            if not self._ahead and not self._stopped and (claimed := await self._claim(room)):
                return claimed

    def _take_ahead(self, room: int) -> list[Received[R]]:
        """What was claimed ahead and has three quarters of its lease left; the rest is given back.

        So a handler does not start with less than the keeper needs to renew in time.
        """
        fresh: list[Received[R]] = []
        stale: list[Received[R]] = []
        worth = trio.current_time() + self._form.lease * 3 / 4
        while self._ahead and len(fresh) < room:
            received = self._ahead.popleft()
            (fresh if received.expires is not None and received.expires > worth else stale).append(received)
        self._let_go(stale)
        return fresh

    def _claim_of(self, room: int, patience: float) -> Claim:
        self._wakes.look()
        return Claim(self._form, room, Passing(self._rows.held, self._passed.now()), patience)

    async def _claim(self, room: int) -> list[Received[R]]:
        job = self._claim_of(room, PATIENCE)
        self._enter(job, partial(self._claimed, job))
        try:
            await self._writer.carry_out(job)
        except trio.Cancelled:
            job.orphan = True
            back = self._let_go(job.received)
            with trio.move_on_after(self._goodbye, shield=True):
                await job.done.wait()
                for each in [back] if back else [*self._returning]:
                    await each.done.wait()
            raise
        if self._stopped:
            self._let_go(job.received)
            return []
        job.check(f"claim of {self._subscription!r}")
        return job.received

    def _claimed(self, job: Claim) -> None:
        """Take in what a claim brought: from here on the rows are held."""
        expires = job.sent + self._form.lease
        job.received = [self._reader.read(row, expires, Leased(self._loans, row[0])) for row in job.rows]
        for received in job.received:
            self._rows.hold(received)
        self._full = job.error is None and job.full
        for moment in self._passed.learn(job.passing, job.rows, job.error):
            self._wakes.wake_at(moment)
        if self._full or job.error is not None:
            self._wakes.wake()
        if job.orphan:
            self._let_go(job.received)

    def stop(self) -> None:
        """Take nothing more; what was claimed ahead is given back, its attempts as they were.

        A claim that has not begun is withdrawn.
        """
        self._stopped = True
        for job in [*self._open]:
            if isinstance(job, Claim):
                self._writer.withdraw(job)
            elif isinstance(job, Settling) and job.sent == 0:
                job.claim = None
        self._let_go([*self._ahead])
        self._ahead.clear()

    async def until_broken(self) -> NoReturn:
        """Wait until the connection's life is over, and raise why. Cancellation: nothing was done."""
        why = await self._over()
        raise ConnectionBroken(f"{self._subscription!r}: {why}") from why.__cause__

    # --- settle --------------------------------------------------------------------------------------------------

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Verdict]:
        """Carry out all settlements in one transaction, each by itself: one that fails does not touch the others.

        An ack of what has a transaction of its handler's is said in that one, and any other verb when it is undone.
        A row whose verb was not applied stays held, to be settled again. A locked file is waited for while the leases
        last, 10 s at most (but one goodbye in any case). Raises `ConnectionBroken` where the file failed.

        Cancellation: shielded for a goodbye at most; so the verdicts are true, and a cancellation is noticed at the
        caller's next checkpoint.
        """
        settling = [settlement.received for settlement in settlements]
        patience = Patience(self._goodbye, [each.expires for each in settling])
        self._settling.update(settling)
        try:
            while not self._extending.isdisjoint(settling):
                if not await patience.until(self._extended):
                    why = f"an extension was still under way after {patience.waited:.1f} s"
                    return [NotApplied(f"settlement of {self._subscription!r}: {why}") for _ in settlements]
            if self._loans:
                return await self._loans.settle(settlements, partial(self._say_all, patience))
            return await self._say_all(patience, settlements)
        finally:
            self._settling.difference_update(settling)

    async def _say_all(self, patience: Patience, settlements: Sequence[Settlement]) -> Sequence[Verdict]:
        """As `settle`, by the writer."""
        said = [Saying(each.received, verb) for each in settlements if (verb := each.plan.verb) is not None]
        claim = self._claim_of(len(settlements), 0.0) if self._full and not self._stopped else None
        job = Settling(self._form, said, claim, patience.length)
        self._enter(job, partial(self._settled, job))
        self._writer.submit(job)
        if not await patience.until(job.done):
            job.deadline = trio.current_time()  # the try that is under way is the last
            self._writer.withdraw(job)
            with trio.move_on_after(patience.landing, shield=True):
                await job.done.wait()
        if not job.done.is_set():
            job.alone = True
            why = f"the database has not answered within {patience.waited:.1f} s"
            return [SettlementUnknown(f"settlement of {self._subscription!r}: {why}") for _ in said]
        if isinstance(job.error, ConnectionBroken):
            job.check(f"settlement of {self._subscription!r}")
        return [each.verdict for each in said]

    def _settled(self, job: Settling) -> None:
        """Take in what a settlement came to, also where its caller no longer waits."""
        unsaid: list[Received[R]] = []
        for said in job.items:
            if isinstance(said.verdict, NotApplied):
                unsaid.append(said.received)
                continue
            self._rows.drop(said.received)
            if said.verdict is None and type(said.verb) is not Finish:
                wake_for(said.verb, self._form.table.name, self._wakes, self._tell)
        if job.claim is not None:
            self._claimed_ahead(job, job.claim)
        if job.alone and not isinstance(job.error, ConnectionBroken):  # it was called unknown: nobody says it again
            self._let_go(unsaid)

    def _claimed_ahead(self, job: Settling, claim: Claim) -> None:
        claim.sent = job.sent
        if job.error is not None:
            claim.rows = []
        if claim.error is not None or job.error is not None:
            self._wakes.wake()
        elif claim.room:  # else no place has returned, and nothing was looked at
            self._claimed(claim)
            if self._stopped:
                self._let_go(claim.received)
            elif claim.received:
                self._ahead.extend(claim.received)
                self._wakes.rouse()

    # --- extend, let go ------------------------------------------------------------------------------------------

    async def extend(self, held: Sequence[Received[R]]) -> Sequence[Received[R]]:
        """Lease again, in one transaction, those that are held and not being settled; return those that are lost.

        Raises `CallBroken` where the statement failed or the file stayed locked, `ConnectionBroken`.

        Cancellation: the old expiry holds; where the thread had begun, the token moves on all the same.
        """
        busy = self._settling | self._extending
        mine = [each for each in held if each not in busy]
        if self._loans:
            mine = self._loans.kept(mine, trio.current_time() + self._form.lease)
        if not mine:
            await trio.lowlevel.checkpoint()
            if self._writer.error is not None:
                raise ConnectionBroken(f"extension of {self._subscription!r}: {self._writer.error}")
            return []
        job = Extend(self._form, mine, PATIENCE)
        self._extending.update(mine)
        self._enter(job, partial(self._extension, job))
        await self._writer.carry_out(job)
        job.check(f"extension of {self._subscription!r}")
        return [each for each in mine if each in job.tokens and job.tokens[each] is None]

    def _extension(self, job: Extend) -> None:
        if job.error is None:
            self._extended_to(job)
        self._extending.difference_update(job.items)
        self._let_go(self._rows.left(job.items))
        done, self._extended = self._extended, trio.Event()
        done.set()

    def _extended_to(self, job: Extend) -> None:
        for received, token in job.tokens.items():
            if token is None:
                self._rows.drop(received)
            else:
                received.token = token
                received.expires = job.sent + self._form.lease
        if job.failed:
            received, why = next(iter(job.failed.items()))
            if not job.tokens:
                job.error = CallBroken(str(why))
                job.error.__cause__ = why
                return
            which = f"{len(job.failed)} not extended, such as row {received.delivery.id}: {why}"
            self.degraded("to extend each lease", which)
        elif self._unextended:
            self.degraded("to extend each lease", None)
        self._unextended = bool(job.failed)

    def forget(self, received: Received[R]) -> None:
        """Nothing will be said for this one: let it go, at once where its lease is more than half.

        Else with the goodbye, unless the lease ends first: a handler that was cancelled may not have ended yet.
        """
        self._loans.forget(received)
        if received not in self._rows:
            return
        fresh = received.expires is not None and received.expires > trio.current_time() + self._form.lease / 2
        if fresh and received not in self._extending:  # else then, by its new token
            self._let_go([received])
        else:
            self._rows.leave([received])

    def undo(self, received: Received[R]) -> None:
        """As `Link.undo`."""
        self._loans.forget(received)

    async def give_back(self, unsettled: Sequence[Received[R]]) -> None:
        """Let the leases go, the attempts as they were before the claim where no handler was called.

        Raises as `extend`; the rows are let go with the goodbye then.

        Cancellation: what was not given back is let go with the goodbye.
        """
        self._loans.forget(*unsettled)
        await self._still(unsettled)
        mine = [each for each in unsettled if each in self._rows and each not in self._settling]
        if mine:
            self._rows.leave(mine)
            job = self._letting_go(mine)
            await self._writer.carry_out(job)
            job.check(f"giving back of {self._subscription!r}")
            for received, why in job.failed.items():
                where = f"giving back of {self._subscription!r}, row {received.delivery.id}"
                raise CallBroken(f"{where}: {why}") from why

    async def _still(self, some: Collection[Received[R]]) -> None:
        while not self._extending.isdisjoint(some):
            await self._extended.wait()

    def _letting_go(self, held: Sequence[Received[R]]) -> Release:
        job = Release(self._form, held, PATIENCE)
        self._enter(job, partial(self._gone, job))
        return job

    def _let_go(self, held: Sequence[Received[R]]) -> Release | None:
        """Let leases go with the next hop; nobody waits for it."""
        if not held:
            return None
        job = self._letting_go(held)
        self._returning.add(job)
        self._rows.leave(held)
        self._writer.submit(job)
        return job

    def _gone(self, job: Release) -> None:
        self._returning.discard(job)
        if job.error is not None:
            return
        for received in job.items:
            if received not in job.failed:
                self._rows.drop(received)
        if not self._stopped and len(job.failed) < len(job.items):
            self._wakes.wake()

    async def say_goodbye(self) -> None:
        """Let go all that is still held: shielded, within `goodbye`; a failure is one warning.

        The attempt of a delivery whose handler was called stays counted, that of another is as before the claim.
        """
        self.stop()
        self._loans.close()
        with trio.move_on_after(self._goodbye, shield=True):
            while self._open:
                await next(iter(self._open)).done.wait()
            if held := self._rows.all:
                self._rows.leave(held)
                job = self._letting_go(held)
                self._writer.submit(job)
                await job.done.wait()
        if left := len(self._rows):
            _log.warning(
                "%r could not let go %d rows; they come back when their lease ends, within %g s",
                self._subscription,
                left,
                self._form.lease,
            )

    def _enter(self, job: Job, then: Callable[[], None]) -> None:
        self._open.add(job)

        def left() -> None:
            self._open.discard(job)
            then()

        job.then = left
