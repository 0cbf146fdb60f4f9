"""How a check runs: `Check` is one, `Trial` is what it works with, `ConformanceError` is how it fails.

Waiting: what must happen is waited for, at most `Capabilities.patience`. What must not happen is proved by a marker
that is published behind it and arrives alone.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, NoReturn

import attrs
import trio
import trio.testing

from actors import Subscription, open_runtime
from links.abc import Broker, Link, Received, Settlement, Source
from links.testing.harness import Capabilities, Harness
from settlement import Ack, Delivery, Outcome, Policy
from settlement.groups import leaves
from settlement.ledger import Line

__all__ = ["Check", "ConformanceError", "Recorder", "Trial", "check"]

GOODBYE = 5.0
MARKER = b"marker"
EARLY = 0.01
"""Seconds that two clocks may disagree about a delay."""
LIMIT = 6
"""A whole check may take so many times the patience."""

_RUN = secrets.token_hex(4)
_numbers = count(1)


class ConformanceError(AssertionError):
    """A transport does not keep a rule: which, what was expected, and what was seen."""

    def __init__(self, rules: str, expected: str, seen: object) -> None:
        super().__init__(f"{rules}: expected {expected}; seen: {seen}")
        self.rules = rules
        self.expected = expected
        self.seen = seen


class Trial:
    """One run of one check on one harness."""

    def __init__(self, harness: Harness, rules: str) -> None:
        self.harness = harness
        self.can: Capabilities = harness.capabilities
        self.rules = rules

    # --- verdicts

    def fail(self, expected: str, seen: object) -> NoReturn:
        """The check has failed."""
        raise ConformanceError(self.rules, expected, seen)

    def holds(self, truth: bool, expected: str, seen: object) -> None:
        """Fail unless this is true."""
        if not truth:
            self.fail(expected, seen)

    def equal(self, seen: object, wanted: object, what: str) -> None:
        """Fail unless both are equal."""
        if seen != wanted:
            self.fail(f"{what}: {wanted!r}", repr(seen))

    def bodies(self, seen: Sequence[bytes], wanted: Sequence[bytes], what: str) -> None:
        """Fail unless these bodies arrived, each as often as wanted; in this order, where the transport keeps it."""
        same = list(seen) == list(wanted) if self.can.ordered else Counter(seen) == Counter(wanted)
        if not same:
            self.fail(f"{what}: {list(wanted)!r}", repr(list(seen)))

    def headers(self, delivery: Delivery[Any], wanted: Mapping[str, bytes], what: str) -> None:
        """Fail unless the delivery has these headers, byte for byte."""
        self.equal({name: delivery.headers.get(name) for name in wanted}, dict(wanted), what)

    def refuses(self, make: Callable[[], object], expected: str, *names: str) -> None:
        """Fail unless this raises a `ValueError` that names one of these."""
        try:
            made = make()
        except ValueError as error:
            self.holds(any(name in str(error) for name in names), f"{expected}, naming {' or '.join(names)}", error)
        else:
            self.fail(expected, repr(made))

    # --- queues

    async def queue(self) -> str:
        """The name of a fresh, empty queue."""
        name = f"conformance_{_RUN}_{next(_numbers)}"
        await self.harness.prepare(name)
        return name

    async def publish(self, broker: Broker, name: str, *bodies: bytes) -> None:
        """Publish these, one after the other."""
        publisher = self.harness.publisher(broker, name)
        for body in bodies:
            await publisher.publish(body)

    async def stored(self, *bodies: bytes) -> str:
        """A fresh queue with these in it, published over a connection of their own."""
        name, broker = await self.queue(), self.harness.broker()
        async with broker.connect():
            await self.publish(broker, name, *bodies)
        return name

    async def remaining(self, name: str) -> list[Delivery[Any]]:
        """What a new connection finds in this queue; it is consumed."""
        broker, recorder = self.harness.broker(), Recorder(self)
        async with open_runtime(Subscription(self.harness.source(broker, name), recorder)):
            await self.quiet(broker, name, recorder)
        return [delivery for delivery in recorder.deliveries if delivery.body != MARKER]

    async def remains(self, name: str, *wanted: bytes) -> None:
        """Fail unless a new connection finds exactly these."""
        found = [delivery.body for delivery in await self.remaining(name)]
        self.bodies(found, wanted if self.can.backlog else (), "a new connection finds")

    async def quiet(self, broker: Broker, name: str, recorder: Recorder) -> None:
        """Let arrive what is to arrive: publish a marker behind it, and wait for that."""
        await self.publish(broker, name, MARKER)
        await recorder.sees(MARKER)
        await trio.sleep(self.can.quiet)

    # --- subscriptions and links

    def subscription(self, broker: Broker, queue: str, recorder: Recorder, **options: Any) -> Subscription[Any]:
        """A subscription whose handler is the recorder."""
        return Subscription(self.harness.source(broker, queue), recorder, **options)

    @asynccontextmanager
    async def attached(
        self, broker: Broker, name: str, *, lease: float | None = None, limit: int = 50
    ) -> AsyncGenerator[tuple[Source[Any], Link[Any]], None]:
        """A link on this queue, for checks of a link itself."""
        source = self.harness.source(broker, name, lease=lease)
        async with source.attach("conformance", _lost, GOODBYE, limit=limit) as link:
            yield source, link

    async def take(self, link: Link[Any], number: int, room: int | None = None) -> list[Received[Any]]:
        """Receive so many; fail when they do not come, or when more are handed over than there was room for."""
        taken: list[Received[Any]] = []
        with trio.move_on_after(self.can.patience):
            while len(taken) < number:
                asked = min(room or number, number - len(taken))
                got = await link.receive(asked)
                self.holds(1 <= len(got) <= asked, f"receive({asked}) hands over 1 to {asked}", len(got))
                taken += got
        self.holds(len(taken) == number, f"{number} deliveries within {self.can.patience:g} s", len(taken))
        return taken

    async def say(self, source: Source[Any], link: Link[Any], outcome: Outcome, *received: Received[Any]) -> list[Any]:
        """Settle these with one call, in this order; the verdicts."""
        settlements = [Settlement(each, source.decide(outcome, each.delivery, Policy())) for each in received]
        verdicts = list(await link.settle(settlements))
        self.equal(len(verdicts), len(settlements), "verdicts, one for each")
        return verdicts


class Recorder:
    """A handler that remembers its deliveries. It answers by the script: outcomes by body, one per call, then `Ack`."""

    def __init__(
        self, trial: Trial, script: Mapping[bytes, Iterable[Outcome]] | None = None, *, beside: Recorder | None = None
    ) -> None:
        self._trial = trial
        self._beside = beside
        """Another one that remembers what this one handles, too."""
        self._script = {body: iter(outcomes) for body, outcomes in (script or {}).items()}
        self.deliveries: list[Delivery[Any]] = []
        self.times: list[float] = []
        """When each handler began, on trio's clock."""
        self._changed = trio.Event()

    async def __call__(self, delivery: Delivery[Any]) -> Outcome | None:
        """Handle one delivery."""
        await trio.lowlevel.checkpoint()
        return self.note(delivery)

    def note(self, delivery: Delivery[Any]) -> Outcome:
        """Remember one delivery; the script's answer to it."""
        self.deliveries.append(delivery)
        self.times.append(trio.current_time())
        self._changed.set()
        self._changed = trio.Event()
        if self._beside is not None:
            self._beside.note(delivery)
        return next(self._script.get(delivery.body, iter(())), Ack())

    @property
    def bodies(self) -> list[bytes]:
        """What was handled, in order."""
        return [delivery.body for delivery in self.deliveries]

    def of(self, body: bytes) -> list[Delivery[Any]]:
        """The deliveries of one message."""
        return [delivery for delivery in self.deliveries if delivery.body == body]

    async def sees(self, *bodies: bytes, within: float = 0.0) -> None:
        """Wait until each of these was handled, as often as it stands here; fail when they do not come."""
        wanted, patience = Counter(bodies), self._trial.can.patience + within
        with trio.move_on_after(patience):
            while wanted - Counter(self.bodies):
                await self._changed.wait()
            return
        missing = sorted((wanted - Counter(self.bodies)).elements())
        self._trial.fail(f"{missing!r} within {patience:g} s", f"handled were {self.bodies!r}")


@attrs.frozen
class Check:
    """One check. `await check(harness)` runs it; raises `ConformanceError`.

    Attributes:
        name: For reports.
        rules: The rules that it holds a transport to.
        says: The promise, in a sentence.
        function: Runs it.
        bounded: May it be cut off? Not where it waits for a thread, which an autojump clock does not see.
    """

    name: str
    rules: tuple[str, ...]
    says: str
    function: Callable[[Trial], Awaitable[None]]
    bounded: bool

    def __str__(self) -> str:
        return f"{'+'.join(self.rules)}-{self.name}"

    async def __call__(self, harness: Harness) -> None:
        """Run it; whatever goes wrong is a `ConformanceError`, what raised it its cause.

        Cancellation: what the check has opened is closed; its queues may hold messages.
        """
        if not harness.capabilities.virtual_time and isinstance(trio.lowlevel.current_clock(), trio.testing.MockClock):
            raise RuntimeError("this harness declares no virtual_time: run it on the real clock")
        rules = f"{', '.join(self.rules)} ({self.name})"
        limit = LIMIT * harness.capabilities.patience if self.bounded else math.inf
        try:
            with trio.fail_after(limit):
                await self.function(Trial(harness, rules))
        except ConformanceError:
            raise
        except Exception as error:
            raise ConformanceError(rules, f"no error while checking: {self.says}", _told(error)) from error


def check(*rules: str, bounded: bool = True) -> Callable[[Callable[[Trial], Awaitable[None]]], Check]:
    """Make a check of a function, whose docstring says what it promises."""

    def made(function: Callable[[Trial], Awaitable[None]]) -> Check:
        return Check(function.__name__, rules, (function.__doc__ or "").strip(), function, bounded)

    return made


def numbered(number: int, prefix: str = "m") -> list[bytes]:
    """So many different bodies."""
    return [f"{prefix}{each}".encode() for each in range(number)]


def _lost(received: Received[Any], line: Line) -> None:
    """Heard when the own connection of a delivery broke; a check that minds sees it by the verdict."""


def _told(error: BaseException) -> str:
    return "; ".join(f"{type(leaf).__name__}: {leaf}" for leaf in leaves(error))
