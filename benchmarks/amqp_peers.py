"""The peers of the AMQP cases, written as their own documentation writes them.

proton's `Container` and `BlockingConnection` (https://qpid.apache.org/releases/qpid-proton-0.40.0/proton/python/docs/)
run in this process; rhea on node in a process of its own. Each takes the same messages from the same queue, accepts
each, reads body, message id and one header where that is asked for, and is done when the broker has answered the
goodbye that follows the last accept.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import attrs
import proton
from proton.handlers import MessagingHandler
from proton.reactor import Container
from proton.utils import BlockingConnection

from benchmarks.amqp_rabbit import BODY, HEADERS, Rabbit
from benchmarks.stopwatch import Spent, Stopwatch

__all__ = ["Rhea", "consume", "publish", "rabbitmq_client"]

_INTEROP: Final = Path(__file__).parents[1] / "tests" / "interop"
_UNAVAILABLE = 75


class _Consumer(MessagingHandler):
    """Takes so many, accepts each by hand, leaves."""

    def __init__(self, rabbit: Rabbit, count: int, credit: int, reads: bool, stopwatch: Stopwatch) -> None:
        super().__init__(prefetch=credit, auto_accept=False)
        self.left = count
        self._reads = reads
        self._rabbit = rabbit
        self._stopwatch = stopwatch

    def on_start(self, event: Any) -> None:
        connection = event.container.connect(self._rabbit.url, reconnect=False)
        event.container.create_receiver(connection, self._rabbit.address)

    def on_link_opened(self, event: Any) -> None:  # noqa: ARG002
        self._stopwatch()

    def on_message(self, event: Any) -> None:
        if self._reads:
            _read(event.message)
        self.accept(event.delivery)
        self.left -= 1
        if not self.left:
            event.connection.close()

    def on_connection_closed(self, event: Any) -> None:  # noqa: ARG002
        self._stopwatch()


def _read(message: Any) -> None:
    assert len(message.body) == len(BODY)
    assert message.id
    assert message.properties["kind"] == HEADERS["kind"].decode()


def consume(rabbit: Rabbit, count: int, credit: int, reads: bool) -> Spent:
    """Proton's `Container`, with that `prefetch`."""
    stopwatch = Stopwatch()
    consumer = _Consumer(rabbit, count, credit, reads, stopwatch)
    Container(consumer).run()
    assert consumer.left == 0
    return stopwatch.spent(count)


def rabbitmq_client() -> Callable[[Rabbit, int, int, bool], Spent] | None:
    """RabbitMQ's own client for Python; None where it is not installed: a line has said so."""
    try:
        client = importlib.import_module("rabbitmq_amqp_python_client")
    except ModuleNotFoundError:
        print("-rabbitmq: left out: rabbitmq-amqp-python-client is not installed", flush=True)
        return None
    return partial(_consume_with, client)


def _consume_with(client: Any, rabbit: Rabbit, count: int, credit: int, reads: bool) -> Spent:
    """As its README has it: an environment, a connection, a consumer of that credit, `run`, each accepted by hand."""
    stopwatch = Stopwatch()

    class Handler(client.AMQPMessagingHandler):  # type: ignore[misc]  # it may not be installed
        def __init__(self) -> None:
            super().__init__()  # pyright: ignore[reportUnknownMemberType] -- the same
            self.left = count

        def on_amqp_message(self, event: Any) -> None:
            if reads:
                message = event.message
                assert len(message.body) == len(BODY)
                assert message.id
                assert message.application_properties["kind"] == HEADERS["kind"].decode()
            self.delivery_context.accept(event)
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt  # as its examples leave `run`; `stop()` would leave the accepts unwritten

    handler = Handler()
    environment = client.Environment(uri=rabbit.url)
    connection = environment.connection()
    connection.dial()
    consumer = connection.consumer(rabbit.address, message_handler=handler, credit=credit)
    stopwatch()
    with suppress(KeyboardInterrupt):
        consumer.run()
    connection.close()
    stopwatch()
    assert handler.left == 0
    return stopwatch.spent(count)


def publish(rabbit: Rabbit, count: int) -> Spent:
    """Proton's `BlockingConnection`: each message is sent when the one before is confirmed."""
    stopwatch = Stopwatch()
    connection = BlockingConnection(rabbit.url, timeout=60)
    sender = connection.create_sender(rabbit.address)
    properties = {name: value.decode() for name, value in HEADERS.items()}
    stopwatch()
    for number in range(count):
        delivery = sender.send(proton.Message(id=f"{number:032}", properties=properties, body=BODY, inferred=True))
        assert delivery.remote_state == proton.Delivery.ACCEPTED
    stopwatch()
    connection.close()
    return stopwatch.spent(count)


@attrs.frozen
class Rhea:
    """Where node and its rhea are."""

    node: str
    modules: str

    @classmethod
    def installed(cls) -> Rhea | None:
        """Installed once; None where it cannot be had: a line has said why."""
        done = subprocess.run([_INTEROP / "install"], check=False, capture_output=True, text=True)  # noqa: S603
        if done.returncode == _UNAVAILABLE:
            print(f"amqp-consume-1000-rhea: left out: {done.stderr.strip()}", flush=True)
            return None
        assert done.returncode == 0, done.stderr
        return cls(*done.stdout.split("\n")[:2])

    def consume(self, rabbit: Rabbit, count: int, credit: int, reads: bool) -> Spent:
        """As the process tells it of itself."""
        program = [self.node, str(_INTEROP / "consume_fast.js"), rabbit.url, rabbit.address]
        done = subprocess.run(  # noqa: S603
            [*program, "--count", str(count), "--credit", str(credit), *(["--read", "kind"] if reads else [])],
            env={**os.environ, "NODE_PATH": self.modules},
            check=False,
            stdout=subprocess.PIPE,
            text=True,
        )
        told = cast("dict[str, Any]", json.loads(done.stdout.splitlines()[-1]))
        assert told.get("count") == count, told
        return Spent.of(count, told["cpu_seconds"], told["wall_seconds"])
