"""What an engine's orders name: a session, a link, a delivery. Their pointers are the engine's alone.

After the end of a link, its session or the connection a handle is dead: every order on it does nothing.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Arrival", "LinkHandle", "SessionHandle"]


class SessionHandle:
    """A session."""

    __slots__ = ("alive", "allowed", "ended", "handles", "links", "opened", "pointer")

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer
        self.alive = True
        self.opened = False
        self.ended = False
        """We said end, or answered it."""
        self.links: set[LinkHandle] = set()
        self.handles = 0
        """How many handles are in use: a link's is free again when its detach was said by both sides, and written."""
        self.allowed = 1 << 32
        """How many the peer allows; all that there are until it has opened the session."""

    @property
    def room(self) -> int:
        """How many links may still be attached."""
        return self.allowed - self.handles


class LinkHandle:
    """A link: our end of it."""

    __slots__ = (
        "alive",
        "attached",
        "drain_unanswered",
        "draining",
        "echo_asked",
        "echo_limit",
        "echo_proved",
        "echo_written",
        "is_sender",
        "name",
        "partial",
        "passed",
        "pointer",
        "presettled",
        "session",
    )

    def __init__(self, pointer: Any, session: SessionHandle, name: str, *, is_sender: bool, presettled: bool) -> None:
        self.pointer = pointer
        self.session = session
        self.name = name
        self.is_sender = is_sender
        self.presettled = presettled
        """A sender that sends everything settled: no outcome comes."""
        self.alive = True
        self.attached = False
        self.draining = False
        self.drain_unanswered = False
        """Our drain was not answered yet: what comes may have been said before it."""
        self.partial: bytearray | None = None
        """What has come of a delivery in many frames; a link has one at a time."""
        self.passed = 0
        """How far our delivery-count as a sender has moved: messages sent, and credit that was drained."""
        self.echo_asked = 0
        self.echo_written = 0
        self.echo_proved = 0
        self.echo_limit = 0
        """An answer with this limit, or a higher one, was given behind the echo."""

    @property
    def echoing(self) -> bool:
        """Is an echo asked for, or on its way?"""
        return self.echo_asked != self.echo_proved

    def __repr__(self) -> str:
        return f"<{'sender' if self.is_sender else 'receiver'} {self.name!r}>"


class Arrival:
    """A delivery that came in. Compared by identity."""

    __slots__ = ("link", "pointer", "raw", "settled")

    def __init__(self, link: LinkHandle, pointer: Any, raw: bytes, settled: bool) -> None:
        self.link = link
        self.pointer = pointer
        """None: settled."""
        self.raw = raw
        """The encoded message, a copy."""
        self.settled = settled
        """The sender sent it settled: nothing can be said of it."""

    @property
    def is_open(self) -> bool:
        """May something be said of it?"""
        return self.pointer is not None and self.link.alive
