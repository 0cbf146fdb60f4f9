"""What the tests on RabbitMQ stand on, and which of their skips `--require` lets pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

import proton
import proton.utils

from tests.links.rabbit_kit import Rabbit, manage, shapes

pytestmark = [pytest.mark.amqp, pytest.mark.servers]

ROOT = Path(__file__).parents[2]


def connect(rabbit: Rabbit) -> Any:
    """A client that is not ours, and waits without trio: nothing else runs here."""
    return proton.utils.BlockingConnection(rabbit.url, timeout=10.0, allowed_mechs="PLAIN")


def closed(connection: Any) -> bool:
    """Has the broker closed it, as an operator ordered?"""
    with pytest.raises(proton.utils.ConnectionClosed, match="Closed via management plugin"):
        connection.wait(lambda: False, timeout=10.0)
    return True


async def test_a_queues_depth_is_told(rabbit: Rabbit) -> None:
    with trio.fail_after(30):
        name = await rabbit.queue()
        connection = connect(rabbit)
        sender = connection.create_sender(f"/queues/{name}")
        for _ in range(5):
            sender.send(proton.Message(body=b"x", inferred=True))
        assert (await rabbit.depth(name)).ready == 5
        receiver = connection.create_receiver(f"/queues/{name}")
        for _ in range(2):
            receiver.receive()  # gives credit for one
        assert (await rabbit.depth(name)).ready == 3
        await rabbit.until_depth(name, 3, 2)
        receiver.accept()
        receiver.release(delivered=False)
        receiver.close()
        await rabbit.until_depth(name, 4, 0)
        connection.close()


async def test_the_broker_closes_the_connections_of_one_test_alone(rabbit: Rabbit) -> None:
    with trio.fail_after(30):
        other = Rabbit(rabbit.node, rabbit.kind)
        await rabbit.put_user(other.user, other.user)
        ours, theirs = [connect(rabbit), connect(rabbit)], connect(other)
        assert (len(await rabbit.connections()), len(await other.connections())) == (2, 1)
        await rabbit.close_connections()
        assert [closed(connection) for connection in ours] == [True, True]
        assert len(await other.connections()) == 1
        theirs.close()


async def test_what_a_test_made_is_gone_when_it_has_ended(rabbit: Rabbit) -> None:
    with trio.fail_after(30):
        other = Rabbit(rabbit.node, rabbit.kind)
        await trio.to_thread.run_sync(other.arrive)
        name = await other.queue({"x-max-length": 7})
        await other.put_policy(f"^{other.user}", {"dead-letter-exchange": "dead"})
        told = await ask(rabbit, f"queues/%2F/{name}")
        assert told["arguments"] == {"x-queue-type": rabbit.kind, "x-max-length": 7}
        assert [each["definition"] for each in await policies(other)] == [{"dead-letter-exchange": "dead"}]
        await trio.to_thread.run_sync(other.leave)
        assert await policies(other) == []
        for path in (f"queues/%2F/{name}", f"users/{other.user}"):
            with pytest.raises(AssertionError, match="404"):
                await ask(rabbit, path)


async def ask(rabbit: Rabbit, path: str) -> Any:
    return await trio.to_thread.run_sync(manage, rabbit.node, "GET", path)


async def policies(rabbit: Rabbit) -> list[Any]:
    return [each for each in await ask(rabbit, "policies") if each["pattern"] == f"^{rabbit.user}"]


@shapes("4.3", "classic")
async def test_a_test_may_ask_for_some_shapes(rabbit: Rabbit) -> None:
    assert (rabbit.node.version, rabbit.kind, rabbit.node.host) == ("4.3", "classic", "127.0.0.1")
    assert rabbit.url == f"amqp://{rabbit.user}:{rabbit.user}@127.0.0.1:{rabbit.node.port}"
    assert "guest" not in repr(rabbit)


# --- what a missing server means

PROBE = """
from pathlib import Path
import pytest
from tests.links import rabbit_kit
from tests.links.rabbit_kit import Rabbit, any_broker, shapes

pytestmark = [pytest.mark.amqp, pytest.mark.servers]
rabbit_kit._SCRIPT = Path(__file__).with_name("rabbitmq")

@shapes("4.3", "quorum")
def test_unstable(rabbit: Rabbit) -> None: ...

@shapes("4.0", "quorum")
def test_stable(rabbit: Rabbit) -> None: ...

@any_broker
async def test_any(rabbit: Rabbit) -> None:
    assert rabbit.url == "amqp://me:secret@localhost:1234"
    assert (rabbit.node.host, rabbit.node.port) == ("localhost", 1234)
    assert (await rabbit.queue()).startswith(rabbit.user)

def test_of_no_server() -> None:
    pytest.skip("no reason")
"""


def probe(folder: Path, code: int, **environment: str) -> tuple[dict[str, str], str]:
    """Run such tests where the script says `no mirror` and exits so: what became of each, and all that was printed."""
    (folder / "test_probe.py").write_text(PROBE)
    (folder / "conftest.py").write_text("from tests.conftest import pytest_runtest_makereport, rabbit\n")
    (folder / "pytest.ini").write_text("[pytest]\ntrio_mode = true\nmarkers =\n    amqp\n    servers\n")
    script = folder / "rabbitmq"
    script.write_text(f'#!/bin/sh\necho "rabbitmq $2: no mirror" >&2\nexit {code}\n')
    script.chmod(0o755)
    clean = {name: os.environ[name] for name in os.environ if name not in ("SETTLEMENT_REQUIRE", "TEST_AMQP_URL")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-rA", "-p", "no:randomly", "-p", "no:cacheprovider", folder],
        cwd=folder,
        env={**clean, "PYTHONPATH": str(ROOT), **environment},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = re.findall(r"::test_(\w+)\S* (PASSED|SKIPPED|FAILED|ERROR) ", done.stdout)
    assert len(found) >= 4, done.stdout + done.stderr
    return dict(found), done.stdout


CANNOT_BE_HAD, FAILED = 75, 1


@pytest.mark.parametrize(
    ("require", "code", "expected"),
    [
        ("", CANNOT_BE_HAD, ("SKIPPED", "SKIPPED", "SKIPPED")),
        ("amqp", CANNOT_BE_HAD, ("SKIPPED", "ERROR", "FAILED")),
        ("", FAILED, ("ERROR", "ERROR", "SKIPPED")),
        ("sqlite,amqp", FAILED, ("ERROR", "ERROR", "FAILED")),
    ],
)
def test_which_servers_are_missed(require: str, code: int, expected: tuple[str, str, str], tmp_path: Path) -> None:
    """Required, what Debian stable has may not be missing; what it has not may, by name. What breaks is a failure."""
    found, said = probe(tmp_path, code, SETTLEMENT_REQUIRE=require)
    assert (found["unstable"], found["stable"], found["of_no_server"]) == expected
    if code == FAILED:
        assert "RabbitMQ 4.3 did not start, 1: rabbitmq 4.3: no mirror" in said
    else:
        assert "not in Debian stable: rabbitmq 4.3: no mirror" in said
        assert ("amqp is required, and this was skipped: Skipped: rabbitmq 4.0: no mirror" in said) == bool(require)


def test_with_a_broker_of_ones_own_what_needs_management_is_skipped_by_name(tmp_path: Path) -> None:
    found, said = probe(tmp_path, FAILED, TEST_AMQP_URL="amqp://me:secret@localhost:1234")
    assert found == {"unstable": "SKIPPED", "stable": "SKIPPED", "any": "PASSED", "of_no_server": "SKIPPED"}
    assert "needs the management of a RabbitMQ of ours, and TEST_AMQP_URL names another broker" in said
    assert "secret" not in said
