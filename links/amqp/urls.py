"""An AMQP URL, and who logs in by it. Pure: all of it is checked before there is any IO.

    amqp://[user[:password]@]host[:port][/vhost]      port 5672
    amqps://[user[:password]@]host[:port][/vhost]     port 5671, TLS

A URL may hold a password, and a malformed one may hold it anywhere: an error shows its scheme, and of the rest no more
than a legal host and port, behind the last "@" if there is one.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import Final
from urllib.parse import quote, unquote_to_bytes

import attrs

from links.amqp.engine.settings import Login

__all__ = ["Target", "login", "parse"]

_LEGAL: Final = "amqp://[user[:password]@]host[:port][/vhost], or amqps:// for TLS"
_PORTS: Final = {"amqp": 5672, "amqps": 5671}
_MECHANISMS: Final = {"anonymous": "ANONYMOUS", "plain": "PLAIN", "external": "EXTERNAL"}
_HIGHEST_PORT: Final = 65535

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_LABEL = r"[A-Za-z0-9_-]{1,63}"
_PLACE = re.compile(rf"(?:\[([0-9A-Fa-f:.]+)\]|({_LABEL}(?:\.{_LABEL})*\.?))(?::([0-9]{{1,5}}))?(?=[/?#]|\Z)")
"""Host and port. A name has no other letters: one beyond ASCII is written as DNS has it, `xn--…`."""
_STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")


@attrs.frozen
class Target:
    """Where a URL leads to, and what it says of who comes.

    Attributes:
        tls: By TLS: the scheme is `amqps`.
        host: A name or an address; of IPv6 without brackets.
        port: 1 to 65535; where the URL says none, 5672, or 5671 by TLS.
        vhost: The virtual host's name; None, the default: the one that the peer takes for its own.
        user: Percent-decoded, and in no repr; None, the default: the URL has none.
        password: The same.
    """

    tls: bool
    host: str
    port: int
    vhost: str | None = None
    user: str | None = attrs.field(default=None, repr=False)
    password: str | None = attrs.field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The URL without credentials, for errors and logs."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        path = "" if self.vhost is None else "/" + quote(self.vhost, safe="")
        return f"{'amqps' if self.tls else 'amqp'}://{host}:{self.port}{path}"

    @property
    def place(self) -> tuple[str, int | None, str]:
        """Where messages are: the same for each way to one virtual host of one broker, by TLS or not."""
        host = "localhost" if self.is_loopback else self.host.lower().removesuffix(".")
        port = None if self.port == _PORTS["amqps" if self.tls else "amqp"] else self.port
        return host, port, self.vhost or "/"

    @property
    def hostname(self) -> str:
        """What our open says. RabbitMQ reads a virtual host behind `vhost:`; anything else means its default one."""
        return self.host if self.vhost is None else f"vhost:{self.vhost}"

    @property
    def is_loopback(self) -> bool:
        """What is sent there does not leave this machine."""
        if self.host.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse(url: str) -> Target:
    """Read a URL. Raises `ValueError` that shows no credential."""
    scheme, rest = _split(url)
    shown = f"{scheme}://{_showable(rest)}"

    def wrong(why: str) -> ValueError:
        return ValueError(f"url must be {_LEGAL}, not {shown}: {why}")

    if not (rest.isascii() and rest.isprintable()) or " " in rest:
        raise wrong("a space, a control character or one beyond ASCII is percent-encoded")
    if "?" in rest or "#" in rest:
        raise wrong("a query or a fragment has no meaning; in a user, password or vhost '?' is %3F and '#' is %23")
    authority, _, path = rest.partition("/")
    credentials, at, place = authority.rpartition("@")
    if "@" in credentials or "@" in path:
        raise wrong("in a user, password or vhost '@' is %40 and '/' is %2F")
    if "/" in path:
        raise wrong("the path is one virtual host; '/' in its name is %2F")
    if not place:
        raise wrong("there is no host")
    found = _place(place)
    if found is None:
        raise wrong(f"behind the host comes a port from 1 to {_HIGHEST_PORT}; an IPv6 address stands in brackets")
    host, port = found
    user, colon, password = credentials.partition(":")
    if at and not user:
        raise wrong("there is no user in front of the '@'")
    texts = [_decoded(text) for text in (user, password, path)]
    if None in texts:
        raise wrong("what is percent-encoded must be UTF-8, and no NUL; '%' itself is %25")
    return Target(
        scheme == "amqps",
        host,
        port or _PORTS[scheme],
        vhost=texts[2] if path else None,
        user=texts[0] if at else None,
        password=texts[1] if colon else None,
    )


def _split(url: str) -> tuple[str, str]:
    """The scheme and what follows `://`."""
    found = _SCHEME.match(url) if isinstance(url, str) else None
    if found is None:
        raise ValueError(f"url must be {_LEGAL}, not one without a scheme")
    scheme = found[1].lower()
    if scheme not in _PORTS:
        raise ValueError(f"url must be {_LEGAL}, not one of scheme {scheme!r}")
    return scheme, url[found.end() :]


def _place(text: str) -> tuple[str, int | None] | None:
    """The host and port that `text` begins with, before its end, a path, a query or a fragment; None: no legal ones."""
    found = _PLACE.match(text)
    if found is None:
        return None
    address, name, digits = found.groups()
    if digits is not None and not 1 <= int(digits) <= _HIGHEST_PORT:
        return None
    if address is not None:
        try:
            ipaddress.IPv6Address(address)
        except ValueError:
            return None
    return address or name, None if digits is None else int(digits)


def _showable(rest: str) -> str:
    """What may be shown of a URL that is malformed."""
    place = rest.rpartition("@")[2]
    if rest.count("@") > 1 or _place(place) is None:
        return "…"
    return re.split("[/?#]", place, maxsplit=1)[0] + "…"


def _decoded(text: str) -> str | None:
    if _STRAY_PERCENT.search(text):
        return None
    try:
        decoded = unquote_to_bytes(text).decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in decoded else decoded


def login(
    target: Target,
    *,
    sasl: str | None = None,
    password: str | Callable[[], object] | None = None,
    plain_text: bool = False,
) -> Login:
    """Who logs in, by one mechanism that is pinned: `sasl`, else PLAIN where the URL has a user, else ANONYMOUS.

    `password` wins over the URL's. A function in its place says that it comes later: the login has an empty one then,
    and is made again with what the function gave. `plain_text`: a password may go to another machine without TLS.

    Raises `ValueError` that names the argument and what is legal, and shows no credential.
    """
    if sasl is not None and sasl not in _MECHANISMS:
        raise ValueError(f"sasl must be 'anonymous', 'plain' or 'external', not {sasl!r}")
    mechanism = _MECHANISMS[sasl or ("anonymous" if target.user is None else "plain")]
    if mechanism == "EXTERNAL" and not target.tls:
        raise ValueError(f"sasl='external' is by a client certificate, so url must be amqps://…, not {target.name}")
    if mechanism != "PLAIN":
        if password is not None:  # never dropped in silence: somebody meant to log in by it
            raise ValueError(
                f"password is for PLAIN, and {target.name} is logged in to by {mechanism}: give url a user"
            )
        return Login(mechanism)
    if target.user is None:
        raise ValueError(f"sasl='plain' needs a user in url: amqp://user@host, not {target.name}")
    if not (target.tls or target.is_loopback or plain_text):
        raise ValueError(
            f"url must be amqps://…, not {target.name}: a password does not go to another machine in clear text, "
            "unless plain_text=True says that the network is trusted"
        )
    said = target.password if password is None else "" if callable(password) else password
    if said is None:
        raise ValueError(f"password is missing: {target.name} is logged in to by PLAIN")
    return Login(mechanism, target.user, _password(said))


def _password(said: object) -> str:
    if not isinstance(said, str):
        raise ValueError(f"password must be a str, or a function that gives one, not {type(said).__name__}")
    if "\0" in said or not _is_unicode(said):
        raise ValueError("password must be a text that UTF-8 can say, without NUL")
    return said


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # it would show the text
        return False
    return True
