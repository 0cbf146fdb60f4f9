"""Does a claim walk along an index? PostgreSQL's own plan of the real statement is asked."""

from __future__ import annotations

from typing import Any

from links.sql.postgres.ddl import in_work_index, index
from links.sql.postgres.schema import PostgresSchema
from links.sql.postgres.statements import Rows
from links.sql.postgres.trio_connection import TrioConnection
from links.sql.table import Table, split

__all__ = ["unmarked", "unserved"]


async def unserved(
    connection: TrioConnection,
    table: Table[Any],
    schema: PostgresSchema,
    texts: Rows,
    values: dict[str, Any],
) -> str | None:
    """One line with the index to create, where a claim sorts every row that is due; None where it does not.

    Planned as if the table were large: a small one is rightly read whole. Raises `psycopg.Error`.
    """
    bound: dict[str, Any] = {**values, "over": [], "room": 1}
    async with connection.transaction(force_rollback=True):
        await connection.execute(b"SET LOCAL enable_seqscan = off")
        await connection.execute(b"SET LOCAL enable_sort = off")
        await connection.execute(b"SET LOCAL enable_bitmapscan = off")
        plan = await (
            await connection.execute(f"EXPLAIN (COSTS OFF) {texts.look}".encode(), bound, prepare=False)
        ).fetchall()
    steps = [str(row[0]).strip() for row in plan]
    sorts = any("Sort" in step.split("  ")[0] for step in steps)
    scans = any("Seq Scan on" in step for step in steps)
    if not sorts and not scans:
        return None
    why = "reads and sorts every row that is due" if sorts else "reads every row"
    null = table.retry_after is not None and schema[table.retry_after].nullable
    nullable = ", with retry_after NOT NULL" if null else ""
    return f"a claim {why}, so it grows slow with the table; create the index{nullable}: " + index(
        split(table.name), table.roles, texts.order
    )


_MARKED = """
SELECT 1 FROM pg_catalog.pg_index i
JOIN pg_catalog.pg_attribute g ON g.attrelid = i.indrelid AND g.attnum = i.indkey[0] AND g.attname = %(group)s
JOIN pg_catalog.pg_attribute l ON l.attrelid = i.indrelid AND l.attname = %(lock)s
WHERE i.indrelid = %(oid)s AND i.indisvalid AND strpos(pg_get_expr(i.indpred, i.indrelid), quote_ident(l.attname)) > 0
LIMIT 1"""


async def unmarked(connection: TrioConnection, table: Table[Any], schema: PostgresSchema) -> str | None:
    """One line with the index to create, where a FIFO claim reads its whole group to see whether a row is in work.

    Raises `psycopg.Error`.
    """
    if not table.fifo or table.locked_until is None:
        return None
    values = {"oid": schema.oid, "group": table.group, "lock": table.locked_until}
    if await (await connection.execute(_MARKED.encode(), values)).fetchone() is not None:
        return None
    return (
        "a claim reads every row of its FIFO group to see whether one is in work, so it grows slow with the group; "
        "create the index: " + in_work_index(split(table.name), table.roles)
    )
