"""links.memory in fair weather: what a queue hands out, in which order and when, and what a settlement does to it."""

import math
from collections.abc import Sequence

import pytest
import trio
import trio.testing

from links.abc import Link, Received, Settlement
from links.errors import LeaseLost, NotConnected, PublishNotAccepted
from links.memory import Delivered, Entry, MemoryBroker, MemoryQueue, Published, Returned, Said, replay
from settlement import Ack, Copies, DeadLetter, Drop, Letter, Native, Plan, Policy, Publish, Retry, RetryAfter, Wait
from settlement.attempts import RETRY_HEADER
from settlement.ledger import Line
from settlement.memory import Accept, PutBack, Reject, Verb
from tests.links.memory_kit import attached, bodies, numbered, order, orders

pytestmark = pytest.mark.memory


# --- what is handed out


async def test_a_delivery_is_the_message_as_it_was_published() -> None:
    """Body, headers and key arrive byte for byte, also values that are empty or no UTF-8."""
    broker = MemoryBroker()
    headers = {"empty": b"", "raw": b"\xff\x00\xfe", "ünï": "ö".encode()}
    async with broker.connect(), attached(broker.queue("orders")) as link:
        await broker.publisher("orders").publish(b"\x00body", headers, key="k")
        (received,) = await link.receive(5)
    delivery = received.delivery
    assert (delivery.body, delivery.message, delivery.key) == (b"\x00body", b"\x00body", "k")
    assert dict(delivery.headers) == headers
    assert (delivery.attempt, delivery.redelivery_count, delivery.source, delivery.id) == (1, 0, "orders", "1")
    assert received.expires is None


async def test_headers_cannot_be_changed_after_publishing() -> None:
    """What was published is a copy: neither its publisher nor a handler changes it any more."""
    broker = MemoryBroker()
    headers = {"a": b"1"}
    broker.fill("q", [Letter(b"", headers)])
    headers["a"] = b"2"
    async with broker.connect(), attached(broker.queue("q")) as link:
        (received,) = await link.receive(1)
    assert received.delivery.headers == {"a": b"1"}
    with pytest.raises(TypeError):
        received.delivery.headers["a"] = b"3"  # type: ignore[index]


async def test_the_attempt_counts_header_and_deliveries() -> None:
    """The attempt is retry header + earlier deliveries + 1; redelivery_count is the queue's count alone."""
    broker = MemoryBroker()
    broker.fill("q", [Letter(b"", {RETRY_HEADER: b"2"})])
    async with broker.connect(), attached(broker.queue("q")) as link:
        seen = list[tuple[int, int | None]]()
        for _ in range(3):
            (received,) = await link.receive(1)
            seen.append((received.delivery.attempt, received.delivery.redelivery_count))
            await link.settle([order(received, PutBack())])
    assert seen == [(3, 0), (4, 1), (5, 2)]


async def test_the_retry_header_is_configurable() -> None:
    broker = MemoryBroker(retry_header="tries")
    broker.fill("q", [Letter(b"", {"tries": b"4", RETRY_HEADER: b"9"}), Letter(b"", {"tries": b"many"})])
    async with broker.connect(), attached(broker.queue("q")) as link:
        assert [received.delivery.attempt for received in await link.receive(2)] == [5, 1]


async def test_receive_gives_what_is_there_up_to_room() -> None:
    """A receive hands over between 1 and `room` messages, in order, and the rest stays."""
    broker = MemoryBroker()
    broker.fill("q", numbered(5))
    async with broker.connect(), attached(broker.queue("q")) as link:
        assert bodies(await link.receive(3)) == numbered(5)[:3]
        assert (bodies(broker.ready("q")), broker.unsettled("q")) == (numbered(5)[3:], 3)
        assert bodies(await link.receive(99)) == numbered(5)[3:]
        assert (broker.ready("q"), broker.held("q")) == ([], ["1", "2", "3", "4", "5"])
        with pytest.raises(ValueError, match="room"):
            await link.receive(0)
    assert broker.most_unsettled("q") == 5


async def test_receive_waits_for_a_message() -> None:
    broker = MemoryBroker()
    got: list[bytes] = []

    async def take(link: Link[bytes]) -> None:
        got.extend(bodies(await link.receive(5)))

    async with broker.connect(), attached(broker.queue("q")) as link, trio.open_nursery() as nursery:
        nursery.start_soon(take, link)
        await trio.testing.wait_all_tasks_blocked()
        assert got == []
        await broker.publisher("q").publish(b"late")
    assert got == [b"late"]


async def test_a_cancelled_receive_has_taken_nothing() -> None:
    """Whenever a receive is cancelled, each message is either in its return value or still ready."""
    broker = MemoryBroker()

    async def take(link: Link[bytes], scope: trio.CancelScope, taken: list[Received[bytes]]) -> None:
        with scope:
            taken.extend(await link.receive(1))

    async def race(*, waiting: bool) -> int:
        scope = trio.CancelScope()
        taken: list[Received[bytes]] = []
        async with attached(broker.queue("q")) as link:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(take, link, scope, taken)
                if waiting:
                    await trio.testing.wait_all_tasks_blocked()
                broker.fill("q", [b"x"])  # in the same tick as the cancel
                scope.cancel()
            assert (len(taken), 1 - len(taken)) == (broker.unsettled("q"), len(broker.ready("q")))
            await link.settle(orders(taken or await link.receive(1)))
        return len(taken)

    async with broker.connect():
        assert [await race(waiting=waiting) for waiting in (False, True)] == [0, 1]


async def test_a_stopped_link_takes_nothing_more() -> None:
    """After `stop` a receive that waits takes nothing, also where messages come."""
    broker = MemoryBroker()
    async with broker.connect(), attached(broker.queue("q")) as link:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.receive, 1)
            await trio.testing.wait_all_tasks_blocked()
            link.stop()
            broker.fill("q", [b"x"])
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert bodies(broker.ready("q")) == [b"x"]


async def test_two_links_share_a_queue() -> None:
    """Links that compete get disjoint messages, and all of them together."""
    broker = MemoryBroker(log=True)
    got: dict[str, list[bytes]] = {"a": [], "b": []}

    async def consume(name: str) -> None:
        async with attached(broker.queue("q", limit=3)) as link:
            while True:
                received = await link.receive(3)
                got[name] += bodies(received)
                await trio.lowlevel.checkpoint()
                await link.settle(orders(received))

    broker.fill("q", numbered(100))
    async with broker.connect(), trio.open_nursery() as nursery:
        nursery.start_soon(consume, "a")
        nursery.start_soon(consume, "b")
        await broker.until_empty("q")
        nursery.cancel_scope.cancel()
    assert got["a"] and got["b"]  # noqa: PT018
    assert sorted(got["a"] + got["b"]) == sorted(numbered(100))
    assert len(replay(broker.log or []).accepted) == 100
    assert broker.most_unsettled("q") == 3


# --- coming back


async def test_a_returned_message_stands_where_it_stood() -> None:
    """Returned messages come before those that were never out, in the order in which they were published."""
    broker = MemoryBroker()
    broker.fill("q", numbered(6))
    async with broker.connect(), attached(broker.queue("q")) as link:
        received = await link.receive(4)
        await link.settle([order(received[each], PutBack()) for each in (3, 0, 2)])
        assert bodies(broker.ready("q")) == [b"0", b"2", b"3", b"4", b"5"]
        assert bodies(await link.receive(4)) == [b"0", b"2", b"3", b"4"]


async def test_the_goodbye_gives_back_what_is_unsettled() -> None:
    """After the link is gone nothing is in hand; the next delivery counts the one before, if its handler was called."""
    broker = MemoryBroker(log=True)
    broker.fill("q", numbered(3))
    async with broker.connect():
        async with attached(broker.queue("q")) as link:
            received = await link.receive(3)
            await link.settle([order(received[1])])
            received[2].started = True
        assert (bodies(broker.ready("q")), broker.unsettled("q"), broker.store("q").links) == ([b"0", b"2"], 0, [])
        async with attached(broker.queue("q")) as link:
            again = await link.receive(3)
            assert [(each.delivery.attempt, each.delivery.redelivery_count) for each in again] == [(1, 0), (2, 1)]
            verdicts = await link.settle(orders(received))
            assert [type(verdict) for verdict in verdicts] == [LeaseLost] * 3
            assert broker.unsettled("q") == 2
    assert replay(broker.log or []).accepted == ("2",)


async def test_giving_back_counts_no_delivery() -> None:
    """A delivery whose handler never started is given back as it was, also where the giver is cancelled."""
    broker = MemoryBroker(log=True)
    broker.fill("q", numbered(3))
    async with broker.connect(), attached(broker.queue("q")) as link:
        received = await link.receive(3)
        with trio.CancelScope() as scope:
            scope.cancel()
            await link.give_back(received[1:])
        assert scope.cancelled_caught
        await link.give_back(received[1:])  # theirs no more: nothing happens
        assert bodies(broker.ready("q")) == [b"1", b"2"]
        assert [each.delivery.redelivery_count for each in await link.receive(3)] == [0, 0]
    assert Returned("q", "2", "given back", counted=False) in (broker.log or [])


async def test_rejected_and_accepted_messages_are_gone() -> None:
    broker = MemoryBroker(log=True)
    broker.fill("q", numbered(2))
    async with broker.connect(), attached(broker.queue("q")) as link:
        one, two = await link.receive(2)
        assert await link.settle([order(one), order(two, Reject())]) == [None, None]
    assert broker.ready("q") == []
    assert (replay(broker.log or []).accepted, replay(broker.log or []).rejected) == (("1",), ("2",))
    assert broker.log == [
        Published("q", "1"),
        Published("q", "2"),
        Delivered("q", "1", 1),
        Delivered("q", "2", 1),
        Said("q", "1", Accept()),
        Said("q", "2", Reject()),
    ]


async def test_a_verb_of_another_transport_is_a_bug() -> None:
    broker = MemoryBroker()
    broker.fill("q", [b"x"])
    async with broker.connect(), attached(broker.queue("q")) as link:
        (received,) = await link.receive(1)
        with pytest.raises(TypeError, match="is no verb"):
            await link.settle([Settlement(received, Plan(Line.ACKED, "finish"))])


# --- publishing


async def test_publishing_makes_the_queue() -> None:
    """A message that nobody waits for yet is there for whom attaches later."""
    broker = MemoryBroker()
    async with broker.connect():
        await broker.publisher("new").publish(b"1")
        await broker.publisher("new").send(Letter(b"2", key="k"))
    assert [(letter.body, letter.key) for letter in broker.ready("new")] == [(b"1", None), (b"2", "k")]


async def test_publishing_needs_an_open_broker() -> None:
    """Before opening and after closing a publish is `NotConnected`, and nothing is stored."""
    broker = MemoryBroker("here")
    with pytest.raises(NotConnected, match="here is not opened yet"):
        await broker.publisher("q").publish(b"")
    async with broker.connect():
        pass
    with pytest.raises(NotConnected, match="here is closed"):
        await broker.publisher("q").publish(b"")
    assert broker.ready("q") == []


@pytest.mark.parametrize(
    "letter",
    [
        Letter(b"", {"text": "no"}),  # type: ignore[dict-item]
        Letter(b"", {"ok": b"", "none": None}),  # type: ignore[dict-item]
        Letter(b"", {1: b""}),  # type: ignore[dict-item]
        Letter(b"", [("a", b"")]),  # type: ignore[arg-type]
        Letter(b"", None),  # type: ignore[arg-type]
        Letter("text"),  # type: ignore[arg-type]
        Letter(b"", key=b"bytes"),  # type: ignore[arg-type]
    ],
)
async def test_what_is_no_message_is_not_stored(letter: Letter) -> None:
    """A body is bytes, headers are a mapping of str to bytes, a key is a str or None: else `PublishNotAccepted`."""
    broker = MemoryBroker(log=True)
    async with broker.connect():
        with pytest.raises(PublishNotAccepted):
            await broker.publisher("q").send(letter)
    assert (broker.ready("q"), broker.log, broker.published) == ([], [], 0)


# --- a source is plain data


def test_sources_refuse_impossible_options() -> None:
    """A wrong option is a `ValueError` that names it and what is legal."""
    broker = MemoryBroker()
    with pytest.raises(ValueError, match="name must be 1 character or more"):
        broker.queue("")
    with pytest.raises(ValueError, match="name must be 1 character or more"):
        broker.publisher("")
    for limit in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="limit must be a whole number, 1 or more"):
            broker.queue("q", limit=limit)  # type: ignore[arg-type]
    for lease in (0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="lease must be a finite number of seconds above 0"):
            broker.queue("q", lease=lease)
    with pytest.raises(ValueError, match="delays must be"):
        broker.queue("q", delays=3.0)  # type: ignore[arg-type]


def test_the_limit_is_as_given_or_twice_what_the_handlers_take() -> None:
    broker = MemoryBroker()
    assert [broker.queue("q").limit(*args) for args in ((1,), (16,), (4, 10))] == [2, 32, 80]
    assert [broker.queue("q", limit=10).limit(*args) for args in ((1,), (16,), (4, 10))] == [10, 10, 10]


def plans(queue: MemoryQueue, policy: Policy, received: Received[bytes]) -> Sequence[Plan[Verb]]:
    outcomes = (Ack(), Drop(), Retry(), RetryAfter(5.0))
    return [queue.decide(outcome, received.delivery, policy) for outcome in outcomes]


async def test_a_source_decides_with_its_own_facts() -> None:
    """The table of `settlement.memory` hears of the source's delays, queue and retry header."""
    broker = MemoryBroker(retry_header="tries")
    broker.fill("q", [b"x"])
    native, copying = broker.queue("q"), broker.queue("q", delays=Copies(max_waiting=7))
    async with broker.connect(), attached(native) as link:
        (received,) = await link.receive(1)
    assert [plan.verb for plan in plans(native, Policy(), received)] == [Accept(), Reject(), PutBack(), PutBack(5.0)]
    copied = copying.decide(RetryAfter(5.0), received.delivery, Policy())
    assert copied.verb == Reject()
    match copied.after:
        case (Wait(5.0), Publish(letter, "q")):
            assert letter.headers == {"tries": b"1"}
        case other:
            pytest.fail(str(other))
    dead = native.decide(DeadLetter(), received.delivery, Policy(dead_letter="dead"))
    assert (dead.verb, dead.instead) == (Accept(), PutBack())
    assert (native.copies, copying.copies) == (0, 7)
    assert list(native.brokers()) == [broker]


def test_constructing_needs_no_loop() -> None:
    """Broker, source, publisher, filling and looking work outside `trio.run`, also between two runs."""
    broker = MemoryBroker()
    queue = broker.queue("q", delays=Native(), lease=30.0)
    broker.fill("q", [b"x"])

    async def attempts() -> list[int]:
        async with broker.connect(), attached(queue) as link:
            broker.fill("later", [Letter(b"y", deliver_after=60.0)])
            return [received.delivery.attempt for received in await link.receive(1)]

    assert [trio.run(attempts), trio.run(attempts)] == [[1], [1]]
    assert (bodies(broker.ready("q")), broker.delayed("q"), broker.unsettled("q")) == ([b"x"], [], 0)
    assert (broker.ready("later"), bodies(broker.delayed("later"))) == ([], [b"y", b"y"])


def test_a_log_that_cannot_be_is_found_out() -> None:
    """A message delivered twice, said twice or out of nowhere does not replay."""
    start: list[Entry] = [Published("q", "1"), Delivered("q", "1", 1)]
    assert replay(start).unsettled == ("1",)
    assert replay([*start, Said("q", "1", PutBack())]).stored == ("1",)
    done: list[Entry] = [*start, Said("q", "1", Accept())]
    late: list[Entry] = [Delivered("q", "1", 2), Said("q", "1", Accept()), Returned("q", "1", ""), Published("q", "1")]
    for more in late:
        with pytest.raises(ValueError, match="of a message that is not"):
            replay([*done, more])
