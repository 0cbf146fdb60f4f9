"""What comes in and what goes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from settlement.delivery import NO_HEADERS, Delivery, Destination, Letter, decoded, made, name_of


@attrs.frozen
class Elsewhere:
    name: str


VALUES: dict[str, Any] = {
    "body": b'"hi"',
    "message": "hi",
    "headers": {"content-type": b"application/json", "raw": b"\xff\x00"},
    "attempt": 2,
    "redelivery_count": 1,
    "source": "orders",
    "id": "7",
    "key": "customer",
}
PLACE = object()
"""A transport's handle."""


def delivery(**changes: Any) -> Delivery[str]:
    return Delivery(**VALUES | changes)


def fields(of: Delivery[Any]) -> dict[str, Any]:
    return attrs.asdict(of, recurse=False)


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


def test_the_cheap_way_makes_the_same_delivery() -> None:
    """DESIGN 3.2: what links make for each message is of the same class, with the same fields, and frozen."""
    cheap = made(**VALUES, handle=PLACE)

    assert type(cheap) is Delivery
    assert fields(cheap) == fields(delivery(handle=PLACE)) == {**VALUES, "_handle": PLACE}
    assert repr(cheap) == repr(delivery())
    assert made(**VALUES) != made(**VALUES)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        cheap.attempt = 1  # type: ignore[misc]


@pytest.mark.parametrize("make", [delivery, lambda **changes: made(**VALUES | changes)], ids=["usual", "cheap"])
def test_a_decoded_delivery_is_the_same_with_another_message(make: Callable[..., Delivery[Any]]) -> None:
    """DESIGN 3.8: all but the message is kept, the transport's handle too; the first one stays as it is."""
    first = make(handle=PLACE)
    second = decoded(first, ["hi"])

    assert fields(second) == {**VALUES, "message": ["hi"], "_handle": PLACE}
    assert type(second) is Delivery
    assert first.message == "hi"


def test_a_handle_is_nobodys_business() -> None:
    """DESIGN 3.8: a transport's handle is private: no repr shows it, and a delivery of a test has none."""
    assert "PLACE" not in repr(delivery(handle="PLACE"))
    assert fields(delivery())["_handle"] is None


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
    assert isinstance(Elsewhere("audit"), Destination)
    assert not isinstance("orders.dead", Destination)
    assert (name_of(Elsewhere("audit")), name_of("orders.dead")) == ("audit", "orders.dead")
