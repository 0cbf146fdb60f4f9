"""Connections that end, rows and tables that others lock, on MySQL and MariaDB: what is in hand goes on."""

from __future__ import annotations

import pytest
import trio

from actors import Subscription, open_runtime
from links.errors import LeaseLost, NotApplied, PublishNotAccepted
from links.sql import AdvisoryLock, Lease, RowLock
from settlement import Delivery
from settlement.sql import ClaimForm, Finish
from tests.links.mysql_kit import connect
from tests.links.mysql_tables import MysqlTables
from tests.links.sqlite_kit import bodies, broker_of, open_link, say, until

pytestmark = [pytest.mark.mysql, pytest.mark.servers]

FORMS = [Lease(30.0), RowLock(), AdvisoryLock("job-{id}")]
forms = pytest.mark.parametrize("claim", FORMS, ids=["lease", "row lock", "advisory"])
OURS = "SELECT ID FROM information_schema.PROCESSLIST WHERE DB = DATABASE() AND ID <> CONNECTION_ID()"


def kill(tables: MysqlTables) -> int:
    """All that are connected."""
    numbers = tables.run(OURS)
    for (number,) in numbers:
        tables.run(f"KILL {number}")
    return len(numbers)


async def test_a_lease_outlives_its_connections(mysql_database: str) -> None:
    """DESIGN 4: the call in flight alone is lost; what is held is settled on the next connection."""
    tables = MysqlTables(mysql_database).create()
    tables.add(b"a", b"b")
    queue = tables.broker().queue(tables.table())
    async with open_link(queue) as link:
        received = await link.receive(2)
        assert kill(tables) == 2
        assert list(await link.extend(received)) == []
        assert kill(tables) > 0
        assert list(await link.settle([say(each, Finish()) for each in received])) == [None, None]
        assert kill(tables) > 0
        await broker_of(queue).publisher(tables.table()).publish(b"c")
        with trio.fail_after(10):
            assert bodies(await link.receive(1)) == [b"c"]


@forms
async def test_a_service_whose_connections_are_killed(claim: ClaimForm, mysql_database: str) -> None:
    """In each form: while handlers run; the rows come again, and all are handled."""
    tables = MysqlTables(mysql_database, leased=isinstance(claim, Lease)).create()
    tables.add(*[b"%d" % number for number in range(6)])
    seen: list[bytes] = []
    gate = trio.Event()

    async def handler(delivery: Delivery[bytes]) -> None:
        seen.append(delivery.body)
        await gate.wait()

    queue = tables.broker().queue(tables.table(), claim=claim)
    async with open_runtime(Subscription(queue, handler, concurrency=2, name="jobs")) as runtime:
        await until(lambda: len(seen) == 2, 10)
        kill(tables)
        if not isinstance(claim, Lease):  # the claim has ended, so its handler is cancelled, and another one called
            await until(lambda: len(seen) >= 4, 20)
        gate.set()
        await until(lambda: tables.rows() == [], 30)
        await until(lambda: runtime.ledger("jobs").acked == 6, 10)


async def test_a_short_wait_timeout(mysql_database: str) -> None:
    """The server's own, for idle connections: ours are not ended, and what was is had again before it is used."""
    tables = MysqlTables(mysql_database, leased=False).create()
    before = tables.run("SELECT @@global.wait_timeout")[0][0]
    tables.run("SET GLOBAL wait_timeout = 1")
    try:
        queue = tables.broker(poll_interval=60.0).queue(tables.table())
        async with open_link(queue):
            await trio.sleep(2.5)  # longer than the server waits
            await broker_of(queue).publisher(tables.table()).publish(b"a")
    finally:
        tables.run(f"SET GLOBAL wait_timeout = {before}")
    assert tables.row()["payload"] == b"a"


@forms
async def test_a_row_that_somebody_has_locked(claim: ClaimForm, mysql_database: str) -> None:
    """It is passed over, and waits for nobody; the others are handled meanwhile."""
    tables = MysqlTables(mysql_database, leased=isinstance(claim, Lease)).create()
    tables.add(b"locked", *[b"%d" % number for number in range(5)])
    seen: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        seen.append(delivery.body)

    queue = tables.broker().queue(tables.table(), claim=claim)
    with connect(mysql_database, autocommit=False) as other, other.cursor() as cursor:
        cursor.execute("SELECT * FROM jobs WHERE id = 1 FOR UPDATE")
        async with open_runtime(Subscription(queue, handler, concurrency=2, name="jobs")) as runtime:
            if not isinstance(claim, AdvisoryLock):  # whose claim counts the attempt, and waits for that
                await until(lambda: runtime.ledger("jobs").acked == 5, 5)
                assert b"locked" not in seen
            other.rollback()
            await until(lambda: runtime.ledger("jobs").acked == 6, 20)


async def test_a_settlement_and_a_renewal_beside_a_locked_row(mysql_database: str) -> None:
    """The others are said at once; the locked one is *not applied*, and is ours still; no wait of a second."""
    tables = MysqlTables(mysql_database).create()
    tables.add(b"a", b"b", b"c")
    async with open_link(tables.broker().queue(tables.table())) as link:
        received = await link.receive(3)
        with connect(mysql_database, autocommit=False) as other, other.cursor() as cursor:
            cursor.execute("SELECT * FROM jobs WHERE id = 2 FOR UPDATE")
            started = trio.current_time()
            assert list(await link.extend(received)) == []
            verdicts = list(await link.settle([say(each, Finish()) for each in received]))
            assert trio.current_time() - started < 0.9  # innodb_lock_wait_timeout is 1 s
            assert [verdicts[0], verdicts[2]] == [None, None]
            assert isinstance(verdicts[1], NotApplied)
            assert "another transaction has locked the row" in str(verdicts[1])
            other.rollback()
        assert list(await link.settle([say(received[1], Finish())])) == [None]
    assert tables.rows() == []


async def test_a_lease_that_somebody_else_has_now(mysql_database: str) -> None:
    """S-3.2: superseded, and the row is untouched."""
    tables = MysqlTables(mysql_database).create()
    tables.add(b"a")
    async with open_link(tables.broker().queue(tables.table())) as link:
        received = await link.receive(1)
        tables.run("UPDATE jobs SET locked_until = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR, attempt = 3")
        before = tables.row()
        (verdict,) = await link.settle([say(received[0], Finish())])
        assert isinstance(verdict, LeaseLost)
        assert tables.row() == before


async def test_a_message_beyond_max_allowed_packet(mysql_database: str) -> None:
    """Not accepted, by name, with nothing sent; the connection goes on."""
    tables = MysqlTables(mysql_database).create()
    ((packet,),) = tables.run("SELECT @@max_allowed_packet")
    broker = tables.broker()
    async with broker.connect():
        publisher = broker.publisher(tables.table())
        with pytest.raises(PublishNotAccepted, match="beyond max_allowed_packet"):
            await publisher.publish(b"x" * (packet // 2))
        await publisher.publish(b"a")
        await publisher.publish_many([b"x" * (packet // 5)] * 6)
    assert len(tables.rows()) == 7


async def test_an_advisory_claim_that_fails_keeps_no_lock(
    mysql_database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its statements fail by no fault of the row, behind GET_LOCK, and its connection lives on: the row is free."""
    tables = MysqlTables(mysql_database, leased=False).create()
    tables.run("CREATE TABLE refusing AS SELECT 1 AS one")
    why = "SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1290, MESSAGE_TEXT = 'not today'"
    body = f"BEGIN IF EXISTS (SELECT 1 FROM refusing) THEN {why}; END IF; END"  # noqa: S608 -- literals
    tables.run(f"CREATE TRIGGER say BEFORE UPDATE ON jobs FOR EACH ROW {body}")
    tables.add(b"a")
    done = trio.Event()

    async def handler(delivery: Delivery[bytes]) -> None:
        assert delivery.body == b"a"
        done.set()

    queue = tables.broker().queue(tables.table(), claim=AdvisoryLock("job-{id}"))
    async with open_runtime(Subscription(queue, handler, name="jobs")):
        await until(lambda: "not today" in caplog.text)
        tables.run("DELETE FROM refusing")
        with trio.fail_after(10):
            await done.wait()
