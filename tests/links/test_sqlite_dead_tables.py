"""A dead-letter table that no row could move to is refused when the link attaches, not by the first dead letter."""

from pathlib import Path

import pytest

from links.errors import LinkRefused
from links.sql import Table
from settlement import Policy
from tests.links.sqlite_kit import Database, attached

pytestmark = pytest.mark.sqlite

JOBS = Table("jobs", id="id", payload="body", locked_until="lock", attempt="tries")
COLUMNS = "id INTEGER PRIMARY KEY, body BLOB, tries INTEGER NOT NULL DEFAULT 1"
POLICY = Policy(max_attempts=2, dead_letter="dead")


@pytest.mark.parametrize(
    ("dead", "said"),
    [
        ("lock REAL, why TEXT NOT NULL", "column 'why' is NOT NULL without a default, .*give it a default"),
        ("lock REAL NOT NULL DEFAULT 0", r"column 'lock' \(locked_until\) is NOT NULL, but .* an empty lease"),
    ],
)
async def test_a_dead_table_that_takes_no_row_is_refused(dead: str, said: str, tmp_path: Path) -> None:
    """Subscription, both tables, the column and the way out are named; with a default, or NULL, it attaches."""
    database = Database(tmp_path / "q.db")
    database.run(f"CREATE TABLE jobs ({COLUMNS}, lock REAL)")
    database.run(f"CREATE TABLE dead ({COLUMNS}, {dead})")
    broker = database.broker()
    async with broker.connect():
        with pytest.raises(LinkRefused, match=rf"'test', table 'jobs': dead-letter table 'dead': {said}"):
            async with attached(broker.queue(JOBS), policy=POLICY):
                raise AssertionError("attached")
        database.run("DROP TABLE dead")
        database.run(f"CREATE TABLE dead ({COLUMNS}, lock REAL, why TEXT NOT NULL DEFAULT '')")
        async with attached(broker.queue(JOBS), policy=POLICY):
            pass
