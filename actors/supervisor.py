"""Lives of one thing, one after the other: bad weather starts the next one, too much of it gives up, a bug propagates.

Owns the history of restarts. Hears the life's exception. Tells observers and the start-up. A cancellation ends the
life (which cleans up after itself) and leaves nothing behind.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import cast

import trio

from actors.errors import LinkGaveUp
from actors.events import Attached, Broke, Tell, log
from actors.restarts import GiveUp, Restarts
from links.errors import ConnectionBroken, LinkBroken, LinkError, LinkRefused
from settlement.groups import leaves, raise_bare

__all__ = ["WEATHER", "Supervisor"]

WEATHER = (LinkBroken, ConnectionBroken, LinkRefused)
"""What a life may end in without being a bug. A refusal is weather after start-up."""
# DESIGN 4


class Supervisor:
    """Supervises a link or a connection; `actors.link` and `actors.connection` say what a life of theirs is."""

    def __init__(self, name: str, tell: Tell) -> None:
        self.name = name
        self.restarts = 0
        self.attached = False
        self._tell = tell

    async def run(
        self,
        life: Callable[[Callable[[], None], Callable[[], None]], Awaitable[None]],
        *,
        failed: Callable[[LinkError], Awaitable[None]],
        pause: Callable[[float], Awaitable[bool]],
        reconnected: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Run lives until one returns, `pause` says that no other shall follow, or it is enough.

        `life(attached, worked)` calls `attached` when it has, and `worked` when it has done one thing since.
        `failed(error)` hears each break before anything is decided, and may raise or stay. `pause(delay)` waits, False
        means: no further life. `reconnected()` waits for a life of the connection, which spends no patience; given for
        links, whose supervisor does not count a `ConnectionBroken`.

        Raises `LinkGaveUp` from the last break; everything that is no weather as it is.
        """
        history = Restarts(trio.current_time())

        def attached() -> None:
            self.attached = True
            history.attached()
            self._tell(Attached(self.name))

        while True:
            if reconnected is not None:
                before = trio.current_time()
                await reconnected()
                history.excused(trio.current_time() - before)
            try:
                await life(attached, history.worked)
                return
            except WEATHER as error:
                broken: LinkError = error
            except BaseExceptionGroup as group:
                broken = _weather(group)
            finally:
                self.attached = False
            await failed(broken)
            if reconnected is not None and isinstance(broken, ConnectionBroken):
                delay = None
                history.excuse(trio.current_time())
            else:
                decision = history.broke(trio.current_time(), dice=random.random())  # noqa: S311
                if isinstance(decision, GiveUp):
                    raise LinkGaveUp(self.name, f"{decision.why}; at last: {broken}") from broken
                delay = decision.delay
            level = log.error if isinstance(broken, LinkRefused) else log.warning
            when = "with the connection" if delay is None else f"in {delay:.2f} s"
            said = str(broken)
            level("%s; next life %s", said if said.startswith(f"{self.name}:") else f"{self.name}: {said}", when)
            self._tell(Broke(self.name, broken, delay))
            # a link whose connection is gone still pauses a little, so that it cannot spin while the broker is leaving
            if not await pause(0.01 if delay is None else delay):
                return
            self.restarts += 1


def _weather(group: BaseExceptionGroup[BaseException]) -> LinkError:
    """The break that a group stands for; raises what else is in it, never the whole, never losing a `Cancelled`."""
    weather, rest = group.split(WEATHER)
    if rest is not None:
        raise_bare(rest)
    assert weather is not None  # noqa: S101 -- split gives both halves or one
    found = leaves(weather)
    # the connection's break explains the link's
    return next((leaf for leaf in found if isinstance(leaf, ConnectionBroken)), cast("LinkError", found[0]))
