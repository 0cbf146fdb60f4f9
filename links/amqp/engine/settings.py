"""What one end of a connection says when it opens it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

__all__ = ["Login", "Settings"]


@attrs.frozen
class Login:
    """One SASL mechanism, pinned: where the peer does not offer it, the login fails."""

    mechanism: str = "ANONYMOUS"
    """ANONYMOUS, PLAIN or EXTERNAL."""
    user: str = ""
    password: str = attrs.field(default="", repr=False)


@attrs.frozen
class Settings:
    """What our end says when it opens the connection."""

    container: str
    hostname: str | None = None
    """The virtual host, as the peer understands it."""
    login: Login | None = None
    """None: no SASL layer; the accepting side's own is in front of the engine."""
    idle_timeout: float = 30.0
    """Seconds of silence after which the connection has failed; half of it is asked of the peer."""
    max_frame: int = 131072
    max_message: int | None = None
    """The longest message that is taken; a longer one ends its link."""
    properties: Mapping[str, object] = attrs.field(factory=dict[str, object])
    capabilities: Sequence[str] = ()
    """Desired by the connecting side, offered by the accepting one."""
