"""Random weather on `links.amqp`, in virtual time: whatever happens, no message is lost and the books balance.

Each seed draws a scenario, plays it (tests/weather/weather.py) against an `EmbeddedBroker` at the other end of cables
that fail, and is judged by the invariants of tests/weather/story.py. A failure prints the command that repeats it.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import trio
import trio.testing

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

import links.amqp.publisher
from actors import Subscription, open_runtime
from links.amqp.broker import AmqpBroker
from links.amqp.embedded.broker import EmbeddedBroker
from links.amqp.engine.events import ACCEPTED
from links.amqp.engine.receiver import Receiver
from links.amqp.link import AmqpLink
from links.amqp.publisher import AmqpPublisher
from links.amqp.wire.messages import copy
from links.errors import LinkBroken
from settlement import Ack, Copies, Delivery, Hold, Letter, Native, Outcome, RetryAfter
from settlement.amqp import Delays
from tests.weather import mistakes
from tests.weather.amqp_story import virtual_wall
from tests.weather.amqp_world import AmqpWorld
from tests.weather.schedule import chosen, sized
from tests.weather.weather import run_seed

pytestmark = pytest.mark.amqp

SEEDS = chosen("SETTLEMENT_SEED", range(sized(fast=50, full=120, long=5000)))


@pytest.mark.parametrize("seed", SEEDS)
def test_weather(seed: int) -> None:
    """Nothing is lost, in any weather; in fair weather nothing is said twice either."""
    run_seed(AmqpWorld, seed)


@pytest.mark.parametrize(
    "delays", [Copies(), Hold(1, max_delay=3600.0), Native()], ids=lambda each: type(each).__name__
)
async def test_an_hour_takes_a_moment(delays: Delays, autojump_clock: trio.testing.MockClock) -> None:
    """`RetryAfter` of one hour over the real wire, heartbeats and all, whoever keeps the message meanwhile."""
    began = time.perf_counter()
    embedded, times, attempts = EmbeddedBroker(), list[float](), list[int]()
    broker = AmqpBroker("amqp://localhost", connect=embedded.connect)

    async def handle(delivery: Delivery[bytes]) -> Outcome:
        times.append(trio.current_time())
        attempts.append(delivery.attempt)
        return RetryAfter(3600.0) if delivery.attempt == 1 else Ack()

    subscription = Subscription(broker.queue("orders", delays=delays), handle)
    with virtual_wall():
        async with embedded.running(), open_runtime(subscription) as runtime:
            await broker.publisher("orders").publish(b"1")
            with trio.fail_after(3700.0):
                while runtime.ledger("orders").acked == 0:
                    await trio.sleep(1.0)
            assert not embedded.ready("orders")
    assert attempts == [1, 2]
    assert times[1] - times[0] == pytest.approx(3600.0, abs=0.1)
    assert (runtime.ledger("orders").delayed, runtime.ledger("orders").balanced) == (1, True)
    assert time.perf_counter() - began < 5.0


# --- mistakes that are planted


def booked_when_written(patch: pytest.MonkeyPatch) -> None:
    """What is said is booked before anybody has seen it."""
    patch.setattr(AmqpLink, "proves", False)


def proved_by_writing(patch: pytest.MonkeyPatch) -> None:
    """The same, by a proof that is none."""

    async def proved(link: AmqpLink) -> None:
        await link.flush()

    patch.setattr(AmqpLink, "proved", proved)


def publish_sent_again(patch: pytest.MonkeyPatch) -> None:
    """A publish that broke on the wire is sent again by itself."""
    send = AmqpPublisher.send

    async def sending(publisher: AmqpPublisher, letter: Letter) -> None:
        try:
            await send(publisher, letter)
        except LinkBroken:
            await send(publisher, letter)

    patch.setattr(AmqpPublisher, "send", sending)


def credit_given_once(patch: pytest.MonkeyPatch) -> None:
    """Places return, and nobody tells the peer."""
    grant = Receiver.grant

    def granting(receiver: Receiver, credit: int) -> None:
        if not receiver.__dict__.setdefault("granted", False):
            receiver.__dict__["granted"] = True
            grant(receiver, credit)

    patch.setattr(Receiver, "grant", granting)


def goodbye_that_accepts(patch: pytest.MonkeyPatch) -> None:
    """What is in hand at the end is accepted, not left."""
    on_arrived, say_goodbye = Receiver.on_arrived, AmqpLink.say_goodbye

    def arrived(receiver: Receiver, arrivals: Any) -> None:
        receiver.__dict__.setdefault("all", []).extend(arrivals)
        on_arrived(receiver, arrivals)

    async def saying(link: AmqpLink, goodbye: float) -> None:
        for arrival in link._receiver.__dict__.get("all", ()):
            link._receiver.settle(arrival, ACCEPTED)
        await say_goodbye(link, goodbye)

    patch.setattr(Receiver, "on_arrived", arrived)
    patch.setattr(AmqpLink, "say_goodbye", saying)


def copies_not_counted(patch: pytest.MonkeyPatch) -> None:
    """A copy goes out as its original came."""

    def splicing(raw: bytes, *, user: bytes | None = None, **_: object) -> bytes:
        return copy(raw, user=user)

    patch.setattr(links.amqp.publisher, "copy", splicing)


def too_much_credit(patch: pytest.MonkeyPatch) -> None:
    """One more place is given back than was free."""
    grant = Receiver.grant
    patch.setattr(Receiver, "grant", lambda receiver, credit: grant(receiver, credit + 1))


OWN = mistakes.named(
    booked_when_written,
    proved_by_writing,
    publish_sent_again,
    credit_given_once,
    goodbye_that_accepts,
    copies_not_counted,
    too_much_credit,
)
MISTAKES = {name: each for name, each in (mistakes.MISTAKES | OWN).items() if name != "verb_not_repeated"}
"""The peer does not answer a verb: nothing is *not applied* here."""


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests can fail."""
    MISTAKES[mistake](monkeypatch)
    assert mistakes.noticed(AmqpWorld), "nobody noticed"
