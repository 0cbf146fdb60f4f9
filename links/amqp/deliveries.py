"""What came in, as deliveries; and verbs, as the dispositions that say them. Pure."""

from __future__ import annotations

from typing import Any

from links.abc import Received
from links.amqp.events import ACCEPTED, DELIVERY_TIME, FAILED, REJECTED, Disposition, State
from links.amqp.handles import Arrival
from links.amqp.sections import Headers, Sections, split, walk
from links.amqp.values import Timestamp, Undecodable, skip
from settlement.amqp import Accepted, Modified, Rejected
from settlement.attempts import attempt
from settlement.delivery import Delivery

__all__ = ["can_be_counted", "disposition", "due_at", "raw_of", "received"]


def received(arrival: Arrival, *, source: str, number: int, retry_header: str, counts: bool) -> Received[bytes]:
    """One arrival. `counts`: this peer's delivery-count grows; `number`: names a message that has no id.

    What cannot be read is a delivery all the same, with its reason in `unreadable` (DESIGN 6): with its headers where
    only the body has no bytes, else with nothing but its raw form, which a dead letter passes on. Such a one reads as
    counted by the broker, so that `Retry` is *modified*: no count of ours could be written into it.
    """
    unreadable: Exception | None = None
    body = b""
    try:
        sections = split(arrival.raw)
    except Undecodable as error:
        sections, unreadable = Sections(arrival.raw, _count(arrival.raw)), error
    else:
        try:
            body = sections.body
        except Undecodable as error:
            unreadable = error
    count = sections.delivery_count if counts or unreadable is not None else None
    identity = sections.well_known(0)
    delivery = Delivery(
        body=body,
        message=body,
        headers=Headers(sections),
        attempt=attempt(sections.copies(retry_header), count),
        redelivery_count=count,
        source=source,
        id=f"#{number}" if identity is None else identity.decode(errors="backslashreplace"),
        key=sections.key,
    )
    return Received(delivery, arrival, unreadable=unreadable)


def _count(raw: bytes) -> int:
    """The broker's count of a message that is broken behind its header section: so a cap is reached all the same."""
    try:
        return split(raw[: skip(raw, 3, len(raw))]).delivery_count or 0
    except Undecodable:
        return 0


def raw_of(delivery: Any) -> bytes | None:
    """The encoded message behind a delivery of this transport; None: it came from elsewhere."""
    headers = delivery.headers if isinstance(delivery, Delivery) else None
    return headers.sections.raw if isinstance(headers, Headers) else None


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
    """How a verb is said (A-1.1 to A-1.6). `wall`: seconds since 1970, for *modified* with a time."""
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
