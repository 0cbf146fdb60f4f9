"""The supervised connection of one broker: one life after the other, until everybody who used it has ended.

Owns the broker's being open. Hears nobody. Tells the start-up. It runs in a shield of its own, so that a cancellation
from outside reaches the links first; its owner sets the deadline in its `finally`. Then the life ends with its goodbye.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import attrs
import trio

from actors.drain import HURRY, Drain
from actors.events import Tell
from actors.startup import StartUp
from actors.supervisor import Supervisor
from links.abc import Broker, beside
from links.errors import LinkError, LinkRefused
from settlement.groups import alone, raise_bare

__all__ = ["Connection", "connected"]


class Connection:
    """Keeps one broker connected.

    `goodbye`: seconds that a life has to close; `dependents`: who waits for it; `broke`: hears, after start-up, why it
    is gone, and why it does not come back.
    """

    def __init__(
        self,
        broker: Broker,
        goodbye: float,
        drain: Drain,
        tell: Tell,
        dependents: tuple[str, ...] = (),
        *,
        broke: Callable[[LinkError], None] | None = None,
    ) -> None:
        self.broker = broker
        self._goodbye = goodbye
        self._drain = drain
        self._dependents = dependents
        self._broke = broke
        self._supervisor = Supervisor(broker.name, tell)
        self._shield = trio.CancelScope(shield=True)
        self._lives = trio.CancelScope()

    async def run(self, startup: StartUp, needed: Callable[[], bool]) -> None:
        """Until `finish`. After a break during a drain the next life comes only while `needed()`.

        Raises `LinkGaveUp`, and bugs. A cancellation from outside is not heard before `finish`.
        """
        # DESIGN 4
        broker = self.broker

        async def life(attached: Callable[[], None], worked: Callable[[], None]) -> None:
            def started() -> None:
                attached()
                worked()  # a connection has done its work when it stands
                startup.attached(broker)

            await broker.run(self._goodbye, task_status=_Started(started))

        async def failed(error: LinkError) -> None:
            if not startup.gate.is_set():
                for dependent in self._dependents:
                    startup.failed(dependent)
                if isinstance(error, LinkRefused):
                    startup.refused(broker, self._named(error))
                    await trio.sleep_forever()  # the start-up raises it, when everybody was heard
                startup.failed(broker)
            elif self._broke is not None:
                self._broke(error)

        async def pause(delay: float) -> bool:
            if await self._drain.unless_requested(delay):
                return True
            await trio.sleep(min(delay, HURRY))  # there is little time left
            while not needed():  # noqa: ASYNC110 -- what subscriptions still have to publish
                await trio.sleep(HURRY)
            return True

        with self._shield, self._lives:
            await self._supervisor.run(life, failed=failed, pause=pause)

    def _named(self, error: LinkRefused) -> LinkRefused:
        """The refusal, with the subscriptions that wait for this broker."""
        if not self._dependents:
            return error
        named = LinkRefused(f"{error} (needed by {', '.join(self._dependents)})")
        named.__cause__ = error
        return named

    def finish(self, deadline: float) -> None:
        """Everybody who used it has ended: close it, by `deadline`."""
        self._lives.cancel()
        self._shield.deadline = min(self._shield.deadline, deadline)


@attrs.frozen
class _Started:
    """A task status that calls back."""

    call: Callable[[], None]

    def started(self, value: None = None) -> None:  # noqa: ARG002 -- trio.TaskStatus has it
        self.call()


@asynccontextmanager
async def connected(broker: Broker, *, goodbye: float = 5.0) -> AsyncGenerator[None, None]:
    """Keep a broker connected for the block, through weather: for publishers that no runtime reaches.

    Entered when it is connected; a runtime inside shares the connection and does not close it. Raises `LinkRefused`
    where the broker says no at first, `LinkGaveUp` after too much weather (the block is cancelled then), `RuntimeError`
    where somebody keeps that broker open already. An exception of the block leaves bare.

    Cancellation: the connection is closed within `goodbye`.

    Args:
        broker: A broker of any transport.
        goodbye: Seconds above 0 that closing may take; 5 by default.
    """
    connection = Connection(broker, goodbye, Drain(0.0, goodbye), Tell(()))
    startup = StartUp([broker])

    async def run(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connection.run, startup, lambda: True)
                try:
                    await startup.complete()
                    task_status.started()
                    await trio.sleep_forever()
                finally:
                    connection.finish(trio.current_time() + goodbye)
        except BaseExceptionGroup as group:
            raise_bare(alone(group))

    with broker.opened():
        async with beside(run):
            yield
