"""The lease form's verbs on PostgreSQL, each one statement, for many rows at once: claim, say, extend, let go.

Nothing here waits for a row that another transaction has locked: it is told as not touched, and `held` tells whether it
is still ours. A statement that fails has changed nothing.

Cancellation, anywhere: the statement is cancelled on the server, and took effect or not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import psycopg
import trio

from links.sql.custom import for_psycopg
from links.sql.jobs import Passing
from links.sql.postgres.codes import is_of_the_row, is_reshaped
from links.sql.postgres.custom import claimed
from links.sql.postgres.lender import PostgresLender
from links.sql.postgres.looked import Ignored, Looked
from links.sql.postgres.pin import Connect
from links.sql.postgres.statements import LeaseStatements, limited
from links.sql.postgres.trio_connection import TrioConnection
from links.sql.postgres.values import array
from links.sql.rows import Row, Token
from settlement.sql import Custom, Delay, Finish, MoveToGroup, PutBack, Verb, lease_of

__all__ = ["PostgresLease"]

_PAUSES: Final = (0.001, 0.002, 0.004, 0.008, 0.016)
"""Seconds behind each try to get the guard of a FIFO group: another claim has it for the time of its statement."""


class PostgresLease(Looked[LeaseStatements]):
    """The verbs for one queue of one table; `connect` gives a connection for a handler's transaction."""

    def __init__(self, *asked: Any, connect: Connect, **names: Any) -> None:
        super().__init__(*asked, **names)
        self._connect = connect

    def lender(self, limit: int) -> PostgresLender:  # noqa: ARG002 -- as many connections as there are deliveries
        """As `LeaseForm.lender`."""
        return PostgresLender(self, self._connect)

    @property
    def lease(self) -> float:
        """Seconds."""
        return lease_of(self.claim_form)

    # --- claim -------------------------------------------------------------------------------------------------------

    async def claim(self, connection: TrioConnection, room: int, passing: Passing) -> list[Row]:
        """Lease up to `room` due rows in the queue's order, but for those that are passed over.

        One that cannot be leased is `passing`'s, and the claim goes on behind it. Raises what says nothing of a row.
        """
        if "claim" in self.own:
            return await self._own_claim(connection, room, passing)
        taken: list[Row] = []
        passing.complete = False
        while not passing.enough:
            wanted = room - len(taken)
            values = self._wanted(wanted, passing, taken)
            if passing.singly:
                found = await self._one_by_one(connection, values, passing)
            else:
                try:
                    found = await self._found(connection, limited(self.texts.claim, wanted), values)
                except psycopg.Error as error:
                    if connection.closed or not (is_of_the_row(error) or is_reshaped(error)):
                        raise
                    if is_reshaped(error):  # by a column that is gone, or else by a row's trigger
                        await self.look_again(connection, now=True)
                    passing.singly = True
                    connection.unprepare()  # it may be the plan that fails, and no row
                    continue
            taken += await self._leased(connection, found, passing)
            if len(found) < wanted:
                passing.complete = True
                break
            if len(taken) == room:
                break
        return taken

    async def _own_claim(self, connection: TrioConnection, room: int, passing: Passing) -> list[Row]:
        async with connection.transaction():
            until = await self._expiry(connection)
            rows = await claimed(self, connection, room, passing, until)
        if self.table.payload is None and self.table.attempt is not None and "fetch" not in self.own:
            for row in rows:  # the row as it was before the claim
                row[6][self.table.attempt] = None if row[2] is None else row[2] - 1
        return rows

    async def _expiry(self, connection: TrioConnection) -> str:
        """The end of a lease from now."""
        ((until, _),) = await self.rows(connection, self.texts.expiry, {"lease": self.lease})
        return str(until)

    def _wanted(self, room: int, passing: Passing, taken: Sequence[Row] = ()) -> dict[str, Any]:
        over = [*passing.held, *passing.over, *passing.failed, *[row[0] for row in taken]]
        held = array([*passing.held])
        return {"group": self.group, "lease": self.lease, "room": room, "over": array(over), "held": held}

    async def _found(self, connection: TrioConnection, claim: str, values: dict[str, Any]) -> list[tuple[Any, ...]]:
        """What a claim finds; of a FIFO group behind its guard, for which the claims of others are waited for a little.

        Cancellation: amid a FIFO claim the connection is closed.
        """
        if not self.texts.guard:
            return await self.rows(connection, claim, values)
        for pause in _PAUSES:
            async with connection.pipeline():  # up to its end it is one transaction
                guard = await connection.execute(self.texts.guard.encode(), values)
                claimed = await connection.execute(claim.encode(), values)
            if await guard.fetchone() == (True,):
                return await claimed.fetchall()
            await trio.sleep(pause)
        return []

    async def _one_by_one(
        self, connection: TrioConnection, values: dict[str, Any], passing: Passing
    ) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        for (key,) in await self.rows(connection, self.texts.look, values):
            if passing.enough:
                break
            try:
                found += await self._found(connection, self.texts.claim_one, {**values, "id": key})
            except psycopg.Error as error:
                if connection.closed or not is_of_the_row(error):
                    raise
                passing.failed[key] = error
                found.append((key, None, error))
        return found

    async def _leased(
        self, connection: TrioConnection, found: Sequence[tuple[Any, ...]], passing: Passing
    ) -> list[Row]:
        leased = [row for row in found if row[1] is not None]
        if self.schema.echoes and leased:
            ours = await self.holds(connection, [(row[0], row[1], row[2]) for row in leased])
            leased = [leased[number] for number in sorted(ours)]
        taken = {row[0] for row in leased}
        for row in found:
            if row[0] not in taken and row[0] not in passing.failed:
                passing.failed[row[0]] = Ignored("a trigger has ignored the lease, changed it or taken it back")
        return [self.row(row) for row in leased]

    # --- settle ------------------------------------------------------------------------------------------------------

    async def say(self, connection: TrioConnection, verbs: Sequence[Verb], tokens: Sequence[Token]) -> set[int]:
        """Carry out these verbs, of one kind, and not a move; the places in the list of those that were touched.

        Raises `psycopg.Error`: none was.
        """
        return await self._touched(connection, *self._saying(verbs, tokens))

    async def say_and_claim(
        self, connection: TrioConnection, verbs: Sequence[Verb], tokens: Sequence[Token], room: int, passing: Passing
    ) -> tuple[set[int], list[Row] | None]:
        """As `say`, then as `claim`, by one message to the server and one transaction.

        No rows but None: another claimer had the guard of the FIFO group, so nobody has looked behind what was said; or
        it takes a statement of the user's own.
        Raises `psycopg.Error`: nothing was done, or the connection is closed.
        """
        if "claim" in self.own:
            return await self.say(connection, verbs, tokens), None
        text, values = self._saying(verbs, tokens)
        wanted = self._wanted(room, passing)
        guard = None
        try:
            async with connection.pipeline():
                said = await connection.execute(text.encode(), values)
                if self.texts.guard:
                    guard = await connection.execute(self.texts.guard.encode(), wanted)
                claimed = await connection.execute(limited(self.texts.claim, room).encode(), wanted)
        except psycopg.Error as error:
            if error.pgresult is None:  # it failed here, and what was sent by then may have been carried out
                connection.finish()
            raise
        touched = self._so(await said.fetchall())
        if guard is not None and await guard.fetchone() != (True,):
            return touched, None
        found = await claimed.fetchall()
        passing.complete = len(found) < room
        return touched, await self._leased(connection, found, passing)

    def _saying(self, verbs: Sequence[Verb], tokens: Sequence[Token]) -> tuple[str, dict[str, Any]]:
        verb = verbs[0]
        values = self._bound(tokens)
        statement = ""
        match verb:
            case Finish():
                statement = self.texts.finish
            case PutBack():
                statement = self.texts.release
            case Delay():
                statement = self.texts.delay
                values["seconds"] = [each.seconds for each in verbs if isinstance(each, Delay)]
            case MoveToGroup(group):
                statement = self.texts.regroup
                values["to"] = group
            case _:
                pass
        if not statement:
            raise ValueError(f"table {self.table.name!r} has no column for it")
        return statement, values

    async def move(self, connection: TrioConnection, token: Token, to: str) -> bool:
        """As `Looked.moved`, by its token."""
        return await self.moved(connection, self._bound([token]), to, token[0])

    async def custom(self, connection: TrioConnection, token: Token, verb: Custom) -> bool:
        """As `Looked.carry_out`, where the row is still ours; False: it is not, or somebody has locked it."""
        async with connection.transaction():
            if not await self._held(connection, [token]):
                return False
            await self.carry_out(connection, verb, token)
        return True

    async def holds(self, connection: TrioConnection, tokens: Sequence[Token]) -> set[int]:
        """Which of these rows are still ours? Raises `psycopg.Error`."""
        return await self._touched(connection, self.texts.holds, self._bound(tokens))

    async def extend(self, connection: TrioConnection, tokens: Sequence[Token]) -> dict[int, Token]:
        """Lease these again: the tokens that now hold those that were touched. Raises `psycopg.Error`: none was."""
        if "extend" in self.own:
            return await self._own_extend(connection, tokens)
        values = {**self._bound(tokens), "lease": self.lease}
        found = await self.rows(connection, self.texts.extend, values)
        return {n - 1: (tokens[n - 1][0], token, tokens[n - 1][2]) for n, token in found if token is not None}

    async def _own_extend(self, connection: TrioConnection, tokens: Sequence[Token]) -> dict[int, Token]:
        """By the statement for extend, where the lease is still ours; what it leases otherwise is undone."""
        found: dict[int, Token] = {}
        async with connection.transaction():
            until = await self._expiry(connection)
            for number in sorted(await self._held(connection, tokens)):
                key, token, attempt = tokens[number]
                names = {"id": key, "token": token, "attempt": attempt, "group": self.group, "until": until}
                new = (key, until, attempt)
                with contextlib.suppress(Ignored):
                    async with connection.transaction():
                        await connection.execute(for_psycopg(self.own["extend"]).encode(), names)
                        if not await self.holds(connection, [new]):
                            raise Ignored
                    found[number] = new
        return found

    async def _held(self, connection: TrioConnection, tokens: Sequence[Token]) -> list[int]:
        """Lock those that are still ours, and that nobody else has locked."""
        return [n - 1 for (n,) in await self.rows(connection, self.texts.hold, self._bound(tokens))]

    async def extended(self, connection: TrioConnection, tokens: Sequence[Token]) -> dict[int, Token]:
        """After a renewal that may have been made: the tokens of those that are of the same attempt, and so ours.

        Without an attempt column nothing tells. Raises `psycopg.Error`.
        """
        if not self.texts.extended:
            return {}
        found = await self.rows(connection, self.texts.extended, self._bound(tokens))
        return {n - 1: (tokens[n - 1][0], token, tokens[n - 1][2]) for n, token in found}

    async def let_go(self, connection: TrioConnection, tokens: Sequence[Token], *, counted: bool) -> set[int]:
        """Let leases go; not `counted`: the attempts are what they were before the claim. Which were touched.

        Raises `psycopg.Error`: none was.
        """
        statement = self.texts.release if counted else self.texts.give_back
        return await self._touched(connection, statement, self._bound(tokens))

    # --- statements --------------------------------------------------------------------------------------------------

    @staticmethod
    def _bound(tokens: Sequence[Token]) -> dict[str, Any]:
        ids, expiries, attempts = zip(*tokens, strict=True)
        texts = '{"' + '","'.join(expiries) + '"}'  # `to_char` gave them: neither quote nor backslash
        return {"ids": array(ids), "tokens": texts, "attempts": array(attempts), "seconds": []}

    async def _touched(self, connection: TrioConnection, statement: str, values: dict[str, Any]) -> set[int]:
        return self._so(await self.rows(connection, statement, values))

    @staticmethod
    def _so(rows: Sequence[tuple[Any, ...]]) -> set[int]:
        """The places of those that have become what was written."""
        return {row[0] - 1 for row in rows if all(row[1:])}
