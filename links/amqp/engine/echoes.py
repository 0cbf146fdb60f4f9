"""Flows that ask for an answer, which proton cannot write: the proof that the peer has seen what was written before.

An answer is a flow of the peer's that says no lower *limit* (delivery-count + link-credit) than the flow that asked: a
limit is the peer's echo of a flow of ours, and dispositions go in front of the flow that gives their credit. So an
answer to an earlier flow is not taken for it, and one that was given without being asked for is as good. RabbitMQ keeps
one flow of a link waiting while its queue answers the one before, and a later one takes its place, with it the wish for
an echo: as long as an echo is on its way, each flow of its link asks for one.

Where no credit was given since the last flow, one is made: the credit is changed up and down again, the first flow is
thrown away (nothing counts flows), and the second one says what is true. A drain moves no limit, so no echo is written
before that is answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from links.amqp.engine.binding import lib
from links.amqp.engine.events import Proved
from links.amqp.engine.handles import LinkHandle
from links.amqp.wire.frames import ATTACH, FLOW, Frame, Frames, fields_of, link_state, reaches, with_echo
from links.amqp.wire.values import scalar, text

__all__ = ["Echoes"]


class Echoes:
    """The echoes that receivers have asked for, and their answers."""

    def __init__(self, pull: Callable[[], bytes]) -> None:
        self._pull = pull
        """Gives what proton has to write, in whole frames."""
        self._asking: dict[LinkHandle, None] = {}
        self._attaching: dict[str, LinkHandle] = {}
        self._theirs: dict[tuple[int, int], LinkHandle] = {}
        """Receivers of ours, by the peer's channel and handle."""

    def __bool__(self) -> bool:
        return bool(self._asking)

    # --- asking

    def ask(self, link: LinkHandle) -> int:
        """Ask for an echo behind what has been ordered so far; returns its number.

        Asks that were not written yet are one.
        """
        if link.echo_asked == link.echo_written:
            link.echo_asked += 1
        self._asking[link] = None
        return link.echo_asked

    def ask_by(self, link: LinkHandle, data: bytes) -> bytes:
        """Let the flow of this link in `data`, which is all that is there to write, ask for an echo."""
        frames: list[bytes] = []
        for frame in Frames().feed(data):
            state = link_state(frame) if frame.code == FLOW else None
            frames.append(frame.raw if state is None else with_echo(frame))
            if state is not None and link.echo_asked != link.echo_written and self._may_write(link):
                link.echo_written, link.echo_limit = link.echo_asked, state.limit
                self._asking.pop(link, None)
        return b"".join(frames)

    def _may_write(self, link: LinkHandle) -> bool:
        """One at a time, and none that a drain's answer could be taken for."""
        return link.attached and not link.drain_unanswered and link.echo_proved == link.echo_written

    def data_to_send(self) -> bytes:
        """The echoes that may be written now; to be called when `pull` has nothing more."""
        due: list[bytes] = []
        for link in tuple(self._asking):
            if not link.alive:
                del self._asking[link]
            elif self._may_write(link):
                lib.pn_link_flow(link.pointer, 1)
                due += [frame.raw for frame in Frames().feed(self._pull()) if frame.code != FLOW]
                lib.pn_link_flow(link.pointer, -1)
                due.append(self.ask_by(link, self._pull()))
        return b"".join(due)

    # --- hearing

    def attaching(self, link: LinkHandle) -> None:
        """We attach this link: the peer's attach of the same name will say how it calls it."""
        self._attaching = {name: each for name, each in self._attaching.items() if each.alive}
        if not link.is_sender:
            self._attaching[link.name] = link

    def answered(self, frames: Iterable[Frame]) -> list[Proved]:
        """What these frames of the peer prove."""
        proofs: list[Proved] = []
        for frame in frames:
            try:
                if frame.code == ATTACH:
                    self._attached(frame)
                elif frame.code == FLOW and (proof := self._flowed(frame)) is not None:
                    proofs.append(proof)
            except (ValueError, IndexError):
                pass  # cut short or too few fields: proton says what is wrong with it
        return proofs

    def _flowed(self, frame: Frame) -> Proved | None:
        state = link_state(frame)
        link = None if state is None else self._theirs.get((frame.channel, state.handle))
        if state is None or link is None or not link.alive:
            return None
        if state.drain:
            link.drain_unanswered = False
        if link.echo_written == link.echo_proved or not reaches(state.limit, link.echo_limit):
            return None
        link.echo_proved = link.echo_written
        return Proved(link, link.echo_proved)

    def _attached(self, frame: Frame) -> None:
        name, handle, is_receiver = fields_of(frame)[:3]
        named = text(name, 0)
        if named is not None and scalar(is_receiver, 0) is False:
            link = self._attaching.pop(named.decode(errors="replace"), None)
            if link is not None:
                number = scalar(handle, 0)
                self._theirs[frame.channel, number if isinstance(number, int) else 0] = link
