"""Books what was said when the other side has shown that it saw it: where a verb gets no answer (AMQP).

Owns nothing: what is unproved stands in `InFlight`, as *with the link*. Hears from the settler what was said, over a
channel, so that one proof serves all that was said before it. Tells `InFlight`. Cancelled, or when the link breaks,
what is unproved is booked by the life as unknown; its place returned, and its copy was owed, when it was said.
"""

from __future__ import annotations

from typing import Any, Final

import trio

from actors.in_flight import InFlight
from actors.messages import Said
from links.abc import Link

__all__ = ["Prover"]

PAUSE: Final = 0.01
"""Seconds between two proofs: each asks the other side for an answer, which is not free."""


class Prover:
    """One per life of a link that `proves`."""

    def __init__(self, link: Link[Any], in_flight: InFlight) -> None:
        self._link = link
        self._in_flight = in_flight

    async def run(self, said: trio.MemoryReceiveChannel[Said]) -> None:
        """Until the settler has ended and everything is proved. Raises what ends the life."""
        with said:
            async for first in said:
                batch = [first]
                try:
                    while True:
                        batch.append(said.receive_nowait())
                except (trio.WouldBlock, trio.EndOfChannel):
                    pass
                await self._link.proved()
                for lines in batch:
                    for line, received in lines.items():
                        self._in_flight.proved(line, received)
                await trio.sleep(PAUSE)
