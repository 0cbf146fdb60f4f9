"""A queue table, or one group of it, as a source of deliveries."""

from __future__ import annotations

import copy
import logging
from collections.abc import AsyncGenerator, Hashable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar, cast

import trio

from links.abc import Link, Lost, Publisher, Settles, Source, beside
from links.errors import CallBroken, LinkBroken, LinkError, LinkRefused
from links.sql.custom import check_custom
from links.sql.database import Database
from links.sql.jobs import Form, LeaseForm, Look
from links.sql.lease_link import LeaseLink
from links.sql.patience import PATIENCE
from links.sql.pin import PinForm
from links.sql.pinned_link import PinnedLink
from links.sql.publisher import SqlPublisher
from links.sql.table import Table
from links.sql.wakes import Wakes
from settlement import sql
from settlement.delivery import Delivery
from settlement.plans import Plan
from settlement.policy import Ending, Policy, positive

__all__ = ["SqlQueue"]

_log = logging.getLogger("trio_settlement")

R = TypeVar("R")


class SqlQueue(Source[R]):
    """Made by `SqlBroker.queue`."""

    def __init__(
        self,
        database: Database,
        table: Table[R],
        group: str | None,
        *,
        claim: sql.ClaimForm | None,
        limit: int | None,
        poll_interval: float,
        custom: Mapping[str, str],
    ) -> None:
        table.check_group(group)
        self._form = form = database.dialect.form(claim, table)
        self.broker, self._database = database.broker, database
        self.table, self.group = table, group
        self.name = group if group is not None else table.name
        self.lease = form.duration if isinstance(form, sql.Lease) else None
        self.settles = Settles.TOGETHER if self.lease is not None else Settles.ALONE
        self._limit = None if limit is None else positive("limit", limit)
        if table.fifo and limit is not None:
            self._refuse_more("limit", limit)
        own = check_custom(custom, form, table)
        database.dialect.check_custom(own)
        self._poll_interval = poll_interval
        self._stores = False
        """Do its rows hold the letters of another transport, whatever their bytes?"""
        self._facts = sql.Facts(
            queue=self.name,
            claim=form,
            has_attempt=table.attempt is not None,
            has_retry_after=table.retry_after is not None,
            has_group=table.group is not None,
            custom=own,
        )

    def __repr__(self) -> str:
        return f"<SqlQueue {self.name!r} on {self.broker.name}>"

    def limit(self, concurrency: int, size: int = 1) -> int:
        """The limit that was given, else one row for each place of a handler.

        Raises `ValueError` for more than one row of a FIFO table: a group has one in work at a time.
        """
        if self.table.fifo:
            self._refuse_more("concurrency", concurrency)
            self._refuse_more("size", size)
        return self._limit or concurrency * size

    def _refuse_more(self, what: str, count: int) -> None:
        if count > 1:
            raise ValueError(
                f"{what} must be 1, not {count}: table {self.table.name!r} is FIFO, so its group {self.group!r} has "
                "one row in work at a time; what may be worked on side by side belongs into several groups"
            )

    def decide(self, outcome: Ending, delivery: Delivery[Any], policy: Policy) -> Plan[sql.Verb]:
        """`settlement.sql.decide` with this queue's facts."""
        return sql.decide(outcome, delivery, self._facts, policy)

    def check(self, policy: Policy) -> None:
        """Refuse, by `ValueError`, half a cap, a cap that nothing counts, and a dead letter that is this queue."""
        sql.check(self._facts, policy)
        to = policy.dead_letter
        if isinstance(to, SqlPublisher):
            itself = self._is_fed_by(to) and self._database.dialect.is_named_as(to.database.dialect)
        elif isinstance(to, str) and self.table.group is None:
            itself = self._spelled(to) == self._spelled(self.name)
        else:
            itself = to == self.name
        if itself:
            raise ValueError(f"dead_letter must be another queue than {self.name!r} itself")

    @property
    def place(self) -> Hashable:
        """As `Source.place`: the table and group of this broker."""
        return self._database, self._spelled(self.table.name), self.group

    def storage(self) -> tuple[Source[Any], Publisher]:
        """As `Source.storage`: for `Stored(queue)`. Its table needs payload, headers and retry_after, and no fifo."""
        table = self.table
        where = f"Stored(queue), table {table.name!r}"
        for role, why in (
            ("payload", "bytes that hold the message"),
            ("headers", "a text that says where the message goes"),
            ("retry_after", "a time until when it waits"),
        ):
            column: str | None = getattr(table, role)
            if column is None:
                raise ValueError(f"{where}: there is no {role}: give it a column for {why}, Table(…, {role}=…)")
            if column in table.generated:
                raise ValueError(f"{where}: column {column!r} ({role}) must not be in generated=(…): it is written")
        if table.fifo:
            raise ValueError(f"{where}: fifo must be False: a message that waits would keep all behind it")
        store = copy.copy(self)
        store._stores = True  # noqa: SLF001 -- ours
        return store, SqlPublisher(self._database, table, self.group)

    def _check_stored(self, subscription: str, form: Form) -> None:
        """Raise `LinkRefused` where a column of texts shall hold messages."""
        column = self.table.payload
        if self._stores and column is not None and form.schema[column].textual:
            raise LinkRefused(
                f"subscription {subscription!r}, table {self.table.name!r}: column {column!r} (payload) holds texts, "
                "and a stored message is bytes; declare it BLOB, on PostgreSQL bytea, on MySQL LONGBLOB"
            )

    def _spelled(self, table: str) -> str:
        return self._database.dialect.spelled(table)

    def _is_fed_by(self, publisher: SqlPublisher) -> bool:
        """Would its rows be this queue's, if it were in the same file?"""
        same = self._spelled(publisher.table.name) == self._spelled(self.table.name)
        return same and (self.table.group is None or publisher.group == self.group)

    async def _refuse_itself(self, subscription: str, policy: Policy) -> None:
        """Raise `LinkRefused` where the dead letter is this queue, in the same file by another name of it.

        Cancellation: a thread that asks the disk is left alone.
        """
        to = policy.dead_letter
        if not isinstance(to, SqlPublisher) or not self._is_fed_by(to):
            return
        limiter = trio.CapacityLimiter(1)  # a thread that hangs shall not take one of everybody's
        look = partial(self._database.dialect.is_one_with, to.database.dialect)
        if await trio.to_thread.run_sync(look, abandon_on_cancel=True, limiter=limiter):
            raise LinkRefused(
                f"subscription {subscription!r}, table {self.table.name!r}: the dead letter {to.name!r} on "
                f"{to.broker.name} is this queue itself, by another name of its file; give it a table of its own"
            )

    @asynccontextmanager
    async def attach(
        self,
        subscription: str,
        lost: Lost,
        goodbye: float,
        policy: Policy = Policy(),
        *,
        limit: int = 1,
        size: int = 1,
    ) -> AsyncGenerator[Link[R], None]:
        """Check the table, and the one that the policy's dead letter names, and attach.

        On the way out all that is still held is let go. `lost` is called where a row has a connection of its own.

        Raises `LinkRefused` naming subscription, table, column and the way out; `ConnectionBroken`; `LinkBroken` where
        others keep the file locked for 10 s.

        Cancellation: rows that were claimed are let go, shielded and within `goodbye`.
        """
        await self.broker.until_up()
        await self._refuse_itself(subscription, policy)
        life = self._database.life
        wakes = Wakes(self._poll_interval)
        with life.link(), self._database.attached(self.table, self.group, subscription, wakes):
            custom = self._facts.custom
            moves = isinstance(policy.dead_letter, str) and self.table.group is None and "dead_letter" not in custom
            look = Look(
                self.table,
                self.group,
                self._form,
                subscription=subscription,
                dead_letter=policy.dead_letter_name if moves else None,
                custom=custom,
                places=limit // min(size, limit),
                patience=PATIENCE,
            )
            await life.queues.carry_out(look)
            error = look.error
            if isinstance(error, LinkError) and not isinstance(error, CallBroken):
                raise error
            if error is not None:  # no call of a link that lives on: this attempt is over
                raise LinkBroken(f"subscription {subscription!r}: {error}") from error
            form = look.form
            assert form is not None, "it was looked at"  # noqa: S101 -- an invariant of ours
            self._check_stored(subscription, form)
            for line in form.warnings:
                _log.warning("%s", line)
            async with self._linked(form, wakes, subscription, goodbye, lost, (limit, size)) as link:
                yield link

    @asynccontextmanager
    async def _linked(  # noqa: PLR0917 -- what `attach` has
        self, form: Form, wakes: Wakes, subscription: str, goodbye: float, lost: Lost, room: tuple[int, int]
    ) -> AsyncGenerator[Link[R], None]:
        life, tell = self._database.life, self._database.wake
        names = {"source": self.name, "subscription": subscription}
        if self.lease is not None:
            leased = cast("LeaseForm", form)
            link: LeaseLink[R] = LeaseLink(
                leased, life.queues, life.until_over, wakes, tell, goodbye=goodbye, limit=room[0], **names
            )
            try:
                yield link
            finally:
                await link.say_goodbye()  # noqa: ASYNC102 -- it shields itself, with a deadline
            return
        pinned: PinnedLink[R] = PinnedLink(
            cast("PinForm", form),
            life.until_over,
            wakes,
            tell,
            lost,
            writer=life.queues,
            goodbye=goodbye,
            limit=room[0],
            size=room[1],
            **names,
        )
        async with beside(pinned.run):
            try:
                yield pinned
            finally:
                await pinned.say_goodbye()  # noqa: ASYNC102 -- it shields itself, with a deadline
