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

import re
from collections import Counter
from collections.abc import Sequence
from random import Random

import psycopg
import pytest

from links.sql import Lease
from settlement import Policy, Retry
from tests.weather.postgres_faults import FAULTS, OURS
from tests.weather.postgres_world import PostgresWorld, run_worlds
from tests.weather.schedule import chosen, dice_of, sized
from tests.weather.table_world import LeasedScenario, LeasedWorld

pytestmark = [pytest.mark.postgres, pytest.mark.servers]

SEEDS = chosen("SETTLEMENT_SEED", range(sized(fast=5, full=50, long=300)))
BEHIND = re.compile(r": (\d+) verbs are said behind a claim")
"""They met a lock of others', so their places have not returned yet."""
AGAIN = "SETTLEMENT_SEED={seed} tests/run --only postgres -- tests/weather/test_weather_postgres.py"


WEATHER = (
    *("lock", "lock", "lock_table", "steal", "steal_and_finish", "steal_all", "sever_link", "close_dead"),
    *("terminate", "terminate", "terminate_all", "terminate_waiting", *FAULTS, "lose_verdict"),
)


def draw(dice: Random, faults: Sequence[str] = WEATHER) -> LeasedScenario:
    """A scenario; `faults`: what may befall it."""
    capped = Policy(max_attempts=dice.choice([1, 1, 2, 3]), dead_letter="dead")
    return LeasedScenario(
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


class World(PostgresWorld, LeasedWorld):
    """A database whose rows are leased."""

    def claim(self) -> Lease:
        """As of a world."""
        return Lease(self.scenario.lease)

    # --- weather

    def fault(self, name: str, seconds: float) -> None:
        """As of a world."""
        if name.startswith("steal"):
            self.steal(name, seconds)
        else:
            super().fault(name, seconds)

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

    # --- the end

    def judge_claims(self, total: Counter[str]) -> None:
        """As of a world."""
        held = self.run(
            "SELECT id, who, pid FROM jobs LEFT JOIN holders USING (id) WHERE locked_until > clock_timestamp()"
        )
        ours = [row for row in held if row[1].startswith(OURS) and row[2] not in self.faults.broken]
        assert len(ours) <= self.kept, f"rows are held by nobody (id, broker, backend): {ours}"
        claims = self.run("SELECT id, attempt, pid, extract(epoch FROM at)::float8 FROM claims ORDER BY n")
        self.judge_made(claims, self.faults.broken)
        late = total["superseded"] + total["unsettled"] * (self.closed or self.locked) + total["unknown"]
        # a settlement claims for the places that it expects to return, and gives back at once what it has not got
        late += sum(": not applied, " in line for line in self.said)
        late += sum(int(found[1]) for line in self.said if (found := BEHIND.search(line)))
        for pid, most in self.run("SELECT pid, n FROM most"):
            assert most <= self.scenario.most + late, f"backend {pid}: {most} leased, the limit is {self.scenario.most}"


@pytest.mark.parametrize(
    "seeds", [SEEDS[at : at + 5] for at in range(0, len(SEEDS), 5)], ids=lambda seeds: f"{seeds[0]}"
)
def test_weather(seeds: Sequence[int], postgres: str) -> None:
    """Nothing is lost or said twice, whoever else is at the database, and whenever a runtime is cut.

    Five seeds at a time, each with a database of its own: most of their time they wait.
    """
    run_worlds(World, {seed: draw(dice_of(seed)) for seed in seeds}, postgres, AGAIN)
