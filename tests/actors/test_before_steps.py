"""actors.before_steps: what stands before a verb is done while the delivery is unsettled, and never skipped (DESIGN
3.6).
"""

# pyright: reportPossiblyUnboundVariable=false

import logging
from typing import Any

import pytest
import trio

from actors import Subscription, open_runtime
from links.abc import Settles
from links.errors import PublishNotAccepted
from links.memory import MemoryBroker
from settlement import Ack, Copies, Delivery, Letter, Plan, Policy, Publish, Retry, RetryAfter, Wait
from settlement.ledger import Line
from settlement.policy import Ending
from tests.actors.scenery import HANGS, Clock, StageBroker, StageQueue, acked, answers, lines, numbered, stored

DEAD = Policy(max_attempts=1, dead_letter="dead")


def held(outcome: Ending, delivery: Delivery[Any], _: Policy) -> Plan[str]:
    """A table that keeps a delayed delivery, as `Hold`, and publishes a dead letter first."""
    match outcome:
        case RetryAfter(delay):
            return Plan(Line.DELAYED, "put back", before=(Wait(delay),), instead="put back")
        case Retry():
            letter = Publish(Letter.of(delivery), "dead")
            return Plan(Line.DEAD_LETTERED, "accept", before=(letter,), instead="put back")
        case _:
            return Plan(Line.ACKED, "accept")


async def test_a_closed_dead_letter_stops_the_line(autojump_clock: Clock) -> None:
    """DESIGN 3.6: it is never skipped: the delivery stays unsettled, its handler is not run again, it shows as
    degraded.
    """
    broker = MemoryBroker()
    broker.fill("q", numbered(3))
    broker.close("dead")
    calls: list[bytes] = []

    async def handler(delivery: Delivery[bytes]) -> Retry:
        calls.append(delivery.body)
        return Retry()

    async with open_runtime(Subscription(broker.queue("q", limit=2), handler, policy=DEAD)) as runtime:
        await trio.sleep(300.0)
        assert calls == [b"0"]
        assert broker.unsettled("q") == 2
        (why,) = runtime.statistics()["q"].degraded
        assert "dead" in why
        broker.reopen("dead")
        await broker.until_empty("q")
        assert runtime.statistics()["q"].degraded == ()
    assert stored(broker, "dead") == numbered(3)
    assert lines(runtime.ledger("q")) == {"received": 3, "dead_lettered": 3}


@pytest.mark.parametrize("settles", Settles)
async def test_drain_with_a_closed_dead_letter(
    settles: Settles, autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """DESIGN 3.6, trap 'closed dead letter × drain': after grace one last try, then the retry verb, a warning each."""
    broker = MemoryBroker()
    broker.fill("q", numbered(2))
    broker.close("dead")
    queue = broker.queue("q", settles=settles)
    async with open_runtime(
        Subscription(queue, answers(then=Retry()), policy=DEAD, concurrency=2), grace=10.0, goodbye=4.0
    ) as runtime:
        await trio.sleep(100.0)
    assert 110.0 <= trio.current_time() <= 118.0
    assert lines(runtime.ledger("q")) == {"received": 2, "retried": 2}
    assert stored(broker, "q") == numbered(2)
    warnings = [record for record in caplog.records if "retried instead" in record.message]
    assert [record.levelno for record in warnings] == [logging.WARNING] * 2


async def test_a_dead_letter_that_opens_in_time_is_published_in_a_drain(autojump_clock: Clock) -> None:
    """DESIGN 3.6: within grace the letter is tried again; a before-step is not cancelled at its end: one last try."""
    for reopened in (5.0, 10.0):
        broker = MemoryBroker()
        broker.fill("q", [b"x"])
        broker.close("dead")
        async with trio.open_nursery() as nursery:

            async def reopen(broker: MemoryBroker = broker, after: float = reopened) -> None:
                await trio.sleep(1.0 + after - 0.001)
                broker.reopen("dead")

            nursery.start_soon(reopen)
            async with open_runtime(
                Subscription(broker.queue("q"), answers(then=Retry()), policy=DEAD), grace=10.0
            ) as (runtime):
                await trio.sleep(1.0)
        assert lines(runtime.ledger("q")) == {"received": 1, "dead_lettered": 1}


@pytest.mark.parametrize("settles", Settles)
async def test_a_hanging_publish_in_a_drain(settles: Settles, autojump_clock: Clock) -> None:
    """DESIGN 3.6, 4: a publish that hangs gets one bounded last try, then the retry verb is said within the goodbye."""
    queue = StageQueue(StageBroker(publishing=HANGS), [b"x"], table=held, settles=settles)
    async with open_runtime(Subscription(queue, answers(Retry())), grace=10.0, goodbye=4.0) as runtime:
        await trio.sleep(1.0)
    assert 11.0 <= trio.current_time() <= 15.0
    assert lines(runtime.ledger("q")) == {"received": 1, "retried": 1}
    assert queue.said == [(b"x", "put back")]


async def test_held_deliveries_keep_their_place_and_not_their_slot(autojump_clock: Clock) -> None:
    """DESIGN 3.1: held deliveries keep their place, not their slot; at concurrency 1 the slot returns as `Wait`
    begins.
    """
    queue = StageQueue(StageBroker(), numbered(10), table=held, limit=4)
    begun: list[float] = []

    async def handler(delivery: Delivery[bytes]) -> RetryAfter:
        begun.append(trio.current_time())
        return RetryAfter(100.0)

    async with open_runtime(Subscription(queue, handler)) as runtime:
        await trio.sleep(50.0)
        assert begun == [0.0] * 4
        assert runtime.ledger("q").in_hand == 4
        await trio.sleep(100.0)
        assert begun == [0.0] * 4 + [100.0] * 4
    assert queue.most == 4
    assert lines(runtime.ledger("q")) == {"received": 8, "delayed": 8}


async def test_a_drain_says_held_verbs_at_once(autojump_clock: Clock) -> None:
    """DESIGN 4, row 'drain, while a delivery is held': its verb is said at once, without waiting."""
    queue = StageQueue(StageBroker(), numbered(3), table=held)
    async with open_runtime(Subscription(queue, answers(then=RetryAfter(1000.0)))) as runtime:
        await trio.sleep(5.0)
    assert trio.current_time() == 5.0
    assert lines(runtime.ledger("q")) == {"received": 3, "delayed": 3}


async def test_a_held_delivery_keeps_its_lease(autojump_clock: Clock) -> None:
    """DESIGN 0.3: a task of its own walks the steps before, in a scope that the keeper holds; the lease is renewed."""
    queue = StageQueue(StageBroker(), [b"x"], table=held, lease=9.0)
    async with open_runtime(Subscription(queue, answers(RetryAfter(200.0)))) as runtime:
        await trio.sleep(150.0)
        queue.extending = HANGS
        await trio.sleep(20.0)
        assert lines(runtime.ledger("q")) == {"received": 1, "superseded": 1}
        await trio.sleep(100.0)
    assert queue.said == []


@pytest.mark.parametrize("settles", Settles)
async def test_cancelled_before_steps_leave_it_unsettled(settles: Settles, autojump_clock: Clock) -> None:
    """DESIGN 4, row 'user cancels': a delivery in its before-steps is unsettled; no verb is said."""
    queue = StageQueue(StageBroker(), numbered(2), table=held, settles=settles)
    with trio.move_on_after(5.0):
        async with open_runtime(Subscription(queue, answers(then=RetryAfter(100.0)))) as runtime:
            await trio.sleep_forever()
    assert lines(runtime.ledger("q")) == {"received": 2, "unsettled": 2}
    assert queue.said == []


async def test_a_break_among_before_steps(autojump_clock: Clock) -> None:
    """DESIGN 4, row 'link breaks': the walks of that life are over; the next life runs the handler again."""
    broker = MemoryBroker()
    broker.fill("q", numbered(4))
    broker.close("dead")
    async with open_runtime(
        Subscription(broker.queue("q"), answers(then=Retry()), policy=Policy(dead_letter="dead"), concurrency=4)
    ) as runtime:
        await trio.sleep(5.0)
        broker.sever("q")
        await trio.sleep(5.0)
        broker.reopen("dead")
        await broker.until_empty("q")
    assert lines(runtime.ledger("q")) == {"received": 8, "unsettled": 4, "dead_lettered": 4}
    assert sorted(stored(broker, "dead")) == numbered(4)


async def test_an_unconfirmed_dead_letter_is_published_again(autojump_clock: Clock) -> None:
    """DESIGN 3.6: a publish without a confirmation is tried again while the delivery stays unsettled: twice beats
    lost.
    """
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    broker.lose_confirmations("dead", 1)
    async with open_runtime(Subscription(broker.queue("q"), answers(Retry()), policy=DEAD)) as runtime:
        await broker.until_empty("q")
    assert stored(broker, "dead") == [b"x", b"x"]
    assert lines(runtime.ledger("q")) == {"received": 1, "dead_lettered": 1}


async def test_a_dead_letter_waits_for_another_brokers_weather(autojump_clock: Clock) -> None:
    """DESIGN 3.6: a dead letter on a broker that is down for a while waits for it, while the line's own link is up."""
    here, there = MemoryBroker("here"), MemoryBroker("there")
    here.fill("q", [b"x"])
    policy = Policy(max_attempts=1, dead_letter=there.publisher("dead"))
    async with open_runtime(Subscription(here.queue("q"), answers(Retry(), taking=5.0), policy=policy)) as runtime:
        there.break_connects(8)
        there.sever_connection()
        await here.until_empty("q")
        assert runtime.statistics()["q"].restarts == 0
    assert trio.current_time() > 10.0
    assert lines(runtime.ledger("q")) == {"received": 1, "dead_lettered": 1}
    assert stored(there, "dead") == [b"x"]


async def test_drain_while_the_dead_letters_broker_is_down(autojump_clock: Clock) -> None:
    """DESIGN 3.6: a letter that waits for a connection is bounded by the drain like any other: the retry verb is
    said.
    """
    here, there = MemoryBroker("here"), MemoryBroker("there")
    here.fill("q", [b"x"])
    policy = Policy(max_attempts=1, dead_letter=there.publisher("dead"))
    async with open_runtime(
        Subscription(here.queue("q"), answers(Retry(), taking=5.0), policy=policy), grace=10.0, goodbye=4.0
    ) as runtime:
        there.break_connects(10**6)
        there.sever_connection()
        await trio.sleep(20.0)
    assert trio.current_time() <= 38.0
    assert lines(runtime.ledger("q")) == {"received": 1, "retried": 1}


async def test_a_letter_that_is_refused_for_ever_holds_one_place(autojump_clock: Clock) -> None:
    """DESIGN 3.6: above concurrency 1 other deliveries go on beside one whose letter is refused."""
    broker = StageBroker()
    broker.errors = [PublishNotAccepted("no")] * 10**4
    queue = StageQueue(broker, numbered(20), table=held, limit=4)
    async with open_runtime(Subscription(queue, answers(Retry()), concurrency=2), grace=1.0) as runtime:
        await trio.sleep(60.0)
        assert acked(runtime) == 19


async def test_before_steps_and_copies_at_once(autojump_clock: Clock) -> None:
    """DESIGN 0.3: before, verb and after: a mix of all over many deliveries balances, every message is somewhere."""
    broker = MemoryBroker()
    broker.fill("q", numbered(60))
    policy = Policy(max_attempts=3, dead_letter="dead")

    async def handler(delivery: Delivery[bytes]) -> Ack | Retry | RetryAfter:
        return (Ack(), Retry(), RetryAfter(3.0))[int(delivery.body) % 3]

    async with open_runtime(
        Subscription(broker.queue("q", delays=Copies(), lease=5.0), handler, policy=policy, concurrency=8)
    ) as runtime:
        await trio.sleep(30.0)
    books = runtime.ledger("q")
    assert (books.acked, books.retried, books.delayed, books.dead_lettered) == (20, 40, 40, 40)
    assert (books.owed, books.published) == (40, 40)
    assert len(stored(broker, "dead")) == 40


@pytest.mark.usefixtures("longest_backoff")
async def test_the_dead_letters_broker_breaks_in_a_drain(autojump_clock: Clock) -> None:
    """DESIGN 4, 3.6: a connection that breaks in a drain is restarted while a step before a verb has to publish."""
    here, there = MemoryBroker("here"), MemoryBroker("there")
    here.fill("q", [b"x"])
    there.close("dead")
    policy = Policy(max_attempts=1, dead_letter=there.publisher("dead"))
    async with open_runtime(Subscription(here.queue("q"), answers(Retry()), policy=policy), grace=15.0) as runtime:
        await trio.sleep(2.0)
        runtime.drain()
        await trio.sleep(0.1)
        there.reopen("dead")
        there.sever_connection()
        await runtime.finished()
    assert trio.current_time() < 5.0
    assert lines(runtime.ledger("q")) == {"received": 1, "dead_lettered": 1}
    assert stored(there, "dead") == [b"x"]


@pytest.mark.parametrize("settles", Settles)
async def test_a_try_that_the_end_of_grace_meets_is_the_last(settles: Settles, autojump_clock: Clock) -> None:
    """DESIGN 3.6: after grace *one* last try within the goodbye: what is in flight is it, and then the verb is said."""
    broker = StageBroker(publishing=8.0)
    broker.errors = [PublishNotAccepted("no")] * 100
    queue = StageQueue(broker, [b"x"], table=held, settling=2.0, settles=settles)
    async with open_runtime(Subscription(queue, answers(Retry())), grace=10.0, goodbye=12.0) as runtime:
        await trio.sleep(1.0)
    assert len(broker.errors) == 98  # at 0 s and at 8.1 s, which fails at 16.1; another one would last until 22.1
    assert 18.0 < trio.current_time() < 18.2
    assert queue.said == [(b"x", "put back")]
    assert lines(runtime.ledger("q")) == {"received": 1, "retried": 1}
