"""Publishing is an INSERT, confirmed when its COMMIT is on the disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from links.abc import Publisher
from links.errors import CallBroken, ConnectionBroken, LinkBroken, PublishNotAccepted
from links.sql.database import Database
from links.sql.jobs import Insert
from links.sql.letters import dated
from links.sql.patience import PATIENCE
from links.sql.table import Table
from settlement.delivery import NO_HEADERS, Letter, check_letter

__all__ = ["SqlPublisher"]


class SqlPublisher(Publisher):
    """Publishes to one table, and there to one group; made by `SqlBroker.publisher`."""

    def __init__(self, database: Database, table: Table[Any], group: str | None) -> None:
        self.broker, self.database = database.broker, database
        self.table, self.group = table, group
        self.name = group if group is not None else table.name

    def __repr__(self) -> str:
        return f"<SqlPublisher to {self.name!r} on {self.broker.name}>"

    async def publish(
        self,
        body: bytes,
        headers: Mapping[str, bytes] = NO_HEADERS,
        *,
        key: str | None = None,
        delay: float | timedelta | None = None,
        due: datetime | None = None,
    ) -> None:
        """Insert one row and commit it, as `send`; not visible before it is due.

        `delay`: seconds or a `timedelta`, 0 or more, by the database's clock. `due`: an instant, a `datetime` with a
        time zone; one that has passed is due now. Both need a retry_after column (`PublishNotAccepted` without one).
        Raises `ValueError`, with nothing written, for both of them, another delay, or a `due` without a time zone;
        else as `send`.

        Cancellation: as `send`.
        """
        await self.send(dated(body, headers, key, delay, due))

    async def send(self, letter: Letter) -> None:
        """Insert one row and commit it; wakes this broker's queue on the same table and group.

        In row mode the body is a JSON object of the row's columns.

        Raises `PublishNotAccepted`, with nothing written, where the table cannot hold a header, the key or a delay, a
        constraint refuses the row or a trigger ignores it, the letter is none, the disk is full, or others keep the
        file locked for 10 s; else as `Publisher.publish`.

        Cancellation: the row was inserted or not; one that had not begun was not.
        """
        await self._insert([(None, letter)])

    async def publish_once(
        self,
        id: Any,  # noqa: A002 -- the role's name
        body: bytes,
        headers: Mapping[str, bytes] = NO_HEADERS,
        *,
        key: str | None = None,
        delay: float | timedelta | None = None,
        due: datetime | None = None,
    ) -> bool:
        """Publish under an id of your own; False, with nothing written, where a row has that id. Raises as `publish`.

        A row that was finished by deletion is no longer there, so only a table with processed_at remembers for ever.

        Cancellation: as `send`; publish again, under the same id.
        """
        return await self._insert([(id, dated(body, headers, key, delay, due))], once=True) > 0

    async def publish_many(self, letters: Sequence[Letter | bytes]) -> None:
        """Publish all in one transaction, or none. Raises as `send`, saying which of the letters was not accepted.

        A letter is delayed by its own `deliver_after`, seconds.

        Cancellation: all were inserted or none.
        """
        if letters:
            await self._insert([(None, each if isinstance(each, Letter) else Letter(each)) for each in letters])

    async def _insert(self, letters: Sequence[tuple[Any, Letter]], *, once: bool = False) -> int:
        for number, (_, letter) in enumerate(letters, 1):
            try:
                check_letter(letter)
            except ValueError as mistake:
                which = f", letter {number} of {len(letters)}" if len(letters) > 1 else ""
                raise PublishNotAccepted(f"{self.name!r}{which}: {mistake}") from None
        while True:
            await self.broker.until_up()
            job = Insert(self.table, self.group, letters, PATIENCE, once=once)
            job.then = lambda job=job: self._inserted(job)
            await self.database.life.publishing.carry_out(job)
            match job.error:
                case None:
                    return job.inserted
                case ConnectionBroken() if job.sent == 0:
                    continue  # it has not begun: the next life may carry it out
                case ConnectionBroken() as error:
                    raise LinkBroken(f"{self.name!r}: {error}; the row may be there or not") from error
                case PublishNotAccepted() as error if not job.which:
                    raise error
                case CallBroken() as error:
                    raise PublishNotAccepted(f"{self.name!r}: {error}") from None
                case error:
                    raise PublishNotAccepted(f"{self.name!r}{job.which}: {error}") from error

    def _inserted(self, job: Insert) -> None:
        if job.error is None and job.inserted:
            self.database.published(self.table.name, self.group)
