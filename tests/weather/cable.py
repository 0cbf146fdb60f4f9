"""A cable between a client and a broker in this process, in virtual time: bytes take their time, stay away, are lost.

What was sent and has not come through when the cable is cut never comes: it was written, and nobody has seen it.
"""

from __future__ import annotations

from collections import deque

import attrs
import trio

__all__ = ["Cable"]


@attrs.define
class Way:
    """One direction."""

    frozen: bool = False
    _thawed: trio.Event = attrs.field(factory=trio.Event)

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        self._thawed.set()
        self._thawed = trio.Event()

    async def passable(self) -> None:
        while self.frozen:
            await self._thawed.wait()


class Cable(trio.abc.Stream):
    """The client's end, over its end of a pair of memory streams. `carry` is to be run beside it."""

    def __init__(self, stream: trio.abc.Stream, latency: float = 0.0) -> None:
        assert isinstance(stream, trio.StapledStream)
        self._stream = stream
        self.latency = latency
        """Seconds, each way."""
        self.out, self.back = Way(), Way()
        self.is_cut = False
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._more = trio.Event()

    def cut(self) -> None:
        """Both ends hear of it at once; what is under way is lost."""
        self.is_cut = True
        self._stream.send_stream.close()
        self._stream.receive_stream.close()
        for way in (self.out, self.back):
            way.thaw()
        self._more.set()

    async def carry(self) -> None:
        """Bring what was sent to the broker, until the cable is cut."""
        while not self.is_cut:
            if not self._under_way:
                self._more = trio.Event()
                await self._more.wait()
                continue
            due, data = self._under_way.popleft()
            await trio.sleep_until(due)
            await self.out.passable()
            try:
                await self._stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        if self.is_cut:
            raise trio.BrokenResourceError
        self._under_way.append((trio.current_time() + self.latency, bytes(data)))
        self._more.set()

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        try:
            data = await self._stream.receive_some(max_bytes)
        except trio.ClosedResourceError:
            raise trio.BrokenResourceError from None
        if self.latency:
            await trio.sleep(self.latency)
        await self.back.passable()
        if self.is_cut:
            raise trio.BrokenResourceError
        return data

    async def aclose(self) -> None:
        self.cut()
        await trio.lowlevel.checkpoint()
