"""links.amqp.embedded: refusals, bounds, weather, and what a test may look at."""

from __future__ import annotations

import random
from functools import partial

import pytest
import trio
import trio.testing

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from links.amqp.embedded.broker import EmbeddedBroker
from links.amqp.embedded.exchange import Consumer
from links.amqp.embedded.store import Message
from links.amqp.engine.events import (
    ACCEPTED,
    FAILED,
    REJECTED,
    RELEASED,
    Condition,
    State,
)
from links.errors import ConnectionBroken, LinkBroken, LinkRefused
from tests.links.test_amqp_embedded import client, message, seen, told

pytestmark = pytest.mark.amqp


async def test_an_attach_is_refused_on_request(autojump_clock: trio.testing.MockClock) -> None:
    broker = EmbeddedBroker()
    async with broker.running(), client(broker) as at:
        broker.refuse("q", Condition("amqp:unauthorized-access", "not yours"))
        for attach in (at.receiver, at.sender):
            with pytest.raises(LinkRefused, match="not yours"):
                await attach("q")
        broker.refuse("q", None)
        await at.receiver("q")


async def test_a_message_that_is_too_long_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    """Our own sender does not send it; to a client that does not look at the limit the broker says no."""
    broker = EmbeddedBroker(max_message=100_000)
    async with broker.running(), client(broker) as at:
        sender = await at.sender("q")
        with pytest.raises(LinkRefused, match="a message of 200000 bytes, and the peer takes 100000 at most"):
            await sender.send(b"x" * 200_000)
        sender.max_message = None
        sent = await sender.send(b"x" * 200_000)
        outcome = await sent.answered()
        assert outcome is not None
        assert outcome.state is State.REJECTED
        assert str(outcome.condition) == "amqp:link:message-size-exceeded: more than 100000 bytes"
        with pytest.raises(LinkBroken, match="message-size-exceeded"):
            await sender.until_broken()
        assert broker.ready("q") == []


async def test_big_messages_go_both_ways_within_the_bound(autojump_clock: trio.testing.MockClock) -> None:
    """What is sent ahead of the last write is bounded, whatever credit a client gives."""
    broker = EmbeddedBroker()
    async with broker.running(), client(broker) as at:
        sender, receiver = await at.sender("q"), await at.receiver("q", 1000)
        most = 0
        deliver = broker.peers[0].deliver

        def watched(consumer: Consumer, message: Message) -> None:
            nonlocal most
            deliver(consumer, message)
            most = max(most, broker.peers[0].ahead)

        broker.peers[0].deliver = watched  # type: ignore[method-assign]
        bodies = [bytes([number]) * 400_000 for number in range(30)]
        async with trio.open_nursery() as nursery:
            for body in bodies:
                nursery.start_soon(sender.send, body)
        got: list[bytes] = []
        with trio.fail_after(60):
            while len(got) < 30:
                got += [each.raw for each in await receiver.receive(30)]
        assert sorted(got) == bodies
        assert most < 1_500_000


async def test_a_client_that_only_reads_slowly_costs_no_more_than_the_bound(
    autojump_clock: trio.testing.MockClock,
) -> None:
    broker = EmbeddedBroker()
    async with broker.running(), client(broker) as at:
        await at.receiver("q", 100_000)
        await trio.sleep(1)
        broker.peers[0].freeze()
        for _ in range(10_000):
            broker.publish("q", message(b"x" * 200))
        await trio.sleep(1)
        for _ in range(10_000):
            broker.publish("q", message(b"x" * 200))
        assert broker.peers[0].ahead < 1_100_000
        assert len(broker.store.queue("q")) > 5_000
        broker.peers[0].thaw()
        await trio.sleep(1)
        assert broker.unsettled("q") == 20_000


async def test_a_drop_gives_back_in_the_order_of_the_queue(autojump_clock: trio.testing.MockClock) -> None:
    broker = EmbeddedBroker()
    async with broker.running():
        for number in range(6):
            broker.publish("q", message(b"%d" % number))
        async with client(broker) as one:
            receiver = await one.receiver("q", 4)
            taken = await receiver.receive(4)
            receiver.settle(taken[1])
            await receiver.proved()
            broker.peers[0].sever()
            with pytest.raises(ConnectionBroken):
                await receiver.until_broken()
        async with client(broker) as other:
            found = await seen(await other.receiver("q", 10), 5)
        assert found == [(b"0", 1), (b"2", 1), (b"3", 1), (b"4", None), (b"5", None)]


async def test_dispositions_are_kept_for_a_look(autojump_clock: trio.testing.MockClock) -> None:
    broker = EmbeddedBroker(keep=3)
    async with broker.running(), client(broker) as at:
        receiver = await at.receiver("q", 10)
        for number in range(5):
            broker.publish("q", message(b"%d" % number))
        await trio.sleep(1)
        assert (broker.peers[0].unsettled, broker.peers[0].container) == (5, "client")
        for arrival in await receiver.receive(5):
            receiver.settle(arrival, REJECTED)
        await receiver.proved()
        assert [(said.address, said.disposition) for said in broker.said] == [("q", REJECTED)] * 3
    assert broker.peers == []


async def test_many_connections_at_once_lose_nothing(autojump_clock: trio.testing.MockClock) -> None:
    """Weather: clients that come, take, fail and are cut; every message is accepted at last."""
    broker = EmbeddedBroker()
    done: set[bytes] = set()

    async def worker(seed: int) -> None:
        dice = random.Random(seed)  # noqa: S311
        while broker.ready("q") or broker.unsettled("q"):
            async with client(broker) as at:
                with trio.move_on_after(0.5 + seed / 10):
                    receiver = await at.receiver("q", 7)
                    while True:
                        for arrival in await receiver.receive(7):
                            body = told(arrival)[0]
                            if dice.random() < 0.7:
                                receiver.settle(arrival)
                                await receiver.proved()
                                done.add(body)
                            else:
                                receiver.settle(arrival, (FAILED, RELEASED)[seed % 2])
                            receiver.grant(1)
                if seed % 2:
                    at.connection.break_off("cut by the test")

    async with broker.running():
        for number in range(200):
            broker.publish("q", message(b"%d" % number))
        with trio.fail_after(600):
            async with trio.open_nursery() as nursery:
                for seed in range(6):
                    nursery.start_soon(partial(worker, seed))
        await trio.sleep(100)
        assert (broker.ready("q"), broker.unsettled("q"), broker.peers) == ([], 0, [])
        assert sum(said.disposition == ACCEPTED for said in broker.said) == 200
        assert len(done) > 150  # the rest was accepted, and the proof was cut off


async def test_it_listens_on_loopback_alone() -> None:
    broker = EmbeddedBroker()
    async with broker.serve() as url:
        assert url.startswith("amqp://127.0.0.1:")
        with pytest.raises(RuntimeError, match="does not run"):
            EmbeddedBroker().connect_in_memory()


async def test_an_exception_of_the_block_leaves_bare() -> None:
    for enter in (EmbeddedBroker().running, EmbeddedBroker().serve):
        with pytest.raises(ZeroDivisionError):
            async with enter():
                raise ZeroDivisionError
