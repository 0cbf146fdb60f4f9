"""What a subscription says on the wire, frame by frame, to each broker (CONFORMANCE H)."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import pytest
import trio
from trio.abc import Clock

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from actors import Subscription, open_runtime
from settlement import Copies, Delivery, Drop, Hold, Outcome, Retry, RetryAfter
from settlement.amqp import AT_MOST_ONCE, Delays
from tests.links.amqp_kit import Handler, Place, dropped, until
from tests.links.wire_kit import ATTACH, BEGIN, FLOW, TRANSFER, Taking, ids

pytestmark = pytest.mark.amqp

State: TypeAlias = tuple[int, list[Any]]
"""Its descriptor and its fields."""
ACCEPTED: Final[State] = (0x24, [])
REJECTED: Final[State] = (0x25, [])
MODIFIED: Final[State] = (0x27, [True])
"""*modified* with delivery-failed true, and nothing else."""


def without_nulls(state: State) -> State:
    """A state without the fields at its end that say nothing: false, null."""
    code, fields = state
    while fields and not fields[-1]:
        fields = fields[:-1]
    return code, fields


async def handled(place: Place, answers: list[Outcome], calls: int, delays: Delays = Copies()) -> list[Any]:
    """What was said of a message, delivery by delivery, whose handler answers so and then acks."""
    name, broker, handler = await place.queue(), place.broker(), Handler({b"m": answers})
    async with open_runtime(Subscription(broker.queue(name, delays=delays), handler)):
        await broker.publisher(name).publish(b"m")
        await handler.has(*[b"m"] * calls)
    taking = Taking(place.trace, place.address(name))
    assert [each.delivery_id for each in taking.delivered] == sorted(taking.said)
    assert [len(said) for said in taking.said.values()] == [1] * calls
    assert all(settled for [(settled, _)] in taking.said.values())
    return [without_nulls(state) for [(_, state)] in taking.said.values()]


# --- verbs


async def test_ack_is_accepted(place: Place, clock: Clock | None) -> None:
    """A-1.1."""
    assert await handled(place, [], 1) == [ACCEPTED]


async def test_retry_is_modified_with_delivery_failed_and_never_released(place: Place, clock: Clock | None) -> None:
    """K-61, A-1.2, A-1.10."""
    assert await handled(place, [Retry(), Retry()], 3) == [MODIFIED, MODIFIED, ACCEPTED]


async def test_drop_is_rejected_without_an_error_condition(place: Place, clock: Clock | None) -> None:
    """K-62, A-1.4, A-1.6: also with a reason, which is for our logs."""
    assert await handled(place, [Drop("malformed")], 1) == [REJECTED]


async def test_retry_after_is_rejected_and_its_copy_accepted(place: Place, clock: Clock | None) -> None:
    """A-1.3."""
    assert await handled(place, [RetryAfter(0.01)], 2) == [REJECTED, ACCEPTED]


async def test_retry_after_of_what_is_held_is_modified(place: Place, clock: Clock | None) -> None:
    """DESIGN 6: said when the delay is over."""
    assert await handled(place, [RetryAfter(0.05)], 2, Hold(5)) == [MODIFIED, ACCEPTED]
    first, second = Taking(place.trace, place.trace(ATTACH, ours=True)[-2].address or "").delivered[:2]
    assert second.at - first.at >= 0.05


# --- one word for each delivery, and none for what is unsettled


async def test_one_word_is_said_of_each_delivery_and_none_of_what_is_unsettled(
    place: Place, clock: Clock | None
) -> None:
    """A-1.5: of 40 messages eight are in hand when the block is left; of those nothing is said."""
    name, broker = await place.queue(), place.broker()
    stuck: list[bytes] = []

    async def handle(delivery: Delivery[bytes]) -> Outcome | None:
        if int(delivery.body) % 5 == 4:
            stuck.append(delivery.body)
            await trio.sleep_forever()
        return Drop() if int(delivery.body) % 5 == 3 else None

    async with broker.connect():
        for number in range(40):
            await broker.publisher(name).publish(b"%d" % number)
    async with dropped(Subscription(broker.queue(name), handle, concurrency=12)) as runtime:
        await until(lambda: runtime.ledger(name).acked + runtime.ledger(name).dropped == 32 and len(stuck) == 8)
    taking = Taking(place.trace, place.address(name))
    bodies = {each.delivery_id: int(each.payload[each.payload.rindex(b"\xa0") + 2 :]) for each in taking.delivered}
    assert len(bodies) == 40
    said = {bodies[number]: words for number, words in taking.said.items()}
    assert sorted(said) == [number for number in range(40) if number % 5 != 4]
    for number, [(settled, state)] in said.items():
        assert settled
        assert without_nulls(state) == (REJECTED if number % 5 == 3 else ACCEPTED)


# --- credit


async def test_the_peer_never_has_more_than_the_limit_to_send_or_settled(place: Place, clock: Clock | None) -> None:
    """A-5.4, A-5.5: what the peer may have sent by our last flow, less what we have settled, is 5 or less, always;
    and all of it is used.
    """
    name, broker, most = await place.queue(), place.broker(), 0
    handler = Handler({b"%d" % number: [Retry()] for number in range(0, 60, 7)})
    async with broker.connect():
        for number in range(60):
            await broker.publisher(name).publish(b"%d" % number)
    async with open_runtime(Subscription(broker.queue(name, credit=5), handler, concurrency=3)):
        await handler.has(*[b"%d" % number for number in range(60)], *[b"%d" % number for number in range(0, 60, 7)])
    taking, allowed, settled = Taking(place.trace, place.address(name)), 0, 0
    for frame in taking:
        if frame.code == FLOW and frame.ours:
            if frame.drain:  # the rest is given back
                break
            allowed = ((frame.delivery_count or 0) - taking.began_with + frame.link_credit) & 0xFFFFFFFF
        elif frame.code not in (FLOW, TRANSFER):
            settled += len(ids(frame))
        most = max(most, allowed - settled)
        assert allowed - settled <= 5
    assert (most, len(taking.delivered), len(taking.said)) == (5, 69, 69)


# --- proof


async def test_what_was_said_is_proved_by_a_flow_with_echo_behind_it(place: Place, clock: Clock | None) -> None:
    """DESIGN 6: behind each disposition comes a flow that asks for an answer, and the answer comes, and at once: not
    with the next heartbeat.
    """
    await handled(place, [Retry()] * 3, 4)
    name = next(each.address for each in place.trace(ATTACH, ours=True) if each.address != "/management")
    frames = list(Taking(place.trace, name or ""))
    last_word = max(at for at, frame in enumerate(frames) if frame.code not in (FLOW, TRANSFER))
    echo = next(at for at, frame in enumerate(frames) if at > last_word and frame.ours and frame.echo)
    answer = next(frame for frame in frames[echo:] if not frame.ours and frame.code == FLOW)
    assert answer.at - frames[echo].at < 2.0


async def test_every_flow_behind_an_echo_asks_for_one_until_the_answer(place: Place, clock: Clock | None) -> None:
    """RabbitMQ keeps one flow of a link waiting for its queue, the last one, and forgets the echo of another: so the
    proof came never, and what was said stayed in hand.
    """
    name, broker, handler = await place.queue(), place.broker(), Handler()
    async with broker.connect(), trio.open_nursery() as nursery:
        for number in range(500):
            nursery.start_soon(broker.publisher(name).publish, b"%d" % number)
    async with open_runtime(Subscription(broker.queue(name), handler, concurrency=8)) as runtime:
        await until(lambda: runtime.ledger(name).acked == 500)
    asked: int | None = None
    echoes = 0
    for frame in Taking(place.trace, place.address(name)):
        if frame.code != FLOW or frame.drain:
            continue
        limit = (frame.delivery_count or 0) + frame.link_credit
        if frame.ours:
            assert frame.echo or asked is None
            if frame.echo and asked is None:
                asked, echoes = limit, echoes + 1
        elif asked is not None and (limit - asked) & 0xFFFFFFFF < 2**31:
            asked = None
    assert echoes > 1


# --- sessions


async def test_each_subscription_has_a_session_and_all_publishers_share_one(place: Place, clock: Clock | None) -> None:
    """A-5.6; on RabbitMQ its management is asked in one more, and each address is tried in one more."""
    names, broker, handler = [await place.queue() for _ in range(3)], place.broker(), Handler()
    async with open_runtime(*[Subscription(broker.queue(name), handler) for name in names]):
        for name in names:
            await broker.publisher(name).publish(name.encode())
            await broker.publisher(name).publish(b"again")
        await handler.has(*[name.encode() for name in names])
    attached = [each for each in place.trace(ATTACH, ours=True) if each.address != "/management"]
    takers = {each.address: each.channel for each in attached if each.is_receiver}
    assert sorted(takers, key=str) == sorted(map(place.address, names))
    assert len(set(takers.values())) == 3
    sent = {each.channel for each in place.trace(TRANSFER, ours=True) if each.settled is not True}
    assert len(sent - set(takers.values())) == 1
    senders = sorted(each.address or "" for each in attached if each.channel in sent)
    assert senders == sorted(map(place.address, names))
    assert len(place.trace(BEGIN, ours=True)) == 4 + 2 * place.is_rabbitmq


# --- at most once


async def test_at_most_once_accepted_is_written_before_the_handler_runs(place: Place, clock: Clock | None) -> None:
    """A-2.1, and nothing more is said after it."""
    name, broker, before = await place.queue(), place.broker(), list[list[Any]]()

    async def handle(delivery: Delivery[bytes]) -> Outcome:
        before.append([state for [(_, state)] in Taking(place.trace, place.address(name)).said.values()])
        return Retry()

    async with open_runtime(Subscription(broker.queue(name, settle=AT_MOST_ONCE, credit=1), handle)) as runtime:
        for body in (b"one", b"two"):
            await broker.publisher(name).publish(body)
        await until(lambda: runtime.ledger(name).refused == 2)
    assert before == [[ACCEPTED], [ACCEPTED, ACCEPTED]]
    assert [len(said) for said in Taking(place.trace, place.address(name)).said.values()] == [1, 1]
