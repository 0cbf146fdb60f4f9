"""The examples do what their first paragraphs say, killed, cut short and tampered with."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
ORDERS = ROOT / "examples" / "orders.jsonl"

CONCURRENCY = 4
"""Of `examples/sigterm.py`."""

pytestmark = [pytest.mark.servers, pytest.mark.sqlite]

SABOTAGE = """
import sys
sys.path.insert(0, {root!r})
sys.argv[0] = {orders!r}
from examples import orders
from links.sql.lease_link import LeaseLink
said = 0
settle = LeaseLink.settle
async def skipping(self, batch):
    global said
    kept = []
    for order in batch:
        said += 1
        if said % 7:
            kept.append(order)
        else:
            self._rows.drop(order.received)
    verdicts = dict(zip(map(id, kept), await settle(self, kept)))
    return [verdicts.get(id(order)) for order in batch]
LeaseLink.settle = skipping
sys.exit(orders.main(["--folder", {folder!r}]))
"""


def start(*arguments: str | Path, program: Path = ROOT / "examples" / "orders.py") -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, program, *arguments], stdout=subprocess.PIPE, text=True)


def run(folder: Path) -> tuple[int, str]:
    process = start("--folder", folder)
    out, _ = process.communicate(timeout=60)
    return process.returncode, out


@pytest.fixture
def running() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start processes; those that a failing test leaves are ended."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str | Path, program: Path = ROOT / "examples" / "orders.py") -> subprocess.Popen[str]:
        started.append(start(*arguments, program=program))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(folder / "orders.db", timeout=10)) as connection:
        return connection.execute(query).fetchall()


def wait_until(folder: Path, query: str, process: subprocess.Popen[str]) -> None:
    """Until the query's first value is true; fails after 30 s, or where the process has ended."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert process.poll() is None, "the example ended too early"
        try:
            if rows(folder, query)[0][0]:
                return
        except sqlite3.OperationalError:  # not there yet
            pass
        time.sleep(0.005)
    pytest.fail(f"{query} was not true within 30 s")


IN_HAND = (
    "SELECT (SELECT count(*) FROM orders WHERE processed_at IS NULL AND locked_until IS NOT NULL) >= 1"
    " AND (SELECT count(*) FROM orders WHERE processed_at IS NOT NULL) >= 30"
)


def test_the_main_job_balances_and_balances_again(tmp_path: Path) -> None:
    """Run twice: the second finds everything done, and no order twice."""
    first, said = run(tmp_path)
    second, again = run(tmp_path)

    assert (first, second) == (0, 0)
    assert said.rstrip().endswith("books balance")
    assert "360 lines in the file = 350 rows finished + 10 rows dead + 0 rows open" in said
    assert "cancelled with" in said
    assert again.rstrip().endswith("books balance")
    assert "published 0 of 360 lines as new orders" in again


def test_killed_in_the_middle_it_resumes_and_no_order_is_acked_twice(
    tmp_path: Path, running: Callable[..., subprocess.Popen[str]]
) -> None:
    """`kill -9` with rows in hand: every order is accounted for, and what was finished is not touched again."""
    process = running("--folder", tmp_path)
    wait_until(tmp_path, IN_HAND, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = dict(rows(tmp_path, "SELECT id, processed_at FROM orders WHERE processed_at IS NOT NULL"))
    in_hand = rows(tmp_path, "SELECT count(*) FROM orders WHERE processed_at IS NULL AND locked_until IS NOT NULL")

    code, said = run(tmp_path)

    assert in_hand[0][0] != 0
    assert code == 0, said
    assert "resuming: " in said
    assert said.rstrip().endswith("books balance")
    after = dict(rows(tmp_path, "SELECT id, processed_at FROM orders WHERE processed_at IS NOT NULL"))
    assert {order: after[order] for order in finished} == finished
    everything = rows(tmp_path, "SELECT id FROM orders UNION ALL SELECT id FROM dead_orders")
    assert len(everything) == len(set(everything)) == len(ORDERS.read_bytes().splitlines())


def test_a_row_that_somebody_removes_is_missed(tmp_path: Path, running: Callable[..., subprocess.Popen[str]]) -> None:
    """The books are no formality: one row less is exit 1, with the difference."""
    process = running("--folder", tmp_path)
    wait_until(tmp_path, IN_HAND, process)
    with closing(sqlite3.connect(tmp_path / "orders.db", timeout=10, isolation_level=None)) as connection:
        gone = connection.execute(
            "DELETE FROM orders WHERE id = (SELECT min(id) FROM orders WHERE processed_at IS NOT NULL)"
        ).rowcount

    out, _ = process.communicate(timeout=60)

    assert gone == 1
    assert process.returncode == 1, out
    assert "books do not balance: +1 lines in the file" in out


def test_a_settler_that_skips_is_found_out(tmp_path: Path) -> None:
    """A link that says it has settled each seventh order, and has not, is exit 1."""
    program = SABOTAGE.format(root=str(ROOT), orders=str(ROOT / "examples/orders.py"), folder=str(tmp_path))

    ran = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120)

    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "books do not balance: " in ran.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(tmp_path: Path, running: Callable[..., subprocess.Popen[str]], number: signal.Signals) -> None:
    """SIGTERM finishes what was begun, gives back what was not, and exits 0 with nothing left in hand."""
    process = running(tmp_path, program=ROOT / "examples" / "sigterm.py")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("serving")
    process.send_signal(number)

    out, _ = process.communicate(timeout=30)

    assert process.returncode == 0, out
    assert f"{number.name}: draining" in out
    received, acked, unsettled = (
        int(re.findall(rf"(\d+) {line}", out)[0]) for line in ("received", "acked", "unsettled")
    )
    assert received == acked + unsettled, out
    assert unsettled <= CONCURRENCY, out  # claimed, and no handler had begun
    assert "0 unknown + 0 in hand" in out
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as connection:
        assert connection.execute("SELECT count(*) FROM jobs WHERE locked_until IS NOT NULL").fetchone() == (0,)


def test_a_second_signal_drops(tmp_path: Path, running: Callable[..., subprocess.Popen[str]]) -> None:
    """The second SIGTERM leaves what is in hand unsettled, and its leases are released at once."""
    process = running(tmp_path, program=ROOT / "examples" / "sigterm.py")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("serving")
    with closing(sqlite3.connect(tmp_path / "jobs.db", timeout=10)) as connection:
        while not connection.execute("SELECT count(*) FROM jobs WHERE locked_until IS NOT NULL").fetchone()[0]:
            assert process.poll() is None
            time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "SIGTERM: draining\n"
    process.send_signal(signal.SIGTERM)

    out, _ = process.communicate(timeout=30)

    assert process.returncode == 0, out
    assert "SIGTERM again: dropping what is in hand" in out
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as connection:
        assert connection.execute("SELECT count(*) FROM jobs WHERE locked_until IS NOT NULL").fetchone() == (0,)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("orders", "--fresh"),
        ("sigterm", "folder"),
        ("amqp_orders", "--url"),
        ("own_table", "--url"),
        ("outbox", "--sell"),
    ],
)
def test_an_example_helps(name: str, said: str) -> None:
    """`examples/run NAME --help` says what it does and what it takes, and does nothing else."""
    if name.startswith("amqp") or name == "outbox":
        pytest.importorskip("proton", reason="python-qpid-proton is not installed")
    process = start("--help", program=ROOT / "examples" / f"{name}.py")

    out, _ = process.communicate(timeout=30)

    assert process.returncode == 0
    assert out.startswith("usage: examples/run")
    assert said in out


def test_a_name_that_no_example_has_is_answered_by_those_that_there_are() -> None:
    """A typing error is said at once, before anything is installed or run."""
    ran = subprocess.run(
        [ROOT / "examples" / "run", "sigtrem"], check=False, capture_output=True, text=True, timeout=30
    )

    assert ran.returncode == 2
    assert ran.stderr.startswith("no example is named sigtrem; there are: ")
    names = ["amqp_orders", "orders", "outbox", "own_table", "sigterm"]
    assert ran.stderr.split()[-5:] == [f"examples/{name}.py" for name in names]


def test_the_commands_can_be_called() -> None:
    """What README tells to type is executable."""
    assert all(os.access(ROOT / command, os.X_OK) for command in ("examples/run", "tests/run", "benchmarks/run"))
