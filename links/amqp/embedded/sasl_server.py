"""The accepting side of SASL: ANONYMOUS and PLAIN. proton's own listening side has no PLAIN.

Part 5.3: a protocol header each way, our mechanisms, the client's init, our outcome; then the AMQP header follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from hmac import compare_digest
from typing import Final

from links.amqp.wire.frames import Frame, Frames, WireError, fields_of, packed
from links.amqp.wire.values import Undecodable, symbol, text

__all__ = ["SaslServer"]

_HEADER: Final = b"AMQP\x03\x01\x00\x00"
_MECHANISMS, _INIT, _OUTCOME = 0x40, 0x41, 0x44
_OK, _AUTH = b"\x50\x00", b"\x50\x01"
_SASL = 1
_LARGEST = 512
"""Part 5.3.1: the largest frame before the connection is open."""


class SaslServer:
    """Asks one client who it is."""

    def __init__(self, users: Mapping[str, str] | None, *, anonymous: bool) -> None:
        self.users = dict(users or {})
        self.anonymous = anonymous
        self.user: str | None = None
        """Who it is; None: nobody in particular, or not known yet."""
        self.done = False
        """What follows is AMQP."""
        self.refused = False
        """Nothing follows."""
        self._frames = Frames(_LARGEST)
        self._head = b""
        self._out = b""

    def receive(self, data: bytes) -> bytes:
        """Take bytes of the client's; returns those that are not SASL's any more."""
        if self.refused:
            return b""
        if len(self._head) < len(_HEADER):
            missing = len(_HEADER) - len(self._head)
            self._head, data = self._head + data[:missing], data[missing:]
            if len(self._head) < len(_HEADER):
                return b""
            if self._head != _HEADER:
                self.done = self.anonymous  # no SASL layer at all
                self.refused = not self.done
                self._out = _HEADER if self.refused else b""  # part 2.2: what we would have spoken
                return self._head + data if self.done else b""
            self._out = _HEADER + packed(_MECHANISMS, [self._mechanisms()], kind=_SASL)
        try:
            for frame in self._frames.feed(data):
                rest = frame.data[frame.end :]
                self._answer(frame)
                return rest if self.done else b""
        except (WireError, Undecodable, IndexError):
            self.refused = True
        return b""

    def data_to_send(self) -> bytes:
        """What is to be written to the client, before anything of AMQP's."""
        out, self._out = self._out, b""
        return out

    def _mechanisms(self) -> bytes:
        names = [*(["PLAIN"] if self.users else []), *(["ANONYMOUS"] if self.anonymous else [])]
        values = b"".join(symbol(name)[1:] for name in names)
        return b"\xe0%c%c\xa3%b" % (len(values) + 2, len(names), values)

    def _answer(self, frame: Frame) -> None:
        ok = frame.code == _INIT and self._is_welcome(frame)
        self.done, self.refused = ok, not ok
        self._out += packed(_OUTCOME, [_OK if ok else _AUTH], kind=_SASL)

    def _is_welcome(self, frame: Frame) -> bool:
        mechanism, response = (*(text(field, 0) for field in fields_of(frame)), None, None)[:2]
        if mechanism == b"ANONYMOUS":
            return self.anonymous
        if mechanism != b"PLAIN" or response is None:
            return False
        _, _, rest = response.partition(b"\x00")
        user, _, password = rest.partition(b"\x00")
        expected = self.users.get(user.decode(errors="replace"))
        if expected is None or not compare_digest(expected.encode(), password):
            return False
        self.user = user.decode()
        return True
