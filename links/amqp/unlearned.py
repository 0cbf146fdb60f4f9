"""What a link attached without knowing: the type of its queue, where RabbitMQ's management did not answer.

Owned by the link, which asks again beside its work: what could not be learned is weather, and never a *no*.
Meanwhile copies count, and what a stream says of itself in its messages is heard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import attrs
import trio

from links.amqp.connection_life import AGAIN, ConnectionLife
from links.amqp.engine.handles import Arrival
from links.amqp.rabbitmq import IS_A_STREAM, QueueInfo
from links.amqp.wire.sections import MESSAGE_ANNOTATIONS, walk
from links.amqp.wire.values import Undecodable, items
from links.errors import ConnectionBroken, LinkBroken, LinkRefused

__all__ = ["Unlearned"]

_OFFSET: Final = "x-stream-offset"


@attrs.frozen(eq=False)
class Unlearned:
    """One queue, of one life of the connection.

    Attributes:
        life: That life: it asks the management.
        queue: The name of that queue.
        learned: Hears what the queue is like. Raises `LinkRefused` where such a queue is none to take from.
        named: Makes of a refusal one that names the subscription.
    """

    life: ConnectionLife
    queue: str
    learned: Callable[[QueueInfo], None]
    named: Callable[[LinkRefused], LinkRefused]

    async def ask(self) -> bool:
        """Ask until there is an answer, each 5 s or later; False: the connection is over.

        Raises `LinkRefused` where the queue is gone, or none to take from. Cancellation: nothing was done.
        """
        while True:
            await trio.sleep(AGAIN)
            try:
                info = await self.life.queue(self.queue)
                self.learned(info)
            except LinkBroken:
                continue
            except ConnectionBroken:
                return False
            except LinkRefused as error:
                raise self.named(error) from error
            return True

    def look(self, arrivals: Sequence[Arrival]) -> None:
        """Raise `LinkRefused` where these come from a stream: each has its offset among the message annotations."""
        for arrival in arrivals:
            try:
                found = any(
                    code == MESSAGE_ANNOTATIONS and _OFFSET in items(arrival.raw, at)
                    for code, _, at, _ in walk(arrival.raw)
                )
            except Undecodable:
                continue
            if found:
                raise self.named(LinkRefused(IS_A_STREAM))
