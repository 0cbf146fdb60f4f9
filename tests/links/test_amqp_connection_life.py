"""links.amqp.connection_life: a peer that does not answer holds up nobody for ever."""

from __future__ import annotations

import logging

import attrs
import pytest
import trio
import trio.testing

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from actors import Subscription, open_runtime
from links.amqp import AmqpBroker, EmbeddedBroker
from links.errors import PublishNotAccepted
from settlement import Delivery

pytestmark = pytest.mark.amqp


async def handler(_: Delivery[bytes]) -> None:
    await trio.lowlevel.checkpoint()


async def test_a_mute_management_is_waited_for_once(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """DESIGN 6, Counting: where the type of a queue cannot be read there is one warning for it, and work goes on."""
    embedded = EmbeddedBroker()
    embedded.settings = attrs.evolve(
        embedded.settings, properties={"product": "RabbitMQ", "version": "4.3.6"}
    )  # it takes /management for a queue, and answers nothing
    broker = AmqpBroker("amqp://localhost", connect=embedded.connect)
    async with embedded.running():
        began = trio.current_time()
        subscriptions = [Subscription(broker.queue(name), handler) for name in ("a", "b", "c")]
        async with open_runtime(*subscriptions):
            assert 10.0 <= trio.current_time() - began < 11.0
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sorted(text.partition(":")[0] for text in said) == [f"subscription {name!r}" for name in ("a", "b", "c")]
    assert all("cannot be read" in text for text in said)


async def test_a_link_of_a_publisher_that_is_never_answered_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    """The message is nowhere but with the user, and the next one to that address does not wait for it."""
    embedded = EmbeddedBroker(idle_timeout=0.0)
    broker = AmqpBroker("amqp://localhost", connect=embedded.connect, heartbeat=1000.0)
    async with embedded.running(), broker.connect():
        embedded.peers[0].freeze()
        began = trio.current_time()
        with pytest.raises(PublishNotAccepted, match="no answer to the attach within 30 s; nothing was sent"):
            await broker.publisher("orders").publish(b"x")
        assert trio.current_time() - began == pytest.approx(30.0, abs=0.5)
        embedded.peers[0].thaw()
        await broker.publisher("orders").publish(b"y")
    assert len(embedded.ready("orders")) == 1


async def test_a_copy_keeps_the_user_id_of_who_is_logged_in_now(autojump_clock: trio.testing.MockClock) -> None:
    """DESIGN 6: no user-id that is not ours; with several hosts, who we are is a matter of the connection."""
    embedded = EmbeddedBroker(users={"anna": "1", "otto": "2"})
    broker = AmqpBroker(["amqp://anna:1@localhost", "amqp://otto:2@localhost"], connect=embedded.connect)
    async with embedded.running():
        for user in (b"anna", b"otto", b"anna"):
            async with broker.connect():
                assert broker.user == user
