"""An AMQP 1.0 connection without IO: bytes and orders in, events and bytes out. No clock, no task, no socket.

It drives python-qpid-proton's engine through the C binding, and knows what that engine must not be asked:

* credit is given after the remote attach alone (RabbitMQ 4.0.5 sends too much otherwise, then ends the session);
* a disposition is updated and settled in one step (RabbitMQ 4.3.6 ends the session on one that is not settled);
* every value is copied out of proton's memory; a partial delivery is read as it comes;
* a handle is dead after the end of its link, session or connection: its pointer is never used again;
* a link is freed after its detach was written and when nothing of it is unsettled, else with its session: proton
  settles what it frees, and that would be said on the wire;
* proton does nothing about silence before the first byte: `tick` does.

Not thread-safe; whoever owns it calls it from one task at a time. Each order may produce bytes and events: take both.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from links.amqp.engine.binding import ffi, lib, put_condition, put_map
from links.amqp.engine.configure import configure
from links.amqp.engine.echoes import Echoes
from links.amqp.engine.event_reader import EventReader
from links.amqp.engine.events import (
    ACCEPTED,
    Closed,
    Condition,
    Disposition,
    Event,
    Failed,
    State,
    Terminus,
)
from links.amqp.engine.handles import Arrival, LinkHandle, SessionHandle
from links.amqp.engine.limits import check_links, check_sessions, note_links
from links.amqp.engine.settings import Settings
from links.amqp.engine.states import put_terminus
from links.amqp.wire.frames import Frame, FramePicker

__all__ = ["Engine"]

_ACCEPTED = int(State.ACCEPTED)
_MODIFIED = int(State.MODIFIED)
_REJECTED = int(State.REJECTED)
_SETTLED, _UNSETTLED = lib.PN_SND_SETTLED, lib.PN_SND_UNSETTLED


class Engine:
    """One connection, one end of it."""

    def __init__(self, settings: Settings, *, accepting: bool = False) -> None:
        self.settings = settings
        self.accepting = accepting
        self.frames_received = 0
        """The weakest proof that something was seen over there: a frame that came after it was written."""
        self._names = self._numbers = 0
        self._echoes = Echoes(self._pull)
        self._picker = FramePicker()
        self._grants: dict[LinkHandle, int] = {}
        """Credit that is not with proton yet, which writes flows before dispositions: the peer would send one too many,
        and another one than what was given back to it."""
        self._heard = False
        self._heard_at: float | None = None
        self._reader = EventReader(accepting=accepting, max_message=settings.max_message)
        self._transport = self._reader.transport
        self._connection = self._reader.connection
        configure(self._transport, self._connection, settings, accepting=accepting)

    @property
    def logged_in(self) -> bool:
        """Has the peer taken the login?"""
        return bool(lib.pn_sasl_outcome(lib.pn_sasl(self._transport)) == lib.PN_SASL_OK)

    @property
    def ended(self) -> Closed | Failed | None:
        """Why the connection is over; None: it is not."""
        return self._reader.ended

    # --- bytes and time

    def receive_bytes(self, data: bytes | bytearray) -> None:
        """Take bytes from the peer."""
        if not data:
            return
        self.mark_heard()
        held = ffi.from_buffer("char[]", data)
        at, size, transport = 0, len(data), self._transport
        while at < size:
            room = lib.pn_transport_capacity(transport)
            if room <= 0:
                break
            count = lib.pn_transport_push(transport, held + at, min(room, size - at))
            if count <= 0:
                break
            at += count
        self.frames_received = lib.pn_transport_get_frames_input(transport)
        reader = self._reader
        reader.read()
        frames: list[Frame] = []
        if not self.accepting:
            frames = self._picker.feed(bytes(data))
            reader.heard += self._echoes.answered(frames)
        if reader.begun:
            note_links(reader.begun, frames)
        if lib.pn_transport_capacity(transport) < 0:
            self._input_is_over()

    def mark_heard(self) -> None:
        """The peer is not mute."""
        self._heard = self._reader.spoken = True

    def receive_eof(self) -> None:
        """Nothing more comes from the peer."""
        self._reader.hung_up = True
        lib.pn_transport_close_tail(self._transport)
        self._reader.read()
        self._input_is_over()

    def _input_is_over(self) -> None:
        """Proton says why by an event, but for some frames that it cannot decode."""
        if self.ended is None:
            self._reader.fail(Condition("amqp:decode-error", "the peer has sent what is no AMQP"))

    def data_to_send(self) -> bytes:
        """What is to be written now: whole frames."""
        data = self._pull()
        if self._grants:
            data += self._flows()
        if self._echoes:
            data += self._echoes.data_to_send()
        self._reader.read()
        self._reader.free()
        return data

    def _pull(self) -> bytes:
        transport, chunks = self._transport, list[bytes]()
        while (size := lib.pn_transport_pending(transport)) > 0:
            buffer = self._reader.buffer(size)
            count = lib.pn_transport_peek(transport, buffer, size)
            chunks.append(ffi.buffer(buffer, count)[:])
            lib.pn_transport_pop(transport, count)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def tick(self, now: float) -> float | None:
        """Tell the time, in seconds on a clock that never goes back; returns when to tell it again, at the latest."""
        milliseconds = lib.pn_transport_tick(self._transport, int(now * 1000) + 1)
        deadline = milliseconds / 1000 if milliseconds > 0 else None
        if self.ended is None and self.settings.idle_timeout > 0:
            if self._heard or self._heard_at is None:
                self._heard, self._heard_at = False, now
            silent = self._heard_at + self.settings.idle_timeout * 1.5
            if now >= silent:
                silence = f"nothing was heard for {now - self._heard_at:g} s"
                self._reader.fail(Condition("amqp:resource-limit-exceeded", silence))
            deadline = silent if deadline is None else min(deadline, silent)
        self._reader.read()
        return deadline

    def events(self) -> list[Event]:
        """What has happened since the last call."""
        return self._reader.take()

    def fail(self, condition: Condition) -> None:
        """Give up: `Failed` comes."""
        self._reader.fail(condition)

    # --- the connection and its sessions

    def open(self) -> None:
        """Open the connection."""
        lib.pn_connection_open(self._connection)

    def close(self, condition: Condition | None = None) -> None:
        """Close the connection."""
        put_condition(lib.pn_connection_condition(self._connection), condition)
        lib.pn_connection_close(self._connection)

    def begin(self) -> SessionHandle:
        """Begin a session. Raises `LinkRefused` where the peer allows no more of them."""
        check_sessions(len(self._reader.sessions), self._reader.sessions_allowed)
        session = self._reader.add_session(lib.pn_session(self._connection))
        lib.pn_session_open(session.pointer)
        return session

    def end(self, session: SessionHandle, condition: Condition | None = None) -> None:
        """End a session, and with it its links."""
        if session.alive and not session.ended:
            session.ended = True
            put_condition(lib.pn_session_condition(session.pointer), condition)
            lib.pn_session_close(session.pointer)

    # --- links

    def attach_receiver(
        self,
        session: SessionHandle,
        source: Terminus,
        *,
        target: str | None = None,
        name: str | None = None,
        properties: Mapping[str, object] | None = None,
        presettled: bool = False,
    ) -> LinkHandle | None:
        """Attach a receiver; None on a dead session. Credit is granted after `LinkAttached`.

        Raises `LinkRefused` where the peer allows no more links on this session.
        """
        return self._attach(
            session, (source, Terminus(target)), name, properties, is_sender=False, presettled=presettled
        )

    def attach_sender(
        self,
        session: SessionHandle,
        target: Terminus,
        *,
        source: str | None = None,
        name: str | None = None,
        properties: Mapping[str, object] | None = None,
        presettled: bool = False,
    ) -> LinkHandle | None:
        """Attach a sender; None on a dead session. Send after `CreditGranted`. Raises as `attach_receiver`."""
        return self._attach(
            session, (Terminus(source), target), name, properties, is_sender=True, presettled=presettled
        )

    def _attach(
        self,
        session: SessionHandle,
        ends: tuple[Terminus, Terminus],
        name: str | None,
        properties: Mapping[str, object] | None,
        *,
        is_sender: bool,
        presettled: bool,
    ) -> LinkHandle | None:
        if not session.alive or session.ended:
            return None
        check_links(session)
        self._names += 1
        name = name or f"{self.settings.container}-{'sender' if is_sender else 'receiver'}-{self._names}"
        make = lib.pn_sender if is_sender else lib.pn_receiver
        pointer = make(session.pointer, name.encode())
        link = self._reader.add_link(pointer, session, name, is_sender=is_sender, presettled=presettled)
        self._echoes.attaching(link)
        put_terminus(lib.pn_link_source(pointer), ends[0])
        put_terminus(lib.pn_link_target(pointer), ends[1])
        put_map(lib.pn_link_properties(pointer), properties or {})
        if presettled or is_sender:
            lib.pn_link_set_snd_settle_mode(pointer, _SETTLED if presettled else _UNSETTLED)
        if not is_sender and self.settings.max_message is not None:
            lib.pn_link_set_max_message_size(pointer, self.settings.max_message)
        lib.pn_link_open(pointer)
        return link

    def accept(self, link: LinkHandle, source: Terminus | None, target: Terminus | None) -> None:
        """Answer `LinkRequested` by an attach with these ends."""
        if link.alive:
            pointer = link.pointer
            for terminus, value in (
                (lib.pn_link_source(pointer), source),
                (lib.pn_link_target(pointer), target),
            ):
                if value is not None:
                    put_terminus(terminus, value)
            lib.pn_link_set_snd_settle_mode(pointer, lib.pn_link_remote_snd_settle_mode(pointer))
            if not link.is_sender and self.settings.max_message is not None:
                lib.pn_link_set_max_message_size(pointer, self.settings.max_message)
            link.attached = True
            lib.pn_link_open(pointer)

    def refuse(self, link: LinkHandle, condition: Condition) -> None:
        """Answer `LinkRequested` by an attach without an end, and the reason."""
        if link.alive:
            for terminus in (lib.pn_link_source(link.pointer), lib.pn_link_target(link.pointer)):
                lib.pn_terminus_set_type(terminus, lib.PN_UNSPECIFIED)
            lib.pn_link_open(link.pointer)
            self.detach(link, condition)

    def detach(self, link: LinkHandle, condition: Condition | None = None) -> None:
        """Detach a link and close it: what is unsettled goes back."""
        self._reader.detach(link, condition)

    # --- deliveries that come

    def grant(self, link: LinkHandle, credit: int) -> bool:
        """Give a receiver so much more credit; False: dead, or not attached yet."""
        if not (link.alive and link.attached):
            return False
        link.draining = False
        self._grants[link] = self._grants.get(link, 0) + credit
        return True

    def _flows(self) -> bytes:
        """The flows that give the credit of `_grants`; those of links with an echo on its way ask for it, too."""
        grants, self._grants = self._grants, {}
        chunks: list[bytes] = []
        for link, credit in grants.items():
            if link.alive and link.echoing:
                lib.pn_link_flow(link.pointer, credit)
                chunks.append(self._echoes.ask_by(link, self._pull()))
        for link, credit in grants.items():
            if link.alive and not link.echoing:
                lib.pn_link_flow(link.pointer, credit)
        return b"".join((*chunks, self._pull()))

    def drain(self, link: LinkHandle) -> bool:
        """Ask for what is there and take the rest of the credit back; `Drained` comes. False: there is no credit."""
        if not (link.alive and link.attached and self.credit(link)):
            return False
        link.draining = link.drain_unanswered = True
        lib.pn_link_drain(link.pointer, self._grants.pop(link, 0))
        return True

    def settle(self, arrival: Arrival, disposition: Disposition = ACCEPTED) -> bool:
        """Say what becomes of a delivery; False: it was said before, came settled, or is dead. Nothing is said then."""
        pointer = arrival.pointer
        if pointer is None or not arrival.link.alive:
            return False
        arrival.pointer = None
        state = int(disposition.state)
        if state == _MODIFIED:
            local = lib.pn_delivery_local(pointer)
            lib.pn_disposition_set_failed(local, disposition.failed)
            lib.pn_disposition_set_undeliverable(local, disposition.undeliverable)
            put_map(lib.pn_disposition_annotations(local), disposition.annotations or {})
        elif state == _REJECTED:
            put_condition(lib.pn_disposition_condition(lib.pn_delivery_local(pointer)), disposition.condition)
        lib.pn_delivery_update(pointer, state)
        lib.pn_delivery_settle(pointer)
        return True

    def accept_all(self, arrivals: Iterable[Arrival]) -> list[Arrival]:
        """As `settle` with *accepted*, for many: those for which nothing was said."""
        update, settle = lib.pn_delivery_update, lib.pn_delivery_settle
        unsaid: list[Arrival] = []
        for arrival in arrivals:
            pointer = arrival.pointer
            if pointer is None or not arrival.link.alive:
                unsaid.append(arrival)
            else:
                arrival.pointer = None
                update(pointer, _ACCEPTED)
                settle(pointer)
        return unsaid

    def concede(self, arrival: Arrival) -> None:
        """The sender has said what becomes of this delivery: settle it as it says; nothing, where it is dead."""
        pointer = arrival.pointer
        if pointer is not None and arrival.link.alive:
            arrival.pointer = None
            if not lib.pn_delivery_settled(pointer):
                lib.pn_delivery_update(pointer, lib.pn_delivery_remote_state(pointer))
            lib.pn_delivery_settle(pointer)

    def echo(self, link: LinkHandle) -> int:
        """Ask the peer to answer what has been ordered so far; `Proved` comes with this number, or a later one."""
        return self._echoes.ask(link)

    # --- messages that go

    def send(self, link: LinkHandle, raw: bytes) -> int:
        """Send an encoded message; its `DispositionOf` has the number returned. 0: dead, nothing is sent.

        One that is sent without credit waits in proton's memory.
        """
        if not link.alive:
            return 0
        self._numbers += 1
        number = self._numbers
        tag = struct.pack(">I", number & 0xFFFFFFFF)
        delivery = lib.pn_delivery(link.pointer, (len(tag), ffi.from_buffer(tag)))
        lib.pn_link_send(link.pointer, ffi.from_buffer(raw), len(raw))
        lib.pn_link_advance(link.pointer)
        link.passed += 1
        if link.presettled:
            lib.pn_delivery_settle(delivery)
        else:
            self._reader.sent[delivery] = link, number
        return number

    def credit(self, link: LinkHandle) -> int:
        """How many messages may be sent; of a receiver: how many may still come."""
        return int(lib.pn_link_credit(link.pointer)) + self._grants.get(link, 0) if link.alive else 0

    def queued(self, link: LinkHandle) -> int:
        """How many messages were sent and are not written: without credit, or beyond the session's window."""
        return int(lib.pn_link_queued(link.pointer)) if link.alive else 0

    @property
    def blocked(self) -> bool:
        """Has a message been sent and not written? A flow that moves its session's window is no event."""
        return any(link.is_sender and self.queued(link) for link in self._reader.links.values())

    def drained(self, link: LinkHandle) -> None:
        """Answer a drain: the rest of the credit is given back."""
        if link.alive:
            link.passed += lib.pn_link_drained(link.pointer)
