"""AMQP 1.0 values in bytes: how long one is, what it says, how one is written. Pure; one value, never a tree.

Part 1 §1.2 of the standard: the upper half of a constructor says how a value's length is found, so that any value can
be passed over without being read; a list, a map or an array is passed over by its size, however deep it is. Nothing in
here recurses, and nothing loops longer than the bytes are.

Text that is not UTF-8 is no reason to lose a message: a header keeps its bytes, a `str` has backslash escapes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from decimal import Decimal
from typing import Any, TypeAlias
from uuid import UUID

import attrs

__all__ = [
    "LIST",
    "MAP",
    "NULL",
    "Other",
    "Symbol",
    "Timestamp",
    "Undecodable",
    "Value",
    "check",
    "compound",
    "element",
    "elements",
    "items",
    "opened",
    "scalar",
    "skip",
    "string",
    "symbol",
    "text",
    "unsigned",
    "variable",
]


class Undecodable(ValueError):
    """The bytes are no AMQP 1.0 message, or one whose body has no bytes. It says what is wrong, never what is in it."""


class Symbol(str):
    """An AMQP symbol: a name from a limited set."""

    __slots__ = ()


class Timestamp(int):
    """Milliseconds since the Unix epoch."""

    __slots__ = ()


@attrs.frozen
class Other:
    """A value that is kept and not read: a list, a map, an array, a described value.

    Attributes:
        type: What it is, such as `list`, `described value`.
        raw: Its bytes, with its constructor.
    """

    type: str
    raw: bytes


Value: TypeAlias = bool | int | float | str | bytes | UUID | Decimal | Other | None
"""A `char` is a text of one character; a `Symbol` and a `Timestamp` say that they are."""

NULL = 0x40
BINARY, STRING, SYMBOL = 0xA0, 0xA1, 0xA3
"""With a size of one byte."""
LONG_BINARY, LONG_STRING, LONG_SYMBOL = 0xB0, 0xB1, 0xB3
"""With a size of four."""
LIST, MAP = 0xC0, 0xC1
"""With a size of one byte; `_LARGER` more: with a size of four."""
_LARGER = 0x10
_LIST_0 = 0x45
_DESCRIBED = 0x00
_ONE_BYTE = 256
"""The first size that a size of one byte cannot say."""

NAMES = {
    _DESCRIBED: "described value",
    NULL: "null", 0x41: "boolean", 0x42: "boolean", 0x56: "boolean",
    0x50: "ubyte", 0x60: "ushort", 0x43: "uint", 0x52: "uint", 0x70: "uint",
    0x44: "ulong", 0x53: "ulong", 0x80: "ulong",
    0x51: "byte", 0x61: "short", 0x54: "int", 0x71: "int", 0x55: "long", 0x81: "long",
    0x72: "float", 0x82: "double", 0x74: "decimal32", 0x84: "decimal64", 0x94: "decimal128",
    0x73: "char", 0x83: "timestamp", 0x98: "uuid",
    0xA0: "binary", 0xB0: "binary", 0xA1: "string", 0xB1: "string", 0xA3: "symbol", 0xB3: "symbol",
    _LIST_0: "list", 0xC0: "list", 0xD0: "list", 0xC1: "map", 0xD1: "map", 0xE0: "array", 0xF0: "array",
}  # fmt: skip
"""Every constructor of part 1 §1.6, and what a value of it is called."""

_FIXED = {0x4: 1, 0x5: 2, 0x6: 3, 0x7: 5, 0x8: 9, 0x9: 17}
_SIZED, _SIZED_BY_FOUR, _ILLEGAL, _SEVERAL = 0, -1, -2, -3


def _width(code: int) -> int:
    if code not in NAMES:
        return _ILLEGAL
    if code == _DESCRIBED:
        return _SEVERAL
    return _FIXED.get(code >> 4, _SIZED_BY_FOUR if code >> 4 in (0xB, 0xD, 0xF) else _SIZED)


_WIDTHS = tuple(map(_width, range(256)))
"""By constructor: the length of the value with its constructor, or how to find it."""


# --- reading


def skip(raw: bytes, at: int, end: int) -> int:
    """Where the value that begins at `at` is over; not behind `end`.

    Raises `Undecodable` where it is cut short, or is none.
    """
    try:
        width = _WIDTHS[raw[at]]
        if width > 0:
            at += width
        elif width == _SIZED:
            at += 2 + raw[at + 1]
        elif width == _SIZED_BY_FOUR:
            at += 5 + int.from_bytes(raw[at + 1 : at + 5])
        elif width == _SEVERAL:
            return _skip_described(raw, at, end)
        else:
            raise Undecodable(f"there is no AMQP type 0x{raw[at]:02x} (at byte {at})")
    except IndexError:
        raise Undecodable(f"cut short: a value is missing at byte {at}") from None
    if at > end:
        raise Undecodable(f"cut short: a value ends at byte {at}, and there are {end}")
    return at


def _skip_described(raw: bytes, at: int, end: int) -> int:
    """A descriptor and a value, each of which may be described in turn: counted, so that depth costs no stack."""
    due = 1
    while due:
        if at >= end:
            raise Undecodable(f"cut short: a value is missing at byte {at}")
        if raw[at] == _DESCRIBED:
            at, due = at + 1, due + 1
        else:
            at, due = skip(raw, at, end), due - 1
    return at


def opened(raw: bytes, at: int, code: int) -> tuple[int, int, int]:
    """The list (`code` LIST) or map (MAP) at `at`, which `skip` passed: how many values, where the first begins, end.

    A null is an empty one. Raises `Undecodable` for a value of another type, and for a size that cannot be.
    """
    found = raw[at]
    if found == code and (size := raw[at + 1]):
        return raw[at + 2], at + 3, at + 2 + size
    if found == code:
        count, first, end = 0, at + 3, at + 2
    elif found == code + _LARGER:
        count, first, end = int.from_bytes(raw[at + 5 : at + 9]), at + 9, at + 5 + int.from_bytes(raw[at + 1 : at + 5])
    elif found == NULL or (found == _LIST_0 and code == LIST):
        return 0, at + 1, at + 1
    else:
        raise Undecodable(f"a {NAMES[code]} is due at byte {at}, not a value of type {_name(found)}")
    if first > end:
        raise Undecodable(f"the {NAMES[code]} at byte {at} is smaller than its own count")
    return count, first, end


def check(raw: bytes, at: int, code: int) -> int:
    """See that the list or map at `at` holds as many values as it says; gives where it ends. Raises `Undecodable`."""
    if raw[at] == code and (size := raw[at + 1]):  # as `opened`, without a call: most are such
        count, at, end = raw[at + 2], at + 3, at + 2 + size
    else:
        count, at, end = opened(raw, at, code)
    left = count
    try:
        while left:
            width = _WIDTHS[raw[at]]
            if width == _SIZED:
                at += 2 + raw[at + 1]
            elif width > 0:
                at += width
            else:
                at = skip(raw, at, end)
            left -= 1
    except IndexError:
        at = -1
    except Undecodable:
        if code == LIST:
            raise
        at = -1
    if at != end or (code == MAP and count % 2):
        what = "keys and values" if code == MAP else "values"
        raise Undecodable(f"the {NAMES[code]} before byte {end} has not as many {what} as it says")
    return end


def element(raw: bytes, at: int, index: int) -> int | None:
    """Where this value of the list at `at`, which `check` passed, begins; None: the list is shorter."""
    count, at, end = opened(raw, at, LIST)
    if index >= count:
        return None
    for _ in range(index):
        width = _WIDTHS[raw[at]]
        at = at + width if width > 0 else skip(raw, at, end)
    return at


def elements(raw: bytes, at: int) -> list[int]:
    """Where each value of the list at `at` begins. Raises `Undecodable`."""
    count, at, end = opened(raw, at, LIST)
    found: list[int] = []
    try:
        for _ in range(count):
            found.append(at)
            width = _WIDTHS[raw[at]]
            at = at + width if width > 0 else skip(raw, at, end)
    except IndexError:
        at = -1
    if at != end:
        raise Undecodable(f"the list before byte {end} has not as many values as it says")
    return found


def items(raw: bytes, at: int) -> dict[str, int]:
    """Where the value of each name in the map at `at` begins. A key that is no text has no name, and is passed over.

    Raises `Undecodable`.
    """
    count, at, end = opened(raw, at, MAP)
    found: dict[str, int] = {}
    try:
        for _ in range((count + 1) // 2):
            key, code = at, raw[at]
            if code == STRING:
                at += 2 + raw[at + 1]
                found[raw[key + 2 : at].decode(errors="backslashreplace")] = at
            else:
                at = skip(raw, at, end)
                if code == SYMBOL:
                    found[raw[key + 2 : at].decode(errors="backslashreplace")] = at
                elif code in (LONG_STRING, LONG_SYMBOL):
                    found[raw[key + 5 : at].decode(errors="backslashreplace")] = at
            width = _WIDTHS[raw[at]]
            at = at + width if width > 0 else skip(raw, at, end)
    except IndexError:
        at = -1
    if at != end or count % 2:
        raise Undecodable(f"the map before byte {end} has not as many keys and values as it says")
    return found


def scalar(raw: bytes, at: int) -> Value:
    """The value at `at`, which `skip` passed; never raises."""
    code = raw[at]
    start, end = at + 1, skip(raw, at, len(raw))
    if code >= BINARY:
        start += 1 if _WIDTHS[code] == _SIZED else 4
    read = _READERS.get(code)
    return Other(_name(code), raw[at:end]) if read is None else read(raw[start:end])


def text(raw: bytes, at: int) -> bytes | None:
    """The value at `at`, which `skip` passed, as the value of a header; never raises.

    None where it has no form as text: a null, a list, a map, an array, a described value.
    """
    code = raw[at]
    if code in (STRING, BINARY, SYMBOL):
        return raw[at + 2 : at + 2 + raw[at + 1]]
    if code in (LONG_STRING, LONG_BINARY, LONG_SYMBOL):
        return raw[at + 5 : at + 5 + int.from_bytes(raw[at + 1 : at + 5])]
    value = scalar(raw, at)
    if value is None or isinstance(value, Other):
        return None
    if isinstance(value, bool):
        return b"true" if value else b"false"
    return str(value).encode()


def _name(code: int) -> str:
    return NAMES.get(code, f"0x{code:02x}")


def _unsigned(payload: bytes) -> int:
    return int.from_bytes(payload)


def _signed(payload: bytes) -> int:
    return int.from_bytes(payload, signed=True)


def _str(payload: bytes) -> str:
    return payload.decode(errors="backslashreplace")


def _symbol(payload: bytes) -> Symbol:
    return Symbol(payload.decode(errors="backslashreplace"))


def _char(payload: bytes) -> str:
    return payload.decode("utf-32-be", "replace")


def _timestamp(payload: bytes) -> Timestamp:
    return Timestamp(_signed(payload))


def _float(payload: bytes) -> float:
    number: float = struct.unpack(">f", payload)[0]
    return number


def _double(payload: bytes) -> float:
    number: float = struct.unpack(">d", payload)[0]
    return number


_EXPONENT_BITS = {4: 8, 8: 10, 16: 14}


def _decimal(payload: bytes) -> Decimal:
    """IEEE 754-2008, binary integer encoding (part 1 §1.6.13): sign, exponent, and coefficient in one of two forms."""
    bits, size, width = int.from_bytes(payload), len(payload) * 8, _EXPONENT_BITS[len(payload)]
    sign = "-" if bits >> (size - 1) else ""
    lead = bits >> (size - 6) & 0b11111
    if lead >= 0b11110:  # noqa: PLR2004 -- the standard's bits
        return Decimal("NaN" if lead & 1 else f"{sign}Infinity")
    digits = size * 9 // 32 - 2
    bias = (3 << (width - 3)) + digits - 2
    room = size - 1 - width
    if lead >> 3 == 0b11:  # noqa: PLR2004 -- likewise
        exponent = bits >> (room - 2) & (1 << width) - 1
        coefficient = 0b100 << (room - 2) | bits & (1 << (room - 2)) - 1
    else:
        exponent = bits >> room & (1 << width) - 1
        coefficient = bits & (1 << room) - 1
    if coefficient >= 10**digits:
        coefficient = 0
    return Decimal(f"{sign}{coefficient}E{exponent - bias}")


_READERS: dict[int, Callable[[bytes], Any]] = {
    NULL: lambda _: None, 0x41: lambda _: True, 0x42: lambda _: False, 0x56: any,
    **dict.fromkeys((0x43, 0x44, 0x50, 0x52, 0x53, 0x60, 0x70, 0x80), _unsigned),
    **dict.fromkeys((0x51, 0x54, 0x55, 0x61, 0x71, 0x81), _signed),
    **dict.fromkeys((0x74, 0x84, 0x94), _decimal),
    0x72: _float, 0x82: _double, 0x73: _char, 0x83: _timestamp, 0x98: lambda payload: UUID(bytes=payload),
    **dict.fromkeys((BINARY, LONG_BINARY), bytes),
    **dict.fromkeys((STRING, LONG_STRING), _str),
    **dict.fromkeys((SYMBOL, LONG_SYMBOL), _symbol),
}  # fmt: skip


# --- writing


def variable(code: int, payload: bytes) -> bytes:
    """A binary, string or symbol (`code` BINARY, STRING, SYMBOL)."""
    size = len(payload)
    if size < _ONE_BYTE:
        return b"%c%c%b" % (code, size, payload)
    return b"%c%b%b" % (code + _LARGER, size.to_bytes(4), payload)


def string(payload: bytes) -> bytes:
    """A string of these UTF-8 bytes."""
    return variable(STRING, payload)


def symbol(name: str) -> bytes:
    """A symbol. Raises `ValueError` for a name that is not ASCII."""
    return variable(SYMBOL, name.encode("ascii"))


def unsigned(number: int) -> bytes:
    """A ulong, or what a `Timestamp` says. Raises `OverflowError` where 64 bits do not hold it."""
    if isinstance(number, Timestamp):
        return b"\x83" + number.to_bytes(8, signed=True)
    return b"\x53%c" % number if 0 <= number < _ONE_BYTE else b"\x80" + number.to_bytes(8)


def compound(code: int, count: int, payload: bytes) -> bytes:
    """A list (`code` LIST) or map (MAP) of so many values, each of one byte or more."""
    size = len(payload)
    if size + 1 < _ONE_BYTE:
        return b"%c%c%c%b" % (code, size + 1, count, payload)
    return b"%c%b%b%b" % (code + _LARGER, (size + 4).to_bytes(4), count.to_bytes(4), payload)
