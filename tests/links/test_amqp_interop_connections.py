"""rhea's connections to links.amqp.embedded over loopback TCP: logins, heartbeats, and what breaks."""

from __future__ import annotations

import signal

import pytest

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from links.amqp.embedded.broker import EmbeddedBroker
from tests.interop.rhea_kit import Rhea, install, only, seen, until

pytestmark = [pytest.mark.amqp, pytest.mark.servers]


@pytest.fixture(scope="session")
def rhea() -> Rhea:
    return install()


async def test_rhea_logs_in_by_plain_and_by_nothing_else(rhea: Rhea) -> None:
    broker = EmbeddedBroker(users={"guest": "se:cr@t"}, anonymous=False)
    async with broker.serve() as url:
        good, bad = (url.replace("//", f"//guest:{password}@") for password in ("se%3Acr%40t", "wrong"))
        assert only(await rhea.run("produce.js", good, "q"), "accepted") == [1]
        assert await rhea.run("produce.js", bad, "q", code=1) == [
            {"error": "amqp:unauthorized-access", "description": "Failed to authenticate: 1"}
        ]
        assert await rhea.run("produce.js", url, "q", "--anonymous", code=1) == [
            {"error": "amqp:unauthorized-access", "description": "No suitable mechanism; server supports PLAIN"}
        ]
        [no_sasl] = await rhea.run("produce.js", url, "q", code=1)
        assert "error" in no_sasl
        assert len(broker.ready("q")) == 1


async def test_rhea_logs_in_as_nobody(rhea: Rhea) -> None:
    broker = EmbeddedBroker()
    async with broker.serve() as url:
        assert only(await rhea.run("produce.js", url, "q", "--anonymous"), "accepted") == [1]
        assert only(await rhea.run("produce.js", url, "q"), "accepted") == [1]  # no SASL layer at all


async def test_heartbeats_keep_a_quiet_connection(rhea: Rhea) -> None:
    """Each side hears the other's: ten of rhea's, one each 0.25 s, are more than twice either side's idle timeout."""
    broker = EmbeddedBroker(idle_timeout=1.0)
    async with broker.serve() as url, rhea.running("consume.js", url, "q", "--idle", "500") as quiet:
        await quiet.tells("attached")
        await until(lambda: [each.credit for peer in broker.peers for each in peer.consumers.values()] == [1])
        [peer] = broker.peers
        before = peer.engine.frames_received
        await until(lambda: peer.engine.frames_received >= before + 10)
        assert broker.peers == [peer]
        await rhea.run("produce.js", url, "q")
        assert seen(await quiet.ends()) == [(0, None)]


async def test_a_rhea_that_stands_still_is_given_up(rhea: Rhea) -> None:
    broker = EmbeddedBroker(idle_timeout=0.6)
    async with broker.serve() as url:
        await rhea.run("produce.js", url, "q")
        async with rhea.running("consume.js", url, "q", "--answers", "nothing", "--goodbye", "never") as still:
            await still.tells("answered")
            still.process.send_signal(signal.SIGSTOP)
            await until(lambda: not broker.peers)
        assert [message.count for message in broker.store.queue("q")] == [1]


@pytest.mark.parametrize("how", ["sever", "freeze"])
async def test_rhea_comes_back_by_itself(rhea: Rhea, how: str) -> None:
    """The connection is cut, or the broker is silent; its links attach again, and what was unsettled comes counted."""
    broker = EmbeddedBroker(idle_timeout=0.6)
    async with broker.serve() as url:
        await rhea.run("produce.js", url, "q", "--count", "2")
        options = ["--count", "3", "--credit", "1", "--answers", "nothing,accept", "--reconnect", "--idle", "300"]
        async with rhea.running("consume.js", url, "q", *options) as back:
            await back.tells("n")
            getattr(broker.peers[0], how)()
            got = await back.ends()
        assert (broker.ready("q"), broker.unsettled("q")) == ([], 0)
    assert only(got, "disconnected") == [True]
    assert only(got, "attached") == [True, True]
    assert sorted(seen(got)[1:]) == [(0, 1), (1, None)]
