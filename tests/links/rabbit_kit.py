"""What the tests on RabbitMQ share: running nodes, and what one test has of one.

    pytestmark = [pytest.mark.amqp, pytest.mark.servers]

    async def test_this(rabbit: Rabbit) -> None:            # four times: every shape
        name = await rabbit.queue()

    @shapes(version="4.3", kind="quorum")                   # of these
    async def test_that(rabbit: Rabbit) -> None: ...

    @any_broker                                             # quorum queues; or the one broker that TEST_AMQP_URL names
    async def test_whatever(rabbit: Rabbit) -> None: ...

Each test logs in as a user of its own, by `rabbit.url`. What it made is deleted when it has ended.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import uuid
from base64 import b64encode
from collections.abc import Generator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

import attrs
import pytest
import trio

SHAPES: Final = (("4.3", "quorum"), ("4.3", "classic"), ("4.0", "quorum"), ("4.0", "classic"))
"""Every version and kind of queue."""
NOT_IN_STABLE: Final = "not in Debian stable: "
"""So begins the reason of a skip that `--require amqp` lets pass: RabbitMQ 4.3 is in Debian unstable alone."""
GIVEN: Final = os.environ.get("TEST_AMQP_URL", "")
"""A broker of which no more is known than its URL."""

_SCRIPT = Path(__file__).parents[1] / "servers" / "rabbitmq"


# --- nodes


@attrs.frozen
class Node:
    version: str
    """4.3 or 4.0; empty: the broker that was given."""
    url: str = attrs.field(repr=False)
    """As guest, where it is ours."""
    management_url: str | None = attrs.field(repr=False)
    """None: the broker that was given."""

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 5672


def node(version: str) -> Node:
    """A running node, which stays, unless `tests/run` stops it at its end.

    One that cannot be had on this machine skips the test, one that does not start fails it.
    """
    code, said = _started(_SCRIPT, version)
    match code:
        case 0:
            return Node(version, *said.split())
        case 75:
            pytest.skip(said if version == "4.0" else NOT_IN_STABLE + said)
        case _:
            pytest.fail(f"RabbitMQ {version} did not start, {code}: {said}", pytrace=False)


@cache
def _started(script: Path, version: str) -> tuple[int, str]:
    """The exit code and what was said, once for this process. It may take the ten minutes that a root may take."""
    command: list[str | Path] = ["timeout", "1200", script, "start", version]
    if run := os.environ.get("SETTLEMENT_RUN"):  # the process id of tests/run
        command.append(run)
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return done.returncode, (done.stderr if done.returncode else done.stdout).strip()


# --- what a test has of a node


@attrs.frozen
class Depth:
    ready: int
    unacknowledged: int


@attrs.define
class Rabbit:
    """A node, a kind of queue, and a user of the test's own, who may do anything but manage."""

    node: Node
    kind: str
    """quorum or classic."""
    user: str = attrs.field(factory=lambda: f"test-{uuid.uuid4().hex[:12]}")
    _made: list[str] = attrs.field(factory=list[str])

    @property
    def url(self) -> str:
        if self.node.management_url is None:
            return self.node.url
        return f"amqp://{self.user}:{self.user}@{self.node.host}:{self.node.port}"

    async def queue(self, arguments: Mapping[str, object] | None = None, kind: str | None = None) -> str:
        """A new queue's name. A broker that was given has to make the queue itself, when it is attached to."""
        name = f"{self.user}.{uuid.uuid4().hex[:8]}"
        if self.node.management_url is not None or arguments or kind:
            await self.declare(name, arguments, kind)
        return name

    async def declare(self, name: str, arguments: Mapping[str, object] | None = None, kind: str | None = None) -> None:
        """Declare a durable queue, of our kind by default."""
        given = {"x-queue-type": kind or self.kind, **(arguments or {})}
        await self.put(_queue(name), {"durable": True, "arguments": given})

    async def delete(self, name: str) -> None:
        """Delete a queue, if it is there."""
        await self._ask("DELETE", _queue(name))

    async def depth(self, name: str) -> Depth:
        """How many messages a queue holds: those ready now; those unacknowledged a moment ago (0.2 s, no promise)."""
        told = await self._ask("GET", f"{_queue(name)}?disable_stats=true&enable_queue_totals=true")
        ready = await trio.to_thread.run_sync(count_ready, self.node, name)
        return Depth(ready, told.get("messages_unacknowledged", 0))

    async def until_depth(self, name: str, ready: int, unacknowledged: int = 0) -> None:
        """Wait until a queue holds so many; for ten seconds."""
        deadline = trio.current_time() + 10
        while (depth := await self.depth(name)) != Depth(ready, unacknowledged):
            assert trio.current_time() < deadline, f"{name} still holds {depth}"
            await trio.sleep(0.02)

    async def connections(self) -> list[str]:
        """The names of our user's connections, from the moment when they are open."""
        return [each["name"] for each in await self._ask("GET", f"connections/username/{self.user}")]

    async def close_connections(self) -> None:
        """The broker closes each connection of our user, as an operator orders: amqp:internal-error."""
        await self._ask("DELETE", f"connections/username/{self.user}")

    async def put_user(self, name: str, password: str, permission: str = ".*") -> None:
        """Make a user, who may configure, write and read what has such a name."""
        await trio.to_thread.run_sync(self._put_user, name, password, permission)

    async def put_policy(self, pattern: str, definition: Mapping[str, object]) -> None:
        """Make a policy for the queues with such names."""
        path = f"policies/%2F/{self.user}.{uuid.uuid4().hex[:8]}"
        await self.put(path, {"pattern": pattern, "definition": definition, "apply-to": "queues"})

    async def put(self, path: str, body: Mapping[str, object]) -> None:
        """Make something by the HTTP API; it is deleted when the test has ended."""
        self._made.append(path)
        await self._ask("PUT", path, body)

    async def _ask(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        return await trio.to_thread.run_sync(manage, self.node, method, path, body)

    def _put_user(self, name: str, password: str, permission: str) -> None:
        self._made.append(f"users/{name}")
        manage(self.node, "PUT", f"users/{name}", {"password": password, "tags": ""})
        rights = {"configure": permission, "write": permission, "read": permission}
        manage(self.node, "PUT", f"permissions/%2F/{name}", rights)

    def arrive(self) -> None:
        """Make the user. Synchronous, as is `leave`: no trio runs."""
        self._put_user(self.user, self.user, ".*")

    def leave(self) -> None:
        """Delete what was made."""
        for path in reversed(self._made):
            manage(self.node, "DELETE", path)


def _queue(name: str) -> str:
    return f"queues/%2F/{quote(name, safe='')}"


# --- the two ways to ask a node; blocking, bounded


def manage(node: Node, method: str, path: str, body: Mapping[str, object] | None = None) -> Any:
    """Ask the HTTP API; what is deleted may be gone."""
    assert node.management_url is not None, "this test needs a node of ours: it is not for @any_broker"
    where = urlsplit(node.management_url)
    request = Request(
        f"http://{where.hostname}:{where.port}/api/{path}",
        None if body is None else json.dumps(body).encode(),
        {
            "Authorization": "Basic " + b64encode(f"{where.username}:{where.password}".encode()).decode(),
            "Content-Type": "application/json",
        },
        method=method,
    )
    try:
        with urlopen(request, timeout=10) as answer:  # noqa: S310  (a node of ours)
            return json.loads(answer.read() or b"null")
    except HTTPError as error:
        with error:
            if method == "DELETE" and error.code == 404:
                return None
            raise AssertionError(f"{method} {path}: {error.code} {error.read().decode()}") from None


def count_ready(node: Node, queue: str) -> int:
    """Ask by AMQP 0-9-1, as guest: the queue itself answers a passive declaration, statistics answer the HTTP API."""
    with socket.create_connection((node.host, node.port), timeout=10) as connection:
        stream = connection.makefile("rwb")

        def say(channel: int, method: tuple[int, int], arguments: bytes) -> None:
            payload = struct.pack(">HH", *method) + arguments
            stream.write(struct.pack(">BHI", 1, channel, len(payload)) + payload + b"\xce")
            stream.flush()

        def hear(method: tuple[int, int]) -> bytes:
            _, _, size = struct.unpack(">BHI", stream.read(7))
            payload = stream.read(size + 1)
            assert struct.unpack(">HH", payload[:4]) == method, payload
            return payload[4:-1]

        with stream:
            stream.write(b"AMQP\0\0\x09\x01")
            stream.flush()
            hear((10, 10))
            say(0, (10, 11), struct.pack(">I", 0) + b"\5PLAIN" + struct.pack(">I", 12) + b"\0guest\0guest" + b"\5en_US")
            say(0, (10, 31), hear((10, 30))[:6] + struct.pack(">H", 0))  # tuned as it likes, without heartbeats
            say(0, (10, 40), b"\1/\0\0")
            hear((10, 41))
            say(1, (20, 10), b"\0")
            hear((20, 11))
            say(1, (50, 10), struct.pack(">HB", 0, len(queue)) + queue.encode() + b"\1" + struct.pack(">I", 0))
            ready: int = struct.unpack(">II", hear((50, 11))[-8:])[0]
            say(0, (10, 50), struct.pack(">HBHH", 200, 0, 0, 0))
            hear((10, 51))
            return ready


# --- for pytest


def shapes(version: str | None = None, kind: str | None = None) -> pytest.MarkDecorator:
    """The shapes that a test is for."""
    chosen = [shape for shape in SHAPES if version in (None, shape[0]) and kind in (None, shape[1])]
    return pytest.mark.parametrize("rabbit", chosen, ids="-".join, indirect=True)


any_broker = pytest.mark.parametrize(
    "rabbit",
    [("", "")] if GIVEN else [("4.3", "quorum"), ("4.0", "quorum")],
    ids="-".join if not GIVEN else ["given"],
    indirect=True,
)
"""A test that needs no more than a queue's name, attached to under the user of the URL."""


@pytest.fixture(params=SHAPES, ids="-".join)
def rabbit(request: pytest.FixtureRequest) -> Generator[Rabbit, None, None]:
    """What a test has of a node; four times, unless it says `shapes` or `any_broker`."""
    version, kind = request.param
    markers = {marker.name for marker in request.node.iter_markers()}
    assert markers >= {"amqp", "servers"}, "a test on RabbitMQ is marked amqp and servers"
    if not version:
        yield Rabbit(Node("", GIVEN, None), "")
        return
    if GIVEN:
        pytest.skip("needs the management of a RabbitMQ of ours, and TEST_AMQP_URL names another broker")
    rabbit = Rabbit(node(version), kind)
    rabbit.arrive()
    try:
        yield rabbit
    finally:
        rabbit.leave()
