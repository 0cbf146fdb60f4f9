"""What no handler began goes back at once, as *released*, which is no try; what one began says what it answers."""

from __future__ import annotations

import pytest
import trio
from trio.abc import Clock

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from actors import BatchSubscription, Subscription, open_runtime
from links.abc import Link
from links.amqp.engine.events import State
from settlement import Ack, Delivery, Outcome
from settlement.amqp import AT_MOST_ONCE
from tests.links.amqp_kit import PATIENCE, Hanging, LeftError, Place, dropped, never_lost, places, take, until
from tests.links.wire_kit import DISPOSITION, FLOW, Trace, Wire, ids

pytestmark = pytest.mark.amqp

RELEASED, ACCEPTED = int(State.RELEASED), int(State.ACCEPTED)
BODIES = (b"a", b"b", b"c", b"d")


def said(trace: Trace) -> list[int]:
    """What we said of deliveries, one each, in order."""
    found: list[int] = []
    for each in trace(DISPOSITION, ours=True):
        if each.is_receiver:
            assert each.settled
            found += [each.state[0]] * len(ids(each))
    return found


async def filled(place: Place) -> str:
    name = await place.queue()
    broker = place.broker()
    async with broker.connect():
        for body in BODIES:
            await broker.publisher(name).publish(body)
    place.trace.frames.clear()
    return name


async def test_a_drain_releases_what_waits_before_the_handler_ends(place: Place, clock: Clock) -> None:
    """The others are ready for somebody else while the handler that runs still runs; none of them has lost a try."""
    name = await filled(place)
    broker = place.broker()
    began, go_on = trio.Event(), trio.Event()

    async def handler(_: Delivery[bytes]) -> Outcome:
        began.set()
        await go_on.wait()
        return Ack()

    with trio.fail_after(40):
        async with open_runtime(Subscription(broker.queue(name, credit=4), handler)) as runtime:
            await began.wait()
            await until(lambda: runtime.ledger(name).received == 4)
            runtime.drain()
            await place.until_ready(name, 3)
            go_on.set()
            await runtime.finished()
    assert said(place.trace) == [RELEASED] * 3 + [ACCEPTED]
    assert (runtime.ledger(name).acked, runtime.ledger(name).unsettled) == (1, 3)
    async with broker.connect():
        assert sorted((each.body, each.attempt) for each in await take(broker, name, 3)) == [
            (body, 1) for body in (b"b", b"c", b"d")
        ]


async def test_a_drop_releases_what_no_handler_began(place: Place, clock: Clock) -> None:
    """An exception of the block drops: what a handler began goes by the detach, the others are released before it."""
    name = await filled(place)
    handler = Hanging()
    with trio.fail_after(40):
        async with dropped(Subscription(place.broker().queue(name, credit=4), handler)) as runtime:
            await until(lambda: runtime.ledger(name).received == 4)
            await handler.has(b"a")
        await place.until_ready(name, 4)
    assert said(place.trace) == [RELEASED] * 3


async def test_a_polite_drain_uses_up_no_try(place: Place, clock: Clock) -> None:
    """As often as somebody drains, the message that waited is still at its first attempt."""
    name = await filled(place)
    for _ in range(3):
        broker = place.broker()
        async with broker.connect(), broker.queue(name).attach("s", never_lost, 5.0) as link:
            while len(await link.receive(4)) < 1:
                pass
            link.stop()
    broker = place.broker()
    async with broker.connect():
        assert [each.attempt for each in await take(broker, name, 4)] == [1] * 4


@places("embedded", "4.3-classic")
async def test_what_comes_behind_the_drain_is_released(place: Place, clock: Clock) -> None:
    """Deliveries that were never taken, also those that come while the link stops, are not left to the detach."""
    name = await filled(place)
    broker = place.broker()
    async with broker.connect(), broker.queue(name).attach("s", never_lost, 5.0) as link:
        receiver = link._receiver  # type: ignore[attr-defined]
        receiver.grant(4)
        link.stop()
        await until(lambda: not receiver.ahead)
        await place.until_ready(name, 4)
    assert set(said(place.trace)) <= {RELEASED}
    async with broker.connect():
        assert [each.attempt for each in await take(broker, name, 4)] == [1] * 4


async def on_the_way(place: Place, name: str, link: Link[bytes]) -> Wire:
    """Let the broker send all of the queue, and keep that on the wire."""
    wire = place.wires[-1]
    wire.deafen()
    receiver = link._receiver  # type: ignore[attr-defined]
    receiver.grant(4)
    await place.until_ready(name, 0)
    return wire


async def test_a_goodbye_waits_for_what_is_on_its_way(place: Place, clock: Clock) -> None:
    """A detach that overtook it would be a try to 4.3 classic; the drain's answer tells that nothing more comes."""
    name = await filled(place)
    broker = place.broker()
    async with broker.connect(), trio.open_nursery() as nursery:

        async def hear_the_drain(wire: Wire) -> None:
            await until(lambda: any(flow.drain for flow in place.trace(FLOW, ours=True)))
            wire.hear()

        async with broker.queue(name).attach("s", never_lost, 5.0) as link:
            wire = await on_the_way(place, name, link)
            nursery.start_soon(hear_the_drain, wire)
        await place.until_ready(name, 4)
    assert said(place.trace) == [RELEASED] * 4
    broker = place.broker()
    async with broker.connect():
        assert [each.attempt for each in await take(broker, name, 4)] == [1] * 4


@places("embedded", "4.3-classic")
async def test_a_goodbye_waits_no_longer_than_it_may(place: Place, clock: Clock) -> None:
    """A peer that does not answer a drain is left all the same, within the goodbye: the messages are ready again."""
    name = await filled(place)
    broker = place.broker()
    async with broker.connect(), trio.open_nursery() as nursery:
        leave = trio.Event()
        wires: list[Wire] = []

        async def attached() -> None:
            async with broker.queue(name).attach("s", never_lost, 60.0) as link:
                wires.append(await on_the_way(place, name, link))
                await leave.wait()

        nursery.start_soon(attached)
        await until(lambda: bool(wires))
        leave.set()
        with trio.fail_after(PATIENCE):  # a third of the goodbye
            await place.until_ready(name, 4)
        wires[0].hear()
    assert set(said(place.trace)) <= {RELEASED}


@places("embedded", "4.3-quorum")
async def test_a_batch_that_never_began_is_released(place: Place, clock: Clock) -> None:
    """A drain that comes while a batch still fills up gives its deliveries back before the link's end."""
    name = await filled(place)

    async def handler(_: list[Delivery[bytes]]) -> Outcome:
        raise LeftError

    source = place.broker().queue(name)
    with trio.fail_after(40):
        async with open_runtime(BatchSubscription(source, handler, size=10, wait=30.0)) as runtime:
            await until(lambda: runtime.ledger(name).received == 4)
            runtime.drain()
            await runtime.finished()
        await place.until_ready(name, 4)
    assert said(place.trace) == [RELEASED] * 4


@places("embedded", "4.3-quorum")
async def test_at_most_once_nothing_is_released_that_was_accepted(place: Place, clock: Clock) -> None:
    """What was accepted on arrival is gone; nothing is said of it a second time."""
    name = await filled(place)
    handler = Hanging()
    async with dropped(Subscription(place.broker().queue(name, settle=AT_MOST_ONCE, credit=2), handler)):
        await handler.has(b"a")
    assert set(said(place.trace)[:2]) == {ACCEPTED}
    assert RELEASED not in said(place.trace)[:2]
