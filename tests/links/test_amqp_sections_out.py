"""The message layer of links.amqp without a broker: what is written, and what a copy keeps byte for byte."""

import pytest

from links.amqp.wire.messages import copy, encode, with_annotation
from links.amqp.wire.sections import split
from links.amqp.wire.values import Timestamp
from settlement.attempts import RETRY_HEADER
from settlement.delivery import Letter

pytestmark = pytest.mark.amqp

NAME = RETRY_HEADER.encode()
RETRY = b"\xa1\x18" + NAME
DATA = b"\x00\x53\x75\xa0\x02hi"
FOOTER = b"\x00\x53\x78\xc1\x05\x02\xa3\x01f\x41"
ANNOTATIONS = b"\x00\x53\x72\xc1\x06\x02\xa3\x01a\x52\x01"
PROPERTIES = b"\x00\x53\x73\xc0\x06\x01\xa1\x03m-1"
NAMED = b"\x00\x53\x74\xc1\x06\x02\xa1\x01n\x55\x07"
"""n: the long 7."""


def counted(*, count: int) -> bytes:
    """The section of application properties that holds the retry count alone."""
    return b"\x00\x53\x74\xc1\x1e\x02" + RETRY + b"\xa1\x01%d" % count


# --- letters


def test_a_bare_letter_is_one_data_section() -> None:
    """A-7.1, A-3.3: a letter without headers is its data section, and no header section."""
    assert encode(Letter(b"hi"), durable=False) == DATA
    assert encode(Letter(b""), durable=False) == b"\x00\x53\x75\xa0\x00"


def test_a_durable_letter_has_a_header_section_that_says_so() -> None:
    """DESIGN 6: AmqpBroker(durable=True) writes a header section; it holds that one word."""
    assert encode(Letter(b"hi"), durable=True) == b"\x00\x53\x70\xc0\x02\x01\x41" + DATA


def test_a_letter_in_the_bytes_of_the_standard() -> None:
    """A-7.1: ids and reply-to are strings, content-type a symbol, the key group-id, the rest application properties."""
    headers = {
        "message-id": b"m",
        "reply-to": b"back",
        "correlation-id": b"c",
        "content-type": b"a/b",
        "é": "ü".encode(),
        "raw": b"\xff",
        "none": b"",
    }
    properties = b"\xa1\x01m@@@\xa1\x04back\xa1\x01c\xa3\x03a/b@@@\xa1\x01k"
    named = b"\xa1\x02\xc3\xa9\xa1\x02\xc3\xbc" + b"\xa1\x03raw\xa0\x01\xff" + b"\xa1\x04none\xa1\x00"
    assert encode(Letter(b"hi", headers, "k"), durable=False) == (
        b"\x00\x53\x73\xc0\x1b\x0b" + properties + b"\x00\x53\x74\xc1\x19\x06" + named + DATA
    )


def test_what_is_longer_than_a_byte_says_has_the_longer_form() -> None:
    """Part 1 §1.6: sizes and counts from 256 on take four bytes."""
    long = b"x" * 256
    raw = encode(Letter(long, {"reply-to": long, "n": long, "b": b"\xff" * 256}), durable=False)
    assert raw.startswith(b"\x00\x53\x73\xd0\x00\x00\x01\x0d\x00\x00\x00\x05@@@@\xb1\x00\x00\x01\x00xx")
    assert b"\x00\x53\x74\xd1\x00\x00\x02\x14\x00\x00\x00\x04\xa1\x01n\xb1\x00\x00\x01\x00xx" in raw
    assert b"\xa1\x01b\xb0\x00\x00\x01\x00\xff\xff" in raw
    assert raw.endswith(b"\x00\x53\x75\xb0\x00\x00\x01\x00" + long)
    for size in (248, 249, 250, 251):  # a map's own size is 254 to 257
        edge = {"n": long[:size]}
        assert split(encode(Letter(b"", edge), durable=False)).headers == edge
    many = {f"{number}": b"" for number in range(128)}
    assert split(encode(Letter(b"", many), durable=False)).headers == many


@pytest.mark.parametrize(
    ("key", "headers", "group"),
    [("k", {}, b"k"), (None, {"partition-key": b"p"}, b"p"), ("k", {"partition-key": b"p"}, b"k"), ("", {}, b"")],
)
def test_the_key_is_the_group_id(key: str | None, headers: dict[str, bytes], group: bytes) -> None:
    """A-7.1: the key travels as group-id; a letter's own key goes before a header of that name."""
    sections = split(encode(Letter(b"", headers, key), durable=False))
    assert (sections.key, dict(sections.headers)) == (group.decode(), {"partition-key": group})


@pytest.mark.parametrize("name", ["message-id", "reply-to", "correlation-id", "content-type", "partition-key"])
def test_a_well_known_header_that_is_not_utf8_is_refused(name: str) -> None:
    """A-7.5: what AMQP cannot carry byte for byte is refused, and the error names the header."""
    with pytest.raises(ValueError, match=f"'{name}'"):
        encode(Letter(b"", {name: b"\xff"}), durable=False)


def test_a_content_type_beyond_ascii_is_refused() -> None:
    """A-7.5: a symbol is ASCII."""
    with pytest.raises(ValueError, match="'content-type' as a symbol: it must be ASCII"):
        encode(Letter(b"", {"content-type": "é".encode()}), durable=False)


@pytest.mark.parametrize("letter", [Letter(b"", {"\ud800": b""}), Letter(b"", {}, "\ud800")])
def test_a_name_that_is_no_text_is_refused(letter: Letter) -> None:
    """C-10.2: half a surrogate pair is no text, in a name or a key."""
    with pytest.raises(ValueError, match="names and keys that are Unicode text"):
        encode(letter, durable=False)


# --- copies


def test_a_dead_letter_of_our_own_message_is_its_bytes() -> None:
    """C-4.9: a dead letter goes on as it arrived."""
    raw = ANNOTATIONS + PROPERTIES + NAMED + DATA + DATA + FOOTER
    assert copy(raw) == raw


def test_a_copy_counts_and_keeps_every_other_byte() -> None:
    """A-4.11, DESIGN 6: the retry count is added to the application properties; types, sections and footer stay."""
    named = b"\x00\x53\x74\xc1\x23\x04\xa1\x01n\x55\x07" + RETRY + b"\xa1\x011"
    raw = ANNOTATIONS + PROPERTIES + NAMED + DATA + DATA + FOOTER
    assert copy(raw, retry_header=RETRY_HEADER, attempt=1) == ANNOTATIONS + PROPERTIES + named + DATA + DATA + FOOTER


@pytest.mark.parametrize("was", [b"\xa1\x0212", b"\xa0\x011", b"\x55\x01", b"\x40", b"\xb1\x00\x00\x00\x011"])
def test_a_copy_of_a_copy_counts_on(was: bytes) -> None:
    """DESIGN 6: the retry count is replaced where it stands, whatever its type was; its neighbours stay."""
    before, after = b"\xa1\x01a\x41", b"\xa1\x01z\x55\x07"
    payload = before + RETRY + was + after
    raw = b"\x00\x53\x74\xd1" + (len(payload) + 4).to_bytes(4) + b"\x00\x00\x00\x06" + payload + DATA
    new = before + RETRY + b"\xa1\x0213" + after
    assert copy(raw, retry_header=RETRY_HEADER, attempt=13) == b"\x00\x53\x74\xc1\x28\x06" + new + DATA


@pytest.mark.parametrize(
    "named", [b"", b"\x00\x53\x74\xc1\x01\x00", b"\x00\x53\x74\xd1\x00\x00\x00\x04\x00\x00\x00\x00"]
)
@pytest.mark.parametrize("before", [b"", PROPERTIES, ANNOTATIONS + PROPERTIES])
@pytest.mark.parametrize("behind", [b"", DATA, FOOTER, b"\x00\x53\x76\x45", b"\x00\x53\x77\x40" + FOOTER])
def test_a_copy_gets_its_application_properties_in_their_place(before: bytes, named: bytes, behind: bytes) -> None:
    """Part 3 §3.2: the section that a copy needs stands before body and footer, whichever of them there are."""
    assert copy(before + named + behind, retry_header=RETRY_HEADER, attempt=2) == before + counted(count=2) + behind


def test_application_properties_grow_into_the_longer_form() -> None:
    """Part 1 §1.6.22: a map of 256 bytes and more says so in four."""
    payload = b"\xa1\x01n\xa1\xe6" + b"x" * 230
    raw = b"\x00\x53\x74\xc1\xec\x02" + payload + DATA
    grown = b"\x00\x53\x74\xd1\x00\x00\x01\x0c\x00\x00\x00\x04" + payload + RETRY + b"\xa1\x011"
    assert copy(raw, retry_header=RETRY_HEADER, attempt=1) == grown + DATA


@pytest.mark.parametrize(
    ("header", "kept"),
    [
        (b"\x45", b""),
        (b"\x40", b""),
        (b"\xc0\x0a\x05\x42\x50\x09\x70\x00\x00\x03\xe8\x41", None),
        (b"\xc0\x07\x05\x42\x50\x09\x40\x42\x43", b""),
        (b"\xc0\x07\x05\x40\x50\x09\x40\x42\x43", b""),
        (b"\xc0\x02\x01\x41", b"\x00\x53\x70\xc0\x02\x01\x41"),
        (b"\xc0\x03\x02\x56\x01", None),
        (b"\xc0\x03\x01\x56\x01", b"\x00\x53\x70\xc0\x02\x01\x41"),
        (b"\xc0\x03\x02\x41\x40", b"\x00\x53\x70\xc0\x03\x02\x41\x40"),
        (
            b"\xc0\x0c\x05\x41\x50\x09\x70\x00\x00\x03\xe8\x42\x52\x07",
            b"\x00\x53\x70\xc0\x09\x03\x41\x50\x09\x70\x00\x00\x03\xe8",
        ),
    ],
)
def test_a_copy_has_no_header_section_unless_durable(header: bytes, kept: bytes | None) -> None:
    """DESIGN 6: only a durable original leaves a header section: durable, priority and, in a copy, ttl; no count."""
    raw = b"\x00\x53\x70" + header + PROPERTIES + DATA
    if kept is None:  # a list that is not as long as it says: no message, which goes on as it came
        assert copy(raw, retry_header=RETRY_HEADER, attempt=1) == raw
        return
    dead = b"\x00\x53\x70\xc0\x04\x02\x41\x50\x09" if b"\x03\xe8" in kept else kept
    assert copy(raw) == dead + PROPERTIES + DATA
    assert copy(raw, retry_header=RETRY_HEADER, attempt=2) == kept + PROPERTIES + counted(count=2) + DATA


def test_a_copy_has_no_delivery_annotations() -> None:
    """DESIGN 6: delivery annotations are said from one hop to the next, and no further."""
    raw = b"\x00\x53\x70\x45" + b"\x00\x53\x71\xc1\x06\x02\xa3\x01d\x52\x01" + ANNOTATIONS + DATA
    assert copy(raw) == ANNOTATIONS + DATA


@pytest.mark.parametrize(
    ("user", "kept"), [(None, b"\x40"), (b"them", b"\x40"), (b"us", b"\xa0\x02us"), (b"u", b"\x40"), (b"", b"\x40")]
)
@pytest.mark.parametrize("rest", [b"", b"\xa1\x02to", b"\x40\x40\xa1\x04back"])
def test_a_copy_claims_no_other_user(user: bytes | None, kept: bytes, rest: bytes) -> None:
    """DESIGN 6: a user-id that is not ours becomes null, its neighbours stay byte for byte."""
    count = {b"": 2, b"\xa1\x02to": 3}.get(rest, 5)

    def properties(claimed: bytes) -> bytes:
        payload = b"\xa1\x01m" + claimed + rest
        return b"\x00\x53\x73\xc0" + bytes((len(payload) + 1, count)) + payload

    assert copy(properties(b"\xa0\x02us") + DATA, user=user) == properties(kept) + DATA


@pytest.mark.parametrize("claimed", [b"\x45", b"\x00\x53\x01\x40"])
def test_a_user_id_that_is_no_name_is_nobody(claimed: bytes) -> None:
    """DESIGN 6: a user-id of an alien type is not ours, also where we have none."""
    raw = b"\x00\x53\x73\xc0" + bytes((len(claimed) + 2, 2)) + b"\x40" + claimed + DATA
    assert copy(raw) == b"\x00\x53\x73\xc0\x03\x02\x40\x40" + DATA


def test_a_copy_without_a_user_id_is_not_touched() -> None:
    """DESIGN 6: what is not changed goes byte for byte, in the form that its sender chose."""
    raw = b"\x00\x80" + bytes(7) + b"\x73\xd0\x00\x00\x00\x06\x00\x00\x00\x02\x40\x40" + DATA
    assert copy(raw, user=b"us") == raw


def test_a_body_that_we_cannot_read_is_copied() -> None:
    """DESIGN 6, Runtime: an unreadable message is a delivery like any other, so it may be retried and dead-lettered."""
    body = b"\x00\x53\x76\xc0\x03\x01\x54\x05"
    assert copy(PROPERTIES + body, retry_header=RETRY_HEADER, attempt=1) == PROPERTIES + counted(count=1) + body


@pytest.mark.parametrize("garbage", [b"\xff\x00garbage", b"\x00\x53\x73\xc0\x03\x02\x40\x40\x00", DATA + DATA[:5]])
def test_garbage_goes_on_as_it_came_and_is_not_counted(garbage: bytes) -> None:
    """C-4.9: a letter made of garbage is that garbage: no count can be written into it, and it stops no line."""
    assert [copy(garbage), copy(garbage, attempt=1), copy(garbage, retry_header=RETRY_HEADER)] == [garbage] * 3
    assert copy(garbage, retry_header=RETRY_HEADER, attempt=1) == garbage


# --- annotations for Scheduled


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (0, b"\x53\x00"),
        (255, b"\x53\xff"),
        (256, b"\x80" + bytes(6) + b"\x01\x00"),
        (Timestamp(1700000000000), b"\x83\x00\x00\x01\x8b\xcf\xe5\x68\x00"),
        (Timestamp(5), b"\x83" + bytes(7) + b"\x05"),
    ],
)
def test_an_annotation_is_a_ulong_or_a_timestamp(value: int, encoded: bytes) -> None:
    """DESIGN 6, Scheduled: the broker's delay annotation is a symbol with milliseconds, from now or since the epoch."""
    annotated = b"\x00\x53\x72\xc1" + bytes((9 + len(encoded),)) + b"\x02\xa3\x06x-when" + encoded
    assert with_annotation(DATA, "x-when", value) == annotated + DATA


@pytest.mark.parametrize("before", [b"", b"\x00\x53\x70\x45", b"\x00\x53\x71\xc1\x01\x00"])
@pytest.mark.parametrize("behind", [b"", PROPERTIES + DATA, NAMED, FOOTER])
def test_annotations_are_set_in_their_place(before: bytes, behind: bytes) -> None:
    """Part 3 §3.2: message annotations stand behind header and delivery annotations, before everything else."""
    new = b"\x00\x53\x72\xc1\x07\x02\xa3\x02in\x53\x05"
    assert with_annotation(before + behind, "in", 5) == before + new + behind


def test_an_annotation_is_added_to_others_and_replaces_itself() -> None:
    """DESIGN 6: what is not changed goes byte for byte."""
    once = b"\x00\x53\x72\xc1\x0c\x04\xa3\x01a\x52\x01\xa3\x02in\x53\x05" + DATA
    assert with_annotation(ANNOTATIONS + DATA, "in", 5) == once
    assert with_annotation(once, "in", 6) == once.replace(b"\x53\x05", b"\x53\x06")


@pytest.mark.parametrize(("name", "value"), [("é", 1), ("a", -1), ("a", 1 << 64), ("a", Timestamp(1 << 63))])
def test_an_annotation_that_cannot_be_said_is_refused(name: str, value: int) -> None:
    """Part 1 §1.6: a symbol is ASCII, a ulong and a timestamp have 64 bits."""
    with pytest.raises(ValueError, match=f"no message annotation {name!r} of {value}"):
        with_annotation(DATA, name, value)
