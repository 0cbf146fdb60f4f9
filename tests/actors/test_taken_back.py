"""What a link says of a delivery in hand: it is no longer ours, wherever it is (DESIGN 3.8 and 6, AMQP)."""

# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from actors import BatchSubscription, Subscription, open_runtime
from links.abc import Link, Lost, Received, Settlement, Verdict
from links.errors import NotApplied, PublishNotAccepted
from settlement import Ack, Delivery, Plan, Policy, Publish, RetryAfter, Wait
from settlement.delivery import Letter
from settlement.ledger import Line
from settlement.policy import Ending
from tests.actors.scenery import HANGS, Clock, StageBroker, StageLink, StageQueue, answers, lines, numbered


class Told(StageLink):
    """A link that remembers what it handed over, and what it was told to forget."""

    def __init__(self, queue: StageQueue) -> None:
        super().__init__(queue)
        self.handed: list[Received[bytes]] = []
        self.forgotten: list[bytes] = []

    async def receive(self, room: int) -> Sequence[Received[bytes]]:
        received = await super().receive(room)
        self.handed += received
        return received

    def forget(self, received: Received[bytes]) -> None:
        self.forgotten.append(received.delivery.body)


class TakingQueue(StageQueue):
    """Its other side takes deliveries back."""

    told: Told
    lost: Lost

    def __init__(self, broker: StageBroker, messages: Any, **options: Any) -> None:
        super().__init__(broker, messages, link=Told, **options)

    @asynccontextmanager
    async def attach(
        self, subscription: str, lost: Lost, *arguments: Any, **options: Any
    ) -> AsyncGenerator[Link[bytes]]:
        self.lost = lost
        async with super().attach(subscription, lost, *arguments, **options) as link:
            assert isinstance(link, Told)
            self.told = link
            yield link

    def take_back(self, number: int, line: Line = Line.SUPERSEDED) -> None:
        self.lost(self.told.handed[number], line)


@pytest.mark.parametrize("line", [Line.SUPERSEDED, Line.UNSETTLED])
@pytest.mark.parametrize("concurrency", [1, 2])
async def test_in_its_handler(line: Line, concurrency: int, autojump_clock: Clock) -> None:
    """The handler is cancelled, nothing is said, the place returns; the worker goes on."""
    queue = TakingQueue(StageBroker(), numbered(3), limit=2)
    cancelled: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        try:
            await trio.sleep(10.0)
        except trio.Cancelled:
            cancelled.append(delivery.body)
            raise

    async with open_runtime(Subscription(queue, handler, concurrency=concurrency)) as runtime:
        await trio.sleep(1.0)
        queue.take_back(0, line)
        queue.take_back(0, line)  # as often as it likes
        await trio.sleep(25.0)
    assert cancelled == [b"0"]
    assert lines(runtime.ledger("q")) == {"received": 3, "acked": 2, line.name.lower(): 1}
    assert (queue.told.forgotten, len(queue.said)) == ([b"0"], 2)


async def test_while_it_waits_for_a_handler(autojump_clock: Clock) -> None:
    """It is not started."""
    queue = TakingQueue(StageBroker(), numbered(2), limit=2)
    begun: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        begun.append(delivery.body)
        await trio.sleep(5.0)

    async with open_runtime(Subscription(queue, handler)) as runtime:
        await trio.sleep(1.0)
        queue.take_back(1)
        await trio.sleep(10.0)
    assert (begun, queue.told.forgotten) == ([b"0"], [b"1"])
    assert lines(runtime.ledger("q")) == {"received": 2, "acked": 1, "superseded": 1}


async def test_in_a_batch(autojump_clock: Clock) -> None:
    """The batch is cancelled, its mates go back at once."""
    queue = TakingQueue(StageBroker(), numbered(3), limit=3)

    async def handler(batch: list[Delivery[bytes]]) -> None:
        await trio.sleep(5.0 if len(queue.told.handed) == 3 else 0.0)

    async with open_runtime(BatchSubscription(queue, handler, size=3)) as runtime:
        await trio.sleep(1.0)
        queue.take_back(1)
        await trio.sleep(1.0)
        assert queue.given_back == [b"0", b"2"]
    assert lines(runtime.ledger("q")) == {"received": 3, "superseded": 1, "unsettled": 2}
    assert queue.told.forgotten == [b"1"]


def held(_: Ending, delivery: Delivery[Any], __: Policy) -> Plan[str]:
    return Plan(Line.DELAYED, "modify", before=(Wait(50.0),), instead="modify")


def dead(_: Ending, delivery: Delivery[Any], __: Policy) -> Plan[str]:
    return Plan(Line.DEAD_LETTERED, "accept", before=(Publish(Letter.of(delivery), "dead"),), instead="modify")


@pytest.mark.parametrize("table", [held, dead])
@pytest.mark.parametrize("concurrency", [1, 2])
async def test_on_the_way_to_its_verb(table: Callable[..., Plan[str]], concurrency: int, autojump_clock: Clock) -> None:
    """Held, or before a closed dead letter: the walk ends, no letter is published, no mark is left."""
    broker = StageBroker()
    broker.errors = [PublishNotAccepted("full")] * 1000
    queue = TakingQueue(broker, [b"x"], table=table, limit=1)
    async with open_runtime(Subscription(queue, answers(), concurrency=concurrency)) as runtime:
        await trio.sleep(10.0)
        queue.take_back(0)
        await trio.sleep(1.0)
        broker.errors.clear()
        assert runtime.statistics()["q"].degraded == ()
        await trio.sleep(60.0)
    assert lines(runtime.ledger("q")) == {"received": 1, "superseded": 1}
    assert (queue.said, broker.published, queue.told.forgotten) == ([], [], [b"x"])


async def test_while_its_settlement_is_on_the_wire(autojump_clock: Clock) -> None:
    """Where a verb is answered, its verdict decides."""
    queue = TakingQueue(StageBroker(), [b"x"], settling=5.0)
    async with open_runtime(Subscription(queue, answers())) as runtime:
        await trio.sleep(1.0)
        queue.take_back(0)
        await trio.sleep(10.0)
    assert lines(runtime.ledger("q")) == {"received": 1, "acked": 1}
    assert queue.told.forgotten == []


@pytest.mark.parametrize("when", ["unproved", "not applied"])
async def test_after_its_verb_was_said(when: str, autojump_clock: Clock) -> None:
    """Said and not proved: the other side took it back before it saw that. Not applied: nothing is said again."""
    queue = TakingQueue(
        StageBroker(), numbered(2), limit=1, verdicts=[NotApplied("no")] if when == "not applied" else []
    )
    proof = trio.Event()

    class Proving(Told):
        proves = when == "unproved"

        async def proved(self) -> None:
            await proof.wait()

    queue._link = Proving
    async with open_runtime(Subscription(queue, answers())) as runtime:
        await trio.sleep(0.5)
        queue.take_back(0)
        proof.set()
        await trio.sleep(10.0)
    assert lines(runtime.ledger("q")) == {"received": 2, "superseded": 1, "acked": 1}


async def test_while_it_waits_for_room_among_the_copies(autojump_clock: Clock) -> None:
    """No copy is owed, and the room is not taken."""
    queue = TakingQueue(StageBroker(), numbered(3), copies=1, limit=2)
    async with open_runtime(Subscription(queue, answers(then=RetryAfter(100.0)), concurrency=2)) as runtime:
        await trio.sleep(1.0)
        waiting = next(n for n, each in enumerate(queue.told.handed) if each.delivery.body != queue.said[0][0])
        queue.take_back(waiting)
        await trio.sleep(1.0)
        assert lines(runtime.ledger("q")) == {
            "received": 3, "delayed": 1, "superseded": 1, "in_hand": 1, "owed": 1, "waiting": 1,
        }  # fmt: skip
    assert runtime.ledger("q").published == 1


@pytest.mark.parametrize("concurrency", [1, 2])
async def test_a_link_is_told_of_what_the_end_of_grace_leaves(concurrency: int, autojump_clock: Clock) -> None:
    """Given up by a cancelled handler: the link hears of it, once."""
    queue = TakingQueue(StageBroker(), [b"x"], limit=1)
    async with open_runtime(Subscription(queue, answers(taking=HANGS), concurrency=concurrency), grace=1.0) as runtime:
        await trio.sleep(1.0)
    assert lines(runtime.ledger("q")) == {"received": 1, "unsettled": 1}
    assert queue.told.forgotten == [b"x"]


async def test_steps_before_and_after_one_verb(autojump_clock: Clock) -> None:
    """A plan may have both: room among the copies is taken when its before-steps are done (DESIGN 0.3, 3.7)."""

    def both(ending: Ending, delivery: Delivery[Any], _: Policy) -> Plan[str]:
        if isinstance(ending, Ack):
            return Plan(Line.ACKED, "accept")
        before = (Publish(Letter(b"before"), "a"), Wait(2.0))
        return Plan(
            Line.DELAYED, "reject", before=before, after=(Wait(3.0), Publish(Letter(b"after"), "b")), instead="m"
        )

    broker = StageBroker()
    queue = StageQueue(broker, numbered(3), table=both, copies=1)
    outcomes = answers(RetryAfter(0.0), RetryAfter(0.0), RetryAfter(0.0))
    async with open_runtime(Subscription(queue, outcomes, concurrency=3)) as runtime:
        await trio.sleep(20.0)
    assert [(at, to) for at, to, _ in broker.published] == [(0.0, "a")] * 3 + [(5.0, "b"), (8.0, "b"), (11.0, "b")]
    assert lines(runtime.ledger("q")) == {"received": 3, "delayed": 3, "owed": 3, "published": 3}


@pytest.mark.parametrize("shielded", [False, True])
async def test_where_everything_is_cancelled_nothing_is_said(
    shielded: bool, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DESIGN 3.5: orders that lie before the settler when all around is cancelled are not said.

    One that the settler had begun to say then is *unknown*.
    """
    queue = StageQueue(StageBroker(), numbered(4), limit=4)
    settle = StageLink.settle
    begun: list[bool] = []

    async def settling(link: StageLink, settlements: Sequence[Settlement]) -> Sequence[Verdict]:
        begun.extend(scope.cancel_called for _ in settlements)
        return await settle(link, settlements)

    monkeypatch.setattr(StageLink, "settle", settling)
    with trio.CancelScope() as scope:

        async def handler(delivery: Delivery[bytes]) -> None:
            if delivery.body == b"3":
                scope.cancel()
            elif shielded:
                with trio.CancelScope(shield=True):
                    await trio.lowlevel.checkpoint()

        async with open_runtime(Subscription(queue, handler, concurrency=2)) as runtime:
            await trio.sleep_forever()
    assert queue.said == []
    assert not any(begun), "it was said in spite of the cancellation"
    ledger = runtime.ledger("q")
    assert (ledger.unknown, ledger.unsettled) == (len(begun), 4 - len(begun))
