"""`Stored(queue)` on PostgreSQL: the server's clock is the judge, each form forwards, an outage costs nothing."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("proton", reason="python-qpid-proton is not installed")
pytest.importorskip("psycopg", reason="psycopg is not installed")

from actors import Subscription, open_runtime
from links.amqp import AmqpBroker, EmbeddedBroker
from links.errors import LinkRefused
from links.sql import AdvisoryLock, Lease, RowLock
from settlement import RetryAfter, Stored
from settlement.sql import ClaimForm
from tests.links.amqp_kit import Handler, until
from tests.links.postgres_tables import PostgresTables

pytestmark = [pytest.mark.amqp, pytest.mark.postgres, pytest.mark.servers]


@pytest.mark.parametrize(
    "claim", [Lease(30.0), RowLock(), AdvisoryLock("late-{id}")], ids=lambda claim: type(claim).__name__
)
async def test_each_form_of_claim_forwards_when_it_is_due(database: str, claim: ClaimForm) -> None:
    """DESIGN 6, SQL: due is computed in the statement, by the database's clock, and compared by it."""
    tables = PostgresTables(database, grouped=True, leased=isinstance(claim, Lease)).create()
    server = EmbeddedBroker()
    handler = Handler({b"\xfflate\0": [RetryAfter(0.5)]})
    store = tables.broker().queue(tables.table(), group="waiting", claim=claim)
    async with server.running():
        broker = AmqpBroker("amqp://localhost", connect=server.connect)
        orders = Subscription(broker.queue("orders", delays=Stored(store)), handler)
        async with open_runtime(orders) as runtime:
            await broker.publisher("orders").publish(b"\xfflate\0")
            await until(lambda: runtime.ledger("orders").delayed == 1)
            ((left, group, headers),) = tables.run(
                "SELECT extract(epoch FROM retry_after - clock_timestamp()), grp, headers FROM jobs"
            )
            assert (group, headers) == ("waiting", {"amqp-queue": "orders"})
            assert 0 < left <= 0.5
            await handler.has(b"\xfflate\0", b"\xfflate\0")
            await until(lambda: runtime.ledger("waiting (stored)").acked == 1)
    assert [each.attempt for each in handler.deliveries] == [1, 2]
    assert handler.times[1] - handler.times[0] >= 0.5
    assert tables.rows() == []


async def test_a_payload_of_texts_is_refused(database: str) -> None:
    tables = PostgresTables(database).create()
    tables.run("ALTER TABLE jobs ALTER COLUMN payload TYPE text USING NULL")
    server = EmbeddedBroker()
    async with server.running():
        broker = AmqpBroker("amqp://localhost", connect=server.connect)
        store = tables.broker().queue(tables.table())
        with pytest.raises(LinkRefused, match=r"column 'payload' \(payload\) holds texts.*bytea"):
            async with open_runtime(Subscription(broker.queue("orders", delays=Stored(store)), Handler())):
                pytest.fail("it was entered")


async def test_a_server_that_is_away_keeps_the_delayed_and_others_go_on(database: str) -> None:
    """DESIGN 3.6: a step before a verb waits, *degraded*; what needs no table is handled as ever."""
    tables = PostgresTables(database).create()
    server = EmbeddedBroker()
    handler = Handler({b"late": [RetryAfter(0.1)]})
    name = tables.run("SELECT current_database()")[0][0]
    admin = PostgresTables(database.rpartition("/")[0] + "/postgres")
    async with server.running():
        broker = AmqpBroker("amqp://localhost", connect=server.connect)
        orders = broker.queue("orders", delays=Stored(tables.broker().queue(tables.table())))
        async with open_runtime(Subscription(orders, handler, concurrency=2)) as runtime:
            _allow(admin, name, "false")
            try:
                await broker.publisher("orders").publish(b"late")
                await until(lambda: bool(runtime.statistics()["orders"].degraded))
                for body in (b"one", b"two"):
                    await broker.publisher("orders").publish(body)
                await until(lambda: runtime.ledger("orders").acked == 2)
                assert (runtime.ledger("orders").delayed, runtime.ledger("orders").in_hand) == (0, 1)
            finally:
                _allow(admin, name, "true")
            await handler.has(b"late", b"late")
            await until(lambda: runtime.ledger("orders").acked == 3)
            assert runtime.statistics()["orders"].degraded == ()
    assert runtime.ledger("orders").balanced


def _allow(admin: PostgresTables, name: Any, allowed: str) -> None:
    admin.run(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS {allowed}')
    admin.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", name)
