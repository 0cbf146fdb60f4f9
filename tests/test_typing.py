"""The public API is type-checked as a user would use it: mypy and pyright accept right uses and refuse wrong ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HERE = ROOT / "tests" / "typing"
FILES = ("tests/typing/right.py", "tests/typing/wrong.py")
WRONG = {number for number, line in enumerate((HERE / "wrong.py").read_text().splitlines(), 1) if "# wrong" in line}


def run(*command: str) -> str:
    """What a checker says; its exit code is 1 where it found errors."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def mypy() -> dict[str, dict[int, str]]:
    """Errors by file and line."""
    found: dict[str, dict[int, str]] = {file: {} for file in FILES}
    for line in run("mypy", "--strict", "--no-error-summary", "--hide-error-context", *FILES).splitlines():
        if error := re.fullmatch(r"([^:]+):(\d+): error: (.*)", line):
            found.setdefault(error[1], {})[int(error[2])] = error[3]
    return found


def pyright() -> dict[str, dict[int, str]]:
    """Errors by file and line; strict, by the settings that stand beside the files."""
    output = json.loads(run("pyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(HERE)))
    found: dict[str, dict[int, str]] = {file: {} for file in FILES}
    for error in output["generalDiagnostics"]:
        if error["severity"] == "error":
            file = Path(error["file"]).relative_to(ROOT).as_posix()
            found.setdefault(file, {})[error["range"]["start"]["line"] + 1] = error["message"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_right_uses_are_accepted_and_wrong_ones_refused(checker: str) -> None:
    """No error in right.py, and an error on exactly the marked lines of wrong.py."""
    found = mypy() if checker == "mypy" else pyright()
    right, wrong = found[FILES[0]], found[FILES[1]]
    assert right == {}
    assert {line: wrong[line] for line in wrong.keys() - WRONG} == {}
    assert WRONG - wrong.keys() == set()


def test_there_are_wrong_uses() -> None:
    assert len(WRONG) > 40
