"""The peer's limits are ours to keep before we send: links on a session, sessions, the length of a message."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from actors import Subscription, open_runtime
from links.amqp import AmqpBroker
from links.amqp import link as link_module
from links.amqp.addresses import Raw
from links.amqp.embedded.broker import EmbeddedBroker
from links.amqp.engine.engine import Engine
from links.amqp.engine.events import Condition, Failed, LinkAttached, Terminus
from links.amqp.engine.handles import SessionHandle
from links.amqp.engine.limits import note_links
from links.amqp.engine.receiver import Receiver
from links.amqp.engine.settings import Settings
from links.amqp.fitting import fitted
from links.amqp.wire.frames import ATTACH, BEGIN, Frames, packed, uint
from links.amqp.wire.values import LIST, compound, string
from links.errors import LinkBroken, LinkRefused, PublishNotAccepted
from settlement import Ack, Delivery, Outcome, Policy, RetryAfter
from settlement.amqp import Accepted, Modified, Rejected
from settlement.delivery import Letter
from settlement.ledger import Line
from settlement.plans import Plan, Publish, TooLong, Wait
from tests.links.amqp_kit import never_lost
from tests.links.rabbit_kit import Rabbit, shapes

pytestmark = pytest.mark.amqp

HEADER = b"AMQP\x00\x01\x00\x00"
OPEN = 0x10
NULL = b"\x40"
LETTER = Letter(b"x")


# --- the engine


def opened(handle_max: bytes = NULL) -> tuple[Engine, SessionHandle]:
    """A client whose peer has opened the connection and one session, with so much for handle-max."""
    engine = Engine(Settings("client"))
    engine.open()
    session = engine.begin()
    engine.data_to_send()
    begun = packed(BEGIN, [b"\x60\x00\x00", uint(0), uint(100), uint(100), handle_max])
    engine.receive_bytes(HEADER + packed(OPEN, [string(b"server")]) + begun)
    engine.events()
    return engine, session


def codes(engine: Engine) -> list[int]:
    return [frame.code for frame in Frames().feed(engine.data_to_send())]


@pytest.mark.parametrize("most", [0, 1, 255])
def test_no_more_links_are_attached_than_the_peer_allows(most: int) -> None:
    """DESIGN 6: the one too many is refused, naming the limit, and the session goes on."""
    engine, session = opened(uint(most))
    links = [engine.attach_sender(session, Terminus("orders")) for _ in range(most + 1)]
    with pytest.raises(LinkRefused, match=f"allows {most + 1} links on a session"):
        engine.attach_receiver(session, Terminus("orders"))
    assert codes(engine) == [ATTACH] * (most + 1)
    assert None not in links
    assert engine.ended is None


def test_a_handle_is_free_again_when_both_sides_have_detached() -> None:
    """A detach that was ordered and not answered holds its handle; one that was answered does not."""
    engine, session = opened(uint(0))
    link = engine.attach_sender(session, Terminus("orders"))
    assert link is not None
    theirs = [string(link.name.encode()), uint(0), b"\x41", NULL, NULL, NULL, b"\x00\x53\x29" + compound(LIST, 0, b"")]
    engine.data_to_send()
    engine.receive_bytes(packed(ATTACH, theirs))
    engine.detach(link)
    engine.data_to_send()
    with pytest.raises(LinkRefused):
        engine.attach_sender(session, Terminus("orders"))
    engine.receive_bytes(packed(0x16, [uint(0), b"\x41"]))
    engine.data_to_send()
    assert engine.attach_sender(session, Terminus("orders")) is not None
    assert codes(engine) == [ATTACH]


def test_what_proton_only_prints_is_a_failure(capfd: pytest.CaptureFixture[str]) -> None:
    """DESIGN 6: an error without an event, after which proton writes nothing more, is a broken connection."""
    engine, session = opened(uint(1))
    session.allowed = 1 << 32  # as for a begin that we could not read
    for _ in range(3):
        engine.attach_sender(session, Terminus("orders"))
    engine.data_to_send()
    (failed,) = [event for event in engine.events() if isinstance(event, Failed)]
    assert "handle" in failed.condition.description
    assert "process error" in failed.condition.description
    assert not failed.refused
    assert capfd.readouterr().err == ""


def test_begins_that_cannot_be_told_apart_set_no_limit() -> None:
    """Where fewer begins were read than sessions opened, nobody is refused by the limit of another session."""
    one, other = SessionHandle(None), SessionHandle(None)
    begin = next(Frames().feed(packed(BEGIN, [NULL, uint(0), uint(1), uint(1), uint(3)])))
    note_links(begun := [one, other], [begin])
    assert (one.room, other.room, begun) == (1 << 32, 1 << 32, [])
    note_links([one], [begin])
    assert (one.room, other.room) == (4, 1 << 32)


@pytest.mark.parametrize(("said", "expected"), [(b"\x80" + (900).to_bytes(8), 900), (NULL, None), (b"\x44", None)])
def test_the_longest_message_of_a_link_is_told(said: bytes, expected: int | None) -> None:
    """A limit of 0, or none, is no limit (part 2.7.3)."""
    engine, session = opened()
    link = engine.attach_sender(session, Terminus("orders"))
    assert link is not None
    engine.data_to_send()
    target = b"\x00\x53\x29" + compound(LIST, 0, b"")
    fields = [string(link.name.encode()), uint(0), b"\x41", NULL, NULL, NULL, target, NULL, NULL, NULL, said]
    engine.receive_bytes(packed(ATTACH, fields))
    (attached,) = engine.events()
    assert isinstance(attached, LinkAttached)
    assert attached.max_message == expected


# --- many addresses, few handles


@asynccontextmanager
async def narrow(links: int, sessions: int) -> AsyncGenerator[tuple[AmqpBroker, EmbeddedBroker]]:
    """A client that believes that the peer allows so many links on a session, and sessions in all."""
    embedded = EmbeddedBroker()
    broker = AmqpBroker("amqp://localhost", connect=embedded.connect)
    async with embedded.running(), broker.connect():
        connection = broker.life.connection
        connection.engine._reader.sessions_allowed = sessions
        begin = connection.engine.begin

        def few() -> SessionHandle:
            session = begin()
            session.allowed = links
            return session

        connection.engine.begin = few  # type: ignore[method-assign]
        yield broker, embedded


async def publish_to(broker: AmqpBroker, number: int) -> None:
    await broker.publisher(Raw(f"to {number}")).publish(b"%d" % number)


async def test_more_addresses_than_links_one_after_the_other(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle sender is detached and its handle used again; no session is begun beyond those that are there."""
    monkeypatch.setattr("links.amqp.engine.engine.note_links", lambda begun, _: begun.clear())
    async with narrow(links=3, sessions=2) as (broker, embedded):
        for number in [*range(20), *range(20)]:
            await publish_to(broker, number)
        assert [len(embedded.ready(f"to {number}")) for number in range(20)] == [2] * 20
        assert len(embedded.peers[0].producers) <= 6


async def test_many_addresses_at_once_take_more_sessions(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in use is not detached: the next link goes into one more session, and every message arrives."""
    monkeypatch.setattr("links.amqp.engine.engine.note_links", lambda begun, _: begun.clear())
    async with narrow(links=3, sessions=5) as (broker, embedded):
        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(publish_to, broker, number)
        assert [len(embedded.ready(f"to {number}")) for number in range(40)] == [1] * 40


async def test_a_link_too_many_in_use_names_the_limit(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every link waits for its answer and no session is left, the message is nowhere, and the limit is named."""
    monkeypatch.setattr("links.amqp.engine.engine.note_links", lambda begun, _: begun.clear())
    async with narrow(links=1, sessions=1) as (broker, embedded):
        await publish_to(broker, 0)
        embedded.peers[0].freeze()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(publish_to, broker, 0)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(PublishNotAccepted, match="allows 1 links on 1 sessions, all are in use"):
                await publish_to(broker, 1)
            embedded.peers[0].thaw()
        assert len(embedded.ready("to 0")) == 2


async def test_a_refused_address_leaves_nothing_behind(autojump_clock: trio.testing.MockClock) -> None:
    """A thousand names that are refused do not stay in the memory of the connection."""
    async with narrow(links=100, sessions=3) as (broker, embedded):
        for number in range(5):
            embedded.refuse(f"to {number}", Condition("amqp:not-found"))
            with pytest.raises(PublishNotAccepted):
                await publish_to(broker, number)
        assert broker.life._ways == {}


# --- long messages


async def test_a_message_that_is_too_long_harms_nobody(autojump_clock: trio.testing.MockClock) -> None:
    """`PublishNotAccepted` before anything is sent, with both lengths; links and sessions live on."""
    embedded = EmbeddedBroker(max_message=1000)
    broker = AmqpBroker("amqp://localhost", connect=embedded.connect)
    async with embedded.running(), broker.connect():
        publisher = broker.publisher("orders")
        await publisher.publish(b"x")
        links = set(embedded.peers[0].producers)
        with pytest.raises(PublishNotAccepted, match=r"of 20\d\d bytes, and the peer takes 1000 at most; nothing was"):
            await publisher.publish(b"x" * 2000)
        await publisher.publish(b"y")
        assert set(embedded.peers[0].producers) == links
        assert len(embedded.ready("orders")) == 2


@pytest.mark.parametrize("policy", [Policy(), Policy(max_attempts=2, dead_letter="dead")])
async def test_a_copy_that_does_not_fit_leaves_its_original_to_modified(
    policy: Policy, autojump_clock: trio.testing.MockClock
) -> None:
    """DESIGN 6: nothing is lost; the original comes again after the delay, and counts its tries."""
    embedded = EmbeddedBroker(max_message=1000)
    broker = AmqpBroker("amqp://localhost", connect=embedded.connect)
    tries: list[tuple[int, float]] = []

    async def handler(delivery: Delivery[bytes]) -> Outcome:
        if delivery.body == b"small":
            return Ack()
        tries.append((delivery.attempt, trio.current_time()))
        return RetryAfter(10.0) if len(tries) < 3 else Ack()

    async with (
        embedded.running(),
        open_runtime(Subscription(broker.queue("orders"), handler, policy=policy)) as runtime,
    ):
        await broker.publisher("orders").publish(b"small")
        body = b"x" * 1100
        embedded.publish("orders", b"\x00\x53\x70\x45\x00\x53\x75\xb0" + len(body).to_bytes(4) + body)
        await trio.sleep(60)
        ledger = runtime.ledger("orders")
        assert ledger.lost == 0
    assert [attempt for attempt, _ in tries][:2] == [1, 2]
    assert tries[1][1] - tries[0][1] == pytest.approx(10.0, abs=1.0)
    assert embedded.ready("dead") == []


LONG = TooLong("orders", 11, 10)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (
            Plan(Line.DELAYED, Rejected(), after=(Wait(3.0), Publish(LETTER, "orders"))),
            Plan(Line.DELAYED, Modified(), before=(Wait(3.0),), instead=Modified(), notice=LONG),
        ),
        (
            Plan(Line.DEAD_LETTERED, Accepted(), before=(Publish(LETTER, "dead"),), instead=Modified()),
            Plan(Line.RETRIED, Modified(), notice=LONG),
        ),
        (
            Plan(Line.DELAYED, None, after=(Wait(3.0), Publish(LETTER, "orders"))),
            Plan(Line.DELAYED, None, after=(Wait(3.0), Publish(LETTER, "orders"))),
        ),
        (Plan(Line.ACKED, Accepted()), Plan(Line.ACKED, Accepted())),
    ],
    ids=["a copy after", "a letter before", "at most once", "nothing to publish"],
)
def test_a_plan_that_does_not_fit(plan: Plan[object], expected: Plan[object]) -> None:
    """The verb becomes *modified* behind the waits; where the original is gone already, nothing changes."""
    assert fitted(plan, lambda _: LONG) == expected  # type: ignore[arg-type]
    assert fitted(plan, lambda _: None) is plan  # type: ignore[arg-type]


# --- a proof's deadline


async def test_a_proof_has_a_deadline(autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is alive and never answers the echo breaks the life, rather than keep deliveries open for ever."""

    async def never(_receiver: Receiver, _patience: float) -> bool:
        await trio.sleep_forever()
        return False

    monkeypatch.setattr(Receiver, "proved", never)
    embedded = EmbeddedBroker()
    broker = AmqpBroker("amqp://localhost", connect=embedded.connect)
    async with embedded.running(), broker.connect(), broker.queue("orders").attach("s", never_lost, 5.0) as link:
        began = trio.current_time()
        with pytest.raises(LinkBroken, match="has not shown within 60 s"):
            await link.proved()
        assert trio.current_time() - began == pytest.approx(link_module.PROOF)


# --- on RabbitMQ


@pytest.mark.servers
@shapes(kind="classic")
async def test_more_addresses_than_a_session_of_rabbitmq_has_handles(rabbit: Rabbit) -> None:
    """256 links are allowed on a session: 300 addresses, one after the other and at once, all answer."""
    broker = AmqpBroker(rabbit.url)
    answered = 0

    async def publish(number: int) -> None:
        nonlocal answered
        with pytest.raises(PublishNotAccepted, match="is a queue bound there"):
            await broker.publisher(Raw(f"/exchanges/amq.direct/{rabbit.user}-{number}")).publish(b"x")
        answered += 1

    name = await rabbit.queue()
    with trio.fail_after(60):
        async with broker.connect():
            for number in range(260):
                await publish(number)
            async with trio.open_nursery() as nursery:
                for number in range(300):
                    nursery.start_soon(publish, number)
            await broker.publisher(name).publish(b"x")
    assert answered == 560


@pytest.mark.servers
@shapes(kind="quorum")
async def test_a_message_too_long_for_rabbitmq_is_refused_here(rabbit: Rabbit) -> None:
    """16 MiB is what RabbitMQ takes: beyond it nothing is sent, and the next message goes on the same link."""
    broker, name = AmqpBroker(rabbit.url), await rabbit.queue()
    with trio.fail_after(60):
        async with broker.connect():
            publisher = broker.publisher(name)
            await publisher.publish(b"x")
            life = broker.life
            with pytest.raises(PublishNotAccepted, match="the peer takes 16777216 at most; nothing was sent"):
                await publisher.publish(bytes(17 * 2**20))
            await publisher.publish(b"y")
            assert broker.life is life
    await rabbit.until_depth(name, 2)
