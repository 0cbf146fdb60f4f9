"""What a peer is, the two ends of a link, and what was said of a delivery: to and from proton's memory."""

from __future__ import annotations

from links.amqp.engine.binding import Pointer, condition_of, lib, map_of, put_symbols, symbols_of, text_of
from links.amqp.engine.events import Disposition, Opened, State, Terminus

__all__ = ["disposition_of", "opened_of", "put_terminus", "terminus_of"]


def terminus_of(terminus: Pointer) -> Terminus | None:
    """A remote source or target; None: there is none."""
    if lib.pn_terminus_get_type(terminus) == lib.PN_UNSPECIFIED:
        return None
    return Terminus(
        text_of(lib.pn_terminus_get_address(terminus)),
        symbols_of(lib.pn_terminus_capabilities(terminus)),
        bool(lib.pn_terminus_is_dynamic(terminus)),
    )


def put_terminus(pointer: Pointer, terminus: Terminus) -> None:
    """Write a source or target of ours."""
    if terminus.address is not None:
        lib.pn_terminus_set_address(pointer, terminus.address.encode())
    if terminus.dynamic:
        lib.pn_terminus_set_dynamic(pointer, True)
    put_symbols(lib.pn_terminus_capabilities(pointer), terminus.capabilities)


def opened_of(connection: Pointer, transport: Pointer) -> Opened:
    """What the peer said when it opened the connection."""
    return Opened(
        container=text_of(lib.pn_connection_remote_container(connection)) or "",
        hostname=text_of(lib.pn_connection_remote_hostname(connection)),
        properties=map_of(lib.pn_connection_remote_properties(connection)),
        capabilities=symbols_of(lib.pn_connection_remote_offered_capabilities(connection)),
        sessions=int(lib.pn_transport_remote_channel_max(transport)) + 1,
        max_frame=lib.pn_transport_get_remote_max_frame(transport),
    )


def disposition_of(remote: Pointer, state: int) -> Disposition:
    """What the peer has said of a delivery: a terminal state."""
    if state == State.MODIFIED:
        return Disposition(
            State.MODIFIED,
            failed=bool(lib.pn_disposition_is_failed(remote)),
            undeliverable=bool(lib.pn_disposition_is_undeliverable(remote)),
            annotations=map_of(lib.pn_disposition_annotations(remote)) or None,
        )
    if state == State.REJECTED:
        return Disposition(State.REJECTED, condition=condition_of(lib.pn_disposition_condition(remote)))
    return Disposition(State(state))
