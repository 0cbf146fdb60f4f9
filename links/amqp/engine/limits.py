"""How many sessions a peer allows on a connection, and links on a session: kept before anything is ordered.

Proton keeps them by a line on stderr, after which it writes nothing any more. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from links.amqp.engine.handles import SessionHandle
from links.amqp.wire.frames import BEGIN, Frame, fields_of
from links.amqp.wire.values import scalar
from links.errors import LinkRefused

__all__ = ["check_links", "check_sessions", "note_links"]

_HANDLE_MAX, _MOST = 4, 0xFFFFFFFF
"""A field of a begin (part 2.7.2), and what holds where it is missing."""


def check_sessions(used: int, allowed: int | None) -> None:
    """Raise `LinkRefused` where no more sessions are allowed; None: the peer has not said yet."""
    if allowed is not None and used >= allowed:
        raise LinkRefused(f"the peer allows {allowed} sessions on a connection, and all are in use")


def check_links(session: SessionHandle) -> None:
    """Raise `LinkRefused` where no more links are allowed on this session."""
    if session.room <= 0:
        raise LinkRefused(f"the peer allows {session.allowed} links on a session, and all are in use")


def note_links(begun: list[SessionHandle], frames: Iterable[Frame]) -> None:
    """These sessions were opened by the begins among these frames, in this order: each says how many links it allows.

    A begin in a form that nobody writes is not among the frames. Then it is not known whose each one is, and proton's
    own limit is left, which breaks the connection.
    """
    begins = [frame for frame in frames if frame.code == BEGIN]
    if len(begins) == len(begun):
        for session, frame in zip(begun, begins, strict=True):
            session.allowed = _handle_max(frame) + 1
    begun.clear()


def _handle_max(frame: Frame) -> int:
    try:
        fields = fields_of(frame)
        most = scalar(fields[_HANDLE_MAX], 0) if len(fields) > _HANDLE_MAX else None
    except (ValueError, IndexError):
        return _MOST  # cut short: proton says what is wrong with it
    return most if isinstance(most, int) and most >= 0 else _MOST
