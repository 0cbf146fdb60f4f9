"""links.amqp.engine.engine: two engines back to back, bytes of one into the other; no trio, no socket."""

from __future__ import annotations

import gc
import random

import pytest

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from links.amqp.engine.binding import ffi, lib
from links.amqp.engine.engine import Engine
from links.amqp.engine.events import (
    ACCEPTED,
    FAILED,
    REJECTED,
    RELEASED,
    Aborted,
    Arrived,
    Closed,
    Condition,
    CreditGranted,
    Disposition,
    DispositionOf,
    Drained,
    Failed,
    LinkAttached,
    LinkDetached,
    LinkRequested,
    Opened,
    SessionEnded,
    State,
    Terminus,
)
from links.amqp.engine.handles import LinkHandle
from links.amqp.engine.settings import Login, Settings
from links.amqp.wire.frames import FLOW, fields_of
from links.amqp.wire.values import Timestamp
from links.errors import LinkRefused
from tests.links.test_amqp_engine_kit import DISPOSITION, Pair, kinds, make_pair

pytestmark = pytest.mark.amqp


@pytest.fixture
def pair() -> Pair:
    return make_pair()


# --- the connection


def test_both_ends_learn_what_the_other_says_when_it_opens() -> None:
    pair = make_pair(
        client=Settings("client", hostname="vhost:shop", properties={"product": "us", "n": 3}),
        server=Settings("server", capabilities=("ANONYMOUS-RELAY",), max_frame=4096, properties={"version": "4.3.6"}),
    )
    pair.open()
    [opened] = [event for event in pair.heard if isinstance(event, Opened)]
    assert (opened.container, opened.capabilities, opened.max_frame) == ("server", ("ANONYMOUS-RELAY",), 4096)
    assert opened.properties == {"version": "4.3.6"}
    [asked] = [event for event in pair.asked if isinstance(event, Opened)]
    assert (asked.container, asked.hostname, asked.properties) == ("client", "vhost:shop", {"product": "us", "n": 3})


def test_a_close_is_answered(pair: Pair) -> None:
    pair.open()
    pair.client.close()
    assert pair.take()[-1] == Closed(None)
    assert pair.took()[-1] == Closed(None)
    assert pair.client.data_to_send() == b""


def test_a_close_brings_its_reason_and_everything_is_dead(pair: Pair) -> None:
    delivered = pair.delivered(2)
    pair.server.close(Condition("amqp:connection:forced", "by the operator"))
    assert pair.take() == [Closed(Condition("amqp:connection:forced", "by the operator"))]
    assert not pair.client.settle(delivered.arrivals[0])
    assert not pair.client.grant(delivered.link, 1)
    assert pair.client.send(delivered.link, b"x") == 0
    pair.client.detach(delivered.link)
    pair.client.end(delivered.session)
    assert pair.client.data_to_send() == b""


def test_a_session_too_many_is_refused() -> None:
    """Proton says nothing but a line on stderr, and never opens it; RabbitMQ allows 64."""
    pair = make_pair()
    lib.pn_transport_set_channel_max(pair.server._transport, 3)
    first = pair.open()
    for _ in range(3):
        pair.client.begin()
    with pytest.raises(LinkRefused, match="4 sessions"):
        pair.client.begin()
    pair.client.end(first)
    pair.shuttle()
    pair.client.begin()


def test_the_end_of_the_stream_is_a_failure(pair: Pair) -> None:
    pair.open()
    pair.client.receive_eof()
    [failed] = [event for event in pair.client.events() if isinstance(event, Failed)]
    assert not failed.refused


@pytest.mark.parametrize(
    "garbage", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"AMQP\x00\x00\x09\x01", b"\x15\x03\x01\x00\x02"]
)
def test_a_peer_that_speaks_something_else_is_a_refusal(garbage: bytes) -> None:
    for login in (None, Login()):
        client = Engine(Settings("client", login=login))
        client.open()
        client.data_to_send()
        client.receive_bytes(garbage)
        client.receive_eof()
        [failed] = [event for event in client.events() if isinstance(event, Failed)]
        assert failed.refused, failed


# --- links


def test_there_is_no_credit_before_the_remote_attach(pair: Pair) -> None:
    """RabbitMQ 4.0.5 over-delivers on an early flow, and then ends the session."""
    session = pair.open()
    link = pair.client.attach_receiver(session, Terminus("orders", ("queue",)))
    assert link is not None
    assert not pair.client.grant(link, 10)
    assert not pair.client.drain(link)
    theirs = pair.accept()
    assert FLOW not in pair.codes()
    assert LinkAttached(link, Terminus("orders", ("queue",)), {}) in pair.take()
    assert pair.client.grant(link, 10)
    assert pair.took() == [CreditGranted(theirs, 10, False)]


def test_a_refused_attach_has_no_source_and_then_a_reason(pair: Pair) -> None:
    session = pair.open()
    link = pair.client.attach_receiver(session, Terminus("missing"))
    assert link is not None
    [request] = [event for event in pair.took() if isinstance(event, LinkRequested)]
    pair.server.refuse(request.link, Condition("amqp:not-found", "no queue 'missing'"))
    attached, detached = pair.take()[-2:]
    assert isinstance(attached, LinkAttached)
    assert attached.remote is None
    assert detached == LinkDetached(link, Condition("amqp:not-found", "no queue 'missing'"))
    assert not pair.client.grant(link, 1)


def test_an_attach_may_be_refused_by_the_end_of_its_session(pair: Pair) -> None:
    """RabbitMQ 4.0 and 3.10 do so."""
    session = pair.open()
    pair.client.attach_receiver(session, Terminus("missing"))
    pair.took()
    [theirs] = pair.server._reader.sessions.values()
    pair.server.end(theirs, Condition("amqp:not-found"))
    assert pair.take()[-1] == SessionEnded(session, Condition("amqp:not-found"))
    assert pair.client.attach_receiver(session, Terminus("missing")) is None


def test_both_ends_may_have_the_same_name_in_both_directions(pair: Pair) -> None:
    """RabbitMQ's /management wants a pair of links with one name."""
    session = pair.open()
    out = pair.client.attach_sender(
        session, Terminus("/management"), source="me", name="pair", properties={"paired": True}, presettled=True
    )
    pair.accept()
    back = pair.client.attach_receiver(session, Terminus("/management"), target="me", name="pair")
    [request] = [event for event in pair.took() if isinstance(event, LinkRequested)]
    assert (request.source, request.target) == (Terminus("/management"), Terminus("me"))
    assert out is not None
    assert back is not None
    assert (out.name, back.name) == ("pair", "pair")


# --- deliveries


def test_each_outcome_is_one_settled_disposition_on_the_wire(pair: Pair) -> None:
    """Retry is *modified* with delivery-failed (A-1.10); *rejected* has no condition (A-1.6)."""
    delivered = pair.delivered(5)
    said = [ACCEPTED, FAILED, REJECTED, RELEASED, Disposition(State.MODIFIED, undeliverable=True)]
    states = []
    for arrival, disposition in zip(delivered.arrivals, said, strict=True):
        assert pair.client.settle(arrival, disposition)
        pair.shuttle()
        [frame] = pair.written
        pair.written.clear()
        role, _first, _last, settled, state = fields_of(frame)[:5]
        assert (frame.code, role, settled) == (DISPOSITION, b"\x41", b"\x41")
        states.append(state)
    assert states[0] == b"\x00\x53\x24\x45"
    assert states[1] == b"\x00\x53\x27\xc0\x03\x02\x41\x42"
    assert states[2] == b"\x00\x53\x25\x45"
    assert states[3] == b"\x00\x53\x26\x45"
    assert states[4] == b"\x00\x53\x27\xc0\x03\x02\x42\x41"
    assert [event.disposition for event in pair.took() if isinstance(event, DispositionOf)] == said


def test_a_modified_may_carry_annotations(pair: Pair) -> None:
    delivered = pair.delivered(1)
    later = Disposition(State.MODIFIED, failed=True, annotations={"x-opt-delivery-time": Timestamp(1_800_000_000_000)})
    pair.client.settle(delivered.arrivals[0], later)
    [outcome] = [event for event in pair.took() if isinstance(event, DispositionOf)]
    assert outcome.disposition == later
    assert outcome.disposition is not None
    assert isinstance((outcome.disposition.annotations or {})["x-opt-delivery-time"], Timestamp)


def test_equal_dispositions_become_one_frame(pair: Pair) -> None:
    delivered = pair.delivered(100)
    for arrival in delivered.arrivals:
        pair.client.settle(arrival)
    outcomes = [event for event in pair.took() if isinstance(event, DispositionOf)]
    assert sorted(outcome.number for outcome in outcomes) == delivered.numbers
    assert pair.codes() == [DISPOSITION]


def test_a_delivery_is_settled_once(pair: Pair) -> None:
    delivered = pair.delivered(1)
    assert pair.client.settle(delivered.arrivals[0])
    assert not pair.client.settle(delivered.arrivals[0], REJECTED)
    assert not delivered.arrivals[0].is_open
    pair.shuttle()
    assert pair.codes() == [DISPOSITION]


@pytest.mark.parametrize("how", ["detach", "end", "close", "detach, end, close", "server detaches", "server ends"])
def test_nothing_is_said_of_an_unsettled_delivery(pair: Pair, how: str) -> None:
    """Proton settles what it frees: that must never reach the wire."""
    delivered = pair.delivered(3)
    pair.client.settle(delivered.arrivals[1])
    for step in how.split(", "):
        match step:
            case "detach":
                pair.client.detach(delivered.link)
            case "end":
                pair.client.end(delivered.session)
            case "close":
                pair.client.close()
            case "server detaches":
                pair.server.detach(delivered.theirs, Condition("amqp:resource-deleted"))
            case _:
                pair.server.end(delivered.theirs.session)
        pair.shuttle()
    assert not pair.client.settle(delivered.arrivals[0])
    pair.client.close()
    pair.shuttle()
    assert pair.codes().count(DISPOSITION) == 1
    if how != "server ends":  # there it crosses the end
        outcomes = [event.number for event in pair.took() if isinstance(event, DispositionOf)]
        assert outcomes == [delivered.numbers[1]]


def test_what_arrived_is_a_copy(pair: Pair) -> None:
    """Proton's binaries are views of memory that it uses again."""
    delivered = pair.delivered(20, lambda number: bytes([number]) * 1000)
    raws = [arrival.raw for arrival in delivered.arrivals]
    for number in range(20):
        pair.client.settle(delivered.arrivals[number])
    pair.shuttle()
    pair.client, pair.server = make_pair().client, make_pair().server
    del delivered
    gc.collect()
    assert raws == [bytes([number]) * 1000 for number in range(20)]


def test_what_is_no_message_arrives_as_it_is(pair: Pair) -> None:
    """Proton decodes garbage without an error, and an empty message; whoever reads the sections says what they are."""
    raws = [b"", b"\xff\x00garbage", b"\x00Su\xa0\x01a\x00Su\xa0\x01b"]
    assert [each.raw for each in pair.delivered(3, lambda number: raws[number]).arrivals] == raws


def test_tags_need_not_be_text(pair: Pair) -> None:
    """RabbitMQ's are binary, and no UTF-8 from the 128th delivery on."""
    delivered = pair.delivered(300)
    assert len(delivered.arrivals) == 300


def test_three_megabytes_in_many_frames(pair: Pair) -> None:
    big = random.Random(1).randbytes(3_000_000)  # noqa: S311
    delivered = pair.delivered(2, lambda number: big if number == 0 else b"small")
    assert [arrival.raw for arrival in delivered.arrivals] == [big, b"small"]


def part_of_a_message(pair: Pair, theirs: LinkHandle, raw: bytes) -> object:
    """The server sends the beginning of a message."""
    tag = b"part"
    delivery = lib.pn_delivery(theirs.pointer, (len(tag), ffi.from_buffer(tag)))
    lib.pn_link_send(theirs.pointer, ffi.from_buffer(raw), len(raw))
    pair.shuttle()
    return delivery


def test_an_aborted_delivery_is_told_and_spends_a_credit(pair: Pair) -> None:
    session = pair.open()
    link, theirs = pair.receiver(session)
    pair.client.grant(link, 3)
    pair.shuttle()
    pair.server.send(theirs, b"before")
    delivery = part_of_a_message(pair, theirs, b"x" * 200_000)
    pair.heard = [event for event in pair.heard if isinstance(event, Arrived)]
    [arrived] = pair.heard
    assert isinstance(arrived, Arrived)
    pair.heard = []
    assert link.partial is not None
    lib.pn_delivery_abort(delivery)
    assert pair.take() == [Aborted(link)]
    assert pair.client.credit(link) == 1
    pair.server.send(theirs, b"after")
    [arrived] = pair.take()
    assert isinstance(arrived, Arrived)
    assert [each.raw for each in arrived.arrivals] == [b"after"]


def test_a_message_that_is_too_long_ends_its_link() -> None:
    pair = make_pair(client=Settings("client", max_message=100_000))
    session = pair.open()
    link, theirs = pair.receiver(session)
    pair.client.grant(link, 3)
    pair.shuttle()
    pair.server.send(theirs, b"x" * 1_000_000)
    assert kinds(pair.take())[-2:] == [Aborted, LinkDetached]
    [detached] = [event for event in pair.took() if isinstance(event, LinkDetached)]
    assert detached.condition is not None
    assert detached.condition.name == "amqp:link:message-size-exceeded"


def test_presettled_deliveries_say_so(pair: Pair) -> None:
    session = pair.open()
    link = pair.client.attach_sender(session, Terminus("orders"), presettled=True)
    assert link is not None
    theirs = pair.accept()
    pair.server.grant(theirs, 5)
    pair.shuttle()
    pair.client.send(link, b"x")
    [arrived] = [event for event in pair.took() if isinstance(event, Arrived)]
    assert [each.settled for each in arrived.arrivals] == [True]
    pair.server.settle(arrived.arrivals[0])
    assert [event for event in pair.take() if isinstance(event, DispositionOf)] == []


def test_credit_is_spent_by_deliveries_and_not_by_settling(pair: Pair) -> None:
    delivered = pair.delivered(2)
    assert pair.client.credit(delivered.link) == 0
    pair.client.settle(delivered.arrivals[0])
    pair.shuttle()
    assert pair.client.credit(delivered.link) == 0
    pair.client.grant(delivered.link, 1)
    assert [event.credit for event in pair.took() if isinstance(event, CreditGranted)] == [1]


def test_a_drain_takes_the_rest_of_the_credit_back(pair: Pair) -> None:
    session = pair.open()
    link, theirs = pair.receiver(session)
    pair.client.grant(link, 5)
    pair.took()
    pair.client.drain(link)
    assert pair.took() == [CreditGranted(theirs, 5, True)]
    pair.server.send(theirs, b"last")
    pair.server.drained(theirs)
    arrived, drained = pair.take()[-2:]
    assert isinstance(arrived, Arrived)
    assert drained == Drained(link, 4)
    pair.client.grant(link, 2)
    assert pair.took()[-1] == CreditGranted(theirs, 2, False)


def test_outcomes_come_back_to_the_sender(pair: Pair) -> None:
    session = pair.open()
    link, theirs = pair.sender(session)
    pair.server.grant(theirs, 3)
    pair.take()
    numbers = [pair.client.send(link, b"m%d" % number) for number in range(3)]
    [arrived] = [event for event in pair.took() if isinstance(event, Arrived)]
    why = Disposition(State.REJECTED, condition=Condition("amqp:not-allowed", "no"))
    for arrival, disposition in zip(arrived.arrivals, (ACCEPTED, RELEASED, why), strict=True):
        pair.server.settle(arrival, disposition)
    outcomes = {event.number: event.disposition for event in pair.take() if isinstance(event, DispositionOf)}
    assert outcomes == dict(zip(numbers, (ACCEPTED, RELEASED, why), strict=True))


def test_dispositions_are_written_before_the_credit_that_they_free(pair: Pair) -> None:
    """Proton would write the flow first: unsettled above the limit, and a retry not at the head of its queue."""
    delivered = pair.delivered(2)
    for arrival in delivered.arrivals:
        pair.client.settle(arrival, FAILED)
        pair.client.grant(delivered.link, 1)
    assert pair.client.credit(delivered.link) == 2
    assert kinds(pair.took()) == [DispositionOf, DispositionOf, CreditGranted]
    assert pair.codes()[-1] == FLOW
