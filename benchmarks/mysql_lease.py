"""`mysql-lease-1-mariadb`, `-8-mysql` and so on: a queue table, one message at a time to so many handlers, leased.

Ours: `open_runtime` with one subscription of that concurrency, so that a claim asks for all free places. Peer: the bare
loop of mysql_rounds.py: START TRANSACTION, SELECT … FOR UPDATE SKIP LOCKED, UPDATE, COMMIT; then DELETE.
`mysql-lease-8-mariadb-firm-queue`: the same work by that, as its pages recommend (firm_peer.py). The servers are their
own on this machine, each COMMIT waits for the disk. Messages per second of wall time, the client's CPU beside them;
rounds are interleaved.

Targets: 0.6 of the loop; firm-queue 5.

What it does not show: a network, a disk that is slow to sync, or a handler that does something.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Final

from pymysql.cursors import Cursor

from benchmarks.firm_peer import firm_queue
from benchmarks.mysql_rounds import Form, Found, said, servers
from benchmarks.result import Result
from benchmarks.rounds import LEASE, compared
from benchmarks.stopwatch import Spent
from links.sql import Lease

FIRM: Final = 5.0
"""Its target."""


def claim(cursor: Cursor, room: int) -> Found:
    """Four statements."""
    cursor.execute("START TRANSACTION")
    cursor.execute(
        "SELECT id, attempt, body FROM jobs FORCE INDEX (jobs_due) WHERE due <= UTC_TIMESTAMP(6) "
        "AND (locked_until IS NULL OR locked_until <= UTC_TIMESTAMP(6)) "
        "ORDER BY due, id LIMIT %s FOR UPDATE SKIP LOCKED",
        [room],
    )
    rows = cursor.fetchall()
    if rows:
        cursor.execute(
            "UPDATE jobs SET locked_until = UTC_TIMESTAMP(6) + INTERVAL %s SECOND, attempt = attempt + 1 "
            "WHERE id IN %s",
            [LEASE, [row[0] for row in rows]],
        )
    cursor.execute("COMMIT")
    return rows


def settle(cursor: Cursor, rows: Found) -> None:
    """Those whose lease is not over, so that nobody else has claimed them since."""
    cursor.execute("DELETE FROM jobs WHERE id IN %s AND locked_until > UTC_TIMESTAMP(6)", [[row[0] for row in rows]])


FORM: Final = Form("lease", Lease(LEASE), claim, settle)


def firm(url: str, count: int) -> Spent:
    """firm-queue, in a new database."""
    server = url.rpartition("/")[0]
    said(server + "/", "DROP DATABASE IF EXISTS firm", "CREATE DATABASE firm")
    return firm_queue(f"mysql+pymysql:{server.partition(':')[2]}/firm", count)


def run(*, quick: bool) -> list[Result]:
    """Each size and the peer on each server, interleaved rounds, medians."""
    results: list[Result] = []
    with servers() as urls:
        for kind, url in urls.items():
            results += FORM.sizes(kind, url, quick=quick)
            case = f"mysql-lease-8-{kind}-firm-queue"
            if importlib.util.find_spec("firm") is None:
                print(f"{case}: left out: firm-queue is not installed", flush=True)
                continue
            mine, theirs = partial(FORM.ours, url, 2_000, 8), partial(firm, url, 200 if quick else 500)
            results.append(compared(case, "firm-queue", mine, theirs, 3 if quick else 5, target=FIRM))
    return results
