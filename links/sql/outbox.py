"""The outbox: a record in the user's own transaction, a message by any transport, and neither without the other.

A record is written first, in whatever transaction; then its message is sent, with the record's id in a header. A
consumer marks the record when it has finished with the message. What is not marked for a while is sent again: so a
program that is killed between any two steps leaves no record without its message, and some messages come twice.

Cancellation leaves each step done or not done, which is said at each; nothing is shielded.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Final, TypeVar, overload

import trio

from links.abc import Publisher
from links.errors import CallBroken, ConnectionBroken, LinkBroken, LinkError, LinkRefused
from links.errors import PublishNotAccepted as NotAccepted
from links.sql.broker import SqlBroker
from links.sql.headers import load
from links.sql.inserting import Awaited, Blocking, Style, Written, written
from links.sql.letters import span
from links.sql.outbox_publisher import OutboxPublisher
from links.sql.outbox_table import OutboxTable
from links.sql.records import Record, Turn
from links.sql.rows import body_of, name_of
from links.sql.tracking import Tracking, check_name
from settlement.delivery import NO_HEADERS, Delivery, Letter, check_letter
from settlement.outcomes import Outcome, seconds

__all__ = ["OUTBOX_ID", "Outbox"]

_log = logging.getLogger("trio_settlement")

T = TypeVar("T")

OUTBOX_ID: Final = "x-ruststream-outbox-id"
"""The header that carries a record's id, a decimal number; so services of the RustStream family know it, too."""

_PAGE: Final = 100
"""Records that are in memory at once, when they are sent again."""
_PAUSE: Final = 0.1
"""Seconds between two looks whether another instance is done."""


class Outbox:
    """Records of one table, by the name of what they are for.

        outbox = Outbox(RECORDS, sql_broker)
        orders = outbox.register("orders", amqp_broker.publisher("orders"))

    `min_age`: seconds or a `timedelta`, 0 or more, since a record was written or last sent; a younger one is not sent
    again. Longer than a handler usually takes: what is still in work would be sent twice. `header`: the name of the
    header that carries the id. No I/O; the broker is opened as for any publisher. Raises `ValueError`, `TypeError`.
    """

    def __init__(
        self, table: OutboxTable, broker: SqlBroker, *, min_age: float | timedelta = 60.0, header: str = OUTBOX_ID
    ) -> None:
        if not isinstance(table, OutboxTable):
            raise TypeError(f"table must be an OutboxTable, not {table!r}")
        if not isinstance(broker, SqlBroker):
            raise TypeError(f"broker must be a SqlBroker, not {broker!r}")
        if not isinstance(header, str) or not header:
            raise ValueError(f"header must be a name of 1 character or more, not {header!r}")
        self.table, self.broker, self.header = table, broker, header
        self.min_age = span("min_age", min_age)
        self._records = broker.database.dialect.records(table)
        self._ask = broker.database.ask
        self._publishers: dict[str, OutboxPublisher] = {}
        self._tracking = Tracking(broker.database, self._records, table.table, header, self._publishers)

    def __repr__(self) -> str:
        return f"<Outbox {self.table.table!r} on {self.broker.name}>"

    def ddl(self) -> str:
        """A record table that fits, as SQL text for this database, with its reasons. What is there stays as it is."""
        return self._records.ddl()

    # --- who sends ---------------------------------------------------------------------------------------------------

    def register(self, name: str, to: Publisher) -> OutboxPublisher:
        """Records of this name are sent by this publisher, now and again. The one that is given back records first.

        Raises `ValueError` for an empty name, or one that is registered already; `TypeError` for no publisher.
        """
        check_name(name)
        if not isinstance(to, Publisher):
            raise TypeError(f"to must be a publisher of a broker, not {to!r}")
        if name in self._publishers:
            raise ValueError(f"name must be registered once, and {name!r} is already, for {self._publishers[name]!r}")
        publisher = self._publishers[name] = OutboxPublisher(name, to, self._add, self.header)
        return publisher

    def _publisher(self, name: str) -> OutboxPublisher:
        if name not in self._publishers:
            known = ", ".join(sorted(map(repr, self._publishers))) or "none yet"
            raise ValueError(f"name must be one that is registered ({known}), not {name!r}")
        return self._publishers[name]

    # --- recording ---------------------------------------------------------------------------------------------------

    @overload
    def record(
        self,
        connection: Awaited,
        name: str,
        body: bytes | str,
        headers: Mapping[str, bytes] = ...,
        *,
        key: str | None = ...,
    ) -> Awaitable[int]: ...
    @overload
    def record(
        self,
        connection: Blocking,
        name: str,
        body: bytes | str,
        headers: Mapping[str, bytes] = ...,
        *,
        key: str | None = ...,
    ) -> int: ...
    def record(
        self,
        connection: Any,
        name: str,
        body: bytes | str,
        headers: Mapping[str, bytes] = NO_HEADERS,
        *,
        key: str | None = None,
    ) -> int | Awaitable[int]:
        """Write a record by a connection of your own, in the transaction that it is in; gives its id, for `send`.

            with sqlite3.connect(path) as connection:     # or psycopg's, or PyMySQL's; awaited on an AsyncConnection
                connection.execute("INSERT INTO orders …")
                key = outbox.record(connection, "orders", b"…")
            await outbox.send(key)

        One statement; nothing is begun or committed here. `body`: bytes, or str where the column holds text or JSON.
        Raises, with nothing written, `ValueError` for a name that is not registered, `TypeError` for a connection of
        another driver, `PublishNotAccepted` where the table has no column for headers or key, or a trigger ignores the
        record; the driver's own error where the statement fails.

        Cancellation, of an `AsyncConnection`: as the driver has it.
        """
        what = self._written(name, body, headers, key)
        drivers = (each.__module__.partition(".")[0] for each in type(connection).__mro__)
        if self._records.driver not in drivers:
            kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
            raise TypeError(
                f"connection must be one of {self._records.driver}, not {kind}: for others: record_statement(…)"
            )
        return self._records.record(connection, what)

    def record_statement(
        self,
        name: str,
        body: bytes | str,
        headers: Mapping[str, bytes] = NO_HEADERS,
        *,
        key: str | None = None,
        style: Style = "text",
    ) -> tuple[str, dict[str, Any]]:
        """The statement of `record` and its parameters by name, for a connection of any other driver.

        `style`: "text", as SQLAlchemy's `text` takes it; "named" (`:name`) or "pyformat" (`%(name)s`), as DB-API calls
        them. On PostgreSQL it gives one row, the id; elsewhere that is the cursor's `lastrowid`. No I/O. Raises as
        `record`, and `ValueError` for another style.
        """
        if style not in ("pyformat", "named", "text"):
            raise ValueError(f"style must be 'text', 'named' or 'pyformat', not {style!r}")
        return self._records.record_statement(self._written(name, body, headers, key), style)

    def _written(self, name: str, body: bytes | str, headers: Mapping[str, bytes], key: str | None) -> Written:
        self._publisher(name)
        letters = self.table.letters
        return written(letters, body, headers, key=key, group=name, delay=None, due=None, id=None, once=False)

    async def _add(self, name: str, letter: Letter) -> int:
        try:
            check_letter(letter)
        except ValueError as mistake:
            raise NotAccepted(f"{name!r}: {mistake}") from None
        where = f"a record for {name!r} in table {self.table.table!r}"
        try:
            return await self._ask(self._records.add(name, letter), where, again=False)
        except (CallBroken, LinkRefused) as error:
            raise NotAccepted(f"{error}; nothing was sent") from error.__cause__

    # --- sending -----------------------------------------------------------------------------------------------------

    async def send(self, key: int) -> bool:
        """Send the message of this record, when its transaction has committed. False: there is nothing to send.

        That is a record that was rolled back, or that is processed. Who forgets to call it, or is killed before, has
        the message sent by `republish`. Raises as `OutboxPublisher.publish`, with the record there; `ValueError` for a
        name that is not registered here, or a key that is no whole number.

        Cancellation: sent or not; the record stays.
        """
        if isinstance(key, bool) or not isinstance(key, int):
            raise ValueError(f"key must be the id of a record, a whole number, not {key!r}")
        where = f"record {key} of table {self.table.table!r}"
        found = await self._ask(self._records.one(key), where)
        if found is None:
            return False
        publisher = self._publisher(name_of(found[1]))
        await publisher.send_record(found[0], self._letter(found))
        return True

    def _letter(self, record: Record) -> Letter:
        """The message of a record. Raises `PublishNotAccepted` where it cannot be read."""
        key, _, payload, headers, partition = record
        try:
            return Letter(body_of(payload), load(headers), None if partition is None else name_of(partition))
        except Exception as error:
            raise NotAccepted(f"record {key} of table {self.table.table!r} cannot be read: {error}") from error

    async def republish(
        self, names: str | Collection[str] | None = None, *, min_age: float | timedelta | None = None
    ) -> int:
        """Send again, in the order of their ids, all records that are not processed and old enough; how many it were.

        Call it at every start, and now and then, or have `run` do it. The table is looked at first. `names`: of these
        alone, each of them registered; None: all that are. `min_age`: as of the outbox; None: that. The age counts
        from when this was called.

        One instance at a time sends, and the others wait for it; what it has sent is young then, so that two at once
        send each record once. 100 records are in memory at a time. A record whose broker refuses it is passed over. In
        weather it waits for the next connection, and the others with it: bound it with a scope of your own.

        Raises `ValueError` for a name that is not registered; `LinkRefused` where the table cannot be one, naming table
        and column; `PublishNotAccepted` when all is done, where there were refused ones; `LinkBroken` where a
        connection broke. `NotConnected` as any publisher. What was sent until then stays sent.

        Cancellation: what was sent is sent; up to 100 of it will be sent once more.
        """
        given = self._publishers if names is None else [names] if isinstance(names, str) else names
        chosen = sorted({self._publisher(name).name for name in given})
        age = self.min_age if min_age is None else span("min_age", min_age)
        where = f"republishing table {self.table.table!r}"
        until = await self._ask(self._records.look(age), where)
        if not chosen:
            return 0
        count, refused, first, after = 0, 0, None, None
        async with self._turn(where) as turn:
            while True:
                if not await turn.holds():
                    raise LinkBroken(f"{where}, after {count}: the lock was lost, another instance may send now")
                page = await self._ask(self._records.page(chosen, until, after, _PAGE), where)
                sent, errors = await self._send_page(page, where)
                count, refused = count + sent, refused + len(errors)
                first = first or next(iter(errors), None)
                if len(page) < _PAGE:
                    break
                after = page[-1][0]
        if first is not None:
            raise NotAccepted(f"{where}: {count} were sent, and {refused} not, first: {first}") from first
        return count

    async def _send_page(self, page: Collection[Record], where: str) -> tuple[int, list[Exception]]:
        """How many were sent, and why others were not. Cancellation: those that were sent are as old as before."""
        sent: list[int] = []
        refused: list[Exception] = []
        failure: Exception | None = None
        for record in page:
            publisher = self._publishers.get(name_of(record[1]))
            if publisher is None:  # a name that the column takes for another one, such as by NOCASE
                continue
            try:
                await publisher.send_record(record[0], self._letter(record))
            except NotAccepted as error:
                _log.warning("%s: record %d is not accepted: %s", where, record[0], error)
                refused.append(error)
            except Exception as error:  # noqa: BLE001 -- raised below
                failure = error
                break
            else:
                sent.append(record[0])
        if sent:
            try:
                await self._ask(self._records.sent(sent), where)
            except LinkError:
                if failure is None:
                    raise
        if failure is not None:
            raise failure
        return len(sent), refused

    @asynccontextmanager
    async def _turn(self, where: str) -> AsyncGenerator[Turn, None]:
        """It is our turn for the block. Cancellation: it is nobody's."""
        turn = self._records.turn()
        try:
            while not await turn.tried():  # noqa: ASYNC110 -- another process has no event
                await trio.sleep(_PAUSE)
            yield turn
        except ConnectionBroken as error:
            raise LinkBroken(f"{where}: {error}") from error
        finally:
            turn.leave()

    # --- consuming ---------------------------------------------------------------------------------------------------

    def tracked(
        self, handler: Callable[[Delivery[T]], Awaitable[Outcome | None]], *, name: str | None = None
    ) -> Callable[[Delivery[T]], Awaitable[Outcome | None]]:
        """The handler, for a subscription of any transport: its outcome marks the record of each message.

        Before the handler the record is looked up: where it is processed already the answer is `Ack`, where that fails
        `Retry`, each without calling the handler. `Ack`, `Drop` and None mark the record before the message is
        settled; where that fails a warning tells, and the outcome stays. `Retry`, `RetryAfter` and exceptions leave it;
        what a policy makes of them, a dead letter among it, is marked by `observe`.

        `name`: of the records; None: the delivery's source, where that is registered. A delivery of another name,
        without the header, with one that is no number, or whose record is not there, is handled as without an outbox.

        Raises `TypeError` for a handler that is no async function. Not for the handler of a batch.

        Cancellation of the handler: the record is marked or not, the message is unsettled.
        """
        return self._tracking.tracked(handler, name)

    def observe(self, event: object) -> None:
        """An observer for `open_runtime(…, observers=[outbox.observe])`: it hears how each delivery has ended.

        So the records of messages that were dead-lettered, or dropped by a policy, are marked: by `run`, or by
        `mark_observed`. 10,000 at most wait for that; what is told beyond is sent again. A plain call.
        """
        self._tracking.observe(event)

    async def mark_observed(self) -> None:
        """Mark the records that `observe` was told of. Where that fails a warning tells.

        Cancellation: each is marked, or waits still.
        """
        await self._tracking.mark_observed()

    async def run(  # noqa: ASYNC128 -- it calls started
        self, *, every: float = 60.0, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Republish, report started, then mark what `observe` is told, and republish each `every` seconds; no end.

            async with open_runtime(…, observers=[outbox.observe]) as runtime, trio.open_nursery() as nursery:
                await nursery.start(outbox.run)

        What goes wrong at the first time is raised, as by `republish`; later a warning tells, and it is tried again. A
        cancellation that comes before `mark_observed` was done leaves records that are sent again at the next start.
        Raises `ValueError` for an `every` that is not above 0.

        Cancellation: as `republish` and `mark_observed`.
        """
        pause = seconds("every", every, zero=False)
        await self.republish()
        task_status.started()
        while True:
            end = trio.current_time() + pause
            while trio.current_time() < end:
                with trio.move_on_at(end):
                    await self._tracking.news.wait()
                await self.mark_observed()
            try:
                await self.republish()
            except (LinkError, ValueError) as error:
                _log.warning("%s", error)
