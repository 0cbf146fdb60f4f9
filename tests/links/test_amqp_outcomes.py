"""What each outcome does to a message, on each broker: caps, dead letters, delays (CONFORMANCE H)."""

from __future__ import annotations

from itertools import cycle, islice

import pytest
from trio.abc import Clock

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from actors import Subscription, open_runtime
from links.errors import LinkRefused
from settlement import Copies, DeadLetter, Delivery, Drop, Hold, Native, Outcome, Policy, Retry, RetryAfter
from settlement.amqp import Delays
from tests.links.amqp_kit import Handler, Place, places, raw_of, take
from tests.links.wire_kit import DISPOSITION, TRANSFER

pytestmark = pytest.mark.amqp

COUNT = "x-ruststream-retry-count"
SOON = 0.02
HEADERS = {"content-type": b"text/plain", "message-id": b"id-1", "tenant": b"7", "binary": b"\xff"}
POISONS: dict[bytes, list[Outcome]] = {
    b"retried": [Retry()] * 9,
    b"delayed": [RetryAfter(SOON)] * 9,
    b"at once": [RetryAfter(0)] * 9,
    b"mixed": list(islice(cycle([Retry(), RetryAfter(SOON), Retry(), RetryAfter(0)]), 9)),
    b"mixed otherwise": list(islice(cycle([RetryAfter(0), RetryAfter(SOON), Retry()]), 9)),
}
"""By body, what a handler answers that never succeeds."""


# --- one outcome


async def test_a_retried_message_returns_with_a_count_that_is_one_higher(place: Place, clock: Clock | None) -> None:
    """K-61, A-1.2, A-3.1; where the broker does not count, the attempt stays 1 without a cap."""
    name, broker = await place.queue(), place.broker()
    handler = Handler({b"again": [Retry(), Retry(), Retry()]})
    async with open_runtime(Subscription(broker.queue(name), handler)) as runtime:
        await broker.publisher(name).publish(b"again")
        await handler.has(*[b"again"] * 4)
    counts = [delivery.redelivery_count for delivery in handler.deliveries]
    assert counts[1:] == ([1, 2, 3] if place.can.counts else [None] * 3)
    assert [delivery.attempt for delivery in handler.deliveries] == ([1, 2, 3, 4] if place.can.counts else [1] * 4)
    assert (runtime.ledger(name).retried, runtime.ledger(name).acked) == (3, 1)


async def test_a_dropped_message_is_in_the_brokers_own_dead_letter(place: Place, clock: Clock | None) -> None:
    """K-62, A-1.4."""
    dead = await place.queue()
    name, broker, handler = await place.queue(dead), place.broker(), Handler({b"useless": [Drop("no")]})
    async with open_runtime(Subscription(broker.queue(name), handler)) as runtime:
        await broker.publisher(name).publish(b"useless", HEADERS)
        await handler.has(b"useless")
    assert runtime.ledger(name).dropped == 1
    async with broker.connect():
        (found,) = await take(broker, dead, 1)
    assert (found.body, dict(found.headers)) == (b"useless", HEADERS)
    await place.until_ready(name, 0)
    await place.until_ready(dead, 1)


async def test_a_cap_without_a_dead_letter_rejects_at_the_cap(place: Place, clock: Clock | None) -> None:
    """K-70, A-4.6: the broker's own policy decides, and there is one warning."""
    dead = await place.queue()
    name, broker, handler = await place.queue(dead), place.broker(), Handler(POISONS)
    policy = Policy(max_attempts=3)
    async with open_runtime(Subscription(broker.queue(name), handler, policy=policy)) as runtime:
        await broker.publisher(name).publish(b"retried")
        await place.until_ready(dead, 1)
    assert handler.bodies == [b"retried"] * 3
    assert (runtime.ledger(name).retried, runtime.ledger(name).dropped) == (2, 1)
    await place.until_ready(name, 0)


# --- a message that never succeeds


async def capped(place: Place, count: str = "broker", delays: Delays = Copies(), raw: bool = False) -> list[int]:
    """Handle `POISONS` under a cap of five, until each is in the dead letter: once, and nothing is left in the queue.

    Returns how many were retried, were delayed, and became a copy.
    """
    dead, broker = await place.queue(), place.broker()
    name, handler, buried = await place.queue(), Handler(POISONS), Handler()
    address = place.address(name) if raw else name
    source = (broker.raw if raw else broker.queue)(address, delays=delays, count=count)
    async with open_runtime(
        Subscription(source, handler, policy=Policy(max_attempts=5, dead_letter=dead), name="capped", concurrency=4),
        Subscription(broker.queue(dead), buried, name="dead"),
    ) as runtime:
        for body in POISONS:
            await broker.publisher(name).publish(body, HEADERS)
        await buried.has(*POISONS)
    assert sorted(handler.bodies) == sorted([*POISONS] * 5)
    assert sorted(buried.bodies) == sorted(POISONS)
    for body in POISONS:
        assert [delivery.attempt for delivery in handler.of(body)] == [1, 2, 3, 4, 5]
        (last,) = buried.of(body)
        assert {name: value for name, value in last.headers.items() if name != COUNT} == HEADERS
        assert last.headers.get(COUNT) == handler.of(body)[-1].headers.get(COUNT)
    ledger = runtime.ledger("capped")
    assert (ledger.received, ledger.dead_lettered, ledger.balanced) == (25, 5, True)
    await place.until_ready(name, 0)
    await place.until_ready(dead, 0)
    copied = [delivery for delivery in handler.deliveries if COUNT in delivery.headers]
    return [ledger.retried, ledger.delayed, len(copied)]


async def test_a_message_that_never_succeeds_is_handled_five_times_under_a_cap_of_five(
    place: Place, clock: Clock | None
) -> None:
    """K-69, A-4.10, DESIGN 6: also when `Retry` and `RetryAfter` are mixed. Then it is in the dead letter once, its
    body and headers as they were published; a copy has its count besides.
    """
    retried, delayed, copied = await capped(place)
    assert (retried, delayed) == (4 + 2 + 1, 4 + 4 + 2 + 3)
    # in the order of `POISONS`; *modified* keeps the count that a copy has
    assert copied == (0 + 4 + 4 + 3 + 4 if place.can.counts and place.can.header_at_first else 20)


async def test_so_it_is_by_an_address_as_it_stands(place: Place, clock: Clock | None) -> None:
    """K-69: a subscription by name; on RabbitMQ its kind of queue is read all the same."""
    assert (await capped(place, raw=True))[:2] == [7, 13]


async def test_so_it_is_where_copies_count(place: Place, clock: Clock | None) -> None:
    """`count="copies"`: each of the four that are not the first is a copy."""
    assert await capped(place, count="copies") == [7, 13, 20]


async def test_so_it_is_where_deliveries_are_held(place: Place, clock: Clock | None) -> None:
    """`Hold`: the message itself goes back, where that is counted; else a copy."""
    assert (await capped(place, delays=Hold(20)))[:2] == [7, 13]


async def test_so_it_is_where_the_broker_delays(place: Place, clock: Clock | None) -> None:
    """`Native`, on quorum queues of RabbitMQ 4.3 and on the embedded broker; elsewhere it is refused by name."""
    if place.can.native:
        assert (await capped(place, delays=Native()))[:2] == [7, 13]
        return
    with pytest.raises(LinkRefused, match=r"needs a quorum queue of RabbitMQ 4\.3 or newer, this is a"):
        await capped(place, delays=Native())


# --- copies


async def test_a_copy_comes_after_its_delay_with_the_attempt_that_it_copies(place: Place, clock: Clock | None) -> None:
    """K-68, A-1.3, DESIGN 6: the header of a copy is the attempt of the delivery that was copied, also of one that the
    broker has counted; the original is rejected, so that the broker's own dead letter has each of them.
    """
    dead = await place.queue()
    name, broker = await place.queue(dead), place.broker()
    handler = Handler({b"later": [Retry(), RetryAfter(0.2), Retry(), RetryAfter(0.1)]})
    async with open_runtime(Subscription(broker.queue(name), handler)) as runtime:
        await broker.publisher(name).publish(b"later", HEADERS)
        await handler.has(*[b"later"] * 5)
    if place.can.counts:
        assert [delivery.attempt for delivery in handler.deliveries] == [1, 2, 3, 4, 5]
        assert [delivery.headers.get(COUNT) for delivery in handler.deliveries] == [None, None, b"2", b"2", b"4"]
    else:  # without a cap nothing needs counting but the copies
        assert [delivery.attempt for delivery in handler.deliveries] == [1, 1, 2, 2, 3]
        assert [delivery.headers.get(COUNT) for delivery in handler.deliveries] == [None, None, b"1", b"1", b"2"]
    assert handler.times[2] - handler.times[1] >= 0.2
    assert handler.times[4] - handler.times[3] >= 0.1
    ledger = runtime.ledger(name)
    assert (ledger.delayed, ledger.owed, ledger.published) == (2, 2, 2)
    await place.until_ready(dead, 2)


async def test_the_cap_accepts_what_it_has_published(place: Place, clock: Clock | None) -> None:
    """A-4.5 as ruled: the dead letter of the policy has it once, and the broker's own has nothing."""
    theirs, ours = await place.queue(), await place.queue()
    name, broker = await place.queue(theirs), place.broker()
    handler = Handler({b"capped": [Retry()] * 3, b"now": [Retry()]})
    policy = Policy(max_attempts=2, dead_letter=ours, failures={ValueError: DeadLetter()})

    async def handle(delivery: Delivery[bytes]) -> Outcome | None:
        if delivery.body == b"failed":
            raise ValueError("never again")
        return await handler(delivery)

    async with open_runtime(Subscription(broker.queue(name), handle, policy=policy)) as runtime:
        for body in (b"capped", b"failed"):
            await broker.publisher(name).publish(body)
        await place.until_ready(ours, 2)
    assert handler.bodies == [b"capped", b"capped"]
    assert runtime.ledger(name).dead_lettered == 2
    await place.until_ready(theirs, 0)
    await place.until_ready(name, 0)


@places("embedded", "embedded-tcp")
async def test_our_own_message_is_not_counted_before_the_broker_has_done_so(place: Place, clock: Clock | None) -> None:
    """K-77, A-3.2 to A-3.4, A-4.3 as ruled: without a header section there is no count. Under a cap the first `Retry`
    publishes a copy, waits until it is confirmed, and then accepts; without a cap it is *modified*, and counted then.
    """
    name, broker, handler = await place.queue(), place.broker(), Handler({b"mine": [Retry()]})
    async with open_runtime(Subscription(broker.queue(name), handler, policy=Policy(max_attempts=9))):
        await broker.publisher(name).publish(b"mine")
        await handler.has(b"mine", b"mine")
    assert [raw_of(delivery).startswith(b"\x00\x53\x70") for delivery in handler.deliveries] == [False, False]
    assert [delivery.redelivery_count for delivery in handler.deliveries] == [None, None]
    assert [delivery.attempt for delivery in handler.deliveries] == [1, 2]
    published = [each.delivery_id for each in place.trace(TRANSFER, ours=True)]
    order = [
        *((place.trace.frames.index(each), "published") for each in place.trace(TRANSFER, ours=True)),
        *((place.trace.frames.index(each), "confirmed") for each in place.trace(DISPOSITION, ours=False)),
        *((place.trace.frames.index(each), "accepted") for each in place.trace(DISPOSITION, ours=True)),
    ]
    assert published == [0, 1]
    assert [what for _, what in sorted(order)][:5] == ["published", "confirmed", "published", "confirmed", "accepted"]


async def test_where_every_delivery_is_counted_our_own_message_is_modified(place: Place, clock: Clock | None) -> None:
    """K-77: a message that shall survive the broker has a header section, and RabbitMQ gives one to all."""
    name, broker, handler = await place.queue(), place.broker(durable=True), Handler({b"mine": [Retry()]})
    async with open_runtime(Subscription(broker.queue(name), handler, policy=Policy(max_attempts=9))):
        await broker.publisher(name).publish(b"mine")
        await handler.has(b"mine", b"mine")
    assert [delivery.attempt for delivery in handler.deliveries] == [1, 2]
    copied = handler.deliveries[1].headers.get(COUNT)
    assert copied == (None if place.can.counts else b"1")
