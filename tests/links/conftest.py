"""Fixtures that several tests of links share, where what they need is installed."""

from __future__ import annotations

from importlib.util import find_spec

__all__: list[str] = []

if find_spec("proton") is not None:
    from tests.links.amqp_kit import clock, place, shape

    __all__ += ["clock", "place", "shape"]
