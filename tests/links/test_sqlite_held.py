"""Rows whose verb was not applied, many at once: they are held, said again now and then, and cost nothing meanwhile."""

from collections import Counter
from pathlib import Path

import pytest
import trio

from actors import Subscription, open_runtime
from settlement import Ack, Delivery
from tests.links.sqlite_kit import Database, Gate, until

pytestmark = pytest.mark.sqlite


async def test_many_that_are_held_unsaid_are_no_hot_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """600 at once: each handler was called once, a second takes few hops, and all are finished when it is possible."""
    count = 600
    database = Database(tmp_path / "q.db").create()
    database.add(*[b"x"] * count)
    database.run("CREATE TRIGGER no BEFORE DELETE ON jobs BEGIN SELECT RAISE(ABORT, 'no'); END")
    calls: Counter[str] = Counter()

    async def handler(delivery: Delivery[bytes]) -> Ack:
        calls[delivery.id] += 1
        return Ack()

    gate = Gate(monkeypatch)
    queue = database.broker().queue(database.table(), limit=count)
    async with open_runtime(Subscription(queue, handler, concurrency=4)) as runtime:
        await until(lambda: len(calls) == count, 30.0)
        hops = gate.entered
        await trio.sleep(1.0)
        assert gate.entered - hops < 50
        assert set(calls.values()) == {1}
        assert len(database.rows()) == count
        database.run("DROP TRIGGER no")
        await until(lambda: not database.rows(), 30.0)
    assert set(calls.values()) == {1}
    assert runtime.ledger("jobs").acked == count
