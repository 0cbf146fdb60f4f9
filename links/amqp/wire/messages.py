"""What goes out: letters written as AMQP 1.0 messages, and copies of messages spliced from what came in. Pure.

A copy is never decoded and encoded again: what is not changed goes byte for byte, so that types, several
data sections and a footer stay as they came.
"""

from __future__ import annotations

import attrs

from links.amqp.wire.headers import WELL_KNOWN
from links.amqp.wire.sections import (
    APPLICATION_PROPERTIES,
    DELIVERY_ANNOTATIONS,
    HEADER,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    walk,
)
from links.amqp.wire.values import (
    BINARY,
    LIST,
    MAP,
    NULL,
    SYMBOL,
    Undecodable,
    compound,
    elements,
    items,
    opened,
    scalar,
    skip,
    string,
    symbol,
    text,
    unsigned,
    variable,
)
from settlement.delivery import Letter

__all__ = ["copy", "encode", "with_annotation"]

_NULL = bytes((NULL,))
_TRUE = b"\x41"
_DATA = b"\x00\x53\x75"
_DURABLE_HEADER = b"\x00\x53\x70" + compound(LIST, 1, _TRUE)
_CONTENT_TYPE, _GROUP_ID = WELL_KNOWN["content-type"], WELL_KNOWN["partition-key"]
_PRIORITY, _TTL = 1, 2
_USER_ID = 1


def _described(section: int, value: bytes) -> bytes:
    return b"\x00\x53%c%b" % (section, value)


# --- letters


def encode(letter: Letter, *, durable: bool) -> bytes:
    """A letter as a message: without a header section unless `durable`.

    Its key is the group-id, also where a header `partition-key` says another. Raises `ValueError` for a header that
    AMQP cannot carry byte for byte: a well-known one that is not UTF-8, a content-type that is not ASCII.
    """
    fields: dict[int, bytes] = {}
    named: list[bytes] = []
    for name, value in letter.headers.items():
        field = WELL_KNOWN.get(name)
        if field is None:
            named += string(_name(name)), string(value) if _is_utf8(value) else variable(BINARY, value)
        else:
            fields[field] = _well_known(name, field, value)
    if letter.key is not None:
        fields[_GROUP_ID] = string(_name(letter.key))
    sections = [_DURABLE_HEADER] if durable else []
    if fields:
        last = max(fields)
        listed = [fields.get(field, _NULL) for field in range(last + 1)]
        sections.append(_described(PROPERTIES, compound(LIST, last + 1, b"".join(listed))))
    if named:
        sections.append(_described(APPLICATION_PROPERTIES, compound(MAP, len(named), b"".join(named))))
    return b"".join((*sections, _DATA, variable(BINARY, letter.body)))


def _is_utf8(value: bytes) -> bool:
    if value.isascii():
        return True
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _name(name: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"AMQP carries names and keys that are Unicode text, not {name!r}") from None


def _well_known(name: str, field: int, value: bytes) -> bytes:
    if field == _CONTENT_TYPE:
        if not value.isascii():
            raise ValueError(f"AMQP carries {name!r} as a symbol: it must be ASCII text")
        return variable(SYMBOL, value)
    if not _is_utf8(value):
        raise ValueError(f"AMQP carries {name!r} as a string: it must be UTF-8 text")
    return string(value)


# --- copies


def copy(
    raw: bytes,
    *,
    retry_header: str | None = None,
    attempt: int | None = None,
    user: bytes | None = None,
    lasting: bool | None = None,
) -> bytes:
    """The message `raw` to be published again: a copy with the retry count `attempt`, a dead letter without one.

    No delivery annotations, no user-id but that of `user`, and no header section, unless the original was durable: then
    one with durable, priority and, in a copy, ttl. A dead letter has none: it waits for a person. `lasting`: shall it
    be without ttl? None: a dead letter shall, which is one without a count.

    Bytes that are no message go on as they came, without a count: a letter that stops here would stop the line.
    """
    count: _Entry | None = None
    if retry_header is not None and attempt is not None:
        count = _Entry(retry_header, string(_name(retry_header)), string(b"%d" % attempt))
    try:
        return _copy(raw, count, user, lasting=count is None if lasting is None else lasting)
    except Undecodable:
        return raw


@attrs.frozen
class _Entry:
    """What is set in a map."""

    name: str
    key: bytes
    value: bytes
    """Both with their constructors."""


def _copy(raw: bytes, count: _Entry | None, user: bytes | None, *, lasting: bool) -> bytes:
    parts: list[bytes] = []
    for code, start, at, end in walk(raw):
        if count is not None and code >= APPLICATION_PROPERTIES:
            was = at if code == APPLICATION_PROPERTIES else None
            parts.append(_with(raw, was, APPLICATION_PROPERTIES, count))
            count = None
            if was is not None:
                continue
        if code == HEADER:
            parts.append(_durable(raw, at, lasting=lasting))
        elif code == PROPERTIES:
            parts.append(_of_user(raw, start, at, end, user))
        elif code != DELIVERY_ANNOTATIONS:
            parts.append(raw[start:end])
    if count is not None:
        parts.append(_with(raw, None, APPLICATION_PROPERTIES, count))
    return b"".join(parts)


def with_annotation(raw: bytes, name: str, value: int) -> bytes:
    """The message `raw` with this message annotation set, for `Scheduled`: a ulong, or a `Timestamp`.

    Raises `ValueError` for a name that is not ASCII or a number that 64 bits do not hold, and `Undecodable`.
    """
    try:
        entry = _Entry(name, symbol(name), unsigned(value))
    except (UnicodeEncodeError, OverflowError):
        raise ValueError(f"AMQP has no message annotation {name!r} of {value}: ASCII, and 64 bits") from None
    before = 0
    for code, start, at, end in walk(raw):
        if code == MESSAGE_ANNOTATIONS:
            return raw[:start] + _with(raw, at, code, entry) + raw[end:]
        if code < MESSAGE_ANNOTATIONS:
            before = end
    return raw[:before] + _with(raw, None, MESSAGE_ANNOTATIONS, entry) + raw[before:]


def _with(raw: bytes, at: int | None, section: int, entry: _Entry) -> bytes:
    """The section whose map is at `at` (None: there was none) with one entry set, the others byte for byte."""
    if at is None:
        return _described(section, compound(MAP, 2, entry.key + entry.value))
    count, first, end = opened(raw, at, MAP)
    was = items(raw, at).get(entry.name)
    if was is None:
        return _described(section, compound(MAP, count + 2, raw[first:end] + entry.key + entry.value))
    return _described(section, compound(MAP, count, raw[first:was] + entry.value + raw[skip(raw, was, end) : end]))


def _durable(raw: bytes, at: int, *, lasting: bool) -> bytes:
    """The header section of a copy: durable, priority and, unless it is `lasting`, ttl; or nothing."""
    fields = elements(raw, at)
    if not fields or scalar(raw, fields[0]) is not True:
        return b""
    last = _TTL if lasting else _TTL + 1
    kept = [raw[field : skip(raw, field, len(raw))] for field in fields[_PRIORITY:last]]
    return _described(HEADER, compound(LIST, 1 + len(kept), b"".join((_TRUE, *kept))))


def _of_user(raw: bytes, start: int, at: int, end: int, user: bytes | None) -> bytes:
    """The properties section, its user-id null where it is not `user`."""
    fields = elements(raw, at)
    if len(fields) <= _USER_ID or raw[fields[_USER_ID]] == NULL:
        return raw[start:end]
    claimed = fields[_USER_ID]
    if user is not None and text(raw, claimed) == user:
        return raw[start:end]
    count, first, last = opened(raw, at, LIST)
    return _described(
        PROPERTIES, compound(LIST, count, raw[first:claimed] + _NULL + raw[skip(raw, claimed, last) : last])
    )
