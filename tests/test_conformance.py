"""The conformance suite of `links.testing`, run on the transports that need no server; and proof that it can fail."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from links.abc import Broker, Link, Lost, Presence, Publisher, Received, Settlement, Settles, Verdict
from links.errors import LinkBroken, NotConnected, PublishNotAccepted
from links.memory import MemoryBroker, MemoryLink, MemoryPublisher, MemoryQueue
from links.sql import AdvisoryLock, Lease, SqlBroker, SqlQueue, Table
from links.testing import CHECKS, Capabilities, Caps, Check, ConformanceError, Harness, Routing, run_all
from settlement import Copies, Letter, Native, Plan, Policy
from settlement.ledger import Line
from settlement.memory import Accept, PutBack, Reject, Verb


@attrs.define
class MemoryHarness(Harness):
    """Queues of one `MemoryBroker`: closed and opened again, it is a new connection to the same messages."""

    capabilities: Capabilities
    memory: MemoryBroker = attrs.field(factory=MemoryBroker)

    def broker(self) -> Broker:
        return self.memory

    def source(self, broker: Broker, name: str, *, lease: float | None = None) -> MemoryQueue:
        assert broker is self.memory
        can = self.capabilities
        return self.memory.queue(
            name,
            delays=Native() if can.native_delay else Copies(),
            lease=can.lease and (lease or 30.0),
            settles=can.settles,
        )


SHAPES = {
    "together": Capabilities(virtual_time=True),
    "alone": Capabilities(virtual_time=True, settles=Settles.ALONE),
    "lease": Capabilities(virtual_time=True, lease=5.0),
    "copies": Capabilities(virtual_time=True, native_delay=False),
    "lease, alone, copies": Capabilities(virtual_time=True, native_delay=False, lease=5.0, settles=Settles.ALONE),
}


@pytest.mark.memory
@pytest.mark.parametrize("check", CHECKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
async def test_memory_conforms(shape: str, check: Check, autojump_clock: trio.testing.MockClock) -> None:
    await check(MemoryHarness(SHAPES[shape]))


@attrs.define
class SqliteHarness(Harness):
    """Queues in one SQLite file: a table each, or a group each of one table."""

    file: Path
    times: str = "REAL"
    """The declared type of the columns that hold a time."""
    grouped: bool = False
    bare: bool = False
    """Without the columns that may be left out: nothing counts, no delay is kept."""
    keyed: bool = False
    """No lease: advisory locks."""
    capabilities: Capabilities = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        can = Capabilities(lease=1.0, caps=Caps.BOTH, twice=False)
        if self.keyed:
            can = attrs.evolve(can, lease=None, settles=Settles.ALONE)
        if self.bare:
            can = attrs.evolve(can, caps=Caps.NONE, counts=False, counts_redeliveries=False, delays=False)
        self.capabilities = can
        with closing(sqlite3.connect(self.file)) as database:
            database.execute("PRAGMA journal_mode=WAL")

    def table(self, name: str) -> Table[bytes]:
        columns: dict[str, Any] = (
            {} if self.bare else {"attempt": "attempt", "retry_after": "due", "processed_at": "done"}
        )
        return Table(
            "queues" if self.grouped else name,
            id="id",
            payload="body",
            headers="headers",
            partition_key="lane",
            locked_until=None if self.keyed else "lease",
            group="name" if self.grouped else None,
            **columns,
        )

    async def prepare(self, name: str) -> None:
        zero = "'1970-01-01T00:00:00.000000Z'" if self.times == "TEXT" else "0"
        counted = f", attempt INTEGER NOT NULL DEFAULT 1, due {self.times} NOT NULL DEFAULT {zero}, done {self.times}"
        with closing(sqlite3.connect(self.file)) as database:
            database.execute(
                f"CREATE TABLE IF NOT EXISTS {self.table(name).name} (id INTEGER PRIMARY KEY AUTOINCREMENT, "
                "name TEXT, body BLOB, "
                f"headers TEXT, lane TEXT, lease {self.times}{'' if self.bare else counted})"
            )

    def broker(self) -> SqlBroker:
        return SqlBroker(f"sqlite:///{self.file}", poll_interval=0.05)

    def source(self, broker: Broker, name: str, *, lease: float | None = None) -> SqlQueue[bytes]:
        assert isinstance(broker, SqlBroker)
        claim = AdvisoryLock("key {id}") if self.keyed else Lease(lease or 30.0)
        return broker.queue(self.table(name), group=name if self.grouped else None, claim=claim)

    def publisher(self, broker: Broker, name: str) -> Publisher:
        assert isinstance(broker, SqlBroker)
        return broker.publisher(self.table(name), group=name if self.grouped else None)


SQLITE_SHAPES = {
    "tables": partial(SqliteHarness, times="REAL"),
    "groups": partial(SqliteHarness, times="INTEGER", grouped=True),
    "bare": partial(SqliteHarness, times="TEXT", bare=True),
    "advisory locks": partial(SqliteHarness, keyed=True),
    "advisory locks, groups": partial(SqliteHarness, times="INTEGER", keyed=True, grouped=True),
    "advisory locks, bare": partial(SqliteHarness, times="TEXT", keyed=True, bare=True),
}
SLOW = ("groups", "bare", "advisory locks, groups", "advisory locks, bare")


@pytest.mark.sqlite
@pytest.mark.parametrize("check", CHECKS, ids=str)
@pytest.mark.parametrize(
    "shape", ["tables", "advisory locks", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
async def test_sqlite_conforms(shape: str, check: Check, tmp_path: Path) -> None:
    await check(SQLITE_SHAPES[shape](tmp_path / "queues.db"))


@pytest.mark.sqlite
async def test_sqlite_keeps_due_times_as_text(tmp_path: Path) -> None:
    """What depends on due times holds in the third column type, too; the shapes above have the other two."""
    checks = [check for check in CHECKS if {"K-31", "K-32", "K-34"} & {*check.rules}]
    await run_all(SqliteHarness(tmp_path / "queues.db", "TEXT"), checks)


# --- the suite can fail


class Faulty(Link[bytes]):
    """A link in front of a good one; each subclass does one thing wrong."""

    def __init__(self, inner: MemoryLink) -> None:
        self.inner = inner

    async def receive(self, room: int) -> Sequence[Received[bytes]]:
        return await self.inner.receive(room)

    def stop(self) -> None:
        self.inner.stop()

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Verdict]:
        return await self.inner.settle(settlements)

    async def extend(self, held: Sequence[Received[bytes]]) -> Sequence[Received[bytes]]:
        return await self.inner.extend(held)

    async def give_back(self, unsettled: Sequence[Received[bytes]]) -> None:
        await self.inner.give_back(unsettled)

    def forget(self, received: Received[bytes]) -> None:
        self.inner.forget(received)

    def settled_as(self, order: Settlement, verb: Verb) -> Settlement:
        return Settlement(order.received, attrs.evolve(order.plan, verb=verb))


class SwallowsEveryThirdAck(Faulty):
    acks = 0

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Verdict]:
        for order in settlements:
            if isinstance(order.plan.verb, Accept):
                self.acks += 1
            if self.acks % 3 or not isinstance(order.plan.verb, Accept):
                await self.inner.settle([order])
        return [None] * len(settlements)


class RequeuesTwice(Faulty):
    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Verdict]:
        verdicts = await self.inner.settle(settlements)
        again = [Letter.of(order.received.delivery) for order in settlements if isinstance(order.plan.verb, PutBack)]
        for letter in again:
            self.inner.store.add(letter)
        self.inner.store.wake()
        return verdicts


class ForgetsDelays(Faulty):
    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Verdict]:
        delayed = (order.plan.verb == PutBack() or not isinstance(order.plan.verb, PutBack) for order in settlements)
        now = [
            order if kept else self.settled_as(order, PutBack())
            for order, kept in zip(settlements, delayed, strict=True)
        ]
        return await self.inner.settle(now)


class DropsByRequeueing(Faulty):
    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Verdict]:
        rejected = [isinstance(order.plan.verb, Reject) for order in settlements]
        said = [
            self.settled_as(order, PutBack()) if no else order for order, no in zip(settlements, rejected, strict=True)
        ]
        return await self.inner.settle(said)


class LosesWhatIsUnsettled(Faulty):
    """Its goodbye throws away what is in hand: it accepts on receipt."""

    async def receive(self, room: int) -> Sequence[Received[bytes]]:
        received = await self.inner.receive(room)
        for each in received:
            self.inner.release(each)
        return received

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Verdict]:
        await trio.lowlevel.checkpoint()
        return [None] * len(settlements)


class SettlesForOthers(Faulty):
    """Says yes to everything, also after the detach, and to whom the lease was lost."""

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Verdict]:
        with suppress(LinkBroken):
            await self.inner.settle(settlements)
        return [None] * len(settlements)


class SettlesTheOldest(Faulty):
    """Ignores which delivery an order is about."""

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Verdict]:
        oldest = list(self.inner.unsettled)[: len(settlements)]
        pairs = zip(oldest, settlements, strict=False)
        await self.inner.settle([Settlement(received, order.plan) for received, order in pairs])
        return [None] * len(settlements)


class TakesAndIsCancelled(Faulty):
    """Its receive has a checkpoint between taking and returning."""

    async def receive(self, room: int) -> Sequence[Received[bytes]]:
        received = await self.inner.receive(room)
        await trio.sleep(0.001)
        return received


class TakesMoreThanAsked(Faulty):
    async def receive(self, room: int) -> Sequence[Received[bytes]]:
        return await self.inner.receive(room + 1)


class TakesTheNewestFirst(Faulty):
    async def receive(self, room: int) -> Sequence[Received[bytes]]:
        await trio.sleep(0.001)
        return list(reversed(await self.inner.receive(room)))


class CountsWhatIsGivenBack(Faulty):
    async def give_back(self, unsettled: Sequence[Received[bytes]]) -> None:
        await self.inner.settle([Settlement(each, Plan(Line.RETRIED, PutBack())) for each in unsettled])


class FinishesWhatItForgets(Faulty):
    def forget(self, received: Received[bytes]) -> None:
        self.inner.release(received)


class NeverCounts(Faulty):
    async def receive(self, room: int) -> Sequence[Received[bytes]]:
        received = await self.inner.receive(room)
        for each in received:
            each.delivery = attrs.evolve(each.delivery, attempt=1)
        return received


class ExtendsInWordsOnly(Faulty):
    async def extend(self, held: Sequence[Received[bytes]]) -> Sequence[Received[bytes]]:
        await trio.lowlevel.checkpoint()
        for each in held:
            expires = each.expires or 0.0
            self.inner.store.leases = [entry for entry in self.inner.store.leases if entry[2] is not each]
            self.inner.store.leases.append((expires, -1, each, self.inner))
        return [each for each in held if (each.expires or 0.0) <= trio.current_time()]


class LosesHeaders(MemoryPublisher):
    async def send(self, letter: Letter) -> None:
        await super().send(attrs.evolve(letter, headers={}))


class DecodesHeaders(MemoryPublisher):
    async def send(self, letter: Letter) -> None:
        lossy = {name: value.decode(errors="replace").encode() for name, value in letter.headers.items()}
        await super().send(attrs.evolve(letter, headers=lossy))


class NeverSaysClosed(MemoryPublisher):
    async def send(self, letter: Letter) -> None:
        with suppress(NotConnected):
            await super().send(letter)


class ConfirmsTooEarly(MemoryPublisher):
    """The message is only stored if somebody is attached to send it to."""

    async def send(self, letter: Letter) -> None:
        await trio.lowlevel.checkpoint()
        assert isinstance(self.broker, MemoryBroker)
        if self.broker.presence is not Presence.UP or self.broker.store(self.name).links:
            await super().send(letter)


class FaultyQueue(MemoryQueue):
    link: type[Faulty]

    @asynccontextmanager
    async def attach(
        self, subscription: str, lost: Lost, goodbye: float, policy: Policy = Policy(), *, limit: int = 1, **_: int
    ) -> AsyncGenerator[Link[bytes], None]:
        async with super().attach(subscription, lost, goodbye, policy, limit=limit) as link:
            assert isinstance(link, MemoryLink)
            yield self.link(link)


@attrs.define
class FaultyHarness(MemoryHarness):
    fault: type[Faulty | MemoryPublisher] = Faulty

    def source(self, broker: Broker, name: str, *, lease: float | None = None) -> MemoryQueue:
        queue = super().source(broker, name, lease=lease)
        if issubclass(self.fault, Faulty):
            queue.__class__ = FaultyQueue
            queue.link = self.fault  # type: ignore[attr-defined]
        return queue

    def publisher(self, broker: Broker, name: str) -> MemoryPublisher:
        assert broker is self.memory
        fault = MemoryPublisher if issubclass(self.fault, Faulty) else self.fault
        return fault(self.memory, name)


FAULTS: Sequence[tuple[type[Faulty | MemoryPublisher], str]] = [
    (SwallowsEveryThirdAck, "K-9"),
    (SwallowsEveryThirdAck, "K-12"),
    (RequeuesTwice, "K-4"),
    (RequeuesTwice, "K-23"),
    (ForgetsDelays, "K-14"),
    (ForgetsDelays, "K-34"),
    (DropsByRequeueing, "K-5"),
    (DropsByRequeueing, "K-22"),
    (LosesWhatIsUnsettled, "K-25"),
    (SettlesForOthers, "K-18"),
    (SettlesForOthers, "L-4"),
    (FinishesWhatItForgets, "L-7"),
    (SettlesTheOldest, "K-24"),
    (TakesAndIsCancelled, "L-1"),
    (TakesMoreThanAsked, "L-6"),
    (TakesTheNewestFirst, "K-50"),
    (CountsWhatIsGivenBack, "L-2"),
    (NeverCounts, "K-31"),
    (NeverCounts, "K-32"),
    (ExtendsInWordsOnly, "L-3"),
    (LosesHeaders, "K-6"),
    (LosesHeaders, "K-7"),
    (DecodesHeaders, "K-11"),
    (NeverSaysClosed, "K-17"),
    (ConfirmsTooEarly, "K-19"),
]


@pytest.mark.memory
@pytest.mark.parametrize(("fault", "rule"), FAULTS, ids=lambda each: each if isinstance(each, str) else each.__name__)
async def test_a_broken_transport_is_caught(
    fault: type[Faulty | MemoryPublisher], rule: str, autojump_clock: trio.testing.MockClock
) -> None:
    """A transport with one fault fails the check that is about it, by a text that says rule, expected and seen."""
    can = SHAPES["lease" if rule in {"L-3", "L-4"} else "together"]
    checks = [check for check in CHECKS if rule in check.rules]
    with pytest.raises(ExceptionGroup) as caught:
        await run_all(FaultyHarness(can, fault=fault), checks)
    texts = [str(error) for error in caught.value.exceptions if isinstance(error, ConformanceError)]
    assert texts
    assert all(rule in text and "expected" in text and "seen: " in text for text in texts)


class TakesInAnyOrder(Faulty):
    """No fault where no order was promised; it gives nothing back before the detach."""

    async def receive(self, room: int) -> Sequence[Received[bytes]]:
        return list(reversed(await self.inner.receive(room)))

    async def give_back(self, unsettled: Sequence[Received[bytes]]) -> None:
        assert unsettled
        await trio.lowlevel.checkpoint()


class RefusesBytes(MemoryPublisher):
    """No fault where header values are texts."""

    async def send(self, letter: Letter) -> None:
        for value in letter.headers.values():
            try:
                value.decode()
            except UnicodeDecodeError as error:
                raise PublishNotAccepted(f"{value!r} is no UTF-8") from error
        await super().send(letter)


class HasNoBacklog(FaultyQueue):
    """No fault of a topic: what comes while nobody is attached is not kept."""

    link = TakesInAnyOrder

    @asynccontextmanager
    async def attach(
        self, subscription: str, lost: Lost, goodbye: float, policy: Policy = Policy(), *, limit: int = 1, **_: int
    ) -> AsyncGenerator[Link[bytes], None]:
        assert isinstance(self.broker, MemoryBroker)
        store = self.broker.store(self.name)
        if not store.links:
            store.fresh.clear()
            store.returned.clear()
            store.delayed.clear()
        async with super().attach(subscription, lost, goodbye, policy, limit=limit) as link:
            yield link


class TopicHarness(MemoryHarness):
    """Everything that the suite has an alternative for, and that the other harnesses here promise."""

    def source(self, broker: Broker, name: str, *, lease: float | None = None) -> MemoryQueue:
        queue = super().source(broker, name, lease=lease)
        queue.__class__ = HasNoBacklog
        return queue

    def publisher(self, broker: Broker, name: str) -> MemoryPublisher:
        assert broker is self.memory
        return RefusesBytes(self.memory, name)


TOPIC = Capabilities(
    virtual_time=True, backlog=False, ordered=False, gives_back=False, byte_headers=False, least_cap=5, quiet=1.0
)


@pytest.mark.memory
@pytest.mark.parametrize("check", CHECKS, ids=str)
async def test_the_alternatives_hold_for_a_transport_that_promises_less(
    check: Check, autojump_clock: trio.testing.MockClock
) -> None:
    await check(TopicHarness(TOPIC))


CLAIMS: Sequence[tuple[Capabilities, str]] = [
    (Capabilities(virtual_time=True, backlog=False), "K-2"),
    (Capabilities(virtual_time=True, routing=Routing.BOTH), "K-8"),
    (Capabilities(virtual_time=True, twice=False), "K-8"),
    (Capabilities(virtual_time=True, counts_redeliveries=False), "K-4"),
    (Capabilities(virtual_time=True, counts=False), "K-31"),
    (Capabilities(virtual_time=True, delays=False), "K-9"),
    (Capabilities(virtual_time=True, byte_headers=False), "K-11"),
    (Capabilities(virtual_time=True, caps=Caps.BOTH), "K-33"),
    (Capabilities(virtual_time=True, caps=Caps.NONE), "K-32"),
    (Capabilities(virtual_time=True, batch=False), "K-50"),
]


@pytest.mark.memory
@pytest.mark.parametrize(("can", "rule"), CLAIMS, ids=[f"{number}-{rule}" for number, (_, rule) in enumerate(CLAIMS)])
async def test_a_wrong_claim_is_caught(can: Capabilities, rule: str, autojump_clock: trio.testing.MockClock) -> None:
    """Capabilities are asserted, not skipped: a queue that can more than its harness says fails, too."""
    with pytest.raises(ExceptionGroup):
        await run_all(MemoryHarness(can), [check for check in CHECKS if rule in check.rules])


async def test_a_good_transport_passes_the_faulty_harness(autojump_clock: trio.testing.MockClock) -> None:
    """What fails above fails for its fault, not for the wrapping."""
    for shape in ("together", "lease"):
        await run_all(FaultyHarness(SHAPES[shape]))


async def test_real_time_transports_are_not_run_on_virtual_time(autojump_clock: trio.testing.MockClock) -> None:
    with pytest.raises(RuntimeError, match="virtual_time"):
        await CHECKS[0](MemoryHarness(Capabilities()))


def test_every_rule_has_a_check() -> None:
    """The rules of the suite, one by one: none was forgotten on the way."""
    core, ladder = range(1, 10), [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
    wanted = {f"K-{number}" for number in [*core, *ladder, *range(21, 27), *range(30, 35), 50]}
    assert {rule for check in CHECKS for rule in check.rules} == wanted | {f"L-{number}" for number in range(1, 10)}
    assert all(check.says for check in CHECKS)
