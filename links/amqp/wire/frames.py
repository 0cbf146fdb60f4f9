"""AMQP's frames, and as much of them as a flow and the SASL layer need; pure bytes.

Part 2.3: a frame is a size (4 bytes), a data offset (1, in words), a type (1), a channel (2), and a performative, which
is a described list.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from links.amqp.wire.values import LIST, compound, elements, scalar, skip

__all__ = [
    "ATTACH",
    "BEGIN",
    "DISPOSITION",
    "FLOW",
    "TRANSFER",
    "Frame",
    "FramePicker",
    "Frames",
    "LinkState",
    "WireError",
    "drains",
    "fields_of",
    "flow_frame",
    "link_state",
    "packed",
    "reaches",
    "uint",
    "wants_echo",
    "with_echo",
]

BEGIN: Final = 0x11
ATTACH: Final = 0x12
FLOW: Final = 0x13
TRANSFER: Final = 0x14
DISPOSITION: Final = 0x15

_NULL, _TRUE, _LONG_TRUE = b"\x40", b"\x41", b"\x56\x01"
_HEADER = 8
_SMALLEST = 11
"""With so many bytes a frame tells its performative; a heartbeat at the end is looked at with what follows."""
_PERFORMATIVE: Final = struct.Struct(">IBBHBBB").unpack_from
"""A frame's header, and the descriptor of its performative in its usual form, `_SHORT`."""
_SHORT: Final = 0x53
_AMQP: Final = int.from_bytes(b"AMQP", "big")
_WATCHED: Final = frozenset({BEGIN, ATTACH, FLOW})
_HANDLE, _DELIVERY_COUNT, _CREDIT, _DRAIN, _ECHO = 4, 5, 6, 8, 9
"""Fields of a flow (part 2.7.4)."""
_SERIAL, _HALF = 0xFFFFFFFF, 1 << 31


class WireError(ValueError):
    """These bytes are no frames of AMQP."""


class Frame(NamedTuple):
    """A whole frame."""

    channel: int
    code: int
    """The performative's descriptor; 0: an empty frame."""
    data: bytes
    start: int
    """Where the frame starts in `data`."""
    begin: int
    """Where its performative begins."""
    end: int

    @property
    def raw(self) -> bytes:
        """Its bytes."""
        return self.data[self.start : self.end]


class Frames:
    """Cuts one direction of a connection into frames. It keeps no more than one that is not whole yet."""

    def __init__(self, most: int = 2**32) -> None:
        self.most = most
        """The largest frame that is allowed."""
        self.kept = b""
        """The beginning of a frame."""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes; their `data` begins with what was kept. Raises `WireError`."""
        if self.kept:
            data = self.kept + data
        at, size = 0, len(data)
        while size - at >= _HEADER:
            if data.startswith(b"AMQP", at):
                at += _HEADER
                continue
            length = int.from_bytes(data[at : at + 4], "big")
            if not _HEADER <= length <= self.most:
                raise WireError(f"there is no frame of {length} bytes")
            if size - at < length:
                break
            start, begin, end = at, at + 4 * data[at + 4], at + length
            channel = (data[at + 6] << 8) | data[at + 7]
            at = end
            yield Frame(channel, _code(data, begin, end), data, start, begin, end)
        self.kept = data[at:]


class FramePicker:
    """Picks begins, attaches and flows out of one direction of a connection; passes over the rest as fast as it can."""

    def __init__(self) -> None:
        self._kept = b""
        self._skip = 0
        """Bytes to come of a frame that does not matter."""

    def feed(self, data: bytes) -> list[Frame]:
        """The begins, attaches and flows that `data` completes."""
        found: list[Frame] = []
        if self._kept:
            data = self._kept + data
        at, size = self._skip, len(data)
        while size - at >= _SMALLEST:
            length, offset, _, channel, constructor, descriptor, code = _PERFORMATIVE(data, at)
            if length == _AMQP:  # a protocol header
                length = _HEADER
            elif code in _WATCHED and length >= _SMALLEST and offset == 2:  # noqa: PLR2004 -- words, 8 bytes
                if size - at < length:
                    break
                if not constructor and descriptor == _SHORT:
                    found.append(Frame(channel, code, data, at, at + _HEADER, at + length))
            at += max(length, _HEADER)
        self._skip, self._kept = (at - size, b"") if at >= size else (0, data[at:])
        return found


def _code(data: bytes, begin: int, end: int) -> int:
    if begin + 2 >= end:
        return 0
    if data.startswith(b"\x00\x53", begin):
        return data[begin + 2]
    code = scalar(data, begin + 1)
    return code if isinstance(code, int) else 0


def fields_of(frame: Frame) -> list[bytes]:
    """The encoded fields of a performative; fields at the end that say nothing may be missing."""
    data, begin, end = frame.data, frame.begin, frame.end
    at = skip(data, begin + 1, end)
    return [data[field : skip(data, field, end)] for field in elements(data, at)]


def uint(value: int) -> bytes:
    """A uint."""
    return b"\x70" + (value & 0xFFFFFFFF).to_bytes(4, "big")


def packed(code: int, fields: Sequence[bytes], channel: int = 0, kind: int = 0) -> bytes:
    """A frame with one performative; kind 1: SASL."""
    body = b"\x00\x53%c%b" % (code, compound(LIST, len(fields), b"".join(fields)))
    return struct.pack(">IBBH", _HEADER + len(body), 2, kind, channel) + body


def flow_frame(
    channel: int,
    handle: bytes,
    *,
    incoming: int,
    outgoing: int,
    window: int,
    delivery_count: int,
    credit: int,
    drain: bool = False,
) -> bytes:
    """The flow with which a sender tells the state of its link."""
    session = [uint(incoming), uint(window), uint(outgoing), uint(window)]
    link = [handle, uint(delivery_count), uint(credit)]
    return packed(FLOW, [*session, *link, *([_NULL, _TRUE] if drain else [])], channel)


class LinkState(NamedTuple):
    """What a flow says of a link (part 2.7.4)."""

    handle: int
    limit: int
    """delivery-count + link-credit, which stays as it is while messages pass: the last one that may be sent."""
    drain: bool


def link_state(frame: Frame) -> LinkState | None:
    """Read a flow; None: it speaks of its session alone."""
    fields = fields_of(frame)
    if len(fields) <= _CREDIT or fields[_HANDLE] == _NULL:
        return None
    limit = (_number(fields[_DELIVERY_COUNT]) + _number(fields[_CREDIT])) & _SERIAL
    drain = len(fields) > _DRAIN and fields[_DRAIN] in (_TRUE, _LONG_TRUE)
    return LinkState(_number(fields[_HANDLE]), limit, drain)


def reaches(limit: int, wanted: int) -> bool:
    """Is this limit the wanted one, or a later one? They are serial numbers of 32 bits (RFC 1982)."""
    return (limit - wanted) & _SERIAL < _HALF


def _number(field: bytes) -> int:
    value = scalar(field, 0)
    return value if isinstance(value, int) else 0


def with_echo(frame: Frame) -> bytes:
    """The same flow, asking for an answer."""
    fields = fields_of(frame)
    fields += [_NULL] * (_ECHO + 1 - len(fields))
    fields[_ECHO] = _TRUE
    return packed(FLOW, fields, frame.channel)


def wants_echo(frame: Frame) -> bool:
    """Does this flow ask for the state of a link?"""
    return _says(frame, _ECHO)


def drains(frame: Frame) -> bool:
    """Does this flow drain a link?"""
    return _says(frame, _DRAIN)


def _says(frame: Frame, flag: int) -> bool:
    fields = fields_of(frame)
    return len(fields) > flag and fields[flag] in (_TRUE, _LONG_TRUE) and fields[_HANDLE] != _NULL
