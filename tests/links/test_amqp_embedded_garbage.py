"""The embedded broker under whatever bytes a client sends: that connection is closed, the broker lives."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from links.amqp.embedded.broker import EmbeddedBroker
from links.amqp.embedded.sasl_server import SaslServer
from links.amqp.embedded.server_engine import ServerEngine
from links.amqp.engine.events import Closed, Failed
from links.amqp.engine.settings import Settings
from links.amqp.wire.frames import ATTACH, BEGIN, DISPOSITION, FLOW, TRANSFER, packed, uint
from links.amqp.wire.values import LIST, compound, string, variable
from tests.weather.schedule import sized

pytestmark = pytest.mark.amqp

HEADER = b"AMQP\x00\x01\x00\x00"
NULL, TRUE, FALSE, EMPTY = b"\x40", b"\x41", b"\x42", b"\x45"
OPEN, DETACH, END, CLOSE = 0x10, 0x16, 0x17, 0x18
OPENED = packed(OPEN, [string(b"client")])
BEGUN = packed(BEGIN, [NULL, uint(0), uint(100), uint(100)])
SOURCE = b"\x00\x53\x28" + compound(LIST, 1, string(b"orders"))
TARGET = b"\x00\x53\x29" + compound(LIST, 1, string(b"orders"))
TAKING = packed(ATTACH, [string(b"in"), uint(0), TRUE, NULL, NULL, SOURCE, TARGET])
GIVING = packed(ATTACH, [string(b"out"), uint(1), FALSE, NULL, NULL, SOURCE, TARGET, NULL, NULL, uint(0)])
CREDIT = packed(FLOW, [uint(0), uint(100), uint(0), uint(100), uint(0), uint(0), uint(5), NULL, FALSE, TRUE])


def framed(body: bytes, channel: int = 0) -> bytes:
    return (8 + len(body)).to_bytes(4) + b"\x02\x00" + channel.to_bytes(2) + body


async def lives_on(data: bytes) -> None:
    """Send this, and let another client publish and hear of it behind that."""
    broker = EmbeddedBroker()
    async with broker.running():
        for _ in range(3):
            broker.publish("orders", b"\x00\x53\x75\xa0\x01x")
        stream = broker.connect_in_memory()
        await stream.send_all(data)
        await trio.sleep(0.1)
        other = broker.connect_in_memory()
        await other.send_all(b"AMQP\x03\x01\x00\x00")
        with trio.fail_after(5):
            assert bytes(await other.receive_some(8)) == b"AMQP\x03\x01\x00\x00"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(HEADER + b"\x00\x00\x00\x03xxxx", id="a frame shorter than its head"),
        pytest.param(HEADER + b"\xff\xff\xff\xff\x02\x00\x00\x00", id="a frame of 4 GiB"),
        pytest.param(HEADER + b"GET / HTTP/1.1\r\n\r\n", id="another protocol behind the header"),
        pytest.param(HEADER + OPENED + framed(b"\x00\x53\x11" + EMPTY), id="a begin without fields"),
        pytest.param(HEADER + OPENED + framed(b"\x00\x53\x11\xc0\x09\x04\x40"), id="a begin that is cut short"),
        pytest.param(HEADER + OPENED + BEGUN + framed(b"\x00\x53\x12" + EMPTY), id="an attach without fields"),
        pytest.param(HEADER + OPENED + framed(b"\x00\x53\x13" + EMPTY), id="a flow without a session"),
        pytest.param(HEADER + OPENED + framed(b"\x00\xff\x11" + EMPTY), id="a descriptor of no type"),
        pytest.param(HEADER + OPENED + framed(b"\x00"), id="half a descriptor"),
        pytest.param(HEADER + OPENED + BEGUN + packed(BEGIN, [NULL, uint(0)]), id="a session begun twice"),
        pytest.param(
            HEADER + OPENED + BEGUN + packed(DISPOSITION, [TRUE, uint(1 << 31), uint(0xFFFFFFFF), TRUE]),
            id="an outcome of more deliveries than there can be",
        ),
        pytest.param(HEADER + OPENED + BEGUN + TAKING + TAKING, id="one name, attached twice"),
        pytest.param(
            HEADER + OPENED + packed(BEGIN, [NULL, uint(0), uint(100), uint(100), uint(0)]) + TAKING + GIVING,
            id="more links than the client allows itself",
        ),
        pytest.param(
            HEADER + OPENED + BEGUN + packed(TRANSFER, [uint(7), uint(0), variable(0xA0, b"t"), uint(0)]),
            id="a transfer on a link that is not there",
        ),
        pytest.param(HEADER + OPENED + packed(DETACH, [uint(0), TRUE]), id="a detach of nothing"),
        pytest.param(HEADER + OPENED + packed(END, []) + packed(CLOSE, []), id="an end of nothing"),
    ],
)
async def test_the_broker_outlives_a_client_that_sends_nonsense(
    data: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    """What cannot be read ends the connection that it came on, and nothing else."""
    await lives_on(data)


WHOLE = HEADER + OPENED + BEGUN + TAKING + GIVING + CREDIT
TAIL = [packed(DETACH, [uint(0), TRUE]), packed(DISPOSITION, [TRUE, uint(0), uint(1), TRUE]), packed(END, []), CREDIT]


@st.composite
def dented(draw: st.DrawFn) -> bytes:
    """A conversation with some bytes that are others, gone, or twice there."""
    data = bytearray(WHOLE + b"".join(draw(st.lists(st.sampled_from(TAIL), max_size=4))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(len(HEADER), len(data) - 1))
        match draw(st.sampled_from(["other", "gone", "twice"])):
            case "other":
                data[at] = draw(st.integers(0, 255))
            case "gone":
                del data[at : at + draw(st.integers(1, 3))]
            case _:
                data[at:at] = data[at : at + draw(st.integers(1, 40))]
    return bytes(data)


@settings(max_examples=sized(fast=100, full=400, long=400), deadline=None)
@given(dented(), st.integers(1, 200))
def test_no_bytes_raise_from_the_accepting_engine(data: bytes, piece: int) -> None:
    """Whatever comes, in whatever pieces, the engine raises nothing: it goes on, or says why it does not."""
    engine = ServerEngine(Settings("server"), SaslServer({}, anonymous=True))
    engine.open()
    for at in range(0, len(data), piece):
        engine.receive_bytes(data[at : at + piece])
        for event in engine.events():
            match event:
                case Closed() | Failed():
                    assert engine.ended is not None
                case _:
                    pass
        engine.data_to_send()


@settings(max_examples=60, deadline=None)
@given(st.one_of(dented(), st.binary(max_size=100).map(lambda tail: WHOLE + tail)))
def test_no_bytes_end_the_broker(data: bytes) -> None:
    """Whatever a client sends, the next one is served."""
    trio.run(lives_on, data, clock=trio.testing.MockClock(autojump_threshold=0))
