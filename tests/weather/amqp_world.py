"""The world of AMQP: an embedded broker, cables to it that fail, and what an operator does to the broker."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, asynccontextmanager
from random import Random
from typing import Any

import attrs
import trio

from links.amqp.broker import AmqpBroker
from links.amqp.engine.events import Condition, State
from links.amqp.publisher import AmqpPublisher
from links.amqp.source import AmqpSource
from links.amqp.wire.messages import encode
from links.amqp.wire.values import LIST, compound, string
from links.errors import ConnectionBroken
from settlement import Copies, Hold, Letter, Native, Scheduled
from settlement.amqp import AT_LEAST_ONCE, AT_MOST_ONCE, Delays
from tests.weather.amqp_story import AmqpRules, AmqpStory, UncountedRules, WatchedBroker, is_sequence, watched_broker
from tests.weather.cable import Cable
from tests.weather.world import DEAD, QUEUE, World

__all__ = ["AmqpOptions", "AmqpWorld"]

_GONE = Condition("amqp:resource-deleted", "the queue was deleted")
_CLOSED = Condition("amqp:unauthorized-access", "it is closed")


@attrs.frozen
class AmqpOptions:
    """What a queue on AMQP lets a user choose, and how far away it is."""

    delays: Delays = Copies()
    at_most_once: bool = False
    count: str = "broker"
    durable: bool = True
    """Messages have a header section, so that the broker counts from the first delivery on."""
    credit: int | None = None
    latency: float = 0.01
    heartbeat: float = 4.0
    longest = 30.0
    """A pause of a handler, in seconds."""


class AmqpWorld(World):
    """One broker, and the cables to it."""

    mark = "amqp"
    faults = (
        *("cut", "cut", "cut", "sever_peer", "freeze", "freeze_out", "freeze_back", "freeze_peer", "thaw"),
        *("detach", "detach_dead", "end_session", "close_connection", "refuse", "refuse", "by_session"),
        *("refuse_dead", "refuse_dead", "refuse_dead", "down", "slow", "slow"),
        *("take_back", "take_back", "finish"),
    )
    spans = (2.0, 10.0, 60.0)
    messages = (8, 25)
    early = 1.0
    long = 5_000.0
    idle = 0.1
    strangers = True
    options: AmqpOptions
    story: AmqpStory

    def __init__(self, options: AmqpOptions, dice: Random) -> None:
        super().__init__(options, dice, AmqpStory(at_most_once=options.at_most_once))
        self.server = WatchedBroker(self.story)
        self.latency = options.latency
        self.cables: list[Cable] = []
        self.down = False
        self.nursery: trio.Nursery

    @staticmethod
    def draw(dice: Random) -> AmqpOptions:
        choice = dice.choice
        at_most_once = dice.random() < 0.12
        copies: list[Delays] = [Copies(1), Copies(3), Copies(), Scheduled("x-opt-delivery-delay")]
        others: list[Delays] = [Hold(1), Hold(4, max_delay=3.0), Hold(50), Native(), Native()]
        return AmqpOptions(
            delays=choice(copies if at_most_once else copies + others),
            at_most_once=at_most_once,
            count=choice(["broker", "broker", "broker", "copies"]),
            durable=choice([False, True]),
            credit=choice([None, None, 1, 9, 40]),
            latency=choice([0.0, 0.001, 0.02, 0.3]),
            heartbeat=choice([2.0, 10.0, 30.0]),
        )

    @staticmethod
    def watched() -> AbstractContextManager[None]:
        return watched_broker()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        async with self.server.running(), trio.open_nursery() as self.nursery:
            yield
            self.nursery.cancel_scope.cancel()

    async def connect(self) -> Cable:
        """For `AmqpBroker(connect=…)`."""
        await trio.lowlevel.checkpoint()
        if self.down:
            raise ConnectionBroken("nobody is there")
        cable = Cable(self.server.connect_in_memory(), self.latency)
        self.cables = [each for each in self.cables if not each.is_cut] + [cable]
        self.nursery.start_soon(cable.carry)
        return cable

    def client(self) -> AmqpBroker:
        options = self.options
        return AmqpBroker(
            "amqp://localhost", connect=self.connect, heartbeat=options.heartbeat, durable=options.durable
        )

    def dead(self, *, abroad: bool) -> AmqpPublisher | str:
        return self.client().publisher(DEAD) if abroad else DEAD

    def source(self, client: AmqpBroker) -> AmqpSource:
        options = self.options
        settle = AT_MOST_ONCE if options.at_most_once else AT_LEAST_ONCE
        return client.queue(QUEUE, delays=options.delays, settle=settle, credit=options.credit, count=options.count)

    def rules(self, **rules: Any) -> AmqpRules:
        options = self.options
        delays = type(options.delays).__name__.lower()
        make = AmqpRules if options.count == "broker" else UncountedRules
        return make(delays=delays, at_most_once=options.at_most_once, **rules)

    def put(self, name: bytes) -> None:
        """As its publisher encodes it, but for those whose body is a sequence."""
        raw = encode(Letter(name, {"message-id": name}), durable=self.options.durable)
        if is_sequence(name):
            data = raw.index(b"\x00\x53\x75")
            raw = raw[:data] + b"\x00\x53\x76" + compound(LIST, 1, string(name))
        self.server.publish(QUEUE, raw)

    async def hushed(self) -> None:
        for cable in self.cables:
            assert cable.is_cut, "a connection is left"
        with trio.fail_after(40.0):
            while self.server.peers:  # the broker hears of it, at the latest by the silence
                await trio.sleep(0.1)

    @property
    def is_empty(self) -> bool:
        queue = self.server.store.queue(QUEUE)
        return not (len(queue) or queue.delayed or queue.unsettled)

    async def until_empty(self) -> None:
        quiet = 0
        while quiet < 30:  # and no copy follows
            quiet = quiet + 1 if self.is_empty else 0
            await trio.sleep(0.1)

    # --- weather

    def detach(self, *addresses: str) -> None:
        for peer in self.server.peers:
            for address in addresses:
                peer.detach(address, _GONE)

    def close_dead(self) -> None:
        """The dead letter is refused."""
        self.server.refuse(DEAD, _CLOSED)

    def freeze(self, cable: Cable, name: str) -> None:
        if name != "freeze_back":
            cable.out.freeze()
        if name != "freeze_out":
            cable.back.freeze()

    def strike(self, name: str) -> None:
        self.story.stolen = True
        for cable in [each for each in self.cables if not each.is_cut]:
            if name == "cut":
                cable.cut()
            elif name in ("freeze_out", "freeze_back"):  # for good: silence ends it
                self.freeze(cable, name)
        for peer in self.server.peers[:]:
            match name:
                case "sever":
                    peer.sever()
                case "detach":
                    self.detach(QUEUE, DEAD)
                    return
                case "end_session":
                    self.server.end_sessions(peer, at_most=10)
                case "close_connection":
                    peer.close(Condition("amqp:connection:forced"))
                case "take_back" | "finish":
                    self.server.take_back(peer, State.RELEASED if name == "take_back" else State.ACCEPTED, 9)
                case _:
                    pass

    def fault(self, name: str) -> None:
        server, dice = self.server, self.dice
        self.story.stolen = True
        cables = [each for each in self.cables if not each.is_cut]
        some = cables if dice.random() < 0.5 else cables[:1]
        peers = server.peers[:] if dice.random() < 0.5 else server.peers[:1]
        match name:
            case "cut":
                for cable in some:
                    cable.cut()
            case "sever_peer":
                for peer in peers:
                    peer.sever()
            case "freeze" | "freeze_out" | "freeze_back":
                for cable in some:
                    self.freeze(cable, name)
                self.later([0.1, 1.0, 100.0], "thaw" if dice.random() < 0.5 else "cut")
            case "freeze_peer":
                for peer in peers:
                    peer.freeze()
            case "thaw":
                for cable in self.cables:
                    cable.out.thaw()
                    cable.back.thaw()
                for peer in server.peers:
                    peer.thaw()
            case "detach":
                self.detach(QUEUE)
            case "detach_dead":
                self.detach(DEAD)
            case "end_session":
                for peer in peers:
                    server.end_sessions(peer, at_most=2)
            case "close_connection":
                for peer in peers:
                    peer.close(Condition("amqp:connection:forced", "by an operator"))
            case "take_back" | "finish":
                state = dice.choice([State.RELEASED, State.MODIFIED]) if name == "take_back" else State.ACCEPTED
                for peer in peers:
                    server.take_back(peer, state, dice.randint(1, 5))
            case "refuse":
                server.refuse(QUEUE, Condition("amqp:not-found", "there is no such queue"))
                self.detach(QUEUE)
                self.later([0.1, 3.0, 30.0], "admit")
            case "admit":
                server.refuse(QUEUE, None)
            case "by_session":
                server.refuses_by_session = not server.refuses_by_session
            case "refuse_dead":
                self.close_dead()
                self.detach(DEAD)
                self.later([1.0, 10.0, 100.0], "admit_dead")
            case "admit_dead":
                server.refuse(DEAD, None)
            case "down":
                self.down = True
                for cable in cables:
                    cable.cut()
                self.later([0.1, 3.0, 30.0], "up")
            case "up":
                self.down = False
            case "slow":
                self.latency = dice.choice([0.0, 0.05, 1.0])
                for cable in cables:
                    cable.latency = self.latency
            case _:
                raise ValueError(name)

    def later(self, seconds: list[float], name: str) -> None:
        """In one of so many seconds another fault follows."""

        async def following(after: float) -> None:
            await trio.sleep(after)
            self.fault(name)

        self.nursery.start_soon(following, self.dice.choice(seconds))

    def calm_down(self) -> None:
        for name in ("thaw", "admit", "admit_dead", "up"):
            self.fault(name)
        self.latency = 0.001
