"""Killed with -9 at every numbered point between record, send and mark: no record stays without its message."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.links.outbox_kit import BOTH, made

ROOT = Path(__file__).parent.parent.parent
KILLED = -9


@pytest.mark.servers
@pytest.mark.slow
@pytest.mark.parametrize("dialect", [*BOTH[:3], pytest.param("mysql", marks=[pytest.mark.mysql, pytest.mark.long])])
async def test_killed_at_every_point(dialect: str, tmp_path: Path, request: pytest.FixtureRequest, tell: Any) -> None:
    """What was committed is handled, at least once, and marked; what was not is never heard of; twice is counted."""
    given = [made(dialect, tmp_path, request).url] if dialect != "sqlite" else []
    with trio.fail_after(240):
        done = await trio.run_process(
            [sys.executable, "-m", "tests.links.outbox_story", *given, str(tmp_path)],
            capture_stdout=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    told = [json.loads(line) for line in done.stdout.splitlines()]

    *killed, last = told
    assert len(killed) > 40
    assert last["died"] == 0
    assert last["sales"] == ["first", "third"]
    assert last["handled"] == ["first", "second", "third"]
    assert last["delivered"] == [5, 0]  # two were sent again before they were handled: they came, and were acked
    twice = 0
    for line in told:
        assert line["died"] == (KILLED if line in killed else 0), line
        assert line["went on"] == 0, line
        recorded = [body for body, _ in line["records"]]
        assert all(processed for _, processed in line["records"]), line
        handled = Counter(line["handled"])
        assert set(handled) == set(recorded), line  # each record's message, and no message without a record
        assert [body for body in recorded if body != "second"] == line["sales"], line
        again = sum(handled.values()) - len(handled)
        assert again <= 1, line  # the one whose handler was done, and whose record was not marked yet
        twice += again
    assert 0 < twice < 10
    tell(f"outbox on {dialect}: killed at {len(killed)} points; {twice} handlers ran twice, no record without message")
