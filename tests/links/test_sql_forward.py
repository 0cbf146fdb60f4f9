"""`forward`: rows of a queue table go out by another transport, as they came."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from actors import HandlerFailed, Subscription, connected, open_runtime
from links.errors import PublishNotAccepted
from links.memory import MemoryBroker
from links.sql import forward
from settlement import Policy, RetryAfter
from settlement.delivery import Letter
from tests.links.outbox_kit import BOTH
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import Database, until


@pytest.fixture(params=BOTH)
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "sqlite":
        return Database(tmp_path / "q.db", marks=True).create()
    return PostgresTables(request.getfixturevalue("database"), marks=True).create()


async def test_rows_go_out_as_they_came(tables: Any) -> None:
    """Body, headers and key; in their order; a row is finished when its message is there."""
    broker, memory = tables.broker(), MemoryBroker()
    to = memory.publisher("orders")
    relay = Subscription(broker.queue(tables.table()), forward(to))
    async with memory.connect(), open_runtime(relay) as runtime:
        from_here = broker.publisher(tables.table())
        await from_here.publish(b"\x00a", {"x": b"\xff", "y": b"1"}, key="lane")
        await from_here.publish(b"b")
        await until(lambda: runtime.ledger("jobs").acked == 2)
    (a, b) = memory.store("orders").ready()
    assert (a.body, dict(a.headers), a.key) == (b"\x00a", {"x": b"\xff", "y": b"1"}, "lane")
    assert (b.body, dict(b.headers), b.key) == (b"b", {}, None)
    assert all(row["processed_at"] is not None for row in tables.rows())


async def test_a_refused_message_is_the_policys(tables: Any) -> None:
    """An exception like any other: tried again, or the end, by the policy; the row stays."""
    memory = MemoryBroker()
    to = memory.publisher("orders")
    sent: list[bytes] = []
    original = to.send

    async def send(letter: Letter) -> None:
        sent.append(letter.body)
        if len(sent) == 1:
            raise PublishNotAccepted("full")
        await original(letter)

    to.send = send  # type: ignore[method-assign]
    tables.add(b"a")
    async with memory.connect():
        with pytest.raises(ExceptionGroup) as raised:
            async with open_runtime(Subscription(tables.broker().queue(tables.table()), forward(to))):
                await trio.sleep_forever()
        (failed,) = raised.value.exceptions
        assert isinstance(failed, HandlerFailed)
        assert isinstance(failed.__cause__, PublishNotAccepted)
        (row,) = tables.rows()
        assert row["processed_at"] is None
        tables.run("UPDATE jobs SET locked_until = NULL")
        policy = Policy(on_error=RetryAfter(0.0))
        again = Subscription(tables.broker().queue(tables.table()), forward(to), policy=policy)
        async with open_runtime(again) as runtime:
            await until(lambda: runtime.ledger("jobs").acked == 1)
    assert sent == [b"a", b"a"]


@pytest.mark.amqp
@pytest.mark.sqlite
async def test_to_amqp(tmp_path: Path) -> None:
    """Body and headers arrive there as they were."""
    pytest.importorskip("proton", reason="python-qpid-proton is not installed")
    from links.amqp import AmqpBroker, EmbeddedBroker  # noqa: PLC0415 -- may not be installed

    database = Database(tmp_path / "q.db").create()
    broker, embedded = database.broker(), EmbeddedBroker()
    async with embedded.running():
        amqp = AmqpBroker("amqp://localhost", connect=embedded.connect)
        relay = Subscription(broker.queue(database.table()), forward(amqp.publisher("orders")))
        async with connected(amqp), open_runtime(relay) as runtime:
            await broker.publisher(database.table()).publish(b"\x00a", {"x": b"1"})
            await until(lambda: runtime.ledger("jobs").acked == 1)
        (letter,) = embedded.ready("orders")
    assert (letter.body, letter.headers["x"]) == (b"\x00a", b"1")


def test_what_is_no_publisher() -> None:
    with pytest.raises(TypeError, match="publisher must be a publisher of a broker, not 'orders'"):
        forward("orders")  # type: ignore[arg-type]
