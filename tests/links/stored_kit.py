"""What the tests of `Stored` stand on: an embedded broker that can be cut off, and a file with a table for what waits.

A database answers in real time, so nothing here runs in virtual time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from actors import Runtime, Subscription, open_runtime
from links.amqp import AmqpBroker, EmbeddedBroker
from links.sql import SqlQueue
from settlement import Policy, Stored
from tests.links.amqp_kit import Handler
from tests.links.sqlite_kit import Database

__all__ = ["World", "serving", "world"]


class World:
    """`down`: is the broker out of reach?"""

    def __init__(self, path: Path) -> None:
        self.server = EmbeddedBroker()
        self.database = Database(path / "delays.db").create()
        self.down = False
        self._streams: list[trio.abc.Stream] = []

    def amqp(self) -> AmqpBroker:
        return AmqpBroker("amqp://localhost", connect=self._connect)

    async def _connect(self) -> trio.abc.Stream:
        if self.down:
            raise OSError("nobody is there")
        self._streams.append(await self.server.connect())
        return self._streams[-1]

    async def cut(self) -> None:
        """Break each connection."""
        streams, self._streams = self._streams, []
        for stream in streams:
            await trio.aclose_forcefully(stream)

    def store(self) -> SqlQueue[Any]:
        return self.database.queue()

    def put(self, payload: bytes, headers: str, due: float = 0.0) -> None:
        """A row as a copy has it."""
        self.database.run("INSERT INTO jobs (payload, headers, retry_after) VALUES (?, ?, ?)", payload, headers, due)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncGenerator[World, None]:
    world = World(tmp_path)
    async with world.server.running():
        yield world


@asynccontextmanager
async def serving(
    world: World, handler: Handler, *, concurrency: int = 1, grace: float = 15.0, **policy: Any
) -> AsyncGenerator[tuple[AmqpBroker, Runtime], None]:
    """A subscription on the queue `orders` whose delays are stored."""
    broker = world.amqp()
    source = broker.queue("orders", delays=Stored(world.store()))
    orders = Subscription(source, handler, policy=Policy(**policy), concurrency=concurrency)
    async with open_runtime(orders, grace=grace, goodbye=2.0) as runtime:
        yield broker, runtime
