"""Cancelled at every step of its task, an outbox holds nothing, and no record stays without its message."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import trio

from settlement import Ack
from tests.links.outbox_kit import BOTH, RecordTables, Sent, a_delivery, answering, made


class Cut(trio.abc.Instrument):
    """Cancels this scope at the step of that number of the task that is in it; None in time: there are not so many."""

    def __init__(self, scope: trio.CancelScope, at: int) -> None:
        self._scope, self._at, self._task = scope, at, trio.lowlevel.current_task()
        self.done = False

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._task and not self.done:
            self._at -= 1
            if self._at == 0:
                self.done = True
                self._scope.cancel()


async def story(tables: RecordTables, to: Sent, at: int) -> bool:
    """Publish, record and send, send again, consume: cut at that step; False: it was through before."""
    outbox = tables.outbox(min_age=0)
    orders = outbox.register("orders", to)
    tracked = outbox.tracked(answering(Ack()))
    async with outbox.broker.connect():
        scope = trio.CancelScope()
        cut = Cut(scope, at)
        with scope:
            trio.lowlevel.add_instrument(cut)
            try:
                await orders.publish(b"a")
                with tables.connection() as connection:
                    key = outbox.record(connection, "orders", b"b")
                await outbox.send(key)
                await outbox.republish()
                await tracked(a_delivery(1))
            finally:
                trio.lowlevel.remove_instrument(cut)
        return cut.done


@pytest.mark.slow
@pytest.mark.parametrize("dialect", BOTH)
async def test_cancelled_at_every_step(dialect: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """After each another instance sends what is left at once: neither the lock nor a transaction is held."""
    tables = made(dialect, tmp_path, request).create()
    last = 0
    for at in count(1):
        to = Sent()
        with trio.fail_after(10):
            if not await story(tables, to, at):
                break
            outbox = tables.outbox(min_age=0)
            outbox.register("orders", to)
            async with outbox.broker.connect():
                await outbox.republish()
                again = outbox.tracked(answering(Ack()))
                for key in set(to.ids):
                    assert await again(a_delivery(key)) == Ack()
        rows = tables.rows()
        assert {key for key, *_ in rows} == set(to.ids), at  # each record's message, and no message without a record
        assert all(done for *_, done in rows), at
        tables.run("DELETE FROM outbox")
        if tables.lite:
            tables.run("DELETE FROM sqlite_sequence")
        elif tables.mysql:
            tables.run("ALTER TABLE outbox AUTO_INCREMENT = 1")
        else:
            tables.run("ALTER TABLE outbox ALTER id RESTART")
        last = at
    assert last > 10
