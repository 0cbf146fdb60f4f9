"""`Stored(queue)` when the process is killed with -9: nothing is lost, a repeat at most; and what `Copies()` does."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator, Callable
from contextlib import closing
from pathlib import Path

import pytest
import trio

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from actors import connected
from links.amqp import AmqpBroker, EmbeddedBroker
from tests.links.rabbit_kit import Rabbit, any_broker
from tests.links.stored_consumer import DELAYS, POINTS, Child, Where, a_child

pytestmark = [pytest.mark.amqp, pytest.mark.sqlite, pytest.mark.servers, pytest.mark.slow]

SOME = [f"order {number}" for number in range(12)]
README = Path(__file__).parents[2] / "README.md"
DELAY = 0.5
TOGETHER = (3, 6)
"""The points that several messages may come to at once."""


def a_file(path: Path) -> str:
    database = path / "delays.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.executescript(DELAYS.ddl("sqlite"))
    return f"sqlite:///{database}"


def rows(path: Path) -> int:
    with closing(sqlite3.connect(path / "delays.db", timeout=30)) as connection:
        (count,) = connection.execute("SELECT count(*) FROM delays").fetchone()
        return int(count)


async def until(condition: Callable[[], bool], child: Child, within: float = 60.0) -> None:
    with trio.move_on_after(within):
        while not condition():
            await trio.sleep(0.02)
        return
    pytest.fail(f"it did not happen: {len(child.calls())} calls; {child.log.with_suffix('.err').read_text()[-2000:]}")


@pytest.fixture
async def served() -> AsyncGenerator[tuple[EmbeddedBroker, str], None]:
    server = EmbeddedBroker()
    async with server.serve() as url:
        yield server, url


async def fill(url: str, queue: str, bodies: list[str]) -> None:
    broker = AmqpBroker(url)
    async with connected(broker):
        for body in bodies:
            await broker.publisher(queue).publish(body.encode())


@pytest.mark.parametrize("point", range(1, len(POINTS) + 1), ids=[each.replace(" ", "-") for each in POINTS])
async def test_killed_at_any_step_nothing_is_lost(
    served: tuple[EmbeddedBroker, str], tmp_path: Path, tell: Callable[[str], None], point: int
) -> None:
    """DESIGN 6, Stored: killed amid the work of twelve messages; the next process ends it."""
    server, url = served
    await fill(url, "orders", SOME)

    def done() -> bool:
        return not (server.ready("orders") or server.unsettled("orders") or rows(tmp_path))

    where, log = Where(url, "orders", a_file(tmp_path)), tmp_path / "log"
    calls = 1 if point in TOGETHER else 3
    with a_child(log, where, stored=True, delay=DELAY, point=point, calls=calls) as child:
        await until(lambda: child.code is not None, child)
        assert child.code == -9, (tmp_path / "log.err").read_text()
    with a_child(log, where, stored=True, delay=DELAY) as child:
        await until(lambda: done() and len({call.body for call in child.calls() if call.attempt > 1}) == 12, child)
        handled = child.calls()
    first = {call.body: call.at for call in reversed(handled) if call.attempt == 1}
    again = [call for call in handled if call.attempt > 1]
    assert {call.body for call in again} == set(SOME)
    assert all(call.at - first[call.body] >= DELAY for call in again)
    tell(f"killed where {POINTS[point - 1]}: {len(handled) - 24} repeats of 24 calls")


@pytest.mark.parametrize("kind", ["Stored", "Copies"])
async def test_two_hundred_that_wait_when_it_is_killed(
    served: tuple[EmbeddedBroker, str], tmp_path: Path, tell: Callable[[str], None], kind: str
) -> None:
    """README's table: `Stored` brings all of them, none before its time; of `Copies` none is ever seen again."""
    server, url = served
    bodies = [f"order {number}" for number in range(200)]
    await fill(url, "orders", bodies)
    where, log = Where(url, "orders", a_file(tmp_path)), tmp_path / "log"
    stored, delay = kind == "Stored", 10.0

    def settled() -> bool:
        return not (server.ready("orders") or server.unsettled("orders"))

    with a_child(log, where, stored=stored, delay=delay) as child:
        await until(lambda: len(child.calls()) == 200 and settled(), child)
        assert [call.attempt for call in child.calls()] == [1] * 200
        assert rows(tmp_path) == (200 if stored else 0)
    first = {call.body: call.at for call in child.calls()}
    assert set(first) == set(bodies)
    with a_child(log, where, stored=stored, delay=delay) as child:
        if stored:
            await until(lambda: len(child.calls()) >= 400 and settled() and not rows(tmp_path), child)
        else:
            await until(lambda: len(server.peers) == 1, child)
            await trio.sleep(delay + 2.0)  # all would have been due
    again = child.calls()[200:]
    early = [call for call in again if call.at - first[call.body] < delay]
    tell(f"{kind}: {len({call.body for call in again})} of 200 came again, {len(early)} of them early")
    assert sorted(call.body for call in again) == (sorted(bodies) if stored else [])
    assert {call.attempt for call in again} == ({2} if stored else set())
    assert early == []
    words = f"of 200 that waited at a `kill -9`, {len(again)} came again" + (", none early" if stored else "")
    (line,) = [each for each in README.read_text().splitlines() if each.startswith(f"| `{kind}(") and "kill" in each]
    assert words in line


async def test_another_process_forwards_what_a_killed_one_has_stored(
    served: tuple[EmbeddedBroker, str], tmp_path: Path
) -> None:
    """Several share a table: each row is forwarded once, by whoever lives, also to a queue that he does not consume."""
    server, url = served
    await fill(url, "orders", SOME)
    database = a_file(tmp_path)
    where, elsewhere = Where(url, "orders", database), Where(url, "others", database)
    log = tmp_path / "log"
    with a_child(tmp_path / "other", elsewhere, stored=True, delay=DELAY) as other:
        with a_child(log, where, stored=True, delay=4.0) as child:
            await until(lambda: rows(tmp_path) == 12 and not server.unsettled("orders"), child)
        assert server.ready("orders") == []
        await until(lambda: not rows(tmp_path), other)
    assert sorted(letter.body.decode() for letter in server.ready("orders")) == sorted(SOME)
    assert [letter.headers["x-ruststream-retry-count"] for letter in server.ready("orders")] == [b"1"] * 12
    assert other.calls() == []


@any_broker
async def test_the_same_on_a_server(rabbit: Rabbit, tmp_path: Path, tell: Callable[[str], None]) -> None:
    """On RabbitMQ, whose queue has nothing left of what waits."""
    name = await rabbit.queue()
    await fill(rabbit.url, name, SOME)
    where, log = Where(rabbit.url, name, a_file(tmp_path)), tmp_path / "log"
    with a_child(log, where, stored=True, delay=3.0) as child:
        await until(lambda: rows(tmp_path) == 12, child)
    first = {call.body: call.at for call in reversed(child.calls())}
    with a_child(log, where, stored=True, delay=3.0) as child:
        await until(lambda: {call.body for call in child.calls() if call.attempt > 1} == set(SOME), child)
        await until(lambda: not rows(tmp_path), child)
    again = [call for call in child.calls() if call.attempt > 1]
    assert all(call.at - first[call.body] >= 3.0 for call in again)
    tell(f"{len(again)} came again")
