"""The one pass over a message as most are written: it says what `split` says, or nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from links.abc import Received
from links.amqp.deliveries import raw_of, received
from links.amqp.engine.handles import Arrival, LinkHandle
from links.amqp.wire.messages import encode
from links.amqp.wire.sections import quick, split
from links.amqp.wire.values import Undecodable
from settlement.attempts import RETRY_HEADER
from settlement.delivery import Delivery, Letter, decoded
from tests.links.test_amqp_sections_laws import letters, messages
from tests.weather.schedule import sized

pytestmark = pytest.mark.amqp

many = settings(database=None, deadline=None, max_examples=sized(fast=50, full=300, long=300))

HEADER = bytes.fromhex("005370c0060542404041 43")
COUNTED = bytes.fromhex("005370c007054240404152 07")
DELIVERED = bytes.fromhex("005371c10a04a3016155 01a3016240")
ROUTED = b"\x00\x53\x72\xc1\x1a\x02\xa3\x0dx-routing-key\xa1\x08thequeue"
LONG_ROUTED = b"\x00\x53\x72\xd1\0\0\0\x0e\0\0\0\x02\xa3\x04x-id\xa1\x02q1"
NAMED_ID = b"\x00\x53\x73\xc0\x06\x01\xa1\x03abc"
LISTED_BY_FOUR = b"\x00\x53\x73\xd0\0\0\0\x0c\0\0\0\x03\xa1\x03abc\x40\xa1\x00"
EMPTY_LIST = b"\x00\x53\x73\x45"
GROUPED = b"\x00\x53\x73\xc0\x15\x0b\x80" + bytes(7) + b"\x05" + b"\x40" * 9 + b"\xa1\x00"
KIND = b"\x00\x53\x74\xc1\x0a\x02\xa1\x04kind\xa1\x01x"
KIND_BY_FOUR = b"\x00\x53\x74\xd1\0\0\0\x0d\0\0\0\x02\xa1\x04kind\xa1\x01x"
NESTED = b"\x00\x53\x74\xc1\x0c\x02\xa1\x01m\xc1\x06\x02\xa1\x01n\x55\x07"
DATA = b"\x00\x53\x75\xa0\x02hi"
LONG_DATA = b"\x00\x53\x75\xb0\0\0\0\x02hi"
SYMBOLIC = b"\x00\xa3\x10amqp:data:binary\xa0\x02hi"
FULL = b"\x00\x80" + bytes(7) + b"\x75\xa0\x02hi"

USUAL = {
    "one of ours from RabbitMQ": HEADER + ROUTED + NAMED_ID + KIND + LONG_DATA,
    "counted by a quorum queue": COUNTED + ROUTED + NAMED_ID + KIND + DATA,
    "one of proton's": HEADER + NAMED_ID + KIND_BY_FOUR + DATA,
    "one of rhea's": LONG_ROUTED + LISTED_BY_FOUR + KIND_BY_FOUR + DATA,
    "with delivery annotations": DELIVERED + ROUTED + KIND + DATA,
    "an id that is a number, a key": GROUPED + DATA,
    "a map in a map": NESTED + LONG_DATA,
    "an empty list": EMPTY_LIST + DATA,
    "a body alone": DATA,
}
"""In the forms in which RabbitMQ, proton, rhea and we write them."""
UNUSUAL = {
    "no body": HEADER + NAMED_ID + KIND,
    "two data sections": HEADER + DATA + DATA,
    "a value": KIND + b"\x00\x53\x77\xa1\x02hi",
    "a sequence": b"\x00\x53\x76\x45",
    "a footer": DATA + b"\x00\x53\x78\xc1\x01\x00",
    "a symbol for a descriptor": SYMBOLIC,
    "a descriptor of nine bytes": FULL,
    "a header of four bytes": b"\x00\x53\x70\xd0\0\0\0\x05\0\0\0\x01\x41" + DATA,
    "an empty header": b"\x00\x53\x70\x45" + DATA,
    "out of order": KIND + NAMED_ID + DATA,
    "a string for data": b"\x00\x53\x75\xa1\x02hi",
    "nothing": b"",
}


def law(raw: bytes) -> bool:
    """Did `quick` say something? Then it is what `split` says."""
    found = quick(raw)
    if found is None:
        return False
    sections: Any = split(raw)
    assert found == (sections.delivery_count, sections.properties_at, sections.named_at, sections._at)
    body = raw[found[3] + (5 if raw[found[3]] == 0xB0 else 2) :]
    assert (sections._bodies, sections.body) == (1, body)
    return True


@pytest.mark.parametrize("what", USUAL)
def test_a_message_as_most_are_takes_one_pass(what: str) -> None:
    """DESIGN 3.2: what RabbitMQ, proton, rhea and we write is not looked at twice."""
    assert law(USUAL[what])


@pytest.mark.parametrize("what", UNUSUAL)
def test_another_message_is_looked_at_again(what: str) -> None:
    """DESIGN 3.2: of anything else the one pass says nothing."""
    assert not law(UNUSUAL[what])


@pytest.mark.parametrize("what", [*USUAL, *UNUSUAL])
def test_a_message_cut_short_is_never_usual(what: str) -> None:
    """A-7.4: at whatever byte a message ends, the one pass says no more than `split`, and nothing of a broken one."""
    raw = {**USUAL, **UNUSUAL}[what]
    for end in range(len(raw)):
        law(raw[:end])
        law(raw[:end] + DATA)
        law(raw[end:])


def test_a_count_that_is_none_is_never_usual() -> None:
    """A-3.1: a header section that `split` refuses is refused each time, not remembered as something else."""
    raw = b"\x00\x53\x70\xc0\x08\x05\x42\x40\x40\x41\xa1\x013" + DATA
    for _ in range(2):
        assert not law(raw)
        with pytest.raises(Undecodable, match="delivery-count"):
            split(raw)


@many
@given(messages)
def test_the_law_for_messages(raw: bytes) -> None:
    """A-7.2: a well-formed message of any types, with any sections, is read alike both ways, or one way."""
    law(raw)


@many
@given(letters, st.booleans())
def test_every_letter_of_ours_takes_one_pass(letter: Letter, durable: bool) -> None:
    """A-7.1: what we publish is a message as most are."""
    assert law(encode(letter, durable=durable))


@many
@given(
    st.sampled_from(list(USUAL.values())) | messages,
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), max_size=4),
    st.lists(st.tuples(st.integers(0, 1000), st.binary(max_size=3)), max_size=2),
)
def test_the_law_for_spoilt_messages(raw: bytes, wrong: list[tuple[int, int]], added: list[tuple[int, bytes]]) -> None:
    """A-7.4: with bytes changed, or put in between, both ways agree, or the one pass says nothing."""
    spoilt = bytearray(raw or b"\0")
    for at, byte in wrong:
        spoilt[at % len(spoilt)] = byte
    for at, more in added:
        spoilt[at % len(spoilt) : at % len(spoilt)] = more
    law(bytes(spoilt))


@many
@given(
    st.binary(max_size=40),
    st.sampled_from([b"", HEADER, b"\x00\x53\x70\xc0", b"\x00\x53\x73\xc0", b"\x00\x53\x74\xd1"]),
)
@example(b"\x02\x01\x00\x00\x53\x75\xa0\x00", b"\x00\x53\x73\xc0")
@example(b"\x01\x05" + DATA, b"\x00\x53\x70\xc0")
def test_the_law_for_noise(noise: bytes, head: bytes) -> None:
    """A-7.4: whatever the bytes are."""
    law(head + noise)
    law(head + noise + DATA)


# --- deliveries


def arrived(*raws: bytes) -> list[Arrival]:
    link = LinkHandle(None, None, "link", is_sender=False, presettled=False)  # type: ignore[arg-type]
    return [Arrival(link, None, raw, settled=True) for raw in raws]


def read(arrivals: list[Arrival], *, counts: bool = True) -> list[Received[bytes]]:
    return received(arrivals, source="orders", before=4, retry_header=RETRY_HEADER, counts=counts)


def facts(delivery: Delivery[bytes]) -> tuple[object, ...]:
    return delivery.body, dict(delivery.headers), delivery.attempt, delivery.redelivery_count, delivery.key


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("what", USUAL)
def test_a_usual_message_is_the_same_delivery_in_its_other_form(what: str, counts: bool) -> None:
    """DESIGN 3.2: body, headers, attempt, count, id and key are those of the same message with a footer behind it."""
    usual, other = (
        each.delivery for each in read(arrived(USUAL[what], USUAL[what] + b"\x00\x53\x78\xc1\x01\x00"), counts=counts)
    )
    assert facts(usual) == facts(other)
    assert usual.body == b"hi"
    assert (usual.id == other.id) or (usual.id, other.id) == ("#5", "#6")


def test_the_attempt_is_read_before_the_headers_are() -> None:
    """C-2.3, A-3.1: copies and redeliveries are added up, for a message in its usual form and for others."""
    count = RETRY_HEADER.encode()
    named = b"\xa1" + bytes((len(count),)) + count + b"\xa1\x012"
    application = b"\x00\x53\x74\xc1" + bytes((len(named) + 1, 2)) + named
    for raw in (COUNTED + application + DATA, COUNTED + application + DATA + DATA):
        (one,) = read(arrived(raw))
        assert (one.delivery.attempt, one.delivery.redelivery_count) == (10, 7)
        (one,) = read(arrived(raw), counts=False)
        assert (one.delivery.attempt, one.delivery.redelivery_count) == (3, None)


def test_a_body_that_holds_the_name_is_no_count() -> None:
    """C-2.3: the retry count is an application property of that name, not these bytes somewhere else."""
    value = RETRY_HEADER.encode()
    named = b"\xa1\x01a\xa1" + bytes((len(value),)) + value
    application = b"\x00\x53\x74\xc1" + bytes((len(named) + 1, 2)) + named
    (one,) = read(arrived(application + b"\x00\x53\x75\xa0" + bytes((len(value),)) + value))
    assert one.delivery.attempt == 1


def test_messages_without_an_id_are_numbered() -> None:
    """C-10.1: the number goes on over what has an id, and over what cannot be read."""
    deliveries = [each.delivery for each in read(arrived(DATA, NAMED_ID + DATA, b"\xff", DATA + DATA))]
    assert [each.id for each in deliveries] == ["#5", "abc", "#7", "#8"]


def test_the_message_is_found_again_by_the_delivery() -> None:
    """DESIGN 3.8: a copy is spliced from the original, which the delivery's handle holds, also when it is decoded."""
    (arrival,) = arrived(HEADER + DATA)
    (one,) = read([arrival])
    assert raw_of(one.delivery) is arrival.raw
    assert raw_of(decoded(one.delivery, "decoded")) is arrival.raw
    assert raw_of(None) is None
