"""From a target to a stream of bytes, and what to say where the peer turns out to be a stranger.

TLS is trio's, in front of proton. A failed handshake says which it was, and the way out; `explain` does the same for
what a connection raises before the peer has opened the connection, where proton knows only that bytes were wrong.
"""

from __future__ import annotations

import re
import ssl
from typing import Final

import trio

from links.amqp.engine.settings import Login
from links.amqp.urls import Target
from links.errors import ConnectionBroken, LinkError, LinkRefused
from settlement.groups import leaves

__all__ = ["check_context", "dial", "explain"]

_OF_ANOTHER_HOST: Final = frozenset({62, 64})
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""
_NO_TLS: Final = frozenset(
    {
        "HTTPS_PROXY_REQUEST",
        "HTTP_REQUEST",
        "PACKET_LENGTH_TOO_LONG",
        "RECORD_LAYER_FAILURE",  # OpenSSL 3.2 and newer, for some of the others
        "UNKNOWN_PROTOCOL",
        "WRONG_VERSION_NUMBER",
    }
)
"""What OpenSSL finds wrong with an answer that is no TLS."""

_STRANGERS: Final = {
    b"\x15\x03": "TLS: use amqps://",
    b"\x16\x03": "TLS: use amqps://",
    b"HTTP/": "HTTP: this may be the port of its management",
    b"AMQP\x00\x00\x09": "AMQP 0-9-1 alone: it needs its support for AMQP 1.0 turned on, or this is another port",
    b"AMQP\x01\x01": "AMQP 0-10 alone: it needs its support for AMQP 1.0 turned on, or this is another port",
}
"""By the first bytes of an answer: what its speaker speaks. The first two are an alert and a handshake."""
_SILENCE: Final = ("local-idle-timeout expired", "nothing was heard")
_NOTHING_SAID: Final = "no protocol header found (connection aborted)"
_ABORTED: Final = "the peer has hung up, without a close"
_ENDS: Final = (_ABORTED, "the connection was cut", "the peer has ended the stream")
"""What proton and the driver say of a peer that goes without a reason; proton's means that it had answered as AMQP."""
_SHOWN: Final = 16
"""Bytes of an answer that are shown."""


def check_context(target: Target, ssl_context: ssl.SSLContext | None) -> None:
    """Refuse a context that cannot be used, before there is any IO: `ValueError` that says what is legal."""
    if ssl_context is None:
        return
    if not target.tls:
        raise ValueError(f"ssl_context is for TLS, so url must be amqps://…, not {target.name}")
    try:
        ssl_context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=target.host)
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(f"ssl_context must be a client's: {error}") from error


async def dial(target: Target, ssl_context: ssl.SSLContext | None = None, *, within: float = 10.0) -> trio.abc.Stream:
    """Connect, by TLS where the target says so: certificate and host name checked, the handshake done.

    `ssl_context`: instead of Python's default; `within`: seconds for all of it. Nagle's delay is off: trio turns it off
    for every TCP stream.

    Raises `ConnectionBroken` for a host that is not known, does not listen, or is not done in time; `LinkRefused` for a
    failed handshake, also for one in which the peer closes or resets the connection: a plain listener does either.

    Cancellation: nothing stays open.
    """
    doing = "it is not connected"
    try:
        with trio.fail_after(within):
            if not target.tls:
                return await _connect(target)
            if ssl_context is None:  # reads files, for 15 ms
                ssl_context = await trio.to_thread.run_sync(ssl.create_default_context)
            stream = await _connect(target)
            doing = "its TLS handshake is not done"
            return await _shake_hands(target, stream, ssl_context)
    except trio.TooSlowError as error:
        raise ConnectionBroken(f"{target.name}: {doing} within {within:g} s") from error


async def _connect(target: Target) -> trio.SocketStream:
    try:
        return await trio.open_tcp_stream(target.host, target.port)
    except OSError as error:  # of several addresses there is a group of them
        each = [str(leaf.strerror if isinstance(leaf, OSError) else leaf) for leaf in leaves(error.__cause__ or error)]
        raise ConnectionBroken(f"{target.name}: cannot connect: {'; '.join(dict.fromkeys(each))}") from error


async def _shake_hands(target: Target, stream: trio.SocketStream, context: ssl.SSLContext) -> trio.abc.Stream:
    host = target.host.removesuffix(".")
    try:
        # https_compatible: AMQP's close says where the stream ends, and many a peer does not say it by TLS as well
        tls = trio.SSLStream(stream, context, server_hostname=host, https_compatible=True)
        await tls.do_handshake()
    except trio.BrokenResourceError as error:
        await trio.aclose_forcefully(stream)
        raise LinkRefused(f"{target.name}: {_why_no_tls(error.__cause__)}") from error
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return tls


def _why_no_tls(error: BaseException | None) -> str:
    """What a TLS failure means, and the way out."""
    if isinstance(error, ssl.SSLCertVerificationError):
        said = error.verify_message.rstrip(".")
        if error.verify_code in _OF_ANOTHER_HOST:
            return f"its certificate is of another host ({said}): the URL needs a name that stands in it"
        return f"its certificate is not trusted ({said}): ssl_context=ssl.create_default_context(cafile=…) trusts a CA"
    if not isinstance(error, ssl.SSLError) or isinstance(
        error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError
    ):
        return "it speaks no TLS or closed the connection during the handshake: without TLS the URL is amqp://"
    reason = error.reason or str(error)
    said = reason.replace("_", " ").lower()
    if reason in _NO_TLS:
        return (
            f"it speaks no TLS ({said}): without TLS the URL is amqp://, and with TLS the port is another, often 5671"
        )
    if "CERTIFICATE" in reason or reason.endswith("UNKNOWN_CA"):
        return f"it wants a client certificate that it trusts ({said}): see ssl_context=, and its load_cert_chain"
    return f"the TLS handshake failed ({said}): ssl_context= sets versions, ciphers and the client's certificate"


# --- what a connection raises


def explain(error: LinkError, target: Target, login: Login, *, opened: bool, logged_in: bool = False) -> LinkError:
    """What ended a connection, with the target's name, and for a stranger what it is: to be raised from `error`.

    `opened`: the peer had opened the connection; `logged_in`: it had taken the login. The class stays, but where a peer
    says no without a word it is `LinkRefused`: by a TLS alert after the handshake (TLS 1.3, to a client certificate),
    or by a cut behind the login (RabbitMQ, to a virtual host that it does not have).
    """
    if opened:
        return type(error)(f"{target.name}: {error}")
    if logged_in and target.vhost is not None and isinstance(error, ConnectionBroken) and not _is_silence(error):
        return LinkRefused(f"{target.name}: cut behind the login: is there a virtual host {target.vhost!r}? ({error})")
    alert = None if error.__cause__ is None else error.__cause__.__cause__
    if isinstance(alert, ssl.SSLError) and "ALERT" in (alert.reason or ""):
        return LinkRefused(f"{target.name}: {_why_no_tls(alert)}")
    return type(error)(f"{target.name}: {_why_no_amqp(str(error), target, login)}")


def _is_silence(error: LinkError) -> bool:
    return "timeout" in str(error) or "nothing was heard" in str(error) or "no answer" in str(error)


def _why_no_amqp(said: str, target: Target, login: Login) -> str:
    """Proton's words in the user's."""
    quoted = re.search(r" got: [^[]*\['([^']*)", said)
    if quoted is not None:
        answer = _unquoted(quoted[1])
        for start, what in _STRANGERS.items():
            if answer.startswith(start):
                return f"the peer speaks {what}"
        return f"the peer does not speak AMQP 1.0 with SASL: it answers {answer[:_SHOWN]!r}"
    if "unauthorized-access" in said:
        if "[mech=none]" in said:
            return f"the peer offers no login by {login.mechanism}: sasl=, or a user in the URL, choose another"
        return f"the peer has refused the login by {login.mechanism} ({said})"
    if any(silence in said for silence in _SILENCE):
        return f"the peer does not answer ({said})"
    if said.endswith(_NOTHING_SAID):
        return f"the peer closed the connection before it said anything; {_wrong_kind_of_tls(target)}"
    if not said.endswith(_ENDS):
        return said
    hints = [] if said.endswith(_ABORTED) else [_wrong_kind_of_tls(target)]
    if target.vhost is not None:
        hints.append(f"RabbitMQ does so where the user has no virtual host {target.vhost!r}")
    return "; ".join([said, *hints])


def _unquoted(text: str) -> bytes:
    """What a peer has answered: in proton's quotes a byte that cannot be printed stands as two hex digits."""
    return re.sub(r"\\x([0-9a-f]{2})", lambda found: chr(int(found[1], 16)), text).encode("latin-1", "replace")


def _wrong_kind_of_tls(target: Target) -> str:
    return "a peer that wants a client certificate does so" if target.tls else "if it speaks TLS, use amqps://"
