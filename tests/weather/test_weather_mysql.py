"""Random weather on MySQL and MariaDB, on a real clock with short times: leases.

As tests/weather/test_weather_postgres.py, of which the scenarios and the judge are the same: connections are killed,
sockets are cut before a message, amid it or behind it, leases are stolen, rows and the table are locked by others,
links are severed, the dead letter is closed by a trigger, handlers answer although they were cancelled, and runtimes
are cut. Each second seed has TIMESTAMP columns. Triggers write down what was done to each row, and by which connection
(tests/weather/mysql_faults.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from links.sql import Lease
from tests.links.mysql_kit import Mysqls
from tests.servers.mysql import Kind
from tests.weather.mysql_faults import FAULTS
from tests.weather.mysql_world import MysqlWorld, run_worlds
from tests.weather.schedule import chosen, dice_of, sized
from tests.weather.table_world import LeasedWorld
from tests.weather.test_weather_postgres import BEHIND, draw

pytestmark = [pytest.mark.mysql, pytest.mark.servers]

SEEDS = chosen("SETTLEMENT_SEED", range(sized(fast=5, full=20, long=200)))
AGAIN = "SETTLEMENT_SEED={seed} tests/run --only mysql -- tests/weather/test_weather_mysql.py"
WEATHER = (
    *("lock", "lock", "lock_table", "steal", "steal_and_finish", "steal_all", "sever_link", "close_dead"),
    *("kill", "kill", "kill_all", "kill_waiting", *FAULTS, "lose_verdict"),
)


class World(MysqlWorld, LeasedWorld):
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
        """Lease rows that are leased, or finish them."""
        leased = "SELECT id, attempt, payload FROM jobs WHERE locked_until > UTC_TIMESTAMP(6) ORDER BY id"
        again = "UPDATE jobs SET locked_until = UTC_TIMESTAMP(6) + INTERVAL %s MICROSECOND, attempt = attempt + 1"
        with self.stranger(autocommit=False) as cursor:
            cursor.execute(f"{leased} FOR UPDATE SKIP LOCKED")
            held = cursor.fetchall()
            for key, attempt, payload in held if name == "steal_all" else held[:1]:
                self.stolen[key, attempt] += 1
                if name == "steal_and_finish":
                    cursor.execute("DELETE FROM jobs WHERE id = %s", (key,))
                    self.thief[payload] += 1
                else:
                    cursor.execute(f"{again} WHERE id = %s", (round(seconds * 1e6), key))
            cursor.connection.commit()

    # --- the end

    def judge_claims(self, total: Counter[str]) -> None:
        """As of a world."""
        log = self.run("SELECT what, id, attempt, pid, at FROM audit ORDER BY n")
        claims = [(key, attempt, pid, at) for what, key, attempt, pid, at in log if what == "claimed" and pid]
        claimer = {(key, attempt): pid for key, attempt, pid, _ in claims}
        with self.stranger() as cursor:
            cursor.execute("SELECT id, attempt FROM jobs WHERE locked_until > UTC_TIMESTAMP(6)")
            held = {row: claimer.get(row) for row in cursor.fetchall()}  # where a thief holds it: nobody of ours
        ours = {row: pid for row, pid in held.items() if pid and pid not in self.faults.broken}
        assert len(ours) <= self.kept, f"rows are held by nobody (id, attempt; connection): {ours}"
        self.judge_made(claims, self.faults.broken)
        late = total["superseded"] + total["unsettled"] * (self.closed or self.locked) + total["unknown"]
        # a settlement claims for the places that it expects to return, and gives back at once what it has not got
        late += sum(": not applied, " in line for line in self.said)
        late += sum(int(found[1]) for line in self.said if (found := BEHIND.search(line)))
        holders: dict[int, int] = {}
        for what, key, _, pid, _ in log:
            holders.pop(key, None)
            if what == "claimed" and pid:
                holders[key] = pid
                leased = list(holders.values()).count(pid)
                assert leased <= self.scenario.most + late, f"{leased} by {pid}, the limit is {self.scenario.most}"


@pytest.mark.parametrize(
    "seeds", [SEEDS[at : at + 5] for at in range(0, len(SEEDS), 5)], ids=lambda seeds: f"{seeds[0]}"
)
@pytest.mark.parametrize("kind", ["mariadb", "mysql"])
def test_weather(kind: Kind, seeds: Sequence[int], mysqls: Mysqls) -> None:
    """Nothing is lost or said twice, whoever else is at the database, and whenever a runtime is cut.

    Five seeds at a time, each with a database of its own: most of their time they wait.
    """
    run_worlds(World, {seed: draw(dice_of(seed), WEATHER) for seed in seeds}, mysqls.url(kind), AGAIN)
