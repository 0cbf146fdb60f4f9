"""The message layer of links.amqp without a broker: what is read out of bytes that are typed from the standard."""

from decimal import Decimal
from uuid import UUID

import pytest

from links.amqp.wire.sections import Properties, Sections, split
from links.amqp.wire.values import Other, Symbol, Timestamp, Undecodable, Value
from settlement.attempts import RETRY_HEADER

pytestmark = pytest.mark.amqp

DATA = b"\x00\x53\x75\xa0\x02hi"
IDENTITY = bytes(range(16))


def section(code: int, value: bytes) -> bytes:
    return b"\x00\x53" + bytes((code,)) + value


def listed(*values: bytes) -> bytes:
    payload = b"".join(values)
    return bytes((0xC0, len(payload) + 1, len(values))) + payload


def mapped(*pairs: tuple[bytes, bytes]) -> bytes:
    payload = b"".join(key + value for key, value in pairs)
    return b"\xd1" + (len(payload) + 4).to_bytes(4) + (2 * len(pairs)).to_bytes(4) + payload


def text(value: bytes) -> bytes:
    return b"\xa1" + bytes((len(value),)) + value


def with_property(value: bytes) -> Sections:
    return split(section(0x74, mapped((text(b"it"), value))) + DATA)


def with_id(value: bytes) -> Sections:
    return split(section(0x73, listed(value)) + DATA)


# --- counting


def test_no_header_section_is_no_count() -> None:
    """A-3.2: a message without a header section has no count of the broker's."""
    assert split(DATA).delivery_count is None


@pytest.mark.parametrize(
    "header",
    [
        b"\x45",
        b"\xc0\x01\x00",
        b"\xd0\x00\x00\x00\x04\x00\x00\x00\x00",
        b"\x40",
        listed(b"\x41"),
        listed(b"\x42", b"\x50\x04", b"\x40", b"\x41", b"\x40"),
        listed(b"\x42", b"\x50\x04", b"\x40", b"\x41", b"\x43"),
    ],
)
def test_a_header_section_without_the_field_counts_nought(header: bytes) -> None:
    """A-3.5: an absent or null delivery-count in a header section is 0, which is not None."""
    sections = split(section(0x70, header) + DATA)
    assert (sections.delivery_count, sections.body) == (0, b"hi")


@pytest.mark.parametrize("code", [b"\x53\x70", b"\x80" + bytes(7) + b"\x70", b"\xa3\x10amqp:header:list"])
@pytest.mark.parametrize(("count", "number"), [(b"\x52\x03", 3), (b"\x70\x00\x01\x00\x00", 65536)])
def test_every_descriptor_of_a_header_section_counts(code: bytes, count: bytes, number: int) -> None:
    """A-3.5: the header section is found under its small, its full and its symbolic descriptor."""
    raw = b"\x00" + code + listed(b"\x41", b"\x50\x07", b"\x70\x00\x00\x03\xe8", b"\x42", count) + DATA
    sections = split(raw)
    assert (sections.delivery_count, sections.durable, sections.priority, sections.ttl) == (number, True, 7, 1000)


def test_no_header_section_says_nothing_of_durability() -> None:
    """Part 3 §3.2.1: without a header section a message is not durable, of the usual priority, and never too old."""
    sections = split(DATA)
    assert (sections.durable, sections.priority, sections.ttl) == (False, None, None)


def test_a_priority_that_is_no_number_is_not_said() -> None:
    """Part 3 §3.2.1: what nobody decides by is no reason to lose a message."""
    sections = split(section(0x70, listed(text(b"yes"), b"\x41", text(b"soon"))) + DATA)
    assert (sections.durable, sections.priority, sections.ttl) == (False, None, None)


@pytest.mark.parametrize("count", [b"\xa1\x013", b"\x41", b"\x54\xff", b"\x82" + bytes(8)])
def test_a_count_that_is_none_is_undecodable(count: bytes) -> None:
    """A-3.1: a delivery-count is a whole number; anything else is no message to count by."""
    with pytest.raises(Undecodable, match="delivery-count is a whole number"):
        split(section(0x70, listed(b"\x42", b"\x40", b"\x40", b"\x41", count)) + DATA)


@pytest.mark.parametrize(
    ("value", "count"),
    [(text(b"2"), 2), (b"\x55\x02", 2), (b"\xa0\x012", 2), (text(b"two"), 0), (b"\x40", 0), (b"\x54\xff", 0)],
)
def test_the_retry_count_is_read_from_the_application_property(value: bytes, count: int) -> None:
    """C-2.3: the retry count is a decimal number however its sender typed it; anything else counts as absent."""
    raw = section(0x74, mapped((text(b"a"), text(b"9")), (text(RETRY_HEADER.encode()), value))) + DATA
    assert split(raw).copies(RETRY_HEADER) == count


def test_no_retry_count_is_no_copy() -> None:
    """C-2.2: a message without the retry count stands behind no copy."""
    assert [split(DATA).copies(RETRY_HEADER), with_property(text(b"3")).copies(RETRY_HEADER)] == [0, 0]


# --- bodies


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", b""),
        (section(0x75, b"\xa0\x00"), b""),
        (section(0x75, b"\xb0\x00\x00\x00\x02hi"), b"hi"),
        (b"\x00\xa3\x10amqp:data:binary\xa0\x02hi", b"hi"),
        (DATA + section(0x75, b"\xb0\x00\x00\x00\x01 ") + section(0x75, b"\xa0\x05there"), b"hi there"),
        (section(0x77, b"\xa0\x02\x00\xff"), b"\x00\xff"),
        (section(0x77, b"\xb0\x00\x00\x00\x02hi"), b"hi"),
        (section(0x77, text("é".encode())), "é".encode()),
        (section(0x77, b"\xb1\x00\x00\x00\x02hi"), b"hi"),
        (section(0x77, b"\x40"), b""),
        (DATA + section(0x78, b"\xc1\x01\x00"), b"hi"),
    ],
)
def test_a_body_of_bytes(body: bytes, expected: bytes) -> None:
    """A-7.3: data sections end to end, an amqp-value of a binary, a string or null; no body section is empty."""
    assert split(section(0x73, b"\x45") + body).body == expected


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (section(0x76, listed(text(b"a"))), "amqp-sequence"),
        (section(0x76, b"\x45") * 2, "amqp-sequence"),
        (section(0x77, b"\x54\x05"), "amqp-value of type int"),
        (section(0x77, b"\xc1\x01\x00"), "amqp-value of type map"),
        (section(0x77, b"\x00\x53\x01\xa0\x01x"), "amqp-value of type described value"),
        (section(0x77, b"\xa3\x02hi"), "amqp-value of type symbol"),
        (section(0x75, text(b"hi")), "a binary, not a value of type string"),
        (DATA + section(0x75, b"\x40"), "a binary, not a value of type null"),
    ],
)
def test_a_body_without_bytes_is_named(body: bytes, what: str) -> None:
    """A-7.3: another body is undecodable, says what it is, and leaves the headers readable."""
    sections = split(section(0x73, listed(text(b"m-1"))) + body)
    assert sections.headers == {"message-id": b"m-1"}
    with pytest.raises(Undecodable, match=what):
        _ = sections.body


# --- headers


@pytest.mark.parametrize(
    ("value", "typed", "header"),
    [
        (b"\x41", True, b"true"),
        (b"\x42", False, b"false"),
        (b"\x56\x01", True, b"true"),
        (b"\x56\x00", False, b"false"),
        (b"\x50\xff", 255, b"255"),
        (b"\x60\x01\x00", 256, b"256"),
        (b"\x43", 0, b"0"),
        (b"\x52\x07", 7, b"7"),
        (b"\x70\xff\xff\xff\xff", 4294967295, b"4294967295"),
        (b"\x44", 0, b"0"),
        (b"\x53\x07", 7, b"7"),
        (b"\x80" + b"\xff" * 8, 18446744073709551615, b"18446744073709551615"),
        (b"\x51\xff", -1, b"-1"),
        (b"\x61\xff\xfe", -2, b"-2"),
        (b"\x54\xfd", -3, b"-3"),
        (b"\x71\x80\x00\x00\x00", -2147483648, b"-2147483648"),
        (b"\x55\xfc", -4, b"-4"),
        (b"\x81" + b"\x80" + bytes(7), -9223372036854775808, b"-9223372036854775808"),
        (b"\x72\x3f\xc0\x00\x00", 1.5, b"1.5"),
        (b"\x82\xbf\xf8" + bytes(6), -1.5, b"-1.5"),
        (b"\x83\x00\x00\x01\x8b\xcf\xe5\x68\x00", Timestamp(1700000000000), b"1700000000000"),
        (b"\x98" + IDENTITY, UUID(bytes=IDENTITY), b"00010203-0405-0607-0809-0a0b0c0d0e0f"),
        (b"\x73\x00\x01\xf4\x07", "\U0001f407", "\U0001f407".encode()),
        (b"\x73\x00\x00\xd8\x00", "\ufffd", "\ufffd".encode()),
        (b"\xa0\x02\x00\xff", b"\x00\xff", b"\x00\xff"),
        (b"\xb0\x00\x00\x00\x01\xff", b"\xff", b"\xff"),
        (text("ü".encode()), "ü", "ü".encode()),
        (b"\xb1\x00\x00\x00\x02hi", "hi", b"hi"),
        (b"\xa3\x02ok", Symbol("ok"), b"ok"),
        (b"\xb3\x00\x00\x00\x02ok", Symbol("ok"), b"ok"),
        (text(b"\xff"), "\\xff", b"\xff"),
        (b"\x74\x32\x00\x00\x0f", Decimal("1.5"), b"1.5"),
        (b"\x74\xb2\x00\x00\x0f", Decimal("-1.5"), b"-1.5"),
        (b"\x74\x6c\xb8\x96\x7f", Decimal(9999999), b"9999999"),
        (b"\x74\x77\xff\xff\xff", Decimal("0E90"), b"0E+90"),
        (b"\x74\x78\x00\x00\x00", Decimal("Infinity"), b"Infinity"),
        (b"\x74\xf8\x00\x00\x00", Decimal("-Infinity"), b"-Infinity"),
        (b"\x84\x31\xa0" + bytes(5) + b"\x0f", Decimal("1.5"), b"1.5"),
        (b"\x94\x30\x3e" + bytes(13) + b"\x0f", Decimal("1.5"), b"1.5"),
    ],
)
def test_an_application_property_in_its_type_and_as_a_header(value: bytes, typed: Value, header: bytes) -> None:
    """A-7.2: true and false, numbers as decimals, timestamps in ms, ids as text, text as UTF-8, binaries as such."""
    sections = with_property(value)
    read = sections.application_properties["it"]
    assert (read, type(read)) == (typed, type(typed))
    assert sections.headers == {"it": header}


@pytest.mark.parametrize("value", [b"\x74\x7c\x00\x00\x00", b"\x72\x7f\xc0\x00\x00"])
def test_not_a_number_is_a_header_all_the_same(value: bytes) -> None:
    """A-7.2: a number that is none has a text, too."""
    assert with_property(value).headers["it"].lower() == b"nan"


@pytest.mark.parametrize(
    ("value", "typed"),
    [
        (b"\x40", None),
        (listed(b"\x41"), Other("list", listed(b"\x41"))),
        (b"\x45", Other("list", b"\x45")),
        (mapped((text(b"a"), b"\x41")), Other("map", mapped((text(b"a"), b"\x41")))),
        (b"\xe0\x04\x02\x50\x01\x02", Other("array", b"\xe0\x04\x02\x50\x01\x02")),
        (b"\x00\x53\x01\x00\x53\x02\x41", Other("described value", b"\x00\x53\x01\x00\x53\x02\x41")),
    ],
)
def test_a_value_without_a_text_is_no_header(value: bytes, typed: Value) -> None:
    """A-7.2: null, lists, maps, arrays and described values are kept with the message, and are no header."""
    sections = with_property(value)
    assert (sections.application_properties, dict(sections.headers)) == ({"it": typed}, {})


@pytest.mark.parametrize(
    ("value", "header"),
    [
        (b"\x44", b"0"),
        (b"\x53\x07", b"7"),
        (b"\x80" + b"\xff" * 8, b"18446744073709551615"),
        (b"\x98" + IDENTITY, b"00010203-0405-0607-0809-0a0b0c0d0e0f"),
        (b"\xa0\x02\x00\xff", b"\x00\xff"),
        (text(b"m-1"), b"m-1"),
        (b"\xb1\x00\x00\x00\x03m-1", b"m-1"),
    ],
)
def test_a_message_id_of_every_type(value: bytes, header: bytes) -> None:
    """A-7.2: ids of type ulong are decimals, of type uuid canonical text, of type binary raw bytes."""
    assert with_id(value).headers == {"message-id": header}


def test_the_well_known_properties_are_headers() -> None:
    """A-7.2: message-id, reply-to, correlation-id, content-type and group-id are headers of these names."""
    none = b"\x40"
    raw = section(
        0x73,
        listed(
            *(text(b"m"), b"\xa0\x01u", text(b"to"), none, text(b"back"), b"\x53\x05", b"\xa3\x0atext/plain", none),
            *(b"\x83" + bytes(8), b"\x83" + bytes(7) + b"\x09", text(b"lane"), b"\x52\x03", text(b"answers")),
        ),
    )
    sections = split(raw + DATA)
    assert sections.key == "lane"
    assert sections.headers == {
        "message-id": b"m",
        "reply-to": b"back",
        "correlation-id": b"5",
        "content-type": b"text/plain",
        "partition-key": b"lane",
    }
    assert sections.properties == Properties(
        message_id="m",
        user_id=b"u",
        to="to",
        reply_to="back",
        correlation_id=5,
        content_type=Symbol("text/plain"),
        absolute_expiry_time=Timestamp(0),
        creation_time=Timestamp(9),
        group_id="lane",
        group_sequence=3,
        reply_to_group_id="answers",
    )


def test_fields_that_the_standard_does_not_know_are_passed_over() -> None:
    """Part 3 §3.2.4: there are thirteen properties; a later standard's are its own."""
    sections = split(section(0x73, listed(text(b"m"), *[b"\x40"] * 12, text(b"new"))) + DATA)
    assert sections.properties == Properties(message_id="m")


def test_no_properties_section_is_no_property() -> None:
    """Part 3 §3.2: every section may be missing."""
    sections = split(DATA)
    assert (sections.properties, sections.application_properties, sections.key) == (Properties(), {}, None)
    assert dict(sections.headers) == {}


def test_a_well_known_header_hides_an_application_property_of_its_name() -> None:
    """A-7.2: one name is one header; the field that the standard has for it is seen where it is set."""
    named = section(0x74, mapped((text(b"message-id"), text(b"theirs")), (text(b"reply-to"), text(b"there"))))
    headers = split(section(0x73, listed(text(b"ours"))) + named + DATA).headers
    assert headers == {"message-id": b"ours", "reply-to": b"there"}


def test_a_name_may_be_a_symbol_or_long_and_other_keys_have_no_name() -> None:
    """A-7.2: names are text, in every form that text has; a key that is none is passed over."""
    pairs = (
        (b"\xa3\x01s", b"\x41"),
        (b"\xb1\x00\x00\x00\x01l", b"\x42"),
        (b"\x54\x05", b"\x41"),
        (text(b"\xff"), b"\x43"),
    )
    assert split(section(0x74, mapped(*pairs)) + DATA).headers == {"s": b"true", "l": b"false", "\\xff": b"0"}


def test_headers_are_read_once_and_only_when_looked_at() -> None:
    """DESIGN 6: sections are decoded on first use."""
    headers = with_property(text(b"1")).headers
    assert headers._read is None
    assert ("it" in headers, "other" in headers, len(headers), headers.get("other"), repr(headers)) == (
        True,
        False,
        1,
        None,
        "{'it': b'1'}",
    )
    assert headers["it"] is headers["it"]
    with pytest.raises(KeyError):
        headers["other"]


# --- what is no message


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"\xff\x00garbage", "a section is due at byte 0, not a value of type 0xff"),
        (DATA + b"\x41", "a section is due at byte 7, not a value of type boolean"),
        (b"\x00", "cut short"),
        (b"\x00\x53", "cut short"),
        (b"\x00\x53\x75", "cut short"),
        (b"\x00\x53\x75\xa0\x03hi", "cut short"),
        (b"\x00\x53\x75\xb0\xff\xff\xff\xffhi", "cut short"),
        (b"\x00\x53\x75\xb0\x00", "cut short"),
        (b"\x00\x53\x75\x3f", "no AMQP type 0x3f"),
        (b"\x00\x53\x75\x47", "no AMQP type 0x47"),
        (b"\x00\x53\x10" + b"\x45", "none of an AMQP 1.0 message"),
        (b"\x00\x53\x79" + b"\x45", "none of an AMQP 1.0 message"),
        (b"\x00\xa3\x05other\x45", "none of an AMQP 1.0 message"),
        (b"\x00\x98" + IDENTITY + b"\x45", "none of an AMQP 1.0 message"),
        (DATA + section(0x73, b"\x45"), "the section properties at byte 7 comes after data"),
        (section(0x70, b"\x45") * 2, "the section header at byte 4 comes after header"),
        (DATA + section(0x77, b"\x40"), "the section amqp-value at byte 7 comes after data"),
        (section(0x77, b"\x40") * 2, "the section amqp-value at byte 4 comes after amqp-value"),
        (section(0x70, b"\xc1\x01\x00"), "a list is due at byte 3, not a value of type map"),
        (section(0x74, b"\x45"), "a map is due at byte 3, not a value of type list"),
        (section(0x73, b"\xc0\x00"), "smaller than its own count"),
        (section(0x73, b"\xd0\x00\x00\x00\x03\x00\x00\x00"), "smaller than its own count"),
        (section(0x73, b"\xc0\x02\x02\x40") + DATA, "a value is missing at byte 7"),
        (section(0x73, b"\xc0\x03\x01\x40\x40"), "not as many values as it says"),
        (section(0x73, b"\xd0\x00\x00\x00\x05\xff\xff\xff\xff\x40"), "not as many values as it says"),
        (section(0x73, b"\xc0\x02\x01\x00") + DATA, "cut short"),
        (section(0x74, b"\xc1\x04\x01\xa1\x01a"), "not as many keys and values as it says"),
        (section(0x74, b"\xc1\x04\x02\xa1\x01a"), "not as many keys and values as it says"),
        (section(0x74, b"\xc1\x09\x03\xa1\x01a\x40\xa1\x01b\x40"), "not as many keys and values as it says"),
        (section(0x74, b"\xc1\x02\x02\xa1"), "not as many keys and values as it says"),
        (section(0x74, b"\xd1\x00\x00\x00\x06\xff\xff\xff\xff\x40\x40"), "not as many keys and values as it says"),
    ],
)
def test_what_is_no_message_is_undecodable(raw: bytes, what: str) -> None:
    """A-7.4: malformed, truncated and alien bytes are undecodable, and the error says what is wrong with them."""
    with pytest.raises(Undecodable, match=what):
        split(raw)


def test_depth_costs_no_stack_and_sizes_no_time() -> None:
    """A-7.4: a million levels, a million sections and four thousand million values end like everything else."""
    deep = b"\x00" * 1_000_000
    for raw in (deep, deep + b"\x53\x75" * 1_000_000, section(0x77, deep), section(0x73, listed(b"\x00")) + deep):
        with pytest.raises(Undecodable):
            split(raw)
    nested = b"\x45"
    for _ in range(10_000):
        nested = b"\xd0" + (len(nested) + 4).to_bytes(4) + b"\x00\x00\x00\x01" + nested
    assert isinstance(with_property(nested).application_properties["it"], Other)
    assert split(section(0x75, b"\xa0\x01x") * 100_000).body == b"x" * 100_000
