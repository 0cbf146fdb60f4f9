"""Clients that nobody here wrote, in processes of their own, against links.amqp.embedded over loopback TCP."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import trio

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from links.amqp.embedded.broker import EmbeddedBroker, QueuePolicy
from links.amqp.engine.client_connection import ClientConnection
from links.amqp.engine.engine import Engine
from links.amqp.engine.events import ACCEPTED, FAILED, REJECTED, Terminus
from links.amqp.engine.settings import Login, Settings
from links.amqp.wire.sections import split

pytestmark = [pytest.mark.amqp, pytest.mark.servers]

BLOCKING = """
import sys
from proton import Message
from proton.utils import BlockingConnection
url, count = sys.argv[1], int(sys.argv[2])
login = dict(pair.split("=") for pair in sys.argv[4:])
connection = BlockingConnection(url, timeout=20, allowed_mechs=sys.argv[3], **login)
sender = connection.create_sender("q")
for number in range(count):
    sender.send(Message(body=b"%d" % number, inferred=True, id=str(number), properties={"n": number}))
receiver = connection.create_receiver("q", credit=10)
seen = []
for _ in range(count):
    message = receiver.receive(timeout=20)
    assert message.delivery_count == 0 and message.first_acquirer in (True, False)
    seen.append((int(bytes(message.body)), message.properties["n"]))
    receiver.accept()
assert seen == [(number, number) for number in range(count)], seen
connection.close()
print("done")
"""

CONTAINER = """
import sys
from proton import Delivery, Message
from proton.handlers import MessagingHandler
from proton.reactor import Container

class Client(MessagingHandler):
    def __init__(self, url, count):
        super().__init__(prefetch=50, auto_accept=False)
        self.url, self.count = url, count
        self.sent = self.confirmed = self.accepted = 0
        self.counts = []

    def on_start(self, event):
        connection = event.container.connect(self.url, allowed_mechs="ANONYMOUS", reconnect=False, heartbeat=5)
        event.container.create_sender(connection, sys.argv[3])
        event.container.create_receiver(connection, sys.argv[3])

    def on_sendable(self, event):
        while event.sender.credit and self.sent < self.count:
            event.sender.send(Message(body="%d" % self.sent))
            self.sent += 1

    def on_accepted(self, event):
        self.confirmed += 1

    def on_message(self, event):
        self.counts.append(event.message.delivery_count)
        if event.message.delivery_count < 2:
            event.delivery.local.failed = True  # release(delivered=True) leaves that out, and so is not counted
            self.settle(event.delivery, Delivery.MODIFIED)
        else:
            self.accept(event.delivery)
            self.accepted += 1
            if self.accepted == self.count and self.confirmed == self.count:
                event.connection.close()

client = Client(sys.argv[1], int(sys.argv[2]))
Container(client).run()
assert sorted(client.counts) == sorted([0, 1, 2] * client.count), client.counts
print("done")
"""


async def run_client(program: str, *arguments: str) -> None:
    with trio.fail_after(60):
        done = await trio.run_process(
            [sys.executable, "-c", program, *arguments], capture_stdout=True, stderr=subprocess.STDOUT, check=False
        )
    assert (done.returncode, done.stdout.decode().splitlines()[-1:]) == (0, ["done"]), done.stdout.decode()


async def test_protons_blocking_client() -> None:
    broker = EmbeddedBroker()
    async with broker.serve() as url:
        await run_client(BLOCKING, url, "200", "ANONYMOUS")
    assert (broker.ready("q"), broker.unsettled("q")) == ([], 0)
    assert [said.disposition for said in broker.said] == [ACCEPTED] * 200


async def test_protons_blocking_client_logs_in_by_plain() -> None:
    """Proton has no PLAIN on its listening side: these frames are ours."""
    broker = EmbeddedBroker(users={"guest": "secret"}, anonymous=False)
    async with broker.serve() as url:
        await run_client(BLOCKING, url, "3", "PLAIN", "user=guest", "password=secret")
        with pytest.raises(AssertionError, match="amqp:unauthorized-access"):
            await run_client(BLOCKING, url, "3", "PLAIN", "user=guest", "password=wrong")
        with pytest.raises(AssertionError, match="amqp:unauthorized-access"):
            await run_client(BLOCKING, url, "3", "ANONYMOUS")


async def test_protons_container() -> None:
    broker = EmbeddedBroker()
    async with broker.serve() as url:
        await run_client(CONTAINER, url, "300", "q")
    assert (broker.ready("q"), broker.unsettled("q")) == ([], 0)


async def test_two_containers_and_our_own_connection_at_once() -> None:
    broker = EmbeddedBroker(policies={"ours": QueuePolicy(dead_letter="dead")})
    async with broker.serve() as url, trio.open_nursery() as nursery:
        for queue in ("one", "other"):
            nursery.start_soon(partial(run_client, CONTAINER, url, "100", queue))
        host, _, port = url.removeprefix("amqp://").partition(":")
        connection = ClientConnection(
            await trio.open_tcp_stream(host, int(port)), Engine(Settings("us", login=Login()))
        )
        nursery.start_soon(connection.run)
        await connection.opened()
        session = await connection.begin()
        sender, receiver = (
            connection.attach_sender(session, Terminus("ours")),
            connection.attach_receiver(session, Terminus("ours")),
        )
        await receiver.attached()
        receiver.grant(20)
        for number in range(100):
            await sender.send(b"\x00\x53\x75\xa0\x01%c" % number)
        failed = rejected = 0
        while rejected < 100:
            for arrival in await receiver.receive(20):
                again = split(arrival.raw).delivery_count is not None
                receiver.settle(arrival, REJECTED if again else FAILED)
                receiver.grant(1)
                failed, rejected = failed + (not again), rejected + again
        assert await receiver.proved()
        assert (failed, broker.unsettled("ours"), len(broker.ready("dead"))) == (100, 0, 100)
        connection.close()


async def test_a_process_that_is_killed_gives_its_messages_back_counted() -> None:
    broker = EmbeddedBroker()
    program = BLOCKING.replace("    receiver.accept()\n", "").replace(
        'connection.close()\nprint("done")', "import os; os.kill(os.getpid(), 9)"
    )
    async with broker.serve() as url:
        await trio.run_process([sys.executable, "-c", program, url, "5", "ANONYMOUS"], check=False)
        with trio.fail_after(10):
            while broker.peers:
                await trio.sleep(0.01)
    assert [message.count for message in broker.store.queue("q")] == [1] * 5
