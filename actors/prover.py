"""Books what was said when the other side has shown that it saw it: where a verb gets no answer (AMQP).

Owns nothing: what is unproved stands in the hand, as *with the link*. Hears from the settler what was said, over a
channel, so that one proof serves all that was said before it. Tells the hand. Cancelled, or when the link breaks, what
is unproved is booked by the life as unknown; its place returned, and its copy was owed, when it was said.
"""

from __future__ import annotations

from typing import Any, Final

import trio

from actors.hand import Hand
from actors.messages import Said
from links.abc import Link

__all__ = ["Prover"]

PAUSE: Final = 0.01
"""Seconds between two proofs: each asks the other side for an answer, which is not free."""


class Prover:
    """One per life of a link that `proves`."""

    def __init__(self, link: Link[Any], hand: Hand) -> None:
        self._link = link
        self._hand = hand

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
                        self._hand.ended(line, received)
                await trio.sleep(PAUSE)
