"""Random weather on SQLite, on a real clock with short times.

The file is locked, leases are stolen, links are severed, connections break before, within or after a transaction
(tests/weather/sqlite_faults.py), the dead letter is closed by a trigger, handlers answer although they were cancelled,
and runtimes are cut. A seed fixes what happens and when it is meant to; threads and disks are as they are. Triggers in
the database write down what was done to each row, and by whom, and the judgement is made by SELECT. The invariants:

1. Each message is in the queue, finished, or dead, and that once. No row is held at the end, but by a connection that
   broke, or a thief, or where a link has said in the log that its goodbye was too short for it (a machine that stalls).
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
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import attrs
import pytest
import trio

from actors import LinkGaveUp, Runtime, Subscription, open_runtime
from actors.events import Booked, Event
from links.errors import LinkBroken
from links.sql import Lease, SqlQueue
from settlement import Ack, Delivery, Drop, Ledger, Outcome, Policy, Retry, RetryAfter
from settlement.groups import leaves
from settlement.ledger import Took
from tests.links.sqlite_kit import Database, Foreigner, stored
from tests.weather.fates import Rules, is_cut
from tests.weather.schedule import chosen, dice_of, same_schedule, sized
from tests.weather.sqlite_faults import FAULTS, Faults, faulty_connections

pytestmark = pytest.mark.sqlite

SEEDS = chosen("SETTLEMENT_SEED", range(sized(fast=5, full=60, long=400)))
SLACK = 3.0
"""Seconds that a busy machine may take on top of a bound."""

KEPT = re.compile(r"could not let go (\d+) rows")
"""So a link says that it leaves rows leased."""

AUDIT = """
CREATE TABLE audit (what TEXT, id INTEGER, attempt INTEGER, payload BLOB);
CREATE TABLE claims (id INTEGER, attempt INTEGER, life INTEGER, at REAL);
CREATE TABLE holders (id INTEGER PRIMARY KEY, life INTEGER, until);
CREATE TRIGGER gone AFTER DELETE ON jobs BEGIN
    INSERT INTO audit VALUES ('gone', OLD.id, OLD.attempt, OLD.payload);
    DELETE FROM holders WHERE id = OLD.id;
END;
CREATE TRIGGER buried AFTER INSERT ON dead
    BEGIN INSERT INTO audit VALUES ('buried', NEW.id, NEW.attempt, NEW.payload); END;
CREATE TRIGGER restored AFTER UPDATE ON jobs WHEN NEW.attempt < OLD.attempt
    BEGIN INSERT INTO audit VALUES ('restored', NEW.id, OLD.attempt, NEW.payload); END;
CREATE TRIGGER freed AFTER UPDATE OF locked_until ON jobs WHEN NEW.locked_until IS NULL
    BEGIN DELETE FROM holders WHERE id = NEW.id; END;
"""
MARKED = """
CREATE TRIGGER marked AFTER UPDATE OF processed_at ON jobs WHEN NEW.processed_at IS NOT NULL
    BEGIN INSERT INTO audit VALUES ('gone', NEW.id, NEW.attempt, NEW.payload); END;
"""
REGROUPED = """
CREATE TRIGGER regrouped AFTER UPDATE OF grp ON jobs WHEN NEW.grp <> OLD.grp BEGIN
    INSERT INTO audit VALUES ('gone', NEW.id, NEW.attempt, NEW.payload);
    INSERT INTO audit VALUES ('buried', NEW.id, NEW.attempt, NEW.payload);
END;
"""


@attrs.frozen
class Scenario:
    """One draw."""

    messages: int
    times: str
    grouped: bool
    marks: bool
    concurrency: int
    limit: int | None
    lease: float
    policy: Policy
    rivals: int
    """Runtimes at once, each as a process of its own would be."""
    faults: tuple[tuple[float, str], ...]
    stubborn: bool
    """Handlers answer although they were cancelled."""
    end: str
    end_at: float
    grace: float

    @property
    def most(self) -> int:
        """How many deliveries one runtime may have unsettled."""
        return self.limit or self.concurrency


def draw(dice: Random) -> Scenario:
    faults = (
        *("lock", "lock", "steal", "steal_and_finish", "steal_all", "sever_link", "close_dead", "close_dead"),
        *FAULTS,
    )
    capped = Policy(max_attempts=dice.choice([1, 1, 2, 3]), dead_letter="dead")
    return Scenario(
        messages=dice.randint(10, 40),
        times=dice.choice(["REAL", "REAL", "INTEGER", "TEXT"]),
        grouped=dice.random() < 0.4,
        marks=dice.random() < 0.4,
        concurrency=dice.choice([1, 2, 5]),
        limit=dice.choice([None, 8]),
        lease=dice.choice([0.6, 1.2]),
        policy=dice.choice([capped, capped, Policy(on_error=Retry())]),
        rivals=dice.choice([1, 1, 2]),
        faults=tuple(sorted((dice.uniform(0, 0.3), dice.choice(faults)) for _ in range(dice.randint(0, 8)))),
        stubborn=dice.random() < 0.3,
        end=dice.choice(["drain", "cancel"]),
        end_at=dice.uniform(0, 0.5),
        grace=dice.choice([0.0, 0.5]),
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

    def __init__(self, path: Path, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.said: Sequence[str] = ()
        """The warnings of all worlds."""
        self.dice = dice_of(seed)
        self.faults = Faults()
        shape: dict[str, Any] = {"times": scenario.times, "grouped": scenario.grouped, "marks": scenario.marks}
        self.database = Database(path / "weather.db", **shape).create()
        self.group = "orders" if scenario.grouped else None
        texts = [AUDIT, MARKED * scenario.marks, REGROUPED * scenario.grouped]
        with contextlib.closing(Foreigner(self.database).connection) as connection:
            connection.executescript("".join(texts))
        self.bodies = [b"%d" % number for number in range(scenario.messages)]
        self.database.add(*self.bodies, group=self.group)
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
        self.closed = False
        """The dead letter was, some time."""
        here = ["1", *["processed_at IS NULL"] * scenario.marks, *["grp <> 'dead'"] * scenario.grouped]
        self.here = f"SELECT payload FROM jobs WHERE {' AND '.join(here)}"  # noqa: S608 -- the test's own words

    # --- lives

    def queue(self) -> SqlQueue[bytes]:
        """The queue, on a broker of its own, with links that can be severed."""
        scenario, dead = self.scenario, self.database.table("dead")
        broker = self.database.broker(poll_interval=0.03)
        queue = broker.queue(self.database.table(), group=self.group, claim=Lease(scenario.lease), limit=scenario.limit)
        if not scenario.grouped:
            broker.table(dead)
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
        scenario, goodbye = self.scenario, 1.0
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
                        while self.database.run(self.here):
                            await trio.sleep(0.02)
                    else:
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

    # --- weather

    async def storm(self) -> None:
        began = trio.current_time()
        for at, name in self.scenario.faults:
            await trio.sleep_until(began + at)
            await trio.to_thread.run_sync(self.fault, name, self.dice.uniform(0.01, 0.25))

    def fault(self, name: str, seconds: float) -> None:
        """Let it happen; in a thread, as another process does it."""
        match name:
            case "sever_link":
                self.severed += 1
            case "lock":
                with Foreigner(self.database):
                    time.sleep(seconds)
            case "close_dead":
                self.closed = True
                how = "ABORT" if seconds < 0.13 else "ROLLBACK"
                what = "UPDATE OF grp ON jobs" if self.scenario.grouped else "INSERT ON dead"
                self.reopen()
                self.database.run(f"CREATE TRIGGER shut BEFORE {what} BEGIN SELECT RAISE({how}, 'closed'); END")
            case _ if name in FAULTS:
                self.faults.order(name)
            case _:
                self.steal(name, seconds)

    def reopen(self) -> None:
        self.database.run("DROP TRIGGER IF EXISTS shut")

    def steal(self, name: str, seconds: float) -> None:
        times = self.scenario.times
        with contextlib.closing(Foreigner(self.database).connection) as connection:
            connection.execute("BEGIN IMMEDIATE")
            held = connection.execute(
                "SELECT id, attempt, payload FROM jobs WHERE locked_until > ? ORDER BY id",
                (stored(time.time(), times),),
            ).fetchall()
            for key, attempt, payload in held if name == "steal_all" else held[:1]:
                self.stolen[key, attempt] += 1
                if name == "steal_and_finish":
                    connection.execute("DELETE FROM jobs WHERE id = ?", (key,))
                    self.thief[payload] += 1
                else:
                    until = stored(time.time() + seconds, times)
                    connection.execute(
                        "UPDATE jobs SET locked_until = ?, attempt = attempt + 1 WHERE id = ?", (until, key)
                    )
                    connection.execute("UPDATE holders SET life = 0, until = ? WHERE id = ?", (until, key))
            connection.execute("COMMIT")

    def calm_down(self) -> None:
        """From now on all is well."""
        self.faults.clear()
        self.reopen()

    # --- the end

    def count(self, what: str) -> Counter[bytes]:
        return Counter(payload for (payload,) in self.database.run("SELECT payload FROM audit WHERE what = ?", what))

    @property
    def kept(self) -> int:
        """How many rows links have left leased, and said so."""
        return sum(int(found[1]) for line in self.said if (found := KEPT.search(line)))

    def judge(self, *, done: bool) -> None:
        """Hold the books against the database."""
        assert not self.wrong, "; ".join(self.wrong)
        now = stored(time.time(), self.scenario.times)
        held = self.database.run(
            "SELECT jobs.id, life FROM jobs LEFT JOIN holders USING (id) WHERE locked_until > ?", now
        )
        careless = self.faults.broken | self.faults.full
        strangers = [(key, life) for key, life in held if life and life not in careless]
        assert len(strangers) <= self.kept, f"rows are held by nobody (id, connection): {strangers}"
        here = Counter(payload for (payload,) in self.database.run(self.here))
        buried_in = "jobs WHERE grp = 'dead'" if self.scenario.grouped else "dead"
        dead = Counter(payload for (payload,) in self.database.run(f"SELECT payload FROM {buried_in}"))  # noqa: S608
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
        careless = self.faults.broken | self.faults.full
        claims = self.database.run("SELECT id, attempt, life, at FROM claims ORDER BY rowid")
        made = Counter((key, attempt) for key, attempt, _, _ in claims)
        excused = self.stolen + Counter(
            (key, attempt) for key, attempt in self.database.run("SELECT id, attempt FROM audit WHERE what='restored'")
        )
        excused += Counter((key, attempt) for key, attempt, life, _ in claims if life in careless)
        since = {(key, attempt): at for key, attempt, _, at in claims}
        for key, attempt, _, at in claims:
            if at >= since.get((key, attempt - 1), at) + self.scenario.lease:  # it ran out where it waited
                excused[key, attempt - 1] += 1
        more = self.received - made
        assert not more, f"handed over, and not claimed (id, attempt): {more}"
        missing = made - self.received - excused
        assert missing.total() <= self.kept, f"claimed, and not handed over (id, attempt): {missing}"
        late = total["superseded"] + total["unsettled"] * (self.closed or "full" in self.faults.happened)
        for life, most in self.faults.most.items():
            assert most <= self.scenario.most + late, (
                f"connection {life}: {most} leased, the limit is {self.scenario.most}"
            )


async def play(world: World, seed: int) -> None:
    """One seed; its failure says how to repeat it."""
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.storm)
            for _ in range(world.scenario.rivals):
                nursery.start_soon(world.life)
        world.calm_down()
        world.judge(done=False)
        with trio.fail_after(20):
            await world.life(patient=True)
        world.judge(done=True)
    except Exception as error:
        again = f"SETTLEMENT_SEED={seed} tests/run --only sqlite -- tests/weather/test_weather_sqlite.py"
        error.add_note(f"{world.scenario}\nhappened: {world.faults.happened}\nagain: {again}")
        raise


@pytest.mark.parametrize(
    "seeds", [SEEDS[at : at + 5] for at in range(0, len(SEEDS), 5)], ids=lambda seeds: f"{seeds[0]}"
)
def test_weather(seeds: Sequence[int], tmp_path: Path) -> None:
    """Nothing is lost or said twice, whoever else is at the file, and whenever a runtime is cut.

    Five seeds at a time, each with a database of its own: most of their time they wait.
    """
    worlds: dict[int, World] = {}
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        worlds[seed] = World(folder, draw(dice_of(seed)), seed)

    async def all_of_them() -> None:
        async with trio.open_nursery() as nursery:
            for seed, world in worlds.items():
                nursery.start_soon(play, world, seed)

    files = {world.database.path: world.faults for world in worlds.values()}
    with same_schedule(seeds[0]) as warnings, faulty_connections(files):
        for world in worlds.values():
            world.said = warnings
        trio.run(all_of_them)
