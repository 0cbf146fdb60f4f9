"""`mysql-advisory-1-mariadb`, `-8-mysql` and so on: a queue table whose rows are in work under a named lock each.

Ours: `open_runtime` with one subscription of that concurrency, so with so many connections. Peer: the bare loop of
mysql_rounds.py: a SELECT of as many rows as there are tasks whose lock nobody holds, GET_LOCK of one after the other,
UPDATE of its attempt; then DELETE, RELEASE_LOCK. The servers and the figure are those of mysql_lease.py.

Target: 0.6 of the loop.

What it does not show: keys that many rows share, a network, or a disk that is slow to sync.
"""

from __future__ import annotations

from typing import Final

from pymysql.cursors import Cursor

from benchmarks.mysql_rounds import Form, Found, servers
from benchmarks.result import Result
from links.sql import AdvisoryLock


def claim(cursor: Cursor, room: int) -> Found:
    """One row out of so many; whoever was faster may have deleted it, so the attempt is counted behind the lock."""
    while True:
        cursor.execute(
            "SELECT id, attempt, body FROM jobs FORCE INDEX (jobs_due) WHERE due <= UTC_TIMESTAMP(6) "
            "AND IS_FREE_LOCK(CONCAT('job-', id)) ORDER BY due, id LIMIT %s",
            [room],
        )
        found = cursor.fetchall()
        if not found:
            return found
        for row in found:
            cursor.execute("SELECT GET_LOCK(CONCAT('job-', %s), 0)", [row[0]])
            if cursor.fetchone() != (1,):
                continue
            if cursor.execute("UPDATE jobs SET attempt = attempt + 1 WHERE id = %s", [row[0]]):
                return (row,)
            cursor.execute("DO RELEASE_LOCK(CONCAT('job-', %s))", [row[0]])


def settle(cursor: Cursor, rows: Found) -> None:
    """In that order: else somebody would find the row, and its lock free."""
    ((key, *_),) = rows
    cursor.execute("DELETE FROM jobs WHERE id = %s", [key])
    cursor.execute("DO RELEASE_LOCK(CONCAT('job-', %s))", [key])


FORM: Final = Form("advisory", AdvisoryLock("job-{id}"), claim, settle, ahead=True)


def run(*, quick: bool) -> list[Result]:
    """Each size on each server, interleaved rounds, medians."""
    with servers() as urls:
        return [result for kind, url in urls.items() for result in FORM.sizes(kind, url, quick=quick)]
