"""Moves bytes between a trio stream and an engine: the one task, with three of its own, that touches that engine.

It owns the stream. It hears the engine's events and hands each to `hear`, a plain function; it is told by `kick` and
`hurry` that an order was given. What a cancellation leaves: the stream is closed, without a goodbye; what was ordered
and not written is nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from links.amqp.engine.engine import Engine
from links.amqp.engine.events import Arrived, Closed, Condition, CreditGranted, Event, Opened
from links.errors import ConnectionBroken, LinkError, LinkRefused
from settlement.groups import alone, raise_bare

__all__ = ["LINGER", "Driver"]

LINGER: Final = 0.002
"""Seconds for which orders that are not urgent wait for others, so that equal dispositions become one frame."""
LAST_WORDS: Final = 1.0
"""Seconds for which an answer to the peer's close, or the reason of a failure, is tried to be written."""
_CHUNK: Final = 65536

_QUIET = (Arrived, CreditGranted)
"""Events after which proton itself has nothing to say."""


class Driver:
    """One connection's bytes."""

    def __init__(
        self, stream: trio.abc.Stream, engine: Engine, hear: Callable[[Event], None], *, linger: float = LINGER
    ) -> None:
        self.stream = stream
        self.engine = engine
        self.linger = linger
        self.pulls = 0
        """How often the engine was asked for bytes: what was ordered before the last time is with the stream."""
        self.over: LinkError | None = None
        """Why nothing more is moved."""
        self._hear = hear
        self._closing = False
        self._opened = False
        self._due = False
        self._urgent = False
        self._order = trio.Event()
        self._written = trio.Event()
        self._writing: trio.Event | None = None
        self._told = trio.Event()
        self._frames = trio.lowlevel.ParkingLot()
        self._scope = trio.CancelScope()
        self._cause: BaseException | None = None

    # --- orders

    def kick(self) -> None:
        """Something was ordered: write it within `linger`."""
        if not self._due:
            self._due = True
            self._order.set()

    def hurry(self) -> None:
        """Something was ordered: write it now, with all that is ordered in this tick."""
        if not self._urgent:
            self._due = self._urgent = True
            self._order.set()

    def close(self, condition: Condition | None = None) -> None:
        """Say goodbye: `run` returns when the peer has answered. Bound it with a scope round `run`."""
        self._closing = True
        self.engine.close(condition)
        self.hurry()

    def break_off(self, why: str, cause: BaseException | None = None) -> None:
        """Give the connection up: `run` raises `ConnectionBroken` at once, nothing more is written."""
        self._finish(ConnectionBroken(why), cause)
        self._scope.cancel()

    async def written(self, *, hurry: bool = True) -> None:
        """Wait until all that was ordered before is with the stream. Raises what ended the connection.

        Cancellation: it is written or not.
        """
        if self.over is not None:
            raise self.over
        if self._due:
            if hurry:
                self.hurry()
            await self._written.wait()
        elif self._writing is not None:
            await self._writing.wait()
        else:
            await trio.lowlevel.checkpoint()
        if self.over is not None:
            raise self.over

    async def next_frames(self, after: int) -> None:
        """Wait until the peer has sent more than `after` frames. Raises what ended the connection.

        Cancellation: nothing was done.
        """
        while self.engine.frames_received <= after and self.over is None:
            await self._frames.park()
        if self.over is not None:
            raise self.over

    # --- the tasks

    async def run(self) -> None:
        """Move bytes until the connection is over; returns where `close` was answered.

        Raises `LinkRefused` where the login failed or the peer speaks something else, `ConnectionBroken` with the
        peer's reason, and what `hear` raises.

        Cancellation: the stream is closed, and everybody who waits hears `ConnectionBroken`.
        """
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._read)
                    nursery.start_soon(self._write)
                    nursery.start_soon(self._tick)
        except BaseExceptionGroup as group:
            raise_bare(alone(group))
        finally:
            self._finish(ConnectionBroken("the connection was dropped by this side"), None)
            await trio.aclose_forcefully(self.stream)
        if self.over is not None and not self._is_goodbye():
            raise self.over from self._cause

    def _is_goodbye(self) -> bool:
        ended = self.engine.ended
        return self._closing and isinstance(ended, Closed) and ended.condition is None

    async def _read(self) -> None:
        engine, stream = self.engine, self.stream
        while self.over is None:
            try:
                data = await stream.receive_some(_CHUNK)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                self.break_off("the connection was cut", error)
                return
            if data:
                engine.receive_bytes(data)
            else:
                engine.receive_eof()
            if not self._opened:
                self.hurry()  # headers and SASL: answers without an event
            self._tell()
            if engine.blocked:
                self.kick()
            if not data and self.over is None:
                self.break_off("the peer has ended the stream")
                return
            if self._frames:
                self._frames.unpark_all()

    async def _write(self) -> None:
        engine, stream = self.engine, self.stream
        while True:
            if not self._due:
                self._order = trio.Event()
                await self._order.wait()
            if not self._urgent and self.linger:
                self._order = trio.Event()
                with trio.move_on_after(self.linger):
                    await self._order.wait()
            self._due = self._urgent = False
            self._writing, self._written = self._written, trio.Event()
            data = engine.data_to_send()
            self.pulls += 1
            self._tell()
            if data:
                try:
                    await stream.send_all(data)
                except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                    if self.over is None:
                        self.break_off("the connection was cut", error)
                    self._scope.cancel()
                    return
            self._writing.set()
            self._writing = None
            self.wrote()
            if self.over is not None and not self._due:
                self._scope.cancel()
                return

    async def _tick(self) -> None:
        while True:
            deadline = self.engine.tick(trio.current_time())
            self._tell()
            self.kick()
            self._told = trio.Event()
            with trio.move_on_at(float("inf") if deadline is None else deadline):
                await self._told.wait()

    # --- telling

    def _tell(self) -> None:
        engine = self.engine
        for event in engine.events():
            if not isinstance(event, _QUIET):
                self.kick()
                if isinstance(event, Opened):
                    self._opened = True
                    self._told.set()
            self._hear(event)
        ended = engine.ended
        if ended is not None and self.over is None:
            refused = not isinstance(ended, Closed) and ended.refused and not self._opened
            why = "the peer has closed the connection" if ended.condition is None else str(ended.condition)
            self._finish(LinkRefused(why) if refused else ConnectionBroken(why), None)
            self._scope.deadline = trio.current_time() + LAST_WORDS
            self.hurry()

    def _finish(self, why: LinkError, cause: BaseException | None) -> None:
        """Nothing is awaited any more."""
        if self.over is None:
            self.over, self._cause = why, cause
            self._ended()
            self._written.set()
            if self._writing is not None:
                self._writing.set()
            self._frames.unpark_all()

    def wrote(self) -> None:
        """All that was ordered before the last write is with the stream; for subclasses."""

    def _ended(self) -> None:
        """For those who wait on what a subclass offers."""
