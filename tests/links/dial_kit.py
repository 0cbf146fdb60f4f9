"""What the tests of links.amqp.dial stand on: peers on loopback that are not what a client hopes for."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final, TypeAlias

import trio
import trustme

USER, PASSWORD = "wren", "hush7"
"""In no error."""
OTHER_BROKER: Final = b"AMQP\x00\x00\x09\x01"

Peer: TypeAlias = Callable[[trio.SocketStream], Awaitable[None]]


def context_of(cert: trustme.LeafCert) -> ssl.SSLContext:
    """A server's context."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    cert.configure_cert(context)
    return context


@asynccontextmanager
async def listening(peer: Peer) -> AsyncGenerator[int, None]:
    """A port on loopback, for the block."""

    async def tolerant(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            await peer(stream)

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        await nursery.start(trio.serve_listeners, tolerant, listeners)
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


def a_tls_server(context: ssl.SSLContext) -> Peer:
    """As OpenSSL does it, with its alerts, which trio does not send; it says "hello" and stays to the client's end.

    A client that speaks no TLS it leaves without a word.
    """

    async def peer(stream: trio.SocketStream) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = context.wrap_bio(incoming, outgoing, server_side=True)
        wants_more = True
        while wants_more:
            wants_more = False
            try:
                server.do_handshake()
                server.write(b"hello")
            except ssl.SSLWantReadError:
                wants_more = True
            except ssl.SSLError:
                pass
            if outgoing.pending:
                await stream.send_all(outgoing.read())
            if wants_more and not incoming.write(await stream.receive_some()):
                return
        if server.version() is not None:
            await until_the_end(stream)

    return peer


async def until_the_end(stream: trio.abc.ReceiveStream) -> None:
    while await stream.receive_some():
        pass


def says(answer: bytes, *, stays: bool = False) -> Peer:
    """It hears something, says this, and goes, or stays and is mute."""

    async def peer(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(answer)
        if stays:
            await until_the_end(stream)

    return peer


async def says_at_once(stream: trio.SocketStream) -> None:
    await stream.send_all(b"220 mail.example ESMTP\r\n")
    await until_the_end(stream)


async def closes_at_once(stream: trio.SocketStream) -> None:
    """The other end sees an end or a reset, which is a race."""


async def resets(stream: trio.SocketStream) -> None:
    await stream.receive_some()
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    stream.socket.close()
