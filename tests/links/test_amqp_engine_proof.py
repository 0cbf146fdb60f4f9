"""links.amqp.engine.engine: what ends a drain and proves a settlement, time, garbage, and memory."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from links.amqp.engine.engine import Engine
from links.amqp.engine.events import (
    ACCEPTED,
    FAILED,
    REJECTED,
    Arrived,
    Closed,
    CreditGranted,
    DispositionOf,
    Drained,
    Failed,
    Proved,
)
from links.amqp.engine.settings import Settings
from links.amqp.wire.frames import (
    ATTACH,
    FLOW,
    TRANSFER,
    FramePicker,
    fields_of,
    flow_frame,
    link_state,
    packed,
    reaches,
    wants_echo,
)
from tests.links.test_amqp_engine_kit import DISPOSITION, Pair, answering, kinds, make_pair

pytestmark = pytest.mark.amqp


@pytest.fixture
def pair() -> Pair:
    return make_pair()


# --- drain


def test_a_drain_is_over_when_the_credit_is_used_up(pair: Pair) -> None:
    """The sender of proton says nothing then, and need not."""
    session = pair.open()
    link, theirs = pair.receiver(session)
    pair.client.grant(link, 2)
    pair.client.drain(link)
    assert pair.took() == [CreditGranted(theirs, 2, True)]
    pair.take()
    pair.server.send(theirs, b"first")
    assert kinds(pair.take()) == [Arrived]
    pair.server.send(theirs, b"last")
    assert pair.take()[-1] == Drained(link, 0)
    assert not pair.client.drain(link)


# --- echo


def test_an_echo_goes_behind_the_dispositions_and_changes_no_credit(pair: Pair) -> None:
    delivered = pair.delivered(3)
    for arrival in delivered.arrivals:
        pair.client.settle(arrival)
    pair.client.grant(delivered.link, 7)
    assert pair.client.echo(delivered.link) == 1
    pair.shuttle()
    codes = [frame.code for frame in pair.written]
    assert codes[-1] == FLOW
    assert DISPOSITION in codes[:-1]
    *others, last = [frame for frame in pair.written if frame.code == FLOW]
    assert wants_echo(last)
    assert not any(map(wants_echo, others))
    assert fields_of(last)[6] == b"\x52\x07"
    assert pair.server.credit(delivered.theirs) == 7


def test_an_echo_is_answered_and_proves_what_went_before() -> None:
    pair = answering()
    delivered = pair.delivered(4)
    for round_ in range(1, 4):
        pair.client.settle(delivered.arrivals[round_])
        number = pair.client.echo(delivered.link)
        assert pair.take() == [Proved(delivered.link, number)]
        outcomes = [event for event in pair.took() if isinstance(event, DispositionOf)]
        assert [event.number for event in outcomes] == [delivered.numbers[round_]]
        pair.client.grant(delivered.link, 1)  # the session's numbers are right after the answer, too
        pair.shuttle()
        assert pair.server.credit(delivered.theirs) == round_
    assert pair.client.credit(delivered.link) == 3
    pair.server.send(delivered.theirs, b"more")
    assert kinds(pair.take()) == [Arrived]


def test_one_echo_of_a_link_is_on_its_way_at_a_time(pair: Pair) -> None:
    """Its answer would be taken for that of the one before. A server that answers none: the second is never written."""
    delivered = pair.delivered(1)
    first = pair.client.echo(delivered.link)
    pair.shuttle()
    second = pair.client.echo(delivered.link)
    assert (first, second, pair.client.echo(delivered.link)) == (1, 2, 2)
    pair.shuttle()
    assert sum(wants_echo(frame) for frame in pair.written if frame.code == FLOW) == 1


def test_an_echo_of_each_link_and_of_several_sessions() -> None:
    pair = answering()
    sessions = [pair.open(), *(pair.client.begin() for _ in range(3))]
    pairs = [pair.receiver(session) for session in sessions for _ in range(2)]
    for number, (ours, _) in enumerate(pairs):
        pair.client.grant(ours, number)
    pair.shuttle()
    pair.take()
    for ours, _ in pairs:
        pair.client.echo(ours)
    assert {event.link for event in pair.take() if isinstance(event, Proved)} == {ours for ours, _ in pairs}
    assert [pair.server.credit(theirs) for _, theirs in pairs] == list(range(8))
    assert [pair.client.credit(ours) for ours, _ in pairs] == list(range(8))


def test_an_echo_of_a_link_that_is_gone_is_nothing(pair: Pair) -> None:
    delivered = pair.delivered(1)
    pair.client.detach(delivered.link)
    pair.shuttle()
    pair.client.echo(delivered.link)
    pair.shuttle()
    assert FLOW not in pair.codes()


def says(pair: Pair, delivery_count: int, credit: int, *, drain: bool = False) -> list[object]:
    """What the client makes of such a flow of the peer, for its first link."""
    flow = flow_frame(
        0, b"\x43", incoming=0, outgoing=9, window=100, delivery_count=delivery_count, credit=credit, drain=drain
    )
    pair.client.receive_bytes(flow)
    return [event for event in pair.client.events() if isinstance(event, Proved)]


@pytest.mark.parametrize("asked_for", [True, False])
def test_a_flow_that_was_said_before_the_echo_proves_nothing(pair: Pair, asked_for: bool) -> None:
    """It has a lower limit: delivery-count + link-credit. A higher one was said behind it, asked for or not."""
    delivered = pair.delivered(3)
    pair.client.settle(delivered.arrivals[0])
    pair.client.grant(delivered.link, 2)
    if not asked_for:
        pair.shuttle()
    number = pair.client.echo(delivered.link)
    pair.shuttle()
    assert says(pair, 3, 1) == []
    assert says(pair, 2, 2) == []
    assert says(pair, 4, 1) == [Proved(delivered.link, number)]
    assert says(pair, 5, 0) == []


def test_each_flow_asks_while_an_echo_is_on_its_way(pair: Pair) -> None:
    """RabbitMQ puts a later flow in the place of one that waits, and forgets that an echo was asked for."""
    delivered = pair.delivered(3)
    pair.client.settle(delivered.arrivals[0])
    pair.client.grant(delivered.link, 1)
    number = pair.client.echo(delivered.link)
    pair.shuttle()
    pair.codes()
    pair.client.settle(delivered.arrivals[1])
    pair.client.grant(delivered.link, 1)
    pair.shuttle()
    assert [wants_echo(frame) for frame in pair.written if frame.code == FLOW] == [True]
    pair.codes()
    assert says(pair, 3, 2) == [Proved(delivered.link, number)]
    pair.client.grant(delivered.link, 1)
    pair.shuttle()
    assert [wants_echo(frame) for frame in pair.written if frame.code == FLOW] == [False]


def test_credit_that_is_due_carries_the_echo(pair: Pair) -> None:
    """One flow, not two."""
    delivered = pair.delivered(2)
    pair.client.settle(delivered.arrivals[0])
    pair.client.grant(delivered.link, 1)
    pair.client.echo(delivered.link)
    pair.shuttle()
    assert [wants_echo(frame) for frame in pair.written if frame.code == FLOW] == [True]


def test_no_echo_is_written_before_a_drain_is_answered(pair: Pair) -> None:
    """A drain moves no limit, so its answer could be taken for that of the echo."""
    delivered = pair.delivered(1)
    pair.client.grant(delivered.link, 2)
    pair.client.drain(delivered.link)
    pair.shuttle()
    pair.client.settle(delivered.arrivals[0])
    number = pair.client.echo(delivered.link)
    pair.shuttle()
    assert not any(wants_echo(frame) for frame in pair.written if frame.code == FLOW)
    assert says(pair, 3, 0, drain=True) == []
    pair.shuttle()
    assert [wants_echo(frame) for frame in pair.written if frame.code == FLOW][-1:] == [True]
    assert says(pair, 3, 0) == [Proved(delivered.link, number)]


def test_limits_are_serial_numbers() -> None:
    """RabbitMQ 4.0.5 begins to count just below the end of 32 bits."""
    assert reaches(2, 0xFFFFFFFE)
    assert not reaches(0xFFFFFFFE, 2)
    assert reaches(7, 7)


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_attaches_and_flows_are_picked_out_of_pieces(size: int) -> None:
    """Whatever the pieces are cut into, and whatever passes between."""
    flow = flow_frame(3, b"\x52\x01", incoming=0, outgoing=0, window=1, delivery_count=7, credit=5)
    attach = packed(ATTACH, [b"\xa1\x01x", b"\x43", b"\x42"], 2)
    transfer = packed(TRANSFER, [b"\x43"], 1)
    heartbeat = b"\x00\x00\x00\x08\x02\x00\x00\x00"
    stream = b"".join((b"AMQP\x00\x01\x00\x00", heartbeat, attach, transfer * 3, heartbeat, flow, heartbeat, flow))
    watch = FramePicker()
    found = [frame for at in range(0, len(stream), size) for frame in watch.feed(stream[at : at + size])]
    assert [(frame.channel, frame.code, frame.raw) for frame in found] == [
        (2, ATTACH, attach),
        (3, FLOW, flow),
        (3, FLOW, flow),
    ]
    assert link_state(found[1]) == (1, 12, False)


# --- time


def test_a_peer_that_never_says_a_word_is_noticed() -> None:
    """Proton's own tick does nothing before the first byte."""
    client = Engine(Settings("client", idle_timeout=10.0))
    client.open()
    client.data_to_send()
    now: float | None = 100.0
    while now is not None and not client.ended:
        now = client.tick(now)
        assert now is not None
        assert now < 120.0
    [failed] = client.events()
    assert isinstance(failed, Failed)
    assert (failed.condition.name, failed.refused) == ("amqp:resource-limit-exceeded", False)


def test_a_peer_that_falls_silent_is_noticed_within_twice_the_idle_timeout(pair: Pair) -> None:
    pair = make_pair(client=Settings("client", idle_timeout=10.0), server=Settings("server", idle_timeout=10.0))
    now = 0.0
    pair.client.tick(now)
    pair.server.tick(now)
    pair.open()
    while now < 100.0:  # both live: heartbeats keep the connection
        now = min(filter(None, (pair.client.tick(now), pair.server.tick(now))))
        pair.shuttle()
    assert pair.client.ended is None
    silent = now
    while not pair.client.ended:
        now = pair.client.tick(now) or now
        assert now <= silent + 20.0


# --- robustness


def test_bytes_may_come_in_any_pieces() -> None:
    dice = random.Random(7)  # noqa: S311
    for _ in range(20):
        pair = answering()
        whole = pair.server.receive_bytes

        def in_pieces(data: bytes | bytearray, whole: Callable[[bytes], None] = whole) -> None:
            at = 0
            while at < len(data):
                size = dice.randrange(1, 40)
                whole(bytes(data[at : at + size]))
                at += size

        pair.server.receive_bytes = in_pieces  # type: ignore[method-assign]
        delivered = pair.delivered(5)
        for arrival in delivered.arrivals:
            pair.client.settle(arrival, dice.choice([ACCEPTED, FAILED, REJECTED]))
        pair.client.echo(delivered.link)
        assert kinds(pair.take()) == [Proved]
        assert len([event for event in pair.took() if isinstance(event, DispositionOf)]) == 5


def test_any_garbage_after_the_open_is_a_failure_and_never_a_crash() -> None:
    dice = random.Random(11)  # noqa: S311
    for _ in range(300):
        pair = make_pair()
        pair.delivered(2)
        good = b"\x00\x00\x00\x1a\x02\x00\x00\x00" if dice.random() < 0.5 else b""
        pair.client.receive_bytes(good + dice.randbytes(dice.randrange(8, 200)))
        pair.client.receive_eof()
        pair.client.data_to_send()
        assert any(isinstance(event, Failed | Closed) for event in pair.client.events())


def resident() -> int:
    with open("/proc/self/statm") as statm:  # noqa: PTH123
        return int(statm.read().split()[1]) * 4096


def test_memory_is_flat_over_messages_links_and_connections(pair: Pair) -> None:
    try:
        resident()
    except OSError:
        pytest.skip("no /proc here")
    session = pair.open()

    def work() -> None:
        for _ in range(20):
            link, theirs = pair.receiver(session)
            pair.client.grant(link, 50)
            pair.shuttle()
            for _ in range(50):
                pair.server.send(theirs, b"x" * 2000)
            for event in pair.take():
                for arrival in event.arrivals if isinstance(event, Arrived) else ():
                    pair.client.settle(arrival)
            pair.client.detach(link)
            pair.take()
            pair.took()
            pair.codes()
            other = make_pair()
            other.delivered(5)
            other.client.close()
            other.shuttle()
        assert not pair.client._reader.links
        assert not pair.server._reader.sent

    work()
    gc.collect()
    before = resident()
    for _ in range(10):
        work()
    gc.collect()
    assert resident() - before < 4_000_000
