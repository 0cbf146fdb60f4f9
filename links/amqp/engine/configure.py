"""How a connection is set up, before its first byte: login, bounds, and who we are. Pure."""

from __future__ import annotations

from links.amqp.engine.binding import Pointer, lib, put_map, put_symbols
from links.amqp.engine.settings import Settings

__all__ = ["configure"]


def configure(transport: Pointer, connection: Pointer, settings: Settings, *, accepting: bool) -> None:
    """Write the settings into proton's two halves of a connection, and bind them."""
    if accepting:
        lib.pn_transport_set_server(transport)
    lib.pn_transport_set_max_frame(transport, settings.max_frame)
    lib.pn_transport_set_idle_timeout(transport, min(int(settings.idle_timeout * 1000), 0xFFFFFFFF))
    if settings.login is not None:
        # before the bind, which copies the user; proton takes our TLS for clear text, so PLAIN must be allowed
        sasl = lib.pn_sasl(transport)
        lib.pn_sasl_allowed_mechs(sasl, settings.login.mechanism.encode())
        lib.pn_sasl_set_allow_insecure_mechs(sasl, True)
        if settings.login.mechanism == "PLAIN":
            lib.pn_connection_set_user(connection, settings.login.user.encode())
            lib.pn_connection_set_password(connection, settings.login.password.encode())
    lib.pn_connection_set_container(connection, settings.container.encode())
    if settings.hostname is not None:
        lib.pn_connection_set_hostname(connection, settings.hostname.encode())
    put_map(lib.pn_connection_properties(connection), settings.properties)
    if accepting:
        put_symbols(lib.pn_connection_offered_capabilities(connection), settings.capabilities)
    else:
        put_symbols(lib.pn_connection_desired_capabilities(connection), settings.capabilities)
    lib.pn_transport_bind(transport, connection)
