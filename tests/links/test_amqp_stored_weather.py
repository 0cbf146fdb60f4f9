"""`Stored(queue)` when something breaks, is drained or cancelled: nothing is lost, and nothing is early."""

from __future__ import annotations

from typing import Any

import pytest
import trio

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from actors import Runtime, Subscription, forwarding, open_runtime
from links.amqp import AmqpPublisher
from links.amqp.engine.events import Condition
from links.amqp.link import AmqpLink
from links.amqp.publisher import Encoded
from links.sql import SqlPublisher
from links.sql.lease_link import LeaseLink
from settlement import Ack, Delivery, Outcome, RetryAfter, Stored
from tests.links.amqp_kit import Handler, until
from tests.links.sqlite_kit import now
from tests.links.stored_kit import World, serving, world

__all__ = ["world"]

pytestmark = [pytest.mark.amqp, pytest.mark.sqlite]

MESSAGE = b"\x00\x53\x75\xa0\x01x"
ORDERS = '{"amqp-queue": "orders"}'
CLOSED = '{"amqp-queue": "closed"}'


# --- the address


async def test_an_address_that_refuses_is_tried_again_and_shown_as_degraded(world: World) -> None:
    """DESIGN 3.6: never dropped, never skipped; the copies to other addresses go on."""
    world.server.refuse("closed", Condition("amqp:not-found", "it was deleted"))
    world.put(MESSAGE, CLOSED)
    world.put(MESSAGE, ORDERS)
    handler = Handler()
    async with serving(world, handler) as (_, runtime):
        await handler.has(b"x")
        await until(lambda: runtime.ledger("jobs (stored)").delayed >= 2)
        (degraded,) = runtime.statistics()["jobs (stored)"].degraded
        assert degraded.startswith("forwarding to closed: ")
        assert "it was deleted" in degraded
        assert world.database.row()["attempt"] >= 3
        world.server.refuse("closed", None)
        await until(lambda: len(world.server.ready("closed")) == 1)
        await until(lambda: not world.database.rows())
        assert runtime.statistics()["jobs (stored)"].degraded == ()


async def test_rows_go_back_while_the_broker_is_away(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are put back, so that another process may forward them; degraded; forwarded when it is there again."""
    monkeypatch.setattr(forwarding, "SLOW", 0.1)
    handler = Handler()
    async with serving(world, handler) as (_, runtime):
        world.down = True
        await world.cut()
        world.put(MESSAGE, ORDERS)
        await until(lambda: runtime.ledger("jobs (stored)").delayed >= 2)
        assert runtime.statistics()["jobs (stored)"].degraded == (
            "forwarding to orders: amqp://localhost:5672 is between two connections",
        )
        assert world.database.row()["locked_until"] is None
        world.down = False
        await handler.has(b"x")
        await until(lambda: not world.database.rows())
        assert runtime.statistics()["jobs (stored)"].degraded == ()


# --- the store


async def test_a_store_that_refuses_keeps_the_original(world: World) -> None:
    """DESIGN 3.6: it is stored again with backoff, unsettled meanwhile; degraded; others go on."""
    world.database.run(
        "CREATE TRIGGER small BEFORE INSERT ON jobs BEGIN SELECT RAISE(ABORT, 'too long for the column'); END"
    )
    handler = Handler({b"late": [RetryAfter(0.1)]})
    async with serving(world, handler, concurrency=2) as (broker, runtime):
        for body in (b"late", b"one", b"two", b"three"):
            await broker.publisher("orders").publish(body)
        await handler.has(b"late", b"one", b"two", b"three")
        await until(lambda: len(runtime.statistics()["orders"].degraded) == 1)
        (degraded,) = runtime.statistics()["orders"].degraded
        assert degraded.startswith("publishing to jobs: ")
        assert "too long for the column" in degraded
        await until(lambda: (runtime.ledger("orders").acked, runtime.ledger("orders").in_hand) == (3, 1))
        world.database.run("DROP TRIGGER small")
        await handler.has(b"late", b"late")
        assert runtime.statistics()["orders"].degraded == ()
    assert [each.attempt for each in handler.of(b"late")] == [1, 2]


async def test_a_store_that_refuses_until_a_drain_ends_gives_the_original_back(world: World) -> None:
    """DESIGN 3.6: one last try, then *modified*."""
    world.database.run("CREATE TRIGGER small BEFORE INSERT ON jobs BEGIN SELECT RAISE(ABORT, 'too long'); END")
    handler = Handler({b"late": [RetryAfter(0.1)]})
    async with serving(world, handler, grace=0.1) as (broker, runtime):
        await broker.publisher("orders").publish(b"late")
        await until(lambda: bool(runtime.statistics()["orders"].degraded))
    assert (runtime.ledger("orders").retried, runtime.ledger("orders").delayed) == (1, 0)
    assert [letter.body for letter in world.server.ready("orders")] == [b"late"]


async def test_a_break_between_store_and_accept_doubles_and_loses_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DESIGN 3.7: twice beats lost."""
    send = SqlPublisher.send
    cuts = 0

    async def stored(self: SqlPublisher, letter: Any) -> None:
        nonlocal cuts
        await send(self, letter)
        cuts += 1
        if cuts == 1:
            await world.cut()

    monkeypatch.setattr(SqlPublisher, "send", stored)
    handler = Handler({b"late": [RetryAfter(0.3)] * 2})
    async with serving(world, handler) as (broker, runtime):
        await broker.publisher("orders").publish(b"late")
        await handler.has(*[b"late"] * 4)
        await until(lambda: runtime.ledger("orders").acked == 2)
    assert world.database.rows() == []
    assert (runtime.ledger("orders").lost, runtime.ledger("orders").balanced) == (0, True)


# --- a drain


async def test_a_drain_stores_what_is_answered_meanwhile_and_forwards_nothing(world: World) -> None:
    """The forwarding stops at once; the table's broker stays open until the last delay is in it."""
    entered = trio.Event()

    class Late(Handler):
        async def __call__(self, delivery: Delivery[Any]) -> Outcome | None:
            self.note(delivery)
            entered.set()
            await until(lambda: runtime.ledger("jobs (stored)").received == 0 and runtime.draining)
            await trio.sleep(0.2)
            return RetryAfter(0.0)

    async with serving(world, Late()) as (broker, runtime):
        await broker.publisher("orders").publish(b"late")
        await entered.wait()
    assert runtime.ledger("orders").delayed == 1
    assert runtime.ledger("jobs (stored)").received == 0
    assert (world.server.ready("orders"), world.server.unsettled("orders")) == ([], 0)
    assert world.database.row()["locked_until"] is None


async def test_what_waits_at_the_end_stays_and_is_not_early(world: World) -> None:
    """Another run forwards it, when it is due."""
    handler = Handler({b"late": [RetryAfter(1.0)]})
    async with serving(world, handler) as (broker, runtime):
        await broker.publisher("orders").publish(b"late")
        await until(lambda: runtime.ledger("orders").delayed == 1)
        due = world.database.row()["retry_after"]
    assert (world.server.ready("orders"), len(world.database.rows())) == ([], 1)
    async with serving(world, handler) as (_, runtime):
        await handler.has(b"late", b"late")
        assert now() >= due
        await until(lambda: runtime.ledger("jobs (stored)").acked == 1)
    assert [each.attempt for each in handler.deliveries] == [1, 2]
    assert world.database.rows() == []


# --- a cancellation


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["store", "accept", "forward", "finish"])
async def test_a_cancellation_at_a_step_loses_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, step: str, when: str
) -> None:
    """DESIGN 4: what was in hand is unsettled; the next run ends it, at worst twice."""
    steps: dict[str, tuple[Any, str]] = {
        "store": (SqlPublisher, "send"),
        "accept": (AmqpLink, "settle"),
        "forward": (AmqpPublisher, "send"),
        "finish": (LeaseLink, "settle"),
    }
    owner, method = steps[step]
    original = getattr(owner, method)
    scope = trio.CancelScope()

    async def cancelled(self: Any, what: Any) -> Any:
        mine = step != "forward" or isinstance(what, Encoded)
        if mine and when == "before":
            scope.cancel()
        result = await original(self, what)
        if mine:
            scope.cancel()
        return result

    handler, books = FirstLater(), list[Runtime]()
    with monkeypatch.context() as patched, scope:
        patched.setattr(owner, method, cancelled)
        async with serving(world, handler) as (broker, runtime):
            books.append(runtime)
            await broker.publisher("orders").publish(b"late")
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert all(books[0].ledger(name).balanced for name in ("orders", "jobs (stored)"))
    assert books[0].ledger("orders").lost == 0
    async with serving(world, handler) as (_, runtime):
        await until(lambda: not world.database.rows() and not _left(world))
    assert max(each.attempt for each in handler.deliveries) == 2
    assert 2 <= len(handler.bodies) <= 4
    assert runtime.ledger("orders").balanced


class FirstLater(Handler):
    """Delays what comes for the first time."""

    async def __call__(self, delivery: Delivery[Any]) -> Outcome:
        self.note(delivery)
        await trio.lowlevel.checkpoint()
        return RetryAfter(0.2) if delivery.attempt == 1 else Ack()


def _left(world: World) -> int:
    return len(world.server.ready("orders")) + world.server.unsettled("orders")


async def test_a_shared_connection_of_the_table_is_used(world: World) -> None:
    """A broker that somebody keeps open is shared, and not closed."""
    handler = Handler({b"late": [RetryAfter(0.1)]})
    queue = world.store()
    broker = world.amqp()
    async with queue.broker.connect():
        async with open_runtime(Subscription(broker.queue("orders", delays=Stored(queue)), handler)):
            await broker.publisher("orders").publish(b"late")
            await handler.has(b"late", b"late")
        assert queue.broker.is_open
