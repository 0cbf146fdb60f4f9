"""What tests/run does with the servers of the tests; in a clone of stubs, so that no server is touched."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import attrs
import pytest

pytestmark = pytest.mark.servers

ROOT = Path(__file__).parents[2]


@attrs.frozen
class Completed:
    code: int
    said: str
    pid: int
    calls: list[str]
    """What the server's script was called with, sorted; PID stands for the process id of tests/run."""


@attrs.define
class Clone:
    """A clone in which every command is a stub, and the tests and the starting of a server do what a test says."""

    folder: Path
    start: str = "echo amqp://there"
    tests: str = "exit 0"

    def __attrs_post_init__(self) -> None:
        self.write("locks/venv.sh", "make_venv() { :; }\nvenv_extra() { :; }\n")
        (self.folder / "tests/servers").mkdir(parents=True)
        shutil.copy(ROOT / "tests/run", self.folder / "tests/run")
        for name in ("ruff", "flake8", "mypy", "pyright", "lint-imports"):
            self.write(f".venv/tests/bin/{name}", "")

    def write(self, path: str, text: str) -> None:
        script = self.folder / path
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(f"#!/bin/sh\n{text}")
        script.chmod(0o755)

    def run(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        called = f'cd {self.folder}\necho "$*" >>calls\n'
        self.write("tests/servers/rabbitmq", f'{called}if [ "$1" = start ]; then echo $$ >$2.pid; {self.start}; fi\n')
        called = called.replace("$*", "tests of $SETTLEMENT_RUN")
        self.write(".venv/tests/bin/python", f"{called}{self.tests}\n")
        clean = {name: os.environ[name] for name in os.environ if name != "TEST_AMQP_URL"}
        clean["XDG_CACHE_HOME"] = str(self.folder.parent / f"{self.folder.name}.cache")
        return subprocess.Popen(
            [self.folder / "tests/run", *arguments],
            env={**clean, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait(self, process: subprocess.Popen[str]) -> Completed:
        said, _ = process.communicate(timeout=30)
        calls = (self.folder / "calls").read_text().replace(str(process.pid), "PID").splitlines()
        return Completed(process.returncode, said, process.pid, sorted(calls))


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


BOTH_BEGUN = "while ! [ -s 4.0.pid -a -s 4.3.pid ]; do sleep 0.01; done"
BOTH_ENDED = f"{BOTH_BEGUN}; for pid in $(cat 4.0.pid 4.3.pid); do while kill -0 $pid; do sleep 0.01; done; done"
ALL = ["start 4.0 PID", "start 4.3 PID", "stop 4.0 PID", "stop 4.3 PID", "tests of PID"]
NONE = ["tests of PID"]


@pytest.mark.parametrize(("tests", "code"), [("exit 0", 0), ("exit 1", 1)])
def test_it_starts_both_nodes_and_stops_them_whatever_the_tests_say(clone: Clone, tests: str, code: int) -> None:
    clone.tests = f"{BOTH_BEGUN}; {tests}"
    ended = clone.wait(clone.run())
    assert (ended.code, ended.calls) == (code, ALL)
    assert "there" not in ended.said


@pytest.mark.parametrize(
    ("arguments", "url", "calls"),
    [
        (["--fast"], "", NONE),
        (["--only", "memory"], "", NONE),
        (["--only", "amqp"], "", ALL),
        (["--only", "amqp"], "amqp://localhost", NONE),
    ],
)
def test_it_starts_none_that_its_tests_do_not_need(
    clone: Clone, arguments: list[str], url: str, calls: list[str]
) -> None:
    clone.tests = BOTH_BEGUN if calls == ALL else "exit 0"
    ended = clone.wait(clone.run(*arguments, TEST_AMQP_URL=url))
    assert (ended.code, ended.calls) == (0, calls)


@pytest.mark.parametrize(("code", "told"), [(1, True), (75, False)])
def test_a_node_that_did_not_start_is_told_and_one_that_cannot_be_had_is_the_tests_to_say(
    clone: Clone, code: int, told: bool
) -> None:
    clone.start = f"echo no luck; exit {code}"
    clone.tests = f"{BOTH_ENDED}; true"
    ended = clone.wait(clone.run())
    assert (ended.code, ended.calls) == (0, ALL)
    assert ("RabbitMQ 4.3 did not start:\nno luck" in ended.said) is told
    assert ("no luck" in ended.said) is told


def test_a_node_that_is_not_up_when_the_tests_have_ended_is_not_waited_for(clone: Clone) -> None:
    clone.start = "exec sleep 1000"
    clone.tests = BOTH_BEGUN
    ended = clone.wait(clone.run())
    assert (ended.code, ended.calls) == (0, ALL)
    assert "did not start" not in ended.said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_from_outside_it_stops_them_too(clone: Clone, number: signal.Signals) -> None:
    clone.tests = f"{BOTH_BEGUN}; touch begun; exec sleep 1000"
    process = clone.run("--only", "amqp")
    deadline = time.monotonic() + 30
    while not (clone.folder / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, number)
    ended = clone.wait(process)
    assert ended.code != 0
    assert ended.calls == ALL


SLOW_LINTER = """
for file; do case $file in *.py) echo "$file" >>linted; grep -q bad "$file" && refused=1;; esac; done
exit ${refused-0}
"""


def test_a_file_that_the_slow_linter_was_content_with_is_not_linted_again_in_any_clone(tmp_path: Path) -> None:
    """What has changed is, and what was refused, and all of it by other rules."""
    cache = str(tmp_path / "cache")
    one, two = Clone(tmp_path / "one"), Clone(tmp_path / "two")
    for clone in (one, two):
        clone.write(".venv/tests/bin/flake8", SLOW_LINTER)

    def linted(clone: Clone, a: str, b: str, rules: str = "") -> tuple[int, list[str]]:
        for name, text in {"a.py": a, "b.py": b, ".flake8": rules, "linted": ""}.items():
            (clone.folder / name).write_text(text)
        code = clone.wait(clone.run("--fast", XDG_CACHE_HOME=cache)).code
        return code, (clone.folder / "linted").read_text().split()

    assert linted(one, "a = 1", "b = 1")[1] != []
    assert linted(one, "a = 1", "b = 1") == (0, [])
    assert linted(two, "a = 1", "b = 1") == (0, [])
    assert linted(two, "bad", "b = 1") == (1, ["./a.py"])
    assert linted(two, "bad", "b = 1") == (1, ["./a.py"])
    assert sorted(linted(two, "b = 1", "a = 1")[1]) == ["./a.py", "./b.py"]
    assert linted(one, "a = 1", "b = 1") == (0, [])
    assert sorted(linted(one, "a = 1", "b = 1", "other rules")[1]) == ["./a.py", "./b.py"]
