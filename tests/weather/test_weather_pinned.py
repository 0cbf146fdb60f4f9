"""Random weather on the forms of PostgreSQL that hold a connection: row locks and advisory locks, rows and batches.

As tests/weather/test_weather_postgres.py, of which the judge and most of the weather are the same. The server ends
connections amid a claim, before a COMMIT and behind it; a COMMIT is refused; handlers write by `links.sql.transaction`.
Half of the tables have no trigger at all, since a settlement is another one then; they are judged by what is in them.
What is true here beyond what the judge says:

1. A row in work is held by the connection that its handler was given it by, and by nobody else: asked of the server
   all the time. Under a row lock a row is in work once, under an advisory lock a key is.
2. What a handler wrote is there once where its delivery was acked, never where it was not, and where that is unknown it
   is there if the row has ended by the same transaction.
3. Under a row lock an attempt is spent by what was booked as retried or delayed, and by nothing else; a batch is
   settled by one transaction, or none of it is, where no verb of its own was refused. Under an advisory lock each
   attempt was handed over, or given back, or its connection ended.
4. While there is nothing to do, no connection holds a lock or has a transaction; and none does in the end.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from random import Random
from typing import Any

import attrs
import psycopg
import pytest
import trio

from links.sql import AdvisoryLock, RowLock
from settlement import Delivery, Policy, Retry
from settlement.ledger import Line
from settlement.sql import ClaimForm
from tests.weather.pinned_world import PinnedScenario, PinnedWorld, Work
from tests.weather.postgres_faults import AUDIT, COMMITS, OURS, PINNED, QUIET
from tests.weather.postgres_world import PostgresWorld, run_worlds
from tests.weather.schedule import chosen, dice_of, sized

pytestmark = [pytest.mark.postgres, pytest.mark.servers]

SEEDS = chosen("SETTLEMENT_SEED", range(sized(fast=5, full=40, long=150)))
AGAIN = "SETTLEMENT_SEED={seed} tests/run --only postgres -- tests/weather/test_weather_pinned.py"
AT_ONCE = 10
SETTLED = (Line.ACKED, Line.RETRIED, Line.DELAYED, Line.DROPPED, Line.DEAD_LETTERED)
LOCKS = """FROM pg_locks l JOIN pg_database d ON d.oid = l.database
    WHERE datname = current_database() AND locktype = 'advisory' AND granted"""
OPEN = f"""SELECT pid {LOCKS} UNION ALL SELECT pid FROM pg_stat_activity WHERE datname = current_database()
    AND application_name LIKE '{OURS}%' AND state LIKE 'idle in transaction%'"""  # noqa: S608 -- the test's own words


@attrs.frozen(kw_only=True)
class PostgresScenario(PinnedScenario):
    """One draw."""

    form: str


def draw(dice: Random, form: str) -> PostgresScenario:
    quiet = dice.random() < 0.5
    faults = (
        *("lock", "lock", "lock_table", "sever_link", "close_dead", *["refuse_commit"] * (not quiet)),
        *("terminate", "terminate", "terminate_all", "terminate_waiting", *PINNED, *PINNED),
    )
    capped = Policy(max_attempts=dice.choice([1, 1, 2, 3]), dead_letter="dead")
    size = dice.choice([1, 1, 2, 5])
    return PostgresScenario(
        form=form,
        size=size,
        lanes=dice.choice([1, 3, 100]),
        writes=size == 1 and dice.random() < 0.7,
        quiet=quiet,
        messages=dice.randint(10, 60),
        grouped=dice.random() < 0.4,
        marks=dice.random() < 0.4,
        concurrency=dice.choice([1, 2, 5]),
        limit=dice.choice([None, None, 3, 8]),
        policy=dice.choice([capped, capped, Policy(on_error=Retry())]),
        rivals=dice.choice([1, 1, 2]),
        faults=tuple(sorted((dice.uniform(0, 0.6), dice.choice(faults)) for _ in range(dice.randint(0, 10)))),
        early=dice.random() < 0.2,
        stubborn=dice.random() < 0.3,
        end=dice.choice(["drain", "cancel"]),
        end_at=dice.uniform(0, dice.choice([0.5, 2.0])),
        grace=dice.choice([0.0, 0.5]),
        goodbye=dice.choice([1.0, 2.5]),
    )


class World(PostgresWorld, PinnedWorld):
    """A database whose rows are held by connections."""

    leased = False

    def __init__(self, url: str, scenario: PostgresScenario, seed: int) -> None:
        super().__init__(url, scenario, seed)
        self.tables.run("UPDATE jobs SET lane = mod(id, %s)::text", scenario.lanes)
        if not scenario.quiet:
            self.tables.run(COMMITS)  # behind the UPDATE, which is no work of anybody
            self.tables.run("TRUNCATE audit, claims")
        self.keyed = scenario.form == "advisory"
        self.refused = False
        """A COMMIT was."""

    def audit(self) -> str:
        """As of a world."""
        return QUIET if self.scenario.quiet else AUDIT

    def claim(self) -> ClaimForm:
        """As of a world."""
        return AdvisoryLock("order-{lane}") if self.keyed else RowLock()

    # --- handlers

    def holder_of(self, delivery: Delivery[bytes]) -> int | None:
        """As of a world: its backend's process."""
        claimed: Any = delivery._handle  # pyright: ignore[reportPrivateUsage] -- the transport's own
        connection = claimed.slot.pin._connection
        return None if connection is None or connection.closed else connection.info.backend_pid

    def is_excused(self, work: Work) -> bool:
        """As of a world: under a row lock a failed statement has ended the row's lock, whatever the handler does."""
        return (work.spoiled and not self.keyed) or work.holder in self.faults.broken

    async def note(self, connection: Any, work: Work) -> None:
        """As of a world."""
        await connection.execute("INSERT INTO notes VALUES (%s, %s)", [work.call, int(work.delivery.id)])
        if self.dice.random() < 0.1:
            work.spoiled = True
            with contextlib.suppress(psycopg.errors.DivisionByZero):
                await connection.execute("SELECT 1 / 0")

    # --- weather

    def fault(self, name: str, seconds: float) -> None:
        """As of a world."""
        if name == "refuse_commit":
            self.refused = True
            self.tables.run("SELECT setval('refusals', -2)")
        else:
            super().fault(name, seconds)

    def calm_down(self) -> None:
        """As of a world."""
        super().calm_down()
        if not self.scenario.quiet:
            self.tables.run("SELECT setval('refusals', 1)")

    async def storm(self) -> None:
        """As of a world; all the time the server is asked whether what is in work is held."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.probe)
            await super().storm()
            await trio.sleep(0.3)
            nursery.cancel_scope.cancel()

    async def probe(self) -> None:
        ask = self.free_keys if self.keyed else self.free_rows
        while True:
            works = list(self.working)
            for work in await trio.to_thread.run_sync(ask, works):
                if work in self.working and not self.is_excused(work):
                    self.wrong.append(f"{work} is in work, and held by nobody")
            await trio.sleep(0.06)

    def free_rows(self, works: list[Work]) -> list[Work]:
        """Those that a stranger can lock."""
        with psycopg.connect(self.tables.url) as stranger:
            found = stranger.execute(
                "SELECT id FROM jobs WHERE id = ANY(%s) FOR UPDATE SKIP LOCKED",
                [[int(work.delivery.id) for work in works]],
            ).fetchall()
            stranger.rollback()
        free = {key for (key,) in found}
        return [work for work in works if int(work.delivery.id) in free]

    def free_keys(self, works: list[Work]) -> list[Work]:
        """Those whose connections hold less keys than they have rows in work."""
        locks = dict(self.run(f"SELECT pid, count(*) {LOCKS} GROUP BY pid"))
        rows = Counter(work.holder for work in works)
        return [work for work in works if locks.get(work.holder, 0) < rows[work.holder]]

    async def until_done(self) -> None:
        """As of a world; and nothing is held by connections that have nothing to do."""
        await super().until_done()
        with trio.move_on_after(5) as bound:
            while await trio.to_thread.run_sync(self.run, OPEN):
                await trio.sleep(0.02)
        if bound.cancelled_caught:
            self.wrong.append("locks are held, or transactions open, and nothing is in work")

    # --- the end

    def judge_claims(self, total: Counter[str]) -> None:
        """As of a world."""
        self.judge_notes()
        if self.keyed and not self.scenario.quiet:
            self.judge_attempts_of_claims()
        elif not self.keyed:
            self.judge_batches()
            if self.scenario.marks or not self.scenario.quiet:
                self.judge_attempts(total)

    def judge_notes(self) -> None:
        """What was written stands or falls with the row, by one transaction."""
        self.judge_works()
        if not self.scenario.quiet:
            alone = self.run(
                "SELECT call, n.id FROM notes n WHERE NOT EXISTS "
                "(SELECT FROM audit a WHERE a.what = 'gone' AND a.id = n.id AND a.tx = n.tx)"
            )
            assert not alone, f"notes (call, id) whose row ended otherwise: {alone}"

    def judge_attempts(self, total: Counter[str]) -> None:
        """A crash spends none."""
        told = "jobs" if self.scenario.quiet else "audit WHERE what = 'gone'"
        left = "" if self.scenario.quiet else self.here.replace("payload", "attempt") + " UNION ALL "
        quiet_dead = " UNION ALL SELECT attempt FROM dead" if self.scenario.quiet and not self.scenario.grouped else ""
        ((spent,),) = self.run(
            f"SELECT COALESCE(sum(attempt - 1), 0) FROM ({left}SELECT attempt FROM {told}{quiet_dead}) a"  # noqa: S608
        )
        said = total["retried"] + total["delayed"]
        assert said <= spent <= said + total["unknown"], f"{said} booked, {spent} attempts spent, {total}"

    def judge_batches(self) -> None:
        """One transaction for what was answered together."""
        by: dict[tuple[int, int], set[str]] = defaultdict(set)
        if not self.scenario.quiet:
            for key, attempt, tx in self.run(
                "SELECT id, attempt, tx FROM audit WHERE what = 'gone' UNION SELECT id, attempt - 1, tx FROM claims"
            ):
                by[key, attempt].add(tx)
        for batch in self.batches if not self.closed else ():
            settled = {work.line in SETTLED for work in batch}
            assert len(settled) == 1, f"a part was settled: {batch}"
            if settled == {True} and not self.scenario.quiet:
                together = [by[int(work.delivery.id), work.delivery.attempt] for work in batch]
                assert set.intersection(*together), f"settled by several transactions: {together}, {batch}"

    def judge_attempts_of_claims(self) -> None:
        """Each was handed over, or there is a reason."""
        claims = self.run("SELECT id, attempt, pid, tx FROM claims ORDER BY n")
        last = {pid: tx for _, _, pid, tx in claims}
        excused = Counter(
            (key, attempt) for key, attempt, pid, tx in claims if pid in self.faults.broken or last[pid] == tx
        )
        kept = sum("an attempt stays counted" in line for line in self.said)
        made = Counter((key, attempt) for key, attempt, _, _ in claims)
        self.judge_received(made, excused, kept * self.scenario.size)


@pytest.mark.parametrize(
    "seeds", [SEEDS[at : at + AT_ONCE] for at in range(0, len(SEEDS), AT_ONCE)], ids=lambda seeds: f"{seeds[0]}"
)
@pytest.mark.parametrize("form", ["row_lock", "advisory"])
def test_weather(form: str, seeds: Sequence[int], postgres: str) -> None:
    """Nothing is lost, done twice at once or said twice, whoever else is at the database; some seeds at a time."""
    run_worlds(World, {seed: draw(dice_of(seed), form) for seed in seeds}, postgres, AGAIN)
