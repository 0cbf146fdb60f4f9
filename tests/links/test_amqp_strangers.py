"""links.amqp.dial.explain: what a connection raises where the peer is a stranger, or does not let this client in."""

from __future__ import annotations

import ssl
import traceback

import pytest
import trio
import trustme

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from links.amqp.dial import dial, explain
from links.amqp.embedded.broker import EmbeddedBroker
from links.amqp.engine.client_connection import ClientConnection
from links.amqp.engine.engine import Engine
from links.amqp.engine.settings import Login, Settings
from links.amqp.urls import Target, parse
from links.errors import ConnectionBroken, LinkError, LinkRefused
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
)

pytestmark = pytest.mark.amqp

WRONG = "hush8"
"""A password that is in no error, either."""


async def explained(stream: trio.abc.Stream, target: Target, login: Login, idle_timeout: float = 30.0) -> LinkError:
    """What ends a connection that does not come to be."""
    connection = ClientConnection(stream, Engine(Settings("client", target.hostname, login, idle_timeout)))
    try:
        with trio.fail_after(30):
            await connection.run()
    except LinkError as error:
        assert connection.remote is None
        try:
            raise explain(error, target, login, opened=False) from error
        except LinkError as said:
            return said
    raise AssertionError("the peer answered")


PLAIN = Login("PLAIN", USER, PASSWORD)
NO_AMQP = "the peer does not speak AMQP 1.0 with SASL: it answers "
GONE = "the peer closed the connection before it said anything; if it speaks TLS, use amqps://"


@pytest.mark.parametrize(
    ("peer", "kind", "why"),
    [
        (says(b"\x15\x03\x03\x00\x02\x02\x0a"), LinkRefused, "the peer speaks TLS: use amqps://"),
        (says(b"\x15\x03\x01"), LinkRefused, "the peer speaks TLS: use amqps://"),
        (
            says(b"HTTP/1.1 400 Bad Request\r\nX-Quote: '[\\x41]'\r\n\r\n" + b"x" * 5000),
            LinkRefused,
            "the peer speaks HTTP: this may be the port of its management",
        ),
        (
            says(OTHER_BROKER),
            LinkRefused,
            "the peer speaks AMQP 0-9-1 alone: it needs its support for AMQP 1.0 turned on, or this is another port",
        ),
        (
            says(b"AMQP\x00\x01\x00\x00"),
            LinkRefused,
            NO_AMQP + "b'AMQP\\x00\\x01\\x00\\x00'",
        ),
        (
            says_at_once,
            LinkRefused,
            NO_AMQP + "b'220 mail.example'",
        ),
        (
            says(bytes(range(7, 250))),
            LinkRefused,
            NO_AMQP + r"b'\x07\x08\t\n\x0b\x0c\r\x0e\x0f\x10\x11\x12\x13\x14\x15\x16'",
        ),
        (
            says(b"'\xff\x00\\x41\n[]", stays=True),
            LinkRefused,
            NO_AMQP + r'''b"'\xff\x00\\x41\n[]"''',
        ),
        (says(b""), ConnectionBroken, GONE),
        (
            says(b"AMQP\x03\x01\x00\x00"),
            ConnectionBroken,
            "the peer has hung up, without a close",
        ),
        (
            says(b"AMQP\x03\x01\x00\x00" + bytes(range(7, 60))),
            ConnectionBroken,
            "amqp:connection:framing-error: malformed frame",
        ),
        (resets, ConnectionBroken, "the connection was cut; if it speaks TLS, use amqps://"),
    ],
)
async def test_a_stranger_is_told_by_its_answer(peer: Peer, kind: type[LinkError], why: str) -> None:
    """A-6.5: something else is a refusal, a sudden end is weather. No error shows a credential."""
    async with listening(peer) as port:
        target = parse(f"amqp://{USER}:{PASSWORD}@127.0.0.1:{port}")
        said = await explained(await dial(target), target, PLAIN)
    assert (type(said), str(said)) == (kind, f"amqp://127.0.0.1:{port}: {why}")
    told = "".join(traceback.format_exception(said))
    assert USER not in told
    assert PASSWORD not in told


@pytest.mark.parametrize("answer", [b"", b"AMQP", b"AMQP\x03\x01\x00\x00"], ids=["none", "half a one", "an echo"])
async def test_silence_is_weather(answer: bytes) -> None:
    """And nobody gets a password who does not ask for it."""
    heard = bytearray()

    async def peer(stream: trio.SocketStream) -> None:
        await stream.send_all(answer)
        while data := await stream.receive_some():
            heard.extend(data)

    async with listening(peer) as port:
        target = Target(False, "127.0.0.1", port)
        said = await explained(await dial(target), target, PLAIN, idle_timeout=0.3)
    assert isinstance(said, ConnectionBroken)
    assert str(said).startswith(f"{target.name}: the peer does not answer (amqp:resource-limit-exceeded: ")
    assert heard == b"AMQP\x03\x01\x00\x00"


async def test_a_peer_that_closes_at_once_may_be_one_that_speaks_tls() -> None:
    async with listening(closes_at_once) as port:
        target = Target(False, "127.0.0.1", port)
        said = await explained(await dial(target), target, PLAIN)
    assert isinstance(said, ConnectionBroken)
    assert str(said).endswith("; if it speaks TLS, use amqps://")


async def test_openssl_ends_a_stream_that_is_no_tls_without_an_alert() -> None:
    """So that there is no more than a hint; Erlang, and so RabbitMQ, sends one."""
    async with listening(a_tls_server(context_of(trustme.CA().issue_cert("127.0.0.1")))) as port:
        target = Target(False, "127.0.0.1", port)
        said = await explained(await dial(target), target, PLAIN)
    assert (type(said), str(said)) == (ConnectionBroken, f"amqp://127.0.0.1:{port}: {GONE}")


@pytest.mark.parametrize(
    ("users", "login", "why"),
    [
        ({USER: PASSWORD}, Login("PLAIN", USER, WRONG), "the peer has refused the login by PLAIN ("),
        ({USER: PASSWORD}, Login("PLAIN", "robin", PASSWORD), "the peer has refused the login by PLAIN ("),
        ({USER: PASSWORD}, Login("ANONYMOUS"), "the peer offers no login by ANONYMOUS: "),
        ({USER: PASSWORD}, Login("EXTERNAL"), "the peer offers no login by EXTERNAL: "),
        (None, Login("PLAIN", USER, PASSWORD), "the peer offers no login by PLAIN: "),
    ],
)
async def test_a_login_that_fails_is_a_refusal(users: dict[str, str] | None, login: Login, why: str) -> None:
    """A-6.2, A-6.5: the mechanism is pinned, and what the error says is which, never who."""
    async with EmbeddedBroker(users=users, anonymous=users is None).serve() as url:
        target = parse(url)
        said = await explained(await dial(target), target, login)
    assert isinstance(said, LinkRefused)
    assert str(said).startswith(f"{target.name}: {why}")
    told = "".join(traceback.format_exception(said))
    for secret in (USER, "robin", PASSWORD, WRONG):
        assert secret not in told


def test_what_ends_an_open_connection_gets_the_name_and_no_guesses() -> None:
    target = Target(False, "broker", 5672, "shop")
    for error in (ConnectionBroken("the connection was cut"), LinkRefused("amqp:not-found")):
        said = explain(error, target, PLAIN, opened=True)
        assert (type(said), str(said)) == (type(error), f"amqp://broker:5672/shop: {error}")


CUT = "the connection was cut"
ABORTED = "the peer has hung up, without a close"
NO_SHOP = "RabbitMQ does so where the user has no virtual host 'a/b'"


@pytest.mark.parametrize(
    ("target", "said", "hints"),
    [
        (Target(False, "broker", 5672), CUT, "; if it speaks TLS, use amqps://"),
        (Target(True, "broker", 5671), CUT, "; a peer that wants a client certificate does so"),
        (Target(False, "broker", 5672, "a/b"), CUT, f"; if it speaks TLS, use amqps://; {NO_SHOP}"),
        (Target(False, "broker", 5672), ABORTED, ""),
        (Target(False, "broker", 5672, "a/b"), ABORTED, f"; {NO_SHOP}"),
    ],
)
def test_a_sudden_end_before_the_connection_is_open_may_mean_this(target: Target, said: str, hints: str) -> None:
    """RabbitMQ 4.0 and 4.3 cut the connection without a word where there is no such virtual host."""
    assert str(explain(ConnectionBroken(said), target, PLAIN, opened=False)) == f"{target.name}: {said}{hints}"


def test_what_a_peer_says_for_itself_stands_as_it_is() -> None:
    said = explain(LinkRefused("amqp:not-allowed: a timeout of yours"), parse("amqp://broker"), PLAIN, opened=False)
    assert str(said) == "amqp://broker:5672: amqp:not-allowed: a timeout of yours"


@pytest.mark.parametrize("stranger", [False, True])
async def test_a_client_certificate_that_is_missing_or_not_trusted(stranger: bool) -> None:
    """TLS 1.3 says so behind the handshake, so that the connection hears it."""
    ca, trusting = trustme.CA(), ssl.create_default_context()
    ca.configure_trust(trusting)
    context = context_of(ca.issue_cert("127.0.0.1"))
    ca.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if stranger:
        trustme.CA().issue_cert("wren@nest.example").configure_cert(trusting)
    async with listening(a_tls_server(context)) as port:
        target = Target(True, "127.0.0.1", port)
        said = await explained(await dial(target, trusting), target, Login("EXTERNAL"))
    assert isinstance(said, LinkRefused)
    assert str(said).startswith(f"amqps://127.0.0.1:{port}: it wants a client certificate that it trusts (tlsv1")
