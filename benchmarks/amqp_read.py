"""`amqp-read-CREDIT`: as `amqp-consume-CREDIT`, and every side reads the message. See amqp_consume.py."""

from __future__ import annotations

from benchmarks.amqp_consume import measure
from benchmarks.result import Result


def run(*, quick: bool) -> list[Result]:
    """Both credits, each peer."""
    return measure("amqp-read", quick=quick, reads=True)
