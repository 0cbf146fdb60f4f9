"""`examples/amqp_orders.py` does what its first paragraphs say, on the embedded broker and on RabbitMQ."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import trio

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from tests.links.rabbit_kit import Rabbit, shapes

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "amqp_orders.py"

pytestmark = [pytest.mark.servers, pytest.mark.amqp]

SABOTAGE = """
import sys
sys.path.insert(0, {root!r})
from examples import amqp_orders
from links.amqp.engine.receiver import Receiver
said = 0
settle = Receiver.settle
def skipping(self, arrival, disposition):
    global said
    said += 1
    return True if said % 7 == 0 else settle(self, arrival, disposition)
Receiver.settle = skipping
sys.exit(amqp_orders.main([]))
"""


async def run(*command: str | Path) -> tuple[int, str]:
    with trio.fail_after(60):
        done = await trio.run_process([sys.executable, *map(str, command)], capture_stdout=True, check=False)
    return done.returncode, done.stdout.decode()


async def test_the_books_balance_on_the_embedded_broker() -> None:
    code, said = await run(EXAMPLE)
    assert code == 0, said
    assert "cancelled in the middle; starting again" in said
    assert "0 left at the broker" in said
    assert said.splitlines()[-1] == "books balance"


@shapes(version="4.3", kind="quorum")
async def test_the_books_balance_on_rabbitmq(rabbit: Rabbit) -> None:
    code, said = await run(EXAMPLE, "--url", rabbit.url)
    assert code == 0, said
    assert "0 left at the broker" in said
    assert said.splitlines()[-1] == "books balance"


async def test_a_link_that_swallows_dispositions_is_found_out() -> None:
    """Each seventh disposition is not said: the broker has those messages still, and the service is never done."""
    code, said = await run("-c", SABOTAGE.format(root=str(ROOT)))
    assert code == 1
    assert said.splitlines()[-1] == "books do not balance"
