"""How psycopg's generators wait: with trio, for a socket that is ready.

psycopg writes and reads in generators that yield what they wait for, and are sent what came; who drives one decides how
to wait (https://www.psycopg.org/psycopg3/docs/advanced/async.html). Nothing here owns a socket. Cancelled while it
waits, nothing was sent to the generator: it can be driven on.
"""

from __future__ import annotations

import select
import time
from collections.abc import Generator
from typing import Any, Final, Generic, TypeVar

import trio
from psycopg import OperationalError
from psycopg.waiting import Ready, Wait

__all__ = ["Alone", "Driven", "Turns", "drive_connecting", "readable", "ready"]

R = TypeVar("R")

BUSY: Final = 0.005
"""Seconds for which a generator may go on without a wait: a large COPY meets none, and would stop everything else."""


async def ready(socket: int, wanted: Wait) -> Ready:
    """Wait until the socket is ready for one of what is wanted; at least one checkpoint where it is not at once.

    Raises `OperationalError` where somebody closes the connection meanwhile. Cancellation: nothing was done.
    """
    try:
        if wanted == Wait.R:
            await trio.lowlevel.wait_readable(socket)
            return Ready.R
        if wanted == Wait.W:
            await trio.lowlevel.wait_writable(socket)
            return Ready.W
        return _at_once(socket) or await _either(socket)
    except (trio.ClosedResourceError, OSError, ValueError) as error:
        raise OperationalError("the connection was closed") from error


def readable(socket: int) -> bool:
    """Has something come, or the end?"""
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return bool(poll.poll(0))


def _at_once(socket: int) -> Ready | None:
    """What it is ready for now: a query is nearly always taken at once."""
    poll = select.poll()
    poll.register(socket, select.POLLIN | select.POLLOUT)
    for _, events in poll.poll(0):
        if events & select.POLLNVAL:
            raise ValueError("the socket is closed")
        found = (Ready.R if events & ~select.POLLOUT else 0) | (Ready.W if events & select.POLLOUT else 0)
        return Ready(found)
    return None


async def _either(socket: int) -> Ready:
    found: list[Ready] = []

    async def first(wait: Any, what: Ready) -> None:
        await wait(socket)
        found.append(what)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(first, trio.lowlevel.wait_readable, Ready.R)
        nursery.start_soon(first, trio.lowlevel.wait_writable, Ready.W)
    return Ready.RW if len(found) > 1 else found[0]


class Turns:
    """Sees to it that other tasks get a turn: a COPY, or many statements, may never meet a wait."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def given(self) -> None:
        """Others have just had one."""
        self._since = time.monotonic()

    async def give(self) -> None:
        """A checkpoint, where the last one is a while ago."""
        if time.monotonic() - self._since > BUSY:
            await trio.lowlevel.checkpoint()
            self.given()


class Alone:
    """A lock as psycopg uses one. `trio.Lock` has a checkpoint in each turn; each statement has one of its own."""

    waits: int | None = None
    """The socket that a task waits for, of a connection that has this lock."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting = trio.lowlevel.ParkingLot()

    async def __aenter__(self) -> None:
        """Wait for it. Cancellation: it was not taken."""
        while self._taken:
            await self._waiting.park()
        self._taken = True

    async def __aexit__(self, *_: object) -> None:
        """The next one's turn."""
        self._taken = False
        self._waiting.unpark()


class Driven(Generic[R]):
    """A generator of one connection, which may be driven on after a cancellation."""

    def __init__(self, steps: Generator[Wait, Ready, R], pgconn: Any, turns: Turns) -> None:
        self._steps, self._pgconn, self._turns = steps, pgconn, turns
        self._socket = pgconn.socket
        self._wanted: Wait | None = None
        """What it waits for; None: it has not begun."""

    async def to_end(self) -> R:
        """What it returns, or raises. Cancellation: it stands where it stood; call this again to go on."""
        try:
            if self._wanted is None:
                await self._turns.give()
                self._wanted = next(self._steps)
            while True:
                if self._wanted == Wait.RW:
                    await self._turns.give()
                    came = await ready(self._socket, Wait.RW)
                else:
                    came = await ready(self._socket, self._wanted)
                    self._turns.given()
                if self._pgconn.pgconn_ptr is None:  # a step of libpq's on what was freed would end the process
                    raise OperationalError("the connection was closed")
                self._wanted = self._steps.send(came)
        except StopIteration as end:
            result: R = end.value
            return result


async def drive_connecting(steps: Generator[tuple[int, Wait], Ready, R]) -> R:
    """Drive a generator that connects, and says each time which socket it waits for.

    Cancellation: the generator is closed, and with it what it has opened.
    """
    try:
        socket, wanted = next(steps)
        while True:
            socket, wanted = steps.send(await ready(socket, wanted))
    except StopIteration as end:
        result: R = end.value
        return result
    finally:
        steps.close()
