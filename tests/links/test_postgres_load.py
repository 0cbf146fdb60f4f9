"""Eight claimers in two processes and four producers on one table, in good weather and while connections are ended."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import NoneType
from typing import Any

import attrs
import pytest
import trio

from links.errors import LinkBroken
from links.sql import SqlBroker
from tests.links.mysql_tables import MysqlTables
from tests.links.postgres_tables import PostgresTables
from tests.links.sql_consumer import Child, a_child, message
from tests.links.sqlite_kit import until

pytestmark = [pytest.mark.postgres, pytest.mark.servers, pytest.mark.slow]

SECONDS = [5.0, pytest.param(60.0, marks=pytest.mark.long)]
FORMS = pytest.mark.parametrize("lease", [2.0, None, "{id}"], ids=["lease", "row lock", "advisory"])
CLAIMERS = 8
HELD = {
    float: "SELECT count(*) FROM jobs WHERE locked_until > clock_timestamp()",
    NoneType: "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
    "AND state = 'idle in transaction' AND query ~ '(SKIP LOCKED|EXECUTE claim_[0-9]+.*)$'",
    str: "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database "
    "WHERE datname = current_database() AND locktype = 'advisory' AND granted",
}
"""As the server sees it: how many rows are held."""


@attrs.define
class Sent:
    """What producers have sent: what was confirmed, and what may be there or not."""

    confirmed: set[str] = attrs.Factory(set[str])
    unknown: set[str] = attrs.Factory(set[str])


OUTCOMES: list[tuple[str, ...]] = [(), (), (), ("retry",), ("after",), ("retry", "after")]


def asked(name: str) -> tuple[str, ...]:
    """The outcomes that a message asks for, before its `Ack`."""
    _, _, number = name.partition(".")
    return OUTCOMES[int(number.partition(".")[0]) % len(OUTCOMES)] if number else ()


async def produce(tables: PostgresTables | MysqlTables, who: int, seconds: float, sent: Sent) -> None:
    """Publish for so long, one by one and in bulk; some messages ask to be retried."""
    broker = SqlBroker(tables.url)
    async with broker.connect():
        publisher = broker.publisher(tables.table())
        with trio.move_on_after(seconds):
            for number in itertools.count():
                names = [f"{who}.{number}.{each}" for each in range(1 if number % 3 else 5)]
                bodies = [message(name, hold=0.002, outcomes=asked(name)) for name in names]
                sent.unknown.update(names)  # a cancellation leaves it so
                try:
                    await (publisher.publish_many(bodies) if len(bodies) > 1 else publisher.publish(bodies[0]))
                except LinkBroken:
                    continue
                sent.unknown.difference_update(names)
                sent.confirmed.update(names)
                await trio.sleep(0.02)


@asynccontextmanager
async def claimers(folder: Path, url: str, lease: float | str | None) -> AsyncGenerator[list[Child], None]:
    """Two processes with four claimers each."""
    options: dict[str, Any] = {"url": url, "lease": lease, "claimers": CLAIMERS // 2}
    async with a_child(folder, **options) as one, a_child(folder, **options) as other:
        yield [one, other]


def overlaps(children: list[Child]) -> list[tuple[str, Any]]:
    """Messages that were in work twice at one time."""
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for child in children:
        begun: dict[tuple[str, int, str], float] = {}
        for what, *rest in child.told:
            if what == "began":
                name, attempt, claimer, at = rest
                begun[name, attempt, claimer] = at
            elif what in ("ended", "cancelled"):
                name, attempt, claimer, at = rest
                spans[name].append((begun.pop((name, attempt, claimer)), at))
        assert begun == {}, "a handler has not ended"
    return [
        (name, each)
        for name, times in spans.items()
        for each in itertools.pairwise(sorted(times))
        if each[0][1] > each[1][0]
    ]


def handled(children: list[Child]) -> dict[str, int]:
    """How often each message's handler came to its end."""
    counts: dict[str, int] = defaultdict(int)
    for child in children:
        for line in child.said("ended"):
            counts[line[1]] += 1
    return counts


@FORMS
@pytest.mark.parametrize("seconds", SECONDS)
async def test_eight_claimers_and_four_producers(  # noqa: PLR0917 -- parameters
    seconds: float,
    lease: float | str | None,
    database: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    tell: Callable[[str], None],
) -> None:
    """S-2.11: no row is in work twice, rows in = rows out, and nobody hears of a deadlock or the like."""
    tables = PostgresTables(database, leased=isinstance(lease, float)).create()
    sent, most = Sent(), 0
    holding = [f"holding {number}" for number in range(CLAIMERS)]
    async with claimers(tmp_path, database, lease) as children:
        tables.add(*[message(name, hold=1.5) for name in holding])  # when everybody is there
        async with trio.open_nursery() as nursery:
            for who in range(4):
                nursery.start_soon(produce, tables, who, seconds, sent)
            end = trio.current_time() + seconds
            while trio.current_time() < end:
                ((held,),) = tables.run(HELD[type(lease)])
                most = max(most, held)
                await trio.sleep(0.05)
        assert most == CLAIMERS, "held at one moment, as the server shows it"
        await until(lambda: tables.run("SELECT count(*) FROM jobs") == [(0,)], 60)
        books = [each for child in children for each in await child.books()]
        complaints = caplog.text + "".join(child.errors for child in children)
        counts = handled(children)
        assert overlaps(children) == []

    # a claim keeps a row locked to its end that it found taken when it had locked it: such a verb is said again
    passing = ("another transaction has locked the row", "settling works again")
    assert [line for line in complaints.splitlines() if not any(each in line for each in passing)] == []
    assert all(each["balanced"] for each in books)
    total = {name: sum(each[name] for each in books) for name in ("received", "acked", "superseded", "unknown")}
    names = {*sent.confirmed, *holding}
    assert names <= {*counts} <= {*names, *sent.unknown}
    assert counts == {name: 1 + len(asked(name)) for name in counts}
    assert (total["acked"], total["superseded"], total["unknown"]) == (len(counts), 0, 0)
    tell(f"{len(counts)} rows by {CLAIMERS} claimers in {seconds:g} s, {total['received']} deliveries")


@FORMS
@pytest.mark.parametrize("seconds", SECONDS)
async def test_connections_are_ended_in_turn_under_load(
    seconds: float, lease: float | str | None, database: str, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """DESIGN 4: a claimer's, the writer's, a publisher's: each is had again, nothing is lost, and the books balance."""
    tables = PostgresTables(database, leased=isinstance(lease, float)).create()
    sent = Sent()
    ours = "application_name = 'trio-settlement' AND datname = current_database()"
    victims = {
        "claimer": f"{ours} AND query ~ '(SKIP LOCKED|EXECUTE claim|pg_try_advisory_lock)'",
        "publisher": f"{ours} AND query LIKE 'INSERT%'",
        "holder": f"{ours} AND state = 'idle in transaction'",
        "any": ours,
    }
    ended: dict[str, int] = defaultdict(int)
    async with claimers(tmp_path, database, lease) as children:
        async with trio.open_nursery() as nursery:
            for who in range(4):
                nursery.start_soon(produce, tables, who, seconds, sent)
            end = trio.current_time() + seconds
            for victim in itertools.cycle(victims):
                if trio.current_time() > end:
                    break
                query = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {victims[victim]} "  # noqa: S608
                ended[victim] += len(tables.run(query + "ORDER BY random() LIMIT 2"))
                await trio.sleep(0.25)
        await until(lambda: tables.run("SELECT count(*) FROM jobs") == [(0,)], 60)
        books = [each for child in children for each in await child.books()]
        counts = handled(children)
        complaints = "".join(child.errors for child in children)

    assert all(each["balanced"] for each in books)
    assert sent.confirmed <= {*counts} <= {*sent.confirmed, *sent.unknown}, "what was confirmed was handled"
    assert "Traceback" not in complaints
    assert "deadlock" not in complaints
    assert ended["claimer"]
    assert ended["publisher"]
    assert ended["any"]
    assert ended["holder"] or lease is not None
    tell(f"{len(counts)} rows, {sum(ended.values())} connections ended, {len(sent.unknown)} publishings unknown")
