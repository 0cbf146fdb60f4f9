"""The two values that carry a message: a `Delivery` comes in, a `Letter` goes out."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

import attrs

from settlement.outcomes import seconds

__all__ = ["NO_HEADERS", "Delivery", "Destination", "Letter", "check_letter", "decoded", "made", "name_of"]

T = TypeVar("T")

NO_HEADERS: Mapping[str, bytes] = MappingProxyType({})


@attrs.frozen(eq=False, kw_only=True, weakref_slot=False)
class Delivery(Generic[T]):
    """One message, handed to a handler once. It has no method that acts: the handler answers by its return value.

    Compared by identity: two deliveries of one message are two deliveries.

    Attributes:
        body: The bytes as the broker delivered them.
        message: What `decode` made of the body; without a decoder, what the source hands out (bytes, or a row).
        headers: Text names to bytes; names are the broker's, values are not decoded.
        attempt: 1 on the first delivery; how it is counted is the transport's: see its table.
        redelivery_count: How often the broker says that it delivered before; None where the broker does not count.
        source: The name of the queue, table or subscription it came from.
        id: The broker's name for the message, for logs: a delivery tag, a row's key, a message id.
        key: The ordering or partition key, where there is one.
    """

    body: bytes
    message: T
    headers: Mapping[str, bytes]  # C-10.1
    attempt: int  # C-2.1
    redelivery_count: int | None
    source: str
    id: str
    key: str | None
    _handle: Any = attrs.field(default=None, repr=False)
    """The transport's own handle; nobody else looks at it. Kept when the message is decoded."""


_Draft: Any = attrs.make_class(
    "_Draft",
    [field.name for field in attrs.fields(Delivery)],
    bases=cast("Any", Delivery).__orig_bases__,
    slots=True,
    eq=False,
    weakref_slot=False,
)
"""A delivery that is not frozen yet: the same fields in the same slots, so that it can become one.

A frozen class sets each of its fields by a call of `object.__setattr__`, which makes it cost three times as much.
"""


def made(  # noqa: PLR0917 -- by position, since keywords would cost more than the fields
    body: bytes,
    message: T,
    headers: Mapping[str, bytes],
    attempt: int,
    redelivery_count: int | None,
    source: str,
    id: str,  # noqa: A002 -- the field's name
    key: str | None,
    handle: Any = None,
) -> Delivery[T]:
    """As `Delivery(...)`, for links, which make one for each message: at a third of its price."""
    delivery: Delivery[T] = _Draft(body, message, headers, attempt, redelivery_count, source, id, key, handle)
    delivery.__class__ = Delivery
    return delivery


def decoded(delivery: Delivery[Any], message: T) -> Delivery[T]:
    """The same delivery, with its message decoded."""
    return made(
        delivery.body,
        message,
        delivery.headers,
        delivery.attempt,
        delivery.redelivery_count,
        delivery.source,
        delivery.id,
        delivery.key,
        delivery._handle,  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    )


@runtime_checkable
class Destination(Protocol):
    """Where a letter may go: something with a name. A publisher of any transport is one."""

    @property
    def name(self) -> str:
        """The address, for errors and logs; never a credential."""
        ...


@attrs.frozen(eq=False)
class Letter:
    """What is published: a user's message, a copy, a dead letter.

    Attributes:
        body: Bytes.
        headers: Text names to bytes; none by default.
        key: The ordering or partition key, where there is one; None by default.
        deliver_after: Seconds that the receiving side shall wait itself (`Scheduled`, `Stored`); None: at once.
        original: The delivery that this is a copy of, so that a publisher of the same transport can pass on its raw
            form.
    """

    body: bytes
    headers: Mapping[str, bytes] = NO_HEADERS
    key: str | None = None
    deliver_after: float | None = None
    original: Any = None

    @classmethod
    def of(cls, delivery: Delivery[Any], *, deliver_after: float | None = None) -> Letter:
        """The letter "as it arrived": body, headers and key unchanged."""
        # C-4.9
        return cls(delivery.body, delivery.headers, delivery.key, deliver_after, delivery)


def check_letter(letter: Letter) -> None:
    """Raise `ValueError` where a letter holds what none can hold: for transports, before they send it."""
    body: object = letter.body
    key: object = letter.key
    headers: object = letter.headers
    if not isinstance(body, bytes):
        raise ValueError(f"a body is bytes, not {type(body).__name__}")
    if key is not None and not isinstance(key, str):
        raise ValueError(f"a key is a str or None, not {type(key).__name__}")
    if letter.deliver_after is not None:
        seconds("deliver_after", letter.deliver_after)
    if not isinstance(headers, Mapping):
        raise ValueError(f"headers are a mapping of str to bytes, not {type(headers).__name__}")
    pairs = cast("Mapping[object, object]", headers)
    for name, value in pairs.items():
        if not isinstance(name, str) or not isinstance(value, bytes):
            raise ValueError(f"a header is a str and bytes, not {type(name).__name__} and {type(value).__name__}")


def name_of(to: str | Destination) -> str:
    """The name under which errors and logs speak of a destination."""
    return to if isinstance(to, str) else to.name
