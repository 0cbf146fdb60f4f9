"""Random weather on PostgreSQL, on a real clock with short times.

Backends are terminated, connections break before a statement or behind it, leases are stolen, rows and the table are
locked by others, links are severed, the dead letter is closed by a trigger, handlers answer although they were
cancelled, and runtimes are cut. A seed fixes what happens and when it is meant to; threads and servers are as they are.
Triggers in the database write down what was done to each row, and by whom (tests/weather/postgres_faults.py), and the
judgement is made by SELECT. The invariants:

1. Each message is in the queue, finished, or dead, and that once. No row is held at the end, but by a connection that
   broke, or a thief, or where a link has said in the log that its goodbye was too short for it (a row that is locked).
2. What was booked was done, and what was done is booked, or *unknown*. Nothing is acked or dropped that no handler has
   answered so without being cancelled.
3. Each claim was handed over; or it was given back (or a link has said that it could not be), stolen, ran out, or its
   connection broke; claim by claim, which have an id and an attempt.
4. Both books balance and are the fold of their events. Never more handlers than `concurrency`, never more in hand than
   the limit, and never more rows leased by one connection, but for those that were lost or could not be settled.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import Any, NoReturn

import attrs
import psycopg
import pytest
import trio

from actors import LinkGaveUp, Runtime, Subscription, open_runtime
from actors.events import Booked, Event
from links.errors import LinkBroken
from links.sql import Lease, SqlBroker, SqlQueue
from settlement import Ack, Delivery, Drop, Ledger, Outcome, Policy, Retry, RetryAfter
from settlement.groups import leaves
from settlement.ledger import Took
from tests.links.postgres_kit import a_database
from tests.links.postgres_tables import PostgresTables
from tests.weather.fates import Rules, is_cut
from tests.weather.postgres_faults import AUDIT, FAULTS, OURS, Faults, faulty_connections
from tests.weather.schedule import chosen, dice_of, same_schedule, sized

pytestmark = [pytest.mark.postgres, pytest.mark.servers]

SEEDS = chosen("SETTLEMENT_SEED", range(sized(fast=5, full=50, long=300)))
SLACK = 3.0
"""Seconds that a busy machine may take on top of a bound."""

KEPT = re.compile(r"could not let go (\d+) rows")
"""So a link says that it leaves rows leased."""


@attrs.frozen
class Scenario:
    """One draw."""

    messages: int
    grouped: bool
    marks: bool
    concurrency: int
    limit: int | None
    lease: float
    policy: Policy
    rivals: int
    """Runtimes at once, each as a process of its own would be."""
    faults: tuple[tuple[float, str], ...]
    early: bool
    """Faults and ends count from the beginning, not from the first delivery."""
    stubborn: bool
    """Handlers answer although they were cancelled."""
    end: str
    end_at: float
    grace: float
    goodbye: float

    @property
    def most(self) -> int:
        """How many deliveries one runtime may have unsettled."""
        return self.limit or self.concurrency


def draw(dice: Random) -> Scenario:
    faults = (
        *("lock", "lock", "lock_table", "steal", "steal_and_finish", "steal_all", "sever_link", "close_dead"),
        *("terminate", "terminate", "terminate_all", "terminate_waiting", *FAULTS, "lose_verdict"),
    )
    capped = Policy(max_attempts=dice.choice([1, 1, 2, 3]), dead_letter="dead")
    return Scenario(
        messages=dice.randint(10, 60),
        grouped=dice.random() < 0.4,
        marks=dice.random() < 0.4,
        concurrency=dice.choice([1, 2, 5]),
        limit=dice.choice([None, 8]),
        lease=dice.choice([0.6, 1.2]),
        policy=dice.choice([capped, capped, Policy(on_error=Retry())]),
        rivals=dice.choice([1, 1, 2]),
        faults=tuple(sorted((dice.uniform(0, 0.6), dice.choice(faults)) for _ in range(dice.randint(0, 8)))),
        early=dice.random() < 0.2,
        stubborn=dice.random() < 0.3,
        end=dice.choice(["drain", "cancel"]),
        end_at=dice.uniform(0, dice.choice([0.5, 3.0])),
        grace=dice.choice([0.0, 0.5]),
        goodbye=dice.choice([1.0, 2.5]),
    )


@attrs.define(eq=False)
class Life:
    """One runtime, and what its handlers answered."""

    patient: bool
    folded: Ledger = attrs.field(factory=Ledger)
    running: int = 0
    acks: int = 0
    drops: int = 0


class World:
    """A database, what was booked about it, and what was done to it."""

    def __init__(self, url: str, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.said: Sequence[str] = ()
        """The warnings of all worlds."""
        self.dice = dice_of(seed)
        self.faults = Faults()
        self.tables = PostgresTables(url, grouped=scenario.grouped, marks=scenario.marks).create()
        self.tables.run(AUDIT)
        self.group = "orders" if scenario.grouped else None
        self.lives = 0
        self.begun = trio.Event()
        """Something was received."""
        self.bodies = [b"%d" % number for number in range(scenario.messages)]
        self.tables.add(*self.bodies, group=self.group)
        self.ledgers: list[tuple[Ledger, Ledger]] = []
        self.received: Counter[tuple[int, int]] = Counter()
        """Deliveries that were taken, by the id and the attempt of their claim."""
        self.wrong: list[str] = []
        """What a handler or an observer saw."""
        self.stolen: Counter[tuple[int, int]] = Counter()
        """Claims that a thief took."""
        self.thief: Counter[bytes] = Counter()
        """What a thief has finished."""
        self.severed = 0
        self.closed = self.locked = False
        """The dead letter was, or rows were, some time."""
        here = ["true", *["processed_at IS NULL"] * scenario.marks, *["grp <> 'dead'"] * scenario.grouped]
        self.here = f"SELECT payload FROM jobs WHERE {' AND '.join(here)}"  # noqa: S608 -- the test's own words

    # --- lives

    def queue(self) -> SqlQueue[bytes]:
        """The queue, on a broker of its own, with links that can be severed."""
        scenario = self.scenario
        self.lives += 1
        broker = SqlBroker(f"{self.tables.url}?application_name={OURS}{self.lives}", poll_interval=0.03)
        queue = broker.queue(self.tables.table(), group=self.group, claim=Lease(scenario.lease), limit=scenario.limit)
        attach = queue.attach

        @asynccontextmanager
        async def attaching(*arguments: Any, **options: Any) -> AsyncGenerator[Any, None]:
            async with attach(*arguments, **options) as link:
                link.until_broken = partial(self.until_severed, link.until_broken)  # type: ignore[method-assign]
                yield link

        queue.attach = attaching  # type: ignore[method-assign]
        return queue

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
        subscription = Subscription(
            self.queue(),
            partial(self.handle, life),
            name="jobs",
            policy=scenario.policy,
            concurrency=scenario.concurrency,
        )
        observers = [partial(self.hear, life)]
        runtime: Runtime | None = None
        with trio.CancelScope() as scope:
            try:
                async with open_runtime(
                    subscription, grace=scenario.grace, goodbye=goodbye, observers=observers
                ) as runtime:
                    if patient:
                        while await trio.to_thread.run_sync(self.tables.run, self.here):
                            await trio.sleep(0.05)
                    else:
                        await self.until_begun()
                        await trio.sleep(scenario.end_at)
                    bound = trio.current_time() + 2 * goodbye + SLACK
                    if scenario.end == "cancel" and not patient:
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

    async def handle(self, life: Life, delivery: Delivery[bytes]) -> Outcome | None:
        life.running += 1
        if life.running > self.scenario.concurrency or delivery.body not in self.bodies:
            self.wrong.append(f"{life.running} handlers at once, {delivery}")
        try:
            outcome = Ack() if life.patient else await self.answer()
        finally:
            life.running -= 1
        if not is_cut(Rules()):
            life.acks += isinstance(outcome, Ack | None)
            life.drops += isinstance(outcome, Drop)
        return outcome

    async def answer(self) -> Outcome | None:
        pause = self.dice.choice([0.0, 0.0, 0.01, 0.05, 0.7 * self.scenario.lease])
        try:
            await trio.sleep(pause)
        except trio.Cancelled:  # noqa: ASYNC103 -- the handler that swallows
            if not self.scenario.stubborn:
                raise
        if self.dice.random() < 0.1:
            raise ValueError("failed")
        delay = self.dice.choice([0.0, 0.01, 0.1])
        return self.dice.choice([Ack(), Ack(), None, Retry(), RetryAfter(delay), Drop()])  # noqa: ASYNC104

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

    def fault(self, name: str, seconds: float) -> None:
        """Let it happen; in a thread, as another process does it."""
        match name:
            case "sever_link":
                self.severed += 1
            case "close_dead":
                self.closed = True
                self.reopen()
                what = "UPDATE OF grp ON jobs" if self.scenario.grouped else "INSERT ON dead"
                self.tables.run(f"CREATE TRIGGER shut BEFORE {what} FOR EACH ROW EXECUTE FUNCTION closed()")
            case _ if name in FAULTS:
                self.faults.order(name)
            case "terminate" | "terminate_all":
                self.terminate("true", most=1 if name == "terminate" else None)
            case "lock" | "lock_table" | "terminate_waiting":
                self.lock(name, seconds)
            case _:
                self.steal(name, seconds)

    def lock(self, name: str, seconds: float) -> None:
        """Hold rows, or the table, for a while."""
        self.locked = True
        with psycopg.connect(self.tables.url) as stranger:
            if name == "lock":
                stranger.execute("SELECT FROM jobs WHERE mod(id, 2) = %s FOR UPDATE", (self.dice.randint(0, 1),))
            else:
                stranger.execute("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE")
            time.sleep(seconds)
            if name == "terminate_waiting":
                self.terminate("wait_event_type = 'Lock'", most=None)

    def terminate(self, which: str, most: int | None) -> None:
        """End backends of ours, whatever they do."""
        for (pid,) in self.tables.run(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE "  # noqa: S608
            f"'{OURS}%' AND {which} ORDER BY md5(pid::text) LIMIT {'ALL' if most is None else most}"
        ):
            self.faults.broken.add(pid)
            self.faults.happened.append("terminated")
            self.tables.run("SELECT pg_terminate_backend(%s)", pid)

    def reopen(self) -> None:
        self.tables.run(f"DROP TRIGGER IF EXISTS shut ON {'jobs' if self.scenario.grouped else 'dead'}")

    def steal(self, name: str, seconds: float) -> None:
        with psycopg.connect(self.tables.url) as thief:
            held = thief.execute(
                "SELECT id, attempt, payload FROM jobs WHERE locked_until > clock_timestamp() ORDER BY id FOR UPDATE"
            ).fetchall()
            for key, attempt, payload in held if name == "steal_all" else held[:1]:
                self.stolen[key, attempt] += 1
                if name == "steal_and_finish":
                    thief.execute("DELETE FROM jobs WHERE id = %s", (key,))
                    self.thief[payload] += 1
                else:
                    thief.execute(
                        "UPDATE jobs SET locked_until = clock_timestamp() + make_interval(secs => %s), "
                        "attempt = attempt + 1 WHERE id = %s",
                        (seconds, key),
                    )

    def calm_down(self) -> None:
        """From now on all is well."""
        self.faults.clear()
        self.reopen()

    # --- the end

    def count(self, what: str) -> Counter[bytes]:
        return Counter(payload for (payload,) in self.tables.run("SELECT payload FROM audit WHERE what = %s", what))

    @property
    def kept(self) -> int:
        """How many rows links have left leased, and said so."""
        return sum(int(found[1]) for line in self.said if (found := KEPT.search(line)))

    def judge(self, *, done: bool) -> None:
        """Hold the books against the database."""
        assert not self.wrong, "; ".join(self.wrong)
        held = self.tables.run(
            "SELECT id, who, pid FROM jobs LEFT JOIN holders USING (id) WHERE locked_until > clock_timestamp()"
        )
        ours = [row for row in held if row[1].startswith(OURS) and row[2] not in self.faults.broken]
        assert len(ours) <= self.kept, f"rows are held by nobody (id, broker, backend): {ours}"
        here = Counter(payload for (payload,) in self.tables.run(self.here))
        buried_in = "jobs WHERE grp = 'dead'" if self.scenario.grouped else "dead"
        dead = Counter(payload for (payload,) in self.tables.run(f"SELECT payload FROM {buried_in}"))  # noqa: S608
        gone, buried = self.count("gone"), self.count("buried")
        assert buried == dead
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
        finished = gone.total() - buried.total() - self.thief.total()
        said = total["acked"] + total["dropped"]
        assert said <= finished <= said + total["unknown"], f"{said} booked, {finished} finished, {total}"
        said = total["dead_lettered"]
        assert said <= dead.total() <= said + total["unknown"], f"{said} booked, {dead.total()} dead, {total}"
        self.judge_claims(total)

    def judge_claims(self, total: Counter[str]) -> None:
        """Each claim was handed over, or else there is a reason."""
        claims = self.tables.run("SELECT id, attempt, pid, extract(epoch FROM at)::float8 FROM claims ORDER BY n")
        made = Counter((key, attempt) for key, attempt, _, _ in claims)
        excused = self.stolen + Counter(
            (key, attempt) for key, attempt in self.tables.run("SELECT id, attempt FROM audit WHERE what='restored'")
        )
        excused += Counter((key, attempt) for key, attempt, pid, _ in claims if pid in self.faults.broken)
        since = {(key, attempt): at for key, attempt, _, at in claims}
        for key, attempt, _, at in claims:
            if at >= since.get((key, attempt - 1), at) + self.scenario.lease:  # it ran out where it waited
                excused[key, attempt - 1] += 1
        more = self.received - made
        assert not more, f"handed over, and not claimed (id, attempt): {more}"
        missing = made - self.received - excused
        assert missing.total() <= self.kept, f"claimed, and not handed over (id, attempt): {missing}"
        late = total["superseded"] + total["unsettled"] * (self.closed or self.locked) + total["unknown"]
        for pid, most in self.tables.run("SELECT pid, n FROM most"):
            assert most <= self.scenario.most + late, f"backend {pid}: {most} leased, the limit is {self.scenario.most}"


async def play(world: World, seed: int) -> None:
    """One seed; its failure says how to repeat it."""
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.storm)
            for _ in range(world.scenario.rivals):
                nursery.start_soon(world.life)
        world.calm_down()
        world.judge(done=False)
        with trio.fail_after(30):
            await world.life(patient=True)
        world.judge(done=True)
    except Exception as error:
        again = f"SETTLEMENT_SEED={seed} tests/run --only postgres -- tests/weather/test_weather_postgres.py"
        error.add_note(f"{world.scenario}\nhappened: {world.faults.happened}\nagain: {again}")
        raise


@pytest.mark.parametrize(
    "seeds", [SEEDS[at : at + 5] for at in range(0, len(SEEDS), 5)], ids=lambda seeds: f"{seeds[0]}"
)
def test_weather(seeds: Sequence[int], postgres: str) -> None:
    """Nothing is lost or said twice, whoever else is at the database, and whenever a runtime is cut.

    Five seeds at a time, each with a database of its own: most of their time they wait.
    """

    async def all_of_them() -> None:
        async with trio.open_nursery() as nursery:
            for seed, world in worlds.items():
                nursery.start_soon(play, world, seed)

    with contextlib.ExitStack() as databases:
        urls = [databases.enter_context(a_database(postgres)) for _ in seeds]
        worlds = {seed: World(url, draw(dice_of(seed)), seed) for seed, url in zip(seeds, urls, strict=True)}
        watched = {url.rpartition("/")[2]: world.faults for url, world in zip(urls, worlds.values(), strict=True)}
        with same_schedule(seeds[0]) as warnings, faulty_connections(watched):
            for world in worlds.values():
                world.said = warnings
            trio.run(all_of_them)
