"""What the weathers of the forms that hold a row while it is in work have in common: who works on what, and notes.

A handler may write notes by `links.sql.transaction`. Half of the tables have no trigger at all, since a settlement is
another one then; they are judged by what is in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import attrs

import links.sql
from actors import BatchSubscription, Subscription
from actors.subscription import AnySubscription
from links.sql import SqlQueue
from settlement import Ack, Delivery, Outcome
from settlement.ledger import Ended, Line
from tests.weather.fates import Rules, is_cut
from tests.weather.table_world import Happened, Life, Scenario, TableWorld

__all__ = ["PinnedScenario", "PinnedWorld", "Work"]


@attrs.frozen(kw_only=True)
class PinnedScenario(Scenario):
    """One draw."""

    size: int
    """Rows of a batch; 1: no batches."""
    lanes: int
    """Keys of the advisory locks."""
    writes: bool
    quiet: bool
    """There are no triggers on the table."""

    @property
    def most(self) -> int:
        """As of a scenario."""
        return self.limit or self.concurrency * self.size


@attrs.define(eq=False)
class Work:
    """One delivery in the hands of a handler.

    `holder`: what holds its row. `call`: its number in the notes; 0: it has written none. `spoiled`: its handler's
    statement has failed, and that has ended the transaction.
    """

    delivery: Delivery[bytes]
    life: Life = attrs.field(repr=False)
    holder: Any
    key: int
    call: int = 0
    spoiled: bool = False
    line: Line | None = None


class PinnedWorld(TableWorld):
    """One whose rows are held. `keyed`: by their keys, which are id modulo lanes."""

    keyed = True

    def __init__(self, scenario: PinnedScenario, seed: int, faults: Happened) -> None:
        super().__init__(scenario, seed, faults)
        self.works: dict[int, Work] = {}
        """By the identity of the delivery."""
        self.working: set[Work] = set()
        self.batches: list[list[Work]] = []
        """Those that were answered."""
        self.calls = 0

    # --- what each dialect has of its own

    def holder_of(self, delivery: Delivery[bytes]) -> Any:
        """What holds this one; the same for all of a batch."""
        raise NotImplementedError

    def is_excused(self, work: Work) -> bool:
        """Has something ended its claim that its handler hears of later, or not at all?"""
        raise NotImplementedError

    async def note(self, connection: Any, work: Work) -> None:
        """A note, on the connection that was lent; now and then that is spoiled."""
        raise NotImplementedError

    # --- handlers

    def subscribed(self, queue: SqlQueue[bytes], life: Life) -> AnySubscription:
        """As of a world."""
        scenario = self.scenario
        how: dict[str, Any] = {"name": "jobs", "policy": scenario.policy, "concurrency": scenario.concurrency}
        if scenario.size == 1:
            return Subscription(queue, partial(self.handle_one, life), **how)
        return BatchSubscription(queue, partial(self.handle_batch, life), size=scenario.size, **how)

    def begin(self, life: Life, deliveries: Sequence[Delivery[bytes]]) -> list[Work]:
        """These are in work now."""
        life.running += 1
        if life.running > self.scenario.concurrency:
            self.wrong.append(f"{life.running} handlers at once")
        began: list[Work] = []
        for delivery in deliveries:
            work = Work(delivery, life, self.holder_of(delivery), int(delivery.id) % self.scenario.lanes)
            for other in self.working:
                same = other.key == work.key if self.keyed else other.delivery.id == delivery.id
                if same and not self.is_excused(other):
                    self.wrong.append(
                        f"row {delivery.id} by {work.holder}, beside {other.delivery.id} by {other.holder}"
                    )
            began.append(work)
            self.works[id(delivery)] = work
            self.working.add(work)
        if len({work.holder for work in began}) > 1:
            self.wrong.append(f"a batch of several claims: {began}")
        return began

    def end(self, life: Life, works: Iterable[Work]) -> None:
        """They are in work no more."""
        life.running -= 1
        self.working.difference_update(works)

    async def handle_one(self, life: Life, delivery: Delivery[bytes]) -> Outcome | None:
        """A handler."""
        works = self.begin(life, [delivery])
        try:
            if self.scenario.writes and not life.patient and self.dice.random() < 0.7:
                await self.write(works[0])
            outcome = Ack() if life.patient else await self.answer()
        finally:
            self.end(life, works)
        self.answered(life, outcome)
        return outcome

    async def handle_batch(
        self, life: Life, deliveries: list[Delivery[bytes]]
    ) -> Outcome | Sequence[Outcome | None] | None:
        """One of batches."""
        if len(deliveries) > self.scenario.size:
            self.wrong.append(f"a batch of {len(deliveries)}")
        works = self.begin(life, deliveries)
        try:
            first = Ack() if life.patient else await self.answer()
        finally:
            self.end(life, works)
        each = [first, *[first if life.patient else self.outcome() for _ in deliveries[1:]]]
        for outcome in each:
            self.answered(life, outcome)
        if not is_cut(Rules()):
            self.batches.append(works)
        return each

    async def write(self, work: Work) -> None:
        """A note, in the transaction that the delivery's row ends in."""
        async with links.sql.transaction(work.delivery) as connection:
            self.calls += 1
            work.call = self.calls
            await self.note(connection, work)

    def ended(self, entry: Ended, deliveries: Iterable[Delivery[Any]]) -> None:
        """As of a world."""
        for delivery in deliveries:
            if (work := self.works.get(id(delivery))) is not None:
                if work.line is not None:
                    self.wrong.append(f"{work} was booked as {entry.line}, too")
                work.line = entry.line

    # --- the end

    def gone(self, here: Counter[bytes]) -> Counter[bytes]:
        """As of a world."""
        return Counter(self.bodies) - here if self.scenario.quiet else super().gone(here)

    def buried(self, dead: Counter[bytes]) -> Counter[bytes]:
        """As of a world."""
        return dead if self.scenario.quiet else super().buried(dead)

    def judge_works(self) -> None:
        """Each was booked; what was written stands or falls with the row."""
        assert not self.working
        notes = Counter(call for (call,) in self.run("SELECT call FROM notes"))
        for work in self.works.values():
            assert work.line is not None, f"{work} was booked as nothing"
            found = notes.pop(work.call, 0) if work.call else 0
            least, most = int(work.line is Line.ACKED), int(work.line in (Line.ACKED, Line.UNKNOWN))
            if work.call:
                assert least <= found <= most, f"{found} notes of {work}"
        assert not notes, f"notes of nobody: {notes}"
