"""Two engines back to back, for the tests of links.amqp.engine.engine."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from links.amqp.embedded.sasl_server import SaslServer
from links.amqp.embedded.server_engine import ServerEngine
from links.amqp.engine.engine import Engine
from links.amqp.engine.events import (
    Arrived,
    Event,
    LinkRequested,
    Terminus,
)
from links.amqp.engine.handles import Arrival, LinkHandle, SessionHandle
from links.amqp.engine.settings import Settings
from links.amqp.wire.frames import Frame, Frames

DISPOSITION = 0x15


@attrs.define
class Pair:
    """A client and a server; what each has heard, and the frames that the client has written."""

    client: Engine
    server: Engine
    heard: list[Event] = attrs.field(factory=list[Event])
    asked: list[Event] = attrs.field(factory=list[Event])
    written: list[Frame] = attrs.field(factory=list[Frame])
    frames: Frames = attrs.field(factory=Frames)

    def shuttle(self) -> None:
        while True:
            out, back = self.client.data_to_send(), self.server.data_to_send()
            if not out and not back:
                break
            if not (self.client.settings.login and not self.written and out.startswith(b"AMQP\x03")):
                self.written += self.frames.feed(out)
            self.server.receive_bytes(out)
            self.client.receive_bytes(back)
        self.heard += self.client.events()
        self.asked += self.server.events()

    def take(self) -> list[Event]:
        self.shuttle()
        heard, self.heard = self.heard, []
        return heard

    def took(self) -> list[Event]:
        self.shuttle()
        asked, self.asked = self.asked, []
        return asked

    def codes(self) -> list[int]:
        """The performatives that the client has written since the last call."""
        written, self.written = self.written, []
        return [frame.code for frame in written if frame.code]

    def open(self) -> SessionHandle:
        self.client.open()
        self.server.open()
        session = self.client.begin()
        self.shuttle()
        return session

    def receiver(self, session: SessionHandle) -> tuple[LinkHandle, LinkHandle]:
        """A receiver of the client's, and the server's end of it."""
        link = self.client.attach_receiver(session, Terminus("orders"))
        assert link is not None
        return link, self.accept()

    def sender(self, session: SessionHandle) -> tuple[LinkHandle, LinkHandle]:
        link = self.client.attach_sender(session, Terminus("orders"))
        assert link is not None
        return link, self.accept()

    def accept(self) -> LinkHandle:
        request = next(event for event in self.took() if isinstance(event, LinkRequested))
        self.server.accept(request.link, request.source, request.target)
        self.shuttle()
        return request.link

    def delivered(self, count: int, raw: Callable[[int], bytes] = lambda number: b"%d" % number) -> Transferred:
        session = self.open()
        link, theirs = self.receiver(session)
        assert self.client.grant(link, count)
        self.shuttle()
        numbers = [self.server.send(theirs, raw(number)) for number in range(count)]
        arrivals = [each for event in self.take() if isinstance(event, Arrived) for each in event.arrivals]
        self.took()
        self.codes()
        return Transferred(session, link, theirs, numbers, arrivals)


@attrs.define
class Transferred:
    session: SessionHandle
    link: LinkHandle
    theirs: LinkHandle
    numbers: list[int]
    arrivals: list[Arrival]


def make_pair(*, client: Settings | None = None, server: Settings | None = None) -> Pair:
    return Pair(Engine(client or Settings("client")), Engine(server or Settings("server"), accepting=True))


def kinds(events: list[Event]) -> list[type[Event]]:
    return [type(event) for event in events]


def answering() -> Pair:
    """A server that answers an echo, which proton does not."""
    sasl = SaslServer({"guest": "secret"}, anonymous=True)
    return Pair(Engine(Settings("client")), ServerEngine(Settings("server"), sasl))
