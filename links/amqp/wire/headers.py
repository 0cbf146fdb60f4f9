"""The headers of an AMQP 1.0 message, in its bytes: fields of the properties section, and application properties. Pure.

Each section is named by where its list or map begins, 0: there is none; `split` or `quick` has let it through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from links.amqp.wire.values import LIST, STRING, element, items, opened, text
from settlement.attempts import header_count

__all__ = ["GROUP_ID", "WELL_KNOWN", "Headers", "copies", "field", "identity"]

WELL_KNOWN = {
    "message-id": 0,
    "reply-to": 4,
    "correlation-id": 5,
    "content-type": 6,
    "partition-key": 10,
}
"""The headers that travel as a field of the properties section, and which one; `partition-key` is group-id."""

GROUP_ID = WELL_KNOWN["partition-key"]


def field(raw: bytes, properties: int, index: int) -> bytes | None:
    """A field of the properties section as the value of a header."""
    at = element(raw, properties, index) if properties else None
    return None if at is None else text(raw, at)


def identity(raw: bytes, properties: int) -> tuple[str | None, str | None]:
    """The message id and the group-id; None: not set."""
    if not properties:
        return None, None
    if raw[properties] == LIST and raw[properties + 1]:  # as `opened`, without a call: most are such
        count, first = raw[properties + 2], properties + 3
    else:
        count, first, _ = opened(raw, properties, LIST)
    name = key = None
    if count:
        name = raw[first + 2 : first + 2 + raw[first + 1]] if raw[first] == STRING else text(raw, first)
        if count > GROUP_ID:
            key = field(raw, properties, GROUP_ID)
    return (
        None if name is None else name.decode(errors="backslashreplace"),
        None if key is None else key.decode(errors="backslashreplace"),
    )


def copies(raw: bytes, named: int, retry_header: str) -> int:
    """How many copies stand behind a message, by the application property of this name (0: absent)."""
    at = items(raw, named).get(retry_header) if named else None
    value = None if at is None else text(raw, at)
    return 0 if value is None else header_count({retry_header: value}, retry_header)


class Headers(Mapping[str, bytes]):
    """The headers of a message, read when they are first looked at; looking never fails.

    A value without a form as text (null, list, map) is no header; a copy carries it all the same. Where an application
    property has the name of a well-known header that is set, the well-known one is seen.
    """

    __slots__ = ("_named", "_properties", "_raw", "_read")

    def __init__(self, raw: bytes, properties: int, named: int) -> None:
        self._raw = raw
        self._properties = properties
        self._named = named
        self._read: dict[str, bytes] | None = None

    def __getitem__(self, name: str) -> bytes:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __contains__(self, name: object) -> bool:
        return name in self._all()

    def __repr__(self) -> str:
        return repr(self._all())

    def _all(self) -> dict[str, bytes]:
        if self._read is None:
            raw = self._raw
            places = items(raw, self._named) if self._named else {}
            found = {name: text(raw, at) for name, at in places.items()}
            for name, index in WELL_KNOWN.items():
                if (value := field(raw, self._properties, index)) is not None:
                    found[name] = value
            self._read = {name: value for name, value in found.items() if value is not None}
        return self._read
