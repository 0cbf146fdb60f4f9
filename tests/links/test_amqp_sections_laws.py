"""The message layer of links.amqp, tried at random."""

from contextlib import suppress
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from links.amqp.wire.headers import WELL_KNOWN
from links.amqp.wire.messages import copy, encode, with_annotation
from links.amqp.wire.sections import split, walk
from links.amqp.wire.values import Timestamp, Undecodable, items, skip
from settlement.attempts import RETRY_HEADER
from settlement.delivery import Letter
from tests.weather import schedule

pytestmark = pytest.mark.amqp

many = settings(database=None, deadline=None, max_examples=schedule.sized(fast=30, full=100, long=100))

NONE = b"\x40"


# --- letters and messages at random

texts = st.text(st.characters(codec="utf-8"), max_size=20)
utf8 = texts.map(str.encode)
ascii_text = st.text(st.characters(codec="ascii"), max_size=20).map(str.encode)
own_headers = st.dictionaries(
    st.one_of(texts, st.just(RETRY_HEADER)).filter(lambda name: name not in WELL_KNOWN),
    st.one_of(st.binary(max_size=20), utf8, st.binary(min_size=250, max_size=260)),
    max_size=8,
)
known_headers = st.fixed_dictionaries(
    {}, optional={"message-id": utf8, "reply-to": utf8, "correlation-id": utf8, "content-type": ascii_text}
)
letters = st.builds(
    lambda body, own, known, key: Letter(body, {**own, **known}, key),
    st.one_of(st.binary(), st.binary(min_size=250, max_size=260)),
    own_headers,
    known_headers,
    st.none() | texts,
)


def sized(code: int, payload: bytes, count: int | None = None, *, long: bool = False) -> bytes:
    """A value of variable length in one of its two forms, made here and nowhere else."""
    width = 0 if count is None else 4 if long else 1
    size, counted = len(payload) + width, b"" if count is None else count.to_bytes(width)
    head = bytes((code + 0x10,)) + size.to_bytes(4) if long else bytes((code, size))
    return head + counted + payload


def forms(code: int, payload: bytes) -> st.SearchStrategy[bytes]:
    return st.booleans().map(lambda long: sized(code, payload, long=long or len(payload) > 255))


def texted(code: int) -> st.SearchStrategy[bytes]:
    return st.binary(max_size=20).flatmap(lambda value: forms(code, value))


def fixed(code: int, size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size).map(lambda payload: bytes((code,)) + payload)


def packed(code: int, values: list[bytes], *, long: bool) -> bytes:
    payload = b"".join(values)
    return sized(code, payload, len(values), long=long or len(payload) > 250 or len(values) > 255)


names = utf8.flatmap(lambda name: forms(0xA1, name)) | ascii_text.flatmap(lambda name: forms(0xA3, name))
scalars = st.one_of(
    st.sampled_from([NONE, b"\x41", b"\x42", b"\x43", b"\x44"]),
    *(fixed(code, 1) for code in (0x50, 0x51, 0x52, 0x53, 0x54, 0x55, 0x56)),
    *(fixed(code, 2) for code in (0x60, 0x61)),
    *(fixed(code, 4) for code in (0x70, 0x71, 0x72, 0x73, 0x74)),
    *(fixed(code, 8) for code in (0x80, 0x81, 0x82, 0x83, 0x84)),
    *(fixed(code, 16) for code in (0x94, 0x98)),
    *(texted(code) for code in (0xA0, 0xA1, 0xA3)),
)


def lists(of: st.SearchStrategy[bytes], max_size: int = 5) -> st.SearchStrategy[bytes]:
    return st.builds(
        lambda values, long: packed(0xC0, values, long=long), st.lists(of, max_size=max_size), st.booleans()
    )


def maps(keys: st.SearchStrategy[bytes], values: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    pairs = st.lists(st.tuples(keys, values).map(b"".join), max_size=4)
    return st.builds(
        lambda pairs, long: sized(0xC1, b"".join(pairs), 2 * len(pairs), long=long or sum(map(len, pairs)) > 250),
        pairs,
        st.booleans(),
    )


values = st.recursive(
    scalars,
    lambda inner: lists(inner) | maps(names, inner) | st.tuples(st.just(b"\x00"), inner, inner).map(b"".join),
    max_leaves=5,
)
keys = names | st.just(sized(0xA1, RETRY_HEADER.encode()))
counts = st.sampled_from([NONE, b"\x43", b"\x52\x03", b"\x70\x00\x00\x00\x02"])
headers = st.builds(
    lambda durable, priority, ttl, count: packed(0xC0, [durable, priority, ttl, b"\x41", count], long=False),
    st.sampled_from([NONE, b"\x41", b"\x42", b"\x56\x01"]),
    st.just(NONE) | fixed(0x50, 1),
    st.just(NONE) | fixed(0x70, 4),
    counts,
)


def described(code: int, value: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    codes = st.sampled_from([b"\x00\x53" + bytes((code,)), b"\x00\x80" + bytes(7) + bytes((code,))])
    return st.tuples(codes, value).map(b"".join)


bodies = st.one_of(
    st.lists(described(0x75, texted(0xA0)), max_size=3).map(b"".join),
    described(0x76, lists(values)),
    described(0x77, values),
)
messages = st.tuples(
    st.just(b"") | described(0x70, headers),
    st.just(b"") | described(0x71, maps(names, values)),
    st.just(b"") | described(0x72, maps(names, values)),
    st.just(b"") | described(0x73, lists(scalars, 14)),
    st.just(b"") | described(0x74, maps(keys, values)),
    bodies,
    st.just(b"") | described(0x78, maps(names, values)),
).map(b"".join)


def look(raw: bytes) -> None:
    """Read everything there is."""
    sections = split(raw)
    assert sections.delivery_count is None or sections.delivery_count >= 0
    assert isinstance(sections.copies(RETRY_HEADER), int)
    assert isinstance(sections.durable, bool)
    assert all(isinstance(value, bytes) for value in sections.headers.values())
    read = sections.key, sections.priority, sections.ttl, sections.properties, sections.application_properties
    assert len(read) == 5
    with suppress(Undecodable):
        assert isinstance(sections.body, bytes)


def outside(raw: bytes, *codes: int) -> list[tuple[int, bytes]]:
    """The sections of a message but those of `codes`, each with its bytes."""
    return [(code, raw[start:end]) for code, start, _, end in walk(raw) if code not in codes]


def entries(raw: bytes, section: int) -> dict[str, bytes]:
    """The raw values of a section that is a map, by name."""
    return {
        name: raw[at : skip(raw, at, end)]
        for code, _, start, end in walk(raw)
        if code == section
        for name, at in items(raw, start).items()
    }


@many
@given(letters)
def test_a_letter_comes_back(letter: Letter) -> None:
    """A-4.11, C-10.1: body, headers and key of what we publish are what we receive."""
    sections = split(encode(letter, durable=False))
    key = {} if letter.key is None else {"partition-key": letter.key.encode()}
    assert sections.headers == {**letter.headers, **key}
    assert (sections.body, sections.key, sections.delivery_count) == (letter.body, letter.key, None)
    durable = split(encode(letter, durable=True))
    assert (durable.durable, durable.delivery_count, durable.headers) == (True, 0, sections.headers)


@many
@given(messages)
def test_every_message_can_be_read(raw: bytes) -> None:
    """A-7.2: whatever types its sender used, a well-formed message is read to the end."""
    look(raw)


@many
@given(messages, st.integers(1, 10**18 - 1))
def test_a_copy_changes_what_it_must(raw: bytes, attempt: int) -> None:
    """DESIGN 6: a copy counts, is counted by no broker unless durable, and has every other byte of the original."""
    was = split(raw)
    new = copy(raw, retry_header=RETRY_HEADER, attempt=attempt)
    now = split(new)
    assert now.copies(RETRY_HEADER) == attempt
    assert now.delivery_count == (0 if was.durable else None)
    assert (now.durable, now.properties.user_id) == (was.durable, None)
    if was.durable:
        assert (now.priority, now.ttl) == (was.priority, was.ttl)
    assert outside(new, 0x70, 0x73, 0x74) == outside(raw, 0x70, 0x71, 0x73, 0x74)
    others = {name: raw for name, raw in entries(raw, 0x74).items() if name != RETRY_HEADER}
    assert entries(new, 0x74) == {**others, RETRY_HEADER: sized(0xA1, b"%d" % attempt)}
    assert dict(now.headers) == {**was.headers, RETRY_HEADER: b"%d" % attempt}
    assert copy(new, retry_header=RETRY_HEADER, attempt=attempt) == new


@many
@given(messages, ascii_text.map(bytes.decode), st.integers(0, (1 << 63) - 1), st.booleans())
def test_an_annotation_changes_one_section(raw: bytes, name: str, number: int, stamp: bool) -> None:
    """DESIGN 6, Scheduled: the annotation is there, the others stay, no other section is touched."""
    annotated = with_annotation(raw, name, Timestamp(number) if stamp else number)
    assert outside(annotated, 0x72) == outside(raw, 0x72)
    now = entries(annotated, 0x72)
    value = now.pop(name)
    assert (value[0] == 0x83) is stamp
    assert int.from_bytes(value[1:]) == number
    assert now == {other: raw for other, raw in entries(raw, 0x72).items() if other != name}


def withstand(raw: bytes) -> None:
    """Whatever the bytes are, whatever is done with them: it is done, or they are undecodable."""
    for call in (
        partial(look, raw),
        partial(copy, raw, retry_header=RETRY_HEADER, attempt=1),
        partial(with_annotation, raw, "a", 1),
    ):
        with suppress(Undecodable):
            call()
    assert isinstance(copy(raw), bytes)


@many
@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda noise: b"\x00\x53\x73\xc0" + noise))
@example(b"\x00\x53\x73\xc0\x02\x01\x00\x00\x53\x75\xa0\x00")
def test_noise_is_undecodable(raw: bytes) -> None:
    """A-7.4: bytes that are no message are undecodable and nothing else, in whatever way one looks at them."""
    withstand(raw)


@many
@given(messages, st.integers(0, 1000), st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), max_size=3))
def test_a_broken_message_is_undecodable(raw: bytes, cut: int, wrong: list[tuple[int, int]]) -> None:
    """A-7.4: a message cut short or with a wrong byte is read or undecodable; reading what was split never fails."""
    withstand(raw[: cut % (len(raw) + 1)])
    spoilt = bytearray(raw or b"\0")
    for at, byte in wrong:
        spoilt[at % len(spoilt)] = byte
    withstand(bytes(spoilt))
