"""A service of its own process on a queue table of the tests' kits: `Child` here, the program behind `-m`.

It says a line of JSON for whatever happens, with a time of the clock that all processes share (`time.monotonic()`);
when its standard input ends it drains, and says its books. What a handler does is written in the message: see `work`.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from actors import Subscription, open_runtime
from links.sql import AdvisoryLock, Lease, SqlQueue
from settlement import Ack, Delivery, Outcome, Policy, Retry, RetryAfter
from settlement.ledger import Ledger
from tests.links.mysql_tables import MysqlTables
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import Database, until

__all__ = ["FAKETIME", "Child", "a_child", "message", "queue_of", "work"]

FAKETIME: Final = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
"""Where Debian's libfaketime is, if it is installed."""


def message(
    name: str, *, hold: float = 0.0, shielded: bool = False, outcomes: tuple[str, ...] = (), fill: int = 0
) -> bytes:
    """A message that tells its handler what to do.

    `hold`: seconds; `shielded`: from cancellations. `outcomes`: of each attempt, "retry" or "after"; then `Ack`.
    `fill`: bytes that it carries besides.
    """
    return json.dumps(
        {"name": name, "hold": hold, "shielded": shielded, "outcomes": outcomes, "fill": "x" * fill}
    ).encode()


def say(*what: Any) -> None:
    os.write(1, json.dumps([*what, time.monotonic()]).encode() + b"\n")


async def work(delivery: Delivery[bytes], claimer: str) -> Outcome:
    """The handler."""
    asked = json.loads(delivery.body)
    say("began", asked["name"], delivery.attempt, claimer)
    try:
        with trio.CancelScope(shield=asked["shielded"]):
            await trio.sleep(asked["hold"])
    except trio.Cancelled:
        say("cancelled", asked["name"], delivery.attempt, claimer)
        raise
    say("ended", asked["name"], delivery.attempt, claimer)
    if delivery.attempt <= len(asked["outcomes"]):
        return Retry() if asked["outcomes"][delivery.attempt - 1] == "retry" else RetryAfter(0.02)
    return Ack()


def queue_of(options: Mapping[str, Any]) -> SqlQueue[bytes]:
    """A queue on what the options name."""
    lease = options["lease"]  # seconds; a key; None: a row lock
    tables: PostgresTables | MysqlTables | Database
    if "url" not in options:
        tables = Database(Path(options["path"]))
    else:
        kit = PostgresTables if options["url"].startswith("postgres") else MysqlTables
        tables = kit(options["url"], leased=isinstance(lease, float))
    claim = AdvisoryLock(lease) if isinstance(lease, str) else None if lease is None else Lease(lease)
    return tables.broker(options.get("poll", 0.1)).queue(tables.table(), claim=claim)


async def _main(options: Mapping[str, Any]) -> None:
    async with AsyncExitStack() as stack:
        runtimes = []
        for number in range(options.get("claimers", 1)):
            handler = partial(work, claimer=f"{os.getpid()}-{number}")
            subscription = Subscription(
                queue_of(options), handler, policy=Policy(), concurrency=options.get("concurrency", 1), name="jobs"
            )
            runtimes.append(await stack.enter_async_context(open_runtime(subscription)))
        say("ready", time.time(), dt.datetime.now(dt.UTC).timestamp())
        await trio.to_thread.run_sync(sys.stdin.buffer.read, abandon_on_cancel=True)
    for runtime in runtimes:
        ledger = runtime.ledger("jobs")
        say("books", _line(ledger))


def _line(ledger: Ledger) -> dict[str, Any]:
    names = ("received", "acked", "retried", "delayed", "superseded", "unsettled", "unknown")
    return {"balanced": ledger.balanced, **{name: getattr(ledger, name) for name in names}}


class Child:
    """The process, and what it has said so far."""

    def __init__(self, process: trio.Process, errors: Path) -> None:
        self._process, self._errors = process, errors
        self.told: list[list[Any]] = []

    async def listen(self) -> None:
        """Take in what it says, until it ends."""
        assert self._process.stdout is not None
        left = b""
        async for some in self._process.stdout:
            *lines, left = (left + some).split(b"\n")
            self.told += [json.loads(line) for line in lines]

    def said(self, what: str, name: str | None = None) -> list[list[Any]]:
        """Every line of this kind, and of this message."""
        return [line for line in self.told if line[0] == what and (name is None or line[1] == name)]

    async def until(self, what: str, name: str | None = None, within: float = 20.0) -> list[Any]:
        """Wait for such a line."""
        await until(lambda: self.said(what, name) or self._process.returncode is not None, within)
        assert self.said(what, name), f"{self.told} {self.errors}"
        return self.said(what, name)[0]

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    async def books(self, within: float = 30.0) -> list[dict[str, Any]]:
        """Let it drain and end: the books of each of its claimers."""
        assert self._process.stdin is not None
        await self._process.stdin.aclose()
        with trio.fail_after(within):
            await self._process.wait()
            while len(self.said("books")) < 1 and self._process.returncode == 0:
                await trio.sleep(0.005)
        assert self._process.returncode == 0, self.errors
        return [line[1] for line in self.said("books")]

    @property
    def seconds(self) -> float:
        """Of CPU that it has spent."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def errors(self) -> str:
        """What it has logged: warnings and worse."""
        return self._errors.read_text()

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def a_child(folder: Path, *, ahead: float = 0.0, **options: Any) -> AsyncGenerator[Child, None]:
    """A process that serves, killed at the end of the block if it is there still.

    `options`: `url` of a PostgreSQL or `path` of an SQLite file; `lease` in seconds, None: row locks; `claimers`, a
    broker and a runtime each; `concurrency`, `poll`. `ahead`: seconds by which its wall clock is ahead.
    """
    environment = dict(os.environ)
    if ahead and FAKETIME.exists():
        environment |= {"LD_PRELOAD": str(FAKETIME), "FAKETIME": f"+{ahead:g}", "DONT_FAKE_MONOTONIC": "1"}
        environment["FAKETIME_DONT_FAKE_MONOTONIC"] = "1"
    elif ahead:
        options["ahead"] = ahead
    errors = folder / f"errors-{time.monotonic_ns()}"
    async with trio.open_nursery() as nursery:
        with errors.open("wb") as written:
            command = [sys.executable, "-m", "tests.links.sql_consumer", json.dumps(options)]
            process = await trio.lowlevel.open_process(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=written, env=environment
            )
        child = Child(process, errors)
        try:
            nursery.start_soon(child.listen)
            await child.until("ready")
            yield child
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 10):
                await child.kill()
            nursery.cancel_scope.cancel()


def _set_clock(ahead: float) -> None:
    """Where there is no libfaketime: what this program's own code asks for."""
    seconds, nanoseconds = time.time, time.time_ns
    time.time = lambda: seconds() + ahead
    time.time_ns = lambda: nanoseconds() + round(ahead * 1e9)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.WARNING)
    if "ahead" in given:
        _set_clock(given["ahead"])
    trio.run(_main, given)
