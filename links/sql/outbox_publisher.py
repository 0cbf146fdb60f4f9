"""Publishing by an outbox: the record first, then the message."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from links.abc import Publisher
from settlement.delivery import Letter

__all__ = ["OutboxPublisher"]


class OutboxPublisher(Publisher):
    """Records each message, then sends it by the publisher that was registered; made by `Outbox.register`."""

    def __init__(self, name: str, to: Publisher, record: Callable[[str, Letter], Awaitable[int]], header: str) -> None:
        self.broker, self.name = to.broker, name
        self.to = to
        """Who sends it."""
        self._record, self._header = record, header

    def __repr__(self) -> str:
        return f"<OutboxPublisher of {self.name!r} to {self.to.name!r} on {self.broker.name}>"

    async def send(self, letter: Letter) -> None:
        """Record the letter in a transaction of its own, and send it.

        Where the record is not written nothing is sent: `PublishNotAccepted` where the table cannot hold it, such as a
        delay; `LinkBroken` where the connection broke amid it, and the record is there or not. Else as
        `Publisher.publish` of the registered one, with a note: the record stays, and `Outbox.republish` sends it
        again, also where its broker refused it.

        Cancellation: recorded or not; what was recorded is sent in the end.
        """
        key = await self._record(self.name, letter)
        try:
            await self.send_record(key, letter)
        except Exception as error:
            error.add_note(f"record {key} of the outbox stays, and is sent when it is republished")
            raise

    async def send_record(self, key: int, letter: Letter) -> None:
        """Send the letter of this record. Raises as `Publisher.publish`. Cancellation: sent or not."""
        headers = {**letter.headers, self._header: str(key).encode()}
        await self.to.send(Letter(letter.body, headers, letter.key, None, letter.original))
