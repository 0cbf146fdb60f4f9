"""The runtime: brokers ⊃ { supervised connections · subscriptions }, the drain, and what leaves when it fails.

Owns every connection it opened and every running. Hears `drain`. A cancellation from outside reaches the lives first,
then the copies, then the connections: 2 × `goodbye` in all.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable
from functools import partial

import trio

from actors.connection import Connection
from actors.drain import Drain
from actors.events import DrainBegan, Observer, Tell, log
from actors.forwarding import Forwarding, forwardings
from actors.running_subscription import RunningSubscription, Statistics
from actors.startup import StartUp
from actors.subscription import AnySubscription, BatchSubscription, Subscription
from links.abc import Broker, Publisher
from links.errors import LinkError
from settlement.groups import alone, leaves, raise_bare
from settlement.ledger import Ledger

__all__ = ["Runtime", "open_runtime"]


class Runtime:
    """Runs subscriptions until it is drained, cancelled, or fails. For one `run`; see `open_runtime` for a block.

    Constructing one does no I/O. Raises `ValueError` for no subscription, two of one name, and times out of range;
    `TypeError` for what is no subscription, and for an observer that is no plain function.

    Args:
        *subscriptions: 1 or more, each with a name of its own.
        grace: Seconds, 0 or more, that a drain gives to what is in hand; 15 by default.
        goodbye: Seconds above 0 for last tries and copies together, and once more for the exits; 5 by default.
        observers: Plain functions of an event (`actors.events`), called where it was learned; one that raises ends the
            runtime with `ObserverFailed`.

    Where delayed copies of a source are stored in a queue table (`Stored`), the runtime forwards what is due there by a
    subscription of its own, named after the table: `delays (stored)`; with a ledger and statistics like any other.

    Attributes:
        block: Set by `open_runtime`: a block that is cancelled where the run fails.
    """

    def __init__(
        self,
        *subscriptions: AnySubscription,
        grace: float = 15.0,
        goodbye: float = 5.0,
        observers: Iterable[Observer] = (),
    ) -> None:
        if not subscriptions:
            raise ValueError("a runtime needs 1 subscription or more")
        self._drain = Drain(grace, goodbye)
        self._tell = Tell(tuple(observers))
        self._subscriptions: dict[str, RunningSubscription] = {}
        for subscription in subscriptions:
            if not isinstance(subscription, Subscription | BatchSubscription):
                raise TypeError(f"a runtime runs subscriptions, each an argument of its own, not {subscription!r}")
            if subscription.name in self._subscriptions:
                raise ValueError(f"two subscriptions are named {subscription.name!r}: give one a name= of its own")
            self._add(subscription)
        for forwarding in forwardings(subscriptions):
            self._add(forwarding)
        self._ran = False
        self._home: trio.lowlevel.TrioToken | None = None
        """The `trio.run` that it runs in."""
        self._finished = trio.Event()
        self.block: trio.CancelScope | None = None

    def _add(self, subscription: AnySubscription) -> None:
        running = RunningSubscription(subscription, self._drain, self._tell)
        if isinstance(subscription.handler, Forwarding):
            subscription.handler.books = running.books
        self._subscriptions[subscription.name] = running

    def drain(self) -> None:
        """Begin a graceful stop: nothing more is taken, what is in hand is finished within `grace`. Idempotent.

        From another thread it is carried into the loop, and begins there a moment later.
        """
        if self._home is None or _in(self._home):
            self._begin_drain()
        else:
            with contextlib.suppress(trio.RunFinishedError):  # nothing is left to drain
                self._home.run_sync_soon(self._begin_drain, idempotent=True)

    def _begin_drain(self) -> None:
        if not self._drain.requested.is_set():
            self._drain.requested.set()
            self._tell(DrainBegan())

    @property
    def draining(self) -> bool:
        """Was `drain` called?"""
        return self._drain.requested.is_set()

    async def finished(self) -> None:
        """Wait until `run` has ended, well or not. Cancellation: nothing was done."""
        await self._finished.wait()

    def ledger(self, name: str) -> Ledger:
        """The books of a subscription as they stand; `KeyError` for a name that no subscription has."""
        if name not in self._subscriptions:
            raise KeyError(f"no subscription is named {name!r}; there are: {', '.join(self._subscriptions)}")
        return self._subscriptions[name].ledger

    def statistics(self) -> dict[str, Statistics]:
        """What each subscription is doing, by name."""
        return {name: running.statistics for name, running in self._subscriptions.items()}

    async def run(  # noqa: ASYNC128 -- `_run` calls started
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run until drained; reports started when every link is attached, or when a drain came before that.

        Raises a refusal at start-up bare, several as one `ExceptionGroup`; everything else as one flat group.

        Cancellation: every delivery in hand is left unsettled, waiting copies get one goodbye, then it is closed.
        """
        if self._ran:
            raise RuntimeError("a Runtime runs once: make another")
        self._ran = True
        self._home = trio.lowlevel.current_trio_token()
        startup: StartUp | None = None
        failed = True
        try:
            with contextlib.ExitStack() as opened:
                connections = self._connections()
                for connection in connections:
                    opened.enter_context(connection.broker.opened())
                startup = StartUp([*self._subscriptions, *(connection.broker for connection in connections)])
                await self._run(connections, startup, task_status.started)
            if self._tell.failure is not None:  # at the very end
                raise ExceptionGroup("an observer failed", [self._tell.failure])
            failed = False
        except BaseExceptionGroup as group:
            started = startup is not None and startup.gate.is_set()
            raise_bare(flat(group, bare=not started))
        finally:
            if failed and self.block is not None:
                self.block.cancel()
            self._finished.set()

    async def _run(self, connections: list[Connection], startup: StartUp, started: Callable[[], None]) -> None:
        async with trio.open_nursery() as outer:
            for connection in connections:
                outer.start_soon(connection.run, startup, self._publishing)
            try:
                async with trio.open_nursery() as clock:
                    clock.start_soon(self._tell.until_failed)
                    async with trio.open_nursery() as nursery:
                        starting = trio.CancelScope()
                        clock.start_soon(self._hear_the_drain, startup, starting)
                        for running in self._subscriptions.values():
                            nursery.start_soon(running.run, startup)
                        with starting:
                            await startup.complete()
                        started()
                        if starting.cancel_called:  # drained, and nothing was taken yet
                            nursery.cancel_scope.cancel()
                        else:
                            log.info("running: %s", ", ".join(self._subscriptions))
                    clock.cancel_scope.cancel()
            finally:
                deadline = trio.current_time() + self._drain.exit
                for connection in connections:
                    connection.finish(deadline)

    async def _hear_the_drain(self, startup: StartUp, starting: trio.CancelScope) -> None:
        drain = self._drain
        await drain.requested.wait()
        log.info("draining: %s", ", ".join(self._subscriptions))
        if not startup.gate.is_set():
            starting.cancel()
            return
        await trio.sleep(drain.grace)
        drain.grace_over.set()
        await trio.sleep(drain.goodbye)
        for running in self._subscriptions.values():
            running.stop()

    def _degrade(self, names: tuple[str, ...], error: LinkError) -> None:
        """Why these have no link: what their connection said last, such as a login that is refused now."""
        for name in names:
            running = self._subscriptions[name]
            running.books.degrade("the link", error, running)

    def _publishing(self) -> bool:
        return any(running.publishing for running in self._subscriptions.values())

    def _connections(self) -> list[Connection]:
        """The brokers that the subscriptions reach and nobody else keeps open."""
        # DESIGN 2
        dependents: dict[Broker, list[str]] = {}
        for name, running in self._subscriptions.items():
            dependents.setdefault(running.source.broker, []).append(name)
        for running in self._subscriptions.values():
            for broker in running.source.brokers():
                dependents.setdefault(broker, [])
            if isinstance(letter_to := running.subscription.policy.dead_letter, Publisher):
                dependents.setdefault(letter_to.broker, [])
        return [
            Connection(
                broker,
                self._drain.exit,
                self._drain,
                self._tell,
                tuple(names),
                broke=partial(self._degrade, tuple(names)),
            )
            for broker, names in dependents.items()
            if not broker.is_open
        ]


def _in(home: trio.lowlevel.TrioToken) -> bool:
    return trio.lowlevel.in_trio_run() and trio.lowlevel.current_trio_token() is home


def flat(group: BaseException, *, bare: bool = False) -> BaseException:
    """The leaves as one flat group, with `Cancelled` at most once; alone, `Cancelled` (or `bare`) as it is."""
    found = leaves(group)
    errors = [leaf for leaf in found if not isinstance(leaf, trio.Cancelled)]
    cancelled = [leaf for leaf in found if isinstance(leaf, trio.Cancelled)]
    if not errors:
        return cancelled[0]
    if bare and len(errors) == 1 and not cancelled:
        return errors[0]
    return BaseExceptionGroup("the runtime failed", [*errors, *cancelled[:1]])


@contextlib.asynccontextmanager
async def open_runtime(
    *subscriptions: AnySubscription, grace: float = 15.0, goodbye: float = 5.0, observers: Iterable[Observer] = ()
) -> AsyncGenerator[Runtime, None]:
    """Run subscriptions beside a block: entered when every link is attached, drained when the block ends normally.

    A block that raises or is cancelled drops everything: deliveries in hand are left unsettled. When the runtime
    fails, the block is cancelled; it is not cancelled by a drain.

    Raises as `Runtime` and `Runtime.run`: a refusal at start-up bare, several as one `ExceptionGroup`, later failures
    as one flat group; an exception of the block alone leaves bare.

    Cancellation: as `Runtime.run`.

    Args:
        *subscriptions: 1 or more, each with a name of its own.
        grace: Seconds, 0 or more, that a drain gives to what is in hand; 15 by default.
        goodbye: Seconds above 0 for last tries and copies together, and once more for the exits; 5 by default.
        observers: Plain functions of an event (`actors.events`), called where it was learned.

    Yields:
        The `Runtime`, which is running.
    """
    runtime = Runtime(*subscriptions, grace=grace, goodbye=goodbye, observers=observers)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.run)
            runtime.block = nursery.cancel_scope
            yield runtime
            runtime.drain()
    except BaseExceptionGroup as group:
        only = alone(group)
        raise_bare(flat(group) if only is group else only)
