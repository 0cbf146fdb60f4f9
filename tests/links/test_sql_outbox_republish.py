"""The outbox sends again what no consumer has finished with: once for all instances, in order, old enough."""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import AsyncExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from links.errors import LinkBroken, PublishNotAccepted
from links.sql import OUTBOX_ID
from settlement import Ack
from settlement.delivery import Letter
from tests.links.outbox_kit import BOTH, RecordTables, Sent, a_delivery, answering, made
from tests.links.sqlite_kit import until

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(params=BOTH)
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> RecordTables:
    return made(request.param, tmp_path, request).create()


async def test_what_nobody_has_processed_is_sent_again_in_order(tables: RecordTables) -> None:
    """S-14.7: with ids and headers; not what is marked, young, or of a name that is not registered; by pages."""
    first = tables.outbox()
    orders = first.register("orders", Sent())
    others = first.register("others", Sent())
    async with first.broker.connect():
        for number in range(250):
            await orders.publish(str(number).encode(), {"n": b"\xff"}, key="k")
        await others.publish(b"other")
    tables.age()
    tables.run("UPDATE outbox SET processed_at = sent_at WHERE id = 7")
    async with first.broker.connect():
        await orders.publish(b"young")

    outbox, to = tables.outbox(), Sent()
    outbox.register("orders", to)
    page, rooms = outbox._records.page, list[int]()

    def paged(names: Any, until: Any, after: int | None, room: int) -> Any:
        rooms.append(room)
        return page(names, until, after, room)

    outbox._records.page = paged  # type: ignore[method-assign]
    async with outbox.broker.connect():
        assert await outbox.republish() == 249
        assert rooms == [100, 100, 100]  # so many are in memory at a time
        assert to.ids == [*range(1, 7), *range(8, 251)]
        assert to.letters[0].key == "k"
        assert to.letters[0].headers["n"] == b"\xff"
        assert await outbox.republish() == 0  # what was sent is young again
        assert await outbox.republish(min_age=0) == 250
    assert len(to.letters) == 499


async def test_a_chosen_name_alone(tables: RecordTables) -> None:
    """S-14.7: a subset of names."""
    outbox, to, other = tables.outbox(min_age=0), Sent(), Sent()
    orders, others = outbox.register("orders", to), outbox.register("others", other)
    async with outbox.broker.connect():
        await orders.publish(b"a")
        await others.publish(b"b")
        assert await outbox.republish(["others"]) == 1
        with pytest.raises(ValueError, match=r"registered \('orders', 'others'\), not 'bills'"):
            await outbox.republish(["bills"])
        assert await outbox.republish([]) == 0
        assert await outbox.republish("others") == 1
    assert (to.ids, other.ids) == ([1], [2, 2, 2])


async def test_two_instances_send_each_record_once(tables: RecordTables) -> None:
    """One sends, the other waits for it, and finds nothing old any more."""
    first = tables.outbox()
    orders = first.register("orders", Sent())
    async with first.broker.connect():
        for number in range(150):
            await orders.publish(str(number).encode())
    tables.age()
    to = Sent()
    to.pause = 0.001
    counts: list[int] = []

    async def instance() -> None:
        outbox = tables.outbox()
        outbox.register("orders", to)
        async with outbox.broker.connect():
            counts.append(await outbox.republish())

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(instance)

    assert sorted(counts) == [0, 0, 150]
    assert to.ids == [*range(1, 151)]


async def test_one_that_refuses_does_not_hold_up_the_others(tables: RecordTables, caplog: Any) -> None:
    """S-14.7: a failure fails the start-up, when the others are sent; it is tried again."""
    outbox, to = tables.outbox(min_age=0), Sent()
    orders = outbox.register("orders", to)
    async with outbox.broker.connect():
        for body in (b"a", b"b", b"c"):
            await orders.publish(body)
        tables.run("UPDATE outbox SET headers = '[1]' WHERE id = 3")
        to.letters.clear()
        to.fail = lambda letter: PublishNotAccepted("too large") if letter.body == b"a" else None
        with pytest.raises(PublishNotAccepted, match=r"1 were sent, and 2 not, first: too large"):
            await outbox.republish()
        assert to.bodies == [b"b"]
        to.fail = lambda _: None
        with pytest.raises(
            PublishNotAccepted, match="record 3 of table 'outbox' cannot be read: headers must be a JSON"
        ):
            await outbox.republish()
    assert to.bodies == [b"b", b"a", b"b"]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3


async def test_a_connection_that_breaks_ends_it_and_what_was_sent_counts(tables: RecordTables) -> None:
    outbox, to = tables.outbox(), Sent()
    orders = outbox.register("orders", to)
    async with outbox.broker.connect():
        for body in (b"a", b"b", b"c"):
            await orders.publish(body)
        tables.age()
        to.letters.clear()
        to.fail = lambda letter: LinkBroken("on the wire") if letter.body == b"b" else None
        with pytest.raises(LinkBroken, match="on the wire"):
            await outbox.republish()
        to.fail = lambda _: None
        assert await outbox.republish() == 2
    assert to.bodies == [b"a", b"b", b"c"]


async def test_a_cancelled_one_lets_the_next_one_go(tables: RecordTables) -> None:
    """Nothing is held: another instance sends at once."""
    outbox, to = tables.outbox(min_age=0), Sent()
    orders = outbox.register("orders", to)
    async with outbox.broker.connect():
        await orders.publish(b"a")
        to.pause = 100.0
        with trio.move_on_after(0.3) as scope:
            await outbox.republish()
        assert scope.cancelled_caught
        to.pause = 0.0
        other = tables.outbox(min_age=0)
        other.register("orders", to)
        with trio.fail_after(5.0):
            async with other.broker.connect():
                assert await other.republish() == 1
    assert to.bodies == [b"a", b"a"]


async def test_a_lock_that_is_taken_away_ends_it(tables: RecordTables) -> None:
    """Between two pages: the lock file is deleted, or its session is ended."""
    outbox, to = tables.outbox(min_age=0), Sent()
    orders = outbox.register("orders", to)
    async with outbox.broker.connect():
        for number in range(101):
            await orders.publish(str(number).encode())
        to.letters.clear()

        def taken(letter: Letter) -> None:
            if letter.body == b"50":
                if tables.lite:
                    (lock,) = Path(tables.url.removeprefix("sqlite:///")).parent.glob("*.outbox-outbox-lock")
                    lock.unlink()
                elif tables.mysql:
                    text = "SHA2(LOWER(CONCAT('outbox ', DATABASE(), '.outbox')), 256)"
                    ((holder,),) = tables.run(f"SELECT IS_USED_LOCK(CONCAT('trio-settlement.', LEFT({text}, 40)))")
                    tables.run(f"KILL {holder}")
                else:
                    tables.run(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state = 'idle in transaction' "
                        "AND datname = current_database()"
                    )

        to.fail = taken
        with pytest.raises(LinkBroken, match="after 100: the lock was lost"):
            await outbox.republish()
    assert len(to.letters) == 100


async def test_it_runs_in_the_background(tables: RecordTables, caplog: Any) -> None:
    """At the start, where a failure is raised; then again and again, where one is told."""
    outbox, to = tables.outbox(min_age=0), Sent()
    orders = outbox.register("orders", to)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(outbox.broker.connect())
        await orders.publish(b"a")
        to.fail = lambda _: PublishNotAccepted("full")
        with pytest.raises(ExceptionGroup) as raised:
            async with trio.open_nursery() as nursery:
                await nursery.start(outbox.run)
        assert isinstance(raised.value.exceptions[0], PublishNotAccepted)
        to.fail = lambda _: None
        to.letters.clear()
        caplog.clear()
        async with trio.open_nursery() as nursery:
            await nursery.start(lambda *, task_status: outbox.run(every=0.02, task_status=task_status))
            assert to.bodies == [b"a"]
            await until(lambda: len(to.letters) >= 3)
            to.fail = lambda _: LinkBroken("weather")
            await until(lambda: caplog.records)
            to.fail = lambda _: None
            count = len(to.letters)
            await until(lambda: len(to.letters) > count)
            nursery.cancel_scope.cancel()
    assert caplog.records[0].getMessage() == "weather"


INSTANCE = """
import sys
import trio
from links.sql import SqlBroker, Table
from tests.links.outbox_kit import RecordTables

url, carrier = sys.argv[1:]
queue = Table("orders", id="id", payload="payload", headers="headers", locked_until="lease", generated=["id"])

async def main():
    outbox, to = RecordTables(url).outbox(), SqlBroker(f"sqlite:///{carrier}")
    outbox.register("orders", to.publisher(queue))
    async with outbox.broker.connect(), to.connect():
        print(await outbox.republish())

trio.run(main)
"""


async def test_two_processes_send_each_record_once(tables: RecordTables, tmp_path: Path) -> None:
    """As two instances of a service that start at once."""
    first = tables.outbox()
    orders = first.register("orders", Sent())
    async with first.broker.connect():
        for number in range(130):
            await orders.publish(str(number).encode())
    tables.age()
    carrier = tmp_path / "carrier.db"
    with closing(sqlite3.connect(carrier)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, payload BLOB, headers TEXT, lease REAL)")
    said: list[int] = []

    async def instance() -> None:
        done = await trio.run_process(
            [sys.executable, "-c", INSTANCE, tables.url, str(carrier)],
            capture_stdout=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        said.append(int(done.stdout))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(instance)
            nursery.start_soon(instance)

    assert sorted(said) == [0, 130]
    with closing(sqlite3.connect(carrier)) as connection:
        rows = connection.execute("SELECT payload FROM orders ORDER BY id").fetchall()
    assert rows == [(str(number).encode(),) for number in range(130)]


@pytest.mark.sqlite
@settings(max_examples=50, deadline=None)
@given(
    letters=st.lists(
        st.tuples(
            st.binary(max_size=20),
            st.dictionaries(st.text(max_size=5), st.binary(max_size=5), max_size=3),
            st.none() | st.text(max_size=5),
        ),
        max_size=5,
    )
)
def test_a_letter_is_sent_again_as_it_was(letters: list[tuple[bytes, dict[str, bytes], str | None]]) -> None:
    """As a law: body, headers and key, in their order, each with the id of its record."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "o.db"
        sqlite3.connect(path).close()
        tables = RecordTables(f"sqlite:///{path}").create()

        async def main() -> Sent:
            outbox, to = tables.outbox(min_age=0), Sent()
            orders = outbox.register("orders", to)
            async with outbox.broker.connect():
                for body, headers, key in letters:
                    await orders.publish(body, headers, key=key)
                assert await outbox.republish() == len(letters)
            return to

        to = trio.run(main)
    for sent in (to.letters[: len(letters)], to.letters[len(letters) :]):
        assert [(each.body, dict(each.headers), each.key) for each in sent] == [
            (body, {**headers, OUTBOX_ID: str(number).encode()}, key)
            for number, (body, headers, key) in enumerate(letters, 1)
        ]


@pytest.mark.postgres
@pytest.mark.servers
async def test_connections_that_are_ended_are_weather(database: str) -> None:
    """All but the lock's: what is asked then is asked once more on the next connection, and nobody hears of it."""
    tables = RecordTables(database).create()
    outbox, to = tables.outbox(min_age=0), Sent()
    orders = outbox.register("orders", to)
    async with outbox.broker.connect():
        for body in (b"a", b"b"):
            await orders.publish(body)
        to.letters.clear()

        def ended(_: Letter) -> None:
            tables.run(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state = 'idle' "
                "AND datname = current_database() AND pid <> pg_backend_pid()"
            )

        to.fail = ended
        with trio.fail_after(20):
            assert await outbox.republish() == 2
            assert await outbox.tracked(answering(Ack()))(a_delivery(1)) == Ack()
    assert to.bodies == [b"a", b"b"]
    assert [done for *_, done in tables.rows()] == [True, False]


@pytest.mark.sqlite
async def test_a_name_that_only_looks_like_another(tmp_path: Path) -> None:
    """Where the column takes ORDERS for orders, the record of a name that is not registered is left alone."""
    path = tmp_path / "o.db"
    sqlite3.connect(path).close()
    tables = RecordTables(f"sqlite:///{path}")
    ddl = tables.outbox().ddl().replace("name TEXT NOT NULL", "name TEXT NOT NULL COLLATE NOCASE")
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(ddl)
        connection.cursor().execute("INSERT INTO outbox (name, payload) VALUES ('ORDERS', x'61'), ('orders', x'62')")
        connection.commit()
    outbox, to = tables.outbox(min_age=0), Sent()
    outbox.register("orders", to)
    async with outbox.broker.connect():
        assert await outbox.republish() == 1
    assert to.bodies == [b"b"]


@pytest.mark.sqlite
async def test_a_file_that_others_keep_locked_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "o.db"
    sqlite3.connect(path).close()
    tables = RecordTables(f"sqlite:///{path}").create()
    outbox, to = tables.outbox(min_age=0), Sent()
    orders = outbox.register("orders", to)
    async with outbox.broker.connect(), trio.open_nursery() as nursery:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        nursery.start_soon(orders.publish, b"a")
        await trio.sleep(0.3)
        assert to.letters == []
        other.execute("ROLLBACK")
        other.close()
        await until(lambda: to.bodies == [b"a"])
