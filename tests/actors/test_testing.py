"""actors.testing: a handler is tested without a broker and without a clock."""

import pytest

from actors.testing import a_delivery, run_once
from settlement import Ack, Delivery, Drop, Outcome, RetryAfter
from tests.actors.scenery import answers


async def test_none_is_ack() -> None:
    """DESIGN 2: `None` from a handler means `Ack()`, in a test as in the runtime."""
    assert await run_once(answers(), a_delivery(b"x")) == Ack()
    assert await run_once(answers(Drop("no")), a_delivery(b"x")) == Drop("no")


async def test_a_failure_leaves_as_it_is() -> None:
    """DESIGN 1 (actors/testing): a test sees the handler's own exception."""
    with pytest.raises(KeyError):
        await run_once(answers(KeyError()), a_delivery(b"x"))


async def test_no_outcome_is_a_type_error() -> None:
    """DESIGN 2: what is no outcome is the same `TypeError` as in the runtime."""
    with pytest.raises(TypeError, match=r"must return Ack.., Retry.., RetryAfter.delay., Drop.. or None, not 'ack'"):
        await run_once(answers("ack"), a_delivery(b"x"))  # type: ignore[arg-type]


async def test_a_delivery_is_what_the_test_says() -> None:
    """DESIGN 2: the handler sees message, attempt, headers, key as given; the rest is that of a first delivery."""

    async def handler(delivery: Delivery[int]) -> Outcome:
        assert (delivery.message, delivery.key, delivery.headers) == (7, "k", {"a": b"1"})
        return RetryAfter(2.0**delivery.attempt)

    delivery = a_delivery(7, attempt=3, key="k", headers={"a": b"1"})
    assert await run_once(handler, delivery) == RetryAfter(8.0)
    first = a_delivery(7)
    assert (first.attempt, first.redelivery_count, first.body) == (1, 0, b"")
