"""An engine that accepts a connection: the SASL layer before it, and the answers that proton does not give: to an echo,
and to a drain whose credit is used up.

Such an answer is a flow, and a flow tells the state of its session, which proton does not tell. So this engine
reads the frames that pass in both directions: which channel and handle is whose, and how many transfers there were.
"""

from __future__ import annotations

import attrs

from links.amqp.embedded.sasl_server import SaslServer
from links.amqp.engine.binding import lib
from links.amqp.engine.engine import Engine
from links.amqp.engine.events import Condition, CreditGranted, SessionOpened
from links.amqp.engine.handles import LinkHandle, SessionHandle
from links.amqp.engine.settings import Settings
from links.amqp.wire.frames import (
    ATTACH,
    BEGIN,
    DISPOSITION,
    FLOW,
    TRANSFER,
    Frame,
    Frames,
    WireError,
    drains,
    fields_of,
    flow_frame,
    wants_echo,
)
from links.amqp.wire.values import scalar, text

__all__ = ["ServerEngine"]

_WINDOW = 2**31 - 1
_RANGE = 1 << 24
"""Deliveries that one disposition may speak of."""


@attrs.define(eq=False)
class _Channel:
    """One session, as it is on the wire."""

    session: SessionHandle
    incoming: int
    """The number of the next transfer that comes."""
    number: int | None = None
    """Our channel."""
    outgoing: int = 0


class ServerEngine(Engine):
    """The accepting end of a connection."""

    def __init__(self, settings: Settings, sasl: SaslServer) -> None:
        super().__init__(settings, accepting=True)
        self.sasl = sasl
        self._frames_in = Frames()
        self._frames_out = Frames()
        self._theirs: dict[int, _Channel] = {}
        self._ours: dict[int, _Channel] = {}
        self._handles: dict[LinkHandle, bytes] = {}
        self._asked: list[LinkHandle] = []
        self._draining: set[LinkHandle] = set()

    def receive_bytes(self, data: bytes | bytearray) -> None:
        """Take bytes from the peer."""
        self.mark_heard()
        data = bytes(data)
        if not self.sasl.done:
            data = self.sasl.receive(data)
            if self.sasl.refused:
                self.fail(Condition("amqp:unauthorized-access", "who are you?"))
        if not data:
            return
        try:
            self._receive(data)
        except (ValueError, IndexError) as error:  # no frame, or one that is cut short, or lacks what it must have
            self.fail(Condition("amqp:decode-error", f"the client has sent what is no AMQP: {error}"))

    def _receive(self, data: bytes) -> None:
        kept, given = len(self._frames_in.kept), 0
        for frame in self._frames_in.feed(data):
            code = frame.code
            if code == TRANSFER:
                if (channel := self._theirs.get(frame.channel)) is not None:
                    channel.incoming += 1
            elif code == DISPOSITION:
                _check_range(frame)
            elif code == BEGIN or (code == FLOW and (drains(frame) or wants_echo(frame))):
                super().receive_bytes(data[given : frame.end - kept])
                given = frame.end - kept
                self._note(frame)
        super().receive_bytes(data[given:])

    def _note(self, frame: Frame) -> None:
        """What the engine has just made of this frame."""
        for event in reversed(self._reader.heard):
            match event:
                case SessionOpened(session) if frame.code == BEGIN:
                    self._theirs[frame.channel] = _Channel(session, _int(fields_of(frame)[1]))
                    return
                case CreditGranted(link) if frame.code == FLOW:
                    if drains(frame):
                        self._draining.add(link)
                    if wants_echo(frame):
                        self._asked.append(link)
                    return
                case _:
                    pass

    def drained(self, link: LinkHandle) -> None:
        """Answer a drain: the rest of the credit is given back."""
        if self.credit(link) > 0:
            self._draining.discard(link)
        super().drained(link)

    def data_to_send(self) -> bytes:
        """What is to be written now."""
        before = self.sasl.data_to_send()
        if not self.sasl.done:
            return before
        data = super().data_to_send()
        if self.ended is not None:  # what is written now is an error, and half of what came may not be noted here
            return before + data
        for frame in self._frames_out.feed(data):
            if frame.code == TRANSFER:
                self._ours[frame.channel].outgoing += 1
            elif frame.code == BEGIN:
                self._began(frame)
            elif frame.code == ATTACH:
                self._attached(frame)
        asked, self._asked = dict.fromkeys(self._asked, False), []
        for link in [link for link in self._draining if not self.credit(link) and not self.queued(link)]:
            self._draining.discard(link)
            asked[link] = link.alive and bool(lib.pn_link_get_drain(link.pointer))  # or it thought better of it
        return b"".join([before, data, *(self._answer(link, drain=drain) for link, drain in asked.items())])

    def _began(self, frame: Frame) -> None:
        remote, outgoing = fields_of(frame)[:2]
        channel = self._ours[frame.channel] = self._theirs[_int(remote)]  # noted when it came, or we had given up
        channel.number, channel.outgoing = frame.channel, _int(outgoing)

    def _attached(self, frame: Frame) -> None:
        name, handle, is_receiver = fields_of(frame)[:3]
        for link in self._ours[frame.channel].session.links:
            if link.name.encode() == text(name, 0) and link.is_sender != scalar(is_receiver, 0):
                self._handles[link] = handle

    def _answer(self, link: LinkHandle, *, drain: bool) -> bytes:
        channel = next((each for each in self._ours.values() if each.session is link.session), None)
        handle = self._handles.get(link)
        if not link.alive or handle is None or channel is None or channel.number is None:
            return b""
        queued = self.queued(link)
        return flow_frame(
            channel.number,
            handle,
            incoming=channel.incoming,
            outgoing=channel.outgoing,
            window=_WINDOW,
            delivery_count=link.passed - queued,
            credit=self.credit(link) + queued,
            drain=drain,
        )


def _check_range(frame: Frame) -> None:
    """Proton goes through a range number by number: one of 2^31 is a minute for all other clients."""
    first, last = (*(scalar(field, 0) for field in fields_of(frame)[1:3]), None, None)[:2]
    if isinstance(first, int) and isinstance(last, int) and (last - first) & 0xFFFFFFFF > _RANGE:
        raise WireError(f"a disposition of {(last - first) & 0xFFFFFFFF} deliveries")


def _int(field: bytes) -> int:
    value = scalar(field, 0)
    return value if isinstance(value, int) else 0
