"""links.amqp.management on RabbitMQ 4.3 and 4.0: the facts about queues that `links.amqp.rabbitmq` builds on."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Final
from urllib.parse import quote

import attrs
import pytest
import trio

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from links.amqp.engine.client_connection import ClientConnection
from links.amqp.engine.engine import Engine
from links.amqp.engine.events import ACCEPTED, FAILED, Terminus
from links.amqp.engine.receiver import Receiver
from links.amqp.engine.session import Session
from links.amqp.engine.settings import Login, Settings
from links.amqp.management import Management, management, request
from links.amqp.rabbitmq import QueueInfo
from links.errors import LinkBroken, LinkRefused
from tests.links.rabbit_kit import Rabbit, shapes

pytestmark = [pytest.mark.amqp, pytest.mark.servers]

DATA = b"\x00\x53\x75\xa0\x01x"
"""A message: a data section."""
NO_ARGUMENTS: Final[Mapping[str, object]] = MappingProxyType({})
BOTH = shapes(kind="quorum")
"""Each version; the kind of queue is the test's own."""


@attrs.define
class Scene:
    connection: ClientConnection
    session: Session
    manage: Management
    made: list[str] = attrs.field(factory=list[str])

    def name(self, what: str = "orders") -> str:
        """A queue name that nobody else has; deleted at the end."""
        self.made.append(f"{what} {secrets.token_hex(4)}")
        return self.made[-1]

    async def declare(self, kind: str = "quorum", arguments: Mapping[str, object] = NO_ARGUMENTS) -> str:
        name = self.name()
        await self.manage.declare(name, kind=kind, arguments=arguments)
        return name

    async def publish(self, address: str, times: int = 1) -> None:
        sender = self.connection.attach_sender(self.session, Terminus(address))
        await sender.attached()
        for _ in range(times):
            assert await (await sender.send(DATA)).answered() == ACCEPTED

    @asynccontextmanager
    async def receiver(self, name: str) -> AsyncGenerator[Receiver, None]:
        receiver = self.connection.attach_receiver(self.session, Terminus(address_of(name)))
        await receiver.attached()
        yield receiver
        receiver.detach()
        await receiver.detached()

    async def fail(self, name: str, times: int) -> None:
        """Let a message fail so many times."""
        async with self.receiver(name) as receiver:
            for _ in range(times):
                receiver.grant(1)
                (arrival,) = await receiver.receive(1)
                receiver.settle(arrival, FAILED)

    async def until_counted(self, name: str, number: int) -> None:
        while await self.manage.count(name) != number:  # noqa: ASYNC110 -- each look is a round trip
            await trio.sleep(0.01)


def address_of(name: str) -> str:
    return "/queues/" + quote(name, safe="")


@asynccontextmanager
async def connected(rabbit: Rabbit, user: str) -> AsyncGenerator[ClientConnection, None]:
    login = Login("PLAIN", user, user)
    stream = await trio.open_tcp_stream(rabbit.node.host, rabbit.node.port)
    async with trio.open_nursery() as nursery:
        connection = ClientConnection(stream, Engine(Settings("management tests", login=login)))
        nursery.start_soon(connection.run)
        await connection.opened()
        yield connection
        connection.close()


@asynccontextmanager
async def scene(rabbit: Rabbit) -> AsyncGenerator[Scene, None]:
    """A connection, with 30 s for all that is done on it."""
    with trio.fail_after(30):
        async with connected(rabbit, rabbit.user) as connection, management(connection) as manage:
            at = Scene(connection, await connection.begin(), manage)
            try:
                yield at
            finally:
                with trio.move_on_after(10, shield=True):
                    for name in at.made:
                        await manage.delete(name)


# --- what is asked for


@BOTH
@pytest.mark.parametrize(("kind", "limit"), [("quorum", 20), ("classic", None), ("stream", None)])
async def test_a_queue_is_declared_looked_at_and_deleted(rabbit: Rabbit, kind: str, limit: int | None) -> None:
    async with scene(rabbit) as at:
        name = at.name()
        with pytest.raises(LinkRefused, match=f"^queue '{name}': .*not found.* [(]404[)]; declare it"):
            await at.manage.queue(name)
        for _ in range(2):
            await at.manage.declare(name, kind=kind)
        assert await at.manage.queue(name) == QueueInfo(name, kind, {"x-queue-type": kind}, limit, None)
        for _ in range(2):
            await at.manage.delete(name)
        with pytest.raises(LinkRefused, match="404"):
            await at.manage.queue(name)


@BOTH
@pytest.mark.parametrize("what", ["ä/ö %", "a+b?c#d;e=f&g", "%2F", "a/../b", "'\"\\", "x" * 200, "队列"])
async def test_any_name_is_encoded_in_the_path(rabbit: Rabbit, what: str) -> None:
    async with scene(rabbit) as at:
        name = at.name(what)
        await at.manage.declare(name)
        assert (await at.manage.queue(name)).name == name
        await at.publish(address_of(name))
        assert await at.manage.count(name) == 1
        await at.manage.purge(name)
        assert await at.manage.count(name) == 0


async def test_other_arguments_are_refused_with_the_reason(rabbit: Rabbit) -> None:
    async with scene(rabbit) as at:
        name = await at.declare(rabbit.kind)
        refused = f"^queue '{name}' was not declared: inequivalent arg 'x-max-length' .* [(]409[)]; declare it as it is"
        with pytest.raises(LinkRefused, match=refused):
            await at.manage.declare(name, kind=rabbit.kind, arguments={"x-max-length": 5})
        other = "classic" if rabbit.kind == "quorum" else "quorum"
        with pytest.raises(LinkRefused, match=f"'{name}' was not declared: inequivalent arg 'x-queue-type'"):
            await at.manage.declare(name, kind=other)
        assert (await at.manage.queue(name)).arguments == {"x-queue-type": rabbit.kind}


@BOTH
async def test_what_rabbitmq_does_not_take_is_refused_with_the_reason(rabbit: Rabbit) -> None:
    async with scene(rabbit) as at:
        with pytest.raises(LinkRefused, match=r"^queue 'amq\.orders' was not declared: .*reserved prefix .*\(403\)"):
            await at.manage.declare("amq.orders")
        with pytest.raises(LinkRefused, match="x-delivery-limit"):
            await at.manage.declare(at.name(), kind="classic", arguments={"x-delivery-limit": 5})
        name = at.name()
        with pytest.raises(LinkRefused, match=f"^queue '{name}' was not purged: no queue .*; correct its name"):
            await at.manage.purge(name)
        with pytest.raises(LinkRefused, match=rf"^queue '{name}' was not bound to exchange 'amq\.topic': no queue "):
            await at.manage.bind(name, "amq.topic", "key")
        name = await at.declare()
        with pytest.raises(LinkRefused, match=f"^queue '{name}' was not bound to exchange 'none': no exchange 'none'"):
            await at.manage.bind(name, "none", "key")


@BOTH
async def test_arguments_come_back_as_they_were_declared(rabbit: Rabbit) -> None:
    arguments = {
        "x-delivery-limit": 7,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "dead",
        "x-single-active-consumer": True,
    }
    async with scene(rabbit) as at:
        name = await at.declare("quorum", arguments)
        expected = QueueInfo(name, "quorum", {"x-queue-type": "quorum", **arguments}, 7, "queue 'dead'")
        assert await at.manage.queue(name) == expected
        name = await at.declare("classic", {"x-dead-letter-exchange": "amq.fanout"})
        assert (await at.manage.queue(name)).dead_letter == "exchange 'amq.fanout'"


async def test_ready_messages_are_counted_and_purged_and_those_with_a_client_are_not(rabbit: Rabbit) -> None:
    async with scene(rabbit) as at:
        name = await at.declare(rabbit.kind)
        await at.publish(address_of(name), times=5)
        assert await at.manage.count(name) == 5
        async with at.receiver(name) as receiver:
            receiver.grant(2)
            taken = 0
            while taken < 2:
                taken += len(await receiver.receive(2))
            assert await at.manage.count(name) == 3
            await at.manage.purge(name)
            assert await at.manage.count(name) == 0
        await at.until_counted(name, 2)


@BOTH
async def test_a_bound_queue_gets_what_is_published_to_the_exchange(rabbit: Rabbit) -> None:
    async with scene(rabbit) as at:
        name, key = await at.declare(), f"key.{secrets.token_hex(4)}"
        for _ in range(2):
            await at.manage.bind(name, "amq.topic", key)
        await at.publish(f"/exchanges/amq.topic/{key}")
        assert await at.manage.count(name) == 1


# --- what its facts mean


@BOTH
@pytest.mark.parametrize(("arguments", "tries"), [({}, 21), ({"x-delivery-limit": 2}, 3), ({"x-delivery-limit": 0}, 1)])
async def test_a_message_is_delivered_once_more_than_the_limit_and_goes_to_the_dead_letter(
    rabbit: Rabbit, arguments: Mapping[str, object], tries: int
) -> None:
    """DESIGN 6, what `advice` says: after `delivery_limit` + 1 tries the broker decides; 20 is the limit by default."""
    async with scene(rabbit) as at:
        dead = await at.declare()
        to_dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
        name = await at.declare("quorum", {**to_dead, **arguments})
        assert (await at.manage.queue(name)).delivery_limit == tries - 1
        await at.publish(address_of(name))
        await at.fail(name, tries - 1)
        await at.until_counted(name, 1)
        assert await at.manage.count(dead) == 0
        await at.fail(name, 1)
        await at.until_counted(dead, 1)
        assert await at.manage.count(name) == 0


@BOTH
@pytest.mark.parametrize("limit", [-1, -5])
async def test_a_negative_limit_is_none(rabbit: Rabbit, limit: int) -> None:
    async with scene(rabbit) as at:
        name = await at.declare("quorum", {"x-delivery-limit": limit})
        assert (await at.manage.queue(name)).delivery_limit is None
        await at.publish(address_of(name))
        await at.fail(name, 30)
        await at.until_counted(name, 1)


@BOTH
async def test_a_policy_of_the_broker_works_and_is_not_seen(rabbit: Rabbit) -> None:
    """Why `QueueInfo` is about arguments alone, and `advice` says that it cannot see everything."""
    async with scene(rabbit) as at:
        dead, name = await at.declare(), at.name()
        to_dead = {"dead-letter-exchange": "", "dead-letter-routing-key": dead}
        await rabbit.put_policy(f"^{name}$", {"delivery-limit": 1, **to_dead})
        await at.manage.declare(name)
        assert await at.manage.queue(name) == QueueInfo(name, "quorum", {"x-queue-type": "quorum"}, 20, None)
        await at.publish(address_of(name))
        await at.fail(name, 2)
        await at.until_counted(dead, 1)


# --- answers


@BOTH
async def test_an_answer_that_nobody_waits_for_any_more_is_passed_over(rabbit: Rabbit) -> None:
    """A cancelled call leaves its answer to come."""
    async with scene(rabbit) as at:
        name = await at.declare()
        at.manage._receiver.grant(1)
        await at.connection.written()
        await at.manage._sender.send(request("cancelled", "GET", "/queues/none", None))
        for _ in range(2):
            assert (await at.manage.queue(name)).name == name


@BOTH
async def test_tasks_that_share_a_client_each_get_their_own_answer(rabbit: Rabbit) -> None:
    async with scene(rabbit) as at:
        names = [await at.declare(kind) for kind in ("quorum", "classic", "quorum", "classic")]
        kinds: dict[str, str] = {}

        async def look(name: str) -> None:
            info = await at.manage.queue(name)
            assert info.name == name
            kinds[name] = info.kind

        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(look, name)
        assert [kinds[name] for name in names] == ["quorum", "classic", "quorum", "classic"]


@BOTH
async def test_a_user_without_permission_hears_of_it_and_the_connection_lives_on(rabbit: Rabbit) -> None:
    """RabbitMQ ends the session. To look, a user needs any permission on the queue, and none on 4.0."""
    user = f"{rabbit.user}-reader"
    await rabbit.put_user(user, user)
    await rabbit.put(f"permissions/%2F/{user}", {"configure": "^$", "write": "^$", "read": ".*"})
    async with scene(rabbit) as at, connected(rabbit, user) as connection:
        name = await at.declare()
        denied = f"^queue '{name}' was not deleted: .*amqp:unauthorized-access.*'{user}'"
        async with management(connection) as manage:
            with pytest.raises(LinkBroken, match=denied):
                await manage.delete(name)
        async with management(connection) as manage:
            assert (await manage.queue(name)).kind == "quorum"
