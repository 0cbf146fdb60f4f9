"""A network that fails on demand: a TCP proxy on loopback, in front of a server on loopback.

    async with faulty_network("127.0.0.1", 5672) as network:
        broker = AmqpBroker(network.url("amqp://guest:guest@127.0.0.1:5672"))

What a test does to it are plain calls that hold at once: when `freeze` returns, no byte passes any more.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import attrs
import trio

from links.abc import beside


@attrs.define(eq=False)
class Way:
    """One direction, of every connection."""

    moved: int = 0
    """Bytes that were passed on."""
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
        await trio.lowlevel.checkpoint_if_cancelled()  # who cancels has closed the sockets


@attrs.define(eq=False)
class ProxiedConnection:
    client: socket.socket
    server: socket.socket = attrs.field(factory=socket.socket)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    half_closed: bool = False

    def cut(self) -> None:
        self.scope.cancel()
        reset(self.client)
        reset(self.server)

    async def carry(self, way: Way, source: socket.socket, target: socket.socket) -> None:
        """Pass on what comes, and at last its end. Nothing is read while the way is frozen."""
        while True:
            await way.passable()
            await trio.lowlevel.wait_readable(source)
            if way.frozen:
                continue
            data = rest = memoryview(source.recv(65536))
            while rest:
                await way.passable()
                await trio.lowlevel.wait_writable(target)
                if target is self.client and self.half_closed:
                    break
                if not way.frozen:
                    sent = target.send(rest)
                    rest, way.moved = rest[sent:], way.moved + sent
            if not data:
                return target.shutdown(socket.SHUT_WR)


class FaultyNetwork:
    """Between any number of clients and one server."""

    def __init__(self, host: str, port: int) -> None:
        self.server = (host, port)
        self.port = 0
        self.connections = 0
        """How many were accepted so far, without those that were refused."""
        self.refused = 0
        self.open: set[ProxiedConnection] = set()
        """Those that are there now."""
        self.to_server, self.to_client = Way(), Way()
        self._refusing = False

    def url(self, url: str) -> str:
        """The server's URL, led through this network."""
        user, at, _ = urlsplit(url).netloc.rpartition("@")
        return urlsplit(url)._replace(netloc=f"{user}{at}127.0.0.1:{self.port}").geturl()

    def cut(self) -> None:
        """Reset every connection at both ends; what was on its way is lost. New ones are welcome."""
        while self.open:
            self.open.pop().cut()

    def freeze(self) -> None:
        """Move neither bytes nor ends nor resets, of connections that are accepted meanwhile, too."""
        self.to_server.freeze()
        self.to_client.freeze()

    def freeze_to_server(self) -> None:
        """Move nothing that clients send; the server does not see a new client."""
        self.to_server.freeze()

    def freeze_to_client(self) -> None:
        """Move nothing that the server sends."""
        self.to_client.freeze()

    def thaw(self) -> None:
        """Move everything again, also what came meanwhile."""
        self.to_server.thaw()
        self.to_client.thaw()

    def half_close(self) -> None:
        """Clients hear an end and then nothing more; what they send is passed on."""
        for connection in self.open:
            connection.half_closed = True
            with suppress(OSError):  # the client is gone
                connection.client.shutdown(socket.SHUT_WR)

    def refuse(self) -> None:
        """Reset new connections as soon as they are accepted."""
        self._refusing = True

    def admit(self) -> None:
        """Refuse no longer."""
        self._refusing = False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled; then everything is reset."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            self.port = listener.getsockname()[1]
            async with trio.open_nursery() as nursery:
                task_status.started()
                while True:
                    await trio.lowlevel.wait_readable(listener)
                    client, _ = listener.accept()
                    if self._refusing:
                        self.refused += 1
                        reset(client)
                    else:
                        self.connections += 1
                        connection = ProxiedConnection(client)
                        self.open.add(connection)
                        nursery.start_soon(self._serve, connection)

    async def _serve(self, connection: ProxiedConnection) -> None:
        client, server = connection.client, connection.server
        try:
            with connection.scope:
                for each in (client, server):
                    each.setblocking(False)
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await self.to_server.passable()
                with suppress(BlockingIOError):  # both ways wait until it is connected, or hear that it is not
                    server.connect(self.server)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(connection.carry, self.to_server, client, server)
                    nursery.start_soon(connection.carry, self.to_client, server, client)
                client.close()
                server.close()
        except* OSError:
            pass  # one end is gone: so is the other
        finally:
            self.open.discard(connection)
            connection.cut()


def reset(sock: socket.socket) -> None:
    """Close a socket so that its peer hears of a reset, not of an end."""
    if sock.fileno() != -1:  # not closed
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        trio.lowlevel.notify_closing(sock)
        sock.close()


@asynccontextmanager
async def faulty_network(host: str, port: int) -> AsyncGenerator[FaultyNetwork, None]:
    """A network in front of a server, for the block. An exception of the block leaves bare."""
    network = FaultyNetwork(host, port)
    async with beside(network.run):
        yield network
