"""The network that the tests of weather pull and freeze: it fails as it was told to, and at once."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import attrs
import pytest
import trio
import trio.testing

from tests.links.faulty_network import FaultyNetwork, faulty_network


@attrs.define
class Echo:
    """A server that gives everything back, and keeps what became of each client."""

    came: int = 0
    heard: bytes = b""
    ended: list[str] = attrs.field(factory=list[str])
    """`end` where the client ended its side, `reset` where the connection was reset; oldest first."""

    async def serve(self, stream: trio.SocketStream) -> None:
        self.came += 1
        try:
            async for data in stream:
                self.heard += data
                await stream.send_all(data)
            self.ended.append("end")
        except trio.BrokenResourceError:
            self.ended.append("reset")


@attrs.define
class Scene:
    echo: Echo
    network: FaultyNetwork
    clients: list[trio.SocketStream] = attrs.field(factory=list[trio.SocketStream])

    async def client(self, network: FaultyNetwork | None = None) -> trio.SocketStream:
        self.clients.append(await trio.open_tcp_stream("127.0.0.1", (network or self.network).port))
        return self.clients[-1]


@asynccontextmanager
async def scene() -> AsyncGenerator[Scene, None]:
    echo = Echo()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(trio.serve_tcp, echo.serve, 0)
            port = listeners[0].socket.getsockname()[1]
            async with faulty_network("127.0.0.1", port) as network:
                at = Scene(echo, network)
                try:
                    yield at
                finally:
                    for client in at.clients:
                        client.socket.close()
            nursery.cancel_scope.cancel()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await trio.sleep(0.002)


async def answered(stream: trio.SocketStream, data: bytes) -> bytes:
    """Say it, and take as many bytes."""
    await stream.send_all(data)
    return await taken(stream, len(data))


async def taken(stream: trio.SocketStream, count: int) -> bytes:
    got = bytearray()
    while len(got) < count:
        data = await stream.receive_some(count - len(got))
        assert data, "ended early"
        got += data
    return bytes(got)


async def how_it_ends(stream: trio.SocketStream) -> str:
    try:
        async for _ in stream:
            pass
    except trio.BrokenResourceError:
        return "reset"
    return "end"


async def is_turned_away(at: Scene) -> bool:
    """Is a new client's connect reset, or what it reads first? Which of the two is a race that the kernel decides."""
    try:
        return await how_it_ends(await at.client()) == "reset"
    except OSError:
        return True


async def test_bytes_and_ends_pass() -> None:
    async with scene() as at:
        one, other = await at.client(), await at.client()
        assert await answered(one, b"one") == b"one"
        assert await answered(other, b"other") == b"other"
        assert (at.network.connections, len(at.network.open)) == (2, 2)
        assert (at.network.to_server.moved, at.network.to_client.moved) == (8, 8)
        await one.send_eof()
        assert await how_it_ends(one) == "end"
        await until(lambda: at.echo.ended == ["end"] and len(at.network.open) == 1)
        assert await answered(other, b"still") == b"still"


async def test_more_than_a_socket_holds_passes_in_order() -> None:
    data = b"".join(b"%07d\n" % number for number in range(2**17))  # 1 MiB
    async with scene() as at, trio.open_nursery() as nursery:
        client = await at.client()
        nursery.start_soon(client.send_all, data)
        assert await taken(client, len(data)) == data
        assert (at.network.to_server.moved, at.network.to_client.moved) == (2**20, 2**20)


async def test_a_cut_resets_both_ends_and_new_connections_pass() -> None:
    async with scene() as at:
        clients = [await at.client() for _ in range(3)]
        for client in clients:
            assert await answered(client, b"x") == b"x"
        at.network.cut()
        assert not at.network.open
        assert [await how_it_ends(client) for client in clients] == ["reset", "reset", "reset"]
        await until(lambda: at.echo.ended == ["reset", "reset", "reset"])
        assert await answered(await at.client(), b"again") == b"again"
        assert at.network.connections == 4


@pytest.mark.parametrize("freeze", ["freeze", "freeze_to_server"])
async def test_frozen_before_the_server_nothing_arrives_until_it_thaws(freeze: str) -> None:
    async with scene() as at:
        client = await at.client()
        assert await answered(client, b"warm") == b"warm"
        getattr(at.network, freeze)()
        await client.send_all(b"cold")
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert (at.echo.heard, at.network.to_server.moved) == (b"warm", 4)
        at.network.thaw()
        assert await taken(client, 4) == b"cold"


async def test_frozen_before_the_client_the_server_still_hears() -> None:
    async with scene() as at:
        client = await at.client()
        assert await answered(client, b"warm") == b"warm"
        at.network.freeze_to_client()
        await client.send_all(b"cold")
        await until(lambda: at.echo.heard == b"warmcold")
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert at.network.to_client.moved == 4
        at.network.thaw()
        assert await taken(client, 4) == b"cold"


async def test_a_freeze_holds_what_waits_for_room() -> None:
    """A mover that waits until a full socket has room passes nothing on when there is some, if it froze meanwhile."""
    async with scene() as at:
        client = await at.client()
        with trio.move_on_after(10) as sending:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.send_all, bytes(32 * 2**20))  # nobody takes the echo: every socket fills
                moved = -1
                while moved != at.network.to_client.moved:
                    moved = at.network.to_client.moved
                    await trio.testing.wait_all_tasks_blocked(0.05)
                at.network.freeze()
                got = 0
                while got < moved:
                    got += len(await client.receive_some(2**20))
                await trio.testing.wait_all_tasks_blocked(0.05)
                assert (got, at.network.to_client.moved) == (moved, moved)
                sending.cancel()


async def test_frozen_and_then_cut_what_was_on_its_way_is_lost() -> None:
    async with scene() as at:
        client = await at.client()
        assert await answered(client, b"warm") == b"warm"
        at.network.freeze()
        await client.send_all(b"lost")
        at.network.cut()
        assert await how_it_ends(client) == "reset"
        await until(lambda: at.echo.ended == ["reset"])
        at.network.thaw()
        assert await answered(await at.client(), b"new") == b"new"
        assert at.echo.heard == b"warmnew"


async def test_thawed_and_cut_at_once_is_cut() -> None:
    async with scene() as at:
        clients = [await at.client() for _ in range(3)]
        for client in clients:
            assert await answered(client, b"x") == b"x"
        at.network.freeze()
        for client in clients:
            await client.send_all(b"x")
        await trio.testing.wait_all_tasks_blocked(0.01)
        at.network.thaw()
        at.network.cut()
        assert [await how_it_ends(client) for client in clients] == ["reset", "reset", "reset"]


async def test_a_client_that_comes_while_all_is_frozen_waits() -> None:
    async with scene() as at:
        at.network.freeze()
        client = await at.client()
        await client.send_all(b"x")
        await until(lambda: at.network.connections == 1)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert (at.echo.came, at.network.to_server.moved) == (0, 0)
        at.network.thaw()
        assert await taken(client, 1) == b"x"


async def test_frozen_no_end_passes() -> None:
    async with scene() as at:
        polite, rude = await at.client(), await at.client()
        for client in (polite, rude):
            assert await answered(client, b"x") == b"x"
        at.network.freeze()
        await polite.aclose()
        rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await rude.aclose()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert (at.echo.ended, len(at.network.open)) == ([], 2)
        at.network.thaw()
        await until(lambda: sorted(at.echo.ended) == ["end", "reset"] and not at.network.open)


async def test_half_closed_the_client_hears_an_end_and_is_still_heard() -> None:
    async with scene() as at:
        client = await at.client()
        assert await answered(client, b"x") == b"x"
        at.network.half_close()
        assert await how_it_ends(client) == "end"
        await client.send_all(b"y")
        await until(lambda: at.echo.heard == b"xy")
        await client.send_all(b"z")
        await until(lambda: at.echo.heard == b"xyz")
        assert (at.echo.ended, at.network.to_client.moved) == ([], 1)
        await client.aclose()
        await until(lambda: at.echo.ended == ["end"] and not at.network.open)


async def test_refused_connections_are_reset_and_open_ones_stay() -> None:
    async with scene() as at:
        old = await at.client()
        assert await answered(old, b"old") == b"old"
        at.network.refuse()
        assert await is_turned_away(at)
        assert await answered(old, b"old") == b"old"
        assert (at.network.connections, at.network.refused, at.echo.heard) == (1, 1, b"oldold")
        at.network.admit()
        assert await answered(await at.client(), b"new") == b"new"


async def test_without_a_server_the_client_is_reset() -> None:
    async with scene() as at:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        async with faulty_network("127.0.0.1", port) as network:
            assert await how_it_ends(await at.client(network)) == "reset"
            await until(lambda: not network.open)


async def fail_inside(at: Scene) -> None:
    async with faulty_network("127.0.0.1", at.network.port) as outer:
        assert await answered(await at.client(outer), b"x") == b"x"
        raise KeyError("mine")


async def test_the_end_of_the_block_resets_and_an_exception_of_the_block_leaves_bare() -> None:
    async with scene() as at:
        with pytest.raises(KeyError, match="mine"):
            await fail_inside(at)
        assert await how_it_ends(at.clients[0]) == "reset"
        await until(lambda: at.echo.ended == ["reset"])


async def test_a_url_is_led_through_it() -> None:
    async with scene() as at:
        port = at.network.port
        assert at.network.url("amqp://guest:a%40b@localhost:5672/%2f?x=1") == (
            f"amqp://guest:a%40b@127.0.0.1:{port}/%2f?x=1"
        )
        assert at.network.url("amqps://[::1]") == f"amqps://127.0.0.1:{port}"
