"""The sections of an AMQP 1.0 message as they came (part 3 §3.2): found by their offsets, read on first use. Pure.

`split` passes over the sections once and checks everything that a later look needs: a message that it lets through
never fails a handler's look at its headers. Only `Sections.body` may still say `Undecodable`. `quick` says the same of
a message that is written as brokers and clients write most of them, at a third of the price, and of others nothing.

A header section is the broker's count: an absent field is 0, no section at all is None, and that difference decides in
`settlement.amqp`.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TypeAlias

import attrs

from links.amqp.wire.headers import Headers, copies, identity
from links.amqp.wire.values import (
    BINARY,
    LIST,
    LONG_BINARY,
    LONG_STRING,
    MAP,
    NAMES,
    NULL,
    STRING,
    Undecodable,
    Value,
    check,
    element,
    elements,
    items,
    scalar,
    skip,
    text,
)

__all__ = [
    "APPLICATION_PROPERTIES",
    "DELIVERY_ANNOTATIONS",
    "HEADER",
    "MESSAGE_ANNOTATIONS",
    "PROPERTIES",
    "Part",
    "Properties",
    "Sections",
    "quick",
    "split",
    "walk",
]

HEADER, DELIVERY_ANNOTATIONS, MESSAGE_ANNOTATIONS, PROPERTIES, APPLICATION_PROPERTIES = range(0x70, 0x75)
DATA, SEQUENCE, VALUE, FOOTER = range(0x75, 0x79)

_SYMBOLIC = {
    b"amqp:header:list": HEADER,
    b"amqp:delivery-annotations:map": DELIVERY_ANNOTATIONS,
    b"amqp:message-annotations:map": MESSAGE_ANNOTATIONS,
    b"amqp:properties:list": PROPERTIES,
    b"amqp:application-properties:map": APPLICATION_PROPERTIES,
    b"amqp:data:binary": DATA,
    b"amqp:amqp-sequence:list": SEQUENCE,
    b"amqp:amqp-value:*": VALUE,
    b"amqp:footer:map": FOOTER,
}

Part: TypeAlias = tuple[int, int, int, int]
"""One section: its code, where it begins, where its value begins, where it is over."""

_SMALL_UINT, _UINT_0 = 0x52, 0x43
_DURABLE, _PRIORITY, _TTL, _FIRST_ACQUIRER, _DELIVERY_COUNT = range(5)


def walk(raw: bytes) -> list[Part]:
    """The sections of a message, in the order that the standard gives them. Raises `Undecodable`."""
    parts: list[Part] = []
    at, end, last = 0, len(raw), HEADER - 1
    while at < end:
        start = at
        if raw.startswith(b"\x00\x53", at) and at + 2 < end:
            code, at = raw[at + 2], at + 3
        else:
            code, at = _descriptor(raw, at, end)
        if code <= last or code > FOOTER or DATA <= last < code < FOOTER:
            _check_order(last, code, start)
        value, at = at, skip(raw, at, end)
        parts.append((code, start, value, at))
        last = code
    return parts


def _descriptor(raw: bytes, at: int, end: int) -> tuple[int, int]:
    """A descriptor in one of its longer forms: ulong of nine bytes, symbol."""
    if raw[at]:
        raise Undecodable(f"a section is due at byte {at}, not a value of type {NAMES.get(raw[at], hex(raw[at]))}")
    behind = skip(raw, at + 1, end)
    value = scalar(raw, at + 1)
    match value:
        case int():
            return value, behind
        case str():
            return _SYMBOLIC.get(value.encode(), 0), behind
        case _:
            return 0, behind


def _check_order(last: int, code: int, at: int) -> None:
    if code == last and code in (DATA, SEQUENCE):
        return
    if not HEADER <= code <= FOOTER:
        raise Undecodable(f"the section at byte {at} is none of an AMQP 1.0 message")
    names = {code: name.decode().split(":")[1] for name, code in _SYMBOLIC.items()}
    raise Undecodable(f"the section {names[code]} at byte {at} comes after {names[last]}")


def split(raw: bytes) -> Sections:
    """Find the sections of a message. Raises `Undecodable`."""
    count: int | None = None
    header = properties = named = bodies = body = end = kind = 0
    for code, _, at, after in walk(raw):
        if code >= DATA:
            if code != FOOTER:
                if not bodies:
                    body, end = at, after
                    kind = code
                bodies += 1
        elif code == PROPERTIES:
            check(raw, at, LIST)
            properties = at
        elif code == APPLICATION_PROPERTIES:
            check(raw, at, MAP)
            named = at
        elif code == HEADER:
            check(raw, at, LIST)
            header = at
            count = _count(raw, at)
    return Sections(raw, count, header, properties, named, kind, body, end, bodies)


def _count(raw: bytes, header: int) -> int:
    """The field delivery-count of a header section; absent or null, it is 0 (part 3 §3.2.1)."""
    at = element(raw, header, _DELIVERY_COUNT)
    if at is None:
        return 0
    if raw[at] == _UINT_0:
        return 0
    if raw[at] == _SMALL_UINT:
        return raw[at + 1]
    count = scalar(raw, at)
    if count is None:
        return 0
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise Undecodable(f"delivery-count is a whole number, not a value of type {type(count).__name__}")
    return count


# --- a message as most are

_SHORT = 0x53
"""A descriptor in its shortest form: 0, this, and the section's code."""
_FOUR = struct.Struct(">I").unpack_from


def quick(raw: bytes) -> tuple[int | None, int, int, int] | None:
    """As `split`, where each section has its short descriptor and the body is one data section; None: look closer.

    Gives the delivery-count, and where the properties, the application properties (0: there are none) and the body
    begin. (It looks at single bytes, since `startswith` or a slice costs as much as five of them.)
    """
    count: int | None = None
    at = properties = named = 0
    last, end = HEADER - 1, len(raw)
    try:
        while not raw[at] and raw[at + 1] == _SHORT:
            code, at = raw[at + 2], at + 3
            if code <= last:
                return None
            last = code
            if code == DATA:
                over = at + (2 + raw[at + 1] if raw[at] == BINARY else 5 + _FOUR(raw, at + 1)[0])
                return (count, properties, named, at) if over == end and raw[at] in (BINARY, LONG_BINARY) else None
            if code == APPLICATION_PROPERTIES:
                named, at = at, check(raw, at, MAP)
            elif code == PROPERTIES:
                properties, at = at, check(raw, at, LIST)
            elif code != HEADER:
                at = skip(raw, at, end)
            elif raw[at] == LIST:
                header, at = at, at + 2 + raw[at + 1]
                count = _counted(raw[header:at])
            else:
                return None
    except (IndexError, struct.error, Undecodable):
        pass
    return None


@lru_cache(256)
def _counted(header: bytes) -> int:
    """The delivery-count of a header section; those of a queue are much the same, so they are remembered."""
    check(header, 0, LIST)
    return _count(header, 0)


@attrs.frozen
class Properties:
    """The properties section (part 3 §3.2.4). What a field holds is its sender's word; its type is not checked.

    Attributes:
        message_id: The message's name: an unsigned number, a UUID, bytes or a text. None, the default here and below:
            not set.
        user_id: Who made the message: bytes.
        to: The address that it goes to.
        subject: What it is about: a text.
        reply_to: The address that an answer goes to.
        correlation_id: Which message it answers, as that one's `message_id` says.
        content_type: The MIME type of its body: a `Symbol`.
        content_encoding: What else was done to its body, such as `gzip`: a `Symbol`.
        absolute_expiry_time: When it is worth nothing any more: a `Timestamp`, milliseconds since 1970.
        creation_time: When it was made: a `Timestamp`, milliseconds since 1970.
        group_id: The group that it belongs to: a text, a delivery's `key`.
        group_sequence: Its place in the group: a number of 32 bits.
        reply_to_group_id: The group that an answer belongs to: a text.
    """

    message_id: Value = None
    user_id: Value = None
    to: Value = None
    subject: Value = None
    reply_to: Value = None
    correlation_id: Value = None
    content_type: Value = None
    content_encoding: Value = None
    absolute_expiry_time: Value = None
    creation_time: Value = None
    group_id: Value = None
    group_sequence: Value = None
    reply_to_group_id: Value = None


_FIELDS = len(attrs.fields(Properties))


@attrs.define(eq=False)
class Sections:
    """A message as it came, and where its sections are.

    Attributes:
        raw: The whole message, encoded.
        delivery_count: How often the broker says that it delivered before, 0 or more (part 3 §3.2.1); None: there is no
            header section, it does not say.
        properties_at: Where the list of the properties section begins, an offset into `raw`; 0, the default: there is
            none.
        named_at: Where the map of the application properties begins, likewise.
    """

    raw: bytes
    delivery_count: int | None
    _header: int = 0
    """Where the list of its fields begins; 0: there is none."""
    properties_at: int = 0
    named_at: int = 0
    _kind: int = 0
    """Of the body's first section."""
    _at: int = 0
    _end: int = 0
    _bodies: int = 0

    @property
    def durable(self) -> bool:
        """Shall the message outlive the broker's restart?"""
        return self._field(_DURABLE) is True

    @property
    def priority(self) -> int | None:
        """None: not said, which means 4."""
        return self._number(_PRIORITY)

    @property
    def ttl(self) -> int | None:
        """How long the message is worth delivering, in milliseconds; None: for ever."""
        return self._number(_TTL)

    @property
    def properties(self) -> Properties:
        """The properties section, each field in its type."""
        if not self.properties_at:
            return Properties()
        return Properties(*[scalar(self.raw, at) for at in elements(self.raw, self.properties_at)[:_FIELDS]])

    @property
    def application_properties(self) -> dict[str, Value]:
        """The application properties, each in its type."""
        return (
            {name: scalar(self.raw, at) for name, at in items(self.raw, self.named_at).items()} if self.named_at else {}
        )

    @property
    def headers(self) -> Headers:
        """Well-known headers and application properties, as text names to bytes."""
        return Headers(self.raw, self.properties_at, self.named_at)

    @property
    def key(self) -> str | None:
        """The group-id."""
        return identity(self.raw, self.properties_at)[1]

    @property
    def body(self) -> bytes:
        """The body: data sections end to end; an amqp-value that is a binary, a string or null; none is empty.

        Raises `Undecodable` for a body that has no bytes.
        """
        if not self._bodies:
            return b""
        at = self._at
        if self._kind == DATA:
            if self._bodies == 1:
                return self._data(at, self._end)
            return b"".join([self._data(at, end) for code, _, at, end in walk(self.raw) if code == DATA])
        if self._kind == SEQUENCE:
            raise Undecodable("the body is an amqp-sequence; links.amqp reads data sections, binaries and strings")
        kind = self.raw[at]
        if kind == NULL:
            return b""
        if kind not in (BINARY, LONG_BINARY, STRING, LONG_STRING):
            raise Undecodable(
                f"the body is an amqp-value of type {NAMES[kind]}; links.amqp reads data sections, binaries and strings"
            )
        return text(self.raw, at) or b""

    def copies(self, retry_header: str) -> int:
        """How many copies stand behind this message, by its application property of this name (0: absent)."""
        return copies(self.raw, self.named_at, retry_header)

    def _data(self, at: int, end: int) -> bytes:
        code = self.raw[at]
        if code == BINARY:
            return self.raw[at + 2 : end]
        if code == LONG_BINARY:
            return self.raw[at + 5 : end]
        raise Undecodable(f"a data section holds a binary, not a value of type {NAMES[code]}")

    def _field(self, field: int) -> Value:
        at = element(self.raw, self._header, field) if self._header else None
        return None if at is None else scalar(self.raw, at)

    def _number(self, field: int) -> int | None:
        value = self._field(field)
        return value if isinstance(value, int) and not isinstance(value, bool) else None
