"""actors.batch_worker: sizes, waits, outcomes and failures of batches (C-7.4 to C-7.7, OQ-28)."""

# pyright: reportPossiblyUnboundVariable=false

import logging
from collections.abc import Sequence

import pytest
import trio

from actors import BatchSubscription, HandlerFailed, open_runtime
from links.abc import Settles
from links.memory import MemoryBroker, Returned
from settlement import Ack, Copies, Delivery, Drop, Outcome, Policy, Retry, RetryAfter
from tests.actors.scenery import HANGS, Clock, StageBroker, StageQueue, bodies, lines, numbered, stored


class Oops(Exception):
    pass


async def nothing(batch: list[Delivery[bytes]]) -> None:
    await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize("settles", Settles)
async def test_batches_have_1_to_size_elements(size: int, settles: Settles, autojump_clock: Clock) -> None:
    """C-7.4: the handler gets 1 to `size` elements, in arrival order, never an empty list."""
    broker = MemoryBroker()
    broker.fill("q", numbered(20))
    batches: list[list[bytes]] = []

    async def handler(batch: list[Delivery[bytes]]) -> None:
        await trio.sleep(1.0)
        batches.append(bodies(batch))

    async with open_runtime(BatchSubscription(broker.queue("q", settles=settles), handler, size=size)) as runtime:
        await broker.until_empty("q")
    assert {len(batch) for batch in batches[:-1]} <= {size}
    assert 1 <= len(batches[-1]) <= size
    assert [body for batch in batches for body in batch] == numbered(20)
    assert lines(runtime.ledger("q")) == {"received": 20, "acked": 20}


async def test_a_batch_closes_on_size_or_wait(autojump_clock: Clock) -> None:
    """C-7.7: a batch closes on size, or on `wait` after its first element, whichever comes first."""
    broker = MemoryBroker()
    batches: list[tuple[float, int]] = []

    async def handler(batch: list[Delivery[bytes]]) -> None:
        batches.append((trio.current_time(), len(batch)))
        await trio.lowlevel.checkpoint()

    async with open_runtime(BatchSubscription(broker.queue("q"), handler, size=3, wait=10.0)):
        broker.fill("q", [b"1"])
        await trio.sleep(4.0)
        broker.fill("q", [b"2"])
        await trio.sleep(16.0)
        broker.fill("q", [b"3"])
        await trio.sleep(1.0)
        broker.fill("q", [b"4", b"5", b"6"])
        await trio.sleep(20.0)
    assert batches == [(10.0, 2), (21.0, 3), (31.0, 1)]


@pytest.mark.parametrize("outcome", [None, Ack(), Drop(), [None, Ack(), Drop()]])
async def test_one_outcome_for_all_or_one_each(
    outcome: Outcome | Sequence[Outcome | None] | None, autojump_clock: Clock
) -> None:
    """C-7.5: one outcome for all, or one per element in order; `None` is `Ack`, for all or for one."""
    broker = MemoryBroker()
    broker.fill("q", numbered(3))

    async def handler(batch: list[Delivery[bytes]]) -> Outcome | Sequence[Outcome | None] | None:
        await trio.lowlevel.checkpoint()
        return outcome

    async with open_runtime(BatchSubscription(broker.queue("q"), handler, size=3)) as runtime:
        await broker.until_empty("q")
    dropped = 3 if outcome == Drop() else 1 if isinstance(outcome, list) else 0
    assert (runtime.ledger("q").acked, runtime.ledger("q").dropped) == (3 - dropped, dropped)


@pytest.mark.parametrize("concurrency", [1, 2])
async def test_mixed_outcomes(concurrency: int, autojump_clock: Clock) -> None:
    """C-7.5: each element has its own outcome, with before-steps and copies, and its own cap."""
    broker = MemoryBroker()
    broker.fill("q", numbered(4))
    policy = Policy(max_attempts=2, dead_letter="dead")

    async def handler(batch: list[Delivery[bytes]]) -> list[Outcome]:
        await trio.lowlevel.checkpoint()
        return [(Ack(), Retry(), RetryAfter(3.0), Drop())[int(delivery.body)] for delivery in batch]

    queue = broker.queue("q", delays=Copies())
    async with open_runtime(
        BatchSubscription(queue, handler, size=4, policy=policy, concurrency=concurrency)
    ) as runtime:
        await trio.sleep(30.0)
    assert lines(runtime.ledger("q")) == {
        "received": 6,
        "acked": 1,
        "dropped": 1,
        "retried": 1,
        "delayed": 1,
        "dead_lettered": 2,
        "owed": 1,
        "published": 1,
    }
    assert sorted(stored(broker, "dead")) == [b"1", b"2"]


@pytest.mark.parametrize(("given", "acked", "retried"), [([], 0, 3), ([Ack()], 1, 2), ([Ack()] * 5, 3, 0)])
async def test_a_list_of_the_wrong_length(
    given: list[Outcome], acked: int, retried: int, autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """C-7.5: elements without an outcome are retried, one error is logged."""
    broker = MemoryBroker()
    broker.fill("q", numbered(3))
    first = True

    async def handler(batch: list[Delivery[bytes]]) -> list[Outcome] | None:
        nonlocal first
        await trio.lowlevel.checkpoint()
        first, answer = False, given if first else None
        return answer

    async with open_runtime(BatchSubscription(broker.queue("q"), handler, size=3)) as runtime:
        await broker.until_empty("q")
    assert lines(runtime.ledger("q")) == {
        key: count for key, count in {"received": 3 + retried, "acked": 3, "retried": retried}.items() if count
    }
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert acked + retried == 3


@pytest.mark.parametrize("bodies_", [[b"1", b"x", b"2"], [b"x", b"y"]])
async def test_undecodable_elements_are_settled_alone(bodies_: list[bytes], autojump_clock: Clock) -> None:
    """C-7.6: they are taken out and settled by the decode policy; if none is left the handler is not called."""
    broker = MemoryBroker()
    broker.fill("q", bodies_)
    seen: list[list[int]] = []

    async def handler(batch: list[Delivery[int]]) -> Retry | None:
        await trio.lowlevel.checkpoint()
        seen.append([delivery.message for delivery in batch])
        return Retry() if len(seen) == 1 else None

    async with open_runtime(BatchSubscription(broker.queue("q"), handler, size=5, decode=int)) as runtime:
        await broker.until_empty("q")
    if b"1" in bodies_:
        assert seen == [[1, 2], [1, 2]]
        assert lines(runtime.ledger("q")) == {"received": 5, "dropped": 1, "retried": 2, "acked": 2}
    else:
        assert seen == []
        assert lines(runtime.ledger("q")) == {"received": 2, "dropped": 2}


async def test_a_failure_is_answered_for_each_element(autojump_clock: Clock) -> None:
    """OQ-28: the error policy is applied to every element."""
    broker = MemoryBroker()
    broker.fill("q", numbered(3))
    asked: list[bytes] = []

    def answer(delivery: Delivery[bytes], error: Exception) -> Outcome:
        asked.append(delivery.body)
        return Drop() if delivery.body == b"1" else Ack()

    async def handler(batch: list[Delivery[bytes]]) -> None:
        raise Oops

    async with open_runtime(
        BatchSubscription(broker.queue("q"), handler, size=3, policy=Policy(failures={Oops: answer}))
    ) as runtime:
        await broker.until_empty("q")
    assert asked == numbered(3)
    assert lines(runtime.ledger("q")) == {"received": 3, "acked": 2, "dropped": 1}


async def test_fail_fast_leaves_the_whole_batch_unsettled(autojump_clock: Clock) -> None:
    """OQ-28: fail-fast leaves all unsettled."""
    broker = MemoryBroker()
    broker.fill("q", numbered(3))

    async def handler(batch: list[Delivery[bytes]]) -> None:
        raise Oops

    with pytest.raises(ExceptionGroup) as caught:
        async with open_runtime(BatchSubscription(broker.queue("q"), handler, size=3)) as runtime:
            await trio.sleep_forever()
    (error,) = caught.value.exceptions
    assert isinstance(error, HandlerFailed)
    assert isinstance(error.__cause__, Oops)
    assert lines(runtime.ledger("q")) == {"received": 3, "unsettled": 3}


@pytest.mark.parametrize("answer", ["ack", 5, Ack, {Ack()}, (outcome for outcome in [Ack()])])
async def test_what_is_no_outcome_is_a_failure_of_each(answer: object, autojump_clock: Clock) -> None:
    """DESIGN 2, C-1.1: a value that is neither an outcome nor a sequence of them is a `TypeError` for each element."""
    broker = MemoryBroker()
    broker.fill("q", numbered(2))

    async def handler(batch: list[Delivery[bytes]]) -> None:
        await trio.lowlevel.checkpoint()
        return answer  # type: ignore[return-value]

    policy = Policy(failures={TypeError: Drop()})
    async with open_runtime(BatchSubscription(broker.queue("q"), handler, size=2, policy=policy)) as runtime:
        await broker.until_empty("q")
    assert lines(runtime.ledger("q")) == {"received": 2, "dropped": 2}


async def test_within_bounds_a_batch(autojump_clock: Clock) -> None:
    """DESIGN 2: `within=` limits one call of the handler, also of a batch."""
    broker = MemoryBroker()
    broker.fill("q", numbered(2))

    async def handler(batch: list[Delivery[bytes]]) -> None:
        await trio.sleep_forever()

    policy = Policy(failures={trio.TooSlowError: Drop()})
    async with open_runtime(
        BatchSubscription(broker.queue("q"), handler, size=2, within=4.0, policy=policy)
    ) as runtime:
        await broker.until_empty("q")
    assert trio.current_time() == 4.0
    assert runtime.ledger("q").dropped == 2


async def test_the_limit_is_enough_for_full_batches(autojump_clock: Clock) -> None:
    """DESIGN 3.1: for batches the limit is × `size`, so that each handler can have its share."""
    broker = MemoryBroker()
    broker.fill("q", numbered(100))
    sizes: set[int] = set()

    async def handler(batch: list[Delivery[bytes]]) -> None:
        sizes.add(len(batch))
        await trio.sleep(1.0)

    async with open_runtime(BatchSubscription(broker.queue("q"), handler, size=10, concurrency=2)):
        await broker.until_empty("q")
    assert sizes == {10}
    assert broker.most_unsettled("q") == 40


@pytest.mark.parametrize("end", ["drain", "cancel"])
async def test_a_cancelled_batch_is_unsettled(end: str, autojump_clock: Clock) -> None:
    """DESIGN 4, rows 'grace over' and 'user cancels': every element is unsettled, whatever the handler answers then."""
    broker = MemoryBroker()
    broker.fill("q", numbered(3))

    async def handler(batch: list[Delivery[bytes]]) -> Ack:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            return Ack()

    with trio.CancelScope() as scope:
        async with open_runtime(BatchSubscription(broker.queue("q"), handler, size=3), grace=2.0) as runtime:
            await trio.sleep(1.0)
            if end == "cancel":
                scope.cancel()
    assert lines(runtime.ledger("q")) == {"received": 3, "unsettled": 3}


async def test_a_batch_whose_lease_is_lost(autojump_clock: Clock) -> None:
    """DESIGN 4, row 'lease lost': leases of a batch are kept while it gathers and runs; lost, it says nothing."""
    queue = StageQueue(StageBroker(), numbered(2), lease=9.0)

    async def handler(batch: list[Delivery[bytes]]) -> None:
        await trio.sleep(30.0)

    async with open_runtime(BatchSubscription(queue, handler, size=5, wait=20.0)) as runtime:
        await trio.sleep(40.0)
        queue.extending = HANGS
        await trio.sleep(20.0)
    assert lines(runtime.ledger("q")) == {"received": 2, "superseded": 2}
    assert queue.said == []


async def test_at_concurrency_1_a_batch_is_said_before_the_next_begins(autojump_clock: Clock) -> None:
    """DESIGN 3.1: at concurrency 1 the slot returns when the verbs were said, for a batch too."""
    queue = StageQueue(StageBroker(), numbered(6), settling=1.0)
    said: list[int] = []

    async def handler(batch: list[Delivery[bytes]]) -> None:
        said.append(len(queue.said))
        await trio.sleep(0.1)

    async with open_runtime(BatchSubscription(queue, handler, size=3), grace=60.0):
        await trio.sleep(0.5)
        await trio.sleep(20.0)
    assert said == [0, 3]


async def test_a_batch_is_said_together(autojump_clock: Clock) -> None:
    """DESIGN 3.2: the settler takes all that is ready: the verbs of a batch do not wait for one another."""
    queue = StageQueue(StageBroker(), numbered(6), settling=1.0)
    async with open_runtime(BatchSubscription(queue, nothing, size=6), grace=60.0) as runtime:
        await trio.sleep(0.5)
        runtime.drain()
        await runtime.finished()
    assert trio.current_time() <= 2.0
    assert runtime.ledger("q").acked == 6


def test_what_a_batch_subscription_refuses() -> None:
    """C-7.4: size is mandatory, 1 or more; a wait is 0 or more."""
    queue = MemoryBroker().queue("q")
    for error, options in (("size", {"size": 0}), ("wait", {"size": 1, "wait": -1.0}), ("size", {"size": True})):
        with pytest.raises(ValueError, match=error):
            BatchSubscription(queue, nothing, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]
    with pytest.raises(TypeError):
        BatchSubscription(queue, nothing)  # type: ignore[call-overload]


@pytest.mark.parametrize("concurrency", [1, 2])
async def test_a_batch_that_needs_more_room_than_there_is(concurrency: int, autojump_clock: Clock) -> None:
    """DESIGN 3.7: the elements of a batch take room one by one; those that were given room are said meanwhile."""
    queue = StageQueue(StageBroker(), numbered(5), copies=2)

    async def handler(batch: list[Delivery[bytes]]) -> RetryAfter:
        await trio.lowlevel.checkpoint()
        return RetryAfter(10.0)

    async with open_runtime(BatchSubscription(queue, handler, size=5, concurrency=concurrency)) as runtime:
        await trio.sleep(60.0)
    assert lines(runtime.ledger("q")) == {"received": 5, "delayed": 5, "owed": 5, "published": 5}


async def test_grace_ends_while_a_batch_waits_for_room(autojump_clock: Clock) -> None:
    """DESIGN 3.7: grace over leaves those elements unsettled, at once, also those whose turn comes after it."""
    queue = StageQueue(StageBroker(), numbered(5), copies=2, settling=2.0)

    async def handler(batch: list[Delivery[bytes]]) -> RetryAfter:
        await trio.lowlevel.checkpoint()
        return RetryAfter(1000.0)

    async with open_runtime(BatchSubscription(queue, handler, size=5), grace=10.0) as runtime:
        await trio.sleep(5.0)
    assert trio.current_time() == 15.0
    assert lines(runtime.ledger("q")) == {"received": 5, "delayed": 2, "unsettled": 3, "owed": 2, "published": 2}


@pytest.mark.parametrize("lost", ["connection", "lease"])
async def test_a_batch_that_loses_one_delivery_gives_back_its_mates(lost: str, autojump_clock: Clock) -> None:
    """DESIGN 4, rows 'lease lost', 'own connection breaks': the batch says nothing, so the others go back at once."""
    broker = MemoryBroker()
    broker.fill("q", numbered(9))
    batches: list[list[tuple[bytes, int]]] = []

    async def handler(batch: list[Delivery[bytes]]) -> None:
        batches.append([(delivery.body, delivery.attempt) for delivery in batch])
        await trio.sleep(1000.0 if len(batches) == 1 else 20.0)

    alone = lost == "connection"
    queue = broker.queue(
        "q", limit=3, lease=None if alone else 9.0, settles=Settles.ALONE if alone else Settles.TOGETHER
    )
    async with open_runtime(BatchSubscription(queue, handler, size=3)) as runtime:
        await trio.sleep(1.0)
        if alone:
            assert broker.sever_delivery("q", "1")
        else:
            store = broker.store("q")
            (link,) = store.links
            store.return_unsettled(link.release(next(iter(link.unsettled))), "lease expired")
            await trio.sleep(2.0)  # until the next extension
        await trio.sleep(0.1)
        # the first three again, each delivery counted, for its handler was called; no others before them
        first = [(body, 1) for body in numbered(3)]
        assert batches == [first, [(body, 2) for body, _ in first]]
        assert broker.held("q") == ["1", "2", "3"]
        await broker.until_empty("q")
    assert broker.most_unsettled("q") == 3
    assert [entry for entry in broker.log or () if isinstance(entry, Returned)] == [
        Returned("q", "1", "its connection broke" if alone else "lease expired"),
        Returned("q", "2", "given back"),
        Returned("q", "3", "given back"),
    ]
    gone = {"unsettled": 3} if alone else {"unsettled": 2, "superseded": 1}
    assert lines(runtime.ledger("q")) == {"received": 12, "acked": 9, **gone}
