"""`mysql-row-lock-1-mariadb`, `-8-mysql` and so on: a queue table whose rows are locked while so many handlers run.

Ours: `open_runtime` with one subscription of that concurrency, so with so many connections. Peer: the bare loop of
mysql_rounds.py: START TRANSACTION, SELECT … FOR UPDATE SKIP LOCKED; then DELETE, COMMIT. The servers and the figure are
those of mysql_lease.py.

Target: 0.6 of the loop.

What it does not show: a network, a disk that is slow to sync, or a handler that writes in its transaction.
"""

from __future__ import annotations

from typing import Final

from pymysql.cursors import Cursor

from benchmarks.mysql_rounds import Form, Found, servers
from benchmarks.result import Result
from links.sql import RowLock


def claim(cursor: Cursor, room: int) -> Found:
    """A transaction that stays open."""
    cursor.execute("START TRANSACTION")
    cursor.execute(
        "SELECT id, attempt, body FROM jobs FORCE INDEX (jobs_due) WHERE due <= UTC_TIMESTAMP(6) "
        "ORDER BY due, id LIMIT %s FOR UPDATE SKIP LOCKED",
        [room],
    )
    rows = cursor.fetchall()
    if not rows:
        cursor.execute("COMMIT")
    return rows


def settle(cursor: Cursor, rows: Found) -> None:
    """Its end."""
    cursor.execute("DELETE FROM jobs WHERE id IN %s", [[row[0] for row in rows]])
    cursor.execute("COMMIT")


FORM: Final = Form("row-lock", RowLock(), claim, settle)


def run(*, quick: bool) -> list[Result]:
    """Each size on each server, interleaved rounds, medians."""
    with servers() as urls:
        return [result for kind, url in urls.items() for result in FORM.sizes(kind, url, quick=quick)]
