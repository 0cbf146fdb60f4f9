"""What came in, as deliveries; and verbs, as the dispositions that say them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from links.abc import Received
from links.amqp.engine.events import ACCEPTED, DELIVERY_TIME, FAILED, REJECTED, Disposition, State
from links.amqp.engine.handles import Arrival
from links.amqp.wire.headers import Headers, copies, identity
from links.amqp.wire.sections import Sections, quick, split, walk
from links.amqp.wire.values import LONG_BINARY, Timestamp, Undecodable, skip
from settlement.amqp import Accepted, Modified, Rejected
from settlement.attempts import attempt
from settlement.delivery import Delivery, made

__all__ = ["can_be_counted", "disposition", "due_at", "raw_of", "received"]


def received(
    arrivals: Sequence[Arrival], *, source: str, before: int, retry_header: str, counts: bool
) -> list[Received[bytes]]:
    """Arrivals as deliveries, in order. `counts`: this peer's delivery-count grows.

    `before`: how many came before; a message that has no id is named by its number.

    What cannot be read is a delivery all the same, with its reason in `unreadable`: with its headers where
    only the body has no bytes, else with nothing but its raw form, which a dead letter passes on. Such a one reads as
    counted by the broker, so that `Retry` is *modified*: no count of ours could be written into it.
    """
    handed: list[Received[bytes]] = []
    retry = retry_header.encode()
    shortest = len(retry)
    for number, arrival in enumerate(arrivals, before + 1):
        raw, unreadable = arrival.raw, None
        if (usual := quick(raw)) is not None:
            count, properties, named, end = usual
            body = raw[end + 5 :] if raw[end] == LONG_BINARY else raw[end + 2 :]
        else:
            sections, body, unreadable = _read(raw)
            count, properties, named = sections.delivery_count, sections.properties_at, sections.named_at
            end = len(raw)
        if not counts and unreadable is None:
            count = None
        copied = 0
        if named and end - named > shortest and raw.find(retry, named, end) >= 0:
            copied = copies(raw, named, retry_header)
        name, key = identity(raw, properties)
        delivery = made(
            body,
            body,
            Headers(raw, properties, named),
            attempt(copied, count),
            count,
            source,
            f"#{number}" if name is None else name,
            key,
            arrival,
        )
        handed.append(Received(delivery, arrival, None, False, unreadable))
    return handed


def _read(raw: bytes) -> tuple[Sections, bytes, Undecodable | None]:
    """The sections of a message, its body, and why there is none."""
    try:
        sections = split(raw)
    except Undecodable as error:
        return Sections(raw, _count(raw)), b"", error
    try:
        return sections, sections.body, None
    except Undecodable as error:
        return sections, b"", error


def _count(raw: bytes) -> int:
    """The broker's count of a message that is broken behind its header section: so a cap is reached all the same."""
    try:
        return split(raw[: skip(raw, 3, len(raw))]).delivery_count or 0
    except Undecodable:
        return 0


def raw_of(delivery: Any) -> bytes | None:
    """The encoded message behind a delivery of this transport; None: it came from elsewhere."""
    handle = delivery._handle if isinstance(delivery, Delivery) else None  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    return handle.raw if isinstance(handle, Arrival) else None


def can_be_counted(delivery: Delivery[Any]) -> bool:
    """Can a retry count be written into a copy of it? Not where its sections cannot be told apart."""
    raw = raw_of(delivery)
    try:
        return raw is None or bool(walk(raw)) or not raw
    except Undecodable:
        return False


def due_at(wall: float, delay: float) -> Timestamp:
    """The time of an annotation: milliseconds since 1970, at most what 64 bits hold."""
    return Timestamp(min(round(min((wall + delay) * 1000, 2.0**63)), 2**63 - 1))  # 1e306 s are no float of ms


def disposition(verb: object, wall: float) -> Disposition:
    """How a verb is said. `wall`: seconds since 1970, for *modified* with a time."""
    match verb:
        case Accepted():
            return ACCEPTED
        case Rejected():
            return REJECTED
        case Modified(None):
            return FAILED
        case Modified(float() | int() as delay):
            due = due_at(wall, delay)
            return Disposition(State.MODIFIED, failed=True, annotations={DELIVERY_TIME: due})
        case _:
            raise TypeError(f"{verb!r} is no verb of links.amqp")
