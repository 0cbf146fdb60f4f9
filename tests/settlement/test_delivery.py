"""What comes in and what goes out."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from settlement.delivery import NO_HEADERS, Delivery, Destination, Letter, name_of


@attrs.frozen
class Topic:
    name: str


def delivery(**changes: Any) -> Delivery[str]:
    values: dict[str, Any] = {
        "body": b'"hi"',
        "message": "hi",
        "headers": {"content-type": b"application/json", "raw": b"\xff\x00"},
        "attempt": 2,
        "redelivery_count": 1,
        "source": "orders",
        "id": "7",
        "key": "customer",
    }
    return Delivery(**values | changes)


def test_a_delivery_has_no_method_that_acts() -> None:
    """C-1.5, DESIGN 2: a handler answers by its return value, so nothing can be settled twice."""
    assert {name for name in dir(Delivery) if not name.startswith("_")} == {
        "attempt",
        "body",
        "headers",
        "id",
        "key",
        "message",
        "redelivery_count",
        "source",
    }


def test_two_deliveries_of_one_message_are_two() -> None:
    """DESIGN 2: compared by identity, whatever is in them, so that a body need not be hashable or comparable."""
    one, other = delivery(), delivery()
    again = one

    assert one == again
    assert one != other
    assert len({one, other}) == 2


def test_a_delivery_cannot_be_changed() -> None:
    """DESIGN 2: a value."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        delivery().attempt = 1  # type: ignore[misc]


def test_a_letter_as_it_arrived() -> None:
    """C-4.9: body, headers and key unchanged; the original goes with it, so that raw sections can be spliced."""
    original = delivery()
    letter = Letter.of(original)

    assert (letter.body, letter.key, letter.deliver_after) == (b'"hi"', "customer", None)
    assert letter.headers is original.headers
    assert letter.original is original


def test_a_letter_that_waits() -> None:
    """DESIGN 6: `Scheduled` and `Stored` let the receiving side wait."""
    assert Letter.of(delivery(key=None), deliver_after=5.0).deliver_after == 5.0


def test_a_letter_of_a_users_own() -> None:
    """DESIGN 2: a body is enough; the empty headers cannot be filled by accident."""
    letter = Letter(b"hello")

    assert letter.headers is NO_HEADERS
    assert (letter.key, letter.deliver_after, letter.original) == (None, None, None)
    with pytest.raises(TypeError):
        NO_HEADERS["a"] = b"b"  # type: ignore[index]


def test_a_destination_is_something_with_a_name() -> None:
    """DESIGN 2: a publisher of any transport is one; a name on the own broker is a plain string."""
    assert isinstance(Topic("audit"), Destination)
    assert not isinstance("orders.dead", Destination)
    assert (name_of(Topic("audit")), name_of("orders.dead")) == ("audit", "orders.dead")
