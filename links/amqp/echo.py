"""Flows that ask for an answer, which proton cannot write: the proof that the peer has seen what was written before.

proton writes a flow where a link's credit has changed. So the credit is changed up and down again: the first flow is
thrown away (nothing counts flows), and the second one, which says what is true, gets its echo flag set. One echo of a
link is on its way at a time, so that its answer, the next flow that comes for this link, is not taken for another's.
"""

from __future__ import annotations

from collections.abc import Callable

from links.amqp.binding import lib
from links.amqp.handles import LinkHandle
from links.amqp.wire import FLOW, Frames, with_echo

__all__ = ["Echoes"]


class Echoes:
    """The echoes that receivers have asked for."""

    def __init__(self, pull: Callable[[], bytes]) -> None:
        self._pull = pull
        """Gives what proton has to write, in whole frames."""
        self._asking: dict[LinkHandle, None] = {}

    def __bool__(self) -> bool:
        return bool(self._asking)

    def ask(self, link: LinkHandle) -> int:
        """Ask for an echo behind what has been ordered so far; returns its number.

        Asks that were not written yet are one.
        """
        if link.echo_asked == link.echo_written:
            link.echo_asked += 1
        self._asking[link] = None
        return link.echo_asked

    def data_to_send(self) -> bytes:
        """The echoes that may be written now; to be called when `pull` has nothing more."""
        due: list[bytes] = []
        for link in tuple(self._asking):
            if not link.alive:
                del self._asking[link]
            elif link.attached and not link.draining and link.echo_proved == link.echo_written:
                due += self._echo(link)
        return b"".join(due)

    def _echo(self, link: LinkHandle) -> list[bytes]:
        lib.pn_link_flow(link.pointer, 1)
        frames = [frame.raw for frame in Frames().feed(self._pull()) if frame.code != FLOW]
        lib.pn_link_flow(link.pointer, -1)
        for frame in Frames().feed(self._pull()):
            if frame.code == FLOW:
                frames.append(with_echo(frame))
                link.echo_written = link.echo_asked
                self._asking.pop(link, None)
            else:
                frames.append(frame.raw)
        return frames
