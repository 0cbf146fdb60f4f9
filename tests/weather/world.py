"""What differs between the transports, as the weather (tests/weather/weather.py) and the sweep ask for it.

A world has a broker that tells the story, faults by name, and makes sources of whatever options it knows. There are
two: tests/weather/memory_world.py and tests/weather/amqp_world.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from random import Random
from typing import Any, ClassVar

from links.abc import Broker, Publisher, Source
from links.errors import NotConnected, PublishNotAccepted
from tests.weather.fates import Rules
from tests.weather.story import Story

__all__ = ["DEAD", "ELSEWHERE", "QUEUE", "World"]

QUEUE, DEAD, ELSEWHERE = "orders", "orders.dead", "elsewhere"


class World(ABC):
    """One run's. `options`: what the transport lets a user choose; what they are is the world's own."""

    mark: ClassVar[str]
    """For `tests/run --only`."""
    faults: ClassVar[tuple[str, ...]]
    spans: ClassVar[tuple[float, ...]]
    """Seconds of weather."""
    messages: ClassVar[tuple[int, int]]
    early: ClassVar[float]
    """How often the weather begins before the start-up is complete."""
    long: ClassVar[float] = 50_000.0
    """Virtual seconds after which a run is said to hang."""
    idle: ClassVar[float] = 0.5
    """Seconds between two looks at whether all is done."""

    strangers: ClassVar[bool] = False
    """A peer that ends the stream in the middle of a login is taken for one."""

    def __init__(self, options: Any, dice: Random, story: Story) -> None:
        self.options = options
        self.dice = dice
        self.story = story

    @staticmethod
    @abstractmethod
    def draw(dice: Random) -> Any:
        """Options."""

    @staticmethod
    def watched() -> AbstractContextManager[None]:
        """Around a run: what must be patched."""
        return nullcontext()

    @abstractmethod
    def running(self) -> AbstractAsyncContextManager[None]:
        """Let the broker run, for one life after the other."""

    def connected(self, goodbye: float) -> AbstractAsyncContextManager[Any]:  # noqa: ARG002 -- for those who need it
        """A connection that several runtimes share, where they must."""
        return nullcontext()

    @abstractmethod
    def client(self) -> Any:
        """A broker of one runtime."""

    @abstractmethod
    def dead(self, *, abroad: bool) -> Publisher | str:
        """Where dead letters go; `abroad`: on another broker, or over a connection of its own."""

    @abstractmethod
    def source(self, client: Any) -> Source[bytes]:
        """The queue."""

    @abstractmethod
    def rules(self, **rules: Any) -> Rules:
        """What a subscription was told, and what the options make of it."""

    @abstractmethod
    def put(self, name: bytes) -> None:
        """A message into the queue, past all weather."""

    async def publish(self, client: Broker, address: str, name: bytes) -> None:
        """As a user does, and remember what came of it."""
        sent = self.story.sent[address]
        sent[name] = "unknown"
        try:
            await client.publisher(address).publish(name, {"message-id": name})
        except (PublishNotAccepted, NotConnected):
            sent[name] = "refused"
            raise
        sent[name] = "confirmed"

    @abstractmethod
    def fault(self, name: str) -> None:
        """Let one of `faults` happen, as the dice say."""

    @abstractmethod
    def strike(self, name: str) -> None:
        """Let a fault of the sweep happen, to everything that is there."""

    @abstractmethod
    def calm_down(self) -> None:
        """From now on all is well."""

    async def hushed(self) -> None:  # noqa: B027 -- where there is nothing to wait for
        """Behind a life: nothing is left of it at the broker."""

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Nothing is stored, delayed or in anybody's hands."""

    @abstractmethod
    async def until_empty(self) -> None:
        """Wait for that."""
