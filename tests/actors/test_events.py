"""actors.events and actors.books: observers hear facts, one that fails ends the runtime, the books still balance."""

# pyright: reportPossiblyUnboundVariable=false

import logging

import pytest
import trio

from actors import ObserverFailed, Subscription, open_runtime
from actors.events import Booked, Degraded, DrainBegan, Event, HandlerErred, Noticed, Recovered
from links.memory import MemoryBroker
from settlement import Ack, Copies, Delivery, Drop, Ledger, Policy, Retry, RetryAfter
from settlement.ledger import CopiesLost, Ended, Line, Took
from settlement.plans import CapReached
from tests.actors.scenery import HANGS, Clock, StageBroker, StageQueue, answers, lines, numbered


async def a_busy_service(observer: object, *, cancel: bool = False) -> tuple[MemoryBroker, Ledger]:
    broker = MemoryBroker()
    broker.fill("q", numbered(40))
    policy = Policy(max_attempts=3, dead_letter="dead")

    async def handler(delivery: Delivery[bytes]) -> Ack | Retry | RetryAfter | Drop:
        await trio.sleep(0.2)
        return (Ack(), Retry(), RetryAfter(0.5), Drop(), RetryAfter(60.0))[int(delivery.body) % 5]

    queue = broker.queue("q", delays=Copies(), lease=10.0)
    with trio.CancelScope() as scope:
        async with open_runtime(
            Subscription(queue, handler, policy=policy, concurrency=6),
            observers=[observer],  # type: ignore[list-item]
            grace=2.0,
        ) as runtime:
            await trio.sleep(0.7)
            broker.sever("q")
            await trio.sleep(1.0)
            if cancel:
                scope.cancel()
    return broker, runtime.ledger("q")


@pytest.mark.parametrize("cancel", [False, True])
async def test_an_observer_can_keep_the_same_books(cancel: bool, autojump_clock: Clock) -> None:
    """DESIGN 3.9: the ledger is a fold over events: an observer's own fold ends with the same books."""
    mine = Ledger()

    def observer(event: Event) -> None:
        if isinstance(event, Booked):
            mine.enter(event.entry)
            if isinstance(event.entry, Took | Ended):
                assert len(event.deliveries) == event.entry.count

    _, books = await a_busy_service(observer, cancel=cancel)
    assert mine == books
    assert mine.balanced


async def test_each_delivery_ends_in_exactly_one_line(autojump_clock: Clock) -> None:
    """DESIGN 0.6: every delivery ends in exactly one line of the ledger."""
    taken: list[Delivery[bytes]] = []
    ended: list[Delivery[bytes]] = []

    def observer(event: Event) -> None:
        if isinstance(event, Booked):
            match event.entry:
                case Took():
                    taken.extend(event.deliveries)
                case Ended():
                    ended.extend(event.deliveries)
                case _:
                    pass

    await a_busy_service(observer)
    assert len(taken) == len(ended) == len(set(ended))
    assert set(taken) == set(ended)


@pytest.mark.parametrize("at", [1, 2, 3, 5, 8, 13, 21, 34, 55, 89])
async def test_an_observer_that_raises_once(at: int, autojump_clock: Clock) -> None:
    """DESIGN 2: an observer that raises ends the runtime as `ObserverFailed` from its error; the books balance."""
    told = 0

    def observer(event: Event) -> None:
        nonlocal told
        told += 1
        if told == at:
            raise KeyError(at)

    with pytest.raises((ExceptionGroup, ObserverFailed)) as caught:
        await a_busy_service(observer)
    error = caught.value.exceptions[0] if isinstance(caught.value, ExceptionGroup) else caught.value
    assert isinstance(error, ObserverFailed)
    assert isinstance(error.__cause__, KeyError)
    assert error.observer is observer


@pytest.mark.parametrize("kind", [Booked, Noticed, DrainBegan])
async def test_an_observer_that_always_raises(kind: type[Event], autojump_clock: Clock) -> None:
    """DESIGN 2 and 3.9: it is called to the end, the runtime fails once, and the books balance all the same."""
    told: list[Event] = []

    def observer(event: Event) -> None:
        if isinstance(event, kind):
            told.append(event)
            raise KeyError

    with pytest.raises((ExceptionGroup, ObserverFailed)) as caught:
        await a_busy_service(observer)
    error = caught.value.exceptions[0] if isinstance(caught.value, ExceptionGroup) else caught.value
    assert isinstance(error, ObserverFailed)
    assert error.event is told[0]


async def test_other_observers_go_on(autojump_clock: Clock) -> None:
    """DESIGN 2: all observers are told, also after one of them has raised."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    heard: list[Event] = []

    def failing(event: Event) -> None:
        raise KeyError

    with pytest.raises((ExceptionGroup, ObserverFailed)):
        async with open_runtime(Subscription(broker.queue("q"), answers()), observers=[failing, heard.append]):
            await trio.sleep_forever()
    assert heard


async def test_drain_does_not_raise_what_an_observer_raises(autojump_clock: Clock) -> None:
    """DESIGN 2: no exception of an observer leaves under its own type, nor out of a plain call of `drain`."""

    def observer(event: Event) -> None:
        if isinstance(event, DrainBegan):
            raise KeyError

    with pytest.raises(ExceptionGroup) as caught:
        async with open_runtime(Subscription(MemoryBroker().queue("q"), answers()), observers=[observer]) as runtime:
            runtime.drain()
    assert [type(error) for error in caught.value.exceptions] == [ObserverFailed]


async def test_what_observers_hear_of_failures_and_notices(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """C-3.5, DESIGN 2: a failure is told with its answer; the cap's warning comes exactly once per delivery."""
    broker = MemoryBroker()
    broker.fill("q", numbered(2))
    heard: list[Event] = []
    error = KeyError()
    policy = Policy(max_attempts=2, dead_letter="dead")
    async with open_runtime(
        Subscription(broker.queue("q"), answers(then=error), policy=policy), observers=[heard.append]
    ):
        await broker.until_empty("q")
    erred = [event for event in heard if isinstance(event, HandlerErred)]
    assert [(event.error, event.answer) for event in erred] == [(error, Retry())] * 4
    noticed = [event.notice for event in heard if isinstance(event, Noticed)]
    assert noticed == [CapReached(2, "dead")] * 2
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 4
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 2


async def test_degraded_is_told_when_it_begins_and_when_it_ends(autojump_clock: Clock) -> None:
    """DESIGN 3.6: what does not work shows as *degraded*: told once when it begins, and when it works again."""
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    broker.close("dead")
    heard: list[Event] = []
    policy = Policy(max_attempts=1, dead_letter="dead")
    async with open_runtime(Subscription(broker.queue("q"), answers(Retry()), policy=policy), observers=[heard.append]):
        await trio.sleep(100.0)
        broker.reopen("dead")
        await broker.until_empty("q")
    told = [type(event) for event in heard if isinstance(event, Degraded | Recovered)]
    assert told == [Degraded, Recovered]


async def test_every_line_is_told(autojump_clock: Clock) -> None:
    """DESIGN 0.6: lines are the ones of the contract; each is told as an `Ended` entry."""
    heard: list[Line] = []

    def observer(event: Event) -> None:
        if isinstance(event, Booked) and isinstance(event.entry, Ended):
            heard.extend([event.entry.line] * event.entry.count)

    _, books = await a_busy_service(observer)
    for line in Line:
        assert heard.count(line) == lines(books).get(line.name.lower(), 0)


async def test_an_observer_that_raises_at_the_very_end(autojump_clock: Clock) -> None:
    """DESIGN 2: also what an observer raises at the last entry of the books leaves as `ObserverFailed`."""
    told: list[Event] = []

    def observer(event: Event) -> None:
        if isinstance(event, Booked) and isinstance(event.entry, CopiesLost):
            told.append(event)
            raise KeyError

    queue = StageQueue(StageBroker(publishing=HANGS), [b"x"])
    with pytest.raises(ExceptionGroup) as caught:
        async with open_runtime(
            Subscription(queue, answers(RetryAfter(9.0))), grace=1.0, goodbye=1.0, observers=[observer]
        ):
            await trio.sleep(1.0)
    assert [type(error) for error in caught.value.exceptions] == [ObserverFailed]
    assert len(told) == 1
