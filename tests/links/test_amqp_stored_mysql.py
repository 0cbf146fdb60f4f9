"""`Stored(queue)` on MySQL and MariaDB, in each form of claim."""

from __future__ import annotations

import pytest

pytest.importorskip("proton", reason="python-qpid-proton is not installed")
pytest.importorskip("pymysql", reason="PyMySQL is not installed")

from actors import Subscription, open_runtime
from links.amqp import AmqpBroker, EmbeddedBroker
from links.errors import LinkRefused
from links.sql import AdvisoryLock, Lease, RowLock, SqlBroker, Table
from settlement import RetryAfter, Stored
from settlement.sql import ClaimForm
from tests.links.amqp_kit import Handler, until
from tests.links.mysql_kit import run
from tests.links.stored_consumer import DELAYS

pytestmark = [pytest.mark.amqp, pytest.mark.mysql, pytest.mark.servers]

BODY = b"\xff\x00late" * 20_000
"""Longer than what a BLOB holds, and no text."""


UNLEASED = Table(
    "delays", id="id", payload="payload", headers="headers", retry_after="due", attempt="attempt", generated="id"
)


def create(url: str, table: Table[bytes] = DELAYS) -> None:
    for statement in table.ddl("mysql").split(";\n"):
        if "CREATE" in statement:
            run(url, statement)


@pytest.mark.parametrize("claim", [Lease(30.0), RowLock(), AdvisoryLock("late-{id}")], ids=["lease", "row", "advisory"])
async def test_each_form_of_claim_forwards_when_it_is_due(mysql_database: str, claim: ClaimForm) -> None:
    """DESIGN 6, SQL: due is computed and compared in the statements, by the database's clock."""
    table = DELAYS if isinstance(claim, Lease) else UNLEASED
    create(mysql_database, table)
    server, handler = EmbeddedBroker(), Handler({BODY: [RetryAfter(0.5)]})
    store = SqlBroker(mysql_database, poll_interval=0.05).queue(table, claim=claim)
    async with server.running():
        broker = AmqpBroker("amqp://localhost", connect=server.connect)
        orders = Subscription(broker.queue("orders", delays=Stored(store)), handler)
        async with open_runtime(orders) as runtime:
            await broker.publisher("orders").publish(BODY)
            await handler.has(BODY, BODY)
            await until(lambda: runtime.ledger("delays (stored)").acked == 1)
    assert [each.attempt for each in handler.deliveries] == [1, 2]
    assert handler.times[1] - handler.times[0] >= 0.5
    assert run(mysql_database, "SELECT * FROM delays") == []


async def test_a_payload_column_that_is_too_small_keeps_the_original(mysql_database: str) -> None:
    """DESIGN 3.6: the row is not accepted; the delivery stays until somebody makes room."""
    create(mysql_database)
    run(mysql_database, "ALTER TABLE delays MODIFY payload TINYBLOB NOT NULL")
    server, handler = EmbeddedBroker(), Handler({BODY: [RetryAfter(0.1)]})
    store = SqlBroker(mysql_database, poll_interval=0.05).queue(DELAYS)
    async with server.running():
        broker = AmqpBroker("amqp://localhost", connect=server.connect)
        orders = Subscription(broker.queue("orders", delays=Stored(store)), handler)
        async with open_runtime(orders) as runtime:
            await broker.publisher("orders").publish(BODY)
            await until(lambda: "Data too long" in "".join(runtime.statistics()["orders"].degraded))
            run(mysql_database, "ALTER TABLE delays MODIFY payload LONGBLOB NOT NULL")
            await handler.has(BODY, BODY)
    assert runtime.ledger("orders").delayed == 1


async def test_a_payload_of_texts_is_refused(mysql_database: str) -> None:
    create(mysql_database)
    run(mysql_database, "ALTER TABLE delays MODIFY payload LONGTEXT NOT NULL")
    server = EmbeddedBroker()
    async with server.running():
        broker = AmqpBroker("amqp://localhost", connect=server.connect)
        store = SqlBroker(mysql_database).queue(DELAYS)
        with pytest.raises(LinkRefused, match=r"column 'payload' \(payload\) holds texts.*BLOB"):
            async with open_runtime(Subscription(broker.queue("orders", delays=Stored(store)), Handler())):
                pytest.fail("it was entered")
