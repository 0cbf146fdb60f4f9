"""`examples/own_table.py` does what its first paragraph says, on a real PostgreSQL."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import trio

from tests.links.postgres_tables import PostgresTables

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "own_table.py"

pytestmark = [pytest.mark.servers, pytest.mark.postgres]

SABOTAGE = """
import sys
sys.path.insert(0, {root!r})
from examples import own_table
from links.sql.postgres.pin import PostgresPin
settle = PostgresPin.settle
async def twice(self, said, rest, *, keep, then):
    return await settle(self, said, rest, keep=False, then=then)
PostgresPin.settle = twice
sys.exit(own_table.main(sys.argv[1:]))
"""


async def run(*command: str | Path) -> tuple[int, str, str]:
    with trio.fail_after(90):
        done = await trio.run_process(
            [sys.executable, *map(str, command)], capture_stdout=True, capture_stderr=True, check=False
        )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


async def test_the_books_balance(database: str) -> None:
    """Every order that the shop took is shipped once; what it refused left no customer behind; nothing is kept."""
    code, said, errors = await run(EXAMPLE, "--url", database)
    assert code == 0, said + errors
    assert len(re.findall(r"^sale \d+ is refused: no pieces$", said, re.MULTILINE)) == 8
    assert "32 sold; customers, orders, done, shipments, orders shipped: (32, 32, 32, 32, 32); 32 acked" in said
    assert said.splitlines()[-1] == "books balance"
    schemas = "SELECT count(*) FROM information_schema.schemata WHERE schema_name = 'example_shop'"
    assert PostgresTables(database).run(schemas) == [(0,)]


async def test_a_link_that_forgets_the_handlers_writes_is_found_out(database: str) -> None:
    """The orders are done, and nothing was shipped."""
    code, said, errors = await run("-c", SABOTAGE.format(root=str(ROOT)), "--url", database)
    assert code == 1, said + errors
    assert said.splitlines()[-1] == "books do not balance"


async def test_without_a_database_it_says_how_to_get_one() -> None:
    """Exit 2, before anything is tried."""
    code, said, errors = await run(EXAMPLE)
    assert (code, said) == (2, "")
    assert "examples/run own_table --url postgresql://" in errors
