"""The world of memory: a broker that logs what it does, leases, and weather by plain calls."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

import attrs

from actors import connected
from links.abc import Settles
from links.errors import LinkBroken
from links.memory import Delivered, MemoryBroker, MemoryLink, MemoryQueue, Published, Returned, Said, Unsaid, replay
from links.memory.publisher import MemoryPublisher
from links.memory.store import MemoryStore
from settlement import Copies, Delivery, Letter, Native
from settlement.ledger import Line
from settlement.memory import Accept, PutBack, Reject
from tests.weather.fates import Fate, Rules
from tests.weather.story import HandOver, Story
from tests.weather.world import DEAD, ELSEWHERE, QUEUE, World

__all__ = ["MemoryOptions", "MemoryWorld"]


@attrs.frozen
class MemoryOptions:
    """What a queue in memory lets a user choose."""

    delays: Native | Copies = Native()
    lease: float | None = None
    settles: Settles = Settles.TOGETHER
    limit: int | None = None

    @property
    def longest(self) -> float:
        """A pause of a handler, in seconds: beyond its lease, if there is one."""
        return 60.0 if self.lease is None else 2.5 * self.lease


class MemoryRules(Rules):
    """Of `settlement.memory`."""

    accept, reject, back = Accept(), Reject(), PutBack()

    def again(self, counted: bool) -> Fate:  # noqa: ARG002 -- everything counts here
        return Fate(Line.RETRIED, PutBack())

    def later(self, delay: float, counted: bool) -> Fate:  # noqa: ARG002
        if self.delays == "copies":
            return Fate(Line.DELAYED, Reject(), after="copy", waits=True)
        return Fate(Line.DELAYED, PutBack(delay))


class MemoryStory(Story):
    """Hears the broker's own log."""

    main: MemoryBroker

    def __init__(self) -> None:
        super().__init__(QUEUE, DEAD)
        self.names: dict[str, bytes] = {}
        """Of the messages in the queue, by id."""
        self.hand_overs: dict[tuple[str, int], HandOver] = {}
        """The last ones with this id and attempt."""

    def find(self, delivery: Delivery[Any]) -> HandOver:
        return self.hand_overs[delivery.id, delivery.attempt]

    def hear(self, entry: Any) -> None:
        """The log goes on."""
        if entry.queue != QUEUE:
            return
        match entry:
            case Delivered(_, id, attempt):
                before = self.present.get(id)
                if before is not None:
                    expected = before.attempt + before.spent
                elif id in self.copies:
                    copied = [each.attempt for each in self.handed if each.name == self.names[id]]
                    expected = attempt if attempt - 1 in copied else 0
                else:
                    expected = 1
                it = self.on_handed(self.names[id], id, attempt, first=before is None)
                it.attempt, it.counted = attempt, True
                self.hand_overs[id, attempt] = it
                self.check(attempt == expected, f"the attempt is not {expected}: {it}")
            case Said(_, id, verb):
                it = self.on_said(id, MemoryRules().says(verb))
                self.check(verb in (it.fate and it.fate.verb, PutBack()), f"{verb} was said: {it}")
            case Returned(_, id, why, counted):
                self.on_returned(id, why, spent=counted)
            case Unsaid(_, id, "refused"):
                self.on_refused(id)
            case _:
                pass

    def judge_broker(self) -> None:
        assert self.main.unsettled(QUEUE) == 0, f"in somebody's hands at the end: {self.main.held(QUEUE)}"
        assert self.main.log is not None
        fates = replay(each for each in self.main.log if each.queue == QUEUE)
        assert (fates.unsettled, fates.stored) == ((), ())
        assert self.main.store(QUEUE).is_empty, "the second life did not finish"


class Log(list[Any]):
    """A broker's, which the story hears."""

    def __init__(self, story: MemoryStory) -> None:
        super().__init__()
        self.story = story

    def append(self, entry: Any) -> None:
        super().append(entry)
        if not isinstance(entry, Published):
            self.story.hear(entry)

    def extend(self, entries: Iterable[Any]) -> None:
        for each in entries:
            self.append(each)


class WatchedStore(MemoryStore):
    story: MemoryStory

    def add(self, letter: Letter) -> None:
        super().add(letter)
        id = str(self.broker.published)  # noqa: A001 -- as Delivery.id
        if self.name == QUEUE:
            self.story.names[id] = letter.body
        self.story.on_stored(self.name, letter.body, id)


class WatchedPublisher(MemoryPublisher):
    def _store(self, store: MemoryStore, letter: Letter) -> None:
        try:
            super()._store(store, letter)
        except LinkBroken:
            assert isinstance(store, WatchedStore)
            store.story.on_unconfirmed(self.name, letter, letter.body)
            raise


class WatchedBroker(MemoryBroker):
    """Tells the story what it stores, and has a log that does the rest."""

    def __init__(self, name: str, story: MemoryStory, dice: Random) -> None:
        super().__init__(name, dice=dice)
        self.story = story

    def store(self, name: str) -> MemoryStore:
        if name not in self._stores:
            store = self._stores[name] = WatchedStore(name, self)
            store.story = self.story
        return self._stores[name]

    def publisher(self, to: str) -> MemoryPublisher:
        return WatchedPublisher(self, to)


class MemoryWorld(World):
    """Two brokers; dead letters may go to the second one."""

    mark = "memory"
    faults = (
        *("sever", "sever", "sever_connection", "expire", "expire", "break_calls", "break_calls", "many_broken_calls"),
        *("lose_confirmations", "lose_dead_confirmations", "refuse_settlements", *["close_dead"] * 4, "close"),
        *("refuse", "break_attaches", "refuse_connection", "break_connects", "slow_settlements", "slow_settlements"),
        *("hanging_settlements", "slow_extensions", "hanging_extensions", "slow_publishes", "slow_dead_publishes"),
        *("sever_delivery", "sever_delivery", "sever_abroad", "hanging_dead_publishes", "stuck", "stuck"),
        *("refuse_settlements", "many_refused_settlements", "take_back", "take_back"),
    )
    spans = (5.0, 30.0, 120.0)
    messages = (30, 80)
    early = 0.1
    options: MemoryOptions
    story: MemoryStory

    def __init__(self, options: MemoryOptions, dice: Random) -> None:
        super().__init__(options, dice, MemoryStory())
        self.main = self.story.main = WatchedBroker("main", self.story, dice)
        self.main.log = Log(self.story)
        self.foreign = WatchedBroker("abroad", self.story, dice)
        self.dead_store = self.main.store(DEAD)
        self.hanging = False

    @staticmethod
    def draw(dice: Random) -> MemoryOptions:
        delays: list[Native | Copies] = [Native(), Native(), Copies(1), Copies(3), Copies(50), Copies()]
        return MemoryOptions(
            delays=dice.choice(delays),
            lease=dice.choice([None, None, 1.0, 6.0, 30.0]),
            settles=dice.choice([Settles.TOGETHER, Settles.TOGETHER, Settles.ALONE]),
            limit=dice.choice([None, None, 1, 9, 40]),
        )

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        yield

    @asynccontextmanager
    async def connected(self, goodbye: float) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(connected(self.main, goodbye=goodbye))
            await stack.enter_async_context(connected(self.foreign, goodbye=goodbye))
            yield

    def client(self) -> MemoryBroker:
        return self.main

    def dead(self, *, abroad: bool) -> MemoryPublisher | str:
        if not abroad:
            return DEAD
        self.dead_store = self.foreign.store(DEAD)
        return self.foreign.publisher(DEAD)

    def source(self, client: MemoryBroker) -> MemoryQueue:
        return client.queue(QUEUE, **attrs.asdict(self.options, recurse=False))

    def rules(self, **rules: Any) -> MemoryRules:
        return MemoryRules(delays=type(self.options.delays).__name__.lower(), **rules)

    def put(self, name: bytes) -> None:
        self.main.fill(QUEUE, [name])

    @property
    def is_empty(self) -> bool:
        return self.main.store(QUEUE).is_empty

    async def until_empty(self) -> None:
        await self.main.until_empty(QUEUE)

    # --- weather

    def take_back(self, at_most: int) -> None:
        """The other side takes back what is in hand, and says so."""
        held = [(link, received) for link in self.main.store(QUEUE).links for received in link.unsettled]
        for link, received in held[:at_most]:
            assert isinstance(link, MemoryLink)
            if received in link.unsettled:
                self.story.present[received.delivery.id].taken_back = True
                link.store.return_unsettled(link.release(received), "taken back")
                link.store.wake()
                link.lost(received, Line.SUPERSEDED)

    def slow_settlements(self, seconds: float) -> None:
        self.story.slowest = max(seconds, self.story.slowest)
        self.main.slow_settlements(QUEUE, seconds)

    def strike(self, name: str) -> None:
        self.story.stolen = name in ("sever", "sever_connection", "expire", "take_back")
        match name:
            case "sever_connection":
                self.main.sever_connection()
            case "take_back":
                self.take_back(9)
            case _:
                getattr(self.main, name)(QUEUE)

    def fault(self, name: str) -> None:
        main, dice, store = self.main, self.dice, self.dead_store
        steals = ("sever", "sever_connection", "expire", "refuse", "refuse_connection", "sever_delivery", "take_back")
        self.story.stolen |= name in steals
        match name:
            case "sever" | "expire":
                self.strike(name)
            case "sever_connection":
                main.sever_connection()
            case "take_back":
                self.take_back(dice.randint(1, 5))
            case "break_calls":
                main.break_calls(QUEUE, dice.randint(1, 3))
            case "many_broken_calls":
                main.break_calls(QUEUE, 7)
            case "lose_confirmations":
                main.lose_confirmations(QUEUE, dice.randint(1, 4))
            case "lose_dead_confirmations":
                store.weather.lost_confirmations += dice.randint(1, 4)
            case "refuse_settlements":
                main.refuse_settlements(QUEUE, dice.randint(1, 5))
            case "many_refused_settlements":
                main.refuse_settlements(QUEUE, 100)
            case "close_dead":
                store.weather.closed = dice.random() < 0.7
            case "close":
                (main.close if dice.random() < 0.5 else main.reopen)(QUEUE)
            case "refuse":
                (main.refuse if dice.random() < 0.5 else main.admit)(QUEUE)
                main.sever(QUEUE)
            case "break_attaches":
                main.break_attaches(QUEUE, dice.randint(1, 3))
            case "refuse_connection":
                (main.refuse_connection if dice.random() < 0.5 else main.admit_connection)()
                main.sever_connection()
            case "break_connects":
                main.break_connects(dice.randint(1, 3))
            case "slow_settlements":
                self.slow_settlements(dice.choice([0.0, 0.1, 2.0, 10.0]))
            case "hanging_settlements":
                self.hanging = True
                self.slow_settlements(math.inf)
            case "slow_extensions":
                main.slow_extensions(QUEUE, dice.choice([0.0, 0.1, 1.0]))
            case "hanging_extensions":
                main.slow_extensions(QUEUE, math.inf)
            case "stuck":  # what waits behind a settlement loses its lease there
                self.slow_settlements(10.0)
                main.slow_extensions(QUEUE, math.inf)
            case "slow_publishes":
                main.slow_publishes(QUEUE, dice.choice([0.0, 0.2, 3.0]))
            case "slow_dead_publishes":
                store.weather.slow_publishes = dice.choice([0.0, 0.2, 3.0])
            case "hanging_dead_publishes":
                self.hanging = True
                store.weather.slow_publishes = math.inf
            case "sever_delivery":
                for each in main.held(QUEUE)[:2]:
                    main.sever_delivery(QUEUE, each)
            case "sever_abroad":
                self.foreign.sever_connection()
            case _:
                raise ValueError(name)

    def calm_down(self) -> None:
        for store in (self.main.store(QUEUE), self.main.store(ELSEWHERE), self.dead_store):
            store.weather = type(store.weather)()
            store.wake()
        self.main.admit_connection()
        self.main.break_connects(-self.main._broken_connects)
        self.story.stolen = True
        if self.options.lease is None:  # what a verdict left unsettled comes back with the end of its link
            self.main.sever(QUEUE)
        if self.hanging:  # what hangs now would hang for ever
            self.main.sever_connection()
            self.foreign.sever_connection()
