"""Bodies and sections of every kind, from raw bytes to a handler and on to a dead letter, through each broker."""

from __future__ import annotations

from typing import Any, Final

import pytest
from trio.abc import Clock

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from actors import Subscription, open_runtime
from actors.events import Event, HandlerErred
from links.amqp.engine.binding import ffi, lib
from links.amqp.engine.events import State
from links.errors import LinkBroken
from settlement import DeadLetter, Drop, Policy, Retry
from tests.links.amqp_kit import Embedded, Handler, Place, Reads, places, put, raw_of, take, until
from tests.links.wire_kit import TRANSFER, Taking

pytestmark = pytest.mark.amqp

ANNOTATIONS: Final = b"\x00\x53\x72\xc1\x10\x04\xa3\x05x-opt\x52\x07\xa3\x03x-y\x41"
PROPERTIES: Final = b"\x00\x53\x73\xc0\x09\x03\xa1\x02id\x40\xa1\x01t"
"""message-id and to."""
NAMED: Final = b"\x00\x53\x74\xc1\x0a\x04\xa1\x01n\x52\x05\xa1\x01b\x41"
"""Application properties: a number and a truth."""
MIXED: Final = ANNOTATIONS + PROPERTIES + NAMED
READABLE: Final = {
    "one data section": (b"\x00\x53\x75\xa0\x02ab", b"ab"),
    "several data sections": (b"\x00\x53\x75\xa0\x02ab\x00\x53\x75\xa0\x00\x00\x53\x75\xa0\x02cd", b"abcd"),
    "a long data section": (b"\x00\x53\x75\xb0\x00\x00\x01\x2c" + b"x" * 300, b"x" * 300),
    "an empty data section": (b"\x00\x53\x75\xa0\x00", b""),
    "a value: text": (b"\x00\x53\x77\xa1\x04Zo\xc3\xab", b"Zo\xc3\xab"),
    "a value: binary": (b"\x00\x53\x77\xa0\x03\xff\x00\xfe", b"\xff\x00\xfe"),
    "a value: null": (b"\x00\x53\x77\x40", b""),
    "sections before and behind": (MIXED + b"\x00\x53\x75\xa0\x02ab\x00\x53\x78\xc1\x01\x00", b"ab"),
}
WITHOUT_BODY: Final = {"nothing at all": b"", "properties alone": b"\x00\x53\x73\xc0\x05\x01\xa1\x02id"}
"""No message by the standard; the embedded broker passes it on, and it is an empty one."""
WITHOUT_BYTES: Final = {
    "a sequence": b"\x00\x53\x76\xc0\x03\x01\x52\x05",
    "a value: map": MIXED + b"\x00\x53\x77\xc1\x06\x02\xa1\x01a\x52\x01",
}
"""Messages whose body is not for us."""
BROKEN: Final = {
    "cut short": b"\x00\x53\x75\xa0\x09ab",
    "out of order": b"\x00\x53\x75\xa0\x02ab\x00\x53\x73\xc0\x05\x01\xa1\x02id",
}
"""No messages at all; RabbitMQ 4.0 looks no farther than to the body."""


def unreadable(place: Place) -> dict[str, bytes]:
    return WITHOUT_BYTES if place.can.reads is Reads.ALL else {**WITHOUT_BYTES, **BROKEN}


class Watch:
    """An observer: what was answered to what could not be decoded."""

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, HandlerErred):
            self.answers.append(event.answer)


# --- what can be read


async def test_bodies_come_as_bytes(place: Place, clock: Clock | None) -> None:
    """A-7.3: data sections end to end, an amqp-value of text, binary or null; no body is an empty one."""
    name, broker, handler = await place.queue(), place.broker(), Handler()
    cases = dict(READABLE)
    if place.can.reads is Reads.NOTHING:
        cases |= {what: (raw, b"") for what, raw in WITHOUT_BODY.items()}
    async with open_runtime(Subscription(broker.queue(name), handler)):
        for raw, _ in cases.values():
            assert await put(broker, name, raw) == [State.ACCEPTED]
        await until(lambda: len(handler.deliveries) == len(cases))
    found = dict(zip(cases, handler.bodies, strict=True))
    assert found == {what: body for what, (_, body) in cases.items()}
    last = handler.deliveries[list(cases).index("sections before and behind")]
    assert (last.headers["n"], last.headers["b"], last.id) == (b"5", b"true", "id")


async def test_three_megabytes_come_in_many_frames_and_again(place: Place, clock: Clock | None) -> None:
    """Out, in, back by *modified*, in again, and on to a dead letter."""
    dead = await place.queue()
    name, broker, body = await place.queue(), place.broker(), bytes(range(256)) * 12 * 1024
    handler = Handler({body: [Retry(), Retry()]})
    policy = Policy(max_attempts=2, dead_letter=dead)
    async with open_runtime(Subscription(broker.queue(name), handler, policy=policy)):
        await broker.publisher(name).publish(body)
        await place.until_ready(dead, 1)
    assert [len(delivery.body) for delivery in handler.deliveries] == [3 * 2**20] * 2
    assert all(delivery.body == body for delivery in handler.deliveries)
    assert len([each for each in place.trace(TRANSFER, ours=False) if each.more]) > 40
    assert len([each for each in place.trace(TRANSFER, ours=True) if each.more]) > 40


async def test_what_has_no_body_is_refused_by_rabbitmq(place: Place, clock: Clock | None) -> None:
    """It ends the link, or in 4.0 the session: the publisher hears of it, and the next message goes all the same."""
    name, broker = await place.queue(), place.broker()
    if place.can.reads is Reads.NOTHING:
        return
    async with broker.connect():
        for raw in WITHOUT_BODY.values():
            with pytest.raises(LinkBroken, match=r"amqp:decode-error|amqp:internal-error"):
                await put(broker, name, raw)
            await broker.publisher(name).publish(b"next")
    await place.until_ready(name, 2)


# --- what cannot


async def test_what_cannot_be_read_is_dropped(place: Place, clock: Clock | None) -> None:
    """A-7.3, A-7.4, C-6.3: without the handler, and the link goes on; the broker's own dead letter has it as it was."""
    dead = await place.queue()
    name, broker, handler = await place.queue(dead), place.broker(), Handler()
    cases, watch = unreadable(place), Watch()
    async with open_runtime(Subscription(broker.queue(name), handler), observers=[watch]) as runtime:
        assert await put(broker, name, *cases.values()) == [State.ACCEPTED] * len(cases)
        await broker.publisher(name).publish(b"behind")
        await handler.has(b"behind")
    assert handler.bodies == [b"behind"]
    assert watch.answers == [Drop()] * len(cases)
    assert (runtime.ledger(name).dropped, runtime.ledger(name).acked) == (len(cases), 1)
    async with broker.connect():
        found = await take(broker, dead, len(cases))
    kept = [
        what for what, raw in cases.items() for each in found if raw_of(each).endswith(raw.removeprefix(ANNOTATIONS))
    ]
    assert sorted(kept) == sorted(cases)


async def test_what_cannot_be_read_is_passed_on_byte_for_byte(place: Place, clock: Clock | None) -> None:
    """DESIGN 6: `DeadLetter()` publishes the raw form; RabbitMQ puts annotations of its own before it."""
    dead = await place.queue()
    name, broker, handler, cases = await place.queue(), place.broker(), Handler(), unreadable(place)
    policy = Policy(dead_letter=dead, on_undecodable=DeadLetter())
    async with open_runtime(Subscription(broker.queue(name), handler, policy=policy)) as runtime:
        await put(broker, name, *cases.values())
        await place.until_ready(dead, len(cases))
    assert (handler.bodies, runtime.ledger(name).dead_lettered) == ([], len(cases))
    async with broker.connect():
        found = [raw_of(delivery) for delivery in await take(broker, dead, len(cases))]
    for raw, passed in zip(cases.values(), found, strict=True):
        assert passed.endswith(raw.removeprefix(ANNOTATIONS))
        assert raw.count(b"x-opt\x52\x07\xa3\x03x-y\x41") == passed.count(b"x-opt\x52\x07\xa3\x03x-y\x41")
        assert place.is_rabbitmq or passed == raw


async def test_what_cannot_be_read_is_modified_by_a_retry(place: Place, clock: Clock | None) -> None:
    """Whatever a broker can count, and without a cap: then it comes again, and may be answered otherwise."""
    name, broker, handler, cases = await place.queue(), place.broker(), Handler(), unreadable(place)
    answers = iter([Retry()] * len(cases) + [Drop()] * len(cases))
    policy = Policy(on_undecodable=lambda *_: next(answers))
    async with open_runtime(Subscription(broker.queue(name, credit=1), handler, policy=policy)) as runtime:
        await put(broker, name, *cases.values())
        await until(lambda: runtime.ledger(name).dropped == len(cases))
    said = Taking(place.trace, place.address(name)).said.values()
    codes = [state[0] for [(_, state)] in said]
    assert sorted(codes) == [0x25] * len(cases) + [0x27] * len(cases)
    assert all(state[1][0] is True for [(_, state)] in said if state[0] == 0x27)
    assert handler.bodies == []
    await place.until_ready(name, 0)


@places("4.0-quorum")
async def test_retries_of_what_is_broken_end_at_the_cap_where_the_broker_counts(
    place: Place, clock: Clock | None
) -> None:
    """Its header section is the broker's, and can be read; then the dead letter has it, once."""
    dead = await place.queue()
    name, broker, handler, watch = await place.queue(), place.broker(), Handler(), Watch()
    policy = Policy(max_attempts=3, dead_letter=dead, on_undecodable=Retry())
    async with open_runtime(Subscription(broker.queue(name), handler, policy=policy), observers=[watch]) as runtime:
        await put(broker, name, *BROKEN.values())
        await place.until_ready(dead, 2)
    assert watch.answers == [Retry()] * 6
    assert (runtime.ledger(name).retried, runtime.ledger(name).dead_lettered) == (4, 2)
    await place.until_ready(name, 0)


# --- what is given up half way


@places("embedded", "embedded-tcp")
async def test_a_delivery_that_is_given_up_half_way_is_no_delivery(place: Place, clock: Clock | None) -> None:
    """Its credit comes back: with a credit of one the next message arrives. (RabbitMQ gives up none.)"""
    assert isinstance(place, Embedded)
    name, broker, handler = await place.queue(), place.broker(), Handler()
    async with open_runtime(Subscription(broker.queue(name, credit=1), handler)) as runtime:
        peer = place.server.peers[0]
        (consumer,) = peer.consumers.values()
        await until(lambda: consumer.credit == 1)
        half = b"\x00\x53\x75\xb0\x00\x10\x00\x00" + b"x" * 200_000
        delivery = lib.pn_delivery(consumer.link.pointer, (2, ffi.from_buffer(b"no")))
        lib.pn_link_send(consumer.link.pointer, ffi.from_buffer(half), len(half))
        peer.hurry()
        await until(lambda: any(each.more for each in place.trace(TRANSFER, ours=False)))
        lib.pn_delivery_abort(delivery)
        consumer.link.passed += 1  # the engine cannot do this, so it does not know
        peer.hurry()
        await broker.publisher(name).publish(b"whole")
        await handler.has(b"whole")
        await until(lambda: runtime.ledger(name).acked == 1)
    assert handler.bodies == [b"whole"]
    assert (runtime.ledger(name).received, runtime.ledger(name).balanced) == (1, True)
