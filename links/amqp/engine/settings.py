"""What one end of a connection says when it opens it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

__all__ = ["Login", "Settings"]


@attrs.frozen
class Login:
    """One SASL mechanism, pinned: where the peer does not offer it, the login fails.

    Attributes:
        mechanism: ANONYMOUS, the default, PLAIN or EXTERNAL.
        user: For PLAIN; empty by default.
        password: For PLAIN; empty by default, and in no repr.
    """

    mechanism: str = "ANONYMOUS"
    user: str = ""
    password: str = attrs.field(default="", repr=False)


@attrs.frozen
class Settings:
    """What our end says when it opens the connection.

    Attributes:
        container: Who we are: the container-id (part 2 §2.7.1).
        hostname: The virtual host, as the peer understands it; None, the default: not said.
        login: None, the default: no SASL layer; the accepting side's own is in front of the engine.
        idle_timeout: Seconds of silence after which the connection has failed, 30 by default; half of it is asked of
            the peer (part 2 §2.4.5). 0: it never fails for that.
        max_frame: The longest frame that is taken, in bytes; 131072 by default.
        max_message: The longest message that is taken, in bytes; a longer one ends its link. None, the default: no
            limit.
        properties: Of the connection, as `product` and `version`; none by default.
        capabilities: Desired by the connecting side, offered by the accepting one; none by default.
    """

    container: str
    hostname: str | None = None
    login: Login | None = None
    idle_timeout: float = 30.0
    max_frame: int = 131072
    max_message: int | None = None
    properties: Mapping[str, object] = attrs.field(factory=dict[str, object])
    capabilities: Sequence[str] = ()
