"""The half of an engine that hears: proton's events become ours, and its deliveries bytes of ours.

It owns what pointer belongs to which handle: one is forgotten when it is freed, and freed only when no event that names
it can be left. It hears proton's collector, and tells its engine by a list of events. It has no coroutine.
"""

from __future__ import annotations

from collections.abc import Callable

from links.amqp.engine.binding import Pointer, condition_of, errors_of, ffi, lib, map_of, put_condition, text_of
from links.amqp.engine.events import (
    Aborted,
    Arrived,
    Closed,
    Condition,
    CreditGranted,
    DispositionOf,
    Drained,
    Event,
    Failed,
    LinkAttached,
    LinkDetached,
    LinkRequested,
    SessionEnded,
    SessionOpened,
    Spoken,
    State,
)
from links.amqp.engine.handles import Arrival, LinkHandle, SessionHandle
from links.amqp.engine.states import disposition_of, opened_of, terminus_of

__all__ = ["HUNG_UP", "TOO_LONG", "EventReader"]

TOO_LONG = "amqp:link:message-size-exceeded"
_ABORTED = "connection aborted"
_ABORTED_READ = -11  # PN_ABORTED, which the binding does not name
HUNG_UP = Condition("", "the peer has hung up, without a close")

_DELIVERY = lib.PN_DELIVERY
_CHUNK = 65536
_STATES = frozenset(int(state) for state in State)
_LOCAL_CLOSED = lib.PN_LOCAL_CLOSED


class EventReader:
    """Reads what happened on one transport."""

    def __init__(self, *, accepting: bool, max_message: int | None) -> None:
        self.collector: Pointer = ffi.gc(lib.pn_collector(), lib.pn_collector_free)
        self.connection: Pointer = ffi.gc(lib.pn_connection(), lib.pn_decref)
        self.transport: Pointer = ffi.gc(lib.pn_transport(), lib.pn_decref)
        lib.pn_connection_collect(self.connection, self.collector)
        self._printed = errors_of(self.transport)
        self.accepting = accepting
        self.max_message = max_message
        self.ended: Closed | Failed | None = None
        self.sessions: dict[Pointer, SessionHandle] = {}
        self.links: dict[Pointer, LinkHandle] = {}
        self.sent: dict[Pointer, tuple[LinkHandle, int]] = {}
        """Messages of ours that are unsettled, and their numbers."""
        self.sessions_allowed: int | None = None
        """By the peer; None: it has not said yet."""
        self.begun: list[SessionHandle] = []
        """Sessions that the peer has opened, in order, until somebody has looked at what it allows on them."""
        self.heard: list[Event] = []
        self.spoken = False
        """The peer has said something, be it garbage."""
        self.hung_up = False
        """Nothing more comes."""
        self._word: dict[LinkHandle, set[Pointer]] = {}
        """Deliveries that came, and of which the sender has said something since."""
        self._readable: dict[LinkHandle, None] = {}
        self._gone_links: list[LinkHandle] = []
        self._gone_sessions: list[SessionHandle] = []
        self._buffer: Pointer = ffi.new("char[]", _CHUNK)
        self._size = _CHUNK
        self._view = ffi.buffer(self._buffer)
        self._answers: dict[int, Callable[[Pointer], None]] = {
            lib.PN_CONNECTION_REMOTE_OPEN: self._opened,
            lib.PN_CONNECTION_REMOTE_CLOSE: self._closed,
            lib.PN_SESSION_REMOTE_OPEN: self._session_opened,
            lib.PN_SESSION_REMOTE_CLOSE: self._session_ended,
            lib.PN_LINK_REMOTE_OPEN: self._attached,
            lib.PN_LINK_REMOTE_CLOSE: self._detached,
            lib.PN_LINK_REMOTE_DETACH: self._detached,
            lib.PN_LINK_FLOW: self._flowed,
            lib.PN_TRANSPORT_ERROR: self._failed,
        }

    def buffer(self, size: int) -> Pointer:
        """A piece of C memory of at least this size, for the next call alone."""
        if size > self._size:
            self._buffer, self._size = ffi.new("char[]", size), size
            self._view = ffi.buffer(self._buffer)
        return self._buffer

    def take(self) -> list[Event]:
        """What was heard since the last call."""
        heard, self.heard = self.heard, []
        return heard

    def add_session(self, pointer: Pointer) -> SessionHandle:
        """Know a session."""
        session = self.sessions[pointer] = SessionHandle(pointer)
        return session

    def add_link(
        self, pointer: Pointer, session: SessionHandle, name: str, *, is_sender: bool, presettled: bool
    ) -> LinkHandle:
        """Know a link."""
        link = LinkHandle(pointer, session, name, is_sender=is_sender, presettled=presettled)
        self.links[pointer] = link
        session.links.add(link)
        session.handles += 1
        return link

    # --- hearing

    def read(self) -> None:
        """Turn what proton has collected into events."""
        collector = self.collector
        peek, pop, type_of = lib.pn_collector_peek, lib.pn_collector_pop, lib.pn_event_type
        links, answers, readable = self.links, self._answers, self._readable
        delivery_of, updated = lib.pn_event_delivery, lib.pn_delivery_updated
        while event := peek(collector):
            kind = type_of(event)
            if kind == _DELIVERY:
                delivery = delivery_of(event)
                link = links.get(lib.pn_delivery_link(delivery))
                if link is not None and link.alive:
                    if link.is_sender:
                        self._updated(delivery)
                    else:
                        readable[link] = None
                        if updated(delivery):
                            self._note_word(link, delivery)
            elif (answer := answers.get(kind)) is not None:
                if readable:
                    self._read_all()  # what came before is told before
                answer(event)
            pop(collector)
        if readable:
            self._read_all()
        if self._printed:
            self._hear_printed()

    def _hear_printed(self) -> None:
        """After an error that proton prints without an event it goes on with heartbeats, and writes nothing else."""
        printed, errors = "; ".join(self._printed), any(line.startswith("ERROR") for line in self._printed)
        self._printed.clear()
        if errors:
            self.fail(Condition("amqp:internal-error", printed))

    def fail(self, condition: Condition, *, refused: bool = False) -> None:
        """The connection is over."""
        self._end(Failed(condition, refused))

    def _end(self, how: Closed | Failed) -> None:
        if self.ended is None:
            self.ended = how
            self.heard.append(how)
            for session in self.sessions.values():
                _kill(session)
            self.sent.clear()

    # --- the connection

    def _opened(self, _event: Pointer) -> None:
        opened = opened_of(self.connection, self.transport)
        self.sessions_allowed = opened.sessions
        self.heard.append(opened)

    def _closed(self, _event: Pointer) -> None:
        lib.pn_connection_close(self.connection)
        self._end(Closed(condition_of(lib.pn_connection_remote_condition(self.connection))))

    def _failed(self, _event: Pointer) -> None:
        condition = condition_of(lib.pn_transport_condition(self.transport))
        condition = condition or Condition("amqp:internal-error", "the transport failed")
        stranger = self.spoken and (
            "header mismatch" in condition.description or "protocol header" in condition.description
        )
        if self.hung_up and condition.description == _ABORTED:
            condition = HUNG_UP  # proton calls that a framing error
        self.fail(condition, refused=stranger or condition.name == "amqp:unauthorized-access")

    # --- sessions

    def _session_opened(self, event: Pointer) -> None:
        pointer = lib.pn_event_session(event)
        session = self.sessions.get(pointer)
        if session is None:
            session = self.add_session(pointer)
            lib.pn_session_open(pointer)
        elif session.opened:  # proton would keep a channel of it behind its end, and crash on that
            self.fail(Condition("amqp:not-allowed", "the peer began a session twice"))
        session.opened = True
        self.begun.append(session)
        self.heard.append(SessionOpened(session))

    def _session_ended(self, event: Pointer) -> None:
        session = self.sessions.get(lib.pn_event_session(event))
        if session is not None and session.alive:
            condition = condition_of(lib.pn_session_remote_condition(session.pointer))
            if not session.ended:
                session.ended = True
                lib.pn_session_close(session.pointer)
            _kill(session)
            self._gone_sessions.append(session)
            self.heard.append(SessionEnded(session, condition))

    # --- links

    def _attached(self, event: Pointer) -> None:
        pointer = lib.pn_event_link(event)
        link = self.links.get(pointer)
        source, target = (
            terminus_of(lib.pn_link_remote_source(pointer)),
            terminus_of(lib.pn_link_remote_target(pointer)),
        )
        properties = map_of(lib.pn_link_remote_properties(pointer))
        if link is not None:
            remote = target if link.is_sender else source
            link.attached = remote is not None
            most = int(lib.pn_link_remote_max_message_size(pointer)) or None
            self.heard.append(LinkAttached(link, remote, properties, most))
            return
        session = self.sessions.get(lib.pn_link_session(pointer))
        if session is not None and session.alive:
            link = self.add_link(
                pointer,
                session,
                text_of(lib.pn_link_name(pointer)) or "",
                is_sender=lib.pn_link_is_sender(pointer),
                presettled=lib.pn_link_remote_snd_settle_mode(pointer) == lib.PN_SND_SETTLED,
            )
            self.heard.append(LinkRequested(link, source, target, properties))

    def _detached(self, event: Pointer) -> None:
        link = self.links.get(lib.pn_event_link(event))
        if link is not None and link.alive:
            condition = condition_of(lib.pn_link_remote_condition(link.pointer))
            if not lib.pn_link_state(link.pointer) & _LOCAL_CLOSED:
                lib.pn_link_close(link.pointer)
            link.alive = False
            self._gone_links.append(link)
            self.heard.append(LinkDetached(link, condition))

    def detach(self, link: LinkHandle, condition: Condition | None) -> None:
        """Close our end of a link, once."""
        if link.alive and not lib.pn_link_state(link.pointer) & _LOCAL_CLOSED:
            put_condition(lib.pn_link_condition(link.pointer), condition)
            lib.pn_link_close(link.pointer)

    def _flowed(self, event: Pointer) -> None:
        link = self.links.get(lib.pn_event_link(event))
        if link is None or not link.alive:
            return
        pointer = link.pointer
        if link.is_sender:
            drain = bool(lib.pn_link_get_drain(pointer))
            self.heard.append(CreditGranted(link, lib.pn_link_credit(pointer), drain))
            return
        self._end_drain(link)

    def _end_drain(self, link: LinkHandle) -> None:
        """No credit is left: nothing more comes, whether the peer says so or not (proton's own sender does not)."""
        if link.draining and lib.pn_link_credit(link.pointer) == 0:
            link.draining = False
            self.heard.append(Drained(link, lib.pn_link_drained(link.pointer)))

    # --- deliveries

    def _read_all(self) -> None:
        for link in self._readable:
            if link.alive:
                self._read_link(link)
        self._readable.clear()
        for link, which in self._word.items():
            if which and link.alive:
                self.heard.append(Spoken(link, frozenset(which)))
        self._word.clear()

    def _note_word(self, link: LinkHandle, delivery: Pointer) -> None:
        if lib.pn_delivery_settled(delivery) or lib.pn_delivery_remote_state(delivery) in _STATES:
            self._word.setdefault(link, set()).add(delivery)

    def _forget_word(self, link: LinkHandle, delivery: Pointer) -> None:
        """It was said with the delivery itself: it came settled, or was given up."""
        if (which := self._word.get(link)) is not None:
            which.discard(delivery)

    def _read_link(self, link: LinkHandle) -> None:
        """Read what has come on a link; a delivery that is not whole yet is read as far as it has come."""
        pointer, arrivals = link.pointer, list[Arrival]()
        current, receive, advance = lib.pn_link_current, lib.pn_link_recv, lib.pn_link_advance
        is_partial, presettled = lib.pn_delivery_partial, lib.pn_delivery_settled
        while delivery := current(pointer):
            size = receive(pointer, self._buffer, self._size)  # not asking before how much there is saves a call
            if size == _ABORTED_READ:
                self._give_up(link, delivery, arrivals)
                arrivals = []
                continue
            raw = self._view[:size] if size > 0 else b""
            while size == self._size:  # there may be more
                more = max(lib.pn_delivery_pending(delivery), 1)
                size = receive(pointer, self.buffer(more), more)
                raw += self._view[:size] if size > 0 else b""
            size = len(raw)
            partial = is_partial(delivery)
            if partial or link.partial is not None:
                whole = link.partial = link.partial or bytearray()
                whole += raw
                size = len(whole)
            if self.max_message is not None and size > self.max_message:
                why = Condition(TOO_LONG, f"more than {self.max_message} bytes")
                put_condition(lib.pn_disposition_condition(lib.pn_delivery_local(delivery)), why)
                lib.pn_delivery_update(delivery, int(State.REJECTED))
                self._give_up(link, delivery, arrivals)
                self.detach(link, why)
                return
            if partial:
                break
            if link.partial is not None:
                raw, link.partial = bytes(link.partial), None
            advance(pointer)
            if settled := bool(presettled(delivery)):
                self._forget_word(link, delivery)
                lib.pn_delivery_settle(delivery)  # proton forgets it, and the peer hears nothing
            arrivals.append(Arrival(link, None if settled else delivery, raw, settled))
        if arrivals:
            self.heard.append(Arrived(link, arrivals))
        self._end_drain(link)

    def _give_up(self, link: LinkHandle, delivery: Pointer, before: list[Arrival]) -> None:
        if before:
            self.heard.append(Arrived(link, before))
        link.partial = None
        self._forget_word(link, delivery)
        lib.pn_link_advance(link.pointer)
        lib.pn_delivery_settle(delivery)
        self.heard.append(Aborted(link))

    def _updated(self, delivery: Pointer) -> None:
        """The receiver said something of a message of ours."""
        state, settled = lib.pn_delivery_remote_state(delivery), lib.pn_delivery_settled(delivery)
        if not settled and state not in _STATES:
            return  # not terminal: *received*
        link, number = self.sent.pop(delivery, (None, 0))
        if link is None:
            return
        disposition = disposition_of(lib.pn_delivery_remote(delivery), state) if state in _STATES else None
        lib.pn_delivery_settle(delivery)
        self.heard.append(DispositionOf(link, number, disposition))

    # --- freeing

    def free(self) -> None:
        """Free links and sessions whose end was written.

        A link with unsettled deliveries waits for its session: proton settles what it frees, and a session that is
        still open would say so on the wire.
        """
        while event := lib.pn_collector_peek(self.collector):
            del event
            self.read()
        for link in self._gone_links:
            link.session.handles -= 1
            if link.session.alive and not lib.pn_link_unsettled(link.pointer):
                self._forget(link)
                lib.pn_link_free(link.pointer)
        self._gone_links.clear()
        for session in self._gone_sessions:
            for link in tuple(session.links):
                self._forget(link)
            del self.sessions[session.pointer]
            lib.pn_session_free(session.pointer)
        self._gone_sessions.clear()

    def _forget(self, link: LinkHandle) -> None:
        del self.links[link.pointer]
        link.session.links.discard(link)
        if link.is_sender:
            for delivery in [each for each, (owner, _) in self.sent.items() if owner is link]:
                del self.sent[delivery]


def _kill(session: SessionHandle) -> None:
    session.alive = False
    for link in session.links:
        link.alive = False
