"""links.amqp.engine.client_connection: credit, turns, coalescing, and what proves a settlement; in virtual time."""

from __future__ import annotations

import pytest
import trio
import trio.testing

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from links.amqp.embedded.broker import EmbeddedBroker
from links.amqp.engine.client_connection import ClientConnection
from links.amqp.engine.engine import Engine
from links.amqp.engine.events import ACCEPTED, FAILED
from links.amqp.engine.receiver import Receiver
from links.amqp.engine.settings import Settings
from links.errors import ConnectionBroken
from tests.links.test_amqp_client_connection import scene

pytestmark = pytest.mark.amqp


async def drain(receiver: Receiver) -> None:
    handle = receiver._handle
    assert handle is not None
    if receiver.driver.engine.drain(handle):
        receiver.driver.hurry()
        while handle.draining:
            await trio.sleep(0.001)


async def test_a_drain_takes_the_credit_back(autojump_clock: trio.testing.MockClock) -> None:
    async with scene() as at:
        receiver = await at.receiver()
        at.broker.publish("orders", b"x")
        receiver.grant(10)
        await drain(receiver)
        assert len(receiver.arrived) == 1
        at.broker.publish("orders", b"y")
        await trio.sleep(1)
        assert (len(receiver.arrived), [each.raw for each in at.broker.store.queue("orders")]) == (1, [b"y"])
        receiver.grant(1)
        await trio.sleep(1)
        assert len(receiver.arrived) == 2


async def test_a_drain_ends_where_no_credit_is_left(autojump_clock: trio.testing.MockClock) -> None:
    async with scene() as at:
        receiver = await at.receiver()
        with trio.fail_after(1):
            await drain(receiver)
        for body in (b"x", b"y", b"z"):
            at.broker.publish("orders", body)
        receiver.grant(2)
        with trio.fail_after(1):
            await drain(receiver)
        assert (len(receiver.arrived), [each.raw for each in at.broker.store.queue("orders")]) == (2, [b"z"])


async def test_senders_wait_for_credit_in_turn(autojump_clock: trio.testing.MockClock) -> None:
    async with scene() as at:
        sender = await at.sender()
        await trio.sleep(1)
        at.peer.freeze()
        sent = 0

        async def send(number: int) -> None:
            nonlocal sent
            outcome = await (await sender.send(b"%03d" % number)).answered()
            sent += outcome == ACCEPTED

        async with trio.open_nursery() as nursery:
            for number in range(600):
                nursery.start_soon(send, number)
                await trio.testing.wait_all_tasks_blocked()
            assert (sender.credit, len(sender.waiting)) == (0, 600 - 256)
            assert sender.send_nowait(b"x") is None
            at.peer.thaw()
        assert (sent, sender.unsettled) == (600, {})
        assert [each.raw for each in at.broker.store.queue("orders")] == [b"%03d" % number for number in range(600)]


async def test_a_sender_that_is_cancelled_in_the_queue_sends_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with scene() as at:
        sender = await at.sender()
        await trio.sleep(1)
        at.peer.freeze()
        while sender.send_nowait(b"x"):
            pass
        with trio.move_on_after(1):
            await sender.send(b"never")
        at.peer.thaw()
        await (await sender.send(b"last")).answered()
        assert [each.raw for each in at.broker.store.queue("orders")][-2:] == [b"x", b"last"]


async def test_settlements_of_many_reads_become_one_frame(autojump_clock: trio.testing.MockClock) -> None:
    """Orders that are not urgent wait for others up to 2 ms, or until half of the credit is to be written."""
    async with scene() as at:
        receiver = await at.receiver()
        for number in range(1000):
            at.broker.publish("orders", b"%d" % number)
        receiver.grant(200)
        pulls, seen = at.connection.pulls, 0
        while seen < 1000:
            for each in await receiver.receive(7):
                receiver.settle(each)
                receiver.grant(1)
                seen += 1
        await receiver.proved()
        assert at.connection.pulls - pulls < 30
        assert {said.disposition for said in at.broker.said} == {ACCEPTED}


async def test_a_settlement_alone_is_written_within_the_linger(autojump_clock: trio.testing.MockClock) -> None:
    async with scene() as at:
        receiver = await at.receiver()
        at.broker.publish("orders", b"x")
        receiver.grant(100)
        [arrival] = await receiver.receive(1)
        began = trio.current_time()
        receiver.settle(arrival, FAILED)
        while not at.broker.said:
            await trio.sleep(0.0001)
        assert trio.current_time() - began < 0.003


async def test_a_peer_without_echo_gives_the_weaker_proof(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any frame that comes after the write: at the latest the next heartbeat."""
    monkeypatch.setattr("links.amqp.embedded.server_engine.wants_echo", lambda _frame: False)
    async with scene() as at:
        receiver = await at.receiver()
        for _ in range(2):
            at.broker.publish("orders", b"x")
            receiver.grant(1)
            [arrival] = await receiver.receive(1)
            receiver.settle(arrival)
            assert not await receiver.proved(patience=0.5)
            assert at.peer.unsettled == 0


async def test_written_and_unproved_at_a_break_is_known_to_be_unknown(autojump_clock: trio.testing.MockClock) -> None:
    async with scene() as at:
        receiver = await at.receiver()
        at.broker.publish("orders", b"x")
        receiver.grant(1)
        [arrival] = await receiver.receive(1)
        at.peer.freeze()
        receiver.settle(arrival)
        await at.connection.written()
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def cut() -> None:
                await trio.sleep(0.5)
                at.peer.sever()

            with pytest.raises(ConnectionBroken):
                await receiver.proved(60.0)
        assert [each.raw for each in at.broker.store.queue("orders")] == [b"x"]


async def test_a_detach_that_was_answered_is_a_proof(autojump_clock: trio.testing.MockClock) -> None:
    async with scene() as at:
        receiver = await at.receiver()
        for body in (b"x", b"y"):
            at.broker.publish("orders", body)
        receiver.grant(2)
        first, second = await receiver.receive(2)
        receiver.settle(first)
        receiver.detach()
        await receiver.detached()
        assert not receiver.settle(second)
        assert [each.raw for each in at.broker.store.queue("orders")] == [b"y"]


async def test_a_bug_of_a_hearer_leaves_the_connection_as_it_is(autojump_clock: trio.testing.MockClock) -> None:
    broker = EmbeddedBroker()
    async with broker.running():
        connection = ClientConnection(broker.connect_in_memory(), Engine(Settings("client")))

        def bug(_event: object) -> None:
            raise ZeroDivisionError

        connection._hear = bug
        with pytest.raises(ZeroDivisionError):
            await connection.run()
        with pytest.raises(ConnectionBroken):
            await connection.opened()
