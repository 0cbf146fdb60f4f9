"""actors.prover: a verb that gets no answer is booked when it is proved; place and copy do not wait for that (DESIGN 6,
AMQP: *written* and *proved* are kept apart).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import trio

from actors import Subscription, open_runtime
from links.abc import Received, Settlement, Verdict
from links.errors import AlreadySettled, ConnectionBroken, LinkBroken, NotApplied
from settlement import Ack, Delivery, Retry, RetryAfter
from tests.actors.scenery import Clock, StageBroker, StageLink, StageQueue, answers, lines, numbered


class ProvingLink(StageLink):
    """Its other side shows what it saw when the test says so."""

    proves = True

    def __init__(self, queue: StageQueue, tests: Peer) -> None:
        super().__init__(queue)
        self._peer = tests

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Verdict]:
        verdicts = await super().settle(settlements)
        self._peer.heard += [order.received.delivery.body for order in settlements]
        return verdicts

    async def flush(self) -> None:
        self._peer.flushes += 1
        await self._peer.writes.wait()

    async def proved(self) -> None:
        self._peer.asked += 1
        await self._peer.answers.wait()
        if self._peer.error is not None:
            raise self._peer.error

    def forget(self, received: Received[bytes]) -> None:
        self._peer.forgotten.append(received.delivery.body)


class Peer:
    """The other side, as a test sees it."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.forgotten: list[bytes] = []
        self.asked = 0
        self.flushes = 0
        self.writes = trio.Event()
        self.writes.set()
        self.answers = trio.Event()
        self.error: Exception | None = None

    def link(self) -> Callable[[StageQueue], ProvingLink]:
        return partial(ProvingLink, tests=self)


async def test_booked_when_proved(autojump_clock: Clock) -> None:
    """What was said and not proved is in hand; with the proof it is in its line."""
    peer = Peer()
    queue = StageQueue(StageBroker(), [b"x", b"y"], link=peer.link())
    async with open_runtime(Subscription(queue, answers(Ack(), Retry()))) as runtime:
        await trio.sleep(5.0)
        assert peer.heard == [b"x", b"y"]
        assert lines(runtime.ledger("q")) == {"received": 2, "in_hand": 2}
        peer.answers.set()
        await trio.sleep(1.0)
        assert lines(runtime.ledger("q")) == {"received": 2, "acked": 1, "retried": 1}


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_places_return_before_the_proof(concurrency: int, autojump_clock: Clock) -> None:
    """The limit is 8, and 40 messages are handled while nothing is proved; one proof then serves them all."""
    peer = Peer()
    queue = StageQueue(StageBroker(), numbered(40), link=peer.link())
    async with open_runtime(Subscription(queue, answers(), concurrency=concurrency)) as runtime:
        await trio.sleep(5.0)
        assert sorted(peer.heard) == sorted(numbered(40))
        asked = peer.asked
        peer.answers.set()
        await trio.sleep(1.0)
        assert lines(runtime.ledger("q")) == {"received": 40, "acked": 40}
    assert asked == 1
    assert peer.asked == 2


async def test_at_concurrency_1_the_next_handler_waits_until_the_verb_is_written(autojump_clock: Clock) -> None:
    """DESIGN 3.1: the slot returns when the verb was said, and a verb in a buffer is not."""
    peer, handled = Peer(), list[bytes]()
    peer.answers.set()
    peer.writes = trio.Event()
    queue = StageQueue(StageBroker(), [b"x", b"y"], link=peer.link())

    async def handler(delivery: Delivery[bytes]) -> None:
        await trio.lowlevel.checkpoint()
        handled.append(delivery.body)

    async with open_runtime(Subscription(queue, handler)):
        await trio.sleep(5.0)
        assert (handled, peer.heard) == ([b"x"], [b"x"])
        peer.writes.set()
        await trio.sleep(1.0)
        assert handled == [b"x", b"y"]


async def test_more_handlers_do_not_wait_for_the_write(autojump_clock: Clock) -> None:
    peer = Peer()
    peer.answers.set()
    queue = StageQueue(StageBroker(), numbered(20), link=peer.link())
    async with open_runtime(Subscription(queue, answers(), concurrency=2)):
        await trio.sleep(5.0)
    assert peer.flushes == 0


@pytest.mark.parametrize("error", [LinkBroken("cut"), ConnectionBroken("cut")])
async def test_a_break_before_the_proof_is_unknown(error: Exception, autojump_clock: Clock) -> None:
    """Written and unproved at a break: *unknown*; an earlier proof stands, and the next life says nothing of it."""
    peer = Peer()
    peer.answers.set()
    queue = StageQueue(StageBroker(), [b"x"], link=peer.link())
    async with open_runtime(Subscription(queue, answers(Ack(), Ack(), Retry()))) as runtime:
        await trio.sleep(5.0)
        assert lines(runtime.ledger("q")) == {"received": 1, "acked": 1}
        peer.answers, peer.error = trio.Event(), error
        queue.messages += [b"y", b"z"]
        await trio.sleep(5.0)
        peer.answers.set()
        await trio.sleep(0.01)
        peer.error = None
        assert lines(runtime.ledger("q")) == {"received": 3, "acked": 1, "unknown": 2}
        if isinstance(error, LinkBroken):
            await trio.sleep(5.0)
            assert queue.lives == 2


async def test_the_drain_waits_for_the_proof(autojump_clock: Clock) -> None:
    """A drain ends when everything is proved."""
    peer = Peer()
    queue = StageQueue(StageBroker(), [b"x"], link=peer.link())
    async with open_runtime(Subscription(queue, answers())) as runtime:
        await trio.sleep(1.0)
        runtime.drain()
        await trio.sleep(1.0)
        assert lines(runtime.ledger("q")) == {"received": 1, "in_hand": 1}
        peer.answers.set()
    assert lines(runtime.ledger("q")) == {"received": 1, "acked": 1}


async def test_a_drain_that_gets_no_proof_ends_with_its_grace(autojump_clock: Clock) -> None:
    peer = Peer()
    queue = StageQueue(StageBroker(), [b"x"], link=peer.link())
    async with open_runtime(Subscription(queue, answers()), grace=3.0, goodbye=2.0) as runtime:
        await trio.sleep(1.0)
        began = trio.current_time()
    assert trio.current_time() - began <= 3.0 + 2 * 2.0
    assert lines(runtime.ledger("q")) == {"received": 1, "unknown": 1}


@pytest.mark.parametrize("proved", [True, False])
async def test_a_copy_goes_out_once_proved_or_not(proved: bool, autojump_clock: Clock) -> None:
    """The copy is owed when its original was said to be rejected; that nobody knows whether it was heard (a break)
    makes no second one, and takes no second room.
    """
    peer, broker = Peer(), StageBroker()
    queue = StageQueue(broker, [b"x", b"y"], link=peer.link(), copies=1)
    async with open_runtime(Subscription(queue, answers(RetryAfter(2.0), RetryAfter(2.0)), concurrency=2)) as runtime:
        await trio.sleep(1.0)
        if not proved:
            peer.error = LinkBroken("cut")
        peer.answers.set()
        await trio.sleep(0.5)
        peer.error = None
        await trio.sleep(20.0)
    books = lines(runtime.ledger("q"))
    assert (books.get("delayed", 0), books.get("unknown", 0)) == ((2, 0) if proved else (0, 1))
    copies = 2 if proved else 1
    assert (books["owed"], books["published"], len(broker.published)) == (copies, copies, copies)


async def test_refused_verdicts_are_booked_at_once(autojump_clock: Clock) -> None:
    """What was not said needs no proof: said again, or, where its sender had let go of it, *refused*: it is gone."""
    peer = Peer()
    queue = StageQueue(
        StageBroker(), numbered(3), link=peer.link(), verdicts=[AlreadySettled("settled"), NotApplied("no")]
    )
    async with open_runtime(Subscription(queue, answers())) as runtime:
        await trio.sleep(1.0)
        assert lines(runtime.ledger("q")) == {"received": 3, "refused": 1, "in_hand": 2}
        peer.answers.set()
        await trio.sleep(1.0)
    assert lines(runtime.ledger("q")) == {"received": 3, "refused": 1, "acked": 2}


async def test_at_most_once_the_link_hears_when_a_handler_has_ended(autojump_clock: Clock) -> None:
    """Nothing is said and nothing is proved; the credit of a delivery follows its handler (A-5.5)."""
    peer = Peer()
    queue = StageQueue(StageBroker(), numbered(3), link=peer.link(), at_most_once=True)
    async with open_runtime(Subscription(queue, answers(), concurrency=2)) as runtime:
        await trio.sleep(1.0)
    assert sorted(peer.forgotten) == numbered(3)
    assert (peer.heard, peer.asked) == ([], 0)
    assert lines(runtime.ledger("q")) == {"received": 3, "refused": 3}
