"""The message layer of links.amqp against proton's own encoder and decoder, and what we do not take from proton."""

import datetime as dt
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from links.amqp.wire.headers import WELL_KNOWN
from links.amqp.wire.messages import copy, encode, with_annotation
from links.amqp.wire.sections import split
from links.amqp.wire.values import Symbol, Timestamp, Undecodable
from settlement.attempts import RETRY_HEADER
from settlement.delivery import Letter

pytestmark = pytest.mark.amqp


@pytest.fixture(scope="module")
def proton() -> Any:
    """The other implementation."""
    return pytest.importorskip("proton", reason="cross-checked with python-qpid-proton, which is not installed")


texts = st.text(st.characters(codec="utf-8"), max_size=20)
own_headers = st.dictionaries(
    st.one_of(texts, st.just(RETRY_HEADER)).filter(lambda name: name not in WELL_KNOWN),
    st.one_of(st.binary(max_size=20), texts.map(str.encode), st.binary(min_size=250, max_size=260)),
    max_size=8,
)
field_texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
letters = st.builds(
    lambda letter, known, key: Letter(letter.body, {**letter.headers, **known}, key),
    st.builds(Letter, st.binary(max_size=300), own_headers),
    st.fixed_dictionaries(
        {"content-type": st.just(b"a/b")},
        optional={name: field_texts.map(str.encode) for name in ("message-id", "reply-to", "correlation-id")},
    ),
    st.none() | field_texts,
)
"""proton's fields are C strings, an empty one is none, and it reads no content-type as the symbol "None"."""


@settings(database=None, deadline=None, max_examples=100)
@given(letters)
def test_proton_reads_what_we_write(proton: Any, letter: Letter) -> None:
    """A-7.1: the other implementation finds every field where the standard has it, and no header section."""
    message = proton.Message()
    message.decode(encode(letter, durable=False))
    fields = {
        "message-id": message.id,
        "reply-to": message.reply_to,
        "correlation-id": message.correlation_id,
        "content-type": message.content_type,
    }
    assert {name: value.encode() for name, value in fields.items() if value is not None} == {
        name: value for name, value in letter.headers.items() if name in WELL_KNOWN
    }
    assert isinstance(message.content_type, proton.symbol)
    assert (message.group_id or None) == letter.key
    assert {
        name: value.encode() if isinstance(value, str) else bytes(value)
        for name, value in (message.properties or {}).items()
    } == {name: value for name, value in letter.headers.items() if name not in WELL_KNOWN}
    assert (bytes(message.body), message.inferred, message.durable) == (letter.body, True, False)


def typed(proton: Any) -> dict[str, tuple[Any, Any, bytes | None]]:
    """What is given to proton, how we read it, and as which header."""
    identity = UUID(int=5)
    return {
        "null": (None, None, None),
        "yes": (True, True, b"true"),
        "no": (False, False, b"false"),
        "ubyte": (proton.ubyte(200), 200, b"200"),
        "ushort": (proton.ushort(60000), 60000, b"60000"),
        "uint": (proton.uint(4000000000), 4000000000, b"4000000000"),
        "ulong": (proton.ulong(1 << 63), 1 << 63, b"9223372036854775808"),
        "byte": (proton.byte(-5), -5, b"-5"),
        "short": (proton.short(-500), -500, b"-500"),
        "int": (proton.int32(-70000), -70000, b"-70000"),
        "long": (-(1 << 40), -(1 << 40), b"-1099511627776"),
        "float": (proton.float32(1.5), 1.5, b"1.5"),
        "double": (-2.25, -2.25, b"-2.25"),
        "char": (proton.char("é"), "é", "é".encode()),
        "timestamp": (proton.timestamp(1700000000000), Timestamp(1700000000000), b"1700000000000"),
        "uuid": (identity, identity, str(identity).encode()),
        "binary": (b"\x00\xff", b"\x00\xff", b"\x00\xff"),
        "string": ("é", "é", "é".encode()),
        "symbol": (proton.symbol("s"), Symbol("s"), b"s"),
    }


def test_we_read_what_proton_writes(proton: Any) -> None:
    """A-7.2: every type that the other implementation writes is read, in its type and as a header."""
    cases = typed(proton)
    message = proton.Message(
        body=b"\x00" * 300,
        inferred=True,
        durable=True,
        priority=7,
        ttl=1.5,
        delivery_count=3,
        id=proton.ulong(7),
        user_id=b"them",
        correlation_id=UUID(int=6),
        reply_to="back",
        content_type="a/b",
        group_id="lane",
        group_sequence=2,
        creation_time=dt.datetime(2026, 1, 1, tzinfo=dt.UTC).timestamp(),
        properties={name: given for name, (given, _, _) in cases.items()},
        annotations={"x-a": 1},
        instructions={"x-d": 2},
    )
    sections = split(bytes(message.encode()))
    assert (sections.delivery_count, sections.durable, sections.priority, sections.ttl) == (3, True, 7, 1500)
    assert sections.application_properties == {name: value for name, (_, value, _) in cases.items()}
    assert sections.headers == {
        **{name: header for name, (_, _, header) in cases.items() if header is not None},
        "message-id": b"7",
        "correlation-id": str(UUID(int=6)).encode(),
        "reply-to": b"back",
        "content-type": b"a/b",
        "partition-key": b"lane",
    }
    assert (sections.body, sections.key, sections.properties.group_sequence) == (b"\x00" * 300, "lane", 2)
    assert sections.properties.creation_time == Timestamp(1767225600000)


def test_proton_reads_our_copy(proton: Any) -> None:
    """DESIGN 6: in a copy the other implementation finds the types of the original, our count, and no user."""
    message = proton.Message(
        body="text",
        delivery_count=3,
        id=UUID(int=6),
        user_id=b"them",
        subject="s",
        properties={"n": proton.ubyte(3), RETRY_HEADER: 1},
        annotations={"x-a": proton.ulong(1)},
        instructions={"x-d": 2},
    )
    raw = with_annotation(copy(bytes(message.encode()), retry_header=RETRY_HEADER, attempt=5), "x-when", Timestamp(9))
    copied = proton.Message()
    copied.decode(raw)
    assert (copied.id, bytes(copied.user_id), copied.subject, copied.body) == (UUID(int=6), b"", "s", "text")
    assert copied.properties == {"n": proton.ubyte(3), RETRY_HEADER: "5"}
    assert type(copied.properties["n"]) is proton.ubyte
    assert copied.annotations == {"x-a": proton.ulong(1), "x-when": proton.timestamp(9)}
    assert (copied.instructions or None, copied.delivery_count) == (None, 0)
    assert split(raw).delivery_count is None


def test_proton_keeps_the_last_data_section_and_we_keep_all(proton: Any) -> None:
    """A-7.3: proton's own decoder loses data sections, so the bytes are read by us."""
    raw = b"\x00\x53\x75\xa0\x01a\x00\x53\x75\xa0\x01b"
    message = proton.Message()
    message.decode(raw)
    assert (bytes(message.body), split(raw).body, copy(raw)) == (b"b", b"ab", raw)


def test_proton_cannot_tell_no_header_from_an_empty_one_and_we_can(proton: Any) -> None:
    """A-3.5: proton says 0 for an absent section and for an absent field."""
    data = b"\x00\x53\x75\xa0\x01a"
    found: list[tuple[int, int | None]] = []
    for raw in (data, b"\x00\x53\x70\x45" + data):
        message = proton.Message()
        message.decode(raw)
        found.append((message.delivery_count, split(raw).delivery_count))
    assert found == [(0, None), (0, 0)]


def test_proton_takes_garbage_and_we_do_not(proton: Any) -> None:
    """A-7.4: what proton's decoder lets through as an empty message is undecodable here."""
    message = proton.Message()
    message.decode(b"\xff\x00garbage")
    assert message.body is None
    with pytest.raises(Undecodable):
        split(b"\xff\x00garbage")


def test_what_we_hand_out_is_our_own(proton: Any) -> None:
    """AMQP lab, gotcha 1: proton's binaries lie in its memory; ours are bytes that outlive the message."""
    message = proton.Message(body=b"AAAA", inferred=True, id=b"BBBB", properties={"b": b"CCCC"})
    assert isinstance(split(bytes(message.encode())).body, bytes)
    sections = split(bytes(message.encode()))
    held = sections.body, sections.headers["message-id"], sections.headers["b"]
    message.clear()
    del message, sections
    assert held == (b"AAAA", b"BBBB", b"CCCC")
    assert {type(value) for value in held} == {bytes}
