"""What the cases on RabbitMQ share: a node, a quorum queue, its messages, the clock."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final
from uuid import uuid4

import attrs
import trio

from links.amqp.dial import dial
from links.amqp.engine.client_connection import ClientConnection
from links.amqp.engine.engine import Engine
from links.amqp.engine.events import ACCEPTED, Terminus
from links.amqp.engine.sender import Sent
from links.amqp.engine.settings import Settings
from links.amqp.management import management
from links.amqp.urls import login, parse
from links.amqp.wire.messages import encode
from settlement import Letter

__all__ = ["BODY", "HEADERS", "Rabbit", "bare_connection", "rabbitmq"]

VERSION: Final = "4.3"
BODY: Final = b"x" * 1024
HEADERS: Final = {"kind": b"benchmark"}
"""One application property; each message has an id besides."""

_SCRIPT = Path(__file__).parents[1] / "tests" / "servers" / "rabbitmq"
_UNAVAILABLE = 75


@attrs.frozen
class Rabbit:
    """A node, and a quorum queue on it."""

    url: str = attrs.field(repr=False)
    queue: str = attrs.field(factory=lambda: f"benchmark-{uuid4().hex[:12]}")

    @property
    def address(self) -> str:
        """As the peers attach to it."""
        return f"/queues/{self.queue}"

    async def declare(self) -> None:
        async with bare_connection(self.url) as connection, management(connection) as manage:
            await manage.declare(self.queue, arguments={"x-delivery-limit": -1})

    async def delete(self) -> None:
        async with bare_connection(self.url) as connection, management(connection) as manage:
            await manage.delete(self.queue)

    async def fill(self, count: int) -> None:
        """Put so many messages into the queue, each confirmed."""
        async with bare_connection(self.url) as connection:
            sender = connection.attach_sender(await connection.begin(), Terminus(self.address))
            await sender.attached()
            sent: list[Sent] = []
            for number in range(count):
                letter = Letter(BODY, {**HEADERS, "message-id": b"%032d" % number})
                sent.append(await sender.send(encode(letter, durable=False)))
            for each in sent:
                assert await each.answered() == ACCEPTED

    async def check(self, count: int) -> None:
        """Wait until so many messages are ready, for ten seconds."""
        until = trio.current_time() + 10
        async with bare_connection(self.url) as connection, management(connection) as manage:
            while (ready := await manage.count(self.queue)) != count:
                assert trio.current_time() < until, f"{ready} messages are in the queue, not {count}"
                await trio.sleep(0.02)

    async def purge(self) -> None:
        async with bare_connection(self.url) as connection, management(connection) as manage:
            await manage.purge(self.queue)


@contextmanager
def rabbitmq() -> Generator[Rabbit | None, None, None]:
    """A node for the block, with an empty queue; None where it cannot be had: a line has said why.

    It is stopped behind the block, unless somebody else needs it.
    """
    this = str(os.getpid())
    started = subprocess.run([_SCRIPT, "start", VERSION, this], check=False, capture_output=True, text=True)  # noqa: S603
    if started.returncode == _UNAVAILABLE:
        print(f"amqp: left out: {started.stderr.strip()}", flush=True)
        yield None
        return
    assert started.returncode == 0, started.stderr
    try:
        rabbit = Rabbit(started.stdout.split()[0])
        trio.run(rabbit.declare)
        try:
            yield rabbit
        finally:
            trio.run(rabbit.delete)
    finally:
        subprocess.run([_SCRIPT, "stop", VERSION, this], check=True)  # noqa: S603


@asynccontextmanager
async def bare_connection(url: str) -> AsyncGenerator[ClientConnection, None]:
    """A connection of our bare engine for the block; behind it the goodbye has been answered."""
    target = parse(url)
    stream = await dial(target)
    settings = Settings("benchmark", hostname=target.hostname, login=login(target))
    connection = ClientConnection(stream, Engine(settings))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.run)  # noqa: ASYNC113 -- `opened` waits for it
        await connection.opened()
        yield connection
        connection.close()
