"""What the peer itself says of a delivery that we hold: superseded, settled at once, and its place returns."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
import trio.testing

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from links.abc import Link, Received, Settlement
from links.amqp import AmqpBroker
from links.amqp.embedded.broker import EmbeddedBroker
from links.amqp.engine.binding import lib
from links.amqp.engine.events import ACCEPTED, Arrived, DispositionOf, Spoken, State
from links.errors import LeaseLost
from settlement.amqp import Accepted
from settlement.ledger import Line
from settlement.plans import Plan
from tests.links.amqp_kit import Place, places
from tests.links.rabbit_kit import Rabbit, shapes
from tests.links.test_amqp_engine_kit import Pair, Transferred, answering
from tests.links.wire_kit import DISPOSITION, Seen

pytestmark = pytest.mark.amqp

RELEASED = int(State.RELEASED)


# --- the engine


def say(pair: Pair, number: int, state: int, *, settled: bool) -> None:
    """Let the server say something of a message that it has sent, as no method of ours does."""
    sent = {known: pointer for pointer, (_, known) in pair.server._reader.sent.items()}
    if state:
        lib.pn_delivery_update(sent[number], state)
    if settled:
        lib.pn_delivery_settle(sent[number])


@pytest.fixture
def pair() -> Pair:
    return answering()


def held(pair: Pair, count: int = 3) -> Transferred:
    pair.client.open()
    pair.server.open()
    session = pair.client.begin()
    pair.shuttle()
    link, theirs = pair.receiver(session)
    pair.client.grant(link, count)
    pair.shuttle()
    numbers = [pair.server.send(theirs, b"%d" % number) for number in range(count)]
    arrivals = [each for event in pair.take() if isinstance(event, Arrived) for each in event.arrivals]
    pair.took()
    return Transferred(session, link, theirs, numbers, arrivals)


@pytest.mark.parametrize("state", [int(state) for state in State])
@pytest.mark.parametrize("settled", [False, True])
def test_any_outcome_is_heard_and_conceded(pair: Pair, state: int, settled: bool) -> None:
    """Whatever it says of one, that one is named, and settled with the same state where it is not settled yet."""
    at = held(pair)
    say(pair, at.numbers[1], state, settled=settled)
    (spoken,) = pair.take()
    assert isinstance(spoken, Spoken)
    assert [arrival.pointer in spoken.which for arrival in at.arrivals] == [False, True, False]
    pair.client.concede(at.arrivals[1])
    assert not pair.client.settle(at.arrivals[1])
    outcomes = [event for event in pair.took() if isinstance(event, DispositionOf)]
    assert [(each.number, each.disposition and int(each.disposition.state)) for each in outcomes] == (
        [] if settled else [(at.numbers[1], state)]
    )


def test_a_settlement_without_a_state_is_heard(pair: Pair) -> None:
    at = held(pair)
    say(pair, at.numbers[0], 0, settled=True)
    (spoken,) = pair.take()
    assert isinstance(spoken, Spoken)
    assert spoken.which == {at.arrivals[0].pointer}


def test_what_is_no_outcome_is_passed_over(pair: Pair) -> None:
    """*received* (part 3.4.1) says how far a message has come, no more."""
    at = held(pair)
    say(pair, at.numbers[0], 0x23, settled=False)
    assert pair.take() == []
    assert pair.client.settle(at.arrivals[0])


def test_a_range_is_one_word(pair: Pair) -> None:
    """Many at once are told at once, so that who holds a thousand looks through them once."""
    at = held(pair, 100)
    for number in at.numbers:
        say(pair, number, RELEASED, settled=False)
    (spoken,) = pair.take()
    assert isinstance(spoken, Spoken)
    assert spoken.which == {arrival.pointer for arrival in at.arrivals}


def test_a_word_behind_our_own_changes_nothing(pair: Pair) -> None:
    """Both have spoken at once: ours is on the wire, and theirs names nothing that we hold."""
    at = held(pair)
    say(pair, at.numbers[0], RELEASED, settled=False)
    assert pair.client.settle(at.arrivals[0], ACCEPTED)
    for event in pair.take():
        assert isinstance(event, Spoken)
        assert all(arrival.pointer not in event.which for arrival in at.arrivals)
    pair.client.concede(at.arrivals[0])
    assert pair.client.ended is None


# --- the link


@attrs.define
class Scene:
    link: Link[bytes]
    broker: AmqpBroker
    embedded: EmbeddedBroker
    lost: list[tuple[bytes, Line]] = attrs.field(factory=list[tuple[bytes, Line]])

    def say(self, state: int, *bodies: bytes, settled: bool = False) -> None:
        """Let the broker say this of each delivery with such a body that is with the client."""
        peer = self.embedded.peers[0]
        for consumer in peer.consumers.values():
            sent = {known: pointer for pointer, (_, known) in peer.engine._reader.sent.items()}
            for number, message in list(consumer.unsettled.items()):
                if message.raw[-1:] in bodies and number in sent:
                    lib.pn_delivery_update(sent[number], state)
                    if settled:
                        lib.pn_delivery_settle(sent[number])
        peer.hurry()


@asynccontextmanager
async def attached(*bodies: bytes, credit: int = 2) -> AsyncGenerator[Scene]:
    embedded = EmbeddedBroker()
    broker = AmqpBroker("amqp://localhost", connect=embedded.connect)
    lost: list[tuple[bytes, Line]] = []

    def tell(received: Received[Any], line: Line) -> None:
        lost.append((received.delivery.body, line))
        link.forget(received)

    for body in bodies:
        embedded.publish("orders", b"\x00\x53\x75\xa0\x01" + body)
    source = broker.queue("orders", credit=credit)
    async with embedded.running(), broker.connect(), source.attach("s", tell, 5.0) as link:
        yield Scene(link, broker, embedded, lost)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(5):
        while not condition():
            await trio.sleep(0.01)


async def test_a_delivery_in_hand_is_superseded_and_its_place_returns(autojump_clock: trio.testing.MockClock) -> None:
    """Told once, in the right line; the feed goes on with what comes next; a late verb is refused and says nothing."""
    async with attached(b"a", b"b", b"c") as at:
        (a, b) = await at.link.receive(2)
        at.say(RELEASED, b"a")
        await until(lambda: bool(at.lost))
        assert at.lost == [(b"a", Line.SUPERSEDED)]
        (again,) = await at.link.receive(1)
        assert again.delivery.body == b"a"  # the broker has it at its old place
        verdicts = await at.link.settle(
            [Settlement(a, Plan(Line.ACKED, Accepted())), Settlement(b, Plan(Line.ACKED, Accepted()))]
        )
        assert [type(verdict) for verdict in verdicts] == [LeaseLost, type(None)]
        assert at.lost == [(b"a", Line.SUPERSEDED)]


async def test_what_waits_for_its_taker_is_nobodys(autojump_clock: trio.testing.MockClock) -> None:
    """One that has come and was not handed over is settled, its credit goes out again, and nobody is told."""
    async with attached(b"a", b"b", b"c", b"d") as at:
        receiver = at.link._receiver  # type: ignore[attr-defined]
        receiver.grant(3)
        await until(lambda: len(receiver.arrived) == 3)
        at.say(RELEASED, b"b")
        await until(lambda: bool(at.embedded.said))
        await until(lambda: len(receiver.arrived) == 3)
        assert at.lost == []
        taken = [each.delivery.body for each in await at.link.receive(4)]
        assert sorted(taken) == [b"a", b"b", b"c"]
        assert taken != [b"a", b"b", b"c"]  # it has come again, behind the others


async def test_a_word_twice_is_told_once(autojump_clock: trio.testing.MockClock) -> None:
    """A second word, on what is conceded already, finds nobody."""
    async with attached(b"a", b"b") as at:
        await at.link.receive(1)
        at.say(RELEASED, b"a")
        at.say(int(State.ACCEPTED), b"a", settled=True)
        await until(lambda: bool(at.lost))
        await trio.sleep(1)
        assert at.lost == [(b"a", Line.SUPERSEDED)]


async def test_a_whole_hand_is_superseded_at_once(autojump_clock: trio.testing.MockClock) -> None:
    """Every delivery of a range is told, and the next ones come into all the places."""
    bodies = [b"%d" % number for number in range(8)]
    async with attached(*bodies, credit=8) as at:
        taken: list[Any] = []
        while len(taken) < 8:
            taken += await at.link.receive(8 - len(taken))
        at.say(int(State.MODIFIED), *bodies)
        await until(lambda: len(at.lost) == 8)
        assert sorted(at.lost) == [(body, Line.SUPERSEDED) for body in bodies]


# --- RabbitMQ's consumer timeout


@pytest.mark.servers
@shapes(version="4.3", kind="quorum")
async def test_rabbitmqs_consumer_timeout_takes_a_delivery_back(rabbit: Rabbit) -> None:
    """`x-consumer-timeout`: 4.3 says *released* of what is held too long; each is superseded, and the feed goes on."""
    name = await rabbit.queue({"x-consumer-timeout": 1000})
    broker = AmqpBroker(rabbit.url)
    lost: list[tuple[bytes, Line]] = []

    def tell(received: Received[Any], line: Line) -> None:
        lost.append((received.delivery.body, line))
        link.forget(received)

    with trio.fail_after(30):
        async with broker.connect():
            for body in (b"a", b"b"):
                await broker.publisher(name).publish(body)
            async with broker.queue(name).attach("s", tell, 5.0) as link:
                taken: list[Received[bytes]] = []
                while len(taken) < 2:
                    taken += await link.receive(2 - len(taken))
                again = list(await link.receive(1))  # nothing else is there: it comes again
                assert again[0].delivery.body in (b"a", b"b")
                assert sorted(lost)[:2] == [(b"a", Line.SUPERSEDED), (b"b", Line.SUPERSEDED)]
                while len(again) < 2:
                    again += await link.receive(2 - len(again))
                verdicts = await link.settle([Settlement(each, Plan(Line.ACKED, Accepted())) for each in again])
                assert verdicts == [None, None]
                await link.proved()
    await rabbit.until_depth(name, 0)


@places("4.3-quorum")
async def test_rabbitmq_hears_released_and_settled(place: Place, clock: trio.abc.Clock) -> None:
    """Its word is answered by its own state, settled, and by nothing else."""
    rabbit: Rabbit = place.rabbit  # type: ignore[attr-defined]
    name = await rabbit.queue({"x-consumer-timeout": 1000})
    broker = place.broker()
    with trio.fail_after(30):
        async with broker.connect():
            await broker.publisher(name).publish(b"a")
            gone = trio.Event()
            async with broker.queue(name).attach("s", lambda _received, _line: gone.set(), 5.0) as link:
                await link.receive(1)
                await gone.wait()
    said: list[Seen] = [each for each in place.trace(DISPOSITION) if each.state and each.state[0] == RELEASED]
    assert [(each.ours, bool(each.settled)) for each in said] == [(False, False), (True, True)]
