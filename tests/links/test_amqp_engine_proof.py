"""links.amqp.engine: what proves a settlement, time, garbage, and memory."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from links.amqp.engine import Engine
from links.amqp.events import (
    ACCEPTED,
    FAILED,
    REJECTED,
    Arrived,
    Closed,
    Failed,
    OutcomeOf,
    Proved,
)
from links.amqp.settings import Settings
from links.amqp.wire import FLOW, fields_of, wants_echo
from tests.links.test_amqp_engine_kit import DISPOSITION, Pair, answering, kinds, make_pair

pytestmark = pytest.mark.amqp


@pytest.fixture
def pair() -> Pair:
    return make_pair()


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
        outcomes = [event for event in pair.took() if isinstance(event, OutcomeOf)]
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
        assert len([event for event in pair.took() if isinstance(event, OutcomeOf)]) == 5


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
        assert not pair.client._listener.links
        assert not pair.server._listener.sent

    work()
    gc.collect()
    before = resident()
    for _ in range(10):
        work()
    gc.collect()
    assert resident() - before < 4_000_000
