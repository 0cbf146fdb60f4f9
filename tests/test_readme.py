"""README's claims: its table is what the decision tables say, its program runs, its files are there."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from settlement import (
    Ack,
    Copies,
    Delivery,
    Drop,
    Hold,
    Native,
    Policy,
    Retry,
    RetryAfter,
    Stored,
    amqp,
    memory,
    pubsub,
    sql,
)

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in this folder, with the library on its path."""
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def delivery(attempt: int) -> Delivery[bytes]:
    return Delivery(
        body=b"", message=b"", headers={}, attempt=attempt, redelivery_count=attempt - 1, source="q", id="1", key=None
    )


class ItsTable:
    name = "its table"


def table() -> list[str]:
    """The lines of README's outcome table, out of `decide`."""
    own = "its queue"
    lease, row, lock = sql.Lease(), sql.RowLock(), sql.AdvisoryLock("{id}")
    sources: list[tuple[str, Any, Any]] = [
        ("memory", memory.decide, memory.Facts(own, Native())),
        ("memory, `Copies()`", memory.decide, memory.Facts(own, Copies())),
        ("SQL, lease", sql.decide, sql.Facts(own, lease, has_attempt=True, has_retry_after=True, has_group=False)),
        ("SQL, row lock", sql.decide, sql.Facts(own, row, has_attempt=True, has_retry_after=True, has_group=False)),
        ("SQL, advisory", sql.decide, sql.Facts(own, lock, has_attempt=True, has_retry_after=True, has_group=False)),
        ("AMQP, `Copies()`", amqp.decide, amqp.Facts(own, Copies())),
        ("AMQP, `Hold(…)`", amqp.decide, amqp.Facts(own, Hold(10))),
        ("AMQP, `Native()`", amqp.decide, amqp.Facts(own, Native())),
        ("AMQP, `Stored(…)`", amqp.decide, amqp.Facts(own, Stored(ItsTable()))),
        ("AMQP, at most once", amqp.decide, amqp.Facts(own, Copies(), amqp.AT_MOST_ONCE)),
        ("Pub/Sub", pubsub.decide, pubsub.Facts("subscription", 5)),
    ]
    policy = Policy(max_attempts=5, dead_letter="D")
    lines: list[str] = []
    for name, decide, facts in sources:
        cells = [decide(outcome, delivery(1), facts, policy) for outcome in (Ack(), Retry(), RetryAfter(9), Drop())]
        cells.append(decide(Retry(), delivery(5), facts, policy))
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    return lines


def test_the_outcome_table_is_what_the_decision_tables_say() -> None:
    """README's table has a row for each source, the strings of the plans that `decide` gives, and no other row."""
    lines = README.splitlines()
    head = lines.index("| transport | `Ack` | `Retry` | `RetryAfter(9)` | `Drop` | cap reached |")
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), lines[head + 2 :]))

    assert rows == table()


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "3 received = 2 acked + 0 retried + 0 delayed + 1 dropped"),
        (1, "a lamp"),
        pytest.param(2, "shipping a lamp at attempt 2", marks=pytest.mark.amqp),
    ],
)
def test_the_programs_run_as_they_stand(number: int, said: str, tmp_path: Path) -> None:
    """A newcomer pastes them into a file, and they do what README says: now, and when they are run again."""
    program = PROGRAMS[number]
    if "links.amqp" in program:
        pytest.importorskip("proton", reason="python-qpid-proton is not installed")
    assert len(program.splitlines()) <= 42

    for _ in ("the first time", "again, in the same folder"):
        ran = python(tmp_path, "-c", program)

        assert ran.returncode == 0, ran.stderr
        assert said in ran.stdout


@pytest.mark.amqp
def test_the_tests_run_as_they_stand(tmp_path: Path) -> None:
    """The recipe for virtual time passes as a newcomer's own test file, and takes no hour."""
    pytest.importorskip("proton", reason="python-qpid-proton is not installed")
    (tmp_path / "test_orders.py").write_text(PROGRAMS[3])

    ran = python(tmp_path, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-o", "trio_mode=true")

    assert ran.returncode == 0, ran.stdout
    assert "3 passed" in ran.stdout


@pytest.mark.parametrize(
    ("theirs", "found"), [("links.py", False), ("links/__init__.py", False), ("links/x.txt", True)]
)
def test_beside_a_module_of_ones_own(theirs: str, found: bool, tmp_path: Path) -> None:
    """What README says of a user's own `links`: a module or package hides ours, a folder that is none does not."""
    (tmp_path / theirs).parent.mkdir(exist_ok=True)
    (tmp_path / theirs).touch()
    (tmp_path / "app.py").write_text("from links.memory import MemoryBroker")

    ran = python(tmp_path, "app.py")

    assert (ran.returncode == 0) is found
    assert ("No module named 'links.memory'" in ran.stderr) is not found


@pytest.mark.parametrize("command", sorted(set(re.findall(r"(?:examples|tests|benchmarks)/[a-z]+(?:\.py)?", README))))
def test_what_readme_names_is_there(command: str) -> None:
    """A stranger finds each command and file that README names."""
    assert (ROOT / command).exists()
