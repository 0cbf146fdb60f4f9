"""The start of a runtime: everybody is tried, nobody takes before all are attached, and refusals leave flat (DESIGN
2).
"""

# ruff: noqa: PT012, ARG002 -- a scenario raises where it ends; a stage does not need every argument

import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import trio

from actors import LinkGaveUp, Runtime, Subscription, connected, open_runtime
from actors.events import Attached, Event
from links.abc import Link, Lost
from links.errors import LinkRefused
from links.memory import MemoryBroker
from settlement import Delivery, Policy, Retry
from tests.actors.scenery import Clock, StageBroker, StageQueue, acked, answers, stored


async def test_a_refusal_leaves_bare(autojump_clock: Clock) -> None:
    """DESIGN 2: one refusal leaves as a bare `LinkRefused` that names its subscription; the block is never entered."""
    broker = MemoryBroker()
    broker.refuse("q")
    with pytest.raises(LinkRefused, match=r"^orders: "):
        async with open_runtime(Subscription(broker.queue("q"), answers(), name="orders")):
            pytest.fail("entered")
    assert not broker.is_open


async def test_several_refusals_leave_as_one_group(autojump_clock: Clock) -> None:
    """DESIGN 2: start-up tries every subscription; several refusals are one flat `ExceptionGroup`, each named."""
    broker = MemoryBroker()
    for name in "ac":
        broker.refuse(name)
    with pytest.raises(ExceptionGroup) as caught:
        async with open_runtime(*(Subscription(broker.queue(name), answers()) for name in "abc")):
            pytest.fail("entered")
    assert sorted(str(error)[:2] for error in caught.value.exceptions) == ["a:", "c:"]
    assert [type(error) for error in caught.value.exceptions] == [LinkRefused, LinkRefused]


async def test_run_raises_a_refusal_bare_too(autojump_clock: Clock) -> None:
    """DESIGN 2: `await nursery.start(runtime.run)` raises what `open_runtime` raises."""
    broker = MemoryBroker()
    broker.refuse("q")
    runtime = Runtime(Subscription(broker.queue("q"), answers()))
    with pytest.raises(LinkRefused):
        await runtime.run()


async def test_a_refused_connection_is_a_refusal(autojump_clock: Clock) -> None:
    """DESIGN 4: a connection that is refused at start-up is final, and leaves bare."""
    broker = MemoryBroker("far")
    broker.refuse_connection()
    with pytest.raises(LinkRefused, match="far"):
        async with open_runtime(Subscription(broker.queue("q"), answers())):
            pytest.fail("entered")


async def test_a_refusal_waits_until_the_others_were_heard(autojump_clock: Clock) -> None:
    """DESIGN 4: a refusal is raised once every other subscription has attached, been refused, or failed once."""
    near, far = MemoryBroker("near"), MemoryBroker("far")
    near.refuse("q")
    far.break_connects(1000)
    near.break_attaches("flaky", 1000)
    with pytest.raises(LinkRefused, match="near"):
        async with open_runtime(
            Subscription(near.queue("q"), answers()),
            Subscription(near.queue("flaky"), answers()),
            Subscription(far.queue("far"), answers()),
        ):
            pytest.fail("entered")
    assert trio.current_time() < 1.0


async def test_nothing_is_taken_before_all_are_attached(autojump_clock: Clock) -> None:
    """DESIGN 2: no delivery is taken before all links are attached, although one waits for the weather."""
    broker = MemoryBroker()
    broker.fill("a", [b"x"])
    broker.break_attaches("b", 3)
    taken: list[float] = []

    async def handler(delivery: Delivery[bytes]) -> None:
        taken.append(trio.current_time())

    attached: dict[str, float] = {}

    def observer(event: Event) -> None:
        if isinstance(event, Attached):
            attached[event.name] = trio.current_time()

    async with open_runtime(
        Subscription(broker.queue("a"), handler), Subscription(broker.queue("b"), answers()), observers=[observer]
    ) as runtime:
        assert runtime.statistics()["b"].attached
        await broker.until_empty("a")
    assert attached["a"] == 0.0
    assert attached["b"] > 0.1
    assert taken == [attached["b"]]


async def test_weather_at_start_up_gives_up_in_the_end(autojump_clock: Clock) -> None:
    """DESIGN 4: an outage at start-up ends in `LinkGaveUp` from the last break, after `patience`."""
    broker = MemoryBroker()
    broker.break_attaches("q", 10**6)
    with pytest.raises(LinkGaveUp, match="outage") as caught:
        async with open_runtime(Subscription(broker.queue("q"), answers())):
            pytest.fail("entered")
    assert "broke while it was attached" in str(caught.value.__cause__)
    assert 600.0 < trio.current_time() < 700.0


async def test_a_subscription_may_be_named_as_its_broker(autojump_clock: Clock) -> None:
    """DESIGN 2: entered when every *link* is attached, also where a broker and a subscription share a name."""
    broker = MemoryBroker("orders")
    broker.break_attaches("orders", 3)
    async with open_runtime(Subscription(broker.queue("orders"), answers())) as runtime:
        assert runtime.statistics()["orders"].attached


async def test_two_brokers_may_share_a_name(autojump_clock: Clock) -> None:
    """DESIGN 2: every broker that a runtime reaches is opened before the block is entered, whatever their names."""
    one, two = MemoryBroker(), MemoryBroker()
    two.break_connects(3)
    async with open_runtime(Subscription(one.queue("q"), answers(), policy=Policy(dead_letter=two.publisher("dead")))):
        await two.publisher("x").publish(b"")
        assert trio.current_time() > 0.1
    assert stored(two, "x") == [b""]


async def test_two_refused_brokers_of_one_name_are_two_refusals(autojump_clock: Clock) -> None:
    """DESIGN 2: several refusals leave as one group, one each."""
    one, two = MemoryBroker(), MemoryBroker()
    one.refuse_connection()
    two.refuse_connection()
    with pytest.raises(ExceptionGroup) as caught:
        async with open_runtime(Subscription(one.queue("a"), answers()), Subscription(two.queue("b"), answers())):
            pytest.fail("entered")
    assert len(caught.value.exceptions) == 2


async def test_a_bug_at_start_up_propagates(autojump_clock: Clock) -> None:
    """DESIGN 4: anything that is no weather is a bug and propagates, also from an attach."""

    class Broken(StageQueue):
        def attach(self, *_: object, **__: object) -> object:  # type: ignore[override]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        async with open_runtime(Subscription(Broken(StageBroker()), answers())):
            pytest.fail("entered")


async def test_refusal_under_an_outside_cancel(autojump_clock: Clock) -> None:
    """DESIGN 4: a cancelled start-up ends at once, although a link never attaches."""
    broker = MemoryBroker()
    broker.break_attaches("q", 10**6)
    with trio.move_on_after(7.0) as scope:
        async with open_runtime(Subscription(broker.queue("q"), answers())):
            pytest.fail("entered")
    assert scope.cancelled_caught
    assert trio.current_time() == 7.0


async def test_connected_raises_a_refusal_bare(autojump_clock: Clock) -> None:
    """DESIGN 2: `connected(broker)` raises a bare `LinkRefused` where the broker says no at first."""
    broker = MemoryBroker()
    broker.refuse_connection()
    with pytest.raises(LinkRefused):
        async with connected(broker):
            pytest.fail("entered")
    assert not broker.is_open


async def test_connected_gives_up_bare(autojump_clock: Clock) -> None:
    """DESIGN 4: `connected(broker)` raises a bare `LinkGaveUp` after too much weather, and cancels the block."""
    broker = MemoryBroker()
    with pytest.raises(LinkGaveUp, match="outage"):
        async with connected(broker):
            broker.break_connects(10**6)
            broker.sever_connection()
            await trio.sleep(math.inf)


async def test_connected_leaves_an_exception_of_the_block_bare(autojump_clock: Clock) -> None:
    """DESIGN 2: an exception of the block alone leaves as it is."""
    broker = MemoryBroker()
    with pytest.raises(KeyError):
        async with connected(broker):
            raise KeyError
    assert not broker.is_open


async def test_connected_lives_through_weather(autojump_clock: Clock) -> None:
    """DESIGN 2: in weather `publish` waits for the next life."""
    broker = MemoryBroker()
    async with connected(broker):
        for number in range(4):
            broker.sever_connection()
            await broker.publisher("q").publish(b"%d" % number)
            await trio.sleep(30.0)
    assert stored(broker, "q") == [b"0", b"1", b"2", b"3"]


async def test_a_refusal_after_start_up_is_weather(autojump_clock: Clock) -> None:
    """DESIGN 4: after start-up a refusal is weather: degraded, then recovered, and the line goes on."""
    broker = MemoryBroker()
    async with open_runtime(Subscription(broker.queue("q"), answers(), policy=Policy(on_error=Retry()))) as runtime:
        broker.refuse("q")
        broker.sever("q")
        await trio.sleep(60.0)
        (why,) = runtime.statistics()["q"].degraded
        assert "refuses 'q'" in why
        assert not runtime.statistics()["q"].attached
        broker.admit("q")
        await trio.sleep(60.0)
        assert runtime.statistics()["q"].degraded == ()
        broker.fill("q", [b"x"])
        await broker.until_empty("q")
    assert acked(runtime) == 1


async def test_a_slow_refusal_is_waited_for(autojump_clock: Clock) -> None:
    """DESIGN 4: a refusal is raised once every other subscription was heard, so that a slow refusal is not hidden."""

    class Slow(StageQueue):
        @asynccontextmanager
        async def attach(
            self,
            subscription: str,
            lost: Lost,
            goodbye: float,
            policy: Policy = Policy(),
            *,
            limit: int = 1,
            size: int = 1,
        ) -> AsyncGenerator[Link[bytes], None]:
            await trio.sleep(3.0)
            raise LinkRefused(f"{subscription}: no")
            yield

    broker = MemoryBroker()
    broker.refuse("q")
    with pytest.raises(ExceptionGroup) as caught:
        async with open_runtime(
            Subscription(broker.queue("q"), answers()), Subscription(Slow(StageBroker(), name="slow"), answers())
        ):
            pytest.fail("entered")
    assert sorted(str(error).split(":")[0] for error in caught.value.exceptions) == ["q", "slow"]


@pytest.mark.parametrize("refused", [1, 2])
async def test_a_refusal_beside_a_shared_broker_between_two_lives(refused: int, autojump_clock: Clock) -> None:
    """DESIGN 4: a refusal is raised once every other was heard; one without a connection cannot attach, and was."""
    shared, other = MemoryBroker("shared"), MemoryBroker("other")
    names = [f"no{number}" for number in range(refused)]
    for name in names:
        other.refuse(name)
    async with connected(shared):
        shared.break_connects(1000)
        shared.sever_connection()
        await trio.sleep(1.0)
        with pytest.raises(LinkRefused if refused == 1 else ExceptionGroup) as caught:
            async with open_runtime(
                Subscription(shared.queue("q"), answers()),
                *(Subscription(other.queue(name), answers()) for name in names),
            ):
                pytest.fail("entered")
        assert trio.current_time() == 1.0
        assert not other.is_open
    error = caught.value
    errors = error.exceptions if isinstance(error, ExceptionGroup) else [error]
    assert sorted(str(each).split(":")[0] for each in errors) == names


async def test_a_shared_broker_between_two_lives_is_waited_for(autojump_clock: Clock) -> None:
    """DESIGN 4: where nothing is refused, start-up goes on until the connection's next life."""
    shared, other = MemoryBroker("shared"), MemoryBroker("other")
    async with connected(shared):
        shared.break_connects(6)
        shared.sever_connection()
        await trio.sleep(0.1)
        async with open_runtime(
            Subscription(shared.queue("a"), answers()), Subscription(other.queue("b"), answers())
        ) as runtime:
            assert trio.current_time() > 1.0
            assert [statistics.attached for statistics in runtime.statistics().values()] == [True, True]
