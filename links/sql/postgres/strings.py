"""Several statements in one string, sent as one message by the simple protocol, with their values written into it.

https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-FLOW-MULTI-STATEMENT. psycopg's cursor hands over
what came when all has come; here each answer is heard when it comes, so a COMMIT is known although what follows waits.

Cancellation: what runs is cancelled on the server, and took effect or not, but for what was heard.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import Any

from psycopg import AsyncClientCursor, errors, generators
from psycopg.adapt import Transformer
from psycopg.pq import ExecStatus
from psycopg.waiting import Ready, Wait

from links.sql.postgres.trio_connection import TrioConnection
from links.sql.postgres.values import literal

__all__ = ["bound", "results"]

_PLACE = re.compile(r"%\((\w+)\)s|%%")


def _unheard(_: bytes) -> None: ...


def bound(connection: TrioConnection, text: str, values: dict[str, Any]) -> str:
    """The statement with its values written into it: here where they are plain, for psycopg takes its time for each."""
    literals = {name: literal(value) for name, value in values.items()}
    if None in literals.values():
        return AsyncClientCursor(connection).mogrify(text.encode(), values)
    return _PLACE.sub(lambda found: literals[found[1]] or "" if found[1] else "%", text)


async def results(
    connection: TrioConnection, texts: Sequence[str], heard: Callable[[bytes], None] = _unheard
) -> list[list[tuple[Any, ...]]]:
    """Carry out these by one message: the rows of each. `heard`: is called with the command of each that was.

    Raises `psycopg.Error`: those before it were carried out, as far as their transaction was committed.
    """
    found: list[Any] = []
    async with connection.lock:
        await connection.wait(_said(connection, "; ".join(texts).encode(), found, heard))
    loader = Transformer.from_context(connection)
    rows: list[list[tuple[Any, ...]]] = []
    for result in found:
        if result.status == ExecStatus.TUPLES_OK and result.ntuples:
            loader.set_pgresult(result)
            rows.append(loader.load_rows(0, result.ntuples, tuple))
        else:
            rows.append([])
    return rows


def _said(
    connection: TrioConnection, text: bytes, found: list[Any], heard: Callable[[bytes], None]
) -> Generator[Wait, Ready, None]:
    pgconn = connection.pgconn
    pgconn.send_query(text)
    yield from generators.send(pgconn)
    failure: errors.Error | None = None
    while (result := (yield from generators.fetch(pgconn))) is not None:
        if result.status == ExecStatus.FATAL_ERROR:
            failure = errors.error_from_result(result, encoding="utf-8")
        else:
            found.append(result)
            heard(result.command_status or b"")
    if failure is not None:
        raise failure
