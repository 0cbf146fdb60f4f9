"""What passes on a connection, frame by frame: a stream that passes bytes on and notes them.

Parsed is what links.amqp itself wrote or got, so that a test sees what a peer sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import attrs
import trio

from links.amqp.wire.frames import ATTACH, BEGIN, FLOW, TRANSFER, Frame, Frames
from links.amqp.wire.values import LIST, elements, items, scalar, skip

__all__ = ["ATTACH", "BEGIN", "DISPOSITION", "FLOW", "TRANSFER", "Seen", "Taking", "Trace", "Wire", "ids"]

DISPOSITION: Final = 0x15

_NAMES: Final[dict[int, tuple[str, ...]]] = {
    BEGIN: ("remote_channel", "next_outgoing_id", "incoming_window", "outgoing_window", "handle_max"),
    ATTACH: (
        "name", "handle", "is_receiver", "snd_settle_mode", "rcv_settle_mode", "source", "target",
        "unsettled", "incomplete_unsettled", "initial_delivery_count",
    ),
    FLOW: (
        "next_incoming_id", "incoming_window", "next_outgoing_id", "outgoing_window",
        "handle", "delivery_count", "link_credit", "available", "drain", "echo",
    ),
    TRANSFER: ("handle", "delivery_id", "delivery_tag", "format", "settled", "more"),
    DISPOSITION: ("is_receiver", "first", "last", "settled", "state"),
}  # fmt: skip
"""The fields of each performative (part 2.7) that a test may ask for."""


@attrs.frozen(eq=False)
class Seen:
    """One frame."""

    ours: bool
    """We wrote it."""
    connection: int
    """Which connection it passed on, 0 is the first."""
    channel: int
    code: int
    _fields: dict[str, Any]
    payload: bytes
    """Of a transfer."""
    at: float
    """On trio's clock."""

    def __getattr__(self, name: str) -> Any:
        """A field, None where it is missing; a described value is a pair of its code and a list or a value."""
        if name not in _NAMES[self.code]:
            raise AttributeError(name)
        return self._fields.get(name)

    @property
    def address(self) -> str | None:
        """Of an attach: the queue's end of the link."""
        terminus = self.source if self.is_receiver == self.ours else self.target
        address: str | None = terminus[1][0] if terminus else None
        return address

    def __repr__(self) -> str:
        return f"<{'>' if self.ours else '<'} {self.channel} {self.code:#x} {self._fields}>"


class Trace:
    """What was seen on connections, oldest first."""

    def __init__(self) -> None:
        self.frames: list[Seen] = []

    def __call__(self, *codes: int, ours: bool | None = None) -> list[Seen]:
        """The frames of these performatives that we wrote (`ours`), or got."""
        return [each for each in self.frames if each.code in codes and ours in (None, each.ours)]

    def __iter__(self) -> Iterator[Seen]:
        return iter(self.frames)


class Taking:
    """One of our receivers, as a peer sees it: of the first link to this address."""

    def __init__(self, trace: Trace, address: str) -> None:
        self._trace = trace
        ours = next(each for each in trace(ATTACH, ours=True) if each.is_receiver and each.address == address)
        begun = next(
            each
            for each in trace(BEGIN, ours=False)
            if each.connection == ours.connection and each.remote_channel == ours.channel
        )
        theirs = next(each for each in trace(ATTACH, ours=False) if each.name == ours.name)
        self._ours = ours.connection, ours.channel, ours.handle
        self._theirs = begun.connection, begun.channel, theirs.handle
        self.began_with: int = theirs.initial_delivery_count or 0
        self.capabilities: Any = ours.source[1][10] if len(ours.source[1]) > 10 else None

    @property
    def delivered(self) -> list[Seen]:
        """The first frame of each delivery."""
        return [each for each in self if each.code == TRANSFER]

    @property
    def flows(self) -> list[Seen]:
        return [each for each in self if each.code == FLOW and each.ours]

    @property
    def said(self) -> dict[int, list[tuple[bool, Any]]]:
        """By delivery: what we said of it, each with whether it settled it."""
        found: dict[int, list[tuple[bool, Any]]] = {}
        for each in self:
            if each.code == DISPOSITION:
                for number in ids(each):
                    found.setdefault(number, []).append((each.settled or False, each.state))
        return found

    def __iter__(self) -> Iterator[Seen]:
        """Flows of both sides, deliveries, and what we said, in order."""
        numbers: set[int] = set()
        for each in self._trace:
            where = each.connection, each.channel
            if each.code == FLOW and (*where, each.handle) == (self._ours if each.ours else self._theirs):
                yield each
            elif each.code == TRANSFER and not each.ours and (*where, each.handle) == self._theirs:
                if each.delivery_id is not None and each.delivery_id not in numbers:
                    numbers.add(each.delivery_id)
                    yield each
            elif each.code == DISPOSITION and each.ours and each.is_receiver and where == self._ours[:2]:
                yield each


def ids(disposition: Seen) -> range:
    """The deliveries that it speaks of."""
    last = disposition.first if disposition.last is None else disposition.last
    return range(disposition.first, last + 1)


class Wire(trio.abc.Stream):
    """A stream that notes what passes. What we write is noted before it is passed on."""

    def __init__(self, stream: trio.abc.Stream, trace: Trace, number: int) -> None:
        self.stream = stream
        self._trace = trace
        self._number = number
        self._out, self._in = Frames(), Frames()
        self._hears = trio.Event()
        self._hears.set()

    def deafen(self) -> None:
        """What comes waits here."""
        self._hears = trio.Event()

    def hear(self) -> None:
        """Go on."""
        self._hears.set()

    def _note(self, ours: bool, frames: Iterator[Frame]) -> None:
        for frame in frames:
            if frame.code in _NAMES:
                self._trace.frames.append(_seen(ours, self._number, frame))

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._note(True, self._out.feed(bytes(data)))
        await self.stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self.stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data = await self.stream.receive_some(max_bytes)
        await self._hears.wait()
        self._note(False, self._in.feed(bytes(data)))
        return data

    async def aclose(self) -> None:
        await self.stream.aclose()


def _seen(ours: bool, connection: int, frame: Frame) -> Seen:
    data = bytes(frame.raw)
    start = frame.begin - frame.start
    end = skip(data, start, len(data))
    at = skip(data, start + 1, end)
    values = [_value(data, each) for each in elements(data, at)]
    named = dict(zip(_NAMES[frame.code], values, strict=False))
    return Seen(ours, connection, frame.channel, frame.code, named, data[end:], trio.current_time())


def _value(data: bytes, at: int) -> Any:
    kind = data[at]
    if kind == 0:
        behind = skip(data, at + 1, len(data))
        return scalar(data, at + 1), _value(data, behind)
    if kind in (LIST, LIST + 0x10, 0x45):
        return [_value(data, each) for each in elements(data, at)]
    if kind in (0xC1, 0xD1):
        return {name: _value(data, each) for name, each in items(data, at).items()}
    return scalar(data, at)
