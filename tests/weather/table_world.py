"""What the weathers of queue tables have in common: lives of a subscription, and the judge of books and rows.

Each dialect has a world of its own (tests/weather/test_weather_sqlite.py, tests/weather/postgres_world.py), which says
how to ask its database, what befalls it, and what must be true of its claims. Used by one test at a time, on a real
clock.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NoReturn, Protocol

import attrs
import trio

from actors import LinkGaveUp, Runtime, Subscription, open_runtime
from actors.events import Booked, Event
from actors.subscription import AnySubscription
from links.errors import LinkBroken
from links.sql import SqlQueue
from settlement import Ack, Delivery, Drop, Ledger, Outcome, Policy, Retry, RetryAfter
from settlement.groups import leaves
from settlement.ledger import Ended, Took
from tests.weather.fates import Rules, is_cut
from tests.weather.schedule import dice_of

__all__ = ["LeasedScenario", "LeasedWorld", "Life", "Scenario", "TableWorld", "play"]

SLACK = 3.0
"""Seconds that a busy machine may take on top of a bound."""

LONGEST = 60.0
"""Seconds in which the lives under a storm end, or hang."""

KEPT = re.compile(r"could not let go (\d+) rows")
"""So a link says that it leaves rows leased."""


@attrs.frozen(kw_only=True)
class Scenario:
    """What every draw has."""

    messages: int
    grouped: bool
    marks: bool
    concurrency: int
    limit: int | None
    policy: Policy
    rivals: int
    """Runtimes at once, each as a process of its own would be."""
    faults: tuple[tuple[float, str], ...]
    early: bool = False
    """Faults and ends count from the beginning, not from the first delivery."""
    stubborn: bool
    """Handlers answer although they were cancelled."""
    end: str
    end_at: float
    grace: float
    goodbye: float = 1.0

    @property
    def most(self) -> int:
        """How many deliveries one runtime may have unsettled."""
        return self.limit or self.concurrency

    @property
    def longest(self) -> float:
        """Seconds of the longest work of a handler."""
        return 0.3


class Happened(Protocol):
    """The faults of a dialect."""

    happened: list[str]

    def clear(self) -> None:
        """Fair weather."""
        ...


@attrs.define(eq=False)
class Life:
    """One runtime, and what its handlers answered. `cut`: it was cancelled from outside."""

    patient: bool
    cut: bool = False
    folded: Ledger = attrs.field(factory=Ledger)
    running: int = 0
    acks: int = 0
    drops: int = 0


class TableWorld:
    """A database, what was booked about it, and what was done to it."""

    def __init__(self, scenario: Scenario, seed: int, faults: Happened) -> None:
        self.scenario: Any = scenario
        self.faults: Any = faults
        self.said: Sequence[str] = ()
        """The warnings of all worlds."""
        self.dice = dice_of(seed)
        self.group = "orders" if scenario.grouped else None
        self.begun = trio.Event()
        """Something was received."""
        self.bodies = [b"%d" % number for number in range(scenario.messages)]
        self.ledgers: list[tuple[Ledger, Ledger]] = []
        self.received: Counter[tuple[int, int]] = Counter()
        """Deliveries that were taken, by the id and the attempt of their claim."""
        self.wrong: list[str] = []
        """What a handler or an observer saw."""
        self.severed = 0
        self.closed = False
        """The dead letter was, some time."""
        here = ["1=1", *["processed_at IS NULL"] * scenario.marks, *["grp <> 'dead'"] * scenario.grouped]
        self.here = f"SELECT payload FROM jobs WHERE {' AND '.join(here)}"  # noqa: S608 -- the test's own words

    # --- what each dialect has of its own

    def run(self, statement: str) -> list[tuple[Any, ...]]:
        """One statement of somebody else; its rows."""
        raise NotImplementedError

    def queue(self) -> SqlQueue[bytes]:
        """The queue, on a broker of its own."""
        raise NotImplementedError

    def fault(self, name: str, seconds: float) -> None:
        """Let it happen; in a thread, as another process does it."""
        raise NotImplementedError

    def reopen(self) -> None:
        """The dead letter."""
        raise NotImplementedError

    def judge_claims(self, total: Counter[str]) -> None:
        """Is what was claimed in order? `total`: the books of all lives."""
        raise NotImplementedError

    # --- lives

    def subscription(self, life: Life) -> AnySubscription:
        """To a queue that can be severed."""
        queue = self.queue()
        attach = queue.attach

        @asynccontextmanager
        async def attaching(*arguments: Any, **options: Any) -> AsyncGenerator[Any, None]:
            async with attach(*arguments, **options) as link:
                link.until_broken = partial(self.until_severed, link.until_broken)  # type: ignore[method-assign]
                yield link

        queue.attach = attaching  # type: ignore[method-assign]
        return self.subscribed(queue, life)

    def subscribed(self, queue: SqlQueue[bytes], life: Life) -> AnySubscription:
        """A subscription of this life to the queue."""
        scenario = self.scenario
        handler = partial(self.handle, life)
        return Subscription(queue, handler, name="jobs", policy=scenario.policy, concurrency=scenario.concurrency)

    async def until_severed(self, until_broken: Callable[[], Awaitable[NoReturn]]) -> NoReturn:
        before = self.severed
        while True:
            with trio.move_on_after(0.01):
                await until_broken()
            if self.severed > before:
                raise LinkBroken("severed by the test")

    async def life(self, *, patient: bool = False) -> None:
        """One runtime, on a broker of its own; cut, unless it is patient."""
        scenario, goodbye = self.scenario, self.scenario.goodbye
        life, bound = Life(patient), float("inf")
        runtime: Runtime | None = None
        with trio.CancelScope() as scope:
            try:
                async with open_runtime(
                    self.subscription(life), grace=scenario.grace, goodbye=goodbye, observers=[partial(self.hear, life)]
                ) as runtime:
                    if patient:
                        await self.until_done()
                    else:
                        await self.until_begun()
                        await trio.sleep(scenario.end_at)
                    bound = trio.current_time() + 2 * goodbye + SLACK
                    life.cut = scenario.end == "cancel" and not patient
                    if life.cut:
                        scope.cancel()
                        await trio.sleep_forever()
                    bound += scenario.grace
            except (LinkGaveUp, BaseExceptionGroup) as error:
                rest = [each for each in leaves(error) if not isinstance(each, LinkGaveUp | trio.Cancelled)]
                if patient or rest or not isinstance(error, LinkGaveUp | ExceptionGroup):
                    raise
            finally:
                if runtime is not None:
                    self.ledgers.append((runtime.ledger("jobs"), life.folded))
        assert trio.current_time() < bound, "it took too long to end"
        assert life.running == 0, "a handler runs on"
        assert life.folded.acked <= life.acks, f"{life.folded.acked} acked, {life.acks} answered so"
        assert life.folded.dropped <= life.drops, f"{life.folded.dropped} dropped, {life.drops} answered so"

    async def until_done(self) -> None:
        while await trio.to_thread.run_sync(self.run, self.here):
            await trio.sleep(0.05)

    def hear(self, life: Life, event: Event) -> None:
        if not isinstance(event, Booked):
            return
        ledger = life.folded
        ledger.enter(event.entry)
        if isinstance(event.entry, Took):
            self.begun.set()
            self.received.update((int(each.id), each.attempt + 1) for each in event.deliveries)
            ended = [ledger.acked, ledger.retried, ledger.delayed, ledger.dropped, ledger.dead_lettered]
            ended += [ledger.superseded, ledger.unsettled, ledger.unknown]
            held = ledger.received - sum(ended)
            if held > self.scenario.most:
                self.wrong.append(f"{held} in hand, the limit is {self.scenario.most}")
        elif isinstance(event.entry, Ended):
            self.ended(event.entry, event.deliveries)

    def ended(self, entry: Ended, deliveries: Iterable[Delivery[Any]]) -> None:
        """These were booked so."""

    async def handle(self, life: Life, delivery: Delivery[bytes]) -> Outcome | None:
        life.running += 1
        if life.running > self.scenario.concurrency or delivery.body not in self.bodies:
            self.wrong.append(f"{life.running} handlers at once, {delivery}")
        try:
            outcome = Ack() if life.patient else await self.answer()
        finally:
            life.running -= 1
        self.answered(life, outcome)
        return outcome

    @staticmethod
    def answered(life: Life, outcome: Outcome | None) -> None:
        """The handler's answer; one that was cancelled has answered nothing."""
        if not is_cut(Rules()):
            life.acks += isinstance(outcome, Ack | None)
            life.drops += isinstance(outcome, Drop)

    async def answer(self) -> Outcome | None:
        pause = self.dice.choice([0.0, 0.0, 0.01, 0.05, self.scenario.longest])
        try:
            await trio.sleep(pause)
        except trio.Cancelled:  # noqa: ASYNC103 -- the handler that swallows
            if not self.scenario.stubborn:
                raise
        if self.dice.random() < 0.1:
            raise ValueError("failed")
        return self.outcome()  # noqa: ASYNC104

    def outcome(self) -> Outcome | None:
        delay = self.dice.choice([0.0, 0.01, 0.1])
        return self.dice.choice([Ack(), Ack(), None, Retry(), RetryAfter(delay), Drop()])

    async def until_begun(self) -> None:
        if not self.scenario.early:
            with trio.move_on_after(5.0):
                await self.begun.wait()

    # --- weather

    async def storm(self) -> None:
        await self.until_begun()
        began = trio.current_time()
        for at, name in self.scenario.faults:
            await trio.sleep_until(began + at)
            await trio.to_thread.run_sync(self.fault, name, self.dice.uniform(0.01, 0.25))

    def calm_down(self) -> None:
        """From now on all is well."""
        self.faults.clear()
        self.reopen()

    # --- the end

    def count(self, what: str) -> Counter[bytes]:
        """What was written down as this, by its payload."""
        return Counter(payload for (payload,) in self.run(f"SELECT payload FROM audit WHERE what = '{what}'"))  # noqa: S608

    def gone(self, here: Counter[bytes]) -> Counter[bytes]:  # noqa: ARG002 -- where nothing is written down
        """How often each has left the queue."""
        return self.count("gone")

    def buried(self, dead: Counter[bytes]) -> Counter[bytes]:  # noqa: ARG002 -- where nothing is written down
        """How often each has become a dead letter."""
        return self.count("buried")

    def taken(self) -> Counter[bytes]:
        """What strangers have finished."""
        return Counter()

    def judge(self, *, done: bool) -> None:
        """Hold the books against the database."""
        assert not self.wrong, "; ".join(self.wrong)
        here = Counter(payload for (payload,) in self.run(self.here))
        buried_in = "jobs WHERE grp = 'dead'" if self.scenario.grouped else "dead"
        dead = Counter(payload for (payload,) in self.run(f"SELECT payload FROM {buried_in}"))  # noqa: S608
        gone = self.gone(here)
        assert self.buried(dead) == dead
        for body in self.bodies:
            assert here[body] + gone[body] == 1, f"{body!r}: {here[body]} times here, {gone[body]} times gone"
            assert dead[body] <= gone[body], f"{body!r} is dead and here"
        if done:
            assert not here, "the second life did not finish"
        total = Counter[str]()
        for ledger, folded in self.ledgers:
            assert ledger.balanced, f"{ledger.deliveries}; {ledger.copies}"
            assert (ledger.in_hand, ledger.owed) == (0, 0)
            assert ledger == folded, "the books are not the fold of the events"
            total.update({name: getattr(ledger, name) for name in attrs.fields_dict(Ledger)})
        finished = gone.total() - dead.total() - self.taken().total()
        said = total["acked"] + total["dropped"]
        assert said <= finished <= said + total["unknown"], f"{said} booked, {finished} finished, {total}"
        said = total["dead_lettered"]
        assert said <= dead.total() <= said + total["unknown"], f"{said} booked, {dead.total()} dead, {total}"
        self.judge_claims(total)

    def judge_received(self, made: Counter[tuple[int, int]], excused: Counter[tuple[int, int]], spare: int) -> None:
        """Each claim that was made was handed over, or given back, or is excused; but for so many."""
        back = Counter(self.run("SELECT id, attempt FROM audit WHERE what = 'restored'"))
        more = self.received - made
        assert not more, f"handed over, and not claimed (id, attempt): {more}"
        missing = made - self.received - excused - back
        assert missing.total() <= spare, f"claimed, and not handed over (id, attempt): {missing}"


@attrs.frozen(kw_only=True)
class LeasedScenario(Scenario):
    """One of leases."""

    lease: float

    @property
    def longest(self) -> float:
        """As of a scenario."""
        return 0.7 * self.lease


class LeasedWorld(TableWorld):
    """One whose rows are leased, and may be stolen. A trigger has written down each claim."""

    def __init__(self, scenario: LeasedScenario, seed: int, faults: Happened) -> None:
        super().__init__(scenario, seed, faults)
        self.stolen: Counter[tuple[int, int]] = Counter()
        """Claims that a thief took."""
        self.thief: Counter[bytes] = Counter()
        """What a thief has finished."""

    def taken(self) -> Counter[bytes]:
        """As of a world."""
        return self.thief

    @property
    def kept(self) -> int:
        """How many rows links have left leased, and said so."""
        return sum(int(found[1]) for line in self.said if (found := KEPT.search(line)))

    def judge_made(self, claims: Sequence[tuple[Any, ...]], careless: set[int]) -> None:
        """Each claim was handed over, or else there is a reason.

        `claims`: id, attempt, connection and time, in order. `careless`: connections that broke.
        """
        excused = self.stolen + Counter((key, attempt) for key, attempt, who, _ in claims if who in careless)
        since = {(key, attempt): at for key, attempt, _, at in claims}
        for key, attempt, _, at in claims:
            if at >= since.get((key, attempt - 1), at) + self.scenario.lease:  # it ran out where it waited
                excused[key, attempt - 1] += 1
        self.judge_received(Counter((key, attempt) for key, attempt, _, _ in claims), excused, self.kept)


async def play(worlds: Mapping[int, TableWorld], again: str, within: float) -> None:
    """All of these at once, by their seeds: most of their time they wait. A failure says how to repeat it."""
    async with trio.open_nursery() as nursery:
        for seed, world in worlds.items():
            nursery.start_soon(_play, world, again.format(seed=seed), within)


async def _play(world: TableWorld, again: str, within: float) -> None:
    try:
        with trio.fail_after(LONGEST):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(world.storm)
                for _ in range(world.scenario.rivals):
                    nursery.start_soon(world.life)
        world.calm_down()
        world.judge(done=False)
        with trio.fail_after(within):
            await world.life(patient=True)
        world.judge(done=True)
    except Exception as error:
        error.add_note(f"{world.scenario}\nhappened: {world.faults.happened}\nagain: {again}")
        raise
