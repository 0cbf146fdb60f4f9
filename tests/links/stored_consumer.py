"""A service of its own process whose delayed copies are stored, or held: `Child` here, the program behind `-m`.

It writes a line for each call of its handler, and may kill itself at one of `POINTS`, by SIGKILL: nothing of Python's
runs behind that.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from actors import Subscription, open_runtime
from links.amqp import AmqpBroker, AmqpPublisher
from links.amqp.link import AmqpLink
from links.amqp.publisher import Encoded
from links.sql import Lease, SqlBroker, SqlPublisher, SqlQueue, Table
from links.sql.lease_link import LeaseLink
from settlement import Ack, Copies, Delivery, Outcome, RetryAfter, Stored

__all__ = ["DELAYS", "POINTS", "Call", "Child", "Where", "a_child"]

DELAYS: Final = Table(
    "delays",
    id="id",
    payload="payload",
    headers="headers",
    retry_after="due",
    attempt="attempt",
    locked_until="locked_until",
    generated="id",
)
POINTS: Final = (
    "before the row is written",
    "the row is committed, the original not accepted",
    "the original is accepted",
    "the row is due and claimed, nothing is published",
    "the message is confirmed, the row not finished",
    "the row is finished",
)


@attrs.frozen
class Call:
    """One call of the handler."""

    body: str
    attempt: int
    at: float
    """Unix seconds."""


# --- the program


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _strike(point: int, calls: int) -> None:
    """Die at this point, when it is passed for the so-and-so-manieth time."""
    left = calls

    def passed() -> None:
        nonlocal left
        left -= 1
        if not left:
            _die()

    def around(owner: Any, method: str, points: tuple[int, int], counts: Callable[[Any], bool]) -> None:
        original = getattr(owner, method)

        async def wrapped(self: Any, what: Any) -> Any:
            if points[0] == point and counts(what):
                passed()
            result = await original(self, what)
            if points[1] == point and counts(what):
                passed()
            return result

        setattr(owner, method, wrapped)

    def accepts(settlements: Any) -> bool:
        return any(settlement.plan.before for settlement in settlements)

    around(SqlPublisher, "send", (1, 2), lambda _: True)
    around(AmqpLink, "settle", (0, 3), accepts)
    around(AmqpPublisher, "send", (4, 5), lambda letter: isinstance(letter, Encoded))
    around(LeaseLink, "settle", (0, 6), lambda _: True)


async def _serve(options: dict[str, Any]) -> None:
    log = os.open(options["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def handle(delivery: Delivery[bytes]) -> Outcome:
        os.write(log, json.dumps([delivery.body.decode(), delivery.attempt, time.time()]).encode() + b"\n")
        await trio.lowlevel.checkpoint()
        return RetryAfter(options["delay"]) if delivery.attempt == 1 else Ack()

    queue: SqlQueue[bytes] = SqlBroker(options["database"], poll_interval=0.05).queue(DELAYS, claim=Lease(2.0))
    delays = Stored(queue) if options["stored"] else Copies()
    orders = AmqpBroker(options["url"]).queue(options["queue"], delays=delays)
    async with open_runtime(Subscription(orders, handle, concurrency=8)) as runtime:
        await runtime.finished()


if __name__ == "__main__":
    given: dict[str, Any] = json.loads(sys.argv[1])
    if given["point"]:
        _strike(given["point"], given["calls"])
    trio.run(partial(_serve, given))


# --- the test's side


@attrs.frozen
class Where:
    """Which queue of which broker, and the table's database."""

    url: str
    queue: str
    database: str


@attrs.define
class Child:
    process: subprocess.Popen[bytes]
    log: Path

    def calls(self) -> list[Call]:
        """What its handler got so far; of all children that share the file."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [Call(*json.loads(line)) for line in lines]

    def kill(self) -> None:
        """With -9."""
        self.process.kill()
        self.process.wait(10)

    @property
    def code(self) -> int | None:
        return self.process.poll()


@contextmanager
def a_child(
    log: Path, where: Where, *, stored: bool, delay: float, point: int = 0, calls: int = 1
) -> Generator[Child, None, None]:
    """Run one for the block; it is killed behind it. `point`: of `POINTS`, from 1; 0: it lives."""
    options = {
        "log": str(log),
        **attrs.asdict(where),
        "stored": stored,
        "delay": delay,
        "point": point,
        "calls": calls,
    }
    command = [sys.executable, "-m", "tests.links.stored_consumer", json.dumps(options)]
    with log.with_suffix(".err").open("ab") as errors:
        process = subprocess.Popen(command, stderr=errors, cwd=Path(__file__).parents[2])
        child = Child(process, log)
        try:
            yield child
        finally:
            child.kill()
