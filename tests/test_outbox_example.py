"""`examples/outbox.py` does what its first paragraph says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import trio

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "outbox.py"

pytestmark = [pytest.mark.servers, pytest.mark.amqp, pytest.mark.sqlite]

SABOTAGE = """
import sys
sys.path.insert(0, {root!r})
from examples import outbox
from links.sql import Outbox
outbox.PATIENCE = 3.0
{mistake}
sys.exit(outbox.main(sys.argv[1:]))
"""
FORGETS = """
outbox.__file__ = __file__
async def nothing(self): return 0
Outbox.republish = nothing
"""
DOUBLES = """
Outbox.tracked = lambda self, handler: handler
"""


async def run(*command: str | Path) -> tuple[int, str, str]:
    with trio.fail_after(90):
        done = await trio.run_process(
            [sys.executable, *map(str, command)], capture_stdout=True, capture_stderr=True, check=False
        )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


async def test_the_books_balance() -> None:
    """The sale whose message was not sent is shipped; the sixteen that came twice are shipped once."""
    code, said, errors = await run(EXAMPLE)
    assert code == 0, said + errors
    assert "the shop was killed: sale 17 is committed, and its message was not sent" in said
    assert "the shop opens after 17 sales, and sends 17 messages again" in said
    assert "sales, shipments, sales shipped, records marked: (40, 40, 40, 40); 16 messages came twice" in said
    assert said.splitlines()[-1] == "books balance"


@pytest.mark.parametrize(
    ("mistake", "counts"), [(FORGETS, "(40, 39, 39, 39)"), (DOUBLES, "(40, 56, 40, 0)")], ids=["forgets", "doubles"]
)
@pytest.mark.slow
async def test_an_outbox_that_does_not_keep_its_promise_is_found_out(mistake: str, counts: str, tmp_path: Path) -> None:
    """One that sends nothing again loses a sale; one that does not look ships twice. Each is exit 1."""
    program = tmp_path / "sabotage.py"
    program.write_text(SABOTAGE.format(root=str(ROOT), mistake=mistake))
    code, said, errors = await run(program)
    assert code == 1, said + errors
    assert f"sales, shipments, sales shipped, records marked: {counts}" in said
    assert said.splitlines()[-1] == "books do not balance"
