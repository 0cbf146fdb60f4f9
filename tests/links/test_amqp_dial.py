"""links.amqp.dial: connections and TLS handshakes, over loopback."""

from __future__ import annotations

import socket
import ssl
import traceback
from datetime import UTC, datetime
from typing import Any, NoReturn

import pytest
import trio
import trio.testing
import trustme

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from links.amqp.dial import check_context, dial
from links.amqp.embedded.broker import EmbeddedBroker
from links.amqp.engine.client_connection import ClientConnection
from links.amqp.engine.engine import Engine
from links.amqp.engine.settings import Login, Settings
from links.amqp.urls import Target, parse
from links.errors import ConnectionBroken, LinkRefused
from tests.links.dial_kit import (
    OTHER_BROKER,
    PASSWORD,
    USER,
    Peer,
    a_tls_server,
    closes_at_once,
    context_of,
    listening,
    resets,
    says,
    says_at_once,
    until_the_end,
)

pytestmark = pytest.mark.amqp

LONG_AGO = datetime(2001, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def trusting(ca: trustme.CA) -> ssl.SSLContext:
    """A client's context."""
    context = ssl.create_default_context()
    ca.configure_trust(context)
    return context


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[trio.SocketStream]:
    """The streams that were dialled."""
    streams: list[trio.SocketStream] = []
    really = trio.open_tcp_stream

    async def noted(host: str, port: int) -> trio.SocketStream:
        streams.append(await really(host, port))
        return streams[-1]

    monkeypatch.setattr(trio, "open_tcp_stream", noted)
    return streams


def is_closed(stream: trio.SocketStream) -> bool:
    return stream.socket.fileno() == -1


class Resolver(trio.abc.HostnameResolver):
    """A DNS that knows these addresses for every name; without any it says so, or never says anything."""

    def __init__(self, *addresses: tuple[str, int], answers: bool = True) -> None:
        self.addresses = addresses
        self.answers = answers

    async def getaddrinfo(self, *_: Any, **__: Any) -> Any:
        if not self.answers:
            await trio.sleep_forever()
        if not self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", each) for each in self.addresses]

    async def getnameinfo(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError


def behind_tls(context: ssl.SSLContext, broker: EmbeddedBroker) -> Peer:
    async def peer(stream: trio.SocketStream) -> None:
        tls = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
        await tls.do_handshake()
        await broker._serve(tls)

    return peer


# --- connections


async def greet(stream: trio.abc.Stream, login: Login) -> None:
    """Open an AMQP connection and close it."""
    connection = ClientConnection(stream, Engine(Settings("client", login=login)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.run)
        assert (await connection.opened()).properties["product"] == "trio-settlement embedded"
        connection.close()


async def test_a_plain_stream_leads_to_the_broker_and_delays_nothing(opened: list[trio.SocketStream]) -> None:
    """A-6.4"""
    async with EmbeddedBroker().serve() as url:
        stream = await dial(parse(url))
        assert stream is opened[0]
        assert opened[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        await greet(stream, Login())


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_a_tls_stream_leads_to_the_broker(
    host: str, ca: trustme.CA, trusting: ssl.SSLContext, opened: list[trio.SocketStream]
) -> None:
    """A-6.1, A-6.4: the handshake is done, by a certificate that was checked; PLAIN goes through it."""
    broker = EmbeddedBroker(users={USER: PASSWORD}, anonymous=False)
    async with broker.running(), listening(behind_tls(context_of(ca.issue_cert(host)), broker)) as port:
        stream = await dial(Target(True, host, port), trusting)
        assert isinstance(stream, trio.SSLStream)
        assert stream.version() in ("TLSv1.2", "TLSv1.3")
        assert stream.getpeercert() is not None
        assert opened[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        await greet(stream, Login("PLAIN", USER, PASSWORD))


async def test_a_name_may_end_with_a_dot(ca: trustme.CA, trusting: ssl.SSLContext) -> None:
    """As DNS has it; no certificate does."""
    async with listening(a_tls_server(context_of(ca.issue_cert("broker.example")))) as port:
        trio.socket.set_custom_hostname_resolver(Resolver(("127.0.0.1", port)))
        stream = await dial(Target(True, "broker.example.", port), trusting)
        assert await stream.receive_some() == b"hello"
        await stream.aclose()


async def test_an_end_that_tls_does_not_say_is_an_end(ca: trustme.CA, trusting: ssl.SSLContext) -> None:
    """AMQP says its own, and many a peer does not say TLS's."""

    async def peer(stream: trio.SocketStream) -> None:
        tls = trio.SSLStream(stream, context_of(ca.issue_cert("127.0.0.1")), server_side=True, https_compatible=True)
        await tls.send_all(b"bye")
        await stream.send_eof()
        await until_the_end(stream)

    async with listening(peer) as port:
        stream = await dial(Target(True, "127.0.0.1", port), trusting)
        assert await stream.receive_some() == b"bye"
        assert await stream.receive_some() == b""
        await stream.aclose()


async def test_nobody_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        for scheme in ("amqp", "amqps"):
            with pytest.raises(ConnectionBroken) as broken:
                await dial(parse(f"{scheme}://{USER}:{PASSWORD}@127.0.0.1:{port}/shop"))
            assert str(broken.value).startswith(f"{scheme}://127.0.0.1:{port}/shop: cannot connect: ")
            assert "refused" in str(broken.value)
            assert PASSWORD not in "".join(traceback.format_exception(broken.value))


async def test_nobody_knows_the_host() -> None:
    trio.socket.set_custom_hostname_resolver(Resolver())
    with pytest.raises(ConnectionBroken) as broken:
        await dial(parse("amqp://broker.example"))
    assert str(broken.value) == "amqp://broker.example:5672: cannot connect: Name or service not known"


async def test_one_of_several_addresses_is_enough() -> None:
    async with EmbeddedBroker().serve() as url:
        port = parse(url).port
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            trio.socket.set_custom_hostname_resolver(Resolver(bound.getsockname(), ("127.0.0.1", port)))
            await greet(await dial(parse("amqp://broker.example")), Login())


# --- handshakes that fail


async def refusal(port: int, context: ssl.SSLContext | None, opened: list[trio.SocketStream]) -> str:
    """Why a handshake failed, behind the name of the target. Nothing stays open."""
    target = parse(f"amqps://{USER}:{PASSWORD}@127.0.0.1:{port}")
    with pytest.raises(LinkRefused) as refused:
        await dial(target, context)
    assert [is_closed(stream) for stream in opened] == [True]
    assert PASSWORD not in "".join(traceback.format_exception(refused.value))
    name, _, why = str(refused.value).partition(": ")
    assert name == f"amqps://127.0.0.1:{port}"
    return why


async def test_a_certificate_that_nobody_vouches_for(ca: trustme.CA, opened: list[trio.SocketStream]) -> None:
    """Python's default context trusts what the system trusts."""
    async with listening(a_tls_server(context_of(ca.issue_cert("127.0.0.1")))) as port:
        why = await refusal(port, None, opened)
    assert why.startswith("its certificate is not trusted (")
    assert "ssl_context=ssl.create_default_context(cafile=" in why


async def test_a_certificate_that_has_expired(
    ca: trustme.CA, trusting: ssl.SSLContext, opened: list[trio.SocketStream]
) -> None:
    cert = ca.issue_cert("127.0.0.1", not_before=LONG_AGO, not_after=LONG_AGO.replace(year=2002))
    async with listening(a_tls_server(context_of(cert))) as port:
        why = await refusal(port, trusting, opened)
    assert why.startswith("its certificate is not trusted (certificate has expired)")


@pytest.mark.parametrize("named", ["broker.example", "127.0.0.2"])
async def test_a_certificate_of_another_host(
    named: str, ca: trustme.CA, trusting: ssl.SSLContext, opened: list[trio.SocketStream]
) -> None:
    async with listening(a_tls_server(context_of(ca.issue_cert(named)))) as port:
        why = await refusal(port, trusting, opened)
    assert why.startswith("its certificate is of another host (")


@pytest.mark.parametrize(
    ("peer", "why"),
    [
        (says(OTHER_BROKER), "it speaks no TLS (wrong version number): without TLS the URL is amqp://"),
        (says(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "it speaks no TLS (wrong version number): "),
        (says_at_once, "it speaks no TLS (wrong version number): "),
        (says(b"AMQP"), "it speaks no TLS or closed the connection during the handshake: "),
        (says(b""), "it speaks no TLS or closed the connection during the handshake: "),
        (closes_at_once, "it speaks no TLS or closed the connection during the handshake: "),
        (resets, "it speaks no TLS or closed the connection during the handshake: "),
        (
            says(b"\x15\x03\x03\x00\x02\x02\x46"),
            "the TLS handshake failed (tlsv1 alert protocol version): ssl_context=",
        ),
        (says(b"\x15\x03\x03\x00\x02\x02\x28"), "the TLS handshake failed (sslv3 alert handshake failure): ssl_conte"),
        (says(b"\x15\x03\x03\x00\x02\x02\x74"), "it wants a client certificate that it trusts (tlsv13 alert certific"),
    ],
)
async def test_a_handshake_that_fails_says_which_it_was(
    peer: Peer, why: str, trusting: ssl.SSLContext, opened: list[trio.SocketStream]
) -> None:
    async with listening(peer) as port:
        assert (await refusal(port, trusting, opened)).startswith(why)


@pytest.mark.parametrize(
    ("anonymous", "why"),
    [
        (False, "it speaks no TLS (wrong version number): "),
        (True, "it speaks no TLS or closed the connection during the handshake: "),
    ],
)
async def test_a_plain_amqp_listener_speaks_no_tls(
    anonymous: bool, why: str, trusting: ssl.SSLContext, opened: list[trio.SocketStream]
) -> None:
    """It answers by its own header, or closes at once."""
    async with EmbeddedBroker(users={USER: PASSWORD}, anonymous=anonymous).serve() as url:
        assert (await refusal(parse(url).port, trusting, opened)).startswith(why)


# --- client certificates


@pytest.mark.parametrize(
    ("version", "said"), [(ssl.TLSVersion.TLSv1_2, "TLSv1.2"), (ssl.TLSVersion.TLSv1_3, "TLSv1.3")]
)
async def test_a_client_certificate_is_shown(
    version: ssl.TLSVersion, said: str, ca: trustme.CA, trusting: ssl.SSLContext
) -> None:
    """A-6.2: what EXTERNAL stands on."""
    seen: list[Any] = []
    context = context_of(ca.issue_cert("127.0.0.1"))
    ca.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    context.maximum_version = version

    async def peer(stream: trio.SocketStream) -> None:
        tls = trio.SSLStream(stream, context, server_side=True)
        await tls.do_handshake()
        seen.append((tls.version(), tls.getpeercert()["subjectAltName"]))
        await tls.send_all(b"hello")

    ca.issue_cert("wren@nest.example").configure_cert(trusting)
    async with listening(peer) as port:
        stream = await dial(Target(True, "127.0.0.1", port), trusting)
        assert await stream.receive_some() == b"hello"
        await stream.aclose()
    assert seen == [(said, (("email", "wren@nest.example"),))]


# --- time and cancellation


async def test_a_connection_that_is_not_made_in_time(autojump_clock: trio.testing.MockClock) -> None:
    trio.socket.set_custom_hostname_resolver(Resolver(answers=False))
    with pytest.raises(ConnectionBroken) as broken:
        await dial(parse("amqp://broker.example"), within=7.0)
    assert str(broken.value) == "amqp://broker.example:5672: it is not connected within 7 s"
    assert trio.current_time() == 7.0


async def test_a_handshake_that_is_not_done_in_time(
    trusting: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    ours, theirs = trio.testing.memory_stream_pair()

    async def connected(*_: object) -> trio.abc.Stream:
        await trio.sleep(3)
        return ours

    monkeypatch.setattr(trio, "open_tcp_stream", connected)
    with pytest.raises(ConnectionBroken) as broken:
        await dial(parse("amqps://broker.example"), trusting, within=7.0)
    assert str(broken.value) == "amqps://broker.example:5671: its TLS handshake is not done within 7 s"
    assert trio.current_time() == 7.0
    with trio.fail_after(1), pytest.raises(trio.ClosedResourceError):
        await ours.receive_some()
    assert (await theirs.receive_some()).startswith(b"\x16\x03")  # and what was written before the end


class After(trio.abc.Instrument):
    """Cancels a scope after so many steps of the task that makes it."""

    def __init__(self, steps: int) -> None:
        self.left = steps
        self.scope = trio.CancelScope()
        self.task = trio.lowlevel.current_task()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.left -= 1
            if self.left == 0:
                self.scope.cancel()


@pytest.mark.parametrize("tls", [False, True])
async def test_cancelled_anywhere_nothing_stays_open(
    tls: bool, ca: trustme.CA, trusting: ssl.SSLContext, opened: list[trio.SocketStream]
) -> None:
    async with listening(a_tls_server(context_of(ca.issue_cert("127.0.0.1"))) if tls else until_the_end) as port:
        for steps in range(1, 100):
            opened.clear()
            instrument = After(steps)
            trio.lowlevel.add_instrument(instrument)
            stream: trio.abc.Stream | None = None
            with instrument.scope:
                stream = await dial(Target(tls, "127.0.0.1", port), trusting if tls else None)
            trio.lowlevel.remove_instrument(instrument)
            if stream is not None:
                break
            assert instrument.scope.cancelled_caught
            assert all(is_closed(each) for each in opened)
        else:
            pytest.fail("it never came through")
        assert steps > (4 if tls else 2)
        await trio.aclose_forcefully(stream)


# --- contexts


def test_a_context_is_looked_at_before_there_is_a_connection(trusting: ssl.SSLContext) -> None:
    check_context(parse("amqp://broker"), None)
    check_context(parse("amqps://broker"), None)
    check_context(parse("amqps://broker"), trusting)
    check_context(parse("amqps://[::1]"), trusting)
    with pytest.raises(ValueError, match="ssl_context is for TLS, so url must be amqps://…, not amqp://broker:5672"):
        check_context(parse("amqp://broker"), trusting)
    with pytest.raises(ValueError, match="ssl_context must be a client's"):
        check_context(parse("amqps://broker"), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))
