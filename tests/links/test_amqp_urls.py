"""links.amqp.urls: what a URL says, what it may not say, and who logs in. No socket."""

from __future__ import annotations

import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from links.amqp.engine.settings import Login
from links.amqp.urls import Target, login, parse

pytestmark = pytest.mark.amqp

USER, PASSWORD = "wren", "hush7"
"""In no error, name or repr."""


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("amqp://broker", Target(tls=False, host="broker", port=5672)),
        ("amqps://broker", Target(tls=True, host="broker", port=5671)),
        ("AMQPS://broker/", Target(tls=True, host="broker", port=5671)),
        ("amqp://broker.example:1", Target(tls=False, host="broker.example", port=1)),
        ("amqp://my_broker-1.svc.:65535/", Target(tls=False, host="my_broker-1.svc.", port=65535)),
        ("amqp://127.0.0.1:00080", Target(tls=False, host="127.0.0.1", port=80)),
        ("amqp://[::1]", Target(tls=False, host="::1", port=5672)),
        ("amqps://[2001:db8::7]:99/v", Target(tls=True, host="2001:db8::7", port=99, vhost="v")),
        ("amqp://broker/%2F", Target(tls=False, host="broker", port=5672, vhost="/")),
        ("amqp://broker/a%2Fb%20%C3%A4+", Target(tls=False, host="broker", port=5672, vhost="a/b ä+")),
        ("amqp://u@broker", Target(tls=False, host="broker", port=5672, user="u")),
        ("amqp://u:@broker", Target(tls=False, host="broker", port=5672, user="u", password="")),
        ("amqp://u:p:q@broker", Target(False, "broker", 5672, None, "u", "p:q")),
        (
            "amqp://a%40b%3A:%2F%3F%23%25%40%C3%A4@broker:7/v",
            Target(False, "broker", 7, "v", "a@b:", "/?#%@ä"),
        ),
    ],
)
def test_a_url_says_where_and_who(url: str, target: Target) -> None:
    """A-6.1: two schemes and their ports; user, password and path are percent-decoded."""
    assert parse(url) == target


@pytest.mark.parametrize(
    ("url", "hostname"),
    [
        ("amqp://broker", "broker"),
        ("amqp://broker/", "broker"),
        ("amqp://[::1]:7", "::1"),
        ("amqp://broker/%2F", "vhost:/"),
        ("amqp://broker/shop", "vhost:shop"),
    ],
)
def test_a_virtual_host_is_said_as_rabbitmq_reads_it(url: str, hostname: str) -> None:
    assert parse(url).hostname == hostname


@pytest.mark.parametrize(
    ("url", "name"),
    [
        (f"amqp://{USER}:{PASSWORD}@broker", "amqp://broker:5672"),
        (f"amqps://{USER}:{PASSWORD}@[::1]:7/a%2fb", "amqps://[::1]:7/a%2Fb"),
    ],
)
def test_a_targets_name_has_no_credentials(url: str, name: str) -> None:
    """A-6.5: nor has its repr; its name leads to the same place."""
    target = parse(url)
    assert target.name == name
    assert (parse(name).host, parse(name).vhost, parse(name).user) == (target.host, target.vhost, None)
    for shown in (target.name, repr(target)):
        assert USER not in shown
        assert PASSWORD not in shown


LEGAL = r"url must be amqp://\[user\[:password\]@\]host\[:port\]\[/vhost\], or amqps:// for TLS, "


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "not one without a scheme"),
        ("broker", "not one without a scheme"),
        ("//wren:hush7@broker", "not one without a scheme"),
        ("wren:hush7@broker", "not one without a scheme"),
        ("wren:hush7://broker", "not one without a scheme"),
        ("amqp:wren:hush7@broker", "not one without a scheme"),
        (" amqp://wren:hush7@broker", "not one without a scheme"),
        ("http://wren:hush7@broker", "not one of scheme 'http'"),
        ("amqp+ssl://wren:hush7@broker", "not one of scheme 'amqp+ssl'"),
        ("amqp://", "not amqp://…: there is no host"),
        ("amqp:///shop", "not amqp://…: there is no host"),
        ("amqp://wren:hush7@", "not amqp://…: there is no host"),
        ("amqp://wren:hush7@/shop", "not amqp://…: there is no host"),
        ("amqp://wren:hush7@broker:0", "not amqp://…: behind the host comes a port from 1 to 65535"),
        ("amqp://wren:hush7@broker:65536/shop", "not amqp://…: behind the host comes a port from 1 to 65535"),
        ("amqp://wren:hush7@broker:", "not amqp://…: behind the host comes a port from 1 to 65535"),
        ("amqp://wren:hush7@broker:-1", "not amqp://…: behind the host comes a port from 1 to 65535"),
        ("amqp://wren:hush7@broker:amqp", "not amqp://…: behind the host comes a port from 1 to 65535"),
        ("amqp://wren:hush7", "not amqp://…: behind the host comes a port from 1 to 65535"),
        ("amqp://wren:hush7@::1", "an IPv6 address stands in brackets"),
        ("amqp://wren:hush7@[::1", "an IPv6 address stands in brackets"),
        ("amqp://wren:hush7@[::g]", "an IPv6 address stands in brackets"),
        ("amqp://wren:hush7@[1:2]", "an IPv6 address stands in brackets"),
        ("amqp://wren:hush7@[127.0.0.1]", "an IPv6 address stands in brackets"),
        ("amqp://wren:hush7@broker..example", "not amqp://…"),
        ("amqp://wren:hush7@bro%6Ber", "not amqp://…"),
        ("amqp://@broker", "not amqp://broker…: there is no user in front of the '@'"),
        ("amqp://:hush7@broker", "not amqp://broker…: there is no user in front of the '@'"),
        ("amqp://wren:hu/sh7@broker:7", "not amqp://broker:7…: in a user, password or vhost '@' is %40 and '/' is %2F"),
        ("amqp://wren:hu@sh7@broker", "not amqp://…: in a user, password or vhost '@' is %40 and '/' is %2F"),
        ("amqp://wren:hu?sh7@broker", "not amqp://broker…: a query or a fragment has no meaning"),
        ("amqp://wren:hu#sh7@broker", "not amqp://broker…: a query or a fragment has no meaning"),
        ("amqp://wren@broker?password=hush7", "not amqp://broker…: a query or a fragment has no meaning"),
        ("amqp://wren:hush7@broker/shop#hush7", "not amqp://broker…: a query or a fragment has no meaning"),
        ("amqp://wren:hush7@broker/a/b", "not amqp://broker…: the path is one virtual host; '/' in its name is %2F"),
        ("amqp://wren:hush7@broker//", "not amqp://broker…: the path is one virtual host; '/' in its name is %2F"),
        ("amqp://wren:hush7@broker\n", "not amqp://…: a space, a control character or one beyond ASCII is percent-"),
        (
            "amqp://wren:hush7 @broker",
            "not amqp://broker…: a space, a control character or one beyond ASCII is percent-",
        ),
        (
            "amqp://wren:hush7ä@broker",
            "not amqp://broker…: a space, a control character or one beyond ASCII is percent-",
        ),
        ("amqp://wren:hush7@bröker", "not amqp://…: a space, a control character or one beyond ASCII is percent-"),
        ("amqp://wren:hush7%@broker", "not amqp://broker…: what is percent-encoded must be UTF-8, and no NUL"),
        ("amqp://wren:hush7%zz@broker", "not amqp://broker…: what is percent-encoded must be UTF-8, and no NUL"),
        ("amqp://wren:hush7%ff@broker", "not amqp://broker…: what is percent-encoded must be UTF-8, and no NUL"),
        ("amqp://wr%00en:hush7@broker", "not amqp://broker…: what is percent-encoded must be UTF-8, and no NUL"),
        ("amqp://wren:hush7@broker/%c3", "not amqp://broker…: what is percent-encoded must be UTF-8, and no NUL"),
    ],
)
def test_a_malformed_url_is_refused_with_the_legal_form(url: str, why: str) -> None:
    """A-6.1, A-6.5: it says what is wrong, and shows neither user nor password wherever they stand."""
    with pytest.raises(ValueError, match=LEGAL) as refused:
        parse(url)
    assert why in str(refused.value)
    said = "".join(traceback.format_exception(refused.value))
    for secret in ("wren", "hush7", "sh7"):
        assert secret not in said


def test_a_url_is_a_text() -> None:
    with pytest.raises(ValueError, match=LEGAL):
        parse(b"amqp://broker")  # type: ignore[arg-type]


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
def test_whatever_is_percent_encoded_comes_back(text: str) -> None:
    said = "".join(f"%{byte:02X}" for byte in text.encode())
    target = parse(f"amqp://{said}:{said}@broker/{said}")
    assert (target.user, target.password, target.vhost) == (text, text, text)


@given(st.text("amqps:/@[]%?#1.x \n\u00e4"), st.text("amqps:/@[]%?#1.x \n\u00e4"))
def test_no_text_gets_anything_else_than_a_value_error(before: str, after: str) -> None:
    """And what stands between the scheme and the last '@' is not in it."""
    url = f"amqp://{before}hush7{after}@broker/?"
    with pytest.raises(ValueError, match=LEGAL) as refused:
        parse(url)
    assert "hush7" not in str(refused.value)


# --- who logs in


@pytest.mark.parametrize(
    ("url", "sasl", "password", "expected"),
    [
        ("amqp://localhost", None, None, Login("ANONYMOUS")),
        ("amqp://localhost", "anonymous", None, Login("ANONYMOUS")),
        ("amqp://u:p@localhost", None, None, Login("PLAIN", "u", "p")),
        ("amqp://u:p@localhost", "plain", None, Login("PLAIN", "u", "p")),
        ("amqp://u:p@localhost", None, "q", Login("PLAIN", "u", "q")),
        ("amqp://u:p@localhost", None, "", Login("PLAIN", "u", "")),
        ("amqp://u:@localhost", None, None, Login("PLAIN", "u", "")),
        ("amqp://u@localhost", None, "ключ", Login("PLAIN", "u", "ключ")),
        ("amqp://u:p@localhost", "anonymous", None, Login("ANONYMOUS")),
        ("amqps://u:p@localhost", "external", None, Login("EXTERNAL")),
        ("amqps://broker", "external", None, Login("EXTERNAL")),
        ("amqps://u:p@broker", None, None, Login("PLAIN", "u", "p")),
    ],
)
def test_one_mechanism_is_pinned(url: str, sasl: str | None, password: str | None, expected: Login) -> None:
    """A-6.2, OQ-A14: a user in the URL means PLAIN, what is said explicitly wins."""
    assert login(parse(url), sasl=sasl, password=password) == expected


def test_a_password_may_come_later() -> None:
    """The function is not called; all else is checked, and checked again with what it gave."""

    def later() -> str:
        raise AssertionError("called before there is a connection")

    assert login(parse("amqp://u:p@localhost"), password=later) == Login("PLAIN", "u", "")
    with pytest.raises(ValueError, match="plain_text=True"):
        login(parse("amqp://u@broker"), password=later)
    with pytest.raises(ValueError, match="password is for PLAIN"):
        login(parse("amqp://localhost"), password=later)


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("localhost", True),
        ("LocalHost", True),
        ("127.0.0.1", True),
        ("127.255.3.4", True),
        ("[::1]", True),
        ("[0:0:0:0:0:0:0:1]", True),
        ("broker", False),
        ("localhost.example", False),
        ("127.0.0.1.example", False),
        ("128.0.0.1", False),
        ("0.0.0.0", False),  # noqa: S104 -- not bound to
        ("[::]", False),
        ("[fe80::1]", False),
        ("2130706433", False),  # the resolver takes it for 127.0.0.1: better refused than guessed
    ],
)
def test_a_password_goes_to_another_machine_by_tls_alone(host: str, is_loopback: bool) -> None:
    """Or where somebody has said that the network is trusted."""
    target = parse(f"amqp://{USER}:{PASSWORD}@{host}")
    welcome = Login("PLAIN", USER, PASSWORD)
    assert target.is_loopback is is_loopback
    assert login(parse(f"amqps://{USER}:{PASSWORD}@{host}")) == welcome
    assert login(target, plain_text=True) == welcome
    if is_loopback:
        assert login(target) == welcome
    else:
        with pytest.raises(ValueError, match=r"url must be amqps://.*plain_text=True") as refused:
            login(target)
        assert target.name in str(refused.value)
        assert USER not in str(refused.value)
        assert PASSWORD not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "sasl", "password", "why"),
    [
        ("amqp://localhost", "PLAIN", None, "sasl must be 'anonymous', 'plain' or 'external', not 'PLAIN'"),
        ("amqp://localhost", "", None, "sasl must be 'anonymous', 'plain' or 'external', not ''"),
        ("amqp://localhost", "plain", None, "sasl='plain' needs a user in url"),
        ("amqp://localhost", "plain", "hush7", "sasl='plain' needs a user in url"),
        ("amqp://localhost", None, "hush7", "password is for PLAIN, and amqp://localhost:5672 is logged in to by ANON"),
        ("amqp://wren@localhost", "anonymous", "hush7", "password is for PLAIN"),
        ("amqps://wren@localhost", "external", "hush7", "password is for PLAIN"),
        ("amqp://wren:hush7@localhost", "external", None, "url must be amqps://…, not amqp://localhost:5672"),
        ("amqp://wren@localhost", None, None, "password is missing: amqp://localhost:5672"),
        ("amqp://wren@localhost", None, "hush7\0", "password must be a text that UTF-8 can say, without NUL"),
        ("amqp://wren@localhost", None, "hush7\udc80", "password must be a text that UTF-8 can say, without NUL"),
        ("amqp://wren@localhost", None, b"hush7", "password must be a str, or a function that gives one, not bytes"),
    ],
)
def test_a_login_that_cannot_be_meant_is_refused(url: str, sasl: str | None, password: str | None, why: str) -> None:
    """A-6.2, A-6.5: nobody becomes anonymous because of a wrong setup; no error shows a credential."""
    with pytest.raises(ValueError, match=r"\b(sasl|url|password)\b") as refused:
        login(parse(url), sasl=sasl, password=password)
    assert why in str(refused.value)
    said = "".join(traceback.format_exception(refused.value))
    assert "wren" not in said
    assert "hush7" not in said
