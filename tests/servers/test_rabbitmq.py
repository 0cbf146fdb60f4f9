"""tests/servers/rabbitmq: who keeps a node up, and what is said where there can be none. Other nodes stay up."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.links import rabbit_kit

pytestmark = [pytest.mark.amqp, pytest.mark.servers]

SCRIPT = Path(__file__).with_name("rabbitmq")
DONE, NOT_RUNNING, USAGE, CANNOT_BE_HAD = 0, 1, 2, 75

Call = Callable[..., int]


@pytest.fixture
def call(tmp_path: Path) -> Iterator[Call]:
    """Call the script with a cache of its own, in which the root of 4.0 is the one that is there."""
    rabbit_kit.node("4.0")
    cache = tmp_path / "trio-settlement"
    cache.mkdir()
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    (cache / "rabbitmq-4.0").symlink_to(home / "trio-settlement" / "rabbitmq-4.0")

    def call(*arguments: object) -> int:
        command = [str(SCRIPT), *map(str, arguments)]
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        return subprocess.run(command, env=environment, check=False, capture_output=True, timeout=200).returncode

    yield call
    call("stop", "4.0")


@pytest.fixture
def users() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes = [subprocess.Popen(["sleep", "1000"]) for _ in range(3)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_a_node_ends_with_the_last_process_that_needs_it(call: Call, users: list[subprocess.Popen[bytes]]) -> None:
    first, second, dead = users
    for user in (first, first, second, dead):
        assert call("start", "4.0", user.pid) == DONE
    dead.kill()
    dead.wait()
    assert (call("stop", "4.0", first.pid), call("status", "4.0")) == (DONE, DONE)
    assert (call("stop", "4.0", first.pid), call("status", "4.0")) == (DONE, DONE)
    assert (call("stop", "4.0", second.pid), call("status", "4.0")) == (DONE, NOT_RUNNING)


def test_a_node_that_a_person_started_stays_until_a_person_stops_it(
    call: Call, users: list[subprocess.Popen[bytes]]
) -> None:
    user = users[0].pid
    assert (call("start", "4.0", user), call("start", "4.0")) == (DONE, DONE)
    assert (call("stop", "4.0", user), call("status", "4.0")) == (DONE, DONE)
    assert (call("stop", "4.0"), call("status", "4.0"), call("stop", "4.0")) == (DONE, NOT_RUNNING, DONE)


@pytest.mark.parametrize("arguments", [(), ("start",), ("start", "4.1"), ("run", "4.0"), ("start", "4.0", "me")])
def test_wrong_arguments_are_told(arguments: tuple[str, ...]) -> None:
    assert subprocess.run([SCRIPT, *arguments], check=False, capture_output=True).returncode == USAGE


IS_ROOT_ON_DEBIAN = os.geteuid() == 0 and Path("/etc/debian_version").exists()


@pytest.mark.skipif(not IS_ROOT_ON_DEBIAN, reason="a root is made as root on Debian")
def test_a_root_that_cannot_be_made_is_told_in_a_line_and_not_tried_again_at_once(tmp_path: Path) -> None:
    for name, text in {"debootstrap": f"echo x >>{tmp_path}/tries; echo E: no such suite; exit 1", "sleep": ""}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path)}
    for _ in range(2):
        done = subprocess.run([SCRIPT, "start", "4.3"], env=environment, check=False, capture_output=True, text=True)
        assert done.returncode == CANNOT_BE_HAD
        (line,) = done.stderr.splitlines()
        assert line.startswith("rabbitmq 4.3 cannot be had here: debootstrap failed three times: E: no such suite")
    assert (tmp_path / "tries").read_text() == "x\nx\nx\n"
    assert not (tmp_path / "trio-settlement" / "rabbitmq-4.3.making").exists()
